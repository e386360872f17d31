"""Learn whether another request arrives soon, for each number of queued requests.

For each decision with ``n`` queued requests, whether the rule waited or not, record if and how soon
the next one arrived within the time that it could save by joining, ``S = L(n) + L(1) - L(n + 1)``
(``L``: latency of a batch). An arrival after an answer may be caused by it and does not count: a
caller that waits for its answers has no company, callers that ask together have.

This tells where waiting lowers the mean latency. If a request arrives with probability ``c``, after
``t`` on average, its latency falls by ``c (S - t)``. Those of the ``n`` queued and of ``m`` other
arrivals meanwhile grow by ``c (n + m) (t + L(n + 1) - L(n))`` if it arrives, and by
``(1 - c) (n + m) w`` after a wait of ``w`` in vain.
"""

from __future__ import annotations

from math import floor

from trims_shim.batching.profiles.profile import LatencyProfile

__all__ = ["Company"]

_CHANCES = 32
"""About how many of the last decisions count."""
_LEAST_WEIGHT = 1 / _CHANCES
# The longest wait, in mean times until the next request: by then 98 % of the requests that arrive
# have, if gaps are memoryless. With 2, callers that wait for their answers meet less often.
_WAITS_TIMES = 4.0


class Company:
    """What one rule learns, for queue lengths up to the largest size of its profile."""

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
        """The device time that one more request saves by joining, by queue length."""
        self.shares: list[float] = []
        """How often another request arrived in time, likewise."""
        self.patience_ns: list[int] = []
        """How long to wait to lower the mean latency, likewise; 0 if waiting raises it."""
        self._chances: list[int] = []
        """The number of decisions, likewise."""
        self._waited_ns: list[float] = []
        """The mean time until the next request; 0 for one that did not arrive in time."""
        # All of these are floats, since sums of integers and floats take ten times as long.
        self._terms_ns: list[tuple[float, float]] = []
        """What one more request saves by joining, and how much longer it makes the batch."""
        self._meanwhile = 0.0
        """The mean number of queued requests at the end of a batch."""
        self._size = 0
        self._since_ns = 0
        self.until_ns = 0
        """An arrival after this time does not count. May be changed after :meth:`expect`."""

    def know(self, profile: LatencyProfile) -> None:
        """Use a new profile, which may have more sizes than the last one."""
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
        """Note that ``size`` requests are queued and could start; return since when."""
        if self._size != size:
            self._size, self._since_ns = size, now_ns
        self.until_ns = self._since_ns + self.savings_ns[size]
        return self._since_ns

    def came(self, now_ns: int) -> None:
        """Note that another request has arrived."""
        if self._size:
            self._learn(now_ns - self._since_ns if now_ns <= self.until_ns else None)

    def answered(self, queued: int) -> None:
        """Note that a batch has ended with ``queued`` waiting; it may cause the next arrivals."""
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
