"""The CUDA driver by ctypes alone: the witness that does not go through the code under test.

For child processes: it retains the primary context of a device and makes it current.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

__all__ = ["Cuda", "CudaError", "why_no_device"]

SUCCESS = 0


class CudaError(Exception):
    """A call failed; ``result`` is its CUresult."""

    def __init__(self, call: str, result: int) -> None:
        super().__init__(f"{call}: CUresult {result}")
        self.result = result


def why_no_device() -> str:
    """Why this machine has no CUDA device; empty when it has one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    count = c_int()
    for call, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (byref(count),))):
        result = getattr(library, call)(*arguments)
        if result != SUCCESS:
            return f"{call}: CUresult {result}"
    return "" if count.value else "the driver shows no device"


class Cuda:
    """One device with its primary context, current in the thread that made this."""

    def __init__(self, index: int = 0) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        device, context = c_int(), c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(device), index)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def result(self, name: str, *arguments: Any) -> int:
        """The CUresult of a call."""
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """A call that has to succeed. Raises CudaError."""
        result = self.result(name, *arguments)
        if result != SUCCESS:
            raise CudaError(name, result)

    def free_bytes(self) -> int:
        """Free memory of the device, whoever uses the rest."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def read(self, address: int, size_bytes: int) -> bytes:
        """Bytes of device memory. Raises CudaError."""
        buffer = ctypes.create_string_buffer(size_bytes)
        self.call("cuMemcpyDtoH_v2", buffer, c_uint64(address), c_size_t(size_bytes))
        return buffer.raw

    def copy_in(self, address: int, data: bytes) -> int:
        """Copy into device memory and wait; the first CUresult that is not success."""
        source = ctypes.create_string_buffer(data, len(data))
        result = self.result("cuMemcpyHtoD_v2", c_uint64(address), source, c_size_t(len(data)))
        return result or self.result("cuCtxSynchronize")

    def fill(self, address: int, value: int, size_bytes: int) -> int:
        """Set device memory and wait; the first CUresult that is not success."""
        size = c_size_t(size_bytes)
        result = self.result("cuMemsetD8_v2", c_uint64(address), ctypes.c_ubyte(value), size)
        return result or self.result("cuCtxSynchronize")
