"""Host memory in the place of a device's, for tests of onnxruntime's CUDA provider without CUDA.

Everything is as on a device but two things: memory is described as the host's, and sessions are of
the CPU provider. On the emulated driver a process can read device memory, so sessions run on it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from onnx_models import Sample

from trims_shim.daemon.preparer import optimising
from trims_shim.daemon.preparer.cuda import CudaSessions
from trims_shim.daemon.preparer.installation import installation
from trims_shim.memory import dlpack
from trims_shim.patches import onnxruntime_cuda
from trims_shim.specs import PREPARED_MODEL
from trims_shim.wire.messages import SessionRecipe

__all__ = ["CPU", "HostRuntime", "HostSessions", "prepare", "recipe"]

CPU = "CPUExecutionProvider"


def recipe(**fields: Any) -> SessionRecipe:
    """Of a session with the defaults, in the installed onnxruntime."""
    found = installation()
    fields = {"providers": ((CPU,),), "level": "ORT_ENABLE_ALL", **fields}
    return SessionRecipe(runtime=found.runtime, build=found.build, **fields)


class HostSessions(CudaSessions):
    """Sessions of the preparer."""

    provider = CPU
    device_type = dlpack.DeviceType.CPU

    def index_of(self, provider: tuple[str, ...]) -> int:
        return 0

    def prepare_libraries(self) -> None:
        pass

    def put(self, data: memoryview) -> tuple[int, object]:
        array = np.array(data, np.uint8)
        return array.ctypes.data, array


class HostRuntime(onnxruntime_cuda.Runtime):
    """Sessions of a client, all on one device."""

    provider = CPU
    device_type = dlpack.DeviceType.CPU

    def __init__(self, device: str) -> None:
        self.device = device

    def device_of(self, provider: tuple[str, ...]) -> str:
        return self.device


def prepare(sample: Sample, directory: str | os.PathLike[str], **fields: Any) -> str:
    """The prepared model of a sample, as for a device; the path of its graph."""
    directory = os.fspath(directory)
    os.makedirs(directory, exist_ok=True)
    source = os.path.join(directory, "source.onnx")
    with open(source, "wb") as file:
        file.write(sample.content)
    sessions = HostSessions(recipe(**fields))
    sessions.save(source, directory, is_packed=True)
    optimising.place(directory)
    sessions.complete(directory)
    return os.path.join(directory, PREPARED_MODEL)
