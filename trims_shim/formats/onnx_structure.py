"""Where tensors are in an ONNX model: its messages, by field number, and the header of a tensor.

Owns the part of ``onnx.proto`` that leads to a tensor or says where its bytes are; every other
field is stepped over. ``formats.onnx`` decides what is read of a model, ``formats.onnx_relayout``
what is changed.

A model is a graph and functions; both have nodes, a node has attributes, and an attribute holds a
number, a string, a tensor or a sub-graph. So tensors are initializers of a graph or values of an
attribute, dense or sparse (a pair of tensors). A tensor's bytes are inside its message
(``raw_data``, or fields by type) or, if ``data_location`` is EXTERNAL, in a file, which the pairs
of a key and a value in ``external_data`` name.

Protobuf merges the parts of a message field that occurs twice. No writer of models uses that, and
it would hide which tensor has which bytes: UnsupportedFormat.

Source: onnx/onnx.proto of onnx 1.23 (IR version 14).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.protobuf import (
    MAX_DEPTH,
    WireReader,
    delimited,
    signed32,
    signed64,
    varint,
)
from trims_shim.specs import Span

__all__ = [
    "ENTRY_KEY",
    "ENTRY_VALUE",
    "GRAPH_INITIALIZER",
    "GRAPH_INPUT",
    "GRAPH_NODE",
    "GRAPH_OUTPUT",
    "MODEL_GRAPH",
    "NODE_ATTRIBUTE",
    "NODE_DOMAIN",
    "NODE_INPUT",
    "NODE_OPERATOR",
    "NODE_OUTPUT",
    "TENSOR_DIM",
    "TENSOR_DIMS",
    "TENSOR_EXTERNAL_DATA",
    "TENSOR_NAME",
    "VALUE_NAME",
    "ExternalData",
    "Message",
    "TensorHeader",
    "read_children",
    "read_external",
    "read_number",
    "read_tensor",
    "size_of",
]


class Message(enum.Enum):
    """The messages that are, or can lead to, a tensor."""

    MODEL = "ModelProto"
    TRAINING = "TrainingInfoProto"
    FUNCTION = "FunctionProto"
    GRAPH = "GraphProto"
    NODE = "NodeProto"
    ATTRIBUTE = "AttributeProto"
    SPARSE_TENSOR = "SparseTensorProto"
    TENSOR = "TensorProto"


MODEL_GRAPH = delimited(7)
GRAPH_NODE = delimited(1)
GRAPH_INITIALIZER = delimited(5)
GRAPH_INPUT = delimited(11)
GRAPH_OUTPUT = delimited(12)
NODE_INPUT = delimited(1)
NODE_OUTPUT = delimited(2)
NODE_OPERATOR = delimited(4)
NODE_ATTRIBUTE = delimited(5)
NODE_DOMAIN = delimited(7)
VALUE_NAME = delimited(1)
"""The name of an input, an output or another value of a graph."""
_ATTRIBUTE_TENSOR = delimited(5)
_ATTRIBUTE_GRAPH = delimited(6)
_ATTRIBUTE_SPARSE = delimited(22)

_CHILDREN: Mapping[Message, Mapping[int, Message]] = {
    Message.MODEL: {
        MODEL_GRAPH: Message.GRAPH,
        delimited(20): Message.TRAINING,
        delimited(25): Message.FUNCTION,
    },
    Message.TRAINING: {delimited(1): Message.GRAPH, delimited(2): Message.GRAPH},
    Message.FUNCTION: {delimited(7): Message.NODE, delimited(11): Message.ATTRIBUTE},
    Message.GRAPH: {
        GRAPH_NODE: Message.NODE,
        GRAPH_INITIALIZER: Message.TENSOR,
        delimited(15): Message.SPARSE_TENSOR,
    },
    Message.NODE: {NODE_ATTRIBUTE: Message.ATTRIBUTE},
    Message.ATTRIBUTE: {
        _ATTRIBUTE_TENSOR: Message.TENSOR,
        _ATTRIBUTE_GRAPH: Message.GRAPH,
        delimited(10): Message.TENSOR,
        delimited(11): Message.GRAPH,
        _ATTRIBUTE_SPARSE: Message.SPARSE_TENSOR,
        delimited(23): Message.SPARSE_TENSOR,
    },
    Message.SPARSE_TENSOR: {delimited(1): Message.TENSOR, delimited(2): Message.TENSOR},
    Message.TENSOR: {},
}
_SINGULAR: Mapping[Message, frozenset[int]] = {
    Message.MODEL: frozenset({MODEL_GRAPH}),
    Message.TRAINING: frozenset({delimited(1), delimited(2)}),
    Message.ATTRIBUTE: frozenset({_ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH, _ATTRIBUTE_SPARSE}),
    Message.SPARSE_TENSOR: frozenset({delimited(1), delimited(2)}),
}
"""Children that a message has once at most."""

TENSOR_DIM = varint(1)
TENSOR_DIMS = delimited(1)
"""Several dimensions in one field."""
_TENSOR_DTYPE = varint(2)
TENSOR_NAME = delimited(8)
_TENSOR_RAW = delimited(9)
TENSOR_EXTERNAL_DATA = delimited(13)
_TENSOR_LOCATION = varint(14)
_LOCATIONS = {0: False, 1: True}
"""DataLocation; protobuf ignores enum values that it does not know."""
ENTRY_KEY = delimited(1)
ENTRY_VALUE = delimited(2)

_MAX_RANK = 255
"""Tensors have no more dimensions than this in any framework (numpy: 64)."""
_MAX_DIGITS = 19
"""Digits of the largest 64-bit offset."""
_MAX_BYTES = (1 << 63) - 1
_BITS: Mapping[int, int] = {
    1: 32,  # FLOAT
    2: 8,  # UINT8
    3: 8,  # INT8
    4: 16,  # UINT16
    5: 16,  # INT16
    6: 32,  # INT32
    7: 64,  # INT64
    9: 8,  # BOOL
    10: 16,  # FLOAT16
    11: 64,  # DOUBLE
    12: 32,  # UINT32
    13: 64,  # UINT64
    14: 64,  # COMPLEX64
    15: 128,  # COMPLEX128
    16: 16,  # BFLOAT16
    17: 8,  # FLOAT8E4M3FN
    18: 8,  # FLOAT8E4M3FNUZ
    19: 8,  # FLOAT8E5M2
    20: 8,  # FLOAT8E5M2FNUZ
    21: 4,  # UINT4
    22: 4,  # INT4
    23: 4,  # FLOAT4E2M1
    24: 8,  # FLOAT8E8M0
    25: 2,  # UINT2
    26: 2,  # INT2
    27: 6,  # FLOAT6E2M3
    28: 6,  # FLOAT6E3M2
}
"""Bits of an element by TensorProto.DataType; strings (8) have no fixed size."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor without its data; ``raw`` is where ``raw_data`` lies in the model's file.

    ``entries`` are the pairs of ``external_data``, as written.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    is_external: bool
    raw: Span | None
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ExternalData:
    """Where an external tensor's bytes are. ``size_bytes``: None if nothing says how many."""

    location: str
    offset_bytes: int
    size_bytes: int | None


