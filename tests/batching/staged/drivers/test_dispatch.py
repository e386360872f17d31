"""Threads that run stages: nobody's answer is lost, doubled or somebody else's."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy
import pytest
from forks import passes_in_child

from tests.batching.staged.driving import Wild
from tests.batching.staged.rules import joining, splitting
from tests.batching.waiting import LONG_S, Gate, join, start, wait_until
from trims_shim.batching import Batcher
from trims_shim.batching.policies.window import Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged import EarlyExit, Loop, StagedModel, Stepped
from trims_shim.batching.staged.drivers.dispatch import StagedDispatch
from trims_shim.batching.staged.scheduler import StagedBatching
from trims_shim.batching.staged.staged_rules import StagedRule
from trims_shim.errors import BatcherClosed, BatchingError, RequestDropped

plain = functools.partial(Batcher, collate="list")


def adding(number: int) -> Callable[[list[int]], list[int]]:
    return lambda items: [item + number for item in items]


class Held:
    """A stage that waits; ``batches`` are those it was called with."""

    def __init__(self) -> None:
        self.gate = Gate()

    def __call__(self, items: list[Any]) -> list[Any]:
        self.gate(items)
        return items

    @property
    def batches(self) -> list[list[Any]]:
        return self.gate.batches


def listening(met: list[bool]) -> Callable[..., StagedRule]:
    """As ``joining``, and keeps what it is told of those who meet."""

    def rule(profile: LatencyProfile, *, max_batch_size: int) -> StagedRule:
        made = joining(profile, max_batch_size=max_batch_size)
        made.on_met = met.append  # type: ignore[method-assign]
        return made

    return rule


# --- the ways through the stages ------------------------------------------------------------------


def test_answers_come_from_the_last_stage() -> None:
    with plain(StagedModel([adding(1), adding(10), adding(100)])) as batcher:
        assert batcher(5) == 116
        assert list(batcher.map(range(50))) == [item + 111 for item in range(50)]


def test_each_stage_has_its_own_time() -> None:
    now_ns = 0

    def taking(duration_ns: int) -> Callable[[list[int]], list[int]]:
        def stage(items: list[int]) -> list[int]:
            nonlocal now_ns
            now_ns += duration_ns
            return items

        return stage

    model = StagedModel([taking(5_000_000), taking(7_000_000), taking(1_000_000)])
    with plain(model, clock_ns=lambda: now_ns) as batcher:
        for number in range(2):
            assert batcher(number) == number
        assert [each.busy_s for each in batcher.stage_stats().stages] == [0.01, 0.014, 0.002]
        stats = batcher.stats()
    assert (stats.busy_total_s, stats.busy_share, stats.wait_total_s) == (0.026, 1, 0)


def test_a_request_waits_until_its_first_stage_starts_and_no_longer() -> None:
    now_ns = 0
    held = Held()
    with plain(StagedModel([held, held]), clock_ns=lambda: now_ns, max_batch_size=1) as batcher:
        first = batcher.submit(0)
        held.gate.wait_entered()
        second = batcher.submit(1)
        now_ns = 3_000_000
        held.gate.open(4)
        assert (first.result(LONG_S), second.result(LONG_S)) == (0, 1)
        batcher.drain(LONG_S)
        stats = batcher.stats()
    assert (stats.wait.max_ms, stats.wait.count, stats.wait_total_s) == (3, 2, 0.003)


def test_a_lone_caller_runs_all_stages_and_starts_no_thread() -> None:
    idents: list[int] = []

    def stage(items: list[int]) -> list[int]:
        idents.append(threading.get_ident())
        return items

    before = set(threading.enumerate())  # those of other tests may end
    with plain(StagedModel([stage] * 4)) as batcher:
        batcher(1)
        assert idents == [threading.get_ident()] * 4
        assert set(threading.enumerate()) <= before


def test_what_is_alone_runs_on_until_something_happens() -> None:
    """Rules are asked at borders only where there is something to decide."""
    asked: list[tuple[int, int]] = []
    # The first waits until the turn in which a request has come is over: it is news till then.
    first_stage, third = Held(), Held()

    class Asked(StagedRule):
        def choose(self, now_ns: int) -> int:
            return self.room()

        def split(self, now_ns: int, part: Any) -> Any:
            asked.append((part.stage, part.size))
            return ()

    with plain(StagedModel([first_stage, adding(2), third, adding(1)]), policy=Asked) as batcher:
        first = batcher.submit(0)
        first_stage.gate.open()
        third.gate.open()
        assert first.result(LONG_S) == 3
        batcher.drain(LONG_S)
        assert asked == []
        assert [each.runs for each in batcher.stage_stats().stages] == [1] * 4
        second = batcher.submit(0)
        first_stage.gate.open(2)
        wait_until(lambda: len(third.batches) == 2)
        another = batcher.submit(5)
        third.gate.open(2)
        assert (second.result(LONG_S), another.result(LONG_S)) == (3, 8)
        batcher.drain(LONG_S)
        assert asked[0] == (3, 1)
        stats = batcher.stats()
    assert (stats.answered, stats.batch_sizes) == (3, {1: 3})


def test_a_batch_runs_on_without_those_who_are_finished_or_have_given_up() -> None:
    """Nobody waits who could join it, so its stages are one job, up to where one leaves."""
    jobs: list[int] = []
    first, second = Held(), Held()

    def leave(items: list[int]) -> EarlyExit:
        ended = [item for item in items if item > 9]
        return EarlyExit([item > 9 for item in items], ended, [i for i in items if i < 10])

    policy = functools.partial(Window, wait_ms=10_000)
    model = StagedModel([first, second, leave, adding(1), adding(1)])
    with plain(model, policy=policy, max_batch_size=4) as batcher:
        dispatch: Any = batcher._engine.threads()
        launch = dispatch._launch
        dispatch._launch = lambda job: (jobs.append(job.stage), launch(job))
        futures = [batcher.submit(item) for item in (1, 2, 10, 3)]
        first.gate.open()  # not before the turn in which the last one has come is over
        second.gate.open()
        assert [each.result(LONG_S) for each in futures] == [3, 4, 10, 5]
        batcher.drain(LONG_S)
        assert jobs == [0, 3]
        futures = [batcher.submit(item) for item in (1, 2, 3, 4)]
        first.gate.open()
        wait_until(lambda: len(second.batches) == 2)
        assert futures[1].cancel()
        second.gate.open()
        assert [each.result(LONG_S) for each in (futures[0], *futures[2:])] == [3, 5, 6]
        batcher.drain(LONG_S)
        assert jobs == [0, 3, 0, 2]
        sizes = [each.batch_sizes for each in batcher.stage_stats().stages]
    assert sizes == [{4: 2}, {4: 2}, {3: 1, 4: 1}, {3: 2}, {3: 2}]


def test_jobs_know_whether_others_ran_beside_them() -> None:
    jobs: list[tuple[int, bool]] = []
    first, second = Held(), Held()
    with plain(StagedModel([first, second]), policy="immediate", devices=2) as batcher:
        dispatch: Any = batcher._engine.threads()
        end = dispatch._end
        dispatch._end = lambda now_ns, job: (
            jobs.append((job.stage, job.is_beside)),
            end(now_ns, job),
        )
        one = batcher.submit(1)
        first.gate.open()
        wait_until(lambda: len(second.batches) == 1)
        other = batcher.submit(2)
        wait_until(lambda: len(first.batches) == 2)
        second.gate.open()
        assert one.result(LONG_S) == 1
        first.gate.open()
        second.gate.open()
        assert other.result(LONG_S) == 2
        batcher.drain(LONG_S)
    assert sorted(jobs) == [(0, False), (0, True), (1, False), (1, True)]


def test_newcomers_catch_up_with_a_batch_on_its_way() -> None:
    """The first waits for them at the border before the third stage; the two go on as one."""
    second, third = Held(), Held()
    met: list[bool] = []
    with plain(StagedModel([adding(1), second, third]), policy=listening(met)) as batcher:
        first = batcher.submit(0)
        second.gate.wait_entered()
        late = [batcher.submit(item) for item in (10, 20)]
        second.gate.open(2)
        third.gate.open()
        assert [each.result(LONG_S) for each in (first, *late)] == [1, 11, 21]
        batcher.drain(LONG_S)
        stats = batcher.stage_stats()
    assert second.batches == [[1], [11, 21]]
    assert third.batches == [[1, 11, 21]]
    assert met == [True]
    assert (stats.batches, stats.stretches, stats.splits) == (1, 1, 0)
    assert [each.runs for each in stats.stages] == [2, 2, 1]
    assert stats.stages[2].mean_batch_size == 3


class Whole(StagedRule):
    """Runs every batch whole."""

    def choose(self, now_ns: int) -> int:
        return self.room()

    def runs_whole(self, now_ns: int, size: int) -> bool:
        return True


def test_a_batch_that_runs_whole_is_one_call() -> None:
    held = Held()
    with plain(StagedModel([adding(1), held, adding(100)]), policy=Whole) as batcher:
        first = batcher.submit(0)
        held.gate.wait_entered()
        others = [batcher.submit(item) for item in (10, 20, 30)]
        assert others[1].cancel()
        stats = batcher.stats()
        assert (stats.running, stats.queued) == (1, 2)
        held.gate.open(2)
        assert [each.result(LONG_S) for each in (first, others[0], others[2])] == [101, 111, 131]
        batcher.drain(LONG_S)
        stages = batcher.stage_stats()
    assert held.batches == [[1], [11, 31]]
    assert (stages.batches, stages.whole, stages.stretches) == (2, 2, 0)
    assert [each.runs for each in stages.stages] == [0, 0, 0]


def test_what_fails_in_a_whole_batch_fails_alone() -> None:
    def picky(items: list[int]) -> list[int]:
        if 13 in items:
            raise ValueError("13")
        return items

    with plain(StagedModel([adding(0), picky]), policy=Whole) as batcher:
        futures = [batcher.submit(item) for item in (1, 13, 2)]
        with pytest.raises(ValueError, match="13"):
            futures[1].result(LONG_S)
        assert [futures[0].result(LONG_S), futures[2].result(LONG_S)] == [1, 2]


class FirstInStages(Whole):
    """The first batch goes through the stages, all others run whole."""

    begun = 0

    def runs_whole(self, now_ns: int, size: int) -> bool:
        self.begun += 1
        return self.begun > 1


@pytest.mark.parametrize("way", ["failed", "compared", "answered early"])
def test_batches_run_whole_unless_stages_have_answered_some_early(way: str) -> None:
    """Those that the whole function has answered would have waited for nobody."""
    calls: list[list[int]] = []

    def first(items: list[int]) -> Any:
        calls.append(items)
        if len(calls) == 1 and way == "failed":
            raise ValueError("once")
        if len(calls) == 1 and way == "answered early":
            return EarlyExit([True], items, None)
        return items

    model = StagedModel([first, adding(1)])
    whole: Any = (adding(1), model) if way == "compared" else (model, None)
    with plain(whole[0], model=whole[1], policy=FirstInStages) as batcher:
        assert batcher(1) == (1 if way == "answered early" else 2)
        assert batcher(5) == 6
        assert batcher.stage_stats().whole == (way != "answered early")


def test_closing_waits_for_a_whole_batch_or_gives_up_those_behind_it() -> None:
    held = Held()
    batcher = plain(StagedModel([held, adding(1)]), policy=Whole)
    first = batcher.submit(0)
    held.gate.wait_entered()
    second = batcher.submit(1)
    closer = start(lambda: batcher.close(cancel=True))
    with pytest.raises(BatcherClosed):
        second.result(LONG_S)
    held.gate.open()
    assert first.result(LONG_S) == 1
    join(closer)


def test_a_batch_of_which_one_gives_up_before_it_starts_is_a_new_one() -> None:
    class Alone(StagedRule):
        def choose(self, now_ns: int) -> int:
            return self.room()

        def may_run_beside(self, now_ns: int, part: Any) -> bool:
            return False

    first, second = Held(), Held()
    with plain(StagedModel([first, second]), policy=Alone, devices=2) as batcher:
        before = batcher.submit(0)
        first.gate.wait_entered()
        one, other = batcher.submit(1), batcher.submit(2)
        first.gate.open()
        second.gate.wait_entered()
        assert one.cancel()
        first.gate.open()
        second.gate.open(2)
        assert [before.result(LONG_S), other.result(LONG_S)] == [0, 2]
        batcher.drain(LONG_S)
        stats = batcher.stage_stats()
    assert first.batches == [[0], [2]]
    assert (stats.batches, stats.stretches) == (2, 0)


def test_a_split_batch_goes_on_in_parts() -> None:
    second = Held()
    policy = splitting(lambda size: (1, size - 1) if size > 1 else ())
    first = Held()
    with plain(StagedModel([first, second]), policy=policy, max_batch_size=4) as batcher:
        before = batcher.submit(9)
        first.gate.wait_entered()
        futures = [batcher.submit(item) for item in range(4)]
        first.gate.open(2)
        second.gate.open(1)
        assert before.result(LONG_S) == 9
        second.gate.open(1)
        wait_until(lambda: sum(each.done() for each in futures) == 1)
        second.gate.open(1)
        assert [each.result(LONG_S) for each in futures] == [0, 1, 2, 3]
        batcher.drain(LONG_S)
        assert batcher.stage_stats().splits == 1
    assert second.batches == [[9], [0], [1, 2, 3]]


def test_splits_are_never_fewer_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus would take them for those of another process, and add them up."""
    seen: list[int] = []
    on_event = StagedBatching.on_event

    def noting(policy: StagedBatching, now_ns: int, event: Any) -> Any:
        seen.append(batcher.stage_stats().splits)
        return on_event(policy, now_ns, event)

    def second(items: list[int]) -> list[int]:
        seen.append(batcher.stage_stats().splits)
        return items

    policy = splitting(lambda size: (1,) * size if size > 1 else ())
    first = Held()
    with plain(StagedModel([first, second]), policy=policy, max_batch_size=4) as batcher:
        before = batcher.submit(9)
        first.gate.wait_entered()
        futures = [batcher.submit(item) for item in range(4)]
        monkeypatch.setattr(StagedBatching, "on_event", noting)
        first.gate.open(2)
        assert [each.result(LONG_S) for each in (before, *futures)] == [9, 0, 1, 2, 3]
        batcher.drain(LONG_S)
    assert (seen[0], seen[-1]) == (0, 1)
    assert seen == sorted(seen)


