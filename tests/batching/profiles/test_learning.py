"""What is learned about latencies: robust, never stuck, and as good as what was told."""

from __future__ import annotations

import copy
import random
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.profiles.learning import LearnedProfile
from trims_shim.batching.profiles.profile import LatencyProfile

MS = 1_000_000
LINE = LatencyProfile.linear(2, 20, max_batch_size=32)


def told(
    learned: LearnedProfile, sizes: list[int], *, times: int = 10, factor: float = 1
) -> LearnedProfile:
    for _ in range(times):
        for size in sizes:
            learned.observe(size, round(LINE.latency_ns(size) * factor))
    return learned


def close(found: LatencyProfile, expected: LatencyProfile, *, tolerance: float = 0.02) -> bool:
    return all(
        abs(found.latency_ns(size) / expected.latency_ns(size) - 1) < tolerance
        for size in range(1, found.max_batch_size + 1)
    )


def test_what_is_between_two_sizes_is_between_their_times() -> None:
    learned = told(LearnedProfile(), [1, 4, 16, 32])
    assert close(learned.profile(32), LINE)


def test_nothing_known_means_try() -> None:
    assert LearnedProfile().profile(8).latency_ns(8) < MS


def test_twice_the_largest_size_is_tried_and_more_is_not_believed() -> None:
    """Of one size nobody knows what part of it is fixed."""
    profile = told(LearnedProfile(), [4]).profile(32)
    known_ns = LINE.latency_ns(4)
    found = [profile.latency_ns(size) / known_ns for size in (3, 4, 8, 32)]
    assert found == [0.875, 1, 1, 4]


def test_half_the_smallest_size_is_tried_but_once() -> None:
    """As if its items cost less: behind a long queue nothing smaller would ever run."""
    flat = LatencyProfile.linear(0.1, 45, max_batch_size=16)
    learned = LearnedProfile()
    sizes = []
    for _ in range(40):
        latency_ns = learned.profile(16).latency_ns
        best = min(range(1, 17), key=lambda size: latency_ns(size) / size) if sizes else 16
        sizes.append(best)
        learned.observe(best, flat.latency_ns(best))
    assert sizes.count(8) <= 2  # the first one may have compiled something
    assert set(sizes) == {16, 8}
    assert sizes[-20:] == [16] * 20


def test_what_was_known_before_is_no_guess() -> None:
    learned = LearnedProfile(LINE)
    for _ in range(8):
        learned.observe(8, LINE.latency_ns(8))
    assert learned.profile(32).latency_ns(4) == LINE.latency_ns(4)


def test_growing_batches_are_all_found_under_an_objective() -> None:
    """Choosing the largest size that seems to fit reaches the largest that does."""
    learned, slo_ns = LearnedProfile(), 70 * MS
    size = 0
    for _ in range(30):
        size = max(1, learned.profile(32).largest_within(slo_ns, 32))
        learned.observe(size, LINE.latency_ns(size))
    assert size == LINE.largest_within(slo_ns, 32) == 25


@pytest.mark.parametrize("pauses", [(1.5, 3), (4, 3.5)])
def test_pauses_in_the_first_batches_of_a_size_keep_no_larger_one_from_being_tried(
    pauses: tuple[float, float],
) -> None:
    learned = LearnedProfile()
    for _ in range(8):
        learned.observe(1, LINE.latency_ns(1))
    learned.profile(8)
    for slower in pauses:
        learned.observe(2, round(slower * LINE.latency_ns(2)))
    assert learned.profile(8).latency_ns(4) <= 2 * LINE.latency_ns(1)


def test_sizes_that_do_not_run_follow_those_that_do_when_a_change_has_passed() -> None:
    learned = LearnedProfile()
    for size in [*range(1, 9)] * 10:
        learned.observe(size, LINE.latency_ns(size))
    for slower in (2, 1.5, 1.1) * 3:
        for _ in range(80):
            learned.profile(8)
            learned.observe(2, round(slower * LINE.latency_ns(2)))
        assert learned.profile(8).latency_ns(8) == pytest.approx(
            slower * LINE.latency_ns(8), rel=0.2
        )


