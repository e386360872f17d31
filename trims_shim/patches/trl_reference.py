"""trl: the model that a policy is compared with becomes private before the policy is mixed into it.

With ``sync_ref_model``, trainers update their reference model, which is in no optimizer, all along.
Teachers of self-distillation are synchronised by the same function. Source: trl 1.16,
``SyncRefModelCallback`` in trl/trainer/callbacks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare_module

__all__ = ["POINTS"]


def _wrap(original: Any) -> Any:
    function: Callable[..., Any] = original.__func__

    @functools.wraps(function)
    def write(model: Any, target_model: Any, alpha: Any) -> Any:
        unshare_module(target_model, "average")
        return function(model, target_model, alpha)

    return staticmethod(write)


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("trl.trainer.callbacks:SyncRefModelCallback._sync_target_model", "1.16", _wrap),
)
