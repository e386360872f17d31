"""Batching policies in the simulator: Proteus' traces, its artefact, and generated arrivals.

``python -m benchmarks.batching_traces`` prints tables and writes
``docs/results/batching_traces.json``, ``.md`` and ``.png``. Everything is simulated, with the same
trace, placement and latencies for every policy. A violation is a request that is answered late,
dropped or never answered. Cells that are in the JSON file and whose code has not changed are not
simulated again, so a run may be interrupted.

Traces and latencies are Proteus' own and not part of this project: ``TRIMS_BATCHING_DATA`` says
where they are (see benchmarks/batching_data.py). ``python -m benchmarks.proteus_artefact`` measures
the rows of its artefact, which are read from ``docs/results/batching_artefact.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.batching_data import DataMissing, find_dataset
from benchmarks.batching_placement import SolverMissing, find_placement
from benchmarks.batching_trace_cells import (
    ARRIVALS,
    DEVICE_SLO_MS,
    MAKERS,
    ROUTINGS,
    TRACE_SLO_MS,
    Cell,
    Result,
    fingerprint,
    run,
)
from benchmarks.batching_trace_plot import plot
from benchmarks.batching_trace_report import Findings
from benchmarks.batching_trace_tables import print_tables, write_markdown
from benchmarks.harness import argument_parser
from benchmarks.proteus_artefact import RESULTS, known_runs

__all__ = ["main"]

_SAVE_EVERY = 50
_COMMIT = "6967c9327e66f6d6fe94993dcaa7521efc2f72f5"


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells to simulate."""

    traces: tuple[str, ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    loads: tuple[float, ...]
    trace_requests: int
    """0: the whole trace."""
    device_requests: int

    def cells(self) -> list[Cell]:
        """Cells of one trace are neighbours, so that a process reads a trace once."""
        found = []
        for trace in self.traces:
            for policy in self.policies:
                for route in ROUTINGS:
                    # Only the random routing is random.
                    seeds = self.seeds if route == "random" else self.seeds[:1]
                    found += [
                        Cell(trace, policy, seed, routing=route, requests=self.trace_requests)
                        for seed in seeds
                    ]
        for subject in ARRIVALS:
            for load in self.loads:
                found += [
                    Cell(subject, policy, seed, load=load, requests=self.device_requests)
                    for policy in self.policies
                    for seed in self.seeds
                ]
        return found


FULL = Plan(
    traces=(
        "zipf_exponential",
        "zipf_uniform",
        "zipf_gamma",
        "zipf_flat_uniform",
        "zipf_flat_bursty",
    ),
    policies=tuple(MAKERS),
    seeds=(1, 2, 3),
    loads=(0.3, 0.6, 0.8, 0.95, 1.1, 1.3),
    trace_requests=0,
    device_requests=20_000,
)
QUICK = replace(
    FULL, traces=FULL.traces[:1], seeds=(1,), loads=(0.6, 1.1), trace_requests=8000,
    device_requests=2000,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate missing cells; return 1 without traces, or with --check if a target is missed."""
    options = _parser().parse_args(arguments)
    plan = _plan(options)
    if not options.show:
        try:
            dataset = find_dataset()
            for trace in plan.traces:  # here, and not in every process at once
                find_placement(dataset, trace, TRACE_SLO_MS)
        except (DataMissing, SolverMissing) as error:
            print(error, file=sys.stderr)
            return 1
    path = options.output / "batching_traces.json"
    started_s = time.monotonic()
    results = _simulated(plan, options, path)
    if not results:
        print(f"{path} has none of these cells; --show simulates nothing", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - started_s:.0f} s", file=sys.stderr)
    artefact = [each for each in known_runs(options.artefact) if each.trace in plan.traces]
    findings = Findings(results, artefact)
    if options.json:
        print(json.dumps(_content(findings) | {"cells": [asdict(each) for each in results]}))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 190)
        print_tables(findings, console)
    whole = Findings(_read(path), known_runs(options.artefact))
    write_markdown(whole, path.with_suffix(".md"))
    plot(whole, path.with_suffix(".png"))
    print(f"written: {path} and, beside it, .md and .png", file=sys.stderr)
    return 1 if options.check and not all(each.is_met for each in findings.targets()) else 0


def _parser() -> argparse.ArgumentParser:
    # Cells that are not simulated anew are kept.
    cells = ("traces", "policies", "seeds", "again")
    parser = argument_parser("batching_traces", __doc__, harmless=(*cells, "show", "artefact"))
    parser.add_argument("--quick", action="store_true", help="a smoke run, in seconds")
    parser.add_argument("--traces", nargs="+", help="which, of those in the directory")
    parser.add_argument("--policies", nargs="+", choices=list(MAKERS))
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--again", nargs="*", choices=list(MAKERS), help="made anew regardless")
    parser.add_argument("--show", action="store_true", help="simulate nothing, print the file")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at once")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--artefact", type=Path, default=RESULTS, help="its results")
    parser.add_argument("--check", action="store_true", help="status 1 when a target is missed")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    changes: dict[str, Any] = {}
    if options.traces:
        changes["traces"] = tuple(options.traces)
    if options.policies:
        changes["policies"] = tuple(options.policies)
    if options.seeds:
        changes["seeds"] = tuple(range(1, options.seeds + 1))
    return replace(QUICK if options.quick else FULL, **changes)


def _simulated(plan: Plan, options: argparse.Namespace, path: Path) -> list[Result]:
    """Every cell of the plan, read from the file if its code is still the same."""
    known = {each.cell: each for each in _read(path)}
    cells = plan.cells()
    if options.show:
        return [known[cell] for cell in cells if cell in known]
    missing = [
        cell
        for cell in cells
        if cell not in known
        or known[cell].code != fingerprint(cell.policy)
        or cell.policy in (options.again or ())
    ]
    print(f"{len(missing)} of {len(cells)} cells to simulate", file=sys.stderr)
    if not missing:
        return [known[cell] for cell in cells]
    pool = ProcessPoolExecutor(options.jobs) if options.jobs > 1 else None
    try:
        found = map(run, missing) if pool is None else pool.map(run, missing)
        for number, result in enumerate(found, start=1):
            known[result.cell] = result
            if number % _SAVE_EVERY == 0:
                _write(path, known.values(), options)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        _write(path, known.values(), options)
    return [known[cell] for cell in cells]


def _read(path: Path) -> list[Result]:
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    return [Result.of_row(row) for row in content["cells"]]


def _write(path: Path, results: Iterable[Result], options: argparse.Namespace) -> None:
    """Write a line per cell: some thousand lines that people can read and compare."""
    ordered = sorted(results, key=lambda each: astuple(each.cell))
    artefact = known_runs(options.artefact)
    head = json.dumps(_content(Findings(ordered, artefact)), indent=1)
    rows = ",\n".join(f"  {json.dumps(each.row())}" for each in ordered)
    partial = path.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(f'{head[:-2]},\n "cells": [\n{rows}\n ]\n}}\n')
    partial.replace(path)


def _content(findings: Findings) -> dict[str, Any]:
    return {
        "source": f"github.com/UMass-LIDS/Proteus {_COMMIT}: traces and latencies; simulated",
        "python": platform.python_version(),
        "slo_ms": {"traces": TRACE_SLO_MS, "device": DEVICE_SLO_MS},
        "device": "20 + 2 b ms, batches up to 16",
        "targets": [asdict(each) | {"is_met": each.is_met} for each in findings.targets()],
        "columns": Result.columns(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