def read_children(
    reader: WireReader, message: Message, start: int, end: int, *, depth: int
) -> Iterator[tuple[int, Message | None, int, int]]:
    """The fields of the message in ``[start, end)``: (key, what it is, first, stop), in order.

    ``depth`` counts the messages around this one. Raises TruncatedFile, CorruptFile or
    UnsupportedFormat.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedFormat(f"{message.value} at {start}: inside more than {MAX_DEPTH} others")
    children = _CHILDREN[message]
    singular = _SINGULAR.get(message, frozenset())
    seen: set[int] = set()
    for key, first, stop in reader.fields(start, end):
        if key in singular:
            if key in seen:
                raise UnsupportedFormat(f"{message.value} at {start}: field {key >> 3} twice")
            seen.add(key)
        yield key, children.get(key), first, stop


def read_tensor(reader: WireReader, start: int, end: int) -> TensorHeader:
    """The header of the TensorProto in ``[start, end)``; its data is not touched.

    Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    name = ""
    dtype = 0
    shape: list[int] = []
    is_external = False
    raw = None
    entries = []
    for key, first, stop in reader.fields(start, end):
        if key == TENSOR_DIM:
            shape.append(signed64(first))
        elif key == _TENSOR_DTYPE:
            dtype = signed32(first)
        elif key == TENSOR_NAME:
            name = reader.text(first, stop)
        elif key == _TENSOR_RAW:
            raw = Span(first, stop - first)
        elif key == _TENSOR_LOCATION:
            is_external = _LOCATIONS.get(signed32(first), is_external)
        elif key == TENSOR_EXTERNAL_DATA:
            entries.append(_read_entry(reader, first, stop))
        elif key == TENSOR_DIMS:
            shape.extend(_read_packed_dims(reader, first, stop))
    if len(shape) > _MAX_RANK:
        raise UnsupportedFormat(f"tensor {name[:64]!r}: {len(shape)} dimensions")
    if shape and min(shape) < 0:
        raise CorruptFile(f"tensor {name[:64]!r}: a dimension of {min(shape)}")
    return TensorHeader(name, dtype, tuple(shape), is_external, raw, tuple(entries))


