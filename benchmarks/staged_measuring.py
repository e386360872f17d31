"""Measure the stages of the serving benchmark's models, for use in the simulator.

    python -m benchmarks.staged_measuring --out DIR                  # a processor; some minutes
    python -m benchmarks.staged_measuring --out DIR --device cuda
    python -m benchmarks.staged_policies --profile DIR/*.json --device narrow --out DIR

Writes a profile for each model, as ``trims stage profile`` does, and prints how much slower a batch
is beside another one: 1 is the simulator's wide device, 2 its narrow one. That is measured with two
threads, each with its own stream on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import results_directory
from trims_shim.batching.drivers.lanes import Lane, lane_of
from trims_shim.batching.profiles.profile_store import machine_text
from trims_shim.batching.staged.profiles.profile_files import SavedStages, save_staged_profile
from trims_shim.batching.staged.profiles.profiling import measure_stages
from trims_shim.batching.torch_settings import without_graph

__all__ = ["main", "slowdown"]

SIZES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (16, 32, 64, 128)
_MODELS = ("bert", "u-net", "vgg")
SIDE_BY_SIDE = (1, 8)
"""Sizes of batches that run side by side."""
_TIMEOUT_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    options = _arguments(arguments)
    # Importing torch takes a second or two, and tests of the simulation do without it.
    from benchmarks.staged_models import make_served

    _set_threads(options.threads)
    for name in options.models:
        served = make_served(name, options.device)
        lane = lane_of(options.device)
        saved = SavedStages(
            {
                length: measure_stages(
                    served.stages,
                    _batches(served, length),
                    options.sizes,
                    clock=time.perf_counter_ns,
                    repeats=options.repeats,
                    lane=lane,
                )
                for length in (LENGTHS if name == "bert" else (None,))
            },
            max(options.sizes),
            name=name,
            machine=machine_text(),
            note=f"measured on {options.device}, {options.threads or 'all'} threads",
        )
        path = options.out / f"staged_profile_{name}.json"
        save_staged_profile(path, saved)
        print(f"{path}: {saved.profile!r}, {saved.diversity}")
        for size in SIDE_BY_SIDE:
            beside = slowdown(served.whole, _batches(served, LENGTHS[-1])(size), options.device)
            print(f"{name}: a batch of {size} beside another takes {beside:.2f} times as long")
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=_MODELS)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda with a number or without")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="of batches")
    parser.add_argument("--repeats", type=int, default=5, help="of each")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 for its own default")
    parser.add_argument(
        "--out", type=results_directory, required=True, help="directory of the profiles"
    )
    return parser.parse_args(arguments)


def _set_threads(count: int) -> None:
    import torch

    if count:
        torch.set_num_threads(count)


def _batches(served: Any, length: int | None) -> Callable[[int], tuple[Any]]:
    """Batches of a size for the first stage; sequences have one length."""
    import torch

    def batch(size: int) -> tuple[Any]:
        item = served.item(0)
        if not isinstance(item, dict):
            return (torch.stack([served.item(number) for number in range(size)]),)
        ids = torch.zeros(size, length or LENGTHS[-1], dtype=torch.long, device=item["ids"].device)
        return ({"ids": ids, "attention_mask": torch.ones_like(ids)},)

    return batch


def slowdown(
    function: Callable[..., Any], arguments: Sequence[Any], device: str, *, rounds: int = 5
) -> float:
    """How many times as long a call takes while another thread makes the same calls.

    The median of ``rounds``; each has some calls alone and as many side by side. Raises
    RuntimeError for a call that takes more than a minute.
    """
    lanes = [lane_of(device), lane_of(device)]
    _many(lanes[0], function, arguments, 1)
    ratios = []
    for _ in range(rounds):
        alone_s = _many(lanes[0], function, arguments, 3)
        ratios.append(_beside(lanes, function, arguments) / alone_s)
    return statistics.median(ratios)


def _beside(lanes: Sequence[Lane], function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """The mean time of two threads that begin and end nearly together."""
    barrier = threading.Barrier(2, timeout=_TIMEOUT_S)
    taken_s: list[float] = []

    def work(lane: Lane) -> None:
        barrier.wait()
        taken_s.append(_many(lane, function, arguments, 3))

    threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    if len(taken_s) < len(threads):
        raise RuntimeError(f"two at once did not end within {_TIMEOUT_S:.0f} s, or failed")
    return statistics.fmean(taken_s)


def _many(lane: Lane, function: Callable[..., Any], arguments: Sequence[Any], count: int) -> float:
    """Seconds of each call."""
    with lane.enter(), without_graph():
        began_s = time.perf_counter()
        for _ in range(count):
            lane.finish(function(*arguments))
        return (time.perf_counter() - began_s) / count


if __name__ == "__main__":
    sys.exit(main())
