"""The policy of a staged model: rules decide, the pipeline keeps order, one object for all drivers.

As :class:`~trims_shim.batching.single.Batching`, with one rule for each key; but a device runs one
*stage* of one part of a batch at a time, and between any two of them newcomers may enter. Whenever
a device is free it asks, in this order: who joins the newest batch; what is ready to go on; and,
where a device is still free, who starts as a new batch. So batches are formed as late as possible,
and nothing that is on its way waits for anything that is not.

Drivers get :class:`RunStage` for each stage of each part and answer with :class:`StageEnded`.
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
from trims_shim.batching.staged.batches import Part
from trims_shim.batching.staged.pipeline import Pipeline
from trims_shim.batching.staged.staged_rules import StagedRule

__all__ = ["RunStage", "StageEnded", "StagedBatching"]


@dataclass(frozen=True, slots=True)
class RunStage(Run):
    """Run ``stage`` of the model with ``part``; ``batch`` are its requests now.

    Those of the first stage leave the queue with it.
    """

    stage: int
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnded(Finished):
    """The device has run a stage of ``part`` and is free; ``batch`` is that of its RunStage."""

    part: Part
    left: Sequence[Request] = ()
    """Those of them that are answered, or failed; after the last stage all are, unless it loops."""


class StagedBatching(Batching):
    """A :class:`~trims_shim.batching.protocol.Policy` for one staged model.

    ``devices``: how many stages run at once. ``pairs``: buffer pairs of each stage. ``has_loop``:
    the last stage is run again until its requests are finished. ``max_active``: how many requests
    may be on their way; None for no limit but that of the buffers.
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
    ) -> None:
        super().__init__(make_rule, devices=devices, max_weight=max_weight)
        self.pipeline = Pipeline(stages, pairs=pairs, has_loop=has_loop)
        self._max_active = max_active

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """As :class:`~trims_shim.batching.protocol.Policy`; Preempted never comes."""
        if isinstance(event, StageEnded):
            self._stage_ended(now_ns, event)
        return super().on_event(now_ns, event)

    # --- events -----------------------------------------------------------------------------------

    def _stage_ended(self, now_ns: int, event: StageEnded) -> None:
        batch = event.part.batch
        rule = self._rules.get(batch.key)
        for part in self.pipeline.finish(event.part, event.left):
            if isinstance(rule, StagedRule) and part.stage and not self._is_split_or_late(part):
                sizes = rule.split(now_ns, part)
                if len(sizes) > 1:
                    _check_sizes(sizes, part)
                    self.pipeline.split(part, sizes)

    def _is_split_or_late(self, part: Part) -> bool:
        return part.batch.is_split or len(part.batch.parts) > 1 or self.pipeline.has_loop

    def _finished(self, now_ns: int, finished: Finished) -> None:
        assert isinstance(finished, StageEnded)
        self._free.append(finished.device)
        batch = finished.part.batch
        rule = self._rules.get(batch.key)
        if rule is not None and finished.batch and not batch.parts:
            whole = Finished(finished.device, finished.batch, batch.created_ns, finished.is_typical)
            rule.on_finished(now_ns, whole)

    def _cancelled(self, request: Request) -> None:
        if not self.pipeline.withdraw(request):
            super()._cancelled(request)

    # --- actions ----------------------------------------------------------------------------------

    def _decide(self, now_ns: int) -> Sequence[Action]:
        actions: list[Action] = []
        while self._free:
            self._stretch(now_ns, actions)
            if not self._start(actions) and not self._form(now_ns, actions):
                break
        self._set_wake()
        return actions

    def _stretch(self, now_ns: int, actions: list[Action]) -> None:
        for batch in list(self.pipeline.table):
            rule = self._waiting.get(batch.key)
            if not isinstance(rule, StagedRule) or not self.pipeline.may_stretch(batch):
                continue
            room = min(rule.room(), rule.max_batch_size - batch.live, self._allowance())
            if room < 1:
                continue
            size = min(room, rule.stretch(now_ns, batch, room))
            actions.extend(rule.take_drops())
            if size > 0:
                self.pipeline.stretch(batch, rule.queue.take(size))
            self._drop_if_empty(batch.key, rule)

    def _start(self, actions: list[Action]) -> bool:
        ready = self.pipeline.ready()
        if not ready:
            return False
        part = ready[0]
        stage, requests = part.stage, part.requests
        self.pipeline.start(part)
        actions.append(RunStage(self._free.pop(), requests, stage, part))
        return True

    def _form(self, now_ns: int, actions: list[Action]) -> bool:
        """Make one new batch, if any rule wants one."""
        allowance = self._allowance()
        if not self._waiting or not self.pipeline.may_new or allowance < 1:
            return False
        has_rivals = len(self._waiting) > 1
        for key, rule in sorted(self._waiting.items(), key=urgency):
            rule.has_rivals = has_rivals
            size = min(allowance, self._ask(rule, now_ns, actions))
            requests = rule.queue.take(size) if size else []
            self._drop_if_empty(key, rule)
            if requests:
                self.pipeline.new(now_ns, requests)
                return True
        return False

    def _allowance(self) -> int:
        """How many more may be on their way."""
        if self._max_active is None:
            return 1 << 30
        return self._max_active - self.pipeline.active

    def _drop_if_empty(self, key: Hashable, rule: Rule) -> None:
        if not rule.queue:
            del self._waiting[key]


def _check_sizes(sizes: Sequence[int], part: Part) -> None:
    if min(sizes) < 1 or sum(sizes) != part.size:
        raise ValueError(f"a part of {part.size} cannot be split into {list(sizes)}")