def test_finished_rows_are_answered_before_the_others() -> None:
    def first(items: list[int]) -> EarlyExit:
        even = [item for item in items if item % 2 == 0]
        return EarlyExit(
            [item % 2 == 0 for item in items], even, [item for item in items if item % 2]
        )

    second = Held()
    gate = Held()
    model = StagedModel([gate, first, second])
    with plain(model, policy="immediate", max_batch_size=4) as batcher:
        start_one = batcher.submit(0)
        gate.gate.wait_entered()
        futures = [batcher.submit(item) for item in range(1, 5)]
        gate.gate.open(2)
        assert start_one.result(LONG_S) == 0
        assert [futures[1].result(LONG_S), futures[3].result(LONG_S)] == [2, 4]
        assert not futures[0].done()
        second.gate.open()
        assert [futures[0].result(LONG_S), futures[2].result(LONG_S)] == [1, 3]
    assert second.batches == [[1, 3]]


def test_batches_of_which_nobody_reaches_the_last_stage_are_counted() -> None:
    def first(items: list[int]) -> EarlyExit:
        if 13 in items:
            raise ValueError("not with this stage")
        return EarlyExit([True] * len(items), items, [])

    policy = functools.partial(Window, wait_ms=1e6)
    with plain(StagedModel([first, adding(0)]), policy=policy, max_batch_size=2) as batcher:
        assert list(batcher.map([1, 2])) == [1, 2]
        futures = [batcher.submit(13) for _ in range(2)]
        assert all(isinstance(each.exception(LONG_S), ValueError) for each in futures)
        batcher.drain(LONG_S)
        assert batcher.stats().batch_sizes == {2: 2}


