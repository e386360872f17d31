"""What the solver ends with is a solution, or an error that says why there is none."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from trims_shim.errors import PlanningError
from trims_shim.planner import programme
from trims_shim.planner.programme import OutOfTime, Programme


@pytest.mark.parametrize("is_found", [True, False])
def test_what_was_found_when_the_time_is_up_is_a_solution(
    monkeypatch: pytest.MonkeyPatch, *, is_found: bool
) -> None:
    solve = programme._solve

    def late(solver: Any) -> None:
        if is_found:
            solve(solver)
        highspy, _ = programme._highs()
        solver.getModelStatus = lambda: highspy.HighsModelStatus.kTimeLimit

    monkeypatch.setattr(programme, "_solve", late)
    made = Programme()
    goal = {made.variable(upper=1, is_integer=True): 1.0}
    if is_found:
        found = made.maximise(goal, gap=0, time_limit_s=60)
        assert found is not None
        assert found.values == [1.0]
        return
    with pytest.raises(OutOfTime, match="no plan was found within 60 s"):
        made.maximise(goal, gap=0, time_limit_s=60)


def test_what_the_solver_gives_up_has_no_solution() -> None:
    made = Programme()
    with pytest.raises(PlanningError, match=r"HiGHS found no plan \(.*nbounded"):
        made.maximise({made.variable(is_integer=True): 1.0}, gap=0, time_limit_s=60)


@pytest.mark.parametrize("gap", [0.0, math.inf])
def test_what_is_no_integer_is_not_rounded_and_is_the_best(gap: float) -> None:
    made = Programme()
    half = made.variable()
    made.row({half: 2.0}, upper=1)
    found = made.maximise({half: 1.0}, gap=gap, time_limit_s=60)
    assert found is not None
    assert (found.values, found.goal, found.bound) == ([0.5], 0.5, 0.5)


def test_where_no_thread_can_start_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = Programme()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        made.maximise({made.variable(upper=1): 1.0}, gap=0, time_limit_s=60)
