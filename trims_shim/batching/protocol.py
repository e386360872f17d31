"""What policies and their drivers say to each other: events in, actions out.

A policy is a state machine without clock, thread or randomness of its own:
``on_event(now_ns, event)`` returns what to do, ``next_deadline_ns()`` when to come back if nothing
happens before. Threads, asyncio and the simulator drive the same objects, so what is measured in
the simulator is what runs in production.

The contract of a driver: it reports every event once, in the order of time; it carries the actions
out in their order before it reports the next event; it sends :data:`TIMER` at
``next_deadline_ns()`` or later, and may send it at any other time. The contract of a policy: a
:class:`Run` names a free device and between one and ``max_batch_size`` queued requests of one
key, or of one family with a request of the longest key first; every request ends in exactly one
Run, Drop or Cancelled, but one that was preempted is queued again.

Times are nanoseconds of a clock that only the driver knows.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "FLUSH",
    "NEVER_NS",
    "TIMER",
    "Action",
    "Cancelled",
    "Drop",
    "DropReason",
    "Event",
    "Finished",
    "Policy",
    "Preempt",
    "Preempted",
    "Request",
    "Run",
    "Signal",
]

NEVER_NS = (1 << 63) - 1
"""A deadline that no request misses."""


# --- events ---------------------------------------------------------------------------------------


# A simulation makes millions of these, and of the events and actions of each batch: they are not
# frozen, which costs up to 1 us each.
@dataclass(slots=True, eq=False)
class Request:
    """One item to be answered. As an event: it has arrived.

    Only requests of equal ``key`` (an input's signature, a model's name) share a batch, or of keys
    of one family (:func:`~trims_shim.batching.buckets.family_of`). Those of higher
    ``priority`` go first. ``payload`` is the driver's; policies never look at it.
    """

    number: int
    """Unique, and ascending in the order of arrival."""
    arrival_ns: int
    deadline_ns: int = NEVER_NS
    priority: int = 0
    key: Hashable = None
    weight: int = 1
    """What it adds to a batch that is limited by more than its size: tokens, pixels."""
    payload: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for this request any more. Has no effect if it is not in the queue."""

    request: Request


@dataclass(slots=True)
class Finished:
    """A device has answered its batch and is free."""

    device: int
    batch: Sequence[Request]
    started_ns: int
    """When the policy chose the batch, or earlier by the time in which event loops deliver answers:
    handing over the batch and its answers is part of the service time."""
    is_typical: bool = True
    """False if its time says nothing about other batches: it failed, or was the first one."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A device has given its batch up at an exit point, as :class:`Preempt` asked, and is free."""

    device: int
    batch: Sequence[Request]
    started_ns: int


class Signal(enum.Enum):
    """Events without content."""

    TIMER = "timer"
    """The time of ``next_deadline_ns()`` has come."""
    FLUSH = "flush"
    """No more requests come: wait for none, run those queued. Holds until the next request."""


TIMER = Signal.TIMER
FLUSH = Signal.FLUSH

Event = Request | Cancelled | Finished | Preempted | Signal


# --- actions --------------------------------------------------------------------------------------


class DropReason(enum.Enum):
    """Why a request is not answered."""

    HOPELESS = "hopeless"
    """It would be late even if it ran alone and at once."""
    SHED = "shed"
    """It would have made other requests of its batch late, or the batch smaller."""


@dataclass(slots=True)
class Run:
    """Give this batch to this device, which is free."""

    device: int
    batch: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Drop:
    """Answer these requests with an error; they have left the queue."""

    requests: Sequence[Request]
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop the batch of this device at its next exit point, unless it ends before (Finished)."""

    device: int


Action = Run | Drop | Preempt


class Policy(Protocol):
    """Decides which requests run together and when, and which are not answered at all."""

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """What to do now; times never go back."""

    def next_deadline_ns(self) -> int | None:
        """When to send :data:`TIMER` unless another event comes first; None for never."""
