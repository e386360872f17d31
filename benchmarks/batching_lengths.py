"""Items of different lengths: padded together, in a batch for each length, or as it pays.

``python -m benchmarks.batching_lengths`` takes about two minutes, prints a table and writes
``docs/results/batching_lengths.json``. One simulated device, the default policy beside one that
never waits; lengths are log-normal, and padded to four buckets. A load of 1 is what full batches of
128 tokens can answer, which is more than the mean length: 1.2 is not yet too much where tokens are
paid for. The objective is a multiple of what a full batch of the longest takes. Nothing depends on
the machine.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.batching_latencies import figures, means
from benchmarks.harness import ROOT, write_json
from trims_shim.batching.buckets import Bucket, OpenBucket
from trims_shim.batching.policies import Auto, Immediate
from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import gamma, simulate
from trims_shim.batching.single import Batching

__all__ = ["main"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_LARGEST = 64
LENGTHS = (32, 64, 128, 256)
_MEDIAN, _SIGMA = 40, 0.7
_CAPACITY_LENGTH = 128


def _launch_bound_ms(tokens: int) -> float:
    return 0.5 + 5 * max(1.0, tokens / 2048)


def _fixed_cost_ms(tokens: int) -> float:
    return 20 + 0.01 * tokens


def _by_token_ms(tokens: int) -> float:
    return 2 + 0.05 * tokens


DEVICES: dict[str, Callable[[int], float]] = {
    "5 ms up to 2048 tokens, then in proportion": _launch_bound_ms,
    "20 ms + 0.01 ms a token": _fixed_cost_ms,
    "2 ms + 0.05 ms a token": _by_token_ms,
}
"""How long a batch takes, by its padded tokens: as a GPU, with a large fixed cost, as a CPU."""
OBJECTIVES = {"tight": 0.6, "loose": 2.2}
ARRIVALS = {"Poisson": (1.0, 0.0), "bursts": (3.0, 0.2)}
"""Coefficient of variation of the gaps, and sigma of what batches take (log-normal)."""
LOADS = (0.1, 0.3, 0.6, 0.9, 1.2)
WAYS: dict[str, tuple[RuleMaker, Callable[[int], Hashable]]] = {
    "immediate, together": (Immediate, lambda length: None),
    "auto, together": (Auto, lambda length: None),
    "auto, apart": (Auto, Bucket),
    "auto": (Auto, OpenBucket),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One way under one load; means over the seeds."""

    device: str
    objective: str
    arrivals: str
    load: float
    way: str
    violated: float
    mean_ms: float
    p99_ms: float
    busy: float


Place = tuple[str, str, str, float, str]


def _requests(place: Place, slo_ns: int, count: int, seed: int) -> Iterator[Request]:
    device, _, arrivals, load, way = place
    capacity_qps = _LARGEST * 1000 / DEVICES[device](_LARGEST * _CAPACITY_LENGTH)
    times_ns = gamma(load * capacity_qps, ARRIVALS[arrivals][0], Random(seed))
    key_of, lengths = WAYS[way][1], Random(seed + 1)
    for number, arrival_ns in zip(range(count), times_ns, strict=False):
        tokens = _MEDIAN * lengths.lognormvariate(0, _SIGMA)
        length = next((each for each in LENGTHS if tokens <= each), LENGTHS[-1])
        deadline_ns = arrival_ns + slo_ns
        yield Request(number, arrival_ns, deadline_ns, key=key_of(length), payload=length)


def _run(place: Place, count: int, seed: int) -> tuple[float, float, float, float]:
    device, objective, arrivals, _, way = place
    profiles = {
        length: LatencyProfile(
            _NS_PER_MS * DEVICES[device](size * length) for size in range(1, _LARGEST + 1)
        )
        for length in LENGTHS
    }
    longest = profiles[LENGTHS[-1]]
    jitter, sigma = Random(seed + 2), ARRIVALS[arrivals][1]

    def service_ns(device: int, batch: Sequence[Request]) -> int:
        length = max(request.payload for request in batch)
        return int(profiles[length].latency_ns(len(batch)) * jitter.lognormvariate(0, sigma))

    def profile_of(key: Hashable) -> LatencyProfile:
        return profiles[key] if isinstance(key, Bucket) else longest

    slo_ns = round(OBJECTIVES[objective] * longest.latency_ns(_LARGEST))
    maker = WAYS[way][0]
    policy = Batching(lambda key: maker(profile_of(key), max_batch_size=_LARGEST))
    return figures(simulate(policy, _requests(place, slo_ns, count, seed), service_ns=service_ns))


def _measure(place: Place, count: int, seeds: int) -> Cell:
    return Cell(*place, *means(_run(place, count, seed) for seed in range(seeds)))


def _table(cells: Sequence[Cell]) -> str:
    """Of each way: violations; mean and 99th percentile of the latencies in ms."""
    lines = [
        f"| a batch takes | objective | arrivals | load | {' | '.join(WAYS)} |",
        "|---|---|---|---|" + "---|" * len(WAYS),
    ]
    for start in range(0, len(cells), len(WAYS)):
        row = cells[start : start + len(WAYS)]
        first = row[0]
        figures = [f"{e.violated:.4f}; {e.mean_ms:.1f}, {e.p99_ms:.0f}" for e in row]
        head = f"| {first.device} | {first.objective} | {first.arrivals} | {first.load:g} | "
        lines.append(head + " | ".join(figures) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=5000, help="in each cell, for each seed")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args(arguments)
    places = list(itertools.product(DEVICES, OBJECTIVES, ARRIVALS, LOADS, WAYS))
    measure = partial(_measure, count=options.requests, seeds=options.seeds)
    with multiprocessing.Pool(options.jobs) as pool:
        cells = pool.map(measure, places, chunksize=2)
    print(_table(cells))
    path = options.output / "batching_lengths.json"
    write_json(path, {"requests": options.requests, "seeds": options.seeds, "cells": cells})
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
