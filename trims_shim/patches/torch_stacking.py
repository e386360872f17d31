"""A stack of tensors without the copy that ``torch.stack`` makes.

Where all the tensors are unwritten and of one image, their stack is taken from an image of just
these pieces of it, one after the other (:class:`~trims_shim.specs.Variant`). That image may be one
of converted numbers itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trims_shim import diagnostics
from trims_shim.client import arenas
from trims_shim.client.write_check import WriteCheck
from trims_shim.patches.asking import variant_image
from trims_shim.patches.torch_copies import is_watched
from trims_shim.patches.torch_mappings import FreshMappings, count_error
from trims_shim.patches.torch_modes import has_foreign_mode
from trims_shim.patches.torch_storage import tensor_over
from trims_shim.specs import PIECES_LIMIT, Variant

__all__ = ["are_alike", "is_stackable", "stacked"]

_MIN_SIZE_BYTES = 8 << 20
"""Of a stack. Each is an image, with a lease and a descriptor in every process."""


def are_alike(tensors: Sequence[Any]) -> bool:
    """Whether tensors are contiguous ones in host memory, equal in shape and dtype."""
    first = tensors[0]
    return all(
        type(each) is torch.Tensor
        and each.is_cpu
        and each.layout is torch.strided
        and each.is_contiguous()
        and (each.shape, each.dtype) == (first.shape, first.dtype)
        and not (each.requires_grad or each.is_neg() or each.is_conj() or each.is_inference())
        for each in tensors
    )


def is_stackable(tensor: Any) -> bool:
    """Whether a tensor may be of a stack that takes no copy: in memory of an image."""
    return are_alike([tensor]) and arenas.find(tensor.data_ptr(), tensor.nbytes) is not None


def stacked(tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    """Return tensors that :func:`are_alike` behind each other, as one of this shape; None where
    they have to be copied.
    """
    try:
        return None if is_watched(has_foreign_mode) else _stacked(tensors, shape)
    # Border: torch stacks them.
    except Exception as error:
        count_error(error, "stack")
        return None


def _stacked(tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor | None:
    first = tensors[0]
    piece_bytes, total_bytes = first.nbytes, first.nbytes * len(tensors)
    if total_bytes < _MIN_SIZE_BYTES or len(tensors) > PIECES_LIMIT:
        return None
    found = [arenas.find(each.data_ptr(), piece_bytes) for each in tensors]
    places = [each for each in found if each is not None]
    images = {image for image, _ in places}
    if len(places) < len(tensors) or len(images) > 1:
        return None
    image = images.pop()
    if (image.original and image.original.variant.pieces) or total_bytes > image.size_bytes:
        return None
    offsets = tuple(offset for _, offset in places)
    made = variant_image(image, Variant(0, None, piece_bytes, offsets))
    if made is None:
        return None
    with WriteCheck() as check:
        if not all(check.is_unwritten(each.data_ptr(), piece_bytes) for each in tensors):
            return None
    storage = FreshMappings(lambda *_: False).take(made, 0, total_bytes)
    if storage is None:
        return None
    diagnostics.count("elided_bytes", "stack", total_bytes)
    diagnostics.count("elided", "stack")
    return tensor_over(storage, first.dtype, shape).data
