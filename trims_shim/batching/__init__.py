"""Adaptive batching in process: batch functions, called with single items, under an objective."""

from __future__ import annotations

from trims_shim.batching.batcher import Batcher, batched
from trims_shim.batching.collating.collate import Collate
from trims_shim.batching.collating.padding import Pad, Padded
from trims_shim.batching.drivers.replies import BatchFuture
from trims_shim.batching.flex.batcher import FlexBatcher, PreemptionStats
from trims_shim.batching.flex.exit_points import exit_point
from trims_shim.batching.profiles.profile import LatencyProfile
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
