"""The default policy: when it waits, for how long, what it learns, and that it beats the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import pytest

from batching.checking import ms
from trims_shim.batching.policies import POLICIES
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, TIMER, Finished, Request, Run
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import Report, gamma, requests, simulate
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


def used_to_company(profile: LatencyProfile = LINE) -> Bench:
    """5 ms after a lone request, while it ran, a second one has come. Nothing happens from 100."""
    bench = Bench(profile)
    bench.arrive(0)
    bench.arrive(5)
    bench.finish(22)
    if bench.running is None:
        bench.wake(bench.wakes_ms() or 0)
    bench.finish(99)
    return bench


def report(
    maker: RuleMaker, *, rate_qps: float, cv: float, jitter_ms: float = 0, count: int = 5000
) -> Report:
    service, timers = Random(1), Random(2)

    def late_ns(random: Random) -> int:
        return round(random.expovariate(1 / jitter_ms) * 1e6) if jitter_ms else 0

    outcome = simulate(
        Batching(lambda key: maker(LINE, max_batch_size=16)),
        requests(gamma(rate_qps, cv, Random(3)), slo_ms=SLO_MS, count=count),
        service_ns=lambda device, batch: LINE.latency_ns(len(batch)) + late_ns(service),
        lateness_ns=lambda: late_ns(timers),
    )
    return Report.of(outcome)


def test_nobody_is_waited_for_before_anybody_has_come_in_time() -> None:
    bench = Bench()
    bench.arrive(0)
    assert bench.running is not None


def test_a_caller_that_waits_for_its_answers_never_waits_for_company() -> None:
    bench = Bench()
    now_ms = 0.0
    for _ in range(50):
        bench.arrive(now_ms)
        assert bench.running is not None
        bench.finish(now_ms + 22)
        now_ms += 22.001


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
    bench = used_to_company()
    now_ms = 100.0
    for _ in range(3):
        bench.arrive(now_ms)
        if bench.running is None:
            now_ms = bench.wakes_ms() or 0
            bench.wake(now_ms)
        for _ in range(16):
            bench.arrive(now_ms + 1)
        bench.finish(now_ms + 22)
        bench.finish(now_ms + 22 + 52)
        now_ms += 100
    bench.arrive(1000)
    assert bench.wakes_ms() == 1020
    bench.wake(1020)
    assert bench.running is not None


def test_with_time_to_spare_it_waits_for_half_of_what_the_first_one_has() -> None:
    bench = used_to_company()
    bench.arrive(100)
    assert bench.running is None
    # Due at 200, and a batch of two takes 24.
    assert bench.wakes_ms() == pytest.approx(100 + 76 / 2)


def test_a_full_batch_bounds_it_however_generous_the_slo() -> None:
    bench = used_to_company()
    bench.arrive(100, slo_ms=60_000)
    assert bench.wakes_ms() == pytest.approx(100 + LINE.latency_ns(16) / 1e6)


def test_without_a_deadline_it_does_not_wait() -> None:
    bench = used_to_company()
    bench.arrive(100, slo_ms=None)
    assert bench.running is not None


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
    event(5, "a")
    for end_ms in (22, 44):
        done = Finished(0, runs[-1].batch, ms(end_ms - 22))
        runs.extend(each for each in policy.on_event(ms(end_ms), done) if isinstance(each, Run))
    event(100, "a")
    assert len(runs) == 2
    event(101, "b")
    assert runs[2].batch[0].key == "a"


def test_late_timers_and_long_batches_make_it_wait_less() -> None:
    calm = used_to_company()
    calm.arrive(100)
    late = used_to_company()
    for _ in range(3):
        late.rule.on_wake(ms(30))
    late.arrive(100)
    slow = used_to_company()
    for _ in range(3):
        slow.rule.on_finished(ms(33), Finished(0, [Request(99, 0)], 0))
    slow.arrive(100)
    assert (calm.wakes_ms() or 0) == pytest.approx(138)
    assert (late.wakes_ms() or 0) == pytest.approx(138 - 15)
    assert (slow.wakes_ms() or 0) < 138


def test_one_pause_changes_nothing() -> None:
    rule = Auto(LINE, max_batch_size=16)
    for took_ms in (22, 22, 5000, 22):
        rule.on_finished(ms(took_ms), Finished(0, [Request(0, 0)], 0))
    assert rule.stretches == [1]
    rule.queue.add(Request(1, 0, ms(23)))
    assert rule.choose(0) == 1


def test_what_is_not_typical_is_not_learned_from() -> None:
    rule = Auto(LINE, max_batch_size=16)
    for _ in range(20):
        rule.on_finished(ms(900), Finished(0, [Request(0, 0)], 0, is_typical=False))
    assert rule.stretches == (1,)


def test_a_profile_that_is_wrong_is_corrected_and_a_new_one_is_not_corrected_again() -> None:
    rule = Auto(LINE, max_batch_size=16)
    for _ in range(20):
        rule.on_finished(ms(44), Finished(0, [Request(0, 0)], 0))
    assert rule.stretches == [2]
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
        name: report(maker, rate_qps=rate_qps, cv=cv, jitter_ms=jitter_ms).violations
        for name, maker in POLICIES.items()
    }
    assert good(violations["auto"], violations.values()), violations


def test_at_low_load_it_needs_less_of_the_device() -> None:
    auto = report(POLICIES["auto"], rate_qps=40, cv=1)
    greedy = report(POLICIES["immediate"], rate_qps=40, cv=1)
    assert auto.violations == greedy.violations == 0
    assert auto.busy_share < 0.65 * greedy.busy_share
