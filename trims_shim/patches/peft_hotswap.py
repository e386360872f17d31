"""peft: hotswapping overwrites an adapter in place, so the adapter becomes private first.

Base weights stay shared. Source: peft 0.21, peft/utils/hotswap.py, which peft imports only when a
program asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint, is_any_shared
from trims_shim.patches.torch_unshare import unshare

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hotswap_adapter_from_state_dict(
        model: Any, state_dict: Any, adapter_name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if is_any_shared() and isinstance(model, torch.nn.Module):
            unshare(
                [
                    each
                    for name, each in model.named_parameters()
                    if adapter_name in name.split(".")
                ],
                "hotswap",
            )
        return original(model, state_dict, adapter_name, *args, **kwargs)

    return hotswap_adapter_from_state_dict


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint(
        "peft.utils.hotswap:hotswap_adapter_from_state_dict", "0.21", _wrap, has_holders=True
    ),
)
