"""What a staged model is made of, and that its stages one after the other are the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trims_shim.batching.collating.splitting import split
from trims_shim.batching.staged.activations import EarlyExit, Stepped
from trims_shim.batching.staged.model import Loop, StagedModel
from trims_shim.errors import BadBatch


async def asynchronous(value: Any) -> Any:
    return value


class TestMaking:
    def test_of_an_nn_sequential(self) -> None:
        body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        model = StagedModel(body, name="body")
        assert list(model) == list(body)
        assert (len(model), repr(model)) == (2, "<StagedModel body 2 stages>")

    def test_of_no_stages(self) -> None:
        with pytest.raises(ValueError, match="at least one stage"):
            StagedModel([])

    def test_of_a_module_that_has_to_be_cut(self) -> None:
        with pytest.raises(TypeError, match=r"stages is a Linear; .*slice_model"):
            StagedModel(nn.Linear(2, 2))  # type: ignore[arg-type]

    @pytest.mark.parametrize("stage", [3, asynchronous])
    def test_of_what_is_no_stage(self, stage: Any) -> None:
        with pytest.raises(TypeError):
            StagedModel([abs, stage])
        with pytest.raises(TypeError):
            Loop(stage)

    def test_a_loop_is_the_last(self) -> None:
        loop = Loop(abs)
        assert StagedModel([abs, loop]).loop is loop
        assert StagedModel([abs]).loop is None
        with pytest.raises(TypeError, match="last stage"):
            StagedModel([loop, abs])


class TestTheWhole:
    def test_several_arguments(self) -> None:
        model = StagedModel([torch.add, torch.neg])
        assert model(torch.ones(2), torch.ones(2)).tolist() == [-2, -2]

    def test_rows_that_leave_early_are_in_their_places(self) -> None:
        model = StagedModel([torch.neg, leave_above(-3), torch.neg, leave_above(6), torch.square])
        assert model(torch.tensor([4.0, 1.0, 7.0, 2.0, 5.0])) == [16, -1, 7, -2, 25]

    def test_all_leave(self) -> None:
        model = StagedModel([torch.neg, leave_above(-9), fail])
        assert model(torch.tensor([4.0, 1.0])) == [-4, -1]

    def test_the_last_stage_may_be_one_that_rows_leave_early(self) -> None:
        assert StagedModel([leave_above(-9)])(torch.tensor([4.0, 1.0])) == [4, 1]
        assert StagedModel([torch.neg, leave_above(-9)])(torch.tensor([4.0, 1.0])) == [-4, -1]
        for bound in (1, 4):
            with pytest.raises(BadBatch, match=r"last stage .* rows that go on"):
                StagedModel([torch.abs, leave_above(bound)])(torch.tensor([4.0, 1.0]))

    def test_a_loop_ends_for_each_row_by_itself(self) -> None:
        def count_down(state: torch.Tensor) -> Stepped:
            return Stepped(state - 1, state * 10, state <= 1)

        loop = Loop(count_down, result=lambda pieces: [int(piece) for piece in pieces])
        model = StagedModel([torch.neg, loop])
        assert model(torch.tensor([-1, -3, -2])) == [[10], [30, 20, 10], [20, 10]]

    @pytest.mark.parametrize(
        "pieces", [lambda state: state[:, 0], lambda state: {"a": (state[:, 0],)}]
    )
    def test_pieces_stay_when_a_step_writes_into_the_state(self, pieces: Any) -> None:
        loop = Loop(upwards(pieces))
        found = loop.run(torch.zeros(2, 1))
        expected = [split(pieces(torch.full((1, 1), number)), 1)[0] for number in (1.0, 2.0, 3.0)]
        assert found == [expected, expected]

    def test_a_row_of_a_loop_that_fails_has_its_exception(self) -> None:
        error = ValueError("two")

        def step(state: list[int]) -> Stepped:
            pieces = [error if n == 2 else n for n in state]
            return Stepped([n - 1 for n in state], pieces, [n in (1, 11) for n in state])

        model = StagedModel([lambda items: items, Loop(step)])
        assert model([1, 4, 12]) == [[1], error, [12, 11]]

    def test_a_loop_with_a_take_of_its_own(self) -> None:
        def step(state: dict[str, list[int]]) -> Stepped:
            left = [each - 1 for each in state["left"]]
            return Stepped({"left": left}, list(left), [each == 0 for each in left])

        def take(state: dict[str, list[int]], rows: Any) -> dict[str, list[int]]:
            return {"left": [state["left"][row] for row in rows]}

        assert Loop(step, take=take).run({"left": [1, 2]}) == [[0], [1, 0]]


def upwards(pieces: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Stepped]:
    """A step that counts to 3 in the memory of its state."""

    def step(state: torch.Tensor) -> Stepped:
        state += 1
        return Stepped(state, pieces(state), state[:, 0] >= 3)

    return step


def leave_above(bound: float) -> Any:
    """A stage that is finished with those of more than ``bound``."""

    def stage(value: torch.Tensor) -> EarlyExit:
        finished = value > bound
        return EarlyExit(finished, value[finished], value[~finished])

    return stage


def fail(value: Any) -> Any:
    raise AssertionError("nobody was left")
