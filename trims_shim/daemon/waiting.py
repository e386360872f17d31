"""Requests that are not answered yet, by session and number, and their count by session and user.

Every question takes the same time however many there are: one user may have thousands, and the
server's thread asks for each request.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from trims_shim.daemon.front import Request
from trims_shim.daemon.offers import Offer

__all__ = ["Waiting", "WaitingRequests"]


class Waiting(NamedTuple):
    """A request that is not answered yet, and its file, which a load may take."""

    request: Request
    offer: Offer


class WaitingRequests:
    """See the module docstring."""

    def __init__(self) -> None:
        self._by_session: dict[int, dict[int, Waiting]] = {}
        self._of_user: Counter[int] = Counter()

    def put(self, request: Request, offer: Offer) -> None:
        """Add a request; its number must not be in use in its session."""
        session = request.session
        waiting = Waiting(request, offer)
        self._by_session.setdefault(session.number, {})[request.number] = waiting
        self._of_user[session.peer.uid] += 1

    def get(self, session: int, request: int) -> Waiting | None:
        """The request; None if it was answered, or given up."""
        return self._by_session.get(session, {}).get(request)

    def pop(self, session: int, request: int) -> Waiting | None:
        """Remove a request and return it, as :meth:`get`."""
        requests = self._by_session.get(session, {})
        waiting = requests.pop(request, None)
        if waiting is not None:
            self._forget(waiting)
            if not requests:
                del self._by_session[session]
        return waiting

    def withdraw(self, session: int, ticket: int) -> None:
        """Remove the requests for the file of a ticket, and close it."""
        for number, waiting in list(self._by_session.get(session, {}).items()):
            if waiting.offer.message.ticket == ticket:
                self.pop(session, number)
                waiting.offer.close()

    def close_session(self, session: int) -> None:
        """Remove all requests of a session, and close their files."""
        for waiting in self._by_session.pop(session, {}).values():
            self._forget(waiting)
            waiting.offer.close()

    def count(self, session: int) -> int:
        """How many a session has."""
        return len(self._by_session.get(session, ()))

    def count_of_user(self, user: int) -> int:
        """How many all sessions of a user have."""
        return self._of_user[user]

    def _forget(self, waiting: Waiting) -> None:
        user = waiting.request.session.peer.uid
        self._of_user[user] -= 1
        if not self._of_user[user]:
            del self._of_user[user]