def test_pieces_that_cannot_be_joined_run_one_after_the_other() -> None:
    """Rows of other lengths: they were padded apart, and are answered all the same."""
    numpy = pytest.importorskip("numpy")
    shapes: list[tuple[int, ...]] = []
    gate = Gate()

    def second(batch: Any) -> Any:
        gate([])
        return batch

    def third(batch: Any) -> Any:
        shapes.append(batch.shape)
        return batch.sum(axis=1)

    from trims_shim.batching import Pad

    met: list[bool] = []
    model = StagedModel([lambda batch: batch.values, second, third])
    with Batcher(model, policy=listening(met), collate=Pad(unpad=False)) as batcher:
        first = batcher.submit(numpy.ones(3))
        gate.wait_entered()
        late = [batcher.submit(numpy.ones(length)) for length in (5, 5)]
        gate.open(2)
        assert [float(each.result(LONG_S)) for each in (first, *late)] == [3, 5, 5]
        batcher.drain(LONG_S)
        stats = batcher.stage_stats()
        assert stats.failures == 0
        assert [each.runs for each in stats.stages] == [2, 2, 2]
        assert dict(stats.stages[2].batch_sizes) == {1: 1, 2: 1}
        assert batcher.stats().batch_sizes == {1: 1, 2: 1}
    assert shapes == [(1, 3), (2, 5)]
    assert met == [False]


