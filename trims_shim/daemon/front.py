"""The way to the clients: what handlers of requests need of the server, and how they answer.

A request is answered where it came from, once, now or later. :meth:`Front.serve` is the border:
whatever goes wrong with a request costs this one request, not the daemon.
"""

from __future__ import annotations

import abc
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from trims_shim.daemon.offers import Offer
from trims_shim.daemon.sessions import Session, Sessions
from trims_shim.daemon.values import Announce
from trims_shim.errors import TrimsError
from trims_shim.wire.handover import clipped
from trims_shim.wire.messages import ErrorReply

__all__ = ["INTERNAL_ERROR", "Front", "Request"]

_logger = logging.getLogger("trims_shim.daemon")

INTERNAL_ERROR = "internal error; see the daemon's log"


class Request(NamedTuple):
    """The client that waits for an answer, and where that goes.

    ``number`` is the client's own for the request. ``routing`` leads to the client's control
    socket; None: the request came as a packet, and so does its answer.
    """

    session: Session
    number: int = 0
    routing: bytes | None = None


class Front(abc.ABC):
    """Talks with the clients. Used by the server's thread only."""

    sessions: Sessions
    counters: Counter[str]
    counters_of_user: Counter[int]
    """How many names of counters each user has brought in."""
    is_stopping: bool
    """No new opening is let in."""

    def serve(self, request: Request, work: Callable[[], Any]) -> None:
        """Answer with what ``work`` returns or raises; None: there is no answer, or a later one."""
        try:
            reply = work()
        # Border: a bug in a handler costs one request, not the daemon.
        except Exception as error:
            reply = self.error_reply(error)
        if reply is not None:
            self.answer(request, reply)

    def answer(self, request: Request, message: Any) -> None:
        """Send a reply, or a sign of life. A client that is gone is sent nothing."""
        if request.routing is not None:
            self.reply(request.routing, request.number, message)
        elif self.sessions.get(request.session.number) is not None:
            try:
                self.hand_over(request.session, message)
            except OSError as error:
                # BlockingIOError too: a client that is not told would wait for an answer in vain.
                reason = f"the client does not take its answer: {error}"
                self.end_session(request.session, reason)

    def error_reply(self, error: Exception) -> ErrorReply:
        """What a client is told of an error. One that is no TrimsError is a bug, and logged."""
        if isinstance(error, TrimsError):
            return ErrorReply(type(error).__name__, clipped(str(error)))
        _logger.error("a request failed", exc_info=error)
        self.counters["internal_errors"] += 1
        return ErrorReply("DaemonError", INTERNAL_ERROR)

    @abc.abstractmethod
    def take_offer(self, request: Request, ticket: int) -> Offer:
        """What a request's client offered under a ticket; the caller closes it.

        Raises AccessDenied.
        """

    @abc.abstractmethod
    def hand_over(self, session: Session, message: Any, descriptor: int | None = None) -> None:
        """Send a packet with a descriptor, or without one. Raises OSError."""

    @abc.abstractmethod
    def reply(self, routing: bytes, number: int, message: Any) -> None:
        """Send a message to a client's control socket."""

    @abc.abstractmethod
    def end_session(self, session: Session, reason: str) -> None:
        """Close a connection."""

    @abc.abstractmethod
    def publish(self, event: Announce) -> None:
        """Tell the subscribers."""
