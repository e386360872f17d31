"""The cost of the default policy of stages while it learns latencies, in the simulator.

    python -m benchmarks.staged_learning            # some minutes
    python -m benchmarks.staged_learning --quick    # a smoke run, in seconds

One model, one batch at a time, no objective: the aim is a low latency. Latencies were measured on a
processor (docs/decisions/0011), where stages gain next to nothing, or follow lines. ``auto`` calls
the whole model and ``dvabatch`` its stages, each with the true profile and with one learned from
nothing. Writes ``docs/results/staged_learning.json``: mean and 99th percentile of latencies, as a
multiple of those of ``auto`` with the true profile.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from random import Random

from benchmarks.batching_learner import Learner, StagedLearner
from benchmarks.batching_learning import TABLES
from benchmarks.harness import argument_parser, write_json
from benchmarks.staged_device import StageDevice, full_demand
from benchmarks.staged_simulation import simulate_staged
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Policy
from trims_shim.batching.simulator import percentile, poisson, requests
from trims_shim.batching.single import Batching
from trims_shim.batching.staged.policies import DVABatch
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import StagedBatching

__all__ = ["LOADS", "Cell", "cell", "main"]

_LARGEST = 16
_OVERHEAD_NS = 100_000
LOADS = (0.3, 0.6, 0.85)
"""Shares of the best throughput."""
_WAYS = ("auto", "auto, learned", "dvabatch", "dvabatch, learned")
_NS_PER_MS = 1e6


_MODELS = {name: (TABLES[name], 2) for name in ("U-Net-like", "BERT-like", "VGG-like")} | {
    "2 + 2 b ms": (TABLES["2 + 2 b ms"], 4),
    "10 + b ms": (TABLES["10 + b ms"], 4),
    "20 + 2 b ms": (LatencyProfile.linear(2, 20, max_batch_size=_LARGEST), 4),
}
"""(latencies of the whole model, number of equally long stages)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Means over several seeds; ``stretches`` per batch."""

    model: str
    load: float
    way: str
    mean_ms: float
    p99_ms: float
    stretches: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, write, print."""
    parser = argument_parser("staged_learning", __doc__)
    parser.add_argument("--quick", action="store_true", help="tries it out, proves nothing")
    options = parser.parse_args(arguments)
    count, seeds = (200, 1) if options.quick else (3000, 4)
    jobs = list(product(_MODELS, LOADS, _WAYS))
    with multiprocessing.Pool() as pool:
        cells = pool.starmap(partial(cell, count=count, seeds=seeds), jobs, chunksize=1)
    content = {"requests": count, "seeds": seeds, "cells": [asdict(each) for each in cells]}
    write_json(options.output / "staged_learning.json", content)
    for line in _table(cells):
        print(line)
    return 0


def _table(cells: Sequence[Cell]) -> Iterator[str]:
    yield f"{'mean / p99, times auto':24}" + "".join(f"{way:>20}" for way in _WAYS[1:])
    for model, load in product(_MODELS, LOADS):
        base, *others = (each for each in cells if (each.model, each.load) == (model, load))
        row = "".join(
            f"{each.mean_ms / base.mean_ms:>12.2f} / {each.p99_ms / base.p99_ms:.2f} "
            for each in others
        )
        yield f"{model + ', ' + str(load):24}{row}"


def cell(model: str, load: float, way: str, *, count: int, seeds: int) -> Cell:
    """Simulate one model and load."""
    runs = [_run(model, load, way, count, seed) for seed in range(seeds)]
    mean_ms, p99_ms, stretches = (
        round(statistics.fmean(each), 4) for each in zip(*runs, strict=True)
    )
    return Cell(model, load, way, mean_ms, p99_ms, stretches)


def _run(model: str, load: float, way: str, count: int, seed: int) -> tuple[float, float, float]:
    whole, stages = _MODELS[model]
    device = StageDevice(
        StagedProfile.even(whole, stages), demand=full_demand, overhead_ns=_OVERHEAD_NS
    )
    arrivals = poisson(load * whole.best_rate() * 1e9, Random(seed))
    outcome = simulate_staged(
        _policy(way, whole, stages),
        requests(arrivals, slo_ms=None, count=count),
        device=device if way.startswith("dvabatch") else device.unstaged(),
    )
    latencies = sorted((end - each.arrival_ns) / _NS_PER_MS for each, end in outcome.answered)
    firsts = [each for each in outcome.stage_executions if each.stage == 0]
    lasts = [each for each in outcome.stage_executions if each.through == device.stages - 1]
    stretches = max(0, len(firsts) - len(lasts)) / len(lasts) if way.startswith("dva") else 0.0
    return statistics.fmean(latencies), percentile(latencies, 0.99), stretches


def _policy(way: str, whole: LatencyProfile, stages: int) -> Policy:
    if way == "auto":
        return Batching(lambda _: Auto(whole, max_batch_size=_LARGEST))
    if way == "auto, learned":
        return Learner(Auto, max_batch_size=_LARGEST)
    if way == "dvabatch":
        profile = StagedProfile.even(whole, stages)
        return StagedBatching(lambda _: DVABatch(profile, max_batch_size=_LARGEST), stages=stages)
    return StagedLearner(DVABatch, stages=stages, max_batch_size=_LARGEST)


if __name__ == "__main__":
    raise SystemExit(main())
