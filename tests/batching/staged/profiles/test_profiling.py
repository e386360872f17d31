"""Measuring by a clock that the stages themselves advance: every figure is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trims_shim.batching.staged.activations import EarlyExit, Stepped
from trims_shim.batching.staged.model import Loop, StagedModel
from trims_shim.batching.staged.profiles.profiling import (
    MAX_TRIES,
    StagePasses,
    StagesTry,
    best_try,
    measure_stages,
    try_stages,
)
from trims_shim.errors import StagingError

MS = 1_000_000


class Clock:
    """Advanced by the stages; a stage takes ``beta + alpha * rows`` milliseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.runs: list[int] = []

    def __call__(self) -> int:
        return self.now_ns

    def stage(self, alpha_ms: float, beta_ms: float) -> Callable[[list[int]], list[int]]:
        def run(rows: list[int]) -> list[int]:
            self.now_ns += round((alpha_ms * len(rows) + beta_ms) * MS)
            self.runs.append(len(rows))
            return rows

        return run


def make_batch(size: int) -> Sequence[Any]:
    return (list(range(size)),)


# --- stages ---------------------------------------------------------------------------------------


def test_each_stage_has_its_durations_by_size() -> None:
    clock = Clock()
    stages = [clock.stage(1, 10), clock.stage(2, 0)]
    found = measure_stages(stages, make_batch, [4, 1], clock=clock, repeats=3)
    assert found == [{1: 11 * MS, 4: 14 * MS}, {1: 2 * MS, 4: 8 * MS}]
    assert clock.runs.count(4) == 2 * (1 + 3)


def test_making_the_batch_is_not_measured() -> None:
    clock = Clock()

    def slow(size: int) -> Sequence[Any]:
        clock.now_ns += 100 * MS
        return make_batch(size)

    found = measure_stages([clock.stage(1, 0)], slow, [2], clock=clock, repeats=2)
    assert found == [{2: 2 * MS}]


def test_the_first_run_of_a_size_does_not_count() -> None:
    clock, seen = Clock(), set[int]()

    def compiling(rows: list[int]) -> list[int]:
        clock.now_ns += (1 if len(rows) in seen else 500) * MS
        seen.add(len(rows))
        return rows

    found = measure_stages([compiling], make_batch, [1, 2], clock=clock, repeats=1)
    assert found == [{1: MS, 2: MS}]


def test_of_several_runs_the_median_counts() -> None:
    clock = Clock()
    durations = iter([9, 3, 50, 4])

    def unsteady(rows: list[int]) -> list[int]:
        clock.now_ns += next(durations) * MS
        return rows

    assert measure_stages([unsteady], make_batch, [1], clock=clock, repeats=3) == [{1: 4 * MS}]


def test_sizes_for_which_there_is_no_time_are_missing() -> None:
    clock = Clock()
    stages = [clock.stage(10, 0), clock.stage(0, 1)]
    found = measure_stages(stages, make_batch, [1, 2, 64], clock=clock, limit_ns=25 * MS)
    assert found == [{1: 10 * MS, 2: 20 * MS}, {1: MS, 2: MS}]
    assert 64 not in clock.runs


def test_several_arguments_go_to_the_first_stage() -> None:
    clock = Clock()
    stages = [lambda left, right: left + right, clock.stage(1, 0)]
    found = measure_stages(stages, lambda size: ([0] * size, [1] * size), [2], clock=clock)
    assert found[1] == {4: 4 * MS} or found[1] == {2: 4 * MS}


def test_unsteadiness_is_what_else_runs_here() -> None:
    clock = Clock()
    durations = iter([9, 10, 12, 15, 9, 10, 10, 10])

    def unsteady(rows: list[int]) -> list[int]:
        clock.now_ns += next(durations) * MS
        return rows

    passes = StagePasses([unsteady], make_batch, clock=clock)
    assert passes.unsteadiness == 0
    for size in (1, 1, 1, 1, 2, 2, 2, 2):
        passes.run(size)
    assert passes.median_ns() == [{1: 12 * MS, 2: 10 * MS}]
    assert passes.least_ns() == [{1: 10 * MS, 2: 10 * MS}]
    assert passes.unsteadiness == pytest.approx((0.2 + 0) / 2)


def test_of_a_loop_one_step_is_measured() -> None:
    clock = Clock()
    body = clock.stage(1, 1)

    def step(state: list[int]) -> Stepped:
        return Stepped(body(state), pieces=state, finished=[False] * len(state))

    found = measure_stages([clock.stage(0, 5), Loop(step)], make_batch, [3], clock=clock)
    assert found == [{3: 5 * MS}, {3: 4 * MS}]


def test_stages_behind_an_early_exit_are_measured_with_what_is_left() -> None:
    clock = Clock()

    def leave(rows: list[int]) -> EarlyExit:
        return EarlyExit([row % 4 == 0 for row in rows], rows[::4], [r for r in rows if r % 4])

    found = measure_stages([leave, clock.stage(1, 0)], make_batch, [4, 8], clock=clock)
    assert found[1] == {3: 3 * MS, 6: 6 * MS}
    assert set(found[0]) == {4, 8}


def test_a_stage_that_none_has_reached_has_no_durations() -> None:
    clock = Clock()

    def leave(rows: list[int]) -> EarlyExit:
        return EarlyExit([True] * len(rows), rows, [])

    found = measure_stages([leave, clock.stage(1, 0)], make_batch, [4], clock=clock)
    assert found[1] == {}
    assert clock.runs == []


