"""torch.load: tensors that are not plain: subclasses, sparse, quantised, nested, numpy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from .payloads import bulk, counting, saved
from .registry import Work, attempt, case, cases


class Plain(torch.Tensor):
    """A subclass without anything of its own."""


class Noting(torch.Tensor):
    """A subclass with state and an own reduction."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_noting, (self.as_subclass(torch.Tensor), getattr(self, "note", None))


def _rebuild_noting(tensor: torch.Tensor, note: Any) -> Noting:
    rebuilt = tensor.as_subclass(Noting)
    rebuilt.note = note  # type: ignore[attr-defined]
    return rebuilt


class Wrapper(torch.Tensor):
    """A wrapper subclass with __torch_dispatch__ over an inner tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, Wrapper) else a for a in args]
        return func(*plain, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapper, (self.inner,)


def _noting() -> torch.Tensor:
    return _rebuild_noting(bulk(), ["note"])


def _plain_with_attribute() -> torch.Tensor:
    tensor = bulk().as_subclass(Plain)
    tensor.note = 5  # type: ignore[attr-defined]
    return tensor


def _coo() -> torch.Tensor:
    indices = torch.arange(1 << 17).repeat(2, 1)
    return torch.sparse_coo_tensor(indices, counting(1 << 17), check_invariants=True)


def _compressed(layout: torch.layout) -> Any:
    def make() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if layout in (torch.sparse_bsr, torch.sparse_bsc):
                return counting(512, 512).to_sparse(layout=layout, blocksize=(4, 4))
            return counting(512, 512).to_sparse(layout=layout)

    return make


def _nested(layout: torch.layout) -> Any:
    def make() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = [counting(300, 1024), counting(700, 1024)]
            return torch.nested.nested_tensor(parts, layout=layout)

    return make


def _masked() -> Any:
    return torch.masked.masked_tensor(bulk(), bulk() > 5)


TYPES = {
    "subclass": lambda: bulk().as_subclass(Plain),
    "subclass_with_attribute": _plain_with_attribute,
    "subclass_parameter": lambda: torch.nn.Parameter(bulk().as_subclass(Plain)),
    "subclass_with_reduction": _noting,
    "wrapper_subclass": lambda: Wrapper(bulk()).inner,
    "sparse_coo": _coo,
    "sparse_csr": _compressed(torch.sparse_csr),
    "sparse_csc": _compressed(torch.sparse_csc),
    "sparse_bsr": _compressed(torch.sparse_bsr),
    "sparse_bsc": _compressed(torch.sparse_bsc),
    "quantized_tensor": lambda: torch.quantize_per_tensor(bulk(), 0.1, 10, torch.quint8),
    "quantized_qint32": lambda: torch.quantize_per_tensor(bulk(), 0.1, 0, torch.qint32),
    "quantized_channel": lambda: torch.quantize_per_channel(
        bulk(), torch.full((1024,), 0.5), torch.zeros(1024, dtype=torch.long), 0, torch.qint8
    ),
    "nested_strided": _nested(torch.strided),
    "meta": lambda: [bulk().to("meta"), bulk()],
    "uninitialized_parameter": lambda: [torch.nn.UninitializedParameter(), bulk()],
    "uninitialized_buffer": lambda: [torch.nn.UninitializedBuffer(), bulk()],
}


@cases(TYPES)
def tensor_type(work: Work, make: Any) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = work.file("model.pt", saved({"value": make(), "bulk": counting(1 << 18)}))
    return [
        attempt(torch.load, path),
        attempt(torch.load, path, weights_only=False),
        attempt(torch.load, path, mmap=True, weights_only=False),
    ]


@case()
def wrapper_subclass_itself(work: Work) -> object:
    path = work.file("model.pt", saved(Wrapper(bulk())))
    loaded = torch.load(path, weights_only=False)
    return [type(loaded), loaded.inner, attempt(torch.load, path)]


@case()
def jagged_tensor(work: Work) -> object:
    path = work.file("model.pt", saved(_nested(torch.jagged)()))
    loaded = torch.load(path, weights_only=False)
    return [type(loaded), list(map(torch.Tensor.clone, loaded.unbind())), loaded._values.shape[0]]


@case()
def masked_tensor(work: Work) -> object:
    error = attempt(torch.save, _masked(), work.directory / "model.pt")
    loaded = attempt(torch.load, work.directory / "model.pt", weights_only=False)
    return [error, loaded if isinstance(loaded, Exception) else type(loaded)]


@case()
def numpy_values(work: Work) -> object:
    value = {"array": np.arange(1 << 19), "scalar": np.float32(3), "dtype": np.dtype("int8")}
    path = work.file("model.pt", saved({**value, "bulk": bulk()}))
    return [
        attempt(torch.load, path),
        attempt(torch.load, path, weights_only=False),
        attempt(torch.load, path, weights_only=False, mmap=True),
    ]


@case(served=True)
def generator_and_random_state(work: Work) -> object:
    value = {"state": torch.get_rng_state(), "bulk": bulk()}
    loaded = torch.load(work.file("model.pt", saved(value)))
    torch.set_rng_state(loaded["state"])
    return [loaded, torch.rand(2)]


@case()
def quantized_module(work: Work) -> object:
    def write(path: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.nn.Sequential(torch.nn.Linear(1024, 2048))
            with torch.no_grad():
                module[0].weight.copy_(counting(2048, 1024) / 2**21)
                module[0].bias.zero_()
            packed = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})
            torch.save(packed.state_dict(), path)

    path = work.file("model.pt", write)
    loaded = attempt(torch.load, path, weights_only=False)
    if isinstance(loaded, Exception):
        return loaded
    return [list(loaded), [torch.load(path, weights_only=False)[key] for key in list(loaded)[:2]]]
