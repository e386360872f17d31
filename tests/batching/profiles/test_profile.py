"""Latencies by batch size: what they are made from, and what is read off them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trims_shim.batching.profiles.profile import LatencyProfile, slow_sizes, without_noise

latencies = st.lists(st.integers(1, 1000), min_size=1, max_size=20)


def table(profile: LatencyProfile) -> list[int]:
    return [profile.latency_ns(size) for size in range(1, profile.max_batch_size + 1)]


def test_a_line() -> None:
    profile = LatencyProfile.linear(2, 20, max_batch_size=3)
    assert table(profile) == [22_000_000, 24_000_000, 26_000_000]
    assert profile.line_ns() == pytest.approx((2_000_000, 20_000_000))
    assert repr(profile) == "<LatencyProfile of 1 to 3: about 20 + 2 b ms>"


@example([9, 15, 21, 28, 36, 44, 51, 57, 66, 74])
@given(latencies)
def test_no_line_with_such_costs_is_closer(measured: list[int]) -> None:
    """Where items cost more in large batches, either: it starts at 0."""
    profile = LatencyProfile(measured)

    def squares(alpha: float, beta: float) -> float:
        return sum((alpha * b + beta - each) ** 2 for b, each in enumerate(table(profile), 1))

    alpha, beta = profile.line_ns()
    assert alpha >= 0
    assert beta >= 0
    least = squares(alpha, beta)
    for less, more in [(0.99, 1.01), (1.0, 1.01), (1.01, 1.0), (1.01, 0.99), (0.99, 1.0)]:
        assert squares(alpha * less, beta * more) >= least * (1 - 1e-9)


@given(latencies)
def test_no_batch_is_quicker_than_one_item(measured: list[int]) -> None:
    profile = LatencyProfile(measured)
    assert table(profile) == [min(measured), *measured[1:]]
    assert [profile.taken_ns(size) for size in range(1, len(measured) + 1)] == measured
    assert profile.limited(1).taken_ns(1) == measured[0]


@given(st.lists(st.integers(100, 109), min_size=1, max_size=20))
def test_small_dips_are_noise(measured: list[int]) -> None:
    found = without_noise(measured)
    assert found == sorted(found)
    assert sum(found) == pytest.approx(sum(measured))
    assert without_noise(found) == pytest.approx(found)


def test_sizes_that_take_longer_than_larger_ones() -> None:
    assert slow_sizes({1: 50, 2: 101, 3: 130, 4: 100, 8: 110, 16: 105}) == [3]
    assert slow_sizes({4: 10, 2: 20, 1: 20}) == [1, 2]
    assert slow_sizes({}) == []


def test_who_waits_for_one_more_needs_the_longer_of_both() -> None:
    profile = LatencyProfile([50, 100, 130, 100])
    assert [profile.or_one_more_ns(size) for size in (1, 2, 3)] == [100, 130, 130]


def test_deep_dips_are_real() -> None:
    assert without_noise([5, 10, 13, 10, 12, 11.9, 14]) == [5, 10, 13, 10, 11.95, 11.95, 14]
    measured = LatencyProfile.measured({1: 50, 2: 100, 3: 130, 4: 100}, pads=False)
    assert table(measured) == [50, 100, 130, 100]
    assert measured.largest_within(100, 4) == 4
    assert measured.largest_within(100, 3) == 2
    assert measured.largest_within(49, 4) == measured.largest_within(-1, 4) == 0


@given(latencies, st.integers(0, 1100), st.integers(1, 25))
def test_the_largest_batch_within_a_time(measured: list[int], budget: int, limit: int) -> None:
    profile = LatencyProfile(measured)
    fitting = [size for size, each in enumerate(table(profile), start=1) if each <= budget]
    expected = max((size for size in fitting if size <= limit), default=0)
    assert profile.largest_within(budget, limit) == expected


def test_sizes_between_measured_ones_lie_on_the_line_between_them() -> None:
    profile = LatencyProfile.measured({1: 10, 4: 40, 8: 60}, pads=False)
    assert table(profile) == [10, 20, 30, 40, 45, 50, 55, 60]


def test_thousands_of_measured_sizes_are_looked_up_quickly() -> None:
    looks = 0

    class Size(int):
        def __ge__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) >= other

        def __lt__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) < other

    sizes = range(1, 2001)
    profile = LatencyProfile.measured({Size(size): 10 * size for size in sizes}, pads=False)
    assert table(profile) == [10 * size for size in sizes]
    assert looks < 50 * len(sizes)


def test_padded_sizes_take_what_the_next_measured_one_takes() -> None:
    profile = LatencyProfile.measured({2: 20, 4: 40, 8: 60}, pads=True)
    assert table(profile) == [20, 20, 40, 40, 60, 60, 60, 60]


def test_smaller_than_all_measured_is_no_quicker() -> None:
    assert table(LatencyProfile.measured({3: 30, 4: 40}, pads=False)) == [30, 30, 30, 40]


@pytest.mark.parametrize("pads", [True, False])
def test_beyond_the_largest_measured_size_every_item_costs_what_one_costs_there(pads: bool) -> None:
    profile = LatencyProfile.measured({1: 10, 4: 20}, max_batch_size=6, pads=pads)
    assert table(profile)[3:] == [20, 25, 30]


def test_a_shorter_profile() -> None:
    profile = LatencyProfile([1, 2, 3])
    assert profile.limited(2) == LatencyProfile([1, 2])
    assert profile.limited(2) != profile
    assert profile != [1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_line_through_a_table_of_one_value(size: int) -> None:
    assert LatencyProfile([5] * size).line_ns() == (0, 5)


def test_the_fixed_cost_is_never_below_nothing() -> None:
    assert LatencyProfile([1, 10, 100]).line_ns()[1] == 0


@pytest.mark.parametrize("wrong", [[], [0], [5, -1], [float("nan")]])
def test_latencies_are_positive(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match=r"latency of at least one|not positive"):
        LatencyProfile(wrong)


@pytest.mark.parametrize("wrong", [{}, {0: 5}])
def test_sizes_start_at_one(wrong: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="from 1 on"):
        LatencyProfile.measured(wrong, pads=False)


def test_profiles_are_not_keys() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(LatencyProfile([1]))


def test_no_batch_takes_no_time() -> None:
    profile = LatencyProfile([1e-3, 0.4, 2])
    assert [profile.latency_ns(size) for size in (1, 2, 3)] == [1, 1, 2]
