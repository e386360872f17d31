"""Cold start to first inference: every way to get a model onto the device, and the ideal.

Owns the sides of the comparison, the state of the cache before each, and the targets. The ideal is
a process that has the weights already. It still makes the first inference, with everything that
libraries prepare on their first use; that part is the same on all sides.

A sample counts only if its weights have the same bytes and its output the same values as on every
other side, and with trims only if torch's own allocator does not hold the weights.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.forking import Server, server
from benchmarks.gpu_plan import EVERY_WAY, Clock, Run, estimate_s, rounds_within, share_s
from benchmarks.gpu_processes import MODULE, Shared, let_settle, shared
from benchmarks.harness import Summary, WorkerFailed
from benchmarks.plan import SERVED_FRACTION
from benchmarks.process_memory import drop_cached
from benchmarks.report import Curve, Row, Target, compared
from trims_shim.errors import TrimsError

__all__ = ["judge", "measure_cold_starts"]

Result = dict[str, Any]
_UPLOADER_ENDS_S = 2.0
LARGE_BYTES = 100e6
"""From this size on the target is that a device hit is near the ideal."""
NEAR_IDEAL = 1.05
FIRST_LOAD = 1.1
HEADLINES = ((600e6, 24.0), (math.inf, 210.0))
"""The paper's best speed-ups (Dakkak et al. 2018, abstract), for models up to a size in bytes."""
OUTPUT_TOLERANCE = 1e-2
"""Relative: libraries choose kernels by free memory, and bfloat16 has 8 bits."""
BASELINE, IDEAL, HIT = "torch.load", "ideal", "trims, device hit"
FIRST, HOST_HIT = "trims, first load", "trims, host hit"
AFTER_PAUSE = "trims, first load after a pause"
PLOTTED = (BASELINE, "safetensors", IDEAL, HIT, FIRST)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to load. ``resident``: where the image is before the load, with trims.

    ``is_after_pause``: the uploader has been idle for longer than it keeps its context.
    """

    how: str
    file_format: str = "pt"
    resident: str = ""
    is_essential: bool = False
    is_after_pause: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether trims is on."""
        return bool(self.resident)


