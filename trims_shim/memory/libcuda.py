"""``libcuda.so.1`` by ctypes: the functions of the driver that this package calls, as in cuda.h.

Owns the library (loaded at the first call, never unloaded), the declarations of its functions and
structures, and the names of results. :mod:`trims_shim.memory.driver` owns the meaning of calls,
the conditions for them, and their failures.

Invariants: handles, addresses, contexts and streams are unsigned 64-bit numbers; a number that its
C type cannot hold is an error, never another number. Each function is looked up by the symbol to
which cuda.h maps its name; NVIDIA never changes a symbol's signature. Calls run without the GIL.

Source: cuda.h of CUDA 12.6 to 13.0; docs/decisions/0013-own-cuda-binding.md says why this is not
NVIDIA's package.
"""

from __future__ import annotations

import ctypes
import operator
from ctypes import POINTER, byref
from typing import Any, NamedTuple

__all__ = [
    "CUDA_SUCCESS",
    "CU_COMPUTEMODE_DEFAULT",
    "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "CU_DEVICE_ATTRIBUTE_MPS_ENABLED",
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED",
    "CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK",
    "CU_IPC_HANDLE_SIZE",
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    "CU_MEM_ACCESS_FLAGS_PROT_READ",
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
    "CU_MEM_ALLOCATION_TYPE_PINNED",
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM",
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "CU_MEM_LOCATION_TYPE_DEVICE",
    "CU_STREAM_CAPTURE_MODE_RELAXED",
    "CU_STREAM_NON_BLOCKING",
    "DEVICE_NAME_BYTES",
    "FUNCTIONS",
    "CUipcMemHandle",
    "CUmemAccessDesc",
    "CUmemAllocationProp",
    "CUmemLocation",
    "CUuuid",
    "Function",
    "Library",
]

CUDA_SUCCESS = 0
CU_COMPUTEMODE_DEFAULT = 0
CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20
CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133
CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK = 1
CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2
CU_IPC_HANDLE_SIZE = 64
CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
CU_MEM_ACCESS_FLAGS_PROT_READ = 1
CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
CU_MEM_ALLOCATION_TYPE_PINNED = 1
CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0
CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
CU_MEM_LOCATION_TYPE_DEVICE = 1
CU_STREAM_CAPTURE_MODE_RELAXED = 2
CU_STREAM_NON_BLOCKING = 1
DEVICE_NAME_BYTES = 256
"""Room for the name from cuDeviceGetName; our choice, not cuda.h's."""


class CUuuid(ctypes.Structure):
    """A UUID; ``bytes()`` of it are the octets."""

    _fields_ = (("bytes", ctypes.c_char * 16),)


class CUipcMemHandle(ctypes.Structure):
    """An IPC handle; ``bytes()`` of it can be sent."""

    _fields_ = (("reserved", ctypes.c_char * CU_IPC_HANDLE_SIZE),)


class CUmemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocFlags(ctypes.Structure):
    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class CUmemAllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", CUmemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", _AllocFlags),
    )


class CUmemAccessDesc(ctypes.Structure):
    _fields_ = (("location", CUmemLocation), ("flags", ctypes.c_int))


class Function(NamedTuple):
    """A function that returns a CUresult.

    ``output`` is the type of the result behind its first parameter, or None; ``inputs`` are the
    other parameters.
    """

    symbol: str
    output: Any
    inputs: tuple[Any, ...]


_INT = ctypes.c_int  # enumerations and CUdevice as well
_UNSIGNED = ctypes.c_uint
_BYTE = ctypes.c_ubyte
_SIZE = ctypes.c_size_t
# CUdeviceptr, CUmemGenericAllocationHandle, CUcontext, CUstream, void *, unsigned long long
_WORD = ctypes.c_uint64
_NUMBERS = (_INT, _UNSIGNED, _SIZE, _WORD)

