"""What a profile says about a model: where larger batches pay, and where stages do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.profiles.diversity import (
    Diversity,
    has_input_diversity,
    has_load_diversity,
    has_operator_diversity,
    preferred_size,
    stretch_gain,
)
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile


def line(alpha_ms: float, beta_ms: float, largest: int = 64) -> LatencyProfile:
    return LatencyProfile.linear(alpha_ms, beta_ms, max_batch_size=largest)


def staged(*lines: tuple[float, float], largest: int = 64) -> StagedProfile:
    return StagedProfile([line(alpha, beta, largest) for alpha, beta in lines])


# --- preferred sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha_ms", "beta_ms", "expected"),
    # Of an endless line: 10 * beta / alpha; of one that ends, what is a tenth below its end.
    [(1, 1e-9, 1), (1, 0.1, 1), (10, 2, 2), (1e-9, 1, 59)],
)
def test_preferred_sizes_of_lines(alpha_ms: float, beta_ms: float, expected: int) -> None:
    assert preferred_size(line(alpha_ms, beta_ms)) == expected


def test_one_bad_size_is_not_the_end() -> None:
    """A size that brings nothing may lie before others that do."""
    profile = LatencyProfile.measured({1: 10, 2: 20, 4: 20, 8: 40}, pads=True)
    assert preferred_size(profile) == 4


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=40))
def test_nothing_larger_brings_a_tenth_more(latencies_ns: list[float]) -> None:
    profile = LatencyProfile(latencies_ns)
    rates = [size / profile.latency_ns(size) for size in range(1, len(latencies_ns) + 1)]
    size = preferred_size(profile)
    assert max(rates[size:], default=0) <= 1.1 * rates[size - 1] * (1 + 1e-9)
    for smaller in range(1, size):
        assert max(rates[smaller:]) > 1.1 * rates[smaller - 1] * (1 - 1e-9)


# --- operators ------------------------------------------------------------------------------------


def test_stages_of_one_kind_have_no_operator_diversity() -> None:
    assert not has_operator_diversity(staged((1, 5), (1, 5), (1, 5)))
    assert not has_operator_diversity(staged((1, 5)))


def test_a_rest_that_prefers_small_batches_has() -> None:
    assert has_operator_diversity(staged((0.1, 40), (3, 0.01)))


def test_a_rest_that_prefers_little_less_has_not() -> None:
    """At 4 its rate is four fifths of that at 64, and that is what splitting would cost at most."""
    assert not has_operator_diversity(staged((1, 1), (3, 1)))
    assert has_operator_diversity(staged((1, 4), (3, 1)))


def test_a_beginning_that_large_batches_harm_is_no_reason_to_split() -> None:
    """Of what does not fit into a cache, for example, batches are small from the start."""
    harmed = LatencyProfile.measured({1: 5, 8: 8, 16: 100}, pads=False)
    assert not has_operator_diversity(StagedProfile([harmed, line(0.00001, 0.0001, 16)]))


def test_what_comes_first_may_prefer_small_batches() -> None:
    """Its parts could be split before it only, where they are formed anyway."""
    assert not has_operator_diversity(staged((3, 0.01), (0.1, 40)))


def test_stages_that_take_no_time_decide_nothing() -> None:
    assert not has_operator_diversity(staged((1, 20), (1, 20), (0.01, 1e-6)))
    assert not has_operator_diversity(staged((1e-9, 0.01), (1, 1e-6), (1, 1e-6)))


# --- load -----------------------------------------------------------------------------------------


def test_the_gain_of_catching_up_is_what_the_rest_saves() -> None:
    # Two batches of b take 2 * (4 * 10 + 4 * b) ms; three of four stages save 10 ms each.
    profile = staged(*[(1, 10)] * 4, largest=4)
    assert stretch_gain(profile) == pytest.approx((30 / (2 * 44) + 30 / (2 * 48)) / 2)
    assert has_load_diversity(profile)


def test_batches_that_cost_as_much_as_their_items_are_not_worth_catching_up_with() -> None:
    profile = staged(*[(1, 1e-6)] * 4)
    assert stretch_gain(profile) == pytest.approx(0, abs=1e-5)
    assert not has_load_diversity(profile)


@pytest.mark.parametrize("profile", [staged((1, 10)), staged((1, 10), (1, 10), largest=1)])
def test_nothing_catches_up_with_one_stage_or_one_item(profile: StagedProfile) -> None:
    assert stretch_gain(profile) == 0
    assert not has_load_diversity(profile)


# --- inputs ---------------------------------------------------------------------------------------


def test_lengths_that_cost_the_same_are_no_diversity() -> None:
    short, long = staged((1, 3), (1, 3)), staged((1.1, 3), (1.1, 3))
    assert not has_input_diversity([short, long])
    assert has_input_diversity([short, staged((4, 3), (4, 3))])


def test_all_are_read_from_the_profiles_of_a_model() -> None:
    short, long = staged((0.1, 1), (0.1, 1)), staged((1, 30), (1, 30))
    assert Diversity.of([short, long]) == Diversity(operators=False, load=True, inputs=True)
    assert Diversity.of([long]).inputs is None
