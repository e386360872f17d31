"""Staged batching against batching of whole models, by the wall clock.

    python -m benchmarks.staged_serving                  # 20 minutes, on a quiet machine
    python -m benchmarks.staged_serving --quick          # a minute: a trial, without usable figures
    python -m benchmarks.staged_serving --device cuda    # larger models, on a GPU
    python -m benchmarks.staged_serving --report         # tables and plot of what was measured

One process, one model, open-loop Poisson arrivals. Each repeat of a load is a fresh process, in
which the sides take turns with equal arrivals. So the machine affects all of them alike; processes
differ more from each other than sides do.

The sides are this package's batcher with four policies. ``immediate`` and ``window`` are the
paper's ZeroBatch and DelayBatch, both with all lengths in one batch; the window is the best of four
for each cell, chosen on other arrivals. With ``auto``, lengths share a batch where that pays. With
``dvabatch``, requests also join and leave between stages. All pad to the longest item of a batch.
No side knows an objective, so nothing is dropped and all latencies count. Only for peak throughput
do all know the objective.

Writes ``docs/results/staged_serving.json``, ``.md`` and ``.png``. Cells that do not fit into
``--minutes`` are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.forking import Server, server
from benchmarks.harness import (
    WorkerFailed,
    argument_parser,
    describe_machine,
    rounded,
    write_json,
)
from benchmarks.staged_serving_report import markdown, plot

__all__ = ["FULL", "LOADS", "LONE", "QUICK", "SIDES", "Plan", "main", "phases_of"]

_MODULE = "benchmarks.staged_cell"
QOS_MS = 200.0
"""The paper's."""
LOADS = {"low": 0.3, "medium": 0.6, "high": 0.9, "step": 1.1}
"""Shares of the throughput of full batches of the whole model; for the step, its upper part."""
_STEP_FOOT = 0.3
SIDES: dict[str, dict[str, Any]] = {
    "immediate": {"policy": "immediate", "stages": 0},
    "window": {"policy": "window", "stages": 0},
    "auto": {"policy": "auto", "stages": 0},
    "dvabatch": {"policy": "dvabatch", "stages": None},
    "stages alone": {"policy": "immediate", "stages": None},
    "stretch only": {"policy": "load", "stages": None},
    "split only": {"policy": "operators", "stages": None},
}
"""The last three are ablations, measured only where ``--sides`` names them."""
LONE: dict[str, dict[str, Any]] = {
    "function": {"policy": "immediate", "stages": 0},
    "one stage": {"policy": "immediate", "stages": 1},
    "all stages": {"policy": "immediate", "stages": None},
}
_CHOOSING_SEED = 99
_DIGITS = 4
_CLIENTS = {"cpu": (4, 8, 16, 32), "cuda": (16, 32, 64, 128, 256)}
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells to measure, and their durations."""

    models: tuple[str, ...] = ("bert", "u-net", "vgg")
    loads: tuple[str, ...] = tuple(LOADS)
    sides: tuple[str, ...] = ("immediate", "window", "auto", "dvabatch")
    windows_ms: tuple[float, ...] = (2, 5, 10, 20)
    repeats: int = 5
    turns: int = 3
    """Turns of each side in a repeat."""
    seconds: float = 1.2
    """Length of a turn; half as long again at low load, where few requests come."""
    choosing_s: float = 0.7
    clients: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict(_CLIENTS))
    saturated_s: float = 0.5
    lone_turns: int = 5
    lone_calls: int = 20
    """Calls of a turn."""
    learning_s: float = 0.5
    """Seconds for each class of lengths."""
    calibrations: int = 4
    """Full batches of each model."""


FULL = Plan()
QUICK = Plan(
    loads=("low", "high"),
    windows_ms=(5,),
    repeats=1,
    turns=1,
    seconds=0.4,
    choosing_s=0.2,
    clients={"cpu": (8,), "cuda": (8,)},
    saturated_s=0.3,
    lone_turns=1,
    lone_calls=10,
    learning_s=0.1,
    calibrations=1,
)


def phases_of(load: str, capacity: float, seconds: float) -> list[tuple[float, float]]:
    """(requests a second, seconds) of each part of a load."""
    if load == "step":
        foot, third = _STEP_FOOT * capacity, seconds / 3
        return [(foot, third), (LOADS[load] * capacity, third), (foot, third)]
    longer = 1.5 if load == "low" else 1.0
    return [(LOADS[load] * capacity, longer * seconds)]


class _Run:
    """The measured cells, and the time that is left."""

    def __init__(self, running: Server, plan: Plan, device: str, minutes: float) -> None:
        self.plan = plan
        self.device = device
        self.cells: list[Result] = []
        self.left_out: list[str] = []
        self.faults: list[str] = []
        self._server = running
        self._end_s = time.monotonic() + 60 * minutes
        self._longest_s: dict[str, float] = {}
        self.calibrations: Result = {}
        self.windows_ms: dict[str, dict[str, float]] = {}
        self.save: Callable[[], None] = lambda: None
        """Writes what there is so far."""

    def ask(self, task: str, **arguments: Any) -> Result:
        """Raises WorkerFailed."""
        return self._server.run(task, device=self.device, **arguments)

    def round(self, kind: str, repeat: int, arguments: Result, **where: str) -> None:
        """Measure every side by turns in one process; nothing if the time is up."""
        began_s = time.monotonic()
        if began_s + self._longest_s.get(kind, 0.0) > self._end_s:
            self.left_out.append(f"{kind} {' '.join(where.values())}, repeat {repeat}")
            return
        try:
            by_side = self.ask(kind, model=where["model"], **arguments)
        except WorkerFailed as error:
            self.faults.append(f"{kind} {where}, repeat {repeat}: {error}")
            self.save()
            return
        for side, result in by_side.items():
            cell = {"kind": kind, **where, "side": side, "repeat": repeat}
            if errors := result.get("errors"):
                self.faults.append(f"{cell}: {errors}")
            self.cells.append(cell | {"result": rounded(result, _DIGITS)})
        self.save()
        taken_s = time.monotonic() - began_s
        self._longest_s[kind] = max(taken_s, self._longest_s.get(kind, 0.0))


# --- what is measured -----------------------------------------------------------------------------


def _calibrate(run: _Run, model: str) -> Result:
    """Measure the whole model, padded as the baselines pad, and the profiles of our policies."""
    durations_ms = run.ask("calibrate", model=model, batches=run.plan.calibrations)["durations_ms"]
    full = max(durations_ms, key=int)
    capacity = 1e3 * int(full) / durations_ms[full]
    for side in run.plan.sides:
        if side not in ("immediate", "window", "stages alone"):
            run.ask("learn", model=model, side=SIDES[side], limit_s=run.plan.learning_s)
    return rounded({"durations_ms": durations_ms, "capacity": capacity}, _DIGITS)


def _load(
    sides: Result, load: str, capacity: float, seconds: float, seeds: Sequence[int]
) -> Result:
    """Arguments of the task ``load``."""
    phases = phases_of(load, capacity, seconds)
    return {"sides": sides, "phases": phases, "seeds": seeds, "qos_ms": QOS_MS}


def _best_windows_ms(run: _Run, model: str, capacity: float) -> dict[str, float]:
    """By load, the tried window with the lowest mean latency."""
    plan = run.plan
    if "window" not in plan.sides:
        return dict.fromkeys(plan.loads, 0.0)
    sides = {str(wait_ms): SIDES["window"] | {"wait_ms": wait_ms} for wait_ms in plan.windows_ms}
    found = {}
    for load in plan.loads:
        arguments = _load(sides, load, capacity, plan.choosing_s, [_CHOOSING_SEED])
        by_side = run.ask("load", model=model, **arguments)
        best = min(by_side, key=lambda side: float(by_side[side]["mean_ms"]))
        found[load] = float(best)
    return found


def _sides(run: _Run, wait_ms: float) -> dict[str, Result]:
    known = SIDES | {"window": SIDES["window"] | {"wait_ms": wait_ms}}
    return {side: known[side] for side in run.plan.sides}


def _overheads(run: _Run, capacities: Mapping[str, float], repeat: int) -> None:
    """Measure a lone client: the cost of stages where they cannot help."""
    plan = run.plan
    arguments = {"sides": LONE, "turns": plan.lone_turns, "calls": plan.lone_calls}
    for model in capacities:
        run.round("lone", repeat, arguments, model=model)


def _peaks(run: _Run, windows_ms: Any, repeat: int) -> None:
    """Measure clients in closed loops; all sides know the objective."""
    plan = run.plan
    for model in windows_ms:
        arguments = {
            "sides": _sides(run, windows_ms[model][plan.loads[-1]]),
            "clients": plan.clients[run.device.partition(":")[0]],
            "seconds": plan.saturated_s,
            "qos_ms": QOS_MS,
        }
        run.round("saturated", repeat, arguments, model=model)


def _loads(run: _Run, capacities: Mapping[str, float], windows_ms: Any, repeat: int) -> None:
    plan = run.plan
    seeds = list(range(repeat * plan.turns, (repeat + 1) * plan.turns))
    for model, capacity in capacities.items():
        for load in plan.loads:
            sides = _sides(run, windows_ms[model][load])
            arguments = _load(sides, load, capacity, plan.seconds, seeds)
            run.round("load", repeat, arguments, model=model, load=load)


def _prepare(run: _Run) -> None:
    """Calibrate each model and choose its windows; one that fails is measured no further."""
    for model in run.plan.models:
        try:
            calibration = _calibrate(run, model)
            run.windows_ms[model] = _best_windows_ms(run, model, calibration["capacity"])
        except WorkerFailed as error:
            run.faults.append(f"{model}: {error}")
        else:
            run.calibrations[model] = calibration
            print(f"{model}: {calibration}", flush=True)
        run.save()


def _measure(run: _Run) -> None:
    """Measure; repeats are the outermost loop, so that a run that is cut off has every cell."""
    _prepare(run)
    capacities = {model: each["capacity"] for model, each in run.calibrations.items()}
    for repeat in range(run.plan.repeats):
        _overheads(run, capacities, repeat)
        _peaks(run, run.windows_ms, repeat)
        _loads(run, capacities, run.windows_ms, repeat)
        print(f"{len(run.cells)} cells", flush=True)
    run.save()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, print; return 1 if a cell failed."""
    options = _arguments(arguments)
    path = options.output / f"{options.name}.json"
    if options.report:
        content: Result = json.loads(path.read_text())
    else:
        content = _measured(options, path)
    text = markdown(content)
    path.with_suffix(".md").write_text(text)
    plot(content, path.with_suffix(".png"))
    print(text)
    for fault in dict.fromkeys(content["faults"]):
        print(f"not valid: {fault}")
    print(f"written: {path}")
    return 1 if content["faults"] else 0


