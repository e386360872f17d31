"""A TorchScript archive without its weights, for torch to read, and where the weights are.

Owns the container; the pickle in it is read by :mod:`.torch_script_pickle`. Weights that are
attributes of modules are empty in the archive that is returned, and their records are left out.
What a class restores by itself (``__setstate__``) may look at its tensors, so archives with such a
class are refused. Knows nothing of torch.
"""

from __future__ import annotations

import struct
import sys
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.torch_zip import (
    CENTRAL_SIGNATURE,
    DIRECTORY,
    FLAG_UTF8,
    FOREIGN_FLAGS,
    LOCAL_SIGNATURE,
    RECORD_ALIGNMENT_BYTES,
    TAIL_BYTES,
    find_directory,
)
from trims_shim.patches.torch_script_pickle import ScriptTensor, read_script_pickle
from trims_shim.specs import Span

__all__ = ["Script", "Weight", "read_script"]

_PICKLE = "data.pkl"
_LEAST_BYTES = 4096
"""Smaller tensors stay in the archive: torch copies them as fast."""

# Where torch's own load is as quick, it is left alone. Measured with ResNets, MobileNets,
# transformers and vocabularies: docs/decisions/0006.
_LITTLE_BYTES = 256 << 10
_WEIGHTS_TO_REST = 16
"""What stays in the archive is copied three times more than by torch, or for the first time."""
_SHORT_PICKLE_BYTES = 16 << 10
_WEIGHTS_TO_PICKLE = 32
_FEW_RECORDS = 64
_BYTES_TO_RECORD = 24 << 10

_LOCAL = struct.Struct("<IHHH4xIIIHH")
_CENTRAL = struct.Struct("<IHHHH4xIIIHHHHHII")
_END = struct.Struct("<I4xHHIIH")
_END_SIGNATURE = 0x06054B50
_VERSION = 20


class _Entry(NamedTuple):
    """A record in the directory, and where the next one begins."""

    info: zipfile.ZipInfo
    end: int


class Weight(NamedTuple):
    """A tensor of the module, over a record of the whole archive."""

    tensor: ScriptTensor
    record: Span


class Script(NamedTuple):
    """``archive``: what torch reads; ``weights``: the tensors that are empty in it."""

    archive: bytes
    weights: Sequence[Weight]


def read_script(file: BinaryIO) -> Script:
    """Read the archive that is all of ``file``, without its weights.

    Raises CorruptFile or UnsupportedFormat, and OSError if the file cannot be read.
    """
    try:
        _refuse_many_records(file)
        with zipfile.ZipFile(file) as archive:
            return _read(file, archive)
    # Places beyond what 64 bits can count end in OverflowError or ValueError, as the file has it.
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OverflowError) as error:
        raise CorruptFile(f"archive: {error}") from error
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UnsupportedFormat(f"archive: {error}") from error


def _read(file: BinaryIO, archive: zipfile.ZipFile) -> Script:
    _refuse_other_directory(file, archive)
    entries = _entries(archive)
    if _PICKLE not in entries or "constants.pkl" not in entries:
        raise UnsupportedFormat("not a TorchScript archive")
    pickle = entries[_PICKLE].info
    large = {name for name, each in entries.items() if _may_be_weight(name, each.info)}
    large_bytes = sum(entries[name].info.file_size for name in large)
    _refuse_much_else(large_bytes, archive.start_dir - large_bytes, pickle.file_size)
    byteorder = entries.get("byteorder")
    if byteorder is not None and archive.read(byteorder.info) != sys.byteorder.encode():
        raise UnsupportedFormat("numbers are in another order of bytes")
    found = read_script_pickle(archive.read(pickle))
    weights = list(_weights(file, entries, [each for each in found.tensors if each.name in large]))
    if not weights:
        raise UnsupportedFormat("no large tensor is an attribute of a module")
    emptied = found.emptied(each.tensor for each in weights)
    gone = {each.tensor.name for each in weights}
    return Script(_without(file, entries, gone, emptied), weights)


def _refuse_many_records(file: BinaryIO) -> None:
    """Before the directory is read, which takes its time, too."""
    size_bytes = file.seek(0, 2)
    signature, count, *_ = _END.unpack(_bytes_at(file, max(0, size_bytes - _END.size), _END.size))
    is_end = signature == _END_SIGNATURE and count > _FEW_RECORDS
    if is_end and size_bytes < count * _BYTES_TO_RECORD:
        raise UnsupportedFormat(f"{count} records in {size_bytes} bytes: torch is as quick")


def _refuse_other_directory(file: BinaryIO, archive: zipfile.ZipFile) -> None:
    """Python's zipfile takes the directory before the end record, torch the one that this names."""
    before = max(0, file.seek(0, 2) - TAIL_BYTES)
    count, start, _ = find_directory(memoryview(_bytes_at(file, before, TAIL_BYTES)), before)
    if (count, start) != (len(archive.infolist()), archive.start_dir):
        raise CorruptFile(f"{count} records at {start} in the end record, others before it")


