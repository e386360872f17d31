"""What members need: measured by running each alone, on one device of each kind.

The paper measures whole allocations, and starts the ensemble anew for each. Here each member is
started once for each kind of device; :func:`~.estimate.throughput` puts the figures together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profiling import measure as measure_sizes
from trims_shim.checks import whole
from trims_shim.ensemble.allocation import (
    DEFAULT_BATCH_SIZES,
    Allocation,
    Device,
    Footprint,
    MemberProfile,
    Problem,
)
from trims_shim.ensemble.devices import find_devices
from trims_shim.ensemble.ensemble import Ensemble, Member, names_of
from trims_shim.ensemble.payloads import count_of, joined, rows_of

__all__ = ["measure"]


def measure(
    members: Sequence[Member],
    samples: Any,
    *,
    devices: Sequence[Device | str] | None = None,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    repeats: int = 3,
    progress: Callable[[str], object] = lambda line: None,
) -> Problem:
    """The problem of allocating ``members`` to ``devices``, with their memory and latencies.

    ``samples``: typical ones, at least one; they are repeated to fill batches. The devices should
    be idle. ``progress`` is called with a line for each member and kind of device. Blocks for some
    runs of each size. Raises as :class:`~.Ensemble` does, and MemberFailed if a member fails.
    """
    found = find_devices(devices)
    names = names_of(members)
    # What cannot be is said now, not after minutes.
    whole("repeats", repeats)
    Problem(found, dict.fromkeys(names, MemberProfile({})), batch_sizes)
    kinds = {device.kind: device for device in reversed(found)}
    sizes = sorted(set(batch_sizes))
    batch = _repeated(samples, sizes[-1])
    profiles = {}
    for member in members:
        footprints, latencies = {}, {}
        for kind, device in kinds.items():
            progress(f"{member.name} on {device.name}")
            footprints[kind], latencies[kind] = _measured(member, device, batch, sizes, repeats)
        profiles[member.name] = MemberProfile(footprints, latencies)
    return Problem(found, profiles, tuple(batch_sizes))


def _measured(
    member: Member, device: Device, batch: Any, sizes: Sequence[int], repeats: int
) -> tuple[Footprint, LatencyProfile]:
    largest = sizes[-1]
    with Ensemble(
        [member],
        devices=[device],
        allocation=Allocation(((largest,),)),
        combine="none",
    ) as ensemble:
        ensemble._system.memory_of(0)  # the peak of loading is no batch's
        ensemble.predict(rows_of(batch, 0, sizes[0]))
        least = ensemble._system.memory_of(0)
        durations_ns = measure_sizes(
            lambda size: ensemble.predict(rows_of(batch, 0, size)),
            sizes,
            repeats=repeats,
            clock=time.perf_counter_ns,
        )
        most = ensemble._system.memory_of(0)
    footprint = _footprint(most.shared_bytes, sizes, (least.peak_bytes, most.peak_bytes))
    return footprint, LatencyProfile.measured(durations_ns, pads=False)


def _footprint(weights_bytes: int, sizes: Sequence[int], peaks_bytes: tuple[int, int]) -> Footprint:
    """The line through the peaks of the smallest and the largest batch.

    What is loaded and allocated with the first batch, whatever its size, is the worker's.
    """
    least_bytes, most_bytes = peaks_bytes
    if len(sizes) == 1 or most_bytes <= least_bytes:
        return Footprint(weights_bytes, max(peaks_bytes))
    sample_bytes = -(-(most_bytes - least_bytes) // (sizes[-1] - sizes[0]))
    return Footprint(weights_bytes, max(0, least_bytes - sizes[0] * sample_bytes), sample_bytes)


def _repeated(samples: Any, count: int) -> Any:
    """At least so many rows."""
    given = count_of(samples)
    if not given:
        raise ValueError("there are no samples to measure with")
    return joined([samples] * -(-count // given))