SIDES = {
    BASELINE: Side("torch", is_essential=True),
    IDEAL: Side("resident", "safetensors", is_essential=True),
    HIT: Side("torch", resident="device", is_essential=True),
    "safetensors": Side("safetensors", "safetensors", is_essential=True),
    "mmap + .to": Side("torch-mmap-to"),
    "fastsafetensors": Side("fastsafetensors", "safetensors"),
    "trims safetensors, device hit": Side("safetensors", "safetensors", "device"),
    "trims mmap + .to, device hit": Side("torch-mmap-to", resident="device"),
    HOST_HIT: Side("torch", resident="host"),
    FIRST: Side("torch", resident="nowhere", is_essential=True),
    AFTER_PAUSE: Side("torch", resident="nowhere", is_after_pause=True),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """The daemons, servers and settings that the samples of one run share."""

    run: Run
    plain: Server
    trims: Shared
    bare: Shared
    """A daemon without room on the host, which therefore keeps no evicted image there."""
    idle: Shared
    """The same, with an uploader that gives its context up as soon as it is idle."""
    files: dict[tuple[str, str], str]

    def server(self, side: Side) -> Server:
        """The server that takes samples of a side."""
        return self.cache(side).server if side.is_shared else self.plain

    def cache(self, side: Side) -> Shared:
        """The daemon of a side with trims."""
        if not self.bare.device_id or side.resident != "nowhere":
            return self.trims
        return self.idle if side.is_after_pause else self.bare

    def sampler(self, name: str, side: Side) -> Callable[[], Result]:
        """Return a function that brings the cache into the side's state and takes one sample."""
        path = self.files[name, side.file_format]
        where = self.server(side)
        device = self.run.plan.device
        arguments: Result = {"name": name, "path": path, "how": side.how, "device": device}

        def sample() -> Result:
            if side.is_shared:
                self._prepare(side, path, arguments)
            return where.run("cold_start", **arguments)

        return sample

    def _prepare(self, side: Side, path: str, arguments: Result) -> None:
        if side.resident == "nowhere":
            self.cache(side).forget(path)
            if side.is_after_pause:
                time.sleep(_UPLOADER_ENDS_S)
        elif side.resident == "host":
            self.trims.keep_on_host(path)
        elif (self.trims.device_id or "host") not in self.trims.tiers(path):
            self.trims.server.run("cold_start", **arguments)


def measure_cold_starts(run: Run) -> None:
    """Measure every model that fits in the time left, the most informative first."""
    host_bytes = "50%" if not run.plan.is_trial else "1G"
    device_id = run.device_id if run.plan.device == "cuda" else ""
    with (
        server(MODULE) as plain,
        shared(device_id, TRIMS_HOST_BYTES=host_bytes) as trims,
        shared(device_id, TRIMS_HOST_BYTES="1M") as bare,
        shared(device_id, TRIMS_HOST_BYTES="1M", TRIMS_UPLOADER_IDLE="0.2") as idle,
    ):
        bench = Bench(run, plain, trims, bare, idle, {})
        sides = _learn_imports(bench, _available(run))
        for number, name in enumerate(run.plan.models):
            size = _size(name)
            chosen = sides if _has_every_way(run, name) else _essential(sides)
            if not run.clock.has(_least_s(name, chosen)):
                chosen = _essential(chosen)
            least_s = _least_s(name, chosen)
            if not run.clock.has(least_s):
                run.left_out.append(f"cold start of {name}: no time left")
                continue
            later = run.plan.models[number + 1 :]
            of_later_s = sum(_least_s(each, _essential(sides)) for each in later)
            part_s = share_s(run.clock.left_s(), least_s, of_later_s=of_later_s)
            _measure_model(bench, name, size, chosen, run.clock.part(part_s))
            run.save()


def _least_s(name: str, sides: dict[str, Side]) -> float:
    return estimate_s(_size(name), tuple(sides), 2)


def _has_every_way(run: Run, name: str) -> bool:
    return run.plan.is_trial or name in EVERY_WAY


def _essential(sides: dict[str, Side]) -> dict[str, Side]:
    return {name: side for name, side in sides.items() if side.is_essential}


def _available(run: Run) -> dict[str, Side]:
    """All sides whose library is installed."""
    import importlib.util

    sides = dict(SIDES)
    if run.plan.device == "cpu" or importlib.util.find_spec("fastsafetensors") is None:
        sides.pop("fastsafetensors")
        run.left_out.append("fastsafetensors: not installed, or no device")
    return _essential(sides) if run.plan.is_essential else sides


def _learn_imports(bench: Bench, sides: dict[str, Side]) -> dict[str, Side]:
    """Let each server import what its ways need, outside of every clock.

    Returns the sides that work here, so that a broken library does not stop the benchmark.
    """
    run = bench.run
    name = min(run.plan.models, key=_size)
    _make_files(bench, name)
    working = {}
    for title, side in sides.items():
        path = bench.files[name, side.file_format]
        order = {"name": name, "path": path, "how": side.how, "device": run.plan.device}
        try:
            bench.server(side).learn("cold_start", **order)
        except WorkerFailed as error:
            if side.is_essential:
                raise
            notes = run.findings.faults if side.is_shared else run.left_out
            notes.append(f"{title}: {error}")
        else:
            working[title] = side
    return working


def _size(name: str) -> int:
    from benchmarks.gpu_models import weights_bytes

    return weights_bytes(name)


def _make_files(bench: Bench, name: str) -> None:
    for file_format in ("pt", "safetensors"):
        made = bench.plain.run(
            "checkpoint",
            name=name,
            file_format=file_format,
            directory=str(bench.run.directory),
            device=bench.run.plan.device,
        )
        bench.files[name, file_format] = made["path"]
    for file_format in ("pt", "safetensors"):
        let_settle(bench.files[name, file_format])


def _measure_model(
    bench: Bench, name: str, size_bytes: int, sides: dict[str, Side], clock: Clock
) -> None:
    run = bench.run

    def keep(results: dict[str, list[Result]]) -> None:
        found = {"size_bytes": size_bytes, "sides": results}
        run.findings.samples[f"cold start {name}"] = found
        run.save()

    try:
        _make_files(bench, name)
        samplers = {title: bench.sampler(name, side) for title, side in sides.items()}
        judge(run, name, size_bytes, rounds_within(samplers, run.plan.rounds, clock, keep=keep))
        if name == run.plan.models[0]:
            _measure_from_disk(bench, name, size_bytes)
    except (WorkerFailed, TrimsError) as error:  # the other models are useful without this one
        run.findings.faults.append(f"cold start of {name}: {error}")
    finally:
        for file_format in ("pt", "safetensors"):
            _remove_file(bench, name, file_format)


def _remove_file(bench: Bench, name: str, file_format: str) -> None:
    path = bench.files.pop((name, file_format), None)
    if path is None:
        return  # it could not be made
    with contextlib.suppress(WorkerFailed, TrimsError):  # only makes room for the next
        for each in (bench.trims, bench.bare, bench.idle):
            each.forget(path)
    Path(path).unlink()


def judge(run: Run, name: str, size_bytes: int, results: dict[str, list[Result]]) -> None:
    """Make rows, points of the plot and faults from the samples of one model."""
    _check(run, name, results)
    times = {side: [each["total_s"] for each in samples] for side, samples in results.items()}
    title = f"{name} ({size_bytes / 1e6:.0f} MB)"
    rows = run.findings.rows
    rows.append(_against_ideal(title, times, size_bytes))
    rows.append(_headline(title, times, size_bytes))
    loads = {side: [each["load_s"] for each in samples] for side, samples in results.items()}
    for other in (BASELINE, "safetensors"):
        if other in loads:
            what = f"the load alone, device hit vs {other}"
            rows.append(compared(what, title, loads[other], loads[HIT]))
    for other in ("mmap + .to", "safetensors", "fastsafetensors"):
        if other in times:
            rows.append(compared(f"device hit vs {other}", title, times[other], times[HIT]))
    for side in ("trims safetensors, device hit", "trims mmap + .to, device hit", HOST_HIT):
        if side in times:
            shared_part = min(each["shared"] for each in results[side])
            note = "" if shared_part >= SERVED_FRACTION else f"{shared_part:.0%} of it shared"
            what = f"{side} vs torch.load"
            rows.append(compared(what, title, times[BASELINE], times[side], note=note))
    if FIRST in times:
        rows.append(_first_load("first load, file in the page cache", title, times, size_bytes))
    if AFTER_PAUSE in times:
        what = "the same after a pause, file in the page cache"
        rows.append(compared(what, title, times[BASELINE], times[AFTER_PAUSE], slower_is="shim"))
    for side in PLOTTED:
        if side in times:
            _add_point(run, side, size_bytes, times[side])


def _against_ideal(title: str, times: dict[str, list[float]], size_bytes: int) -> Row:
    return compared(
        "device hit vs ideal",
        title,
        times[IDEAL],
        times[HIT],
        slower_is="shim",
        target=Target(at_most=NEAR_IDEAL) if size_bytes >= LARGE_BYTES else None,
        note=f"{100 * min(1.0, _median(times[IDEAL]) / _median(times[HIT])):.0f} % of ideal",
    )


def _headline(title: str, times: dict[str, list[float]], size_bytes: int) -> Row:
    """The paper's speed-up, a target only if the baseline is that much slower than ideal."""
    wanted = next(gain for limit, gain in HEADLINES if size_bytes <= limit)
    bound = _median(times[BASELINE]) / _median(times[IDEAL])
    is_possible = bound >= wanted * NEAR_IDEAL
    reason = f"the ideal itself is {bound:.1f}x, the paper's best {wanted:g}x"
    return compared(
        "device hit vs torch.load",
        title,
        times[BASELINE],
        times[HIT],
        target=Target(at_least=wanted) if is_possible else None,
        note="" if is_possible else reason,
    )


def _first_load(what: str, title: str, times: dict[str, list[float]], size_bytes: int) -> Row:
    target = Target(at_most=FIRST_LOAD) if size_bytes >= LARGE_BYTES else None
    return compared(what, title, times[BASELINE], times[FIRST], slower_is="shim", target=target)


def _median(samples: Sequence[float]) -> float:
    return Summary.of(samples).median


def _add_point(run: Run, side: str, size_bytes: int, samples: Sequence[float]) -> None:
    panel = "cold start to first inference"
    curves = run.findings.curves
    known = next((c for c in curves if (c.panel, c.name) == (panel, side)), None)
    points = known.points if known else ()
    if known:
        curves.remove(known)
    added = sorted([*points, (float(size_bytes), Summary.of(samples))], key=lambda point: point[0])
    curves.append(Curve(panel, side, tuple(added)))


def _check(run: Run, name: str, results: dict[str, list[Result]]) -> None:
    faults = run.findings.faults
    everything = [each for samples in results.values() for each in samples]
    if len({each["checksum"] for each in everything}) != 1:
        faults.append(f"{name}: the weights differ between the sides")
    if not all(each["is_finite"] for each in everything):
        faults.append(f"{name}: an output is not finite")
    elif not _outputs_agree([each["output"] for each in everything]):
        faults.append(f"{name}: the outputs differ between the sides")
    for side, samples in results.items():
        is_promised = SIDES[side].is_shared and SIDES[side].how == "torch"
        if is_promised and min(each["shared"] for each in samples) < SERVED_FRACTION:
            faults.append(f"{name}, {side}: the weights are not in shared memory")


def _outputs_agree(outputs: Sequence[Sequence[float]]) -> bool:
    scale = max(abs(value) for output in outputs for value in output)
    return all(
        abs(value - first) <= OUTPUT_TOLERANCE * scale
        for output in outputs
        for value, first in zip(output, outputs[0], strict=True)
    )


def _measure_from_disk(bench: Bench, name: str, size_bytes: int) -> None:
    """Measure the first load with the file on disk, if the directory is on one."""
    path = bench.files[name, "pt"]
    if not bench.run.clock.has(4 * estimate_s(size_bytes, (BASELINE, FIRST), 1)):
        bench.run.left_out.append(f"first load of {name} from disk: no time left")
        return
    if drop_cached(path) > 0.01:
        where = bench.run.directory
        bench.run.left_out.append(f"first load of {name} from disk: {where} is in memory")
        return
    samplers = {}
    for title in (BASELINE, FIRST):
        samplers[title] = _after_dropping(path, bench.sampler(name, SIDES[title]))
    results = rounds_within(samplers, bench.run.plan.rounds, bench.run.clock)
    bench.run.findings.samples[f"first load from disk {name}"] = results
    times = {side: [each["total_s"] for each in samples] for side, samples in results.items()}
    title = f"{name} ({size_bytes / 1e6:.0f} MB)"
    row = _first_load("first load, file on disk", title, times, size_bytes)
    bench.run.findings.rows.append(row)


def _after_dropping(path: str, sample: Callable[[], Result]) -> Callable[[], Result]:
    def run() -> Result:
        drop_cached(path)
        return sample()

    return run
