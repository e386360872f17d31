"""The limit grows by one, and shrinks by a tenth."""

from __future__ import annotations

import pytest

from batching.checking import ms
from batching.policies.instances import Instance, run
from trims_shim.batching.policies import AIMD
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Finished, Request

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=16)


def finished(size: int, slo_ms: float = 50, *, is_typical: bool = True) -> Finished:
    batch = [Request(number, ms(7), ms(7 + slo_ms)) for number in range(size)]
    return Finished(0, batch, ms(100), is_typical)


def rule_at(limit: int) -> AIMD:
    rule = AIMD(PROFILE, max_batch_size=16)
    for size in range(1, limit):
        rule.on_finished(ms(101), finished(size))
    assert rule.limit == limit
    return rule


def test_batches_grow_by_one_as_long_as_they_are_quick_enough() -> None:
    requests = tuple(Request(number, 0, ms(1000)) for number in range(10))
    history = run(AIMD, Instance(requests, PROFILE))
    assert [len(numbers) for _, _, numbers in history.log] == [1, 2, 3, 4]


def test_a_batch_that_took_longer_than_the_objective_costs_a_tenth() -> None:
    rule = rule_at(10)
    rule.on_finished(ms(150), finished(10))
    assert rule.limit == 11
    rule.on_finished(ms(150.001), finished(10))
    assert rule.limit == 9  # 9.9
    rule.on_finished(ms(150), finished(9))
    assert rule.limit == 10  # 10.9


def test_it_is_the_time_of_the_batch_and_not_the_wait_that_counts() -> None:
    """The batch started at 100, after the deadline of all of its requests."""
    rule = rule_at(3)
    rule.on_finished(ms(101), finished(3))
    assert rule.limit == 4


def test_only_batches_at_the_limit_say_that_more_is_possible() -> None:
    rule = rule_at(5)
    rule.on_finished(ms(101), finished(4))
    assert rule.limit == 5


def test_what_says_nothing_about_others_is_not_counted() -> None:
    rule = rule_at(5)
    rule.on_finished(ms(500), finished(5, is_typical=False))
    assert rule.limit == 5


def test_the_limit_stays_within_one_and_the_maximum() -> None:
    rule = rule_at(16)
    rule.on_finished(ms(101), finished(16))
    rule.on_finished(ms(101), finished(16))
    rule.on_finished(ms(101), finished(16))
    assert rule.limit == 16
    rule.on_finished(ms(900), finished(16))
    assert rule.limit == 14  # 14.4
    for _ in range(50):
        rule.on_finished(ms(900), finished(1))
    assert rule.limit == 1


def test_without_deadlines_nothing_is_too_slow() -> None:
    rule = rule_at(2)
    rule.on_finished(ms(10_000), Finished(0, [Request(0, 0, NEVER_NS)] * 2, 0))
    assert rule.limit == 3


def test_step_and_backoff() -> None:
    rule = AIMD(PROFILE, max_batch_size=16, step=4, backoff=0.5)
    rule.on_finished(ms(101), finished(1))
    assert rule.limit == 5
    rule.on_finished(ms(900), finished(5))
    assert rule.limit == 2


def test_only_what_is_late_already_is_dropped() -> None:
    """At 22, one has missed its deadline, and the other, due at 30, will."""
    requests = (Request(0, 0, ms(50)), Request(1, 0, ms(21.9)), Request(2, 0, ms(30)))
    assert run(AIMD, Instance(requests, PROFILE)).log == [
        (0, "run", (0,)),
        (ms(22), "drop", (1,)),
        (ms(22), "run", (2,)),
    ]


@pytest.mark.parametrize("wrong", [{"step": 0}, {"backoff": 1}, {"backoff": 0}])
def test_steps_and_backoffs_that_lead_nowhere(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="step is"):
        AIMD(PROFILE, max_batch_size=16, **wrong)
