"""The published rules."""

from __future__ import annotations

import pytest

from batching.checking import ms
from batching.staged.policies.boards import batch_at, queue_up
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS
from trims_shim.batching.staged.policies.paper import PaperDVABatch
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

# Up to 4 take as long as 4.
STEP = LatencyProfile(max(size, 4) for size in range(1, 17))
PROFILE = StagedProfile([STEP] * 3)


def test_everything_starts_at_once() -> None:
    rule = PaperDVABatch(PROFILE, max_batch_size=16)
    queue_up(rule, 5, NEVER_NS)
    assert rule.choose(100) == 2


def test_all_join_a_young_batch_and_nobody_an_old_one() -> None:
    rule = PaperDVABatch(PROFILE, max_batch_size=16, wait_ms=5)
    batch = batch_at((1, 2, None))
    assert rule.stretch(ms(4.9), batch, 3) == 3
    assert rule.stretch(ms(5), batch, 3) == 0


@pytest.mark.parametrize(
    ("size", "sizes"), [(16, (8, 8)), (10, (5, 5)), (9, ()), (7, ()), (4, ()), (1, ())]
)
def test_halves_where_they_take_no_longer(size: int, sizes: tuple[int, ...]) -> None:
    """16 take 16, twice 8; 9 take 9, and twice 5 takes 10."""
    rule = PaperDVABatch(PROFILE, max_batch_size=16)
    assert tuple(rule.split(0, batch_at((1, size, None)).parts[0])) == sizes


def test_a_time_is_not_below_nothing() -> None:
    with pytest.raises(ValueError, match="wait_ms"):
        PaperDVABatch(PROFILE, max_batch_size=16, wait_ms=-1)
