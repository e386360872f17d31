"""What is learned of each stage, and what is kept for the next process."""

from __future__ import annotations

import functools
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.batching.staged.rules import joining
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.learning import LateKey
from trims_shim.batching.drivers.replies import BatchFuture, Entry
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_store import ProfileStore
from trims_shim.batching.protocol import Drop, DropReason, Request
from trims_shim.batching.single import Batching
from trims_shim.batching.staged.drivers.jobs import StageJob
from trims_shim.batching.staged.drivers.learning import StagedLearning
from trims_shim.batching.staged.drivers.running import StageOutput
from trims_shim.batching.staged.mechanism.batches import Batch, Part, Piece
from trims_shim.batching.staged.profiles.learning import LearnedStages
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import RunStage, StagedBatching

MS = 1_000_000


def make(**options: Any) -> StagedLearning:
    defaults: dict[str, Any] = {
        "stages": 2, "has_loop": False, "batching": functools.partial(StagedBatching, stages=2),
        "name": None, "max_batch_size": 8, "devices": 1, "store": lambda: None,
    }  # fmt: skip
    return StagedLearning(joining, **{**defaults, **options})


def ran_stage(
    stage: int,
    size: int,
    *latencies_ms: float,
    key: Any = None,
    runs: int = 1,
) -> StageJob:
    requests = [
        Request(number, 0, key=key, payload=Entry((number,), BatchFuture(), 0, None))
        for number in range(size)
    ]
    pieces = [Piece(list(requests), list(range(size)))]
    part = Part(Batch(0, key, 0, 0, size, [0, 0]), stage, pieces)
    job = StageJob(RunStage(0, requests, stage, part), 0, is_end=stage == 1, result=list)
    job.begin(0)
    job.pieces()
    *before_ns, end_ns = (round(each * MS) for each in accumulate(latencies_ms))
    for border_ns in before_ns:
        assert job.run_on(border_ns, is_end=True)
    job.end_stage(end_ns, StageOutput(pieces, runs=runs))
    return job


def with_rule(learning: StagedLearning, key: Any = None) -> tuple[Batching, Any]:
    policy = learning.make_policy()
    assert isinstance(policy, Batching)
    policy.on_event(0, Request(1, 0, key=key))
    return policy, policy.rules[key]


def test_each_stage_has_its_own_latencies() -> None:
    learning = make()
    policy, rule = with_rule(learning)
    assert isinstance(policy, StagedBatching)
    for stage, latency_ms in ((0, 2), (1, 10)):
        assert not learning.ran(policy, ran_stage(stage, 1, 500))
        assert learning.ran(policy, ran_stage(stage, 1, latency_ms))
        assert learning.ran(policy, ran_stage(stage, 1, latency_ms))
    assert isinstance(rule.profile, StagedProfile)
    assert rule.profile.stage_ns(0, 1) == 2 * MS
    assert rule.profile.stage_ns(1, 1) == 10 * MS
    assert rule.profile.latency_ns(1) == 12 * MS


def test_all_stages_of_a_job_that_ran_on_are_learned() -> None:
    learning = make()
    policy, rule = with_rule(learning)
    for latency_ms in (500, 2):
        job = ran_stage(0, 1, latency_ms, 10)
        assert (job.stage, job.through) == (0, 1)
        assert learning.ran(policy, job) == (latency_ms == 2)
    assert rule.profile.stage_ns(0, 1) == 2 * MS
    assert rule.profile.stage_ns(1, 1) == 10 * MS


def test_a_batch_that_ran_whole_is_divided_among_the_stages() -> None:
    learning = make()
    policy, rule = with_rule(learning)
    for latency_ms in (500, 2, 2):
        learning.ran(policy, ran_stage(0, 1, latency_ms, 3 * latency_ms))
    assert rule.profile.latency_ns(1) == 8 * MS
    job = Job(0, [Request(1, 0, payload=Entry((1,), BatchFuture(), 0, None))], 0)
    for _ in range(60):
        job.live, job.results = job.requests, [1]
        job.started_ns, job.ended_ns = 0, 16 * MS
        learning.ran(policy, job)
    assert rule.profile.stage_ns(0, 1) == pytest.approx(4 * MS, rel=0.02)
    assert rule.profile.stage_ns(1, 1) == pytest.approx(12 * MS, rel=0.02)


