"""An emulated libcuda.so.1 and libnvidia-ml.so.1: the GPU tier is tested without a GPU.

The code under test loads these libraries as it loads the real ones. "Device"
memory is files on tmpfs that are mapped into the process: an exported allocation is a real
descriptor, access rights are real ``mprotect`` rights, and what a killed process held is freed by
the kernel. It is a test double, strict where the real driver is strict or undefined; nothing that
is measured or proved with it is a statement about a GPU. ``src/emulator.h`` says how it works.

For children::

    variables = emulated_cuda.environment("/dev/shm/mine", devices=2, fail="cuMemCreate:2")
    subprocess.run([...], env=os.environ | variables)
    emulated_cuda.Emulated.of(variables).used_bytes(0)

Inside a test process: the fixture ``emulated_cuda`` of ``tests/conftest.py``. A library cannot be
unloaded, so it stays loaded in that process; without ``TRIMS_TEST_CUDA_DIR`` in the environment it
is a driver that finds no device (``cuInit`` says CUDA_ERROR_NO_DEVICE), which is what the tests
after it would have seen on a machine without a GPU. It refuses a process that has the real one, and
hides the real one from later tests: those that need a GPU run by themselves (``pytest -m gpu``).
"""

from __future__ import annotations

from emulated_cuda.building import NoCompiler, build
from emulated_cuda.machine import (
    DEFAULT_MEMORY_BYTES,
    GRANULARITY,
    Allocation,
    Emulated,
    device_ids,
    environment,
)
from emulated_cuda.process import Held, RealDriver, held, load, reset

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "GRANULARITY",
    "Allocation",
    "Emulated",
    "Held",
    "NoCompiler",
    "RealDriver",
    "build",
    "device_ids",
    "environment",
    "held",
    "load",
    "reset",
]
