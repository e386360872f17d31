"""Tables, verdicts and plot of the comparison with other batchers.

Owns no measurement. A verdict compares, in each cell, the better of this package's two forms with
the best of all peers, by the mean of the paired differences of the repeats, which had equal
arrivals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.batching_plan import COMPARE, OURS, Record, matching
from benchmarks.peers import CATALOGUE
from benchmarks.rendering import markdown_table, pyplot, save_picture

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Verdict", "judge", "plot", "tables", "write_markdown"]

_NOISE = 0.02
"""Noise of one repeat of ten seconds. Of several: twice the error of the mean, at least 0.005."""
_LEAST_NOISE = 0.005
_COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#999999", "#000000")
_MARKERS = "oosD^v<>"
CellKey = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell: the mean of (best peer - ours), its noise, and who that peer is."""

    cell: CellKey
    ours: str
    peer: str
    difference: float
    noise: float

    def __str__(self) -> str:
        if abs(self.difference) <= self.noise:
            return "equal"
        return "best" if self.difference > 0 else "behind"


def _key(record: Record) -> CellKey:
    cell = record["job"]["cell"]
    return cell["device"], cell["cv"], cell["load"]


def _title(cell: CellKey) -> str:
    device, cv, load = cell
    return f"{device} CV {cv:g}, {f'{load:g} qps' if load > 2 else f'{load:.0%}'}"


def _cells(records: Sequence[Record]) -> list[CellKey]:
    return sorted({_key(record) for record in records})


def _policies(records: Sequence[Record]) -> list[str]:
    measured = {record["job"]["policy"] for record in records}
    return [name for name in CATALOGUE if name in measured]


def _of(records: Sequence[Record], policy: str, cell: CellKey) -> list[Record]:
    device, cv, load = cell
    return matching(records, policy=policy, device=device, cv=cv, load=load, purpose=COMPARE)


def _mean(records: Sequence[Record], value: Callable[[Mapping[str, Any]], float | None]) -> float:
    """The mean; infinite if a value is None (an overdue quantile), nan without values."""
    values = [value(record["result"]) for record in records]
    known = [each for each in values if each is not None and not math.isnan(each)]
    if None in values:
        return math.inf
    return statistics.fmean(known) if known else math.nan


def _violations(result: Mapping[str, Any]) -> float:
    return float(result["violations"])


def judge(records: Sequence[Record], cell: CellKey) -> Verdict | None:
    """Judge this package in a cell; None if it or every peer is missing."""
    measured = {
        policy: found for policy in _policies(records) if (found := _of(records, policy, cell))
    }
    means = {policy: _mean(found, _violations) for policy, found in measured.items()}
    ours = min((name for name in means if name in OURS), key=means.__getitem__, default=None)
    peers = [name for name in means if not name.startswith("trims")]
    if ours is None or not peers:
        return None
    peer = min(peers, key=means.__getitem__)
    theirs = {record["job"]["repeat"]: record["result"] for record in measured[peer]}
    pairs = [
        theirs[record["job"]["repeat"]]["violations"] - record["result"]["violations"]
        for record in measured[ours]
        if record["job"]["repeat"] in theirs
    ]
    if not pairs:
        return None
    noise = _NOISE
    if len(pairs) > 1:
        noise = max(_LEAST_NOISE, 2 * statistics.stdev(pairs) / math.sqrt(len(pairs)))
    return Verdict(cell, ours, peer, statistics.fmean(pairs), noise)


def _verdicts(records: Sequence[Record]) -> list[Verdict]:
    judged = (judge(records, cell) for cell in _cells(records))
    return [verdict for verdict in judged if verdict is not None]


# --- tables ---------------------------------------------------------------------------------------


def _violation_rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    cells = _cells(records)
    verdicts = {verdict.cell: verdict for verdict in _verdicts(records)}
    rows = []
    for policy in _policies(records):
        found = [_of(records, policy, cell) for cell in cells]
        shown = [f"{_mean(each, _violations):.3f}" if each else "" for each in found]
        rows.append([CATALOGUE[policy].title, *shown])
    judged = [verdicts.get(cell) for cell in cells]
    rows.append(["trims against the best peer", *("" if v is None else str(v) for v in judged)])
    return ["violations", *map(_title, cells)], rows


def _handover_us(result: Mapping[str, Any], quantile: str) -> float:
    """The hand-over; None if no full batch ever waited."""
    found = result["handover_us"]
    return float(found[quantile]) if found["count"] else math.nan


