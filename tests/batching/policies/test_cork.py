"""What BentoML's dispatcher decides, worked out by hand from its formulas."""

from __future__ import annotations

import random

import pytest

from batching.checking import ms
from batching.policies.instances import Instance, run
from trims_shim.batching.policies import Cork
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import DropReason, Finished, Request

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=4)


def test_how_long_one_waits_for_another() -> None:
    """n (w + dt + a) <= 0.95 W with n = 1, dt = 1, a = 2, W = 10: w <= 6.5."""
    history = run(Cork, Instance((Request(0, ms(3), ms(500)),), PROFILE))
    assert history.log == [(ms(9.5), "run", (0,))]


def test_two_wait_less_and_from_the_newer_one() -> None:
    """2 (w + 1 + 2) <= 9.5: w <= 1.75."""
    requests = (Request(0, 0, ms(500)), Request(1, ms(4), ms(500)))
    history = run(Cork, Instance(requests, PROFILE))
    assert history.log == [(ms(5.75), "run", (0, 1))]


def test_three_wait_hardly_at_all() -> None:
    """3 (w + 1 + 2) <= 9.5: w <= 1 / 6."""
    requests = tuple(Request(number, ms(number), ms(500)) for number in range(4))
    history = run(Cork, Instance(requests, PROFILE))
    assert history.log[0] == (ms(2 + 1 / 6), "run", (0, 1, 2))


def test_the_head_goes_when_all_that_are_queued_would_make_it_late() -> None:
    """All five count, though a batch holds four: 2 * 5 + 20 is not before 30; 2 * 4 + 20 is."""
    rule = Cork(PROFILE, max_batch_size=4)
    for number, deadline_ms in enumerate((30, 29, 40, 40, 40)):
        rule.queue.add(Request(number, 0, ms(deadline_ms)))
    assert rule.choose(0) == 4
    (drop,) = rule.take_drops()
    assert [each.number for each in drop.requests] == [1]
    assert drop.reason is DropReason.SHED


def test_it_does_not_wait_beyond_the_moment_at_which_the_head_goes() -> None:
    """That of two is 24 before the deadline; the wait alone would end at 1.75."""
    requests = (Request(0, 0, ms(25)), Request(1, 0, ms(200)))
    history = run(Cork, Instance(requests, PROFILE))
    assert history.log == [(ms(1), "drop", (0,)), (ms(6.5), "run", (1,))]


def test_a_single_one_is_served_late_until_its_deadline_has_passed() -> None:
    rule = Cork(PROFILE, max_batch_size=4)
    rule.queue.add(Request(0, 0, ms(10)))
    rule.on_arrival(0, rule.queue[0])
    assert rule.choose(ms(9.9)) == 1
    assert rule.choose(ms(10)) == 0
    assert [len(each.requests) for each in rule.take_drops()] == [1]


def finish(rule: Cork, size: int, started_ms: float, taken_ms: float, wait_ms: float) -> None:
    batch = [Request(0, ms(started_ms - wait_ms)) for _ in range(size)]
    rule.on_finished(ms(started_ms + taken_ms), Finished(0, batch, ms(started_ms)))


def waits_ms(rule: Cork, now_ms: float) -> float:
    """How long it waits for a second request."""
    request = Request(0, ms(now_ms))
    rule.queue.add(request)
    rule.on_arrival(ms(now_ms), request)
    size = rule.choose(ms(now_ms))
    rule.queue.discard(request)
    return 0 if size else (rule.wake_ns or 0) / 1e6 - now_ms


def test_it_learns_the_line_and_the_wait() -> None:
    """Twice as slow as the profile says: a = 4, and W = 8: w <= 0.95 * 8 - 1 - 4."""
    rule = Cork(PROFILE, max_batch_size=4)
    rng = random.Random(1)
    for number in range(60):
        size = rng.randint(1, 4)
        finish(rule, size, 1000 * number, 40 + 4 * size, wait_ms=8)
    assert waits_ms(rule, 61_000) == pytest.approx(0.95 * 8 - 1 - 4, abs=1e-3)


def test_it_forgets_all_but_fifty_batches() -> None:
    rule = Cork(PROFILE, max_batch_size=4)
    for number in range(106):
        finish(rule, 1 + number % 4, 1000 * number, 22 + 2 * (number % 4), 20 if number < 50 else 9)
    assert waits_ms(rule, 107_000) == pytest.approx(0.95 * 9 - 1 - 2, abs=1e-3)


def test_between_refreshes_it_keeps_what_it_learned() -> None:
    rule = Cork(PROFILE, max_batch_size=4)
    finish(rule, 1, 1000, 22, wait_ms=10)
    finish(rule, 1, 2000, 22, wait_ms=100)
    assert waits_ms(rule, 2500) == pytest.approx(0.95 * 10 - 1 - 2)
    finish(rule, 1, 6500, 22, wait_ms=10)
    assert waits_ms(rule, 7000) == pytest.approx(0.95 * 40 - 1 - 2)
    finish(rule, 1, 7500, 22, wait_ms=400)  # five seconds from the last time, not from the first
    assert waits_ms(rule, 8000) == pytest.approx(0.95 * 40 - 1 - 2)


def test_one_more_item_never_makes_a_batch_quicker() -> None:
    """As it seems if the larger batches were the quicker ones by chance: a = .001."""
    rule = Cork(PROFILE, max_batch_size=4)
    finish(rule, 1, 1000, 60, wait_ms=8)
    finish(rule, 4, 6500, 30, wait_ms=8)
    assert waits_ms(rule, 7000) == pytest.approx(0.95 * 8 - 1 - 0.001)


def test_batches_of_one_size_move_the_line_up_and_down_only() -> None:
    rule = Cork(PROFILE, max_batch_size=4)
    finish(rule, 3, 1000, 100, wait_ms=10)
    assert waits_ms(rule, 1500) == pytest.approx(0.95 * 10 - 1 - 2)
    for number, deadline_ms in enumerate((2098.1, 2098.1)):  # 2 * 2 + 94 after now
        rule.queue.add(Request(number, 0, ms(deadline_ms)))
    assert rule.choose(ms(2000)) == 2
    assert not rule.take_drops()
    assert rule.choose(ms(2000.2)) == 1
    assert [len(each.requests) for each in rule.take_drops()] == [1]


def test_a_full_batch_waits_for_nothing() -> None:
    rule = Cork(PROFILE, max_batch_size=4)
    finish(rule, 1, 1000, 22, wait_ms=1000)
    for number in range(4):
        assert number == 0 or rule.choose(ms(2000)) == 0
        request = Request(number, ms(2000))
        rule.queue.add(request)
        rule.on_arrival(ms(2000), request)
    assert rule.choose(ms(2000)) == 4


def test_what_says_nothing_about_others_is_not_learned() -> None:
    rule = Cork(PROFILE, max_batch_size=4)
    batch = [Request(0, 0)]
    rule.on_finished(ms(5000), Finished(0, batch, ms(4000), is_typical=False))
    assert waits_ms(rule, 6000) == pytest.approx(6.5)
