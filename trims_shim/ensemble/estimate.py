"""How fast an allocation is, by the latencies of its workers alone. Pure.

All members answer the same samples. A device is shared evenly by the workers on it that have work;
a member's samples go to its workers as these come free. When a member has answered everything, its
devices are left to the others. So the time for many samples follows step by step, from the end of
one member to the next (a fluid model). Not in it: memory bandwidth and caches that workers on
different devices share, and kernels that overlap on one GPU.
"""

from __future__ import annotations

from trims_shim.ensemble.allocation import Allocation, Problem

__all__ = ["throughput"]

_NS_PER_S = 1e9


def throughput(problem: Problem, allocation: Allocation) -> float:
    """Samples per second that the whole ensemble answers, for very many samples.

    Raises KeyError for a worker on a kind of device of which its member has no latencies.
    """
    costs_ns = _costs_ns(problem, allocation)
    remaining = dict.fromkeys(range(len(problem.members)), 1.0)
    sample_ns = 0.0
    while remaining:
        rates = _rates(costs_ns, remaining)
        if not all(rates.values()):
            return 0.0
        step_ns = min(remaining[member] / rates[member] for member in remaining)
        sample_ns += step_ns
        left = {member: share - step_ns * rates[member] for member, share in remaining.items()}
        remaining = {member: share for member, share in left.items() if share > 1e-9}
    return _NS_PER_S / sample_ns


def _costs_ns(problem: Problem, allocation: Allocation) -> list[dict[int, float]]:
    """By device, the time that a sample of each member on it takes alone."""
    members = list(problem.members.values())
    found: list[dict[int, float]] = [{} for _ in problem.devices]
    for device, member, size in allocation.workers():
        profile = members[member].latencies[problem.devices[device].kind]
        fitting = min(size, profile.max_batch_size)
        found[device][member] = profile.taken_ns(fitting) / fitting
    return found


def _rates(costs_ns: list[dict[int, float]], active: dict[int, float]) -> dict[int, float]:
    """By member, samples per nanosecond of all its workers."""
    rates = dict.fromkeys(active, 0.0)
    for costs in costs_ns:
        working = [member for member in costs if member in active]
        for member in working:
            rates[member] += 1 / (len(working) * costs[member])
    return rates
