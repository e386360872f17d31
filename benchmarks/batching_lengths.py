"""Items of different lengths: all in one batch, a batch for each length, or whichever pays.

``python -m benchmarks.batching_lengths`` takes about five minutes, prints a table and writes
``docs/results/batching_lengths.json``. One simulated device; the default policy beside one that
never waits. Lengths are log-normal, in the classes of ``Pad()``, and a batch is padded to its
longest item. Latencies are known from the beginning, as after ``warm`` with items of the longest
length of their class, or learned from nothing.

A load of 1 is the throughput of full batches of 128 tokens. That is more than the mean length, so
1.2 is not an overload if every token costs its time. The objective is a multiple of the time of a
full batch of the longest items. Nothing depends on the machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmarks.batching_latencies import figures, means
from benchmarks.batching_learner import Learner
from benchmarks.harness import argument_parser, write_json
from benchmarks.rendering import markdown_table
from trims_shim.batching.buckets import Bucket, OpenBucket
from trims_shim.batching.policies import Auto, Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Policy, Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import gamma, simulate
from trims_shim.batching.single import Batching

__all__ = ["main"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_LARGEST = 64
LENGTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The longest items of each class."""
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
"""Time of a batch by its padded tokens: like a GPU, with a large fixed cost, like a CPU."""
OBJECTIVES = {"tight": 0.6, "loose": 2.2}
ARRIVALS = {"Poisson": (1.0, 0.0), "bursts": (3.0, 0.2)}
"""Coefficient of variation of the gaps, and sigma of the batches' times (log-normal)."""
LOADS = (0.1, 0.3, 0.6, 0.9, 1.2)
WAYS: dict[str, tuple[RuleMaker, Callable[[int], Hashable]]] = {
    "immediate, together": (Immediate, lambda length: None),
    "auto, together": (Auto, lambda length: None),
    "auto, apart": (Auto, Bucket),
    "auto": (Auto, OpenBucket),
}
KNOWLEDGE = ("known", "learned")


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of batching under one load; means over the seeds."""

    device: str
    objective: str
    arrivals: str
    load: float
    knowledge: str
    way: str
    violated: float
    mean_ms: float
    p99_ms: float
    busy: float


Place = tuple[str, str, str, float, str, str]


def _requests(place: Place, slo_ns: int, count: int, seed: int) -> Iterator[Request]:
    device, _, arrivals, load, _, way = place
    capacity_qps = _LARGEST * 1000 / DEVICES[device](_LARGEST * _CAPACITY_LENGTH)
    times_ns = gamma(load * capacity_qps, ARRIVALS[arrivals][0], Random(seed))
    key_of, lengths = WAYS[way][1], Random(seed + 1)
    for number, arrival_ns in zip(range(count), times_ns, strict=False):
        drawn = _MEDIAN * lengths.lognormvariate(0, _SIGMA)
        length = min(max(1, round(drawn)), LENGTHS[-1])
        key = key_of(next(each for each in LENGTHS if length <= each))
        yield Request(number, arrival_ns, arrival_ns + slo_ns, key=key, payload=length)


def _run(place: Place, count: int, seed: int) -> tuple[float, float, float, float]:
    device, objective, arrivals, _, knowledge, way = place
    duration_ms = DEVICES[device]

    def profile_of(key: Hashable) -> LatencyProfile:
        length = key if isinstance(key, Bucket) else LENGTHS[-1]
        return LatencyProfile(
            _NS_PER_MS * duration_ms(size * length) for size in range(1, _LARGEST + 1)
        )

    jitter, sigma = Random(seed + 2), ARRIVALS[arrivals][1]

    def service_ns(device: int, batch: Sequence[Request]) -> int:
        tokens = len(batch) * max([request.payload for request in batch])
        return int(_NS_PER_MS * duration_ms(tokens) * jitter.lognormvariate(0, sigma))

    slo_ns = round(OBJECTIVES[objective] * profile_of(None).latency_ns(_LARGEST))
    maker = WAYS[way][0]
    policy: Policy
    if knowledge == "known":
        policy = Batching(lambda key: maker(profile_of(key), max_batch_size=_LARGEST))
    else:
        policy = Learner(maker, max_batch_size=_LARGEST)
    return figures(simulate(policy, _requests(place, slo_ns, count, seed), service_ns=service_ns))


def _measure(place: Place, count: int, seeds: int) -> Cell:
    return Cell(*place, *means(_run(place, count, seed) for seed in range(seeds)))


def _table(cells: Sequence[Cell]) -> str:
    """Print violations, and mean and 99th percentile of latencies in ms, of each way."""
    rows = []
    for start in range(0, len(cells), len(WAYS)):
        row = cells[start : start + len(WAYS)]
        first = row[0]
        figures = [f"{e.violated:.4f}; {e.mean_ms:.1f}, {e.p99_ms:.0f}" for e in row]
        where = (first.device, first.objective, first.arrivals, f"{first.load:g}", first.knowledge)
        rows.append([*where, *figures])
    head = ["a batch takes", "objective", "arrivals", "load", "which is", *WAYS]
    return "\n".join(markdown_table(head, rows, texts=3))


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argument_parser("batching_lengths", __doc__)
    parser.add_argument("--requests", type=int, default=5000, help="in each cell, for each seed")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    options = parser.parse_args(arguments)
    places = list(itertools.product(DEVICES, OBJECTIVES, ARRIVALS, LOADS, KNOWLEDGE, WAYS))
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
