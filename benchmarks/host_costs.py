"""Other costs and gains: memory of several processes, the import, the rate of opens."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import (
    ROOT,
    Daemon,
    Summary,
    Worker,
    alternate,
    daemon,
    describe_machine,
)
from benchmarks.plan import Findings, Model, Plan, check_equal, prepare, served_note, warm_daemon
from benchmarks.process_memory import (
    Area,
    areas,
    areas_holding,
    cpu_time,
    is_segment,
    machine_cpu_time,
)
from benchmarks.report import Row, Target

__all__ = ["measure_import", "measure_opens", "measure_sharing"]

IMPORT_LIMIT_S = 0.020
FORBIDDEN_IMPORTS = ("torch", "zmq", "numpy")
SATURATED = 0.85
"""Share of a processor from which a process or the machine counts as the bottleneck."""


def measure_sharing(plan: Plan, findings: Findings) -> None:
    """Measure the copies of a model in memory while several processes hold it, from their PSS."""
    model = prepare(plan.shared_model)
    processes = _affordable(plan.processes, model.size_bytes)
    copies: dict[str, float] = {}
    with warm_daemon(plan, model.pt) as own:
        copies["without"] = _copies(model, processes, None, findings)
        if own is not None:
            copies["shim"] = _copies(model, processes, own, findings)
    findings.samples["copies"] = {"processes": processes, "model": model.name, **copies}
    shim = Summary.of([copies["shim"]]) if "shim" in copies else None
    findings.rows.append(
        Row(
            f"copies in memory, {processes} processes",
            model.title,
            Summary.of([copies["without"]]),
            shim,
            shim,
            "copies",
            Target(at_most=1.1),
            "sum of PSS of the weights' memory / size",
        )
    )


def _affordable(processes: int, size_bytes: int) -> int:
    interpreter_bytes = 400e6
    available = describe_machine()["available_bytes"] * 0.7
    return max(2, min(processes, int(available / (size_bytes + interpreter_bytes))))


def _copies(model: Model, processes: int, own: Daemon | None, findings: Findings) -> float:
    environment = None if own is None else own.environment
    with contextlib.ExitStack() as stack:
        holders = []
        for _ in range(processes):  # one after another: all at once would need twice the memory
            worker = Worker("hold", environment=environment, path=model.pt, how="torch")
            stack.enter_context(worker)
            holders.append(worker.result())
        check_equal(f"copies of {model.name}", holders, findings)
        if own is not None:
            served_note(f"copies of {model.name}", holders, findings)
        total: int = sum(_weights_pss(h["pid"], h["ranges"], model.pt) for h in holders)
        if own is not None:
            total += _same_files_pss(own.pid(), holders[0], model.pt)
        weights_bytes: int = sum(end - start for start, end in holders[0]["ranges"])
        return total / weights_bytes


def _weights_pss(pid: int, ranges: list[tuple[int, int]], path: str) -> int:
    """PSS of the areas with weights; of the heap, which has other data too, only their share."""
    total = 0
    for area, size_bytes in areas_holding(areas(pid, with_pss=True), ranges):
        is_exact = is_segment(area, path)
        total += area.pss_bytes if is_exact else min(area.pss_bytes, size_bytes)
    return total


def _same_files_pss(daemon_pid: int, holder: dict[str, Any], path: str) -> int:
    """PSS of what the daemon has mapped of the segments with a client's weights."""

    def identity(area: Area) -> tuple[str, int]:
        return area.device, area.inode

    held = areas_holding(areas(holder["pid"]), holder["ranges"])
    segments = {identity(area) for area, _ in held if is_segment(area, path)}
    return sum(
        area.pss_bytes for area in areas(daemon_pid, with_pss=True) if identity(area) in segments
    )


_IMPORT = """
import sys, time
{before}
start = time.perf_counter()
import trims_shim
elapsed = time.perf_counter() - start
print(elapsed, *(name for name in {forbidden!r} if name in sys.modules))
"""


def measure_import(plan: Plan, findings: Findings) -> None:
    """Measure the time of ``import trims_shim``, and of patching torch when torch is there.

    The sum is the same whichever of the two is imported first.
    """
    if plan.with_shim:
        limit = Target(at_most=IMPORT_LIMIT_S * 1e3)
        _measure_import("fresh interpreter", "pass", findings, plan, FORBIDDEN_IMPORTS, limit)
        _measure_import("after import torch", "import torch", findings, plan)