def _measured(options: argparse.Namespace, path: Path) -> Result:
    plan = QUICK if options.quick else FULL
    chosen = {"models": options.models, "loads": options.loads, "sides": options.sides}
    plan = replace(plan, **{name: tuple(each) for name, each in chosen.items() if each})
    content: Result = {
        "machine": describe_machine(),
        "device": options.device,
        "is_quick": options.quick,
        "plan": plan,
        "qos_ms": QOS_MS,
    }
    with tempfile.TemporaryDirectory(prefix="trims-bench-") as cache:
        environment = {"TRIMS_ENABLED": "0", "XDG_CACHE_HOME": cache}
        with server(_MODULE, environment) as running:
            run = _Run(running, plan, options.device, options.minutes)

            def save() -> None:
                facts = {"calibrations": run.calibrations, "windows_ms": run.windows_ms}
                found = {"cells": run.cells, "left_out": run.left_out, "faults": run.faults}
                write_json(path, content | facts | found)

            run.save = save
            _measure(run)
    return dict(json.loads(path.read_text()))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser("staged_serving", __doc__, harmless=("minutes", "name", "report"))
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--models", nargs="+", choices=FULL.models)
    parser.add_argument("--loads", nargs="+", choices=LOADS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="also of ablations")
    parser.add_argument("--quick", action="store_true", help="tries it out, proves nothing")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--minutes", type=float, default=25, help="begin nothing after")
    parser.add_argument("--name", default="staged_serving", help="name of the result files")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
