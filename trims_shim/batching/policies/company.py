"""Whether another request comes soon: learned for each number of those that are queued already.

Of each decision with ``n`` queued is remembered whether the next one came within the time that it
could save by joining, ``S = L(n) + L(1) - L(n + 1)``, and how soon, whether it was waited for or
not. Who comes after an answer may do so because of it and is not counted: a caller that waits for
its answers has no company, callers that ask together have.

From that follows where waiting lowers the mean latency. With the chance ``c`` that one comes, after
``t`` on average, it is ``c (S - t)`` less for that one, and more for the ``n`` that are queued and
the ``m`` that come meanwhile beside it: ``c (n + m) (t + L(n + 1) - L(n))`` where it comes, and
``(1 - c) (n + m) w`` where it was waited for ``w`` in vain.
"""

from __future__ import annotations

from math import floor

from trims_shim.batching.profile import LatencyProfile

__all__ = ["Company"]

_CHANCES = 32
"""The last ones that count, about."""
_LEAST_WEIGHT = 1 / _CHANCES
# Of the mean time until the next one came: by then, 98 % of those that come have, if gaps are
# memoryless. With 2, callers that wait for their answers meet less often.
_WAITS_TIMES = 4.0


class Company:
    """One of each rule; sizes go up to the largest of its profile."""

    __slots__ = (
        "_chances",
        "_meanwhile",
        "_since_ns",
        "_size",
        "_terms_ns",
        "_waited_ns",
        "patience_ns",
        "savings_ns",
        "shares",
        "until_ns",
    )

    def __init__(self) -> None:
        self.savings_ns: list[int] = []
        """What one more saves by joining, by the number of those queued."""
        self.shares: list[float] = []
        """How often another one came in time, likewise."""
        self.patience_ns: list[int] = []
        """How long waiting for it lowers the mean latency, likewise; 0 where it does not."""
        self._chances: list[int] = []
        self._waited_ns: list[float] = []
        """The time until it came, 0 where it did not, on average."""
        # All of these are floats, since sums of integers and floats take ten times as long.
        self._terms_ns: list[tuple[float, float]] = []
        """What one more saves by joining, and how much longer it makes the batch."""
        self._meanwhile = 0.0
        """How many were queued when a batch ended, on average."""
        self._size = 0
        self._since_ns = 0
        self.until_ns = 0
        """Who comes later than this comes too late; may be set after :meth:`expect`."""

    def know(self, profile: LatencyProfile) -> None:
        """``profile`` is new; it may have more sizes than the one before."""
        latency_ns, largest = profile.latency_ns, profile.max_batch_size
        alone_ns = latency_ns(1)
        savings_ns = [
            latency_ns(size) + alone_ns - latency_ns(size + 1) for size in range(1, largest)
        ]
        self.savings_ns = [0, *savings_ns, 0]
        self._terms_ns = [(float(each), float(alone_ns - each)) for each in self.savings_ns]
        if self._size >= largest:
            self._size = 0
        unknown = largest + 1 - len(self.shares)
        self.shares += [0.0] * unknown
        self.patience_ns += [0] * unknown
        self._chances += [0] * unknown
        self._waited_ns += [0.0] * unknown

    def expect(self, size: int, now_ns: int) -> int:
        """``size`` are queued and could start; returns since when that is so."""
        if self._size != size:
            self._size, self._since_ns = size, now_ns
        self.until_ns = self._since_ns + self.savings_ns[size]
        return self._since_ns

    def came(self, now_ns: int) -> None:
        """Another one is here."""
        if self._size:
            self._learn(now_ns - self._since_ns if now_ns <= self.until_ns else None)

    def answered(self, queued: int) -> None:
        """A batch has ended, while which so many have come; others may come because it has."""
        self._meanwhile += (queued - self._meanwhile) * _LEAST_WEIGHT
        if self._size:
            self._learn(None)

    def _learn(self, gap_ns: int | None) -> None:
        size, self._size = self._size, 0
        if self.until_ns <= self._since_ns:
            return
        chances = self._chances[size] = self._chances[size] + 1
        weight = 1 / chances if chances < _CHANCES else _LEAST_WEIGHT
        kept = 1.0 - weight
        share, waited_ns = self.shares[size] * kept, self._waited_ns[size] * kept
        if gap_ns is not None:
            share += weight
            waited_ns += weight * gap_ns
        self.shares[size], self._waited_ns[size] = share, waited_ns
        if share:
            self.patience_ns[size] = self._patience_ns(size, share, waited_ns)

    def _patience_ns(self, size: int, share: float, waited_ns: float) -> int:
        saving_ns, longer_ns = self._terms_ns[size]
        delayed = float(size)
        if self._meanwhile > share:
            delayed += self._meanwhile - share
        gained_ns = share * (saving_ns - delayed * longer_ns) - (1.0 + delayed) * waited_ns
        if gained_ns <= 0.0:
            return 0
        wait_ns = _WAITS_TIMES * waited_ns / share
        return floor(wait_ns) if gained_ns > (1.0 - share) * delayed * wait_ns else 0