class Lane:
    """Work is done only when it is waited for, as on a GPU."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_entered = False

    def enter(self) -> Any:
        return self

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        self.is_entered = False

    def stage_done(self) -> None:
        raise AssertionError("a stage is measured to its end")

    def finish(self, results: Any = None) -> None:
        assert self.is_entered
        self.clock.now_ns += 7 * MS


def test_a_stage_ends_when_its_lane_is_done() -> None:
    clock = Clock()
    found = measure_stages(
        [clock.stage(0, 1)], make_batch, [1], clock=clock, lane=Lane(clock), repeats=1
    )
    assert found == [{1: 8 * MS}]


# --- the number of stages -------------------------------------------------------------------------


def slicer(clock: Clock, whole_ms: float, extra_ms: float, most: int = 99) -> Any:
    """A model that is cut evenly, and each of whose stages costs something more."""

    def slice_into(count: int) -> StagedModel:
        count = min(count, most)
        share = whole_ms / count + (extra_ms if count > 1 else 0)
        return StagedModel([clock.stage(0, share) for _ in range(count)])

    return slice_into


def tried(whole_ms: float, extra_ms: float, **options: Any) -> list[StagesTry]:
    clock = Clock()
    slice_into = slicer(clock, whole_ms, extra_ms, **options)
    return try_stages(slice_into, make_batch, [1, 8], clock=clock, limit_ns=10**15)


def test_stages_that_cost_nothing_are_many_and_tries_are_few() -> None:
    tries = tried(whole_ms=10_000, extra_ms=0)
    assert [len(each.model) for each in tries] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert len(tries) == MAX_TRIES
    assert len(best_try(tries).model) == 16


@pytest.mark.parametrize(
    ("extra_ms", "expected"),
    # Half a stage is saved and n times the rest is paid: least near sqrt(100 / (2 * (extra + .1))).
    [(0.4, 12), (2.4, 4), (5, 3), (40, 1)],
)
def test_stages_that_cost_something_are_as_many_as_pay_off(extra_ms: float, expected: int) -> None:
    tries = tried(whole_ms=100, extra_ms=extra_ms)
    assert len(best_try(tries).model) == expected


def test_a_model_that_takes_no_time_is_not_cut() -> None:
    """What the batcher does between two stages takes longer than what it saves."""
    tries = tried(whole_ms=0.05, extra_ms=0)
    assert len(best_try(tries).model) == 1
    assert len(tries) == 3


def test_no_more_tries_where_nothing_is_left_to_cut() -> None:
    tries = tried(whole_ms=1000, extra_ms=0, most=3)
    assert [len(each.model) for each in tries] == [1, 2, 3]


def test_a_model_that_cannot_be_cut_so_often_is_cut_less_often() -> None:
    clock = Clock()
    evenly = slicer(clock, whole_ms=1000, extra_ms=0)

    def slice_into(count: int) -> StagedModel:
        if count > most:
            raise StagingError("no place for a cut")
        return evenly(count)

    most = 2
    tries = try_stages(slice_into, make_batch, [1], clock=clock, limit_ns=10**15)
    assert len(best_try(tries).model) == 2
    most = 0
    with pytest.raises(StagingError, match="no place"):
        try_stages(slice_into, make_batch, [1], clock=clock, limit_ns=10**15)


def test_a_slow_moment_decides_nothing() -> None:
    clock = Clock()
    evenly = slicer(clock, whole_ms=1000, extra_ms=0)

    def slice_into(count: int) -> StagedModel:
        model = evenly(count)
        moments = iter([0, 0, 5000])

        def interrupted(rows: list[int]) -> list[int]:
            clock.now_ns += next(moments, 0) * MS
            return model.stages[0](rows)

        return StagedModel([interrupted, *model.stages[1:]]) if count == 4 else model

    tries = try_stages(slice_into, make_batch, [1], clock=clock, limit_ns=10**15, repeats=2)
    assert [each.total_ns[1] for each in tries[:4]] == pytest.approx([1e9] * 4)


def test_an_uneven_cut_is_judged_by_its_longest_stage() -> None:
    clock = Clock()

    def uneven(count: int) -> StagedModel:
        rest = [clock.stage(0, 0.001) for _ in range(count - 1)]
        return StagedModel([clock.stage(0, 100), *rest])

    tries = try_stages(uneven, make_batch, [1], clock=clock, limit_ns=10**15)
    assert len(best_try(tries).model) == 1


def test_tries_end_with_the_time() -> None:
    clock, told = Clock(), list[StagesTry]()
    tries = try_stages(
        slicer(clock, whole_ms=1000, extra_ms=0),
        make_batch,
        [1, 2, 64],
        clock=clock,
        limit_ns=10_000 * MS,
        on_try=told.append,
    )
    assert tries == told
    assert 1 < len(tries) < MAX_TRIES
    assert clock.now_ns < 15_000 * MS


def test_all_tries_are_compared_by_the_sizes_of_the_first() -> None:
    clock, runs = Clock(), iter([1000])
    evenly = slicer(clock, whole_ms=10, extra_ms=0)

    def compiling(count: int) -> StagedModel:
        def first(rows: list[int]) -> list[int]:
            clock.now_ns += next(runs, 0) * MS
            return rows

        first_stage, *rest = evenly(count)
        return StagedModel([lambda rows: first_stage(first(rows)), *rest])

    tries = try_stages(compiling, make_batch, [1, 8], clock=clock, limit_ns=4000 * MS)
    assert len(tries) > 3
    assert {tuple(each.total_ns) for each in tries} == {(1,)}
