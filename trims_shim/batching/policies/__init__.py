"""Batching policies, one small file each, and the table of their names."""

from __future__ import annotations

from trims_shim.batching.policies.aimd import AIMD
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.policies.clockwork import Clockwork
from trims_shim.batching.policies.cork import Cork
from trims_shim.batching.policies.early_drop import EarlyDrop
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.policies.proteus import Proteus
from trims_shim.batching.policies.registry import POLICIES, rule_maker
from trims_shim.batching.policies.window import Window

__all__ = [
    "AIMD",
    "POLICIES",
    "Auto",
    "Clockwork",
    "Cork",
    "EarlyDrop",
    "Immediate",
    "Proteus",
    "Window",
    "rule_maker",
]
