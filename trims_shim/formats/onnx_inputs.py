"""Inputs of an ONNX model that only its initializers made optional.

Up to IR version 3 every initializer had to be an input as well. Where onnxruntime folds or fuses
one away it saves the model with the input but without the initializer: loaded again, the model asks
its user for a weight. Such inputs are taken out.

Pure. Source: GraphProto in onnx/onnx.proto of onnx 1.23.
"""

from __future__ import annotations

from typing import Any

from trims_shim.formats.protobuf import WireReader, delimited, encode_field

__all__ = ["without_lost_inputs"]

_GRAPH = delimited(7)
_INITIALIZER = delimited(5)
_INPUT = delimited(11)
_NAME_OF_TENSOR = delimited(8)
_NAME_OF_INPUT = delimited(1)


def without_lost_inputs(model: bytes, source: Any) -> bytes:
    """``model`` without the inputs that have an initializer in ``source`` (a buffer) only.

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
        for start, first, stop in _fields(reader, 0, len(reader.view), _GRAPH):
            graph = _without(reader, first, stop, lost)
            parts += (reader.copy(kept, start), encode_field(_GRAPH, graph))
            kept = stop
        return b"".join((*parts, reader.copy(kept, len(reader.view))))


def _optional(reader: WireReader) -> set[bytes]:
    """Names of inputs that have an initializer."""
    inputs, initializers = set(), set()
    for _, first, stop in _fields(reader, 0, len(reader.view), _GRAPH):
        inputs |= {
            _name(reader, *each[1:], _NAME_OF_INPUT)
            for each in _fields(reader, first, stop, _INPUT)
        }
        initializers |= {
            _name(reader, *each[1:], _NAME_OF_TENSOR)
            for each in _fields(reader, first, stop, _INITIALIZER)
        }
    return inputs & initializers


def _without(reader: WireReader, start: int, end: int, lost: set[bytes]) -> bytes:
    parts: list[bytes] = []
    kept = start
    for begin, first, stop in _fields(reader, start, end, _INPUT):
        if _name(reader, first, stop, _NAME_OF_INPUT) in lost:
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


def _name(reader: WireReader, start: int, end: int, key_of_name: int) -> bytes:
    name = b""
    for key, first, stop in reader.fields(start, end):
        if key == key_of_name:
            name = reader.name(first, stop)
    return name
