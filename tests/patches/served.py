"""What came of loads: tensors in the memory of the cache, and what was counted."""

from __future__ import annotations

import torch

from trims_shim import diagnostics
from trims_shim.client import arenas

__all__ = ["grown", "is_shared", "outcomes"]


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether all of a tensor's storage lies in an arena."""
    storage = tensor.untyped_storage()
    return arenas.find(storage.data_ptr(), storage.nbytes()) is not None


def outcomes() -> dict[str, int]:
    """The counters of this process, with ``fallback:REASON`` for each reason."""
    seen = diagnostics.stats()
    return {**seen.events, **{f"fallback:{name}": n for name, n in seen.fallbacks.items()}}


def grown(before: dict[str, int], name: str) -> int:
    """By how much a counter has grown since ``before``."""
    return outcomes().get(name, 0) - before.get(name, 0)
