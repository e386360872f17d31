"""``trims batch simulate``: policies side by side on the same requests, in virtual time."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trims_shim.batching.protocol import Request
from trims_shim.batching.simulator import Report
from trims_shim.cli.arguments import refuse
from trims_shim.cli.batch_setup import Setup, made_up, policies, rate_of, trace
from trims_shim.cli.exits import Exit
from trims_shim.cli.text import print_json, table

__all__ = ["device_text", "report_fields", "simulate", "stream_of", "stream_text"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


def simulate(arguments: argparse.Namespace) -> Exit:
    """Print a row for each policy, first its violations: all requests not answered in time."""
    setup = Setup.of(arguments)
    makers = policies(arguments.policy, setup.profile)
    stream = stream_of(arguments, setup)
    reports = {
        name: Report.of(setup.run(maker, stream), devices=setup.devices)
        for name, maker in makers.items()
    }
    if arguments.json:
        print_json({name: report_fields(report) for name, report in reports.items()})
    else:
        print(f"{device_text(setup)}; {stream_text(stream)}\n\n{_table(reports)}")
    return Exit.OK


def stream_of(arguments: argparse.Namespace, setup: Setup) -> list[Request]:
    """The requests of the trace, or made-up ones."""
    if arguments.trace:
        refuse(arguments, ("--arrivals", "--cv"), "with --trace")
        return trace(arguments)
    return made_up(arguments, rate_of(arguments, setup))


def device_text(setup: Setup) -> str:
    """``1 x 20 + 2 b ms (b up to 16)``."""
    alpha_ns, beta_ns = setup.profile.line_ns()
    return (
        f"{setup.devices} x {beta_ns / _NS_PER_MS:.3g} + {alpha_ns / _NS_PER_MS:.3g} b ms "
        f"(b up to {setup.profile.max_batch_size})"
    )


def stream_text(stream: Sequence[Request]) -> str:
    """``20000 requests at 200/s, SLO 100 ms``."""
    objectives = sorted({request.deadline_ns - request.arrival_ns for request in stream})
    slo = f"{objectives[0] / _NS_PER_MS:g}"
    if len(objectives) > 1:
        slo += f" to {objectives[-1] / _NS_PER_MS:g}"
    span_ns = stream[-1].arrival_ns - stream[0].arrival_ns
    rate = f" at {(len(stream) - 1) * _NS_PER_S / span_ns:.4g}/s" if span_ns else ""
    return f"{len(stream)} requests{rate}, SLO {slo} ms"


def _table(reports: Mapping[str, Report]) -> str:
    titles = (
        "POLICY",
        "VIOLATIONS",
        "LATE",
        "DROPPED",
        "GOODPUT/S",
        "BATCH",
        "BUSY",
        "P50 MS",
        "P99 MS",
    )
    rows = [
        (
            name,
            f"{report.violation_ratio:.2%}",
            str(report.late),
            str(report.dropped),
            f"{report.goodput_qps:.1f}",
            f"{report.mean_batch:.2f}",
            f"{report.busy_share:.0%}",
            f"{report.p50_ms:.1f}",
            f"{report.p99_ms:.1f}",
        )
        for name, report in reports.items()
    ]
    return table(titles, rows, right=titles[1:])


def report_fields(report: Report) -> dict[str, Any]:
    """What ``--json`` shows of a report."""
    return dataclasses.asdict(report) | {
        "violation_ratio": report.violation_ratio,
        "goodput_qps": report.goodput_qps,
    }
