"""The cost of the default policy's waiting: latencies over the load, against never waiting.

``python -m benchmarks.batching_latencies`` takes about two minutes, prints a table and writes
``docs/results/batching_latencies.json``. One simulated device with a high, middle or no fixed cost,
Poisson arrivals and bursts, with or without jitter of batches and timers. A load of 1 is the
throughput of batches that take half of the objective. Nothing depends on the machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmarks.batching_policies import JITTERS, simulated
from benchmarks.harness import argument_parser, write_json
from benchmarks.rendering import markdown_table
from trims_shim.batching.policies import POLICIES
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.simulator import Outcome, Report, gamma, requests

__all__ = ["figures", "main", "means"]

_NS_PER_MS = 1_000_000
_LARGEST = 16
SETTINGS = {
    "45 + 0.4 b": (LatencyProfile.linear(0.4, 45, max_batch_size=_LARGEST), 150),
    "20 + 2 b": (LatencyProfile.linear(2, 20, max_batch_size=_LARGEST), 100),
    "2 + 3 b": (LatencyProfile.linear(3, 2, max_batch_size=_LARGEST), 100),
}
"""Latencies in ms, and an objective."""
CVS = (1, 3)
LOADS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.2)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one load; means over the seeds."""

    profile: str
    jitter: str
    cv: int
    load: float
    policy: str
    violated: float
    mean_ms: float
    p99_ms: float
    busy: float


Place = tuple[str, str, int, float, str]


def _run(place: Place, count: int, seed: int) -> tuple[float, float, float, float]:
    setting, jitter, cv, load, policy = place
    profile, slo_ms = SETTINGS[setting]
    size = profile.largest_within(slo_ms * _NS_PER_MS / 2, _LARGEST)
    rate_qps = load * size / profile.latency_ns(size) * 1e9
    stream = requests(gamma(rate_qps, cv, Random(seed)), slo_ms=slo_ms, count=count)
    return figures(simulated(POLICIES[policy], profile, stream, jitter=jitter, seed=seed))


def figures(outcome: Outcome) -> tuple[float, float, float, float]:
    """Violations, mean and 99th percentile of latencies in ms, the busy share of the device."""
    report = Report.of(outcome)
    mean_ns = statistics.fmean(end_ns - each.arrival_ns for each, end_ns in outcome.answered)
    return report.violation_ratio, mean_ns / _NS_PER_MS, report.p99_ms, report.busy_share


def means(runs: Iterable[Sequence[float]]) -> list[float]:
    """The mean of each figure over the seeds."""
    return [round(statistics.fmean(each), 5) for each in zip(*runs, strict=True)]


def _measure(place: Place, count: int, seeds: int) -> Cell:
    return Cell(*place, *means(_run(place, count, seed) for seed in range(seeds)))


def _table(cells: Sequence[Cell], policies: Sequence[str]) -> str:
    """Print violations, and mean and 99th percentile of latencies in ms, of each policy."""
    rows = []
    for start in range(0, len(cells), len(policies)):
        row = cells[start : start + len(policies)]
        first = row[0]
        figures = [f"{e.violated:.4f}; {e.mean_ms:.1f}, {e.p99_ms:.0f}" for e in row]
        rows.append([first.profile, first.jitter, str(first.cv), f"{first.load:g}", *figures])
    head = ["profile", "jitter", "CV", "load", *policies]
    return "\n".join(markdown_table(head, rows, texts=2))


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argument_parser("batching_latencies", __doc__)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["immediate", "auto"])
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--requests", type=int, default=5000, help="in each cell, for each seed")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    options = parser.parse_args(arguments)
    places = list(itertools.product(SETTINGS, JITTERS, CVS, options.loads, options.policies))
    measure = partial(_measure, count=options.requests, seeds=options.seeds)
    with multiprocessing.Pool(options.jobs) as pool:
        cells = pool.map(measure, places, chunksize=2)
    print(_table(cells, options.policies))
    head = {"requests": options.requests, "seeds": options.seeds}
    path = options.output / "batching_latencies.json"
    write_json(path, head | {"cells": cells})
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
