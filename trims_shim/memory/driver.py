"""The CUDA driver, as far as this package uses it: the one place in Python that calls it.

Owns ``cuInit``, the primary contexts that this process has retained, and the translation of failed
results into :class:`~trims_shim.errors.DriverFailure`. Callers own the objects it creates: handles,
addresses, streams and descriptors are plain integers, as finalizers and packets need them.

Invariants: nothing is loaded before the first :func:`driver`. A process has one :class:`Driver`; in
a forked child every call raises and none reaches CUDA, which does not survive a fork. ``devices``,
``peers``, ``granularity``, ``create``, ``export``, ``import_descriptor`` and ``release`` need no
context, so a daemon that keeps to them never takes device memory for one. Any thread may call;
calls block without the GIL. Nothing here runs at interpreter exit.

Source: CUDA Driver API (docs.nvidia.com/cuda/cuda-driver-api), "Virtual Memory Management"; through
:mod:`trims_shim.memory.libcuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trims_shim.errors import DriverFailure
from trims_shim.memory import libcuda
from trims_shim.specs import DeviceId

__all__ = [
    "IPC_HANDLE_BYTES",
    "OUT_OF_MEMORY",
    "RESERVATION_ALIGNMENT_BYTES",
    "DeviceInfo",
    "Driver",
    "Word",
    "driver",
    "forget",
]

RESERVATION_ALIGNMENT_BYTES = 2 << 20
"""The device's page size; torch and GMS reserve at it too. The granularity is a multiple of it."""
IPC_HANDLE_BYTES = libcuda.CU_IPC_HANDLE_SIZE
Word = ctypes.c_uint64
"""A handle or an address that a caller holds before the call that makes it, as ``into``: a signal
handler may raise right after that call, and what it returns would be lost."""
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
"""A :attr:`DriverFailure.result` that may pass: a later try can succeed."""

