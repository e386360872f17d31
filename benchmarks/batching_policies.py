"""Every batching policy on a simulated device, over a grid of loads.

``python -m benchmarks.batching_policies`` takes minutes.

The grid is of profiles (a high, middle and low fixed cost, padded sizes, small and large batches),
SLOs (tight and loose), arrivals (uniform, Poisson, gamma with a coefficient of variation of 2 and
4, bursts), loads, and jitters (none; exponential, 1 ms on average, on service and timers;
log-normal service). All policies see the same arrivals. A load of 1 is the throughput of the
largest batch that can be waited for and run within the SLO. A violation is a request that is
answered late, dropped or never answered. Nothing depends on the machine. All policies know the
profile.

Prints, for each policy, how far it is from the best of each cell; writes
``docs/results/batching_policies.json`` and ``.png``. The decision based on it is
``docs/decisions/0009-default-batching-policy.md``.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.harness import argument_parser
from benchmarks.rendering import pyplot, save_picture
from trims_shim.batching.policies import POLICIES, Proteus, Window
from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import (
    Outcome,
    Report,
    bursty,
    gamma,
    poisson,
    requests,
    simulate,
    uniform,
)
from trims_shim.batching.single import Batching

__all__ = ["JITTERS", "main", "simulated"]

_NS_PER_MS = 1_000_000
PROFILES = {
    "45 + 0.4 b": LatencyProfile.linear(0.4, 45, max_batch_size=16),
    "20 + 2 b": LatencyProfile.linear(2, 20, max_batch_size=16),
    "2 + 3 b": LatencyProfile.linear(3, 2, max_batch_size=16),
    "padded": LatencyProfile.measured(
        {1: 30e6, 2: 42e6, 4: 70e6, 8: 120e6}, max_batch_size=8, pads=True
    ),
    "20 + 2 b, 8": LatencyProfile.linear(2, 20, max_batch_size=8),
    "20 + 2 b, 64": LatencyProfile.linear(2, 20, max_batch_size=64),
}
SLOS = {"tight": 1.6, "loose": 4.0}
"""Multiples of the latency of the largest batch, or of 16 if that is smaller."""
ARRIVALS = ("uniform", "Poisson", "gamma 2", "gamma 4", "bursty")
LOADS = (0.3, 0.6, 0.8, 1.0, 1.3)
JITTERS = ("none", "1 ms", "log-normal")
MAKERS: dict[str, RuleMaker] = {
    **POLICIES,
    "goodput": Goodput,
    "proteus_exact": partial(Proteus, margin_ms=0),
    "proteus_head": partial(Proteus, drop="head"),
    "window": partial(Window, wait_ms=5),
    "window_20": partial(Window, wait_ms=20),
}
_LOG_NORMAL_SIGMA = 0.3


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on one device."""

    profile: str
    slo: str
    arrivals: str
    load: float
    jitter: str
    seed: int
    requests: int


@dataclass(frozen=True, slots=True)
class Result:
    """By policy: violations, and the share of the time that the device was busy."""

    cell: Cell
    violations: dict[str, int]
    busy: dict[str, float]

    def is_good(self, policy: str) -> bool:
        """Whether no policy is better by more than two standard deviations of the counts."""
        best, own = min(self.violations.values()), self.violations[policy]
        return own - best <= 2 * math.sqrt(own + best)


def _slo_ms(cell: Cell) -> float:
    profile = PROFILES[cell.profile]
    largest_ns = profile.latency_ns(min(16, profile.max_batch_size))
    return round(SLOS[cell.slo] * largest_ns / _NS_PER_MS)


def _rate_qps(cell: Cell) -> float:
    profile = PROFILES[cell.profile]
    half_ns = _slo_ms(cell) * _NS_PER_MS / 2
    largest = max(1, profile.largest_within(half_ns, profile.max_batch_size))
    best = max(size / profile.latency_ns(size) for size in range(1, largest + 1))
    return cell.load * best * 1e9


def _times_ns(cell: Cell) -> Iterator[int]:
    rate_qps, random = _rate_qps(cell), Random(cell.seed)
    if cell.arrivals == "uniform":
        return uniform(rate_qps)
    if cell.arrivals == "Poisson":
        return poisson(rate_qps, random)
    if cell.arrivals == "bursty":
        return bursty(rate_qps, random, burst_s=_slo_ms(cell) / 100)
    return gamma(rate_qps, float(cell.arrivals.split()[1]), random)


def simulated(
    maker: RuleMaker, profile: LatencyProfile, stream: Iterable[Request], *, jitter: str, seed: int
) -> Outcome:
    """Simulate one device whose batches and timers have one of :data:`JITTERS`."""
    timers = Random(seed + 2)
    return simulate(
        Batching(lambda key: maker(profile, max_batch_size=profile.max_batch_size)),
        stream,
        service_ns=_service_ns(profile.latency_ns, jitter, Random(seed + 1)),
        lateness_ns=None if jitter == "none" else lambda: _exponential_ns(timers),
    )


def _service_ns(
    latency_ns: Callable[[int], int], jitter: str, random: Random
) -> Callable[[int, Sequence[Request]], int]:
    if jitter == "none":
        return lambda device, batch: latency_ns(len(batch))
    if jitter == "1 ms":
        return lambda device, batch: latency_ns(len(batch)) + _exponential_ns(random)
    return lambda device, batch: int(
        latency_ns(len(batch)) * random.lognormvariate(0, _LOG_NORMAL_SIGMA)
    )


