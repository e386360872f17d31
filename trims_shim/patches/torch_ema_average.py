"""torch-ema: parameters become private before averages are copied into them.

``copy_to`` and ``restore`` write through ``.data``; a model that only infers is in no optimizer.
``average_parameters`` calls both. Source: torch-ema 0.3, torch_ema/ema.py.
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
    def write(self: Any, parameters: Any = None) -> Any:
        if is_any_shared():
            parameters = self._get_parameters(parameters)  # an iterator can be read only once
            unshare(parameters, "average")
        return original(self, parameters)

    return write


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("torch_ema.ema:ExponentialMovingAverage.copy_to", "0.3", _wrap),
    DevicePoint("torch_ema.ema:ExponentialMovingAverage.restore", "0.3", _wrap),
)
