"""The simulated comparison as a picture: traces above, generated arrivals on one device below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.batching_trace_cells import ARRIVALS
from benchmarks.batching_trace_report import (
    ARTEFACT_NAMES,
    DEFAULT,
    POLICY_NAMES,
    Findings,
    ordered,
)
from benchmarks.rendering import pyplot, save_picture

__all__ = ["plot"]

# Okabe and Ito, "Color Universal Design" (2008); our colour stands out.
_COLOURS = {
    "auto": "#D55E00",
    "proteus": "#0072B2",
    "proteus_head": "#5E4FA2",
    "early_drop": "#009E73",
    "clockwork": "#56B4E9",
    "cork": "#CC79A7",
    "aimd": "#E69F00",
    "immediate": "#999999",
    "window": "#444444",
}
_OTHER = "#bbbbbb"
_TICKS = (1e-4, 1e-3, 1e-2, 1e-1, 1)
_TICK_LABELS = ("0.01 %\nor less", "0.1 %", "1 %", "10 %", "100 %")
_FLOOR = 1e-4
"""Where zero violations are drawn on a logarithmic axis."""


def plot(findings: Findings, path: Path) -> None:
    """Plot each trace with the artefact and the policies; below, one device over its load."""
    traces, columns = findings.traces, max(len(ARRIVALS), 1)
    figure = pyplot().figure(figsize=(17, 9.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    for index, (axis, trace) in enumerate(
        zip(upper.subplots(1, len(traces), sharey=True, squeeze=False)[0], traces, strict=True)
    ):
        _draw_trace(axis, findings, trace, is_first=index == 0)
    upper.suptitle(
        "Proteus' traces and latencies, one placement for all, SLO 300 ms: "
        "requests answered late, dropped, or not answered",
        fontweight="bold",
    )
    axes = lower.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axis, arrivals in zip(axes, ARRIVALS, strict=True):
        _draw_device(axis, findings, arrivals)
    axes[0].set_ylabel("share of requests")
    lower.suptitle("One device, 20 + 2 b ms, SLO 100 ms", fontweight="bold")
    handles, labels = axes[0].get_legend_handles_labels()
    lower.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save_picture(figure, path)


def _draw_trace(axis: Any, findings: Findings, trace: str, *, is_first: bool) -> None:
    runs = [each for each in findings.artefact if each.trace == trace]
    rows = {row.policy: row for row in findings.on(trace, routing="random")}
    pooled = {row.policy: row for row in findings.on(trace, routing="least loaded")}
    order = [policy for policy in ordered(rows) if policy in rows]
    labels: list[str] = []
    for place, policy in enumerate(order):
        colour = _COLOURS.get(policy, _OTHER)
        values = [rows[policy].ratio] + ([pooled[policy].ratio] if policy in pooled else [])
        axis.plot([_shown(v) for v in values], [place] * len(values), color=colour, lw=2, alpha=0.4)
        axis.plot(_shown(values[0]), place, "o", color=colour, ms=10)
        for value in values[1:]:
            axis.plot(_shown(value), place, "o", mfc="white", mec=colour, mew=2, ms=9)
        labels.append(POLICY_NAMES.get(policy, policy))
    for place, run in enumerate(runs, start=len(order)):
        true = run.ratio
        axis.plot([run.published_ratio, true], [place] * 2, color="black", lw=2, alpha=0.25)
        axis.plot(run.published_ratio, place, "|", color="black", ms=13, mew=2)
        axis.plot(true, place, "s", color="black", ms=9)
        labels.append(f"artefact: {ARTEFACT_NAMES[run.batching]}")
    ours = rows.get(DEFAULT)
    if ours:
        axis.axvline(_shown(ours.ratio), color=_COLOURS[DEFAULT], lw=1, ls=":", zorder=0)
    axis.set(xscale="log", xlim=(_FLOOR * 0.8, 1), title=trace)
    axis.set_xticks(_TICKS, _TICK_LABELS)
    axis.minorticks_off()
    if is_first:
        axis.invert_yaxis()
        axis.set_yticks(range(len(labels)), labels)
    axis.grid(True, axis="x", alpha=0.3)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("● random routing  ○ least loaded\n■ artefact  | as it prints", fontsize=8)


def _draw_device(axis: Any, findings: Findings, arrivals: str) -> None:
    rows = [row for row in findings.rows if row.subject == arrivals and not row.routing]
    for policy in reversed(ordered({row.policy for row in rows})):
        found = sorted((row for row in rows if row.policy == policy), key=lambda row: row.load)
        is_ours = policy == DEFAULT
        axis.plot(
            [row.load for row in found],
            [_shown(row.ratio) for row in found],
            color=_COLOURS.get(policy, _OTHER),
            label=POLICY_NAMES.get(policy, policy),
            marker="o",
            ms=6 if is_ours else 4,
            lw=3 if is_ours else 1.4,
            zorder=3 if is_ours else 2,
        )
    axis.set(yscale="log", ylim=(_FLOOR * 0.8, 1.1), title=arrivals, xlabel="load / capacity")
    axis.set_yticks(_TICKS, _TICK_LABELS)
    axis.minorticks_off()
    axis.axvline(1, color="black", lw=0.8, alpha=0.3)
    axis.grid(True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _shown(ratio: float) -> float:
    return max(ratio, _FLOOR)
