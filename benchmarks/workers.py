"""Measured tasks, one per fresh process: ``python -m benchmarks.workers TASK JSON FD``.

Owns the timed regions. Both sides of a comparison run the same lines here; the only difference is
that a process with ``TRIMS_ENABLED=1`` imports trims_shim first. Imports of libraries are not
timed. Lazy imports and connections of a library or the shim on its first load are. So is collecting
the garbage of a load; the garbage of the imports is collected before.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.process_memory import areas, areas_holding, is_segment, settle

if TYPE_CHECKING:
    import torch

__all__: list[str] = []

State = Mapping[str, "torch.Tensor"]
TOUCH_STRIDE_BYTES = 4096


def _emit(descriptor: int, result: Mapping[str, Any]) -> None:
    os.write(descriptor, json.dumps(result).encode() + b"\n")


def _activate() -> None:
    """Import the shim before everything else, as a user's program does."""
    if os.environ.get("TRIMS_ENABLED") == "1":
        import trims_shim  # noqa: F401


def _loader(how: str, path: str) -> Callable[[], State]:
    import torch

    if how == "torch":
        return lambda: torch.load(path)
    if how == "torch-mmap":
        return lambda: torch.load(path, mmap=True)
    if how == "safetensors":
        from safetensors.torch import load_file

        return lambda: load_file(path)
    if how == "transformers":
        from transformers import GPT2Model
        from transformers.utils import logging

        logging.disable_progress_bar()
        return lambda: GPT2Model.from_pretrained(os.path.dirname(path)).state_dict()
    raise ValueError(f"unknown loader {how!r}")


def _touch(state: State) -> int:
    """Read one byte of every page of every tensor; the sum is the same for equal weights."""
    import numpy as np
    import torch

    total = 0
    for tensor in state.values():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        total += int(data[::TOUCH_STRIDE_BYTES].sum(dtype=np.int64))
    return total


def _ranges(state: State) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values()]


def _shared_fraction(state: State, path: str) -> float:
    """The share of the weights' bytes that lies in a shared segment, as the kernel reports it."""
    total = sum(tensor.nbytes for tensor in state.values())
    held = areas_holding(areas("self"), _ranges(state))
    return sum(inside for area, inside in held if is_segment(area, path)) / total


def load(descriptor: int, *, path: str, how: str, settle_bytes: int = 0) -> None:
    """Load a checkpoint, then read every page of it."""
    _activate()
    import numpy  # noqa: F401

    loader = _loader(how, path)
    settle(settle_bytes)
    gc.collect()
    start = time.perf_counter()
    state = loader()
    loaded = time.perf_counter()
    checksum = _touch(state)
    end = time.perf_counter()
    _emit(
        descriptor,
        {
            "load_s": loaded - start,
            "touch_s": end - loaded,
            "total_s": end - start,
            "checksum": checksum,
            "shared": _shared_fraction(state, path),
        },
    )


def load_into(descriptor: int, *, path: str, how: str, architecture: str) -> None:
    """Load a checkpoint into a model that is already built."""
    _activate()
    from benchmarks.models import build

    model = build(architecture)
    loader = _loader(how, path)
    gc.collect()
    start = time.perf_counter()
    state = loader()
    loaded = time.perf_counter()
    model.load_state_dict(state)
    end = time.perf_counter()
    del state
    _emit(
        descriptor,
        {
            "load_s": loaded - start,
            "load_state_dict_s": end - loaded,
            "total_s": end - start,
            "checksum": _touch(model.state_dict()),
            "shared": _shared_fraction(model.state_dict(), path),
        },
    )


def hold(descriptor: int, *, path: str, how: str) -> None:
    """Load a checkpoint, read every page, and keep it until released."""
    _activate()
    state = _loader(how, path)()
    checksum = _touch(state)
    _emit(
        descriptor,
        {
            "pid": os.getpid(),
            "ranges": _ranges(state),
            "checksum": checksum,
            "shared": _shared_fraction(state, path),
        },
    )
    sys.stdin.readline()


def warm(descriptor: int, *, path: str) -> None:
    """Make a file resident in the cache."""
    import trims_shim

    trims_shim.warm(path)
    _emit(descriptor, {})


def opens(descriptor: int, *, path: str, duration_s: float) -> None:
    """Open and close a resident model again and again, beginning when released."""
    import trims_shim

    trims_shim.open(path).close()
    _emit(descriptor, {"ready": True})
    sys.stdin.readline()
    latencies_ns = []
    busy = time.process_time()
    begin = now = time.perf_counter_ns()
    end = begin + int(duration_s * 1e9)
    while now < end:
        trims_shim.open(path).close()
        then, now = now, time.perf_counter_ns()
        latencies_ns.append(now - then)
    _emit(
        descriptor,
        {
            "latencies_ns": latencies_ns,
            "elapsed_s": (now - begin) / 1e9,
            "cpu_s": time.process_time() - busy,
        },
    )


def checkpoint(descriptor: int, *, architecture: str, file_format: str) -> None:
    """Make a checkpoint if the cache of checkpoints lacks it."""
    from benchmarks.models import ensure_checkpoint

    made = ensure_checkpoint(architecture, file_format)
    facts = {"path": str(made.path), "size_bytes": made.size_bytes, "tensors": made.tensors}
    _emit(descriptor, {"architecture": architecture, "file_format": file_format, **facts})


def segment(descriptor: int, *, kind: str, size_bytes: int, path: str) -> None:
    """Make, map and read one segment."""
    from benchmarks.segment_task import measure

    _emit(descriptor, measure(kind, size_bytes, path))


_TASKS: dict[str, Callable[..., None]] = {
    task.__name__: task for task in (load, load_into, hold, warm, opens, checkpoint, segment)
}


def main(arguments: list[str]) -> None:
    """Run one task."""
    task, parameters, descriptor = arguments
    _TASKS[task](int(descriptor), **json.loads(parameters))


if __name__ == "__main__":
    main(sys.argv[1:])
