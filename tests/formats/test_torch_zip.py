"""The reader of torch's zip archives.

Promise: offsets and sizes are those of PyTorch's own reader, and no bytes make it raise anything
but a FormatError or return a record outside the file or inside another one.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat
from trims_shim.formats import read_archive
from trims_shim.formats.torch_zip import TorchArchive

_FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_NOTES = {"version": b"3\n", "byteorder": b"little"}


def _assert_as_torch(data: bytes, archive: TorchArchive) -> None:
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    assert list(archive.records) == reader.get_all_records()
    for name, span in archive.records.items():
        assert data[span.offset_bytes : span.end_bytes] == reader.get_record(name), name
        assert span.offset_bytes == reader.get_record_offset(name), name


@pytest.fixture(scope="module")
def saved(tools: Any, model_state: Any) -> bytes:
    return tools.save(model_state)


@pytest.fixture(scope="module")
def plain(tools: Any) -> bytes:
    """A small archive, the records of which are easy to find and to break."""
    return tools.archive_of({"data.pkl": b"\x80\x02N.", "data/0": b"zero", **_NOTES})


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_offsets_and_sizes_are_those_of_torchs_reader(
    alignment: int, tools: Any, model_state: Any
) -> None:
    serialization = pytest.importorskip("torch.utils.serialization")  # torch 2.7 and newer
    with serialization.config.patch("save.storage_alignment", alignment):
        data = tools.save(model_state)
    archive = read_archive(data)
    _assert_as_torch(data, archive)
    assert all(
        span.offset_bytes % alignment == 0
        for name, span in archive.records.items()
        if name.startswith("data/")
    )
    assert archive.byteorder == "little"


@pytest.mark.parametrize("name", ["model.pt", "mödel ü.bin", "a" * 180, "no_suffix", "x.tar.gz"])
def test_prefix_follows_the_file_name(name: str, tmp_path: Any) -> None:
    path = tmp_path / name
    torch.save({"a": torch.ones(3)}, path)
    data = path.read_bytes()
    _assert_as_torch(data, read_archive(data))


def test_records_without_bytes(tools: Any) -> None:
    data = tools.save([torch.ones(0), torch.ones(2), torch.ones(0, 3)])
    archive = read_archive(data)
    _assert_as_torch(data, archive)
    assert archive.records["data/0"].size_bytes == 0


def test_archives_of_other_writers(plain: bytes) -> None:
    archive = read_archive(plain)
    _assert_as_torch(plain, archive)


def test_arrays_of_any_type_and_memoryviews_are_read_in_place(saved: bytes) -> None:
    assert read_archive(memoryview(saved)) == read_archive(saved)
    for kind in (ctypes.c_char, ctypes.c_char * 1):
        array = (kind * len(saved)).from_buffer_copy(saved)
        assert read_archive(array) == read_archive(saved)


def test_zip64_local_headers(tools: Any) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": b"N.", "data/0": b"0" * 100, **_NOTES}.items():
            with archive.open(f"a/{name}", "w", force_zip64=True) as record:
                record.write(content)
    _assert_as_torch(file.getvalue(), read_archive(file.getvalue()))


def test_zip64_directory(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 60)
    data = tools.archive_of({"data.pkl": b"N.", "data/0": b"0" * 100, **_NOTES})
    assert data.count(struct.pack("<I", 0xFFFFFFFF)) >= 4
    _assert_as_torch(data, read_archive(data))


def _streamed(*, is_zip64: bool = False) -> bytes:
    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: Any) -> int:
            raise io.UnsupportedOperation

        def tell(self) -> int:
            raise io.UnsupportedOperation

    file = Unseekable()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": b"N.", **_NOTES}.items():
            with archive.open(f"a/{name}", "w", force_zip64=is_zip64) as record:
                record.write(content)
    return file.getvalue()


@pytest.mark.parametrize("is_zip64", [False, True])
def test_streamed_records_have_their_sizes_after_the_data_only(is_zip64: bool) -> None:
    data = _streamed(is_zip64=is_zip64)
    size = 18
    if is_zip64:  # Python 3.11.3 and earlier leave the sizes before it at zero
        data = _patched(data, size, b"\xff" * 8)
        size = 30 + len("a/data.pkl") + 4
    _assert_as_torch(data, read_archive(data))
    with pytest.raises(CorruptFile, match="at the data"):
        read_archive(_patched(data, size, b"\x05"))


# Hostile and odd files


def _entries(data: bytes) -> Iterator[tuple[int, int]]:
    """(offset of the directory entry, offset of the local header) of each record."""
    position = data.index(b"PK\x01\x02")
    while data[position : position + 4] == b"PK\x01\x02":
        yield position, struct.unpack_from("<I", data, position + 42)[0]
        position += 46 + sum(struct.unpack_from("<3H", data, position + 28))


def _patched(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


def test_every_truncation_is_a_format_error(plain: bytes) -> None:
    for size in range(len(plain)):
        with pytest.raises(FormatError):
            read_archive(plain[:size])


def test_a_cut_file_says_so(saved: bytes) -> None:
    for size in (0, 3, 100, len(saved) // 2):
        with pytest.raises(TruncatedFile):
            read_archive(saved[:size])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"\x80\x02}q\x00.", UnsupportedFormat, "does not begin with a zip record"),
        (b"PK\x03\x04" + bytes(100), TruncatedFile, "no zip end record"),
        (b"PK\x05\x06" + bytes(18), UnsupportedFormat, "does not begin"),
    ],
)
def test_other_files(data: bytes, error: type[FormatError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_archive(data)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        (0, b"QK", CorruptFile, "wrong signature"),
        (8, b"\x01\x00", UnsupportedFormat, "encrypted"),
        (8, b"\x40\x00", UnsupportedFormat, "encrypted"),
        (8, b"\x20\x00", UnsupportedFormat, "flags 0x20"),
        (8, b"\x08\x00", CorruptFile, "flags 0x8 in the directory"),
        (10, b"\x08\x00", UnsupportedFormat, "compressed with method 8"),
        (20, b"\x05\x00", CorruptFile, "5 bytes stored for 4"),
        (24, b"\x03\x00", CorruptFile, "4 bytes stored for 3"),
        (28, b"\xff\xff", CorruptFile, "ends inside the entry"),
        (30, b"\x01\x00", CorruptFile, "central directory|wrong signature"),
        (32, b"\x01\x00", UnsupportedFormat, "comment"),
        (34, b"\x01\x00", UnsupportedFormat, "another disk"),
        (34, b"\xff\xff", UnsupportedFormat, "another disk"),
        (38, b"\x10", UnsupportedFormat, "marked as a directory"),
        (42, b"\x00\x00\x00\x00", CorruptFile, "overlaps"),
        (42, b"\xff\xff\xff\x7f", CorruptFile, "not before the directory"),
        (42, b"\xff\xff\xff\xff", CorruptFile, "announces a zip64 field"),
        (46, b"brchive", CorruptFile, "its local header names"),
    ],
)
def test_a_bad_directory_entry(
    field: int, value: bytes, error: type[FormatError], message: str, plain: bytes
) -> None:
    entry, _ = list(_entries(plain))[1]
    with pytest.raises(error, match=message):
        read_archive(_patched(plain, entry + field, value))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, b"QK", "no local header"),
        (6, b"\x00\x08", "flags"),
        (8, b"\x08\x00", "method 8"),
        (18, b"\x05", "at the data"),
        (22, b"\x05", "at the data"),
        (18, b"\x00" * 8, "at the data"),
        (22, b"\xff\xff\xff\xff", "announces a zip64 field"),
        (26, b"\x01\x00", "its local header names"),
        (28, b"\xff\xff", "reach into the directory"),
        (30, b"brchive", "its local header names"),
    ],
)
def test_a_bad_local_header(field: int, value: bytes, message: str, plain: bytes) -> None:
    _, header = list(_entries(plain))[1]
    with pytest.raises(CorruptFile, match=message):
        read_archive(_patched(plain, header + field, value))


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        (4, b"\x01\x00", UnsupportedFormat, "several disks"),
        (6, b"\xff\xff", UnsupportedFormat, "several disks"),
        (8, b"\x01\x00", UnsupportedFormat, "on this disk"),
        (8, b"\x00\x00\x00\x00", UnsupportedFormat, "no records"),
        (8, b"\xfe\xff\xfe\xff", CorruptFile, "ends after 4 of 65534"),
        (8, b"\x03\x00\x03\x00", CorruptFile, "after its last record"),
        (8, b"\x05\x00\x05\x00", CorruptFile, "ends after 4 of 5"),
        (12, b"\x00", CorruptFile, "central directory of"),
        (16, b"\xff\xff\xff\xff", CorruptFile, "central directory of"),
        (20, b"\x01\x00", TruncatedFile, "comment"),
    ],
)
def test_a_bad_end_record(
    field: int, value: bytes, error: type[FormatError], message: str, plain: bytes
) -> None:
    with pytest.raises(error, match=message):
        read_archive(_patched(plain, len(plain) - 22 + field, value))


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        (-42 + 4, b"\x01", UnsupportedFormat, "several disks"),
        (-42 + 16, b"\x00", UnsupportedFormat, "several disks"),
        (-42 + 8, b"\xff" * 8, CorruptFile, "not before its locator"),
        (-42 + 8, b"\x04\x00", CorruptFile, "wrong signature"),
        (-98 + 4, b"\x2d", CorruptFile, "do not reach its locator"),
        (-98 + 16, b"\x01", UnsupportedFormat, "several disks"),
        (-98 + 32, b"\xff" * 8, UnsupportedFormat, "several disks"),
        (-98 + 40, b"\xff" * 8, CorruptFile, "directory size"),
        (-98 + 48, b"\xff" * 8, CorruptFile, "directory offset"),
    ],
)
def test_a_bad_zip64_end_record(
    field: int, value: bytes, error: type[FormatError], message: str, saved: bytes
) -> None:
    with pytest.raises(error, match=message):
        read_archive(_patched(saved, len(saved) + field, value))


@pytest.mark.parametrize(("surplus", "error"), [(0, CorruptFile), (1, UnsupportedFormat)])
def test_the_directory_is_bounded_before_anything_is_allocated(
    surplus: int, error: type[FormatError]
) -> None:
    size = (64 << 20) + surplus
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, size, 4, 0)
    with mmap.mmap(-1, 4 + size + len(end)) as data:
        data[:4], data[4 + size :] = b"PK\x03\x04", end
        with pytest.raises(error, match="central directory"):
            read_archive(data)


def test_a_zip64_field_that_is_too_short(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 60)
    data = tools.archive_of({"data/0": b"0" * 100, **_NOTES})
    entry, _ = next(_entries(data))
    field = entry + 46 + len("archive/data/0")
    assert data[field : field + 4] == b"\x01\x00\x10\x00"
    with pytest.raises(CorruptFile, match="zip64 field of 4 bytes"):
        read_archive(_patched(data, field + 2, b"\x04\x00"))
    with pytest.raises(CorruptFile, match="announces a zip64 field"):
        read_archive(_patched(data, field, b"\x02\x00"))


@pytest.mark.parametrize("position", ["before", "after", "comment"])
def test_bytes_around_the_archive(position: str, plain: bytes) -> None:
    odd = {
        "before": b"#!stub\n" + plain,
        "after": plain + b"\n",
        "comment": plain[:-2] + b"\x03\x00abc",
    }[position]
    with pytest.raises(UnsupportedFormat):
        read_archive(odd)


@pytest.mark.parametrize("twice", ["data/0", "DATA/0"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice(twice: str) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data/0", b"a"), (twice, b"b"), *_NOTES.items()):
            archive.writestr(f"a/{name}", content)
    with pytest.raises(CorruptFile, match="more than once"):
        read_archive(file.getvalue())


def test_overlapping_records(plain: bytes) -> None:
    (_, first), (entry, _), *_ = _entries(plain)
    inside = struct.pack("<I", first + 5)
    with pytest.raises(CorruptFile, match=r"'archive/data/0'.*overlaps"):
        read_archive(_patched(plain, entry + 42, inside))


def test_records_listed_out_of_order(plain: bytes) -> None:
    (first, _), (second, _), (third, _), *_ = _entries(plain)
    data = plain[:first] + plain[second:third] + plain[first:second] + plain[third:]
    assert torch._C.PyTorchFileReader(io.BytesIO(data)).get_record("data/0") == b"zero"
    with pytest.raises(UnsupportedFormat, match="out of the order"):
        read_archive(data)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"data/0": b""}, "'version': missing"),
        ({"version": b"11"}, "not one of 1 to 10"),
        ({"version": b"0x3"}, "not one of 1 to 10"),
        ({"version": b"3" * 21}, "21 bytes"),
        ({"version": b"3", ".data/version": b"11"}, "not one of 1 to 10"),
        ({"version": b"3", ".Data/version": b"3"}, "other letters"),
        ({"version": b"3", "byteorder": b"middle"}, "'byteorder'"),
        ({"version": b"3", ".storage_alignment": b"a"}, "not a number"),
        ({"version": b"3", "ByteOrder": b"big"}, "other letters"),
        ({"version": b"3", "folder/": b""}, "marked as a directory"),
    ],
)
def test_records_that_torch_would_stumble_over(
    records: dict[str, bytes], message: str, tools: Any
) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        read_archive(tools.archive_of(records))


def test_the_version_may_be_where_torch_export_has_it(tools: Any) -> None:
    records = {".data/version": b"6\n", "data/0": b"zero"}
    data = tools.archive_of(records)
    assert list(read_archive(data).records) == list(records)
    assert torch._C.PyTorchFileReader(io.BytesIO(data)).get_record("data/0") == b"zero"


def test_archives_without_a_folder(tools: Any) -> None:
    with pytest.raises(UnsupportedFormat, match="not a file in the folder"):
        read_archive(tools.archive_of(_NOTES, prefix=""))


@pytest.mark.parametrize(
    ("old", "new"), [(b"data/0", b"data\x000"), (b"data/0", b"data/\xff"), (b"data/0", b"data0/")]
)
def test_names_that_are_no_file_names(old: bytes, new: bytes, plain: bytes) -> None:
    with pytest.raises(UnsupportedFormat, match=r"NUL|UTF-8|not a file"):
        read_archive(plain.replace(old, new))


def test_compressed_archives_are_left_to_torch() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/version", "3")
    with pytest.raises(UnsupportedFormat, match="compressed"):
        read_archive(file.getvalue())


# Anything at all


def _check_invariants(data: bytes, archive: TorchArchive) -> None:
    end = 0
    for span in archive.records.values():
        assert end <= span.offset_bytes <= span.end_bytes <= len(data)
        end = span.end_bytes


_EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from([0, 1, 2, 8, 0x50, 0x7F, 0x80, 0xFF])),
    min_size=1,
    max_size=4,
)


@_FUZZ
@given(edits=_EDITS, from_end=st.booleans(), cut=st.integers(0, 3))
def test_mutated_archives(
    edits: list[tuple[int, int]], from_end: bool, cut: int, saved: bytes, plain: bytes
) -> None:
    for original in (saved, plain):
        data = bytearray(original)
        for position, value in edits:
            # Most structure is at the end of the file.
            data[-1 - position % min(len(data), 900) if from_end else position % len(data)] = value
        mutated = bytes(data[: len(data) - cut])
        try:
            archive = read_archive(mutated)
        except FormatError:
            continue
        _check_invariants(mutated, archive)
        _assert_as_torch(mutated, archive)


@_FUZZ
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    for candidate in (data, b"PK\x03\x04" + data, b"PK\x03\x04" + data + b"PK\x05\x06" + bytes(18)):
        with pytest.raises(FormatError):
            read_archive(candidate)
