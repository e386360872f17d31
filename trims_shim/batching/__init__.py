"""Adaptive batching in process: batch functions, called with single items, under an objective."""

from __future__ import annotations

from trims_shim.batching.batcher import Batcher, batched
from trims_shim.batching.collate import Collate
from trims_shim.batching.exit_points import exit_point
from trims_shim.batching.flex import FlexBatcher, PreemptionStats
from trims_shim.batching.padding import Pad, Padded
from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.replies import BatchFuture
from trims_shim.batching.statistics import BatcherStats, Percentiles

__all__ = [
    "BatchFuture",
    "Batcher",
    "BatcherStats",
    "Collate",
    "FlexBatcher",
    "LatencyProfile",
    "Pad",
    "Padded",
    "Percentiles",
    "PreemptionStats",
    "batched",
    "exit_point",
]
