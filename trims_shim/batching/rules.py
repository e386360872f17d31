"""The decisions of a batching policy for one queue, and nothing else.

A :class:`Rule` looks at its queue when a device is free and says how many requests go now. The
state machine around it (:class:`trims_shim.batching.single.Batching`) keeps devices, keys and
time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

from trims_shim.batching.buckets import Family
from trims_shim.batching.ordering import DeadlineQueue
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Drop, DropReason, Finished, Request

__all__ = ["Rule", "RuleMaker", "duration_ns"]

_NS_PER_MS = 1_000_000


class Rule(ABC):
    """Decides for the requests of one key.

    Sub-classes define :meth:`choose` and may look at arrivals and results. They read
    ``self.profile`` afresh at each decision: it may be replaced while batches run.

    ``margin_ms`` is kept free before each deadline: a policy that looks at deadlines decides as if
    every batch took that much longer than its profile says.
    """

    has_rivals = False
    """Whether requests of other keys are waiting for a device; set by the state machine."""
    max_weight: int | None = None
    """The most that the requests of a batch may weigh together; set by the state machine."""
    stretches: Sequence[float] = (1.0,)
    """Durations of batches as multiples of their profile: equally likely, ascending."""
    devices = 1
    """How many batches, or stages, run at once; set by the state machine."""
    key: Hashable = None
    """The key of its requests; set by the state machine."""
    family: Family | None = None
    """The family of that key; set by the state machine."""

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, margin_ms: float = 0.0
    ) -> None:
        profile.check_knows(max_batch_size)
        self.profile = profile
        self.max_batch_size = max_batch_size
        self.margin_ns = duration_ns("margin_ms", margin_ms)
        self.queue = DeadlineQueue()
        self.wake_ns: int | None = None
        """When to ask again if nothing happens before; set by ``choose`` where it waits."""
        self.drops: list[Drop] = []
        """Requests that were given up, until :meth:`take_drops`."""

    @property
    def length(self) -> int:
        """The length of its key in its family; 0 if the key has no family."""
        return 0 if self.family is None else self.family.length

    @abstractmethod
    def choose(self, now_ns: int) -> int:
        """How many of the queue's first requests to run now: 0 to wait, at most :meth:`room`.

        Called when a device is free and the queue is not empty. May take requests out of the queue
        and give them up (:meth:`drop`); returns 0 if none are left. Where it waits for a time, and
        not only for another event, it sets ``wake_ns`` to one later than ``now_ns``.
        """

    def companions(
        self, now_ns: int, size: int, others: Collection[Rule]
    ) -> Sequence[tuple[Rule, int]]:
        """Requests of other keys that join the first ``size``, which run now.

        Returns rules of its family, each with how many of its queue's first requests join.
        ``others`` are all other rules with requests waiting. The whole batch is no larger, and
        weighs no more, than a batch may. By default none join: a batch is of one key.
        """
        return ()

    # Most rules need none of these, so they are not abstract.

    def on_arrival(self, now_ns: int, request: Request) -> None:  # noqa: B027
        """A request has joined the queue."""

    def on_finished(self, now_ns: int, finished: Finished) -> None:  # noqa: B027
        """A batch of this rule has been answered."""

    def on_wake(self, lateness_ns: int) -> None:  # noqa: B027
        """The timer came ``lateness_ns``, 0 or more, after ``wake_ns``."""

    def room(self) -> int:
        """How many of the queue's first requests one batch can hold."""
        count = len(self.queue)
        if count > self.max_batch_size:
            count = self.max_batch_size
        if self.max_weight is None:
            return count
        return self.queue.within_weight(count, self.max_weight)

    def is_full(self, size: int) -> bool:
        """Whether waiting cannot make a batch of the first ``size`` larger."""
        if size >= self.max_batch_size or size < len(self.queue):
            return True
        if self.max_weight is None:
            return False
        return sum(request.weight for request in self.queue) >= self.max_weight

    def drop(self, requests: Sequence[Request], reason: DropReason) -> None:
        """Give up requests that were taken out of the queue."""
        if requests:
            self.drops.append(Drop(requests, reason))

    def drop_hopeless(self, now_ns: int) -> None:
        """Give up requests that would be late even if they ran alone now."""
        soonest_ns = now_ns + self.margin_ns + self.profile.latency_ns(1)
        self.drop(self.queue.take_due(soonest_ns), DropReason.HOPELESS)

    def take_drops(self) -> list[Drop]:
        """Return the drops since the last call."""
        drops, self.drops = self.drops, []
        return drops


class RuleMaker(Protocol):
    """Makes the rule of a key: a :class:`Rule` class, or a function around one."""

    def __call__(self, profile: LatencyProfile, *, max_batch_size: int) -> Rule: ...


def duration_ns(option: str, duration_ms: float) -> int:
    """Convert a policy's option from milliseconds. Raises TypeError for no number, ValueError for a
    negative or an infinite one.
    """
    try:
        is_duration = 0 <= duration_ms < math.inf
    except TypeError:
        raise TypeError(
            f"{option} is {duration_ms!r}; it has to be a number of milliseconds"
        ) from None
    if not is_duration:
        raise ValueError(f"{option} is {duration_ms}; it has to be 0 or more, and finite")
    return round(float(duration_ms) * _NS_PER_MS)
