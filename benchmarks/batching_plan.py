"""What a comparison of batchers measures: cells, their order, and each peer's settings.

Pure but for nothing: no process is started here, no clock is read. A cell is a device, a load and
an objective; a job is a batcher with settings on a cell. Peers have several settings to choose
from: short jobs of purpose ``choose`` are measured with each, and what had the fewest violations
there is what stands in the table for that cell.
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
"""The sleeping device's 100 ms are 1.92 of its full batches."""
Record = Mapping[str, Any]
"""A job with its result, as the file of results keeps it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How long batches take on a device of this machine, by size."""

    durations_ms: Mapping[int, float]

    @property
    def capacity(self) -> float:
        """Requests a second of the best batch size."""
        return max(size / taken * 1e3 for size, taken in self.durations_ms.items())

    @property
    def slo_ms(self) -> float:
        """The objective: two of the largest batches, in whole milliseconds."""
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
    """The rate, of the device's capacity."""

    @property
    def title(self) -> str:
        """For people."""
        load = f"{self.load:g} qps" if self.load > 2 else f"{self.load:.0%}"
        return f"{self.device}, CV {self.cv:g}, {load}"


@dataclass(frozen=True, slots=True)
class Job:
    """One process to run. Equal for all batchers of a cell and repeat: the arrivals, by seed."""

    cell: Cell
    policy: str
    settings: Settings
    repeat: int
    seconds: float
    purpose: str

    @property
    def seed(self) -> int:
        """Of the arrivals; those of the comparison are not those that settings were chosen by."""
        return self.repeat + (1000 if self.purpose == CHOOSE else 1)

    def key(self) -> dict[str, Any]:
        """What identifies its result; the rate is not part of it, it is measured anew."""
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
    """Every batcher with its best settings; the order of batchers moves on by one each time."""
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

    Of the same device, else of any; then of the same burstiness; then of the nearest share of the
    device's capacity. Where nothing was tried, the first of the catalogue.
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
