"""The host tier against the frameworks' own loaders: ``make bench``.

``python -m benchmarks.host`` prints one table and writes ``docs/results/host.json`` (machine, raw
samples, medians, ratios, verdicts) and ``docs/results/host.png``. Every sample is a fresh process,
timed after its imports. Variants alternate. The daemon is warm and belongs to this run.

Files are dropped from the page cache and read back before they are measured, so that the page cache
looks as after a normal read. (Pages of a file that was just written are laid out differently;
mapping them was measured to be several times slower.)

A comparison counts only if the weights really lay in the shared segment (from /proc/PID/maps) and
the bytes were equal; otherwise the run ends with status 1.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import argument_parser, describe_machine, write_json
from benchmarks.host_costs import measure_import, measure_opens, measure_sharing
from benchmarks.host_loads import measure_loads, measure_misses, measure_pretrained
from benchmarks.plan import FULL, SMOKE, Findings, Plan
from benchmarks.report import plot, show, verdicts

__all__ = ["main"]

_SECTIONS: dict[str, Callable[[Plan, Findings], None]] = {
    "loads": measure_loads,
    "pretrained": measure_pretrained,
    "misses": measure_misses,
    "sharing": measure_sharing,
    "import": measure_import,
    "opens": measure_opens,
}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser("host", __doc__)
    parser.add_argument("--pairs", type=int, help="rounds of every comparison")
    parser.add_argument("--quick", action="store_true", help="a smoke run with small models")
    parser.add_argument("--baseline-only", action="store_true", help="measure without trims")
    parser.add_argument("--models", nargs="+", help="architectures of benchmarks/models.py")
    parser.add_argument("--miss-models", nargs="+", help="architectures of the first loads")
    parser.add_argument("--only", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS))
    parser.add_argument("--check", action="store_true", help="status 1 when a target is missed")
    return parser.parse_args(arguments)


def _plan(options: argparse.Namespace) -> Plan:
    chosen = asdict(SMOKE if options.quick else FULL)
    chosen["with_shim"] = not options.baseline_only
    if options.pairs:
        chosen["rounds"] = options.pairs
    if options.models:
        chosen["models"] = chosen["miss_models"] = tuple(options.models)
    if options.miss_models:
        chosen["miss_models"] = tuple(options.miss_models)
    return Plan(**chosen)


def _write(plan: Plan, machine: dict[str, Any], findings: Findings, directory: Path) -> None:
    described = [asdict(row) | {"is_met": row.is_met} for row in findings.rows]
    content = {
        "machine": machine,
        "load_average_after": os.getloadavg(),
        "plan": asdict(plan),
        "page_cache": "files dropped and read back before measuring",
        "targets": verdicts(findings.rows),
        "faults": findings.faults,
        "rows": described,
        "samples": findings.samples,
    }
    write_json(directory / "host.json", content)
    if findings.curves:
        subtitle = (
            f"{machine['processor']}, {machine['processors']} processors, "
            f"torch {machine['versions']['torch']}; medians of {plan.rounds}, warm, fresh processes"
        )
        plot(findings.curves, directory / "host.png", subtitle=subtitle)


def _measure(name: str, plan: Plan, findings: Findings) -> None:
    try:
        _SECTIONS[name](plan, findings)
    except Exception as error:  # the other sections are useful without this one
        findings.faults.append(f"{name}: {type(error).__name__}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections; return 1 if a comparison was not valid (or missed, with --check)."""
    from rich.console import Console

    options = _arguments(arguments)
    plan, findings, machine = _plan(options), Findings(), describe_machine()
    # As for Ctrl-C: children end with their blocks, and the findings so far are written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in options.only:
            with Console().status(f"measuring {name}"):
                _measure(name, plan, findings)
    except KeyboardInterrupt:
        findings.faults.append("interrupted: what follows was not measured")
    _write(plan, machine, findings, options.output)
    title = f"trims on the host tier, medians of {plan.rounds} alternating rounds"
    show(findings, title, options.output / "host.json")
    is_missed = options.check and verdicts(findings.rows)["missed"]
    return 1 if findings.faults or is_missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
