"""Batches that are stretched and split, against closed batches, in the simulator.

    python -m benchmarks.staged_policies                      # everything; under eight minutes
    python -m benchmarks.staged_policies --quick              # a smoke run, in seconds
    python -m benchmarks.staged_policies --sections peaks     # the others keep their results
    python -m benchmarks.staged_policies --profile FILE       # and models measured by `trims stage`

Writes ``docs/results/staged_policies.json``, ``.png`` and ``.md``. :mod:`benchmarks.staged_scenes`
has the simulated scenes: stated stages on a device that several of them share. *immediate* is
ZeroBatch and *window* DelayBatch of DVABatch (ATC'22), with the best of four windows in each cell.
All systems get the same requests, and know how long each stage takes alone. The latency of a
dropped request is infinite for percentiles, and left out of means.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.harness import argument_parser
from benchmarks.staged_policies_report import Cell, plot, report
from benchmarks.staged_scenes import (
    DEVICES,
    LOADS,
    SCENES,
    Scene,
    Way,
    line_stages,
    measured_scene,
    run,
)
from benchmarks.staged_simulation import StagedOutcome
from benchmarks.staged_systems import PEAK_SYSTEMS, SYSTEMS, is_of
from trims_shim.batching.simulator import Report, percentile
from trims_shim.batching.staged.policies import DVABatch

__all__ = ["main"]

SECTIONS = ("latencies", "peaks", "lanes", "pairs", "stages")
PAIRS = (1, 2, 3, 4)
STAGES = (1, 2, 3, 4, 6, 8, 12, 20)
STAGE_MODELS = {"VGG-like": (1.3, 4.0), "ResNet-like": (1.1, 14.0)}
"""Alpha and beta in ms, of models cut into equal stages."""
_MOST_VIOLATIONS = 0.01
"""Largest share at a sustained rate: the 99th percentile is within the objective."""
_PEAK_STEPS = 5
_PEAK_BETWEEN = 0.6, 1.2
"""Loads between which the search starts; it goes beyond them if necessary."""
_LOWEST_LOAD, _HIGHEST_LOAD = 0.05, 6.0
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Job:
    """A cell to be measured."""

    section: str
    scene: Scene
    system: str
    ways: Sequence[Way]
    load: str
    count: int
    seeds: int


@dataclass(frozen=True, slots=True)
class _Figures:
    """The figures of one run."""

    mean_ms: float
    p99_ms: float
    violated: float
    batch: float
    busy: float


def _figures(outcome: StagedOutcome) -> _Figures:
    summary = Report.of(outcome)
    latencies_ms = sorted((end - each.arrival_ns) / _NS_PER_MS for each, end in outcome.answered)
    lost = [math.inf] * (outcome.requests - len(latencies_ms))
    items = sum(len(each.batch) for each in outcome.stage_executions)
    return _Figures(
        mean_ms=statistics.fmean(latencies_ms) if latencies_ms else math.inf,
        p99_ms=percentile([*latencies_ms, *lost], 0.99),
        violated=summary.violation_ratio,
        batch=items / max(1, len(outcome.stage_executions)),
        busy=summary.busy_share,
    )


def _measure(job: Job) -> Cell:
    """The way with the lowest mean latency, among those with at most 1 % violations if any."""
    return min((_cell(job, way) for way in job.ways), key=_rank)


def _rank(cell: Cell) -> tuple[bool, float]:
    return cell.violated > _MOST_VIOLATIONS, cell.mean_ms or math.inf


def _cell(job: Job, way: Way) -> Cell:
    runs = [
        _figures(run(job.scene, way, LOADS[job.load], count=job.count, seed=seed))
        for seed in range(1, job.seeds + 1)
    ]
    means_ms = [each.mean_ms for each in runs]

    def mean(value: Callable[[_Figures], float]) -> float | None:
        found = statistics.fmean(map(value, runs))
        return round(found, 4) if math.isfinite(found) else None

    return Cell(
        section=job.section,
        scene=job.scene.name,
        system=job.system,
        setting=way.setting,
        load=job.load,
        mean_ms=mean(lambda each: each.mean_ms),
        spread_ms=round(max(means_ms) - min(means_ms), 3) if max(means_ms) < math.inf else None,
        p99_ms=mean(lambda each: each.p99_ms),
        violated=mean(lambda each: each.violated) or 0.0,
        batch=mean(lambda each: each.batch) or 0.0,
        busy=mean(lambda each: each.busy) or 0.0,
        qps=None,
    )


def _peak(job: Job) -> Cell:
    """The highest rate of the best way with the 99th percentile within the objective."""
    found = [(_peak_load(job, way), way) for way in job.ways]
    load, way = max(found, key=lambda each: each[0])
    return Cell(
        section=job.section,
        scene=job.scene.name,
        system=job.system,
        setting=way.setting,
        load="peak",
        mean_ms=None,
        spread_ms=None,
        p99_ms=None,
        violated=0.0,
        batch=0.0,
        busy=0.0,
        qps=round(load * job.scene.capacity_qps, 1),
    )


def _peak_load(job: Job, way: Way) -> float:
    """Mean over the seeds, by bisection; assumes that every lower rate is sustained, too."""
    return statistics.fmean(_peak_of_seed(job, way, seed) for seed in range(1, job.seeds + 1))


def _peak_of_seed(job: Job, way: Way, seed: int) -> float:
    low, high = _PEAK_BETWEEN
    while _is_sustained(job, way, high, seed):
        low, high = high, 1.5 * high
        if high > _HIGHEST_LOAD:
            return low
    while not _is_sustained(job, way, low, seed):
        low, high = low / 2, low
        if high < _LOWEST_LOAD:
            return 0.0
    for _ in range(_PEAK_STEPS):
        middle = (low + high) / 2
        if _is_sustained(job, way, middle, seed):
            low = middle
        else:
            high = middle
    return low


def _is_sustained(job: Job, way: Way, load: float, seed: int) -> bool:
    outcome = run(job.scene, way, (load,), count=job.count, seed=seed)
    return Report.of(outcome).violation_ratio <= _MOST_VIOLATIONS


# --- what is measured -----------------------------------------------------------------------------


def _jobs(
    sections: Sequence[str], scenes: Sequence[Scene], count: int, seeds: int
) -> Iterator[Job]:
    for section in sections:
        if section == "lanes":
            yield from _lane_jobs(scenes, count, seeds)
        elif section == "pairs":
            yield from _pair_jobs(scenes, count, seeds)
        elif section == "stages":
            yield from _stage_jobs(count, seeds)
        else:
            systems = SYSTEMS if section == "latencies" else PEAK_SYSTEMS
            loads = LOADS if section == "latencies" else ("peak",)
            for scene, (name, ways), load in product(scenes, systems.items(), loads):
                if is_of(name, scene.diversity):
                    yield Job(section, scene, name, ways, load, count, seeds)


def _lane_jobs(scenes: Sequence[Scene], count: int, seeds: int) -> Iterator[Job]:
    """Jobs in which a second lane gains at low load and loses at high load."""
    ways = {
        "one lane": Way(DVABatch, lanes=1),
        "two lanes": Way(DVABatch, lanes=2),
        "two lanes, width measured": Way(DVABatch, lanes=2, knows_width=True),
    }
    for scene in scenes:
        for (name, way), load in product(ways.items(), LOADS) if scene.device == "half" else ():
            yield Job("lanes", scene, name, [way], load, count, seeds)


def _pair_jobs(scenes: Sequence[Scene], count: int, seeds: int) -> Iterator[Job]:
    """Jobs with a lane for each pair, so that only the number of pairs limits stages."""
    for scene in scenes:
        for pairs in PAIRS if scene.device == "wide" else ():
            way = Way(DVABatch, str(pairs), lanes=max(PAIRS), pairs=pairs)
            for load in ("medium", "high"):
                yield Job("pairs", scene, f"{pairs} pairs", [way], load, count, seeds)


def _stage_jobs(count: int, seeds: int) -> Iterator[Job]:
    for device in ("wide", "narrow"):
        for model, (alpha_ms, beta_ms) in STAGE_MODELS.items():
            for stages in STAGES:
                profiles = {1: line_stages(alpha_ms, beta_ms, stages)}
                scene = replace(SCENES[f"{model}, {device}"], profiles=profiles)
                way = Way(DVABatch, str(stages))
                for load in ("medium", "high"):
                    yield Job("stages", scene, f"{stages} stages", [way], load, count, seeds)


def _run_job(job: Job) -> Cell:
    return _peak(job) if job.section == "peaks" else _measure(job)


def _run_all(jobs: Sequence[Job], processes: int) -> Iterator[Cell]:
    if processes == 1:
        yield from map(_run_job, jobs)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap(_run_job, jobs, chunksize=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, plot, print."""
    options = _arguments(arguments)
    count, seeds = options.requests, options.seeds
    if options.quick:
        count, seeds = min(count, 150), 1
    scenes = [SCENES[name] for name in options.scenes]
    scenes += [measured_scene(path, device=options.device) for path in options.profile]
    path = options.output / "staged_policies.json"
    began_s = time.monotonic()
    cells = _kept(path, options.sections)
    jobs = list(_jobs(options.sections, scenes, count, seeds))
    for number, cell in enumerate(_run_all(jobs, options.jobs), 1):
        cells.append(cell)
        if options.verbose:
            print(f"{number}/{len(jobs)} {cell}")
    seconds = round(time.monotonic() - began_s)
    head = {"requests": count, "seeds": seeds, "seconds": seconds}
    _write(path, cells, head)
    text = report(cells, head)
    path.with_suffix(".md").write_text(text)
    plot(cells, path.with_suffix(".png"))
    print(text)
    print(f"written: {path}, .png and .md, in {seconds} s")
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser("staged_policies", __doc__, harmless=("sections", "verbose"))
    parser.add_argument("--quick", action="store_true", help="a smoke run, in seconds")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--scenes", nargs="*", choices=SCENES, default=list(SCENES))
    parser.add_argument("--profile", nargs="+", type=Path, default=[], help="measured models")
    parser.add_argument("--device", choices=DEVICES, default="narrow", help="theirs")
    parser.add_argument("--requests", type=int, default=2000, help="in each cell, for each seed")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--verbose", action="store_true", help="print each cell")
    return parser.parse_args(arguments)


def _kept(path: Path, measured: Sequence[str]) -> list[Cell]:
    """Cells of earlier runs, of the sections that this run does not measure."""
    if not path.exists():
        return []
    cells = [Cell(**each) for each in json.loads(path.read_text())["cells"]]
    return [each for each in cells if each.section not in measured]


def _write(path: Path, cells: Sequence[Cell], head: dict[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(each)) for each in cells)
    text = json.dumps(head)[:-1]
    path.write_text(f'{text},\n"cells": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
