"""transformers' own initialisers: tensors on shared device memory become private before a write.

These two copy into the tensor; the others call ``torch.nn.init`` (:mod:`.torch_initializers`).
Weights that from_pretrained has loaded are marked. They are not written, and stay shared. Source:
transformers 5.24, transformers/initialization.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(tensor, "_is_hf_initialized", False):
            unshare((tensor,), "init")
        return original(tensor, *args, **kwargs)

    return write


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("transformers.initialization:copy_", "5.24", _wrap),
    DevicePoint("transformers.initialization:orthogonal_", "5.24", _wrap),
)
