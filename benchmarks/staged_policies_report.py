"""Results of :mod:`benchmarks.staged_policies` as Markdown and as a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rendering import can_draw, markdown_table, pyplot, save_picture
from benchmarks.staged_scenes import DEVICES
from benchmarks.staged_systems import OURS

_Gains = dict[tuple[str, str], float]

__all__ = ["BASELINES", "Cell", "gains", "plot", "report"]

BASELINES = {"immediate": "ZeroBatch", "window": "DelayBatch"}
"""The paper's baselines, by their names here."""
# Okabe and Ito, "Color Universal Design" (2008), as in benchmarks.batching_trace_plot.
_COLOURS = {
    OURS: "#D55E00",
    "as published": "#E69F00",
    "auto": "#0072B2",
    "immediate, two at once": "#56B4E9",
    "stages alone": "#009E73",
    "immediate": "#999999",
    "immediate, own lengths": "#CC79A7",
    "window": "#444444",
}
_READING = """
Stages and devices are stated, not measured (`benchmarks/staged_scenes.py`). *Wide*: what a small
batch leaves of the device is free, two stages at once; *half*: half of that is; *narrow*: nothing
is, one stage at a time, as on any device that is given one lane. What a real device has lies in
between; where two at once gain little, the second lane is the mistake.

*immediate*: ZeroBatch, whole models, a batch padded to the longest input in it; *window*:
DelayBatch, the best of 2, 5, 10 and 20 ms; *own lengths*: a batch for each length, as in all below
it; *two at once*: whole models, on two streams; *auto*: our policy for whole models, which waits
where that saves device time; *stages alone*: no stretching, no splitting; *as published*: stretched
while younger than the best of 2, 5, 10 and 20 ms, split in halves.

A load of 1 is 64 at a time of the longest length; the step is from 0.2 to 1 and back. Objective
200 ms; means are of what was answered. Each stage has 0.1 ms of overhead, whole models have it
once. The paper, on its GPU and models: mean latency 46 % lower over all, throughput up to 2.12x
with input diversity.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One system under one load; means over the seeds. None: not measured."""

    section: str
    scene: str
    system: str
    setting: str
    """The best setting, if there are several."""
    load: str
    mean_ms: float | None
    spread_ms: float | None
    """Difference of the mean between the best and the worst seed."""
    p99_ms: float | None
    """None if more than one percent was dropped."""
    violated: float
    """Share of requests that were late, dropped or not answered."""
    batch: float
    """Mean number of requests in a run of a stage."""
    busy: float
    qps: float | None
    """The highest rate with the 99th percentile within the objective."""


def gains(cells: Sequence[Cell], baseline: str, *, device: str) -> _Gains:
    """By scene and load, how much lower our mean latency is."""
    found = {
        (each.scene, each.load, each.system): each
        for each in cells
        if each.section == "latencies" and each.scene.endswith(device)
    }
    result = {}
    for (scene, load, system), ours in found.items():
        other = found.get((scene, load, baseline))
        if system == OURS and other is not None and ours.mean_ms and other.mean_ms:
            result[scene, load] = 1 - ours.mean_ms / other.mean_ms
    return result


def report(cells: Sequence[Cell], head: dict[str, int]) -> str:
    """A fragment for the documentation."""
    count = f"{head['requests']} requests for each of {head['seeds']} seeds."
    lines = [
        "Written by `python -m benchmarks.staged_policies`, as is `staged_policies.png`.",
        "",
        *textwrap.wrap(f"**Simulated**, {count} {' '.join(_READING.split())}", 100),
    ]
    for section in (_summary, _latencies, _peaks, _lanes, _ablations):
        lines += section(cells)
    return "\n".join(lines) + "\n"


