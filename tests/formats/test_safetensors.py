"""The reader of safetensors headers.

Promise: what it accepts, the safetensors library accepts and understands the same; what it refuses
is a FormatError, one for each way to be wrong. Every dtype the library knows is known.
"""

from __future__ import annotations

import ctypes
import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat
from trims_shim.formats import read_header
from trims_shim.formats.safetensors import DTYPE_BITS
from trims_shim.specs import Record, Span

_FUZZ = settings(max_examples=150, deadline=None)
_ONE = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def _file(header: Any, data: bytes = b"") -> bytes:
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


def _tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _assert_as_library(data: bytes, records: tuple[Record, ...]) -> None:
    theirs = dict(safetensors.deserialize(data))
    assert sorted(theirs) == sorted(record.name for record in records)
    for record in records:
        view = theirs[record.name]
        assert (view["dtype"], tuple(view["shape"])) == (record.dtype, record.shape)
        assert bytes(view["data"]) == data[record.span.offset_bytes : record.span.end_bytes]


def test_a_saved_file() -> None:
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(5, dtype=np.int8),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 3), dtype=np.int64),
        "ünï": np.ones(2, dtype=np.complex64),
    }
    data = save(arrays, metadata={"format": "pt", "x": ""})
    records = read_header(data)
    _assert_as_library(data, records)
    for record in records:
        raw = data[record.span.offset_bytes : record.span.end_bytes]
        assert raw == arrays[record.name].tobytes()


def test_spans_are_absolute_and_in_order_of_offset() -> None:
    data = _file({"z": _tensor("I16", [2], 4, 8), "y": _tensor("F32", [], 0, 4)}, b"12345678")
    start = len(data) - 8
    assert read_header(data) == (
        Record("y", Span(start, 4), "F32", ()),
        Record("z", Span(start + 4, 4), "I16", (2,)),
    )


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_has_the_librarys_size(dtype: str) -> None:
    bits = DTYPE_BITS[dtype]
    data = _file({"a": _tensor(dtype, [3, 8], 0, 3 * bits)}, bytes(3 * bits))
    _assert_as_library(data, read_header(data))
    short = _file({"a": _tensor(dtype, [3, 8], 0, 3 * bits - 1)}, bytes(3 * bits - 1))
    with pytest.raises(CorruptFile, match="of shape"):
        read_header(short)


def test_every_dtype_of_the_library_is_known() -> None:
    with pytest.raises(safetensors.SafetensorError, match="expected one of") as caught:
        safetensors.deserialize(_file({"a": _tensor("nonsense", [1], 0, 1)}, b"0"))
    names = str(caught.value).partition("expected one of ")[2].split("`")[1::2]
    assert sorted(names) == sorted(DTYPE_BITS)


@pytest.mark.parametrize(
    "header", ["{}", "{}      ", '{"__metadata__":{}}', '{"__metadata__":null}']
)
def test_files_without_tensors(header: str) -> None:
    assert read_header(_file(header)) == ()
    assert safetensors.deserialize(_file(header)) == []


def test_arrays_of_any_type_are_read_in_place() -> None:
    data = _file({"a": json.loads(_ONE)}, b"x")
    for kind in (ctypes.c_char, ctypes.c_char * 1):
        array = (kind * len(data)).from_buffer_copy(data)
        assert read_header(array) == read_header(data)


