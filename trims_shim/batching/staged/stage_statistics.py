"""Statistics of the stages of a model, in addition to those of every batcher.

Plain counters, written under the lock of one dispatch, read without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["StageRecord", "StageStats", "StagedStats"]


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage of a model, since the batcher was made."""

    batch_sizes: Mapping[int, int]
    """The number of runs by the number of requests."""
    busy_s: float
    """Summed over devices."""
    exits: int = 0
    """The number of requests that it answered before the last stage."""

    @property
    def runs(self) -> int:
        """The number of runs."""
        return sum(self.batch_sizes.values())

    @property
    def requests(self) -> int:
        """The number of requests of all runs together."""
        return sum(size * count for size, count in self.batch_sizes.items())

    @property
    def mean_batch_size(self) -> float:
        """Requests per run; 0 before the first."""
        return self.requests / self.runs if self.batch_sizes else 0.0


@dataclass(frozen=True, slots=True)
class StagedStats:
    """The operations on batches between stages, and the statistics of each stage."""

    batches: int
    """The number of batches that were started."""
    stretches: int
    """The number of times that requests joined a batch under way."""
    splits: int
    failures: int
    """Parts that the whole function answered because a stage had failed with them."""
    stages: tuple[StageStats, ...]
    """Without the batches that ran whole."""
    whole: int = 0
    """The number of batches, of all, that ran all stages in one call."""

    @property
    def exits(self) -> int:
        """The number of requests that were answered before the last stage."""
        return sum(stage.exits for stage in self.stages)


class StageRecord:
    """The counters themselves."""

    def __init__(self, stages: int) -> None:
        self.batches = 0
        self.stretches = 0
        self.splits = 0
        self.failures = 0
        self.whole = 0
        self._sizes: list[Counter[int]] = [Counter() for _ in range(stages)]
        self._busy_ns = [0] * stages
        self._exits = [0] * stages

    def add_runs(self, stage: int, sizes: Sequence[int], taken_ns: int) -> None:
        """Count the runs of a stage: a size for each call, several if pieces ran apart."""
        if sizes:
            self._busy_ns[stage] += taken_ns
            counts = self._sizes[stage]
            for size in sizes:
                counts[size] += 1

    def add_exits(self, stage: int, count: int) -> None:
        """Count requests that a stage before the last has answered."""
        self._exits[stage] += count

    def snapshot(self) -> StagedStats:
        """Return the statistics as of now."""
        return StagedStats(
            batches=self.batches,
            stretches=self.stretches,
            splits=self.splits,
            failures=self.failures,
            whole=self.whole,
            stages=tuple(
                StageStats(dict(sorted(sizes.copy().items())), busy_ns / 1e9, exits)
                for sizes, busy_ns, exits in zip(
                    self._sizes, self._busy_ns, self._exits, strict=True
                )
            ),
        )
