"""How many requests of each family come in a second, from those that came (Proteus).

Requests are counted in bins of a second; the estimate is their exponentially weighted mean. As in
the artefact, a bin that is one second older has 0.615 of the weight (a "centre of mass" of 1.6), 20
bins count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

__all__ = ["Demand"]

_BIN_NS = 1_000_000_000
_CENTRE_OF_MASS = 1.6
_KEPT = _CENTRE_OF_MASS / (1 + _CENTRE_OF_MASS)
_BINS = 20


class Demand:
    """Counts requests; times never go back."""

    def __init__(self, families: Iterable[str]) -> None:
        self._families = tuple(families)
        self._bins: deque[Counter[str]] = deque(maxlen=_BINS)
        """Complete seconds, the last one at the end."""
        self._bin = Counter[str]()
        self._end_ns = 0
        """When the present second ends; 0 before the first request."""

    def came(self, now_ns: int, family: str) -> None:
        """Note a request."""
        if not self._end_ns:
            self._end_ns = now_ns + _BIN_NS
        self._advance(now_ns)
        self._bin[family] += 1

    def estimate_qps(self, now_ns: int) -> dict[str, float]:
        """By family; 0 for all in the first second."""
        self._advance(now_ns)
        sums = dict.fromkeys(self._families, 0.0)
        weight, total = 1.0, 0.0
        for counts in reversed(self._bins):
            for family, count in counts.items():
                sums[family] += weight * count
            total += weight
            weight *= _KEPT
        return {family: each / total if total else 0.0 for family, each in sums.items()}

    def last_qps(self, now_ns: int) -> int:
        """All requests of the last complete second."""
        self._advance(now_ns)
        return self._bins[-1].total() if self._bins else 0

    def _advance(self, now_ns: int) -> None:
        if not self._end_ns:
            return
        missed = (now_ns - self._end_ns) // _BIN_NS
        for _ in range(min(missed + 1, _BINS + 1)):
            self._bins.append(self._bin)
            self._bin = Counter[str]()
        if missed >= 0:
            self._end_ns += (missed + 1) * _BIN_NS
