"""Which unleased image goes first when room is needed.

Pure. A policy sees candidates only (never a leased, pinned or loading image) and ranks them; how
many go is the store's business. Each tier has a policy of its own, told what is used and what goes.

Candidates come in the order of their last use, and the ranking is read only as far as room is
needed: a load that makes room among many images must not look at all of them if the policy need
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from trims_shim.daemon.recent import Recent
from trims_shim.specs import Digest

__all__ = [
    "Candidate",
    "EvictionPolicy",
    "FirstInFirstOut",
    "GreedyDualSizeFrequency",
    "LeastFrequentlyUsed",
    "LeastRecentlyFrequentlyUsed",
    "LeastRecentlyUsed",
    "Never",
    "eviction_policy",
]

_USES_LIMIT = 8192


@dataclass(slots=True)
class Candidate:
    """An image that may be evicted, with the figures that policies weigh and never change."""

    digest: Digest
    resident_bytes: int
    loaded_ns: int
    used_ns: int
    opens: int
    load_ns: int


class EvictionPolicy:
    """Ranks candidates for eviction."""

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """The order in which they should go; leaving one out keeps it.

        ``candidates``: least recently used first.
        """
        raise NotImplementedError

    def used(self, image: Candidate) -> None:
        """A client opened the image (``image.opens`` counts it), or had it loaded for later."""

    def gone(self, image: Candidate) -> None:
        """The image was dropped, for whatever reason."""

    def resized(self, budget_bytes: int) -> None:
        """The tier has another budget."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evict what was opened or released longest ago (TrIMS §4.3, the default there)."""

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """As they come."""
        return candidates


class FirstInFirstOut(EvictionPolicy):
    """Evict what was loaded first (TrIMS §4.3)."""

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """In the order of their loads."""
        return sorted(candidates, key=lambda image: image.loaded_ns)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evict what was opened least often since it was loaded (TrIMS §4.3: least commonly used)."""

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """Of equals, the least recently used first."""
        return sorted(candidates, key=lambda image: image.opens)


class GreedyDualSizeFrequency(EvictionPolicy):
    """Evict the smallest ``L + opens * load time / bytes`` (Cherkasova 1998, GDSF).

    ``L`` is the value of the last image that went: images that are not used any more fall behind.
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._values: dict[Digest, float] = {}

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """By their values when they were last used."""
        return sorted(candidates, key=lambda image: self._values.get(image.digest, 0.0))

    def used(self, image: Candidate) -> None:
        """Value it anew."""
        worth = max(1, image.load_ns) / max(1, image.resident_bytes)
        self._values[image.digest] = self._floor + max(1, image.opens) * worth

    def gone(self, image: Candidate) -> None:
        """Raise ``L``."""
        self._floor = max(self._floor, self._values.pop(image.digest, 0.0))


class LeastRecentlyFrequentlyUsed(EvictionPolicy):
    """Evict where ``sum over uses of 2**-age`` is smallest (Lee et al. 1999, LRFU).

    A use is a turnover old when images of as many bytes as the budget have gone since: so recent
    uses count more where room is scarce, and nothing has to be tuned. Uses of images that have gone
    are remembered, for some thousands of images.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.resized(budget_bytes)
        self._turnovers = 0.0
        self._sums: Recent[Digest, float] = Recent(_USES_LIMIT)
        """The logarithm of each sum, plus the turnovers when it was that: it does not change as
        time goes by, and neither does the order of images that nobody uses."""

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """Of equals, the least recently used first."""
        sums = self._sums
        return sorted(candidates, key=lambda image: sums.get(image.digest, -math.inf))

    def used(self, image: Candidate) -> None:
        """Count the use."""
        before = 2.0 ** (self._sums.get(image.digest, -math.inf) - self._turnovers)
        self._sums.put(image.digest, math.log2(before + 1.0) + self._turnovers)

    def gone(self, image: Candidate) -> None:
        """Let all uses age."""
        self._turnovers += image.resident_bytes / self._budget_bytes

    def resized(self, budget_bytes: int) -> None:
        """Take as long to turn over."""
        self._budget_bytes = max(1, budget_bytes)


class Never(EvictionPolicy):
    """Keep everything: a load that does not fit is the client's own (TrIMS §4.3)."""

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """Nothing."""
        return ()


_MAKERS: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "lru": lambda budget_bytes: LeastRecentlyUsed(),
    "lrfu": LeastRecentlyFrequentlyUsed,
    "gdsf": lambda budget_bytes: GreedyDualSizeFrequency(),
    "lfu": lambda budget_bytes: LeastFrequentlyUsed(),
    "fifo": lambda budget_bytes: FirstInFirstOut(),
    "never": lambda budget_bytes: Never(),
}


def eviction_policy(name: str, budget_bytes: int) -> EvictionPolicy:
    """Make a policy for a tier of ``budget_bytes``; ``name`` is a value of ``TRIMS_EVICTION``."""
    return _MAKERS[name](budget_bytes)
