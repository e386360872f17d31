"""What plans are worth: planning again and again, loading variants slowly, and groups of devices.

``python -m benchmarks.planning`` simulates Proteus' traces on its forty devices
(:mod:`benchmarks.batching_data` says where they are), and writes ``docs/results/planning.json``,
``planning.md`` and ``planning.png``. Virtual time: violations and accuracies are the same on every
machine that finds the same plans; times of the solver are this machine's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from random import Random

from benchmarks.batching_data import DEVICE_COUNTS, DataMissing, find_dataset
from benchmarks.batching_placement import planned_options
from benchmarks.harness import argument_parser, describe_machine, write_json
from benchmarks.planning_herd import HerdCell, herd_cells, run_herd
from benchmarks.planning_report import write_markdown, write_plot
from trims_shim.batching.policies import rule_maker
from trims_shim.batching.protocol import Request
from trims_shim.planner import (
    Option,
    Placement,
    Problem,
    Replanning,
    Serving,
    plan_proteus,
    serve,
)

__all__ = ["main"]

_SLO_MS = 300.0
_TRACES = ("zipf_exponential", "zipf_exponential_bursty", "zipf_exponential x2.5")
"""The last one is the first one in less time."""
_HEADROOMS = (1.0, 1.25, 1.5, 2.0, 3.0)
_LOADS_S = (0.0, 0.05, 0.5, 2.0, 5.0)
"""How long a device takes to load a variant: at once, mapped, or read and copied."""
_USUAL_HEADROOM, _USUAL_LOAD_S = 1.5, 0.05
_LIMIT_S = 2.0
_DEMANDS_QPS = (260, 800, 1000, 1200)
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. ``plans``: "once", for the 95th percentile of the demand, or "again"."""

    trace: str
    plans: str
    headroom: float
    load_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all cells; return 1 without traces."""
    parser = argument_parser("planning", __doc__)
    parser.add_argument("--traces", nargs="+", default=list(_TRACES))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        find_dataset()
    except DataMissing as error:
        print(error, file=sys.stderr)
        return 1
    solved = [_solve(qps, times) for times in (1, 4) for qps in _DEMANDS_QPS]
    cells = list(_cells(options.traces))
    with ProcessPoolExecutor(options.jobs) as pool:
        served = []
        for cell, found in zip(cells, pool.map(_run, cells), strict=True):
            print(cell, found, flush=True)
            served.append(asdict(cell) | found)
        herds: list[HerdCell] = list(herd_cells())
        grouped = []
        for each, row in zip(herds, pool.map(run_herd, herds), strict=True):
            print(each, row, flush=True)
            grouped.append(asdict(each) | row)
    content = {
        "machine": describe_machine(),
        "solver": solved,
        "served": served,
        "herd": grouped,
    }
    write_json(options.output / "planning.json", content)
    write_markdown(content, options.output / "planning.md")
    write_plot(content, options.output / "planning.png")
    return 0


def _cells(traces: Sequence[str]) -> Iterator[Cell]:
    for trace in traces:
        for headroom in _HEADROOMS:
            yield Cell(trace, "once", headroom, _USUAL_LOAD_S)
            yield Cell(trace, "again", headroom, _USUAL_LOAD_S)
        for load_s in _LOADS_S:
            if load_s != _USUAL_LOAD_S:
                yield Cell(trace, "again", _USUAL_HEADROOM, load_s)


@cache
def _options() -> list[Option]:
    return planned_options(find_dataset().options(_SLO_MS))


@cache
def _requests(trace: str) -> list[Request]:
    name, _, speed = trace.partition(" x")
    found = find_dataset().requests(name)
    if speed:
        for each in found:
            slo_ns = each.deadline_ns - each.arrival_ns
            each.arrival_ns = round(each.arrival_ns / float(speed))
            each.deadline_ns = each.arrival_ns + slo_ns
    return found


def _peak_qps(trace: str) -> dict[str, float]:
    name, _, speed = trace.partition(" x")
    demand_qps = find_dataset().demand_qps(name, headroom=1.0)
    return {family: qps * float(speed or 1) for family, qps in demand_qps.items()}


def _plan(demand_qps: Mapping[str, float], headroom: float, before: Placement | None) -> Placement:
    problem = Problem(DEVICE_COUNTS, _options(), demand_qps)
    return plan_proteus(problem, headroom=headroom, before=before, time_limit_s=_LIMIT_S)


def _run(cell: Cell) -> dict[str, float | None]:
    requests = _requests(cell.trace)
    first = _plan(_peak_qps(cell.trace), cell.headroom, None)
    replanning = Replanning(lambda demand, before: _plan(demand, cell.headroom, before))
    load_ns = round(cell.load_s * _NS_PER_S)
    serving = Serving(
        [kind for kind, count in DEVICE_COUNTS.items() for _ in range(count)],
        first,
        make_rule=rule_maker("auto"),
        random=Random(1),
        load_ns=lambda option: load_ns,
        replanning=replanning if cell.plans == "again" else None,
    )
    _, report = serve(serving, requests)
    return {
        "requests": report.requests,
        "violation_ratio": report.violation_ratio,
        "accuracy": report.accuracy,
        "busy_share": report.busy_share,
        "replans": serving.plans,
        "loads": serving.loads,
    }


def _solve(qps: float, times: int) -> dict[str, float]:
    """Plan for ``times`` the devices; a family's demand is as in the first trace."""
    counts = Counter(str(each.key) for each in _requests(_TRACES[0]))
    whole = sum(counts.values())
    problem = Problem(
        {kind: times * count for kind, count in DEVICE_COUNTS.items()},
        _options(),
        {family: times * qps * count / whole for family, count in counts.items()},
    )
    taken_s = []
    for _ in range(5):
        started_s = time.perf_counter()
        placement = plan_proteus(problem, headroom=1.0)
        taken_s.append(time.perf_counter() - started_s)
    again_s = []
    grown = replace(problem, demand_qps={f: 1.1 * each for f, each in problem.demand_qps.items()})
    for _ in range(5):
        started_s = time.perf_counter()
        plan_proteus(grown, headroom=1.0, before=placement)
        again_s.append(time.perf_counter() - started_s)
    return {
        "devices": sum(problem.devices.values()),
        "options": len(problem.options),
        "demand_qps": times * qps,
        "taken_s": statistics.median(taken_s),
        "again_s": statistics.median(again_s),
        "accuracy": placement.accuracy,
        "bound": placement.accuracy_bound,
        "headroom": placement.headroom,
    }


if __name__ == "__main__":
    raise SystemExit(main())