@pytest.mark.parametrize("leaves_early", [False, True])
def test_parts_of_a_padded_batch_are_cut_by_what_the_whole_was_padded_to(
    leaves_early: bool,
) -> None:
    numpy = pytest.importorskip("numpy")
    gate = Gate()

    def first(batch: Any) -> Any:
        gate([])
        return batch.values

    def second(values: Any) -> Any:
        is_short = values[:, -1] == 0
        if not leaves_early or not is_short.any():
            return values
        return EarlyExit(is_short, values[is_short], values[~is_short])

    from trims_shim.batching import Pad

    policy = splitting(lambda size: () if leaves_early else (1,) * size)
    model = StagedModel([first, second, lambda values: values])
    with Batcher(model, policy=policy, max_batch_size=4, collate=Pad(unpad=True)) as batcher:
        before = batcher.submit(numpy.ones(3))
        gate.wait_entered()
        others = [batcher.submit(numpy.ones(length)) for length in (2, 5)]
        gate.open(2)
        assert [each.result(LONG_S).tolist() for each in (before, *others)] == [
            [1] * 3,
            [1] * 2,
            [1] * 5,
        ]
        batcher.drain(LONG_S)
        assert batcher.stage_stats().failures == 0


def test_stages_of_two_batches_run_at_the_same_time() -> None:
    """One waits for the other; so it is with stages that release the interpreter's lock."""
    meeting = threading.Barrier(2)

    def meet(who: int, items: list[int]) -> list[int]:
        if items == [who]:
            meeting.wait(LONG_S / 4)
        return items

    # The first batch in the second stage, and the second batch in the first stage.
    model = StagedModel([functools.partial(meet, 2), functools.partial(meet, 1)])
    with plain(model, policy="immediate", max_batch_size=1, devices=2) as batcher:
        futures = [batcher.submit(item) for item in (1, 2)]
        assert [each.result(LONG_S) for each in futures] == [1, 2]
        batcher.drain(LONG_S)
        assert batcher.stage_stats().failures == 0


def test_every_stage_sees_the_given_batch_sizes_only() -> None:
    seen: list[int] = []

    def stage(items: list[int]) -> Any:
        seen.append(len(items))
        return items

    def leave(items: list[int]) -> EarlyExit:
        seen.append(len(items))
        flags = [item % 3 == 0 for item in items]
        ended = [item for item in items if item % 3 == 0]
        return EarlyExit(flags, ended, [item for item in items if item % 3])

    model = StagedModel([stage, leave, stage])
    with plain(model, batch_sizes=(4, 8), max_batch_size=8) as batcher:
        assert list(batcher.map(range(60))) == list(range(60))
    assert set(seen) <= {4, 8}


# --- loops ----------------------------------------------------------------------------------------


def counting(held: Callable[[list[Any]], object] = lambda state: None) -> StagedModel:
    """Of ``n`` the answer is n, n - 1, ..., 1, one in each step."""

    def step(state: list[int]) -> Stepped:
        held(state)
        return Stepped([n - 1 for n in state], list(state), [n == 1 for n in state])

    return StagedModel([lambda items: items, Loop(step)])


def test_rows_leave_a_loop_when_they_are_finished() -> None:
    with plain(counting()) as batcher:
        assert batcher(3) == [3, 2, 1]
        assert list(batcher.map([1, 4, 2])) == [[1], [4, 3, 2, 1], [2, 1]]
        assert list(batcher.stream(3)) == [3, 2, 1]


def test_newcomers_join_between_two_steps() -> None:
    gate = Gate()
    with plain(counting(gate), policy=joining) as batcher:
        long = batcher.submit(4)
        gate.wait_entered()
        short = batcher.submit(1)
        gate.open(2)
        assert short.result(LONG_S) == [1]
        assert not long.done()
        gate.open(10)
        assert long.result(LONG_S) == [4, 3, 2, 1]
    assert [4] in gate.batches
    assert any(sorted(batch) == [1, 3] for batch in gate.batches)


def test_pieces_come_as_they_are_made() -> None:
    gate = Gate()
    with plain(counting(gate)) as batcher:
        pieces = batcher.stream(3)
        gate.open()
        assert next(pieces) == 3
        gate.open(2)
        assert list(pieces) == [2, 1]


def test_a_listener_that_goes_leaves_the_loop() -> None:
    gate = Gate()
    with plain(counting(gate)) as batcher:
        pieces = batcher.stream(100)
        gate.open()
        assert next(pieces) == 100
        pieces.close()  # type: ignore[attr-defined]
        gate.open()
        wait_until(lambda: batcher.stats().cancelled == 1)
        gate.open()
        assert batcher(1) == [1]
    assert len(gate.batches) <= 3


def test_the_result_of_a_loop_is_the_users_to_make() -> None:
    def result(pieces: list[int]) -> int:
        if len(pieces) == 2:
            raise ValueError("two")
        return sum(pieces)

    step = counting().stages[-1]
    assert isinstance(step, Loop)
    with plain(StagedModel([Loop(step.step, result=result)])) as batcher:
        assert batcher(3) == 6
        with pytest.raises(ValueError, match="two"):
            batcher(2)
        batcher.drain(LONG_S)
        assert batcher.stats().failed == 1


