"""Whether another one is worth waiting for: what is counted, and what follows from it."""

from __future__ import annotations

import pytest

from batching.checking import ms
from trims_shim.batching.policies.company import Company
from trims_shim.batching.profiles.profile import LatencyProfile

LINE = LatencyProfile.linear(2, 20, max_batch_size=4)


def company(profile: LatencyProfile = LINE) -> Company:
    found = Company()
    found.know(profile)
    return found


def expect(known: Company, size: int, gap_ms: float | None, times: int = 1) -> None:
    """``size`` are queued, and the next one comes so much later, or not before an answer."""
    for _ in range(times):
        since_ns = known.expect(size, ms(1000))
        known.until_ns = since_ns + known.savings_ns[size]
        if gap_ms is None:
            known.answered(0)
        else:
            known.came(since_ns + ms(gap_ms))


def test_nothing_is_assumed_at_first() -> None:
    assert company().shares == [0] * 5
    assert company().patience_ns == [0] * 5


def test_one_more_saves_the_fixed_cost() -> None:
    assert company().savings_ns == [0, ms(20), ms(20), ms(20), 0]


def test_the_share_is_of_those_that_came_in_time() -> None:
    known = company()
    expect(known, 1, 20)
    expect(known, 1, 20.1)
    expect(known, 1, None)
    expect(known, 1, 3)
    assert known.shares == pytest.approx([0, 1 / 2, 0, 0, 0])


def test_what_can_not_come_in_time_is_not_counted() -> None:
    known = company()
    known.expect(1, ms(1000))
    known.until_ns = ms(999)
    known.came(ms(1001))
    assert known.shares[1] == 0
    expect(known, 1, 3)
    assert known.shares[1] == 1


def test_a_decision_that_is_made_again_counts_from_the_first_time() -> None:
    known = company()
    assert known.expect(2, ms(10)) == ms(10)
    assert known.expect(2, ms(12)) == ms(10)
    assert known.expect(3, ms(13)) == ms(13)


def test_who_always_comes_soon_is_waited_for() -> None:
    known = company()
    expect(known, 1, 0.5, times=10)
    assert known.patience_ns == pytest.approx([0, ms(2), 0, 0, 0])


def test_who_comes_late_or_seldom_is_not() -> None:
    known = company()
    expect(known, 1, 9)  # saves 11 ms to one, costs 11 ms to the other
    assert known.patience_ns[1] == 0
    known = company()
    expect(known, 1, 8.9)
    assert known.patience_ns[1] > 0
    expect(known, 1, None, times=3)
    assert known.patience_ns[1] == 0


def test_the_more_would_wait_the_sooner_it_has_to_come() -> None:
    known = company()
    expect(known, 1, 5)
    expect(known, 3, 5)
    assert known.patience_ns[1] > 0
    assert known.patience_ns[3] == 0


def test_those_who_come_while_a_batch_runs_would_wait_too() -> None:
    known = company()
    for _ in range(500):
        known.answered(4)
    expect(known, 1, 5)
    assert known.patience_ns[1] == 0


def test_the_one_that_is_waited_for_is_one_of_those_who_come_meanwhile() -> None:
    """With three others it costs four of them 2 ms of waiting and 2 of a longer batch."""
    known = company()
    for _ in range(500):
        known.answered(4)
    expect(known, 1, 2)
    assert known.patience_ns[1] > 0


def test_it_changes_its_mind() -> None:
    known = company()
    expect(known, 1, 0.5, times=200)
    expect(known, 1, None, times=200)
    assert known.patience_ns[1] == 0
    expect(known, 1, 0.5, times=200)
    assert known.patience_ns[1] > 0


def test_a_new_profile_may_have_more_sizes_or_fewer() -> None:
    known = company()
    expect(known, 1, 0.5)
    known.know(LatencyProfile.linear(2, 20, max_batch_size=16))
    expect(known, 15, 0.5)
    known.expect(15, 0)
    known.know(LatencyProfile.linear(2, 20, max_batch_size=2))
    known.came(1)
    assert known.shares[1] == 1
