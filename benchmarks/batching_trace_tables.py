"""The simulated comparison as tables, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.batching_trace_cells import ARRIVALS
from benchmarks.batching_trace_report import (
    ARTEFACT_NAMES,
    DEFAULT,
    POLICY_NAMES,
    Findings,
    Row,
    is_best,
    ordered,
)
from benchmarks.proteus_artefact import ArtefactRun
from benchmarks.rendering import markdown_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_tables", "write_markdown"]

_BEST = "\N{CHECK MARK}"


@dataclass(slots=True)
class _Sheet:
    """A table before it is rendered. A row of ``None`` separates sections."""

    title: str
    head: list[str]
    texts: int
    """The number of leading columns that hold text."""
    rows: list[list[str] | None] = field(default_factory=list)


def print_tables(findings: Findings, console: Console) -> None:
    """Print all tables and the verdicts."""
    from rich.table import Table

    for sheet in _sheets(findings):
        table = Table(title=sheet.title, header_style="bold")
        for index, name in enumerate(sheet.head):
            table.add_column(name, justify="left" if index < sheet.texts else "right", no_wrap=True)
        for row in sheet.rows:
            if row is None:
                table.add_section()
            else:
                is_ours = POLICY_NAMES[DEFAULT] in row
                table.add_row(*row, style="bold green" if is_ours else None)
        console.print(table)
    for target in findings.targets():
        verdict = "[green]met[/]" if target.is_met else "[red]missed[/]"
        console.print(f"{verdict}: {target.name}: {target.figure} (wanted: {target.wanted})")


_INTRODUCTION = """Written by `python -m benchmarks.batching_traces`, as is `batching_traces.png`.

Simulated: traces and latencies are those of Proteus' artefact, one placement for all. A violation
is a request that was answered late, dropped, or never answered. "As it prints": the artefact's own
figure, in which an answer is late only after 1000 ms. "True": the same run, judged by the objective
of 300 ms, with what was never answered. Our rows are means over three seeds of the random routing;
random means the shares that the placement planned, as in the artefact. Policies other than the
default are the algorithms as they were published, in our code: they do far better than the versions
in the artefact, which wait for full batches and serve late requests. Accuracy is the mean over
answers in time."""


def write_markdown(findings: Findings, path: Path) -> None:
    """Write the same for the documentation."""
    lines = [_INTRODUCTION, ""]
    for target in findings.targets():
        verdict = "met" if target.is_met else "missed"
        lines.append(f"- {verdict}: {target.name}: {target.figure} (wanted: {target.wanted})")
    for sheet in _sheets(findings):
        lines += ["", f"## {sheet.title[0].upper()}{sheet.title[1:]}", ""]
        lines += markdown_table(sheet.head, filter(None, sheet.rows), texts=sheet.texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _sheets(findings: Findings) -> Iterator[_Sheet]:
    if findings.traces:
        yield _ratios(findings)
        yield _details(findings)
    if any(not row.routing for row in findings.rows):
        yield _device(findings)


def _ratios(findings: Findings) -> _Sheet:
    """A line for each trace: the share of violations of each policy."""
    policies = ordered({row.policy for row in findings.rows if row.routing})
    theirs = [("accscale", "artefact's Proteus, as it prints"), ("accscale", "true")]
    theirs += [("nexus", "its Nexus, true"), ("aimd", "its AIMD, true")]
    head = ["trace", *(name for _, name in theirs), *(POLICY_NAMES.get(p, p) for p in policies)]
    sheet = _Sheet("traces: share of requests violated", [*head, "trims, least loaded"], 1)
    for trace in findings.traces:
        runs = {run.batching: run for run in findings.artefact if run.trace == trace}
        rows = {row.policy: row for row in findings.on(trace, routing="random")}
        pooled = {row.policy: row for row in findings.on(trace, routing="least loaded")}
        found = [f"{runs[name].ratio:.2%}" if name in runs else "" for name, _ in theirs]
        if "accscale" in runs:
            found[0] = f"{runs['accscale'].published_ratio:.2%}"
        ours = [f"{rows[p].ratio:.2%}" if p in rows else "" for p in policies]
        last = f"{pooled[DEFAULT].ratio:.2%}" if DEFAULT in pooled else ""
        sheet.rows.append([trace, *found, *ours, last])
    return sheet


def _details(findings: Findings) -> _Sheet:
    head = ["trace", "batching", "violated", "min to max", "late", "dropped", "no answer"]
    head += ["accuracy", "batch", "busy", "p50 ms", "p99 ms", "least loaded"]
    sheet = _Sheet("traces: all figures", head, 2)
    for trace in findings.traces:
        for run in findings.artefact:
            if run.trace == trace:
                name = f"artefact: {ARTEFACT_NAMES[run.batching]}"
                printed = [trace, f"{name}, as it prints", f"{run.published_ratio:.4f}"]
                sheet.rows += [printed + [""] * 10, _artefact_row(run, f"{name}, true")]
        pooled = {row.policy: row for row in findings.on(trace, routing="least loaded")}
        rows = findings.on(trace, routing="random")
        for row in sorted(rows, key=lambda each: each.ratio):
            sheet.rows.append(_trace_row(row, pooled.get(row.policy)))
        sheet.rows.append(None)
    return sheet


def _artefact_row(run: ArtefactRun, name: str) -> list[str]:
    shares = [each / run.requests for each in (run.late, run.dropped, run.unanswered)]
    figures = (run.accuracy, run.mean_batch, run.busy_share)
    latencies = (run.p50_ms, run.p99_ms)
    return [run.trace, name, f"{run.ratio:.4f}", "", *_cells(shares, figures, latencies), ""]


def _trace_row(row: Row, pooled: Row | None) -> list[str]:
    low, high = row.range
    shares = [row.share(name) for name in ("late", "dropped", "unanswered")]
    figures = [row.mean(name) for name in ("accuracy", "mean_batch", "busy_share")]
    latencies = [row.mean(name) for name in ("p50_ms", "p99_ms")]
    return [
        row.subject,
        POLICY_NAMES.get(row.policy, row.policy),
        f"{row.ratio:.4f}",
        f"{low:.4f} to {high:.4f}",
        *_cells(shares, figures, latencies),
        f"{pooled.ratio:.4f}" if pooled else "",
    ]


def _cells(
    shares: Sequence[float], figures: Sequence[float], latencies: Sequence[float]
) -> list[str]:
    return [
        *(f"{each:.4f}" for each in shares),
        *(f"{each:.2f}" for each in figures),
        *(f"{each:.0f}" for each in latencies),
    ]


def _device(findings: Findings) -> _Sheet:
    rows = [row for row in findings.rows if not row.routing]
    policies = ordered({row.policy for row in rows})
    sheet = _Sheet(
        f"one device, 20 + 2 b ms, SLO 100 ms: share violated ({_BEST}: best, or within noise)",
        ["arrivals", "load", *(POLICY_NAMES.get(policy, policy) for policy in policies)],
        1,
    )
    for arrivals in ARRIVALS:
        for load in sorted({row.load for row in rows if row.subject == arrivals}):
            contest = findings.on(arrivals, load=load)
            found = {row.policy: row for row in contest}
            shown = [_marked(contest, found[p]) if p in found else "" for p in policies]
            sheet.rows.append([arrivals, f"{load:g}", *shown])
        sheet.rows.append(None)
    return sheet


def _marked(contest: Sequence[Row], row: Row) -> str:
    mark = _BEST if is_best(contest, row.policy) else " "
    return f"{row.ratio:.4f} {mark}"
