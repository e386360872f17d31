"""Lightning by its older name: the same callbacks as in :mod:`.lightning_average`."""

from __future__ import annotations

from trims_shim.patches.lightning_average import wrap_copy, wrap_transfer
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint

__all__ = ["POINTS"]

POINTS: tuple[PatchPoint, ...] = (
    DevicePoint(
        "pytorch_lightning.callbacks.weight_averaging:WeightAveraging._swap_models",
        "2.6.6",
        wrap_copy,
    ),
    DevicePoint(
        "pytorch_lightning.callbacks.weight_averaging:WeightAveraging._copy_average_to_current",
        "2.6.6",
        wrap_copy,
    ),
    DevicePoint(
        "pytorch_lightning.callbacks.stochastic_weight_avg:"
        "StochasticWeightAveraging.transfer_weights",
        "2.6.6",
        wrap_transfer,
    ),
)
