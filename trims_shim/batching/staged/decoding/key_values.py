"""The keys and values of the tokens that a decoder has seen: rows that come, go and grow.

Rows have different lengths. They end at the same column, so that one more token is one more column
for all of them. The columns before a row's first token are padding, which its mask leaves out. When
rows are joined, shorter ones are padded in front; when the longest leaves, so does the padding that
only it needed.

A growing cache is not copied at every token, as by concatenation: there is room behind the last
column, and a token is written there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trims_shim.batching.staged.activations import Shared

__all__ = ["NOTHING_SEEN", "GrowingCache", "KeyValues", "gather"]

_ROOM = 64
"""Spare columns. The cache is copied once in so many tokens; on average half of them are unused."""

_Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class KeyValues:
    """The keys and values of a batch. The columns in use do not change any more."""

    layers: Mapping[int, _Pair]
    """Keys and values of each layer, ``[batch, heads, capacity, width]``."""
    columns: Shared
    """How many are in use."""

    @property
    def length(self) -> int:
        """How many columns are in use."""
        length: int = self.columns.value
        return length


NOTHING_SEEN = KeyValues({}, Shared(0))


class GrowingCache:
    """The cache of one call of a decoder: the past, to which it adds new keys and values.

    ``update`` is called as that of transformers' caches.
    """

    def __init__(self, past: KeyValues, *, padding: Any = None) -> None:
        """``padding``: ``[batch, tokens]``, which of the new tokens are padding."""
        self.past = past
        self._padding = None if padding is None else padding[:, None, :, None]
        self._layers = dict(past.layers)
        self._length = past.length
        self._updated: set[int] = set()

    def update(self, keys: Any, values: Any, layer: int) -> tuple[Any, Any]:
        """Add ``[batch, heads, tokens, width]`` of one layer; to be called once for each layer.

        Returns all of the layer, ``[batch, heads, past + tokens, width]``, to be read only.
        """
        start, end = self.past.length, self.past.length + int(keys.shape[-2])
        buffers = self._layers.get(layer, (None, None))
        pair = _appended(buffers[0], keys, start, end), _appended(buffers[1], values, start, end)
        if self._padding is not None:
            # Padding attends to nothing and may have become NaN; NaN times a weight of 0 is NaN.
            for buffer in pair:
                buffer[..., start:end, :].masked_fill_(self._padding, 0)
        self._layers[layer] = pair
        self._length = end
        self._updated.add(layer)
        return pair[0][..., :end, :], pair[1][..., :end, :]

    def length_of(self, layer: int) -> int:
        """How many columns of one layer are in use."""
        return self._length if layer in self._updated else self.past.length

    def grown(self) -> KeyValues:
        """The past of the next call."""
        return KeyValues(self._layers, Shared(self._length))


def _appended(buffer: Any, new: Any, start: int, end: int) -> Any:
    if buffer is None or end > buffer.shape[-2]:
        larger = new.new_empty((*new.shape[:-2], end + _ROOM, new.shape[-1]))
        if buffer is not None:
            larger[..., :start, :] = buffer[..., :start, :]
        buffer = larger
    buffer[..., start:end, :] = new
    return buffer


def gather(parts: Sequence[tuple[KeyValues, Any]], length: int) -> KeyValues:
    """Make a batch, which ends at the column ``length``, of rows of others. Always a copy.

    Each part is a cache and a tensor of the numbers of the rows to take, or None for all. No such
    row is longer than ``length``.
    """

    def gathered(layer: int, which: int) -> Any:
        buffers = [(cache.layers[layer][which], cache.length, rows) for cache, rows in parts]
        return _gathered(buffers, length)

    layers = {layer: (gathered(layer, 0), gathered(layer, 1)) for layer in parts[0][0].layers}
    return KeyValues(layers, Shared(length))


def _gathered(parts: Sequence[tuple[Any, int, Any]], length: int) -> Any:
    first = parts[0][0]
    counts = [len(buffer) if rows is None else len(rows) for buffer, _, rows in parts]
    # Zeros: padding is multiplied by a weight of 0, so it must not be infinite.
    shape = (sum(counts), *first.shape[1:-2], length + _ROOM, first.shape[-1])
    gathered = first.new_zeros(shape)
    start = 0
    for (buffer, end, rows), count in zip(parts, counts, strict=True):
        own = min(end, length)
        taken = buffer[..., end - own : end, :]
        target = gathered[start : start + count, ..., length - own : length, :]
        target.copy_(taken if rows is None else taken.index_select(0, rows))
        start += count
    return gathered
