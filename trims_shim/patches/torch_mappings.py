"""Fresh mappings of images for the tensors that one load makes, instead of copies.

A copy is independent of what it was copied from and of other copies. So is a slice of a fresh
private mapping: each load maps one arena for each image, and gives each byte of it to one tensor
only. What tensors get here is aligned as a copy is, and may be converted as a copy would be
(:meth:`FreshMappings.image_for`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from trims_shim import diagnostics
from trims_shim.client import arenas
from trims_shim.client.arenas import Image
from trims_shim.errors import FormatError
from trims_shim.formats import read_header
from trims_shim.patches import torch_device, torch_repoint
from trims_shim.patches.asking import variant_image
from trims_shim.patches.torch_copies import PLAIN_TYPES, has_views
from trims_shim.patches.torch_modes import unseen
from trims_shim.patches.torch_rounding import dtype_name
from trims_shim.patches.torch_storage import storage_of
from trims_shim.specs import Conversion, Variant

__all__ = [
    "ALIGNMENT_BYTES",
    "MIN_SIZE_BYTES",
    "FreshMappings",
    "bytes_in",
    "count_error",
    "image_of",
    "is_for_devices",
    "is_fresh",
    "make_resizable",
]

MIN_SIZE_BYTES = 64 << 10
"""Below this a copy is as cheap as the checks."""
ALIGNMENT_BYTES = 64
"""The alignment of torch's allocator. Kernels choose their loops by alignment: with MKL on x86-64 a
matrix at 8 modulo 16 gives other last bits than the same matrix at 0."""
_OF_DEVICES_BYTES = torch_device.ALIGNMENT_BYTES

_RECORDED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of dtypes in safetensors files."""
_VARIANTS_FROM_BYTES = 8 << 20
_VARIANTS_LIMIT = 8
_MOSTLY = 0.9
_LEAST = 0.2
"""Of a file, in which an image of converted numbers may be of use."""

_own_arenas: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_char]] = (
    weakref.WeakValueDictionary()
)
"""Arenas mapped here, by address. Only tensors of the load hold slices of them, each its own."""
_for_devices: weakref.WeakKeyDictionary[Image, bool] = weakref.WeakKeyDictionary()
"""What :func:`is_for_devices` says of images of converted numbers."""


def is_fresh(address: int, size_bytes: int) -> bool:
    """Whether memory was mapped here, by this load or an earlier one."""
    found = arenas.find(address, size_bytes)
    return found is not None and address - found[1] in _own_arenas


def is_for_devices(image: Image) -> bool:
    """Whether nearly all of an image lies as it would in device memory.

    A file's tensors are laid out anew there. So are a stack's, which are one tensor.
    """
    original = image.original
    if original is None or original.variant.conversion is None:
        return True
    return _for_devices.get(image, False)


def _residues(image: Image, conversion: Conversion) -> Counter[int]:
    """How much of a safetensors file lies how many bytes off a border of a device's.

    Only what is converted counts, and borders are where those of the results come from. Of other
    files, nothing is known.
    """
    residues: Counter[int] = Counter()
    if not image.is_open:
        return residues
    lead_bytes = image.original.variant.lead_bytes if image.original else 0
    period = _period(conversion, _OF_DEVICES_BYTES)
    with contextlib.suppress(FormatError), memoryview(image.map().buffer)[lead_bytes:] as file:
        for record in read_header(file):
            if record.dtype == _RECORDED[conversion.source]:
                place = (lead_bytes + record.span.offset_bytes) % period
                residues[place] += record.span.size_bytes
    return residues


def _period(conversion: Conversion, alignment_bytes: int) -> int:
    """Bytes of a file between those whose results are at multiples of an alignment."""
    return alignment_bytes * conversion.source_bytes // conversion.target_bytes


def image_of(value: Any) -> Image | None:
    """The image with the bytes of a plain tensor, if there are enough of them."""
    is_large = (
        type(value) in PLAIN_TYPES
        and value.layout is torch.strided
        and value.is_cpu
        and value.nbytes >= MIN_SIZE_BYTES
    )
    found = arenas.find(value.data_ptr(), value.nbytes) if is_large else None
    return None if found is None else found[0]


def bytes_in(image: Image, numbers: str, values: Iterable[Any]) -> int:
    """How much of an image these tensors are, as far as they have this dtype; tied ones once."""
    sizes: dict[int, int] = {
        value.data_ptr(): value.nbytes
        for value in values
        if image_of(value) is image and dtype_name(value.dtype) == numbers
    }
    return sum(sizes.values())


