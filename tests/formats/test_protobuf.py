"""The reader and writer of protobuf's wire format.

Promise: fields are found where protobuf's own parsers find them; whatever the bytes are, nothing
but a FormatError comes out, no field leaves its message, and the work is bounded.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat
from trims_shim.formats.protobuf import (
    MAX_MESSAGE_BYTES,
    WireReader,
    delimited,
    encode_field,
    encode_varint,
    signed32,
    signed64,
    varint,
)

_FUZZ = settings(max_examples=150, deadline=None)


def _fields(data: bytes) -> list[tuple[int, int, int]]:
    return list(WireReader(data).fields(0, len(data)))


@pytest.fixture
def hole() -> Iterator[mmap.mmap]:
    """2 GiB of nothing, which takes no memory."""
    descriptor = os.memfd_create("hole")
    os.ftruncate(descriptor, MAX_MESSAGE_BYTES + 1)
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapping:
        yield mapping
    os.close(descriptor)


def test_fields_of_every_wire_type() -> None:
    data = b"\x08\x96\x01" + b"\x11" + bytes(8) + b"\x1a\x03abc" + b"\x25" + bytes(4)
    assert _fields(data) == [(varint(1), 150, 3), (17, 4, 12), (delimited(3), 14, 17), (37, 18, 22)]


def test_content_is_not_read() -> None:
    data = b"\x0a\x05\xff\xff\xff\xff\xff" + b"\x10\x01"
    assert _fields(data) == [(delimited(1), 2, 7), (varint(2), 1, 9)]


def test_messages_are_read_in_their_own_bounds() -> None:
    data = b"\x0a\x02\x08\x07" + b"\x10\x01"
    reader = WireReader(data)
    [(_, first, stop), _] = list(reader.fields(0, len(data)))
    assert list(reader.fields(first, stop)) == [(varint(1), 7, 4)]


def test_a_message_without_fields() -> None:
    assert _fields(b"") == []


def test_buffers_of_other_types() -> None:
    data = b"\x08\xff\xff\x01"
    for kind in (ctypes.c_char, ctypes.c_byte, ctypes.c_uint16, ctypes.c_char * 2):
        array = (kind * (len(data) // ctypes.sizeof(kind))).from_buffer_copy(data)
        assert list(WireReader(array).fields(0, len(data))) == _fields(data)


@pytest.mark.parametrize(
    ("value", "as_int32", "as_int64"),
    [
        (0, 0, 0),
        (0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF),
        (0x80000000, -0x80000000, 0x80000000),
        (1 << 32 | 1, 1, 1 << 32 | 1),
        ((1 << 64) - 1, -1, -1),
        (1 << 63, 0, -(1 << 63)),
    ],
)
def test_signed_numbers(value: int, as_int32: int, as_int64: int) -> None:
    assert (signed32(value), signed64(value)) == (as_int32, as_int64)
    # As protobuf reads them: data_type is an int32, a dimension an int64.
    encoded = b"\x10" + encode_varint(value) + b"\x08" + encode_varint(value)
    tensor = onnx.TensorProto.FromString(encoded)
    assert (tensor.data_type, tensor.dims[0]) == (as_int32, as_int64)


_LONG = b"\x80" * 9
_WRONG: dict[str, tuple[bytes, type[FormatError], str]] = {
    "cut key": (b"\x80", TruncatedFile, "number at 0: the file ends at 1"),
    "no value": (b"\x08", TruncatedFile, "number at 1: the file ends at 1"),
    "cut value": (b"\x08\x80\x80", TruncatedFile, "number at 1: the file ends at 3"),
    "no length": (b"\x0a", TruncatedFile, "number at 1: the file ends at 1"),
    "cut content": (b"\x0a\x02x", TruncatedFile, "field of 2 bytes at 2: the file ends at 3"),
    "cut double": (b"\x09" + bytes(7), TruncatedFile, "field of 8 bytes at 1"),
    "cut float": (b"\x0d" + bytes(3), TruncatedFile, "field of 4 bytes at 1"),
    "value of 11 bytes": (b"\x08" + _LONG + b"\x80\x00", CorruptFile, "not end after 10 bytes"),
    "value of 65 bits": (b"\x08" + _LONG + b"\x02", CorruptFile, "out of range"),
    "key of 6 bytes": (b"\x80" * 5 + b"\x01\x00", CorruptFile, "not end after 5 bytes"),
    "key of 33 bits": (b"\x88\x80\x80\x80\x10\x00", CorruptFile, "out of range"),
    "length of 2 GiB": (b"\x0a\x80\x80\x80\x80\x08", UnsupportedFormat, "more than 2 GiB"),
    "length of -1": (b"\x0a" + b"\xff" * 9 + b"\x01", UnsupportedFormat, "more than 2 GiB"),
    "length of 2 GiB - 1": (b"\x0a\xff\xff\xff\xff\x07", TruncatedFile, "field of 2147483647"),
    "number 0": (b"\x00\x01", CorruptFile, "has the number 0"),
    "number 0, with length": (b"\x02\x00", CorruptFile, "has the number 0"),
    "number 0, of four bytes": (b"\x05" + bytes(4), CorruptFile, "has the number 0"),
    "begin of a group": (b"\x0b\x0c", UnsupportedFormat, "is a group"),
    "end of a group": (b"\x0c", UnsupportedFormat, "is a group"),
    "wire type 6": (b"\x0e", CorruptFile, "wire type 6 does not exist"),
    "wire type 7": (b"\x0f", CorruptFile, "wire type 7 does not exist"),
}
_STRICTER = {"begin of a group", "value of 65 bits"}
"""What protobuf takes, or takes in some versions."""


@pytest.mark.parametrize("name", _WRONG)
def test_one_error_for_each_way_to_be_wrong(name: str) -> None:
    data, error, message = _WRONG[name]
    with pytest.raises(error, match=message):
        _fields(data)
    if name not in _STRICTER:
        with pytest.raises(DecodeError):
            onnx.ModelProto.FromString(data)


def test_a_field_that_leaves_its_message_is_corrupt() -> None:
    for inner in (b"\x0a\x02x", b"\x08", b"\x80", b"\x09\x00", b"\x0a"):
        data = encode_field(delimited(1), inner) + b"\x08\x01\x08\x01\x08\x01\x08\x01"
        reader = WireReader(data)
        with pytest.raises(CorruptFile, match=f"its message ends at {2 + len(inner)}"):
            list(reader.fields(2, 2 + len(inner)))


def test_numbers_that_are_longer_than_needed() -> None:
    assert _fields(b"\x08\x81\x80\x00") == [(varint(1), 1, 4)]
    assert _fields(b"\x0a\x81\x00x") == [(delimited(1), 3, 4)]


def test_negative_numbers() -> None:
    [(_, value, stop)] = _fields(b"\x08" + b"\xff" * 9 + b"\x01")
    assert (signed64(value), stop) == (-1, 11)


def test_two_gibibytes_are_too_much(hole: mmap.mmap) -> None:
    with pytest.raises(UnsupportedFormat, match="2147483648 bytes"):
        WireReader(hole)
    with (
        memoryview(hole) as whole,
        whole[:MAX_MESSAGE_BYTES] as most,
        WireReader(most) as reader,
        pytest.raises(CorruptFile, match="number 0"),
    ):
        list(reader.fields(0, MAX_MESSAGE_BYTES))


def test_the_number_of_fields_is_bounded_over_all_messages() -> None:
    data = b"\x08\x01" * 5
    reader = WireReader(data, max_fields=20)
    assert len(list(reader.fields(0, 10))) == 5
    assert len(list(reader.fields(0, 6))) == 3
    assert len(list(reader.fields(0, 0))) == 0
    with pytest.raises(UnsupportedFormat, match="more fields"):
        next(reader.fields(0, 2))


def test_text() -> None:
    reader = WireReader("ü".encode() + b"\xff")
    assert (reader.text(0, 2), reader.copy(0, 2)) == ("ü", "ü".encode())
    with pytest.raises(UnsupportedFormat, match="a name at 0 is not UTF-8"):
        reader.text(0, 3)


def test_names_are_short() -> None:
    reader = WireReader(b"x" * (1 << 17))
    assert reader.name(1, 1 + (1 << 16)) == b"x" * (1 << 16)
    for read in (reader.name, reader.text):
        with pytest.raises(UnsupportedFormat, match="a name of 65537 bytes at 5"):
            read(5, 6 + (1 << 16))


@_FUZZ
@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_packed_numbers(numbers: list[int]) -> None:
    data = b"".join(map(encode_varint, numbers))
    assert list(WireReader(data).varints(0, len(data))) == numbers


@_FUZZ
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("varint"), st.integers(1, 1 << 28), st.integers(0, (1 << 64) - 1)),
            st.tuples(st.just("bytes"), st.integers(1, 1 << 28), st.binary(max_size=300)),
        )
    )
)
def test_what_is_written_is_read(fields: list[tuple[str, int, int | bytes]]) -> None:
    data = b""
    for _, number, content in fields:
        if isinstance(content, bytes):
            data += encode_field(delimited(number), content)
        else:
            data += encode_varint(varint(number)) + encode_varint(content)
    found = [
        ("bytes", key >> 3, data[first:stop]) if key & 7 == 2 else ("varint", key >> 3, first)
        for key, first, stop in _fields(data)
    ]
    assert found == fields


@_FUZZ
@given(data=st.binary(max_size=64), start=st.integers(0, 64), end=st.integers(0, 64))
def test_arbitrary_bytes(data: bytes, start: int, end: int) -> None:
    start, end = min(start, len(data)), min(end, len(data))
    position = start
    try:
        for key, first, stop in WireReader(data).fields(start, end):
            assert position < stop <= end
            assert key & 7 == 0 or position < first <= stop
            position = stop
    except FormatError:
        return
    assert position == max(start, end) or start > end
