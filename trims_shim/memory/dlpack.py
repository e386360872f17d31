"""DLPack capsules over memory that this package owns, for consumers that take no plain address.

Owns what a consumer holds: the structures that describe each tensor, and one reference to its
*owner*, the object that keeps the memory. Both go when the consumer calls the deleter. Nothing is
read, copied or checked here: callers answer for the address.

Invariants: an offered tensor is given up exactly once, by the deleter or, if no consumer took it,
by :func:`offer`. Any thread may call the deleter, with or without the interpreter's lock, also at
interpreter exit: it is the C method ``dict.pop`` behind a thunk that is never freed, so it needs
none of this module's globals, which are gone by then. It only drops a reference; an owner's
finalizers neither block nor unmap. A forked child has its own table, as it has its own consumers.

Source: ``dlpack.h`` of DLPack 0.8 (github.com/dmlc/dlpack), the unversioned ``DLManagedTensor``
under the capsule name ``dltensor``, which onnxruntime 1.21 and later take.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["ELEMENTS", "DeviceType", "DlpackTensor", "Kind", "offer", "offered", "ort_value"]

_Result = TypeVar("_Result")


class DeviceType(enum.IntEnum):
    """``DLDeviceType``."""

    CPU = 1
    CUDA = 2


class Kind(enum.IntEnum):
    """``DLDataTypeCode``."""

    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4


ELEMENTS: Mapping[str, tuple[Kind, int]] = {
    "BFLOAT16": (Kind.BFLOAT, 16),
    "DOUBLE": (Kind.FLOAT, 64),
    "FLOAT": (Kind.FLOAT, 32),
    "FLOAT16": (Kind.FLOAT, 16),
    "INT16": (Kind.INT, 16),
    "INT32": (Kind.INT, 32),
    "INT64": (Kind.INT, 64),
    "INT8": (Kind.INT, 8),
    "UINT16": (Kind.UINT, 16),
    "UINT32": (Kind.UINT, 32),
    "UINT64": (Kind.UINT, 64),
    "UINT8": (Kind.UINT, 8),
}
"""Kind and bits of the elements of an ONNX tensor, by the name of its ``TensorProto.DataType``."""


@dataclass(frozen=True, slots=True)
class DlpackTensor:
    """A contiguous tensor of ``shape`` from ``address`` on; ``dtype`` is a key of ELEMENTS.

    ``index`` is the device's number in this process; 0 for host memory.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    device: DeviceType
    index: int = 0


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


_offered: dict[int, tuple[_ManagedTensor, object, object]] = {}
"""Offered tensors and their owners, by the address that consumers pass to the deleter."""

# Not a function of ours: at exit a session may outlive the globals that one would need.
_delete = _Deleter(_offered.pop)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_delete))

# A capsule keeps a pointer to its name, no copy; this module keeps the name alive for longer.
_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype = ctypes.c_int
_is_capsule.argtypes = (ctypes.py_object, ctypes.c_char_p)


def offer(tensor: DlpackTensor, owner: object, consume: Callable[[Any], _Result]) -> _Result:
    """Return ``consume(capsule)`` for a capsule of the tensor that is valid for this call only.

    ``owner`` is held until the consumer calls the deleter. It is given up at once if ``consume``
    does not take the tensor, or raises before.
    """
    rank = len(tensor.shape)
    shape = (ctypes.c_int64 * rank)(*tensor.shape)
    managed = _ManagedTensor()
    managed.deleter = _delete
    described = managed.dl_tensor
    described.data = tensor.address
    described.device = _Device(tensor.device, tensor.index)
    described.ndim = rank
    described.dtype = _DataType(*ELEMENTS[tensor.dtype], 1)
    described.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    # No strides: contiguous, in C order.
    key = ctypes.addressof(managed)
    _offered[key] = (managed, shape, owner)
    capsule = _new_capsule(key, _NAME, None)
    try:
        return consume(capsule)
    finally:
        # By DLPack's rules, a consumer that takes the tensor renames the capsule.
        if _is_capsule(capsule, _NAME):
            _offered.pop(key, None)


def ort_value(kind: Any, capsule: Any) -> Any:
    """Make a capsule a ``kind``, the OrtValue of onnxruntime's binding; for :func:`offer`."""
    try:
        return kind.from_dlpack(capsule, False)
    except TypeError:
        # From 1.32 on, only the capsule says whether it holds booleans.
        return kind.from_dlpack(capsule)


def offered() -> int:
    """Return the number of tensors that consumers hold."""
    return len(_offered)
