"""Who may join a batch on its way: whom it helps, whom it costs, and who would be late."""

from __future__ import annotations

import itertools
import statistics
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.checking import ms
from batching.staged.policies.boards import Place, batch_at, queue_up
from benchmarks.staged_device import StageDevice, full_demand
from benchmarks.staged_simulation import simulate_staged
from trims_shim.batching.policies import Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, DropReason, Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator.arrivals import poisson
from trims_shim.batching.staged.mechanism.batches import Batch
from trims_shim.batching.staged.policies.load import LoadDiversity
from trims_shim.batching.staged.policies.staged_auto import StagedAuto
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import StagedBatching

STAGE = LatencyProfile.linear(1, 10, max_batch_size=16)
PROFILE = StagedProfile([STAGE] * 4)
NOW_NS = ms(1000)
LATER_NS = ms(9000)


def rule_with(
    *deadlines_ns: int, profile: StagedProfile = PROFILE, **options: Any
) -> LoadDiversity:
    rule = LoadDiversity(profile, max_batch_size=profile.max_batch_size, **options)
    queue_up(rule, *deadlines_ns)
    return rule


def joining(rule: LoadDiversity, *places: Place, deadlines_ns: tuple[int, ...] = ()) -> int:
    batch = batch_at(*places, stages=4, deadlines_ns=deadlines_ns)
    rule.ahead = [batch]
    room = min(len(rule.queue), rule.max_batch_size - batch.live)
    return rule.stretch(NOW_NS, batch, room)


def test_many_join_one_who_has_just_begun() -> None:
    assert joining(rule_with(*[LATER_NS] * 6), (1, 1, None)) == 6


def test_one_does_not_hold_up_many_who_are_nearly_done() -> None:
    assert joining(rule_with(LATER_NS), (3, 10, None)) == 0


def test_where_batches_save_nothing_nobody_joins() -> None:
    profile = StagedProfile([LatencyProfile.linear(10, 0, max_batch_size=16)] * 4)
    assert joining(rule_with(*[LATER_NS] * 6, profile=profile), (1, 2, None)) == 0


@pytest.mark.parametrize(
    ("sure", "joined"), [((16, 16, 16, 16), 6), ((2, 4, 16, 16), 3), ((16, 16, 16, 1), 0)]
)
def test_a_batch_grows_only_to_sizes_of_which_it_is_known_what_they_take(
    sure: tuple[int, ...], joined: int
) -> None:
    profile = StagedProfile([STAGE] * 4, sure=sure)
    assert joining(rule_with(*[LATER_NS] * 6, profile=profile), (1, 1, None)) == joined


class Asked(LoadDiversity):
    """Remembers how many it has thought of."""

    sizes: list[int] | None = None

    def _in_time(self, now_ns: int, batch: Batch, size: int) -> int:
        self.sizes = [*(self.sizes or ()), size]
        return super()._in_time(now_ns, batch, size)


def test_nobody_joins_a_batch_that_is_larger_than_any_before() -> None:
    rule = Asked(StagedProfile([STAGE] * 4, sure=(8,) * 4), max_batch_size=16)
    queue_up(rule, *[LATER_NS] * 6)
    assert joining(rule, (1, 9, None)) == 0
    assert rule.sizes == [0]


def test_the_papers_rule_knows_of_no_such_sizes() -> None:
    profile = StagedProfile([STAGE] * 4, sure=(1, 1, 1, 1))
    rule = rule_with(*[LATER_NS] * 6, profile=profile, wait_ms=2000)
    assert joining(rule, (1, 1, None)) == 6


def test_those_that_could_not_be_joined_are_remembered_for_a_while() -> None:
    rule = rule_with(*[LATER_NS] * 6)
    for _ in range(20):
        rule.on_met(False)
    chances = [joining(rule, (1, 1, None)) for _ in range(500)]
    assert chances[:20] == [0] * 20
    assert 6 in chances  # or nobody would know that they can be, by now
    rule.on_met(False)
    assert joining(rule, (1, 1, None)) == 0
    for _ in range(20):
        rule.on_met(True)
    assert joining(rule, (1, 1, None)) == 6


def test_one_who_could_be_late_if_they_are_not_joined_is_spared() -> None:
    together_ns = PROFILE.stage_ns(0, 6) + PROFILE.remaining_ns(1, 7)
    due_ns = NOW_NS + together_ns + ms(1)
    rule = rule_with(*[LATER_NS] * 6)
    assert joining(rule, (1, 1, None), deadlines_ns=(due_ns,)) == 6
    rule.on_met(False)
    assert joining(rule, (1, 1, None), deadlines_ns=(due_ns,)) < 6