def _refuse_much_else(large_bytes: int, rest_bytes: int, pickle_bytes: int) -> None:
    most_rest = max(min(_LITTLE_BYTES, large_bytes), large_bytes // _WEIGHTS_TO_REST)
    most_pickle = max(_SHORT_PICKLE_BYTES, large_bytes // _WEIGHTS_TO_PICKLE)
    if rest_bytes > most_rest or pickle_bytes > most_pickle:
        raise UnsupportedFormat(
            f"{rest_bytes} bytes ({pickle_bytes} of a pickle) beside {large_bytes} in large "
            "tensors: torch is as quick"
        )


def _entries(archive: zipfile.ZipFile) -> Mapping[str, _Entry]:
    """The records by their names in the folder that all are in, in the order of the file."""
    infos = archive.infolist()
    offsets = [each.header_offset for each in infos]
    if offsets != sorted(set(offsets)) or offsets[:1] != [0] or any(map(_is_odd, infos)):
        raise UnsupportedFormat("records that torch does not write, or not there")
    folder = f"{infos[0].filename.partition('/')[0]}/" if infos else "/"
    ends = [*offsets, archive.start_dir][1:]
    found = {
        info.filename.removeprefix(folder): _Entry(info, end)
        for info, end in zip(infos, ends, strict=True)
    }
    is_one_folder = all(each.filename.startswith(folder) for each in infos)
    # torch looks records up in letters of any case.
    if not is_one_folder or len({name.lower() for name in found}) != len(infos):
        raise UnsupportedFormat("records of several folders, or of one name")
    return found


def _is_odd(info: zipfile.ZipInfo) -> bool:
    """Whether torch may refuse a record that Python's zipfile takes."""
    is_cut = info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size
    # zipfile ends names at a NUL, and takes them from extra fields.
    is_odd = is_cut or info.filename != info.orig_filename
    return bool(is_odd or info.flag_bits & FOREIGN_FLAGS or info.external_attr & DIRECTORY)


def _may_be_weight(name: str, info: zipfile.ZipInfo) -> bool:
    is_stored = info.compress_type == zipfile.ZIP_STORED
    return is_stored and info.file_size >= _LEAST_BYTES and name.startswith("data/")


def _weights(
    file: BinaryIO, entries: Mapping[str, _Entry], tensors: Sequence[ScriptTensor]
) -> Iterator[Weight]:
    for tensor in tensors:
        entry = entries[tensor.name]
        info = entry.info
        header = _bytes_at(file, info.header_offset, _LOCAL.size)
        record = Span(info.header_offset + _data_start(header, entry), info.file_size)
        is_aligned = record.offset_bytes % RECORD_ALIGNMENT_BYTES == 0
        if is_aligned and record.size_bytes == tensor.storage_bytes:
            yield Weight(tensor, record)


def _data_start(header: bytes, entry: _Entry) -> int:
    """Return how long the local header is, which is before the data. Raises CorruptFile."""
    signature, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    info, start = entry.info, _LOCAL.size + int(name_bytes) + int(extra_bytes)
    if signature != LOCAL_SIGNATURE:
        raise CorruptFile(f"record {info.filename!r}: no local header where the directory says")
    if info.header_offset + start + info.compress_size > entry.end:
        raise CorruptFile(f"record {info.filename!r}: reaches into the next one")
    return start


def _bytes_at(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    file.seek(offset)
    return file.read(size_bytes)


# --- the archive that torch reads -----------------------------------------------------------------


def _without(
    file: BinaryIO, entries: Mapping[str, _Entry], gone: Collection[str], pickle: bytes
) -> bytes:
    """The archive without the records ``gone``, and with another pickle."""
    parts: list[bytes] = []
    directory: list[bytes] = []
    position = 0
    for name, (info, end) in entries.items():
        if name in gone:
            continue
        part = _bytes_at(file, info.header_offset, end - info.header_offset)
        start = _data_start(part, entries[name])
        if name == _PICKLE:
            info = _stored(info, pickle)
            part = _local(info) + pickle
        elif name.startswith("code/") and name.endswith(".py"):
            _refuse_restoring(info, part[start : start + info.compress_size])
        parts.append(part)
        directory.append(_listed(info, position))
        position += len(part)
    listed = b"".join(directory)
    count = len(directory)
    end_record = _END.pack(_END_SIGNATURE, count, count, len(listed), position, 0)
    return b"".join([*parts, listed, end_record])


def _refuse_restoring(info: zipfile.ZipInfo, code: bytes) -> None:
    if info.compress_type != zipfile.ZIP_STORED:
        code = zlib.decompress(code, wbits=-zlib.MAX_WBITS)
    if b"__setstate__" in code:
        raise UnsupportedFormat(f"{info.filename}: a class restores itself")


def _stored(info: zipfile.ZipInfo, content: bytes) -> zipfile.ZipInfo:
    """The entry of a record with another content."""
    made = zipfile.ZipInfo(info.filename)
    made.flag_bits = info.flag_bits & FLAG_UTF8
    made.CRC = zlib.crc32(content)
    made.file_size = made.compress_size = len(content)
    return made


def _name(info: zipfile.ZipInfo) -> bytes:
    return info.filename.encode("utf-8" if info.flag_bits & FLAG_UTF8 else "cp437")


def _local(info: zipfile.ZipInfo) -> bytes:
    name, sizes = _name(info), (info.CRC, info.compress_size, info.file_size)
    head = _LOCAL.pack(
        LOCAL_SIGNATURE, _VERSION, info.flag_bits, info.compress_type, *sizes, len(name), 0
    )
    return head + name


def _listed(info: zipfile.ZipInfo, offset: int) -> bytes:
    """The entry of a record in the directory."""
    name, sizes = _name(info), (info.CRC, info.compress_size, info.file_size)
    kind = (_VERSION, _VERSION, info.flag_bits, info.compress_type)
    head = _CENTRAL.pack(CENTRAL_SIGNATURE, *kind, *sizes, len(name), 0, 0, 0, 0, 0, offset)
    return head + name
