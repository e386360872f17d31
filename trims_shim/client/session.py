"""One client's conversation with the daemon, without I/O.

Owns the request numbers, the match of replies to requests, and the decision that the daemon has
stopped making progress. Time is an argument. The connection feeds it arriving messages and asks it
when to give up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trims_shim import errors
from trims_shim.errors import DaemonError, LoadStalled, TrimsError
from trims_shim.wire import messages
from trims_shim.wire.codec import Envelope

__all__ = ["Conversation", "error_from"]


@dataclass(slots=True)
class _Pending:
    request_id: int
    deadline_s: float
    done_bytes: int = -1


class Conversation:
    """At most one request at a time; late answers of abandoned requests are ignored."""

    def __init__(self, *, token: bytes, stall_timeout_s: float) -> None:
        self._token = token
        self._stall_timeout_s = stall_timeout_s
        self._next = 1
        self._pending: _Pending | None = None

    def begin(self, message: Any, now_s: float) -> Envelope:
        """Return the envelope to send; forgets an abandoned request."""
        request_id, self._next = self._next, self._next + 1
        self._pending = _Pending(request_id, now_s + self._stall_timeout_s)
        return Envelope(request_id, self._token, message)

    def receive(self, envelope: Envelope, now_s: float) -> Any | None:
        """Return the reply; None for progress and for answers to abandoned requests.

        Raises the error that an ErrorReply names.
        """
        pending = self._pending
        if pending is None or not _is_for(pending, envelope):
            return None
        if isinstance(envelope.message, messages.Progress):
            # Only bytes count: a daemon that is alive but reads nothing does not help. A load that
            # hashed first and begins again goes on counting (trims_shim.daemon.loader).
            if envelope.message.done_bytes > pending.done_bytes:
                pending.done_bytes = envelope.message.done_bytes
                pending.deadline_s = now_s + self._stall_timeout_s
            return None
        self._pending = None
        if isinstance(envelope.message, messages.ErrorReply):
            raise error_from(envelope.message)
        return envelope.message

    def check_stall(self, now_s: float) -> float:
        """Return the seconds until the request is given up. Raises LoadStalled when it is time."""
        if self._pending is None:
            return self._stall_timeout_s
        left = self._pending.deadline_s - now_s
        if left <= 0:
            self._pending = None
            raise LoadStalled(
                f"the daemon made no progress for {self._stall_timeout_s:g} s; see `trims status`"
            )
        return left


def _is_for(pending: _Pending, envelope: Envelope) -> bool:
    """Whether this answers the request, or is an error about an unreadable message."""
    if envelope.request_id == 0:
        return isinstance(envelope.message, messages.ErrorReply)
    return envelope.request_id == pending.request_id


def error_from(reply: messages.ErrorReply) -> TrimsError:
    """Make the error that an ErrorReply names; an unknown name makes a DaemonError."""
    kind = getattr(errors, reply.error, None)
    if reply.error in errors.__all__ and isinstance(kind, type) and kind is not errors.NotServed:
        error: TrimsError = kind(reply.message)
        return error
    return DaemonError(f"{reply.error}: {reply.message}")
