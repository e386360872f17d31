"""What holds for every policy of the table, whatever arrives.

``drive`` and ``Checked`` assert the contract of the protocol in all of these: no empty, oversized
or doubled batch, none of keys that may not share one, no lost request, free devices only, timers in
the future.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.checking import Checked, ms
from batching.policies.instances import Instance, instances, run
from trims_shim.batching.buckets import OpenBucket
from trims_shim.batching.policies import POLICIES, Proteus
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Cancelled,
    Drop,
    DropReason,
    Request,
    Run,
)
from trims_shim.batching.rules import Rule, RuleMaker
from trims_shim.batching.simulator import requests, simulate, uniform
from trims_shim.batching.single import Batching

MAKERS: dict[str, RuleMaker] = {
    **POLICIES,
    "proteus-head": partial(Proteus, drop="head"),
    "proteus-none": partial(Proteus, drop="none"),
}
every_policy = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
# Each of these tests runs for each policy.
fewer_examples = settings(max_examples=40)

# Which promises a policy makes beyond the contract.
WORK_CONSERVING = ("aimd", "clockwork", "early_drop", "immediate")
NEVER_LATE = ("auto", "clockwork", "early_drop", "proteus", "proteus-head")
WATCHES_DEADLINES = (*NEVER_LATE, "proteus-none")


def policies(names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("maker", [MAKERS[name] for name in names], ids=names)


KEYS = ("a", "b", OpenBucket(8), OpenBucket(16), OpenBucket(24))
mixed = instances(devices=3, keys=KEYS, priorities=2, weights=4)


@every_policy
@fewer_examples
@given(instance=mixed)
def test_every_request_ends_once(maker: RuleMaker, instance: Instance) -> None:
    assert run(maker, instance).log == run(maker, instance).log


@every_policy
@fewer_examples
@given(instance=mixed, jitter=st.randoms(use_true_random=True))
def test_every_request_ends_once_whatever_batches_and_timers_take(
    maker: RuleMaker, instance: Instance, jitter: random.Random
) -> None:
    run(maker, instance, jitter=jitter)


@every_policy
@fewer_examples
@given(instance=mixed, data=st.data())
def test_what_is_cancelled_neither_runs_nor_keeps_others_from_it(
    maker: RuleMaker, instance: Instance, data: st.DataObject
) -> None:
    gone = data.draw(st.lists(st.sampled_from(instance.requests)))
    extra = [
        (each.arrival_ns + ms(data.draw(st.integers(0, 60))), Cancelled(each)) for each in gone
    ]
    history = run(maker, instance, *extra)
    assert history.cancelled <= {each.number for each in gone}


@every_policy
@fewer_examples
@given(instance=mixed, data=st.data())
def test_flushing_ends_all_waiting(
    maker: RuleMaker, instance: Instance, data: st.DataObject
) -> None:
    run(maker, instance, (ms(data.draw(st.integers(0, 200))), FLUSH))


@every_policy
@fewer_examples
@given(instance=instances(), data=st.data())
def test_timers_that_nobody_asked_for_change_nothing(
    maker: RuleMaker, instance: Instance, data: st.DataObject
) -> None:
    times_ms = data.draw(st.lists(st.floats(0, 400), max_size=20))
    timers = [(ms(each), TIMER) for each in times_ms]
    assert run(maker, instance, *timers).log == run(maker, instance).log


@every_policy
def test_a_request_without_deadline_does_not_wait_for_ever(maker: RuleMaker) -> None:
    instance = Instance(
        (Request(0, 0, NEVER_NS), Request(1, ms(10_000), NEVER_NS)),
        LatencyProfile.linear(2, 20, max_batch_size=4),
    )
    assert run(maker, instance).answered[0] < ms(10_000)


@every_policy
@pytest.mark.parametrize("slow", [1, 5, 25])
def test_a_device_that_was_slow_at_first_is_not_given_up(maker: RuleMaker, slow: int) -> None:
    profile = LatencyProfile.linear(2, 20, max_batch_size=16)
    batches = itertools.count()
    outcome = simulate(
        Batching(lambda _: maker(profile, max_batch_size=16)),
        requests(uniform(50), slo_ms=100, count=800),
        service_ns=lambda _, batch: (
            profile.latency_ns(len(batch)) * (6 if next(batches) < slow else 1)
        ),
    )
    last = [
        end_ns <= request.deadline_ns
        for request, end_ns in outcome.answered
        if request.number >= 700
    ]
    assert sum(last) > 95


@every_policy
@fewer_examples
@given(instance=instances(devices=2, keys="ab"))
def test_the_simulator_sees_the_same_decisions(maker: RuleMaker, instance: Instance) -> None:
    def make(key: Hashable) -> Rule:
        return maker(instance.profile, max_batch_size=instance.max_batch_size)

    outcome = simulate(
        Batching(make, devices=instance.devices),
        instance.requests,
        service_ns=lambda device, batch: instance.profile.latency_ns(len(batch)),
    )
    history = run(maker, instance)
    assert {request.number: end_ns for request, end_ns in outcome.answered} == history.answered
    assert {request.number for request, _ in outcome.dropped} == set(history.dropped)
    assert not outcome.unanswered


@policies(WORK_CONSERVING)
@fewer_examples
@given(instance=mixed)
def test_no_device_idles_while_anything_is_queued(maker: RuleMaker, instance: Instance) -> None:
    def observe(now_ns: int, policy: Checked, actions: Sequence[Action]) -> None:
        assert not (policy.free and policy.queued)

    run(maker, instance, observe=observe)


@policies(WATCHES_DEADLINES)
@fewer_examples
@given(instance=instances(devices=3, keys="ab", priorities=2))
def test_nothing_expires_while_a_device_idles(maker: RuleMaker, instance: Instance) -> None:
    """A waiting policy is asked again before it is too late for any request that is queued.

    Too late: the last moment at which the request, run alone, would be answered in time. What is
    given up as hopeless is past it, and something is shed only where a batch starts instead.
    The other policies either never wait (immediate, aimd), or wait by the clock: the window for
    ``wait_ms`` at most (see its tests), cork for less than requests have waited of late.
    """
    alone_ns = instance.profile.latency_ns(1)

    def observe(now_ns: int, policy: Checked, actions: Sequence[Action]) -> None:
        dropped = [each for each in actions if isinstance(each, Drop)]
        for drop in dropped:
            if drop.reason is DropReason.HOPELESS:
                assert all(each.deadline_ns < now_ns + alone_ns for each in drop.requests)
            else:
                assert any(isinstance(each, Run) for each in actions)
        if policy.free and policy.queued:
            wake_ns = policy.next_deadline_ns()
            assert wake_ns is not None
            last_ns = min(each.deadline_ns for each in policy.queued.values()) - alone_ns
            assert wake_ns <= last_ns

    run(maker, instance, observe=observe)


@policies(NEVER_LATE)
@fewer_examples
@given(instance=instances(devices=3, keys="ab", priorities=2, weights=4))
def test_no_answer_is_late_when_batches_take_what_the_profile_says(
    maker: RuleMaker, instance: Instance
) -> None:
    history = run(maker, instance)
    assert history.in_time(instance.requests) == len(history.answered)


@policies(("auto", "early_drop", "proteus"))
@fewer_examples
@given(instance=instances(priorities=3))
def test_nothing_is_shed_for_a_lower_priority(maker: RuleMaker, instance: Instance) -> None:
    by_number = {each.number: each for each in instance.requests}

    def observe(now_ns: int, policy: Checked, actions: Sequence[Action]) -> None:
        ran = [each.batch for each in actions if isinstance(each, Run)]
        for drop in actions:
            if isinstance(drop, Drop) and drop.reason is DropReason.SHED:
                highest = max(by_number[each.number].priority for each in ran[0])
                assert all(each.priority <= highest for each in drop.requests)

    run(maker, instance, observe=observe)
