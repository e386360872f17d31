"""Virtual time: what happens when, that every request is accounted for, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.policies import EarlyDrop, Immediate, Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Drop,
    DropReason,
    Event,
    Finished,
    Preempt,
    Preempted,
    Request,
    Run,
)
from trims_shim.batching.simulator import Outcome, Report, poisson, requests, simulate
from trims_shim.batching.single import Batching

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=8)


class Scripted:
    """Answers from a function, and remembers what it was told."""

    def __init__(self, answer: Callable[[int, Event], Sequence[Action]]) -> None:
        self.answer = answer
        self.seen: list[tuple[int, Event]] = []
        self.wake_ns: int | None = None

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        self.seen.append((now_ns, event))
        return self.answer(now_ns, event)

    def next_deadline_ns(self) -> int | None:
        return self.wake_ns


def at(*times_ns: int) -> list[Request]:
    return [Request(number, time_ns) for number, time_ns in enumerate(times_ns)]


def run_each(now_ns: int, event: Event) -> list[Action]:
    return [Run(event.number, [event])] if isinstance(event, Request) else []


def test_a_batch_ends_after_its_service_time() -> None:
    outcome = simulate(Scripted(run_each), at(5, 7), service_ns=lambda device, batch: 10 + device)
    assert [(r.number, t) for r, t in outcome.answered] == [(0, 15), (1, 18)]
    assert (outcome.start_ns, outcome.end_ns, outcome.busy_ns) == (5, 18, 21)
    assert outcome.batch_sizes == [1, 1]


def test_at_one_time_devices_are_free_before_requests_arrive_and_timers_come_last() -> None:
    policy = Scripted(run_each)
    policy.wake_ns = 10

    def answer(now_ns: int, event: Event) -> Sequence[Action]:
        if event is TIMER:
            policy.wake_ns = None
        return run_each(now_ns, event)

    policy.answer = answer
    simulate(policy, at(0, 10), service_ns=lambda device, batch: 10)
    events = [event if event in (TIMER, FLUSH) else type(event) for _, event in policy.seen]
    assert events == [Request, Finished, Request, TIMER, Finished, FLUSH]


def test_a_timer_is_late_by_what_is_drawn_once() -> None:
    draws = iter((3, 100))
    policy = Scripted(lambda now_ns, event: [])
    policy.wake_ns = 50

    def answer(now_ns: int, event: Event) -> Sequence[Action]:
        if event is TIMER:
            policy.wake_ns = None
        return ()

    policy.answer = answer
    simulate(policy, at(0, 20), service_ns=lambda *_: 1, lateness_ns=lambda: next(draws))
    assert [now_ns for now_ns, event in policy.seen if event is TIMER] == [53]


def test_a_timer_that_has_passed_comes_at_once() -> None:
    policy = Scripted(lambda now_ns, event: [])
    policy.wake_ns = 4

    def answer(now_ns: int, event: Event) -> Sequence[Action]:
        if event is TIMER:
            policy.wake_ns = None
        return ()

    policy.answer = answer
    simulate(policy, at(9), service_ns=lambda *_: 1)
    assert [now_ns for now_ns, event in policy.seen if event is TIMER] == [9]


def test_waits_and_batches_that_outlast_time_itself() -> None:
    policy = Batching(lambda _: Window(PROFILE, max_batch_size=8, wait_ms=1e300))
    outcome = simulate(policy, at(3, 4), service_ns=lambda *_: 10**30)
    assert [(r.number, t) for r, t in outcome.answered] == [(0, NEVER_NS), (1, NEVER_NS)]
    assert Report.of(outcome).requests == 2


def test_what_nobody_answers_is_unanswered() -> None:
    outcome = simulate(Scripted(lambda *_: ()), at(3, 4), service_ns=lambda *_: 1)
    assert [request.number for request in outcome.unanswered] == [0, 1]
    assert outcome.requests == 2


def test_nothing_at_all() -> None:
    report = Report.of(simulate(Scripted(run_each), [], service_ns=lambda *_: 1))
    assert report.requests == report.duration_s == report.violation_ratio == 0


def test_flush_comes_once_when_nothing_else_would_happen() -> None:
    waiting: list[Request] = []

    def answer(now_ns: int, event: Event) -> Sequence[Action]:
        if isinstance(event, Request):
            waiting.append(event)
        return [Run(0, waiting)] if event is FLUSH else ()

    policy = Scripted(answer)
    outcome = simulate(policy, at(3, 4), service_ns=lambda *_: 10)
    assert [(r.number, t) for r, t in outcome.answered] == [(0, 14), (1, 14)]
    assert [event for _, event in policy.seen].count(FLUSH) == 1


# --- what breaks the contract is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _, event: [Run(0, [event, event])], "twice"),
        (lambda _, event: [Run(0, [event]), Run(1, [event])], "not queued"),
        (lambda _, event: [Run(0, [event]), Drop([event], DropReason.SHED)], "not queued"),
        (lambda _, event: [Run(0, [Request(99, 0)])], "not queued"),
        (lambda _, event: [Run(0, [])], "of nothing"),
        (lambda _, event: [Run(0, [event]), Preempt(0)], "no exit points"),
    ],
)
def test_a_policy_cannot_cheat(
    answer: Callable[[int, Event], Sequence[Action]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(Scripted(answer), at(1), service_ns=lambda *_: 10)


def test_a_busy_device_takes_no_batch() -> None:
    policy = Scripted(lambda _, event: [Run(0, [event])] if isinstance(event, Request) else ())
    with pytest.raises(ValueError, match="device 0, which is busy"):
        simulate(policy, at(1, 2), service_ns=lambda *_: 10)


def test_a_policy_that_wants_the_same_timer_for_ever_is_stopped() -> None:
    policy = Scripted(lambda *_: ())
    policy.wake_ns = 5
    with pytest.raises(ValueError, match="did nothing at 5 ns"):
        simulate(policy, at(1), service_ns=lambda *_: 10)


@pytest.mark.parametrize("is_collecting", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_is_collected_afterwards_as_it_was_before(is_collecting: bool, fails: bool) -> None:
    collecting = []

    def service_ns(device: int, batch: Sequence[Request]) -> int:
        collecting.append(gc.isenabled())
        if fails:
            raise KeyError("no such batch")
        return 1

    was_collecting = gc.isenabled()
    try:
        (gc.enable if is_collecting else gc.disable)()
        policy = Batching(lambda key: Immediate(PROFILE, max_batch_size=8))
        try:
            simulate(policy, [Request(0, 0)], service_ns=service_ns)
        except KeyError:
            assert fails
        assert gc.isenabled() == is_collecting
    finally:
        (gc.enable if was_collecting else gc.disable)()
    assert collecting == [False]


def test_arrivals_do_not_go_back() -> None:
    with pytest.raises(ValueError, match="request 1 arrives before"):
        simulate(Scripted(run_each), at(5, 4), service_ns=lambda *_: 10)


# --- exit points ----------------------------------------------------------------------------------


def preempting(times: int = 1) -> Scripted:
    """Runs the first request, gives it up for the second, and runs it again at the end."""
    first: list[Request] = []

    def answer(now_ns: int, event: Event) -> Sequence[Action]:
        if isinstance(event, Request) and not first:
            first.append(event)
            return [Run(0, [event])]
        if isinstance(event, Request):
            return [Preempt(0)] * times
        if isinstance(event, Preempted):
            return [Run(0, event.batch)]
        return ()

    return Scripted(answer)


def every(exit_ns: int) -> Callable[[int, Sequence[Request], int], int]:
    return lambda device, batch, passed_ns: -(-passed_ns // exit_ns) * exit_ns


@pytest.mark.parametrize("times", [1, 2])
def test_a_batch_is_given_up_at_its_next_exit_point(times: int) -> None:
    policy = preempting(times)
    outcome = simulate(policy, at(0, 35), service_ns=lambda *_: 100, next_exit_ns=every(30))
    ends = [(each.started_ns, each.ended_ns, each.is_preempted) for each in outcome.executions]
    assert ends == [(0, 60, True), (60, 160, False)]
    assert [type(event) for _, event in policy.seen][2:4] == [Preempted, Finished]
    assert [(r.number, t) for r, t in outcome.answered] == [(0, 160)]
    assert [request.number for request in outcome.unanswered] == [1]
    assert outcome.busy_ns == 160
    report = Report.of(outcome)
    assert (report.preemptions, report.wasted_share, report.busy_share) == (1, 60 / 160, 1.0)


def test_a_batch_that_ends_before_its_next_exit_point_is_answered() -> None:
    policy = preempting()
    outcome = simulate(policy, at(0, 35), service_ns=lambda *_: 50, next_exit_ns=every(30))
    assert [(r.number, t) for r, t in outcome.answered] == [(0, 50)]
    assert not any(each.is_preempted for each in outcome.executions)


def test_an_idle_device_cannot_be_preempted() -> None:
    policy = Scripted(lambda *_: [Preempt(3)])
    with pytest.raises(ValueError, match="device 3, which runs nothing"):
        simulate(policy, at(1), service_ns=lambda *_: 10, next_exit_ns=every(5))


# --- against theory, and against itself -----------------------------------------------------------


def test_waiting_at_a_single_server_is_what_theory_says() -> None:
    """M/D/1 (Pollaczek and Khinchine): the mean wait is rho * S / (2 (1 - rho))."""
    service_ns, load = 10_000_000, 0.7
    stream = requests(poisson(load * 1e9 / service_ns, Random(5)), slo_ms=None, count=60_000)
    outcome = simulate(
        Batching(lambda _: Immediate(LatencyProfile([service_ns]), max_batch_size=1)),
        stream,
        service_ns=lambda *_: service_ns,
    )
    waits = [end_ns - request.arrival_ns - service_ns for request, end_ns in outcome.answered]
    expected = load * service_ns / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(expected, rel=0.05)
    assert Report.of(outcome).busy_share == pytest.approx(load, rel=0.02)


def digest(outcome: Outcome) -> object:
    batches = [
        (each.device, each.started_ns, each.ended_ns, [request.number for request in each.batch])
        for each in outcome.executions
    ]
    return batches, [(request.number, time_ns) for request, time_ns in outcome.dropped]


@given(
    gaps=st.lists(st.integers(0, 60_000_000), max_size=40),
    rule=st.sampled_from((Immediate, EarlyDrop, Window)),
    devices=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_request_is_accounted_for_and_a_run_can_be_repeated(
    gaps: list[int], rule: Callable[..., EarlyDrop], devices: int, seed: int
) -> None:
    times_ns = [sum(gaps[: index + 1]) for index in range(len(gaps))]

    def outcome() -> Outcome:
        random = Random(seed)
        return simulate(
            Batching(lambda _: rule(PROFILE, max_batch_size=8), devices=devices),
            requests(times_ns, slo_ms=60),
            service_ns=lambda _, batch: PROFILE.latency_ns(len(batch)) + random.randrange(10**6),
            lateness_ns=lambda: random.randrange(10**6),
        )

    first, second = outcome(), outcome()
    assert digest(first) == digest(second)
    ended = [request.number for request, _ in [*first.answered, *first.dropped]]
    ended += [request.number for request in first.unanswered]
    assert sorted(ended) == list(range(len(gaps)))
    assert Report.of(first, devices=devices).requests == len(gaps)
    assert Report.of(first, devices=devices).busy_share <= 1
