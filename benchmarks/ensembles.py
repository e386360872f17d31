"""Ensembles: how good allocations are, what workers gain, and what sharing their weights gains.

``python -m benchmarks.ensembles`` takes about ten minutes and writes
``docs/results/ensembles.json`` and ``ensembles.md``. Searches are compared on made-up problems by
estimated throughput. Everything else is measured: fresh processes, alternating rounds. Each core of
this machine is a device.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from benchmarks.harness import (
    Worker,
    alternate,
    argument_parser,
    daemon,
    describe_machine,
    rounded,
    write_json,
)
from benchmarks.models import ensure_checkpoint
from benchmarks.rendering import markdown_table
from trims_shim.batching import LatencyProfile
from trims_shim.ensemble import (
    Allocation,
    Device,
    Footprint,
    MemberProfile,
    Problem,
    bounded_greedy,
    load_problem,
    optimise,
    throughput,
    worst_fit_decreasing,
)

__all__ = ["main"]

_ARCHITECTURES = ("mobilenet", "resnet18", "resnet50")
_SHARED = ("vgg16", "resnet50")
_BATCH_SIZES = (1, 2, 4, 8, 16)
_IMAGES = 48
_TASK_S = 600.0
_GB = 1_000_000_000
_SHAPES = ((4, 4), (4, 12), (8, 12), (16, 12), (8, 36))
"""Devices and members, as in the paper's tables."""
_PROBLEMS = 2
_MANY_TRIES = 30_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each part, and write what there is after it."""
    parser = argument_parser("ensembles", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    for name in {*_ARCHITECTURES, *_SHARED}:
        ensure_checkpoint(name, "pt")
    parts: dict[str, Callable[[], Any]] = {
        "search": lambda: [_searched(*shape) for shape in _SHAPES],
        "throughput": lambda: _throughputs(options.rounds),
        "sharing": lambda: _sharing(options.rounds),
        "overhead": lambda: _overhead(options.rounds),
    }
    content: dict[str, Any] = {"machine": describe_machine()}
    for name, measure in parts.items():
        content[name] = measure()
        write_json(options.output / "ensembles.json", rounded(content, 4))
    (options.output / "ensembles.md").write_text(_markdown(content))
    return 0


def _task(name: str, environment: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    module = "benchmarks.ensembles_task"
    with Worker(name, module=module, environment=environment, **arguments) as worker:
        return worker.result(_TASK_S)


# --- searches, by estimates -----------------------------------------------------------------------


def _made_up(devices: int, members: int, random: Random) -> Problem:
    """Members like image classifiers on GPUs: seconds and gigabytes over an order of magnitude."""
    profiles = {}
    for number in range(members):
        footprint = Footprint(
            round(random.uniform(0.05, 0.6) * _GB), round(0.6 * _GB), round(0.02 * _GB)
        )
        line = LatencyProfile.linear(
            random.uniform(0.5, 6), random.uniform(3, 30), max_batch_size=128
        )
        profiles[f"m{number}"] = MemberProfile({"gpu": footprint}, {"gpu": line})
    return Problem([Device(f"gpu:{n}", 16 * _GB) for n in range(devices)], profiles)


def _searched(devices: int, members: int) -> dict[str, Any]:
    """Samples per second of each search, as a share of the best that many more tries find."""
    searches: dict[str, Callable[[Problem], Allocation]] = {
        "worst fit": worst_fit_decreasing,
        "bounded greedy": _greedy,
        "optimise": optimise,
    }
    shares: dict[str, list[float]] = {name: [] for name in searches}
    taken_s: dict[str, list[float]] = {name: [] for name in searches}
    for seed in range(_PROBLEMS):
        problem = _made_up(devices, members, Random(seed))
        best = throughput(problem, optimise(problem, random=Random(2), tries=_MANY_TRIES))
        for name, search in searches.items():
            started_s = time.perf_counter()
            found = search(problem)
            taken_s[name].append(time.perf_counter() - started_s)
            shares[name].append(throughput(problem, found) / best)
    print(devices, members, shares, flush=True)
    return {
        "devices": devices,
        "members": members,
        "share_of_best": {name: statistics.mean(each) for name, each in shares.items()},
        "taken_s": {name: statistics.median(each) for name, each in taken_s.items()},
    }


def _greedy(problem: Problem) -> Allocation:
    return bounded_greedy(problem, lambda each: throughput(problem, each), random=Random(1))


# --- this machine ---------------------------------------------------------------------------------


def _devices() -> list[str]:
    return [f"cpu:{core}" for core in sorted(os.sched_getaffinity(0))]


def _throughputs(rounds: int) -> dict[str, Any]:
    with daemon() as private:
        made = _task(
            "problem",
            private.environment,
            architectures=_ARCHITECTURES,
            devices=_devices(),
            batch_sizes=[8, *(size for size in _BATCH_SIZES if size != 8)],
        )
        problem = load_problem(made["path"])
        allocations = {"worst fit": worst_fit_decreasing(problem), "optimise": optimise(problem)}
        common = {"architectures": _ARCHITECTURES, "images": _IMAGES}
        cores = sorted(os.sched_getaffinity(0))
        sides: dict[str, Callable[[], Any]] = {
            f"in turn, batches of {size}": partial(
                _task, "in_turn", private.environment, **common, batch_size=size, cores=cores
            )
            for size in (1, 8)
        }
        for name, allocation in allocations.items():
            sides[name] = partial(
                _task,
                "ensemble",
                private.environment,
                **common,
                devices=_devices(),
                batch_sizes=allocation.batch_sizes,
            )
        results = alternate(sides, rounds)
    print(results, flush=True)
    return {
        "members": _ARCHITECTURES,
        "images": _IMAGES,
        "alone_ns": {
            name: {size: profile.latencies["cpu"].taken_ns(size) for size in problem.batch_sizes}
            for name, profile in problem.members.items()
        },
        "allocations": {
            name: {
                "batch_sizes": allocation.batch_sizes,
                "estimated_per_s": throughput(problem, allocation),
            }
            for name, allocation in allocations.items()
        },
        "samples_per_s": {
            name: [each["samples_per_s"] for each in found] for name, found in results.items()
        },
    }


def _sharing(rounds: int) -> dict[str, Any]:
    """Two workers of each member: their start and memory, with the cache warm and without it."""
    ensemble = partial(
        _task,
        "ensemble",
        architectures=_SHARED,
        images=8,
        devices=_devices(),
        batch_sizes=[[4] * len(_SHARED)] * len(_devices()),
    )
    with daemon() as private:
        ensemble(environment=private.environment)
        results = alternate(
            {
                "without": partial(ensemble, environment={"TRIMS_ENABLED": "0"}),
                "shared": partial(ensemble, environment=private.environment),
            },
            rounds,
            warmups=1,
        )
    print(results, flush=True)
    return {
        "members": _SHARED,
        "workers": len(_SHARED) * len(_devices()),
        "checkpoint_bytes": [ensure_checkpoint(name, "pt").size_bytes for name in _SHARED],
        **results,
    }


def _overhead(rounds: int) -> dict[str, Any]:
    """A member alone against the same model in one process, and members that do nothing."""
    core = min(os.sched_getaffinity(0))
    common = {"architectures": ["mobilenet"], "images": _IMAGES}
    with daemon() as private:
        results = alternate(
            {
                "direct": partial(
                    _task, "in_turn", private.environment, **common, batch_size=8, cores=[core]
                ),
                "ensemble": partial(
                    _task,
                    "ensemble",
                    private.environment,
                    **common,
                    devices=[f"cpu:{core}"],
                    batch_sizes=[[8]],
                ),
            },
            rounds,
            warmups=1,
        )
    idle = {
        size: statistics.median(_task("idle", batch_size=size, calls=200)["taken_s"])
        for size in (1, 8, 64)
    }
    print(results, idle, flush=True)
    return {
        "direct_per_s": [each["samples_per_s"] for each in results["direct"]],
        "ensemble_per_s": [each["samples_per_s"] for each in results["ensemble"]],
        "idle_call_s": idle,
    }


# --- words ----------------------------------------------------------------------------------------


def _markdown(content: Mapping[str, Any]) -> str:
    parts = [
        "Written by `python -m benchmarks.ensembles`.",
        "",
        "**Searches** (made-up members on equal GPUs, by estimates): samples per second as a share "
        "of the best that many more tries find; time of the search",
        "",
        *_search_rows(content["search"]),
        "",
        "**Throughput** on two cores, each of which is a device: samples per second, medians "
        "(smallest to largest); members " + ", ".join(content["throughput"]["members"]),
        "",
        *_throughput_rows(content["throughput"]),
        "",
        "**Sharing**: "
        f"{content['sharing']['workers']} workers, two of each of "
        + ", ".join(content["sharing"]["members"]),
        "",
        *_sharing_rows(content["sharing"]),
        "",
        "**Overhead**",
        "",
        *_overhead_rows(content["overhead"]),
    ]
    return "\n".join(parts) + "\n"


def _search_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(rows[0]["share_of_best"])
    cells = [
        [
            *(str(row["devices"]), str(row["members"])),
            *(f"{row['share_of_best'][name]:.1%}, {row['taken_s'][name]:.2g} s" for name in names),
        ]
        for row in rows
    ]
    return markdown_table(["devices", "members", *names], cells, texts=0)


def _throughput_rows(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, rates in found["samples_per_s"].items():
        planned = found["allocations"].get(name)
        estimated = f"{planned['estimated_per_s']:.1f}" if planned else ""
        matrix = str([list(row) for row in planned["batch_sizes"]]) if planned else "one process"
        rows.append([name, _median(rates), estimated, matrix])
    return markdown_table(["", "measured", "estimated", "allocation"], rows)


def _sharing_rows(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in ("without", "shared"):
        starts = [each["start_s"] for each in found[name]]
        memory = [each["pss_bytes"] / _GB for each in found[name]]
        rows.append([name, f"{_median(starts)} s", f"{_median(memory)} GB"])
    return markdown_table(["", "start", "memory of all workers"], rows)


def _overhead_rows(found: Mapping[str, Any]) -> list[str]:
    ratios = [
        ensemble / direct
        for ensemble, direct in zip(found["ensemble_per_s"], found["direct_per_s"], strict=True)
    ]
    rows = [["throughput of one member, against the same loop in one process", _median(ratios)]]
    rows += [
        [f"a call with {size} images, of a member that does nothing", f"{taken_s * 1e3:.2f} ms"]
        for size, taken_s in found["idle_call_s"].items()
    ]
    return markdown_table(["", ""], rows)


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    raise SystemExit(main())
