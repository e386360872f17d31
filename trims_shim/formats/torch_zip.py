"""Where the records of a ``torch.save`` zip archive lie, read from the mapped file.

Owns the container only: the pickle inside is read by :mod:`trims_shim.formats.torch_recipe`. Pure:
the buffer is read in place, and nothing of it is kept.

The archive is the subset of PKWARE's APPNOTE.TXT 6.3.10 that PyTorch's writer (miniz) and Python's
``zipfile`` produce with stored entries. Sections are cited at the readers. Invariants of an archive
that is returned:

- every record lies inside the file, before the central directory, and no two overlap;
- data offsets come from local headers, because their padding is what aligns the data; what a local
  header says agrees with the central directory;
- names are unique also when case is ignored: miniz looks records up that way.

Anything PyTorch's reader may accept but that is not of this shape is ``UnsupportedFormat``: the
caller then lets that reader decide.
"""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from trims_shim.errors import CorruptFile, TruncatedFile, UnsupportedFormat
from trims_shim.specs import Span

__all__ = [
    "CENTRAL_SIGNATURE",
    "DIRECTORY",
    "FLAG_UTF8",
    "FOREIGN_FLAGS",
    "LOCAL_SIGNATURE",
    "RECORD_ALIGNMENT_BYTES",
    "TAIL_BYTES",
    "TorchArchive",
    "find_directory",
    "read_archive",
]

RECORD_ALIGNMENT_BYTES = 64
"""torch aligns records so when it writes; its kernels expect the same of its allocator."""

LOCAL_SIGNATURE = 0x04034B50
CENTRAL_SIGNATURE = 0x02014B50
_END64_SIGNATURE = 0x06064B50

_CENTRAL = struct.Struct("<I4xHH8xIIHHHH2xII")
_LOCAL_BYTES = 30
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQ4xIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
TAIL_BYTES = _END64.size + _LOCATOR.size + _END.size
"""What torch writes after the directory."""
_EXTRA = struct.Struct("<HH")

_IN_ZIP64 = 0xFFFFFFFF
_IN_ZIP64_SHORT = 0xFFFF
_ZIP64_EXTRA = 0x0001
_FLAG_DESCRIPTOR = 0x0008
FLAG_UTF8 = 0x0800
_FLAGS_ENCRYPTED = 0x2041
FOREIGN_FLAGS = 0xFFFF & ~(_FLAG_DESCRIPTOR | FLAG_UTF8)
DIRECTORY = 0x10
"""MS-DOS attribute; miniz then reads nothing and returns memory it never wrote."""
_END_SEARCH_BYTES = _END.size + 0xFFFF
"""An end record may be followed by a comment of at most 65535 bytes (4.3.16)."""

_MAX_DIRECTORY_BYTES = 64 << 20
"""Far above any checkpoint (some 100 bytes per tensor); bounds what a hostile file makes us do."""
_VERSIONS = {b"%d%s" % (n, end) for n in range(1, 11) for end in (b"", b"\n")}
"""``kMinSupportedFileFormatVersion`` to ``kMaxSupportedFileFormatVersion`` of caffe2/serialize."""
_MAX_NOTE_BYTES = 20
_NOTES = frozenset({b".data/version", b".storage_alignment", b"byteorder", b"version"})
"""Records that say how to read the others. miniz finds them in letters of any case."""


class TorchArchive(NamedTuple):
    """The records of one archive.

    ``records`` is keyed as ``PyTorchFileReader`` names them, without the folder that all are in,
    and ordered by offset. ``byteorder`` is ``"little"``, ``"big"``; empty if nothing says it.
    """

    records: Mapping[str, Span]
    byteorder: str


