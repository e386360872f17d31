"""The policies of staged models by name: those of all batchers, and those for stages only.

A plain :class:`~trims_shim.batching.rules.Rule` works for a staged model too: its batches go
through the stages unchanged.
"""

from __future__ import annotations

from trims_shim.batching.policies.registry import POLICIES, rule_maker
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.staged.policies.dvabatch import DVABatch
from trims_shim.batching.staged.policies.inputs import InputDiversity
from trims_shim.batching.staged.policies.load import LoadDiversity
from trims_shim.batching.staged.policies.operators import OperatorDiversity

__all__ = ["STAGED_POLICIES", "staged_rule_maker"]

STAGED_POLICIES: dict[str, RuleMaker] = {
    "dvabatch": DVABatch,
    "load": LoadDiversity,
    "operators": OperatorDiversity,
    "inputs": InputDiversity,
}


def staged_rule_maker(policy: str | RuleMaker) -> RuleMaker:
    """Resolve a policy: a name in either table, or a function that makes a rule.

    Raises ValueError for an unknown name, TypeError for anything else.
    """
    return rule_maker(policy, STAGED_POLICIES | POLICIES)
