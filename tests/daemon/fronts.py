"""A server without sockets, for those who answer clients."""

from __future__ import annotations

import itertools
import os
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from trims_shim import config
from trims_shim.daemon.eviction import LeastRecentlyUsed
from trims_shim.daemon.front import Front, Request
from trims_shim.daemon.loader import Loader
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.openings import Openings
from trims_shim.daemon.sessions import Limits, Session, Sessions
from trims_shim.daemon.store import Store
from trims_shim.daemon.tiers import DeviceSettings, HostTier, Tiers
from trims_shim.daemon.values import Announce
from trims_shim.memory.host import MemfdMemory
from trims_shim.specs import SegmentKind
from trims_shim.wire.handover import Peer


class FakeFront(Front):
    """Has one session; ``send`` is called for each packet that its client is sent."""

    is_stopping = False

    def __init__(
        self,
        session: Session,
        send: Callable[[], None] = lambda: None,
        limits: Limits | None = None,
    ) -> None:
        self.sessions = Sessions(limits or Limits())
        self.sessions._by_number[session.number] = session
        self.counters: Counter[str] = Counter()
        self.counters_of_user: Counter[int] = Counter()
        self.ended: list[str] = []
        self.sent: list[Any] = []
        self.replies: list[tuple[bytes, int, Any]] = []
        self.published: list[Announce] = []
        self.send = send

    def take_offer(self, request: Request, ticket: int) -> Offer:
        return request.session.offers.pop(ticket)

    def hand_over(self, session: Session, message: Any, descriptor: int | None = None) -> None:
        self.send()
        self.sent.append(message)

    def reply(self, routing: bytes, number: int, message: Any) -> None:
        self.replies.append((routing, number, message))

    def end_session(self, session: Session, reason: str) -> None:
        self.ended.append(reason)

    def publish(self, event: Announce) -> None:
        self.published.append(event)


class Later(Executor):
    """Runs what is submitted when it is told to, in the calling thread."""

    def __init__(self) -> None:
        self._work: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._work.append(partial(fn, *args, **kwargs))
        return Future()

    def run(self) -> None:
        while self._work:
            self._work.pop(0)()


class HostFront(FakeFront):
    """Has a host tier of 1 MiB, too, whose loads run when they are waited for.

    The tiers of devices are never made: that starts processes.
    """

    def __init__(self, session: Session, **settings: Any) -> None:
        super().__init__(session, **settings)
        self.descriptors: list[int] = []
        self.memory = MemfdMemory(SegmentKind.MEMFD)
        self._pool = Later()
        loader = Loader(
            self.memory, threads=1, wake=nothing, pool=self._pool, trusts_young_files=True
        )
        numbers = itertools.count(1)
        store = Store(
            1 << 20,
            policy=LeastRecentlyUsed(),
            footprint_bytes=self.memory.footprint_bytes,
            numbers=numbers,
        )
        self.host = HostTier(store, loader)
        settings_of_devices = DeviceSettings.of(config.load({}))
        self.tiers = Tiers(
            self.host, settings_of_devices, numbers=numbers, wake=nothing, pool=Later()
        )
        self.openings = Openings(self, self.tiers)

    def client(self, user: int) -> Session:
        """A further session."""
        number = len(self.sessions) + 1
        session = Session(number, socket.socket(), Peer(1000 + number, user, user), 3, b"token")
        self.sessions._by_number[number] = session
        return session

    def hand_over(self, session: Session, message: Any, descriptor: int | None = None) -> None:
        super().hand_over(session, message)
        if descriptor is not None:
            self.descriptors.append(os.dup(descriptor))

    def work(self) -> None:
        """Let the loads end."""
        self._pool.run()
        self.openings.finish()

    def close(self) -> None:
        for each in self.sessions:
            self.sessions.close(each)
            self.openings.close_session(each.number)
        self._pool.run()  # What a test that failed has left, or closing would wait for ever.
        self.tiers.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def nothing() -> None:
    """Wakes nobody."""