def test_nobody_joins_a_batch_that_runs_each_stage_twice_already() -> None:
    rule = rule_with(*[LATER_NS] * 6)
    batch = batch_at((1, 1, None), stages=4)
    batch.is_apart = True
    assert rule.stretch(NOW_NS, batch, 6) == 0
    batch.is_apart = False
    assert rule.stretch(NOW_NS, batch, 6) == 6


def mean_ns(rule: RuleMaker, profile: StagedProfile, load: float, seed: int) -> float:
    rate = load * max(size / profile.latency_ns(size) for size in range(1, 17))
    times_ns = itertools.islice(poisson(rate * 1e9, Random(seed)), 2000)
    requests = [Request(number, time_ns, NEVER_NS) for number, time_ns in enumerate(times_ns)]
    policy = StagedBatching(lambda _: rule(profile, max_batch_size=16), stages=len(profile.stages))
    device = StageDevice(profile, demand=full_demand)
    executions = simulate_staged(policy, requests, device=device).executions
    return statistics.mean(
        each.ended_ns - request.arrival_ns for each in executions for request in each.batch
    )


@pytest.mark.parametrize("load", [0.3, 0.6])
@pytest.mark.parametrize("seed", [1, 2])
def test_where_large_batches_cost_more_stages_cost_nothing(load: float, seed: int) -> None:
    """As on a processor whose caches they leave: what one saves by joining is soon lost again."""
    stage = LatencyProfile(ms(1.4 * size + 0.02 * size**2 + 0.2) for size in range(1, 17))
    profile = StagedProfile([stage] * 2)
    immediate_ns = mean_ns(Immediate, profile, load, seed)
    assert mean_ns(LoadDiversity, profile, load, seed) < 1.005 * immediate_ns


