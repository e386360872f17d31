"""How slow the device is at present: batches that were slow are followed by slow ones.

Neighbours on the machine, clocks that heat brings down, other models on the device: what makes a
batch take longer than its profile says usually makes the next ones take longer, too. On a shared
virtual machine the times of a perceptron's batches, over their medians, are correlated by .87 with
those of the batch before, and by .56 with those 16 batches before. So the next one's is predicted
by an exponentially weighted mean of the last ones, as far as such means have clearly predicted of
late: where times are drawn independently, that is not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log, sqrt

__all__ = ["Tempo"]

# Flat around these values: docs/decisions/0009.
_WEIGHT = 0.4
"""Of the last batch in the mean."""
_KEPT = 0.98
"""Of what is known of earlier predictions, with each batch."""
_MOST = 2.0
_LEAST = 1 / _MOST
"""Times as long, or as short: more is a pause, which says nothing of the next batch."""
_CLEARLY = 2.0
"""Standard errors: what independent times seem to predict by chance."""
_ERROR = (1 - _KEPT) / (1 + _KEPT)
"""How many values such a mean is worth, its inverse."""
_KNOWN = 1e-6
"""Squares of logarithms: less says nothing."""


class Tempo:
    """Of batches whose durations, over what their profile says, are told one after the other."""

    __slots__ = ("_level", "_products", "_squares", "_totals", "now")

    def __init__(self) -> None:
        self.now = 1.0
        """What the next one is expected to take, over what its profile says."""
        self._level = 0.0
        """The mean of the last ones' logarithms."""
        self._products = self._squares = self._totals = 0.0
        """Of that mean and the logarithm of the next one, both, and each with itself."""

    def add(self, ratio: float) -> bool:
        """A batch took ``ratio`` times what its profile says; whether :attr:`now` has changed."""
        if ratio == 1.0 and not self._level:
            return False
        before = self.now
        self.follow((ratio,))
        return self.now != before

    def follow(self, ratios: Iterable[float]) -> list[float]:
        """:meth:`add` each; each over what was expected of it."""
        now, level = self.now, self._level
        products, squares, totals = self._products, self._squares, self._totals
        found = []
        for ratio in ratios:
            found.append(ratio / now)
            taken = log(ratio) if _LEAST < ratio < _MOST else _limited(ratio)
            products = _KEPT * products + taken * level
            squares = _KEPT * squares + level * level
            totals = _KEPT * totals + taken * taken
            level += _WEIGHT * (taken - level)
            # Of the mean, the next one has the slope of a line through the origin, less its error.
            clearly = products - _CLEARLY * sqrt(totals * squares * _ERROR)
            if clearly <= 0 or squares < _KNOWN:
                now = 1.0
            else:
                now = exp(min(1.0, clearly / squares) * level)
        self.now, self._level = now, level
        self._products, self._squares, self._totals = products, squares, totals
        return found


def _limited(ratio: float) -> float:
    return log(_MOST if ratio > 1 else _LEAST)
