"""The order of an ONNX model's metadata properties.

onnxruntime keeps them in a hash table and saves them in the table's order; a program that iterates
over the reloaded ones sees yet another order. If they are saved in the source model's order, they
come out of the table as they did there.

Pure. Source: ``metadata_props`` of ModelProto, onnx/onnx.proto of onnx 1.23.
"""

from __future__ import annotations

from typing import Any

from trims_shim.formats.onnx_structure import ENTRY_KEY
from trims_shim.formats.protobuf import WireReader, delimited

__all__ = ["with_metadata_order"]

_METADATA = delimited(14)


def with_metadata_order(model: bytes, source: Any) -> bytes:
    """``model`` with its metadata in the order of ``source`` (a buffer), from which it was made.

    Unchanged if the two do not have the same properties. Raises TruncatedFile, CorruptFile or
    UnsupportedFormat.
    """
    with WireReader(source) as reader:
        wanted = [key for key, _, _ in _properties(reader)]
    with WireReader(model) as reader:
        found = _properties(reader)
        places = {key: (start, stop) for key, start, stop in found}
        # Of two with one name the table keeps the last.
        order = list(dict.fromkeys(wanted))
        if set(order) != places.keys() or len(places) != len(found):
            return model
        parts: list[bytes] = []
        position = 0
        for key, (_, start, stop) in zip(order, found, strict=True):
            parts += (reader.copy(position, start), reader.copy(*places[key]))
            position = stop
        return b"".join((*parts, reader.copy(position, len(reader.view))))


def _properties(reader: WireReader) -> list[tuple[bytes, int, int]]:
    """(name, start, end) of each field."""
    properties = []
    start = 0
    for key, first, stop in reader.fields(0, len(reader.view)):
        if key == _METADATA:
            properties.append((reader.name_in(first, stop, ENTRY_KEY), start, stop))
        start = stop
    return properties
