"""Waiting for request q + 1 until D(1) - L(q + 1), case by case."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from batching.checking import ms
from batching.policies.instances import Instance, run
from trims_shim.batching.policies import Proteus
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import DropReason, Finished, Request

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=4)


def history_of(*requests: Request, **options: Any) -> Any:
    return run(partial(Proteus, **options), Instance(requests, PROFILE))


def test_a_lone_request_waits_until_a_second_would_make_it_late() -> None:
    history = history_of(Request(0, ms(5), ms(100)))
    assert history.log == [(ms(100 - 24), "run", (0,))]


def test_it_waits_no_longer_than_it_may_if_nobody_comes() -> None:
    """Where three would take less than the two that wait."""
    odd = LatencyProfile([ms(10), ms(40), ms(12)])
    history = run(Proteus, Instance((Request(0, 0, ms(100)), Request(1, 0, ms(100))), odd))
    assert history.log == [(ms(100 - 40), "run", (0, 1))]


def test_each_arrival_moves_the_moment() -> None:
    """The second waits for a third (26), the third for a fourth (28)."""
    history = history_of(
        Request(0, 0, ms(100)), Request(1, ms(10), ms(110)), Request(2, ms(20), ms(120))
    )
    assert history.log == [(ms(100 - 28), "run", (0, 1, 2))]


def test_a_full_batch_goes_at_once() -> None:
    history = history_of(*(Request(number, ms(number), ms(200)) for number in range(4)))
    assert history.log == [(ms(3), "run", (0, 1, 2, 3))]


def test_a_batch_that_fills_up_while_the_device_is_busy_goes_when_it_is_free() -> None:
    history = history_of(*(Request(number, ms(number), ms(500)) for number in range(8)))
    assert history.log == [(ms(3), "run", (0, 1, 2, 3)), (ms(31), "run", (4, 5, 6, 7))]


def test_the_next_one_too_late_for_the_first_does_not_join() -> None:
    """At 76 the first has to start; one at 77 finds the device busy and waits for its own time."""
    history = history_of(Request(0, 0, ms(100)), Request(1, ms(77), ms(177)))
    assert history.log == [(ms(76), "run", (0,)), (ms(177 - 24), "run", (1,))]


def test_a_margin_is_kept_free() -> None:
    history = history_of(Request(0, 0, ms(100)), margin_ms=3)
    assert history.log == [(ms(100 - 24 - 3), "run", (0,))]


def learned(**options: Any) -> Proteus:
    """After timers 2 ms late, batches 3 ms longer than expected, one of 50 ms and one of none."""
    rule = Proteus(PROFILE, max_batch_size=4, **options)
    for number in range(300):
        batch = [Request(number, 0)]
        rule.on_wake(ms(2))
        rule.on_finished(ms(25 if number != 200 else 72), Finished(0, batch, 0))
        rule.on_finished(ms(500), Finished(0, batch, 0, is_typical=False))
    rule.on_finished(ms(22), Finished(0, [Request(300, 0)], 0))
    rule.queue.add(Request(301, 0, ms(100)))
    return rule


@pytest.mark.parametrize(("margin_ms", "wake_ms"), [(None, 71), (0, 76), (1, 75)])
def test_waits_end_early_by_what_timers_and_batches_are_late(
    margin_ms: float | None, wake_ms: float
) -> None:
    rule = learned(margin_ms=margin_ms)
    assert rule.choose(0) == 0
    assert rule.wake_ns == ms(wake_ms)


def test_a_new_profile_has_been_overrun_only_since() -> None:
    rule = learned()
    rule.profile = LatencyProfile.linear(2, 23, max_batch_size=4)
    for took_ms in (26, 26, 26, 25):
        rule.on_finished(ms(took_ms), Finished(0, [Request(0, 0)], 0))
    assert rule.choose(0) == 0
    assert rule.wake_ns == ms(100 - 27 - 2 - 1)


def test_batches_quicker_than_expected_do_not_lengthen_the_wait() -> None:
    rule = Proteus(PROFILE, max_batch_size=4)
    rule.on_finished(ms(1), Finished(0, [Request(0, 0)], 0))
    rule.queue.add(Request(1, 0, ms(100)))
    assert rule.choose(0) == 0
    assert rule.wake_ns == ms(76)


def test_as_many_go_as_the_first_one_has_time_for() -> None:
    rule = Proteus(PROFILE, max_batch_size=4, drop="head")
    for number in range(4):
        rule.queue.add(Request(number, 0, ms(24 if number == 0 else 500)))
    assert rule.choose(0) == 2


@pytest.mark.parametrize("drop", ["window", "head"])
def test_a_margin_makes_up_for_late_timers(drop: Any) -> None:
    rule = Proteus(PROFILE, max_batch_size=4, drop=drop, margin_ms=10)
    rule.queue.add(Request(0, 0, ms(100)))
    assert rule.choose(0) == 0
    assert rule.wake_ns == ms(66)
    assert rule.choose(ms(66 + 12)) == 1
    assert rule.choose(ms(66 + 13)) == 0  # now it is hopeless
    assert not rule.queue


def test_a_request_without_time_to_wait_runs_at_once() -> None:
    history = history_of(Request(0, ms(1), ms(24)))
    assert history.log == [(ms(1), "run", (0,))]


def test_nothing_is_waited_for_while_another_model_needs_the_device() -> None:
    history = history_of(Request(0, 0, ms(100), key="a"), Request(1, ms(10), ms(300), key="b"))
    assert history.log == [(ms(10), "run", (0,)), (ms(300 - 24), "run", (1,))]


BUSY_THEN_LATE = (
    *(Request(number, 0, ms(30), priority=1) for number in range(4)),
    Request(4, ms(1), ms(51)),
    Request(5, ms(1), ms(54)),
    Request(6, ms(1), ms(100)),
    Request(7, ms(1), ms(40)),
)


@pytest.mark.parametrize(
    ("drop", "batches", "dropped"),
    [
        ("window", [(5, 6)], {4: DropReason.SHED, 7: DropReason.HOPELESS}),
        ("head", [(4,), (6,)], {5: DropReason.HOPELESS, 7: DropReason.HOPELESS}),
        ("none", [(7, 4, 5, 6)], {}),
    ],
)
def test_what_gives_way_when_not_all_can_be_in_time(
    drop: str, batches: list[tuple[int, ...]], dropped: dict[int, DropReason]
) -> None:
    """Free at 28: one ends at 50, two at 52, three at 54, four at 56."""
    requests = tuple(
        Request(each.number, each.arrival_ns, each.deadline_ns) for each in BUSY_THEN_LATE
    )
    history = history_of(*requests, drop=drop)
    runs = [numbers for _, what, numbers in history.log if what == "run"]
    assert runs == [(0, 1, 2, 3), *batches]
    assert history.dropped == dropped


def test_a_tight_request_of_low_priority_does_not_make_the_batch_small() -> None:
    """At 28, three end at 54: the third has until 53, and the first two have time."""
    requests = [Request(number, 0, ms(30), priority=1) for number in range(4)]
    requests += [Request(number, ms(1), ms(90), priority=1) for number in (4, 5)]
    history = history_of(*requests, Request(6, ms(1), ms(53)), drop="head")
    assert history.log[1] == (ms(28), "run", (4, 5))


def test_a_tight_request_is_not_shed_for_a_batch_that_then_waits() -> None:
    history = history_of(Request(0, 0, ms(200)), Request(1, ms(10), ms(33)))
    assert history.log == [(ms(10), "drop", (1,)), (ms(10), "run", (0,))]


def test_unknown_ways_to_drop() -> None:
    with pytest.raises(ValueError, match="drop is 'all'; it has to be one of"):
        Proteus(PROFILE, max_batch_size=4, drop="all")  # type: ignore[arg-type]
