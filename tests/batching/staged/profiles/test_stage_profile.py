"""Latencies by stage: sums from any stage to the end, and what they are made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

tables = st.integers(1, 5).flatmap(
    lambda most: st.lists(
        st.lists(st.integers(1, 1000), min_size=most, max_size=most), min_size=1, max_size=5
    )
)


@given(tables)
def test_what_remains_is_the_sum_of_the_stages(latencies: list[list[int]]) -> None:
    stages = [LatencyProfile(each) for each in latencies]
    profile = StagedProfile(stages)
    for size in range(1, profile.max_batch_size + 1):
        for stage in range(len(stages) + 1):
            expected = sum(each.latency_ns(size) for each in stages[stage:])
            assert profile.remaining_ns(stage, size) == expected
            assert profile.passed_ns(stage, size) == profile.latency_ns(size) - expected
        assert profile.latency_ns(size) == profile.remaining_ns(0, size)
        assert profile.stage_ns(0, size) == stages[0].latency_ns(size)


def test_nobody_takes_no_time() -> None:
    profile = StagedProfile([LatencyProfile([5, 6])] * 2)
    assert (profile.stage_ns(1, 0), profile.remaining_ns(0, 0), profile.passed_ns(1, 0)) == (0,) * 3


def test_it_knows_the_sizes_that_all_of_its_stages_know() -> None:
    profile = StagedProfile([LatencyProfile([1, 2, 3]), LatencyProfile([1, 2])])
    assert profile.max_batch_size == 2
    assert profile.preferred == (2, 2)


def test_a_whole_in_even_stages() -> None:
    profile = StagedProfile.even(LatencyProfile([30, 60]), 3)
    assert [profile.stage_ns(stage, 2) for stage in range(3)] == [20] * 3
    assert profile.latency_ns(1) == 30


def test_a_stage_takes_a_nanosecond_at_least() -> None:
    assert StagedProfile.even(LatencyProfile([1]), 3).latency_ns(1) == 3


def test_a_shorter_profile() -> None:
    stages = [LatencyProfile([1, 2, 3]), LatencyProfile([2, 4, 6])]
    profile = StagedProfile(stages, preferred=(3, 1), sure=(1, 3)).limited(2)
    limited = [each.limited(2) for each in stages]
    assert profile == StagedProfile(limited, preferred=(2, 1), sure=(1, 2))
    assert profile.max_batch_size == 2


def test_equal_are_those_of_equal_stages_and_sizes() -> None:
    stages = [LatencyProfile([1, 2])]
    assert StagedProfile(stages) == StagedProfile(stages)
    assert StagedProfile(stages) != StagedProfile(stages, preferred=[1])
    assert StagedProfile(stages) != StagedProfile(stages, sure=[1])
    assert StagedProfile(stages) != StagedProfile(stages * 2)
    assert StagedProfile(stages) != LatencyProfile([1, 2])
    with pytest.raises(TypeError, match="unhashable"):
        hash(StagedProfile(stages))


def test_larger_sizes_take_as_the_largest_in_proportion() -> None:
    profile = StagedProfile([LatencyProfile([10, 12]), LatencyProfile([20, 30])])
    assert profile.latency_ns(4) == 84
    assert profile.remaining_ns(1, 4) == profile.stage_ns(1, 4) == 60
    assert profile.passed_ns(1, 4) == profile.stage_ns(0, 4) == 24
    assert profile.max_batch_size == 2


def test_it_says_what_it_is() -> None:
    profile = StagedProfile([LatencyProfile.linear(1, 10, max_batch_size=4)] * 3)
    assert repr(profile) == "<StagedProfile of 3 stages, of 1 to 4: about 30 + 3 b ms>"


def test_it_needs_stages() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        StagedProfile([])


@pytest.mark.parametrize("kind", ["preferred", "sure"])
@pytest.mark.parametrize("wrong", [(1,), (1, 2, 1)])
def test_every_stage_has_its_sizes(wrong: tuple[int, ...], kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} sizes for 2 stages"):
        StagedProfile([LatencyProfile([1, 2])] * 2, **{kind: wrong})


def test_what_it_is_made_of_is_sure() -> None:
    assert StagedProfile([LatencyProfile([1, 2, 3]), LatencyProfile([1, 2])]).sure == (2, 2)


@pytest.mark.parametrize("width", [-0.1, 1.1])
def test_the_width_is_a_share(width: float) -> None:
    with pytest.raises(ValueError, match="it is a share"):
        StagedProfile([LatencyProfile([1, 2])], width=width)


def test_a_preferred_size_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="prefers batches of 0"):
        StagedProfile([LatencyProfile([1, 2])] * 2, preferred=(1, 0))
