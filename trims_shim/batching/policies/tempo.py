"""How slow the device is at present: batches that were slow are followed by slow ones.

Neighbours on the machine, clocks that heat brings down, other models on the device: what makes a
batch take longer than its profile says usually makes the next ones take longer, too. On a shared
virtual machine the times of a perceptron's batches, over their medians, are correlated by .87 with
those of the batch before, and by .56 with those 16 batches before. So the next one's is predicted
by an exponentially weighted mean of the last ones, as far as such means have clearly predicted of
late: where times are drawn independently, that is not at all.
"""

from __future__ import annotations

import math

__all__ = ["Tempo"]

# Flat around these values: docs/decisions/0009.
_WEIGHT = 0.4
"""Of the last batch in the mean."""
_KEPT = 0.98
"""Of what is known of earlier predictions, with each batch."""
_MOST = 2.0
"""Times as long, or as short: more is a pause, which says nothing of the next batch."""
_CLEARLY = 2.0
"""Standard errors: what independent times seem to predict by chance."""
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
        level, before = self._level, self.now
        if ratio == 1.0 and not level:
            return False
        taken = math.log(max(1 / _MOST, min(_MOST, ratio)))
        self._products = _KEPT * self._products + taken * level
        self._squares = _KEPT * self._squares + level * level
        self._totals = _KEPT * self._totals + taken * taken
        self._level = level = level + _WEIGHT * (taken - level)
        self.now = math.exp(self._share() * level)
        return self.now != before

    def _share(self) -> float:
        """Of the mean, what the next one has: the slope of a line through the origin."""
        if self._squares < _KNOWN:
            return 0.0
        error = math.sqrt(self._totals * self._squares * (1 - _KEPT) / (1 + _KEPT))
        return max(0.0, min(1.0, (self._products - _CLEARLY * error) / self._squares))
