"""peft: merging adapters writes the base weights in place, so they become private first.

Merging a whole model makes all of its weights private at once. ``merge`` of a single layer, which
diffusers' ``fuse_lora`` calls for each, has a class for each tuner; all of them first call
``check_adapters_to_merge``, which is patched in their place. OLoRA takes its adapters out of the
base weight, and so writes it too. Sources: peft 0.21, ``BaseTuner`` and
``check_adapters_to_merge`` in peft/tuners/tuners_utils.py, ``LoraLayer`` in tuners/lora/layer.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare_module, writing_module

__all__ = ["POINTS"]


_wrap = writing_module("merge")


def _wrap_unload(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unloading(self: Any, merge: Any = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            unshare_module(self, "merge")
        return original(self, merge, *args, **kwargs)

    return unloading


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("peft.tuners.tuners_utils:BaseTuner.merge_adapter", "0.21", _wrap),
    DevicePoint("peft.tuners.tuners_utils:BaseTuner.unmerge_adapter", "0.21", _wrap),
    DevicePoint(
        "peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge", "0.21", _wrap_unload
    ),
    DevicePoint(
        "peft.tuners.tuners_utils:check_adapters_to_merge", "0.21", _wrap, has_holders=True
    ),
    DevicePoint("peft.tuners.lora.layer:LoraLayer.olora_init", "0.21", _wrap),
)
