"""ema-pytorch: an average, or the model that gets it, becomes private before it is written.

The average that a run is resumed with is a module of its own, often from a file of its own, and in
no optimizer. ``KarrasEMA``, of which ``PostHocEMA`` has several, is no subclass of ``EMA``. What
``EMAPytree`` averages is tensors in any containers. Source: ema-pytorch 0.8.3, ``EMA`` in
ema_pytorch/ema_pytorch.py, ``KarrasEMA`` in post_hoc_ema.py, ``EMAPytree`` in ema_pytree_pytorch.py
there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare, unshare_module, writing_module

__all__ = ["POINTS"]


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_moving_average(self: Any, ma_model: Any, *args: Any, **kwargs: Any) -> Any:
        unshare_module(ma_model, "average")
        return original(self, ma_model, *args, **kwargs)

    return update_moving_average


def _wrap_update_tree(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_moving_average(self: Any, ma_pytree: Any, *args: Any, **kwargs: Any) -> Any:
        unshare(_pytree.tree_iter(ma_pytree), "average")
        return original(self, ma_pytree, *args, **kwargs)

    return update_moving_average


def _wrap_copy_to_tree(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def copy_params_from_pytree_to_ema(self: Any) -> Any:
        unshare(_pytree.tree_iter(self.ema_pytree), "average")
        return original(self)

    return copy_params_from_pytree_to_ema


_wrap_copy_to_average = writing_module("average", lambda average: average.ema_model)
_wrap_copy_to_model = writing_module("average", lambda average: average.model)

POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("ema_pytorch.ema_pytorch:EMA.update_moving_average", "0.8", _wrap_update),
    DevicePoint(
        "ema_pytorch.ema_pytorch:EMA.copy_params_from_model_to_ema", "0.8", _wrap_copy_to_average
    ),
    DevicePoint(
        "ema_pytorch.ema_pytorch:EMA.copy_params_from_ema_to_model", "0.8", _wrap_copy_to_model
    ),
    DevicePoint("ema_pytorch.post_hoc_ema:KarrasEMA.update_moving_average", "0.8", _wrap_update),
    DevicePoint(
        "ema_pytorch.post_hoc_ema:KarrasEMA.copy_params_from_model_to_ema",
        "0.8",
        _wrap_copy_to_average,
    ),
    DevicePoint(
        "ema_pytorch.post_hoc_ema:KarrasEMA.copy_params_from_ema_to_model",
        "0.8",
        _wrap_copy_to_model,
    ),
    DevicePoint(
        "ema_pytorch.ema_pytree_pytorch:EMAPytree.update_moving_average",
        "0.8.3",
        _wrap_update_tree,
    ),
    DevicePoint(
        "ema_pytorch.ema_pytree_pytorch:EMAPytree.copy_params_from_pytree_to_ema",
        "0.8.3",
        _wrap_copy_to_tree,
    ),
)
