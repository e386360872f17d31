"""How long a batch takes by its number of padded values, learned from batches of all lengths.

Each length has a profile of its own, because no one law holds for all models. But sizes times
lengths are many, and most of them run rarely. The latency of a size that has not run is read from
the curve of its family: ``n`` items that are padded to ``l`` take a time that depends on ``n l``
alone, which is about right on processors and GPUs alike. How much a length differs from the curve
is learned from its own batches (:class:`~trims_shim.batching.profiles.learning.LearnedProfile`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sized
from itertools import accumulate

from trims_shim.batching.profiles.profile import between

__all__ = ["LengthCurve"]

_KEPT = 16
"""Durations that are kept of each number of values."""
_REMEMBERED = 512
"""A number of values is forgotten after so many batches of any length without it."""
_REFRESH = 16
_WORTH_NS = 500_000
"""A new version is made after ``_REFRESH`` batches, if they ran for ``_WORTH_NS`` for each size of
each profile that rests on the curve, which takes some microseconds to make. It is also made after
half as many batches as there were at the last version, which is sooner at first."""
_ENOUGH = 4
"""The slope of the curve is known if the largest number of values is so many times the least."""
_FAR = 1024
"""The curve is continued to so many times the largest number of values, more than any batch has."""
_PLAUSIBLE = 2.0
"""The first batch of a shape is left out if it took more than so many times as long for each value
as one of fewer values: it has compiled or allocated something."""


class LengthCurve:
    """Durations in, expectations out. Not safe for threads without a lock.

    Unlike a profile it learns from the first batch of each size, too, as most batches are the
    first. No number of values is expected to take longer than a larger one has taken.
    """

    def __init__(self, keys: Sized = ((),), *, max_batch_size: int = 64) -> None:
        """``keys``: of the profiles that rest on the curve, each of ``max_batch_size`` sizes."""
        self._keys = keys
        self._max_batch_size = max_batch_size
        self.version = 0
        """Increases when the curve is made anew; 0 while nothing is known."""
        self._durations: dict[int, deque[tuple[int, int, int]]] = {}
        """By number of values: (number of the batch, its size, its duration)."""
        self._count = self._ran_ns = 0
        self._made_after = 0
        self._expected_ns: Callable[[float], float] = between({})

    def tell(self, size: int, length: int, duration_ns: int) -> None:
        """Learn from a batch of ``size`` items, padded to ``length``."""
        values = size * length
        self._count += 1
        self._ran_ns += duration_ns
        durations = self._durations.get(values)
        if durations is None:
            durations = self._durations[values] = deque(maxlen=_KEPT)
        durations.append((self._count, size, duration_ns))
        news = self._count - self._made_after
        worth_ns = _WORTH_NS * self._max_batch_size * len(self._keys)
        if (news >= _REFRESH and self._ran_ns >= worth_ns) or 2 * news >= self._made_after:
            self._make()

    def expected_ns(self, values: int) -> float:
        """The expected latency of a batch of so many values. Only valid if ``version`` is not 0."""
        return self._expected_ns(values)

    def _make(self) -> None:
        known_ns: dict[int, float] = {}
        most_ns = math.inf
        for values, durations in sorted(self._durations.items()):
            if self._count - durations[-1][0] > _REMEMBERED:
                self._durations.pop(values, None)
                continue
            told = [*durations]
            median_ns = statistics.median_low([each for _, _, each in told])
            has_run_twice = len({size for _, size, _ in told}) < len(told)  # in one shape
            if has_run_twice or median_ns <= values * most_ns:
                known_ns[values] = median_ns
                most_ns = _PLAUSIBLE * median_ns / values
        least_ns = [*accumulate(reversed(known_ns.values()), min)][::-1]
        self._expected_ns = between(_continued(dict(zip(known_ns, least_ns, strict=True))))
        self.version += 1
        self._made_after, self._ran_ns = self._count, 0


def _continued(known_ns: Mapping[int, float]) -> Mapping[int, float]:
    """The same, continued beyond the largest in a straight line if the slope is known."""
    if not known_ns or _ENOUGH * min(known_ns) > max(known_ns):
        return known_ns
    last = max(known_ns)
    more_ns = known_ns[last] - between(known_ns)(last / _ENOUGH)
    return {**known_ns, _FAR * last: known_ns[last] + more_ns * (_FAR - 1) / (1 - 1 / _ENOUGH)}