_FORKED = (
    "this process was forked from one that uses the CUDA driver, which cannot be used here; start "
    "it by spawn (multiprocessing.set_start_method('spawn')) to have device memory shared"
)
_LOST = (
    "the process's CUDA context is lost (a write to shared read-only weights ends like this); "
    "restart it"
)
_ADVICE = {
    OUT_OF_MEMORY: "free device memory or lower TRIMS_DEVICE_BYTES",
    "CUDA_ERROR_NO_DEVICE": "look at CUDA_VISIBLE_DEVICES and `nvidia-smi -L`",
    "CUDA_ERROR_NOT_INITIALIZED": _FORKED,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda.so and the kernel's driver differ; reboot",
    "CUDA_ERROR_NOT_SUPPORTED": "set TRIMS_DEVICE_BACKEND=ipc, or TRIMS_DEVICE=0",
    "CUDA_ERROR_NOT_PERMITTED": "set TRIMS_DEVICE_BACKEND=ipc, or TRIMS_DEVICE=0",
    "CUDA_ERROR_OPERATING_SYSTEM": "look at `ulimit -n` and the container's devices",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "wait until no CUDA graph is captured",
}
_OTHERWISE = "look at `nvidia-smi`; TRIMS_DEVICE=0 keeps this package off the device"
_DESCRIPTOR = libcuda.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device this process may use. ``index`` is CUDA's number in this process, and torch's.

    ``can_share``: its memory can be exported as a descriptor. ``is_exclusive``: no second process
    can have a context on it.
    """

    index: int
    id: DeviceId
    name: str
    total_bytes: int
    can_share: bool
    is_exclusive: bool


class Driver:
    """An initialised driver. Every method may raise DriverFailure with the call and the reason."""

    __slots__ = ("_contexts", "_devices", "_granularities", "_library", "_lock", "_pid")

    def __init__(self) -> None:
        """Load and initialise the driver."""
        self._library = libcuda.Library()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._contexts: dict[int, int] = {}
        self._granularities: dict[int, int] = {}
        self._devices: tuple[DeviceInfo, ...] | None = None
        self._call("cuInit", 0)

    # --- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Return the devices in CUDA_VISIBLE_DEVICES, in CUDA's order; at least one."""
        if self._devices is None:
            count = self._number("cuDeviceGetCount")
            self._devices = tuple(self._describe(index) for index in range(count))
        return self._devices

    def index_of(self, device: DeviceId) -> int:
        """Return this process's number of a device."""
        for each in self.devices():
            if each.id == device:
                return each.index
        seen = ", ".join(each.id for each in self.devices())
        raise DriverFailure(
            f"this process does not see the device {device}; CUDA_VISIBLE_DEVICES shows it: {seen}"
        )

    def peers(self, index: int) -> dict[DeviceId, int]:
        """Return the devices whose memory this one reads directly, each with its link's rank.

        Rank 0 is the fastest (docs: CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK). MIG instances have
        none.
        """
        one = self._number("cuDeviceGet", index)
        found = {}
        for each in self.devices():
            if each.index == index:
                continue
            other = self._number("cuDeviceGet", each.index)
            kind = libcuda.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
            if self._number("cuDeviceGetP2PAttribute", kind, one, other):
                kind = libcuda.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
                found[each.id] = self._number("cuDeviceGetP2PAttribute", kind, one, other)
        return found

    def granularity(self, index: int) -> int:
        """Return the unit of allocations: sizes and mapped addresses are multiples of it."""
        if index not in self._granularities:
            kind = libcuda.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            size = self._number("cuMemGetAllocationGranularity", _properties(index), kind)
            self._granularities[index] = size
        return self._granularities[index]

    # --- physical memory that can be shared -------------------------------------------------------

    def create(self, index: int, size_bytes: int) -> int:
        """Return a handle of new physical memory; ``size_bytes``: a multiple of the granularity."""
        of = f"{size_bytes} bytes on device {index}"
        return self._number("cuMemCreate", size_bytes, _properties(index), 0, of=of)

    def export(self, handle: int) -> int:
        """Return a descriptor, close-on-exec; it holds the memory as the handle does."""
        descriptor = self._number("cuMemExportToShareableHandle", handle, _DESCRIPTOR, 0)
        os.set_inheritable(descriptor, False)
        return descriptor

    def import_descriptor(self, descriptor: int, *, into: Word | None = None) -> int:
        """Return a handle of a descriptor's memory; the caller keeps or closes the descriptor."""
        return self._number("cuMemImportFromShareableHandle", descriptor, _DESCRIPTOR, into=into)

    def release(self, handle: int) -> None:
        """Give up a handle. The memory goes with its last handle, mapping and descriptor."""
        self._call("cuMemRelease", handle)

    # --- address space ----------------------------------------------------------------------------

    def reserve(self, size_bytes: int, *, into: Word | None = None) -> int:
        """Reserve a range of addresses; ``size_bytes``: a multiple of the granularity."""
        arguments = (size_bytes, RESERVATION_ALIGNMENT_BYTES, 0, 0)
        return self._number("cuMemAddressReserve", *arguments, of=f"{size_bytes} bytes", into=into)

    def free_address(self, address: int, size_bytes: int) -> None:
        """Give back a whole reservation, in which nothing may be mapped."""
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Map a whole allocation into a reservation; no access until :meth:`set_access`."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0, of=f"{size_bytes} bytes")

    def unmap(self, address: int, size_bytes: int) -> None:
        """Remove the mapping of exactly one :meth:`map`. Does not wait for work that uses it."""
        self._call("cuMemUnmap", address, size_bytes)

    def set_access(self, address: int, size_bytes: int, index: int, *, is_writable: bool) -> None:
        """Let a device read, or also write, a range mapped without gaps."""
        rights = (
            libcuda.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if is_writable
            else libcuda.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        access = libcuda.CUmemAccessDesc(_location(index), rights)
        self._call("cuMemSetAccess", address, size_bytes, access, 1)

    # --- contexts and streams ---------------------------------------------------------------------

    @contextlib.contextmanager
    def context(self, index: int) -> Iterator[None]:
        """Make a device's primary context (the one torch uses) current inside the block.

        The first use retains it, and creates it if the process has none: then it costs some hundred
        MB of device memory until the process ends.
        """
        primary = self._primary(index)
        before = self._number("cuCtxGetCurrent")
        # Not pushed and popped: whether a call that a signal handler interrupted was made does not
        # show, and the wrong context would be popped, or ours left.
        try:
            self._call("cuCtxSetCurrent", primary)
            yield
        finally:
            self._restore("cuCtxSetCurrent", before)

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Let this thread call functions that a CUDA graph cannot contain, inside the block.

        Otherwise such a call in any thread invalidates another thread's running capture (docs:
        cuThreadExchangeStreamCaptureMode; the default mode is global).
        """
        mode = ctypes.c_int(libcuda.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            self._call("cuThreadExchangeStreamCaptureMode", mode)
            yield
        finally:
            if mode.value != libcuda.CU_STREAM_CAPTURE_MODE_RELAXED:  # else it is as it was
                self._restore("cuThreadExchangeStreamCaptureMode", mode)

    def synchronize(self, index: int) -> None:
        """Wait for all work that this process has given to a device.

        While a CUDA graph is captured on the device, CUDA refuses to wait (``DriverFailure.result``
        is CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; the work may still run). Reports differ on whether
        the capture survives, so do not call this during captures that you know of.
        """
        with self.relaxed_capture(), self.context(index):
            self._call("cuCtxSynchronize")

    def new_stream(self) -> int:
        """Return a stream of the current context that does not wait for the default stream."""
        return self._number("cuStreamCreate", libcuda.CU_STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """Give up a stream; its queued work still runs."""
        self._call("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int) -> None:
        """Wait for a stream's queued work."""
        self._call("cuStreamSynchronize", stream)

    # --- copies, in the current context -----------------------------------------------------------

    def copy_to_device(self, address: int, host_address: int, size_bytes: int, stream: int) -> None:
        """Start a copy. Only from pinned memory can it go on after the call returns."""
        self._call("cuMemcpyHtoDAsync", address, host_address, size_bytes, stream)

    def copy_to_host(self, host_address: int, address: int, size_bytes: int, stream: int) -> None:
        """Start a copy. Only to pinned memory can it go on after the call returns."""
        self._call("cuMemcpyDtoHAsync", host_address, address, size_bytes, stream)

    def copy_on_device(self, address: int, source: int, size_bytes: int, stream: int) -> None:
        """Start a copy between addresses that the context's device may access, also a peer's."""
        self._call("cuMemcpyDtoDAsync", address, source, size_bytes, stream)

    def clear(self, address: int, size_bytes: int, stream: int) -> None:
        """Start to fill memory with zeros."""
        self._call("cuMemsetD8Async", address, 0, size_bytes, stream)

    def allocate_pinned(self, size_bytes: int) -> int:
        """Return the address of host memory that the device reads and writes directly."""
        return self._number("cuMemHostAlloc", size_bytes, 0, of=f"{size_bytes} bytes")

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""
        self._call("cuMemFreeHost", address)

    # --- legacy sharing, in the current context ---------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        """Return the address of ordinary device memory; only :meth:`ipc_handle` shares it."""
        return self._number("cuMemAlloc", size_bytes, of=f"{size_bytes} bytes")

    def free(self, address: int) -> None:
        """Free memory of :meth:`allocate`. Undefined while another process has it open."""
        self._call("cuMemFree", address)

    def ipc_handle(self, address: int) -> bytes:
        """Return a handle with which other processes open this memory while this one lives."""
        return bytes(self._call("cuIpcGetMemHandle", address))

    def ipc_open(self, handle: bytes, *, into: Word | None = None) -> int:
        """Return the address of another process's memory, writable; needs one close per open."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise DriverFailure(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        wanted = libcuda.CUipcMemHandle.from_buffer_copy(handle)
        lazily = libcuda.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return self._number("cuIpcOpenMemHandle", wanted, lazily, into=into)

    def ipc_close(self, address: int) -> None:
        """Undo one :meth:`ipc_open`."""
        self._call("cuIpcCloseMemHandle", address)

    # --- behind all of them -----------------------------------------------------------------------

    def _describe(self, index: int) -> DeviceInfo:
        device = self._number("cuDeviceGet", index)
        name = self._call("cuDeviceGetName", libcuda.DEVICE_NAME_BYTES, device)
        name = name.value.decode(errors="replace")
        return DeviceInfo(
            index=index,
            id=_device_id(name, bytes(self._call("cuDeviceGetUuid", device))),
            name=name,
            total_bytes=self._number("cuDeviceTotalMem", device),
            can_share=self._can_share(device),
            is_exclusive=self._is_exclusive(device),
        )

    def _can_share(self, device: int) -> bool:
        needed = (
            libcuda.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            libcuda.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )
        return all(self._number("cuDeviceGetAttribute", each, device) for each in needed)

    def _is_exclusive(self, device: int) -> bool:
        mode = libcuda.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
        if self._number("cuDeviceGetAttribute", mode, device) == libcuda.CU_COMPUTEMODE_DEFAULT:
            return False
        try:
            # MPS has the one context then, and shares it.
            return not self._number(
                "cuDeviceGetAttribute", libcuda.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device
            )
        except DriverFailure:  # a driver older than the question
            return True

    def _primary(self, index: int) -> int:
        with self._lock:
            if index not in self._contexts:
                device = self._number("cuDeviceGet", index)
                self._contexts[index] = self._number("cuDevicePrimaryCtxRetain", device)
            return self._contexts[index]

    def _number(self, call: str, *inputs: object, of: str = "", into: Word | None = None) -> int:
        return int(self._call(call, *inputs, of=of, into=into).value)

    def _restore(self, call: str, before: object) -> None:
        """At the end of a block; one that a forked child leaves, maybe to exit, is its parent's."""
        if self._pid == os.getpid():
            self._call(call, before)

    def _call(self, call: str, *inputs: object, of: str = "", into: Word | None = None) -> Any:
        """Return the call's output as a ctypes object (None where it has none)."""
        if self._pid != os.getpid():
            raise DriverFailure(_FORKED)
        try:
            result, output = self._library.call(call, *inputs, into=into)
        except ctypes.ArgumentError as error:
            raise DriverFailure(f"{call} cannot be asked for {of or inputs}: {error}") from error
        except OSError as error:
            raise DriverFailure(
                f"{call} cannot be called: {error}; install NVIDIA's driver, or give the container "
                "its devices"
            ) from error
        except AttributeError as error:
            raise DriverFailure(
                f"{call} cannot be called: {error}; install a newer driver of NVIDIA's, 470 or "
                "later"
            ) from error
        if result != libcuda.CUDA_SUCCESS:
            raise _failure(call, of, self._library.name_of(result))
        return output


