"""Clients of prepared models: what they prove, and what they are told.

Owns the descriptor that a client offers, until somebody takes it, and the form of the answers. Used
by :mod:`trims_shim.daemon.prepared`, in the server's thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from trims_shim.daemon.front import Front
from trims_shim.daemon.prepared_events import Flight, Grant
from trims_shim.daemon.prepared_files import Published
from trims_shim.daemon.sessions import Session, check_readable_file
from trims_shim.errors import NotServed, TrimsError
from trims_shim.specs import Identity
from trims_shim.wire import messages
from trims_shim.wire.handover import clipped

__all__ = [
    "Offer",
    "flight_of",
    "hand_over_answer",
    "hit_reply",
    "refusal_reply",
    "reply_or_error",
]

_logger = logging.getLogger("trims_shim.daemon")


def reply_or_error(front: Front, answer: Callable[[], Any]) -> Any:
    """What ``answer`` returns, or the error that the client is told instead."""
    try:
        return answer()
    except TrimsError as error:
        return messages.ErrorReply(type(error).__name__, clipped(str(error)))
    # Border: a bug costs one request, also one that is taken up later, not the daemon.
    except Exception:
        _logger.exception("a request for a prepared model failed")
        front.counters["internal_errors"] += 1
        return messages.ErrorReply("DaemonError", "internal error; see the daemon's log")


def hand_over_answer(front: Front, session: Session, reply: Any) -> None:
    """Answer a request where it came, as a packet; who does not take it is let go."""
    try:
        front.hand_over(session, reply)
    except OSError as error:
        # BlockingIOError too: it would wait for an answer in vain.
        front.end_session(session, f"the client does not take its answer: {error}")


class Offer:
    """The descriptor of a ticket, closed at the end of the block unless it was taken."""

    def __init__(self, front: Front, session: Session, ticket: int) -> None:
        """Ticket 0: nothing is offered. Raises AccessDenied."""
        self._descriptor = front.take_offer(session, ticket) if ticket else -1

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self.take())

    def identity(self) -> Identity | None:
        """Of what is offered, if anything is. Raises AccessDenied, NotServed."""
        if self._descriptor < 0:
            return None
        status = check_readable_file(self._descriptor)
        if status.st_size == 0:
            raise NotServed("not_a_model", "the offered file is empty")
        return Identity.from_stat(status)

    def take(self) -> int:
        """It is the caller's now."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor


def hit_reply(grant: Grant, published: Published) -> messages.OpenPreparedReply:
    """The files of a model, and the lease."""
    return messages.OpenPreparedReply(
        "hit",
        lease=grant.lease,
        key=grant.key,
        model=published.model,
        model_identity=published.model_identity,
        weights=published.weights,
        weights_identity=published.weights_identity,
    )


def refusal_reply(reason: str, message: str) -> messages.OpenPreparedReply:
    """No model, and why."""
    return messages.OpenPreparedReply("refused", reason=reason, message=clipped(message))


def flight_of(message: messages.OpenPreparedRequest, identity: Identity | None) -> Flight:
    """What a request is for, as far as it can be told before the model is hashed."""
    if identity is None or not message.path:
        return message.digest or identity, message.recipe
    return identity, os.path.dirname(message.path), message.recipe