def test_full_batches_are_reached_soon() -> None:
    """Where all sizes take about as long, none is a surprise, and each leads to the next."""
    flat = LatencyProfile.linear(0.4, 45, max_batch_size=16)
    learned, size = LearnedProfile(), 0
    learned.observe(1, flat.latency_ns(1))
    for _ in range(10):
        size = learned.profile(16).largest_within(55 * MS, 16)
        if size == 16:
            break
        learned.observe(size, flat.latency_ns(size))
    assert size == 16


def test_a_second_item_that_costs_more_than_all_others_is_no_end() -> None:
    """As in torch on a processor: a product of matrices instead of one with a vector."""
    took_ms = [0, 18, 42, 55, 40, 43, 45, 47, 50, 53, 56, 58, 60, 62, 64, 66, 68]
    rng = random.Random(2)
    learned, sizes = LearnedProfile(), []
    for _ in range(60):
        queued = rng.randint(8, 16)
        sizes.append(max(1, learned.profile(16).largest_within(90 * MS, queued)))
        learned.observe(sizes[-1], round(took_ms[sizes[-1]] * MS * rng.uniform(1, 1.1)))
    assert min(sizes[-20:]) >= 8


@pytest.mark.parametrize("prior", [None, LINE])
def test_one_pause_is_not_learned(prior: LatencyProfile | None) -> None:
    learned = told(LearnedProfile(prior), [1, 8, 32], times=9)
    before = learned.profile(32)
    learned.observe(8, 5_000 * MS)
    told(learned, [1], times=20)
    assert close(learned.profile(32), before)


def test_the_first_batch_of_each_size_may_be_slow() -> None:
    """It compiles, tunes, allocates; were it believed, no size would be tried but the first."""
    rng = random.Random(1)
    learned, begun, sizes = LearnedProfile(), set(), []
    for _ in range(100):
        queued = rng.randint(1, 16)
        sizes.append(max(1, learned.profile(16).largest_within(70 * MS, queued)))
        slow = 1 if sizes[-1] in begun else 10
        begun.add(sizes[-1])
        learned.observe(sizes[-1], slow * LINE.latency_ns(sizes[-1]))
    assert close(learned.profile(16), LINE, tolerance=0.1)
    assert max(sizes[-50:]) == 16


def test_one_slow_batch_does_not_win_over_a_prior() -> None:
    learned = LearnedProfile(LINE)
    learned.observe(1, 10 * LINE.latency_ns(1))
    assert learned.profile(32) == LINE


def test_one_quick_batch_corrects_a_slow_prior() -> None:
    slow = LatencyProfile([10 * LINE.latency_ns(size) for size in range(1, 33)])
    learned = LearnedProfile(slow)
    learned.observe(1, LINE.latency_ns(1))
    assert close(learned.profile(32), LINE)


def test_a_slower_machine_is_noticed_at_sizes_that_have_not_run() -> None:
    learned = told(LearnedProfile(LINE), [2, 4], times=30, factor=3)
    profile = learned.profile(32)
    assert profile.latency_ns(32) == pytest.approx(3 * LINE.latency_ns(32), rel=0.1)
    assert profile.latency_ns(4) == pytest.approx(3 * LINE.latency_ns(4), rel=0.02)


def test_another_shape_than_the_priors_is_learned() -> None:
    flat = LatencyProfile([50 * MS] * 32)
    learned = told(LearnedProfile(flat), list(range(1, 33)), times=40)
    assert close(learned.profile(32), LINE, tolerance=0.1)


def test_a_machine_that_has_become_quicker_is_noticed() -> None:
    learned = told(LearnedProfile(), [1, 16], times=40, factor=5)
    told(learned, [1, 16], times=40)
    assert close(learned.profile(16), LINE)


def test_what_has_not_run_for_long_must_not_cost_more_than_what_has() -> None:
    learned = told(LearnedProfile(), [32], factor=9)
    told(learned, [1, 16], times=10)
    assert learned.profile(32).latency_ns(32) == pytest.approx(9 * LINE.latency_ns(32), rel=0.2)
    told(learned, [1, 16], times=400)
    assert learned.profile(32).latency_ns(32) <= 2 * LINE.latency_ns(16)


