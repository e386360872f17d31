"""Tensors of 16 bits in float32 without the copy that a conversion makes.

Where the copies of many tensors are to be made, as when a model of float16 is loaded or converted
into float32, the results are put on an image of the file in which the numbers are widened
(:class:`.torch_mappings.FreshMappings`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from trims_shim import diagnostics
from trims_shim.client import arenas
from trims_shim.client.write_check import WriteCheck
from trims_shim.patches.torch_copies import PLAIN_TYPES, is_watched
from trims_shim.patches.torch_mappings import MIN_SIZE_BYTES, FreshMappings, count_error, widened
from trims_shim.patches.torch_storage import tensor_over

__all__ = ["Widening", "is_narrow"]


class Widening:
    """The conversions of one load or module. Threads may share it."""

    def __init__(self, what: str, is_mostly: Callable[[arenas.Image, str], bool]) -> None:
        """``what`` is counted; ``is_mostly`` as for :class:`FreshMappings`."""
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

    def widened(self, tensor: Any) -> torch.Tensor | None:
        """Return ``tensor.to(torch.float32)``; None where torch has to convert it."""
        try:
            if not is_narrow(tensor) or is_watched():
                return None
            with self._lock:
                return self._widened(tensor)
        # Border: torch converts.
        except Exception as error:
            count_error(error, self._what)
            return None

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor | None:
        numbers = widened(torch.float32, tensor.dtype)
        found = arenas.find(tensor.data_ptr(), tensor.nbytes)
        mappings = self._mappings
        if mappings is None or found is None or not numbers:
            return None
        place = mappings.image_for(*found, numbers)
        if place is None:
            return None
        if not self._write_check.is_unwritten(tensor.data_ptr(), tensor.nbytes):
            return None
        size = 4 * tensor.numel()
        storage = mappings.take(*place, size)
        if storage is None:
            return None
        self._copies += 1
        self._bytes += size
        # With the strides of dimensions of size 1: they tell channels_last from contiguous. Like
        # any result of a conversion, it has not been changed in place yet.
        return tensor_over(storage, torch.float32, tensor.shape, tensor.stride()).data


def is_narrow(tensor: Any) -> bool:
    """Whether a tensor is numbers of 16 bits in order, in an arena, and worth it."""
    return (
        type(tensor) in PLAIN_TYPES
        and bool(widened(torch.float32, tensor.dtype))
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.nbytes >= MIN_SIZE_BYTES
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_inference())
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and arenas.find(tensor.data_ptr(), tensor.nbytes) is not None
    )
