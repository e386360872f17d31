"""Input diversity: batches of one length each, and a short window in which they gather.

Inputs of different lengths have different keys (``Pad(buckets=...)`` makes one for each length), so
each length has a rule of its own, and batches of several keys are under way at the same time. With
many keys, few requests of one key are queued at a time. DVABatch (ATC'22, section 6) waits for more
requests for the time that the first stage takes with a full batch. In our tests that cost more than
it saved (docs/decisions/0011). This policy is for comparison, and for users who ask for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trims_shim.batching.protocol import NEVER_NS
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.policies.staged_auto import StagedAuto

__all__ = ["InputDiversity"]


class InputDiversity(StagedAuto):
    """Waits for other requests of the same length, as far as deadlines permit."""

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        size = super().choose(now_ns)
        if not size or self.has_shed or self.is_full(size):
            return size
        end_ns = self._window_end_ns(size)
        if end_ns <= now_ns:
            return size
        self.wake_ns = end_ns
        return 0

    def companions(
        self, now_ns: int, size: int, others: Collection[Rule]
    ) -> Sequence[tuple[Rule, int]]:
        """None: a batch has requests of one length only."""
        return ()

    def _window_end_ns(self, size: int) -> int:
        oldest_ns = min(request.arrival_ns for request in self.queue)
        end_ns = oldest_ns + self.staged.stage_ns(0, self.max_batch_size)
        deadline_ns = self.queue.deadline_ns(size)
        if deadline_ns == NEVER_NS:
            return end_ns
        takes_ns = int(self.stretches[-1] * self.profile.or_one_more_ns(size))
        return min(end_ns, deadline_ns - self.margin_ns - takes_ns)
