"""Problems that tests of planners share."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.planner import Option, Problem
from trims_shim.planner.programme import Programme

__all__ = ["option", "problems", "solve_for_minutes"]


def option(
    family: str, variant: str, device: str, accuracy: float, qps: float, *, size: int = 4
) -> Option:
    """An option that answers ``qps`` requests a second in batches of ``size``."""
    profile = LatencyProfile([size / qps * 1e9] * size)
    return Option(family, variant, device, accuracy, profile)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """At most two kinds with few devices, two families and three variants of each."""
    devices = {kind: draw(st.integers(0, 3)) for kind in ("cpu", "gpu")}
    options = [
        option(family, f"{family}{number}", kind, draw(st.sampled_from((50, 60, 75, 90))), qps)
        for family in ("cats", "dogs")
        for number in range(draw(st.integers(1, 2)))
        for kind in devices
        if (qps := draw(st.sampled_from((0, 5, 10, 20, 40))))
    ]
    demand_qps = {
        family: draw(st.sampled_from((0, 1, 8, 20, 60)))
        for family in ("cats", "dogs")
        if any(each.family == family for each in options)
    }
    return Problem(devices, options, demand_qps)


def solve_for_minutes() -> None:
    """A programme that is not solved within the minutes that it is given."""
    randoms, hard = Random(1), Programme()
    goal = {hard.variable(upper=1, is_integer=True): randoms.uniform(1, 1000) for _ in range(400)}
    for _ in range(60):
        hard.row({each: randoms.uniform(1, 1000) for each in goal}, upper=80_000)
    hard.maximise(goal, gap=0, time_limit_s=600)
