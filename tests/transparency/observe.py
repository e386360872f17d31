"""Canonical observations: a value as JSON that is equal exactly where a program sees no difference.

Kept: types, dtypes, shapes, strides, offsets, storage sizes, which tensors share a storage or are
one object, version counters, gradients, extra attributes, the bytes. Dropped: addresses, object
ids, the name of the working directory.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Described", "Normaliser", "Observer", "type_name"]

_PATTERNS = (
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "<address>"),
    (re.compile(r"\[([WE])\d{4} \d\d:\d\d:\d\d\.\d+ "), r"[\1 "),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3,}"), "<time>"),
    (re.compile(r"/proc/\d+"), "/proc/<pid>"),
    (re.compile(r"\(pid=\d+\)"), "(pid=<pid>)"),  # a fork beside threads, from Python 3.12 on
    (
        re.compile(rf"({re.escape(tempfile.gettempdir())}|/tmp)/(tmp|transparency-)\w+"),
        "<temporary>",
    ),
)


class Normaliser:
    """Removes from a text what differs between two equal runs."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __call__(self, text: str) -> str:
        text = text.replace(self._directory, "<work>")
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text


def type_name(value: object) -> str:
    """Qualified name of a value's class."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True)
class Described:
    """What a case has described itself, because it changed it afterwards."""

    json: Any


class Observer:
    """Describes values; one instance per case, because aliases are numbered across its values."""

    def __init__(self, normalise: Normaliser) -> None:
        self._normalise = normalise
        self._storages: dict[int, int] = {}
        self._objects: dict[int, int] = {}
        self._kept_alive: list[Any] = []

    def describe(self, value: Any) -> Any:
        """JSON of a value."""
        if value is None or (isinstance(value, (bool, int)) and type(value) in (bool, int)):
            return value
        if type(value) is float:
            return f"float {value!r}"
        if type(value) is str:
            return self._normalise(value)
        if isinstance(value, (bytes, bytearray)):
            return [type_name(value), len(value), hashlib.sha256(value).hexdigest()[:16]]
        if isinstance(value, BaseException):
            return self._exception(value)
        if isinstance(value, Described):
            return value.json
        return self._repeatable(value)

    def _repeatable(self, value: Any) -> Any:
        """Objects with an identity: the second time only a reference to the first."""
        if id(value) in self._objects:
            return f"same object as #{self._objects[id(value)]}"
        self._objects[id(value)] = number = len(self._objects)
        self._kept_alive.append(value)
        described = self._object(value)
        if isinstance(described, dict):
            described["#"] = number
        return described

    def _object(self, value: Any) -> Any:
        import numpy

        if "torch" in sys.modules:
            import torch

            if isinstance(value, torch.Tensor):
                return self._tensor(value)
            if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
                return self._storage_object(value)
            if isinstance(value, torch.nn.Module):
                return self._module(value)
        if isinstance(value, numpy.ndarray):
            return self._array(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, (set, frozenset)):
            return {"type": type_name(value), "items": sorted(map(str, value))}
        if isinstance(value, (list, tuple)):
            return {"type": type_name(value), "items": [self.describe(item) for item in value]}
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}"
        return {"type": type_name(value), "repr": self._normalise(repr(value))}

    def _exception(self, error: BaseException) -> Any:
        described = {"raised": type_name(error), "message": self._normalise(str(error))}
        # The explicit cause is part of what a user reads; frames are not compared.
        if error.__cause__ is not None:
            described["cause"] = self._exception(error.__cause__)
        return described

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        described = {
            "type": type_name(value),
            "items": [[self.describe(key), self.describe(item)] for key, item in value.items()],
        }
        if getattr(value, "__dict__", None):
            described["attributes"] = self._attributes(vars(value))
        return described

    def _attributes(self, attributes: Mapping[str, Any]) -> Any:
        return {name: self.describe(item) for name, item in sorted(attributes.items())}

    def _module(self, module: Any) -> Any:
        return {
            "type": type_name(module),
            "repr": self._normalise(repr(module)),
            "training": module.training,
            "parameters": [[name, self.describe(p)] for name, p in module.named_parameters()],
            "buffers": [[name, self.describe(b)] for name, b in module.named_buffers()],
            "keys": list(module.state_dict()),
        }

    def _array(self, array: Any) -> Any:
        described = {
            "type": type_name(array),
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "strides": list(array.strides),
            "writeable": bool(array.flags.writeable),
            "owns": bool(array.flags.owndata),
        }
        # The bytes of an array of objects are addresses.
        if array.dtype.hasobject:
            return {**described, "items": [self.describe(item) for item in array.flat]}
        return {**described, "sha256": _digest(_row_major(array))}

    def _storage_object(self, storage: Any) -> Any:
        untyped = storage if not hasattr(storage, "_untyped_storage") else storage._untyped_storage
        described = {
            "type": type_name(storage),
            "dtype": str(getattr(storage, "dtype", None)),
            "storage": self._storage(untyped),
        }
        if untyped.device.type == "cpu":
            described["sha256"] = _digest(_storage_bytes(untyped))
        return described

    def _storage(self, storage: Any) -> str:
        # The StorageImpl's address tells whether two tensors share memory by design; the object is
        # kept so that the address is not given to another one meanwhile.
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        self._kept_alive.append(storage)
        return f"storage {number} of {storage.nbytes()} bytes on {storage.device}"

    def _tensor(self, tensor: Any) -> Any:
        import torch

        if torch.nn.parameter.is_lazy(tensor):
            return {"type": type_name(tensor), "repr": "uninitialized"}
        described = {
            "type": type_name(tensor),
            "dtype": str(tensor.dtype),
            "shape": [int(size) for size in tensor.shape] if not tensor.is_nested else "nested",
            "layout": str(tensor.layout),
            "device": str(tensor.device),
            "requires_grad": tensor.requires_grad,
            "is_leaf": tensor.is_leaf,
            "grad_fn": type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else None,
            "inference": tensor.is_inference(),
        }
        if not tensor.is_inference():
            described["version"] = tensor._version
        if tensor.is_leaf and tensor.grad is not None:
            described["grad"] = self.describe(tensor.grad)
        if getattr(tensor, "__dict__", None):
            described["attributes"] = self._attributes(vars(tensor))
        if getattr(tensor, "_backward_hooks", None):
            described["hooks"] = len(tensor._backward_hooks)
        with torch.no_grad():
            described.update(self._contents(tensor.detach(), type_name(tensor)))
        return described

    def _contents(self, tensor: Any, name: str) -> dict[str, Any]:
        import torch

        if "Fake" in name:
            return {"stride": list(tensor.stride())}
        if type(tensor) is not torch.Tensor and tensor.layout is torch.strided:
            tensor = tensor.as_subclass(torch.Tensor)
        if tensor.is_quantized:
            return {
                "quantizer": self._normalise(str(tensor.qscheme())),
                "parameters": _quantizer(tensor),
                "contents": self._strided(tensor, tensor.int_repr()),
            }
        if tensor.is_nested:
            return {"parts": [self._strided(part, part) for part in tensor.unbind()]}
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
            return {"coalesced": tensor.is_coalesced(), "parts": [self.describe(p) for p in parts]}
        if tensor.layout is not torch.strided:
            columns = tensor.layout in (torch.sparse_csc, torch.sparse_bsc)
            plain = ("ccol_indices", "row_indices") if columns else ("crow_indices", "col_indices")
            parts = [getattr(tensor, part)() for part in (*plain, "values")]
            return {"parts": [self.describe(part) for part in parts]}
        return self._strided(tensor, tensor)

    def _strided(self, tensor: Any, readable: Any) -> dict[str, Any]:
        described = {
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "contiguous": tensor.is_contiguous(),
            "conj": tensor.is_conj(),
            "neg": tensor.is_neg(),
            "storage": self._storage(tensor.untyped_storage()),
        }
        if tensor.device.type == "cpu":
            described["sha256"] = _digest(_logical_bytes(readable))
        return described


def _quantizer(tensor: Any) -> list[str]:
    import torch

    if tensor.qscheme() == torch.per_tensor_affine:
        return [repr(tensor.q_scale()), repr(tensor.q_zero_point())]
    return [
        str(tensor.q_per_channel_scales().tolist()),
        str(tensor.q_per_channel_zero_points().tolist()),
        str(tensor.q_per_channel_axis()),
    ]


# What the following return is hashed where it lies, if it can be: most of what a case costs is
# memory that its process touches for the first time.


def _row_major(array: Any) -> Any:
    """What ``array.tobytes()`` returns, without a copy of what is in that order already."""
    import numpy

    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)


def _logical_bytes(tensor: Any) -> Any:
    """The values in row-major order, as bytes, whatever the layout in memory."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy() if plain.numel() else b""


def _storage_bytes(storage: Any) -> Any:
    import torch

    # bytes(storage) would go through one Python integer for each byte.
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return whole.numpy() if whole.numel() else b""


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
