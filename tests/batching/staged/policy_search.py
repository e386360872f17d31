"""Every state that the scheduler of a small staged model can get into, whatever its rules decide.

As :mod:`state_search`, one level up: here :class:`StagedBatching` says what runs, and the rule of
each key decides anything that it may, each time it is asked. Events come in every order: requests
arrive, stages end, some requests leave, others are cancelled, queued or on their way, and at the
end FLUSH comes. What must hold: each stage gets those that are there, on a device that is free; no
device stays free while a part is ready; no stage is ready for ever; whoever arrives is answered. A
batch on a single device may run whole.

    python -m tests.batching.staged.policy_search --stages 3 --devices 2 --requests 4
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import FLUSH, Action, Cancelled, Event, Finished, Request, Run
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import RunStage, StagedBatching, StageEnded
from trims_shim.batching.staged.staged_rules import StagedRule

__all__ = ["PolicyLimits", "PolicySearch", "search_policy"]


@dataclass(frozen=True)
class PolicyLimits:
    """How far the search goes."""

    stages: int = 3
    pairs: int = 2
    devices: int = 2
    requests: int = 3
    largest: int = 2
    keys: int = 1
    cancels: int = 1
    exits: bool = True
    has_loop: bool = False
    beside: bool = True
    """Whatever is ready starts beside others; or rules say whether it does."""


@dataclass
class PolicySearch:
    """What was found."""

    states: int = 0
    steps: int = 0
    facts: set[str] = field(default_factory=set)


class _Undecided(Exception):
    """The rule was asked once more than there are answers."""


class _Answers:
    """What rules say, in the order in which they are asked; one for all of them."""

    def __init__(self) -> None:
        self.given: Sequence[int] = ()
        self.used = 0
        self.choices = 0

    def pick(self, choices: int) -> int:
        if choices == 1:
            return 0
        if self.used == len(self.given):
            self.choices = choices
            raise _Undecided
        self.used += 1
        return self.given[self.used - 1]


ANSWERS = _Answers()


class Anything(StagedRule):
    """Decides what the search wants to try."""

    runs_beside = True

    def choose(self, now_ns: int) -> int:
        return ANSWERS.pick(self.room() + 1)

    def runs_whole(self, now_ns: int, size: int) -> bool:
        assert 1 <= size <= self.max_batch_size
        return ANSWERS.pick(2) == 1

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        assert 1 <= room <= self.max_batch_size - batch.live
        return ANSWERS.pick(room + 1)

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        size = part.size
        first = ANSWERS.pick(size)
        return (first, size - first) if first else ()

    def next_split(self, now_ns: int, part: Part) -> int | None:
        """Here or there: asking later is only another order of the same answers."""
        later = self.staged.stages[part.stage + 1 :]
        border = ANSWERS.pick(len(later) + 1)
        return part.stage + border if border else None

    def may_run_beside(self, now_ns: int, part: Part) -> bool:
        return self.runs_beside or ANSWERS.pick(2) == 1


def make_rule(stages: int, largest: int) -> Anything:
    profile = StagedProfile([LatencyProfile([10] * largest)] * stages)
    return Anything(profile, max_batch_size=largest)


class _Maker:
    """Not a lambda: worlds are pickled."""

    def __init__(self, limits: PolicyLimits) -> None:
        self.limits = limits

    def __call__(self, key: Hashable) -> Anything:
        rule = make_rule(self.limits.stages, self.limits.largest)
        rule.runs_beside = self.limits.beside
        return rule


class PolicyWorld:
    """The policy, what runs, and who is where."""

    def __init__(self, limits: PolicyLimits) -> None:
        self.limits = limits
        self.policy = StagedBatching(
            _Maker(limits),
            stages=limits.stages,
            devices=limits.devices,
            pairs=limits.pairs,
            has_loop=limits.has_loop,
        )
        self.left = limits.requests
        self.cancels = limits.cancels
        self.running: list[Run] = []
        self.live: dict[Request, int] = {}
        """Who is not answered yet, and how many stages he has behind him; -1 in the queue. Whole
        batches have none behind them."""
        self.is_flushed = False

    # --- what can happen --------------------------------------------------------------------------

    def events(self) -> Iterator[Callable[[PolicyWorld], Event]]:
        """Each for a copy of this world."""
        if self.left:
            for key in range(self.limits.keys):
                yield partial(PolicyWorld.arrive, key=key)
        elif not self.is_flushed:
            yield PolicyWorld.flush
        for index, run in enumerate(self.running):
            if not isinstance(run, RunStage):
                yield partial(PolicyWorld.end_whole, index=index)
                continue
            is_last = run.stage == self.limits.stages - 1
            fewest = len(run.batch) if is_last and not self.limits.has_loop else 0
            most = len(run.batch) if is_last or self.limits.exits else 0
            for leaving in range(fewest, most + 1):
                yield partial(PolicyWorld.end, index=index, leaving=leaving, through=run.stage)
            for through in range(run.stage + 1, run.until + 1):
                is_end = through == self.limits.stages - 1
                most = len(run.batch) if is_end or self.limits.exits else 0
                for leaving in range(len(run.batch) if is_end else 0, most + 1):
                    yield partial(PolicyWorld.end, index=index, leaving=leaving, through=through)
        for index in range(len(self.live) if self.cancels else 0):
            yield partial(PolicyWorld.cancel, index=index)

    def arrive(self, key: int) -> Event:
        self.left -= 1
        request = Request(self.limits.requests - self.left, 0, key=key)
        self.live[request] = -1
        return request

    def flush(self) -> Event:
        self.is_flushed = True
        return FLUSH

    def end_whole(self, index: int) -> Event:
        run = self.running.pop(index)
        for request in run.batch:
            self.live.pop(request, None)
        return Finished(run.device, run.batch, 0)

    def end(self, index: int, leaving: int, through: int) -> Event:
        run = self.running.pop(index)
        assert isinstance(run, RunStage)
        is_loop = self.limits.has_loop and through == self.limits.stages - 1
        left = list(run.batch[:leaving])
        for request in left:
            self.live.pop(request, None)
        for request in run.batch:
            if request in self.live:
                self.live[request] = through + (not is_loop)
        return StageEnded(run.device, run.batch, 0, part=run.part, left=left, through=through)

    def cancel(self, index: int) -> Event:
        self.cancels -= 1
        request = list(self.live)[index]
        del self.live[request]
        return Cancelled(request)

    # --- what must hold ---------------------------------------------------------------------------

    def take(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert isinstance(action, Run)
            assert action.device not in {each.device for each in self.running}, "a busy device"
            assert not any(type(each) is Run for each in self.running), "beside a whole batch"
            stage = action.stage if isinstance(action, RunStage) else 0
            if isinstance(action, RunStage):
                assert stage not in _stages(self.running), "a stage runs twice"
            else:
                assert not self.running, "a whole batch beside another"
                assert not len(self.policy.pipeline.table), "a whole batch overtakes another"
            assert 1 <= len(action.batch) <= self.limits.largest, "an empty or oversized batch"
            assert len({each.key for each in action.batch}) == 1, "keys are mixed"
            for request in action.batch:
                assert max(0, self.live[request]) == stage, "a request is not there"
                assert stage or isinstance(action, RunStage) or self.live[request] == -1
                self.live[request] = stage
            self.running.append(action)

    def check(self) -> None:
        """After each event."""
        pipeline = self.policy.pipeline
        is_free = len(self.running) < (self.limits.devices if self.limits.beside else 1)
        assert not (is_free and pipeline.ready()), "a device is free while a part is ready"
        queued = {each for rule in self.policy.rules.values() for each in rule.queue}
        inside = {
            each for batch in pipeline.table for part in batch.parts for each in part.requests
        }
        inside |= {each for run in self.running if type(run) is Run for each in run.batch}
        assert not queued & inside, "a request is doubled"
        assert self.live.keys() <= queued | inside, "a request is lost"
        if not self.running:
            assert not inside, "deadlock"
            assert not (self.is_flushed and queued), "nothing comes, and some still wait"
        assert self.policy.next_deadline_ns() is None, "a timer that nobody asked for"

    def key(self) -> Hashable:
        """Equal for states from which the same can happen."""
        pairs: dict[int, int] = {}
        rows = []
        for batch in self.policy.pipeline.table:
            pair = pairs.setdefault(batch.pair, len(pairs))
            parts = tuple((p.stage, p.order, p.state.value, self._who(p)) for p in batch.parts)
            rows.append((batch.key, pair, batch.is_split, parts))
        first = min((batch.number for batch in self.policy.pipeline.table), default=0)
        queues = tuple(
            tuple((part.batch.number - first, part.order, part.stage) for part in queue)
            for queue in self.policy.pipeline._queues
        )
        waiting = tuple(
            (key, len(self.policy.rules[key].queue))
            for key in range(self.limits.keys)
            if key in self.policy.rules
        )
        running = tuple(
            sorted((each.stage, each.until) for each in self.running if isinstance(each, RunStage))
        )
        whole = tuple(
            request in self.live
            for run in self.running
            if type(run) is Run
            for request in run.batch
        )
        has_exits = not self.policy._may_run_whole
        return (
            tuple(rows),
            queues,
            waiting,
            running,
            whole,
            has_exits,
            self.left,
            self.cancels,
            self.is_flushed,
        )

    def _who(self, part: Part) -> tuple[bool, ...]:
        return tuple(request in self.live for request in part.requests)


def search_policy(limits: PolicyLimits) -> PolicySearch:
    """Everything within the limits. Raises AssertionError, or RuntimeError of a table."""
    found = PolicySearch()
    start = PolicyWorld(limits)
    seen = {start.key()}
    frontier = [pickle.dumps(start)]
    while frontier:
        saved = frontier.pop()
        for event in pickle.loads(saved).events():
            for world in _outcomes(saved, event):
                found.steps += 1
                found.facts.update(_facts(world))
                key = world.key()
                if key not in seen:
                    seen.add(key)
                    frontier.append(pickle.dumps(world))
    found.states = len(seen)
    return found


def _outcomes(saved: bytes, event: Callable[[PolicyWorld], Event]) -> Iterator[PolicyWorld]:
    """Of one event, with each sequence of decisions."""
    untried: list[tuple[int, ...]] = [()]
    while untried:
        ANSWERS.given, ANSWERS.used = untried.pop(), 0
        world: PolicyWorld = pickle.loads(saved)
        try:
            actions = world.policy.on_event(0, event(world))
        except _Undecided:
            untried.extend((*ANSWERS.given, each) for each in range(ANSWERS.choices))
            continue
        world.take(actions)
        world.check()
        yield world


def _stages(running: Sequence[Run]) -> set[int]:
    return {each.stage for each in running if isinstance(each, RunStage)}


def _facts(world: PolicyWorld) -> Iterator[str]:
    stages = _stages(world.running)
    if len(stages) < len(world.running):
        yield "whole"
    if any(stage + 1 in stages for stage in stages):
        yield "neighbours at once"
    for batch in world.policy.pipeline.table:
        if batch.is_split:
            yield "split"
        elif len(batch.parts) > 1:
            yield "stretched"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many states there are; fails at the first that must not be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("stages", "pairs", "devices", "requests", "largest", "keys", "cancels"):
        parser.add_argument(f"--{name}", type=int, default=getattr(PolicyLimits, name))
    parser.add_argument("--loop", action="store_true", dest="has_loop")
    parser.add_argument("--no-exits", action="store_false", dest="exits")
    parser.add_argument("--not-beside", action="store_false", dest="beside")
    limits = PolicyLimits(**vars(parser.parse_args(arguments)))
    started_s = time.perf_counter()
    found = search_policy(limits)
    print(limits)
    print(f"{found.states} states, {found.steps} steps, {time.perf_counter() - started_s:.1f} s")
    print("seen:", ", ".join(sorted(found.facts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
