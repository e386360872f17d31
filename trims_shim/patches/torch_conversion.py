"""Tensors in another dtype without the copy that a conversion makes.

Where the copies of many tensors are to be made, as when a model of float16 is loaded or converted
into float32, the results are put on an image of the file in which the numbers are converted
(:class:`.torch_mappings.FreshMappings`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from trims_shim import diagnostics
from trims_shim.client import arenas
from trims_shim.client.write_check import WriteCheck
from trims_shim.memory.mapping import are_addresses_limited
from trims_shim.patches.torch_copies import PLAIN_TYPES, is_watched
from trims_shim.patches.torch_mappings import (
    MIN_SIZE_BYTES,
    FreshMappings,
    bytes_in,
    count_error,
)
from trims_shim.patches.torch_modes import has_foreign_mode
from trims_shim.patches.torch_rounding import conversion_of, dtype_name
from trims_shim.patches.torch_stock_load import registered
from trims_shim.patches.torch_storage import tensor_over
from trims_shim.specs import Conversion

__all__ = ["DTYPES", "Conversions", "conversions_of", "is_convertible"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What :class:`Conversions` convert into each other."""


class Conversions:
    """The conversions to one dtype of one load or module. Threads may share it."""

    def __init__(
        self,
        dtype: torch.dtype,
        what: str,
        is_mostly: Callable[[arenas.Image, Conversion], bool],
    ) -> None:
        """``what`` is counted; ``is_mostly`` as for :class:`FreshMappings`."""
        self.dtype = dtype
        self._what = what
        self._lock = threading.Lock()
        self._write_check = WriteCheck()
        self._mappings: FreshMappings | None = FreshMappings(is_mostly)
        self._copies = self._bytes = 0

    def end(self) -> None:
        """Close and count. What is asked for later is converted by torch."""
        try:
            with self._lock:
                self._mappings = None  # a traceback may keep this object
                self._write_check.close()
                if self._copies:
                    diagnostics.count("elided_bytes", self._what, self._bytes)
                    diagnostics.count("elided", self._what, self._copies)
        # Border: what torch was to do has been done.
        except Exception as error:
            count_error(error, self._what)

    def converted(self, tensor: Any) -> torch.Tensor | None:
        """Return ``tensor.to(self.dtype)``; None where torch has to convert it."""
        try:
            if not is_convertible(tensor, self.dtype) or is_watched(has_foreign_mode):
                return None
            with self._lock:
                return self._converted(tensor)
        # Border: torch converts.
        except Exception as error:
            count_error(error, self._what)
            return None

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor | None:
        conversion = conversion_of(tensor.dtype, self.dtype)
        found = arenas.find(tensor.data_ptr(), tensor.nbytes)
        mappings = self._mappings
        if mappings is None or found is None or conversion is None:
            return None
        # First: no image is to be made for a program that has trained what it converts.
        if not self._write_check.is_unwritten(tensor.data_ptr(), tensor.nbytes):
            return None
        place = mappings.image_for(*found, conversion)
        if place is None:
            return None
        size = self.dtype.itemsize * tensor.numel()
        storage = mappings.take(*place, size)
        if storage is None:
            return None
        self._copies += 1
        self._bytes += size
        # With the strides of dimensions of size 1: they tell channels_last from contiguous. Like
        # any result of a conversion, it has not been changed in place yet.
        return tensor_over(storage, self.dtype, tensor.shape, tensor.stride()).data


def is_convertible(tensor: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor is numbers of another dtype in order, in an arena, and worth it."""
    return (
        type(tensor) in PLAIN_TYPES
        and conversion_of(tensor.dtype, dtype) is not None
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.nbytes >= MIN_SIZE_BYTES
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_inference())
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and arenas.find(tensor.data_ptr(), tensor.nbytes) is not None
    )


def conversions_of(module: torch.nn.Module, dtype: torch.dtype) -> Conversions | None:
    """Return what converts the tensors of a module, or None where torch has to; counts errors."""
    what = dtype_name(dtype)
    try:
        if is_watched(has_foreign_mode):  # who watches would see our looks
            return None
        # Most modules have none, which is seen quickly.
        values = registered(module).values()
        tensors = [each for each in values if conversion_of(each.dtype, dtype) is not None]
        if not tensors or are_addresses_limited():
            return None
        with torch.no_grad():  # as torch converts
            tensors = [each for each in tensors if is_convertible(each, dtype)]
        if tensors:
            return Conversions(dtype, what, functools.partial(_is_mostly, tensors))
    # Border: torch converts, and raises an error of its own if it fails too.
    except Exception as error:
        count_error(error, what)
    return None


def _is_mostly(tensors: list[torch.Tensor], image: arenas.Image, conversion: Conversion) -> bool:
    """Whether most of an image are tensors of the module of this dtype."""
    return 2 * bytes_in(image, conversion.source, tensors) > image.size_bytes
