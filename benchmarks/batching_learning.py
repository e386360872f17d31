"""The cost of learning how long batches take, in the simulator.

``python -m benchmarks.batching_learning`` takes some minutes, prints a table and writes
``docs/results/batching_learning.json``. One simulated device, the default policy, Poisson arrivals.
Batches of up to 16 take the time of one of nine tables: lines, measured ones, and some with steps,
as kernels of fixed sizes make them. Noise is none, independent (log-normal, sigma .15), or
correlated (sigma .3, by .95 from batch to batch). A load of 1 is the best throughput.

With an objective, 2.5 times the time of a batch of 8, violations count. Without one, mean latencies
count, as a multiple of those with the true profile. The learned profile starts empty. Nothing
depends on the machine.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from random import Random

from benchmarks.batching_learner import Learner
from benchmarks.harness import argument_parser, write_json
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Policy
from trims_shim.batching.simulator import Report, poisson, requests, simulate
from trims_shim.batching.single import Batching

__all__ = ["CELLS", "TABLES", "Cell", "cell", "main"]

_LARGEST = 16
_NS_PER_MS = 1e6


def _of(latency_ms: Callable[[int], float]) -> LatencyProfile:
    return LatencyProfile(latency_ms(size) * _NS_PER_MS for size in range(1, _LARGEST + 1))


def _measured(*latencies_ms: float) -> LatencyProfile:
    """A table from the times of batches of 1, 2, 4, 8 and 16."""
    found_ns = {1 << power: each * _NS_PER_MS for power, each in enumerate(latencies_ms)}
    return LatencyProfile.measured(found_ns, pads=False)


TABLES = {
    "2 + 2 b ms": _of(lambda b: 2 + 2 * b),
    "10 + b ms": _of(lambda b: 10 + b),
    "U-Net-like": _measured(9, 15, 28, 57, 126),
    "BERT-like": _measured(3.2, 6, 12, 25, 57),
    "VGG-like": _measured(7.6, 13, 19, 33, 67),
    "5 ms, 10 for each 8": _of(lambda b: 5 + 10 * math.ceil(b / 8)),
    "3 ms, 5 for each 4": _of(lambda b: 3 + 5 * math.ceil(b / 4)),
    "6.4 + .4 b ms, 12 beyond 4 and 8": _of(lambda b: 6.4 + 0.4 * b + 12 * ((b > 4) + (b > 8))),
    "5 + 1.2 b ms, but 13 for 3": _of(lambda b: 13 if b == 3 else 5 + 1.2 * b),
}
"""Times of batches, by size."""
_NOISES = {"none": (0.0, 0.0), "independent": (0.15, 0.0), "drifting": (0.3, 0.95)}
"""Sigma, and the correlation of a batch's noise with that of the one before."""
CELLS = ((0.85, False), (0.6, True), (0.85, True), (1.1, True))
"""(load, whether there is an objective)."""
_OBJECTIVE = 2.5


@dataclass(frozen=True, slots=True)
class Cell:
    """Means over seeds."""

    table: str
    noise: str
    load: float
    has_objective: bool
    learns: bool
    mean_ms: float
    violated: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, write, print."""
    parser = argument_parser("batching_learning", __doc__)
    parser.add_argument("--requests", type=int, default=5000, help="in each cell, for each seed")
    parser.add_argument("--seeds", type=int, default=4, help="how many")
    options = parser.parse_args(arguments)
    jobs = [
        (*each, *which, learns)
        for *each, which, learns in product(TABLES, _NOISES, CELLS, (False, True))
    ]
    measure = partial(cell, count=options.requests, seeds=options.seeds)
    with multiprocessing.Pool() as pool:
        cells = pool.starmap(measure, jobs, chunksize=1)
    content = {
        "requests": options.requests,
        "seeds": options.seeds,
        "summary": _summary(cells),
        "cells": [asdict(each) for each in cells],
    }
    write_json(options.output / "batching_learning.json", content)
    _print(cells)
    print(content["summary"])
    return 0


def cell(
    table: str,
    noise: str,
    load: float,
    has_objective: bool,
    learns: bool,
    *,
    count: int,
    seeds: int,
) -> Cell:
    """Simulate one cell, over several seeds."""
    profile = TABLES[table]
    slo_ms = _OBJECTIVE * profile.latency_ns(8) / _NS_PER_MS if has_objective else None
    found = [
        _run(profile, _NOISES[noise], load, slo_ms, learns, count, seed) for seed in range(seeds)
    ]
    mean_ms, violated = (round(statistics.fmean(each), 5) for each in zip(*found, strict=True))
    return Cell(table, noise, load, has_objective, learns, mean_ms, violated)


def _run(
    profile: LatencyProfile,
    noise: tuple[float, float],
    load: float,
    slo_ms: float | None,
    learns: bool,
    count: int,
    seed: int,
) -> tuple[float, float]:
    """Return the mean latency of answered requests in ms, and the share of violations."""
    slower = _slowness(*noise, Random(seed))
    arrivals = poisson(load * profile.best_rate() * 1e9, Random(seed))
    outcome = simulate(
        _policy(profile, learns=learns),
        requests(arrivals, slo_ms=slo_ms, count=count),
        service_ns=lambda _, batch: round(slower() * profile.latency_ns(len(batch))),
    )
    latencies_ns = [end_ns - request.arrival_ns for request, end_ns in outcome.answered]
    return statistics.fmean(latencies_ns) / _NS_PER_MS, Report.of(outcome).violation_ratio


def _policy(profile: LatencyProfile, *, learns: bool) -> Policy:
    if learns:
        return Learner(Auto, max_batch_size=_LARGEST)
    return Batching(lambda _: Auto(profile, max_batch_size=_LARGEST))


def _slowness(sigma: float, correlation: float, random: Random) -> Callable[[], float]:
    state = 0.0

    def slower() -> float:
        nonlocal state
        news = math.sqrt(1 - correlation**2) * random.gauss(0, sigma)
        state = correlation * state + news
        return math.exp(state)

    return slower


def _pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Pairs of figures: with the true profile, and with the learned one."""
    return list(zip(cells[::2], cells[1::2], strict=True))


def _summary(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """By noise: mean violations, and the geometric mean of the ratios of latencies."""
    found = {}
    for noise in _NOISES:
        pairs = [each for each in _pairs(cells) if each[0].noise == noise]
        bound = [each for each in pairs if each[0].has_objective]
        free = [learned.mean_ms / true.mean_ms for true, learned in pairs if not true.has_objective]
        found[noise] = {
            "violated_true": round(statistics.fmean(true.violated for true, _ in bound), 4),
            "violated_learned": round(statistics.fmean(each.violated for _, each in bound), 4),
            "times_as_long": round(statistics.geometric_mean(free), 3),
        }
    return found


def _print(cells: Sequence[Cell]) -> None:
    for true, learned in _pairs(cells):
        if true.has_objective:
            figures = f"violated {true.violated:.4f}, learned {learned.violated:.4f}"
        else:
            figures = f"mean {true.mean_ms:.1f} ms, learned {learned.mean_ms / true.mean_ms:.2f} x"
        print(f"{true.table:34} {true.noise:12} load {true.load:4} {figures}")


if __name__ == "__main__":
    raise SystemExit(main())
