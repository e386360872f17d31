"""Which variants run where, so that answers are as accurate as the demand allows (Proteus).

The paper's programme (ASPLOS'24, section 4) in a linear form over kinds of devices. Of variant m on
kind t, let n be the number of devices, P the throughput of one, A the accuracy, and f the requests
a second that are planned for it::

    maximise  sum A f                               (effective accuracy)
    where     sum over a family's variants f = s    (its demand, times a headroom)
              f <= P n
              sum over the variants on a kind n <= its devices,  n whole

The paper has a binary variable for each device and products of variables; as devices of a kind are
interchangeable, both forms have the same optimum, and this one is solved in a fraction of a second.

Three things the paper leaves open. If the devices cannot take all of the demand, every family gets
at least the same, largest share of its own, then as many requests are served as possible; the
artefact lowers the demand in steps. Devices that the optimum does not need give room for bursts:
the least spare room of all families becomes as large as possible, by variants that are accurate
enough to keep the optimum. And requests are spread so that no group is busier than needed.

A plan that replaces another one also counts the devices that change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from trims_shim.checks import check_amount
from trims_shim.errors import PlanningError
from trims_shim.planner.placement import Group, Placement
from trims_shim.planner.problem import Option, Problem
from trims_shim.planner.programme import Programme, Solution

__all__ = ["plan_proteus"]

_HAIR = 1e-6
"""Relative; results of one programme are limits of the next, and solvers round."""
_MOST_SPARE = 10.0
"""In times the demand; more is as good."""
_OTHERS_COUNT = 0.1
"""The mean spare room of all families, against the least."""
_CHANGE_COSTS = 0.02
"""Of one device, against the least spare room."""
_IDLE_QPS = 1e-6
"""Less than this is no flow, but rounding."""
_LEAST_QPS = 1e-4
"""Less demand counts as this, a request in some hours: the solver may take it for none."""


def plan_proteus(
    problem: Problem,
    *,
    headroom: float = 1.5,
    before: Placement | None = None,
    gap: float = 1e-3,
    time_limit_s: float = 10.0,
) -> Placement:
    """Place variants on devices. Pure, but for the solver's reading of the clock.

    Each family's devices can answer ``headroom`` times its demand if there are enough of them. With
    ``before``, the placement that is running, devices change their variants only where that gains
    something. ``gap`` is how much of the accuracy, relatively, may be lost to find a plan sooner or
    to change less; each of up to five programmes takes at most ``time_limit_s``. Raises
    PlanningError if a family has no option, if no plan is found in time, and without highspy;
    ValueError for a headroom or time limit that is not positive, and a gap below 0.
    """
    check_amount("headroom", headroom, positive=True)
    for family in problem.families:
        if not any(problem.of_family(family)):
            raise PlanningError(
                f"no device runs a variant of {family!r} within its objective: give it a longer "
                "one, or add a faster variant or kind of device"
            )
    if not problem.families:
        return Placement((), problem.demand_qps, headroom)
    wanted = problem.times(headroom)
    least = {family: max(_LEAST_QPS, wanted.demand_qps[family]) for family in problem.families}
    model = _Model(replace(wanted, demand_qps=least), gap=gap, time_limit_s=time_limit_s)
    share = model.serve()
    best = model.solved(model.accuracy)
    model.keep(model.accuracy, best.goal * (1 if before is None else 1 - gap))
    flows, counts = model.spread(best, before)
    groups = [
        Group(option, round(count), flow)
        for option, count, flow in zip(problem.options, counts, flows, strict=True)
        if round(count)
    ]
    placement = Placement(tuple(_of_demand(groups, problem)), problem.demand_qps, share * headroom)
    # Less than the best goal where that was given for fewer changes.
    reached = sum(flow * each for flow, each in zip(flows, model.accuracy.values(), strict=True))
    worse = best.bound / reached if reached > 0 else 1.0
    return replace(placement, accuracy_bound=placement.accuracy * max(1.0, worse))


def _of_demand(groups: list[Group], problem: Problem) -> Iterator[Group]:
    """Scale what was planned for the headroom down to the demand, where that is exceeded.

    Where less is planned, groups take more as far as they have room: beside a far larger demand,
    all of a family's may be next to nothing for the solver.
    """
    planned = dict.fromkeys(problem.demand_qps, 0.0)
    room = dict.fromkeys(problem.demand_qps, 0.0)
    for group in groups:
        planned[group.option.family] += group.planned_qps
        room[group.option.family] += _room_qps(group)
    for group in groups:
        family, qps = group.option.family, group.planned_qps
        missing = problem.demand_qps[family] - planned[family]
        if missing <= 0:
            qps *= problem.demand_qps[family] / planned[family]
        elif room[family] > 0:
            qps += _room_qps(group) * min(1.0, missing / room[family])
        yield replace(group, planned_qps=qps)


def _room_qps(group: Group) -> float:
    return group.devices * group.option.peak_qps - group.planned_qps


class _Model:
    """The programme, and which of its variables mean what."""

    def __init__(self, problem: Problem, *, gap: float, time_limit_s: float) -> None:
        self._problem = problem
        self._gap = gap
        self._time_limit_s = time_limit_s
        self._programme = Programme()
        self._found: Solution | None = None
        """The last one; what is required later holds for it."""
        options = problem.options
        self._flows = [self._programme.variable() for _ in options]
        self._counts = [
            self._programme.variable(
                upper=problem.devices[each.device] if problem.demand_qps.get(each.family) else 0,
                is_integer=True,
            )
            for each in options
        ]
        for option, flow, count in zip(options, self._flows, self._counts, strict=True):
            self._programme.row({flow: 1, count: -option.peak_qps}, upper=0)
        for kind, devices in problem.devices.items():
            counts = {
                count: 1.0
                for option, count in zip(options, self._counts, strict=True)
                if option.device == kind
            }
            if counts:
                self._programme.row(counts, upper=devices)

    @property
    def accuracy(self) -> dict[int, float]:
        """The sum of A f, with A in shares of the highest."""
        options = self._problem.options
        highest = max(option.accuracy for option in options) or 1.0
        return {
            flow: option.accuracy / highest
            for flow, option in zip(self._flows, options, strict=True)
        }

    def serve(self) -> float:
        """Require that demands are served; return the least share of a family's that is."""
        programme, problem = self._programme, self._problem
        demand_qps = problem.demand_qps
        most = min(1.0, *(self._most_qps(each) / demand_qps[each] for each in problem.families))
        share = programme.variable(upper=1.0)  # of `most`: the solver takes small goals for none
        for family in problem.families:
            terms = self._flows_of(family)
            programme.row(terms, upper=demand_qps[family])
            programme.row({**terms, share: -most * demand_qps[family]}, lower=0)
            # Otherwise a share below the solver's tolerance is met by no device.
            counts = {self._counts[i]: 1.0 for i, _ in problem.of_family(family)}
            programme.row({**counts, share: -1.0}, lower=0)
        whole: dict[int, float] = {share: 1.0}
        reached = self.solved(whole, gap=_HAIR).goal
        self.keep(whole, reached)
        largest = most * reached
        if largest < 1 - _HAIR:
            served = dict.fromkeys(self._flows, 1.0)
            self.keep(served, self.solved(served).goal)
        return min(1.0, largest)

    def solved(self, goal: Mapping[int, float], *, gap: float | None = None) -> Solution:
        """Maximise ``goal``. Raises PlanningError if no solution was found in time."""
        found = self._programme.maximise(
            goal,
            gap=self._gap if gap is None else gap,
            time_limit_s=self._time_limit_s,
            start=self._found,
        )
        if found is None:  # not even what was found for the last goal
            raise PlanningError(
                "HiGHS takes back a plan that it has found: the problem has numbers of very "
                "different size"
            )
        self._found = found
        return found

    def keep(self, goal: Mapping[int, float], value: float) -> None:
        """Require what was reached, less a hair."""
        self._programme.row(goal, lower=value * (1 - _HAIR))

    def spread(self, best: Solution, before: Placement | None) -> tuple[list[float], list[float]]:
        """Use devices that are not needed, and all alike; return flows and counts."""
        try:
            running = (
                {} if before is None else {each.option: each.devices for each in before.groups}
            )
            return self._levelled(self.solved(self._spare(best, running) | self._changes(running)))
        except PlanningError:
            return self._flows_and_counts(best)

    def _spare(self, best: Solution, running: Mapping[Option, int]) -> dict[int, float]:
        """Add rows for the spare room of each family, in times its demand; return it as a goal."""
        programme, problem = self._programme, self._problem
        least = programme.variable(upper=_MOST_SPARE)
        goal = {least: 1.0}
        for family in problem.families:
            used = [
                option.accuracy
                for i, option in problem.of_family(family)
                if best.values[self._flows[i]] > _IDLE_QPS
            ]
            if not used:
                continue
            spare = programme.variable(upper=_MOST_SPARE)
            goal[spare] = _OTHERS_COUNT / len(problem.families)
            room = {}
            for i, option in problem.of_family(family):
                may_lose = self._gap if option in running else 0.0
                if option.accuracy >= min(used) * (1 - may_lose):
                    room[self._counts[i]] = option.peak_qps
                else:
                    programme.row({self._counts[i]: 1.0}, upper=0)
            taken = dict.fromkeys(self._flows_of(family), -1.0)
            programme.row({**room, **taken, spare: -problem.demand_qps[family]}, lower=0)
            programme.row({spare: 1.0, least: -1.0}, lower=0)
        return goal

    def _changes(self, running: Mapping[Option, int]) -> dict[int, float]:
        """Add rows for the number of devices that change their variant; return it as a goal."""
        if not running:
            return {}
        goal = {}
        for option, count in zip(self._problem.options, self._counts, strict=True):
            changed = self._programme.variable()
            self._programme.row({changed: 1.0, count: -1.0}, lower=-float(running.get(option, 0)))
            goal[changed] = -_CHANGE_COSTS
        return goal

    def _levelled(self, found: Solution) -> tuple[list[float], list[float]]:
        """Keep the counts, and make the busiest group of each family as little busy as possible."""
        programme, problem = self._programme, self._problem
        for count in self._counts:
            programme.row({count: 1.0}, lower=found.values[count], upper=found.values[count])
        goal = {}
        for family in problem.families:
            busiest = programme.variable(upper=1.0)
            goal[busiest] = -1.0
            for i, option in problem.of_family(family):
                room = option.peak_qps * found.values[self._counts[i]]
                programme.row({self._flows[i]: 1.0, busiest: -room}, upper=0)
        return self._flows_and_counts(self.solved(goal))

    def _most_qps(self, family: str) -> float:
        """What all devices could answer of a family, if it had them alone."""
        best_qps = dict.fromkeys(self._problem.devices, 0.0)
        for _, option in self._problem.of_family(family):
            best_qps[option.device] = max(best_qps[option.device], option.peak_qps)
        return sum(best_qps[kind] * count for kind, count in self._problem.devices.items())

    def _flows_of(self, family: str) -> dict[int, float]:
        return {self._flows[i]: 1.0 for i, _ in self._problem.of_family(family)}

    def _flows_and_counts(self, found: Solution) -> tuple[list[float], list[float]]:
        flows = [max(0.0, found.values[flow]) for flow in self._flows]
        return flows, [found.values[count] for count in self._counts]
