"""The sliding window against Nexus' own words, and what was added to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.checking import ms
from batching.policies.instances import Instance, instances, profiles, run
from trims_shim.batching.policies import EarlyDrop
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import DropReason, Request

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=4)


def window(
    deadlines_ns: Sequence[int], now_ns: int, profile: LatencyProfile
) -> tuple[list[int], list[int]]:
    """(kept, dropped) as Nexus' backend does it: one by one, with a target that shrinks."""
    left, kept, dropped = sorted(deadlines_ns), [], []
    target = min(len(left), profile.max_batch_size)
    while left and len(kept) < target:
        deadline_ns = left.pop(0)
        in_time = deadline_ns >= now_ns + profile.latency_ns(target)
        (kept if in_time else dropped).append(deadline_ns)
        target = min(target, len(kept) + len(left))
    return kept, dropped


@given(profiles(), st.lists(st.integers(0, 120), min_size=1, max_size=20), st.integers(0, 50))
def test_it_keeps_and_drops_what_nexus_does(
    profile: LatencyProfile, deadlines_ms: list[int], now_ms: int
) -> None:
    rule = EarlyDrop(profile, max_batch_size=profile.max_batch_size)
    for number, each in enumerate(deadlines_ms):
        rule.queue.add(Request(number, 0, ms(each)))
    size = rule.choose(ms(now_ms))
    kept, dropped = window([ms(each) for each in deadlines_ms], ms(now_ms), profile)
    assert [each.deadline_ns for each in rule.queue.take(size)] == kept
    drops = [request for drop in rule.take_drops() for request in drop.requests]
    assert sorted(each.deadline_ns for each in drops) == dropped
    assert rule.has_shed == any(each >= ms(now_ms) + profile.latency_ns(1) for each in dropped)


def test_a_head_that_forces_small_batches_goes() -> None:
    """At 22, four end at 50 and three at 48, and either of the first two would not let them."""
    deadlines_ms = (45, 47, 60, 60, 60)
    requests = (
        Request(0, 0, ms(1000)),
        *(Request(number, ms(1), ms(each)) for number, each in enumerate(deadlines_ms, start=1)),
    )
    assert run(EarlyDrop, Instance(requests, PROFILE)).log == [
        (0, "run", (0,)),
        (ms(22), "drop", (1, 2)),
        (ms(22), "run", (3, 4, 5)),
    ]


def rule_with(*requests: Request) -> EarlyDrop:
    rule = EarlyDrop(PROFILE, max_batch_size=4)
    for request in requests:
        rule.queue.add(request)
    return rule


def test_whether_something_was_shed_is_of_the_last_decision() -> None:
    rule = rule_with(Request(0, 0, ms(23)), Request(1, 0, ms(200)))
    assert (rule.choose(0), rule.has_shed) == (1, True)
    assert (rule.choose(0), rule.has_shed) == (1, False)


def test_behind_a_light_head_there_may_be_heavy_ones() -> None:
    rule = rule_with(
        Request(0, 0, ms(23)), Request(1, 0, ms(200)), Request(2, 0, ms(200), weight=9)
    )
    rule.max_weight = 3
    assert rule.choose(0) == 1
    assert [each.number for each in rule.queue] == [1, 2]


def test_the_reasons() -> None:
    requests = (
        Request(0, 0, ms(1000)),
        Request(1, ms(1), ms(40)),
        Request(2, ms(1), ms(45)),
        Request(3, ms(1), ms(100)),
    )
    history = run(EarlyDrop, Instance(requests, PROFILE))
    assert history.log[0] == (0, "run", (0,))
    assert history.dropped == {1: DropReason.HOPELESS, 2: DropReason.SHED}
    assert history.answered[3] == ms(44)


def test_low_priorities_fill_up_and_cost_higher_ones_nothing() -> None:
    """At 22, the urgent one leaves time for a batch of two; more of low priority have to wait."""
    requests = (
        Request(0, 0, ms(1000)),
        Request(1, ms(1), ms(47), priority=1),
        *(Request(number, ms(1), ms(200)) for number in range(2, 6)),
    )
    history = run(EarlyDrop, Instance(requests, PROFILE))
    assert history.log == [
        (0, "run", (0,)),
        (ms(22), "run", (1, 2)),
        (ms(46), "run", (3, 4, 5)),
    ]


def test_late_ones_of_low_priority_make_room_for_others_of_it() -> None:
    requests = (
        Request(0, 0, ms(1000)),
        Request(1, ms(1), ms(90), priority=1),
        Request(2, ms(1), ms(45)),
        Request(3, ms(1), ms(200)),
    )
    history = run(EarlyDrop, Instance(requests, PROFILE))
    assert history.dropped == {2: DropReason.SHED}
    assert history.log[-1] == (ms(22), "run", (1, 3))


def test_all_of_low_priority_go_if_none_is_in_time_beside_the_others() -> None:
    """The second would be in time alone, at 22, not in a batch of two, at 24."""
    rule = rule_with(Request(0, 0, ms(90), priority=1), Request(1, 0, ms(23)))
    assert (rule.choose(0), rule.has_shed) == (1, True)
    (drop,) = rule.take_drops()
    assert [each.number for each in drop.requests] == [1]
    assert [each.number for each in rule.queue] == [0]


def test_low_priorities_fill_up_also_where_higher_ones_had_to_go() -> None:
    """The first of each priority is in time alone, at 22, and in no larger batch."""
    rule = rule_with(
        Request(0, 0, ms(23), priority=1),
        Request(1, 0, ms(90), priority=1),
        Request(2, 0, ms(23)),
        Request(3, 0, ms(200)),
    )
    assert rule.choose(0) == 2
    (drop,) = rule.take_drops()
    assert [each.number for each in drop.requests] == [0, 2]
    assert [each.number for each in rule.queue] == [1, 3]


@given(instance=instances(keys="ab"), margin_ms=st.integers(0, 20))
def test_a_margin_is_a_slower_profile(instance: Instance, margin_ms: int) -> None:
    slower = LatencyProfile(
        instance.profile.latency_ns(size) + ms(margin_ms)
        for size in range(1, instance.max_batch_size + 1)
    )
    with_margin = run(partial(EarlyDrop, margin_ms=margin_ms), instance)

    def careful(profile: LatencyProfile, *, max_batch_size: int) -> EarlyDrop:
        return EarlyDrop(slower, max_batch_size=max_batch_size)

    assert with_margin.log == run(careful, instance).log


@pytest.mark.parametrize(("max_weight", "first"), [(None, (1, 2, 3)), (4, (1, 2)), (1, (1,))])
def test_weights_limit_the_batch(max_weight: int | None, first: tuple[int, ...]) -> None:
    requests = (
        Request(0, 0, ms(1000)),
        *(Request(number, ms(1), ms(500), weight=2) for number in (1, 2, 3)),
    )
    history = run(EarlyDrop, Instance(requests, PROFILE, max_weight=max_weight))
    assert history.log[1] == (ms(22), "run", first)
    assert not history.dropped
