"""Requests for prepared models that came before the directory was looked through.

They wait here, as many of a session as it may have open, and are answered all at once. A session
that ends takes its requests with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trims_shim.daemon.front import Front
from trims_shim.daemon.prepared_clients import hand_over_answer, reply_or_error
from trims_shim.daemon.sessions import Session
from trims_shim.errors import TooManyRequests

__all__ = ["EarlyRequests"]


@dataclass(frozen=True, slots=True)
class _Early:
    """``routing`` None: it came as a packet of the handover socket, by which it is answered."""

    session: int
    routing: bytes | None
    request: int
    answer: Callable[[Session], Any]


class EarlyRequests:
    """See the module docstring. For the server's thread."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._waiting: list[_Early] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(
        self,
        session: Session,
        routing: bytes | None,
        request: int,
        answer: Callable[[Session], Any],
    ) -> None:
        """Keep a request; ``answer`` gives the reply, or TrimsError. Raises TooManyRequests."""
        limit = self._front.sessions.limits.requests
        if sum(1 for each in self._waiting if each.session == session.number) >= limit:
            raise TooManyRequests(f"more than {limit} open requests")
        self._waiting.append(_Early(session.number, routing, request, answer))

    def close_session(self, session: int) -> None:
        """Nobody waits for its answers any more."""
        self._waiting = [each for each in self._waiting if each.session != session]

    def answer(self) -> None:
        """All of them, in the order in which they came."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._answer(each)

    def _answer(self, early: _Early) -> None:
        session = self._front.sessions.get(early.session)
        if session is None:
            return
        reply = reply_or_error(self._front, lambda: early.answer(session))
        if early.routing is not None:
            self._front.reply(early.routing, early.request, reply)
        else:
            hand_over_answer(self._front, session, reply)
