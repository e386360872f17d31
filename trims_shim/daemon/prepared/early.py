"""Requests for prepared models that arrive before the directory is scanned.

They wait here, at most a session's limit of open requests, and are then answered all at once. A
session that ends takes its requests with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trims_shim.daemon.front import Front, Request
from trims_shim.errors import TooManyRequests

__all__ = ["EarlyRequests"]


class EarlyRequests:
    """See the module docstring. For the server's thread."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._waiting: list[tuple[Request, Callable[[], Any]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, request: Request, work: Callable[[], Any]) -> None:
        """Keep a request until :meth:`serve`. Raises TooManyRequests."""
        limit = self._front.sessions.limits.requests
        if sum(1 for each, _ in self._waiting if each.session is request.session) >= limit:
            raise TooManyRequests(f"more than {limit} open requests")
        self._waiting.append((request, work))

    def close_session(self, session: int) -> None:
        """Forget the requests of a session."""
        self._waiting = [each for each in self._waiting if each[0].session.number != session]

    def serve(self) -> None:
        """Serve them all, in the order of arrival."""
        while self._waiting:
            self._front.serve(*self._waiting.pop(0))