def _summary(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for device in DEVICES:
        paper: _Gains = {}
        for name in (*BASELINES, "immediate, two at once", "auto"):
            found = gains(cells, name, device=device)
            if found:
                rows.append(_gains_row(device, name, found))
            if name in BASELINES:
                paper |= {(f"{scene} {name}", load): v for (scene, load), v in found.items()}
        steady = [gain for (_, load), gain in paper.items() if load != "step"]
        if steady:
            note = "immediate and window, but for the step, as in the paper"
            rows.append([device, note, *[""] * len(_LOADS), _signed(_mean(steady)), ""])
    head = ["device", "against", *_LOADS, "all", "worst cell"]
    title = "## Mean latency, dvabatch against others"
    return ["", title, "", *markdown_table(head, rows, texts=2)]


def _gains_row(device: str, name: str, found: _Gains) -> list[str]:
    means = [_mean(gain for (_, load), gain in found.items() if load == each) for each in _LOADS]
    (scene, load), worst = min(found.items(), key=lambda each: each[1])
    place = f"{_signed(worst)} ({scene.rpartition(',')[0]}, {load})"
    return [device, name, *map(_signed, [*means, _mean(found.values())]), place]


def _latencies(cells: Sequence[Cell]) -> list[str]:
    lines = ["", "## Latencies", "", "Mean / 99th percentile in ms; violated, if any, in brackets."]
    return lines + _latencies_of(cells, "latencies")


def _lanes(cells: Sequence[Cell]) -> list[str]:
    tables = _latencies_of(cells, "lanes")
    return ["", "## Lanes of dvabatch, where half of the room is free", *tables] if tables else []


def _latencies_of(cells: Sequence[Cell], section: str) -> list[str]:
    mine = [each for each in cells if each.section == section]
    lines = []
    for scene in dict.fromkeys(each.scene for each in mine):
        here = [each for each in mine if each.scene == scene]
        rows = []
        for system in dict.fromkeys(each.system for each in here):
            row = {each.load: each for each in here if each.system == system}
            shown = [_latency(row[load]) if load in row else "" for load in _LOADS]
            rows.append([system, *shown])
        lines += ["", *markdown_table([scene, *_LOADS], rows)]
    return lines


def _peaks(cells: Sequence[Cell]) -> list[str]:
    mine = [each for each in cells if each.section == "peaks"]
    systems = list(dict.fromkeys(each.system for each in mine))
    if not mine:
        return []
    rows = []
    for scene in dict.fromkeys(each.scene for each in mine):
        row = {each.system: each.qps or 0.0 for each in mine if each.scene == scene}
        shown = [f"{row[name]:.0f}" if name in row else "" for name in systems]
        ratio = _ratio(row.get(OURS), row.get("immediate"))
        rows.append([scene, *shown, f"{ratio:.2f} x"])
    title = "## Requests a second with 99 % of them within the objective"
    return ["", title, "", *markdown_table(["", *systems, "dvabatch / immediate"], rows)]


def _ablations(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for section, title in (
        ("pairs", "Buffer pairs, four stages at once"),
        ("stages", "Stages, of which one is auto"),
    ):
        mine = [each for each in cells if each.section == section]
        if not mine:
            continue
        systems = list(dict.fromkeys(each.system for each in mine))
        lines += ["", f"## {title}: mean / 99th percentile of dvabatch in ms", ""]
        rows = []
        for scene, load in dict.fromkeys((each.scene, each.load) for each in mine):
            row = {
                each.system: _latency(each)
                for each in mine
                if (each.scene, each.load) == (scene, load)
            }
            rows.append([f"{scene}, {load} load", *(row.get(system, "") for system in systems)])
        lines += markdown_table(["", *systems], rows)
    return lines


_LOADS = ("low", "medium", "high", "step")


def _latency(cell: Cell) -> str:
    p99 = "-" if cell.p99_ms is None else f"{cell.p99_ms:.0f}"
    mean = "-" if cell.mean_ms is None else f"{cell.mean_ms:.1f}"
    violated = f" ({cell.violated:.1%})" if cell.violated >= 0.0005 else ""
    return f"{mean} / {p99}{violated}"


def _mean(values: Any) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _ratio(value: float | None, to: float | None) -> float:
    return value / to if value and to else 0.0


def _signed(share: float | None) -> str:
    return "" if share is None else f"{-share:+.0%}"


# --- the picture ----------------------------------------------------------------------------------


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Plot latencies, a row per device and a column per model; below them the rest."""
    if not can_draw(path):
        return
    latencies = [each for each in cells if each.section == "latencies"]
    scenes = dict.fromkeys(each.scene for each in latencies)
    models = list(dict.fromkeys(scene.rpartition(", ")[0] for scene in scenes)) or [""]
    devices = [each for each in DEVICES if any(scene.endswith(each) for scene in scenes)] or [""]
    figure = pyplot().figure(figsize=(15, 4.5 + 2.6 * len(devices)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(2.6 * len(devices), 4.5))
    axes = upper.subplots(len(devices), len(models), squeeze=False, sharey=True)
    for row, device in zip(axes, devices, strict=True):
        for axis, model in zip(row, models, strict=True):
            scene = f"{model}, {device}"
            _draw_latencies(axis, [each for each in latencies if each.scene == scene], scene)
        row[0].set_ylabel("ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    upper.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1, frameon=False)
    upper.suptitle("Simulated: mean latency (dots) and 99th percentile (where the lines end)")
    _draw_lower(lower.subplots(1, 3), cells)
    save_picture(figure, path)


def _draw_latencies(axis: Any, cells: Sequence[Cell], scene: str) -> None:
    names = [name for name in _COLOURS if any(each.system == name for each in cells)]
    for place, name in enumerate(names):
        row = {each.load: each for each in cells if each.system == name}
        for index, load in enumerate(_LOADS):
            cell = row.get(load)
            if cell is None or cell.mean_ms is None:
                continue
            across = index + (place - len(names) / 2) * 0.1
            top_ms = cell.p99_ms if cell.p99_ms is not None else 1e4
            axis.plot([across] * 2, [cell.mean_ms, top_ms], color=_COLOURS[name], lw=2, alpha=0.4)
            axis.plot(
                across,
                cell.mean_ms,
                "o",
                color=_COLOURS[name],
                ms=5,
                label=name if index == 0 else None,
            )
    axis.set(yscale="log", ylim=(5, 300))
    axis.set_title(scene, fontsize="medium")
    axis.set_yticks((10, 100), ("10", "100"))
    axis.set_xticks(range(len(_LOADS)), _LOADS)
    axis.axhline(200, color="black", lw=0.5, ls="--")
    axis.grid(alpha=0.3)


def _draw_lower(axes: Any, cells: Sequence[Cell]) -> None:
    peaks = {(each.scene, each.system): each.qps for each in cells if each.section == "peaks"}
    scenes = list(dict.fromkeys(scene for scene, _ in peaks))
    for place, (name, colour) in enumerate(_COLOURS.items()):
        ratios = [_ratio(peaks.get((s, name)), peaks.get((s, "immediate"))) for s in scenes]
        across = [index + (place - len(_COLOURS) / 2) * 0.1 for index in range(len(scenes))]
        axes[0].bar(across, ratios, width=0.1, color=colour)
    axes[0].set_xticks(range(len(scenes)), scenes, rotation=40, ha="right", fontsize=7)
    axes[0].set(title="requests a second with 99 % in time", ylabel="times immediate")
    for axis, section in ((axes[1], "pairs"), (axes[2], "stages")):
        for label, points in _lines([each for each in cells if each.section == section]):
            axis.plot(*zip(*points, strict=True), "o-", ms=3, label=label)
        axis.set(title=f"dvabatch, by {section}", xlabel=section, ylabel="mean latency, ms")
        if axis.lines:
            axis.legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)


def _lines(cells: Sequence[Cell]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    key: Callable[[Cell], tuple[str, str]] = lambda each: (each.scene, each.load)  # noqa: E731
    for scene, load in dict.fromkeys(map(key, cells)):
        points = [
            (int(each.setting), each.mean_ms)
            for each in cells
            if key(each) == (scene, load) and each.mean_ms is not None
        ]
        if points:
            yield f"{scene}, {load}", points