def driver() -> Driver:
    """Return this process's driver. Raises DriverFailure, on every call, where there is none."""
    process = _process  # A signal handler may fork in the middle, and the child has another one.
    if process.driver is not None:
        return process.driver
    with process.lock:
        if process.is_forked:
            raise DriverFailure(_FORKED)
        if process.driver is None:
            process.is_used = True
            try:
                process.driver = Driver()
            except DriverFailure:
                process.is_used = False
                raise
        return process.driver


def forget() -> None:
    """Make the next :func:`driver` start anew, for a test that has changed the machine."""
    global _process
    _process = _Process(is_forked=False)


def _properties(index: int) -> libcuda.CUmemAllocationProp:
    return libcuda.CUmemAllocationProp(
        type=libcuda.CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes=_DESCRIPTOR,
        location=_location(index),
    )


def _location(index: int) -> libcuda.CUmemLocation:
    location = libcuda.CUmemLocation(libcuda.CU_MEM_LOCATION_TYPE_DEVICE, index)
    if location.id != index:  # truncated by ctypes
        raise DriverFailure(f"there is no device {index}; {_OTHERWISE}")
    return location


def _device_id(name: str, raw: bytes) -> DeviceId:
    # Only the driver's name shows the kind: "NVIDIA A100-SXM4-40GB MIG 1g.5gb". NVML and
    # CUDA_VISIBLE_DEVICES use exactly these ids since driver 470.
    kind = "MIG" if " MIG " in name else "GPU"
    parts = (raw[:4], raw[4:6], raw[6:8], raw[8:10], raw[10:])  # as of any UUID
    return "-".join([kind, *(part.hex() for part in parts)])


def _failure(call: str, of: str, result: str) -> DriverFailure:
    what = f"{call} of {of}" if of else call
    failure = DriverFailure(f"{what} failed: {result}; {_ADVICE.get(result, _OTHERWISE)}")
    failure.result = result
    return failure


# --- the process ----------------------------------------------------------------------------------


class _Process:
    """The driver of this process, and whether it may be used."""

    def __init__(self, *, is_forked: bool) -> None:
        self.lock = threading.RLock()  # a signal handler may load, too
        self.driver: Driver | None = None
        self.is_used = False
        self.is_forked = is_forked


_process = _Process(is_forked=False)


def _after_fork_in_child() -> None:
    """Only forget. Nothing of the old object has a destructor, which would run in the child."""
    global _process
    _process = _Process(is_forked=_process.is_forked or _process.is_used)


os.register_at_fork(after_in_child=_after_fork_in_child)
