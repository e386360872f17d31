"""Requests for prepared models that came before the directory was looked through.

They wait here, as many of a session as it may have open, and are answered all at once. A session
that ends takes its requests with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trims_shim.daemon.prepared_clients import Front
from trims_shim.daemon.sessions import Session
from trims_shim.errors import TooManyRequests, TrimsError
from trims_shim.wire import messages
from trims_shim.wire.handover import clipped

__all__ = ["EarlyRequests"]

_logger = logging.getLogger("trims_shim.daemon")


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
        reply: Any
        try:
            reply = early.answer(session)
        except TrimsError as error:
            reply = messages.ErrorReply(type(error).__name__, clipped(str(error)))
        # Border: a bug costs one request, also one that is taken up later, not the daemon.
        except Exception:
            _logger.exception("a request for a prepared model failed")
            self._front.counters["internal_errors"] += 1
            reply = messages.ErrorReply("DaemonError", "internal error; see the daemon's log")
        if early.routing is not None:
            self._front.reply(early.routing, early.request, reply)
            return
        try:
            self._front.hand_over(session, reply)
        except OSError as error:
            self._front.end_session(session, f"the client does not take its answer: {error}")
