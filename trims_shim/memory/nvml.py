"""NVML's answers: a device's free memory and the driver's version, without a CUDA context.

Owns NVML's initialisation in this process. Devices are found by their id, which is also NVML's UUID
text: indices differ between NVML and CUDA, and between processes. Every answer is None where NVML
or the package nvidia-ml-py is absent or does not know. Answers are figures to show and defaults to
start from, so nothing may depend on them. (The daemon requires the package, but no answers.) What
cannot be initialised is tried again half a minute later: drivers come up after daemons.

A child forked from a process that has used NVML gets None: NVML's locks may be held in it for ever.
The first question blocks for some ms, the others for far less than one. Any thread may ask.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trims_shim.late_imports import ensure_imported
from trims_shim.specs import DeviceId

__all__ = [
    "INSTALL",
    "driver_version",
    "forget",
    "free_bytes",
    "is_installed",
]

INSTALL = 'pip install "trims-shim[cuda13]" (or cuda12)'
"""How to install the package."""

_TRY_AGAIN_S = 30.0
_Answer = TypeVar("_Answer")


def is_installed() -> bool:
    """Whether the package is installed; NVML itself may still be absent."""
    return importlib.util.find_spec("pynvml") is not None


def free_bytes(device: DeviceId) -> int | None:
    """Return the free memory of a GPU or of a MIG instance."""
    return _ask(lambda nvml: _free_bytes(nvml, device))


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, such as ``580.82.07``."""
    return _ask(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def forget() -> None:
    """Make the next question start anew, for a test that has changed the machine."""
    global _process
    _process = _Process(is_forked=False)


def _free_bytes(nvml: Any, device: DeviceId) -> int:
    handle = nvml.nvmlDeviceGetHandleByUUID(device)
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)


def _ask(question: Callable[[Any], _Answer]) -> _Answer | None:
    nvml = _process.open()
    if nvml is None:
        return None
    try:
        return question(nvml)
    except nvml.NVMLError:
        # No such device in this container, or one without memory of its own (NotSupported).
        return None


# --- the process ----------------------------------------------------------------------------------


class _Process:
    """NVML in this process, and whether it may be used."""

    def __init__(self, *, is_forked: bool) -> None:
        self.lock = threading.Lock()
        self.is_used = False
        self.is_forked = is_forked
        self.nvml: Any = None
        self._next_try_s = 0.0

    def open(self) -> Any:
        """Return the module pynvml, initialised; None where that is not possible now."""
        with self.lock:
            now_s = time.monotonic()
            if self.nvml is None and not self.is_forked and now_s >= self._next_try_s:
                self.is_used = True
                self._next_try_s = now_s + _TRY_AGAIN_S
                self.nvml = _initialised()
            return self.nvml


def _initialised() -> Any:
    try:
        ensure_imported("pynvml")
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


_process = _Process(is_forked=False)
_forgotten: list[_Process] = []


def _after_fork_in_child() -> None:
    """Only forget; the old object is kept so that its destructors do not run in the child."""
    global _process
    _forgotten.append(_process)
    _process = _Process(is_forked=_process.is_forked or _process.is_used)


os.register_at_fork(after_in_child=_after_fork_in_child)
