"""onnxruntime sessions with the cache, against onnxruntime alone: ``make bench-ort``.

``python -m benchmarks.ort`` prints one table and writes ``docs/results/ort.json`` (machine, raw
samples, medians, ratios, verdicts, what was left out) and ``docs/results/ort.png``. Every sample is
a fresh process, timed after its imports. Variants alternate. The daemon and its directory of
prepared models belong to this run.

Models have random weights and are exported on the first run, which takes some minutes more and is
not counted in ``--budget-s``. A comparison counts only if the outputs have the same bits and the
weights were really mapped from the prepared model; otherwise the run ends with status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_plan import Clock
from benchmarks.harness import argument_parser, describe_machine, write_json
from benchmarks.ort_memory import measure_processes
from benchmarks.ort_plan import FULL, SMOKE, Plan, Run, find_model
from benchmarks.ort_sessions import measure_first_sessions, measure_sessions
from benchmarks.report import plot, show, verdicts

__all__ = ["main"]

_BUDGET_S = 450.0
_RESERVE_S = 10.0
"""Reserve for the plot and for a round that takes longer than the one before."""
_SECTIONS: dict[str, Callable[[Run], None]] = {
    "memory": measure_processes,
    "first": measure_first_sessions,
    "sessions": measure_sessions,
}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser("ort", __doc__, harmless=("budget_s",))
    parser.add_argument("--rounds", type=int, help="rounds of every comparison")
    parser.add_argument("--quick", action="store_true", help="a smoke run with small models")
    parser.add_argument("--models", nargs="+", choices=FULL.models, help="what to measure")
    parser.add_argument("--only", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS))
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S, help="what the run may take")
    parser.add_argument("--check", action="store_true", help="status 1 when a target is missed")
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> Plan:
    changes: dict[str, Any] = {}
    if options.rounds:
        changes["rounds"] = options.rounds
    if options.models:
        changes["models"] = changes["first_models"] = tuple(options.models)
        changes["shared_model"] = options.models[0]
    return dataclasses.replace(SMOKE if options.quick else FULL, **changes)


def _needed(plan: Plan, sections: Sequence[str]) -> list[str]:
    wanted = {
        "memory": (plan.shared_model,),
        "first": plan.first_models,
        "sessions": plan.models,
    }
    return list(dict.fromkeys(name for section in sections for name in wanted[section]))


def _write(run: Run, machine: dict[str, Any], directory: Path) -> None:
    findings = run.findings
    content = {
        "machine": machine,
        "load_average_after": os.getloadavg(),
        "plan": asdict(run.plan),
        "page_cache": "files dropped and read back before measuring",
        "targets": verdicts(findings.rows),
        "faults": findings.faults,
        "left_out": run.left_out,
        "rows": [asdict(row) | {"is_met": row.is_met} for row in findings.rows],
        "samples": findings.samples,
    }
    write_json(directory / "ort.json", content)


def _measure(run: Run, sections: Sequence[str], budget_s: float) -> None:
    # As for Ctrl-C: children end with their blocks, and the findings so far are written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in _needed(run.plan, sections):
            print(f"model {name}", file=sys.stderr, flush=True)
            find_model(name)
        run.clock = Clock(budget_s - _RESERVE_S)
        for name in sections:
            _SECTIONS[name](run)
    except KeyboardInterrupt:
        run.findings.faults.append("interrupted: what follows was not measured")


def _describe() -> dict[str, Any]:
    import onnxruntime

    machine = describe_machine()
    machine["versions"] |= {"onnxruntime": onnxruntime.__version__}
    return machine | {"onnxruntime_build": onnxruntime.get_build_info()}


def _plot(run: Run, machine: dict[str, Any], options: argparse.Namespace) -> None:
    if run.findings.curves:
        subtitle = (
            f"{machine['processor']}, {machine['processors']} processors, onnxruntime "
            f"{machine['versions']['onnxruntime']}; medians of {run.plan.rounds}, prepared, "
            "fresh processes"
        )
        plot(run.findings.curves, options.output / "ort.png", subtitle=subtitle)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections; return 1 if a comparison was not valid (or missed, with --check)."""
    options = _arguments(arguments)
    machine = _describe()
    run = Run(_plan(options), Clock(0.0))
    run.save = lambda: _write(run, machine, options.output)
    _measure(run, options.only, options.budget_s)
    run.save()
    _plot(run, machine, options)
    title = f"trims with onnxruntime, medians of {run.plan.rounds} alternating rounds"
    show(run.findings, title, options.output / "ort.json", run.left_out)
    is_missed = options.check and verdicts(run.findings.rows)["missed"]
    return 1 if run.findings.faults or is_missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
