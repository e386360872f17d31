"""What is learned from batches, and what is not."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from trims_shim.batching.buckets import OpenBucket
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.learning import LateKey, Learning
from trims_shim.batching.drivers.replies import BatchFuture, Entry
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.policies.early_drop import EarlyDrop
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_store import ProfileStore
from trims_shim.batching.protocol import Drop, DropReason, Finished, Request, Run
from trims_shim.batching.single import Batching

MS = 1_000_000


def make(**options: Any) -> Learning:
    defaults: dict[str, Any] = {
        "name": None, "max_batch_size": 8, "devices": 1, "store": lambda: None,
    }  # fmt: skip
    return Learning(options.pop("maker", EarlyDrop), **{**defaults, **options})


def ran_job(size: int, latency_ms: float, *, key: Any = None, fails: bool = False) -> Job:
    requests = [
        Request(number, 0, key=key, payload=Entry((number,), BatchFuture(), 0, None))
        for number in range(size)
    ]
    job = Job(0, requests, 0)
    job.begin(0)
    if fails:
        job.end_with(round(latency_ms * MS), ValueError())
    else:
        job.end(round(latency_ms * MS), list(range(size)))
    job.deliver()
    return job


def with_rule(learning: Learning, key: Any = None) -> tuple[Batching, Any]:
    policy = learning.make_policy()
    assert isinstance(policy, Batching)
    policy.on_event(0, Request(1, 0, key=key))
    return policy, policy.rules[key]


def test_the_first_batch_of_each_size_says_nothing() -> None:
    learning = make()
    policy, rule = with_rule(learning)
    assert not learning.ran(policy, ran_job(1, 500))
    assert learning.ran(policy, ran_job(1, 5))
    assert not learning.ran(policy, ran_job(2, 500))
    assert learning.ran(policy, ran_job(2, 6))
    assert 4 * MS < rule.profile.latency_ns(1) < 7 * MS
    assert rule.profile.latency_ns(2) < 8 * MS


def test_of_the_first_batch_of_a_size_only_what_is_slow_says_nothing() -> None:
    learning = make()
    policy, rule = with_rule(learning)
    learning.ran(policy, ran_job(1, 500))
    learning.ran(policy, ran_job(1, 6))
    assert learning.ran(policy, ran_job(3, 5))
    assert rule.profile.latency_ns(3) < 6 * MS


def test_a_size_that_is_slow_twice_is_slow() -> None:
    """It had nothing to compile then, and a policy is told of a batch if its profile is."""
    learning = make()
    policy, rule = with_rule(learning)
    learning.ran(policy, ran_job(1, 500))
    learning.ran(policy, ran_job(1, 6))
    assert not learning.ran(policy, ran_job(2, 50))
    assert rule.profile.latency_ns(2) <= 6 * MS
    assert learning.ran(policy, ran_job(2, 50))
    assert rule.profile.latency_ns(2) == 50 * MS


def test_failed_and_empty_batches_say_nothing() -> None:
    learning = make()
    policy, _ = with_rule(learning)
    learning.ran(policy, ran_job(1, 5))
    assert not learning.ran(policy, ran_job(1, 5, fails=True))
    empty = ran_job(1, 5)
    empty.live = []
    assert not learning.ran(policy, empty)


def test_keys_learn_apart_and_late_requests_teach_their_key() -> None:
    learning = make()
    policy, rule = with_rule(learning, "small")
    for _ in range(4):
        learning.ran(policy, ran_job(1, 2, key="small"))
        learning.ran(policy, ran_job(1, 50, key=LateKey("large")))
    assert learning.profile("small").latency_ns(1) < 3 * MS
    assert learning.profile("large").latency_ns(1) > 40 * MS
    assert rule.profile.latency_ns(1) < 3 * MS
    assert set(learning.keys()) == {"small", "large"}


def test_a_batch_of_several_lengths_teaches_the_longest() -> None:
    learning = make()
    policy, short = with_rule(learning, OpenBucket(8))
    job = ran_job(2, 50, key=OpenBucket(32))
    job.requests[1].key = OpenBucket(8)
    assert [learning.ran(policy, job) for _ in range(5)] == [False, *[True] * 4]
    assert learning.profile(OpenBucket(32)).latency_ns(2) > 40 * MS
    assert short.profile == learning.profile(OpenBucket(8))
    assert learning._learned[OpenBucket(8)].count == 0
    job.live = job.live[1:]  # type: ignore[index]  # the long one was cancelled before it began
    assert not learning.ran(policy, job)


def test_lengths_tell_each_other_what_to_expect() -> None:
    learning = make()
    policy, short = with_rule(learning, OpenBucket(8))
    policy.on_event(0, Request(2, 0, key=OpenBucket(64)))
    long = policy.rules[OpenBucket(64)]
    # 1 ms for every 8 values.
    for size in (1, 1, 2, 4, 8):
        learning.ran(policy, ran_job(size, 8 * size, key=OpenBucket(64)))
    assert [short.profile.latency_ns(size) for size in (8, 4)] == [8 * MS, 6 * MS]
    learning.ran(policy, ran_job(4, 4, key=OpenBucket(8)))
    assert short.profile.latency_ns(4) == 4 * MS
    # What 12 ms are to 8 short ones, it is to as many values of long ones.
    for _ in range(20):
        learning.ran(policy, ran_job(8, 12, key=OpenBucket(8)))
        learning.ran(policy, ran_job(8, 64, key=OpenBucket(64)))
    assert short.profile.latency_ns(8) == pytest.approx(12 * MS, rel=0.1)
    assert long.profile.latency_ns(8) == pytest.approx(64 * MS, rel=0.1)
    # Other shapes have nothing to do with it.
    assert learning.profile((OpenBucket(8), "other")).latency_ns(8) < MS


def test_beyond_what_a_prior_knows_other_lengths_tell() -> None:
    # Of so few sizes, as what an earlier process has kept of a rare length.
    kept = LatencyProfile([10 * MS, 20 * MS])
    learning = make(prior=lambda key: kept)
    policy, short = with_rule(learning, OpenBucket(8))
    for size in (1, 1, 2, 4, 8):
        learning.ran(policy, ran_job(size, 8 * size, key=OpenBucket(64)))
    assert [short.profile.latency_ns(size) for size in (1, 2)] == [10 * MS, 20 * MS]
    # At the speed of the last one that is known: 16 values take 5 ms by the curve, and 64 take 8.
    assert short.profile.latency_ns(8) == pytest.approx(20 * MS * 8 / 5)


def test_what_was_measured_of_one_length_is_known_of_others() -> None:
    learning = make()
    learning.measured(OpenBucket(64), {1: 8 * MS, 8: 64 * MS})
    assert learning.profile(OpenBucket(8)).latency_ns(8) == 8 * MS
    assert learning.profile(OpenBucket(32)).latency_ns(8) == pytest.approx(32 * MS)
    policy, _ = with_rule(learning, OpenBucket(8))
    assert learning.ran(policy, ran_job(8, 8, key=OpenBucket(8)))  # of all lengths not the first


def test_of_many_lengths_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trims_shim.batching.drivers.learning._MOST_KEYS", 3)
    learning = make()
    policy, _ = with_rule(learning, OpenBucket(8))
    for number in range(1, 40):
        key = ("shape", number % 5), OpenBucket(8 * number)
        for _ in range(2):
            learning.ran(policy, ran_job(2, 5, key=key))
    assert len(learning.keys()) == 3
    assert len(learning._families) == 3


def test_of_many_keys_that_are_measured_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trims_shim.batching.drivers.learning._MOST_KEYS", 3)
    learning = make()
    for number in (0, 1, 2, 2, 3):
        learning.measured(number, {1: 8 * MS})
    assert learning.keys() == [1, 2, 3]
    assert learning._measured == {1, 2, 3}


def test_a_key_that_comes_again_is_not_forgotten_for_those_that_come_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trims_shim.batching.drivers.learning._MOST_KEYS", 3)
    learning = make()
    policy, _ = with_rule(learning)
    for number in range(12):
        for key in ("often", number):
            learning.ran(policy, ran_job(1, 5, key=key))
    assert learning.profile("often").latency_ns(1) == 5 * MS
    assert learning.keys() == [10, "often", 11]


@pytest.mark.parametrize(
    ("maker", "mixes"),
    [(Auto, True), (functools.partial(Auto, margin_ms=1), True), (EarlyDrop, False)],
)
def test_which_policies_let_lengths_share_a_batch(maker: Any, mixes: bool) -> None:
    assert make(maker=maker).mixes_lengths == mixes


def test_late_requests_have_a_rule_that_serves_them() -> None:
    learning = make()
    policy = learning.make_policy()
    (run,) = policy.on_event(10, Request(1, 0, deadline_ns=1, key=LateKey("key")))
    assert len(run.batch) == 1  # type: ignore[union-attr]
    assert isinstance(policy.rules[LateKey("key")], Immediate)  # type: ignore[attr-defined]
    others: set[Hashable] = {"key"}
    assert LateKey("key") not in others


@pytest.mark.parametrize(("maker", "together"), [(Auto, 3), (EarlyDrop, 1)])
def test_late_requests_of_different_lengths_share_a_batch(maker: Any, together: int) -> None:
    """Where that takes hardly longer, by policies that mix lengths."""
    learning = make(maker=maker)
    policy = learning.make_policy()
    short, long = LateKey(OpenBucket(8)), LateKey(OpenBucket(16))
    (busy,) = policy.on_event(0, Request(1, 0, key="other"))
    assert isinstance(busy, Run)
    for number, key in enumerate((short, long, long), 2):
        assert not policy.on_event(0, Request(number, 0, key=key))
    for size in (*[1] * 5, *[3] * 5):
        learning.ran(policy, ran_job(size, 10 + size, key=OpenBucket(16)))
    assert policy.rules[long].profile.latency_ns(3) < 20 * MS  # type: ignore[attr-defined]
    (run,) = policy.on_event(5, Finished(busy.device, busy.batch, 0))
    assert isinstance(run, Run)
    assert len(run.batch) == together


def test_a_padded_batch_is_learned_at_the_size_that_ran() -> None:
    learning = make(batch_sizes=(4, 8))
    policy, rule = with_rule(learning)
    for _ in range(4):
        learning.ran(policy, ran_job(1, 20))
    assert rule.profile.latency_ns(1) == rule.profile.latency_ns(4) > 15 * MS
    assert learning.sizes_to_measure() == [4, 8]


@pytest.mark.parametrize(
    ("deadline_ms", "now_ms", "reason", "heals"),
    [
        (100, 1, DropReason.HOPELESS, True),
        (100, 1, DropReason.SHED, False),
        (100, 60, DropReason.HOPELESS, False),  # it waited
        (-1, 1, DropReason.HOPELESS, False),  # nobody could have
    ],
)
def test_a_profile_by_which_nothing_is_possible_is_doubted(
    deadline_ms: int, now_ms: int, reason: DropReason, heals: bool
) -> None:
    learning = make(prior=LatencyProfile.linear(1, 10_000, max_batch_size=8))
    policy, rule = with_rule(learning)
    before = rule.profile.latency_ns(1)
    drop = Drop([Request(2, 0, deadline_ns=deadline_ms * MS)], reason)
    for _ in range(10):
        learning.gave_up(policy, drop, now_ms * MS)
    assert (rule.profile.latency_ns(1) < before) == heals


def test_saved_under_a_lasting_name_and_found_again(tmp_path: Path) -> None:
    store = ProfileStore(str(tmp_path))
    first = make(name="name", store=lambda: store)
    policy, _ = with_rule(first, "key")
    for _ in range(20):
        first.ran(policy, ran_job(1, 5, key="key"))
    first.save()
    again = make(name="name", store=lambda: store)
    assert 4 * MS < again.profile("key").latency_ns(1) < 7 * MS
    assert again.profile("other").latency_ns(1) < MS
    for nameless in (make(store=lambda: store), make(name="name")):
        assert nameless.profile("key").latency_ns(1) < MS


def test_sizes_that_a_file_may_not_have_are_not_saved(tmp_path: Path) -> None:
    """A largest size that is meant as none: what was learned of the others is found again."""
    most, store = 1 << 17, ProfileStore(str(tmp_path))
    first = make(name="name", store=lambda: store, max_batch_size=most)
    first.measured("key", {1: 5 * MS, 8: 6 * MS, most: 90 * MS})
    first.save()
    again = make(name="name", store=lambda: store, max_batch_size=most)
    assert again.profile("key").latency_ns(1) == 5 * MS
    assert again.profile("key").latency_ns(8) == 6 * MS


def test_nothing_is_saved_of_a_few_batches_or_of_a_given_profile(tmp_path: Path) -> None:
    store = ProfileStore(str(tmp_path / "profiles"))
    prior = LatencyProfile.linear(1, 1, max_batch_size=8)
    for learning, batches in (
        (make(name="few", store=lambda: store), 2),
        (make(name="given", store=lambda: store, prior=prior), 50),
    ):
        policy, _ = with_rule(learning)
        for _ in range(batches):
            learning.ran(policy, ran_job(1, 5))
        learning.save()
    assert not (tmp_path / "profiles").exists()


def test_keys_without_end_do_not_add_up(tmp_path: Path) -> None:
    lookups = []

    class Counting(ProfileStore):
        def load(self, name: str, key: Any = None) -> None:
            lookups.append(key)

    learning = make(name="name", store=lambda: Counting(str(tmp_path)))
    policy = learning.make_policy()
    for key in range(3000):
        learning.ran(policy, ran_job(1, 5, key=key))
    assert len(learning.keys()) <= 1024
    assert len(lookups) < 100


def test_resizing() -> None:
    learning = make()
    policy, rule = with_rule(learning)
    for max_batch_size in (30, 2):
        learning.check_size(max_batch_size)
        learning.max_batch_size = max_batch_size
        learning.ran(policy, ran_job(1, 5))
        assert rule.profile.max_batch_size >= rule.max_batch_size
        learning.resize(policy)
        assert rule.max_batch_size == max_batch_size
    with pytest.raises(ValueError, match="max_batch_size"):
        learning.check_size(0)
    with pytest.raises(ValueError, match="batch_sizes"):
        make(batch_sizes=(8,)).check_size(9)


def test_resizing_while_rules_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread does it, between any two looks."""
    learning = make()
    policy, rule = with_rule(learning)
    sizes = itertools.cycle((2, 64))
    monkeypatch.setattr(
        Learning, "max_batch_size", property(lambda self: next(sizes)), raising=False
    )
    policy.on_event(0, Request(2, 0, key="new"))
    policy.on_event(0, Request(3, 0, key=LateKey("late")))
    learning.resize(policy)
    for each in policy.rules.values():
        each.profile.check_knows(each.max_batch_size)
    assert rule.max_batch_size in (2, 64)


