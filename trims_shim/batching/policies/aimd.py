"""Clipper's batch size (NSDI'17, section 4.3.1): additive increase, multiplicative decrease.

Work conserving, and without a profile: the limit on batches grows by one after each batch that
filled it within the latency objective, and shrinks by a tenth after one that took longer. As in
Clipper's code, requests whose deadline has passed are given up before they are batched, no others.
"""

from __future__ import annotations

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, DropReason, Finished
from trims_shim.batching.rules import Rule

__all__ = ["AIMD"]


class AIMD(Rule):
    """All queued requests, up to a limit found by trial.

    ``step`` is added to the limit, ``backoff`` (below 1) multiplies it. The objective of a batch is
    the shortest time from arrival to deadline of its requests.
    """

    def __init__(
        self,
        profile: LatencyProfile,
        *,
        max_batch_size: int,
        step: float = 1.0,
        backoff: float = 0.9,
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size)
        if not step > 0 or not 0 < backoff < 1:
            raise ValueError(f"step is {step}, backoff {backoff}: not above 0, and within 0 and 1")
        self._step = step
        self._backoff = backoff
        self._limit = 1.0

    @property
    def limit(self) -> int:
        """The current limit on batch size."""
        return min(int(self._limit), self.max_batch_size)

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self.drop(self.queue.take_due(now_ns), DropReason.HOPELESS)
        return min(self.room(), self.limit)

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if not finished.is_typical:
            return
        objective_ns = min(
            NEVER_NS if each.deadline_ns == NEVER_NS else each.deadline_ns - each.arrival_ns
            for each in finished.batch
        )
        if now_ns - finished.started_ns > objective_ns:
            self._limit = max(1.0, self._limit * self._backoff)
        elif len(finished.batch) >= self.limit:
            self._limit = min(float(self.max_batch_size), self._limit + self._step)
