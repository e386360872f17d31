"""What a clairvoyant scheduler would reach: exact, by trying everything, for a few requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations

from trims_shim.batching.policies.preemptible import PreemptibleModel
from trims_shim.batching.protocol import Request

__all__ = ["most_in_time"]


def most_in_time(
    requests: Sequence[Request], models: Mapping[str, PreemptibleModel], *, devices: int
) -> int:
    """The most requests that any schedule of batches answers in time, knowing all arrivals.

    Batches of the best schedule never need to be preempted. A device starts a batch as soon as it
    is free and all of the batch have arrived: starting later helps nobody.
    """
    everything = range(len(requests))

    @cache
    def best(free_ns: tuple[int, ...], left: frozenset[int]) -> int:
        most = 0
        for key, model in models.items():
            mine = [each for each in left if requests[each].key == key]
            for size in range(1, min(len(mine), model.max_batch_size) + 1):
                for batch in combinations(mine, size):
                    arrived_ns = max(requests[each].arrival_ns for each in batch)
                    end_ns = max(free_ns[0], arrived_ns) + model.profile.latency_ns(size)
                    if end_ns <= min(requests[each].deadline_ns for each in batch):
                        after = tuple(sorted((end_ns, *free_ns[1:])))
                        most = max(most, size + best(after, left - set(batch)))
        if len(free_ns) > 1:  # a device that has nothing more to do
            most = max(most, best(free_ns[1:], left))
        return most

    return best((0,) * devices, frozenset(everything))
