"""The policy of a staged model: rules decide, the pipeline keeps order, one object for all drivers.

Like :class:`~trims_shim.batching.single.Batching`, with one rule for each key; but a device runs
one *stage* of one part of a batch at a time, and requests may join between stages. A free device
is used in this order: requests join batches under way; a part that is ready goes on; requests form
a new batch that would start at once. So batches form as late as possible, and a part under way
never waits for queued requests. Only a loop, whose end nobody knows, gives way between two steps to
keys that have no batch under way.

Drivers get a :class:`RunStage` for each stage of each part, and answer with :class:`StageEnded`.
A batch for which stages do not pay is a plain :class:`~trims_shim.batching.protocol.Run` of the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from trims_shim.batching.protocol import (
    Action,
    Event,
    Finished,
    Request,
    Run,
)
from trims_shim.batching.rules import Rule
from trims_shim.batching.single import Batching, urgency
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.mechanism.pipeline import Pipeline
from trims_shim.batching.staged.staged_rules import StagedRule

__all__ = ["RunStage", "StageEnded", "StagedBatching"]

# After early exits a batch can be filled up again while the others wait: all that enter it are at
# most this many times max_batch_size.
_MOST_FILLINGS = 2


@dataclass(slots=True)
class RunStage(Run):
    """Run ``stage`` of the model with ``part``; ``batch`` are its requests at this moment.

    Requests that run the first stage leave the queue with this action.
    """

    stage: int
    part: Part
    until: int = 0
    """If later than ``stage``: the driver may run on up to it without asking at borders, as long as
    no event occurs, since nothing has to be decided."""


@dataclass(slots=True, kw_only=True)
class StageEnded(Finished):
    """A device has run a stage of ``part`` and is free; ``batch`` is that of the RunStage."""

    part: Part
    left: Sequence[Request] = ()
    """The requests that are answered or failed: all after the last stage, unless it is a loop."""
    has_exits: bool = True
    """If any have left before the last stage: whether the stage has answered some of them. Others
    were cancelled, or the whole function has answered them."""
    through: int | None = None
    """The last stage that was run; None if it is the stage of the RunStage."""
    is_joined: bool | None = None
    """Whether pieces that met at this stage ran as one batch; None if none met."""


class StagedBatching(Batching):
    """A :class:`~trims_shim.batching.protocol.Policy` for one staged model.

    ``devices``: how many stages run at once. ``pairs``: buffer pairs of each stage. ``has_loop``:
    the last stage runs again until its requests are finished. ``max_active``: how many requests may
    be under way; None for no limit except the buffers. ``may_run_whole``: the device also takes
    batches for the whole model.
    """

    def __init__(
        self,
        make_rule: Callable[[Hashable], Rule],
        *,
        stages: int,
        devices: int = 1,
        pairs: int = 2,
        has_loop: bool = False,
        max_active: int | None = None,
        max_weight: int | None = None,
        may_run_whole: bool = True,
    ) -> None:
        super().__init__(make_rule, devices=devices, max_weight=max_weight)
        if max_active is not None and max_active < 1:
            raise ValueError(f"max_active is {max_active}; it has to be 1 or more")
        self.pipeline = Pipeline(stages, pairs=pairs, has_loop=has_loop)
        self._max_active = max_active
        self._may_run_whole = may_run_whole and devices == 1 and not has_loop

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """See :class:`~trims_shim.batching.protocol.Policy`; never gets Preempted."""
        if isinstance(event, StageEnded):
            self._stage_ended(now_ns, event)
        return super().on_event(now_ns, event)

    # --- events -----------------------------------------------------------------------------------

    def _new_rule(self, key: Hashable) -> Rule:
        rule = super()._new_rule(key)
        if isinstance(rule, StagedRule):
            rule.has_loop = self.pipeline.has_loop
            rule.ahead = self.pipeline.table
        return rule

    def _stage_ended(self, now_ns: int, event: StageEnded) -> None:
        batch = event.part.batch
        batch.is_typical &= event.is_typical
        rule = self._rules.get(batch.key)
        through = event.part.stage if event.through is None else event.through
        if event.left and event.has_exits and through < self.pipeline.last:
            self._may_run_whole = False  # those that are finished early would wait for the others
        if event.is_joined is not None and not batch.is_apart:
            batch.is_apart = not event.is_joined
            if isinstance(rule, StagedRule):
                rule.on_met(event.is_joined)
        for part in self.pipeline.finish(event.part, event.left, through=event.through):
            if isinstance(rule, StagedRule) and part.stage and not self._is_split_or_late(part):
                self._tell(rule, self._count_waiting())
                sizes = rule.split(now_ns, part)
                if sizes:
                    _check_sizes(sizes, part)
                if len(sizes) > 1:
                    self.pipeline.split(part, sizes)

    def _is_split_or_late(self, part: Part) -> bool:
        return part.batch.is_split or len(part.batch.parts) > 1 or self.pipeline.has_loop

    def _finished(self, now_ns: int, finished: Finished) -> None:
        if not isinstance(finished, StageEnded):
            super()._finished(now_ns, finished)
            return
        self._free.append(finished.device)
        batch = finished.part.batch
        rule = self._rules.get(batch.key)
        if rule is not None and finished.batch and not batch.parts:
            is_typical = self._is_typical(batch) and len(finished.batch) == batch.size
            whole = Finished(finished.device, finished.batch, batch.created_ns, is_typical)
            rule.on_finished(now_ns, whole)

    def _is_typical(self, batch: Batch) -> bool:
        """Whether its duration is what a profile should say of its size."""
        return batch.is_typical and not batch.is_split and not self.pipeline.has_loop

    def _cancelled(self, request: Request) -> None:
        if not self.pipeline.withdraw(request):
            super()._cancelled(request)

    # --- actions ----------------------------------------------------------------------------------

    def _decide(self, now_ns: int) -> Sequence[Action]:
        if not self._waiting and not len(self.pipeline.table):
            return ()
        actions: list[Action] = []
        # Rules that are not asked this time must not keep a wake time in the past.
        for rule in self._waiting.values():
            rule.wake_ns = None
        while self._free:
            part = None
            if len(self.pipeline.table):
                if self._waiting:
                    self._stretch(now_ns, actions)
                part = self._next(now_ns)
            may_form = self._waiting and (part is None or self.pipeline.is_step(part))
            if may_form and self._form(now_ns, actions, only_rivals=part is not None):
                continue
            if part is None:
                break
            self.pipeline.start(part)
            actions.append(self._run(now_ns, part))
        if self._free and self._waiting and self.pipeline.may_new:
            self._set_wake()
        return actions

    def _run(self, now_ns: int, part: Part) -> RunStage:
        """Return the action for a part that the pipeline has started."""
        part.started_ns = now_ns
        until = self._until(now_ns, part)
        return RunStage(self._free.pop(), part.running, part.stage, part, until)

    def _next(self, now_ns: int) -> Part | None:
        """Return the part that goes on now; None if there is none or its rule lets it wait."""
        ready = self.pipeline.ready()
        part = ready[0] if ready else None
        if part is None or len(self._free) == self._devices:
            return part
        rule = self._rules.get(part.batch.key)
        if isinstance(rule, StagedRule) and not rule.may_run_beside(now_ns, part):
            return None
        return part

    def _until(self, now_ns: int, part: Part) -> int:
        """Return the stage up to which nothing has to be decided as long as no event occurs.

        Later than ``part.stage`` only if the part is alone on a single device: no request is queued
        to join it, and no part is under way to pass it.
        """
        is_alone = len(self.pipeline.table) == len(part.batch.parts) == 1 and not self._waiting
        last = self.pipeline.last - self.pipeline.has_loop
        if self._devices > 1 or not is_alone or part.stage >= last:
            return part.stage
        rule = self._rules.get(part.batch.key)
        if part.size == 1 or self._is_split_or_late(part) or not isinstance(rule, StagedRule):
            return last
        self._tell(rule, 0)
        border = rule.next_split(now_ns, part)
        return last if border is None else border - 1

    def _stretch(self, now_ns: int, actions: list[Action]) -> None:
        for batch in list(self.pipeline.table):
            rule = self._waiting.get(batch.key)
            if not isinstance(rule, StagedRule) or not self.pipeline.may_stretch(batch):
                continue
            self._tell(rule, self._count_waiting())
            room = self._room(rule, batch)
            if room < 1:
                continue
            size = rule.stretch(now_ns, batch, room)
            drops = rule.take_drops()
            if drops:
                actions.extend(drops)
                room = self._room(rule, batch)
            requests = rule.queue.take(max(0, min(room, size)))
            if requests:
                self.pipeline.stretch(batch, requests)
                batch.is_typical &= len(batch.parts) == 1
            self._drop_if_empty(batch.key, rule)

    def _room(self, rule: StagedRule, batch: Batch) -> int:
        """Return how many of the queue's first requests the batch can take.

        0 or less if its earlier requests, or other keys, might otherwise wait forever.
        """
        room = min(rule.room(), rule.max_batch_size - batch.live, self._allowance())
        if not self.pipeline.has_loop:
            room = min(room, _MOST_FILLINGS * rule.max_batch_size - batch.size)
        elif rule.has_rivals and not self.pipeline.may_new:
            return 0
        if room < 1 or rule.max_weight is None:
            return room
        left = rule.max_weight - batch.weight
        return rule.queue.within_weight(room, left) if rule.queue[0].weight <= left else 0

    def _form(self, now_ns: int, actions: list[Action], *, only_rivals: bool) -> bool:
        """Make one new batch if a rule wants one; ``only_rivals``: of a key without a batch."""
        allowance = self._allowance()
        if allowance < 1 or not self.pipeline.may_new:
            return False
        on_their_way = {batch.key for batch in self.pipeline.table} if only_rivals else ()
        waiting = self._count_waiting()
        asking = list(self._waiting.items())
        if len(asking) > 1:
            asking.sort(key=urgency)
        for key, rule in asking:
            if key in on_their_way:
                continue
            self._tell(rule, waiting)
            size = min(allowance, self._ask(rule, now_ns, actions))
            is_last = len(self._free) == 1
            requests = (
                self._take(rule, size, now_ns, is_last=is_last, most=allowance) if size else []
            )
            self._drop_if_empty(key, rule)
            if not requests:
                continue
            is_alone = self._devices == 1 and not len(self.pipeline.table)
            if is_alone and self._runs_whole(rule, now_ns, len(requests)):
                actions.append(Run(self._free.pop(), requests))
            elif not is_alone or self._waiting:
                self.pipeline.new(now_ns, requests)
            else:
                part = self.pipeline.new_alone(now_ns, requests)
                actions.append(self._run(now_ns, part))
            return True
        return False

    def _runs_whole(self, rule: Rule, now_ns: int, size: int) -> bool:
        if not (self._may_run_whole and isinstance(rule, StagedRule)):
            return False
        return rule.runs_whole(now_ns, size)

    def _tell(self, rule: Rule, waiting: int) -> None:
        """Tell a rule how many other requests wait; ``waiting``: in all queues."""
        others = waiting - len(rule.queue)
        rule.has_rivals = others > 0
        if isinstance(rule, StagedRule):
            rule.others = others

    def _count_waiting(self) -> int:
        return sum([len(rule.queue) for rule in self._waiting.values()])

    def _allowance(self) -> int:
        """Return how many more requests may be under way."""
        if self._max_active is None:
            return 1 << 30
        return self._max_active - self.pipeline.active

    def _drop_if_empty(self, key: Hashable, rule: Rule) -> None:
        if not rule.queue:
            del self._waiting[key]


def _check_sizes(sizes: Sequence[int], part: Part) -> None:
    if min(sizes) < 1 or sum(sizes) != part.size:
        raise ValueError(f"a part of {part.size} cannot be split into {list(sizes)}")
