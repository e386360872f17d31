"""peft: adapters that inference itself writes become private first.

OFT with ``coft=True`` projects its rotations back in each forward pass. Arrow with ``use_gks``
subtracts the mean of general adapters from the others in the first one. Base weights stay shared.
Sources: peft 0.21, ``OFTRotationModule`` in peft/tuners/oft/layer.py, ``ArrowLoraLinearLayer`` in
peft/tuners/lora/arrow.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare_module, writing_module

__all__ = ["POINTS"]


def _wrap_subtraction(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gen_know_sub(self: Any, lora_A: Any, lora_B: Any) -> Any:
        if self.use_gks and not (self.gks_done and not self.gks_added_adapter_names):
            unshare_module(lora_A, "adapter")
            unshare_module(lora_B, "adapter")
        return original(self, lora_A, lora_B)

    return gen_know_sub


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint(
        "peft.tuners.oft.layer:OFTRotationModule._project_batch", "0.21", writing_module("adapter")
    ),
    DevicePoint(
        "peft.tuners.lora.arrow:ArrowLoraLinearLayer.gen_know_sub", "0.21", _wrap_subtraction
    ),
)