def read_archive(buffer: Any) -> TorchArchive:
    """The records of the archive that fills ``buffer`` (contiguous).

    Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < 4:
        raise TruncatedFile(f"archive of {len(view)} bytes: shorter than a zip signature")
    if bytes(view[:4]) != b"PK\x03\x04":
        raise UnsupportedFormat("the file does not begin with a zip record")
    count, start, size = find_directory(view)
    names, spans = _read_records(view, bytes(view[start : start + size]), count, start)
    records = dict(zip(_relative_names(names), spans, strict=True))
    _check_version(view, records)
    return TorchArchive(records, _read_byteorder(view, records))


def find_directory(view: memoryview, before: int = 0) -> tuple[int, int, int]:
    """(records, offset, size) of the central directory (4.3.14 to 4.3.16).

    ``view`` is the archive, or its end of at least ``TAIL_BYTES``; ``before`` are the bytes that
    come before it. Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    end = len(view) - _END.size
    if end < 0 or bytes(view[end : end + 4]) != b"PK\x05\x06":
        _refuse_ending(view)
    _, disk, directory_disk, here, count, size, start, comment = _END.unpack_from(view, end)
    if comment:
        raise TruncatedFile(f"archive comment of {comment} bytes: the file ends before it")
    if disk or directory_disk:
        raise UnsupportedFormat("the archive is split over several disks")
    if here != count:
        raise UnsupportedFormat(f"{here} of {count} records are on this disk")
    locator = end - _LOCATOR.size
    if locator >= 0 and bytes(view[locator : locator + 4]) == b"PK\x06\x07":
        end, count64, size64, start64 = _read_end64(view, before, locator)
        for name, short, wide, mark in (
            ("record count", count, count64, _IN_ZIP64_SHORT),
            ("directory size", size, size64, _IN_ZIP64),
            ("directory offset", start, start64, _IN_ZIP64),
        ):
            if short not in (wide, mark):
                raise CorruptFile(f"{name}: {short} in the end record, {wide} in the zip64 one")
        count, size, start = count64, size64, start64
    _check_directory(count, start, size, before + end)
    return count, start, size


def _refuse_ending(view: memoryview) -> NoReturn:
    tail = bytes(view[max(0, len(view) - _END_SEARCH_BYTES) :])
    if b"PK\x05\x06" in tail:
        raise UnsupportedFormat("the zip end record is not the last thing in the file")
    raise TruncatedFile("no zip end record: the file ends before its central directory")


def _read_end64(view: memoryview, before: int, locator: int) -> tuple[int, int, int, int]:
    """(offset in ``view`` of the zip64 end record, records, directory size, directory offset)."""
    _, disk, offset, disks = _LOCATOR.unpack_from(view, locator)
    if disk or disks != 1:
        raise UnsupportedFormat("the archive is split over several disks")
    place = offset - before
    if place < 0:
        raise UnsupportedFormat(f"zip64 end record at {offset}: too long")
    if place + _END64.size > locator:
        raise CorruptFile(
            f"zip64 end record at {offset}: not before its locator at {before + locator}"
        )
    signature, size, disk, directory_disk, here, count, length, start = _END64.unpack_from(
        view, place
    )
    if signature != _END64_SIGNATURE:
        raise CorruptFile(f"zip64 end record at {offset}: wrong signature {signature:#x}")
    if place + 12 + size != locator:
        raise CorruptFile(f"zip64 end record at {offset}: {size} bytes do not reach its locator")
    if disk or directory_disk or here != count:
        raise UnsupportedFormat("the archive is split over several disks")
    return place, count, length, start


def _check_directory(count: int, start: int, size: int, stop: int) -> None:
    if start + size != stop:
        raise CorruptFile(
            f"central directory of {size} bytes at {start}: the end record is at {stop}"
        )
    if size > _MAX_DIRECTORY_BYTES:
        raise UnsupportedFormat(f"central directory of {size} bytes")
    if count == 0:
        raise UnsupportedFormat("the archive holds no records")


