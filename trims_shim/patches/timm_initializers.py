"""timm's own initialisers: tensors on shared device memory become private before they are filled.

``init_weights`` of many models fills by these, the others by ``torch.nn.init``
(:mod:`.torch_initializers`). Source: timm 1.0.31, timm/layers/weight_init.py.
"""

from __future__ import annotations

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import writing_tensor

__all__ = ["POINTS"]

_wrap = writing_tensor("tensor", "init")

POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("timm.layers.weight_init:_trunc_normal_", "1.0.31", _wrap),
    DevicePoint("timm.layers.weight_init:variance_scaling_", "1.0.31", _wrap, has_holders=True),
)
