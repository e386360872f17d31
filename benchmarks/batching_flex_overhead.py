"""What exit points and preemption cost on a model that really runs.

    python -m benchmarks.batching_flex_overhead             # about a minute, on a quiet machine
    python -m benchmarks.batching_flex_overhead --device cuda:0

*Execution delay* compares a batch through a model in several stages with the same model in one
call, alternating. *Preemption* gives a long model up again and again for bursts of a short one, and
takes the time from the decision until the device is free. Writes
``docs/results/batching_flex_overhead.json``. The model is a stack of linear layers on one processor
thread, so that stages take equally long.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import argument_parser, write_json
from trims_shim.batching.drivers.lanes import CpuLane, lane_of
from trims_shim.batching.drivers.replies import BlockedCall, Entry
from trims_shim.batching.flex.batcher import FlexBatcher
from trims_shim.batching.flex.exit_points import ExitPoints
from trims_shim.batching.flex.models import FlexFunctions

NAME = "batching_flex_overhead"
LAYERS, BATCH = 16, 8
WIDTHS = {"cpu": 1024, "cuda": 8192}
"""Wide enough for a device to compute longer than Python takes to tell it what."""
STAGES = (1, 2, 4, 8, 16)
ROUNDS = 60
BURSTS = 40


def main() -> None:
    """Measure, print, write."""
    parser = argument_parser(NAME, __doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0")
    parser.add_argument("--name", default=NAME, help="name of the result file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = arguments.device
    with torch.inference_mode():
        found = {
            "device": device,
            "torch": torch.__version__,
            "model": f"{LAYERS} x Linear({width(device)}, {width(device)}), batch {BATCH}",
            "exit_point_us": exit_point_us(),
            "execution_delay": execution_delay(device),
            "preemption": [preemption(device, stages) for stages in STAGES[1:]],
        }
    print(json.dumps(found, indent=1))
    write_json(arguments.output / f"{arguments.name}.json", found)


def width(device: str) -> int:
    """Features of a layer."""
    return WIDTHS[device.partition(":")[0]]


def layers(device: str, count: int = LAYERS) -> list[torch.nn.Module]:
    """Some equal layers."""
    return [torch.nn.Linear(width(device), width(device), device=device) for _ in range(count)]


def row(device: str) -> torch.Tensor:
    """An item."""
    return torch.randn(width(device), device=device)


def in_stages(modules: list[torch.nn.Module], stages: int) -> list[Callable[..., Any]]:
    """Cut the layers into stages, each of which runs without gradients in any thread."""
    size = len(modules) // stages

    def stage(number: int) -> Callable[..., Any]:
        whole = torch.nn.Sequential(*modules[number * size : (number + 1) * size])

        def run(batch: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return whole(batch)  # type: ignore[no-any-return]

        return run

    return [stage(number) for number in range(stages)]


def exit_point_us() -> float:
    """Microseconds that one exit point takes on a processor, between stages that do nothing."""
    points = ExitPoints(lambda: False, CpuLane(), time.monotonic_ns)
    number = 100_000
    began_s = time.perf_counter()
    for _ in range(number):
        points.check()
    return (time.perf_counter() - began_s) / number * 1e6


def execution_delay(device: str) -> list[dict[str, float]]:
    """By number of stages, how much longer a batch takes than in one call without exit points."""
    modules = layers(device)
    entries = [Entry((row(device),), BlockedCall(), 0, "m") for _ in range(BATCH)]

    def staged(stages: int) -> Callable[[], object]:
        functions = _functions(device, in_stages(modules, stages))

        def run() -> object:
            points = ExitPoints(lambda: False, functions.lanes[0], time.monotonic_ns)
            return functions.run_staged(entries, 0, points)

        return run

    plain = _functions(device, in_stages(modules, 1))

    ways: dict[int, Callable[[], object]] = {0: lambda: plain.run(entries)}
    ways |= {stages: staged(stages) for stages in STAGES}
    taken: dict[int, list[float]] = {stages: [] for stages in ways}
    for turn in range(ROUNDS + 5):
        for stages, run in ways.items():
            began_s = time.perf_counter()
            run()
            if turn >= 5:
                taken[stages].append(time.perf_counter() - began_s)
    base = taken[0]
    return [
        {
            "stages": stages,
            "median_ms": statistics.median(taken[stages]) * 1e3,
            "ratio": statistics.median(
                own / other for own, other in zip(taken[stages], base, strict=True)
            ),
        }
        for stages in STAGES
    ]


def _functions(device: str, stages: list[Callable[..., Any]]) -> FlexFunctions:
    return FlexFunctions(
        {"m": stages},
        devices=[device],
        lanes=[lane_of(device)],
        collate="auto",
        isolate_failures=True,
        name="overhead",
    )


def preemption(device: str, stages: int) -> dict[str, float]:
    """Give a long model up for bursts of a short one that cannot wait for its end."""
    repeats = 8
    long = in_stages([each for _ in range(repeats) for each in layers(device)], stages)
    batcher = FlexBatcher(
        {"long": long, "short": in_stages(layers(device, 1), 1)},
        max_batch_size=16,
        devices=[device],
        caller_runs=False,
    )
    item = row(device)
    with batcher:
        long_ms = batcher.warm("long", item).latency_ns(1) / 1e6
        short_ms = batcher.warm("short", item).latency_ns(8) / 1e6
        for _ in range(BURSTS):
            slow = batcher.submit("long", item, deadline_ms=100 * long_ms)
            time.sleep(0.2 * long_ms / 1e3)
            deadline_ms = (0.7 * long_ms) + short_ms
            burst = [batcher.submit("short", item, deadline_ms=deadline_ms) for _ in range(8)]
            for each in burst:
                each.exception()
            slow.result()
        found, stats = batcher.preemption_stats(), batcher.stats()
    return {
        "stages": stages,
        "long_batch_ms": long_ms,
        "stage_ms": long_ms / stages,
        "bursts": BURSTS,
        "preemptions": found.preemptions,
        "stop_p50_ms": found.stop_p50_ms,
        "stop_p99_ms": found.stop_p99_ms,
        "short_in_time": stats.answered - BURSTS - stats.late,
        "of": 8 * BURSTS,
    }


if __name__ == "__main__":
    main()
