"""What a rule of a staged model is asked, and what one says that decides nothing more."""

from __future__ import annotations

import pytest

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import BatchTable
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.staged_rules import StagedRule

PROFILE = StagedProfile([LatencyProfile([10, 20])] * 2)


class Everything(StagedRule):
    def choose(self, now_ns: int) -> int:
        return self.room()


def test_by_itself_a_rule_stretches_and_splits_nothing() -> None:
    rule = Everything(PROFILE, max_batch_size=2)
    part = BatchTable(stages=2).new(0, [Request(0, 0), Request(1, 0)], pair=0)
    assert rule.stretch(0, part.batch, 1) == 0
    assert not rule.split(0, part)


def test_its_profile_is_read_afresh() -> None:
    rule = Everything(PROFILE, max_batch_size=2)
    assert rule.staged is PROFILE
    rule.profile = StagedProfile([LatencyProfile([1, 2])] * 2)
    assert rule.staged is rule.profile


def test_a_profile_without_stages_is_a_mistake_of_the_program() -> None:
    rule = Everything(PROFILE, max_batch_size=2)
    rule.profile = LatencyProfile([1, 2])
    with pytest.raises(AssertionError):
        _ = rule.staged