def test_a_key_that_comes_again_is_not_forgotten_for_those_that_come_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trims_shim.batching.drivers.learning._MOST_KEYS", 3)
    learning = make()
    policy, _ = with_rule(learning)
    for number in range(12):
        for key in ("often", number):
            learning.ran(policy, ran_stage(0, 1, 5, key=key))
    assert learning.keys() == [10, "often", 11]


def test_what_ran_beside_others_is_learned_where_nothing_better_is_known() -> None:
    """A width was measured together with what stages take alone."""
    alone = LatencyProfile([4.0 * MS] * 8)
    for prior, assumed, is_learned in (
        (StagedProfile([alone] * 2, width=0.5), None, False),
        (StagedProfile([alone] * 2), 0.0, True),
        (None, 0.0, True),
    ):
        learning = make(prior=prior, width=assumed)
        policy, rule = with_rule(learning)
        for _ in range(12):
            job = ran_stage(0, 1, 40)
            job.is_beside = True
            learning.ran(policy, job)
        assert (rule.profile.stage_ns(0, 1) > 10 * MS) is is_learned
        for _ in range(12):
            learning.ran(policy, ran_stage(0, 1, 40))
        assert rule.profile.stage_ns(0, 1) > 10 * MS


def test_what_is_doubted_is_learned_from_whatever_runs() -> None:
    alone = LatencyProfile([4.0 * MS] * 8)
    learned = LearnedStages(2, StagedProfile([alone] * 2, width=0.5))
    assert not learned.is_doubted
    for _ in range(4):
        learned.doubt()
    assert learned.is_doubted
    learned.observe(1, 4 * MS, 0)
    learned.observe(1, 4 * MS, 1)
    assert not learned.is_doubted
    learning = make(prior=StagedProfile([alone] * 2, width=0.5))
    policy, rule = with_rule(learning)
    late = Request(1, 0, 10 * MS)
    for _ in range(6):
        learning.gave_up(policy, Drop([late], DropReason.HOPELESS), 1)
    assert rule.profile.stage_ns(0, 1) < 4 * MS
    for _ in range(2):
        for stage in (0, 1):
            job = ran_stage(stage, 1, 4)
            job.is_beside = True
            learning.ran(policy, job)
    assert rule.profile.stage_ns(0, 1) == 4 * MS


def test_what_was_no_single_call_of_the_stage_says_nothing() -> None:
    learning = make()
    policy, _ = with_rule(learning)
    learning.ran(policy, ran_stage(0, 1, 5))
    for runs in (0, 2):  # answered by the whole; pieces that could not be joined
        assert not learning.ran(policy, ran_stage(0, 1, 5, runs=runs))
    failed = ran_stage(0, 1, 5)
    failed.end_with(MS, ValueError())
    assert not learning.ran(policy, failed)


def test_keys_have_their_own_and_late_requests_have_none() -> None:
    learning = make()
    policy, rule = with_rule(learning, "a")
    for _ in range(3):
        learning.ran(policy, ran_stage(0, 1, 3, key="a"))
        learning.ran(policy, ran_stage(1, 1, 3, key=LateKey("a")))
    assert rule.profile.latency_ns(1) == 6 * MS
    policy.on_event(0, Request(2, 0, key=LateKey("a")))
    late = policy.rules[LateKey("a")]
    assert isinstance(late, Immediate)
    assert late.profile == rule.profile
    assert learning.profile("b").latency_ns(1) < MS


