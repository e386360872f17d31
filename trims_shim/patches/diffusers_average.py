"""diffusers' EMAModel: parameters become private before averages are copied into them.

``copy_to`` and ``restore`` write through ``.data``; a model that only infers is in no optimizer.
Source: diffusers 0.42, ``EMAModel`` in diffusers/training_utils.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint, is_any_shared
from trims_shim.patches.torch_unshare import unshare

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(self: Any, parameters: Any) -> Any:
        if is_any_shared():
            parameters = list(parameters)  # an iterator can be read only once
            unshare(parameters, "average")
        return original(self, parameters)

    return write


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("diffusers.training_utils:EMAModel.copy_to", "0.42", _wrap),
    DevicePoint("diffusers.training_utils:EMAModel.restore", "0.42", _wrap),
)