_DETAILS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("on time, 1/s", "{:.0f}", lambda result: result["goodput"]),
    ("p50, ms", "{:.1f}", lambda result: result["latency_ms"]["p50"]),
    ("p99, ms", "{:.0f}", lambda result: result["latency_ms"]["p99"]),
    ("mean batch", "{:.1f}", lambda result: result["mean_batch"]),
    ("device busy", "{:.2f}", lambda result: result["busy"]),
    ("CPU a request, µs", "{:.0f}", lambda result: result["processor_us"]),
    ("switches, 1/s", "{:.0f}", lambda result: result["switches_per_s"]),
    ("hand-over p50, µs", "{:.0f}", lambda result: _handover_us(result, "p50")),
    ("hand-over p95, µs", "{:.0f}", lambda result: _handover_us(result, "p95")),
    ("generator late p99, ms", "{:.2f}", lambda result: result["generator_late_ms"]["p99"]),
)


def _detail_rows(records: Sequence[Record], cell: CellKey) -> tuple[list[str], list[list[str]]]:
    rows = []
    for policy in _policies(records):
        if found := _of(records, policy, cell):
            means = [(form, _mean(found, value)) for _, form, value in _DETAILS]
            values = ["" if math.isnan(mean) else form.format(mean) for form, mean in means]
            settings = found[0]["job"]["settings"]
            described = ", ".join(f"{name} {value}" for name, value in settings.items())
            rows.append([f"{CATALOGUE[policy].title} ({described})", *values])
    return [_title(cell), *(name for name, _, _ in _DETAILS)], rows


def _all_rows(records: Sequence[Record]) -> list[tuple[list[str], list[list[str]]]]:
    devices = sorted({cell[0] for cell in _cells(records)})
    violations = [_violation_rows(matching(records, device=device)) for device in devices]
    return violations + [_detail_rows(records, cell) for cell in _cells(records)]


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the violations, then each cell in detail, for the terminal."""
    from rich.table import Table

    compared = matching(records, purpose=COMPARE)
    shown = []
    for head, rows in _all_rows(compared) if compared else ():
        table = Table(header_style="bold")
        for index, name in enumerate(head):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        shown.append(table)
    return shown


def write_markdown(records: Sequence[Record], content: Mapping[str, Any], path: Path) -> None:
    """Write the same tables for the documentation."""
    machine = content["machine"]
    seconds = sorted({record["job"]["seconds"] for record in records})
    repeats = len({record["job"]["repeat"] for record in records})
    jobs = max(record["at_once"] for record in records)
    verdicts = [str(verdict) for verdict in _verdicts(records)]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("best", "equal", "behind"))
    lines = [
        "Written by `python -m benchmarks.batching_peers`.",
        "",
        f"{machine['processor']}, {machine['processors']} processors; "
        f"each cell {' or '.join(f'{each:g}' for each in seconds)} s long, up to {repeats} times, "
        f"{jobs} batchers at the same moment; means. Cells: {counts}. Violations are answers that "
        "were late or dropped or did not come. `inf`: more requests were overdue at the end than "
        "this quantile allows.",
    ]
    for head, rows in _all_rows(records):
        lines += ["", *markdown_table(head, rows)]
    path.write_text("\n".join(lines) + "\n")


# --- plot -----------------------------------------------------------------------------------------


def plot(records: Sequence[Record], path: Path, machine: Mapping[str, Any]) -> None:
    """Plot violations over load, a panel per device and burstiness; bars are min to max."""
    panels = sorted({_key(record)[:2] for record in records})
    policies = _policies(records)
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = pyplot().subplots(
        lines, columns, figsize=(6 * columns, 4.2 * lines), squeeze=False, sharey=True
    )
    for axis, (device, cv) in zip(axes.flat, panels, strict=False):
        for index, policy in enumerate(policies):
            _draw(axis, records, policy, (device, cv), index)
        is_share = device != "sleep"
        axis.set(
            title=f"{device}, CV {cv:g}",
            xlabel="load (share of capacity)" if is_share else "load (requests/s)",
        )
        # The axis is linear up to 0.01, because many cells have no violation at all.
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(-0.0005, 1.05)
        axis.set_yticks([0, 0.005, 0.01, 0.1, 1], ["0", ".5 %", "1 %", "10 %", "100 %"])
        axis.grid(True, alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("violations")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"In-process batchers, {machine['processors']} processors ({machine['processor']})",
        fontsize=10,
    )
    figure.tight_layout()
    save_picture(figure, path)


def _draw(
    axis: Any, records: Sequence[Record], policy: str, panel: tuple[str, float], index: int
) -> None:
    points = []
    for cell in _cells(records):
        if cell[:2] == panel and (found := _of(records, policy, cell)):
            values = [record["result"]["violations"] for record in found]
            points.append((cell[2], statistics.fmean(values), min(values), max(values)))
    if points:
        loads, means, lows, highs = zip(*points, strict=True)
        below = [mean - low for mean, low in zip(means, lows, strict=True)]
        above = [high - mean for mean, high in zip(means, highs, strict=True)]
        axis.errorbar(
            loads,
            means,
            yerr=[below, above],
            label=CATALOGUE[policy].title,
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            linestyle="-" if policy.startswith("trims") else "--",
            linewidth=2.2 if policy.startswith("trims") else 1.2,
            capsize=3,
        )
