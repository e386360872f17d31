"""What holds for every policy of staged models, whatever arrives, leaves, and is cancelled."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.checking import ms
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Cancelled,
    Drop,
    Event,
    Finished,
    Request,
)
from trims_shim.batching.protocol import Run as Plain
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.policies.registry import STAGED_POLICIES, staged_rule_maker
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import RunStage, StagedBatching, StageEnded

PLAIN = ("auto", "cork", "early_drop", "immediate", "window")
every_policy = pytest.mark.parametrize("name", [*STAGED_POLICIES, *PLAIN])
# Each of these tests runs for each policy.
fewer_examples = settings(max_examples=15)


@dataclass(frozen=True)
class Instance:
    """A model, what serves it, and who comes."""

    profile: StagedProfile
    requests: tuple[Request, ...]
    devices: int
    pairs: int
    has_loop: bool
    max_weight: int | None
    max_active: int | None
    cancelled: tuple[tuple[int, Request], ...]
    """With the times."""
    seed: int
    """Of how long stages take, and of who leaves early."""

    @property
    def stages(self) -> int:
        return len(self.profile.stages)


@st.composite
def instances(
    draw: st.DrawFn, *, devices: int = 3, most: int = 20, has_deadlines: bool = True
) -> Instance:
    largest = draw(st.integers(1, 6))
    stages = [
        LatencyProfile.linear(draw(st.integers(1, 4)), draw(st.integers(0, 10)), max_batch_size=6)
        for _ in range(draw(st.integers(1, 4)))
    ]
    preferred = [draw(st.integers(1, largest)) for _ in stages]
    profile = StagedProfile([each.limited(largest) for each in stages], preferred=preferred)
    time_ms, requests = 0, []
    for number in range(draw(st.integers(1, most))):
        time_ms += draw(st.sampled_from((0, 0, 1, 2, 5, 11, 23)))
        slack_ms = draw(st.integers(0, 200)) if has_deadlines else None
        deadline_ns = NEVER_NS if slack_ms is None else ms(time_ms + slack_ms)
        key, weight = draw(st.sampled_from("ab")), draw(st.integers(1, 4))
        requests.append(Request(number, ms(time_ms), deadline_ns, key=key, weight=weight))
    gone = draw(st.lists(st.sampled_from(requests), max_size=4))
    return Instance(
        profile,
        tuple(requests),
        draw(st.integers(1, devices)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.sampled_from((None, 4, 8))),
        draw(st.sampled_from((None, 1, 5))),
        tuple((each.arrival_ns + ms(draw(st.integers(0, 90))), each) for each in gone),
        draw(st.integers(0, 1 << 16)),
    )


@dataclass
class Run:
    """Drives a policy through an instance, and holds it to its contract all the way."""

    instance: Instance
    policy: StagedBatching
    shrink_ns: int = NEVER_NS
    """From when on batches are to be of one."""
    now_ns: int = 0
    running: dict[int, Plain] = field(default_factory=dict)
    """By device."""
    place: dict[Request, int] = field(default_factory=dict)
    """Of those who have come and are not settled: their next stage; -1 in the queue."""
    began_ns: dict[Request, int] = field(default_factory=dict)
    ended_ns: dict[Request, int] = field(default_factory=dict)
    dropped: set[Request] = field(default_factory=set)
    cancelled: set[Request] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._randoms = random.Random(self.instance.seed)
        script = [(each.arrival_ns, 0, each.number, each) for each in self.instance.requests]
        extra = [
            (time_ns, 1, index, Cancelled(each))
            for index, (time_ns, each) in enumerate(self.instance.cancelled)
        ]
        self._events: list[tuple[int, int, int, Event]] = [*script, *extra]
        heapq.heapify(self._events)
        self._count = 0

    def to_the_end(self) -> Run:
        is_flushed = False
        for _ in range(20_000):
            wake_ns = self.policy.next_deadline_ns()
            if wake_ns is not None:
                assert wake_ns > self.now_ns, "a timer for now, or for what is over"
                assert len(self.running) < self.instance.devices, "a timer that leads to nothing"
            if wake_ns is not None and (not self._events or wake_ns < self._events[0][0]):
                self.now_ns = wake_ns
                self._tell(TIMER)
            elif self._events:
                self.now_ns, _, _, event = heapq.heappop(self._events)
                self._shrink()
                self._note(event)
                self._tell(event)
            elif not is_flushed:
                is_flushed = True
                self._tell(FLUSH)
            else:
                assert not self.place, "somebody is not settled"
                assert not len(self.policy.pipeline.table)
                return self
        raise AssertionError("it does not end")

    def _shrink(self) -> None:
        """As when the batcher is told to, while larger ones are on their way."""
        for rule in self.policy.rules.values() if self.now_ns >= self.shrink_ns else ():
            rule.profile, rule.max_batch_size = self.instance.profile.limited(1), 1

    def _note(self, event: Event) -> None:
        if isinstance(event, Request):
            self.place[event] = -1
        elif isinstance(event, Cancelled) and event.request in self.place:
            self.cancelled.add(event.request)
            del self.place[event.request]
        elif isinstance(event, Finished):
            run = self.running.pop(event.device)
            for request in event.left if isinstance(event, StageEnded) else event.batch:
                if self.place.pop(request, None) is not None:
                    self.ended_ns[request] = self.now_ns
            if not isinstance(run, RunStage):
                return
            after = min(run.stage + 1, self.instance.stages - 1)
            self.place |= {each: after for each in run.batch if each in self.place}

    def _tell(self, event: Event) -> None:
        for action in self.policy.on_event(self.now_ns, event):
            if isinstance(action, Plain):
                self._start(action)
            else:
                self._drop(action)
        is_free = len(self.running) < self.instance.devices
        assert not (is_free and self.policy.pipeline.ready()), "a device idles"
        assert self.instance.max_active is None or (
            self.policy.pipeline.active <= self.instance.max_active
        )

    def _drop(self, action: Action) -> None:
        assert isinstance(action, Drop)
        assert action.requests
        for request in action.requests:
            assert self.place.pop(request) == -1
            self.dropped.add(request)

    def _start(self, run: Plain) -> None:
        assert 0 <= run.device < self.instance.devices
        assert run.device not in self.running
        stage = run.stage if isinstance(run, RunStage) else 0
        if isinstance(run, RunStage):
            others = self.running.values()
            assert stage not in {each.stage for each in others if isinstance(each, RunStage)}
        else:
            assert not self.running, "a whole batch is not alone"
        assert 1 <= len(run.batch) <= self.instance.profile.max_batch_size
        assert len(set(run.batch)) == len(run.batch)
        assert len({request.key for request in run.batch}) == 1
        most = self.instance.max_weight
        assert most is None or len(run.batch) == 1 or sum(r.weight for r in run.batch) <= most
        for request in run.batch:
            assert max(0, self.place[request]) == stage
            self.place[request] = stage
            self.began_ns.setdefault(request, self.now_ns)
        self.running[run.device] = run
        self._schedule_end(run)

    def _schedule_end(self, run: Plain) -> None:
        if isinstance(run, RunStage):
            took_ns = self.instance.profile.stage_ns(run.stage, len(run.batch))
            ended = self._stage_ended(run)
        else:
            took_ns = self.instance.profile.latency_ns(len(run.batch))
            ended = Finished(run.device, run.batch, self.now_ns)
        took_ns = int(took_ns * self._randoms.uniform(0.5, 2))
        self._count += 1
        heapq.heappush(self._events, (self.now_ns + took_ns, 2, self._count, ended))

    def _stage_ended(self, run: RunStage) -> StageEnded:
        is_last = run.stage == self.instance.stages - 1
        chance = 1.0 if is_last and not self.instance.has_loop else 0.4 if is_last else 0.1
        left = [each for each in run.batch if self._randoms.random() < chance]
        return StageEnded(run.device, run.batch, self.now_ns, part=run.part, left=left)


def served(name: str, instance: Instance, *, shrink_ns: int = NEVER_NS) -> Run:
    maker = staged_rule_maker(name)

    def make(key: Hashable) -> Rule:
        return maker(instance.profile, max_batch_size=instance.profile.max_batch_size)

    make_rule: Callable[[Hashable], Rule] = make
    policy = StagedBatching(
        make_rule,
        stages=instance.stages,
        devices=instance.devices,
        pairs=instance.pairs,
        has_loop=instance.has_loop,
        max_active=instance.max_active,
        max_weight=instance.max_weight,
    )
    return Run(instance, policy, shrink_ns).to_the_end()


def ends(run: Run) -> Sequence[int]:
    return sorted(each.number for each in [*run.ended_ns, *run.dropped, *run.cancelled])


@every_policy
@fewer_examples
@given(instance=instances())
def test_everyone_ends_once(name: str, instance: Instance) -> None:
    run = served(name, instance)
    assert ends(run) == [request.number for request in instance.requests]
    assert not run.policy.pipeline.active


@every_policy
@fewer_examples
@given(instance=instances(), shrink_ms=st.integers(0, 100))
def test_batches_may_get_smaller_while_larger_ones_are_on_their_way(
    name: str, instance: Instance, shrink_ms: int
) -> None:
    run = served(name, instance, shrink_ns=ms(shrink_ms))
    assert ends(run) == [request.number for request in instance.requests]


@every_policy
@fewer_examples
@given(instance=instances(has_deadlines=False))
def test_nobody_is_dropped_who_has_all_the_time(name: str, instance: Instance) -> None:
    assert not served(name, instance).dropped


@every_policy
@fewer_examples
@given(instance=instances(devices=1, most=40, has_deadlines=False))
def test_nobody_who_is_on_his_way_waits_for_ever(name: str, instance: Instance) -> None:
    """On one device, with no loop: not longer than if all who can join came one at a time."""
    if instance.has_loop:
        return
    run = served(name, instance)
    largest = instance.profile.max_batch_size
    bound_ns = 2 * (2 * largest) * instance.profile.latency_ns(largest)
    for request, end_ns in run.ended_ns.items():
        assert end_ns - run.began_ns[request] <= bound_ns


@every_policy
@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("has_loop", [False, True], ids=["stages", "loop"])
def test_few_overtake_one_of_another_key(name: str, pairs: int, has_loop: bool) -> None:
    """There are always more than can be served, and a batch on its way that they could join."""
    profile = StagedProfile([LatencyProfile.linear(1, 5, max_batch_size=4)] * 2)
    requests = tuple(
        Request(number, ms(3 * number), key="b" if number == 60 else "a") for number in range(300)
    )
    rare = requests[60]
    run = served(name, Instance(profile, requests, 1, pairs, has_loop, None, None, (), 7))
    overtaking = [
        each
        for each in requests
        if each.number > rare.number and run.began_ns[each] < run.began_ns[rare]
    ]
    assert len(overtaking) <= 2 * profile.max_batch_size
