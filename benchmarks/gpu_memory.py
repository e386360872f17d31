"""Device memory: the time to map an image, the copies that N processes hold, the upload's rate.

These need no kernel, so they also run where only the driver's calls exist. The files of the first
measurement are holes with a header, because the timed code never reads a tensor's bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.forking import server
from benchmarks.gpu_plan import Run, rounds_within
from benchmarks.gpu_processes import MODULE, Shared, let_settle, shared, stable_free_bytes
from benchmarks.harness import Summary, Worker, WorkerFailed
from benchmarks.plan import SERVED_FRACTION
from benchmarks.report import Curve, Row, Target
from trims_shim.errors import TrimsError

__all__ = ["measure_maps", "measure_processes", "measure_uploads"]

Result = dict[str, Any]
MAP_TARGET_MS = 50.0
COPIES_TARGET = 1.1
ENGINE_TARGET = 0.9
READ_THREADS = 8
_MAP_SAMPLE_S = 1.5
_OTHER_ROUNDS = 2
_REMAPS = 10
_PROCESSES_S = 40.0


def measure_maps(run: Run) -> None:
    """Time connect, open, map and making tensors of a resident file, by size and tensor count."""
    size, tensors = run.plan.map_subject
    cases = [(size, tensors)]
    cases += [(each, tensors) for each in run.plan.map_sizes]
    cases += [(1 << 30, each) for each in run.plan.map_tensors if not run.plan.is_trial]
    with shared(run.device_id, TRIMS_HOST_BYTES="1M") as trims:
        for number, (size_bytes, count) in enumerate(cases):
            rounds = run.plan.rounds if not number else _OTHER_ROUNDS
            if not run.clock.has(_MAP_SAMPLE_S * (rounds + 2) + size_bytes / 2e9):
                run.left_out.append(f"mapping {size_bytes / 1e6:.0f} MB: no time left")
                continue
            try:
                _measure_map(run, trims, size_bytes, count, rounds)
            except (WorkerFailed, TrimsError) as error:  # the other sizes are useful without it
                case = f"{size_bytes / 1e6:.0f} MB, {count} tensors"
                run.findings.faults.append(f"map {case}: {error}")
            run.save()


def _measure_map(run: Run, trims: Shared, size_bytes: int, tensors: int, rounds: int) -> None:
    path = str(run.directory / f"map-{size_bytes}-{tensors}.safetensors")
    made = trims.server.run("outline", path=path, tensors=tensors, size_bytes=size_bytes)
    let_settle(path)
    image: Result = {"path": path, "device_id": run.device_id, "times": 1 + _REMAPS}
    trims.server.learn("open_image", **(image | {"times": 1}))  # uploads it
    findings: Result = {"image": trims.server.run("open_image", **image)}
    what = f"{made['size_bytes'] / 1e6:.0f} MB, {tensors} tensors"
    row = Row("open + map", what, figure=_in_ms(findings["image"]["again_s"]), unit="ms")
    run.findings.rows.append(row)
    if run.plan.device == "cuda":
        loads = _load_tensors(run, trims, path, rounds)
        findings["tensors"] = loads
        _add_load_row(run, what, (size_bytes, tensors), loads)
        if any(each["shared"] < SERVED_FRACTION for each in loads):
            run.findings.faults.append(f"map {what}: the tensors are not in shared memory")
        points = [each["total_s"] for each in loads]
        _add_point(run, "connect, open, map, make tensors", tensors, size_bytes, points)
    _add_point(run, "open and map", tensors, size_bytes, findings["image"]["again_s"])
    run.findings.samples[f"map {what}"] = findings
    trims.forget(path)
    Path(path).unlink()


def _load_tensors(run: Run, trims: Shared, path: str, rounds: int) -> list[Result]:
    """Load in fresh processes whose imports are done."""
    order: Result = {"path": path, "device": run.plan.device}
    trims.server.learn("open_tensors", **order)
    sides = {"tensors": lambda: trims.server.run("open_tensors", **order)}
    return rounds_within(sides, rounds, run.clock)["tensors"]


def _add_load_row(run: Run, what: str, case: tuple[int, int], loads: list[Result]) -> None:
    target = Target(at_most=MAP_TARGET_MS) if case == run.plan.map_subject else None
    first = _in_ms([each["total_s"] for each in loads])
    title = "connect + open + map + tensors"
    run.findings.rows.append(Row(title, what, figure=first, unit="ms", target=target))


def _in_ms(seconds: Sequence[float]) -> Summary:
    return Summary.of([1e3 * each for each in seconds])


def _add_point(
    run: Run, panel: str, tensors: int, size_bytes: int, seconds: Sequence[float]
) -> None:
    """Add a point to the curve of one number of tensors; only the usual one has every size."""
    if tensors != run.plan.map_subject[1]:
        return
    name = f"{tensors} tensors, trims"
    curves = run.findings.curves
    known = next((c for c in curves if (c.panel, c.name) == (panel, name)), None)
    points = [*(known.points if known else ()), (float(size_bytes), Summary.of(seconds))]
    if known:
        curves.remove(known)
    curves.append(Curve(panel, name, tuple(sorted(points, key=lambda point: point[0]))))


# --- copies that several processes hold -----------------------------------------------------------


def measure_processes(run: Run) -> None:
    """Measure the device memory of N processes with one model, in copies of it."""
    from benchmarks.gpu_models import weights_bytes

    name = run.plan.shared_model
    if not run.clock.has(_PROCESSES_S):
        run.left_out.append("memory of several processes: no time left")
        return
    with server(MODULE) as plain:
        made = plain.run(
            "checkpoint",
            name=name,
            file_format="safetensors",
            directory=str(run.directory),
            device=run.plan.device,
        )
    let_settle(made["path"])
    size_bytes = weights_bytes(name)
    how = "torch" if run.plan.device == "cuda" else "image"
    with shared(run.device_id, TRIMS_UPLOADER_IDLE="1") as trims:
        held = {"with": _held_bytes(run, made["path"], how, trims.daemon.environment)}
    if how == "torch" and run.clock.has(_PROCESSES_S):
        held["without"] = _held_bytes(run, made["path"], how, None)
    Path(made["path"]).unlink()
    run.findings.samples["memory of processes"] = {"size_bytes": size_bytes, "held_bytes": held}
    for number in run.plan.processes:
        copies = {side: Summary.of([of[number] / size_bytes]) for side, of in held.items()}
        _add_copies_row(run, number, size_bytes, copies)


def _add_copies_row(run: Run, number: int, size_bytes: int, copies: dict[str, Summary]) -> None:
    run.findings.rows.append(
        Row(
            f"copies in device memory, {number} process{'es' if number > 1 else ''}",
            f"{run.plan.shared_model} ({size_bytes / 1e6:.0f} MB)",
            copies.get("without"),
            copies["with"],
            copies["with"],
            "copies",
            # A trial's model is smaller than the granularity of device memory.
            None if run.plan.is_trial else Target(at_most=COPIES_TARGET),
            "fall of the free memory while ready processes load, one after another",
        )
    )


def _held_bytes(
    run: Run, path: str, how: str, environment: dict[str, str] | None
) -> dict[int, int]:
    """By number of processes with the model: the device memory that is no longer free."""
    order: Result = {"path": path, "how": how, "device": run.plan.device}
    order["device_id"] = run.device_id
    held = {}
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker("hold", module=MODULE, environment=environment, **order))
            for _ in range(max(run.plan.processes))
        ]
        for worker in workers:
            worker.result()
        before = stable_free_bytes(run.device_id)
        for number, worker in enumerate(workers, start=1):
            worker.proceed()
            result = worker.result()
            if environment and result.get("shared", 1.0) < SERVED_FRACTION:
                fault = f"process {number} of {len(workers)}: the weights are not in shared memory"
                run.findings.faults.append(fault)
            if number in run.plan.processes:
                # Longer than the uploader lives: its context must not count as a copy.
                quiet_s = 2.5 if number == 1 else 0.5
                held[number] = before - stable_free_bytes(run.device_id, quiet_s=quiet_s)
    return held


# --- rate of an upload ----------------------------------------------------------------------------


def measure_uploads(run: Run) -> None:
    """Measure the rate of an upload, against the slower of reading and copying."""
    size_bytes = run.plan.copied_bytes
    path = run.directory / "upload.safetensors"
    if not run.clock.has(20 + 4 * size_bytes / 1e9):
        run.left_out.append("rate of uploads: no time left")
        return
    with server(MODULE) as plain, shared(run.device_id, TRIMS_HOST_BYTES="2%") as trims:
        plain.run("outline", path=str(path), tensors=100, size_bytes=size_bytes)
        _fill(path)
        let_settle(str(path))
        limits = plain.run(
            "rates",
            device_id=run.device_id,
            path=str(path),
            size_bytes=size_bytes,
            threads=min(READ_THREADS, os.cpu_count() or 1),
        )
        limits |= plain.run("engine_rates", path=str(path))
        _upload_rate(run, trims, str(path), size_bytes)  # starts the uploader, which stays
        rates = [_upload_rate(run, trims, str(path), size_bytes) for _ in range(run.plan.rounds)]
    path.unlink()
    found = run.findings.samples["uploads"] = limits | {"upload_bytes_per_s": rates}
    slower = min(_median(limits["read_bytes_per_s"]), _median(limits["pinned_bytes_per_s"]))
    what = f"{size_bytes / 1e6:.0f} MB in the page cache"
    fed = f"reads {_in_giga(limits, 'read')}, pinned copies {_in_giga(limits, 'pinned')}"
    promised = None if run.plan.is_trial else Target(at_least=ENGINE_TARGET)
    for name, title, target in (
        ("engine", "copy engine, share of the slower limit", promised),
        ("hashed", "the same, hashed on the way", None),
        ("upload", "the same, request to mapping", None),
    ):
        run.findings.rows.append(
            Row(
                title,
                what,
                figure=Summary.of([rate / slower for rate in found[f"{name}_bytes_per_s"]]),
                unit="",
                target=target,
                note=f"{_in_giga(found, name)}; {fed}",
            )
        )


def _median(samples: Sequence[float]) -> float:
    return Summary.of(samples).median


def _in_giga(limits: Result, name: str) -> str:
    return f"{_median(limits[f'{name}_bytes_per_s']) / 1e9:.1f} GB/s"


def _fill(path: Path) -> None:
    """Fill the hole with bytes, because reading a hole does not read the page cache."""
    block = os.urandom(1 << 20) * 16
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        end = file.seek(0, os.SEEK_END)
        file.seek(start)
        for position in range(start, end, len(block)):
            file.write(block[: end - position])


def _upload_rate(run: Run, trims: Shared, path: str, size_bytes: int) -> float:
    """The rate that a client sees, with the request and the final mapping."""
    found = trims.server.learn("open_image", path=path, device_id=run.device_id, times=1)
    trims.forget(path)
    return size_bytes / float(found["total_s"])
