"""This package's batcher against other in-process batchers, by the wall clock.

``benchmarks/peers/setup.sh`` makes the environment; from the root of the repository then
``.venv-peers/bin/python -m benchmarks.batching_peers``. Each cell is a fresh process: one batcher,
one device (it sleeps 20 + 2 b ms, or is a torch model on one thread), open-loop arrivals. Batchers
take turns within a cell, with the same arrivals. Writes ``docs/results/batching_peers.json`` after
every round, then ``.md`` and ``.png``. An interrupted run goes on where it stopped, except with
``--fresh``.

``--choose`` measures the settings that peers have to choose from; run it first. ``--jobs N``
measures N batchers at the same moment. They start together, once all have imported and warmed up.
That needs the sleeping device, which leaves the processors idle; for the model N is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.batching_peers_report import plot, tables, write_markdown
from benchmarks.batching_plan import (
    CHOOSE,
    COMPARE,
    DEFAULT_POLICIES,
    Calibration,
    Cell,
    Job,
    compared_jobs,
    tried_jobs,
)
from benchmarks.harness import (
    Worker,
    WorkerFailed,
    argument_parser,
    describe_machine,
    rounded,
    write_json,
)
from benchmarks.peers import CATALOGUE, check_installed

__all__ = ["main"]

_MODULE = "benchmarks.batching_cell"
_SLEEP_SLO_MS = 100.0
_CALIBRATION_REPEATS = 15
_STAGGER_S = 0.0037
"""Between starts in a round, so that equal arrivals of several processes do not coincide."""
_READY_DEADLINE_S = 90.0
_DIGITS = 5


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    # What is not measured anew is kept.
    measured = ("policies", "devices", "cvs", "rates", "shares", "seconds", "repeats")
    harmless = (*measured, "choose", "minutes", "fresh", "report")
    parser = argument_parser("batching_peers", __doc__, harmless=harmless)
    parser.add_argument("--choose", action="store_true", help="only try the peers' settings")
    parser.add_argument("--policies", nargs="+", choices=CATALOGUE, default=DEFAULT_POLICIES)
    parser.add_argument("--devices", nargs="+", default=("sleep", "torch"))
    parser.add_argument("--cvs", nargs="+", type=float, default=(1.0, 3.0))
    parser.add_argument("--rates", nargs="+", type=float, default=(200.0, 260.0, 120.0, 40.0))
    parser.add_argument("--shares", nargs="+", type=float, default=(0.8, 0.6, 1.0, 0.4))
    parser.add_argument("--seconds", type=float, default=10.0, help="of one cell")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="at once, on the sleeping device")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--fresh", action="store_true", help="compare anew; settings are kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    return parser.parse_args(arguments)


def _calibrate(device: str, known: dict[str, Any]) -> Calibration:
    """Calibrate each device once and keep it: loads and objectives of all jobs depend on it."""
    if device not in known:
        with Worker(
            "calibrate", module=_MODULE, device=device, repeats=_CALIBRATION_REPEATS
        ) as worker:
            known[device] = worker.result()["durations_ms"]
    return Calibration({int(size): taken for size, taken in known[device].items()})


def _cells(options: argparse.Namespace, calibrations: dict[str, Any]) -> list[Cell]:
    cells = []
    for device in options.devices:
        calibration = _calibrate(device, calibrations)
        is_sleep = device == "sleep"
        for load in options.rates if is_sleep else options.shares:
            rate = load if is_sleep else round(load * calibration.capacity, 1)
            slo_ms = _SLEEP_SLO_MS if is_sleep else calibration.slo_ms
            share = rate / calibration.capacity
            cells += [Cell(device, cv, load, rate, slo_ms, share) for cv in options.cvs]
    return cells


def _jobs(
    options: argparse.Namespace, cells: Sequence[Cell], records: Sequence[dict[str, Any]]
) -> Iterator[list[Job]]:
    times = {"seconds": options.seconds, "repeats": options.repeats}
    if options.choose:
        return tried_jobs(cells, options.policies, **times)
    return compared_jobs(cells, options.policies, records, **times)


def _rounds(jobs: Iterable[Job], at_once: int) -> Iterator[list[Job]]:
    waiting = list(jobs)
    size = at_once if waiting and waiting[0].cell.device == "sleep" else 1
    for begin in range(0, len(waiting), size):
        yield waiting[begin : begin + size]


def _run(jobs: Sequence[Job], records: list[dict[str, Any]], faults: list[str]) -> None:
    """Measure jobs at the same moment, each in its own process."""
    with contextlib.ExitStack() as stack:
        started = []
        for job in jobs:
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="trims-bench-"))
            parameters = asdict(job.cell) | {"seconds": job.seconds, "seed": job.seed}
            del parameters["load"], parameters["share"]
            worker = Worker(
                "measure",
                module=_MODULE,
                environment={"TRIMS_ENABLED": "0", "XDG_CACHE_HOME": cache},
                policy=job.policy,
                settings=dict(job.settings),
                **parameters,
            )
            started.append((job, stack.enter_context(worker)))
        ready = [each for each in started if _is_ready(*each, faults)]
        load_average = os.getloadavg()[0]
        for _, worker in ready:
            worker.proceed()
            time.sleep(_STAGGER_S)
        for job, worker in ready:
            try:
                result = worker.result(job.seconds + _READY_DEADLINE_S)
            except WorkerFailed as error:
                faults.append(f"{job.policy} on {job.cell.title}: {error}")
                continue
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            conditions = {"at": now, "load_average": load_average, "at_once": len(ready)}
            if job.purpose == CHOOSE:
                del result["facts"]
            records.append({"job": job.key(), "cell": asdict(job.cell), **conditions})
            records[-1]["result"] = rounded(result, _DIGITS)


def _is_ready(job: Job, worker: Worker, faults: list[str]) -> bool:
    try:
        worker.result(_READY_DEADLINE_S)
    except WorkerFailed as error:
        faults.append(f"{job.policy} on {job.cell.title}: {error}")
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"calibrations": {}, "records": []}
    return content


def _report(content: dict[str, Any], options: argparse.Namespace) -> None:
    compared = [each for each in content["records"] if each["job"]["purpose"] == COMPARE]
    if compared:
        write_markdown(compared, content, options.output / "batching_peers.md")
        plot(compared, options.output / "batching_peers.png", content["machine"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the missing cells; return 1 if one failed."""
    from rich.console import Console

    options = _arguments(arguments)
    path = options.output / "batching_peers.json"
    content, faults = _read(path), list[str]()
    records: list[dict[str, Any]] = content["records"]
    console = Console(width=None if sys.stdout.isatty() else 200)
    if options.fresh:
        records[:] = [each for each in records if each["job"]["purpose"] != COMPARE]
        content["calibrations"].clear()
    end = time.monotonic() + options.minutes * 60
    if not options.report:
        check_installed(options.policies)
        content["machine"] = describe_machine()
        cells = _cells(options, content["calibrations"])
        for group in _jobs(options, cells, records):
            done = [each["job"] for each in records]
            for jobs in _rounds((job for job in group if job.key() not in done), options.jobs):
                if time.monotonic() > end:
                    faults.append("the time was up: what follows was not measured")
                    break
                _run(jobs, records, faults)
                content["faults"] = faults
                write_json(path, content)
                names = ", ".join(f"{job.policy} {dict(job.settings)}" for job in jobs)
                console.print(f"[dim]{jobs[0].cell.title}, repeat {jobs[0].repeat}: {names}[/]")
            if time.monotonic() > end:
                break
    _report(content, options)
    for table in tables(records):
        console.print(table)
    for fault in dict.fromkeys(faults):
        console.print(f"[red]not valid:[/] {fault}")
    console.print(f"written: {path}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
