"""Weights of matrix products, stored so that kernels read them in order when they pack them.

Theory of operation. In every session onnxruntime packs the second factor of a ``Gemm`` into panels
of 16 columns, even if the packed bytes lie in a file, where it finds them by their hash. Of a
weight ``[K, N]`` a panel takes 64 bytes of each row: one cache line here, the next one 4 N bytes
further on. Of its transpose ``[N, K]`` a panel takes 16 rows as they lie in memory. The packed
bytes, and so every result, are the same, but packing takes little more than half the time. The
attribute ``transB`` of a ``Gemm`` says which of the two it is given.

:func:`with_transposed_weights` sets it on the nodes where that changes nothing else: the weight is
a matrix of floats that kernels packed, of at least 64 KiB outside the model, and only such nodes
read it. Fields keep their order, everything else is copied as it is, and the same input gives the
same output.

Pure: the data are not touched here; the matrices to transpose are returned. Source: onnx/onnx.proto
of onnx 1.23; ``MlasGemmPackB`` of onnxruntime 1.31.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trims_shim.formats.onnx_relayout import PREPACKED, external_tensors
from trims_shim.formats.onnx_structure import (
    GRAPH_INITIALIZER,
    GRAPH_INPUT,
    GRAPH_NODE,
    GRAPH_OUTPUT,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    NODE_DOMAIN,
    NODE_INPUT,
    NODE_OPERATOR,
    TENSOR_DIM,
    TENSOR_DIMS,
    VALUE_NAME,
    Message,
    TensorHeader,
    read_children,
    read_external,
    read_tensor,
)
from trims_shim.formats.protobuf import (
    WireReader,
    delimited,
    encode_field,
    encode_varint,
    signed64,
    varint,
)

__all__ = ["Transposition", "with_transposed_weights"]

_GRAPH_ENDS = frozenset({GRAPH_INPUT, GRAPH_OUTPUT})
"""Inputs and outputs."""
_GRAPH_VALUE = delimited(13)
"""The shape of a value, stated once more; onnxruntime takes it from the weight itself."""
_ATTRIBUTE_NAME = delimited(1)
_ATTRIBUTE_INT = varint(3)
_TRANSPOSED = encode_field(
    NODE_ATTRIBUTE,
    encode_field(_ATTRIBUTE_NAME, b"transB")
    + encode_varint(_ATTRIBUTE_INT)
    + encode_varint(1)
    + encode_varint(varint(20))  # its type: INT
    + encode_varint(2),
)
_OPERATORS = frozenset({(b"", b"Gemm"), (b"ai.onnx", b"Gemm"), (b"com.microsoft", b"FusedGemm")})
_FACTOR = 1
"""The input that is packed."""
_FLOAT = 1
_WORTH_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Transposition:
    """A matrix in the data file, of four bytes an element, that has to become its transpose."""

    offset_bytes: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the main graph. ``is_product``: it reads a matrix that could be transposed."""

    inputs: tuple[bytes, ...]
    is_product: bool