def _measure_import(
    subject: str,
    before: str,
    findings: Findings,
    plan: Plan,
    forbidden: Sequence[str] = (),
    target: Target | None = None,
) -> None:
    code = _IMPORT.format(before=before, forbidden=forbidden)
    _interpreter(code)  # writes the byte code once
    sides = {"before": lambda: _interpreter(before), "import": lambda: _interpreter(code)}
    results = alternate(sides, max(plan.rounds, 5) * 2)
    findings.samples[f"import, {subject}"] = results
    dragged = {name for run in results["import"] for name in run["output"].split()[1:]}
    note = "figure: inside the process"
    if dragged:
        findings.faults.append(f"import trims_shim imports {', '.join(sorted(dragged))}")
        note = f"[red]imports {', '.join(sorted(dragged))}[/]"
    elif forbidden:
        note += "; imports neither " + ", ".join(forbidden)
    findings.rows.append(
        Row(
            "import trims_shim",
            subject,
            Summary.of([run["wall_s"] for run in results["before"]]),
            Summary.of([run["wall_s"] for run in results["import"]]),
            Summary.of([float(run["output"].split()[0]) * 1e3 for run in results["import"]]),
            "ms",
            target,
            note,
        )
    )


def _interpreter(code: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRIMS_ENABLED": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {"wall_s": time.perf_counter() - start, "output": done.stdout.strip()}


def measure_opens(plan: Plan, findings: Findings) -> None:
    """Measure how fast a resident model can be opened, and what limits the rate."""
    if not plan.with_shim:
        return
    model = prepare(plan.models[0])
    with daemon() as own:
        own.warm(model.pt)
        for clients in (1, plan.open_clients):
            measured = _open_storm(own, model, clients, plan.open_duration_s)
            findings.samples[f"opens by {clients}"] = measured
            latency = Summary.of([measured["p50_ms"]])
            findings.rows.append(
                Row(
                    f"open and close, {clients} client{'s' if clients > 1 else ''}",
                    model.title,
                    figure=latency,
                    unit="ms p50",
                    note=f"p99 {measured['p99_ms']:.2f} ms, {measured['per_s']:.0f} opens/s; "
                    + measured["bound_by"],
                )
            )


def _open_storm(own: Daemon, model: Model, clients: int, duration_s: float) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                Worker("opens", environment=own.environment, path=model.pt, duration_s=duration_s)
            )
            for _ in range(clients)
        ]
        for worker in workers:
            worker.result()
        pid = own.pid()
        served, machine = cpu_time(pid), machine_cpu_time()
        for worker in workers:
            worker.proceed()
        results = [worker.result() for worker in workers]
        served_end, machine_end = cpu_time(pid), machine_cpu_time()
    elapsed = max(result["elapsed_s"] for result in results)
    latencies = sorted(ns for result in results for ns in result["latencies_ns"])
    use = {
        "daemon_cores": (served_end.busy_s - served.busy_s) / elapsed,
        "client_cores": sum(result["cpu_s"] for result in results) / elapsed,
        "machine_busy": (machine_end.busy_s - machine.busy_s)
        / max(machine_end.total_s - machine.total_s, 1e-9),
    }
    return {
        "clients": clients,
        "opens": len(latencies),
        "per_s": len(latencies) / elapsed,
        "p50_ms": statistics.median(latencies) / 1e6,
        "p99_ms": latencies[int(len(latencies) * 0.99)] / 1e6,
        "max_ms": latencies[-1] / 1e6,
        **use,
        "bound_by": _bound(**use),
    }


def _bound(daemon_cores: float, client_cores: float, machine_busy: float) -> str:
    """Name the bottleneck, from the use of the processors' time."""
    shares = f"daemon {daemon_cores:.2f}, clients {client_cores:.2f} processors"
    if daemon_cores >= SATURATED:
        return f"bound by the daemon's processor time ({shares})"
    if machine_busy >= SATURATED:
        larger = "clients" if client_cores > daemon_cores else "daemon"
        return f"bound by the machine's processors, most of it the {larger} ({shares})"
    return f"bound by the round trip: wake-ups, not processor time ({shares})"
