"""An index from an address back to the owner of the mapping there.

Invariants: as in :mod:`trims_shim.client.arenas`, finalizers change the index, so every change is
one dictionary operation and no lock is taken. A reader that loses a race finds no entry for an
address, which means "unknown"; it never finds another owner.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["AddressIndex"]

_Owner = TypeVar("_Owner")


class AddressIndex(Generic[_Owner]):
    """Mappings that do not overlap, by address.

    The sorted list of addresses is a cache; it is valid for one stamp.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, Callable[[], _Owner | None]]] = {}
        self._stamps = itertools.count()
        self._stamp = next(self._stamps)
        self._sorted: tuple[int, list[int]] = (self._stamp, [])

    def add(self, address: int, size_bytes: int, owner: Callable[[], _Owner | None]) -> None:
        """Add a mapping. ``owner()`` returns its owner, or None once nothing uses it."""
        self._entries[address] = (size_bytes, owner)
        self._stamp = next(self._stamps)

    def remove(self, address: int) -> None:
        """Forget a mapping, before the address may be handed out again."""
        self._entries.pop(address, None)
        self._stamp = next(self._stamps)

    def find(self, address: int, size_bytes: int) -> tuple[_Owner, int] | None:
        """Return (owner, offset in bytes) of the mapping of ``[address, address + size_bytes)``."""
        starts = self._starts()
        index = bisect.bisect_right(starts, address) - 1
        if index < 0:
            return None
        start = starts[index]
        entry = self._entries.get(start)
        if entry is None or address - start + size_bytes > entry[0]:
            return None
        owner = entry[1]()
        return None if owner is None else (owner, address - start)

    def _starts(self) -> list[int]:
        stamp = self._stamp
        cached_stamp, starts = self._sorted
        if cached_stamp != stamp:
            starts = sorted(self._entries)
            self._sorted = (stamp, starts)
        return starts