@pytest.mark.parametrize("load", [0.6, 0.8])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_where_latencies_jump_stages_cost_nothing(load: float, count: int, seed: int) -> None:
    """Eight in one batch take longer than four and four: it is no gain to be one of them."""
    stage = LatencyProfile(
        ms((6.4 + 0.4 * size + 12 * ((size - 1) // 4)) / count) for size in range(1, 17)
    )
    profile = StagedProfile([stage] * count)
    alone_ns = mean_ns(StagedAuto, profile, load, seed)
    assert mean_ns(LoadDiversity, profile, load, seed) < 1.005 * alone_ns


@given(
    early=st.integers(1, 8),
    stage=st.integers(1, 3),
    late=st.integers(1, 8),
    fixed=st.integers(0, 9),
)
def test_with_nobody_else_coming_the_latencies_of_all_decide(
    early: int, stage: int, late: int, fixed: int
) -> None:
    """Both ways, step by step; what a driver does around a stage is on the side of not joining."""
    stages = [LatencyProfile.linear(1 + each, fixed, max_batch_size=16) for each in (1, 3, 2, 1)]
    profile = StagedProfile(stages)
    rest = sum(each.latency_ns(early) for each in stages[stage:])
    apart = early * rest + late * (rest + sum(each.latency_ns(late) for each in stages))
    catching_up = sum(each.latency_ns(late) + 100_000 for each in stages[:stage])
    together = catching_up + sum(each.latency_ns(early + late) for each in stages[stage:])
    joined = joining(rule_with(*[NEVER_NS] * late, profile=profile), (stage, early, None))
    if (early + late) * together != pytest.approx(apart, rel=1e-3):
        assert bool(joined) == ((early + late) * together < apart)


def test_a_batch_that_has_not_begun_stays_as_it_was_made() -> None:
    assert joining(rule_with(*[LATER_NS] * 6), (0, 1, None)) == 0
    assert joining(rule_with(*[LATER_NS] * 6), (0, 1, NOW_NS)) == 6


def test_what_the_driver_does_around_stages_counts() -> None:
    """Stages of 60 us: 0.6 ms for all if the three wait, 0.48 if they join, but for the driver."""
    quick = StagedProfile([LatencyProfile([60_000] * 4)] * 2)
    assert joining(rule_with(*[LATER_NS] * 3, profile=quick), (1, 1, None)) == 0


def test_who_is_in_time_alone_is_not_made_late() -> None:
    due_ns = NOW_NS + PROFILE.stage_ns(0, 3) + PROFILE.remaining_ns(1, 4)
    assert joining(rule_with(*[LATER_NS] * 6), (1, 1, None), deadlines_ns=(due_ns,)) == 3
    tight_ns = NOW_NS + PROFILE.remaining_ns(1, 1)
    assert joining(rule_with(*[LATER_NS] * 6), (1, 1, None), deadlines_ns=(tight_ns,)) == 0


def test_a_margin_is_kept() -> None:
    due_ns = NOW_NS + PROFILE.stage_ns(0, 3) + PROFILE.remaining_ns(1, 4)
    rule = rule_with(*[LATER_NS] * 6, margin_ms=1)
    assert joining(rule, (1, 1, None), deadlines_ns=(due_ns,)) == 2


def test_who_is_late_anyway_forbids_nothing() -> None:
    assert joining(rule_with(*[LATER_NS] * 6), (1, 1, None), deadlines_ns=(NOW_NS,)) == 6


def test_who_is_hopeless_does_not_join_but_is_given_up() -> None:
    rule = rule_with(NOW_NS + ms(5), *[LATER_NS] * 5)
    assert joining(rule, (1, 1, None)) == 5
    drops = rule.take_drops()
    assert [(len(each.requests), each.reason) for each in drops] == [(1, DropReason.HOPELESS)]
    only = rule_with(NOW_NS)
    assert joining(only, (1, 1, None)) == 0
    assert not only.queue


@pytest.mark.parametrize(("margin_ms", "given_up"), [(0, 0), (2, 1)])
def test_who_is_not_in_time_with_the_margin_is_hopeless(margin_ms: int, given_up: int) -> None:
    soon_ns = NOW_NS + PROFILE.latency_ns(1) + ms(1)
    rule = rule_with(soon_ns, *[LATER_NS] * 5, margin_ms=margin_ms)
    joining(rule, (1, 1, None))
    assert sum(len(each.requests) for each in rule.take_drops()) == given_up


def test_those_of_other_keys_are_not_held_up_for_little() -> None:
    rule = rule_with(*[LATER_NS] * 2)
    assert joining(rule, (1, 1, None)) == 2
    rule.others = 50
    assert joining(rule, (1, 1, None)) == 0


def test_a_fixed_time_as_in_the_paper() -> None:
    """Whatever it costs: the batch was made at 0."""
    assert joining(rule_with(LATER_NS, wait_ms=1001), (3, 10, None)) == 1
    assert joining(rule_with(*[LATER_NS] * 6, wait_ms=1000), (1, 1, None)) == 0


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_time_is_not_below_nothing(wrong: float) -> None:
    with pytest.raises(ValueError, match="wait_ms"):
        rule_with(wait_ms=wrong)


def test_all_join_a_loop() -> None:
    rule = rule_with(*[LATER_NS] * 3)
    rule.has_loop = True
    assert joining(rule, (3, 10, None)) == 3


# --- where two stages run at a time ---------------------------------------------------------------

# The third stage takes as long for 16 as for 1: who comes behind another one waits there.
BOTTLENECK = StagedProfile(
    [LatencyProfile.linear(0.1, 1, max_batch_size=16)] * 2
    + [LatencyProfile([ms(30)] * 16)]
    + [LatencyProfile.linear(0.1, 1, max_batch_size=16)]
)


def test_beside_a_batch_one_joins_where_he_would_wait_behind_it() -> None:
    rule = rule_with(*[LATER_NS] * 2, profile=BOTTLENECK)
    rule.devices = 2
    assert joining(rule, (1, 2, None)) == 2
    assert joining(rule, (3, 2, None)) == 0


def test_beside_a_batch_nobody_joins_who_can_go_on_his_own() -> None:
    rule = rule_with(*[LATER_NS] * 2)
    rule.devices = 2
    assert joining(rule, (2, 2, None)) == 0


@pytest.mark.parametrize(("stage", "aboard", "joined"), [(2, 2, 2), (2, 14, 0), (1, 14, 2)])
def test_once_the_device_is_busy_only_the_first_stage_is_waited_for(
    stage: int, aboard: int, joined: int
) -> None:
    rule = rule_with(*[LATER_NS] * 2, profile=BOTTLENECK)
    rule.devices = 2
    assert joining(rule, (stage, aboard, None)) == joined
