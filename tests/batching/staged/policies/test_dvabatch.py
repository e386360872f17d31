"""All together, in the simulator: as good as without stages where these help nothing, else better.

Latencies are stated, not measured. A *narrow* device does one thing at a time; a *wide* one has
room beside small batches, and runs two stages at once.
"""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from batching.staged.policies.boards import batch_at, queue_up
from benchmarks.staged_device import StageDevice, demand_of_best_size, full_demand
from benchmarks.staged_simulation import StagedOutcome, simulate_staged
from trims_shim.batching.policies import Auto, Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import Report, gamma, requests
from trims_shim.batching.staged.policies import DVABatch
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import StagedBatching

SIZE = 32
LINE = StagedProfile([LatencyProfile.linear(0.3, 4, max_batch_size=SIZE)] * 4)


def plateaus(*stages: tuple[int, float]) -> StagedProfile:
    """Of (preferred size, milliseconds of a full batch): fewer take as long as that size."""
    profiles = [
        LatencyProfile(1e6 * full_ms * max(size, preferred) / SIZE for size in range(1, SIZE + 1))
        for preferred, full_ms in stages
    ]
    return StagedProfile(profiles, preferred=[preferred for preferred, _ in stages])


UNET = plateaus((2, 10), (8, 8), (32, 6), (8, 8), (2, 10), (2, 10))


def run(
    maker: RuleMaker,
    profile: StagedProfile,
    *,
    load: float,
    cv: float = 1,
    is_wide: bool = False,
    slo_ms: float | None = 150,
    count: int = 1200,
) -> StagedOutcome:
    """``load``: of the throughput of the largest batches."""
    size = profile.max_batch_size
    device = StageDevice(profile, demand=demand_of_best_size if is_wide else full_demand)
    policy = StagedBatching(
        lambda key: maker(profile, max_batch_size=size),
        stages=len(profile.stages),
        devices=2 if is_wide else 1,
    )
    rate_qps = load * size / profile.latency_ns(size) * 1e9
    stream = requests(gamma(rate_qps, cv, Random(7)), slo_ms=slo_ms, count=count)
    return simulate_staged(policy, stream, device=device)


def mean_ms(outcome: StagedOutcome) -> float:
    answered = outcome.answered
    return sum(end_ns - each.arrival_ns for each, end_ns in answered) / len(answered) / 1e6


def answers(outcome: StagedOutcome) -> dict[int, int]:
    return {request.number: end_ns for request, end_ns in outcome.answered}


def test_with_one_stage_it_is_the_default_policy() -> None:
    whole = StagedProfile([LatencyProfile.linear(1.2, 16, max_batch_size=SIZE)])
    for load in (0.3, 0.9):
        ours = run(DVABatch, whole, load=load, cv=2, slo_ms=90)
        default = run(Auto, whole, load=load, cv=2, slo_ms=90)
        assert answers(ours) == answers(default)
        assert len(ours.dropped) == len(default.dropped)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_one_thing_at_a_time_and_stages_alike_lose_nothing(load: float) -> None:
    ours, immediate = run(DVABatch, LINE, load=load), run(Immediate, LINE, load=load)
    assert mean_ms(ours) <= 1.02 * mean_ms(immediate)


def staged_run(maker: RuleMaker, load: float, overhead_ns: int, *, stages: int) -> float:
    """Mean latency of a model whose stages are alike, where each call takes some time."""
    profile = StagedProfile([LatencyProfile.linear(0.5, 1, max_batch_size=SIZE)] * 4)
    device = StageDevice(profile, demand=full_demand, overhead_ns=overhead_ns)
    if stages == 1:
        device = device.unstaged()
    known = device.profile()
    policy = StagedBatching(lambda key: maker(known, max_batch_size=SIZE), stages=stages)
    rate_qps = load * SIZE / known.latency_ns(SIZE) * 1e9
    stream = requests(gamma(rate_qps, 1, Random(7)), slo_ms=None, count=1200)
    return mean_ms(simulate_staged(policy, stream, device=device))


@pytest.mark.parametrize("load", [0.2, 0.5, 0.9])
def test_where_stages_gain_nothing_they_cost_nothing(load: float) -> None:
    """One batch in sixteen goes through them; on all others a border of 0.1 ms costs 2 to 9 %."""
    ours = staged_run(DVABatch, load, 100_000, stages=4)
    assert ours <= 1.01 * staged_run(Auto, load, 100_000, stages=1)


def test_batches_run_whole_unless_stages_pay() -> None:
    def counts(profile: StagedProfile, load: float) -> tuple[int, int]:
        ended = run(DVABatch, profile, load=load).stage_executions
        whole = sum(each.part is None for each in ended)
        return whole, sum(each.stage == 0 for each in ended) - whole

    whole, staged = counts(LINE, 0.5)
    assert whole > 8 * staged > 0
    whole, staged = counts(UNET, 0.85)
    assert staged > 4 * whole
    paced = run(partial(DVABatch, wait_ms=2), LINE, load=0.5)
    assert all(each.part for each in paced.stage_executions), "the user says who may join"
    wide = run(DVABatch, LINE, load=0.5, is_wide=True)
    assert all(each.part for each in wide.stage_executions), "others run beside it"


