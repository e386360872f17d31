"""accelerate: large buffers become private when it puts loaded tensors into modules itself.

Modules write buffers. load_checkpoint_and_dispatch goes the same way, and so do diffusers' models
that are given a device map. Source: accelerate 1.15, accelerate/utils/modeling.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint, is_any_shared
from trims_shim.patches.torch_unshare import unshare_buffer

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_module_tensor_to_device(
        module: Any, tensor_name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(module, tensor_name, *args, **kwargs)
        if is_any_shared():
            *path, name = tensor_name.split(".")
            owner = functools.reduce(getattr, path, module)
            unshare_buffer(owner, name)
        return result

    return set_module_tensor_to_device


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint(
        "accelerate.utils.modeling:set_module_tensor_to_device", "1.15", _wrap, has_holders=True
    ),
)