def test_whatever_the_result_of_a_loop_raises_fails_its_row_alone() -> None:
    def result(pieces: list[int]) -> list[int]:
        if len(pieces) == 2:
            raise SystemExit("two")
        return pieces

    step = counting().stages[-1]
    assert isinstance(step, Loop)
    with plain(StagedModel([Loop(step.step, result=result)])) as batcher:
        futures = [batcher.submit(number) for number in (1, 2, 3)]
        assert futures[0].result(LONG_S) == [1]
        with pytest.raises(SystemExit, match="two"):
            futures[1].result(LONG_S)
        assert futures[2].result(LONG_S) == [3, 2, 1]
        batcher.drain(LONG_S)


def test_pieces_that_are_streamed_stay_when_a_step_writes_into_the_state() -> None:
    def step(state: Any) -> Stepped:
        state += 1
        return Stepped(state, state, state[:, 0] >= 3)

    with plain(StagedModel([numpy.copy, Loop(step)]), collate="stack") as batcher:
        assert [piece.tolist() for piece in batcher.stream(numpy.zeros(1))] == [[1], [2], [3]]
        assert [piece.tolist() for piece in batcher(numpy.zeros(1))] == [[1], [2], [3]]


def test_pieces_by_event_loops() -> None:
    async def ask() -> list[int]:
        return [piece async for piece in batcher.astream(3)]

    with plain(counting()) as batcher:
        assert asyncio.run(ask()) == [3, 2, 1]


# --- failures -------------------------------------------------------------------------------------


def refusing(bad: int) -> Callable[[list[int]], list[int]]:
    def stage(items: list[int]) -> list[int]:
        if bad in items:
            raise ValueError(f"{bad} is bad")
        return items

    return stage


def test_a_bad_item_fails_alone() -> None:
    model = StagedModel([adding(0), refusing(13), adding(1)])
    with plain(model, policy=functools.partial(Window, wait_ms=20)) as batcher:
        futures = [batcher.submit(item) for item in range(10, 20)]
        errors = [each.exception(LONG_S) for each in futures]
        assert [isinstance(each, ValueError) for each in errors] == [n == 3 for n in range(10)]
        assert [f.result() for f in futures if not f.exception()] == [
            item + 1 for item in range(10, 20) if item != 13
        ]
        batcher.drain(LONG_S)
        assert batcher.stage_stats().failures == 1
        assert batcher.stats().failed == 1


def test_without_isolation_all_of_them_fail() -> None:
    model = StagedModel([adding(0), refusing(13)])
    policy = functools.partial(Window, wait_ms=1e6)
    with plain(model, policy=policy, isolate_failures=False, max_batch_size=3) as batcher:
        futures = [batcher.submit(item) for item in (12, 13, 14)]
        assert all(isinstance(each.exception(LONG_S), ValueError) for each in futures)


def test_what_cannot_cross_a_border_is_answered_by_the_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = StagedModel([lambda items: len(items), lambda count: [count] * count])
    with plain(model, max_batch_size=1) as batcher:
        assert [batcher(item) for item in range(3)] == [1, 1, 1]
        batcher.drain(LONG_S)
        assert batcher.stage_stats().failures == 3
    (record,) = caplog.records
    assert "stage 0" in record.getMessage()
    assert "the number 1" in record.getMessage()


def test_a_loop_that_fails_is_run_again_for_those_who_have_heard_nothing() -> None:
    failed: list[bool] = []

    def step(state: list[int]) -> Stepped:
        if len(state) == 2 and not failed:
            failed.append(True)
            raise ValueError("once")
        time.sleep(0.001)
        return Stepped([n - 1 for n in state], list(state), [n == 1 for n in state])

    model = StagedModel([lambda items: items, Loop(step)])
    with plain(model, policy=functools.partial(Window, wait_ms=1e6), max_batch_size=2) as batcher:
        future = batcher.submit(3)
        stream = batcher.stream(2)
        assert future.result(LONG_S) == [3, 2, 1]
        assert list(stream) == [2, 1]
    assert failed


def test_a_stream_that_has_begun_fails_with_the_step() -> None:
    def step(state: list[int]) -> Stepped:
        if state == [2]:
            raise ValueError("two")
        return Stepped([n - 1 for n in state], list(state), [n == 1 for n in state])

    with plain(StagedModel([lambda items: items, Loop(step)])) as batcher:
        stream = batcher.stream(3)
        assert next(stream) == 3
        with pytest.raises(ValueError, match="two"):
            next(stream)
        with pytest.raises(ValueError, match="two"):
            batcher(3)


def test_a_row_that_a_step_fails_for_fails_alone() -> None:
    def step(state: list[int]) -> Stepped:
        pieces = [ValueError("two") if n == 2 else n for n in state]
        return Stepped([n - 1 for n in state], pieces, [n in (1, 11) for n in state])

    model = StagedModel([lambda items: items, Loop(step)])
    with plain(model, policy=functools.partial(Window, wait_ms=1e6), max_batch_size=3) as batcher:
        future, failing, stream = batcher.submit(12), batcher.stream(3), batcher.stream(14)
        assert list(stream) == [14, 13, 12, 11]
        assert next(failing) == 3
        with pytest.raises(ValueError, match="two"):
            next(failing)
        assert future.result(LONG_S) == [12, 11]
        batcher.drain(LONG_S)
        assert (batcher.stats().answered, batcher.stats().failed) == (2, 1)
        assert batcher.stage_stats().failures == 0


# --- cancellation, deadlines ----------------------------------------------------------------------


