"""Staged policies in virtual time: what happens when, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.staged_device import StageDevice, full_demand
from benchmarks.staged_simulation import simulate_staged
from trims_shim.batching.policies import Immediate, Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    FLUSH,
    TIMER,
    Action,
    Drop,
    DropReason,
    Event,
    Preempt,
    Request,
)
from trims_shim.batching.simulator import Report, poisson, requests, simulate
from trims_shim.batching.single import Batching
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import RunStage, StagedBatching, StageEnded
from trims_shim.batching.staged.staged_rules import StagedRule

MS = 1_000_000
TWO = StagedProfile([LatencyProfile.linear(1, 9, max_batch_size=8)] * 2)
"""Two stages of 10 ms for one, 11 for two, 12 for three."""


class Greedy(StagedRule):
    """Starts and stretches whenever it may."""

    def choose(self, now_ns: int) -> int:
        return self.room()

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        return room


class Halving(Greedy):
    """And splits everything in halves."""

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        return 0

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        return (part.size // 2, part.size - part.size // 2) if part.size > 1 else ()


def policy(make: Callable[..., StagedRule], stages: int = 2, **options: int) -> StagedBatching:
    profile = StagedProfile([TWO.stages[0]] * stages)
    return StagedBatching(lambda key: make(profile, max_batch_size=8), stages=stages, **options)


def at(*times_ms: float) -> list[Request]:
    return [Request(number, round(time_ms * MS)) for number, time_ms in enumerate(times_ms)]


def answers_ms(outcome) -> dict[int, float]:  # type: ignore[no-untyped-def]
    return {request.number: end_ns / MS for request, end_ns in outcome.answered}


CPU = StageDevice(TWO, demand=full_demand)
WIDE = StageDevice(TWO, demand=lambda profile, size: 0.5)


# --- what happens when ----------------------------------------------------------------------------


def test_a_batch_goes_through_all_stages_and_is_answered_after_the_last() -> None:
    outcome = simulate_staged(policy(Immediate), at(5), device=CPU)
    assert answers_ms(outcome) == {0: 25}
    assert [(e.stage, e.started_ns, e.ended_ns) for e in outcome.stage_executions] == [
        (0, 5 * MS, 15 * MS),
        (1, 15 * MS, 25 * MS),
    ]
    assert (outcome.start_ns, outcome.end_ns, outcome.busy_ns) == (5 * MS, 25 * MS, 20 * MS)
    assert Report.of(outcome).mean_batch == 1


def test_two_stages_share_the_device_and_each_is_slower() -> None:
    """The second batch starts at 10; each keeps all of the device busy."""
    outcome = simulate_staged(policy(Immediate, devices=2), at(0, 1), device=CPU)
    assert answers_ms(outcome) == {0: 30, 1: 40}
    assert outcome.busy_ns == 40 * MS


def test_stages_that_leave_room_do_not() -> None:
    outcome = simulate_staged(policy(Immediate, devices=2), at(0, 1), device=WIDE)
    assert answers_ms(outcome) == {0: 20, 1: 30}
    assert outcome.busy_ns == 20 * MS


def test_who_comes_while_the_first_stage_runs_catches_up_and_merges() -> None:
    outcome = simulate_staged(policy(Greedy), at(0, 1), device=CPU)
    sizes = [(e.stage, len(e.batch), e.ended_ns // MS) for e in outcome.stage_executions]
    assert sizes == [(0, 1, 10), (0, 1, 20), (1, 2, 31)]
    assert answers_ms(outcome) == {0: 31, 1: 31}
    assert {e.part.batch.number for e in outcome.stage_executions} == {0}


def test_halves_are_answered_one_after_the_other() -> None:
    outcome = simulate_staged(policy(Halving), at(0, 0, 0), device=CPU)
    # The first request starts alone: it was there first.
    assert answers_ms(outcome) == {0: 20, 1: 41, 2: 51}


def test_who_exits_early_is_answered_at_the_end_of_that_stage() -> None:
    outcome = simulate_staged(
        policy(Greedy), at(0), device=CPU, exits=lambda request, stage: request.number == 0
    )
    assert answers_ms(outcome) == {0: 10}
    assert len(outcome.stage_executions) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loop_runs_the_last_stage_as_often_as_each_request_needs(devices: int) -> None:
    """The second request joins after the first step, and is still there after the third."""
    looping = policy(Greedy, has_loop=True, devices=devices)
    outcome = simulate_staged(looping, at(0, 12), device=WIDE, steps=lambda request: 3)
    steps = [[r.number for r in e.batch] for e in outcome.stage_executions if e.stage == 1]
    assert steps == [[0], [0, 1], [0, 1], [1]]
    assert Report.of(outcome).requests == 2


def test_a_timer_comes_at_its_time() -> None:
    waiting = StagedBatching(
        lambda key: Window(TWO, max_batch_size=8, wait_ms=4), stages=2, devices=1
    )
    assert answers_ms(simulate_staged(waiting, at(0, 1), device=CPU)) == {0: 26, 1: 26}


def test_of_plain_batches_several_run_at_once() -> None:
    profile = StagedProfile([TWO.stages[0]])
    plain = Batching(lambda key: Immediate(profile, max_batch_size=8), devices=2)
    outcome = simulate_staged(plain, at(0, 5), device=StageDevice(profile, demand=full_demand))
    assert answers_ms(outcome) == {0: 15, 1: 20}


@pytest.mark.parametrize("make", [Immediate, Window])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), rate_qps=st.sampled_from([20, 200, 2000]))
def test_one_stage_on_one_device_is_the_plain_simulation(
    make: Callable[..., Immediate], seed: int, rate_qps: int
) -> None:
    profile = StagedProfile([TWO.stages[0]])
    stream = list(requests(poisson(rate_qps, Random(seed)), slo_ms=50, count=60))
    staged = simulate_staged(
        StagedBatching(lambda key: make(profile, max_batch_size=8), stages=1),
        stream,
        device=StageDevice(profile),
    )
    plain = simulate(
        Batching(lambda key: make(profile, max_batch_size=8)),
        stream,
        service_ns=lambda device, batch: profile.latency_ns(len(batch)),
    )
    assert staged.answered == plain.answered
    assert (staged.end_ns, staged.batch_sizes) == (plain.end_ns, plain.batch_sizes)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    make=st.sampled_from([Immediate, Greedy, Halving]),
    stages=st.integers(1, 4),
    pairs=st.integers(1, 3),
    devices=st.integers(1, 3),
    has_loop=st.booleans(),
)
def test_every_request_is_answered_once_in_a_time_that_is_possible(
    seed: int, make: type[Greedy], stages: int, pairs: int, devices: int, has_loop: bool
) -> None:
    random = Random(seed)
    stream = list(requests(poisson(300, random), slo_ms=None, count=40))
    steps = {request: random.randint(1, 3) for request in stream}
    exits = {(request, stage) for request in stream for stage in range(4) if random.random() < 0.1}
    device = StageDevice(StagedProfile([TWO.stages[0]] * stages))
    outcome = simulate_staged(
        policy(make, stages, pairs=pairs, devices=devices, has_loop=has_loop),
        stream,
        device=device,
        exits=lambda request, stage: (request, stage) in exits,
        steps=steps.__getitem__ if has_loop else None,
    )
    assert sorted(r.number for r, _ in outcome.answered) == list(range(40))
    for request, end_ns in outcome.answered:
        left_at = next((s for s in range(stages - 1) if (request, s) in exits), None)
        runs = left_at + 1 if left_at is not None else stages - 1
        if left_at is None:
            runs += steps[request] if has_loop else 1
        assert end_ns - request.arrival_ns >= runs * 10 * MS - runs
    for each in outcome.stage_executions:
        ((alone_ns, _),) = device.cost(each.stage, each.batch)
        assert each.ended_ns - each.started_ns >= alone_ns - 1


def test_equal_seeds_give_equal_outcomes() -> None:
    def run() -> list[tuple[int, int]]:
        stream = requests(poisson(400, Random(5)), slo_ms=100, count=200)
        outcome = simulate_staged(policy(Greedy, devices=2), stream, device=StageDevice(TWO))
        return [(request.number, end_ns) for request, end_ns in outcome.answered]

    assert run() == run()


# --- what is refused ------------------------------------------------------------------------------


class Scripted:
    """Answers from a function of the event."""

    def __init__(self, answer: Callable[[Event], Sequence[Action]]) -> None:
        self.answer = answer
        self.wake_ns: int | None = None

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        return self.answer(event)

    def next_deadline_ns(self) -> int | None:
        return self.wake_ns


def run_stage(device: int, batch: Sequence[Request], stage: int = 0) -> RunStage:
    row = Batch(number=0, key=None, created_ns=0, pair=0, size=len(batch), passed=[])
    return RunStage(device, batch, stage, Part(row, stage, []))


def on_arrival(act: Callable[[Request], Action]) -> Scripted:
    return Scripted(lambda event: [act(event)] if isinstance(event, Request) else [])


def on_end(act: Callable[[StageEnded], Action]) -> Scripted:
    def answer(event: Event) -> Sequence[Action]:
        if isinstance(event, Request):
            return [run_stage(0, [event])]
        return [act(event)] if isinstance(event, StageEnded) else []

    return Scripted(answer)


TWICE = [Request(0, 0), Request(1, 0)]


@pytest.mark.parametrize(
    ("scripted", "arrivals", "message"),
    [
        (on_arrival(lambda r: run_stage(0, [r], r.number)), TWICE, "device 0, which is busy"),
        (on_arrival(lambda r: run_stage(r.number, [r])), TWICE, "stage 0 twice at the same"),
        (on_arrival(lambda r: run_stage(0, [])), TWICE, "with nothing"),
        (on_arrival(lambda r: run_stage(0, [r, Request(9, 0, key=1)])), TWICE, "different keys"),
        (on_arrival(lambda r: run_stage(0, [r, r])), TWICE, "not queued, or twice"),
        (on_arrival(lambda r: run_stage(0, [r], 1)), TWICE, "request 0, which is not there"),
        (on_end(lambda e: run_stage(0, e.batch, 0)), [Request(0, 0)], "which is not there"),
        (on_end(lambda e: Drop(e.batch, DropReason.SHED)), [Request(0, 0)], "not queued"),
        (on_arrival(lambda r: Preempt(0)), TWICE, "Preempt is no action of a staged"),
        (on_arrival(lambda r: Drop([r], DropReason.SHED)), at(5, 1), "before what has happened"),
    ],
)
def test_what_breaks_the_contract_is_refused(
    scripted: Scripted, arrivals: list[Request], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_staged(scripted, arrivals, device=CPU)


def test_at_one_time_stages_end_before_requests_arrive_and_flush_comes_when_all_is_over() -> None:
    seen: list[object] = []

    def answer(event: Event) -> Sequence[Action]:
        seen.append(event if event is FLUSH else type(event))
        is_first = isinstance(event, Request) and event.number == 0
        return [run_stage(0, [event])] if is_first else []

    simulate_staged(Scripted(answer), at(0, 10), device=CPU)
    assert seen == [Request, StageEnded, Request, FLUSH]


def test_a_policy_that_asks_for_now_for_ever_is_refused() -> None:
    idle = Scripted(lambda event: [])
    idle.wake_ns = 0
    with pytest.raises(ValueError, match="did nothing at 0 ns"):
        simulate_staged(idle, [Request(0, 0)], device=CPU)


def test_what_is_left_between_stages_or_queued_is_unanswered() -> None:
    def answer(event: Event) -> Sequence[Action]:
        assert event is not TIMER
        is_first = isinstance(event, Request) and event.number == 0
        return [run_stage(0, [event])] if is_first else []

    outcome = simulate_staged(Scripted(answer), TWICE, device=CPU)
    assert outcome.unanswered == TWICE
    assert Report.of(outcome).unanswered == 2


def test_what_is_dropped_is_kept_with_the_time() -> None:
    outcome = simulate_staged(on_arrival(lambda r: Drop([r], DropReason.SHED)), at(7), device=CPU)
    assert [(r.number, time_ns) for r, time_ns in outcome.dropped] == [(0, 7 * MS)]
