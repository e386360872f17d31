"""The base of the policies for staged models: when a batch starts, and what a plan costs.

New batches and drops are chosen as in :class:`~trims_shim.batching.policies.auto.Auto`; for a model
of one stage both rules are the same. With several stages on one device, this rule waits only if
starting at once might cause violations, not to lower the mean latency: later requests can still
join. On several devices, a batch waits while running beside others gains nothing. If a batch ahead
would hold it up before a later stage, it starts later by that time; meanwhile more requests can be
in it at no cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.mechanism.batches import Batch, Part, PartState
from trims_shim.batching.staged.policies.prospect import Answer, Prospect
from trims_shim.batching.staged.policies.timetable import Timetable
from trims_shim.batching.staged.profiles.stage_profile import WIDE
from trims_shim.batching.staged.staged_rules import StagedRule

__all__ = ["RUN_NS", "StagedAuto"]

RUN_NS = 100_000
"""The approximate overhead of a driver for a stage, including joining and splitting batches."""

_ARRIVALS = 32
"""The number of recent arrivals from which the rate is computed."""
_RATE_CHANGES = 1.1
"""The ratio of rates, either way, at which a prospect is renewed."""


class StagedAuto(Auto, StagedRule):
    """Never stretches, never splits."""

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, margin_ms: float = 0.0
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=margin_ms)
        self._waits_for_company = len(self.staged.stages) == 1
        self._arrivals_ns: deque[int] = deque(maxlen=_ARRIVALS)
        self._prospect: Prospect | None = None
        self._prospect_of: LatencyProfile | None = None
        self._prospect_rate = 0.0

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if self.devices == 1 or len(self.staged.stages) == 1:
            return super().choose(now_ns)
        size = Goodput.choose(self, now_ns)
        if not size:
            return 0
        if not self._gains_beside(now_ns, size, 0, queued=len(self.queue)):
            return 0
        if self.has_shed or self.is_full(size):
            return size
        start_ns = self._start_held_ns(now_ns, size)
        if start_ns <= now_ns:
            return size
        self.wake_ns = start_ns
        return 0

    def _start_ns(self, size: int, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.policies.auto.Auto`."""
        # A loop's duration is unknown, and requests can join it at every step.
        return now_ns if self.has_loop else super()._start_ns(size, now_ns)

    @property
    def servers(self) -> int:
        """See :class:`~trims_shim.batching.policies.goodput.Goodput`: stages share one device."""
        return 1

    def companions(
        self, now_ns: int, size: int, others: Collection[Rule]
    ) -> Sequence[tuple[Rule, int]]:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        # A loop's duration is unknown.
        return () if self.has_loop else super().companions(now_ns, size, others)

    def _start_held_ns(self, now_ns: int, size: int) -> int:
        """Return when batches ahead no longer hold up a batch of ``size``, or its deadline nears.

        The start is earlier by half of its first stage: where stages that run together slow each
        other down, using the rest of the device is worth more than letting more requests join.
        """
        start_ns = self.timetable(now_ns).next_ns(size) - self.staged.stage_ns(0, size) // 2
        takes_ns = int(self.stretches[-1] * self.profile.latency_ns(size))
        return min(start_ns, self.queue.deadline_ns(size) - self.margin_ns - takes_ns)

    def on_arrival(self, now_ns: int, request: Request) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        super().on_arrival(now_ns, request)
        self._arrivals_ns.append(now_ns)

    def demand(self, size: int) -> float:
        """Return a batch's throughput alone, as a share of that of a full batch; at most 1."""
        full, latency_ns = self.max_batch_size, self.profile.latency_ns
        size = min(size, full)
        return min(1.0, size * latency_ns(full) / (full * latency_ns(size))) if size else 0.0

    @property
    def is_wide(self) -> bool:
        """Whether batches always gain from running at the same time, or this was not measured."""
        width = self.staged.width
        return width is None or width >= WIDE

    def load(self, size: int, stage: int = 0) -> float:
        """Return the share of the device that a batch keeps busy from this stage on."""
        width = self.staged.width
        if width is None or self.is_wide:
            return self.demand(size)
        full, remaining_ns = self.max_batch_size, self.staged.remaining_ns
        size = min(size, full)
        rest_ns = full * remaining_ns(stage, size)
        demand = min(1.0, size * remaining_ns(stage, full) / rest_ns) if rest_ns else 0.0
        return 1 - width * (1 - demand)

    def may_run_beside(self, now_ns: int, part: Part) -> bool:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        return self._gains_beside(now_ns, part.size, part.stage, queued=None)

    def _gains_beside(self, now_ns: int, size: int, stage: int, *, queued: int | None) -> bool:
        """Whether ``size`` requests at ``stage`` gain from running beside the running parts.

        The alternative is to run after them. ``queued``: the length of the queue whose first
        requests they are; None if they are under way. If all demand more than the device has, all
        get slower: running requests are answered later, the new ones sooner. Always True for a
        loop, whose duration is unknown.
        """
        if self.is_wide or self.has_loop:
            return True
        running = [
            part for batch in self.ahead for part in batch.parts if part.state is PartState.RUNNING
        ]
        slower = self.load(size, stage) + sum(self.load(each.size, each.stage) for each in running)
        if not running or slower <= 1:
            return True
        remaining_ns = self.staged.remaining_ns
        rest_ns = max(
            max(0, remaining_ns(part.stage, part.size) + part.started_ns - now_ns)
            for part in running
        )
        own_ns, aboard = remaining_ns(stage, size), sum(part.size for part in running)
        both_ns = min(rest_ns, own_ns) * (slower - 1)
        answers = [(rest_ns + both_ns, aboard), (own_ns + both_ns, size)]
        left = len(self.queue) if queued is None else queued - size
        beside = self.cost_ns(now_ns, answers, next_ns=max(rest_ns, own_ns) + both_ns, queued=left)
        if queued is not None:
            return beside < self.cost_ns(
                now_ns, [(rest_ns, aboard)], next_ns=rest_ns, queued=queued
            )
        answers = [(rest_ns, aboard), (rest_ns + own_ns, size)]
        return beside < self.cost_ns(now_ns, answers, next_ns=rest_ns + own_ns, queued=left)

    def timetable(self, now_ns: int, *, without: Batch | None = None) -> Timetable:
        """Return the timetable of all batches but ``without``, as if all had this profile."""
        timetable = Timetable(self.staged, now_ns)
        for batch in self.ahead:
            if batch is not without:
                timetable.add(batch)
        return timetable

    def cost_ns(
        self, now_ns: int, answers: Iterable[Answer], *, next_ns: float, queued: int
    ) -> float:
        """Return the cost of a plan that leaves ``queued`` requests of this key in the queue."""
        prospect = self.looked_at(now_ns)
        return prospect.cost_ns(answers, next_ns=next_ns, queued=queued + self.others)

    def looked_at(self, now_ns: int) -> Prospect:
        """Return the prospect at the present rate; the same one while nothing changes much."""
        rate = self.rate(now_ns)
        prospect = self._prospect
        if (
            prospect is None
            or self._prospect_of is not self.profile
            or rate > self._prospect_rate * _RATE_CHANGES
            or rate * _RATE_CHANGES < self._prospect_rate
        ):
            prospect = Prospect(self.profile, max_batch_size=self.max_batch_size, rate=rate)
            self._prospect, self._prospect_of, self._prospect_rate = prospect, self.profile, rate
        return prospect

    def rate(self, now_ns: int) -> float:
        """Return the arrivals per nanosecond."""
        arrivals_ns = self._arrivals_ns
        if len(arrivals_ns) < 2:
            return 0.0
        return (len(arrivals_ns) - 1) / max(1, now_ns - arrivals_ns[0])
