"""Tasks of the GPU benchmark, one per process, with the timed regions.

``python -m benchmarks.gpu_workers TASK JSON FD``, as in :mod:`benchmarks.workers`. The task
``serve`` imports the libraries once and runs each order in a forked child
(:mod:`benchmarks.forking`).

Both sides of a comparison run the same lines here; only the environment and one import differ.
``device`` is ``cuda``, or ``cpu`` in a trial run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import sys
import time
from typing import Any

from benchmarks import forking
from benchmarks.gpu_ways import WAYS, start, wait
from benchmarks.gpu_witness import shared_fraction, weights_sum
from benchmarks.tasks import main, pause

__all__: list[str] = []

Result = dict[str, Any]


# --- tasks ----------------------------------------------------------------------------------------


def cold_start(*, name: str, path: str, how: str, device: str) -> Result:
    """From a ready process to the first output: load a checkpoint and run the model once."""
    import torch

    from benchmarks.gpu_models import SUBJECTS

    begun = time.perf_counter()
    start(device)
    context_s = time.perf_counter() - begun
    load = WAYS[how](name, path, device)
    sample = SUBJECTS[name].sample().to(device)
    if sample.is_floating_point():
        sample = sample.to(SUBJECTS[name].dtype)
    wait(device)
    with torch.no_grad():
        began = time.perf_counter()
        model = load()
        loaded = time.perf_counter()
        output = model(sample)
        wait(device)
        end = time.perf_counter()
    state = model.state_dict()
    return {
        "context_s": context_s,
        "load_s": loaded - began,
        "inference_s": end - loaded,
        "total_s": end - began,
        "checksum": weights_sum(state),
        "output": [float(value) for value in output.double().flatten()[:4]],
        "is_finite": bool(output.isfinite().all()),
        "shared": shared_fraction(state.values(), path, device),
    } | _events()


def _events() -> Result:
    if os.environ.get("TRIMS_ENABLED") != "1":
        return {}
    import trims_shim

    return {"events": trims_shim.stats().events}


def open_tensors(*, path: str, device: str) -> Result:
    """Connect, open, map, and make all tensors of a resident safetensors file; no kernel runs."""
    from safetensors.torch import load_file

    start(device)
    began = time.perf_counter()
    state = load_file(path, device=device)
    end = time.perf_counter()
    shared = shared_fraction(state.values(), path, device)
    return {"total_s": end - began, "tensors": len(state), "shared": shared} | _events()


def open_image(*, path: str, device_id: str, times: int) -> Result:
    """Connect, then map an image again and again with the client library alone."""
    from trims_shim.client import device_arenas
    from trims_shim.client.cache import cache
    from trims_shim.memory.driver import driver

    found = []
    with driver().context(driver().index_of(device_id)):
        for _ in range(times):
            descriptor = os.open(path, os.O_RDONLY)
            began = time.perf_counter()
            arena = cache().open_device(descriptor, name=path, device=device_id)
            found.append(time.perf_counter() - began)
            os.close(descriptor)
            del arena
            device_arenas.reap()
    return {"total_s": found[0], "again_s": found[1:]} | _events()


def rates(*, device_id: str, path: str, size_bytes: int, threads: int) -> Result:
    """The two limits of an upload: reading the cached file, copying from pinned memory."""
    from concurrent.futures import ThreadPoolExecutor

    from trims_shim.memory.driver import driver

    def read(part: int) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        buffer = bytearray(8 << 20)
        done = 0
        for offset in range(part * len(buffer), size_bytes, threads * len(buffer)):
            done += os.preadv(descriptor, [buffer], offset)
        os.close(descriptor)
        return done

    read_s = []
    for _ in range(3):
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(read, range(threads)))
        read_s.append(time.perf_counter() - began)
    copies = _pinned_copies(driver(), device_id, min(size_bytes, 1 << 30))
    return {"read_bytes_per_s": [done / s for s in read_s], "pinned_bytes_per_s": copies}


def engine_rates(*, path: str) -> Result:
    """The copy engine alone, without and with the hash, in a process that has uploaded before."""
    from benchmarks.copying_task import device
    from trims_shim.memory.copying import engine

    size = os.stat(path).st_size
    found: Result = {}
    for name, side in (("engine", "upload, not hashed"), ("hashed", "upload")):
        samples = [device(side, path, is_cached=True, engine=engine()) for _ in range(3)]
        found[f"{name}_bytes_per_s"] = [size / each["seconds"] for each in samples]
    return found


def _pinned_copies(own: Any, device_id: str, size_bytes: int) -> list[float]:
    index = own.index_of(device_id)
    with own.context(index):
        host = own.allocate_pinned(size_bytes)
        device, stream = own.allocate(size_bytes), own.new_stream()
        ctypes.memset(host, 7, size_bytes)
        found = []
        for _ in range(4):
            began = time.perf_counter()
            own.copy_to_device(device, host, size_bytes, stream)
            own.synchronize_stream(stream)
            found.append(size_bytes / (time.perf_counter() - began))
        own.destroy_stream(stream)
        own.free(device)
        own.free_pinned(host)
    return found[1:]


def hold(*, path: str, how: str, device: str, device_id: str) -> None:
    """Get a model when released, and keep it until released again."""
    kept: Any
    if how == "image":
        from trims_shim.client.cache import cache
        from trims_shim.memory.driver import driver

        context = driver().context(driver().index_of(device_id))
        context.__enter__()
        pause({"ready": True})
        descriptor = os.open(path, os.O_RDONLY)
        kept = cache().open_device(descriptor, name=path, device=device_id)
        pause({"address": kept.address})
        return
    from safetensors.torch import load_file

    start(device)
    pause({"ready": True})
    kept = load_file(path, device=device)
    wait(device)
    pause({"shared": shared_fraction(kept.values(), path, device)})


def checkpoint(*, name: str, file_format: str, directory: str, device: str) -> Result:
    """Make a checkpoint if the directory lacks it."""
    from pathlib import Path

    from benchmarks import gpu_models

    path = gpu_models.checkpoint(name, file_format, Path(directory), device=device)
    return {"path": str(path), "size_bytes": path.stat().st_size}


def outline(*, path: str, tensors: int, size_bytes: int) -> Result:
    """Make a safetensors file of float16 zeros that takes no disk: a header, then a hole."""
    numbers = size_bytes // tensors // 2
    header = {
        f"layers.{i}.weight": {
            "dtype": "F16",
            "shape": [numbers],
            "data_offsets": [i * numbers * 2, (i + 1) * numbers * 2],
        }
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + tensors * numbers * 2)
    return {"path": path, "size_bytes": os.stat(path).st_size}


def describe(*, device: str) -> Result:
    """Describe the device and its libraries by torch and the driver's management library."""
    import torch

    facts: Result = {"torch_cuda": torch.version.cuda, "has_cuda": torch.cuda.is_available()}
    if device == "cuda" and facts["has_cuda"]:
        properties = torch.cuda.get_device_properties(0)
        facts["name"] = properties.name
        facts["total_bytes"] = properties.total_memory
        facts["capability"] = f"{properties.major}.{properties.minor}"
        cudnn: Any = torch.backends.cudnn
        facts["cudnn"] = cudnn.version()
    with contextlib.suppress(Exception):  # the figures are useful without it
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
    return facts


def devices() -> Result:
    """The devices whose memory the daemon can share, and the engine that copies to them."""
    from trims_shim.errors import DriverFailure
    from trims_shim.memory.copying import engine
    from trims_shim.memory.driver import driver

    try:
        found = driver().devices()
    except DriverFailure as error:
        return {"devices": [], "reason": str(error)}
    described = [{"id": each.id, "name": each.name, "can_share": each.can_share} for each in found]
    return {"devices": described, "copy_engine": engine()}


_TASKS = (
    cold_start,
    open_tensors,
    open_image,
    rates,
    engine_rates,
    hold,
    checkpoint,
    outline,
    describe,
    devices,
)


def serve() -> None:
    """Import the libraries once, and run the tasks that are ordered."""
    with contextlib.suppress(ImportError):  # tasks that need one of them say what is missing
        import safetensors.torch  # noqa: F401

        import benchmarks.gpu_models  # noqa: F401
    forking.serve({task.__name__: task for task in _TASKS}, int(sys.argv[3]))


if __name__ == "__main__":
    main(*_TASKS, serve)
