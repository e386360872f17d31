"""The emulated libraries inside this process.

They are loaded by their absolute path before anybody first asks for ``libcuda.so.1``; the
loader then finds them by that name (their SONAME). They cannot be unloaded, only be reset.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from emulated_cuda.building import build

__all__ = ["Held", "RealDriver", "held", "load", "reset"]

_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


class RealDriver(Exception):
    """This process has loaded the real driver; the emulated one would never be asked."""


@dataclass(frozen=True)
class Held:
    """What this process holds of the emulated driver; field by field struct held of process.c."""

    handles: int
    mappings: int
    reservations: int
    linear: int
    imported: int
    pinned: int
    streams: int
    events: int
    contexts: int


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in Held.__dataclass_fields__)


def load() -> None:
    """Load both libraries for every later user in this process.

    Raises NoCompiler, and RealDriver when NVIDIA's driver is there already.
    """
    _libraries()


def held() -> Held:
    """What is not yet given back."""
    counts = _Counts()
    _libraries()[0].trims_test_cuda_held(ctypes.byref(counts))
    return Held(*(getattr(counts, name) for name in Held.__dataclass_fields__))


def reset() -> None:
    """Forget everything, so that the next cuInit and nvmlInit read the environment again.

    Handles are closed; what is mapped stays mapped (it may still be pointed to) until the process
    ends. Waits for the streams.
    """
    driver, nvml = _libraries()
    driver.trims_test_cuda_reset()
    nvml.trims_test_nvml_reset()


@cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    directory = str(build())
    maps = Path("/proc/self/maps").read_text().splitlines()
    real = {path for line in maps if "/libcuda.so" in (path := line.split()[-1])}
    if any(not path.startswith(directory) for path in real):
        raise RealDriver(f"this process has loaded {', '.join(sorted(real))}")
    driver, nvml = (ctypes.CDLL(f"{directory}/{name}", os.RTLD_GLOBAL) for name in _NAMES)
    return driver, nvml
