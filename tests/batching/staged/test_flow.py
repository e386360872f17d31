"""Rows that are taken and joined are the rows that were there, or nothing is done at all."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trims_shim.batching.staged.activations import Shared
from trims_shim.batching.staged.flow import NotJoinable, join, rows_of, take
from trims_shim.errors import BadBatch

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class State:
    hidden: torch.Tensor
    mask: numpy.ndarray[Any, Any]
    scale: Shared


def batch(rows: int, first: float = 0.0) -> Any:
    hidden = torch.arange(first, first + rows * 3).reshape(rows, 3)
    return State(
        hidden=hidden,
        mask=numpy.arange(rows) + int(first),
        scale=Shared(torch.ones(2)),
    )


class TestRowsOf:
    @pytest.mark.parametrize(
        ("value", "rows"),
        [
            (torch.zeros(3, 2), 3),
            (numpy.zeros((4, 1)), 4),
            (["a", "b"], 2),
            ([(torch.zeros(2),), (torch.zeros(3),)], 2),
            ((torch.zeros(3), None, Shared(7), 0.5, "text", True), 3),
            ({"a": torch.zeros(2, 2), "b": [1, 2]}, 2),
            (Pair(torch.zeros(2), torch.zeros(2, 5)), 2),
            (batch(5), 5),
            (torch.zeros(0, 2), 0),
            (Shared(torch.zeros(9)), None),
            ((torch.tensor(1.0), None), None),
        ],
    )
    def test_rows(self, value: Any, rows: int | None) -> None:
        assert rows_of(value) == rows

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ((torch.zeros(3), {"mask": torch.zeros(1, 4)}), r"3 rows at \[0\] and 1 at \[1\]"),
            ((torch.zeros(3), 3), r"the number 3 at \[1\]: the size of a batch changes"),
            ([torch.zeros(2), torch.zeros(2)], "a list of arrays"),
            ((torch.zeros(2), object()), r"an object of type object at \[1\]"),
        ],
    )
    def test_what_no_activation_may_hold(self, value: Any, message: str) -> None:
        with pytest.raises(BadBatch, match=message):
            rows_of(value)


class TestTake:
    def test_all_rows_are_the_value_itself(self) -> None:
        value = batch(4)
        assert take(value, [0, 1, 2, 3]) is value

    def test_neighbours_are_a_view(self) -> None:
        hidden = torch.arange(8.0).reshape(4, 2)
        taken = take((hidden, None), [1, 2])[0]
        assert taken.data_ptr() == hidden[1].data_ptr()
        assert torch.equal(taken, hidden[1:3])

    def test_others_are_a_copy_in_their_order(self) -> None:
        value = batch(6)
        taken = take(value, [5, 0, 1, 3])
        assert torch.equal(taken.hidden, value.hidden[[5, 0, 1, 3]])
        assert taken.mask.tolist() == [5, 0, 1, 3]
        assert taken.scale is value.scale

    def test_structures_keep_their_types(self) -> None:
        taken = take(Pair({"a": torch.arange(3)}, ["x", "y", "z"]), [2])
        assert isinstance(taken, Pair)
        assert (taken.left["a"].tolist(), taken.right) == ([2], ["z"])

    def test_arrays_without_axes_have_no_rows(self) -> None:
        scale = torch.tensor(2.0)
        rows, taken = take((torch.arange(3), scale), [2])
        assert rows.tolist() == [2]
        assert taken is scale

    def test_rows_that_share_their_memory_are_copied(self) -> None:
        expanded = torch.ones(2).expand(3, 2)
        take(expanded, [0]).mul_(5)
        assert take(expanded, [1]).tolist() == [[1, 1]]
        assert take(numpy.broadcast_to(numpy.ones(2), (3, 2)), [1]).flags.writeable

    def test_no_rows(self) -> None:
        assert take(torch.zeros(3, 2), []).shape == (0, 2)

    def test_without_rows_nothing_is_taken(self) -> None:
        value = (None, Shared(1))
        assert take(value, [0]) is value

    def test_what_cannot_be_taken_apart(self) -> None:
        sparse = torch.eye(3).to_sparse()
        assert take(sparse, [0, 1, 2]) is sparse
        with pytest.raises(NotJoinable):
            take(sparse, [1])


class TestJoin:
    def test_a_single_one_is_itself(self) -> None:
        value = batch(2)
        assert join([value]) is value

    def test_rows_in_their_order(self) -> None:
        one, other = batch(2), batch(3, first=6.0)
        joined = join([one, other])
        assert torch.equal(joined.hidden, torch.cat([one.hidden, other.hidden]))
        assert joined.mask.tolist() == [0, 1, 6, 7, 8]
        assert joined.scale is one.scale

    def test_a_graph_is_left_behind(self) -> None:
        assert not join([torch.ones(1, requires_grad=True)] * 2).requires_grad

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (torch.zeros(1, 3), torch.zeros(1, 4)),
            (torch.zeros(1), torch.zeros(1, dtype=torch.float64)),
            (torch.zeros(1), numpy.zeros(1)),
            (torch.zeros(1), torch.tensor(0.0)),
            ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}),
            ((torch.zeros(1), None), (torch.zeros(1), torch.zeros(1))),
            ((torch.zeros(1),), (torch.zeros(1), torch.zeros(1))),
            ((torch.zeros(1), "a"), (torch.zeros(1), "b")),
            ((torch.zeros(1), Shared(1)), (torch.zeros(1), Shared(2))),
            ((torch.zeros(1), Shared(1)), (torch.zeros(1), Shared(1.0))),
            ((torch.zeros(1), Shared(torch.ones(2))), (torch.zeros(1), Shared(torch.ones(3)))),
            (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        ],
    )
    def test_what_differs_stays_apart(self, one: Any, other: Any) -> None:
        with pytest.raises(NotJoinable):
            join([one, other])

    def test_shared_arrays_are_told_by_shape_not_by_content(self) -> None:
        shared = Shared({"mask": torch.zeros(2), "names": ["a"]})
        again = Shared({"mask": torch.zeros(2), "names": ["a"]})
        assert join([(torch.zeros(1), shared), (torch.zeros(1), again)])[1] is shared


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_taking_undoes_joining(sizes: list[int], random: Any) -> None:
    values = [torch.rand(size, 2) for size in sizes]
    joined = join([(value, Shared(3)) for value in values])
    start = 0
    for value in values:
        rows = list(range(start, start + len(value)))
        start += len(value)
        random.shuffle(rows)
        taken = take(joined, rows)[0]
        assert torch.equal(taken, joined[0][rows])
        assert torch.equal(take(joined, sorted(rows))[0], value)


@dataclass
class Scaled:
    """Computes more of its rows than its fields."""

    hidden: torch.Tensor

    def __post_init__(self) -> None:
        self.largest = self.hidden.amax(1)


def test_attributes_that_are_no_fields_are_joined_and_taken_too() -> None:
    states = [Scaled(torch.full((1, 2), each)) for each in (1.0, 2.0, 3.0)]
    joined = join(states)
    assert joined.largest.tolist() == [1, 2, 3]
    assert take(joined, [0, 2]).largest.tolist() == [1, 3]
    assert join([Shared(states[0]), Shared(states[0])]).value is states[0]


def test_attributes_that_are_no_fields_may_differ() -> None:
    states = [Scaled(torch.ones(1, 2)) for _ in range(2)]
    for state, factor in zip(states, (0.5, 2.0), strict=True):
        state.factor = factor  # type: ignore[attr-defined]
    with pytest.raises(NotJoinable, match="factor"):
        join(states)
    states[0].count = 1  # type: ignore[attr-defined]
    with pytest.raises(BadBatch, match="count"):
        rows_of(states[0])