class FreshMappings:
    """See the module docstring. Of one load; not for sharing between threads.

    ``is_mostly(image, conversion)``: whether most of an image are numbers that are to be converted
    so. All of it would be. Asked once for each, before anything is converted.
    """

    def __init__(self, is_mostly: Callable[[Image, Conversion], bool]) -> None:
        self._is_mostly = functools.cache(is_mostly)
        self._residues = functools.cache(_residues)
        self._variants: dict[tuple[Image, Variant], Image | None] = {}
        self._targets: dict[Image, _Target] = {}

    def image_for(
        self, image: Image, offset: int, conversion: Conversion | None
    ) -> tuple[Image, int] | None:
        """Where the result of a copy of the bytes at ``offset`` lies; None where it must be copied.

        Bytes off a 64-byte border of the file, as in most safetensors files, are taken from a
        second image with the same bytes after some zeros. Numbers for tensors of another dtype are
        taken from one in which they are converted. The daemon makes such a variant at the second
        request for it.
        """
        if conversion is None and offset % ALIGNMENT_BYTES == 0:
            return image, offset
        # Asking takes as long as copying 2 MB.
        if image.size_bytes < _VARIANTS_FROM_BYTES:
            return None
        # The daemon converts whole numbers only.
        if conversion and (
            offset % conversion.source_bytes or not self._is_mostly(image, conversion)
        ):
            return None
        # A variant of a variant would be a third image; but what load_state_dict has put on an
        # aligned one may be converted, as the plain one has gone by then.
        if image.original and not (conversion and image.original.variant.is_shifted):
            return None
        lead_bytes = self._lead(image, offset, conversion)
        if lead_bytes is None:
            return None
        variant = Variant(lead_bytes, conversion)
        made = self._variant(image, variant)
        return None if made is None else (made, variant.offset_bytes(offset))

    def _lead(self, image: Image, offset: int, conversion: Conversion | None) -> int | None:
        """The zeros before a file that align the bytes at ``offset``.

        With a conversion it is best if they align most of the file as on a device. None if they
        align too little of it.
        """
        if conversion is None:
            return -offset % ALIGNMENT_BYTES
        period = _period(conversion, ALIGNMENT_BYTES)
        residues = self._residues(image, conversion)
        alike = Counter({n: size for n, size in residues.items() if (n - offset) % period == 0})
        if alike.total() < _LEAST * residues.total():
            return None
        for most, _ in residues.most_common(1):
            if most in alike:
                return -most % _period(conversion, _OF_DEVICES_BYTES)
        return -offset % period

    def _variant(self, image: Image, variant: Variant) -> Image | None:
        key = (image, variant)
        if key not in self._variants:
            self._variants[key] = None
            # An ordinary file needs only one.
            if sum(each is image for each, _ in self._variants) <= _VARIANTS_LIMIT:
                made = self._variants[key] = variant_image(image, variant)
                if made is not None and variant.conversion:
                    residues = self._residues(image, variant.conversion)
                    lying = -variant.lead_bytes % _period(variant.conversion, _OF_DEVICES_BYTES)
                    _for_devices[made] = residues[lying] > _MOSTLY * residues.total()
        return self._variants[key]

    def take(self, image: Image, offset: int, size: int) -> torch.UntypedStorage | None:
        """Give away these bytes; None if some of them have been, or the image cannot be mapped.

        Raises MemoryFailure.
        """
        target = self._targets.get(image)
        if target is None:
            if not image.is_open:
                return None
            target = self._targets[image] = _Target.of(image)
        if not target.take(offset, offset + size):
            return None
        part: torch.UntypedStorage = target.storage[offset : offset + size]
        return part


class _Target(NamedTuple):
    """A fresh arena of one image, and the ranges of it that have been given away."""

    storage: torch.UntypedStorage
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, image: Image) -> _Target:
        arena = image.map()
        _own_arenas[arena.address] = arena.buffer
        return cls(storage_of(arena), [], [])

    def take(self, start: int, end: int) -> bool:
        """Reserve ``[start, end)``; return False when any of it is taken."""
        index = bisect_left(self.starts, end)
        if index and self.ends[index - 1] > start:
            return False
        self.starts.insert(index, start)
        self.ends.insert(index, end)
        return True


def make_resizable(storage: torch.UntypedStorage, *, keeps_bytes: bool) -> None:
    """Give a storage in a fresh mapping memory of torch's allocator.

    Tensors on the storage stay on it. A numpy array does not follow (torch would refuse to resize
    a storage that has had one): where there may be one, the mapping stays as long as the storage.
    Does nothing to other storages. Needs a torch that can swap.
    """
    try:
        if storage.device.type != "cpu" or not is_fresh(storage.data_ptr(), storage.nbytes()):
            return
        with unseen():
            # Equally large, or empty: torch swaps no others.
            size = storage.nbytes() if keeps_bytes else 0
            own = torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
        # Not by torch, which may use its threads: a forked child would wait for its parent's.
        ctypes.memmove(own.data_ptr(), storage.data_ptr(), size)
        torch_repoint.move([storage], [own], ())
        if has_views(storage):
            storage._trims_mapping = own  # type: ignore[attr-defined]
    # Border: torch says that the storage is not resizable.
    except Exception as error:
        count_error(error, "resize_")


def count_error(error: Exception, what: str) -> None:
    """Count an error of ours after which memory is copied. Passes on one of a signal handler."""
    diagnostics.pass_on(error)
    diagnostics.log(logging.DEBUG, "%s: copying, elision failed", what, error=error)
    diagnostics.count("elision_error", type(error).__name__)
