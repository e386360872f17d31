"""The time that a batcher adds to a lone request: ``python -m benchmarks.batching_overhead``.

Runs in the environment that ``benchmarks/peers/setup.sh`` makes. The function does nothing, and one
client calls it in a closed loop, blocking or awaiting. So the time of a request is the time that
the batcher adds. With sixteen clients it is the elapsed time of all divided by their requests.
*Beside a model* the function reads 32 MB, as a model reads its weights, so that the batcher finds
the processor's caches cold; the time of the reading is not counted.

Peers get their shortest wait. Each sample is a fresh process, and sides alternate. Figures are
medians of the rounds' median requests. Writes ``docs/results/batching_overhead.json``; ``--check``
fails if ours adds more than 50 µs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    Worker,
    WorkerFailed,
    alternate,
    argument_parser,
    describe_machine,
    write_json,
)
from benchmarks.peers import CATALOGUE, check_installed

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main"]

_MODULE = "benchmarks.batching_overhead_task"
_TARGET_US = 50.0
_CLIENTS = 16
_MODEL_MB = 32.0
_CALLS_BESIDE = 500
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Side:
    """A batcher with settings."""

    policy: str
    settings: Mapping[str, Any]

    @property
    def is_ours(self) -> bool:
        return self.policy.startswith("trims")

    @property
    def title(self) -> str:
        described = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{CATALOGUE[self.policy].title} ({described})"

    @property
    def beside_title(self) -> str:
        return f"{self.title}, beside a model"

    @property
    def shared_title(self) -> str:
        return f"{self.title}, {_CLIENTS} clients"


# Each peer with its shortest wait.
_SIDES = (
    _Side("trims", {"policy": "immediate"}),
    _Side("trims", {"policy": "auto"}),
    _Side("trims-asyncio", {"policy": "immediate"}),
    _Side("trims-asyncio", {"policy": "auto"}),
    _Side("batched", {"wait_ms": 0}),
    _Side("batched-asyncio", {"wait_ms": 0}),
    _Side("async-batcher", {"wait_ms": 0}),
    _Side("batch-inference", {"wait_ms": 0}),
    _Side("cork", {"latency_share": 1.0}),
    _Side("ray", {"wait_ms": 0, "calls": "executor"}),
)


def _sample(
    side: _Side, calls: int, clients: int = 1, read_mb: float = 0.0
) -> Callable[[], Result]:
    parameters = {
        "policy": side.policy,
        "settings": dict(side.settings),
        "calls": calls,
        "clients": clients,
        "read_mb": read_mb,
    }

    def run() -> Result:
        try:
            with Worker("batcher", module=_MODULE, **parameters) as worker:
                return worker.result(60.0)
        except WorkerFailed as error:
            return {"failed": str(error)}

    return run


def _direct(calls: int, read_mb: float = 0.0) -> Result:
    with Worker("direct", module=_MODULE, calls=calls, read_mb=read_mb) as worker:
        return worker.result(60.0)


def _median(runs: Sequence[Result], name: str) -> float:
    values = [run[name] for run in runs if "failed" not in run]
    return statistics.median(values) if values else float("nan")


def _rows(sides: Sequence[_Side], samples: Mapping[str, list[Result]]) -> list[Result]:
    direct_us = _median(samples["direct"], "p50_us")
    direct_beside_us = _median(samples["direct, beside a model"], "p50_us")
    rows = []
    for side in sides:
        runs, beside, shared = (
            samples[each] for each in (side.title, side.beside_title, side.shared_title)
        )
        added_us = _median(runs, "p50_us") - direct_us
        rows.append(
            {
                "title": side.title,
                "added_us": added_us,
                "mean_us": _median(runs, "mean_us"),
                "p99_us": _median(runs, "p99_us"),
                "processor_us": _median(runs, "processor_us"),
                "beside_us": _median(beside, "p50_us") - direct_beside_us,
                "shared_us": _median(shared, "elapsed_us"),
                "is_met": added_us <= _TARGET_US if side.is_ours else None,
                "failed": [run["failed"] for run in [*runs, *beside, *shared] if "failed" in run],
            }
        )
    return rows


def _table(rows: Sequence[Result], rounds: int) -> Table:
    from rich.table import Table

    table = Table(title=f"added to a request, medians of {rounds} rounds", header_style="bold")
    table.add_column("batcher")
    shared = f"each of {_CLIENTS} clients' (µs)"
    beside = "beside a model (µs)"
    for name in ("added (µs)", "mean", "p99", "CPU", beside, shared, f"≤ {_TARGET_US:g} µs"):
        table.add_column(name, justify="right")
    for row in rows:
        names = ("added_us", "mean_us", "p99_us", "processor_us", "beside_us", "shared_us")
        met = {None: "", True: "yes", False: "no"}[row["is_met"]]
        table.add_row(row["title"], *(f"{row[name]:.1f}" for name in names), met)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; with ``--check`` 1 when a target is missed."""
    from rich.console import Console

    parser = argument_parser("batching_overhead", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--policies", nargs="+", choices=CATALOGUE)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    machine = describe_machine()
    sides = [each for each in _SIDES if each.policy in (options.policies or CATALOGUE)]
    check_installed(side.policy for side in sides)
    measured = {side.title: _sample(side, options.calls) for side in sides}
    calls_beside = min(options.calls, _CALLS_BESIDE)
    measured |= {
        side.beside_title: _sample(side, calls_beside, read_mb=_MODEL_MB) for side in sides
    }
    measured |= {side.shared_title: _sample(side, options.calls, _CLIENTS) for side in sides}
    measured["direct"] = lambda: _direct(options.calls)
    measured["direct, beside a model"] = lambda: _direct(calls_beside, _MODEL_MB)
    samples = alternate(measured, options.rounds)
    rows = _rows(sides, samples)
    content = {"machine": machine, "rows": rows, "samples": samples}
    write_json(options.output / "batching_overhead.json", content)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(rows, options.rounds))
    for row in rows:
        for failure in dict.fromkeys(row["failed"]):
            console.print(f"[red]not valid:[/] {row['title']}: {failure}")
    missed = any(row["is_met"] is False for row in rows)
    failed = any(row["failed"] for row in rows)
    return 1 if failed or (options.check and missed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