def test_a_future_can_be_cancelled_until_its_last_stage() -> None:
    first, second, third = Held(), Held(), Held()
    with plain(StagedModel([first, second, third]), policy="immediate") as batcher:
        kept, given_up = None, None
        blocking = batcher.submit(0)
        first.gate.wait_entered()
        kept, given_up = batcher.submit(1), batcher.submit(2)
        first.gate.open(2)
        second.gate.open(1)
        third.gate.open(1)
        assert blocking.result(LONG_S) == 0
        wait_until(lambda: len(second.batches) == 2)
        assert given_up.cancel()
        second.gate.open()
        wait_until(lambda: len(third.batches) == 2)
        assert not kept.cancel()
        third.gate.open()
        assert kept.result(LONG_S) == 1
        assert given_up.cancelled()
        batcher.drain(LONG_S)
        stats = batcher.stats()
    assert third.batches == [[0], [1]]
    assert (stats.answered, stats.cancelled) == (2, 1)


def test_who_is_cancelled_at_the_last_moment_does_not_run_the_last_stage() -> None:
    """A stage runs on to the next one while nobody has told of an event."""
    last = Held()
    futures: list[Any] = []
    is_there = threading.Event()

    def first(items: list[str]) -> list[str]:
        if items == ["given up"]:
            is_there.wait(LONG_S)
            Future.cancel(futures[0])  # as BatchFuture.cancel, before it tells of it
        return items

    with plain(StagedModel([first, last]), max_batch_size=1) as batcher:
        futures.append(batcher.submit("given up"))
        is_there.set()
        last.gate.open()
        assert batcher("kept") == "kept"
        assert futures[0].cancelled()
        assert last.batches == [["kept"]]


def test_a_cancelled_task_leaves_between_two_stages() -> None:
    first, second = Held(), Held()

    async def ask() -> None:
        tasks = [asyncio.ensure_future(batcher.aio(item)) for item in (1, 2)]
        while not first.batches:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        first.gate.open(2)
        second.gate.open(2)
        assert await tasks[1] == 2
        assert tasks[0].cancelled()

    with plain(StagedModel([first, second]), policy="immediate") as batcher:
        asyncio.run(asyncio.wait_for(ask(), LONG_S))
        wait_until(lambda: batcher.stats().running == 0)
        assert batcher.stats().cancelled == 1
    assert [item for batch in second.batches for item in batch] == [2]


def test_who_goes_in_the_last_stage_has_been_answered() -> None:
    """As in any batcher: the work is done, and nothing of it can be saved."""
    second = Held()

    async def ask() -> None:
        task = asyncio.ensure_future(batcher.aio(1))
        while not second.batches:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        second.gate.open()

    with plain(StagedModel([adding(1), second])) as batcher:
        asyncio.run(asyncio.wait_for(ask(), LONG_S))
        batcher.drain(LONG_S)
        stats = batcher.stats()
    assert (stats.answered, stats.cancelled) == (1, 0)


def test_what_cannot_be_in_time_is_dropped_or_served_late() -> None:
    for when_late in ("drop", "serve"):
        held = Held()
        model = StagedModel([held, adding(1)])
        with plain(model, policy="early_drop", when_late=when_late) as batcher:  # type: ignore[arg-type]
            first = batcher.submit(0)
            held.gate.wait_entered()
            late = batcher.submit(1, deadline_ms=0.01)
            held.gate.open(3)
            assert first.result(LONG_S) == 1
            if when_late == "drop":
                assert isinstance(late.exception(LONG_S), RequestDropped)
            else:
                assert late.result(LONG_S) == 2


# --- interrupts, broken policies ------------------------------------------------------------------


def interrupt_caller() -> None:
    """Does not return in the main thread, where its handler raises."""
    if threading.current_thread() is threading.main_thread():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(LONG_S)


def answer_beside(batcher: Any, error: type[BaseException]) -> Any:
    """Of 7, in one batch with 5, whose caller gets ``error``."""
    others: list[Any] = []

    def submit() -> None:
        wait_until(lambda: batcher.stats().queued == 1)
        others.append(batcher.submit(7))

    other = start(submit)
    with pytest.raises(error):
        batcher(5)
    join(other)
    batcher.drain(LONG_S)
    return others[0].result(0)


@pytest.mark.usefixtures("python_handler")
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_caller_loses_nobody_elses_answer(interrupted: int) -> None:
    """A stage that has written into its activations does not get them a second time."""
    calls: list[int] = []

    def stage(number: int, items: list[list[int]]) -> list[list[int]]:
        calls.append(number)
        for item in items:
            item.append(number)
        if calls.count(number) == 1 and number == interrupted:
            interrupt_caller()
        return items

    def begin(items: list[int]) -> list[list[int]]:
        return stage(0, [[item] for item in items])

    policy = functools.partial(Window, wait_ms=1e6)
    model = StagedModel([begin, functools.partial(stage, 1), functools.partial(stage, 2)])
    with plain(model, policy=policy, max_batch_size=2) as batcher:
        assert answer_beside(batcher, KeyboardInterrupt) == [7, 0, 1, 2]
        wait_until(lambda: batcher.stats().cancelled == 1)


@pytest.mark.parametrize("limited", [0, 1])
def test_a_time_limit_ends_its_caller_and_is_no_failure_of_a_stage(
    time_limit: type[Exception], limited: int
) -> None:
    calls: list[int] = []

    def stage(number: int, items: list[int]) -> list[int]:
        calls.append(number)
        if calls.count(number) == 1 and number == limited:
            interrupt_caller()
        return items

    model = StagedModel([functools.partial(stage, number) for number in range(3)])
    policy = functools.partial(Window, wait_ms=1e6)
    with plain(model, policy=policy, max_batch_size=2) as batcher:
        assert answer_beside(batcher, time_limit) == 7
        assert batcher.stage_stats().failures == 0


