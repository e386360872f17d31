"""Leases: the claims of sessions on the things of one store, by number.

Pure. All stores of a daemon share the counter of the numbers, because a client gives a lease up by
its number alone. A session has only what it was granted, and no lease of it is left once it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Leases"]

_Key = TypeVar("_Key", bound=Hashable)


class Leases(Generic[_Key]):
    """See the module docstring."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._held: dict[int, tuple[int, _Key]] = {}
        self._by_session: defaultdict[int, set[int]] = defaultdict(set)
        self._by_key: defaultdict[_Key, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, session: int, key: _Key) -> int:
        """Lease something to a session; return the number of the lease."""
        lease = next(self._numbers)
        self._held[lease] = (session, key)
        self._by_session[session].add(lease)
        self._by_key[key].add(lease)
        return lease

    def release(self, session: int, lease: int) -> _Key | None:
        """End a lease; return what was leased, None if it is not the session's own."""
        if lease not in self._by_session.get(session, ()):
            return None
        _, key = self._held.pop(lease)
        self._by_session[session].discard(lease)
        self._by_key[key].discard(lease)
        return key

    def close_session(self, session: int) -> list[_Key]:
        """End a session for good; return what it had leased."""
        ended = []
        for lease in self._by_session.pop(session, ()):
            _, key = self._held.pop(lease)
            self._by_key[key].discard(lease)
            ended.append(key)
        return ended

    def forget(self, key: _Key) -> None:
        """Forget a thing, and all leases of it."""
        for lease in self._by_key.pop(key, ()):
            session, _ = self._held.pop(lease)
            self._by_session[session].discard(lease)

    def of_session(self, session: int) -> int:
        """How many leases a session has."""
        return len(self._by_session.get(session, ()))

    def of(self, key: _Key) -> int:
        """How many leases of one thing there are."""
        return len(self._by_key.get(key, ()))
