"""Several models on shared devices in the simulator: Flex against its baselines.

    python -m benchmarks.batching_flex                       # everything; some minutes
    python -m benchmarks.batching_flex --quick               # a quarter of the requests, one seed
    python -m benchmarks.batching_flex --sections lambda     # the others keep their results

Writes ``docs/results/batching_flex.json`` and ``.png``. Goodput is the share of all requests that
were answered by their deadline; every request is accounted for. With ``TRIMS_BATCHING_DATA`` (see
:mod:`benchmarks.batching_data`) the traces are simulated too.
:mod:`benchmarks.batching_flex_overhead` measures the cost of preemption on real models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.batching_data import DataMissing, find_dataset
from benchmarks.batching_flex_systems import (
    SYSTEMS,
    System,
    Workload,
    flex,
    of_trace,
    run,
    synthetic,
)
from benchmarks.harness import argument_parser, write_json
from benchmarks.rendering import markdown_table, pyplot, save_picture
from trims_shim.batching.simulator import Report

MODELS = ("equal", "mixed", "heavy")
SECTIONS = ("grid", "lambda", "stages", "traces")
WRITE_EVERY_S = 20.0
FACTORS = (1.2, 1.5, 2.0, 2.5, 3.03, 4.0, 6.0, None)
SWEEPS = (("mixed", 0.6), ("mixed", 0.9), ("mixed", 1.3), ("heavy", 0.6), ("heavy", 0.9))
STAGES = (1, 2, 4, 10, 50)
TRACES = ("zipf_exponential_bursty", "zipf_flat_bursty", "zipf_gamma")
# Okabe and Ito, "Color Universal Design" (2008), as in benchmarks.report.
_COLOURS = {"paper": "#D55E00", "ours": "#0072B2"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One system under one load; means over the seeds."""

    section: str
    setting: str
    system: str
    goodput: float
    spread: float
    """Difference between the best and the worst seed."""
    mean_batch: float
    busy: float
    wasted: float
    preemptions_per_1000: float


def main() -> None:
    """Measure, write, plot, print."""
    arguments = _arguments()
    count, seeds = (4_000, 1) if arguments.quick else (16_000, 3)
    began_s = written_s = time.monotonic()
    path = arguments.output / "batching_flex.json"
    cells = _kept(path, arguments.sections)
    notes: list[str] = []
    for section in arguments.sections:
        for setting, name, system, workloads, stages in _plan(
            section, arguments.models, count, seeds, notes
        ):
            cell = _measure(section, setting, name, system, workloads, stages)
            cells.append(cell)
            print(f"{section:8s} {setting:34s} {name:30s} {cell.goodput:.3f} ±{cell.spread:.3f}")
            if time.monotonic() - written_s > WRITE_EVERY_S:
                written_s = time.monotonic()
                _write(path, cells, notes, count, seeds, written_s - began_s)
    _write(path, cells, notes, count, seeds, time.monotonic() - began_s)
    plot(cells, path.with_suffix(".png"))
    print(table(cells))


def _write(
    path: Path, cells: list[Cell], notes: list[str], count: int, seeds: int, taken_s: float
) -> None:
    written = {
        "requests": count,
        "seeds": seeds,
        "seconds": round(taken_s),
        "notes": notes,
        "cells": cells,
    }
    write_json(path, written)


def _kept(path: Path, measured: Sequence[str]) -> list[Cell]:
    """Cells of earlier runs, of the sections that this run does not measure."""
    if not path.exists():
        return []
    cells = [Cell(**each) for each in json.loads(path.read_text())["cells"]]
    return [each for each in cells if each.section not in measured]


def _arguments() -> argparse.Namespace:
    parser = argument_parser("batching_flex", __doc__, harmless=("sections",))
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, one seed")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of the grid")
    return parser.parse_args()


Row = tuple[str, str, System, list[Workload], int]


def _plan(
    section: str, models: Sequence[str], count: int, seeds: int, notes: list[str]
) -> Iterator[Row]:
    if section == "grid":
        for setting, workloads in _settings(models, count, seeds):
            for name, system in SYSTEMS.items():
                yield setting, name, system, workloads, 10
    elif section == "lambda":
        for slos, load in SWEEPS:
            workloads = _workloads(slos, "4", load, 8, count, seeds)
            for factor in FACTORS:
                setting = f"{slos}, load {load}, λ {factor}"
                for name, system in (
                    ("paper", flex(factor, of_paper=True)),
                    ("ours", flex(factor)),
                ):
                    yield setting, name, system, workloads, 10
    elif section == "stages":
        for devices in (1, 8):
            workloads = _workloads("heavy", "4", 0.6, devices, count, seeds)
            for stages in STAGES:
                setting = f"{devices} devices, {stages} stages"
                for name, system in (("paper", flex(3.03, of_paper=True)), ("ours", flex(3.03))):
                    yield setting, name, system, workloads, stages
    else:
        yield from _traces(notes)


