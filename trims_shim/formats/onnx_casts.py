"""The Cast nodes of an ONNX model.

However little a session may optimise, onnxruntime leaves out some pairs of Cast nodes, of which one
takes what the other makes, and their rounding with them. It looks at each node once: a pair that
first comes about while it looks is still in the model that it saves, and goes when that is loaded.

Pure. Source: ``RemoveDuplicateCastTransformer`` of onnxruntime (core/optimizer); tried with 1.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trims_shim.formats.onnx_structure import (
    NODE_INPUT,
    NODE_OPERATOR,
    NODE_OUTPUT,
    Message,
    read_children,
)
from trims_shim.formats.protobuf import WireReader

__all__ = ["casts_of", "have_pairs"]


def casts_of(model: Any) -> list[tuple[bytes, bytes]]:
    """(what it takes, what it makes) of each Cast in all graphs of ``model`` (a buffer), sorted.

    Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    with WireReader(model) as reader:
        return sorted(_casts(reader, Message.MODEL, 0, len(reader.view), depth=0))


def have_pairs(casts: list[tuple[bytes, bytes]]) -> bool:
    """Whether one of them takes what another one makes."""
    return not {taken for taken, _ in casts}.isdisjoint(made for _, made in casts)


def _casts(
    reader: WireReader, message: Message, start: int, end: int, *, depth: int
) -> Iterator[tuple[bytes, bytes]]:
    operator = taken = made = b""
    for key, child, first, stop in read_children(reader, message, start, end, depth=depth):
        if child is not None and child is not Message.TENSOR:
            yield from _casts(reader, child, first, stop, depth=depth + 1)
        elif message is not Message.NODE:
            continue
        elif key == NODE_OPERATOR:
            operator = reader.name(first, stop)
        elif key == NODE_INPUT:
            taken = reader.name(first, stop)
        elif key == NODE_OUTPUT:
            made = reader.name(first, stop)
    if operator == b"Cast":
        yield taken, made
