"""A simulated device that runs several stages at once, and how they slow each other down.

A stage that has the device to itself takes as long as its profile says. It has a *demand*: the
share of the device that it keeps busy. While the demands of all running stages add up to at most 1,
they do not affect each other. If they add up to D > 1, all of them run D times slower: processor
sharing, where the share that one stage cannot use goes to the others (Parekh and Gallager, IEEE/ACM
ToN 1993). So two stages side by side gain the share that a single one leaves idle, and no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

__all__ = [
    "DeviceTime",
    "Phase",
    "StageDevice",
    "demand_of_best_size",
    "full_demand",
]

T = TypeVar("T")

Demand = Callable[[LatencyProfile, int], float]
"""(a stage's profile, batch size) -> the share of the device that it keeps busy, at most 1."""


def demand_of_best_size(profile: LatencyProfile, size: int) -> float:
    """Return a batch size's throughput as a share of the best one, whose size demands it all.

    So no stages that run side by side exceed the throughput of the best batch size alone.
    """
    sizes = range(1, profile.max_batch_size + 1)
    best_ns = min(profile.latency_ns(each) / each for each in sizes)
    return min(1.0, size * best_ns / profile.latency_ns(size))  # rounding may exceed 1


def full_demand(profile: LatencyProfile, size: int) -> float:
    """Return 1: each stage keeps the whole device busy, as on a CPU if all cores work at it."""
    return 1.0


Phase = tuple[int, float]
"""(nanoseconds if alone, the share of the device that is busy meanwhile)."""
_Costs = Sequence[Sequence[Sequence[Phase]]]
"""The phases of each stage, for each batch size from 0 on."""


class StageDevice:
    """How long each stage takes alone, and the share of the device it keeps busy.

    ``profiles``: one for all batches, or several by name; then ``profile_of(batch)`` returns the
    name for a batch, by default its key. ``overhead_ns`` is added to each stage without keeping the
    device busy: the launch, and the driver's work between two stages. Raises ValueError for
    profiles that differ in their number of stages.
    """

    __slots__ = (
        "_costs",
        "_demand",
        "_overhead_ns",
        "_profile_of",
        "_profiles",
        "_whole",
        "stages",
    )

    def __init__(
        self,
        profiles: StagedProfile | Mapping[Hashable, StagedProfile],
        *,
        demand: Demand = demand_of_best_size,
        overhead_ns: int = 0,
        profile_of: Callable[[Sequence[Request]], Hashable] = lambda batch: batch[0].key,
    ) -> None:
        if isinstance(profiles, StagedProfile):
            profiles, profile_of = {None: profiles}, lambda batch: None
        counts = {len(each.stages) for each in profiles.values()}
        if len(counts) != 1:
            raise ValueError(f"profiles of {sorted(counts)} stages; all need the same number")
        self.stages = counts.pop()
        self._profiles = profiles
        self._profile_of = profile_of
        self._demand = demand
        self._overhead_ns = overhead_ns
        self._costs = {
            name: _with_overhead(_costs(each, demand), overhead_ns)
            for name, each in profiles.items()
        }

        self._whole = {
            name: _with_overhead(_in_one(_costs(each, demand)), overhead_ns)
            for name, each in profiles.items()
        }

    def unstaged(self) -> StageDevice:
        """Return this device for the model in one stage, which has its stages' demands in turn."""
        device = StageDevice(
            self._profiles,
            demand=self._demand,
            overhead_ns=self._overhead_ns,
            profile_of=self._profile_of,
        )
        device.stages = 1
        device._costs = device._whole
        return device

    def profile(self, name: Hashable = None) -> StagedProfile:
        """Return one of its profiles as measuring would give it: with the overhead."""
        return StagedProfile(
            [LatencyProfile(map(_alone_ns, stage[1:])) for stage in self._costs[name]]
        )

    def cost(self, stage: int | None, batch: Sequence[Request]) -> Sequence[Phase]:
        """Return the phases that a batch goes through in a stage, one after the other.

        ``stage``: None for all stages in one call.
        """
        name = self._profile_of(batch)
        costs = self._whole[name][0] if stage is None else self._costs[name][stage]
        if len(batch) >= len(costs):
            raise ValueError(f"a batch of {len(batch)} is larger than any in the profile")
        return costs[len(batch)]


def _alone_ns(phases: Sequence[Phase]) -> int:
    return sum(own_ns for own_ns, _ in phases)


def _costs(profile: StagedProfile, demand: Demand) -> _Costs:
    sizes = range(1, profile.max_batch_size + 1)
    return [
        [(), *(((stage.latency_ns(size), min(1.0, demand(stage, size))),) for size in sizes)]
        for stage in profile.stages
    ]


def _in_one(costs: _Costs) -> _Costs:
    return [[tuple(chain.from_iterable(stages)) for stages in zip(*costs, strict=True)]]


def _with_overhead(costs: _Costs, overhead_ns: int) -> _Costs:
    """Add the overhead, which keeps nothing busy, to the first phase, and spread its demand."""
    return [
        [
            (),
            *(
                ((own_ns + overhead_ns, demand * own_ns / (own_ns + overhead_ns)), *rest)
                for (own_ns, demand), *rest in stage[1:]
            ),
        ]
        for stage in costs
    ]


class DeviceTime(Generic[T]):
    """Processor sharing: what runs, when the next phase ends, how busy the device was.

    All running phases progress at the same rate, so they share one clock of progress. Each ends
    when that clock reaches a value that is known when it starts.
    """

    __slots__ = ("_count", "_ends", "_load", "_now_ns", "_progress_ns", "busy_ns")

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, float, T, Sequence[Phase]]] = []
        """A heap of (progress at the end, number, demand, ``what``, later phases)."""
        self._count = 0
        self._load = 0.0
        """The sum of the demands of running phases."""
        self._now_ns = 0
        self._progress_ns = 0.0
        self.busy_ns = 0.0
        """Each moment counts with the share of the device that is busy."""

    def start(self, now_ns: int, what: T, phases: Sequence[Phase]) -> None:
        """Start running ``what``."""
        self._advance(now_ns)
        self._begin(what, phases)

    def _begin(self, what: T, phases: Sequence[Phase]) -> None:
        (alone_ns, demand), *rest = phases
        self._count += 1
        entry = (self._progress_ns + alone_ns, self._count, demand, what, rest)
        heapq.heappush(self._ends, entry)
        self._load += demand

    def next_end_ns(self) -> int:
        """Return when the next phase ends; NEVER_NS if nothing runs."""
        if not self._ends:
            return NEVER_NS
        left_ns = self._ends[0][0] - self._progress_ns
        return self._now_ns + max(0, round(left_ns * max(1.0, self._load)))

    def end_next(self) -> T | None:
        """Advance to ``next_end_ns()``; return what ends then, or None if it has another phase."""
        self._advance(self.next_end_ns())
        self._progress_ns, _, _, what, rest = heapq.heappop(self._ends)
        # Summed anew each time: repeated subtraction of floats would drift.
        self._load = sum(demand for _, _, demand, *_ in self._ends)
        if not rest:
            return what
        self._begin(what, rest)
        return None

    def _advance(self, now_ns: int) -> None:
        passed_ns = now_ns - self._now_ns
        self._progress_ns += passed_ns / max(1.0, self._load)
        self.busy_ns += passed_ns * min(1.0, self._load)
        self._now_ns = now_ns
