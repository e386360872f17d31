"""One sample of an ensemble, in a fresh process: ``python -m benchmarks.ensembles_task``.

Owns the clocked regions: from nothing to models that can answer, and answering. Models are real
architectures; their weights come from checkpoints that :mod:`benchmarks.models` keeps.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.process_memory import pss_bytes
from benchmarks.tasks import main

__all__ = ["members"]


def load(architecture: str, device: str) -> Callable[[Any], Any]:
    """A model of an architecture with its checkpoint's weights, as programs load it."""
    import torch

    from benchmarks.models import ARCHITECTURES, ensure_checkpoint

    path = ensure_checkpoint(architecture, "pt").path
    with torch.device("meta"):
        model = ARCHITECTURES[architecture]()
    model.to_empty(device="cpu")
    model.load_state_dict(torch.load(path))
    return torch.inference_mode()(model.eval().forward)


def members(architectures: Sequence[str]) -> list[Any]:
    """The members of an ensemble, named like their architectures."""
    from trims_shim.ensemble import Member

    return [Member(name, functools.partial(load, name)) for name in architectures]


def _images(count: int) -> Any:
    import torch

    return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(1))


def in_turn(
    *, architectures: list[str], images: int, batch_size: int, cores: list[int]
) -> dict[str, Any]:
    """One process that asks one model after the other, as a program without an ensemble does."""
    import torch

    import trims_shim  # noqa: F401

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    batches = _images(images).split(batch_size)
    started_s = time.perf_counter()
    models = [load(name, "cpu") for name in architectures]
    ready_s = time.perf_counter()
    models[0](batches[0])
    begin_s = time.perf_counter()
    for batch in batches:
        torch.stack([model(batch) for model in models]).mean(0)
    taken_s = time.perf_counter() - begin_s
    return {
        "start_s": ready_s - started_s,
        "samples_per_s": images / taken_s,
        "pss_bytes": pss_bytes(os.getpid()),
    }


def ensemble(
    *, architectures: list[str], images: int, devices: list[str], batch_sizes: list[list[int]]
) -> dict[str, Any]:
    """The same by an ensemble."""
    from trims_shim.ensemble import Allocation, Ensemble

    samples = _images(images)
    allocation = Allocation(tuple(map(tuple, batch_sizes)))
    started_s = time.perf_counter()
    with Ensemble(members(architectures), devices=devices, allocation=allocation) as made:
        ready_s = time.perf_counter()
        made.predict(samples[: 2 * max(map(max, batch_sizes))])
        begin_s = time.perf_counter()
        made.predict(samples)
        taken_s = time.perf_counter() - begin_s
        pids = [worker.pid for worker in made.stats().workers if worker.pid is not None]
        memory = sum(map(pss_bytes, pids))
    return {
        "start_s": ready_s - started_s,
        "samples_per_s": images / taken_s,
        "pss_bytes": memory,
    }


def idle(*, batch_size: int, calls: int) -> dict[str, Any]:
    """What a call costs if the member does nothing: seconds of each."""
    import numpy as np

    from trims_shim.ensemble import Allocation, Ensemble, Member

    samples = np.zeros((batch_size, 3, 224, 224), np.float32)
    made = Ensemble(
        [Member("idle", _nothing)], devices=["cpu"], allocation=Allocation(((batch_size,),))
    )
    with made:
        taken_s = []
        for _ in range(calls + 20):
            begin_s = time.perf_counter()
            made.predict(samples)
            taken_s.append(time.perf_counter() - begin_s)
    return {"taken_s": taken_s[20:]}


def _nothing(device: str) -> Callable[[Any], Any]:
    return lambda batch: batch[:, 0, 0, :10]


def problem(*, architectures: list[str], devices: list[str], batch_sizes: list[int]) -> Any:
    """What members need, measured; the path of a problem file."""
    from benchmarks.models import cache_directory
    from trims_shim.ensemble import measure, save_problem

    found = measure(
        members(architectures), _images(4), devices=devices, batch_sizes=batch_sizes, repeats=3
    )
    path = cache_directory() / "ensemble-problem.json"
    save_problem(path, found)
    return {"path": str(path)}


if __name__ == "__main__":
    main(in_turn, ensemble, idle, problem)