def _read_records(
    view: memoryview, directory: bytes, count: int, limit: int
) -> tuple[list[bytes], list[Span]]:
    """Full names and data spans, in file order; data must end at or before ``limit``.

    One loop over both headers of each record, because a load waits for it. A record that is not as
    PyTorch writes it leaves the loop for a function that is slow and precise.
    """
    names: list[bytes] = []
    spans: list[Span] = []
    length = len(directory)
    position = floor = 0
    unpack_central = _CENTRAL.unpack_from
    for _ in range(count):
        begin = position + 46
        if begin > length:
            raise CorruptFile(f"central directory: ends after {len(names)} of {count} records")
        (signature, flags, method, stored, size, name_bytes, extra_bytes, comment, disk,
         attributes, header) = unpack_central(directory, position)  # fmt: skip
        end = begin + name_bytes
        position = end + extra_bytes + comment
        name = directory[begin:end]
        if position > length:
            raise CorruptFile(f"central directory: ends inside the entry of record {name!r}")
        if signature != CENTRAL_SIGNATURE or flags & FOREIGN_FLAGS or method or comment:
            _refuse_entry(name, signature, flags, method)
        if attributes & DIRECTORY:
            raise UnsupportedFormat(f"record {name!r}: marked as a directory")
        if _IN_ZIP64 in (stored, size, header):
            size, stored, header = _widen(
                name, directory[end : end + extra_bytes], size, stored, header
            )
        if stored != size or disk:
            _refuse_extent(name, size, stored)
        if header < floor:
            _refuse_order(name, names, spans, header, floor)
        data = header + _LOCAL_BYTES + name_bytes
        if data > limit:
            raise CorruptFile(f"record {name!r}: its local header is not before the directory")
        local = _local_reader(name_bytes)(view, header)
        if local[:3] != (LOCAL_SIGNATURE, flags, 0) or local[5] != name_bytes or local[7] != name:
            _refuse_local(name, flags, local)
        data += local[6]
        if local[3] != size or local[4] != size:
            _check_local_sizes(view, name, flags, local, header, size)
        floor = data + size
        if floor > limit:
            raise CorruptFile(f"record {name!r}: {size} bytes at {data} reach into the directory")
        names.append(name)
        spans.append(Span(data, size))
    if position != length:
        raise CorruptFile(f"central directory: {length - position} bytes after its last record")
    return names, spans


@functools.lru_cache(maxsize=1024)
def _local_reader(name_bytes: int) -> Callable[[memoryview, int], tuple[Any, ...]]:
    """Unpacks signature, flags, method, sizes (stored, plain), name length, extra length, name."""
    return struct.Struct(f"<I2xHH8xIIHH{name_bytes}s").unpack_from


def _widen(name: bytes, extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """The zip64 extra field's values in place of those that are all ones (4.5.3)."""
    field = _zip64_field(name, extra)
    values = [size, stored, header]
    position = 0
    for index, value in enumerate(values):
        if value != _IN_ZIP64:
            continue
        if position + 8 > len(field):
            raise CorruptFile(f"record {name!r}: zip64 field of {len(field)} bytes is too short")
        values[index] = int.from_bytes(field[position : position + 8], "little")
        position += 8
    return values[0], values[1], values[2]


def _zip64_field(name: bytes, extra: bytes) -> bytes:
    position = 0
    while position + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, position)
        position += _EXTRA.size
        if position + size > len(extra):
            break
        if kind == _ZIP64_EXTRA:
            return extra[position : position + size]
        position += size
    raise CorruptFile(f"record {name!r}: announces a zip64 field and has none")


def _check_local_sizes(
    view: memoryview, name: bytes, flags: int, local: tuple[Any, ...], header: int, size: int
) -> None:
    """Sizes in a local header: zero when a descriptor follows the data, or in its zip64 field."""
    stored, plain, name_bytes, extra_bytes = local[3:7]
    if flags & _FLAG_DESCRIPTOR and stored == plain == 0:
        return
    if _IN_ZIP64 in (stored, plain):
        begin = header + _LOCAL_BYTES + name_bytes
        extra = bytes(view[begin : begin + extra_bytes])
        plain, stored, _ = _widen(name, extra, plain, stored, 0)
        if flags & _FLAG_DESCRIPTOR and stored == plain == 0:
            return
    if stored != size or plain != size:
        raise CorruptFile(
            f"record {name!r}: {size} bytes in the directory, {plain} ({stored} stored) at the data"
        )


