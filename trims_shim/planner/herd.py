"""Which streams of requests share which devices, so that bursts do least harm (Shepherd's Herd).

A *stream* is the requests of one user for one model. The more devices a stream may use, the larger
a burst of it may be; but each device of a group holds the models of all its streams, and memory is
limited. So streams are divided into groups. Let a stream need n devices on average (its rate over
the throughput of a device); its burst tolerance is the size of its group over n. The programme
(NSDI'23, section 4)::

    maximise  min over streams of size(its group) / n
    where     each stream is in one group, and a group holds the models of its streams
              a group's models fit in the memory of a device, and are of one affinity
              sizes sum up to at most the devices, no group is larger than the largest size

Within a group requests are scheduled online, by :class:`~trims_shim.batching.flex.FlexBatcher` for
example.

Streams of one model may as well share a group, the largest that holds it. Then only the stream that
needs most matters, and the programme has a variable for each model and group instead of for each
stream and group. The paper leaves open which of the many best solutions is taken: here, one in
which the group with the least spare devices (its size less what its streams need) has most. For
that, streams of a model may be divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trims_shim.errors import PlanningError
from trims_shim.planner.programme import Programme, Solution

__all__ = ["DeviceGroup", "HerdPlan", "HostedModel", "Stream", "plan_herd"]

_HAIR = 1e-6


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


@dataclass(frozen=True, slots=True)
class HerdPlan:
    """The result of planning."""

    groups: tuple[DeviceGroup, ...]
    burst_tolerance: float
    """How many times its average rate every stream may have, if others do not need the devices."""
    bound: float
    """No plan has a higher burst tolerance."""


def plan_herd(
    streams: Mapping[str, Stream],
    models: Mapping[str, HostedModel],
    *,
    devices: int,
    memory_bytes: int,
    groups: int,
    largest: int | None = None,
    gap: float = 1e-3,
    time_limit_s: float = 10.0,
) -> HerdPlan:
    """Divide streams and ``devices``, each of ``memory_bytes``, into at most so many ``groups``.

    ``largest`` limits the size of a group, as one scheduler serves each (default: no limit).
    ``gap`` is how much of the tolerance may be lost to find a plan sooner; each of two programmes
    takes at most ``time_limit_s``. Raises PlanningError if the models do not fit, if no plan is
    found in time, and without highspy; ValueError for numbers that are not positive and for unknown
    models.
    """
    _check(streams, models, devices, groups, largest)
    for name, stream in streams.items():
        if models[stream.model].memory_bytes > memory_bytes:
            raise PlanningError(
                f"{stream.model!r}, which {name!r} asks for, needs more memory than a device has"
            )
    if not streams:
        return HerdPlan((), math.inf, math.inf)
    size = _Size(devices, memory_bytes, groups, min(largest or devices, devices))
    busiest: dict[str, Stream] = {}
    for stream in streams.values():
        if stream.model not in busiest or busiest[stream.model].rate_qps < stream.rate_qps:
            busiest[stream.model] = stream
    herd = _Herd(busiest, models, size)
    found = herd.maximise(herd.tolerance, gap=gap, time_limit_s=time_limit_s)
    together = herd.groups(found)
    needed = {
        name: stream.rate_qps / models[stream.model].throughput_qps
        for name, stream in streams.items()
    }
    herd = _Herd(streams, models, size)
    herd.require(found.goal)
    try:
        members = herd.groups(herd.maximise(herd.spare(), gap=gap, time_limit_s=time_limit_s))
    except PlanningError:  # the time is up
        members = [
            (count, [name for name, stream in streams.items() if stream.model in held])
            for count, held in together
        ]
    chosen = tuple(
        DeviceGroup(
            devices=count,
            models=tuple(dict.fromkeys(streams[name].model for name in names)),
            streams=tuple(names),
            needed=sum(needed[name] for name in names),
        )
        for count, names in members
    )
    tolerance = min(each.devices / needed[name] for each in chosen for name in each.streams)
    return HerdPlan(chosen, tolerance, max(tolerance, found.bound))


def _check(
    streams: Mapping[str, Stream],
    models: Mapping[str, HostedModel],
    devices: int,
    groups: int,
    largest: int | None,
) -> None:
    for name, number in (("devices", devices), ("groups", groups), ("largest", largest)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; at least one is needed")
    for name, model in models.items():
        if not 0 < model.throughput_qps < math.inf:
            raise ValueError(f"{name!r} has a throughput of {model.throughput_qps}")
        if model.memory_bytes < 0:
            raise ValueError(f"{name!r} needs {model.memory_bytes} bytes")
    for name, stream in streams.items():
        if stream.model not in models:
            raise ValueError(f"{name!r} asks for {stream.model!r}, which is no model")
        if not 0 < stream.rate_qps < math.inf:
            raise ValueError(f"{name!r} has a rate of {stream.rate_qps}")


@dataclass(frozen=True, slots=True)
class _Size:
    devices: int
    memory_bytes: int
    groups: int
    largest: int


class _Herd:
    """The programme, and which of its variables mean what."""

    def __init__(
        self, streams: Mapping[str, Stream], models: Mapping[str, HostedModel], size: _Size
    ) -> None:
        self._streams = streams
        self._needed = {
            name: stream.rate_qps / models[stream.model].throughput_qps
            for name, stream in streams.items()
        }
        self._models = {stream.model: models[stream.model] for stream in streams.values()}
        self._programme = programme = Programme()
        self._groups = range(min(size.groups, len(streams), size.devices))
        self._sizes = [
            programme.variable(upper=size.largest, is_integer=True) for _ in self._groups
        ]
        self._joins = {name: self._choices() for name in streams}
        self._holds = {name: self._choices() for name in self._models}
        self._place(size)
        self._tolerance = self._add_tolerance(size.largest)

    @property
    def tolerance(self) -> dict[int, float]:
        """The least burst tolerance of all streams, as a goal."""
        return {self._tolerance: 1.0}

    def spare(self) -> dict[int, float]:
        """The least number of spare devices of all groups, as a goal; negative in overload."""
        least = self._programme.variable()
        offset = math.ceil(sum(self._needed.values()))  # variables are not negative
        for group in self._groups:
            terms = {self._joins[name][group]: -needed for name, needed in self._needed.items()}
            self._programme.row(
                {**terms, self._sizes[group]: 1.0, least: -1.0}, lower=-float(offset)
            )
        return {least: 1.0}

    def maximise(self, goal: Mapping[int, float], *, gap: float, time_limit_s: float) -> Solution:
        """Raises PlanningError if there is no plan, or none was found in time."""
        found = self._programme.maximise(goal, gap=gap, time_limit_s=time_limit_s)
        if found is None:
            raise PlanningError(
                f"the models do not fit in the memory of the groups (at most {len(self._groups)}): "
                "allow for more of them, or for more memory"
            )
        return found

    def require(self, tolerance: float) -> None:
        """Require a tolerance that was reached, less a hair."""
        self._programme.row(self.tolerance, lower=tolerance * (1 - _HAIR))

    def groups(self, found: Solution) -> list[tuple[int, list[str]]]:
        """Return the size of each group that is used, and the names of its streams."""
        members = [
            [name for name, joins in self._joins.items() if found.values[joins[group]]]
            for group in self._groups
        ]
        sizes = [round(found.values[size]) for size in self._sizes]
        return [each for each in zip(sizes, members, strict=True) if each[1]]

    def _choices(self) -> list[int]:
        return [self._programme.variable(upper=1, is_integer=True) for _ in self._groups]

    def _place(self, limits: _Size) -> None:
        programme = self._programme
        programme.row(dict.fromkeys(self._sizes, 1.0), upper=limits.devices)
        for larger, smaller in zip(self._sizes, self._sizes[1:], strict=False):
            programme.row({larger: 1.0, smaller: -1.0}, lower=0)  # groups are interchangeable
        for name, joins in self._joins.items():
            programme.row(dict.fromkeys(joins, 1.0), lower=1, upper=1)
            holds = self._holds[self._streams[name].model]
            for join, hold in zip(joins, holds, strict=True):
                programme.row({join: 1.0, hold: -1.0}, upper=0)
        for group in self._groups:
            held = {self._holds[name][group]: each for name, each in self._models.items()}
            # In shares of a device: solvers do not like numbers of very different size.
            whole = max(1, limits.memory_bytes)
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

    def _add_tolerance(self, largest: int) -> int:
        """Add the least tolerance: for each stream, its group's size over what it needs."""
        programme = self._programme
        least = programme.variable()
        for name, joins in self._joins.items():
            shares = []
            for join, size in zip(joins, self._sizes, strict=True):
                share = programme.variable(upper=largest)  # the size, or 0: size x join
                programme.row({share: 1.0, size: -1.0}, upper=0)
                programme.row({share: 1.0, join: -float(largest)}, upper=0)
                shares.append(share)
            programme.row({**dict.fromkeys(shares, 1.0), least: -self._needed[name]}, lower=0)
        return least
