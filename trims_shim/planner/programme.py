"""Mixed-integer linear programmes, written row by row and solved by HiGHS.

Knows nothing of models and devices. highspy is imported when something is solved.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from trims_shim.checks import check_amount
from trims_shim.errors import PlanningError

__all__ = ["OutOfTime", "Programme", "Solution"]


_LOOK_S = 0.1
"""Between looks at whether the program ends."""
_ROUNDING = 1e-5
"""Ten times HiGHS' tolerance, which is absolute."""


class OutOfTime(PlanningError):
    """No solution was found in time; there may be one."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best values that were found, and what is known of better ones."""

    values: list[float]
    """By the number of the variable; those of integers are whole."""
    goal: float
    bound: float
    """No solution has a higher goal."""
    taken_s: float
    """By the solver."""


class Programme:
    """Variables from 0 on, and rows: sums of variables with limits."""

    def __init__(self) -> None:
        self._upper: list[float] = []
        self._is_integer: list[bool] = []
        self._rows: list[tuple[Mapping[int, float], float, float]] = []

    def variable(self, *, upper: float = math.inf, is_integer: bool = False) -> int:
        """Add a variable between 0 and ``upper``; return its number."""
        self._upper.append(upper)
        self._is_integer.append(is_integer)
        return len(self._upper) - 1

    def row(
        self, terms: Mapping[int, float], *, lower: float = -math.inf, upper: float = math.inf
    ) -> None:
        """Require that the sum of variables times their factors lies between two limits."""
        self._rows.append((terms, lower, upper))

    def maximise(
        self,
        goal: Mapping[int, float],
        *,
        gap: float,
        time_limit_s: float,
        start: Solution | None = None,
    ) -> Solution | None:
        """Return a solution within the relative ``gap`` of the best one; None if there is none.

        ``start`` is a solution of this programme for another goal, before variables were added:
        one with its integers is found soon, and kept if there is no time for a better one. When the
        time is up, it is the best one found so far. Raises OutOfTime if none was;
        PlanningError without highspy, and if the solver gives up; ValueError for a gap below 0, and
        no time.
        """
        # HiGHS would take its own for what makes no sense.
        check_amount("gap", gap, may_be_infinite=True)
        check_amount("time_limit_s", time_limit_s, positive=True, may_be_infinite=True)
        highspy, make_solver = _highs()
        solver = make_solver()
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("time_limit", time_limit_s)
        solver.passModel(self._model(highspy, goal))
        if start is not None:
            known = [i for i, _ in enumerate(start.values) if self._is_integer[i]]
            solver.setSolution(len(known), known, [start.values[i] for i in known])
        _solve(solver)
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status == highspy.HighsModelStatus.kTimeLimit and not _is_solved(highspy, info):
            raise OutOfTime(f"no plan was found within {time_limit_s:g} s; give it more time")
        # HiGHS refuses its own result where rounding exceeds its tolerance by a hair.
        if not (_is_solved(highspy, info) or info.max_primal_infeasibility <= _ROUNDING):
            raise PlanningError(
                f"HiGHS found no plan ({solver.modelStatusToString(status)}): numbers of very "
                "different size make that likely"
            )
        values = [
            float(round(value)) if is_integer else value
            for value, is_integer in zip(
                solver.getSolution().col_value, self._is_integer, strict=True
            )
        ]
        found = info.objective_function_value
        bound = info.mip_dual_bound if any(self._is_integer) else found
        return Solution(values, found, bound, solver.getRunTime())

    def _model(self, highspy: Any, goal: Mapping[int, float]) -> Any:
        model = highspy.HighsLp()
        count = len(self._upper)
        kinds = highspy.HighsVarType
        model.num_col_, model.num_row_ = count, len(self._rows)
        model.sense_ = highspy.ObjSense.kMaximize
        model.col_cost_ = [goal.get(variable, 0.0) for variable in range(count)]
        model.col_lower_ = [0.0] * count
        model.col_upper_ = self._upper
        model.integrality_ = [
            kinds.kInteger if is_integer else kinds.kContinuous for is_integer in self._is_integer
        ]
        model.row_lower_ = [lower for _, lower, _ in self._rows]
        model.row_upper_ = [upper for *_, upper in self._rows]
        starts: list[int] = [0]
        variables: list[int] = []
        factors: list[float] = []
        for terms, _, _ in self._rows:
            variables += terms.keys()
            factors += terms.values()
            starts.append(len(variables))
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_, matrix.index_, matrix.value_ = starts, variables, factors
        return model


def _solve(solver: Any) -> None:
    """Ends with Ctrl-C, and with the program, which otherwise aborts while threads of HiGHS run."""
    solver.HandleUserInterrupt = True
    has_ended = threading.Event()

    def run() -> None:
        try:
            solver.run()
        finally:
            has_ended.set()

    solving = threading.Thread(target=run, name="trims-planner", daemon=False)
    try:
        solving.start()  # may be interrupted when the thread runs
        while not has_ended.wait(_LOOK_S) and threading.main_thread().is_alive():
            pass
    finally:
        solver.cancelSolve()
        if solving.ident is not None:  # else it has not begun, or never will
            has_ended.wait()


def _is_solved(highspy: Any, info: Any) -> bool:
    feasible = highspy.SolutionStatus.kSolutionStatusFeasible
    return bool(info.primal_solution_status == int(feasible))


@cache
def _highs() -> tuple[Any, Any]:
    """Return highspy, and a class of solvers that print nothing."""
    try:
        highspy: Any = importlib.import_module("highspy")
    except ImportError as error:
        raise PlanningError(
            "planning needs the solver HiGHS: pip install 'trims-shim[planner]'"
        ) from error

    class Quiet(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            self.silent()  # 1.16.0 prints a line here, before any option can be set
            super().enableCallbacks()

    # Its threads are not in a child, which would wait for them forever.
    os.register_at_fork(after_in_child=partial(highspy.Highs.resetGlobalScheduler, False))
    return highspy, Quiet
