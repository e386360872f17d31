"""The policies of staged models by name: those of all batchers, and those that stretch and split.

A plain :class:`~trims_shim.batching.rules.Rule` works for a staged model as well: its batches go
through the stages as they are.
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
    """What a user calls a policy: one of the names of both tables, or a function that makes a rule.

    Raises ValueError for a name that is not known, TypeError for anything else.
    """
    return rule_maker(policy, STAGED_POLICIES | POLICIES)
