"""Results of the serving benchmark of staged models: figures, verdicts, a table and a plot.

Owns no measurement. Every figure and verdict is computed here from the cells; a ratio is taken
within one repeat, between sides that took turns in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Summary, pair_ratios
from benchmarks.rendering import can_draw, markdown_table, pyplot, save_picture
from benchmarks.report import Target

__all__ = ["gains", "markdown", "overheads", "peaks", "plot"]

Result = dict[str, Any]
OURS = "dvabatch"
BASELINES = ("immediate", "window", "auto")
STEADY = ("low", "medium", "high")
DIVERSITY = {"bert": "inputs", "u-net": "operators", "vgg": "load"}
_TITLES = {
    "immediate": "immediate (ZeroBatch)",
    "window": "best window (DelayBatch)",
    "auto": "auto",
    "dvabatch": "dvabatch",
    "stages alone": "immediate, in stages",
    "stretch only": "stretch only",
    "split only": "split only",
}
MEAN_GAIN = Target(at_least=0.46)
"""The paper's, over all its benchmarks; here against the same two baselines."""
PEAK_GAIN = Target(at_least=2.12)
"""The paper's, "up to", with input diversity."""
NO_LOSS = Target(at_most=1.02)
OVERHEAD = Target(at_most=1.02)
# Okabe and Ito, "Color Universal Design" (2008), as in benchmarks.report.
_COLOURS = {"immediate": "#D55E00", "window": "#E69F00", "auto": "#56B4E9", "dvabatch": "#0072B2"}
_COLOURS |= {"stages alone": "#999999", "stretch only": "#009E73", "split only": "#CC79A7"}


def _samples(content: Result, figure: Callable[[Result], Any], **where: Any) -> list[Any]:
    """Figures of the matching cells, in the order of their repeats."""
    found = [
        cell
        for cell in content["cells"]
        if all(cell.get(name) == value for name, value in where.items())
    ]
    return [figure(each["result"]) for each in sorted(found, key=lambda cell: cell["repeat"])]


def _ratios(content: Result, figure: str, one: str, other: str, **where: Any) -> Summary | None:
    """``one`` as a multiple of ``other``; None if they were not measured equally often."""
    sides = [
        _samples(content, lambda result: result[figure], side=side, **where)
        for side in (one, other)
    ]
    if not sides[0] or len(sides[0]) != len(sides[1]):
        return None
    return pair_ratios(*sides)


def _cells(content: Result) -> Iterator[tuple[str, str]]:
    """(model, load) of the measured cells."""
    for cell in content["cells"]:
        if cell["kind"] == "load" and cell["side"] == OURS and not cell["repeat"]:
            yield cell["model"], cell["load"]


def gains(content: Result, baseline: str, figure: str = "mean_ms") -> dict[tuple[str, str], float]:
    """By model and load, the share by which ours is below the baseline; medians of ratios."""
    found = {}
    for model, load in _cells(content):
        ratios = _ratios(content, figure, OURS, baseline, kind="load", model=model, load=load)
        if ratios is not None:
            found[model, load] = 1 - ratios.median
    return found


def peaks(content: Result) -> dict[str, dict[str, float]]:
    """By model and side: the highest answered rate with at most 1 % too late."""
    found: dict[str, dict[str, float]] = {}
    for model in DIVERSITY:
        for side in content["plan"]["sides"]:
            samples = _samples(content, _peak, kind="saturated", model=model, side=side)
            if samples:
                found.setdefault(model, {})[side] = statistics.median(samples)
    return found


def _peak(result: Result) -> float:
    kept = [
        each["throughput"] for each in result["by_clients"].values() if each["violations"] <= 0.01
    ]
    return max(kept, default=0.0)


def overheads(content: Result) -> dict[str, dict[str, Summary]]:
    """By model: times as long as a function's that a lone request takes in one stage and in all."""
    found: dict[str, dict[str, Summary]] = {}
    for model in DIVERSITY:
        for side in ("one stage", "all stages"):
            ratios = _ratios(content, "p50_us", side, "function", kind="lone", model=model)
            if ratios is not None:
                found.setdefault(model, {})[side] = ratios
    return found


