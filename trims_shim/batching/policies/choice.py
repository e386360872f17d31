"""Which model goes first when a device is free and several could use it.

Each :class:`Choice` looks at what every model could run now, one :class:`Offer` for each, and at
when the other devices are about to be free. Higher priorities go first with all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from trims_shim.batching.protocol import Request

__all__ = ["Choice", "Offer", "by_need", "by_size"]

_URGENCY = 3.0
"""How much more a request counts that will be lost unless it goes now.

Of 0 to 10, under light and heavy load, with 1 and 8 devices, equal and mixed deadlines: more helps
where nearly everything can be answered, and harms where it cannot.
"""
_OBJECTIVE_SHARE = 0.5
"""Of the shortest objective: who comes in a batch that takes longer is not in time after it.

1 and a quarter are worse, and so is to divide every batch by its time: models whose deadlines are
alike lose their large batches then.
"""


@dataclass(slots=True)
class Offer:
    """What one model could run now."""

    batch: Sequence[Request]
    latency_ns: int
    due_ns: Sequence[int]
    """When the batch has to start at the latest, and further ones of its size for the rest."""
    size_at: Callable[[int], int]
    """How large its batch could be at a later time."""
    given_up: Sequence[Request] = ()
    """Who could not be answered in time with it."""

    @property
    def objective_ns(self) -> int:
        """How long its first request may take."""
        return self.batch[0].deadline_ns - self.batch[0].arrival_ns

    @property
    def rank(self) -> tuple[int, int]:
        """Of equal offers the one with the lower rank goes."""
        return self.batch[0].deadline_ns, self.batch[0].number


class Choice(Protocol):
    """Chooses from at least one offer, of equal priority; returns it and its worth in requests.

    ``ends_ns`` are the times at which the busy devices will be free, now or later.
    """

    def __call__(
        self, now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]
    ) -> tuple[Offer, float]: ...


def by_size(now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]) -> tuple[Offer, float]:
    """The largest batch, as the paper has it."""
    best = min(offers, key=lambda each: (-len(each.batch), each.rank))
    return best, float(len(best.batch))


def by_need(now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]) -> tuple[Offer, float]:
    """The batch that can wait least, as long as everything that is queued can be in time.

    When it cannot, the batch that is worth most: its size, and ``_URGENCY`` for each request of it
    that would be lost by waiting for the next device. The longer it runs beyond half of the
    shortest objective of the others, the less that counts, in proportion.
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
    """Whether all batches are in time that are started in the order in which they have to."""
    heapq.heapify(free_ns)
    batches = sorted((due_ns, each.latency_ns) for each in offers for due_ns in each.due_ns)
    for due_ns, latency_ns in batches:
        if free_ns[0] > due_ns:
            return False
        heapq.heapreplace(free_ns, free_ns[0] + latency_ns)
    return True


def _worths(now_ns: int, offers: Sequence[Offer], ends_ns: Sequence[int]) -> Iterator[float]:
    soonest_ns = min(ends_ns, default=None)
    latencies = [each.latency_ns for each in offers]
    for number, offer in enumerate(offers):
        next_ns = now_ns + max(latencies[:number] + latencies[number + 1 :])
        if soonest_ns is not None:
            next_ns = max(now_ns, min(next_ns, soonest_ns))
        size = len(offer.batch)
        yield size + _URGENCY * (size - offer.size_at(next_ns))


def _shares(offers: Sequence[Offer]) -> list[float]:
    """What to count of the worth of each: all, if it is done in time for who comes meanwhile."""
    shortest_ns, second_ns = sorted(each.objective_ns for each in offers)[:2]
    found = []
    for offer in offers:
        others_ns = second_ns if offer.objective_ns == shortest_ns else shortest_ns
        found.append(min(1.0, _OBJECTIVE_SHARE * others_ns / offer.latency_ns))
    return found
