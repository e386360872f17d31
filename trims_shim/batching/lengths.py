"""What a batch takes by its padded values: learned from all lengths, for those that say little yet.

Each length is learned by itself, since no one law holds for all models. But sizes times lengths
are many, most of them run rarely, and what a size takes that has not run has to be guessed. Then it
is read from the curve of its family: what ``n`` items that are padded to ``l`` take, by ``n l``
alone, which is about so on processors and GPUs alike. By how much a length differs from that, its
own batches tell (:class:`~trims_shim.batching.profiling.LearnedProfile`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sized
from itertools import accumulate

from trims_shim.batching.profile import between

__all__ = ["LengthCurve"]

_KEPT = 16
"""Durations of each number of values."""
_REMEMBERED = 512
"""For so many batches of any length a number of values is remembered after it last ran."""
_REFRESH = 16
_WORTH_NS = 500_000
"""So many batches are between two versions, and they have run so long for each size of each profile
that rests on it, which takes some microseconds to make; at first half as many as there were."""
_ENOUGH = 4
"""Where the most are so many times the fewest, it is known how much more cost."""
_FAR = 1024
"""So many times the most that have run is more than will."""
_PLAUSIBLE = 2.0
"""So many times what fewer values took for each: a batch that takes longer has compiled or
allocated something, if it is the first of its shape."""


class LengthCurve:
    """Durations in, expectations out. Not safe for threads without a lock.

    Unlike a profile it is told of the first batch of each size, too, as most are the first. Nothing
    is expected to take longer than something larger has taken.
    """

    def __init__(self, keys: Sized = ((),), *, max_batch_size: int = 64) -> None:
        """``keys``: as many profiles rest on it, of so many sizes."""
        self._keys = keys
        self._max_batch_size = max_batch_size
        self.version = 0
        """Another one when there is more than little news; 0 while nothing is known."""
        self._durations: dict[int, deque[tuple[int, int, int]]] = {}
        """By values; each with the number of its batch, and its size."""
        self._count = self._ran_ns = 0
        self._made_after = 0
        self._expected_ns: Callable[[float], float] = between({})

    def tell(self, size: int, length: int, duration_ns: int) -> None:
        """A batch of ``size`` items, padded to ``length``, has taken so long."""
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
        """What a batch of so many values is expected to take. Only where ``version`` is not 0."""
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
    """The same, and beyond the largest on the line on which it is, if it is known."""
    if not known_ns or _ENOUGH * min(known_ns) > max(known_ns):
        return known_ns
    last = max(known_ns)
    more_ns = known_ns[last] - between(known_ns)(last / _ENOUGH)
    return {**known_ns, _FAR * last: known_ns[last] + more_ns * (_FAR - 1) / (1 - 1 / _ENOUGH)}