def _exponential_ns(random: Random) -> int:
    return int(random.expovariate(1) * _NS_PER_MS)


def _report(cell: Cell, maker: RuleMaker) -> Report:
    stream = requests(_times_ns(cell), slo_ms=_slo_ms(cell), count=cell.requests)
    profile = PROFILES[cell.profile]
    return Report.of(simulated(maker, profile, stream, jitter=cell.jitter, seed=cell.seed))


def _run(cell: Cell, policies: Sequence[str]) -> Result:
    reports = {name: _report(cell, MAKERS[name]) for name in policies}
    return Result(
        cell,
        {name: each.violations for name, each in reports.items()},
        {name: round(each.busy_share, 3) for name, each in reports.items()},
    )


def _cells(count: int, seeds: int, *, quick: bool) -> list[Cell]:
    axes = (PROFILES, SLOS, ARRIVALS, LOADS, JITTERS)
    if quick:
        axes = (["20 + 2 b", "padded"], ["tight"], ["Poisson", "gamma 4"], [0.6], JITTERS)
    grid = itertools.product(*axes, range(seeds))
    return [Cell(*place, requests=count) for place in grid]


def _table(results: Sequence[Result], policies: Sequence[str]) -> str:
    lines = [
        f"{'policy':<14} {'violations':>10} {'busy':>6} {'good cells':>11}"
        f" {'mean behind':>12} {'most behind':>12}"
    ]
    for name in policies:
        behind = [
            (each.violations[name] - min(each.violations.values())) / each.cell.requests
            for each in results
        ]
        mean = statistics.mean(each.violations[name] / each.cell.requests for each in results)
        busy = statistics.mean(each.busy[name] for each in results)
        good = sum(each.is_good(name) for each in results)
        lines.append(
            f"{name:<14} {mean:>10.4f} {busy:>6.3f} {good:>5}/{len(results):<5}"
            f" {statistics.mean(behind):>12.4f} {max(behind):>12.4f}"
        )
    return "\n".join(lines)


def _worst(results: Sequence[Result], policy: str, count: int) -> str:
    def behind(result: Result) -> int:
        return result.violations[policy] - min(result.violations.values())

    rows = []
    for each in sorted(results, key=behind, reverse=True)[:count]:
        best = min(each.violations, key=each.violations.__getitem__)
        cell = each.cell
        rows.append(
            f"{cell.profile}, {cell.slo}, {cell.arrivals}, load {cell.load}, {cell.jitter}: "
            f"{each.violations[policy] / cell.requests:.4f}; "
            f"{best} {each.violations[best] / cell.requests:.4f}"
        )
    return "\n".join(rows)


def _plot(results: Sequence[Result], policies: Sequence[str], path: Path) -> None:
    figure, panels = pyplot().subplots(1, len(JITTERS), figsize=(5 * len(JITTERS), 4), sharey=True)
    for panel, jitter in zip(panels, JITTERS, strict=True):
        for name in policies:
            shares = sorted(
                (each.violations[name] - min(each.violations.values())) / each.cell.requests
                for each in results
                if each.cell.jitter == jitter
            )
            ranks = [rank / len(shares) for rank in range(1, len(shares) + 1)]
            panel.step(shares, ranks, label=name, linewidth=2.5 if name == "auto" else 1)
        panel.set(title=f"jitter: {jitter}", xlabel="violations more than the best", xlim=(0, 0.1))
    panels[0].set_ylabel("share of cells")
    panels[-1].legend(fontsize="small")
    figure.tight_layout()
    save_picture(figure, path)


def _write(results: Sequence[Result], policies: Sequence[str], directory: Path) -> None:
    rows = [
        [
            *(each.cell.profile, each.cell.slo, each.cell.arrivals, each.cell.load),
            *(each.cell.jitter, each.cell.seed, each.cell.requests),
            [each.violations[name] for name in policies],
            [each.busy[name] for name in policies],
        ]
        for each in results
    ]
    columns = [*(field.name for field in fields(Cell)), "violations", "busy"]
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"policies": {json.dumps(policies)},\n"columns": {json.dumps(columns)},\n"cells": ['
    path = directory / "batching_policies.json"
    path.write_text(f"{text}\n{lines}\n]}}\n")
    _plot(results, policies, path.with_suffix(".png"))
    print(f"written: {path} and .png")


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argument_parser("batching_policies", __doc__, harmless=("worst",))
    parser.add_argument("--quick", action="store_true", help="a smoke run, in seconds")
    parser.add_argument("--policies", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--requests", type=int, default=2500, help="in each cell")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--worst", type=int, default=10, help="cells of auto to print")
    options = parser.parse_args(arguments)
    count = min(options.requests, 1000) if options.quick else options.requests
    run = partial(_run, policies=options.policies)
    with multiprocessing.Pool(options.jobs) as pool:
        results = pool.map(run, _cells(count, options.seeds, quick=options.quick), chunksize=5)
    for jitter in JITTERS:
        print(f"\njitter: {jitter}")
        print(_table([each for each in results if each.cell.jitter == jitter], options.policies))
    if "auto" in options.policies:
        print(f"\nwhere auto is furthest behind:\n{_worst(results, 'auto', options.worst)}")
    _write(results, options.policies, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