def test_sizes_with_unknown_latencies_go_through_the_stages() -> None:
    def rule(sure: int) -> DVABatch:
        return DVABatch(StagedProfile(LINE.stages, sure=[sure] * 4), max_batch_size=SIZE)

    for sure, expected in ((4, 15), (3, 0)):
        asked = rule(sure)
        assert sum(asked.runs_whole(0, 4) for _ in range(16)) == expected


def test_bursts_catch_up() -> None:
    ours = run(DVABatch, LINE, load=0.3, cv=3)
    immediate = run(Immediate, LINE, load=0.3, cv=3)
    assert mean_ms(ours) <= 0.93 * mean_ms(immediate)


def test_operators_that_differ_gain_one_at_a_time() -> None:
    ours, immediate = run(DVABatch, UNET, load=0.85), run(Immediate, UNET, load=0.85)
    assert mean_ms(ours) <= 0.93 * mean_ms(immediate)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_a_batch_starts_when_it_is_not_held_up(load: float) -> None:
    """Behind the stage that takes as long for one as for all, small batches would queue up."""
    ours = run(DVABatch, UNET, load=load, is_wide=True)
    immediate = run(Immediate, UNET, load=load, is_wide=True)
    assert mean_ms(ours) <= 0.9 * mean_ms(immediate)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("profile", [LINE, UNET], ids=["line", "unet"])
def test_in_overload_nobody_waits_for_ever(profile: StagedProfile, is_wide: bool) -> None:
    outcome = run(DVABatch, profile, load=1.2, cv=2, is_wide=is_wide)
    report = Report.of(outcome)
    assert report.unanswered == 0
    assert report.p99_ms <= 2 * 150
    assert report.goodput_qps > 0.7 * SIZE / profile.latency_ns(SIZE) * 1e9


def test_tight_objectives_are_kept_as_well_as_by_the_default_policy() -> None:
    for cv in (1, 3):
        ours = Report.of(run(DVABatch, LINE, load=0.6, cv=cv, slo_ms=80))
        default = Report.of(run(Auto, LINE, load=0.6, cv=cv, slo_ms=80))
        assert ours.violations <= 1.05 * default.violations


@pytest.mark.parametrize("load", [0.2, 0.5])
@pytest.mark.parametrize(
    ("stage", "slo_ms"),
    [
        pytest.param(LatencyProfile.linear(0.2, 22, max_batch_size=SIZE), 65, id="nobody"),
        pytest.param(LatencyProfile.linear(1, 10, max_batch_size=4), 36, id="one"),
    ],
)
def test_so_they_are_where_few_can_join_in_time(
    load: float, stage: LatencyProfile, slo_ms: float
) -> None:
    """Two long stages, most of whose time is not the items': then it waits before it starts."""
    profile = StagedProfile([stage] * 2)
    ours = Report.of(run(DVABatch, profile, load=load, cv=3, slo_ms=slo_ms))
    default = Report.of(run(Auto, profile, load=load, cv=3, slo_ms=slo_ms))
    assert ours.violations <= 1.05 * default.violations


def test_without_deadlines_everything_is_answered() -> None:
    outcome = run(DVABatch, UNET, load=0.7, slo_ms=None)
    assert len(outcome.answered) == outcome.requests


@pytest.mark.parametrize(("stages", "waits"), [(1, True), (4, False)])
def test_it_waits_for_company_only_where_nobody_can_join_later(stages: int, waits: bool) -> None:
    """Requests come in pairs, one a millisecond after the other."""
    whole = LatencyProfile.linear(2, 20, max_batch_size=16)
    profile = StagedProfile.even(whole, stages)
    policy = StagedBatching(lambda key: DVABatch(profile, max_batch_size=16), stages=stages)
    stream = [
        Request(2 * pair + second, (200 * pair + second) * 1_000_000)
        for pair in range(6)
        for second in range(2)
    ]
    outcome = simulate_staged(policy, stream, device=StageDevice(profile, demand=full_demand))
    starts_ns = [each.started_ns for each in outcome.stage_executions if each.stage == 0]
    firsts_ns = {request.arrival_ns for request in stream[::2]}
    assert bool(firsts_ns.difference(starts_ns)) == waits


def test_a_batch_is_held_back_until_the_one_ahead_is_out_of_the_way() -> None:
    rule = DVABatch(UNET, max_batch_size=SIZE)
    rule.devices = 2
    queue_up(rule, NEVER_NS)
    rule.ahead = [batch_at((1, 1, 0), stages=6)]
    assert rule.choose(0) == 0
    # The third stage is free at 8 ms; one is there after 0.625 + 2 ms, and stage 1 takes 2.
    held_until_ns = 8_000_000 - UNET.passed_ns(2, 1) - UNET.stage_ns(0, 1) // 2
    assert rule.wake_ns == held_until_ns
    rule.ahead = [batch_at((2, 1, 2_000_000), stages=6)]
    assert rule.choose(held_until_ns - 1) == 0
    assert rule.choose(held_until_ns) == 1


def test_a_deadline_ends_that() -> None:
    rule = DVABatch(UNET, max_batch_size=SIZE)
    rule.devices = 2
    due_ns = UNET.latency_ns(1) + 1_000_000
    queue_up(rule, due_ns)
    rule.ahead = [batch_at((1, 1, 0), stages=6)]
    assert rule.choose(0) == 0
    assert rule.wake_ns == 1_000_000
    assert rule.choose(1_000_000) == 1
