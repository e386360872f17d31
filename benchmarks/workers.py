"""Measured tasks, one per fresh process: ``python -m benchmarks.workers TASK JSON FD``.

Owns the timed regions. Both sides of a comparison run the same lines here; the only difference is
that a process with ``TRIMS_ENABLED=1`` imports trims_shim first. Imports of libraries are not
timed. Lazy imports and connections of a library or the shim on its first load are. So is collecting
the garbage of a load; the garbage of the imports is collected before.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.process_memory import areas, areas_holding, is_segment, settle
from benchmarks.tasks import main, pause

if TYPE_CHECKING:
    import torch

__all__ = ["shared_fraction", "touch"]

Result = dict[str, Any]
State = Mapping[str, "torch.Tensor"]
TOUCH_STRIDE_BYTES = 4096
_TOUCHED = 3
"""The byte of each page that is read: a high one, as the low ones of numbers that were converted to
more bits are 0."""


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


def touch(state: State) -> int:
    """Read one byte of every page of every tensor; the sum is the same for equal weights."""
    import numpy as np
    import torch

    total = 0
    for tensor in state.values():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        total += int(data[_TOUCHED::TOUCH_STRIDE_BYTES].sum(dtype=np.int64))
    return total


def _ranges(state: State) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values()]


def shared_fraction(state: State, path: str) -> float:
    """The share of the weights' bytes that lies in a shared segment, as the kernel reports it."""
    total = sum(tensor.nbytes for tensor in state.values())
    held = areas_holding(areas("self"), _ranges(state))
    return sum(inside for area, inside in held if is_segment(area, path)) / total


def load(*, path: str, how: str, settle_bytes: int = 0) -> Result:
    """Load a checkpoint, then read every page of it."""
    import numpy  # noqa: F401

    loader = _loader(how, path)
    settle(settle_bytes)
    gc.collect()
    start = time.perf_counter()
    state = loader()
    loaded = time.perf_counter()
    checksum = touch(state)
    end = time.perf_counter()
    return {
        "load_s": loaded - start,
        "touch_s": end - loaded,
        "total_s": end - start,
        "checksum": checksum,
        "shared": shared_fraction(state, path),
    }


def load_into(*, path: str, how: str, architecture: str) -> Result:
    """Load a checkpoint into a model that is already built."""
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
    return {
        "load_s": loaded - start,
        "load_state_dict_s": end - loaded,
        "total_s": end - start,
        "checksum": touch(model.state_dict()),
        "shared": shared_fraction(model.state_dict(), path),
    }


def hold(*, path: str, how: str) -> None:
    """Load a checkpoint, read every page, and keep it until released."""
    state = _loader(how, path)()
    checksum = touch(state)
    pause(
        {
            "pid": os.getpid(),
            "ranges": _ranges(state),
            "checksum": checksum,
            "shared": shared_fraction(state, path),
        }
    )


def warm(*, path: str) -> Result:
    """Make a file resident in the cache."""
    import trims_shim

    trims_shim.warm(path)
    return {}


def opens(*, path: str, duration_s: float) -> Result:
    """Open and close a resident model again and again, beginning when released."""
    import trims_shim

    trims_shim.open(path).close()
    pause({"ready": True})
    latencies_ns = []
    busy = time.process_time()
    begin = now = time.perf_counter_ns()
    end = begin + int(duration_s * 1e9)
    while now < end:
        trims_shim.open(path).close()
        then, now = now, time.perf_counter_ns()
        latencies_ns.append(now - then)
    return {
        "latencies_ns": latencies_ns,
        "elapsed_s": (now - begin) / 1e9,
        "cpu_s": time.process_time() - busy,
    }


def checkpoint(*, architecture: str, file_format: str) -> Result:
    """Make a checkpoint if the cache of checkpoints lacks it."""
    from benchmarks.models import ensure_checkpoint

    made = ensure_checkpoint(architecture, file_format)
    facts = {"path": str(made.path), "size_bytes": made.size_bytes, "tensors": made.tensors}
    return {"architecture": architecture, "file_format": file_format, **facts}


def segment(*, kind: str, size_bytes: int, path: str) -> Result:
    """Make, map and read one segment."""
    from benchmarks.segment_task import measure

    return measure(kind, size_bytes, path)


if __name__ == "__main__":
    main(load, load_into, hold, warm, opens, checkpoint, segment)
