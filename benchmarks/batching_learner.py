"""Policies that learn latencies in the simulator as they do behind a batcher."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.learning import Learning
from trims_shim.batching.protocol import Action, Drop, Event, Finished
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.staged.drivers.jobs import StageJob
from trims_shim.batching.staged.drivers.learning import StagedLearning
from trims_shim.batching.staged.scheduler import RunStage, StagedBatching, StageEnded

__all__ = ["Learner", "StagedLearner"]


class Learner:
    """A :class:`~trims_shim.batching.protocol.Policy` that starts without a profile."""

    def __init__(self, maker: RuleMaker, *, max_batch_size: int) -> None:
        self._learning = self._make_learning(
            maker,
            name=None,
            max_batch_size=max_batch_size,
            devices=1,
            store=lambda: None,
        )
        self._policy = self._learning.make_policy()
        self.next_deadline_ns = self._policy.next_deadline_ns

    def _make_learning(self, maker: RuleMaker, **options: Any) -> Learning:
        return Learning(maker, **options)

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """See :class:`~trims_shim.batching.protocol.Policy`."""
        if isinstance(event, Finished):
            job = self._job_of(event, now_ns)
            job.live = list(event.batch)
            job.started_ns, job.ended_ns = event.started_ns, now_ns
            is_typical = self._learning.ran(self._policy, job)
            event = replace(event, is_typical=is_typical)
        actions = self._policy.on_event(now_ns, event)
        for action in actions:
            if isinstance(action, Drop):
                self._learning.gave_up(self._policy, action, now_ns)
        return actions

    def _job_of(self, event: Finished, now_ns: int) -> Job:
        return Job(event.device, event.batch, 0)


class StagedLearner(Learner):
    """As :class:`Learner`, for a model of several stages, one of which runs at a time."""

    def __init__(self, maker: RuleMaker, *, stages: int, max_batch_size: int) -> None:
        self._stages = stages
        self._running: dict[int, RunStage] = {}
        super().__init__(maker, max_batch_size=max_batch_size)

    def _make_learning(self, maker: RuleMaker, **options: Any) -> Learning:
        return StagedLearning(
            maker,
            stages=self._stages,
            has_loop=False,
            batching=functools.partial(StagedBatching, stages=self._stages),
            **options,
        )

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """See :class:`~trims_shim.batching.protocol.Policy`."""
        actions = super().on_event(now_ns, event)
        self._running.update((each.device, each) for each in actions if isinstance(each, RunStage))
        return actions

    def _job_of(self, event: Finished, now_ns: int) -> Job:
        if not isinstance(event, StageEnded):
            return super()._job_of(event, now_ns)
        job = StageJob(self._running.pop(event.device), 0, is_end=True, result=list)
        job.size = len(event.batch)
        job.durations_ns.append(now_ns - event.started_ns)
        return job
