"""Every state that a small pipeline can get into, and what must hold in each of them.

An explicit-state search: from the empty pipeline, whatever may happen next does, in every order,
until no new state is found. Requests enter whenever they can (as a batch, or joining one), what is
ready starts in any order while a device is free, stages end in any order, any number of requests
leave at their ends, batches are split in any way or not at all, and requests are withdrawn. So the
decisions of all policies, and the order of all events, are among what is tried.

States that differ only in the names of requests, batches and buffer pairs are the same one. What
must hold is said here a second time, without the pipeline's tables: who is where, who reads and who
writes what, who is behind whom.

    python -m tests.batching.staged.state_search --stages 4 --pairs 2 --batches 3 --requests 5
    python -m tests.batching.staged.state_search --grid  # 1-4 stages, 1-3 pairs, devices, batches
"""

from __future__ import annotations

import argparse
import enum
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from unittest import mock

from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism import buffers
from trims_shim.batching.staged.mechanism.batches import Batch, Part, PartState
from trims_shim.batching.staged.mechanism.buffers import BUFFER_TRANSITIONS, BufferState
from trims_shim.batching.staged.mechanism.pipeline import Pipeline

__all__ = ["Limits", "Search", "Violation", "World", "search"]


class Executor(enum.Enum):
    """What the executor of a stage does (DVABatch, section 5.3 and figure 9).

    A buffer pair is legal if its input may be read and its output written.
    """

    INACTIVE = "nothing is queued, and no pair is legal"
    ACTIVE = "nothing is queued"
    CHECKING = "the first in the queue waits for its pair or for a device"
    WORKING = "a part runs"


EXECUTOR_TRANSITIONS = {
    (Executor.INACTIVE, Executor.ACTIVE),
    (Executor.ACTIVE, Executor.INACTIVE),
    (Executor.ACTIVE, Executor.CHECKING),
    (Executor.CHECKING, Executor.ACTIVE),
    (Executor.CHECKING, Executor.WORKING),
    (Executor.WORKING, Executor.ACTIVE),
}


class Violation(AssertionError):
    """Something happened that must not."""


@dataclass(frozen=True)
class Limits:
    """How far the search goes."""

    stages: int = 3
    pairs: int = 2
    devices: int = 2
    batches: int = 2
    """How many are made."""
    requests: int = 3
    """How many enter."""
    largest: int = 2
    """Batch size."""
    keys: int = 1
    cancels: int = 1
    exits: bool = True
    """Whether any may leave at the end of any stage."""
    has_loop: bool = False


@dataclass
class Search:
    """What was found."""

    limits: Limits
    states: int = 0
    steps: int = 0
    """From a state to another, or the same."""
    facts: set[str] = field(default_factory=set)
    """What was seen to happen."""
    transitions: set[Hashable] = field(default_factory=set)
    """Of the table of buffers, those that were used."""
    changes: set[tuple[Executor, Executor]] = field(default_factory=set)
    """Of the executors' states, from one state of the pipeline to the next."""

    @property
    def missed(self) -> set[Hashable]:
        """Transitions of the table that were not."""
        return {*BUFFER_TRANSITIONS} - self.transitions