def _settings(
    models: Sequence[str], count: int, seeds: int
) -> Iterator[tuple[str, list[Workload]]]:
    for slos in models:
        for devices in (8, 1):
            for process in ("1", "4", "bursty"):
                for load in (0.6, 0.9, 1.3):
                    kind = process if process == "bursty" else f"CV {process}"
                    setting = f"{slos} SLOs, {devices} devices, {kind}, load {load}"
                    yield setting, _workloads(slos, process, load, devices, count, seeds)


def _workloads(
    slos: str, process: str, load: float, devices: int, count: int, seeds: int
) -> list[Workload]:
    return [
        synthetic(slos=slos, process=process, load=load, devices=devices, count=count, seed=seed)
        for seed in range(1, seeds + 1)
    ]


def _traces(notes: list[str]) -> Iterator[Row]:
    try:
        data = find_dataset()
    except DataMissing as error:
        notes.append(f"no traces: {error}")
        print(error)
        return
    for trace in TRACES:
        for load in (0.6, 0.9, 1.3):
            workload = of_trace(data, trace, load=load)
            for name, system in SYSTEMS.items():
                yield f"{trace}, {workload.devices} GPUs, load {load}", name, system, [workload], 10


def _measure(
    section: str, setting: str, name: str, system: System, workloads: list[Workload], stages: int
) -> Cell:
    reports = [run(system, workload, stages=stages) for workload in workloads]
    goodputs = [each.on_time / each.requests for each in reports]

    def mean(values: list[float]) -> float:
        return round(statistics.fmean(values), 5)

    return Cell(
        section=section,
        setting=setting,
        system=name,
        goodput=mean(goodputs),
        spread=round(max(goodputs) - min(goodputs), 5),
        mean_batch=mean([each.mean_batch for each in reports]),
        busy=mean([each.busy_share for each in reports]),
        wasted=mean([each.wasted_share for each in reports]),
        preemptions_per_1000=mean([_per_1000(each) for each in reports]),
    )


def _per_1000(report: Report) -> float:
    return 1000 * report.preemptions / report.requests


def table(cells: list[Cell]) -> str:
    """Return goodput as Markdown: a row per setting, a column per system, the best in bold."""
    lines = []
    for section in ("grid", "traces"):
        mine = [each for each in cells if each.section == section]
        names = [name for name in SYSTEMS if any(each.system == name for each in mine)]
        if not names:
            continue
        rows = []
        for setting in dict.fromkeys(each.setting for each in mine):
            row = {each.system: each.goodput for each in mine if each.setting == setting}
            best = max(row.values())
            shown = [f"**{row[n]:.3f}**" if row[n] == best else f"{row[n]:.3f}" for n in names]
            rows.append([setting, *shown])
        lines += ["", *markdown_table([section, *names], rows)]
    return "\n".join(lines)


def plot(cells: list[Cell], path: Path) -> None:
    """Plot goodput over lambda for two sets of models, lost device time, and numbers of stages."""
    figure, axes = pyplot().subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    labels = ["none" if factor is None else f"{factor:g}" for factor in FACTORS]
    for slos, load in SWEEPS:
        upper, style = axes[0][int(slos == "heavy")], {0.6: ":", 0.9: "--", 1.3: "-"}[load]
        settings = [f"{slos}, load {load}, λ {factor}" for factor in FACTORS]
        for name, points in _lines(cells, "lambda", settings):
            line = {"linestyle": style, "color": _COLOURS[name], "label": f"{name}, load {load}"}
            upper.plot(labels, [each.goodput for each in points], **line)
            if slos == "heavy":
                axes[1][0].plot(labels, [each.wasted for each in points], **line)
    for devices, style in ((1, "--"), (8, "-")):
        settings = [f"{devices} devices, {stages} stages" for stages in STAGES]
        for name, points in _lines(cells, "stages", settings):
            axes[1][1].plot(
                [*map(str, STAGES)],
                [each.goodput for each in points],
                linestyle=style,
                color=_COLOURS[name],
                label=f"{name}, {devices} device{'s' * (devices > 1)}",
            )
    axes[0][0].set(title="eight light models, mixed objectives", ylabel="goodput, share of all")
    axes[0][1].set(title="light models and a heavy one", ylabel="goodput, share of all")
    axes[1][0].set(title="the same: device time given up", ylabel="share of all device time")
    axes[1][1].set(title="the same, load 0.6", xlabel="stages", ylabel="goodput, share of all")
    for each in (axes[0][0], axes[0][1], axes[1][0]):
        each.set(xlabel="λ (preemption factor)")
    for each in axes.flat:
        each.grid(alpha=0.3)
        if each.get_legend_handles_labels()[0]:
            each.legend(fontsize=8, loc="lower right" if each is axes[0][0] else "best")
    figure.suptitle("Flex on 8 devices, gamma arrivals of CV 4 (simulated)")
    save_picture(figure, path)


def _lines(
    cells: list[Cell], section: str, settings: list[str]
) -> Iterator[tuple[str, list[Cell]]]:
    """(system, its cells in the order of the settings), of systems with all cells measured."""
    for name in _COLOURS:
        found = {
            each.setting: each for each in cells if (each.section, each.system) == (section, name)
        }
        if all(setting in found for setting in settings):
            yield name, [found[setting] for setting in settings]


if __name__ == "__main__":
    main()
