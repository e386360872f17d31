"""The reader of ONNX models on files that are not what they seem.

Promise: whatever the bytes are, it says within bounds what the onnx package finds in them, or
raises a FormatError, one for each way to be wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_everything import everything
from onnx_messages import (
    attribute,
    entry,
    external,
    facts_by_onnx,
    facts_of,
    graph,
    model,
    node,
    tensor,
)

from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat
from trims_shim.formats.onnx import read_model
from trims_shim.formats.protobuf import WireReader, delimited, encode_field, encode_varint, varint

_FUZZ = settings(max_examples=150, deadline=None)
_DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
_REAL = sorted(_DATA.rglob("*.onnx"))

# What is refused


def _nested(levels: int) -> bytes:
    """Three messages per level: a node, its attribute, its sub-graph."""
    content = node("Deep")
    for _ in range(levels):
        content = node("If", attribute(graph(content, field=6)))
    return model(graph(content))


_GRAPH = graph(node("Add"), tensor(b"\x4a\x04abcd"))
_WRONG: dict[str, tuple[bytes, type[FormatError], str]] = {
    "nothing": (b"", CorruptFile, "no graph"),
    "no graph": (model(), CorruptFile, "no graph"),
    "zeros": (bytes(100), CorruptFile, "has the number 0"),
    "text": (b"ir_version: 10 graph { }", CorruptFile, "does not exist|number 0|out of range"),
    "cut graph": (model(_GRAPH)[:-1], TruncatedFile, "the file ends"),
    "cut opset": (model(_GRAPH)[:5], TruncatedFile, "the file ends"),
    "cut node": (model(graph(b"\x0a\x20")) + b"\x28\x00" * 30, CorruptFile, "its message ends"),
    "length of 2 GiB": (model(b"\x3a\x80\x80\x80\x80\x08"), UnsupportedFormat, "more than 2 GiB"),
    "raw data of 4 GiB": (
        model(graph(encode_field(delimited(5), b"\x4a\x80\x80\x80\x80\x10"))),
        UnsupportedFormat,
        "more than 2 GiB",
    ),
    "group": (model(graph(b"\x0b\x0c")), UnsupportedFormat, "is a group"),
    "two graphs": (model(_GRAPH, _GRAPH), UnsupportedFormat, "ModelProto at 0: field 7 twice"),
    "two tensors": (
        model(graph(node("Constant", attribute(tensor() + tensor())))),
        UnsupportedFormat,
        "AttributeProto at .*: field 5 twice",
    ),
    "two sub-graphs": (
        model(graph(node("If", attribute(graph(field=6) + graph(field=6))))),
        UnsupportedFormat,
        "AttributeProto at .*: field 6 twice",
    ),
    "two values": (
        model(graph(encode_field(delimited(15), tensor(field=1) + tensor(field=1)))),
        UnsupportedFormat,
        "SparseTensorProto at .*: field 1 twice",
    ),
    "nesting": (_nested(34), UnsupportedFormat, "inside more than 100 others"),
    "deep nesting": (_nested(2000), UnsupportedFormat, "inside more than 100 others"),
    "negative dimension": (model(graph(tensor(shape=(2, -1)))), CorruptFile, "dimension of -1"),
    "negative packed dimension": (
        model(graph(tensor(encode_field(delimited(1), b"\xff" * 9 + b"\x01")))),
        CorruptFile,
        "dimension of -1",
    ),
    "rank": (model(graph(tensor(shape=(1,) * 256))), UnsupportedFormat, "256 dimensions"),
    "packed rank": (
        model(graph(tensor(encode_field(delimited(1), b"\x01" * 300)))),
        UnsupportedFormat,
        "301 dimensions",
    ),
    "long packed rank": (
        model(graph(tensor(encode_field(delimited(1), b"\x01" * 3000)))),
        UnsupportedFormat,
        "3000 bytes of dimensions",
    ),
    "cut packed dimension": (
        model(graph(tensor(encode_field(delimited(1), b"\x80"), name="w"))) + b"\x28\x00",
        CorruptFile,
        "number at .*: its message ends",
    ),
    "tensor name": (model(graph(tensor(name=b"\xff"))), UnsupportedFormat, "not UTF-8"),
    "operator name": (model(graph(node(b"\xff"))), UnsupportedFormat, "operator has a name"),
    "long operator name": (
        model(graph(node(b"x" * 70000))),
        UnsupportedFormat,
        "a name of 70000 bytes",
    ),
    "long location": (
        model(graph(tensor(external("x" * 70000)))),
        UnsupportedFormat,
        "a name of 70000 bytes",
    ),
    "location name": (
        model(graph(tensor(entry("location", b"\xff"), b"\x70\x01"))),
        UnsupportedFormat,
        "not UTF-8",
    ),
    "no location": (model(graph(tensor(b"\x70\x01"))), CorruptFile, "without a location"),
    "two locations": (
        model(graph(tensor(entry("location", "a"), external("b")))),
        UnsupportedFormat,
        "twice",
    ),
    "negative offset": (
        model(graph(tensor(external(offset=-4)))),
        CorruptFile,
        "'-4' is not an offset",
    ),
    "offset of words": (
        model(graph(tensor(entry("location", "a"), entry("offset", "four"), b"\x70\x01"))),
        CorruptFile,
        "'four' is not an offset",
    ),
    "offset of other digits": (
        model(graph(tensor(entry("location", "a"), entry("offset", "٤"), b"\x70\x01"))),
        CorruptFile,
        "is not an offset",
    ),
    "no digits": (
        model(graph(tensor(entry("location", "a"), entry("length", ""), b"\x70\x01"))),
        CorruptFile,
        "'' is not an offset",
    ),
    "many digits": (
        model(graph(tensor(entry("location", "a"), entry("length", "1" * 9999), b"\x70\x01"))),
        CorruptFile,
        "is not an offset",
    ),
    "overflow": (
        model(graph(tensor(external(offset=(1 << 63) - 4, length=8)))),
        CorruptFile,
        "external data of 8 bytes at",
    ),
    "overflowing shape": (
        model(graph(tensor(entry("location", "a"), b"\x70\x01", shape=(1 << 62,) * 200))),
        CorruptFile,
        "external data of",
    ),
}
_STRICTER = {
    "nothing", "no graph", "group", "two graphs", "two tensors", "two sub-graphs", "two values",
    "negative dimension", "negative packed dimension", "rank", "packed rank", "long packed rank",
    "tensor name", "operator name", "location name", "no location", "two locations",
    "long operator name", "long location", "negative offset", "offset of words",
    "offset of other digits", "no digits", "many digits", "overflow", "overflowing shape",
}  # fmt: skip
"""What is well-formed protobuf; judged by onnxruntime, or taken by it."""


@pytest.mark.parametrize("name", _WRONG)
def test_one_error_for_each_way_to_be_wrong(name: str) -> None:
    content, error, message = _WRONG[name]
    with pytest.raises(error, match=message):
        read_model(content)
    if name not in _STRICTER:
        with pytest.raises(DecodeError):
            onnx.ModelProto.FromString(content)


def _nested_graph(levels: int) -> bytes:
    """Empty graphs, the innermost at a depth of 1 + 3 * levels."""
    content = b""
    for _ in range(levels):
        content = node("If", attribute(graph(content, field=6)))
    return model(graph(content))


def test_nesting_is_as_deep_as_protobuf_takes() -> None:
    for content in (_nested(32), _nested_graph(33)):
        onnx.ModelProto.FromString(content)
        read_model(content)
    for content in (_nested(33), _nested_graph(34)):
        with pytest.raises(DecodeError):
            onnx.ModelProto.FromString(content)
        with pytest.raises(UnsupportedFormat, match="inside more than 100 others"):
            read_model(content)


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WireReader.__init__.__kwdefaults__, "max_fields", 1000)
    content = model(graph(b"\x10\x01" * 2000))
    with pytest.raises(UnsupportedFormat, match="more fields"):
        read_model(content)


# Anything at all

_GOOD = [
    everything().SerializeToString(),
    model(_GRAPH),
    model(graph(tensor(external()), node("If", attribute(graph(tensor(), node("A"), field=6))))),
    *[path.read_bytes() for path in _REAL if path.stat().st_size < 2000][:20],
]


def _assert_judged(content: bytes) -> None:
    """A FormatError, or what the onnx package finds."""
    try:
        found = read_model(content)
    except FormatError:
        return
    for each in found.tensors:
        if not each.location and each.span is not None:
            assert 0 <= each.span.offset_bytes <= each.span.end_bytes <= len(content)
    try:
        expected = facts_by_onnx(content)
    except (DecodeError, UnicodeDecodeError):
        return
    assert facts_of(found, content) == expected


_EDITS = st.lists(
    st.tuples(
        st.integers(0, 1 << 30),
        st.one_of(
            st.integers(0, 255),
            st.sampled_from([0, 1, 8, 0x0A, 0x2A, 0x3A, 0x6A, 0x7F, 0x80, 0xFF]),
        ),
        st.sampled_from(["replace", "insert", "delete"]),
    ),
    min_size=1,
    max_size=4,
)


@_FUZZ
@given(content=st.sampled_from(_GOOD), edits=_EDITS)
def test_mutated_models(content: bytes, edits: list[tuple[int, int, str]]) -> None:
    mutated = bytearray(content)
    for position, value, kind in edits:
        at = position % (len(mutated) or 1)
        mutated[at : at + (kind != "insert")] = b"" if kind == "delete" else bytes([value])
    _assert_judged(bytes(mutated))


@_FUZZ
@given(content=st.sampled_from(_GOOD), keep=st.floats(0, 1), tail=st.binary(max_size=8))
def test_cut_models(content: bytes, keep: float, tail: bytes) -> None:
    _assert_judged(content[: int(len(content) * keep)] + tail)


@_FUZZ
@given(
    content=st.sampled_from(_GOOD),
    start=st.integers(0, 1 << 30),
    size=st.integers(1, 60),
    target=st.integers(0, 1 << 30),
)
def test_transplanted_pieces(content: bytes, start: int, size: int, target: int) -> None:
    start, target = start % len(content), target % len(content)
    piece = content[start : start + size]
    _assert_judged(content[:target] + piece + content[target:])
    _assert_judged(content[:target] + piece + content[target + size :])


_NUMBERS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 20, 22, 23, 25])
_MESSAGES = st.recursive(
    st.one_of(
        st.tuples(_NUMBERS, st.integers(0, (1 << 64) - 1)),
        st.tuples(_NUMBERS, st.sampled_from([b"", b"a", b"length", b"offset", b"location", b"9"])),
    ),
    lambda inner: st.tuples(_NUMBERS, st.lists(inner, max_size=5)),
    max_leaves=25,
)


def _encode(number: int, content: Any) -> bytes:
    if isinstance(content, int):
        return encode_varint(varint(number)) + encode_varint(content)
    if isinstance(content, list):
        content = b"".join(_encode(*each) for each in content)
    return encode_field(delimited(number), content)


@_FUZZ
@given(st.lists(_MESSAGES, max_size=6))
def test_arbitrary_messages(fields: list[Any]) -> None:
    _assert_judged(b"".join(_encode(*each) for each in fields))
    _assert_judged(model(graph(*(_encode(*each) for each in fields))))
    _assert_judged(model(graph(tensor(*(_encode(*each) for each in fields)))))


@_FUZZ
@given(st.binary(max_size=64))
def test_arbitrary_bytes(content: bytes) -> None:
    _assert_judged(content)
    _assert_judged(model(graph(content)))
