"""The state machine around the rules: devices, keys, timers, weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import pytest

from trims_shim.batching import single
from trims_shim.batching.buckets import OpenBucket
from trims_shim.batching.policies import EarlyDrop, Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Cancelled,
    Drop,
    Finished,
    Preempted,
    Request,
    Run,
)
from trims_shim.batching.rules import Rule
from trims_shim.batching.single import Batching

PROFILE = LatencyProfile([10, 20, 30, 40])


class Waits(Rule):
    """Until a given time after the first arrival; keeps what it was told."""

    def __init__(self, wait_ns: int) -> None:
        super().__init__(PROFILE, max_batch_size=4)
        self._wait_ns = wait_ns
        self.lateness_ns: list[int] = []
        self.finished: list[Finished] = []
        self.rivals: list[bool] = []

    def choose(self, now_ns: int) -> int:
        self.rivals.append(self.has_rivals)
        self.wake_ns = self.queue[0].arrival_ns + self._wait_ns
        return self.room() if now_ns >= self.wake_ns else 0

    def on_wake(self, lateness_ns: int) -> None:
        self.lateness_ns.append(lateness_ns)

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        self.finished.append(finished)


def greedy(key: Hashable) -> Rule:
    return Immediate(PROFILE, max_batch_size=4)


def waiting(wait_ns: int) -> Callable[[Hashable], Waits]:
    return lambda key: Waits(wait_ns)


def runs(actions: Sequence[Action]) -> list[tuple[int, list[int]]]:
    return [
        (each.device, [request.number for request in each.batch])
        for each in actions
        if isinstance(each, Run)
    ]


def busy(policy: Batching) -> Run:
    """Occupy a device with request -1 of key "busy"."""
    (action,) = policy.on_event(0, Request(-1, 0, key="busy"))
    assert isinstance(action, Run)
    return action


def finish(policy: Batching, now_ns: int, run: Run) -> Sequence[Action]:
    return policy.on_event(now_ns, Finished(run.device, run.batch, 0))


def test_a_batch_is_formed_when_a_device_is_free() -> None:
    policy = Batching(greedy)
    run = busy(policy)
    assert policy.on_event(1, Request(1, 1)) == ()
    assert policy.on_event(2, Request(2, 2)) == ()
    assert runs(finish(policy, 3, run)) == [(0, [1, 2])]


def test_every_device_gets_a_batch() -> None:
    policy = Batching(greedy, devices=2)
    first = busy(policy)
    (second,) = policy.on_event(1, Request(1, 1))
    assert isinstance(second, Run)
    assert {first.device, second.device} == {0, 1}
    assert policy.on_event(2, Request(2, 2)) == ()
    assert runs(finish(policy, 3, second)) == [(second.device, [2])]


def test_the_more_urgent_key_goes_first() -> None:
    policy = Batching(greedy)
    run = busy(policy)
    policy.on_event(1, Request(1, 1, 100, key="a"))
    policy.on_event(1, Request(2, 1, 50, key="b"))
    policy.on_event(1, Request(3, 1, 200, key="c", priority=1))
    order = []
    for _ in range(3):
        (run,) = finish(policy, 2, run)  # type: ignore[assignment]
        order.append(run.batch[0].key)
    assert order == ["c", "b", "a"]


def test_without_deadlines_no_key_starves() -> None:
    """One key always has a full batch waiting, and was there first."""
    policy = Batching(greedy)
    run = busy(policy)
    for number in range(1, 10):
        policy.on_event(number, Request(number, number, NEVER_NS, key="b" if number == 5 else "a"))
    batches = []
    for _ in range(3):
        (run,) = finish(policy, 10, run)  # type: ignore[assignment]
        batches.append([each.number for each in run.batch])
    assert batches == [[1, 2, 3, 4], [5], [6, 7, 8, 9]]


def test_rules_are_told_of_rivals() -> None:
    policy = Batching(waiting(100))
    policy.on_event(0, Request(1, 0, key="a"))
    policy.on_event(1, Request(2, 1, key="b"))
    rule = policy.rules["a"]
    assert isinstance(rule, Waits)
    assert rule.rivals == [False, True]


def test_the_timer_is_the_earliest_of_the_rules() -> None:
    waits = {"a": Waits(100), "b": Waits(30)}
    policy = Batching(waits.__getitem__)  # type: ignore[arg-type]
    assert policy.next_deadline_ns() is None
    policy.on_event(0, Request(1, 0, key="a"))
    assert policy.next_deadline_ns() == 100
    policy.on_event(10, Request(2, 10, key="b"))
    assert policy.next_deadline_ns() == 40
    assert runs(policy.on_event(40, TIMER)) == [(0, [2])]
    assert policy.next_deadline_ns() is None, "no device is free"


def test_a_later_rule_does_not_put_the_timer_off() -> None:
    waits = {"a": Waits(30), "b": Waits(100)}
    policy = Batching(waits.__getitem__)  # type: ignore[arg-type]
    policy.on_event(0, Request(1, 0, key="a"))
    policy.on_event(10, Request(2, 10, key="b"))
    assert policy.next_deadline_ns() == 30
    assert runs(policy.on_event(30, TIMER)) == [(0, [1])]


def test_a_rule_that_waits_for_arrivals_alone_needs_no_timer() -> None:
    class Patient(Rule):
        def choose(self, now_ns: int) -> int:
            if len(self.queue) == 1:
                self.wake_ns = 50
            return 0

    policy = Batching(lambda key: Patient(PROFILE, max_batch_size=4))
    policy.on_event(0, Request(1, 0))
    assert policy.next_deadline_ns() == 50
    policy.on_event(1, Request(2, 1))
    assert policy.next_deadline_ns() is None


@pytest.mark.parametrize("others", [0, 1])
def test_what_has_waited_long_enough_takes_every_device(others: int) -> None:
    """Also if another key is there, which still waits."""
    policy = Batching(lambda key: Waits(100 if key is None else 1000), devices=2)
    for number in range(others):
        policy.on_event(0, Request(-1 - number, 0, key="other"))
    for number in range(5):
        policy.on_event(0, Request(number, 0))
    batches = runs(policy.on_event(100, TIMER))
    assert [numbers for _, numbers in batches] == [[0, 1, 2, 3], [4]]


def test_only_the_rule_that_waited_learns_how_late_the_timer_was() -> None:
    waits = {"a": Waits(100), "b": Waits(30)}
    policy = Batching(waits.__getitem__, devices=2)  # type: ignore[arg-type]
    policy.on_event(0, Request(1, 0, key="a"))
    policy.on_event(0, Request(2, 0, key="b"))
    policy.on_event(29, TIMER)
    assert waits["b"].lateness_ns == []
    policy.on_event(35, TIMER)
    assert waits["b"].lateness_ns == [5]
    policy.on_event(100, TIMER)
    policy.on_event(300, TIMER)
    assert (waits["a"].lateness_ns, waits["b"].lateness_ns) == ([0], [5])


def test_a_cancelled_request_leaves_its_place() -> None:
    policy = Batching(waiting(100))
    request = Request(1, 0)
    policy.on_event(0, request)
    assert policy.on_event(5, Cancelled(request)) == ()
    assert policy.next_deadline_ns() is None
    assert policy.on_event(6, Cancelled(request)) == ()
    assert policy.on_event(6, Cancelled(Request(2, 0, key="unknown"))) == ()
    assert policy.on_event(100, TIMER) == ()


def test_those_behind_a_cancelled_request_run() -> None:
    policy = Batching(greedy)
    run = busy(policy)
    request = Request(1, 1)
    policy.on_event(1, request)
    policy.on_event(2, Request(2, 2))
    policy.on_event(3, Cancelled(request))
    assert runs(finish(policy, 4, run)) == [(0, [2])]


def test_cancelling_what_runs_changes_nothing() -> None:
    policy = Batching(greedy)
    run = busy(policy)
    assert policy.on_event(1, Cancelled(run.batch[0])) == ()
    assert policy.on_event(2, Request(1, 2)) == ()


def test_flushing_runs_what_waits_until_the_next_request_comes() -> None:
    policy = Batching(waiting(100))
    for number in range(6):
        policy.on_event(0, Request(number, 0))
    (run,) = policy.on_event(1, FLUSH)
    assert runs([run]) == [(0, [0, 1, 2, 3])]
    assert isinstance(run, Run)
    (run,) = finish(policy, 2, run)
    assert runs([run]) == [(0, [4, 5])]
    assert isinstance(run, Run)
    assert finish(policy, 3, run) == ()
    assert policy.on_event(3, Request(7, 3)) == []
    assert policy.next_deadline_ns() == 103


def test_results_go_to_the_rule_of_their_key() -> None:
    policy = Batching(waiting(0), devices=2)
    (run,) = policy.on_event(0, Request(1, 0, key="a"))
    assert isinstance(run, Run)
    policy.on_event(0, Request(2, 0, key="b"))
    finish(policy, 5, run)
    told = {
        key: len(rule.finished) for key, rule in policy.rules.items() if isinstance(rule, Waits)
    }
    assert told == {"a": 1, "b": 0}


def test_a_batch_is_cut_to_the_weight_allowed() -> None:
    class Careless(Immediate):
        def choose(self, now_ns: int) -> int:
            return min(len(self.queue), self.max_batch_size)

    policy = Batching(lambda key: Careless(PROFILE, max_batch_size=4), max_weight=5)
    run = busy(policy)
    for number, weight in enumerate((2, 3, 1, 7)):
        policy.on_event(1, Request(number, 1, weight=weight))
    batches = []
    for _ in range(3):
        (run,) = finish(policy, 2, run)  # type: ignore[assignment]
        batches.append([each.number for each in run.batch])
    assert batches == [[0, 1], [2], [3]]


def test_drops_come_before_the_batch_they_made_room_for() -> None:
    policy = Batching(lambda key: EarlyDrop(PROFILE, max_batch_size=4))
    run = busy(policy)
    policy.on_event(1, Request(1, 1, 35))
    policy.on_event(1, Request(2, 1, 100))
    dropped, started = finish(policy, 20, run)
    assert isinstance(dropped, Drop)
    assert [each.number for each in dropped.requests] == [1]
    assert runs([started]) == [(0, [2])]


def test_a_key_whose_requests_are_all_dropped_asks_for_nothing() -> None:
    policy = Batching(lambda key: EarlyDrop(PROFILE, max_batch_size=4))
    (dropped,) = policy.on_event(5, Request(1, 5, 6))
    assert isinstance(dropped, Drop)
    assert policy.next_deadline_ns() is None
    assert runs(policy.on_event(6, Request(2, 6, 100))) == [(0, [2])]


def test_keys_that_never_repeat_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_MOST_IDLE_RULES", 3)
    policy = Batching(greedy, devices=2)
    busy(policy)
    often = None
    for number in range(20):
        (run,) = policy.on_event(number, Request(2 * number, number, key=number))
        policy.on_event(number, Request(2 * number + 1, number, key="often"))
        assert isinstance(run, Run)
        (run,) = finish(policy, number, run)  # type: ignore[assignment]
        finish(policy, number, run)
        often = often or policy.rules["often"]
    assert len(policy.rules) <= 4
    assert policy.rules["often"] is often


def test_a_forgotten_key_may_still_finish_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_MOST_IDLE_RULES", 1)
    policy = Batching(greedy)
    run = busy(policy)
    policy.on_event(1, Request(1, 1, key="a"))
    assert "busy" not in policy.rules
    (again,) = finish(policy, 2, run)
    assert isinstance(again, Run)
    policy.on_event(3, Request(2, 3, key="busy"))
    assert runs(finish(policy, 4, again)) == [(0, [2])]


def test_no_rule_is_forgotten_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_MOST_IDLE_RULES", 1)
    policy = Batching(greedy)
    run = busy(policy)
    idle = Request(2, 1, key="idle")
    policy.on_event(1, Request(1, 1, key="waits"))
    policy.on_event(1, idle)
    policy.on_event(1, Cancelled(idle))
    policy.on_event(2, Request(3, 2, key="new"))
    assert set(policy.rules) == {"waits", "new"}
    assert runs(finish(policy, 3, run)) == [(0, [1])]


def test_what_it_does_not_do() -> None:
    policy = Batching(greedy)
    run = busy(policy)
    with pytest.raises(ValueError, match="preempts nothing"):
        policy.on_event(1, Preempted(run.device, run.batch, 0))
    with pytest.raises(ValueError, match="at least one is needed"):
        Batching(greedy, devices=0)
    with pytest.raises(ValueError, match="max_batch_weight is 0"):
        Batching(greedy, max_weight=0)


def test_with_several_devices_nobody_is_a_rival_any_more_who_has_got_one() -> None:
    rules: dict[Hashable, Waits] = {}

    def make(key: Hashable) -> Waits:
        rules[key] = Waits(50)
        return rules[key]

    policy = Batching(make, devices=2)
    policy.on_event(0, Request(0, 0, key="a"))
    policy.on_event(10, Request(1, 10, key="b"))
    assert rules["b"].rivals == [True]
    assert [numbers for _, numbers in runs(policy.on_event(50, TIMER))] == [[0]]
    assert rules["b"].rivals == [True, False]


class Joins(Immediate):
    """With all requests of every other length."""

    def companions(
        self, now_ns: int, size: int, others: Collection[Rule]
    ) -> Sequence[tuple[Rule, int]]:
        return [(each, len(each.queue)) for each in others]

    def choose(self, now_ns: int) -> int:
        assert self.queue
        return super().choose(now_ns)


@pytest.mark.parametrize("devices", [1, 2])
def test_other_lengths_join_a_batch_only_where_no_other_device_is_free(devices: int) -> None:
    policy = Batching(lambda key: Joins(PROFILE, max_batch_size=4), devices=devices)
    for number in range(devices):
        policy.on_event(0, Request(number, 0, key=("busy",)))
    for number, length in ((10, 8), (11, 16), (12, 12)):
        policy.on_event(1, Request(number, 1, key=(OpenBucket(length),)))
    if devices == 2:  # both are free at once, for two batches
        policy._free.append(0)
    found = runs(policy.on_event(2, Finished(devices - 1, [Request(0, 0, key=("busy",))], 0)))
    batches = [batch for _, batch in found]
    assert batches == ([[11, 12, 10]] if devices == 1 else [[10], [11, 12]])
    assert policy.on_event(3, Finished(0, [Request(0, 0, key=("busy",))], 0)) == ()


@pytest.mark.parametrize(("most", "taken"), [(1, [0]), (2, [0]), (3, [0, 1, 2]), (None, [0, 1, 2])])
def test_other_lengths_join_a_batch_only_if_there_is_room_for_all(
    most: int | None, taken: list[int]
) -> None:
    policy = Batching(lambda key: Joins(PROFILE, max_batch_size=4))
    busy(policy)
    for number, length in enumerate((16, 12, 8)):
        policy.on_event(1, Request(number, 1, key=(OpenBucket(length),)))
    rule = policy.rules[(OpenBucket(16),)]
    batch = policy._take(rule, 1, 2, is_last=True, most=most)
    assert sorted(each.number for each in batch) == taken