def test_what_was_measured_or_saved_is_where_it_begins(tmp_path: Path) -> None:
    store = ProfileStore(str(tmp_path))
    first = make(name="m", store=lambda: store)
    measured = first.measured_stages("k", [{1: 2.0 * MS, 8: 3.0 * MS}, {1: 5.0 * MS}])
    assert isinstance(measured, StagedProfile)
    assert measured.stage_ns(0, 8) == 3 * MS
    first.save()
    second = make(name="m", store=lambda: store)
    found = second.profile("k")
    assert isinstance(found, StagedProfile)
    assert found.stage_ns(0, 1) == 2 * MS
    assert found.stage_ns(1, 1) == 5 * MS
    # Cut elsewhere, stages are others.
    assert make(name="m", stages=3, store=lambda: store).profile("k").latency_ns(1) < MS


def test_a_stage_that_was_never_reached_takes_nothing() -> None:
    measured = make().measured_stages("k", [{1: 2.0 * MS}, {}])
    assert measured.latency_ns(1) < 2 * MS + 10


def test_preferred_sizes_are_the_priors() -> None:
    prior = StagedProfile([LatencyProfile([MS] * 8)] * 2, preferred=(8, 2))
    learning = make(prior=prior)
    policy, rule = with_rule(learning)
    for _ in range(3):
        learning.ran(policy, ran_stage(0, 1, 5))
    assert rule.profile.preferred == (8, 2)
    learning.max_batch_size = 4
    learning.resize(policy)
    assert rule.profile.preferred == (4, 2)
    assert rule.profile.max_batch_size == 4


def test_a_profile_by_which_nothing_is_in_time_is_doubted() -> None:
    prior = StagedProfile([LatencyProfile([50.0 * MS] * 8)] * 2)
    learning = make(prior=prior)
    policy, rule = with_rule(learning)
    drop = Drop([Request(2, 0, 10 * MS)], DropReason.HOPELESS)
    for _ in range(2):
        learning.gave_up(policy, drop, 0)
    assert rule.profile.latency_ns(1) == 50 * MS
    assert rule.profile.stage_ns(0, 1) == 25 * MS


def test_one_stage_has_a_plain_policy() -> None:
    learning = make(stages=1, batching=Batching)
    policy, rule = with_rule(learning)
    assert type(policy) is Batching
    assert isinstance(rule.profile, StagedProfile)


def test_a_width_that_was_measured_counts_before_one_that_is_assumed() -> None:
    stage = LatencyProfile([1.0] * 8)
    measured = StagedProfile([stage] * 2, width=0.7)
    for prior, assumed, width in (
        (None, None, None),
        (None, 0.0, 0.0),
        (StagedProfile([stage] * 2), 0.0, 0.0),
        (measured, 0.0, 0.7),
    ):
        profile = make(prior=prior, width=assumed).profile()
        assert isinstance(profile, StagedProfile)
        assert profile.width == width


def test_sizes_that_there_was_no_time_to_measure_are_tried() -> None:
    learning = make(max_batch_size=16)
    profile = learning.measured_stages(None, [{1: 40 * MS, 2: 41 * MS}, {1: 4 * MS, 2: 5 * MS}])
    assert profile.max_batch_size == 16
    assert profile.latency_ns(4) == 46 * MS
    assert learning.measured_stages(None, [{2: 41 * MS}, {}]).latency_ns(2) < 42 * MS


def test_sizes_are_sure_that_have_run_some_times_or_were_known_before() -> None:
    learning = make()
    policy, rule = with_rule(learning)
    for _ in range(6):
        learning.ran(policy, ran_stage(0, 3, 2, 4))
    for _ in range(2):
        learning.ran(policy, ran_stage(0, 5, 2, 4))
    learning.refresh(policy, None)
    assert rule.profile.sure == (3, 3)
    assert rule.profile.max_batch_size == 8

    known = StagedProfile([LatencyProfile([4.0 * MS] * 4)] * 2)
    _, rule = with_rule(make(prior=known))
    assert rule.profile.sure == (4, 4)
