"""When it is planned again, and for what demand."""

from __future__ import annotations

import pytest

from trims_shim.planner import Placement
from trims_shim.planner.replanning import Replanner

SECOND = 1_000_000_000


def placement(cats: float, dogs: float = 0.0) -> Placement:
    return Placement((), {"cats": cats, "dogs": dogs}, 1.5)


def ask(replanner: Replanner, second: int, times: int, family: str = "cats") -> None:
    """So many requests, evenly in the second that begins then."""
    for number in range(times):
        replanner.came(second * SECOND + number * SECOND // times, family)


def test_a_plan_is_due_after_the_period_but_only_if_somebody_asks() -> None:
    replanner = Replanner(placement(10), period_s=5, burst=1.1)
    assert replanner.next_plan_ns() is None
    assert not replanner.is_due(60 * SECOND)
    replanner.came(60 * SECOND, "cats")
    assert replanner.next_plan_ns() == 62 * SECOND
    assert replanner.is_due(62 * SECOND)
    replanner.planned(62 * SECOND, placement(1))
    replanner.came(63 * SECOND, "cats")
    assert not replanner.is_due(67 * SECOND - 1)
    assert replanner.is_due(67 * SECOND)
    assert replanner.plans == 1
    replanner.planned(67 * SECOND, placement(1))
    assert replanner.plans == 2


def test_what_was_planned_for_stays_for_a_period() -> None:
    replanner = Replanner(placement(10), period_s=5, burst=1.1, since_ns=60 * SECOND)
    replanner.came(61 * SECOND, "cats")
    assert replanner.next_plan_ns() == 65 * SECOND


def test_requests_do_not_put_a_plan_off() -> None:
    replanner = Replanner(placement(10), period_s=5, burst=1.1, since_ns=60 * SECOND)
    for second in (61, 62, 65, 66):
        replanner.came(second * SECOND, "cats")
    assert replanner.is_due(66 * SECOND)
    replanner.planned(66 * SECOND, placement(10))
    replanner.came(67 * SECOND, "cats")
    assert replanner.next_plan_ns() == 71 * SECOND


def test_a_short_period_is_kept_as_long_as_requests_come() -> None:
    replanner = Replanner(placement(10), period_s=1, burst=1.1)
    ask(replanner, 60, 10)
    replanner.planned(61 * SECOND, placement(10))
    ask(replanner, 61, 10)
    assert replanner.next_plan_ns() == 62 * SECOND


def test_a_plan_long_after_the_last_request_is_for_the_least_demand() -> None:
    replanner = Replanner(placement(10), period_s=60, burst=1.1)
    ask(replanner, 10, 10)
    assert replanner.is_due(60 * SECOND)
    assert replanner.wanted_qps(60 * SECOND) == {"cats": 0.1, "dogs": 0.1}


def test_a_plan_after_a_pause_is_for_the_requests_that_come_now() -> None:
    replanner = Replanner(placement(100), period_s=5, burst=1.1)
    for pause_s in (100, 200):
        second = pause_s
        while not replanner.is_due(second * SECOND):
            ask(replanner, second, 40)
            second += 1
        assert second == pause_s + 2
        assert replanner.wanted_qps(second * SECOND)["cats"] == pytest.approx(40)
        replanner.planned(second * SECOND, placement(40))


@pytest.mark.parametrize(
    ("planned_qps", "qps", "after_s", "is_due"),
    [
        (100, 500, 3, True),
        (100, 135, 3, True),
        (100, 125, 3, False),  # within three standard deviations of 100
        (100, 500, 2, True),
        (10_000, 10_500, 3, False),  # more than three, but less than the factor
        (100, 500, 1, False),  # too soon after the last plan
    ],
)
def test_a_burst_is_planned_for_at_once(
    planned_qps: float, qps: int, after_s: int, is_due: bool
) -> None:
    replanner = Replanner(placement(10), period_s=60, burst=1.1)
    ask(replanner, 10, 100)
    replanner.planned(11 * SECOND, placement(planned_qps))
    ask(replanner, 10 + after_s, qps)
    assert replanner.is_due((11 + after_s) * SECOND) is is_due


def test_a_sudden_rise_counts_at_once_and_no_family_is_forgotten() -> None:
    replanner = Replanner(placement(100), period_s=60, burst=1.1)
    for second in range(10, 30):
        ask(replanner, second, 100)
    assert replanner.wanted_qps(30 * SECOND)["cats"] == pytest.approx(100)
    ask(replanner, 30, 1000)
    assert replanner.wanted_qps(31 * SECOND) == {"cats": pytest.approx(1000), "dogs": 0.1}


def test_a_fall_counts_by_and_by() -> None:
    replanner = Replanner(placement(100), period_s=60, burst=1.1)
    for second in range(10, 30):
        ask(replanner, second, 100)
    ask(replanner, 30, 10)
    assert 50 < replanner.wanted_qps(31 * SECOND)["cats"] < 100