# --- as text --------------------------------------------------------------------------------------


def markdown(content: Result) -> str:
    """Return all tables and the verdicts."""
    lines = [_heading(content), "", *_latency_table(content)]
    lines += ["", *_gain_table(content), "", *_peak_table(content), "", *_overhead_table(content)]
    lines += ["", *_verdicts(content)]
    lines += [f"- left out: {each}" for each in content["left_out"]]
    return "\n".join(lines) + "\n"


def _heading(content: Result) -> str:
    machine = content["machine"]
    quick = "**Tried out, not measured.** " if content["is_quick"] else ""
    return (
        f"{quick}Written by `python -m benchmarks.staged_serving`; {content['device']}, "
        f"{machine['processor']}, {machine['processors']} processors, torch "
        f"{machine['versions']['torch']}, {machine['date'][:10]}. Medians of repeats."
    )


def _latency_table(content: Result) -> list[str]:
    head = ["mean / p99, ms", *(f"{load}" for load in content["plan"]["loads"])]
    rows = []
    for model in content["plan"]["models"]:
        for side in content["plan"]["sides"]:
            row = [f"{model} ({DIVERSITY[model]}), {_TITLES[side]}"]
            for load in content["plan"]["loads"]:
                where = {"kind": "load", "model": model, "load": load, "side": side}
                row.append(
                    " / ".join(
                        _number(_samples(content, lambda r, f=figure: r[f], **where))
                        for figure in ("mean_ms", "p99_ms")
                    )
                )
            rows.append(row)
    return markdown_table(head, rows)


def _gain_table(content: Result) -> list[str]:
    head = ["dvabatch lower by (mean / p99)", *(_TITLES[each] for each in BASELINES)]
    found = {
        (each, figure): gains(content, each, figure)
        for each in BASELINES
        for figure in ("mean_ms", "p99_ms")
    }
    rows = []
    for cell in dict.fromkeys(_cells(content)):
        row = [", ".join(cell)]
        for each in BASELINES:
            both = [found[each, figure].get(cell) for figure in ("mean_ms", "p99_ms")]
            row.append(" / ".join("" if one is None else f"{one:+.0%}" for one in both))
        rows.append(row)
    return markdown_table(head, rows)


def _peak_table(content: Result) -> list[str]:
    found = peaks(content)
    sides = content["plan"]["sides"]
    head = [f"peak at {content['qos_ms']:.0f} ms, 1/s", *(_TITLES[each] for each in sides)]
    head.append("ours, times the better baseline")
    rows = []
    for model, by_side in found.items():
        best = max(by_side.get("immediate", 0.0), by_side.get("window", 0.0))
        ratio = f"{by_side[OURS] / best:.2f}" if best and OURS in by_side else ""
        shown = [f"{by_side[side]:.0f}" if side in by_side else "" for side in sides]
        rows.append([model, *shown, ratio])
    return markdown_table(head, rows)


def _overhead_table(content: Result) -> list[str]:
    head = ["a lone request, times the plain function's", "in one stage", "in all stages"]
    rows = [
        [model, *(_spread(by_side.get(side)) for side in ("one stage", "all stages"))]
        for model, by_side in overheads(content).items()
    ]
    return markdown_table(head, rows)


def _verdicts(content: Result) -> list[str]:
    """Each target with the figure found and the verdict."""
    both = [gains(content, each) for each in ("immediate", "window")]
    steady = [gain for found in both for (_, load), gain in found.items() if load in STEADY]
    low = [1 - gain for found in both for (_, load), gain in found.items() if load == "low"]
    ratios = [
        by_side[OURS] / max(by_side["immediate"], by_side["window"])
        for by_side in peaks(content).values()
        if {OURS, "immediate", "window"} <= set(by_side)
        and max(by_side["immediate"], by_side["window"])
    ]
    ones = [each["one stage"].median for each in overheads(content).values() if "one stage" in each]
    lines = []
    for name, values, reduce, target, shown in (
        ("mean latency lower, over all models and steady loads", steady, statistics.fmean,
         MEAN_GAIN, "{:.0%}"),
        ("peak throughput, the best model, times the better baseline's", ratios, max,
         PEAK_GAIN, "{:.2f}"),
        ("mean latency at low load, the worst model, times a baseline's", low, max,
         NO_LOSS, "{:.2f}"),
        ("a lone request in one stage, the worst model, times the function's", ones, max,
         OVERHEAD, "{:.3f}"),
    ):  # fmt: skip
        if values:
            value = reduce(values)
            verdict = "met" if target.is_met(value) else "**missed**"
            lines.append(f"- {name}: {shown.format(value)} (target {target}): {verdict}")
    return lines


