"""Proteus' own simulator on our traces and placements, for comparison.

``python -m benchmarks.proteus_artefact --checkout DIR --python VENV/bin/python`` runs it and adds
to ``docs/results/batching_artefact.json``; runs that are in it are not repeated. ``DIR`` is a
checkout of github.com/UMass-LIDS/Proteus, commit 6967c932, which is not changed. ``VENV`` has numpy
1.23.5, pandas 2.1.1, scipy 1.11.3, gym 0.26.2, requests, gurobipy 11.0.3 and matplotlib on Python
3.11 (newer numpy lacks names that it uses; gurobipy is only imported). A run takes one to seven
minutes. Traces and profiles are read from ``TRIMS_BATCHING_DATA`` (see batching_data.py).

Its licence allows use for comparison only, so this repository holds none of it. The counts:

- ``published``: the ratio that it prints. There an answer is late after 1000 ms, whatever the
  objective, because the events that end a request carry no deadline (core/simulator.py,
  generate_end_request_event). Requests that are still queued at the end are not counted at all.
- ``late``: answers after the objective, by each answer's latency. The simulation is the same,
  because it never looks at lateness.
- ``unanswered``: requests of the trace that were neither answered nor dropped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.batching_data import DataMissing, Dataset, find_dataset
from benchmarks.batching_placement import Placement, find_placement
from benchmarks.harness import ROOT, write_json

__all__ = ["RESULTS", "ArtefactRun", "known_runs", "main", "placement_file"]

RESULTS = ROOT / "docs" / "results" / "batching_artefact.json"
BATCHINGS = ("accscale", "nexus", "aimd")
"""The artefact's names for Proteus' own batching and its versions of Nexus and Clipper."""
_TRACES = (
    "zipf_exponential",
    "zipf_uniform",
    "zipf_gamma",
    "zipf_flat_uniform",
    "zipf_flat_bursty",
)
_SLO_MS = 300.0
_SEED = 10
"""As in its configurations."""
_LIMIT_S = 1800.0
# The artefact's kinds of devices. The profiled CPU stands for two of them, of ten each.
_KINDS = {"cpu": ("CPU", "VPU"), "gpu_ampere": ("GPU_AMPERE",), "gpu_pascal": ("GPU_PASCAL",)}
_COUNT = 10

# Runs in its own interpreter and directory; counts beside its simulator without changing it.
_DRIVER = """
import json, sys, time
from types import SimpleNamespace
time.sleep = lambda seconds: None
import run
from core.simulator import Simulator
seen = SimpleNamespace(answers=[], batches=0, busy_ms=0.0, simulator=None)
bump, finish = Simulator.bump_successful_request_stats, Simulator.generate_finish_batch_event
def bump_and_note(self, event, processing_time):
    seen.answers.append((processing_time, event.accuracy_seen))
    return bump(self, event, processing_time)
def finish_and_note(self, finish_time, predictor, executor):
    seen.simulator = self
    seen.batches += 1
    seen.busy_ms += finish_time - self.clock
    return finish(self, finish_time, predictor, executor)
Simulator.bump_successful_request_stats = bump_and_note
Simulator.generate_finish_batch_event = finish_and_note
run.main(SimpleNamespace(action_size=1, reward_window_length=10, allocation_window=1000,
    random_runtimes=False, logging_level=30, config_file=sys.argv[1]))
counted = seen.simulator.slo_timeouts
json.dump({"answers": seen.answers, "batches": seen.batches, "busy_ms": seen.busy_ms,
    "clock_ms": seen.simulator.clock, "dropped": counted["timeouts"], "late": counted["late"]},
    open(sys.argv[2], "w"))
"""


@dataclass(frozen=True, slots=True)
class ArtefactRun:
    """One run of the artefact."""

    trace: str
    batching: str
    slo_ms: float
    requests: int
    published_ratio: float
    published_late: int
    on_time: int
    late: int
    dropped: int
    unanswered: int
    accuracy: float
    """Mean over answers in time."""
    published_accuracy: float
    """Mean over all answers."""
    mean_batch: float
    busy_share: float
    p50_ms: float
    p99_ms: float
    took_s: float

    @property
    def violations(self) -> int:
        """Violations as :class:`~trims_shim.batching.simulator.Report` counts them."""
        return self.late + self.dropped + self.unanswered

    @property
    def ratio(self) -> float:
        """Violations as a share of the trace's requests."""
        return self.violations / self.requests


