"""The batch table, and what is done to parts and their pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import Batch, BatchTable, Part, PartState, Piece


def requests(*numbers: int, weight: int = 1) -> list[Request]:
    return [Request(number, 0, key="a", weight=weight) for number in numbers]


def part_of(*sizes: int) -> Part:
    """One piece of each size, whose values are their rows."""
    table = BatchTable(stages=3)
    part = table.new(0, requests(*range(sum(sizes))), pair=0)
    everyone, pieces = iter(part.requests), []
    for number, size in enumerate(sizes):
        rows = list(range(size))
        pieces.append(Piece([next(everyone) for _ in rows], rows, value=f"value {number}"))
    part.pieces = pieces
    return part


def numbers(part: Part) -> list[int]:
    return [request.number for request in part.requests]


def content(pieces: Sequence[Piece]) -> list[tuple[object, list[int], list[int]]]:
    return [(each.value, [one.number for one in each.requests], each.rows) for each in pieces]


# --- pieces and parts -----------------------------------------------------------------------------


def test_a_cut_takes_whole_pieces_and_the_beginning_of_the_next() -> None:
    part = part_of(2, 3)
    first = part.cut(3)
    assert content(first.pieces) == [("value 0", [0, 1], [0, 1]), ("value 1", [2], [0])]
    assert content(part.pieces) == [("value 1", [3, 4], [1, 2])]
    assert (first.batch, first.stage, first.state) == (part.batch, 0, PartState.WAITING)


def test_those_that_leave_take_their_rows_along() -> None:
    part = part_of(3, 1)
    everyone = part.requests
    part.leave_out([everyone[1], everyone[3]])
    assert content(part.pieces) == [("value 0", [0, 2], [0, 2])]


def test_who_caught_up_comes_after_those_he_has_reached() -> None:
    first, second = part_of(2), part_of(1)
    first.absorb(second)
    assert len(first.pieces) == 2
    assert first.size == 3
    assert second.pieces == []


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_cutting_and_absorbing_keeps_rows_with_their_requests(
    sizes: list[int], data: st.DataObject
) -> None:
    part = part_of(*sizes)
    before = rows_by_request(part)
    first = part.cut(data.draw(st.integers(0, part.size)))
    first.absorb(part)
    assert rows_by_request(first) == before
    assert numbers(first) == list(range(sum(sizes)))


def rows_by_request(part: Part) -> dict[int, tuple[object, int]]:
    return {
        request.number: (piece.value, row)
        for piece in part.pieces
        for request, row in zip(piece.requests, piece.rows, strict=True)
    }


def test_while_a_part_runs_its_pieces_are_the_drivers() -> None:
    part = part_of(2)
    part.running, part.state = part.requests, PartState.RUNNING
    part.pieces = []
    assert part.size == 2
    assert numbers(part) == [0, 1]


# --- the table ------------------------------------------------------------------------------------


def test_rows_are_numbered_when_some_are_taken_away() -> None:
    first, second = Piece(requests(0, 1, 2), value="a"), Piece(requests(3, 4), value="b")
    before = first.cut(1)
    assert (before.rows, first.rows, second.rows) == ([0], [1, 2], None)
    first.leave_out(first.requests[:1])
    second.leave_out(())
    assert (first.rows, second.rows) == ([2], None)


def batches(table: BatchTable) -> list[int]:
    return [batch.number for batch in table]


def test_batches_are_numbered_in_the_order_of_their_creation() -> None:
    table = BatchTable(stages=2)
    first = table.new(5, requests(0, 1), pair=0).batch
    second = table.new(6, requests(2), pair=1).batch
    assert (first.created_ns, first.key, first.pair, first.size) == (5, "a", 0, 2)
    assert first.passed == [0, 0]
    assert batches(table) == [0, 1]
    table.end(first)
    assert (batches(table), len(table)) == ([1], 1)
    assert table.new(7, requests(3), pair=0).batch.number == second.number + 1


def test_the_newest_is_that_of_those_on_their_way() -> None:
    table = BatchTable(stages=2)
    first = table.new(0, requests(0), pair=0).batch
    second = table.new(0, requests(1), pair=0).batch
    assert (table.is_newest(first), table.is_newest(second)) == (False, True)
    table.end(second)
    assert table.is_newest(first)
    table.end(first)
    assert not table.is_newest(first)


def test_a_stretched_batch_has_one_more_part() -> None:
    table = BatchTable(stages=2)
    batch = table.new(0, requests(0, 1), pair=0).batch
    part = table.stretch(batch, requests(2, weight=5))
    assert (part.stage, numbers(part), part.pieces[0].rows) == (0, [2], None)
    assert (batch.size, batch.live, batch.weight) == (3, 3, 7)
    assert batch.parts[1] is part
    assert not batch.is_split


def test_a_split_keeps_the_order_and_cannot_be_undone() -> None:
    table = BatchTable(stages=2)
    part = table.new(0, requests(*range(5)), pair=0)
    parts = table.split(part, (2, 2, 1))
    assert [numbers(each) for each in parts] == [[0, 1], [2, 3], [4]]
    assert [each.order for each in parts] == [0, 1, 2]
    assert parts[-1] is part
    assert part.batch.is_split
    assert set(map(id, part.batch.parts)) == set(map(id, parts))


@pytest.mark.parametrize("left", [0, 1, 2])
def test_who_left_is_not_live_but_has_entered(left: int) -> None:
    table = BatchTable(stages=2)
    batch: Batch = table.new(0, requests(0, 1), pair=0).batch
    part = batch.parts[0]
    part.leave_out(part.requests[:left])
    assert (batch.live, batch.size) == (2 - left, 2)
