"""Early drop by goodput: give requests up only if more are answered instead.

Work conserving. With the first ``k`` requests given up, the next one's deadline allows a batch of
``b(k)`` requests, which are answered at the rate ``b / L(b)`` (``L``: latency of a batch). Early
drop over a window (Nexus, SOSP'19, section 6.3) always takes the ``k`` with the largest batch;
giving up only hopeless requests always takes ``k = 0``. This policy takes the ``k`` with the
largest ``min(b(k) / L(b(k)), a) H - k``: the answers at that rate while the backlog lasts, ``H``,
less the requests given up. No rate is worth more than ``a``, the rate at which the queue has grown:
a batch that keeps up with arrivals need not give up any. With ``d`` devices, each has to keep up
with a ``d``-th of it. While other keys wait for the device, there is no such limit.

If latencies vary, a deadline does not allow a single size. The sizes that would be in time at
several likely latencies are then compared by the number of requests expected to be in time.

If batches are padded to some sizes, one of 4 may be answered at a higher rate than one of 5: of the
sizes that a deadline allows, the one with the best rate runs.

No request is given up for one of lower priority; lower priorities only fill a batch up. Among them
requests are given up in the same way: one that is about to be late must not keep all others of its
priority out of the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import islice

from trims_shim.batching.policies.mixing import companions
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, DropReason
from trims_shim.batching.rules import Rule

__all__ = ["Goodput"]

# H, in times from a request's arrival to its deadline. From 8 to 40, violations differ by 1 % of
# themselves (docs/decisions/0009): less is better if the fixed cost is small, more if it is large.
_BACKLOG_LASTS = 18
# How many times the rate a smaller batch needs to be preferred, since profiles have errors.
_CLEARLY = 1.1
# After comparing so many values of k, skip those that might not allow a larger batch at the slowest
# latency: the result is as good, and a queue of thousands has hundreds of values.
_CLOSELY = 32


class Goodput(Rule):
    """Run the batch whose rate is best worth the requests given up for it."""

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, margin_ms: float = 0.0
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=margin_ms)
        self.has_shed = False
        """Whether the last decision gave up a request that alone would have been in time."""
        self.due_ns = 0
        """The earliest deadline of the requests that it found to fit."""
        self._efficient: list[int] = []
        """By size: the size up to it to run; a smaller one only if its rate is clearly higher."""
        self._best_rate = 0.0
        self._known: LatencyProfile | None = None

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        size = self.fitting(now_ns)
        return self._efficient[size] if size else 0

    def fitting(self, now_ns: int) -> int:
        """Give up requests that do not fit, and return how many of the rest may go."""
        profile = self.profile
        if self._known is not profile:
            self._know(profile)
        ready_ns = now_ns + self.margin_ns
        size = self.room()
        self.has_shed = False
        self.due_ns = due_ns = self.queue.deadline_ns(size)
        if self.is_in_time(size, due_ns - ready_ns):
            return size
        # At most 1: if stretches alone made all hopeless, nothing would run to correct them.
        quickest = min(self.stretches[0], 1.0)
        soonest_ns = ready_ns + int(quickest * profile.latency_ns(1))
        self.drop(self.queue.take_due(soonest_ns), DropReason.HOPELESS)
        if not self.queue:
            return 0
        size, end = 0, 0
        while size == end < self.room():
            shed, size, end = self._joined(now_ns, ready_ns, size)
            self.has_shed |= shed
        size = min(size, self.room())
        self.due_ns = self.queue.deadline_ns(size)
        return size

    def companions(
        self, now_ns: int, size: int, others: Collection[Rule]
    ) -> Sequence[tuple[Rule, int]]:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        return companions(now_ns, self, size, others)

    def is_in_time(self, size: int, budget_ns: int) -> bool:
        """Whether a batch of ``size`` is done within ``budget_ns`` even at the largest stretch."""
        return budget_ns >= self.stretches[-1] * self.profile.latency_ns(size)

    @property
    def servers(self) -> int:
        """How many batches of the queue can run at the same time."""
        return self.devices

    def _know(self, profile: LatencyProfile) -> None:
        """Derive from a new profile what each decision reads."""
        self._known = profile
        self._efficient = _most_efficient(profile)
        self._best_rate = profile.best_rate()

    def _joined(self, now_ns: int, ready_ns: int, start: int) -> tuple[bool, int, int]:
        """Let requests of the next priority join the first ``start``.

        Returns whether some of them were given up, how many requests go in total, and how many are
        queued down to this priority.
        """
        end = self.queue.peers(start)
        shed, size = self._best(now_ns, ready_ns, start, end)
        self.drop(self.queue.cut(start, start + shed), DropReason.SHED)
        return shed > 0, size, end - shed

    def _best(self, now_ns: int, ready_ns: int, start: int, end: int) -> tuple[int, int]:
        """Return how many requests from ``start`` on to give up, and how many go in total.

        The requests from ``start`` to ``end`` have one priority. The first ``start`` go too, and
        must stay in time.
        """
        profile, first, peers = self.profile, self.queue[start], end - start
        due_ns = [request.deadline_ns for request in islice(self.queue, start, end)]
        needed = peers / max(1, now_ns - first.arrival_ns) / self.servers
        if self.has_rivals:  # while this batch runs, other keys wait
            needed = float("inf")
        lasts_ns = _BACKLOG_LASTS * (first.deadline_ns - first.arrival_ns)
        # Rates are by the clock, like arrivals, not by the profile.
        stretch_mean = sum(self.stretches) / len(self.stretches)
        most = min(self._best_rate / stretch_mean, needed) * lasts_ns
        before_ns = self._budget_ns(start, ready_ns)
        largest = profile.largest_within(before_ns, self.max_batch_size)
        # A request that is not hopeless may go alone, though that is a risk.
        best, best_shed, best_size = (0.0, 0, start) if start else (float("-inf"), 0, 1)
        least = 0 if start else 1
        larger_ns = surely = compared = 0
        for shed, deadline_ns in enumerate(due_ns):
            if end - shed <= surely or most - shed <= best:
                break
            if shed and due_ns[shed - 1] == NEVER_NS:
                break  # whoever has no deadline waits until the weights of the others fit
            if deadline_ns < larger_ns:
                continue  # without the one before it, the batch could be no larger
            compared += 1
            limit = self._limit(start, start + shed, end)
            is_enough, seen = False, start
            for stretch in self.stretches:
                budget_ns = min((deadline_ns - ready_ns) / stretch, before_ns)
                surely = profile.largest_within(budget_ns, limit) or least
                size = self._efficient[surely]
                if size == seen or size < start:
                    continue
                seen = size
                in_time = self._expected(due_ns, shed, size - start, ready_ns, size)
                rate = in_time / (stretch_mean * profile.latency_ns(size))
                worth = min(rate, needed) * lasts_ns - shed - (size - start - in_time)
                if worth > best:
                    best, best_shed, best_size = worth, shed, size
                is_enough = rate >= needed and in_time == size - start
            if is_enough or surely == min(end - shed, largest):
                break
            if not shed and surely > start and self._is_overtaken(start, surely, ready_ns):
                break
            # Without a heavy request there may be room for more, whatever the deadlines are.
            least_ns = profile.beyond_ns(surely) if surely < limit else 0
            stretch = self.stretches[0 if compared < _CLOSELY else -1]
            larger_ns = ready_ns + int(stretch * least_ns)
        return best_shed, best_size

    def _budget_ns(self, start: int, ready_ns: int) -> float:
        """Return the time that a batch may take if the first ``start`` must be in time."""
        if not start:
            return float("inf")
        return (self.queue.deadline_ns(start) - ready_ns) / self.stretches[-1]

    def _limit(self, start: int, first: int, end: int) -> int:
        """Return how many fit in one batch of the first ``start`` and ``first`` to ``end``."""
        count = min(end - first, self.max_batch_size - start)
        if self.max_weight is None:
            return start + count
        left = self.max_weight - sum([request.weight for request in self.queue[:start]])
        if start and self.queue[first].weight > left:
            return start
        return start + self.queue.within_weight(count, left, first)

    def _expected(
        self, due_ns: list[int], start: int, count: int, ready_ns: int, size: int
    ) -> float:
        """Return how many of ``count`` from ``start`` on should be in time in this batch."""
        latency_ns = self.profile.latency_ns(size)
        end = start + count
        in_time = 0
        for stretch in self.stretches:
            in_time += end - bisect_left(due_ns, ready_ns + stretch * latency_ns, start, end)
        return in_time / len(self.stretches)

    def _is_overtaken(self, start: int, size: int, ready_ns: int) -> bool:
        """Whether the request at ``start`` overtook others that all have time after its batch.

        A short deadline of its own, not a backlog, then limits the batch.
        """
        queue = self.queue
        rest = len(queue) - size
        if not 0 < rest <= self._limit(0, size, len(queue)):
            return False
        if queue[size].number > queue[start].number:
            return False
        then_ns = ready_ns + int(self.stretches[-1] * self.profile.latency_ns(size))
        return self.is_in_time(rest, queue[size].deadline_ns - then_ns)


def _most_efficient(profile: LatencyProfile) -> list[int]:
    best = 1
    sizes = [0]
    for size in range(1, profile.max_batch_size + 1):
        # Rates compared without division.
        if size * profile.latency_ns(best) >= best * profile.latency_ns(size):
            best = size
        is_worse = size * profile.latency_ns(best) * _CLEARLY < best * profile.latency_ns(size)
        sizes.append(best if is_worse else size)
    return sizes
