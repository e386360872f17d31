"""A policy that learns what batches take, for simulations: as behind a batcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trims_shim.batching.jobs import Job
from trims_shim.batching.learning import Learning
from trims_shim.batching.protocol import Action, Drop, Event, Finished
from trims_shim.batching.rules import RuleMaker

__all__ = ["Learner"]


class Learner:
    """A :class:`~trims_shim.batching.protocol.Policy` that knows nothing at first."""

    def __init__(self, maker: RuleMaker, *, max_batch_size: int) -> None:
        self._learning = Learning(
            maker,
            name=None,
            max_batch_size=max_batch_size,
            max_batch_weight=None,
            devices=1,
            batch_sizes=None,
            prior=None,
            store=lambda: None,
        )
        self._policy = self._learning.make_policy()
        self.next_deadline_ns = self._policy.next_deadline_ns

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """See :class:`~trims_shim.batching.protocol.Policy`."""
        if isinstance(event, Finished):
            job = Job(event.device, event.batch, 0)
            job.live = list(event.batch)
            job.started_ns, job.ended_ns = event.started_ns, now_ns
            is_typical = self._learning.ran(self._policy, job)
            event = replace(event, is_typical=is_typical)
        actions = self._policy.on_event(now_ns, event)
        for action in actions:
            if isinstance(action, Drop):
                self._learning.gave_up(self._policy, action, now_ns)
        return actions
