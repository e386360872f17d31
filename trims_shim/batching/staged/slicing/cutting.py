"""Where a line of operations is cut into stages: arithmetic on times, without models.

Pure. ``times_ns`` are those of operations in their order; a cut at position ``p`` is before
operation ``p``, and only some positions are legal.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Cut", "even_cuts"]

_SLACK = 0.05
"""How much longer than necessary the longest stage may be so that fewer bytes cross borders."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A legal position."""

    position: int
    crossing_bytes: int = 0
    """How much goes from stage to stage there."""


def even_cuts(times_ns: Sequence[int], cuts: Sequence[Cut], stages: int) -> list[int]:
    """Positions, ascending, that make the longest of ``stages`` stages as short as possible.

    Of positions that are nearly as good, those with the fewest bytes crossing; of those, the most
    even. ``cuts`` ascend. Raises ValueError if there are too few.
    """
    if stages < 1 or len(cuts) < stages - 1:
        raise ValueError(f"{len(cuts)} cuts make {len(cuts) + 1} stages at most, not {stages}")
    until = [0, *itertools.accumulate(times_ns)]
    # The time until each cut.
    ends = [until[cut.position] for cut in cuts]
    longest = int(_shortest_longest(ends, until[-1], stages) * (1 + _SLACK))
    return [cuts[index].position for index in _cheapest(cuts, ends, until[-1], stages, longest)]


def _shortest_longest(ends: Sequence[int], whole: int, stages: int) -> int:
    """The least time of the longest stage, by bisection of what is possible."""
    low, high = 0, whole
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(ends, whole, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(ends: Sequence[int], whole: int, longest: int) -> float:
    """How many stages of at most ``longest`` are needed; infinity if no number is enough."""
    begin, count, next_cut = 0, 1, 0
    while whole - begin > longest:
        last = bisect.bisect_right(ends, begin + longest, next_cut) - 1
        if last < next_cut:
            return float("inf")
        begin, count, next_cut = ends[last], count + 1, last + 1
    return count


def _cheapest(
    cuts: Sequence[Cut], ends: Sequence[int], whole: int, stages: int, longest: int
) -> list[int]:
    """Indices of cuts, by dynamic programming over how many there are and which is the last."""
    best: dict[int, _Way] = {-1: (0, 0, ())}
    for stage in range(1, stages):
        # Enough cuts have to remain for the stages that follow.
        indices = range(stage - 1, len(cuts) - (stages - 1 - stage))
        ways = {index: _way_to(index, ends[index], best, ends, longest) for index in indices}
        best = {
            index: (way[0] + cuts[index].crossing_bytes, way[1], (*way[2], index))
            for index, way in ways.items()
            if way is not None
        }
    final = _way_to(len(cuts), whole, best, ends, longest)
    assert final is not None
    return list(final[2])


_Way = tuple[int, int, tuple[int, ...]]
"""Bytes that cross, the sum of squared times of stages, the cuts."""


def _way_to(
    index: int, end: int, best: Mapping[int, _Way], ends: Sequence[int], longest: int
) -> _Way | None:
    """The best way to a stage that ends here and begins at one of ``best``."""
    found: _Way | None = None
    for before in range(index - 1, -2, -1):
        taken_ns = end - (ends[before] if before >= 0 else 0)
        if taken_ns > longest:
            break
        if before in best:
            crossing_bytes, squares, path = best[before]
            way = (crossing_bytes, squares + taken_ns**2, path)
            found = way if found is None else min(found, way)
    return found