@pytest.mark.parametrize("broken", [0, 1])
def test_a_stage_that_ends_its_thread_fails_its_batch_and_no_later_one(broken: int) -> None:
    """``sys.exit`` in a stage: the whole is not asked instead, and its place is free again."""

    def stage(number: int, items: list[int]) -> list[int]:
        if number == broken and items == [1]:
            raise SystemExit
        return items

    model = StagedModel([functools.partial(stage, number) for number in range(2)])
    with plain(model, policy="immediate", max_batch_size=1) as batcher:
        assert isinstance(batcher.submit(1).exception(LONG_S), SystemExit)
        assert batcher.submit(2).result(LONG_S) == 2
        batcher.drain(LONG_S)
        stats = batcher.stats()
        assert batcher.stage_stats().failures == 0
    assert (stats.submitted, stats.failed, stats.answered, stats.running) == (2, 1, 1, 0)


def break_down(batcher: Batcher, error: BaseException) -> None:
    """As if the policy had failed, between two events."""
    batcher._engine.threads().post(lambda now_ns: _raise(error))


def _raise(error: BaseException) -> None:
    raise error


def test_a_policy_that_fails_fails_what_waits_and_what_runs_is_run_again() -> None:
    first, second = Held(), Held()
    with plain(StagedModel([first, second]), policy="immediate", max_batch_size=1) as batcher:
        running = batcher.submit(1)
        first.gate.wait_entered()
        waiting = batcher.submit(2)
        break_down(batcher, RuntimeError("broken"))
        assert isinstance(waiting.exception(LONG_S), RuntimeError)
        first.gate.open(2)  # its second stage belongs to a pipeline that is gone
        second.gate.open(1)
        assert running.result(LONG_S) == 1
        batcher.drain(LONG_S)
        stats = batcher.stats()
    assert (stats.answered, stats.failed, stats.submitted) == (1, 1, 2)
    assert first.batches == [[1], [1]]