_WRONG: dict[str, tuple[bytes, type[FormatError], str]] = {
    "nothing": (b"", TruncatedFile, "shorter than its header's length"),
    "seven bytes": (bytes(7), TruncatedFile, "shorter than its header's length"),
    "cut header": (struct.pack("<Q", 9) + b"{}", TruncatedFile, "header of 9 bytes"),
    "no header": (_file(""), UnsupportedFormat, "not with a brace"),
    "space first": (_file(f' {{"a":{_ONE}}}', b"x"), UnsupportedFormat, "not with a brace"),
    "a list": (_file("[]"), UnsupportedFormat, "not with a brace"),
    "byte order mark": (_file("\ufeff{}"), UnsupportedFormat, "not with a brace"),
    "100 MB and 1": (struct.pack("<Q", 100_000_001) + b"{}", UnsupportedFormat, "more than 1000"),
    "2**64 - 1": (b"\xff" * 8 + b"{}", UnsupportedFormat, "more than 1000"),
    "not UTF-8": (_file(b'{"\xff":1}'), CorruptFile, "not UTF-8"),
    "not JSON": (_file("{a}"), CorruptFile, "not JSON"),
    "trailing text": (_file("{}x"), CorruptFile, "not JSON"),
    "control character": (_file(f'{{"a\n":{_ONE}}}', b"x"), CorruptFile, "not JSON"),
    "NaN": (_file('{"a":NaN}'), CorruptFile, "NaN"),
    "nesting": (_file('{"a":' + "[" * 200_000), CorruptFile, "not JSON"),
    "long integer": (_file('{"a":' + "1" * 10_000 + "}"), CorruptFile, "not JSON"),
    "half a pair": (_file(f'{{"\\ud800":{_ONE}}}', b"x"), CorruptFile, "surrogate"),
    "twice": (_file(f'{{"a":{_ONE},"a":{_ONE}}}', b"x"), CorruptFile, "'a' twice"),
    "field twice": (
        _file('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        CorruptFile,
        "'dtype' twice",
    ),
    "metadata list": (_file('{"__metadata__":[]}'), CorruptFile, "map from strings"),
    "metadata number": (_file('{"__metadata__":{"a":1}}'), CorruptFile, "map from strings"),
    "metadata twice": (_file('{"__metadata__":{},"__metadata__":{}}'), CorruptFile, "twice"),
    "tensor list": (_file('{"a":["U8",[1],[0,1]]}', b"x"), UnsupportedFormat, "an object"),
    "tensor null": (_file('{"a":null}'), UnsupportedFormat, "an object"),
    "no shape": (
        _file({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"),
        CorruptFile,
        "shape missing",
    ),
    "more fields": (
        _file({"a": {**_tensor("U8", [1], 0, 1), "x": 1}}, b"x"),
        UnsupportedFormat,
        "unknown fields",
    ),
    "dtype": (_file({"a": _tensor("F128", [1], 0, 16)}, bytes(16)), UnsupportedFormat, "'F128'"),
    "dtype case": (_file({"a": _tensor("u8", [1], 0, 1)}, b"x"), UnsupportedFormat, "'u8'"),
    "dtype list": (
        _file('{"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}}', b"x"),
        UnsupportedFormat,
        "unknown",
    ),
    "shape number": (
        _file('{"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}}', b"x"),
        CorruptFile,
        "shape is not a list",
    ),
    "shape float": (
        _file('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"x"),
        CorruptFile,
        "shape holds 1.0",
    ),
    "shape true": (
        _file('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"x"),
        CorruptFile,
        "shape holds True",
    ),
    "shape negative": (_file({"a": _tensor("U8", [-1], 0, 1)}, b"x"), CorruptFile, "holds -1"),
    "negative zero": (
        _file('{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', b"x"),
        UnsupportedFormat,
        "negative zero",
    ),
    "shape 2**64": (_file({"a": _tensor("U8", [1 << 64], 0, 1)}, b"x"), CorruptFile, "holds 184"),
    "overflow": (
        _file({"a": _tensor("U8", [1 << 40, 1 << 40], 0, 1)}, b"x"),
        CorruptFile,
        "overflows",
    ),
    "overflow in bits": (_file({"a": _tensor("U8", [1 << 62], 0, 1)}, b"x"), CorruptFile, "overf"),
    "overflow, then zero": (
        _file({"a": _tensor("U8", [1 << 40, 1 << 40, 0], 0, 0)}),
        CorruptFile,
        "overflows",
    ),
    "half bytes": (_file({"a": _tensor("F4", [3], 0, 1)}, b"x"), CorruptFile, "12 bits"),
    "one offset": (
        _file('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1]}}', b"x"),
        CorruptFile,
        "1 data_offsets",
    ),
    "offset float": (
        _file('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1e0]}}', b"x"),
        CorruptFile,
        "data_offsets holds 1.0",
    ),
    "backwards": (_file({"a": _tensor("U8", [1], 1, 0)}, b"x"), CorruptFile, "before it begins"),
    "size": (_file({"a": _tensor("F32", [1], 0, 3)}, bytes(3)), CorruptFile, "3 bytes, but F32"),
    "gap at the start": (_file({"a": _tensor("U8", [1], 1, 2)}, b"xy"), CorruptFile, "after a gap"),
    "gap": (
        _file({"a": _tensor("U8", [1], 0, 1), "b": _tensor("U8", [1], 2, 3)}, b"xyz"),
        CorruptFile,
        "after a gap",
    ),
    "overlap": (
        _file({"a": _tensor("U8", [2], 0, 2), "b": _tensor("U8", [2], 1, 3)}, b"xyz"),
        CorruptFile,
        "overlap",
    ),
    "cut data": (_file({"a": _tensor("U8", [3], 0, 3)}, b"xy"), TruncatedFile, "tensors end at"),
    "more data": (_file({"a": _tensor("U8", [1], 0, 1)}, b"xy"), CorruptFile, "1 bytes after"),
    "data without tensors": (_file("{}", b"x"), CorruptFile, "1 bytes after"),
}

_STRICTER = {"space first", "twice", "more fields", "tensor list"}
"""What the library takes and this reader leaves to it."""


@pytest.mark.parametrize("name", _WRONG)
def test_one_error_for_each_way_to_be_wrong(name: str) -> None:
    data, error, message = _WRONG[name]
    with pytest.raises(error, match=message):
        read_header(data)
    if name in _STRICTER:
        safetensors.deserialize(data)
    else:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data)


def test_messages_tell_the_ways_apart() -> None:
    messages = set()
    for data, _, _ in _WRONG.values():
        with pytest.raises(FormatError) as caught:
            read_header(data)
        messages.add(str(caught.value))
    assert len(messages) >= len(_WRONG) - 3


# Anything at all

_GOOD = [
    _file({"a": _tensor("U8", [1], 0, 1), "b-0": _tensor("F32", [2, 1], 1, 9)}, bytes(9)),
    _file({"__metadata__": {"k": "v"}, "x": _tensor("F4", [2, 2], 0, 2)}, b"ab"),
    _file({"x": _tensor("I64", [0, 9], 0, 0), "y": _tensor("BF16", [], 0, 2)}, b"ab"),
]
_EDITS = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.sampled_from(list(b'0123456789-.,:[]{}" \\ue+E\x00\xff\n')),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


@_FUZZ
@given(data=st.sampled_from(_GOOD), edits=_EDITS, keep_length=st.booleans())
def test_mutated_headers(
    data: bytes, edits: list[tuple[int, int, bool]], keep_length: bool
) -> None:
    length = struct.unpack_from("<Q", data)[0]
    text, rest = bytearray(data[8 : 8 + length]), data[8 + length :]
    for position, value, is_insert in edits:
        at = position % len(text)
        text[at : at if is_insert else at + 1] = bytes([value])
    mutated = struct.pack("<Q", length if keep_length else len(text)) + bytes(text) + rest
    try:
        header = read_header(mutated)
    except FormatError:
        return
    _assert_as_library(mutated, header)


_COUNTS = st.one_of(
    st.integers(0, 4), st.sampled_from([-1, 1 << 62, 1 << 64, True, 1.0, None, "1"])
)


@_FUZZ
@given(
    tensors=st.dictionaries(
        st.text(max_size=3),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F4", "F32", "X", 1]),
                "shape": st.lists(_COUNTS, max_size=3),
                "data_offsets": st.lists(_COUNTS, max_size=3),
            }
        ),
        max_size=3,
    ),
    data=st.binary(max_size=6),
)
def test_arbitrary_headers(tensors: dict[str, Any], data: bytes) -> None:
    made = _file(tensors, data)
    try:
        header = read_header(made)
    except FormatError:
        return
    _assert_as_library(made, header)


@_FUZZ
@given(data=st.binary(max_size=64))
def test_arbitrary_bytes(data: bytes) -> None:
    for candidate in (data, _file(data), _file(b"{" + data)):
        try:
            header = read_header(candidate)
        except FormatError:
            continue
        _assert_as_library(candidate, header)
