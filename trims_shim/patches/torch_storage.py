"""Torch storages over arenas, and torch's names for dtypes of safetensors.

A storage keeps its arena's buffer alive. Its slices (``storage[a:b]``) are storages of their own
that keep the whole alive, so that a record is saved, pickled and shared by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trims_shim.errors import UnsupportedFormat
from trims_shim.patches.torch_modes import unseen

if TYPE_CHECKING:
    from trims_shim.client.arenas import Arena
    from trims_shim.specs import Record

__all__ = ["bytes_over", "storage_of", "tensor_over", "torch_dtype", "torch_form"]

_empty = torch.empty
"""torch's own: programs replace it while they make a model (accelerate), and then ours fails."""
_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "U64": "uint64",
    "I32": "int32",
    "U32": "uint32",
    "I16": "int16",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""By the name safetensors gives them."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that safetensors calls ``name``. Raises UnsupportedFormat."""
    dtype: torch.dtype | None = getattr(torch, _TORCH_DTYPES.get(name, ""), None)
    if dtype is None:
        raise UnsupportedFormat(f"this torch has no dtype {name}")
    return dtype


def torch_form(record: Record) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a record as safetensors gives it; bytes without a dtype.

    Raises UnsupportedFormat.
    """
    if not record.dtype:
        return torch.uint8, record.shape
    pair: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
    if record.dtype == "F4" and pair is not None and record.shape[-1] % 2 == 0:
        return pair, (*record.shape[:-1], record.shape[-1] // 2)
    return torch_dtype(record.dtype), record.shape


def storage_of(arena: Arena) -> torch.UntypedStorage:
    """Return a storage over the whole mapping."""
    with unseen():
        return torch.frombuffer(arena.buffer, dtype=torch.uint8).untyped_storage()


def bytes_over(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor of bytes over all of a storage."""
    return tensor_over(storage, torch.uint8, (storage.nbytes(),))


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] = (),
) -> torch.Tensor:
    """Return a tensor over the begin of a storage; contiguous unless there are ``strides``."""
    with unseen():
        blank: Any = _empty(0, dtype=dtype, device="cpu")
        tensor: torch.Tensor = blank.set_(storage, 0, shape, strides)
        return tensor
