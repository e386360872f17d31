"""Inputs of an ONNX model that only its initializers made optional.

Up to IR version 3 every initializer had to be an input as well. When onnxruntime folds or fuses one
away, it saves the model with the input but without the initializer, and the model that is loaded
again asks its user for a weight. Such inputs are removed.

Pure. Source: GraphProto in onnx/onnx.proto of onnx 1.23.
"""

from __future__ import annotations

from typing import Any

from trims_shim.formats.onnx_structure import (
    GRAPH_INITIALIZER,
    GRAPH_INPUT,
    MODEL_GRAPH,
    TENSOR_NAME,
    VALUE_NAME,
)
from trims_shim.formats.protobuf import WireReader, encode_field

__all__ = ["without_lost_inputs"]


def without_lost_inputs(model: bytes, source: Any) -> bytes:
    """``model`` without the inputs that have an initializer only in ``source`` (a buffer).

    Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    with WireReader(source) as reader:
        before = _optional(reader)
    if not before:
        return model
    with WireReader(model) as reader:
        lost = before - _optional(reader)
        if not lost:
            return model
        parts: list[bytes] = []
        kept = 0
        for start, first, stop in _fields(reader, 0, len(reader.view), MODEL_GRAPH):
            graph = _without(reader, first, stop, lost)
            parts += (reader.copy(kept, start), encode_field(MODEL_GRAPH, graph))
            kept = stop
        return b"".join((*parts, reader.copy(kept, len(reader.view))))


def _optional(reader: WireReader) -> set[bytes]:
    """Names of inputs that have an initializer."""
    inputs, initializers = set(), set()
    for _, first, stop in _fields(reader, 0, len(reader.view), MODEL_GRAPH):
        inputs |= {
            reader.name_in(*each[1:], VALUE_NAME)
            for each in _fields(reader, first, stop, GRAPH_INPUT)
        }
        initializers |= {
            reader.name_in(*each[1:], TENSOR_NAME)
            for each in _fields(reader, first, stop, GRAPH_INITIALIZER)
        }
    return inputs & initializers


def _without(reader: WireReader, start: int, end: int, lost: set[bytes]) -> bytes:
    parts: list[bytes] = []
    kept = start
    for begin, first, stop in _fields(reader, start, end, GRAPH_INPUT):
        if reader.name_in(first, stop, VALUE_NAME) in lost:
            parts.append(reader.copy(kept, begin))
            kept = stop
    return b"".join((*parts, reader.copy(kept, end)))


def _fields(reader: WireReader, start: int, end: int, wanted: int) -> list[tuple[int, int, int]]:
    """(start, start of the content, end) of each field with this key."""
    found, begin = [], start
    for key, first, stop in reader.fields(start, end):
        if key == wanted:
            found.append((begin, first, stop))
        begin = stop
    return found