def _read_packed_dims(reader: WireReader, start: int, end: int) -> list[int]:
    # A number takes at most ten bytes; shorter ones are counted by the caller.
    if end - start > 10 * _MAX_RANK:
        raise UnsupportedFormat(f"tensor at {start}: {end - start} bytes of dimensions")
    return [signed64(value) for value in reader.varints(start, end)]


def _read_entry(reader: WireReader, start: int, end: int) -> tuple[str, str]:
    key = value = ""
    for field, first, stop in reader.fields(start, end):
        if field == ENTRY_KEY:
            key = reader.text(first, stop)
        elif field == ENTRY_VALUE:
            value = reader.text(first, stop)
    return key, value


def read_external(tensor: TensorHeader) -> ExternalData:
    """Where the bytes of an external tensor are.

    A length that is missing or zero (the same to onnxruntime) follows from dtype and shape. The
    location is as written: it may be absolute, lead out of the model's directory, or be no file's
    name at all. Raises CorruptFile or UnsupportedFormat.
    """
    entries = dict(tensor.entries)
    if len(entries) != len(tensor.entries):
        raise UnsupportedFormat(f"tensor {tensor.name!r}: one key of its external data twice")
    location = entries.get("location", "")
    if not location:
        raise CorruptFile(f"tensor {tensor.name!r}: external data without a location")
    size = read_number(tensor, entries.get("length", "0")) or size_of(tensor)
    offset = read_number(tensor, entries.get("offset", "0"))
    if offset + (size or 0) > _MAX_BYTES:
        raise CorruptFile(f"tensor {tensor.name!r}: external data of {size} bytes at {offset}")
    return ExternalData(location, offset, size)


def read_number(tensor: TensorHeader, text: str) -> int:
    """An offset or a length in external data. Raises CorruptFile."""
    if len(text) > _MAX_DIGITS or not text.isascii() or not text.isdigit():
        raise CorruptFile(f"tensor {tensor.name!r}: {text[:64]!r} is not an offset or a length")
    return int(text)


def size_of(tensor: TensorHeader) -> int | None:
    """Bytes of the elements, packed; None for strings and dtypes of the future."""
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        return None
    for count in tensor.shape:
        bits *= count
    return (bits + 7) // 8