def test_sizes_that_there_was_no_time_to_measure_are_tried() -> None:
    """They are taken to be as quick as the largest that was, and not to cost the same by item."""
    learning = make(max_batch_size=16)
    profile = learning.measured(None, {1: 45 * MS, 2: 46 * MS})
    assert profile.max_batch_size == 16
    assert profile.latency_ns(4) == 46 * MS
    padded = make(max_batch_size=16, batch_sizes=[1, 4, 16]).measured(
        None, {1: 45 * MS, 4: 47 * MS}
    )
    assert [padded.latency_ns(size) / MS for size in (1, 2, 8)] == [45, 47, 94]


def test_several_event_loops_learn_at_once() -> None:
    """Of the same lengths, and of more than are kept. Any error would fail all that wait."""
    learning = make(maker=Auto)
    errors: list[Exception] = []

    def learn(seed: int) -> None:
        policy, chance = learning.make_policy(), random.Random(seed)
        lengths = range(1, 2001) if seed % 2 else range(8, 40, 8)
        try:
            for _ in range(1500):
                key = OpenBucket(chance.choice(lengths))
                learning.ran(policy, ran_job(chance.randint(1, 8), chance.uniform(3, 9), key=key))
                learning.profile(key)
        except Exception as error:
            errors.append(error)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=learn, args=(seed,)) for seed in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before_s)
    assert not errors
