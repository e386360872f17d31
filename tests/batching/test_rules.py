"""What all rules share: sizes, weights, and what is given up."""

from __future__ import annotations

import pytest

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Drop, DropReason, Request
from trims_shim.batching.rules import Rule

PROFILE = LatencyProfile([10, 20, 30, 40])


class Everything(Rule):
    def choose(self, now_ns: int) -> int:
        return self.room()


def rule_of(*weights: int, **options: float) -> Everything:
    rule = Everything(PROFILE, max_batch_size=3, **options)  # type: ignore[arg-type]
    for number, weight in enumerate(weights):
        rule.queue.add(Request(number, 0, 100 + number, weight=weight))
    return rule


@pytest.mark.parametrize("wrong", [0, -1, 5])
def test_a_batch_size_that_the_profile_does_not_know(wrong: int) -> None:
    with pytest.raises(ValueError, match="the profile knows sizes from 1 to 4"):
        Everything(PROFILE, max_batch_size=wrong)


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_margin_is_not_below_nothing(wrong: float) -> None:
    with pytest.raises(ValueError, match="margin_ms"):
        Everything(PROFILE, max_batch_size=1, margin_ms=wrong)


@pytest.mark.parametrize(
    ("weights", "max_weight", "room", "is_full"),
    [
        ((1, 1), None, 2, False),
        ((1, 1, 1), None, 3, True),
        ((1, 1, 1, 1), None, 3, True),
        ((9, 9), None, 2, False),
        ((1, 1), 3, 2, False),
        ((1, 2), 3, 2, True),
        ((2, 2), 3, 1, True),
        ((9,), 3, 1, True),
        ((), 3, 0, False),
    ],
)
def test_what_one_batch_holds(
    weights: tuple[int, ...], max_weight: int | None, room: int, is_full: bool
) -> None:
    rule = rule_of(*weights)
    rule.max_weight = max_weight
    assert rule.room() == room
    assert rule.is_full(room) is is_full


def test_dropped_requests_are_reported_once() -> None:
    rule = rule_of(1, 1, 1)
    rule.drop_hopeless(92)
    rule.drop([], DropReason.SHED)
    (drop,) = rule.take_drops()
    assert [each.number for each in drop.requests] == [0, 1]
    assert drop.reason is DropReason.HOPELESS
    assert [each.number for each in rule.queue] == [2]
    assert list(rule.take_drops()) == []


def test_what_would_be_just_in_time_is_not_hopeless() -> None:
    rule = rule_of(1)
    rule.drop_hopeless(90)
    assert rule.take_drops() == []
    rule.drop_hopeless(91)
    assert isinstance(rule.take_drops()[0], Drop)


def test_a_margin_makes_it_hopeless_sooner() -> None:
    rule = rule_of(1, margin_ms=5e-6)
    rule.drop_hopeless(85)
    assert rule.take_drops() == []
    rule.drop_hopeless(86)
    assert rule.take_drops()
