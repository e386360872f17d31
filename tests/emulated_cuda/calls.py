"""The driver calls of the emulator's own tests, through NVIDIA's bindings, with plain values.

NVIDIA's, not the package's own (:mod:`trims_shim.memory.libcuda`): whoever wrote that one wrote the
emulator, and both could be wrong in the same way.

Also imported by the child processes of these tests. Nothing here knows that the driver is emulated.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as api

__all__ = [
    "MIB",
    "CallFailed",
    "api",
    "call",
    "create",
    "export",
    "failure",
    "handle_bytes",
    "handle_of",
    "import_descriptor",
    "mapped",
    "peek",
    "pinned",
    "poke",
    "properties",
    "rights",
    "start",
    "unmapped",
]

MIB = 1 << 20
IPC_HANDLE_BYTES = 64
DESCRIPTOR = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CallFailed(Exception):
    """A driver call said something other than CUDA_SUCCESS; ``result`` is its name."""

    def __init__(self, name: str, result: str) -> None:
        super().__init__(f"{name}: {result}")
        self.result = result


def call(name: str, *arguments: Any) -> Any:
    """A driver call's value; None where it has none."""
    result, *values = getattr(api, name)(*arguments)
    if result != api.CUresult.CUDA_SUCCESS:
        raise CallFailed(name, result.name)
    return values[0] if len(values) == 1 else (values or None)


def failure(name: str, *arguments: Any) -> str:
    """The result of a call that fails, without CUDA_ERROR_."""
    try:
        value = call(name, *arguments)
    except CallFailed as error:
        return error.result.removeprefix("CUDA_ERROR_")
    raise AssertionError(f"{name}{arguments} succeeded: {value}")


def start(ordinal: int = 0) -> Any:
    """cuInit, and a device's primary context as this thread's; the context."""
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", ordinal)
    call("cuCtxSetCurrent", context)
    return context


def properties(ordinal: int = 0) -> Any:
    """Shareable memory of a device."""
    wanted = api.CUmemAllocationProp()
    wanted.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.requestedHandleTypes = DESCRIPTOR
    return wanted


def create(size_bytes: int = 2 * MIB, ordinal: int = 0) -> int:
    """A handle."""
    return int(call("cuMemCreate", size_bytes, properties(ordinal), 0))


def export(handle: int) -> int:
    """A descriptor, the caller's."""
    return int(call("cuMemExportToShareableHandle", handle, DESCRIPTOR, 0))


def import_descriptor(descriptor: int) -> int:
    """A handle; the descriptor stays the caller's."""
    return int(call("cuMemImportFromShareableHandle", descriptor, DESCRIPTOR))


def rights(flags: str, ordinal: int = 0) -> Any:
    """READ, READWRITE or NONE for a device."""
    wanted = api.CUmemAccessDesc()
    wanted.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.flags = getattr(api.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{flags}")
    return wanted


def mapped(handle: int, size_bytes: int = 2 * MIB, flags: str = "READWRITE") -> int:
    """The address of an allocation in a reservation of its own."""
    address = int(call("cuMemAddressReserve", size_bytes, 0, 0, 0))
    call("cuMemMap", address, size_bytes, 0, handle, 0)
    call("cuMemSetAccess", address, size_bytes, [rights(flags)], 1)
    return address


def unmapped(address: int, size_bytes: int = 2 * MIB) -> None:
    """Undo :func:`mapped`."""
    call("cuMemUnmap", address, size_bytes)
    call("cuMemAddressFree", address, size_bytes)


def handle_bytes(handle: Any) -> bytes:
    """An IPC handle, to be sent."""
    return ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES)


def handle_of(data: bytes) -> Any:
    """The IPC handle that was sent."""
    handle = api.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), data, IPC_HANDLE_BYTES)
    return handle


def pinned(size_bytes: int) -> int:
    """The address of pinned host memory."""
    return int(call("cuMemHostAlloc", size_bytes, 0))


def peek(address: int, size_bytes: int = 1) -> bytes:
    """Memory, as the CPU sees it: what a kernel on the device would read."""
    return ctypes.string_at(address, size_bytes)


def poke(address: int, data: bytes) -> None:
    """Write memory by the CPU, as a kernel would."""
    ctypes.memmove(address, data, len(data))
