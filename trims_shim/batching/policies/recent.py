"""The last values of a varying quantity and their quantiles, from which margins are learned."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

__all__ = ["Recent"]


class Recent:
    """The last ``count`` values. A quantile of them forgets an outlier at once, a maximum never."""

    __slots__ = ("_ascending", "_values")

    def __init__(self, count: int) -> None:
        self._values: deque[float] = deque(maxlen=count)
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> bool:
        """Add a value, in place of the oldest if full; return whether a quantile may change."""
        values, ascending = self._values, self._ascending
        if len(values) == values.maxlen:
            oldest = values[0]
            values.append(value)
            if value == oldest:
                return False
            del ascending[bisect_left(ascending, oldest)]
        else:
            values.append(value)
        insort(ascending, value)
        return True

    def replace(self, values: Iterable[float]) -> None:
        """Replace all values by these, the oldest first."""
        self._values = deque(values, self._values.maxlen)
        self._ascending = sorted(self._values)

    def quantile(self, share: float) -> float:
        """Return the value below which ``share`` of the others are; 0 if there are none.

        Rounded down: while there are few values, the largest one does not count.
        """
        ascending = self._ascending
        return ascending[int(share * (len(ascending) - 1))] if ascending else 0.0

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return :meth:`quantile` of each share."""
        ascending = self._ascending
        if not ascending:
            return [0.0] * len(shares)
        last = len(ascending) - 1
        return [ascending[int(share * last)] for share in shares]