def test_what_is_forgotten_leaves_its_shape() -> None:
    """A policy that makes batches of one size only still knows that two of them take too long."""
    learned = told(LearnedProfile(), [1, 4, 16, 32])
    told(learned, [8], times=1000)
    assert close(learned.profile(32), LINE)


@pytest.mark.parametrize("factor", [0.9, 5])
def test_the_best_size_is_found_from_a_prior_by_which_batches_do_not_pay(factor: float) -> None:
    """Measured while the machine was busy; choosing what it calls best must find what is."""
    prior = LatencyProfile([factor * LINE.latency_ns(1) * size**1.3 for size in range(1, 33)])
    learned, sizes = LearnedProfile(prior), []
    for _ in range(500):
        profile = learned.profile(32)
        sizes.append(max(range(1, 33), key=lambda size: (size / profile.latency_ns(size), size)))
        learned.observe(sizes[-1], LINE.latency_ns(sizes[-1]))
    assert sizes[0] == 1
    assert sizes[-50:].count(32) >= 40


def test_little_is_promised_of_sizes_that_have_not_run() -> None:
    """Large batches leave the caches, so their items cost a little more; few come for now."""
    prior = LatencyProfile([MS * size ** (1.1 if size > 3 else 0.95) for size in range(1, 17)])
    learned = LearnedProfile(prior)
    for _ in range(50):
        for size in (1, 2, 3):
            learned.observe(size, prior.latency_ns(size))
    profile = learned.profile(16)
    found = [profile.latency_ns(size) / prior.latency_ns(size) for size in range(1, 17)]
    assert found[:3] == [1, 1, 1]
    assert 0.6 < min(found) < 0.95
    assert sorted(profile.latency_ns(size) for size in range(1, 17)) == [
        profile.latency_ns(size) for size in range(1, 17)
    ]


def test_of_a_size_that_seems_slow_no_more_is_promised_than_that_items_cost_the_same() -> None:
    """That is enough for it to be tried; what is promised and not kept makes requests late."""
    learned = LearnedProfile()
    for size in (1, 2, 3, 4) * 10:
        learned.observe(size, 8 * MS)
    for _ in range(3):
        learned.profile(16)
        learned.observe(5, 20 * MS)
    profile = learned.profile(16)
    assert profile.latency_ns(4) == 8 * MS
    assert profile.latency_ns(5) == 10 * MS


def test_batches_that_do_not_pay_are_tried_seldom() -> None:
    rng = random.Random(3)
    learned, sizes = LearnedProfile(), []
    for _ in range(3000):
        profile, queued = learned.profile(16), rng.randint(1, 16)
        rates = {size: size / profile.latency_ns(size) for size in range(1, queued + 1)}
        sizes.append(max(rates, key=lambda size: (rates[size], size)))
        learned.observe(sizes[-1], round(MS * sizes[-1] ** 1.3))
    assert sizes[-1000:].count(1) > 900


def test_what_is_typical_is_promised() -> None:
    """Not what is safe: a request that is given up for safety is lost for certain."""
    rng = random.Random(5)
    learned = LearnedProfile()
    for _ in range(32):
        learned.observe(1, rng.choice([10, 11, 11, 20]) * MS)
    assert learned.profile(1).latency_ns(1) == 11 * MS


def test_only_sizes_that_run_are_estimated() -> None:
    learned = LearnedProfile(batch_sizes=[4, 1, 16])
    for _ in range(9):
        for size, latency in ((1, 5), (4, 9), (16, 30)):
            learned.observe(size, latency * MS)
    assert set(learned.latencies_ns(16)) == {1, 4, 16}
    found = [learned.profile(16).latency_ns(size) / MS for size in (1, 2, 4, 5, 16)]
    assert found == [pytest.approx(each, rel=0.05) for each in (5, 9, 9, 30, 30)]


