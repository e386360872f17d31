"""The last values of something that varies, and their quantiles: what margins are learned from."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

__all__ = ["Recent"]


class Recent:
    """The last ``count`` values. A quantile of them forgets an outlier at once, a maximum never."""

    __slots__ = ("_ascending", "_values")

    def __init__(self, count: int) -> None:
        self._values: deque[float] = deque(maxlen=count)
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """The oldest is forgotten where there are too many."""
        values, ascending = self._values, self._ascending
        if len(values) == values.maxlen:
            del ascending[bisect_left(ascending, values[0])]
        values.append(value)
        insort(ascending, value)

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._ascending.clear()

    def quantile(self, share: float) -> float:
        """The value below which ``share`` of the others are; 0 for none.

        Rounded down: as long as there are few values, the largest of them does not count.
        """
        if not self._ascending:
            return 0.0
        return self._ascending[int(share * (len(self._ascending) - 1))]
