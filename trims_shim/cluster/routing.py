"""Which request goes to which device, and which waits or is given up. Pure.

A request is given to a device that is ready for its family and has room: a group of devices by the
planned shares, and in the group the device with the fewest open requests. Until there is one it
waits here, in the order of deadlines, because here any device can still take it. What waits beyond
its deadline, or when no device is to get a variant of its family, is dropped.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trims_shim.batching.protocol import NEVER_NS, DropReason
from trims_shim.cluster.fleet import Device, Fleet
from trims_shim.errors import DeviceLost, QueueFull, RequestDropped, TrimsError
from trims_shim.planner import Option

__all__ = ["Action", "Refuse", "Router", "Send", "Ticket"]

_LEAST_QPS = 1e-6
"""Of a device; those for which nothing is planned share what no other has room for."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way."""

    number: int
    """Unique, and ascending in the order of arrival."""
    family: str
    deadline_ns: int = NEVER_NS
    payload: Any = field(default=None, repr=False)
    """The driver's."""
    device: Device | None = None
    """Where it is; None while it waits."""
    load: int = 0
    """The device's, when it was sent."""
    losses: int = 0
    """How many devices were lost with it."""


@dataclass(frozen=True, slots=True)
class Send:
    """Give a request to its ``device``."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Refuse:
    """A request will not be answered."""

    ticket: Ticket
    error: TrimsError


Action: TypeAlias = Send | Refuse


class Router:
    """Events in, actions out; times never go back.

    ``resends``: whether a request whose device was lost is given to another one, once; it may then
    have run twice. ``queue_size``: how many of a family may wait.
    """

    def __init__(
        self, fleet: Fleet, families: Iterable[str], *, queue_size: int, resends: bool
    ) -> None:
        self._fleet = fleet
        self._queue_size = queue_size
        self._most_losses = 1 if resends else 0
        self._waiting: dict[str, list[tuple[int, int, Ticket]]] = {each: [] for each in families}
        """Heaps by deadline and number."""
        self._credits: defaultdict[Option, float] = defaultdict(float)
        """How many requests the groups are behind their shares."""
        self.counters = {family: Counter[str]() for family in self._waiting}
        """What became of the requests of each family; see :class:`FamilyStats`."""

    def waiting(self, family: str) -> int:
        """How many requests of a family wait here."""
        return len(self._waiting[family])

    def arrived(self, now_ns: int, ticket: Ticket) -> list[Action]:
        """A request has come."""
        self.counters[ticket.family]["requests"] += 1
        if len(self._waiting[ticket.family]) >= self._queue_size:
            error = QueueFull(
                f"{self._queue_size} requests of {ticket.family!r} wait already; ask less, or plan "
                "for more"
            )
            return [self._refusal(ticket, "rejected", error)]
        self._wait(ticket)
        return self.settle(now_ns)

    def answered(self, now_ns: int, ticket: Ticket, outcome: str) -> None:
        """Its device has finished with it; ``outcome`` is a counter: answered, dropped, failed."""
        self._leave(ticket)
        counters = self.counters[ticket.family]
        counters[outcome] += 1
        if outcome == "answered" and now_ns > ticket.deadline_ns:
            counters["late"] += 1

    def returned(self, ticket: Ticket) -> None:
        """Its device did not take it, as it runs another variant by now; another one will."""
        self._leave(ticket)
        self._wait(ticket)

    def lost(self, ticket: Ticket) -> list[Refuse]:
        """Its device was lost with it."""
        device = self._leave(ticket)
        ticket.losses += 1
        if ticket.losses > self._most_losses:
            error = DeviceLost(
                f"a request of {ticket.family!r} was not answered: its device (number "
                f"{device.number}, {device.kind}) was lost, {ticket.losses} in all; see Ray's "
                "log of that node"
            )
            return [self._refusal(ticket, "failed", error)]
        self.counters[ticket.family]["resent"] += 1
        self._wait(ticket)
        return []

    def settle(self, now_ns: int) -> list[Action]:
        """Drop what waits in vain, and send what can be sent. After every change."""
        actions: list[Action] = []
        for family, waiting in self._waiting.items():
            while waiting and waiting[0][0] < now_ns:
                actions.append(self._dropped(family, "its deadline passed while it waited"))
            while waiting and not self._fleet.is_coming(family):
                actions.append(self._dropped(family, f"no device runs a variant of {family!r} now"))
            while waiting and (device := self._choose(family)) is not None:
                ticket = heapq.heappop(waiting)[2]
                ticket.device, ticket.load = device, device.load
                device.open += 1
                actions.append(Send(ticket))
        return actions

    def next_deadline_ns(self) -> int | None:
        """When to call :meth:`settle` if nothing happens before."""
        first_ns = min((each[0][0] for each in self._waiting.values() if each), default=NEVER_NS)
        return None if first_ns == NEVER_NS else first_ns + 1

    def _choose(self, family: str) -> Device | None:
        """Smooth weighted round robin over the groups; the least loaded device of the group."""
        best: dict[Option, Device] = {}
        shares: defaultdict[Option, float] = defaultdict(float)
        for device in self._fleet.ready(family):
            if not device.has_room:
                continue
            option = device.option
            assert option is not None
            shares[option] += max(_LEAST_QPS, device.planned_qps)
            if option not in best or device.open < best[option].open:
                best[option] = device
        if not best:
            return None
        # In requests: what is left of a plan before, which had other rates, counts for one or two.
        total_qps = sum(shares.values())
        for option, share in shares.items():
            self._credits[option] += share / total_qps
        chosen = max(best, key=lambda option: self._credits[option])
        self._credits[chosen] -= 1
        return best[chosen]

    def _wait(self, ticket: Ticket) -> None:
        heapq.heappush(self._waiting[ticket.family], (ticket.deadline_ns, ticket.number, ticket))

    @staticmethod
    def _leave(ticket: Ticket) -> Device:
        device = ticket.device
        assert device is not None
        device.open -= 1
        ticket.device = None
        return device

    def _dropped(self, family: str, why: str) -> Refuse:
        """The first of those that wait is dropped."""
        error = RequestDropped(DropReason.HOPELESS.value, f"a request was dropped: {why}")
        return self._refusal(heapq.heappop(self._waiting[family])[2], "dropped", error)

    def _refusal(self, ticket: Ticket, outcome: str, error: TrimsError) -> Refuse:
        self.counters[ticket.family][outcome] += 1
        return Refuse(ticket, error)
