"""How long a batch takes: what every deadline decision rests on.

A profile is a table of latencies by batch size, made from a line ``l(b) = alpha * b + beta``
(Nexus, SOSP'19, Eq. 1), from measured sizes, or learned while batches run. Pure: executors measure,
:mod:`trims_shim.batching.profiles.learning` learns,
:mod:`trims_shim.batching.profiles.profile_store` saves and loads.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from trims_shim.checks import check_amount, whole

__all__ = ["LatencyProfile", "between", "slow_sizes", "without_noise"]

_NS_PER_MS = 1_000_000
_REAL_DIP = 0.9
"""A batch that takes less than this share of a smaller one's time really is quicker: libraries
choose other kernels for it. Measurements vary by less (docs/decisions/0009)."""
_GUESS_NS = 1_000
"""The guess while no size is known: so short that batches are tried."""


class LatencyProfile:
    """Latency of a batch, in nanoseconds, for every size from 1 to ``max_batch_size``.

    A larger size may take less than a smaller one, as some products of matrices do: a perceptron on
    a processor took 13 ms for 3 rows, and 10 for 4. But no size takes less than one item alone,
    because that latency decides which requests are hopeless: it is lowered to the least of all.
    """

    __slots__ = ("_alone_ns", "_least", "_table", "max_batch_size")

    def __init__(self, latencies_ns: Iterable[float]) -> None:
        """Of sizes 1, 2, 3, ... Raises ValueError for none, or for one not above 0 and finite."""
        table = [0]
        for latency_ns in latencies_ns:
            if not 0 < latency_ns < math.inf:
                raise ValueError(
                    f"a batch of {len(table)} takes {latency_ns} ns: not positive and finite"
                )
            table.append(max(round(latency_ns), 1))
        if len(table) == 1:
            raise ValueError("a profile needs the latency of at least one batch size")
        self._alone_ns = table[1]
        table[1] = min(table[1:])
        self._table = table
        # By size, the least latency of it and all larger sizes.
        self._least = [*accumulate(reversed(table), min)][::-1]
        self.max_batch_size = len(table) - 1
        """The largest size it knows."""

    @classmethod
    def linear(cls, alpha_ms: float, beta_ms: float, *, max_batch_size: int) -> LatencyProfile:
        """``l(b) = alpha * b + beta``: the cost of each item, and of each batch."""
        check_amount("alpha_ms", alpha_ms)
        check_amount("beta_ms", beta_ms)
        whole("max_batch_size", max_batch_size)
        return cls(
            (alpha_ms * size + beta_ms) * _NS_PER_MS for size in range(1, max_batch_size + 1)
        )

    @classmethod
    def measured(
        cls, latencies_ns: Mapping[int, float], *, max_batch_size: int | None = None, pads: bool
    ) -> LatencyProfile:
        """From some sizes; ``max_batch_size`` defaults to the largest of them.

        With ``pads``, other sizes run as the next larger measured one (Proteus' artefact, compiled
        models with fixed batch sizes); else they lie on the line between their neighbours. Beyond
        the largest measured size, its cost of an item is added for each further one. Raises
        ValueError for no sizes.
        """
        if not latencies_ns or min(latencies_ns) < 1:
            raise ValueError("a profile needs the latency of at least one batch size from 1 on")
        sizes = sorted(latencies_ns)
        last = sizes[-1] if max_batch_size is None else whole("max_batch_size", max_batch_size)
        found = (_at(size, sizes, latencies_ns, pads=pads) for size in range(1, last + 1))
        return cls(without_noise(found))

    def latency_ns(self, size: int) -> int:
        """The latency of a batch of ``size``, from 1 to ``max_batch_size``."""
        return self._table[size]

    def taken_ns(self, size: int) -> int:
        """The latency as it was given; that of one item is not lowered to the least of all."""
        return self._alone_ns if size == 1 else self._table[size]

    def or_one_more_ns(self, size: int) -> int:
        """The longest that a batch of ``size`` takes with, or without, one more request."""
        return max(self.latency_ns(size), self.latency_ns(size + 1))

    def beyond_ns(self, size: int) -> int:
        """The least latency of all sizes above ``size``, which is below ``max_batch_size``."""
        return self._least[size + 1]

    def best_rate(self, max_batch_size: int | None = None) -> float:
        """The highest throughput of all sizes up to ``max_batch_size``, in items per nanosecond."""
        largest = self.max_batch_size if max_batch_size is None else max_batch_size
        return max([size / self.latency_ns(size) for size in range(1, largest + 1)])

    def largest_within(self, budget_ns: float, limit: int) -> int:
        """The largest size up to ``limit`` that takes at most ``budget_ns``; 0 if none does."""
        table = self._table
        size = bisect_right(self._least, budget_ns, 1, min(limit + 1, len(table))) - 1
        while size and table[size] > budget_ns:  # the least may be of a size beyond the limit
            size -= 1
        return size

    def check_knows(self, max_batch_size: int) -> None:
        """Raise ValueError unless ``max_batch_size`` is one of the sizes that it knows."""
        if not 1 <= max_batch_size <= self.max_batch_size:
            raise ValueError(
                f"max_batch_size is {max_batch_size}, and the profile knows sizes from 1 to "
                f"{self.max_batch_size}"
            )

    def line_ns(self) -> tuple[float, float]:
        """``(alpha, beta)`` of the line of least squares through the table, neither below 0."""
        count = self.max_batch_size
        if count == 1:
            return 0.0, float(self._table[1])
        table = self._table[1:]
        mean_size, mean_ns = (count + 1) / 2, sum(table) / count
        products = sum((size - mean_size) * each for size, each in enumerate(table, 1))
        alpha = max(0.0, products / (count * (count * count - 1) / 12))
        if alpha * mean_size <= mean_ns:
            return alpha, mean_ns - alpha * mean_size
        # The best line would start below 0; of those that start at 0 another one is best.
        products = sum(size * each for size, each in enumerate(table, 1))
        return products / (count * (count + 1) * (2 * count + 1) / 6), 0.0

    def limited(self, max_batch_size: int) -> LatencyProfile:
        """The same up to a smaller size."""
        return LatencyProfile([self._alone_ns, *self._table[2 : max_batch_size + 1]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatencyProfile) and self._table == other._table

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        alpha, beta = self.line_ns()
        return (
            f"<LatencyProfile of 1 to {self.max_batch_size}: about "
            f"{beta / _NS_PER_MS:.3g} + {alpha / _NS_PER_MS:.3g} b ms>"
        )


def slow_sizes(latencies_ns: Mapping[int, float]) -> list[int]:
    """The measured sizes that take clearly longer than a larger one."""
    found: list[int] = []
    least_ns = math.inf
    for size in sorted(latencies_ns, reverse=True):
        if least_ns < _REAL_DIP * latencies_ns[size]:
            found.append(size)
        least_ns = min(least_ns, latencies_ns[size])
    return found[::-1]


def without_noise(latencies_ns: Iterable[float]) -> list[float]:
    """Smooth measured latencies of sizes 1, 2, 3, ...: larger sizes take no less.

    Neighbours that were measured the other way round get their mean (isotonic regression, by
    pooling: Ayer et al., 1955). A dip that is deep is real, and stays.
    """
    found: list[float] = []
    rising: list[float] = []
    highest_ns = 0.0
    for latency_ns in latencies_ns:
        if latency_ns < _REAL_DIP * highest_ns:
            found += _isotonic(rising)
            rising, highest_ns = [], 0.0
        rising.append(latency_ns)
        highest_ns = max(highest_ns, latency_ns)
    return found + _isotonic(rising)


def between(known_ns: Mapping[int, float]) -> Callable[[float], float]:
    """Return a function that guesses the latency of any size from the known ones.

    Between two known sizes it is linear. Above the largest, up to twice its size is guessed to take
    as long, and more in proportion. A guess that is too low costs some late batches. One that is
    too high would stay for ever, as the size would never run, and it easily is: the second item of
    a batch may cost more than all others (a product of matrices instead of one with a vector).
    Below the smallest, half of its latency is taken as fixed: a policy that waits for the last
    moment is lost if one item less saves nothing.
    """
    sizes = sorted(known_ns)

    def at(size: float) -> float:
        if not sizes:
            return _GUESS_NS
        if size >= sizes[-1]:
            return known_ns[sizes[-1]] * max(1.0, size / sizes[-1] / 2)
        index = bisect_left(sizes, size)
        above = sizes[index]
        if index == 0:
            return known_ns[above] * (1 + size / above) / 2
        below = sizes[index - 1]
        share = (size - below) / (above - below)
        return known_ns[below] + share * (known_ns[above] - known_ns[below])

    return at


def _isotonic(values: Sequence[float]) -> list[float]:
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _at(size: int, sizes: list[int], latencies_ns: Mapping[int, float], *, pads: bool) -> float:
    index = bisect_left(sizes, size)
    if index == len(sizes):
        largest = sizes[-1]
        return latencies_ns[largest] * size / largest
    above = sizes[index]
    if pads or above == size or index == 0:
        return latencies_ns[above]
    below = sizes[index - 1]
    share = (size - below) / (above - below)
    return latencies_ns[below] + share * (latencies_ns[above] - latencies_ns[below])
