"""Load diversity: requests that arrive soon enough join a batch that is under way (stretch).

DVABatch (ATC'22, section 6) lets requests join while the batch is younger than a fixed time. But
the cost varies: the batch waits while the newcomers catch up, they need not wait for its end, and
the device runs the remaining stages once instead of twice. So by default both plans are compared,
each with its effect on waiting and future requests.

No request may join if a request of the batch would be late because of it.

Rows that are padded to other lengths cannot be joined: the batch then waits for nothing, and each
stage runs twice. The policy learns how often that happens and includes it in the cost. If joining
always fails, it is still tried now and then, to notice when that changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, DropReason
from trims_shim.batching.rules import duration_ns
from trims_shim.batching.staged.mechanism.batches import Batch
from trims_shim.batching.staged.policies.staged_auto import RUN_NS, StagedAuto
from trims_shim.batching.staged.policies.timetable import Level, levels_of, together_ns

__all__ = ["LoadDiversity"]

_NEWS = 1 / 8
"""The weight of the last attempt to join in the estimate for the next one."""
_HOPE = 1 / 256
"""The step of the estimate towards success at each border where no request joins: a failure is
forgotten after some thirty of them."""


class LoadDiversity(StagedAuto):
    """Stretches a batch where that is worth it.

    ``wait_ms``: stretch while the batch is younger than this (the paper's T_comp_wait), whatever it
    costs; None to stretch if that lowers the total latency of all requests.
    """

    def __init__(
        self,
        profile: LatencyProfile,
        *,
        max_batch_size: int,
        margin_ms: float = 0.0,
        wait_ms: float | None = None,
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=margin_ms)
        self.wait_ns = None if wait_ms is None else duration_ns("wait_ms", wait_ms)
        self._joinable = 1.0
        """The probability that the rows of newcomers can be joined with those of the batch."""

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        if levels_of(batch)[-1][0] == 0:  # not started, and its size was just chosen
            return 0
        if self.has_loop:  # newcomers join between two steps, where the batch does not wait
            return room
        soonest_ns = now_ns + self.margin_ns + int(self.stretches[0] * self.profile.latency_ns(1))
        self.drop(self.queue.take_due(soonest_ns), DropReason.HOPELESS)
        size = self._in_time(now_ns, batch, min(room, len(self.queue), self._sure_room(batch)))
        if size and not batch.is_apart and self._is_worth_it(now_ns, batch, size):
            return size
        self._joinable += (1 - self._joinable) * _HOPE
        return 0

    def joining_saves_ns(self, now_ns: int, size: int) -> float:
        """Return what the next arrivals are expected to save by joining a new batch of ``size``.

        They join at the border where that saves most; each border is weighed with the probability
        that somebody has arrived by then. In requests x ns, like :meth:`cost_ns`.
        """
        staged, rate = self.staged, self.rate(now_ns)
        one_by_one = together = 0.0
        for stage in range(1, len(staged.stages)):
            arrivals = rate * staged.passed_ns(stage, size)
            each = max(0.0, self._join_saves_ns(now_ns, stage, size, 1))
            one_by_one += rate * staged.stage_ns(stage - 1, size) * each
            saved = self._join_saves_ns(now_ns, stage, size, max(1, round(arrivals)))
            together = max(together, -math.expm1(-arrivals) * saved)
        return max(one_by_one, together)

    def _join_saves_ns(self, now_ns: int, stage: int, size: int, joining: int) -> float:
        joining = min(joining, self.max_batch_size - size)
        if joining < 1:
            return 0.0
        rest_ns = self.staged.remaining_ns(stage, size)
        all_ns = self._joined_ns([(stage, size)], joining) + RUN_NS * stage
        apart = self.cost_ns(now_ns, [(rest_ns, size)], next_ns=rest_ns, queued=joining)
        return apart - self.cost_ns(now_ns, [(all_ns, size + joining)], next_ns=all_ns, queued=0)

    def _sure_room(self, batch: Batch) -> int:
        """Return how many can join before the batch exceeds the sizes with known latencies.

        Latencies of larger sizes are optimistic guesses. If a new batch is slower than guessed,
        only its own requests pay; here the whole batch would wait for newcomers.
        """
        if self.wait_ns is not None:
            return len(self.queue)
        later = range(levels_of(batch)[0][0], len(self.staged.stages))
        return max(0, min([self.staged.sure[stage] for stage in later]) - batch.live)

    def on_met(self, is_joined: bool) -> None:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        self._joinable += (is_joined - self._joinable) * _NEWS

    def _in_time(self, now_ns: int, batch: Batch, size: int) -> int:
        """Return how many of the first ``size`` can join without making others late."""
        levels = levels_of(batch)
        due_ns = self._due_ns(now_ns, batch, together_ns(self.staged, levels))
        while size and due_ns < self._likely_ns(now_ns, self._joined_ns(levels, size)):
            size -= 1
        return size

    def _joined_ns(self, levels: Sequence[Level], size: int) -> int:
        """Return the expected time until all are answered if ``size`` requests join."""
        return together_ns(self.staged, [(0, size), *levels]) + self._unjoined_ns(levels, size)

    def _unjoined_ns(self, levels: Sequence[Level], size: int) -> int:
        """Return the expected part of that time that is due to rows that cannot be joined."""
        if self._joinable == 1:
            return 0
        joined_ns = together_ns(self.staged, [(0, size), *levels])
        one_by_one_ns = together_ns(self.staged, levels) + self.staged.remaining_ns(0, size)
        return int((1 - self._joinable) * (one_by_one_ns - joined_ns))

    def _due_ns(self, now_ns: int, batch: Batch, rest_ns: int) -> int:
        """Return the batch's earliest deadline among those that are met if no request joins."""
        soonest_ns = self._likely_ns(now_ns, rest_ns)
        return min(
            (
                request.deadline_ns
                for part in batch.parts
                for request in part.requests
                if request.deadline_ns >= soonest_ns
            ),
            default=NEVER_NS,
        )

    def _likely_ns(self, now_ns: int, duration_ns: int) -> int:
        return now_ns + self.margin_ns + int(self.stretches[-1] * duration_ns)

    def _is_worth_it(self, now_ns: int, batch: Batch, size: int) -> bool:
        if self.wait_ns is not None:
            return now_ns - batch.created_ns < self.wait_ns
        if self.devices == 1:
            return self._saves_alone(now_ns, batch, size)
        return self._saves_in_pipeline(now_ns, batch, size)

    def _saves_alone(self, now_ns: int, batch: Batch, size: int) -> bool:
        """Compare with newcomers that wait until the batch is done."""
        levels, aboard, queued = levels_of(batch), batch.live, len(self.queue)
        rest_ns = together_ns(self.staged, levels)
        all_ns = self._joined_ns(levels, size) + RUN_NS * levels[0][0]
        return self.cost_ns(
            now_ns, [(all_ns, aboard + size)], next_ns=all_ns, queued=queued - size
        ) < self.cost_ns(now_ns, [(rest_ns, aboard)], next_ns=rest_ns, queued=queued)

    def _saves_in_pipeline(self, now_ns: int, batch: Batch, size: int) -> bool:
        """Compare with newcomers that run beside the batch.

        Once the batches under way keep the device busy, making one of them wait saves nothing on a
        wide device, unless the newcomers are only one stage behind. On a device where two at once
        gain little, it saves as much as if only one ran at a time.
        """
        is_busy = self.load(size) + sum(self.load(each.live) for each in self.ahead) > 1
        if is_busy and not self.is_wide:
            return self._saves_alone(now_ns, batch, size)
        if is_busy and levels_of(batch)[-1][0] > 1:
            return False
        aboard = batch.live
        apart = self.timetable(now_ns, without=batch)
        joined = apart.copy()
        apart_ns = aboard * (apart.add(batch) - now_ns) + size * (apart.add_size(size) - now_ns)
        joined_ns = joined.add(batch, size) - now_ns + self._unjoined_ns(levels_of(batch), size)
        return (aboard + size) * joined_ns < apart_ns
