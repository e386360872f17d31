"""The policies by name.

A policy of this table is a :class:`~trims_shim.batching.rules.Rule` class: one queue, devices of
one kind. :class:`~trims_shim.batching.policies.flex.Flex` plans for several models, and is no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from trims_shim.batching.policies.aimd import AIMD
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.policies.clockwork import Clockwork
from trims_shim.batching.policies.cork import Cork
from trims_shim.batching.policies.early_drop import EarlyDrop
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.policies.proteus import Proteus
from trims_shim.batching.policies.window import Window
from trims_shim.batching.rules import RuleMaker
from trims_shim.suggestions import did_you_mean

__all__ = ["POLICIES", "rule_maker"]

POLICIES: dict[str, RuleMaker] = {
    "auto": Auto,
    "aimd": AIMD,
    "clockwork": Clockwork,
    "cork": Cork,
    "early_drop": EarlyDrop,
    "immediate": Immediate,
    "proteus": Proteus,
    "window": Window,
}


def rule_maker(policy: str | RuleMaker, known: Mapping[str, RuleMaker] = POLICIES) -> RuleMaker:
    """Resolve a policy: a name in ``known``, or a function that makes a rule.

    ``functools.partial(Window, wait_ms=5)`` is such a function. Raises ValueError for an unknown
    name, TypeError for anything else.
    """
    if isinstance(policy, str):
        if policy not in known:
            hint = did_you_mean(policy, known)
            raise ValueError(f"there is no policy {policy!r}; there are {', '.join(known)}{hint}")
        return known[policy]
    if not callable(policy):
        raise TypeError(f"a policy is a name or makes a Rule, and {policy!r} is neither")
    return policy
