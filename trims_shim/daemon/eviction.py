"""Which unleased image goes first when room is needed.

Pure. A policy sees candidates only (never a leased, pinned or loading image) and ranks them; how
many go is the store's business. Policies are stateless over :class:`Candidate`, so that the store
and a simulation run the same object.

Candidates come in the order of their last use, and the ranking is read only as far as room is
needed: a load that makes room among many images must not look at all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from trims_shim.specs import Digest

__all__ = ["Candidate", "EvictionPolicy", "LeastRecentlyUsed"]


@dataclass(slots=True)
class Candidate:
    """An image that may be evicted, with the figures that policies weigh and never change."""

    digest: Digest
    resident_bytes: int
    loaded_ns: int
    used_ns: int
    opens: int
    load_ns: int


class EvictionPolicy(Protocol):
    """Ranks candidates for eviction."""

    def rank(self, candidates: Iterable[Candidate], now_ns: int) -> Iterable[Candidate]:
        """The order in which they should go; leaving one out keeps it.

        ``candidates``: least recently used first.
        """


class LeastRecentlyUsed:
    """Evict what was opened or released longest ago (TrIMS §4.3, the default there)."""

    def rank(self, candidates: Iterable[Candidate], now_ns: int) -> Iterable[Candidate]:
        """Oldest use first: as they come."""
        return candidates
