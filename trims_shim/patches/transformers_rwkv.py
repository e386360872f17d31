"""transformers' RWKV: weights that it rescales in place become private first.

It divides weights of its layers on the first inference, and multiplies them when trained again.
Source: transformers 5.24, ``RwkvModel`` in transformers/models/rwkv/modeling_rwkv.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare_module

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _rescale_layers(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layers_are_rescaled == self.training:
            unshare_module(self.blocks, "rescale")
        return original(self, *args, **kwargs)

    return _rescale_layers


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("transformers.models.rwkv.modeling_rwkv:RwkvModel._rescale_layers", "5.24", _wrap),
)