def with_transposed_weights(model: bytes) -> tuple[bytes, tuple[Transposition, ...]]:
    """``model`` as it is right once these matrices of its data file are transposed.

    Its external data is in one file, as :func:`trims_shim.formats.onnx_relayout.relayout` leaves
    it. Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    with WireReader(model) as reader:
        parts: list[bytes] = []
        found: list[Transposition] = []
        start = 0
        for key, first, stop in reader.fields(0, len(reader.view)):
            if key == MODEL_GRAPH:
                content = _rewritten(reader, first, stop, found)
                parts.append(encode_field(key, content))
            else:
                parts.append(reader.copy(start, stop))
            start = stop
        return (b"".join(parts), tuple(found)) if found else (model, ())


def _rewritten(reader: WireReader, start: int, end: int, found: list[Transposition]) -> bytes:
    """The graph in ``[start, end)``; adds to ``found``."""
    wanted = _wanted(reader, start, end)
    parts: list[bytes] = []
    position = start
    for key, first, stop in reader.fields(start, end):
        content = None
        if key == GRAPH_INITIALIZER:
            tensor = read_tensor(reader, first, stop)
            if tensor.name.encode() in wanted:
                rows, columns = tensor.shape
                found.append(Transposition(read_external(tensor).offset_bytes, rows, columns))
                content = _with_shape(reader, first, stop, (columns, rows))
        elif key == GRAPH_NODE:
            node = _read_node(reader, first, stop)
            if node.is_product and node.inputs[_FACTOR] in wanted:
                content = _with_attribute(reader, first, stop)
        elif key == _GRAPH_VALUE and reader.name_in(first, stop, VALUE_NAME) in wanted:
            position = stop
            continue
        parts.append(reader.copy(position, stop) if content is None else encode_field(key, content))
        position = stop
    return b"".join(parts)


# --- which ----------------------------------------------------------------------------------------


def _wanted(reader: WireReader, start: int, end: int) -> set[bytes]:
    """Names of the weights that only products read, and whose data no other tensor has."""
    weights: Counter[bytes] = Counter()
    owners = _owners(reader)
    uses: Counter[bytes] = Counter()
    products: Counter[bytes] = Counter()
    for key, first, stop in reader.fields(start, end):
        if key == GRAPH_INITIALIZER:
            tensor = read_tensor(reader, first, stop)
            if _is_worth(tensor) and owners[read_external(tensor).offset_bytes] == 1:
                weights[tensor.name.encode()] += 1
        elif key == GRAPH_NODE:
            node = _read_node(reader, first, stop)
            uses.update(node.inputs)
            uses.update(_names_inside(reader, Message.NODE, first, stop, depth=2))
            if node.is_product:
                products[node.inputs[_FACTOR]] += 1
        elif key in _GRAPH_ENDS:
            uses[reader.name_in(first, stop, VALUE_NAME)] += 1
    return {
        name
        for name, count in weights.items()
        if count == 1 and products[name] and products[name] == uses[name]
    }


def _owners(reader: WireReader) -> Counter[int]:
    """How many tensors of the model have their data at each offset."""
    found = external_tensors(reader, Message.MODEL, 0, len(reader.view), depth=0)
    return Counter(data.offset_bytes for data in map(read_external, found) if data.size_bytes)


def _is_worth(tensor: TensorHeader) -> bool:
    return (
        tensor.is_external
        and tensor.dtype == _FLOAT
        and len(tensor.shape) == 2
        and (read_external(tensor).size_bytes or 0) >= _WORTH_BYTES
        and any(key.startswith(PREPACKED) for key, _ in tensor.entries)
    )


def _read_node(reader: WireReader, start: int, end: int) -> _Node:
    inputs: list[bytes] = []
    operator = domain = b""
    is_transposed = False
    for key, first, stop in reader.fields(start, end):
        if key == NODE_INPUT:
            inputs.append(reader.name(first, stop))
        elif key == NODE_OPERATOR:
            operator = reader.name(first, stop)
        elif key == NODE_DOMAIN:
            domain = reader.name(first, stop)
        elif key == NODE_ATTRIBUTE and _is_transposition(reader, first, stop):
            is_transposed = any(
                signed64(value)
                for field, value, _ in reader.fields(first, stop)
                if field == _ATTRIBUTE_INT
            )
    is_product = (domain, operator) in _OPERATORS and not is_transposed and len(inputs) > _FACTOR
    return _Node(tuple(inputs), is_product)


def _is_transposition(reader: WireReader, start: int, end: int) -> bool:
    return reader.name_in(start, end, _ATTRIBUTE_NAME) == b"transB"


def _names_inside(
    reader: WireReader, message: Message, start: int, end: int, *, depth: int
) -> Iterator[bytes]:
    """Names of values in a message's sub-graphs; they may be values of the graphs around."""
    for key, child, first, stop in read_children(reader, message, start, end, depth=depth):
        if message is Message.GRAPH and (key in _GRAPH_ENDS or key == _GRAPH_VALUE):
            yield reader.name_in(first, stop, VALUE_NAME)
        if child is Message.NODE:
            yield from _read_node(reader, first, stop).inputs
        if child in (Message.NODE, Message.ATTRIBUTE, Message.GRAPH):
            yield from _names_inside(reader, child, first, stop, depth=depth + 1)


# --- messages -------------------------------------------------------------------------------------


def _with_shape(reader: WireReader, start: int, end: int, shape: tuple[int, ...]) -> bytes:
    """The tensor with another shape."""
    parts = [encode_varint(TENSOR_DIM) + encode_varint(size) for size in shape]
    position = start
    for key, _, stop in reader.fields(start, end):
        if key not in (TENSOR_DIM, TENSOR_DIMS):
            parts.append(reader.copy(position, stop))
        position = stop
    return b"".join(parts)


def _with_attribute(reader: WireReader, start: int, end: int) -> bytes:
    """The node as a product of the transpose."""
    parts: list[bytes] = []
    position = start
    for key, first, stop in reader.fields(start, end):
        if key != NODE_ATTRIBUTE or not _is_transposition(reader, first, stop):
            parts.append(reader.copy(position, stop))
        position = stop
    return b"".join((*parts, _TRANSPOSED))