def test_guesses_are_not_saved() -> None:
    """Else the next process would take them for measured, and not try."""
    learned = LearnedProfile()
    assert learned.known_latencies_ns(32) == {}
    told(learned, [1, 2, 4])
    known = learned.known_latencies_ns(32)
    assert {size: round(each) for size, each in known.items()} == {
        size: LINE.latency_ns(size) for size in range(1, 5)
    }


def test_a_doubt_is_not_saved() -> None:
    """Else requests that no device could answer make the next process promise a thousandth."""
    learned = told(LearnedProfile(), [1, 2, 4])
    known = learned.known_latencies_ns(4)
    for _ in range(20):
        learned.doubt()
    assert learned.is_doubted
    assert learned.known_latencies_ns(4) == known


def test_what_invites_a_size_is_not_saved() -> None:
    """Sizes that have not run in this process keep what earlier ones have measured."""
    prior = LatencyProfile([each * MS for each in (10, 10, 10, 10, 20, 20, 20, 20)])
    learned = LearnedProfile(prior)
    for _ in range(20):
        learned.observe(4, 10 * MS)
    assert learned.profile(8).latency_ns(5) < 13 * MS  # so that it is tried
    assert learned.known_latencies_ns(8)[5] == 20 * MS


def test_one_item_that_takes_more_than_others_changes_nothing_of_these() -> None:
    """Over any number of processes, each of which starts from what the last one knew."""
    taken_ns = [14 * MS, 9 * MS, 10 * MS, 11 * MS, 12 * MS, 13 * MS, 14 * MS, 15 * MS]
    learned = LearnedProfile()
    for size, each_ns in enumerate(taken_ns, 1):
        learned.observe(size, each_ns)
    for _ in range(10):
        known = learned.known_latencies_ns(8)
        learned = LearnedProfile(LatencyProfile.measured(known, pads=False))
        for _ in range(20):
            learned.observe(1, 14 * MS)
    promised = [learned.profile(8).latency_ns(size) for size in range(2, 9)]
    assert promised == pytest.approx(taken_ns[1:], rel=0.01)


def test_a_profile_of_many_sizes_is_not_made_after_each_batch() -> None:
    rng = random.Random(4)
    learned = told(LearnedProfile(), [1, 32], times=40)
    made = set()
    for _ in range(160):
        learned.observe(rng.randint(1, 1024), rng.randint(1, 10**9))
        made.add(id(learned.profile(1024)))
    assert len(made) <= 11


def test_a_prior_is_stretched_to_more_sizes() -> None:
    small = LINE.limited(8)
    profile = LearnedProfile(small).profile(32)
    assert profile.latency_ns(16) == LINE.latency_ns(8)
    assert profile.latency_ns(32) == 2 * LINE.latency_ns(8)


# --- doubt ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2, 10, 1000])
def test_a_profile_that_lets_nothing_run_does_not_stay(factor: int) -> None:
    """Saved on a busy machine: some requests are lost, then it is right."""
    slow = LatencyProfile([factor * LINE.latency_ns(size) for size in range(1, 33)])
    learned, given_up = LearnedProfile(slow), 0
    for _ in range(100):
        if learned.profile(32).latency_ns(1) > 30 * MS:
            given_up += 1
            learned.doubt()
        else:
            learned.observe(1, LINE.latency_ns(1))
    assert close(learned.profile(32), LINE)
    assert given_up <= 2 * factor.bit_length()


def test_doubt_is_gone_when_something_has_run() -> None:
    learned = told(LearnedProfile(), [1, 16])
    learned.profile(32)
    assert not learned.doubt()
    assert learned.doubt()
    assert learned.profile(16).latency_ns(16) == pytest.approx(LINE.latency_ns(16) / 2, rel=0.02)
    learned.observe(1, LINE.latency_ns(1))
    assert not learned.doubt()
    assert close(learned.profile(16), LINE)


# --- refreshing -----------------------------------------------------------------------------------


def test_a_profile_is_made_anew_only_for_news() -> None:
    learned = told(LearnedProfile(), [1, 2], times=50)
    profile = learned.profile(8)
    assert learned.profile(8) is profile
    learned.observe(1, MS)
    assert learned.profile(8) is profile
    for _ in range(16):
        learned.observe(1, MS)
    assert learned.profile(8) is not profile
    assert learned.profile(4).max_batch_size == 4
    assert learned.count == 117


