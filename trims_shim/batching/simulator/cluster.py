"""Several devices behind a router, each with a policy of its own: as serving clusters are built.

A :class:`Cluster` is a :class:`~trims_shim.batching.protocol.Policy` made of others, so it runs in
the same loop. A request is given to one node when it arrives, and stays there. For devices of one
kind, a single policy with several devices and a shared queue (late binding) does better. This is
for devices that differ, and for measuring what early binding costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trims_shim.batching.protocol import (
    FLUSH,
    TIMER,
    Action,
    Drop,
    Event,
    Finished,
    Policy,
    Preempt,
    Preempted,
    Request,
    Run,
)

if TYPE_CHECKING:
    from random import Random

__all__ = ["Cluster", "Node", "Route", "least_loaded", "weighted"]


@dataclass(slots=True, eq=False)
class Node:
    """One device with its policy, and what a router may know about it."""

    policy: Policy
    """For one device, which it knows as number 0."""
    keys: Iterable[Hashable] = (None,)
    """The keys of the requests that it can answer."""
    cost_ns: float = 1.0
    """Time for one request when the device is kept busy; its throughput is 1 / cost."""
    weight: float = 1.0
    """Its share of the requests, for :func:`weighted`."""
    open: int = field(default=0, init=False)
    """Requests that it was given, and has neither answered nor dropped."""
    wake_ns: int | None = field(default=None, init=False)
    """When its policy wants TIMER; None for never."""


Route = Callable[[Request, Sequence[Node]], int]
"""(request, the nodes that can answer it) -> the index of one of them."""


def weighted(random: Random) -> Route:
    """Route at random by the nodes' weights: the shares that a placement planned, or equal ones."""

    def route(request: Request, nodes: Sequence[Node]) -> int:
        return random.choices(range(len(nodes)), [node.weight for node in nodes])[0]

    return route


def least_loaded(request: Request, nodes: Sequence[Node]) -> int:
    """The node that, kept busy, would answer the request first; the first of equal ones."""
    loads = [(node.open + 1) * node.cost_ns for node in nodes]
    return loads.index(min(loads))


class Cluster:
    """Node ``i`` is device ``i``. Raises ValueError for a request whose key no node has."""

    def __init__(self, nodes: Sequence[Node], route: Route) -> None:
        self.nodes = tuple(nodes)
        self._route = route
        self._hosts: dict[Hashable, list[int]] = {}
        self._candidates: dict[Hashable, list[Node]] = {}
        self.find_hosts()
        self._wakes: list[tuple[int, int]] = []
        """A heap of (time, node); an entry is void if its time is no longer the node's."""

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """As :class:`~trims_shim.batching.protocol.Policy` has it; nothing can be cancelled."""
        if isinstance(event, Request):
            return self._ask(self._receive(event), now_ns, event)
        if isinstance(event, Finished):
            self.nodes[event.device].open -= len(event.batch)
            own = Finished(0, event.batch, event.started_ns, event.is_typical)
            return self._ask(event.device, now_ns, own)
        if isinstance(event, Preempted):
            return self._ask(event.device, now_ns, Preempted(0, event.batch, event.started_ns))
        if event is TIMER:
            return [each for index in self._due(now_ns) for each in self._ask(index, now_ns, TIMER)]
        if event is FLUSH:
            every = range(len(self.nodes))
            return [each for index in every for each in self._ask(index, now_ns, FLUSH)]
        raise ValueError("a cluster cancels nothing")

    def next_deadline_ns(self) -> int | None:
        """The earliest of its nodes' deadlines."""
        return self._next_wake_ns()

    def _next_wake_ns(self) -> int | None:
        """As above, also in sub-classes, which may have deadlines of their own."""
        wakes, nodes = self._wakes, self.nodes
        while wakes and nodes[wakes[0][1]].wake_ns != wakes[0][0]:
            heapq.heappop(wakes)
        return wakes[0][0] if wakes else None

    @property
    def hosted(self) -> Collection[Hashable]:
        """The keys of requests that some node can answer."""
        return self._hosts.keys()

    def find_hosts(self) -> None:
        """Note which nodes answer which requests; to be called when their keys have changed."""
        self._hosts.clear()
        for index, node in enumerate(self.nodes):
            for key in node.keys:
                self._hosts.setdefault(key, []).append(index)
        self._candidates = {
            key: [self.nodes[index] for index in hosts] for key, hosts in self._hosts.items()
        }

    def _receive(self, request: Request) -> int:
        candidates = self._candidates.get(request.key)
        if candidates is None:
            raise ValueError(f"no node answers requests of {request.key!r}")
        chosen = self._route(request, candidates)
        candidates[chosen].open += 1
        return self._hosts[request.key][chosen]

    def _due(self, now_ns: int) -> list[int]:
        """The nodes whose time has come."""
        due: list[int] = []
        while (wake_ns := self._next_wake_ns()) is not None and wake_ns <= now_ns:
            _, index = heapq.heappop(self._wakes)
            self.nodes[index].wake_ns = None
            due.append(index)
        return due

    def _ask(self, index: int, now_ns: int, event: Event) -> Sequence[Action]:
        node = self.nodes[index]
        actions = node.policy.on_event(now_ns, event)
        wake_ns = node.policy.next_deadline_ns()
        if wake_ns != node.wake_ns:
            node.wake_ns = wake_ns
            if wake_ns is not None:
                heapq.heappush(self._wakes, (wake_ns, index))
        return [self._translated(each, index, node) for each in actions] if actions else ()

    def _translated(self, action: Action, index: int, node: Node) -> Action:
        if isinstance(action, Run):
            return Run(index, action.batch)
        if isinstance(action, Drop):
            node.open -= len(action.requests)
            return action
        return Preempt(index)
