"""The last values of something that varies, and their quantiles: what margins are learned from."""

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
        """The oldest is forgotten where there are too many. Whether that may change a quantile."""
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
        """These instead of those until now, the oldest first."""
        self._values = deque(values, self._values.maxlen)
        self._ascending = sorted(self._values)

    def quantile(self, share: float) -> float:
        """The value below which ``share`` of the others are; 0 for none.

        Rounded down: as long as there are few values, the largest of them does not count.
        """
        ascending = self._ascending
        return ascending[int(share * (len(ascending) - 1))] if ascending else 0.0

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Each as :meth:`quantile` has it."""
        ascending = self._ascending
        if not ascending:
            return [0.0] * len(shares)
        last = len(ascending) - 1
        return [ascending[int(share * last)] for share in shares]
