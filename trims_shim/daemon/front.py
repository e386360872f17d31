"""What those who open images and prepare models need of the server: a way to the clients."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from trims_shim.daemon.sessions import Session, Sessions
from trims_shim.daemon.store import Announce

__all__ = ["Front"]


class Front(Protocol):
    """Who talks with the clients."""

    sessions: Sessions
    counters: Counter[str]

    @property
    def is_stopping(self) -> bool:
        """Whether no new opening is let in."""

    def take_offer(self, session: Session, ticket: int) -> int:
        """The descriptor that was offered under a ticket, owned by the caller.

        Raises AccessDenied.
        """

    def hand_over(self, session: Session, message: Any, descriptor: int | None = None) -> None:
        """Send a packet with a descriptor, or without one. Raises OSError."""

    def reply(self, routing: bytes, request: int, message: Any) -> None:
        """Answer a request."""

    def end_session(self, session: Session, reason: str) -> None:
        """Close a connection."""

    def publish(self, event: Announce) -> None:
        """Tell who listens."""
