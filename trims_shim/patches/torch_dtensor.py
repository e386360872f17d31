"""torch.distributed.tensor: broadcasts that spread a module's weights over a mesh.

``distribute_module`` and ``distribute_tensor`` broadcast what is to be replicated. Their module
imports ``broadcast`` by name, so where it came before the shim, it has torch's own
(:mod:`.torch_unshare` replaces the public names). To search all modules for such names would take
longer than this. Source: torch 2.13, ``mesh_broadcast`` in
torch/distributed/tensor/_collective_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import wrap_broadcast

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    is_wrapped = original is vars(torch.distributed).get("broadcast")  # imported after the shim
    return original if is_wrapped else wrap_broadcast(original)


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("torch.distributed.tensor._collective_utils:broadcast", "2.5+", _wrap),
)
