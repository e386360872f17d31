"""Measure how long batches take, before any request."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

__all__ = ["measure", "sizes_to_measure"]


def sizes_to_measure(max_batch_size: int) -> list[int]:
    """Return powers of two and the largest size; a profile interpolates the rest."""
    sizes = [1 << power for power in range(max_batch_size.bit_length())]
    return sorted({*sizes, max_batch_size})


def measure(
    run: Callable[[int], object],
    sizes: Sequence[int],
    *,
    repeats: int = 5,
    clock: Callable[[], int],
    limit_ns: int | None = None,
) -> dict[int, int]:
    """Return median durations of ``run(size)`` by size, in nanoseconds of ``clock``.

    Each size runs once uncounted (allocation, compilation), then ``repeats`` times. Sizes take
    turns, from small to large, so that a slow second does not fall on one size. After
    ``limit_ns`` nothing more is begun: sizes for which there was no time are missing (never the
    smallest), and each reported size has been counted at least once.
    """
    end_ns = None if limit_ns is None else clock() + limit_ns
    durations: dict[int, list[int]] = {}
    for turn in range(repeats):
        for size in sorted(set(sizes)) if turn == 0 else list(durations):
            if end_ns is not None and durations and clock() >= end_ns:
                return _medians(durations)
            if turn == 0:
                run(size)
            started_ns = clock()
            run(size)
            durations.setdefault(size, []).append(max(1, clock() - started_ns))
    return _medians(durations)


def _medians(durations: Mapping[int, Sequence[int]]) -> dict[int, int]:
    return {size: round(statistics.median(found)) for size, found in durations.items()}