def test_what_is_queued_again_is_not_lost_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = [KeyboardInterrupt]
    wait_again = StagedDispatch._wait_again

    def interrupted(dispatch: StagedDispatch, request: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        wait_again(dispatch, request)

    held = Held()
    with plain(StagedModel([held, adding(1)]), policy="immediate") as batcher:
        future = batcher.submit(1)
        held.gate.wait_entered()
        break_down(batcher, RuntimeError("broken"))
        monkeypatch.setattr(StagedDispatch, "_wait_again", interrupted)
        held.gate.open(2)
        assert future.result(LONG_S) == 2
    assert not interrupts


def test_a_policy_that_is_interrupted_gets_all_back_that_is_on_its_way() -> None:
    """Also what is between two stages, and in no job."""

    class Interrupted(StagedRule):
        def choose(self, now_ns: int) -> int:
            return 1

        def split(self, now_ns: int, part: Any) -> Any:
            nonlocal is_due
            if is_due:
                is_due = False
                raise KeyboardInterrupt
            return ()

    is_due = True
    # Two devices: on one, a request that is alone is not asked about between its stages.
    with plain(StagedModel([adding(1), adding(1)]), policy=Interrupted, devices=2) as batcher:
        with pytest.raises(KeyboardInterrupt):
            batcher(1)  # runs the first stage in this thread
        wait_until(lambda: batcher.stats().running == 0)
        is_due = True
        future = batcher.submit(2)  # in a worker, which nobody would miss
        assert future.result(LONG_S) == 4
        assert batcher(3) == 5
        assert not is_due


def test_a_stream_that_has_begun_is_not_begun_again() -> None:
    gate = Gate()
    with plain(counting(gate)) as batcher:
        stream = batcher.stream(3)
        gate.open()
        assert next(stream) == 3
        gate.wait_entered()
        gate.wait_entered()
        break_down(batcher, RuntimeError("broken"))
        gate.open(9)
        # What the interrupted step has made is handed out first.
        assert next(stream) == 2
        with pytest.raises(BatchingError, match="interrupted after the first pieces"):
            next(stream)
        assert batcher(2) == [2, 1]


# --- the ends of lives ----------------------------------------------------------------------------


def test_closing_answers_what_is_on_its_way() -> None:
    first, second = Held(), Held()
    batcher = plain(StagedModel([first, second]), max_batch_size=1, policy="immediate")
    running = batcher.submit(1)
    first.gate.wait_entered()
    waiting = batcher.submit(2)
    closing = start(functools.partial(batcher.close, cancel=True))
    assert isinstance(waiting.exception(LONG_S), BatcherClosed)
    first.gate.open()
    second.gate.open()
    assert running.result(LONG_S) == 1
    join(closing)
    with pytest.raises(BatcherClosed):
        batcher(3)


def test_draining_waits_for_what_is_between_two_stages() -> None:
    first, second = Held(), Held()
    with plain(StagedModel([first, second])) as batcher:
        future = batcher.submit(1)
        first.gate.open()
        second.gate.wait_entered()
        with pytest.raises(TimeoutError):
            batcher.drain(timeout_s=0.02)
        second.gate.open()
        batcher.drain(timeout_s=LONG_S)
        assert future.done()


def test_a_child_works_anew_and_does_not_wait_for_the_parents_stages() -> None:
    first, second = Held(), Held()
    with plain(StagedModel([first, second])) as batcher:
        future = batcher.submit(1)
        first.gate.open()
        second.gate.wait_entered()

        def check() -> bool:
            first.gate.open(5)
            second.gate.open(5)
            is_orphan = isinstance(future.exception(LONG_S), BatchingError)
            return is_orphan and batcher(2) == 2

        assert passes_in_child(check)
        second.gate.open()
        assert future.result(LONG_S) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_child_that_goes_on_in_a_stage_is_told(place: int) -> None:
    """Found: a child forked by a signal handler in the caller's stage waited for the next one."""
    children: list[int] = []

    def forking(items: list[int]) -> list[int]:
        if not children:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(round(LONG_S))
        return items

    stages = [adding(1), adding(2)]
    stages.insert(place, forking)
    batcher = plain(StagedModel(stages))
    try:
        answer = batcher(1)
    except BatchingError as error:
        if not children[0]:
            os._exit("parent" not in str(error) or batcher(1) != 4)
        raise
    finally:
        if not children[0]:
            os._exit(1)
    assert answer == 4
    assert os.waitpid(children[0], 0)[1] == 0
    batcher.close()


def test_a_batcher_that_nobody_has_any_more_is_gone() -> None:
    batcher = plain(StagedModel([adding(1), adding(2)]))
    assert batcher.submit(1).result(LONG_S) == 4
    dispatch = weakref.ref(batcher._engine.threads())
    del batcher
    gc.collect()
    wait_until(lambda: dispatch() is None)


class Tracked:
    """An activation, and an answer, whose end can be seen."""

    alive: ClassVar[weakref.WeakSet[Tracked]] = weakref.WeakSet()

    def __init__(self) -> None:
        Tracked.alive.add(self)


@pytest.mark.parametrize("stages", [1, 3])
def test_nothing_is_kept_of_an_answer(stages: int) -> None:
    def stage(items: list[Any]) -> list[Tracked]:
        return [Tracked() for _ in items]

    with plain(StagedModel([stage] * stages)) as batcher:
        answer = batcher(1)
        assert isinstance(answer, Tracked)
        assert list(Tracked.alive) == [answer]
        del answer
        assert not list(Tracked.alive)
        batcher.submit(1).result(LONG_S)
        wait_until(lambda: not list(Tracked.alive))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_nothing_is_kept_of_an_error(failing: int) -> None:
    """Without the collector: its traceback has frames of ours."""

    class Bad(Exception):
        pass

    def fails(items: list[Any]) -> list[Any]:
        raise Bad

    def error_of(ask: Callable[[Any], Any]) -> weakref.ref[Bad]:
        try:
            ask(1)
        except Bad as error:
            return weakref.ref(error)
        raise AssertionError("it did not fail")

    stages: list[Any] = [adding(1)] * 3
    stages[failing] = fails
    gc.collect()
    gc.disable()
    try:
        with plain(StagedModel(stages)) as batcher:
            called = error_of(batcher)
            submitted = error_of(lambda item: batcher.submit(item).result(LONG_S))
            wait_until(lambda: called() is None and submitted() is None)
    finally:
        gc.enable()


# --- all of it at once ----------------------------------------------------------------------------


def wild_model(stages: int, *, has_loop: bool) -> StagedModel:
    """``n`` becomes the numbers of its stages; every fifth leaves early, some fail."""

    def stage(number: int, items: list[Any]) -> Any:
        if any(item[0] % 29 == 28 and item[0] % stages == number for item in items):
            raise ValueError("bad")
        passed = [(item[0], [*item[1], number]) for item in items]
        if number or stages == 1:
            return passed
        flags = [item[0] % 5 == 0 for item in passed]
        ended = [item[1] for item in passed if item[0] % 5 == 0]
        return EarlyExit(flags, ended, [item for item in passed if item[0] % 5])

    def step(items: list[Any]) -> Stepped:
        after = [(item[0], [*item[1], "step"]) for item in items]
        ends = [item[1].count("step") > item[0] % 4 for item in after]
        return Stepped(after, [len(item[1]) for item in after], ends)

    last: list[Any] = [Loop(step)] if has_loop else [lambda items: [item[1] for item in items]]
    return StagedModel([*(functools.partial(stage, n) for n in range(stages)), *last])


def wild_answer(item: int, stages: int, *, has_loop: bool) -> Any:
    is_early = stages > 1 and item % 5 == 0
    if item % 29 == 28 and not (is_early and item % stages):
        return ValueError
    if is_early:
        return [0]
    if has_loop:
        return [stages + 1 + index for index in range(item % 4 + 1)]
    return list(range(stages))


@pytest.mark.parametrize("policy", [Wild, "dvabatch", "auto", "immediate"])
@pytest.mark.parametrize(
    ("stages", "has_loop", "devices", "pairs"),
    [(1, False, 1, 1), (3, False, 1, 2), (4, False, 3, 2), (2, True, 2, 2), (2, True, 1, 1)],
)
def test_everyone_gets_their_own_answer_once(
    policy: Any, stages: int, has_loop: bool, devices: int, pairs: int
) -> None:
    batcher = plain(
        wild_model(stages, has_loop=has_loop),
        policy=policy,
        devices=devices,
        buffer_pairs=pairs,
        max_batch_size=6,
    )
    wrong: list[Any] = []

    def ask(seed: int) -> None:
        randoms = random.Random(seed)
        for _ in range(20):
            item = randoms.randrange(200)
            expected = wild_answer(item, stages, has_loop=has_loop)
            future = batcher.submit((item, []))
            if randoms.random() < 0.2:
                time.sleep(randoms.random() * 1e-3)
                if future.cancel():
                    continue
            try:
                found = future.result(LONG_S)
            except ValueError:
                found = ValueError
            if found != expected:
                wrong.append((item, found, expected))

    join(*[start(functools.partial(ask, seed)) for seed in range(5)])
    batcher.close(timeout_s=LONG_S)
    stats = batcher.stats()
    assert wrong == []
    assert stats.submitted == stats.answered + stats.failed + stats.cancelled == 100
    dispatch: Any = batcher._engine.threads()
    wait_until(lambda: not dispatch._jobs)
    assert not dispatch._active
    assert len(dispatch._room) == 1024
    assert not list(dispatch._policy.pipeline.table)
