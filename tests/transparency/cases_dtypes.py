"""torch.load: every dtype, as a tensor beside a large one and as the large one itself."""

from __future__ import annotations

import torch

from .payloads import saved, with_bulk
from .registry import Work, attempt, case, cases

NAMES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex128",
    "complex64",
    "complex32",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]
DTYPES = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}


def _of(dtype: torch.dtype, size_bytes: int) -> torch.Tensor:
    """Bytes 0, 1, 0, 1, ... as that type: valid as a bool, too."""
    return (torch.arange(size_bytes, dtype=torch.int64) % 2).to(torch.uint8).view(dtype)


@cases(DTYPES, served=True)
def small_tensor(work: Work, dtype: torch.dtype) -> object:
    return torch.load(work.file("model.pt", saved(with_bulk(_of(dtype, 1600).reshape(10, -1)))))


@cases(DTYPES, served=True)
def large_tensor(work: Work, dtype: torch.dtype) -> object:
    path = work.file("model.pt", saved({"weight": _of(dtype, 2 << 20).reshape(64, -1)}))
    return [torch.load(path), torch.load(path, weights_only=False), torch.load(path, mmap=True)]


@case(served=True)
def all_in_one_file(work: Work) -> object:
    tensors = {name: _of(dtype, 64 * 9) for name, dtype in DTYPES.items()}
    return torch.load(work.file("model.pt", saved(with_bulk(tensors))))


@case(served=True)
def dtype_objects_and_sizes(work: Work) -> object:
    value = [torch.float16, torch.Size([1, 2]), torch.device("cpu"), torch.strided]
    path = work.file("model.pt", saved(with_bulk(value)))
    return [attempt(torch.load, path), attempt(torch.load, path, weights_only=False)]


@case(served=True)
def odd_sizes(work: Work) -> object:
    """Record sizes around the archive's alignment of 64 bytes."""
    sizes = (0, 1, 2, 63, 64, 65, 127, 128, 4095, 4096, 4097)
    return torch.load(work.file("model.pt", saved(with_bulk([_of(torch.uint8, n) for n in sizes]))))


@case(served=True)
def special_values(work: Work) -> object:
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1e308]
    tensors = [torch.tensor(values, dtype=torch.float64), torch.tensor(values[:4])]
    return torch.load(work.file("model.pt", saved(with_bulk(tensors))))
