"""Exit points: they are passed, or left by an exception that models do not swallow."""

from __future__ import annotations

import threading

import pytest
from harness import PATIENCE_S

from trims_shim.batching.drivers.lanes import CpuLane
from trims_shim.batching.flex.exit_points import ExitPoints, GivenUp, exit_point


class Counting(CpuLane):
    def __init__(self) -> None:
        self.done = 0

    def stage_done(self) -> None:
        self.done += 1


def points(*, is_unwanted: bool = False, lane: CpuLane | None = None) -> ExitPoints:
    ticks = iter(range(100, 200))
    return ExitPoints(lambda: is_unwanted, lane or CpuLane(), lambda: next(ticks))


def test_outside_of_a_batch_it_does_nothing() -> None:
    exit_point()


def test_a_wanted_batch_goes_on_and_the_time_is_noted() -> None:
    lane = Counting()
    with points(lane=lane) as passed:
        exit_point()
        exit_point()
    assert passed.marks_ns == [100, 101]
    assert lane.done == 2
    exit_point()
    assert len(passed.marks_ns) == 2


def test_an_unwanted_batch_is_left_through_except_exception() -> None:
    def model() -> None:
        try:
            exit_point()
        except Exception:
            pytest.fail("a model has swallowed it")

    unwanted = points(is_unwanted=True)
    with pytest.raises(GivenUp), unwanted:
        model()
    assert unwanted.marks_ns == [100]


def test_a_batch_inside_a_batch_has_its_own_and_gives_them_back() -> None:
    with points() as outer:
        with points() as inner:
            exit_point()
        exit_point()
    assert (len(inner.marks_ns), len(outer.marks_ns)) == (1, 1)


def test_they_are_of_one_thread() -> None:
    with points() as here:
        other = threading.Thread(target=exit_point)
        other.start()
        other.join(PATIENCE_S)
    assert here.marks_ns == []
