"""Who of other lengths goes along, and who does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.checking import ms
from trims_shim.batching.buckets import OpenBucket, family_of
from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.policies.mixing import companions
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.rules import Rule

FIXED = LatencyProfile.linear(0.01, 10, max_batch_size=8)
"""Whatever the length, a batch takes 10 ms."""
numbers = itertools.count()


def rule_of(
    length: int | None,
    queued: int,
    profile: LatencyProfile = FIXED,
    *,
    deadline_ns: int = NEVER_NS,
    priority: int = 0,
    weight: int = 1,
) -> Rule:
    rule = Goodput(profile, max_batch_size=profile.max_batch_size)
    rule.key = "plain" if length is None else OpenBucket(length)
    rule.family = family_of(rule.key)
    for _ in range(queued):
        rule.queue.add(Request(next(numbers), 0, deadline_ns, priority, rule.key, weight))
    return rule


def joined(rule: Rule, size: int, *others: Rule, now_ns: int = 0) -> list[tuple[object, int]]:
    return [(mate.key, count) for mate, count in companions(now_ns, rule, size, others)]


def test_where_padding_costs_nothing_all_go_together() -> None:
    short, middle, long = rule_of(8, 1), rule_of(16, 2), rule_of(32, 3)
    assert joined(middle, 2, short, long) == [(8, 1), (32, 3)]


def test_where_every_token_is_paid_for_nobody_does() -> None:
    by_length = {
        length: LatencyProfile.linear(length, 0, max_batch_size=8) for length in (8, 16, 32)
    }
    short, middle, long = (rule_of(length, 2, by_length[length]) for length in by_length)
    assert joined(middle, 2, short, long) == []
    assert joined(short, 2, middle, long) == []
    assert joined(long, 2, short, middle) == []


def test_a_few_wait_for_a_long_one_only_if_enough_gain_by_it() -> None:
    # Together 18 + 8 ms; apart 10 and then 18 more.
    quick = LatencyProfile.linear(0, 10, max_batch_size=8)
    slow = LatencyProfile.linear(0, 18, max_batch_size=8)
    crowd, lone = rule_of(8, 7, quick), rule_of(32, 1, slow)
    assert joined(crowd, 7, lone) == []  # 7 x 8 ms later, 1 x 10 ms sooner
    crowd, many = rule_of(8, 2, quick), rule_of(32, 6, slow)
    assert joined(crowd, 2, many) == [(32, 6)]
    elsewhere = rule_of(None, 6, slow)
    crowd = rule_of(8, 7, quick)
    assert joined(crowd, 7, lone, elsewhere) == [(32, 1)]  # for the sake of others that wait


def test_only_those_of_the_family() -> None:
    assert joined(rule_of(8, 1), 1, rule_of(None, 3)) == []
    assert joined(rule_of(None, 1), 1, rule_of(8, 3)) == []
    other = rule_of(8, 3)
    other.family = family_of(("other", OpenBucket(8)))
    assert joined(rule_of(8, 1), 1, other) == []


def test_no_more_than_a_batch_can_hold() -> None:
    assert joined(rule_of(8, 6), 6, rule_of(16, 5)) == [(16, 2)]
    assert joined(rule_of(8, 8), 8, rule_of(16, 5)) == []


def test_no_more_than_a_batch_may_weigh() -> None:
    rule, light, heavy = rule_of(8, 2, weight=3), rule_of(16, 3, weight=2), rule_of(32, 2, weight=5)
    last = rule_of(64, 2, weight=2)  # would fit beside the first ones, but not beside all
    for each in (rule, light, heavy, last):
        each.max_weight = 10
    assert joined(rule, 2, light, heavy, last) == [(16, 2)]


def test_those_of_other_priority_keep_to_themselves() -> None:
    assert joined(rule_of(8, 1, priority=1), 1, rule_of(16, 3)) == []
    below = rule_of(16, 2, priority=1)
    below.queue.add(Request(next(numbers), 0, key=below.key))
    assert joined(rule_of(8, 1, priority=1), 1, below) == [(16, 2)]


SLOW = LatencyProfile.linear(1, 40, max_batch_size=8)
"""6 take 46 ms, 2 take 42, and 8 together 48."""


@pytest.mark.parametrize(
    ("deadline_ms", "margin_ms", "joins"), [(60, 0, True), (47, 0, False), (60, 13, False)]
)
def test_nobody_is_late_for_it(deadline_ms: float, margin_ms: float, joins: bool) -> None:
    mine, others = rule_of(8, 6, SLOW, deadline_ns=ms(deadline_ms)), rule_of(16, 2, SLOW)
    mine.margin_ns = others.margin_ns = ms(margin_ms)
    assert bool(joined(mine, 6, others)) == joins


@pytest.mark.parametrize(("deadline_ms", "joins"), [(48, True), (47, True), (89, True), (88, True)])
def test_who_would_be_late_goes_along_where_nobody_else_is_late_for_it(
    deadline_ms: float, joins: bool
) -> None:
    # After the others, they would be answered after 88 ms.
    crowd, few = rule_of(8, 6, SLOW), rule_of(16, 2, SLOW, deadline_ns=ms(deadline_ms))
    assert bool(joined(crowd, 6, few)) == joins


def test_more_that_are_in_time_count_before_who_waits_longer() -> None:
    quick = LatencyProfile.linear(0, 10, max_batch_size=8)
    slow = LatencyProfile.linear(0, 18, max_batch_size=8)
    # Together 18 ms; apart 10, and then 18 more. All seven wait for the one, by 8 ms each.
    for deadline_ms, expected in ((28, []), (27, [(32, 1)]), (18, [(32, 1)]), (17, [])):
        lone = rule_of(32, 1, slow, deadline_ns=ms(deadline_ms))
        assert joined(rule_of(8, 7, quick), 7, lone) == expected
    # Two are late for one.
    lone = rule_of(32, 1, slow, deadline_ns=ms(20))
    assert joined(rule_of(8, 2, quick, deadline_ns=ms(17)), 2, lone) == []
    assert joined(rule_of(8, 2, quick, deadline_ns=ms(18)), 2, lone) == [(32, 1)]


def test_what_batches_may_take_is_weighed() -> None:
    # 8 take 48 ms, or 24, or 72: of three times one is in time together, and 2 apart.
    mine, others = rule_of(8, 6, SLOW, deadline_ns=ms(47)), rule_of(16, 2, SLOW)
    mine.stretches = others.stretches = [0.5, 1.0, 1.5]
    assert joined(mine, 6, others) == []
    mine.stretches = others.stretches = [0.5, 0.5, 1.5]
    assert joined(mine, 6, others) == [(16, 2)]


def test_what_is_late_anyway_keeps_nobody_away() -> None:
    mine, others = rule_of(8, 6, SLOW, deadline_ns=ms(45)), rule_of(16, 2, SLOW)
    assert joined(mine, 6, others) == [(16, 2)]


def test_a_second_device_is_free_sooner() -> None:
    # Together 16 ms; apart the others begin after 10, or with two devices after 5, and take 10.
    profile = LatencyProfile([ms(each) for each in (10, 10, 10, 16)])
    found = []
    for devices in (1, 2):
        rule, mate = rule_of(8, 2, profile), rule_of(16, 2, profile)
        rule.devices = mate.devices = devices
        found.append(joined(rule, 1, mate))
    assert found == [[(16, 2)], [(16, 2)]]
    found = []
    for devices in (1, 2):
        rule, mate = rule_of(8, 1, profile), rule_of(16, 3, profile)
        rule.devices = mate.devices = devices
        found.append(joined(rule, 1, mate))
    assert found == [[(16, 3)], []]


def test_who_is_in_time_on_a_second_device_delays_nobody() -> None:
    # Together 18 ms; apart the one is answered after 10 + 18, or with two devices after 5 + 18.
    quick = LatencyProfile.linear(0, 10, max_batch_size=8)
    slow = LatencyProfile.linear(0, 18, max_batch_size=8)
    for devices, expected in ((1, [(32, 1)]), (2, [])):
        crowd, lone = rule_of(8, 7, quick), rule_of(32, 1, slow, deadline_ns=ms(23))
        crowd.devices = lone.devices = devices
        assert joined(crowd, 7, lone) == expected


def test_other_rules_have_no_companions() -> None:
    rule = Immediate(FIXED, max_batch_size=8)
    assert rule.companions(0, 1, [rule_of(8, 1)]) == ()


@settings(max_examples=300)
@given(data=st.data())
def test_all_together_wait_no_longer_for_it(data: st.DataObject) -> None:
    """One device, nobody else comes: against the same batches one after the other."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4, unique=True))
    alpha, beta = data.draw(st.floats(0, 3)), data.draw(st.floats(0.1, 20))
    rules = [
        rule_of(
            length,
            data.draw(st.integers(1, 4)),
            LatencyProfile.linear(alpha * length, beta, max_batch_size=32),
        )
        for length in lengths
    ]
    first, *others = rules
    size = len(first.queue)
    found = companions(0, first, size, others)
    gone = [(first, size), *found]
    rest = [each for each in others if all(each is not mate for mate, _ in found)]
    together = _waited([[mate for mate, _ in gone], *([each] for each in rest)])
    assert together <= _waited([*([mate] for mate, _ in gone), *([each] for each in rest)])


def _waited(batches: Sequence[Sequence[Rule]]) -> int:
    """By all of them, if the batches run in this order."""
    total_ns = now_ns = 0
    for batch in batches:
        count = sum(len(rule.queue) for rule in batch)
        longest = max(batch, key=lambda rule: int(str(rule.key)))
        now_ns += longest.profile.latency_ns(count)
        total_ns += count * now_ns
    return total_ns
