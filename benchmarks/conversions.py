"""What sharing converted and stacked weights gains: ``python -m benchmarks.conversions``.

transformers loads a model into another dtype than its file's, or stacks experts. Without the shim
each process makes these weights anew; with it they come from an image that the daemon has made at
the second load. Prints a table and writes ``docs/results/conversions.json``. Every sample is a
fresh process, timed after its imports and a small load; sides alternate; the first loads, which
copy on both sides, are not counted. A comparison counts only if the weights lay in the shared
segment and were equal; otherwise the run ends with status 1.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.conversions_task import WAYS
from benchmarks.harness import (
    Summary,
    alternate,
    argument_parser,
    daemon,
    describe_machine,
    run_once,
    write_json,
)
from benchmarks.models import cache_directory
from benchmarks.plan import Findings, check_equal, run_until_served, served_note
from benchmarks.process_memory import drop_cached, warm_cached
from benchmarks.report import Row, compared, show

__all__ = ["main"]

Result = dict[str, Any]
_MODULE = "benchmarks.conversions_task"


class _Case(NamedTuple):
    kind: str
    saved: str
    """The file's dtype."""
    way: str

    @property
    def title(self) -> str:
        how = "experts that are stacked" if self.way == "stacked" else self.way
        return f"{self.kind} in {self.saved}, {how}"


_CASES = (
    _Case("gpt2-medium", "bfloat16", "dtype=float32"),
    _Case("gpt2-medium", "bfloat16", "float()"),
    _Case("gpt2-medium", "float32", "dtype=bfloat16"),
    _Case("gpt2-medium", "float32", "half()"),
    _Case("experts", "bfloat16", "stacked"),
)


def _measure(case: _Case, rounds: int, findings: Findings) -> None:
    directory = cache_directory() / f"conversions-{case.kind}-{case.saved}"
    where = {"module": _MODULE, "kind": case.kind, "directory": str(directory)}
    made = run_once("make", dtype=case.saved, **where)
    for file in directory.glob("large/*.safetensors"):
        drop_cached(file)
        warm_cached(file)

    def side(environment: Mapping[str, str] | None) -> Callable[[], Result]:
        return lambda: run_once("load", environment=environment, way=case.way, **where)

    with daemon() as own:
        run_until_served(side(own.environment))
        results = alternate({"plain": side(None), "shim": side(own.environment)}, rounds)
    plain, shim = results["plain"], results["shim"]
    findings.samples[case.title] = results
    check_equal(case.title, [*plain, *shim], findings)
    note = served_note(case.title, shim, findings)
    size = f"{made['size_bytes'] / 1e6:.0f} MB"
    findings.rows += [
        compared(
            "load + touch",
            f"{case.title} ({size})",
            [each["total_s"] for each in plain],
            [each["total_s"] for each in shim],
            note=note,
        ),
        Row(
            "private memory",
            f"{case.title} ({size})",
            Summary.of([each["private_bytes"] for each in plain]),
            Summary.of([each["private_bytes"] for each in shim]),
            measured="bytes",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases; return 1 if a comparison was not valid."""
    from rich.console import Console

    parser = argument_parser("conversions", __doc__)
    parser.add_argument("--pairs", type=int, default=7, help="rounds of every comparison")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    findings, machine = Findings(), describe_machine()
    # As for Ctrl-C: children end with their blocks, and the findings so far are written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for case in _CASES:
            if case.way in options.ways:
                with Console().status(f"measuring {case.title}"):
                    _measure(case, options.pairs, findings)
    except KeyboardInterrupt:
        findings.faults.append("interrupted: what follows was not measured")
    written = options.output / "conversions.json"
    content = {
        "machine": machine,
        "faults": findings.faults,
        "rows": [asdict(row) for row in findings.rows],
        "samples": findings.samples,
    }
    write_json(written, content)
    show(findings, f"converted and stacked weights, medians of {options.pairs} rounds", written)
    return 1 if findings.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
