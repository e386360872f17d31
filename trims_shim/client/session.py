"""One request of a client to the daemon, without I/O.

Owns the match of replies to the request, and the decision that the daemon has stopped making
progress. Time is an argument. The connection feeds it arriving messages and asks it when to give
up. A request that was given up is not answered any more: its connection is closed.
"""

from __future__ import annotations

from typing import Any

from trims_shim import errors
from trims_shim.errors import DaemonError, LoadStalled, TrimsError
from trims_shim.wire import messages
from trims_shim.wire.codec import Envelope

__all__ = ["Conversation", "error_from"]


class Conversation:
    """The request of this number, from the moment at which it is sent to its reply."""

    def __init__(self, request_id: int, now_s: float, *, stall_timeout_s: float) -> None:
        self._request_id = request_id
        self._stall_timeout_s = stall_timeout_s
        self._deadline_s = now_s + stall_timeout_s
        self._done_bytes = -1

    def receive(self, envelope: Envelope, now_s: float) -> Any | None:
        """Return the reply; None for progress, and for what answers another request.

        Raises the error that an ErrorReply names.
        """
        message = envelope.message
        is_error = isinstance(message, messages.ErrorReply)
        # An error about a message that could not be read has no number.
        if envelope.request_id != self._request_id and not (is_error and envelope.request_id == 0):
            return None
        if isinstance(message, messages.Progress):
            # Only bytes count: a daemon that is alive but reads nothing does not help. A load that
            # hashed first and begins again goes on counting (trims_shim.daemon.loader).
            if message.done_bytes > self._done_bytes:
                self._done_bytes = message.done_bytes
                self._deadline_s = now_s + self._stall_timeout_s
            return None
        if isinstance(message, messages.ErrorReply):
            raise error_from(message)
        return message

    def check_stall(self, now_s: float) -> float:
        """Return the seconds until the request is given up. Raises LoadStalled when it is time."""
        left = self._deadline_s - now_s
        if left <= 0:
            raise LoadStalled(
                f"the daemon made no progress for {self._stall_timeout_s:g} s; see `trims status`"
            )
        return left


def error_from(reply: messages.ErrorReply) -> TrimsError:
    """Make the error that an ErrorReply names; an unknown name makes a DaemonError."""
    kind = getattr(errors, reply.error, None)
    if reply.error in errors.__all__ and isinstance(kind, type) and kind is not errors.NotServed:
        error: TrimsError = kind(reply.message)
        return error
    return DaemonError(f"{reply.error}: {reply.message}")
