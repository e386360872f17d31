"""Tables and the picture of :mod:`benchmarks.planning`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rendering import markdown_table, pyplot, save_picture

__all__ = ["write_markdown", "write_plot"]

Row = Mapping[str, Any]


def write_markdown(content: Mapping[str, Any], path: Path) -> None:
    """Write the tables."""
    lines = [
        "Written by `python -m benchmarks.planning`; simulated, but for times of the solver.",
        "",
    ]
    lines += markdown_table(
        ["devices", "demand, 1/s", "a plan", "the next one", "accuracy", "no plan above", "served"],
        (
            [
                f"{each['devices']}",
                f"{each['demand_qps']:g}",
                f"{each['taken_s']:.2f} s",
                f"{each['again_s']:.2f} s",
                f"{each['accuracy']:.2f}",
                f"{each['bound']:.2f}",
                f"{min(1.0, each['headroom']):.0%}",
            ]
            for each in content["solver"]
        ),
    )
    served = content["served"]
    loads = sorted({each["load_s"] for each in served})
    usual = statistics.mode(each["load_s"] for each in served)
    for trace in dict.fromkeys(each["trace"] for each in served):
        own = [each for each in served if each["trace"] == trace]
        lines += ["", f"**{trace}**: violations, and accuracy of answers in time", ""]
        headrooms = sorted({each["headroom"] for each in own})
        lines += markdown_table(
            ["headroom", *(f"{each:g}" for each in headrooms)],
            (
                [
                    "planned once" if plans == "once" else "planned again",
                    *(_cell(_one(own, plans, headroom, usual)) for headroom in headrooms),
                ]
                for plans in ("once", "again")
            ),
        )
        headroom = statistics.mode(each["headroom"] for each in own)
        lines += [""]
        lines += markdown_table(
            ["a variant loads in", *(f"{each:g} s" for each in loads)],
            [["planned again", *(_cell(_one(own, "again", headroom, each)) for each in loads)]],
        )
    lines += ["", "**Groups of devices**: violations; mean of seeds", ""]
    herd = content["herd"]
    cells = list(dict.fromkeys((each["load"], each["cv"]) for each in herd))
    lines += markdown_table(
        ["", *(f"load {load:g}, CV {cv:g}" for load, cv in cells)],
        (
            [system, *(f"{_mean(herd, system, load, cv):.2%}" for load, cv in cells)]
            for system in dict.fromkeys(each["system"] for each in herd)
        ),
    )
    path.write_text("\n".join(lines) + "\n")


def write_plot(content: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy over violations, and violations over the time of a load."""
    served = content["served"]
    usual_s = statistics.mode(each["load_s"] for each in served)
    headroom = statistics.mode(each["headroom"] for each in served)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, trace in enumerate(dict.fromkeys(each["trace"] for each in served)):
        own = [each for each in served if each["trace"] == trace]
        for plans, style in (("once", "o--"), ("again", "s-")):
            points = [e for e in own if e["plans"] == plans and e["load_s"] == usual_s]
            left.plot(
                [100 * each["violation_ratio"] for each in points],
                [each["accuracy"] for each in points],
                style,
                color=f"C{number}",
                label=f"{trace}, planned {plans}",
                markersize=4,
            )
        slow = sorted(
            (e for e in own if e["plans"] == "again" and e["headroom"] == headroom),
            key=lambda each: each["load_s"],
        )
        right.plot(
            [each["load_s"] for each in slow],
            [100 * each["violation_ratio"] for each in slow],
            "s-",
            color=f"C{number}",
            label=trace,
            markersize=4,
        )
    left.set(xlabel="violations, %", ylabel="accuracy of answers in time", xscale="log")
    left.set_title("one point for each headroom", fontsize=10)
    right.set(xlabel="a variant loads in, s", ylabel="violations, %", ylim=(0, None))
    right.set_title(f"planned again, headroom {headroom:g}", fontsize=10)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    save_picture(figure, path)


def _cell(row: Row) -> str:
    return f"{row['violation_ratio']:.2%}, {row['accuracy']:.2f}"


def _one(rows: Sequence[Row], plans: str, headroom: float, load_s: float) -> Row:
    return next(
        each
        for each in rows
        if (each["plans"], each["headroom"], each["load_s"]) == (plans, headroom, load_s)
    )


def _mean(rows: Sequence[Row], system: str, load: float, cv: float) -> float:
    return statistics.mean(
        each["violation_ratio"]
        for each in rows
        if (each["system"], each["load"], each["cv"]) == (system, load, cv)
    )
