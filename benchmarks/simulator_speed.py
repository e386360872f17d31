"""Requests that the simulator handles in a second of processor time.

``python -m benchmarks.simulator_speed`` prints a table of policies and loads, and one of Flex with
several models, and writes ``docs/results/simulator_speed.json``. Generating the requests and
judging the outcome count, the import does not. The fewer requests share a batch, the more work each
takes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

from benchmarks.batching_flex_systems import SYSTEMS, run, synthetic
from benchmarks.batching_trace_cells import DEVICE_SLO_MS, PROFILE
from benchmarks.harness import argument_parser, describe_machine, write_json
from trims_shim.batching.policies import POLICIES, rule_maker
from trims_shim.batching.simulator import Report, poisson, requests, simulate
from trims_shim.batching.single import Batching

__all__ = ["main"]

_RATES_QPS = (40, 120, 200, 260, 400)
"""Requests a second; the device can do 308."""
_FLEX = (("equal", 1), ("equal", 8), ("mixed", 8), ("heavy", 8))
"""Models and devices, as in :mod:`benchmarks.batching_flex`."""
_FLEX_LOADS = (0.3, 0.6, 0.9, 1.3)
_LEAST_PER_S = 200_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a cell is slower than the target."""
    parser = argument_parser("simulator_speed", __doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="of a cell")
    parser.add_argument("--repeats", type=int, default=3, help="the quickest counts")
    options = parser.parse_args(arguments)
    count = options.requests
    found = _measured(
        "requests/s, qps",
        _RATES_QPS,
        {policy: partial(_speed, policy, count=count) for policy in POLICIES},
        repeats=options.repeats,
    )
    flex = _measured(
        "Flex, load",
        _FLEX_LOADS,
        {
            f"{models}, {devices} device{'s' * (devices > 1)}": partial(
                _flex_speed, models, devices, count=count
            )
            for models, devices in _FLEX
        },
        repeats=options.repeats,
    )
    slowest = min(min(each) for each in (found | flex).values())
    print(f"slowest: {slowest:,} requests/s (wanted: {_LEAST_PER_S:,})")
    content = {
        "machine": describe_machine(),
        "rates_qps": _RATES_QPS,
        "requests_per_s": found,
        "flex_loads": _FLEX_LOADS,
        "flex_requests_per_s": flex,
    }
    write_json(options.output / "simulator_speed.json", content)
    return int(slowest < _LEAST_PER_S)


def _measured(
    title: str,
    loads: Sequence[float],
    rows: Mapping[str, Callable[[float], int]],
    *,
    repeats: int,
) -> dict[str, list[int]]:
    """Measure the rate of each load, by row; print the table meanwhile."""
    print(f"{title:20}" + "".join(f"{load:>12}" for load in loads))
    found = {}
    for name, speed_of in rows.items():
        found[name] = [max(speed_of(load) for _ in range(repeats)) for load in loads]
        print(f"{name:20}" + "".join(f"{each:>12,}" for each in found[name]), flush=True)
    return found


def _speed(policy: str, rate_qps: float, *, count: int) -> int:
    maker = rule_maker(policy)
    gc.collect()
    started_s = time.process_time()
    outcome = simulate(
        Batching(lambda _: maker(PROFILE, max_batch_size=PROFILE.max_batch_size)),
        requests(poisson(rate_qps, Random(1)), slo_ms=DEVICE_SLO_MS, count=count),
        service_ns=lambda _, batch: PROFILE.latency_ns(len(batch)),
    )
    Report.of(outcome)
    return round(count / (time.process_time() - started_s))


def _flex_speed(models: str, devices: int, load: float, *, count: int) -> int:
    workload = synthetic(slos=models, process="4", load=load, devices=devices, count=count, seed=1)
    gc.collect()
    started_s = time.process_time()
    report = run(SYSTEMS["Flex, ours"], workload)
    return round(report.requests / (time.process_time() - started_s))


if __name__ == "__main__":
    raise SystemExit(main())
