"""Lightning: a model becomes private before averages are copied into it, frozen weights included.

What an optimizer has is private already. The callbacks write all parameters, also those of a frozen
backbone, and ``WeightAveraging`` takes them back after a validation. The package of the older name
is in :mod:`.pytorch_lightning_average`. Source: Lightning 2.6.6, ``WeightAveraging`` and
``StochasticWeightAveraging`` in weight_averaging.py and stochastic_weight_avg.py of the callbacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare_module

__all__ = ["POINTS", "wrap_copy", "wrap_transfer"]


def wrap_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that copies between its average and the module that it gets."""

    @functools.wraps(original)
    def write(self: Any, pl_module: Any) -> Any:
        for each in (self._average_model, pl_module):
            unshare_module(each, "average")
        return original(self, pl_module)

    return write


def wrap_transfer(original: Any) -> Any:
    """Wrap the static method that copies one module's parameters into those of another."""
    function: Callable[..., Any] = original.__func__

    @functools.wraps(function)
    def transfer_weights(src_pl_module: Any, dst_pl_module: Any) -> Any:
        unshare_module(dst_pl_module, "average")
        return function(src_pl_module, dst_pl_module)

    return staticmethod(transfer_weights)


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint(
        "lightning.pytorch.callbacks.weight_averaging:WeightAveraging._swap_models",
        "2.6.6",
        wrap_copy,
    ),
    DevicePoint(
        "lightning.pytorch.callbacks.weight_averaging:WeightAveraging._copy_average_to_current",
        "2.6.6",
        wrap_copy,
    ),
    DevicePoint(
        "lightning.pytorch.callbacks.stochastic_weight_avg:"
        "StochasticWeightAveraging.transfer_weights",
        "2.6.6",
        wrap_transfer,
    ),
)