def _refuse_entry(name: bytes, signature: int, flags: int, method: int) -> NoReturn:
    if signature != CENTRAL_SIGNATURE:
        raise CorruptFile(f"central directory: wrong signature {signature:#x} before {name[:64]!r}")
    if flags & _FLAGS_ENCRYPTED:
        raise UnsupportedFormat(f"record {name!r}: encrypted")
    if method:
        raise UnsupportedFormat(f"record {name!r}: compressed with method {method}")
    if flags & FOREIGN_FLAGS:
        raise UnsupportedFormat(f"record {name!r}: flags {flags:#x}")
    raise UnsupportedFormat(f"record {name!r}: has a comment")


def _refuse_extent(name: bytes, size: int, stored: int) -> NoReturn:
    if stored != size:
        raise CorruptFile(f"record {name!r}: {stored} bytes stored for {size}, uncompressed")
    raise UnsupportedFormat(f"record {name!r}: on another disk")


def _refuse_order(
    name: bytes, names: list[bytes], spans: list[Span], header: int, floor: int
) -> NoReturn:
    if spans and header < spans[-1].offset_bytes - _LOCAL_BYTES - len(names[-1]):
        raise UnsupportedFormat(f"record {name!r}: listed out of the order of the file")
    raise CorruptFile(f"record {name!r}: at {header} overlaps {names[-1]!r}, which ends at {floor}")


def _refuse_local(name: bytes, flags: int, local: tuple[Any, ...]) -> NoReturn:
    if local[0] != LOCAL_SIGNATURE:
        raise CorruptFile(f"record {name!r}: no local header where the directory says")
    if local[5] != len(name) or local[7] != name:
        raise CorruptFile(
            f"record {name!r}: its local header names {local[7]!r} ({local[5]} bytes)"
        )
    raise CorruptFile(
        f"record {name!r}: flags {flags:#x} in the directory, {local[1]:#x} and method {local[2]} "
        "at the data"
    )


def _relative_names(names: list[bytes]) -> list[str]:
    """The names inside the common folder. All at once: one decode, one split."""
    prefix = names[0].partition(b"/")[0]
    start = prefix + b"/"
    for name in names:
        if not name.startswith(start) or name == start or name.endswith(b"/"):
            raise UnsupportedFormat(f"record {name!r}: not a file in the folder {prefix!r}")
    cut = len(start)
    joined = b"\0".join([name[cut:] for name in names])
    if joined.count(b"\0") != len(names) - 1:
        raise UnsupportedFormat("a record has a NUL in its name")
    lowered = set(joined.lower().split(b"\0"))
    if len(lowered) != len(names):
        repeated = Counter(name.lower() for name in names).most_common(1)[0][0]
        raise CorruptFile(f"record {repeated!r}: more than once (case is ignored)")
    for note in _NOTES & lowered:
        if start + note not in names:
            raise UnsupportedFormat(f"record {note!r}: written in other letters")
    try:
        prefix.decode()
        return joined.decode().split("\0")
    except UnicodeDecodeError as error:
        raise UnsupportedFormat("a record has a name that is not UTF-8") from error


def _check_version(view: memoryview, records: Mapping[str, Span]) -> None:
    # As torch's reader looks for it; archives of torch.export have the first.
    name = ".data/version" if ".data/version" in records else "version"
    note = _read_note(view, records, name)
    if note is None:
        raise UnsupportedFormat("record 'version': missing")
    if note not in _VERSIONS:
        raise UnsupportedFormat(f"record {name!r}: {note!r} is not one of 1 to 10")
    alignment = _read_note(view, records, ".storage_alignment")
    if alignment is not None and not alignment.isdigit():
        raise UnsupportedFormat(f"record '.storage_alignment': {alignment!r} is not a number")


def _read_byteorder(view: memoryview, records: Mapping[str, Span]) -> str:
    note = _read_note(view, records, "byteorder")
    if note not in (None, b"little", b"big"):
        raise UnsupportedFormat(f"record 'byteorder': {note!r}")
    return "" if note is None else note.decode()


def _read_note(view: memoryview, records: Mapping[str, Span], name: str) -> bytes | None:
    """A record of a few bytes, or None if there is none."""
    span = records.get(name)
    if span is None:
        return None
    if span.size_bytes > _MAX_NOTE_BYTES:
        raise UnsupportedFormat(f"record {name!r}: {span.size_bytes} bytes")
    return bytes(view[span.offset_bytes : span.end_bytes])
