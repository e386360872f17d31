"""Nothing goes wrong in any state of small pipelines, and the search would notice if it did."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest import mock

import pytest

from batching.staged import policy_search, state_search
from batching.staged.policy_search import PolicyLimits, search_policy
from batching.staged.state_search import EXECUTOR_TRANSITIONS, Executor, Limits, Search, search
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import Batch, BatchTable, Part, PartState
from trims_shim.batching.staged.mechanism.buffers import Buffer, BufferState
from trims_shim.batching.staged.mechanism.pipeline import Pipeline
from trims_shim.batching.staged.scheduler import StagedBatching

PIPELINED = Limits()
SERIAL = Limits(pairs=1, batches=3, devices=3)
SINGLE = Limits(devices=1)
LOOPING = Limits(has_loop=True)
LIMITS = {
    "two pairs": PIPELINED,
    "one pair": SERIAL,
    "three pairs": Limits(pairs=3, devices=3, cancels=0),
    "one stage": Limits(stages=1, requests=5, batches=4),
    "two stages": Limits(stages=2, requests=4, batches=3, largest=3, cancels=0),
    "four stages": Limits(stages=4, cancels=0),
    "one device": SINGLE,
    "one device, a loop": Limits(devices=1, has_loop=True),
    "a loop": LOOPING,
    "only a loop": Limits(stages=1, has_loop=True, keys=2, requests=4, batches=3),
    "a loop, several keys": Limits(stages=2, has_loop=True, keys=2, batches=3),
    "a loop after four stages": Limits(
        stages=5, pairs=1, has_loop=True, keys=2, requests=3, cancels=0, exits=False
    ),
}
found = cache(search)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_nothing_goes_wrong_in_any_state(limits: Limits) -> None:
    assert found(limits).states > 40


def test_everything_happens_that_can() -> None:
    assert found(PIPELINED).facts == {
        "end",
        "end of the last stage",
        "merge",
        "merge of the last stage",
        "neighbours at once",
        "new",
        "split",
        "start",
        "stretch",
        "withdrawn while queued",
        "withdrawn while running",
        "withdrawn while waiting",
    }


def test_every_transition_of_the_table_is_used() -> None:
    assert not found(PIPELINED).missed


def test_stages_behave_like_the_papers_executors() -> None:
    """Which changes of state are allowed is checked at each step; here: that all of them happen."""
    assert found(PIPELINED).changes >= EXECUTOR_TRANSITIONS


@pytest.mark.parametrize("before", [Executor.INACTIVE, Executor.ACTIVE])
def test_what_was_not_queued_does_not_run(before: Executor) -> None:
    with pytest.raises(state_search.Violation, match=f"{before.name} became WORKING"):
        state_search.checked([(before, Executor.WORKING)])


def test_with_one_buffer_pair_neighbouring_stages_take_turns() -> None:
    """That they never overlap is checked at each start; here: that with two pairs they do."""
    assert "neighbours at once" not in found(SERIAL).facts
    assert "neighbours at once" in found(PIPELINED).facts


def test_what_is_alone_on_one_device_is_told_of_later() -> None:
    assert "new, alone" in found(SINGLE).facts
    assert "new, alone" not in found(PIPELINED).facts


def test_a_loop_is_not_split() -> None:
    assert "split" not in found(LOOPING).facts


POLICY_LIMITS = {
    "two pairs": PolicyLimits(cancels=0),
    "one pair": PolicyLimits(pairs=1),
    "one device": PolicyLimits(devices=1, stages=2, keys=2),
    "three devices": PolicyLimits(devices=3, cancels=0),
    "lanes that may stay free": PolicyLimits(stages=2, beside=False),
    "a loop": PolicyLimits(stages=2, has_loop=True, keys=2, cancels=0),
    "only a loop": PolicyLimits(stages=1, has_loop=True, keys=2, requests=4),
}


@pytest.mark.parametrize("limits", POLICY_LIMITS.values(), ids=POLICY_LIMITS.keys())
def test_whatever_rules_decide_everyone_is_answered_and_no_device_idles(
    limits: PolicyLimits,
) -> None:
    assert search_policy(limits).states > 40


# --- what the search would notice -----------------------------------------------------------------

Mutation = Callable[[], "mock._patch[object]"]


def replaced(owner: type, name: str, by: object) -> Mutation:
    return lambda: mock.patch.object(owner, name, by)


def writes_anywhere(buffer: Buffer, batch: Batch) -> bool:
    return True


def reads_at_any_time(buffer: Buffer, batch: Batch) -> bool:
    return buffer.owner is batch


def waits_for_nobody(pipeline: Pipeline, part: Part) -> bool:
    return True


def always_newest(table: BatchTable, batch: Batch) -> bool:
    return True


def merges_with_nobody(pipeline: Pipeline, part: Part) -> None:
    return None


def lets_the_first_part_go(pipeline: Pipeline, batch: Batch, requests: Sequence[Request]) -> None:
    pipeline._enter(pipeline.table.stretch(batch, requests))


def stretches_what_is_split(
    pipeline: Pipeline, batch: Batch, original: Callable[..., bool] = Pipeline.may_stretch
) -> bool:
    is_split, batch.is_split = batch.is_split, False
    try:
        return original(pipeline, batch)
    finally:
        batch.is_split = is_split


def stretches_before_its_own_buffers(pipeline: Pipeline, batch: Batch) -> bool:
    newer = [each for each in pipeline.table if each.number > batch.number]
    return pipeline._may_enter(batch) and not any(each.key == batch.key for each in newer)


def takes_the_running_away(
    pipeline: Pipeline,
    part: Part,
    request: Request,
    original: Callable[..., None] = Pipeline._withdraw,
) -> None:
    if part.state is PartState.RUNNING:
        part.running = [each for each in part.running if each is not request]
    original(pipeline, part, request)


def keeps_the_withdrawn(part: Part, gone: Collection[Request]) -> None:
    part.pieces = [piece for piece in part.pieces if piece.requests]


def leaves_it_queued(
    pipeline: Pipeline,
    part: Part,
    request: Request,
    original: Callable[..., None] = Pipeline._withdraw,
) -> None:
    if part.state is PartState.QUEUED:
        part.state = PartState.WAITING
    original(pipeline, part, request)


def tells_nobody(pipeline: Pipeline, part: Part) -> None:
    pass


def clears_nothing(pipeline: Pipeline, pair: int) -> bool:
    return pipeline._buffers[0][pair].state is not BufferState.READING


MUTATIONS: dict[str, tuple[Mutation, Limits]] = {
    "buffers of others are written": (replaced(Buffer, "may_write", writes_anywhere), PIPELINED),
    "buffers are read while written": (replaced(Buffer, "may_read", reads_at_any_time), PIPELINED),
    "no one waits for those behind": (replaced(Pipeline, "_goes_on", waits_for_nobody), PIPELINED),
    "any batch is stretched": (replaced(BatchTable, "is_newest", always_newest), PIPELINED),
    "those that meet do not merge": (
        replaced(Pipeline, "_queued_before", merges_with_nobody),
        PIPELINED,
    ),
    "the first part runs away": (replaced(Pipeline, "stretch", lets_the_first_part_go), PIPELINED),
    "split batches are stretched": (
        replaced(Pipeline, "may_stretch", stretches_what_is_split),
        PIPELINED,
    ),
    "a loop is stretched behind one with its buffers": (
        replaced(Pipeline, "may_stretch", stretches_before_its_own_buffers),
        LIMITS["a loop after four stages"],
    ),
    "who runs is taken away": (replaced(Pipeline, "_withdraw", takes_the_running_away), PIPELINED),
    "who is withdrawn stays": (replaced(Part, "leave_out", keeps_the_withdrawn), PIPELINED),
    "who is withdrawn stays queued": (replaced(Pipeline, "_withdraw", leaves_it_queued), PIPELINED),
    "what was alone stays untold": (replaced(Pipeline, "_tell_of", tells_nobody), SINGLE),
    "batches are made too early": (replaced(Pipeline, "_is_clear", clears_nothing), SERIAL),
}


@pytest.mark.parametrize(("mutation", "limits"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_the_search_notices(mutation: Mutation, limits: Limits) -> None:
    with mutation(), pytest.raises((state_search.Violation, RuntimeError, IndexError)):
        search(limits)


@contextmanager
def one_device_less() -> Iterator[None]:
    """As if one were always busy."""

    def decide(policy: StagedBatching, now_ns: int) -> Sequence[object]:
        hidden, policy._free = policy._free[:1], policy._free[1:]
        try:
            return original(policy, now_ns)
        finally:
            policy._free += hidden

    original = StagedBatching._decide
    with mock.patch.object(StagedBatching, "_decide", decide):
        yield


def test_the_search_notices_idle_devices() -> None:
    with one_device_less(), pytest.raises(AssertionError, match="a device is free"):
        search_policy(PolicyLimits(stages=4, requests=2))


# --- the commands ---------------------------------------------------------------------------------


def test_the_commands_print_what_they_found(capsys: pytest.CaptureFixture[str]) -> None:
    state_search.main(["--stages", "2", "--requests", "2", "--cancels", "0", "--no-exits"])
    policy_search.main(["--stages", "2", "--requests", "2", "--keys", "1"])
    printed = capsys.readouterr().out
    assert "Limits(stages=2" in printed
    assert "PolicyLimits(stages=2" in printed
    assert printed.count(" states, ") == 2
    assert "not used: BufferState.AVAILABLE BufferEvent.CLEARED" in printed


def test_an_empty_search_finds_one_state() -> None:
    assert search(Limits(requests=0)) == Search(Limits(requests=0), states=1)
