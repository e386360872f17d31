"""Choose the model that goes first when a device is free and several could use it.

A :class:`Choice` takes one :class:`Offer` for each model that could run now, and the times at which
other devices will be free. With every Choice, higher priorities go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from trims_shim.batching.protocol import NEVER_NS, Request

__all__ = ["Choice", "Offer", "by_need", "by_size"]

_URGENCY = 3.0
"""The extra worth of a request that is lost unless it goes now.

Tried from 0 to 10, under light and heavy load, with 1 and 8 devices, equal and mixed deadlines:
more helps where nearly everything can be answered, and harms elsewhere.
"""
_OBJECTIVE_SHARE = 0.5
"""A batch counts fully up to this share of the shortest objective: requests that arrive during a
longer one are not in time after it.

1 and 0.25 are worse. So is dividing the worth of every batch by its latency: models with equal
deadlines then lose their large batches.
"""


@dataclass(slots=True)
class Offer:
    """The batch that one model could run now."""

    batch: Sequence[Request]
    latency_ns: int
    due_ns: Sequence[int]
    """The latest starts of the batch, and of further ones of its size for the rest of the queue."""
    size_at: Callable[[int], int]
    """Returns how large the model's batch could be at a later time."""

    @property
    def objective_ns(self) -> int:
        """The time from arrival to deadline of its first request."""
        return self.batch[0].deadline_ns - self.batch[0].arrival_ns

    @property
    def rank(self) -> tuple[int, int]:
        """Of equal offers, the one with the lowest rank goes."""
        return self.batch[0].deadline_ns, self.batch[0].number


class Choice(Protocol):
    """Chooses from one or more offers of equal priority; returns one and its worth in requests.

    ``ends_ns``: the times, now or later, at which the other devices are free.
    """

    def __call__(
        self, now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]
    ) -> tuple[Offer, float]: ...


def by_size(now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]) -> tuple[Offer, float]:
    """Return the largest batch, as in the paper (Shepherd)."""
    best = min(offers, key=lambda each: (-len(each.batch), each.rank))
    return best, float(len(best.batch))


def by_need(now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]) -> tuple[Offer, float]:
    """Return the most urgent batch if all queued requests can be in time, else the most valuable.

    The worth of a batch is its size, plus ``_URGENCY`` for each of its requests that would be lost
    by waiting for the next device. If it runs longer than half of the shortest objective of the
    other offers, it is ranked by its worth scaled down in proportion.
    """
    if len(offers) == 1:
        return offers[0], float(len(offers[0].batch))
    if _is_in_time([now_ns, *ends_ns], offers):
        first = min(offers, key=lambda each: (each.due_ns[0], each.rank))
        return first, float(len(first.batch))
    worths = list(_worths(now_ns, offers, ends_ns))
    shares = _shares(offers)
    index = min(
        range(len(offers)), key=lambda each: (-worths[each] * shares[each], offers[each].rank)
    )
    return offers[index], worths[index]


def _is_in_time(free_ns: list[int], offers: Sequence[Offer]) -> bool:
    """Whether all batches are in time if they start in the order of ``due_ns``."""
    heapq.heapify(free_ns)
    batches = sorted((due_ns, each.latency_ns) for each in offers for due_ns in each.due_ns)
    for due_ns, latency_ns in batches:
        if free_ns[0] > due_ns:
            return False
        heapq.heapreplace(free_ns, free_ns[0] + latency_ns)
    return True


def _worths(now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]) -> Iterator[float]:
    soonest_ns = min(ends_ns, default=NEVER_NS)
    latencies = [each.latency_ns for each in offers]
    for number, offer in enumerate(offers):
        next_ns = min(soonest_ns, now_ns + max(latencies[:number] + latencies[number + 1 :]))
        size = len(offer.batch)
        yield size + _URGENCY * (size - offer.size_at(next_ns))


def _shares(offers: Sequence[Offer]) -> list[float]:
    """Return a factor for each worth: below 1 if later arrivals would be late after the batch."""
    shortest_ns, second_ns = sorted(each.objective_ns for each in offers)[:2]
    found = []
    for offer in offers:
        others_ns = second_ns if offer.objective_ns == shortest_ns else shortest_ns
        found.append(min(1.0, _OBJECTIVE_SHARE * others_ns / offer.latency_ns))
    return found
