"""Make tensors as torch's unpickling does, from the plain data of a recipe.

Does the work of the torch functions that a plain state dict's pickle calls, without the pickle.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.serialization

from trims_shim.errors import UnsupportedFormat
from trims_shim.formats import ParameterSpec, Recipe, TensorSpec, TorchArchive

__all__ = ["Blanks", "Built", "assemble", "collector_paused", "is_little_endian"]

_serialization: Any = torch.serialization  # Private names, probed before use.


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection while a state dict is built from thousands of short-lived objects.

    A full collection takes 80 ms in a program that has imported torch, ten times the load. Other
    threads have no collector meanwhile either, so nothing in the block may wait for the daemon. If
    another thread turns the collector off meanwhile, this turns it on again, which is harmless.
    """
    if not gc.isenabled():
        yield
        return
    ours = object()
    try:
        _pausing.add(ours)
        gc.disable()
        yield
    finally:
        gc.enable()
        _pausing.discard(ours)


_pausing: set[object] = set()
"""Whoever may have turned the collector off. Not one flag: the end of one pause may come in the
middle of the next."""


def _resume_collector() -> None:
    """Turn the collector on in a forked child, which lacks the thread that would do it."""
    if _pausing:
        gc.enable()
        _pausing.clear()


os.register_at_fork(after_in_child=_resume_collector)


class Built:
    """A result that may itself be None."""

    __slots__ = ("result",)

    def __init__(self, result: Any) -> None:
        self.result = result


class Blanks(dict[torch.dtype, torch.Tensor]):
    """Empty tensors on one device, by dtype.

    ``blank.new_empty`` is faster than making a tensor from a dtype and a device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, dtype: torch.dtype) -> torch.Tensor:
        blank = torch.empty((0,), dtype=dtype, device=self._device)
        self[dtype] = blank
        return blank


def is_little_endian(archive: TorchArchive) -> bool:
    """Whether torch would use the records' bytes unswapped."""
    if sys.byteorder != "little":
        return False
    if archive.byteorder:
        return archive.byteorder == "little"
    return _serialization.get_default_load_endianness() in (
        None,
        _serialization.LoadEndianness.LITTLE,
    )


def assemble(recipe: Recipe, storages: Sequence[torch.UntypedStorage], blanks: Blanks) -> Any:
    """Build what the pickle describes over its storages; ``blanks`` are on the same device.

    Raises UnsupportedFormat for a dtype that this torch does not have.
    """
    for name in {spec.dtype for spec in recipe.tensors}:
        if not hasattr(torch, name):
            raise UnsupportedFormat(f"this torch has no dtype {name}")
    tensors = [_tensor(spec, storages[spec.storage], blanks) for spec in recipe.tensors]
    parameters = [_parameter(spec, tensors[spec.tensor]) for spec in recipe.parameters]
    return recipe.assemble(tensors, parameters)


def _tensor(spec: TensorSpec, storage: torch.UntypedStorage, blanks: Blanks) -> torch.Tensor:
    """As torch._utils._rebuild_tensor_v2 with an empty dictionary of hooks."""
    result = blanks[getattr(torch, spec.dtype)].new_empty(0)
    result.set_(storage, spec.offset, spec.size, spec.stride)
    if spec.requires_grad:
        result.requires_grad = True
    result._backward_hooks = OrderedDict()
    return result


def _parameter(spec: ParameterSpec, data: torch.Tensor) -> torch.nn.Parameter:
    """As torch._utils._rebuild_parameter with an empty dictionary of hooks."""
    result = torch.nn.Parameter(data, spec.requires_grad)
    result._backward_hooks = OrderedDict()
    return result
