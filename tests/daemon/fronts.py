"""A server without sockets, for those who answer clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from trims_shim.daemon.front import Front, Request
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.sessions import Limits, Session, Sessions
from trims_shim.daemon.store import Announce


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
        self.ended: list[str] = []
        self.sent: list[Any] = []
        self.replies: list[tuple[bytes, int, Any]] = []
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
        """Nobody listens."""
