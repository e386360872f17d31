"""Policies by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from trims_shim.batching.policies import POLICIES, Window, rule_maker
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import Rule

PROFILE = LatencyProfile([1, 2])


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_a_rule(name: str) -> None:
    rule = rule_maker(name)(PROFILE, max_batch_size=2)
    assert isinstance(rule, Rule)
    assert rule.max_batch_size == 2


def test_a_policy_with_settings() -> None:
    maker = partial(Window, wait_ms=5)
    assert rule_maker(maker) is maker


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no policy 'fast'; there are auto, aimd"):
        rule_maker("fast")
    with pytest.raises(ValueError, match="window; did you mean 'immediate'"):
        rule_maker("imediate")


def test_what_is_no_policy() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="5 is neither"):
        rule_maker(wrong)
