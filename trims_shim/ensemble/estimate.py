"""How fast an allocation is, by the latencies of its workers alone. Pure.

All members answer the same samples. A device is shared evenly by the workers on it that have work;
a member's samples go to its workers as these come free. When a member has answered everything, its
devices are left to the others. So the time for many samples follows step by step, from the end of
one member to the next (a fluid model). Not in it: memory bandwidth and caches that workers on
different devices share, and kernels that overlap on one GPU.
"""

from __future__ import annotations

from trims_shim.ensemble.allocation import Allocation, Problem
from trims_shim.errors import PlanningError

__all__ = ["throughput"]

_NS_PER_S = 1e9
_NOTHING = 1e-9
"""A share that is left only because numbers are rounded."""


def throughput(problem: Problem, allocation: Allocation) -> float:
    """Samples per second that the whole ensemble answers, for very many samples.

    Raises PlanningError for a worker on a kind of device of which its member has no latencies.
    """
    costs_ns = _costs_ns(problem, allocation)
    rates = _rates(costs_ns, len(problem.members))
    if not all(rates.values()):
        return 0.0
    remaining = dict.fromkeys(rates, 1.0)
    sample_ns = 0.0
    while remaining:
        step_ns = min(share / rates[member] for member, share in remaining.items())
        sample_ns += step_ns
        left = {member: share - step_ns * rates[member] for member, share in remaining.items()}
        remaining = {member: share for member, share in left.items() if share > _NOTHING}
        for member in left.keys() - remaining.keys():
            _leave(costs_ns, rates, member)
    return _NS_PER_S / sample_ns


def _costs_ns(problem: Problem, allocation: Allocation) -> list[dict[int, float]]:
    """By device, the time that a sample of each member on it takes alone."""
    names, members = list(problem.members), list(problem.members.values())
    found: list[dict[int, float]] = [{} for _ in problem.devices]
    for device, member, size in allocation.workers():
        kind = problem.devices[device].kind
        profile = members[member].latencies.get(kind)
        if profile is None:
            raise PlanningError(
                f"nothing is known of how fast member {names[member]!r} is on {kind}; measure it, "
                "or leave that kind out of its footprints"
            )
        fitting = min(size, profile.max_batch_size)
        found[device][member] = profile.taken_ns(fitting) / fitting
    return found


def _rates(costs_ns: list[dict[int, float]], members: int) -> dict[int, float]:
    """By member, samples per nanosecond of all its workers."""
    rates = dict.fromkeys(range(members), 0.0)
    for costs in costs_ns:
        for member, cost_ns in costs.items():
            rates[member] += 1 / (len(costs) * cost_ns)
    return rates


def _leave(costs_ns: list[dict[int, float]], rates: dict[int, float], member: int) -> None:
    """Share the devices of a member that has ended among the others there."""
    for costs in costs_ns:
        if costs.pop(member, None) is not None and costs:
            more = 1 / len(costs) - 1 / (len(costs) + 1)
            for other, cost_ns in costs.items():
                rates[other] += more / cost_ns
