"""The plan of a comparison of batchers: cells, their order, and each peer's settings.

Pure: starts no process and reads no clock. A cell is a device, a load and an objective; a job is a
batcher with settings on a cell. Peers have several settings. Short jobs of purpose ``choose``
measure each of them, and the table shows, for each cell, the setting with the fewest violations
there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers import CATALOGUE, Settings

__all__ = [
    "CHOOSE",
    "COMPARE",
    "DEFAULT_POLICIES",
    "OURS",
    "Calibration",
    "Cell",
    "Job",
    "Record",
    "choose",
    "compared_jobs",
    "matching",
    "tried_jobs",
]

CHOOSE, COMPARE = "choose", "compare"
OURS = ("trims", "trims-asyncio")
DEFAULT_POLICIES = (
    *OURS,
    "cork",
    "batched",
    "batched-asyncio",
    "async-batcher",
    "batch-inference",
    "ray",
)
_OBJECTIVE_IN_FULL_BATCHES = 2.0
"""The sleeping device's 100 ms are 1.92 times the duration of its full batch."""
Record = Mapping[str, Any]
"""A job with its result, as stored in the results file."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Durations of batches on a device of this machine, by size."""

    durations_ms: Mapping[int, float]

    @property
    def capacity(self) -> float:
        """Requests a second at the best batch size."""
        return max(size / taken * 1e3 for size, taken in self.durations_ms.items())

    @property
    def slo_ms(self) -> float:
        """The objective: the time of two of the largest batches, in whole milliseconds."""
        largest = self.durations_ms[max(self.durations_ms)]
        return float(round(_OBJECTIVE_IN_FULL_BATCHES * largest))


@dataclass(frozen=True, slots=True)
class Cell:
    """A column of the table. ``load`` names the rate: requests a second, or a share of capacity."""

    device: str
    cv: float
    load: float
    rate: float
    slo_ms: float
    share: float
    """The rate as a share of the device's capacity."""

    @property
    def title(self) -> str:
        """The cell's name for people."""
        load = f"{self.load:g} qps" if self.load > 2 else f"{self.load:.0%}"
        return f"{self.device}, CV {self.cv:g}, {load}"


@dataclass(frozen=True, slots=True)
class Job:
    """One process to run. All batchers of a cell and repeat have equal arrivals (the same seed)."""

    cell: Cell
    policy: str
    settings: Settings
    repeat: int
    seconds: float
    purpose: str

    @property
    def seed(self) -> int:
        """Seed of the arrivals. Settings are chosen on other arrivals than those compared."""
        return self.repeat + (1000 if self.purpose == CHOOSE else 1)

    def key(self) -> dict[str, Any]:
        """The key of its result. The rate is not part of it, because it is measured anew."""
        kept = asdict(self)
        kept["settings"] = dict(self.settings)
        kept["cell"] = {name: kept["cell"][name] for name in ("device", "cv", "load")}
        return kept


def matching(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Records whose job has these values; names of a cell's fields are looked up there."""
    return [
        record
        for record in records
        if all(
            record["job"].get(name, record["job"]["cell"].get(name)) == value
            for name, value in wanted.items()
        )
    ]


def tried_jobs(
    cells: Sequence[Cell], policies: Sequence[str], *, seconds: float, repeats: int
) -> Iterator[list[Job]]:
    """Every setting of every peer that has several; one list for each cell and repeat."""
    for repeat in range(repeats):
        for cell in cells:
            jobs = [
                Job(cell, policy, settings, repeat, seconds, CHOOSE)
                for policy in policies
                if len(CATALOGUE[policy].variants) > 1
                for settings in CATALOGUE[policy].variants
            ]
            if jobs:
                yield jobs


def compared_jobs(
    cells: Sequence[Cell],
    policies: Sequence[str],
    records: Sequence[Record],
    *,
    seconds: float,
    repeats: int,
) -> Iterator[list[Job]]:
    """Every batcher with its best settings; each list starts one batcher further."""
    turn = 0
    for repeat in range(repeats):
        for cell in cells:
            order = [*policies[turn % len(policies) :], *policies[: turn % len(policies)]]
            turn += 1
            yield [
                Job(cell, policy, choose(policy, cell, records), repeat, seconds, COMPARE)
                for policy in order
            ]


def choose(policy: str, cell: Cell, records: Sequence[Record]) -> Settings:
    """The settings with the fewest violations on this cell, or on the one most like it.

    The most similar cell has the same device if possible, then the same burstiness, then the
    nearest share of the device's capacity. If nothing was tried, the first of the catalogue.
    """
    variants = CATALOGUE[policy].variants
    tried = matching(records, policy=policy, purpose=CHOOSE)
    tried = matching(tried, device=cell.device) or tried
    tried = matching(tried, cv=cell.cv) or tried
    nearest = min((abs(_share(each) - cell.share) for each in tried), default=0.0)
    alike = [each for each in tried if abs(_share(each) - cell.share) == nearest]

    def rank(settings: Settings) -> tuple[float, float]:
        results = [record["result"] for record in matching(alike, settings=dict(settings))]
        if not results:
            return (2.0, 0.0)
        worst_ms = [result["latency_ms"]["p99"] or float("inf") for result in results]
        violations = [result["violations"] for result in results]
        return (statistics.fmean(violations), statistics.fmean(worst_ms))

    return min(variants, key=rank)


def _share(record: Record) -> float:
    return float(record["cell"]["share"])
