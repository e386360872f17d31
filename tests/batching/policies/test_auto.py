"""The default policy: when it waits, for how long, what it learns, and that it beats the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import pytest

from batching.checking import ms
from trims_shim.batching.policies import POLICIES
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, TIMER, Finished, Request, Run, Signal
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import Outcome, Report, gamma, requests, simulate
from trims_shim.batching.single import Batching

LINE = LatencyProfile.linear(2, 20, max_batch_size=16)
SLO_MS = 100


class Bench:
    """A policy with one device, and a clock that the test turns."""

    def __init__(self, profile: LatencyProfile = LINE) -> None:
        self.rule = Auto(profile, max_batch_size=profile.max_batch_size)
        self.policy = Batching(lambda key: self.rule)
        self.running: Run | None = None
        self.started_ns = 0
        self.number = 0

    def arrive(self, now_ms: float, slo_ms: float | None = SLO_MS) -> None:
        deadline_ns = NEVER_NS if slo_ms is None else ms(now_ms + slo_ms)
        self._event(now_ms, Request(self.number, ms(now_ms), deadline_ns))
        self.number += 1

    def finish(self, now_ms: float, *, is_typical: bool = True) -> None:
        assert self.running is not None
        batch, self.running = self.running.batch, None
        self._event(now_ms, Finished(0, batch, self.started_ns, is_typical))

    def wake(self, now_ms: float) -> None:
        self._event(now_ms, TIMER)

    def wakes_ms(self) -> float | None:
        wake_ns = self.policy.next_deadline_ns()
        return None if wake_ns is None else wake_ns / 1e6

    def _event(self, now_ms: float, event: object) -> None:
        for action in self.policy.on_event(ms(now_ms), event):  # type: ignore[arg-type]
            if isinstance(action, Run):
                assert self.running is None
                self.running, self.started_ns = action, ms(now_ms)


def used_to_company(
    profile: LatencyProfile = LINE, *, after_ms: float = 1, bursts: int = 0
) -> Bench:
    """After a lone request, while it ran, a second one has come. Nothing happens from 100.

    Then ``bursts`` of 16 more, also while one runs; and nothing happens from 1000.
    """
    bench = Bench(profile)
    bench.arrive(0)
    bench.arrive(after_ms)
    bench.finish(22)
    if bench.running is None:
        bench.wake(bench.wakes_ms() or 0)
    bench.finish(99)
    now_ms = 100.0
    for _ in range(bursts):
        bench.arrive(now_ms)
        if bench.running is None:
            now_ms = bench.wakes_ms() or 0
            bench.wake(now_ms)
        for _ in range(16):
            bench.arrive(now_ms + after_ms)
        bench.finish(now_ms + 22)
        bench.finish(now_ms + 22 + 52)
        now_ms += 100
    return bench


def simulated(
    maker: RuleMaker, *, rate_qps: float, cv: float, jitter_ms: float = 0, count: int = 5000
) -> Outcome:
    service, timers = Random(1), Random(2)

    def late_ns(random: Random) -> int:
        return round(random.expovariate(1 / jitter_ms) * 1e6) if jitter_ms else 0

    return simulate(
        Batching(lambda key: maker(LINE, max_batch_size=16)),
        requests(gamma(rate_qps, cv, Random(3)), slo_ms=SLO_MS, count=count),
        service_ns=lambda device, batch: LINE.latency_ns(len(batch)) + late_ns(service),
        lateness_ns=lambda: late_ns(timers),
    )


def mean_ms(outcome: Outcome) -> float:
    answered = outcome.answered
    return sum(end_ns - request.arrival_ns for request, end_ns in answered) / len(answered) / 1e6


def test_nobody_is_waited_for_before_anybody_has_come_in_time() -> None:
    bench = Bench()
    bench.arrive(0)
    assert bench.running is not None


@pytest.mark.parametrize("took_ms", [22, 5])
def test_a_caller_that_waits_for_its_answers_never_waits_for_company(took_ms: float) -> None:
    """Not even if they come so much sooner than its profile says that the next item is in time."""
    bench = Bench()
    now_ms = 0.0
    for _ in range(50):
        bench.arrive(now_ms)
        assert bench.running is not None
        bench.finish(now_ms + took_ms, is_typical=False)
        now_ms += took_ms + 0.001


def test_callers_that_come_together_are_waited_for_and_nobody_else() -> None:
    """Three ask at once, wait for their answers, and ask again."""
    bench = Bench()
    now_ms, sizes = 0.0, []
    for _ in range(30):
        for late_ms in (0, 0.1, 0.2):
            bench.arrive(now_ms + late_ms)
        now_ms += 0.2
        waits = 0
        while bench.running is not None or bench.wakes_ms() is not None:
            if bench.running is None:
                waits += 1
                now_ms = bench.wakes_ms() or 0
                bench.wake(now_ms)
            else:
                sizes.append(len(bench.running.batch))
                now_ms += LINE.latency_ns(sizes[-1]) / 1e6
                bench.finish(now_ms)
    assert sizes[-5:] == [3] * 5
    assert not waits


def test_it_waits_as_long_as_the_next_one_could_save() -> None:
    """The fixed cost is 20 ms, and bursts have shown that there is no time to spare."""
    bench = used_to_company(bursts=3)
    bench.arrive(1000)
    assert bench.wakes_ms() == 1020
    bench.wake(1020)
    assert bench.running is not None


def test_it_does_not_wait_where_nobody_has_come_in_time() -> None:
    """After 21 ms: a batch saves at most 20 by one more."""
    bench = used_to_company(after_ms=21, bursts=3)
    bench.arrive(1000)
    assert bench.running is not None


def test_bursts_make_it_wait_also_after_many_batches_that_were_all_alike() -> None:
    """Those that came one by one would have been in time anyway."""
    bench, now_ms = Bench(), 0.0
    for count in [1] * 150 + [16] * 5:
        bench.arrive(now_ms)
        if bench.running is None:
            now_ms = bench.wakes_ms() or 0
            bench.wake(now_ms)
        for _ in range(count):
            bench.arrive(now_ms + 15)
        bench.finish(now_ms + 22)
        bench.finish(now_ms + 22 + LINE.latency_ns(count) / 1e6)
        now_ms += 100
    bench.arrive(now_ms)
    assert bench.wakes_ms() == now_ms + 20


def test_where_those_who_come_would_be_in_time_anyway_it_waits_for_nobody() -> None:
    """15 ms later, another one has come often: too late to be worth it."""
    bench = used_to_company(after_ms=15)
    bench.arrive(100)
    assert bench.running is not None


def test_then_it_waits_only_for_one_that_comes_so_soon_that_all_are_answered_sooner() -> None:
    bench = used_to_company(after_ms=1)
    bench.arrive(100)
    assert bench.wakes_ms() == pytest.approx(104)
    bench.wake(104)
    assert bench.running is not None


def test_it_does_not_wait_so_long_that_one_more_would_make_it_late() -> None:
    """Those who had to wait for the device have less time left: a batch of two takes 24 ms."""
    bench = used_to_company(after_ms=1)
    bench.arrive(100)
    bench.wake(104)
    bench.arrive(105, slo_ms=50)
    bench.finish(130, is_typical=False)
    assert bench.wakes_ms() == pytest.approx(131)


def test_a_burst_that_was_too_large_is_forgotten_only_after_many_batches() -> None:
    bench = used_to_company(after_ms=15, bursts=3)
    now_ms = 1000.0
    waited = []
    for _ in range(300):
        bench.arrive(now_ms)
        waited.append(bench.running is None)
        if bench.running is None:
            bench.arrive(now_ms + 15)
            bench.wake(now_ms + 20)
        else:
            bench.arrive(now_ms + 15)
        while bench.running is not None:
            bench.finish(now_ms + 50)
        now_ms += 200
    assert all(waited[:150])
    assert not any(waited[-20:])


@pytest.mark.parametrize("callers", [2, 3, 5])
def test_callers_that_ask_again_at_once_share_batches(callers: int) -> None:
    """Each as soon as it has its answer. By itself, a greedy policy answers them in turns."""
    policy = Batching(lambda key: Auto(LINE, max_batch_size=16))
    random, number, now_ns = Random(0), 0, 0
    coming = [ms(each / 10) for each in range(callers)]
    running: Run | None = None
    end_ns, sizes = NEVER_NS, []
    while len(sizes) < 300:
        coming.sort()
        wake_ns = policy.next_deadline_ns()
        event: Finished | Request | Signal
        if running is not None and end_ns <= min(coming, default=NEVER_NS):
            now_ns = end_ns
            event = Finished(0, running.batch, end_ns - LINE.latency_ns(len(running.batch)))
            coming += [now_ns + ms(random.expovariate(10)) for _ in running.batch]
            running = None
        elif wake_ns is not None and wake_ns <= min(coming, default=NEVER_NS):
            now_ns, event = wake_ns, TIMER
        else:
            now_ns = coming.pop(0)
            event = Request(number, now_ns, now_ns + ms(SLO_MS))
            number += 1
        for action in policy.on_event(now_ns, event):
            assert isinstance(action, Run)
            running, end_ns = action, now_ns + LINE.latency_ns(len(action.batch))
            sizes.append(len(action.batch))
    assert sum(sizes[-200:]) / 200 > 0.9 * callers


def test_without_a_deadline_it_waits_only_to_answer_sooner() -> None:
    bench = used_to_company(after_ms=15, bursts=3)
    bench.arrive(1000, slo_ms=None)
    assert bench.running is not None
    bench = used_to_company(after_ms=1)
    bench.arrive(100, slo_ms=None)
    assert bench.wakes_ms() == pytest.approx(104)


def test_where_batches_save_nothing_it_does_not_wait() -> None:
    bench = used_to_company(LatencyProfile.linear(22, 0, max_batch_size=4))
    bench.arrive(100)
    assert bench.running is not None


def test_it_stops_waiting_when_another_key_waits_for_the_device() -> None:
    policy = Batching(lambda key: Auto(LINE, max_batch_size=16))
    number, runs = 0, []

    def event(now_ms: float, key: str) -> None:
        nonlocal number
        request = Request(number, ms(now_ms), ms(now_ms + SLO_MS), key=key)
        number += 1
        runs.extend(each for each in policy.on_event(ms(now_ms), request) if isinstance(each, Run))

    event(0, "a")
    event(1, "a")
    for end_ms in (22, 99):
        done = Finished(0, runs[-1].batch, ms(end_ms - 22))
        policy.on_event(ms(end_ms), done)
        if end_ms == 22:
            runs += policy.on_event(policy.next_deadline_ns() or 0, TIMER)  # type: ignore[arg-type]
    event(100, "a")
    assert len(runs) == 2
    event(101, "b")
    assert runs[2].batch[0].key == "a"


def test_late_timers_and_long_batches_make_it_wait_less() -> None:
    """A batch of two that takes 24 ms has to start 76 ms after the first has come."""
    calm = used_to_company(bursts=3)
    calm.arrive(1000, slo_ms=40)
    late = used_to_company(bursts=3)
    for _ in range(3):
        late.rule.on_wake(ms(5))
    late.arrive(1000, slo_ms=40)
    slow = used_to_company(bursts=3)
    for _ in range(200):
        slow.rule.on_finished(ms(26.4), Finished(0, [Request(99, 0)], 0))
    slow.arrive(1000, slo_ms=40)
    assert calm.wakes_ms() == pytest.approx(1016)
    assert late.wakes_ms() == pytest.approx(1011)
    assert slow.wakes_ms() == pytest.approx(1040 - 1.2 * 24, abs=1)


def test_one_pause_changes_nothing() -> None:
    rule = Auto(LINE, max_batch_size=16)
    for took_ms in (22, 22, 5000, 22):
        rule.on_finished(ms(took_ms), Finished(0, [Request(0, 0)], 0))
    assert rule.stretches == [1]
    rule.queue.add(Request(1, 0, ms(23)))
    assert rule.choose(0) == 1


def test_batches_may_take_no_time_by_a_coarse_clock() -> None:
    bench = Bench()
    for turn in range(20):
        bench.arrive(100 * turn)
        bench.finish(100 * turn)
    for slo_ms in (30, 40, 50):
        bench.arrive(3000, slo_ms)
        bench.arrive(3000, slo_ms)
    assert bench.running is not None
    bench.finish(3032)
    assert bench.running is not None


def test_what_is_not_typical_is_not_learned_from() -> None:
    rule = Auto(LINE, max_batch_size=16)
    for _ in range(20):
        rule.on_finished(ms(900), Finished(0, [Request(0, 0)], 0, is_typical=False))
    assert rule.stretches == (1,)


def test_a_profile_that_is_wrong_is_corrected_and_a_new_one_is_not_corrected_again() -> None:
    rule = Auto(LINE, max_batch_size=16)
    for _ in range(20):
        rule.on_finished(ms(44), Finished(0, [Request(0, 0)], 0))
    assert rule.stretches[1] == pytest.approx(2, rel=0.03)
    rule.profile = LatencyProfile.linear(4, 40, max_batch_size=16)
    rule.on_finished(ms(44), Finished(0, [Request(0, 0)], 0))
    assert rule.stretches == [1]


def test_more_may_run_together_than_at_first() -> None:
    rule = Auto(LatencyProfile.linear(2, 20, max_batch_size=2), max_batch_size=2)
    rule.profile, rule.max_batch_size = LINE, 16
    for number in range(9):
        rule.queue.add(Request(number, 0, ms(100)))
        rule.choose(0)
        rule.on_arrival(0, rule.queue[0])
    assert rule.choose(0) in (0, 9)


def good(policy: int, others: Iterable[int]) -> bool:
    """Best, or within two standard deviations of the counts."""
    best = min(others)
    return policy - best <= 2 * math.sqrt(policy + best)


@pytest.mark.parametrize("jitter_ms", [0, 1])
@pytest.mark.parametrize(("rate_qps", "cv"), [(40, 1), (200, 1), (260, 1), (200, 3), (400, 2)])
def test_it_is_best_or_within_noise_of_it(rate_qps: float, cv: float, jitter_ms: float) -> None:
    violations = {
        name: Report.of(simulated(maker, rate_qps=rate_qps, cv=cv, jitter_ms=jitter_ms)).violations
        for name, maker in POLICIES.items()
    }
    assert good(violations["auto"], violations.values()), violations


@pytest.mark.parametrize("cv", [1, 3])
@pytest.mark.parametrize("rate_qps", [15, 31, 62])
def test_at_low_load_it_is_as_quick_as_never_waiting(rate_qps: float, cv: float) -> None:
    """5, 10 and 20 % of what the device can do."""
    auto = simulated(POLICIES["auto"], rate_qps=rate_qps, cv=cv, count=2000)
    greedy = simulated(POLICIES["immediate"], rate_qps=rate_qps, cv=cv, count=2000)
    assert mean_ms(auto) <= 1.1 * mean_ms(greedy)
    assert Report.of(auto).violations <= Report.of(greedy).violations


def test_a_limit_on_weights_is_as_good_a_reason_to_wait_as_one_on_items() -> None:
    """Four at a time either way: those who come while a batch runs need several."""
    profile = LatencyProfile.linear(0.4, 45, max_batch_size=64)

    def violations(max_batch_size: int, max_weight: int | None) -> float:
        outcome = simulate(
            Batching(lambda _: Auto(profile, max_batch_size=max_batch_size), max_weight=max_weight),
            requests(gamma(50, 3, Random(1)), slo_ms=120, count=3000),
            service_ns=lambda device, batch: profile.latency_ns(len(batch)),
        )
        return Report.of(outcome).violation_ratio

    assert violations(64, 4) == pytest.approx(violations(4, None), abs=0.003)


def test_a_limit_on_weights_that_nothing_reaches_changes_nothing() -> None:
    ends_ns = []
    for max_weight in (None, 1000):
        outcome = simulate(
            Batching(lambda _: Auto(LINE, max_batch_size=16), max_weight=max_weight),
            requests(gamma(50, 3, Random(1)), slo_ms=SLO_MS, count=1000),
            service_ns=lambda device, batch: LINE.latency_ns(len(batch)),
        )
        ends_ns.append([each.ended_ns for each in outcome.executions])
    assert ends_ns[0] == ends_ns[1]


@pytest.mark.parametrize(("factor", "left"), [(0.5, 1.0), (0.65, 2.0), (1.6, 0.8125), (2.0, 1.0)])
def test_of_a_device_of_another_speed_past_batches_say_nothing(factor: float, left: float) -> None:
    """They took 1.3 times the profile."""
    rule = Auto(LatencyProfile([1000.0, 2000.0]), max_batch_size=2)
    for number in range(70):
        batch = [Request(number, 0)] * (1 + number % 2)
        rule.on_finished(1300 * len(batch), Finished(0, batch, 0))
    rule.profile = LatencyProfile([factor * 1000, factor * 2000])
    rule.queue.add(Request(99, 0))
    assert rule.fitting(0) == 1
    assert max(rule.stretches) == pytest.approx(left, rel=0.05)


def test_how_many_of_the_heaviest_one_batch_can_hold() -> None:
    rule = Auto(LatencyProfile([1000.0, 2000.0]), max_batch_size=2)
    assert rule._weighs_little(99)
    rule.max_weight = 10
    assert rule._weighs_little(99)  # no batch has ended yet
    rule._worst_pace, rule._worst_weight_pace = 2.0, 10.0
    assert rule._weighs_little(2)
    assert not rule._weighs_little(3)
