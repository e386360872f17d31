"""Problems of allocation for tests, and all allocations of small ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

from trims_shim.batching import LatencyProfile
from trims_shim.ensemble import Allocation, Device, Footprint, MemberProfile, Problem

GB = 1_000_000_000


def member(
    weights_gb: float = 1.0,
    *,
    worker_gb: float = 0.0,
    sample_gb: float = 0.0,
    line_ms: tuple[float, float] = (1.0, 0.0),
    kinds: Sequence[str] = ("gpu",),
) -> MemberProfile:
    """``line_ms``: what a batch takes for each sample, and besides."""
    footprint = Footprint(round(weights_gb * GB), round(worker_gb * GB), round(sample_gb * GB))
    profile = LatencyProfile.linear(*line_ms, max_batch_size=128)
    return MemberProfile(dict.fromkeys(kinds, footprint), dict.fromkeys(kinds, profile))


def gpus(count: int, memory_gb: float = 16.0) -> list[Device]:
    return [Device(f"gpu:{index}", round(memory_gb * GB)) for index in range(count)]


def random_problem(
    random: Random, *, devices: int, members: int, batch_sizes: Sequence[int] = (8, 64)
) -> Problem:
    profiles = {
        f"m{number}": member(
            random.uniform(0.1, 5),
            worker_gb=0.5,
            sample_gb=0.01,
            line_ms=(random.uniform(0.5, 8), random.uniform(1, 40)),
        )
        for number in range(members)
    }
    return Problem(gpus(devices), profiles, tuple(batch_sizes))


def allocations(problem: Problem) -> Iterator[Allocation]:
    """All that fit and have a worker of each member."""
    width = len(problem.members)
    sizes = (0, *problem.batch_sizes)
    for flat in itertools.product(sizes, repeat=width * len(problem.devices)):
        rows = [flat[start : start + width] for start in range(0, len(flat), width)]
        allocation = Allocation(tuple(rows))
        if allocation.is_complete and problem.fits(allocation):
            yield allocation
