"""What an ONNX model consists of, read from its file without touching the weights.

Owns the answer to "what is in it, and in which files", and judges nothing: an operator may not
exist, and a location may be absolute or lead out of the model's directory. Code that opens the
files has to judge that (onnxruntime refuses such locations). Pure: the buffer may be a mapping.
Keys, lengths, names and small numbers are read from it, a tensor's bytes never. So a model of any
size takes the time of its graph: linear in nodes, about 7 us each.

Invariants of a model that is returned: it has a graph; every span inside the file is a tensor's
``raw_data``; ``operators``, ``tensors`` and ``locations`` cover sub-graphs, functions and training
graphs, in the order of the file. Files that protobuf's parsers refuse may be accepted if the fault
is in a field that is stepped over. Files that they accept, but that no writer of models produces
(a graph in two parts, names that are not UTF-8), are UnsupportedFormat.

The ORT format is another one (a flatbuffer), which :func:`is_ort_format` recognises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.onnx_structure import (
    NODE_DOMAIN,
    NODE_OPERATOR,
    Message,
    read_children,
    read_external,
    read_tensor,
)
from trims_shim.formats.protobuf import WireReader
from trims_shim.specs import Span

__all__ = ["OnnxModel", "StoredTensor", "is_ort_format", "read_model"]

_ORT_IDENTIFIER = b"ORTM"
"""``file_identifier`` of onnxruntime's flatbuffer schema, at offset 4 as in every flatbuffer."""

# Looked up for every field; looking up members of an Enum is slow.
_GRAPH, _NODE, _TENSOR, _SPARSE = (
    Message.GRAPH,
    Message.NODE,
    Message.TENSOR,
    Message.SPARSE_TENSOR,
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and where its bytes are.

    ``dtype`` is a TensorProto.DataType. ``location`` is the external file as written, ``""`` for
    the model's own. ``span`` lies in that file; None if the bytes are in fields by type, or if
    neither the file nor the dtype says how many there are.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    location: str
    span: Span | None


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A model without its data.

    ``operators`` are (domain, type) as nodes name them: ``("com.microsoft", "EPContext")`` in a
    model compiled for one device. ``tensors`` are initializers of all graphs, and values of
    attributes where they are external. ``locations`` are all external files, sorted.
    """

    operators: frozenset[tuple[str, str]]
    tensors: tuple[StoredTensor, ...]
    locations: tuple[str, ...]


def is_ort_format(prefix: bytes) -> bool:
    """Whether a file that begins with ``prefix`` (eight bytes will do) is of the ORT format."""
    return bytes(prefix[4:8]) == _ORT_IDENTIFIER


def read_model(buffer: Any) -> OnnxModel:
    """The model that fills ``buffer`` (contiguous).

    Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    with WireReader(buffer) as reader:
        return _read_model(reader)


def _read_model(reader: WireReader) -> OnnxModel:
    if is_ort_format(reader.copy(0, 8)):
        raise UnsupportedFormat("the model is of the ORT format")
    contents = _Contents(reader)
    has_graph = False
    for _, child, first, stop in read_children(reader, Message.MODEL, 0, len(reader.view), depth=0):
        if child is not None:
            has_graph |= child is _GRAPH
            contents.scan(child, first, stop, depth=1)
    if not has_graph:
        raise CorruptFile("the model has no graph")
    return OnnxModel(
        operators=contents.named_operators(),
        tensors=tuple(contents.tensors),
        locations=tuple(sorted({each.location for each in contents.tensors} - {""})),
    )


class _Contents:
    """Collects what an OnnxModel says from every message of a model."""

    def __init__(self, reader: WireReader) -> None:
        self.tensors: list[StoredTensor] = []
        self._reader = reader
        self._operators: set[tuple[bytes, bytes]] = set()

    def scan(
        self, message: Message, start: int, end: int, *, depth: int, is_in_graph: bool = False
    ) -> None:
        """``is_in_graph``: the message is an initializer's, not an attribute's."""
        reader = self._reader
        domain = operator = b""
        for key, child, first, stop in read_children(reader, message, start, end, depth=depth):
            if child is None:
                if key == NODE_OPERATOR and message is _NODE:
                    operator = reader.name(first, stop)
                elif key == NODE_DOMAIN and message is _NODE:
                    domain = reader.name(first, stop)
            elif child is _TENSOR:
                self._add(first, stop, is_in_graph=message is _GRAPH or is_in_graph)
            else:
                is_sparse = child is _SPARSE and message is _GRAPH
                self.scan(child, first, stop, depth=depth + 1, is_in_graph=is_sparse)
        if message is _NODE:
            self._operators.add((domain, operator))

    def _add(self, start: int, end: int, *, is_in_graph: bool) -> None:
        header = read_tensor(self._reader, start, end)
        location, span = "", header.raw
        if header.is_external:
            data = read_external(header)
            location = data.location
            span = None if data.size_bytes is None else Span(data.offset_bytes, data.size_bytes)
        elif not is_in_graph:
            return
        self.tensors.append(StoredTensor(header.name, header.dtype, header.shape, location, span))

    def named_operators(self) -> frozenset[tuple[str, str]]:
        """(domain, type). Decoded once each: a model has many nodes of few kinds."""
        try:
            return frozenset((domain.decode(), name.decode()) for domain, name in self._operators)
        except UnicodeDecodeError as error:
            raise UnsupportedFormat("an operator has a name that is not UTF-8") from error
