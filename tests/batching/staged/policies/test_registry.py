"""Policies of staged models by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from trims_shim.batching.policies import POLICIES
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.policies import STAGED_POLICIES, LoadDiversity, staged_rule_maker
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

PROFILE = StagedProfile([LatencyProfile([1, 2])] * 2)


@pytest.mark.parametrize("name", [*STAGED_POLICIES, *POLICIES])
def test_every_name_makes_a_rule(name: str) -> None:
    rule = staged_rule_maker(name)(PROFILE, max_batch_size=2)
    assert isinstance(rule, Rule)
    assert rule.max_batch_size == 2


def test_no_name_means_two_things() -> None:
    assert not STAGED_POLICIES.keys() & POLICIES.keys()


def test_a_policy_with_settings() -> None:
    maker = partial(LoadDiversity, wait_ms=5)
    assert staged_rule_maker(maker) is maker


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no policy 'fast'; there are dvabatch, load, operators"):
        staged_rule_maker("fast")


def test_what_is_no_policy() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="5 is neither"):
        staged_rule_maker(wrong)
