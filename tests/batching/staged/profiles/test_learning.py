"""What is learned of all stages together."""

from __future__ import annotations

from trims_shim.batching.profiles.lengths import LengthCurve
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.profiles.learning import LearnedStages
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

MS = 1_000_000


def test_a_profile_of_the_whole_is_shared_out_evenly() -> None:
    learned = LearnedStages(2, LatencyProfile([4.0 * MS, 8.0 * MS]))
    assert [each.latency_ns(2) for each in learned.profile(2).stages] == [4 * MS, 4 * MS]


def test_little_news_is_no_new_profile() -> None:
    """What rules are given stays the same object, which costs nothing to look at."""
    learned = LearnedStages(2)
    for _ in range(8):
        learned.observe(1, MS, 0)
        learned.observe(1, MS, 1)
    made = learned.profile(8)
    learned.observe(1, MS, 1)
    assert learned.profile(8) is made
    assert learned.count == 8


def test_the_largest_size_that_was_known_is_not_preferred_to_larger_ones() -> None:
    """Else what an earlier process never ran is split for ever."""
    stage = LatencyProfile.linear(1, 10, max_batch_size=4)
    assert LearnedStages(2, StagedProfile([stage] * 2)).profile(32).preferred == (32, 32)
    known = StagedProfile([stage] * 2, preferred=[2, 4])
    assert LearnedStages(2, known).profile(32).preferred == (2, 32)
    assert LearnedStages(2, known).profile(3).preferred == (2, 3)


def test_where_lengths_tell_of_larger_sizes_all_are_sure() -> None:
    curve = LengthCurve()
    learned = LearnedStages(1, curves=[curve], length=8)
    assert learned.profile(8).sure == (0,)
    for _ in range(20):
        curve.tell(4, 32, 5 * MS)
    assert learned.profile(8).sure == (8,)
