"""The device tier against the frameworks' own loaders: ``python -m benchmarks.gpu``.

Writes ``docs/results/gpu.json`` (machine, raw samples, medians, ratios, verdicts, and what was left
out) after every section, so that a run that is cut off leaves results, and ``gpu.png`` at the end.
Every sample is a process that has done nothing but imports and the creation of the context.
Variants alternate. ``--budget-s`` limits the run; the JSON names what did not fit.

``--trial`` gives no usable figures. It runs everything with tiny models, on the CPU if torch has no
device; parts that need no kernel use any driver there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_cold import measure_cold_starts
from benchmarks.gpu_memory import measure_maps, measure_processes, measure_uploads
from benchmarks.gpu_plan import FULL, TRIAL, Clock, Plan, Run, make_directory
from benchmarks.gpu_processes import MODULE
from benchmarks.harness import argument_parser, describe_machine, run_once, write_json
from benchmarks.report import plot, show, verdicts

__all__ = ["main"]

Result = dict[str, Any]
_DISK_BYTES = 40 << 30
_RESERVE_S = 10.0
"""Reserve for the plot and for a round that takes longer than the one before."""
_SECTIONS: dict[str, Callable[[Run], None]] = {
    "maps": measure_maps,
    "processes": measure_processes,
    "uploads": measure_uploads,
    "cold": measure_cold_starts,
}
_OF_THE_DRIVER = ("maps", "processes", "uploads")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser("gpu", __doc__, harmless=("budget_s", "name"))
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds the run may take")
    parser.add_argument("--rounds", type=int, help="rounds of every comparison")
    models = list(dict.fromkeys((*FULL.models, *TRIAL.models)))
    parser.add_argument("--models", nargs="+", choices=models, help="what to start cold")
    parser.add_argument("--essential", action="store_true", help="fewer ways of loading a model")
    parser.add_argument("--only", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS))
    parser.add_argument("--trial", action="store_true", help="tiny models, to try the run out")
    parser.add_argument("--name", default="gpu", help="name of the result files")
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> Plan:
    changes: Result = {"is_essential": options.essential}
    if options.rounds:
        changes["rounds"] = options.rounds
    if options.models:
        changes["models"] = tuple(options.models)
    return dataclasses.replace(TRIAL if options.trial else FULL, **changes)


def _describe(plan: Plan) -> tuple[Result, str, list[str]]:
    """Describe the machine and the device; note what cannot be measured here."""
    import trims_shim

    device = run_once("describe", module=MODULE, device=plan.device)
    if plan.device == "cuda" and not device["has_cuda"]:
        raise SystemExit("torch has no CUDA device here; --trial --output DIR tries this out")
    machine = describe_machine() | {"device": device, "trims_shim": trims_shim.__version__}
    left_out = []
    if plan.device == "cpu":
        left_out.append("torch on a device: a trial loads to the CPU")
    answer = run_once("devices", module=MODULE)
    found = answer["devices"]
    if not found:
        reason = answer.get("reason", "it has no device")
        return machine, "", [*left_out, f"everything that needs the driver: {reason}"]
    machine |= {"devices": found, "copy_engine": answer["copy_engine"]}
    return machine, found[0]["id"], left_out


def _write(run: Run, machine: Result, options: argparse.Namespace) -> None:
    findings = run.findings
    content = {
        "machine": machine,
        "is_trial": run.plan.is_trial,
        "load_average_after": os.getloadavg(),
        "plan": asdict(run.plan),
        "checkpoints_in": str(run.directory.parent),
        "targets": verdicts(findings.rows),
        "faults": findings.faults,
        "left_out": run.left_out,
        "rows": [asdict(row) | {"is_met": row.is_met} for row in findings.rows],
        "samples": findings.samples,
    }
    write_json(options.output / f"{options.name}.json", content)


def _measure(run: Run, options: argparse.Namespace) -> None:
    for name in options.only:
        if name in _OF_THE_DRIVER and not run.device_id:
            continue
        try:
            _SECTIONS[name](run)
        except Exception as error:  # the other sections are useful without this one
            run.findings.faults.append(f"{name}: {type(error).__name__}: {error}")
        run.save()


def _plot(run: Run, machine: Result, options: argparse.Namespace) -> None:
    if not run.findings.curves:
        return
    device = machine["device"].get("name", "no device")
    subtitle = (
        f"{device}, torch {machine['versions']['torch']}; medians of up to {run.plan.rounds} "
        "rounds, after imports and context creation"
    )
    subtitle = f"TRIAL, no measurement. {subtitle}" if run.plan.is_trial else subtitle
    plot(run.findings.curves, options.output / f"{options.name}.png", subtitle=subtitle)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections; return 1 if a comparison was not valid."""
    options = _arguments(arguments)
    plan = _plan(options)
    # As for Ctrl-C: processes, sockets and checkpoints end with their blocks.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    clock = Clock(options.budget_s - _RESERVE_S)
    machine, device_id, left_out = _describe(plan)
    needed_bytes = (1 << 30) if plan.is_trial else _DISK_BYTES
    run = Run(plan, clock, make_directory(needed_bytes), device_id, left_out=left_out)
    run.save = lambda: _write(run, machine, options)
    try:
        _measure(run, options)
    finally:
        shutil.rmtree(run.directory, ignore_errors=True)
    title = "trims on the device tier" + (" (TRIAL, no measurement)" if plan.is_trial else "")
    show(run.findings, title, options.output / f"{options.name}.json", run.left_out)
    _plot(run, machine, options)
    return 1 if run.findings.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
