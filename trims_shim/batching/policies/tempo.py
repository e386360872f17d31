"""How slow the device is at present: slow batches follow slow ones.

Other load on the machine, thermal throttling, other models on the device: what makes a batch
slower than its profile usually makes the next ones slower too. On a shared virtual machine, the
times of a perceptron's batches, over their medians, correlate by .87 with the batch before, and by
.56 with the batch 16 before. So an exponentially weighted mean of the last batches predicts the
next one, as far as such means have clearly predicted recent ones. If times are independent, that is
not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log, sqrt

__all__ = ["Tempo"]

# Flat around these values: docs/decisions/0009.
_WEIGHT = 0.4
"""The weight of the last batch in the mean."""
_KEPT = 0.98
"""The share of the statistics of earlier predictions that remains after each batch."""
_MOST = 2.0
_LEAST = 1 / _MOST
"""Ratios are limited to this range: beyond it is a pause, which says nothing of the next batch."""
_CLEARLY = 2.0
"""Standard errors that a correlation must exceed: independent times show less by chance."""
_ERROR = (1 - _KEPT) / (1 + _KEPT)
"""The inverse of the number of values that a mean with ``_KEPT`` is worth."""
_KNOWN = 1e-6
"""The least sum of squared logarithms that says anything."""


class Tempo:
    """Predicts the next batch from the ratios of durations to the profile, told one by one."""

    __slots__ = ("_level", "_products", "_squares", "_totals", "now")

    def __init__(self) -> None:
        self.now = 1.0
        """The expected ratio of the next batch's duration to its profile."""
        self._level = 0.0
        """The weighted mean of the logarithms of the last ratios."""
        self._products = self._squares = self._totals = 0.0
        """Sums over batches of mean x logarithm of the next ratio, mean^2, and logarithm^2."""

    def add(self, ratio: float) -> bool:
        """Add a batch that took ``ratio`` times its profile; return whether :attr:`now` changed."""
        if ratio == 1.0 and not self._level:
            return False
        before = self.now
        self.follow((ratio,))
        return self.now != before

    def follow(self, ratios: Iterable[float]) -> list[float]:
        """Add each ratio; return each ratio over its prediction."""
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
            # The slope of a line through the origin, from the mean to the next one, less its error.
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
