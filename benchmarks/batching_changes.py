"""Devices that become slower or quicker: how soon a batcher with a learned profile adapts.

``python -m benchmarks.batching_changes`` takes about a minute, prints a table and writes
``docs/results/batching_changes.json``. One simulated device, learned profiles, Poisson arrivals. A
batch takes 4 + b / 2 ms. After 20 s it takes several times as long: for good, or in periods that
begin and end at fixed times. Nothing depends on the machine.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.batching_learner import Learner
from benchmarks.harness import argument_parser, write_json
from trims_shim.batching.policies import rule_maker
from trims_shim.batching.protocol import Request
from trims_shim.batching.simulator import poisson, requests, simulate

__all__ = ["main"]

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
_LARGEST = 32
_POLICIES = ("auto", "early_drop")
_BEFORE_S = 20.0
_WINDOW_S = 10.0
_SPREAD = 0.03
LASTING = (
    # times as slow, requests a second, objective in ms
    (0.2, 200, 100),
    (2, 300, 50),
    (3, 300, 50),
    (5, 200, 100),
    (10, 200, 100),
    (10, 200, 400),
)
PASSING = (
    # period in s, its slow part in s, times as slow; then requests a second, objective, and sigma
    (5, 0.3, 3, 300, 50, 0.1),
    (5, 0.5, 3, 600, 60, 0.1),
    (10, 1, 4, 600, 100, 0.1),
    (3, 0.2, 5, 900, 80, 0.2),
    (20, 10, 2.5, 900, 80, 0.2),
    (1, 0, 1, 200, 60, 0.8),
    (1, 0, 1, 600, 100, 0.8),
)

Slowness = Callable[[float], float]
"""How many times as slow the device is at a time in seconds."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """Shares of requests answered in time, by windows of ten seconds; means over seeds."""

    slower: float
    rate_qps: float
    slo_ms: float
    policy: str
    before: float
    at_once: float
    after_10_s: float
    after_50_s: float
    new: float
    """The first ten seconds of a process that starts on the slow device."""


@dataclass(frozen=True, slots=True)
class Passing:
    """Periods in which the device is slow; means over seeds of two minutes each."""

    every_s: float
    for_s: float
    slower: float
    rate_qps: float
    slo_ms: float
    sigma: float
    policy: str
    violated: float


def _in_time(
    policy: str, slowness: Slowness, rate_qps: float, slo_ms: float, *, s: float, sigma: float,
    seed: int,
) -> tuple[list[float], float]:  # fmt: skip
    """Return the share answered in time, of each window of ten seconds and of all requests."""
    now_ns = [0]
    jitter = Random(seed + 1)

    class Timed(Learner):
        def on_event(self, at_ns, event):  # type: ignore[no-untyped-def]
            now_ns[0] = at_ns
            return super().on_event(at_ns, event)

    def service_ns(device: int, batch: Sequence[Request]) -> int:
        ms = (4 + 0.5 * len(batch)) * slowness(now_ns[0] / _NS_PER_S)
        return round(ms * _NS_PER_MS * jitter.lognormvariate(0, sigma))

    every = list(requests(poisson(rate_qps, Random(seed)), slo_ms=slo_ms, duration_s=s))
    outcome = simulate(
        Timed(rule_maker(policy), max_batch_size=_LARGEST), iter(every), service_ns=service_ns
    )
    windows = range(round(s / _WINDOW_S))
    asked, good = [0 for _ in windows], [0 for _ in windows]
    for each in every:
        asked[int(each.arrival_ns / _NS_PER_S / _WINDOW_S)] += 1
    for request, end_ns in outcome.answered:
        if end_ns <= request.deadline_ns:
            good[int(request.arrival_ns / _NS_PER_S / _WINDOW_S)] += 1
    shares = [of / all_ for of, all_ in zip(good, asked, strict=True)]
    return shares, sum(good) / sum(asked)


def _lasting(seeds: int) -> Iterator[Lasting]:
    for (slower, rate_qps, slo_ms), policy in itertools.product(LASTING, _POLICIES):

        def change(at_s: float, slower: float = slower) -> float:
            return slower if at_s >= _BEFORE_S else 1.0

        def always(at_s: float, slower: float = slower) -> float:
            return slower

        found = [
            _in_time(policy, change, rate_qps, slo_ms, s=80, sigma=_SPREAD, seed=seed)[0]
            for seed in range(seeds)
        ]
        new = [
            _in_time(policy, always, rate_qps, slo_ms, s=10, sigma=_SPREAD, seed=seed)[1]
            for seed in range(seeds)
        ]
        mean = [sum(each) / seeds for each in zip(*found, strict=True)]
        yield Lasting(
            slower, rate_qps, slo_ms, policy, mean[1], mean[2], mean[3], mean[7], sum(new) / seeds
        )


def _passing(seeds: int) -> Iterator[Passing]:
    for (every_s, for_s, slower, rate_qps, slo_ms, sigma), policy in itertools.product(
        PASSING, _POLICIES
    ):

        def change(
            at_s: float, every_s: float = every_s, for_s: float = for_s, slower: float = slower
        ) -> float:
            return slower if at_s % every_s < for_s else 1.0

        shares = [
            _in_time(policy, change, rate_qps, slo_ms, s=120, sigma=sigma, seed=seed)[1]
            for seed in range(seeds)
        ]
        violated = 1 - sum(shares) / seeds
        yield Passing(every_s, for_s, slower, rate_qps, slo_ms, sigma, policy, violated)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argument_parser("batching_changes", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    options = parser.parse_args(arguments)
    print(
        "| times as slow | 1/s | objective | policy | before | 0-10 s | 10-20 s | 50-60 s | new |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    lasting = []
    for one in _lasting(options.seeds):
        lasting.append(one)
        shares = (one.before, one.at_once, one.after_10_s, one.after_50_s, one.new)
        figures = " | ".join(f"{each:.3f}" for each in shares)
        where = f"{one.slower:g} | {one.rate_qps:g} | {one.slo_ms:g} ms | {one.policy}"
        print(f"| {where} | {figures} |", flush=True)
    print("\n| every | for | times as slow | 1/s | objective | sigma | policy | violated |")
    print("|---|---|---|---|---|---|---|---|")
    passing = []
    for other in _passing(options.seeds):
        passing.append(other)
        when = f"{other.every_s:g} s | {other.for_s:g} s | {other.slower:g}"
        where = f"{other.rate_qps:g} | {other.slo_ms:g} ms | {other.sigma:g} | {other.policy}"
        print(f"| {when} | {where} | {other.violated:.4f} |", flush=True)
    path = options.output / "batching_changes.json"
    content = {"seeds": options.seeds, "lasting": lasting, "passing": passing}
    write_json(path, content)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
