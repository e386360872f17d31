"""Rows of a cache keep what they have seen, wherever they go, and growing copies nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trims_shim.batching.staged.decoding.key_values import (
    NOTHING_SEEN,
    GrowingCache,
    KeyValues,
    gather,
)


def seen(rows: list[list[float]]) -> KeyValues:
    """Rows of these numbers, padded in front with infinities."""
    columns = max(len(row) for row in rows)
    padded = torch.tensor([[float("inf")] * (columns - len(row)) + row for row in rows])
    cache = GrowingCache(NOTHING_SEEN, padding=padded.isinf())
    for layer in (0, 1):
        keys = padded[:, None, :, None].expand(-1, 2, -1, 3) + layer
        cache.update(keys, -keys, layer)
    return cache.grown()


def content(cache: KeyValues, row: int, length: int) -> list[list[float]]:
    """The last numbers of one row, of each buffer."""
    buffers = [buffer for pair in cache.layers.values() for buffer in pair]
    used = [buffer[row, :, : cache.length] for buffer in buffers]
    assert all(torch.equal(each, each[:1, :, :1].expand_as(each)) for each in used)
    assert all(each.isfinite().all() for each in used), "padding must not be infinite"
    return [each[0, cache.length - length :, 0].tolist() for each in used]


def expected(row: list[float]) -> list[list[float]]:
    there = [[number + layer for number in row] for layer in (0, 1)]
    return [there[0], [-n for n in there[0]], there[1], [-n for n in there[1]]]


ROWS = st.lists(
    st.lists(st.integers(1, 99).map(float), min_size=1, max_size=5), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=50)
@given(batches=st.lists(ROWS, min_size=1, max_size=3), data=st.data())
def test_rows_keep_their_own_through_joins_steps_and_leaving(
    batches: list[list[list[float]]], data: st.DataObject
) -> None:
    caches = [seen(rows) for rows in batches]
    cache = gather([(each, None) for each in caches], max(each.length for each in caches))
    rows = [list(row) for batch in batches for row in batch]
    for number in range(data.draw(st.integers(0, 3))):
        growing = GrowingCache(cache)
        for layer in (0, 1):
            new = torch.full((len(rows), 2, 1, 3), 100.0 + number + layer)
            growing.update(new, -new, layer)
        cache = growing.grown()
        rows = [[*row, 100.0 + number] for row in rows]
        kept = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
        rows = [rows[index] for index in kept]
        length = max(len(row) for row in rows)
        cache = gather([(cache, torch.tensor(kept))], length)
        assert cache.length == length, "padding that nobody needs is left out"
    for index, row in enumerate(rows):
        assert content(cache, index, len(row)) == expected(row)


def test_a_token_more_is_written_where_there_is_room() -> None:
    cache = seen([[1.0, 2.0]])
    places = []
    for number in range(100):
        growing = GrowingCache(cache)
        for layer in (0, 1):
            new = torch.full((1, 2, 1, 3), float(number) + layer)
            growing.update(new, -new, layer)
        cache = growing.grown()
        places.append(cache.layers[0][0].data_ptr())
    assert content(cache, 0, 102) == expected([1.0, 2.0, *map(float, range(100))])
    assert len(set(places)) == 2, "copied once in 64 tokens"


def test_a_past_can_be_gone_on_from_twice() -> None:
    """What failed is run again from the state before it."""
    past = seen([[1.0]])
    for number in (5.0, 6.0):
        growing = GrowingCache(past)
        assert growing.length_of(0) == 1
        keys, _ = growing.update(torch.full((1, 2, 1, 3), number), torch.zeros(1, 2, 1, 3), 0)
        assert (growing.length_of(0), growing.length_of(1)) == (2, 1)
        assert keys[0, 0, :, 0].tolist() == [1.0, number]
        assert past.length == 1


def test_layers_may_have_other_shapes() -> None:
    growing = GrowingCache(NOTHING_SEEN)
    growing.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 2), 0)
    growing.update(torch.ones(2, 5, 3, 4), torch.ones(2, 5, 3, 4), 2)
    cache = gather([(growing.grown(), torch.tensor([1]))], 2)
    assert {layer: [tuple(b.shape) for b in pair] for layer, pair in cache.layers.items()} == {
        0: [(1, 1, 66, 4), (1, 1, 66, 2)],
        2: [(1, 5, 66, 4), (1, 5, 66, 4)],
    }


@pytest.mark.parametrize("is_view", [True, False])
def test_what_update_returns_is_as_long_as_what_was_given(*, is_view: bool) -> None:
    given = torch.rand(2, 2, 7, 3)
    keys = given[:, :, :5] if is_view else given[:, :, :5].clone()
    found, _ = GrowingCache(NOTHING_SEEN).update(keys, keys, 0)
    assert torch.equal(found, keys)
    found.zero_()
    assert given.min() > 0, "the model's own tensor is left alone"
