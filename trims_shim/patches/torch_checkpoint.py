"""torch.distributed.checkpoint: a load writes into the tensors that it is given.

``load(model.state_dict(), ...)`` reads into the parameters themselves, so they become private when
the load is planned. Sharded tensors are torch's own: nothing shared is among their parts. Source:
torch 2.13, torch/distributed/checkpoint/default_planner.py, which torch imports only when a
program asks for it. The other planners of torch derive from this one.
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
    def set_up_planner(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if is_any_shared():
            unshare(self.state_dict.values(), "checkpoint")  # flat by now, or not to be read
        return result

    return set_up_planner


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.set_up_planner",
        "2.4+",
        _wrap,
    ),
)