def check(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


class World:
    """A pipeline, what may still enter, and what is known of it from outside."""

    def __init__(self, limits: Limits) -> None:
        self.pipeline = Pipeline(limits.stages, pairs=limits.pairs, has_loop=limits.has_loop)
        self.limits = limits
        self.left = limits.requests
        self.made = 0
        self.cancelled = 0
        self.progress: dict[int, int] = {}
        """How many stages each request on its way has finished."""
        self.withdrawn: set[int] = set()
        """Those of them that run, and that nobody waits for."""

    @property
    def parts(self) -> list[Part]:
        return [part for batch in self.pipeline.table for part in batch.parts]

    @property
    def running(self) -> list[Part]:
        return [part for part in self.parts if part.state is PartState.RUNNING]

    # --- what can happen --------------------------------------------------------------------------

    def moves(self) -> Iterator[Callable[[World], str]]:
        """Each for a copy of this world; says what it was."""
        yield from self._entries()
        if len(self.running) < self.limits.devices:
            for index in range(len(self.pipeline.ready())):
                yield partial(World.start, index=index)
        for index, part in enumerate(self.parts):
            if part.state is PartState.RUNNING:
                yield from self._ends(index, part)
            if self.cancelled < self.limits.cancels and len(part.gone) < part.size:
                yield partial(World.withdraw, index=index)

    def _entries(self) -> Iterator[Callable[[World], str]]:
        if self.pipeline._untold is not None:
            return  # the only device is busy, and nobody asks
        if self.made < self.limits.batches and self.pipeline.may_new:
            for size in range(1, min(self.left, self.limits.largest) + 1):
                for key in range(self.limits.keys):
                    yield partial(World.new, size=size, key=key)
                    if self.limits.devices == 1 and not self.parts:
                        yield partial(World.new_alone, size=size, key=key)
        for index, batch in enumerate(self.pipeline.table):
            if self.pipeline.may_stretch(batch):
                for size in range(1, min(self.left, self.limits.largest - batch.live) + 1):
                    yield partial(World.stretch, index=index, size=size)

    def _ends(self, index: int, part: Part) -> Iterator[Callable[[World], str]]:
        is_last = part.stage == self.pipeline.last
        fewest = part.size if is_last and not self.limits.has_loop else 0
        most = part.size if is_last or self.limits.exits else 0
        for leaving in range(fewest, most + 1):
            for cut in range(self.limits.largest):
                yield partial(World.end, index=index, leaving=leaving, cut=cut)
        # What is alone on one device may run on through several stages before it is asked about.
        if self.limits.devices > 1 or self.parts != [part]:
            return
        for through in range(part.stage + 1, self.pipeline.last + 1 - self.limits.has_loop):
            is_end = through == self.pipeline.last
            most = part.size if is_end or self.limits.exits else 0
            for leaving in range(part.size if is_end else 0, most + 1):
                for cut in range(self.limits.largest):
                    yield partial(World.end, index=index, leaving=leaving, cut=cut, through=through)

    def new(self, size: int, key: int) -> str:
        requests = self._requests(size, key)
        self.made += 1
        batch = self.pipeline.new(0, requests)
        check(not self._others_at(batch, 0), "a new batch got buffers that are used")
        is_ready = any(part.batch is batch for part in self.pipeline.ready())
        takes_turns = self._is_loop(0)
        check(is_ready or takes_turns, "a new batch was made before it could start")
        return "new"

    def new_alone(self, size: int, key: int) -> str:
        self.made += 1
        self.pipeline.new_alone(0, self._requests(size, key))
        return "new, alone"

    def stretch(self, index: int, size: int) -> str:
        batch = list(self.pipeline.table)[index]
        newer = [each for each in self.pipeline.table if each.number > batch.number]
        check(not batch.is_split, "a split batch is stretched")
        check(self.limits.has_loop or not newer, "a batch is stretched that is not the newest")
        self.pipeline.stretch(batch, self._requests(size, batch.key))
        return "stretch"

    def _requests(self, size: int, key: Hashable) -> list[Request]:
        first = self.limits.requests - self.left
        self.left -= size
        requests = [Request(number, 0, key=key) for number in range(first, first + size)]
        self.progress |= dict.fromkeys(range(first, first + size), 0)
        return requests

    def start(self, index: int) -> str:
        part = self.pipeline.ready()[index]
        batch, stage, pair = part.batch, part.stage, part.batch.pair
        at_once = {(each.stage, each.batch.pair) for each in self.running}
        check(part.size > 0, "a stage runs with nothing")
        check(not any(stage == each for each, _ in at_once), "a stage runs twice at once")
        check((stage - 1, pair) not in at_once, "a buffer is read while it is written")
        check((stage + 1, pair) not in at_once, "a buffer is written while it is read")
        check(not self._others_at(batch, stage + 1), "a buffer of another batch is overwritten")
        for request in part.requests:
            check(request.key == batch.key, "keys are mixed")
            check(self.progress[request.number] == stage, "a request is not at this stage")
        if not batch.is_split and not self._is_loop(stage):
            behind = [each for each in batch.parts if each.stage < stage]
            check(not behind, "a part goes on though others of its batch are behind")
        if not self.limits.has_loop:
            older = [each for each in self.pipeline.table if each.number < batch.number]
            overtaken = [each for other in older for each in other.parts if each.stage < stage]
            check(not overtaken, "a batch overtakes another")
        self.pipeline.start(part)
        neighbours = any(abs(stage - each) == 1 for each, _ in at_once)
        if neighbours:
            check(self.limits.pairs > 1, "neighbouring stages at once with one buffer pair")
        return "neighbours at once" if neighbours else "start"

    def end(self, index: int, leaving: int, cut: int, through: int | None = None) -> str:
        part = self.parts[index]
        batch, parts = part.batch, len(part.batch.parts)
        first, stage = part.stage, part.stage if through is None else through
        ran = part.requests
        left = ran[:leaving]
        queued = self.pipeline.finish(part, left, through=through)
        is_last = stage == self.pipeline.last
        for request in ran:
            if request in left or request.number in self.withdrawn:
                del self.progress[request.number]
                self.withdrawn.discard(request.number)
            elif not is_last:
                self.progress[request.number] += stage + 1 - first
        what = "merge" if len(batch.parts) < parts and batch.live else "end"
        if cut:
            what = "split"
            can = not batch.is_split and len(batch.parts) == 1 and not self.limits.has_loop
            if not (can and queued == [part] and part.stage and part.size > cut):
                return ""  # no such move here
            self.pipeline.split(part, (cut, part.size - cut))
        return what if stage < self.pipeline.last else f"{what} of the last stage"

    def withdraw(self, index: int) -> str:
        part = self.parts[index]
        self.cancelled += 1
        request = next(each for each in part.requests if each not in part.gone)
        state = part.state
        check(self.pipeline.withdraw(request), "a request on its way is not found")
        if state is PartState.RUNNING:
            self.withdrawn.add(request.number)
        else:
            del self.progress[request.number]
        return f"withdrawn while {state.value}"

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """In every state."""
        found = [request.number for part in self.parts for request in part.requests]
        check(sorted(found) == sorted(self.progress), "a request is lost or doubled")
        check(len(self.running) <= self.limits.devices, "more run than there are devices")
        for part in self.parts:
            stages = {self.progress[request.number] for request in part.requests}
            check(stages == {part.stage}, "a part is not where its requests are")
            self._check_place(part)
            self._check_merged(part)
        for stage in range(self.limits.stages):
            for pair in range(self.limits.pairs):
                self._check_buffer(stage, pair)
        if self.parts and not self.running:
            check(bool(self.pipeline.ready()), "deadlock")
        if not self.parts:
            check(not len(self.pipeline.table), "a batch of nothing is kept")

    def executors(self) -> list[Executor]:
        """Of each stage; these states follow from what the pipeline keeps."""
        pipeline, found = self.pipeline, []
        for stage in range(self.limits.stages):
            if pipeline._running[stage] is not None:
                found.append(Executor.WORKING)
            elif pipeline._queues[stage]:
                found.append(Executor.CHECKING)
            else:
                is_legal = any(pipeline._is_legal(p) for p in self.parts if p.stage == stage)
                found.append(Executor.ACTIVE if is_legal else Executor.INACTIVE)
        return found

    def _check_place(self, part: Part) -> None:
        if part is self.pipeline._untold:
            check(self.parts == [part], "what nobody is told of is not alone")
            check(part.state is PartState.RUNNING, "what nobody is told of does not run")
            return
        queues, running = self.pipeline._queues, self.pipeline._running
        places = [(PartState.QUEUED, stage) for stage, each in enumerate(queues) if part in each]
        places += [(PartState.RUNNING, stage) for stage, each in enumerate(running) if each is part]
        expected = [] if part.state is PartState.WAITING else [(part.state, part.stage)]
        check(places == expected, f"a part that is {part.state.value} is elsewhere")

    def _check_merged(self, part: Part) -> None:
        if part.state is not PartState.QUEUED or part.batch.is_split:
            return
        beside = [each for each in part.batch.parts if each.stage == part.stage]
        check(
            all(each is part or each.state is PartState.RUNNING for each in beside),
            "parts of a batch that is not split are to run the same stage one after the other",
        )

    def _check_buffer(self, stage: int, pair: int) -> None:
        buffer = self.pipeline._buffers[stage][pair]
        parts = [each for each in self.parts if each is not self.pipeline._untold]
        inside = [each for each in parts if each.batch.pair == pair and each.stage == stage]
        running = [each for each in parts if each.state is PartState.RUNNING]
        written = any(each.batch.pair == pair and each.stage == stage - 1 for each in running)
        read = any(each.state is PartState.RUNNING for each in inside)
        check(len({each.batch.number for each in inside}) < 2, "a buffer of two batches")
        check(not (written and read), "a buffer is read and written at once")
        state = BufferState.AVAILABLE if inside else BufferState.INVALID
        state = BufferState.WRITING if written else BufferState.READING if read else state
        check(
            buffer.state is state, f"a buffer is {buffer.state.value}, and should be {state.value}"
        )

    def _others_at(self, batch: Batch, stage: int) -> bool:
        return any(
            each.batch.pair == batch.pair and each.stage == stage and each.batch is not batch
            for each in self.parts
        )

    def _is_loop(self, stage: int) -> bool:
        return self.limits.has_loop and stage == self.pipeline.last

    # --- which state it is ------------------------------------------------------------------------

    def key(self) -> Hashable:
        """Equal for states from which the same can happen."""
        batches = list(self.pipeline.table)
        names: dict[int, int] = {}
        for batch in batches:
            names.setdefault(batch.pair, len(names))
        part_names = {
            id(part): (row, column)
            for row, batch in enumerate(batches)
            for column, part in enumerate(batch.parts)
        }
        rows = tuple(
            (
                batch.key,
                names[batch.pair],
                batch.is_split,
                tuple(
                    (part.stage, part.order, part.state.value, part.size, len(part.gone))
                    for part in batch.parts
                ),
            )
            for batch in batches
        )
        queues = tuple(
            tuple(part_names[id(part)] for part in queue) for queue in self.pipeline._queues
        )
        return rows, queues, self.left, self.made, self.cancelled


def search(limits: Limits, *, most_states: int = 10_000_000) -> Search:
    """Everything within the limits. Raises :class:`Violation`, or RuntimeError of the table."""
    found = Search(limits)
    table = _Recording(BUFFER_TRANSITIONS)
    table.used = found.transitions
    with mock.patch.object(buffers, "BUFFER_TRANSITIONS", table):
        _explore(World(limits), found, most_states)
    return found


class _Recording(dict[Hashable, object]):
    used: set[Hashable]

    def get(self, key: Hashable, default: object = None) -> object:
        if key in self:
            self.used.add(key)
        return super().get(key, default)


def _explore(start: World, found: Search, most_states: int) -> None:
    seen = {start.key()}
    frontier = [pickle.dumps(start)]
    while frontier and len(seen) < most_states:
        saved = frontier.pop()
        for move in pickle.loads(saved).moves():
            world = pickle.loads(saved)
            before = world.executors()
            what = move(world)
            if not what:
                continue
            world.check()
            found.changes |= checked(zip(before, world.executors(), strict=True))
            found.steps += 1
            found.facts.add(what)
            key = world.key()
            if key not in seen:
                seen.add(key)
                frontier.append(pickle.dumps(world))
    found.states = len(seen)


def checked(changes: Iterable[tuple[Executor, Executor]]) -> set[tuple[Executor, Executor]]:
    """Return the changes of states; those in several steps have all of them at an active one."""
    found = {(before, after) for before, after in changes if before is not after}
    for before, after in found - EXECUTOR_TRANSITIONS:
        steps = {(before, Executor.ACTIVE), (Executor.ACTIVE, after)}
        check(steps <= EXECUTOR_TRANSITIONS, f"{before.name} became {after.name}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many states there are; fails at the first that must not be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("stages", "pairs", "devices", "batches", "requests", "largest", "keys", "cancels"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Limits, name))
    parser.add_argument("--loop", action="store_true", dest="has_loop")
    parser.add_argument("--no-exits", action="store_false", dest="exits")
    parser.add_argument("--grid", action="store_true")
    options = vars(parser.parse_args(arguments))
    is_grid = options.pop("grid")
    limits = Limits(**options)
    unused = {*BUFFER_TRANSITIONS}
    total = Search(limits)
    for each in _grid(limits) if is_grid else [limits]:
        found = _print_search(each)
        total.states += found.states
        unused &= found.missed
    if is_grid:
        print(f"{total.states} states in all")
    for state, event in sorted(unused, key=str):  # type: ignore[misc]
        print("not used:", state, event)
    return 0


def _grid(limits: Limits) -> Iterator[Limits]:
    for has_loop, stages, pairs in product((False, True), range(1, 5), range(1, 4)):
        for devices, batches in product(range(1, 4), range(1, 4)):
            yield replace(
                limits,
                stages=stages,
                pairs=pairs,
                devices=devices,
                batches=batches,
                has_loop=has_loop,
            )


def _print_search(limits: Limits) -> Search:
    started_s = time.perf_counter()
    found = search(limits)
    print(limits)
    print(f"{found.states} states, {found.steps} steps, {time.perf_counter() - started_s:.1f} s")
    print("seen:", ", ".join(sorted(found.facts)), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
