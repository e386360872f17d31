"""Which streams of requests share which devices, so that bursts do least harm (Shepherd's Herd).

A *stream* is the requests of one user for one model. The more devices a stream may use, the larger
a burst of it may be; but each device of a group holds the models of all its streams, and memory is
limited. So streams are divided into groups. Let a stream need n devices on average: its rate over
the throughput of a device. The programme (NSDI'23, section 4)::

    maximise  min over streams of size(its group) / n      (burst tolerance)
    where     each stream is in one group, and a group holds the models of its streams
              a group's models fit in the memory of a device, and are of one affinity
              sizes sum up to at most the devices, no group is larger than the largest size

This goal does not mind that the other streams of a group keep its devices busy: the group of the
stream that needs most becomes large, and others are left with too few devices for what they have to
do. So here the plan is first one with the largest *slack* (within 3 % of the range that is
possible): the devices of a group beyond those that its streams need, over the square root of these,
least of all groups. Fluctuations grow with that root, so small groups need relatively more
(square-root staffing: Halfin and Whitt, 1981). Of such plans, one with the highest burst tolerance
is taken. ``of_paper`` leaves the slack out (``docs/decisions/0015`` compares them).

Streams of one model stay together, as their requests share batches, unless they need more devices
than a group may have.

Within a group requests are scheduled online, by :class:`~trims_shim.batching.FlexBatcher` for
example.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trims_shim.checks import check_amount, check_limit, whole
from trims_shim.errors import PlanningError
from trims_shim.planner.programme import OutOfTime, Programme, Solution

__all__ = ["DeviceGroup", "HerdPlan", "HostedModel", "Stream", "plan_herd"]

_HARDLY = 0.03
"""Of the range in which the largest slack lies: less is not searched for."""
_STEPS = 6
"""Of the search; each halves the range."""
_ALL_SIZES = 64
"""Up to so many devices, the slack of every size of a group is in the programme."""
_STEP = 1.02
"""Between sizes of larger groups: what up to 2 % of its devices add to a group is not seen."""
_LAST = 0.5
"""The share of the time for the most tolerant of these plans."""


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model that streams ask for."""

    throughput_qps: float
    """Requests that one device answers in a second, within the objective."""
    memory_bytes: int
    affinity: str = ""
    """Only models of equal affinity share a group: a framework, a tenant."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The requests of one user for one model."""

    model: str
    rate_qps: float


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that hold the same models and serve the same streams."""

    devices: int
    models: tuple[str, ...]
    streams: tuple[str, ...]
    needed: float
    """The number of devices that its streams keep busy on average."""

    @property
    def slack(self) -> float:
        """Devices beyond the needed ones, over the square root of these."""
        return (self.devices - self.needed) / math.sqrt(self.needed)


@dataclass(frozen=True, slots=True)
class HerdPlan:
    """The result of planning."""

    groups: tuple[DeviceGroup, ...]
    burst_tolerance: float
    """How many times its average rate any stream may have, if its group serves it alone."""

    @property
    def slack(self) -> float:
        """See the module docstring; below 0, a group is overloaded."""
        return min((group.slack for group in self.groups), default=math.inf)


def plan_herd(
    streams: Mapping[str, Stream],
    models: Mapping[str, HostedModel],
    *,
    devices: int,
    memory_bytes: int,
    groups: int,
    largest: int | None = None,
    of_paper: bool = False,
    gap: float = 1e-3,
    time_limit_s: float = 10.0,
) -> HerdPlan:
    """Divide streams and ``devices``, each of ``memory_bytes``, into at most so many ``groups``.

    ``largest`` limits the size of a group, as one scheduler serves each (default: no limit).
    ``of_paper``: groups of the highest burst tolerance, however busy others become.
    ``gap`` is how much of the tolerance may be lost to find a plan sooner. The search ends after
    about twice ``time_limit_s`` with the best plan so far. Raises PlanningError if the models do
    not fit, if no plan is found in time, and without highspy; ValueError for numbers that are not
    positive (memory and ``gap`` may be 0) and for unknown models.
    """
    _check(streams, models, devices, memory_bytes, groups, largest)
    for name, stream in streams.items():
        if models[stream.model].memory_bytes > memory_bytes:
            raise PlanningError(
                f"{stream.model!r}, which {name!r} asks for, needs more memory than a device has"
            )
    if not streams:
        return HerdPlan((), math.inf)
    needed = {
        name: stream.rate_qps / models[stream.model].throughput_qps
        for name, stream in streams.items()
    }
    limits = _Limits(devices, memory_bytes, groups, min(largest or devices, devices))
    units = _units(streams, needed, limits.largest)
    herd = _Herd(units, models, needed, limits)
    found = herd.maximise(herd.tolerance(), gap=gap, time_limit_s=time_limit_s)
    if found is None:
        raise PlanningError(
            f"the models do not fit in the groups (at most {min(groups, devices)}), by memory or "
            "affinity: allow for more of them, or for more devices or memory; or give the solver "
            "more time"
        )
    plan = _plan(herd.groups(found), streams, needed)
    if of_paper:
        return plan

    def search(slack: float, *, is_last: bool) -> HerdPlan | None:
        herd = _Herd(units, models, needed, limits)
        herd.require(slack)
        goal = herd.tolerance() if is_last else {}
        share = _LAST if is_last else (1 - _LAST) / _STEPS
        found = herd.maximise(goal, gap=gap, time_limit_s=share * time_limit_s)
        return None if found is None else _plan(herd.groups(found), streams, needed)

    # No division has more slack than a single group would; than equal groups, where devices lack.
    whole = sum(needed.values())
    shared = whole if whole <= devices else whole * min(groups, len(units))
    most = (devices - whole) / math.sqrt(shared)
    # Nor has the busiest group of the largest size.
    most = min(most, (limits.largest - herd.busiest) / math.sqrt(herd.busiest))
    close = _HARDLY * (most - plan.slack)
    for _ in range(_STEPS):
        if most - plan.slack <= close:
            break
        middle = (most + plan.slack) / 2
        better = search(middle, is_last=False)
        if better is None:
            most = middle
        else:
            plan = better
    return search(plan.slack - close, is_last=True) or plan


def _units(streams: Mapping[str, Stream], needed: Mapping[str, float], largest: int) -> list[_Unit]:
    """The streams of each model, or each of them where they need more than the largest group."""
    by_model: dict[str, list[str]] = {}
    for name, stream in streams.items():
        by_model.setdefault(stream.model, []).append(name)
    units = []
    for model, names in by_model.items():
        if sum(needed[name] for name in names) <= largest:
            units.append(_Unit(tuple(names), model))
        else:
            units += [_Unit((name,), model) for name in names]
    return units


def _plan(
    members: Sequence[tuple[int, Sequence[str]]],
    streams: Mapping[str, Stream],
    needed: Mapping[str, float],
) -> HerdPlan:
    groups = tuple(
        DeviceGroup(
            devices=size,
            models=tuple(dict.fromkeys(streams[name].model for name in names)),
            streams=tuple(names),
            needed=sum(needed[name] for name in names),
        )
        for size, names in members
    )
    tolerance = min(group.devices / needed[name] for group in groups for name in group.streams)
    return HerdPlan(groups, tolerance)


def _check(
    streams: Mapping[str, Stream],
    models: Mapping[str, HostedModel],
    devices: int,
    memory_bytes: float,
    groups: int,
    largest: int | None,
) -> None:
    whole("devices", devices, most=math.inf)
    check_limit("groups", groups)
    if largest is not None:
        check_limit("largest", largest)
    check_amount("memory_bytes", memory_bytes, may_be_infinite=True)
    for name, model in models.items():
        check_amount(f"the throughput_qps of {name!r}", model.throughput_qps, positive=True)
        check_amount(f"the memory_bytes of {name!r}", model.memory_bytes, may_be_infinite=True)
    for name, stream in streams.items():
        if stream.model not in models:
            raise ValueError(f"{name!r} asks for {stream.model!r}, which is no model")
        check_amount(f"the rate_qps of {name!r}", stream.rate_qps, positive=True)
        if not 0 < stream.rate_qps / models[stream.model].throughput_qps < math.inf:
            raise ValueError(f"the rate_qps of {name!r} is {stream.rate_qps}")


@dataclass(frozen=True, slots=True)
class _Limits:
    devices: int
    memory_bytes: int
    groups: int
    largest: int


@dataclass(frozen=True, slots=True)
class _Unit:
    """Streams of one model that stay together."""

    streams: tuple[str, ...]
    model: str


class _Herd:
    """The programme, and which of its variables mean what."""

    def __init__(
        self,
        units: Sequence[_Unit],
        models: Mapping[str, HostedModel],
        needed: Mapping[str, float],
        limits: _Limits,
    ) -> None:
        self._units = units
        self._models = {unit.model: models[unit.model] for unit in units}
        self._limits = limits
        self._needed = [sum(needed[name] for name in unit.streams) for unit in units]
        self._largest = [max(needed[name] for name in unit.streams) for unit in units]
        """What the stream that needs most needs."""
        self._programme = Programme()
        self._groups = range(min(limits.groups, len(units), limits.devices))
        self._sizes = [
            self._programme.variable(upper=limits.largest, is_integer=True) for _ in self._groups
        ]
        self._possible = _sizes(limits.largest)
        self._joins = [self._choices() for _ in units]
        self._holds = {name: self._choices() for name in self._models}
        self._place()

    @property
    def busiest(self) -> float:
        """What the streams of some group need at least."""
        return max(*self._needed, sum(self._needed) / len(self._groups))

    def tolerance(self) -> dict[int, float]:
        """Add the least burst tolerance of all streams; return it as a goal.

        It is multiplied by what the neediest stream needs: the solver takes tiny factors for none.
        """
        programme, largest = self._programme, float(self._limits.largest)
        least, most = programme.variable(), max(self._largest)
        for unit, joins in enumerate(self._joins):
            rooms = []
            for join, size in zip(joins, self._sizes, strict=True):
                room = programme.variable(upper=largest)  # the size, or 0: join x size
                programme.row({room: 1.0, size: -1.0}, upper=0)
                programme.row({room: 1.0, join: -largest}, upper=0)
                rooms.append(room)
            share = self._largest[unit] / most
            programme.row({**dict.fromkeys(rooms, 1.0), least: -share}, lower=0)
        return {least: 1.0}

    def require(self, slack: float) -> None:
        """Require that every group has so much slack."""
        programme, most = self._programme, max(self._needed)
        for group, size in enumerate(self._sizes):
            needed = {
                joins[group]: each / most
                for joins, each in zip(self._joins, self._needed, strict=True)
            }
            choices = [programme.variable(upper=1, is_integer=True) for _ in self._possible]
            programme.row(dict.fromkeys(choices, 1.0), lower=1, upper=1)
            count = {choice: -float(n) for choice, n in zip(choices, self._possible, strict=True)}
            programme.row({**count, size: 1.0}, lower=0)
            room = {
                choice: -_most_needed(n, slack) / most
                for choice, n in zip(choices, self._possible, strict=True)
            }
            programme.row({**needed, **room}, upper=0)

    def maximise(
        self, goal: Mapping[int, float], *, gap: float, time_limit_s: float
    ) -> Solution | None:
        """None if there is no plan, or none was found in time."""
        while True:
            try:
                found = self._programme.maximise(goal, gap=gap, time_limit_s=time_limit_s)
            except OutOfTime:
                return None
            if found is None or not self._exclude_overfull(found):
                return found
            time_limit_s -= found.taken_s
            if time_limit_s <= 0:
                return None

    def groups(self, found: Solution) -> list[tuple[int, list[str]]]:
        """Return the size of each group that is used, and the names of its streams."""
        members: list[list[str]] = [[] for _ in self._groups]
        for unit, joins in zip(self._units, self._joins, strict=True):
            for group, join in enumerate(joins):
                if found.values[join]:
                    members[group] += unit.streams
        sizes = [round(found.values[size]) for size in self._sizes]
        return [each for each in zip(sizes, members, strict=True) if each[1]]

    def _exclude_overfull(self, found: Solution) -> bool:
        """Exclude what fits only by the solver's tolerance; return whether there was any."""
        bytes_of = {name: each.memory_bytes for name, each in self._models.items()}
        is_any = False
        for group in self._groups:
            held = {
                unit.model
                for unit, joins in zip(self._units, self._joins, strict=True)
                if found.values[joins[group]]
            }
            if sum(bytes_of[name] for name in held) <= self._limits.memory_bytes:
                continue
            is_any = True
            cover = self._least_cover(held)
            # Nor do as many others fit that are as large.
            largest = max(bytes_of[name] for name in cover)
            among = [n for n in self._holds if n in cover or bytes_of[n] >= largest]
            for other in self._groups:
                terms = {self._holds[name][other]: 1.0 for name in among}
                self._programme.row(terms, upper=len(cover) - 1)
        return is_any

    def _least_cover(self, held: Collection[str]) -> list[str]:
        """Models that do not fit either: no more than these, and the largest is as small as can be.

        All of ``held`` that are not among them are as large, or too small to matter.
        """

        def size(name: str) -> int:
            return self._models[name].memory_bytes

        cover = sorted(held, key=size)
        while True:
            excess = sum(map(size, cover)) - self._limits.memory_bytes
            largest = size(cover[-1])
            smaller = [
                name
                for name in self._holds
                if name not in cover and largest - excess < size(name) < largest
            ]
            if size(cover[0]) < excess:
                del cover[0]
            elif smaller:
                cover = sorted([*cover[:-1], max(smaller, key=size)], key=size)
            else:
                return cover

    def _choices(self) -> list[int]:
        return [self._programme.variable(upper=1, is_integer=True) for _ in self._groups]

    def _place(self) -> None:
        programme = self._programme
        programme.row(dict.fromkeys(self._sizes, 1.0), upper=self._limits.devices)
        for larger, smaller in zip(self._sizes, self._sizes[1:], strict=False):
            programme.row({larger: 1.0, smaller: -1.0}, lower=0)  # groups are interchangeable
        for unit, joins in zip(self._units, self._joins, strict=True):
            programme.row(dict.fromkeys(joins, 1.0), lower=1, upper=1)
            for join, hold, size in zip(joins, self._holds[unit.model], self._sizes, strict=True):
                programme.row({join: 1.0, hold: -1.0}, upper=0)
                # Otherwise a need below the solver's tolerance is met by no device.
                programme.row({join: 1.0, size: -1.0}, upper=0)
        whole = max(1, self._limits.memory_bytes)
        for group in self._groups:
            held = {self._holds[name][group]: each for name, each in self._models.items()}
            # In shares of a device: solvers do not like numbers of very different size.
            programme.row({hold: each.memory_bytes / whole for hold, each in held.items()}, upper=1)
            self._match_affinities(held)

    def _match_affinities(self, held: Mapping[int, HostedModel]) -> None:
        affinities = {each.affinity for each in held.values()}
        if len(affinities) < 2:
            return
        chosen = {
            affinity: self._programme.variable(upper=1, is_integer=True)
            for affinity in sorted(affinities)
        }
        self._programme.row(dict.fromkeys(chosen.values(), 1.0), upper=1)
        for hold, each in held.items():
            self._programme.row({hold: 1.0, chosen[each.affinity]: -1.0}, upper=0)


def _sizes(largest: int) -> list[int]:
    """The sizes of groups whose slack is known: in between, that of the next smaller one is.

    All small ones, and so few large ones that HiGHS does not spend minutes on simplifying, in which
    it does not look at the clock.
    """
    sizes = list(range(min(largest, _ALL_SIZES) + 1))
    while sizes[-1] < largest:
        sizes.append(min(largest, math.floor(sizes[-1] * _STEP)))
    return sizes


def _most_needed(devices: int, slack: float) -> float:
    """What streams may need at most, so that a group of so many devices has this slack."""
    if not devices:
        return 0.0
    root = math.sqrt(slack * slack + 4 * devices)
    # Both are the same; one of them is a difference of numbers that may be almost equal.
    return ((root - slack) / 2 if slack < 0 else 2 * devices / (root + slack)) ** 2
