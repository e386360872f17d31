"""The memory of several processes with a session on one model."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from benchmarks.harness import Worker
from benchmarks.ort_plan import (
    MODULE,
    Model,
    Prepared,
    Run,
    check_equal,
    check_served,
    find_model,
    prepared_models,
)
from benchmarks.process_memory import pss_bytes
from benchmarks.report import Target, compared

__all__ = ["measure_processes"]

Result = dict[str, Any]
_LESS_EACH = {"bert-base": 15.0}


def measure_processes(run: Run) -> None:
    """Measure the memory of 1, 2, 4... processes after one inference each, and of each further one.

    Memory is the sum of their proportional set sizes, interpreters and libraries included. The
    daemon maps nothing of a prepared model.
    """
    plan = run.plan
    if not run.has_time(f"memory of {plan.shared_model}", plan.memory_rounds * 20.0):
        return
    with run.part(f"memory of {plan.shared_model}"):
        _measure_processes(run, find_model(plan.shared_model))


def _measure_processes(run: Run, model: Model) -> None:
    plan = run.plan
    totals: dict[str, list[dict[int, int]]] = {"onnxruntime": [], "trims": []}
    with prepared_models() as prepared:
        prepared.prepare(model)
        for _ in range(plan.memory_rounds):
            totals["onnxruntime"].append(_measure(run, model, None))
            totals["trims"].append(_measure(run, model, prepared))
    run.findings.samples[f"memory of {model.name}"] = totals
    for processes in plan.processes:
        plain, shim = ([float(each[processes]) for each in side] for side in totals.values())
        name = f"memory of {processes} process{'es' if processes > 1 else ''}"
        row = compared(name, model.title, plain, shim)
        run.findings.rows.append(dataclasses.replace(row, measured="bytes"))
    fewest, most = plan.processes[0], plan.processes[-1]
    plain, shim = (
        [(each[most] - each[fewest]) / (most - fewest) for each in side] for side in totals.values()
    )
    least = _LESS_EACH.get(model.name)
    row = compared(
        "memory of each further process",
        model.title,
        plain,
        shim,
        target=None if least is None else Target(at_least=least),
    )
    run.findings.rows.append(dataclasses.replace(row, measured="bytes"))


def _measure(run: Run, model: Model, prepared: Prepared | None) -> dict[int, int]:
    """The sum of the processes' PSS, by their number."""
    environment = None if prepared is None else prepared.daemon.environment
    directory = "" if prepared is None else str(prepared.directory)
    totals = {}
    holders: list[Result] = []
    with contextlib.ExitStack() as stack:
        for count in range(1, run.plan.processes[-1] + 1):
            worker = Worker(
                "hold",
                module=MODULE,
                environment=environment,
                model=model.path,
                prepared=directory,
            )
            stack.enter_context(worker)
            holders.append(worker.result())
            if count in run.plan.processes:
                totals[count] = sum(pss_bytes(holder["pid"]) for holder in holders)
    what = f"memory of {model.name}"
    check_equal(what, holders, run.findings)
    if prepared is not None:
        check_served(what, holders, run.findings)
    return totals
