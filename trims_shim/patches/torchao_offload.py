"""torchao: parameters of an optimizer on the CPU become private before they are updated.

``CPUOffloadOptimizer`` gives torch's optimizers copies in host memory, and copies their results
into the parameters on the device, which so are in no optimizer. Source: torchao 0.18,
torchao/optim/cpu_offload.py.
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
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        unshare(self.param_d2h_map, "optimizer")
        return original(self, *args, **kwargs)

    return step


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("torchao.optim.cpu_offload:CPUOffloadOptimizer.step", "0.18", _wrap),
)
