"""Batches that requests can join, and that can be split, between a model's stages (DVABatch).

The slicers and the decoder are imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trims_shim.batching.staged.activations import EarlyExit, Shared, Stepped
from trims_shim.batching.staged.model import Loop, StagedModel
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.stage_statistics import StagedStats, StageStats
from trims_shim.late_imports import ensure_imported

if TYPE_CHECKING:
    from trims_shim.batching.staged.decoding.generating import Decoder, generation
    from trims_shim.batching.staged.slicing.block_slicing import slice_blocks
    from trims_shim.batching.staged.slicing.graph_slicing import slice_model
    from trims_shim.batching.staged.slicing.onnx_slicing import slice_onnx

__all__ = [
    "Decoder",
    "EarlyExit",
    "Loop",
    "Shared",
    "StageStats",
    "StagedModel",
    "StagedProfile",
    "StagedStats",
    "Stepped",
    "generation",
    "slice_blocks",
    "slice_model",
    "slice_onnx",
]

_LATE = {
    "Decoder": "decoding.generating",
    "generation": "decoding.generating",
    "slice_blocks": "slicing.block_slicing",
    "slice_model": "slicing.graph_slicing",
    "slice_onnx": "slicing.onnx_slicing",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_LATE[name]}"
    ensure_imported(module)
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
