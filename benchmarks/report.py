"""Rows of a benchmark: judged, printed and plotted.

Owns no measurement. Figures and verdicts are computed here from the samples, so that none is
written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Summary, pair_ratios
from benchmarks.rendering import can_draw, pyplot, save_picture

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.plan import Findings

__all__ = ["Curve", "Row", "Target", "compared", "plot", "show", "table", "verdicts"]

MEGA = 1e6
# Okabe and Ito, "Color Universal Design" (2008): distinct for every common colour vision.
_COLOURS = ("#D55E00", "#E69F00", "#009E73", "#0072B2", "#56B4E9")
_MARKERS = "osD^v"


@dataclass(frozen=True, slots=True)
class Target:
    """A row's target: its figure is ``at_least`` or ``at_most`` a value."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float) -> bool:
        """Whether a measured value meets the target."""
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. The target applies to ``figure``, whose unit is ``unit``.

    ``baseline`` and ``shim`` are seconds, or copies if ``unit`` is "copies", or bytes if
    ``measured`` says so.
    """

    measurement: str
    subject: str
    baseline: Summary | None = None
    shim: Summary | None = None
    figure: Summary | None = None
    unit: str = "x"
    target: Target | None = None
    note: str = ""
    measured: str = "s"

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without a target or a measurement."""
        if self.target is None or self.figure is None:
            return None
        return self.target.is_met(self.figure.median)


@dataclass(frozen=True, slots=True)
class Curve:
    """Time over model size of one way to load: ``points`` are (bytes, seconds)."""

    panel: str
    name: str
    points: tuple[tuple[float, Summary], ...]


def compared(
    measurement: str,
    subject: str,
    baseline: Sequence[float],
    shim: Sequence[float] | None,
    *,
    target: Target | None = None,
    slower_is: str = "baseline",
    note: str = "",
) -> Row:
    """Make a row of ratios: speed-ups, or with ``slower_is="shim"`` costs relative to baseline."""
    base = Summary.of(baseline)
    if shim is None:
        return Row(measurement, subject, base, target=target, note=note)
    slow, fast = (baseline, shim) if slower_is == "baseline" else (shim, baseline)
    ratio = pair_ratios(slow, fast)
    return Row(measurement, subject, base, Summary.of(shim), ratio, "x", target, note)


def table(rows: Iterable[Row], title: str) -> Table:
    """Return all rows as one table."""
    from rich.table import Table

    shown = Table(title=title, header_style="bold", row_styles=("", "dim"))
    shown.add_column("measurement", no_wrap=True)
    shown.add_column("model", no_wrap=True)
    for name in ("without", "with trims", "figure (min to max)", "target"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("met")
    shown.add_column("remark")
    for row in rows:
        shown.add_row(
            row.measurement,
            row.subject,
            _quantity(row.baseline, row),
            _quantity(row.shim, row),
            _figure(row),
            "" if row.target is None else str(row.target),
            _verdict(row.is_met),
            row.note,
        )
    return shown


def verdicts(rows: Iterable[Row]) -> dict[str, int]:
    """Say how many targets were met, missed, and not judged."""
    judged = [row.is_met for row in rows if row.target is not None]
    return {
        "met": judged.count(True),
        "missed": judged.count(False),
        "not measured": judged.count(None),
    }


def show(findings: Findings, title: str, written: Path, left_out: Iterable[str] = ()) -> None:
    """Print what was found, what was not, and the file that has it all."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(table(findings.rows, title))
    counts = verdicts(findings.rows)
    console.print(", ".join(f"{count} targets {name}" for name, count in counts.items()))
    for reason in left_out:
        console.print(f"left out: {reason}")
    for fault in dict.fromkeys(findings.faults):
        console.print(f"[red]not valid:[/] {fault}")
    console.print(f"written: {written}")


def _quantity(summary: Summary | None, row: Row) -> str:
    if summary is None:
        return ""
    if row.unit == "copies":
        return f"{summary.median:.2f}"
    if row.measured == "bytes":
        return f"{_short(summary.median / MEGA)} MB"
    if summary.median < 1e-3:
        return f"{summary.median * 1e6:.0f} µs"
    return f"{summary.median * 1e3:.1f} ms"


def _figure(row: Row) -> str:
    if row.figure is None:
        return ""
    low, middle, high = (_short(v) for v in (row.figure.low, row.figure.median, row.figure.high))
    spread = f" ({low} to {high})" if len(row.figure.samples) > 1 else ""
    return f"{middle} {row.unit}{spread}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _verdict(is_met: bool | None) -> str:
    if is_met is None:
        return ""
    return "[green]yes[/]" if is_met else "[red]no[/]"


def plot(curves: Sequence[Curve], path: Path, *, subtitle: str) -> None:
    """Plot time over size, one panel per measurement, log-log; bars are min to max."""
    if not can_draw(path):
        return
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    names = list(dict.fromkeys(curve.name for curve in curves))
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(5.6 * len(panels), 4.8), sharey=True, squeeze=False
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for curve in curves:
            if curve.panel == panel:
                _draw(axis, curve, names.index(curve.name))
        axis.set(xscale="log", yscale="log", xlabel="checkpoint size (MB)", title=panel)
        sizes = sorted({size / MEGA for curve in curves for size, _ in curve.points})
        axis.set_xticks(sizes, [f"{size:.2g}" if size < 10 else f"{size:.0f}" for size in sizes])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    axes[0][0].set_ylabel("time (ms)")
    figure.suptitle(subtitle, fontsize=10)
    figure.tight_layout()
    save_picture(figure, path)


def _draw(axis: Any, curve: Curve, index: int) -> None:
    medians = [summary.median * 1e3 for _, summary in curve.points]
    below = [(s.median - s.low) * 1e3 for _, s in curve.points]
    above = [(s.high - s.median) * 1e3 for _, s in curve.points]
    axis.errorbar(
        [size / MEGA for size, _ in curve.points],
        medians,
        yerr=[below, above],
        label=curve.name,
        color=_COLOURS[index % len(_COLOURS)],
        marker=_MARKERS[index % len(_MARKERS)],
        linestyle="-" if "trims" in curve.name else "--",
        capsize=3,
    )