def test_the_first_news_count_at_once() -> None:
    learned = LearnedProfile()
    learned.profile(8)
    learned.observe(1, 7 * MS)
    assert learned.profile(8).latency_ns(1) == 7 * MS


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10**12)), max_size=60),
    st.sampled_from([None, [1, 8, 64]]),
    st.sampled_from([None, LINE]),
    st.data(),
)
def test_any_history_makes_a_profile(
    history: list[tuple[int, int]],
    batch_sizes: list[int] | None,
    prior: LatencyProfile | None,
    data: st.DataObject,
) -> None:
    learned = LearnedProfile(prior, batch_sizes=batch_sizes)
    for size, duration_ns in history:
        learned.observe(size, duration_ns)
        if data.draw(st.booleans()):
            learned.doubt()
        profile = learned.profile(64)
        assert profile.max_batch_size == 64
        assert 0 < profile.latency_ns(1) <= profile.latency_ns(64)


def test_doubt_has_an_end() -> None:
    """Thousands are given up in a burst before anything runs; the next batch says what is true."""
    learned = LearnedProfile(LatencyProfile([5e6] * 4))
    learned.profile(4)
    for _ in range(5000):
        learned.doubt()
        learned.profile(4)
    assert learned.is_doubted
    learned.observe(1, 5_000_000)
    learned.observe(1, 5_000_000)
    assert not learned.is_doubted
    assert learned.profile(4).latency_ns(1) == 5_000_000


def slowed(batches: int, *, factor: float) -> LearnedProfile:
    """All sizes known, then so many batches of two of them on a device of another speed."""
    learned = told(LearnedProfile(), [1, 2, 4, 8, 16, 32], times=30)
    for number in range(batches):
        size = (2, 4)[number % 2]
        learned.profile(32)
        learned.observe(size, round(factor * LINE.latency_ns(size)))
    return learned


@pytest.mark.parametrize("factor", [0.2, 3, 10])
def test_a_device_of_another_speed_is_seen_at_once_in_all_sizes(factor: float) -> None:
    expected = LatencyProfile([factor * LINE.latency_ns(size) for size in range(1, 33)])
    assert close(slowed(12, factor=factor).profile(32), expected, tolerance=0.1)


def test_a_short_disturbance_is_none() -> None:
    learned = slowed(9, factor=3)
    told(learned, [2], times=1)
    told(learned, [1, 8, 32], times=20)
    assert close(learned.profile(32), LINE, tolerance=0.1)


def test_a_change_of_speed_takes_what_has_run_since_as_it_was() -> None:
    """Sizes that say little by themselves have run among those that showed it."""
    learned = LearnedProfile()
    told(learned, [1, 2], times=60)
    for _ in range(10):
        for size in (2, 32):
            learned.profile(32)
            learned.observe(size, 10 * LINE.latency_ns(size))
    assert learned.profile(32).latency_ns(32) == pytest.approx(10 * LINE.latency_ns(32), rel=0.1)


def test_a_size_that_has_run_since_a_change_stays_firm() -> None:
    learned = LearnedProfile()
    for number in range(80):
        size = 1 + number % 2
        learned.observe(size, 1000 * size)
        learned.profile(2)
    for size in (2, 2, 2, 2, 1, 2, 2, 2, 2, 2):
        learned.observe(size, 2000 * size)
        learned.profile(2)
    found = learned.profile(2)
    assert [found.taken_ns(size) for size in (1, 2)] == pytest.approx([2000, 4000], rel=0.02)
    learned.observe(2, 2000)  # one that is quick is no news for the other
    assert learned._has_run_often(1)


def test_a_child_that_is_forked_while_a_duration_is_noted_can_go_on() -> None:
    learned, copies = LearnedProfile(), []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        copies.append(copy.deepcopy(learned))
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: trace if event == "call" else None)
    try:
        learned.observe(2, MS)
    finally:
        sys.settrace(before)
    assert len(copies) > 5
    for each in copies:
        assert each.renewed(4).latency_ns(2) > 0