FUNCTIONS = {
    # By the name in cuda.h, which callers use.
    each.symbol.removesuffix("_v2"): each
    for each in (
        Function("cuInit", None, (_UNSIGNED,)),
        Function("cuGetErrorName", None, (_INT, POINTER(ctypes.c_char_p))),
        Function("cuDeviceGetCount", ctypes.c_int, ()),
        Function("cuDeviceGet", ctypes.c_int, (_INT,)),
        Function("cuDeviceGetName", ctypes.c_char * DEVICE_NAME_BYTES, (_INT, _INT)),
        # Version 2 names the MIG instance, version 1 the GPU around it.
        Function("cuDeviceGetUuid_v2", CUuuid, (_INT,)),
        Function("cuDeviceTotalMem_v2", ctypes.c_size_t, (_INT,)),
        Function("cuDeviceGetAttribute", ctypes.c_int, (_INT, _INT)),
        Function("cuDeviceGetP2PAttribute", ctypes.c_int, (_INT, _INT, _INT)),
        Function(
            "cuMemGetAllocationGranularity", ctypes.c_size_t, (POINTER(CUmemAllocationProp), _INT)
        ),
        Function("cuMemCreate", _WORD, (_SIZE, POINTER(CUmemAllocationProp), _WORD)),
        # For the one handle type that we use, a shareable handle is an int, a descriptor. To import
        # one, the descriptor is passed as the pointer's value.
        Function("cuMemExportToShareableHandle", ctypes.c_int, (_WORD, _INT, _WORD)),
        Function("cuMemImportFromShareableHandle", _WORD, (_WORD, _INT)),
        Function("cuMemRelease", None, (_WORD,)),
        Function("cuMemAddressReserve", _WORD, (_SIZE, _SIZE, _WORD, _WORD)),
        Function("cuMemAddressFree", None, (_WORD, _SIZE)),
        Function("cuMemMap", None, (_WORD, _SIZE, _SIZE, _WORD, _WORD)),
        Function("cuMemUnmap", None, (_WORD, _SIZE)),
        Function("cuMemSetAccess", None, (_WORD, _SIZE, POINTER(CUmemAccessDesc), _SIZE)),
        Function("cuDevicePrimaryCtxRetain", _WORD, (_INT,)),
        Function("cuCtxGetCurrent", _WORD, ()),
        Function("cuCtxSetCurrent", None, (_WORD,)),
        Function("cuCtxSynchronize", None, ()),
        # An exchange: the value behind the pointer is both read and written.
        Function("cuThreadExchangeStreamCaptureMode", None, (POINTER(ctypes.c_int),)),
        Function("cuStreamCreate", _WORD, (_UNSIGNED,)),
        Function("cuStreamDestroy_v2", None, (_WORD,)),
        Function("cuStreamSynchronize", None, (_WORD,)),
        Function("cuMemcpyHtoDAsync_v2", None, (_WORD, _WORD, _SIZE, _WORD)),
        Function("cuMemcpyDtoHAsync_v2", None, (_WORD, _WORD, _SIZE, _WORD)),
        Function("cuMemcpyDtoDAsync_v2", None, (_WORD, _WORD, _SIZE, _WORD)),
        Function("cuMemsetD8Async", None, (_WORD, _BYTE, _SIZE, _WORD)),
        Function("cuMemHostAlloc", _WORD, (_SIZE, _UNSIGNED)),
        Function("cuMemFreeHost", None, (_WORD,)),
        Function("cuMemAlloc_v2", _WORD, (_SIZE,)),
        Function("cuMemFree_v2", None, (_WORD,)),
        Function("cuIpcGetMemHandle", CUipcMemHandle, (_WORD,)),
        Function("cuIpcOpenMemHandle_v2", _WORD, (CUipcMemHandle, _UNSIGNED)),
        Function("cuIpcCloseMemHandle", None, (_WORD,)),
    )
}


class Library:
    """``libcuda.so.1``, as the dynamic loader finds it. Any thread may call."""

    __slots__ = ("_found", "_loaded")

    def __init__(self) -> None:
        self._loaded: ctypes.CDLL | None = None
        self._found: dict[str, Any] = {}

    def call(self, name: str, *inputs: Any, into: Any = None) -> tuple[int, Any]:
        """Return the CUresult, and the output as a ctypes object (None where there is none).

        ``into`` is that object where the caller has to have the output even if a signal handler
        raises right after the call.

        Raises ctypes.ArgumentError if an input does not fit its parameter, OSError if there is no
        library, AttributeError if the library lacks the function.
        """
        function = self._found.get(name) or self._find(name)
        _, output, kinds = FUNCTIONS[name]
        arguments = [_argument(*each) for each in zip(kinds, inputs, strict=True)]
        if output is None:
            return function(*arguments), None
        result = output() if into is None else into
        return function(byref(result), *arguments), result

    def name_of(self, result: int) -> str:
        """Return a result's name in cuda.h, or its number if the library does not know it."""
        name = ctypes.c_char_p()
        self.call("cuGetErrorName", result, name)
        return name.value.decode() if name.value else f"CUresult {result}"

    def _find(self, name: str) -> Any:
        if self._loaded is None:
            self._loaded = ctypes.CDLL("libcuda.so.1")
        symbol, output, inputs = FUNCTIONS[name]
        function = self._loaded[symbol]
        function.restype = ctypes.c_int
        function.argtypes = inputs if output is None else (POINTER(output), *inputs)
        self._found[name] = function
        return function


# Not a ``from_param`` of the parameter's type: ctypes makes an ArgumentError of all that is raised
# there, also by a signal handler.
def _argument(kind: Any, value: Any) -> Any:
    """Return what to pass; refuse a number that does not fit, which ctypes would truncate."""
    if kind not in _NUMBERS:
        return value
    try:
        number = kind(operator.index(value))
    except TypeError as error:
        raise ctypes.ArgumentError(str(error)) from error
    if number.value != value:
        raise ctypes.ArgumentError(f"{value} does not fit {8 * ctypes.sizeof(number)} bits")
    return number
