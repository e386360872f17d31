"""Early drop by goodput: what is given up, for what, and how large the batch is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batching.checking import ms
from batching.policies.instances import Instance, offline_optimum, run
from trims_shim.batching.policies.early_drop import EarlyDrop
from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, DropReason, Request
from trims_shim.batching.rules import Rule

LINE = LatencyProfile.linear(1, 10, max_batch_size=8)


def asked(
    deadlines_ms: Sequence[float],
    profile: LatencyProfile = LINE,
    *,
    now_ms: float = 40,
    arrivals_ms: Sequence[float] | None = None,
    priorities: Sequence[int] | None = None,
    has_rivals: bool = False,
    margin_ms: float = 0,
) -> tuple[Rule, int]:
    """A rule whose queue holds such requests, and its answer."""
    rule = Goodput(profile, max_batch_size=profile.max_batch_size, margin_ms=margin_ms)
    rule.has_rivals = has_rivals
    for number, deadline_ms in enumerate(deadlines_ms):
        arrival_ns = ms(0 if arrivals_ms is None else arrivals_ms[number])
        priority = 0 if priorities is None else priorities[number]
        rule.queue.add(Request(number, arrival_ns, ms(deadline_ms), priority))
    return rule, rule.choose(ms(now_ms))


def dropped(rule: Rule) -> dict[DropReason, list[int]]:
    return {
        drop.reason: [request.number for request in drop.requests] for drop in rule.take_drops()
    }


def test_all_that_are_in_time_go_at_once() -> None:
    rule, size = asked([100] * 5)
    assert size == 5
    assert not dropped(rule)


def test_what_is_late_even_alone_is_hopeless() -> None:
    rule, size = asked([50.9, 51, 100])
    assert dropped(rule) == {DropReason.HOPELESS: [0]}
    assert size == 1


def test_a_margin_is_kept_before_every_deadline() -> None:
    rule, size = asked([52.9, 53, 100], margin_ms=2)
    assert dropped(rule) == {DropReason.HOPELESS: [0]}
    assert size == 1
    for deadline_ms, fitting in ((57, 5), (56.9, 4)):
        rule, size = asked([deadline_ms] * 5, margin_ms=2)
        assert size == fitting
        assert not dropped(rule)


def test_nothing_is_given_up_for_a_rate_that_is_hardly_better() -> None:
    """Two in 20.5 ms instead of one in 10.5: less than one answer more, in 18 times 15 ms."""
    profile = LatencyProfile.linear(10, 0.5, max_batch_size=8)
    rule, size = asked([54, 70, 70, 70], profile, arrivals_ms=[39] * 4)
    assert size == 1
    assert not dropped(rule)


def test_a_batch_that_keeps_up_with_arrivals_gives_nothing_up() -> None:
    """Two in 12 ms are more than the queue of five has grown by in 40."""
    rule, size = asked([52, 60, 60, 60, 60])
    assert size == 2
    assert not dropped(rule)


def test_to_keep_up_is_not_enough_while_others_wait_for_the_device() -> None:
    rule, size = asked([52, 60, 60, 60, 60], has_rivals=True)
    assert size == 4
    assert dropped(rule) == {DropReason.SHED: [0]}


def test_in_a_backlog_the_first_are_given_up_for_a_better_rate() -> None:
    """One in 11 ms would never serve a queue that has grown by eight in 40."""
    rule, size = asked([51, *[80] * 7])
    assert dropped(rule) == {DropReason.SHED: [0]}
    assert size == 7


def test_a_rate_that_is_hardly_better_is_not_worth_many_requests() -> None:
    """Where batches cost next to nothing, a window would give four up for one batch of six."""
    cheap = LatencyProfile.linear(4, 0.1, max_batch_size=8)
    deadlines_ms = [*[53] * 4, *[80] * 6]
    rule, size = asked(deadlines_ms, cheap)
    assert size == 3
    assert not dropped(rule)
    window = EarlyDrop(cheap, max_batch_size=8)
    for number, deadline_ms in enumerate(deadlines_ms):
        window.queue.add(Request(number, 0, ms(deadline_ms)))
    assert window.choose(ms(40)) == 6
    assert dropped(window) == {DropReason.SHED: [0, 1, 2, 3]}


def test_the_first_may_have_a_short_deadline_of_its_own() -> None:
    """It came last: no sign of a backlog, and the others have time after it."""
    rule, size = asked([90, 90, 90, 51.5], arrivals_ms=[30, 31, 32, 40])
    assert size == 1
    assert rule.queue[0].number == 3
    assert not dropped(rule)


def test_of_padded_sizes_the_one_with_the_best_rate_runs() -> None:
    padded = LatencyProfile.measured({1: 30e6, 2: 42e6, 4: 70e6, 8: 120e6}, pads=True)
    sizes = {count: asked([500] * count, padded)[1] for count in range(1, 9)}
    assert sizes == {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 7, 8: 8}


@pytest.mark.parametrize(("five_ms", "size"), [(54, 5), (56, 4)])
def test_one_more_runs_unless_the_rate_is_clearly_lower_with_it(five_ms: float, size: int) -> None:
    """Four take 40 ms: up to a tenth more for each is noise."""
    profile = LatencyProfile(ms(each) for each in (37, 38, 39, 40, five_ms))
    assert asked([1000] * 5, profile)[1] == size


def test_two_at_once_may_take_longer_than_one_after_the_other() -> None:
    profile = LatencyProfile.measured({1: 33e6, 2: 76e6, 4: 103e6}, pads=True)
    assert asked([500] * 2, profile)[1] == 1
    assert asked([500] * 4, profile)[1] == 4


def test_a_profile_that_is_replaced_is_read_afresh() -> None:
    rule = Goodput(LINE, max_batch_size=4)
    for number in range(3):
        rule.queue.add(Request(number, 0, ms(500)))
    assert rule.choose(0) == 3
    rule.profile = LatencyProfile.measured({1: 10e6, 2: 12e6, 4: 90e6}, pads=True)
    assert rule.choose(0) == 2


@pytest.mark.parametrize("low_ms", [58, 200])
def test_lower_priorities_only_fill_up(low_ms: float) -> None:
    """A batch of three would be late for those due at 52; one of lower priority is no reason."""
    rule, size = asked([52, 52, low_ms], priorities=[1, 1, 0])
    assert size == 2
    assert not dropped(rule)
    rule, size = asked([58, 58, low_ms], priorities=[1, 1, 0])
    assert size == 3


@pytest.mark.parametrize(
    ("high_ms", "size", "shed"), [(100, 6, [1]), (53, 3, [1]), (52.5, 2, []), (51.5, 1, [])]
)
def test_of_lower_priorities_those_are_given_up_that_keep_more_from_filling_up(
    high_ms: float, size: int, shed: list[int]
) -> None:
    """At 52, the first of them leaves time for two; the others, and who goes before, for more."""
    deadlines_ms = [high_ms, 52, *[90] * 5]
    rule, found = asked(deadlines_ms, arrivals_ms=[39, *[0] * 6], priorities=[1, *[0] * 6])
    assert found == size
    assert dropped(rule) == ({DropReason.SHED: shed} if shed else {})


@pytest.mark.parametrize(("max_weight", "size"), [(5, 6), (3, 4), (1, 2), (0, 1)])
def test_lower_priorities_fill_up_to_the_limit_on_weights(max_weight: int, size: int) -> None:
    rule = Goodput(LINE, max_batch_size=8)
    rule.max_weight = 10 * max_weight + 5
    rule.queue.add(Request(0, ms(39), ms(100), 1, weight=5))
    for number in range(1, 9):
        rule.queue.add(Request(number, 0, ms(52 if number == 1 else 90), weight=10))
    assert rule.choose(ms(40)) == size


def test_four_may_fill_up_where_two_would_be_late() -> None:
    dips = LatencyProfile(each * 1e6 for each in (7.9, 15.4, 20.5, 14.7, 17.2))
    rule, size = asked([55, *[80] * 4], dips, priorities=[1, 0, 0, 0, 0])
    assert size == 4
    assert not dropped(rule)


def test_of_what_varies_as_many_go_as_are_expected_to_be_in_time() -> None:
    """Half of the batches take their profile, half of them twice as long."""
    rule = Goodput(LINE, max_batch_size=8)
    rule.stretches = (1.0, 2.0)
    for number in range(8):
        rule.queue.add(Request(number, 0, ms(30)))
    # 8 in 18 ms or 36 would be 4 in time; 5 in 15 or 30 all of them.
    assert rule.choose(0) == 5
    rule.stretches = (1.0, 1.0, 1.0, 1.0, 2.0)
    assert rule.choose(0) == 8


@pytest.mark.parametrize(("devices", "size", "shed"), [(1, 7, [0]), (2, 2, [])])
def test_devices_keep_up_together(devices: int, size: int, shed: list[int]) -> None:
    """Two in 12 ms are less than the eight by which the queue has grown in 40, twice two more."""
    rule = Goodput(LINE, max_batch_size=8)
    rule.devices = devices
    for number, deadline_ms in enumerate([52, *[60] * 7]):
        rule.queue.add(Request(number, 0, ms(deadline_ms)))
    assert rule.choose(ms(40)) == size
    assert dropped(rule) == ({DropReason.SHED: shed} if shed else {})


@pytest.mark.parametrize(
    ("max_weight", "size", "shed"), [(None, 8, [0, 1]), (8, 8, [0, 1]), (3, 2, [])]
)
def test_nobody_is_given_up_for_a_batch_that_would_weigh_too_much(
    max_weight: int | None, size: int, shed: list[int]
) -> None:
    """Eight at a time are answered at a rate that is worth two, three at a time are not."""
    rule = Goodput(LatencyProfile.linear(4, 0.1, max_batch_size=8), max_batch_size=8)
    rule.max_weight = max_weight
    for number, deadline_ms in enumerate([51, 51, *[80] * 8]):
        rule.queue.add(Request(number, 0, ms(deadline_ms)))
    assert rule.choose(ms(40)) == size
    assert dropped(rule) == ({DropReason.SHED: shed} if shed else {})


def test_one_that_fills_a_batch_alone_is_given_up_for_many() -> None:
    """If batches take a tenth longer it is late; the others have time for one of seven."""
    rule = Goodput(LINE, max_batch_size=8)
    rule.max_weight = 8
    rule.queue.add(Request(0, 0, ms(51), weight=8))
    for number in range(1, 8):
        rule.queue.add(Request(number, 0, ms(60)))
    rule.stretches = (1.0, 1.1)
    assert rule.choose(ms(40)) == 7
    assert dropped(rule) == {DropReason.SHED: [0]}


def test_nobody_without_a_deadline_is_given_up_for_others_that_weigh_less() -> None:
    """After the first, of a higher priority, there is room for the last, not for the heavy one."""
    rule = Goodput(LINE, max_batch_size=8)
    rule.max_weight = 2
    rule.queue.add(Request(0, 0, ms(60), 1))
    for number, (deadline_ns, weight) in enumerate([(ms(51), 1), (NEVER_NS, 2), (NEVER_NS, 1)], 1):
        rule.queue.add(Request(number, 0, deadline_ns, weight=weight))
    rule.choose(ms(40))
    assert not {2, 3} & {each for gone in dropped(rule).values() for each in gone}


def test_a_larger_batch_may_be_possible_although_one_more_is_not() -> None:
    """Two would take 15.4 ms, and four 14.7; the first has 8, the others 15."""
    dips = LatencyProfile(each * 1e6 for each in (7.9, 15.4, 20.5, 14.7))
    rule, size = asked([48, *[55] * 8], dips)
    assert size == 4
    assert dropped(rule) == {DropReason.SHED: [0]}


def test_a_larger_batch_may_be_possible_if_it_is_quick() -> None:
    """After the first one, two would take 10.8 or 13.2 ms, and there are 13."""
    rule = Goodput(LINE, max_batch_size=8)
    rule.stretches = (0.9, 1.1)
    for number, deadline_ms in enumerate([50, *[53] * 7]):
        rule.queue.add(Request(number, 0, ms(deadline_ms)))
    assert rule.choose(ms(40)) == 4
    assert dropped(rule) == {DropReason.SHED: [0]}


def test_whether_a_rate_keeps_up_is_said_by_what_batches_take_now() -> None:
    """Two would keep up with five in 40 ms if they took the 12 of the profile, but they take 18."""
    rule = Goodput(LINE, max_batch_size=8)
    rule.stretches = (1.5,)
    for number, deadline_ms in enumerate([58, 70, 70, 70, 70]):
        rule.queue.add(Request(number, 0, ms(deadline_ms)))
    assert rule.choose(ms(40)) == 4
    assert dropped(rule) == {DropReason.SHED: [0]}


@pytest.mark.parametrize(
    ("stretches", "deadline_ms", "size"),
    [
        ((1.0, 100.0), 12, 1),
        ((1.0, 100.0), 10, 0),
        ((0.5, 1.0), 6, 1),
        ((0.5, 1.0), 5, 0),
        ((3.0, 4.0), 12, 1),  # if nothing ran now, nobody would see that it is quick again
    ],
)
def test_hopeless_is_only_what_is_late_even_with_the_quickest_batch(
    stretches: Sequence[float], deadline_ms: float, size: int
) -> None:
    rule = Goodput(LINE, max_batch_size=8)
    rule.queue.add(Request(0, 0, ms(deadline_ms)))
    rule.stretches = stretches
    assert rule.choose(0) == size
    assert dropped(rule) == ({} if size else {DropReason.HOPELESS: [0]})


def test_it_is_no_worse_than_the_window_where_both_can_be_compared_with_the_optimum() -> None:
    totals = {Goodput: 0, EarlyDrop: 0}
    optimum = 0
    for gap_ms in (0, 3, 7, 11, 14):
        requests = tuple(Request(n, ms(n * gap_ms), ms(n * gap_ms + 36)) for n in range(9))
        instance = Instance(requests, LatencyProfile.linear(4, 6, max_batch_size=4))
        optimum += offline_optimum(instance)
        for maker in totals:
            totals[maker] += run(maker, instance).in_time(requests)
    assert totals[EarlyDrop] <= totals[Goodput] <= optimum


@pytest.mark.parametrize(("deadline_ms", "is_overtaken"), [(24, True), (23.9, False)])
def test_whether_all_others_have_time_after_a_short_deadline(
    deadline_ms: float, is_overtaken: bool
) -> None:
    """One takes 11 ms from 1 on, the two others 12 after it."""
    rule = Goodput(LINE, max_batch_size=8)
    for number, each_ms in ((5, 11), (0, deadline_ms), (1, 100)):
        rule.queue.add(Request(number, 0, ms(each_ms)))
    assert rule._is_overtaken(0, 1, ms(1)) is is_overtaken
    rule.queue[0].number = -1
    assert not rule._is_overtaken(0, 1, ms(1))  # it came first, so it overtook nobody
    assert not rule._is_overtaken(0, 3, ms(1))  # there are no others