def known_runs(path: Path = RESULTS) -> list[ArtefactRun]:
    """The runs in the results file; none if there is no file."""
    if not path.exists():
        return []
    return [ArtefactRun(**each) for each in json.loads(path.read_text())["runs"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the missing runs; return 1 without traces."""
    options = _parser().parse_args(arguments)
    try:
        dataset = find_dataset()
    except DataMissing as error:
        print(error, file=sys.stderr)
        return 1
    runs = known_runs(options.output)
    done = {(each.trace, each.batching) for each in runs}
    wanted = [
        (trace, batching)
        for trace in options.traces
        for batching in options.batchings
        if (trace, batching) not in done
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(_run, options, dataset, *each) for each in wanted]
        for future in pending:
            found = future.result()
            runs.append(found)
            write_json(options.output, {"seed": _SEED, "runs": [asdict(each) for each in runs]})
            print(f"{found.trace} {found.batching}: published {found.published_ratio:.4f}, "
                  f"true {found.ratio:.4f}, in {found.took_s:.0f} s", flush=True)  # fmt: skip
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proteus_artefact",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkout", type=Path, required=True, help="of UMass-LIDS/Proteus")
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter that has its needs"
    )
    parser.add_argument("--traces", nargs="+", default=list(_TRACES))
    parser.add_argument("--batchings", nargs="+", choices=BATCHINGS, default=list(BATCHINGS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser


def _run(options: argparse.Namespace, dataset: Dataset, trace: str, batching: str) -> ArtefactRun:
    placement = find_placement(dataset, trace, _SLO_MS)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="proteus-") as name:
        found = _simulated(options, dataset, placement, batching, Path(name))
    took_s = time.monotonic() - started_s
    return _judged(found, placement, batching, len(dataset.requests(trace)), took_s)


def _simulated(
    options: argparse.Namespace,
    dataset: Dataset,
    placement: Placement,
    batching: str,
    directory: Path,
) -> dict[str, Any]:
    for each in ("latency", "per_predictor", "reward", "throughput", "throughput_per_model"):
        (directory / "logs" / each).mkdir(parents=True)
    (directory / "placement.txt").write_text(placement_file(placement, dataset.families))
    config = {
        "profiling_data": str(dataset.directory / "aggregate_profiled.csv"),
        "trace_path": str(dataset.directory / "traces" / placement.trace),
        "allowed_variants": str(dataset.directory / "model_variants"),
        "model_allocation": "clipper",  # means a placement from a file
        "static_allocation": "placement.txt",
        "job_scheduling": "canary_routing",
        "batching": batching,
        "fixed_seed": True,
        "seed": _SEED,
    }
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "log.txt").open("w") as log:
        subprocess.run(
            [options.python, "-c", _DRIVER, "config.json", "result.json"],
            cwd=directory,
            env={"PYTHONPATH": str(options.checkout.resolve()), "PATH": "/usr/bin:/bin"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=True,
        )
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def placement_file(placement: Placement, families: Sequence[str]) -> str:
    """The placement in the format of the artefact's ``clipper_solutions``.

    The artefact's router keeps one weight for each (kind, variant), the last one, and then takes
    any device of these. So every device gets the weight of all devices of its kind and variant.
    """
    names = {
        device: [f"{kind}-{index}" for kind in kinds for index in range(_COUNT)]
        for device, kinds in _KINDS.items()
    }
    required: dict[tuple[str, str], int] = {}
    weights: dict[tuple[str, int], float] = {}
    hosted: dict[tuple[str, str], int] = {}
    for group in placement.groups:
        option = group.option
        taken = [names[option.device].pop(0) for _ in range(group.devices)]
        kinds = [name.rpartition("-")[0] for name in taken]
        for name, kind in zip(taken, kinds, strict=True):
            share = kinds.count(kind) / len(kinds)
            required[option.variant, kind] = kinds.count(kind)
            weights[name, families.index(option.family)] = group.planned_qps * share
            hosted[option.variant, name] = 1
    return f"required_predictors:\n{required!r}\ncanary_dict:\n{weights!r}\nilp_x:\n{hosted!r}\n"


def _judged(
    found: dict[str, Any], placement: Placement, batching: str, requests: int, took_s: float
) -> ArtefactRun:
    latencies = sorted(each[0] for each in found["answers"])
    timely = [accuracy for latency_ms, accuracy in found["answers"] if latency_ms <= _SLO_MS]
    answered = len(latencies)
    devices = sum(group.devices for group in placement.groups)
    counted = answered + found["dropped"]
    return ArtefactRun(
        trace=placement.trace,
        batching=batching,
        slo_ms=_SLO_MS,
        requests=requests,
        published_ratio=(found["dropped"] + found["late"]) / counted,
        published_late=found["late"],
        on_time=len(timely),
        late=answered - len(timely),
        dropped=found["dropped"],
        unanswered=requests - counted,
        accuracy=sum(timely) / len(timely),
        published_accuracy=sum(each[1] for each in found["answers"]) / answered,
        mean_batch=answered / found["batches"],
        busy_share=found["busy_ms"] / (devices * found["clock_ms"]),
        p50_ms=latencies[answered // 2],
        p99_ms=latencies[int(answered * 0.99)],
        took_s=took_s,
    )


if __name__ == "__main__":
    raise SystemExit(main())
