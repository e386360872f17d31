"""What an executor can do when: each row of the table, and everything that is in none."""

from __future__ import annotations

from itertools import product

import pytest

from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import BatchTable, Part
from trims_shim.batching.staged.mechanism.stage_executors import (
    EXECUTOR_TRANSITIONS,
    ExecutorEvent,
    ExecutorState,
    StageExecutor,
)

_WAYS = {
    ExecutorState.INACTIVE: (),
    ExecutorState.ACTIVE: (ExecutorEvent.PAIR_LEGAL,),
    ExecutorState.CHECKING: (ExecutorEvent.PAIR_LEGAL, ExecutorEvent.TAKE),
    ExecutorState.WORKING: (ExecutorEvent.PAIR_LEGAL, ExecutorEvent.TAKE, ExecutorEvent.START),
}


def part() -> Part:
    return BatchTable(stages=1).new(0, [Request(0, 0)], pair=0)


def executor_in(state: ExecutorState) -> StageExecutor:
    executor = StageExecutor()
    for event in _WAYS[state]:
        executor.handle(event)
    assert executor.state is state
    return executor


@pytest.mark.parametrize(("state", "event"), list(product(ExecutorState, ExecutorEvent)))
def test_only_what_is_in_the_table_can_happen(state: ExecutorState, event: ExecutorEvent) -> None:
    executor = executor_in(state)
    after = EXECUTOR_TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(RuntimeError, match=f"is {state.value} cannot '{event.value}'"):
            executor.handle(event)
        assert executor.state is state
    else:
        executor.handle(event)
        assert executor.state is after


def test_idle_is_who_has_nothing_and_nothing_waits_for() -> None:
    executor = StageExecutor()
    assert executor.is_idle
    executor.queue.append(part())
    assert not executor.is_idle
    executor.part = executor.queue.pop()
    assert not executor.is_idle


def test_a_part_that_was_taken_is_given_back() -> None:
    executor = executor_in(ExecutorState.CHECKING)
    executor.part = taken = part()
    executor.discard(taken)
    assert executor.part is None
    assert executor.state is ExecutorState.ACTIVE


def test_a_part_that_is_queued_is_taken_out() -> None:
    executor = executor_in(ExecutorState.CHECKING)
    executor.part, queued, other = part(), part(), part()
    executor.queue.extend([queued, other])
    executor.discard(queued)
    assert list(executor.queue) == [other]
    assert executor.state is ExecutorState.CHECKING


def test_a_part_that_is_elsewhere_is_not_missed() -> None:
    executor = executor_in(ExecutorState.ACTIVE)
    executor.discard(part())
    assert executor.is_idle


def test_a_running_part_cannot_be_discarded() -> None:
    executor = executor_in(ExecutorState.WORKING)
    executor.part = running = part()
    with pytest.raises(RuntimeError, match="is working cannot 'the part was withdrawn'"):
        executor.discard(running)
