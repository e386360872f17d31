"""loralib: ``eval`` merges adapters into the weights in place, and ``train`` takes them out again.

Only a layer that is about to change from one to the other becomes private; it writes through
``.data`` in the ``train`` of its class. Source: loralib 0.1.2, loralib/layers.py.
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
    def train(self: Any, mode: bool = True) -> Any:
        if self.r > 0 and self.merge_weights and self.merged == mode:
            unshare_module(self, "merge")
        return original(self, mode)

    return train


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("loralib.layers:Embedding.train", "0.1.2", _wrap),
    DevicePoint("loralib.layers:Linear.train", "0.1.2", _wrap),
    DevicePoint("loralib.layers:MergedLinear.train", "0.1.2", _wrap),
    DevicePoint("loralib.layers:ConvLoRA.train", "0.1.2", _wrap),
)