def _number(samples: Sequence[float | None]) -> str:
    known = [each for each in samples if each is not None]
    if not known:
        return ""
    median = statistics.median(known)
    return f"{median:.0f}" if median >= 100 else f"{median:.1f}"


def _spread(summary: Summary | None) -> str:
    if summary is None:
        return ""
    return f"{summary.median:.3f} ({summary.low:.3f} to {summary.high:.3f})"


# --- as a picture ---------------------------------------------------------------------------------


def plot(content: Result, path: Path) -> None:
    """Plot mean and p99 latency by load for each model, and peaks."""
    if not can_draw(path):
        return
    from matplotlib.patches import Patch

    models = [each for each in content["plan"]["models"] if each in DIVERSITY]
    figure, axes = pyplot().subplots(
        2, len(models) + 1, figsize=(3.6 * (len(models) + 1), 6.4), squeeze=False
    )
    for column, model in enumerate(models):
        for row, name in enumerate(("mean_ms", "p99_ms")):
            axis = axes[row][column]
            _bars(axis, content, model, name)
            axis.set(title=f"{model} ({DIVERSITY[model]})" if not row else "", yscale="log")
        axes[1][column].set_xlabel("load")
    axes[0][0].set_ylabel("mean latency, ms")
    axes[1][0].set_ylabel("p99 latency, ms")
    _peak_bars(axes[0][-1], peaks(content))
    axes[0][-1].set(title=f"peak at {content['qos_ms']:.0f} ms", ylabel="times immediate's")
    axes[1][-1].axis("off")
    sides = content["plan"]["sides"]
    patches = [Patch(color=_COLOURS[side], label=_TITLES[side]) for side in sides]
    axes[1][-1].legend(handles=patches, frameon=False, loc="center")
    quick = "TRIED OUT, NOT MEASURED. " if content["is_quick"] else ""
    figure.suptitle(
        f"{quick}{content['device']}, {content['machine']['processor']}; medians of repeats, "
        "bars from the least to the most",
        fontsize=9,
    )
    figure.tight_layout()
    save_picture(figure, path)


def _bars(axis: Any, content: Result, model: str, name: str) -> None:
    loads = content["plan"]["loads"]
    sides = content["plan"]["sides"]
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        for index, load in enumerate(loads):
            where = {"kind": "load", "model": model, "load": load, "side": side}
            samples = [
                each
                for each in _samples(content, lambda result: result[name], **where)
                if each is not None
            ]
            if not samples:
                continue
            middle = statistics.median(samples)
            axis.bar(
                index + width * (number - (len(sides) - 1) / 2),
                middle,
                0.9 * width,
                yerr=[[middle - min(samples)], [max(samples) - middle]],
                color=_COLOURS[side],
                error_kw={"linewidth": 0.8},
            )
    axis.set_xticks(range(len(loads)), loads)


def _peak_bars(axis: Any, found: Mapping[str, Mapping[str, float]]) -> None:
    for index, (_, by_side) in enumerate(found.items()):
        base = by_side.get("immediate")
        width = 0.8 / len(by_side)
        for number, (side, peak) in enumerate(by_side.items()):
            if base:
                place = index + width * (number - (len(by_side) - 1) / 2)
                axis.bar(place, peak / base, 0.9 * width, color=_COLOURS[side])
    axis.set_xticks(range(len(found)), list(found))
    axis.axhline(1, color="grey", linewidth=0.6)
