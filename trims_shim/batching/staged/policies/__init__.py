"""Policies of staged models, one small file each, and the table of their names."""

from __future__ import annotations

from trims_shim.batching.staged.policies.dvabatch import DVABatch
from trims_shim.batching.staged.policies.inputs import InputDiversity
from trims_shim.batching.staged.policies.load import LoadDiversity
from trims_shim.batching.staged.policies.operators import OperatorDiversity
from trims_shim.batching.staged.policies.paper import PaperDVABatch
from trims_shim.batching.staged.policies.registry import STAGED_POLICIES, staged_rule_maker

__all__ = [
    "STAGED_POLICIES",
    "DVABatch",
    "InputDiversity",
    "LoadDiversity",
    "OperatorDiversity",
    "PaperDVABatch",
    "staged_rule_maker",
]
