"""Early drop by goodput: give requests up only where those that are answered instead are more.

Work conserving. With ``k`` first requests given up, the next one's deadline allows a batch of
``b(k)``, which is answered at the rate ``b / L(b)`` (``L``: latency of a batch). Early drop over a
window (Nexus, SOSP'19, section 6.3) takes the ``k`` with the largest batch whatever it costs;
giving up only what is hopeless takes ``k = 0`` whatever it costs. Here it is the ``k`` with the
largest ``min(b(k) / L(b(k)), a) H - k``: what the better rate brings for as long as there is a
backlog, ``H``, less what is given up for it. No rate is worth more than ``a``, that at which the
queue has grown: a batch that keeps up with arrivals needs to give up nothing, and with ``d``
devices, each of them has to keep up with a ``d``-th of it. With other keys that wait for the
device, there is no such limit.

Where batches do not always take the same, there is no one size that a deadline allows. Then each of
the sizes that would be in time if it took this or that is compared by how many of it are expected
to be in time.

Where batches are padded to some sizes, one of 4 may be answered at a higher rate than one of 5: of
the sizes that a deadline allows, the one with the best rate runs.

No request is given up for the sake of those of lower priority; these only fill a batch up. Which of
them is found in the same way: what is about to be late must not keep all others of its priority
from going along.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import islice

from trims_shim.batching.policies.mixing import companions
from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.protocol import DropReason
from trims_shim.batching.rules import Rule

__all__ = ["Goodput"]

# H, in distances from a request's arrival to its deadline. From 8 to 40, violations differ by 1 %
# of themselves (docs/decisions/0009): fewer are better where a fixed cost is small, more where it
# is large.
_BACKLOG_LASTS = 18
# A smaller batch has to be answered at so much of a higher rate, since profiles are measured.
_CLEARLY = 1.1
# Ways that are compared before only those are that are sure to be larger: as good as all of them,
# of which a queue of thousands has hundreds.
_CLOSELY = 32


class Goodput(Rule):
    """The batch with the highest rate that is worth what has to be given up for it."""

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, margin_ms: float = 0.0
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=margin_ms)
        self.has_shed = False
        """Whether the last decision gave up a request that alone would have been in time."""
        self.due_ns = 0
        """The earliest deadline of what it found fitting."""
        self._efficient: list[int] = []
        """By size: of the sizes up to it, the one that is answered at the highest rate."""
        self._best_rate = 0.0
        self._known: LatencyProfile | None = None

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        size = self.fitting(now_ns)
        return self._efficient[size] if size else 0

    def fitting(self, now_ns: int) -> int:
        """Give up what does not fit, and return how many of the rest may go."""
        profile = self.profile
        if self._known is not profile:
            self._know(profile)
        ready_ns = now_ns + self.margin_ns
        size = self.room()
        self.has_shed = False
        self.due_ns = due_ns = self.queue.deadline_ns(size)
        if self.is_in_time(size, due_ns - ready_ns):
            return size
        # Never by stretches alone: where all is given up nothing runs, and they stay as they are.
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
        """Whether a batch of ``size`` is done after so long, even if it is as slow as any."""
        return budget_ns >= self.stretches[-1] * self.profile.latency_ns(size)

    @property
    def servers(self) -> int:
        """How many such batches the queue is served by at the same time."""
        return self.devices

    def _know(self, profile: LatencyProfile) -> None:
        """``profile`` is new: make what is read from it at each decision."""
        self._known = profile
        self._efficient = _most_efficient(profile)
        self._best_rate = profile.best_rate()

    def _joined(self, now_ns: int, ready_ns: int, start: int) -> tuple[bool, int, int]:
        """Let those of the next priority go along with the first ``start``: whether some of them
        were given up, how many go in all, and how many there are down to this priority."""
        end = self.queue.peers(start)
        shed, size = self._best(now_ns, ready_ns, start, end)
        self.drop(self.queue.cut(start, start + shed), DropReason.SHED)
        return shed > 0, size, end - shed

    def _best(self, now_ns: int, ready_ns: int, start: int, end: int) -> tuple[int, int]:
        """How many of those from ``start`` up to ``end``, which have one priority, to give up, and
        how many go then; with the first ``start``, for whom they must not be too many.
        """
        profile, first, peers = self.profile, self.queue[start], end - start
        due_ns = [request.deadline_ns for request in islice(self.queue, start, end)]
        needed = peers / max(1, now_ns - first.arrival_ns) / self.servers
        if self.has_rivals:  # while this runs, others do not
            needed = float("inf")
        lasts_ns = _BACKLOG_LASTS * (first.deadline_ns - first.arrival_ns)
        # By the clock, as arrivals are counted, not by the profile.
        stretch_mean = sum(self.stretches) / len(self.stretches)
        most = min(self._best_rate / stretch_mean, needed) * lasts_ns
        before_ns = self._budget_ns(start, ready_ns)
        largest = profile.largest_within(before_ns, self.max_batch_size)
        # What is not hopeless may go alone, though it is a risk.
        best, best_shed, best_size = (0.0, 0, start) if start else (float("-inf"), 0, 1)
        least = 0 if start else 1
        larger_ns = surely = compared = 0
        for shed, deadline_ns in enumerate(due_ns):
            if end - shed <= surely or most - shed <= best:
                break
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
            # Behind one that weighs much, more may find room, whatever their deadline is.
            least_ns = profile.beyond_ns(surely) if surely < limit else 0
            stretch = self.stretches[0 if compared < _CLOSELY else -1]
            larger_ns = ready_ns + int(stretch * least_ns)
        return best_shed, best_size

    def _budget_ns(self, start: int, ready_ns: int) -> float:
        """What a batch may take so that the first ``start`` are in time even if it is slow."""
        if not start:
            return float("inf")
        return (self.queue.deadline_ns(start) - ready_ns) / self.stretches[-1]

    def _limit(self, start: int, first: int, end: int) -> int:
        """How many one batch can hold: the first ``start``, and those from ``first`` to ``end``."""
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
        """How many of ``count`` from ``start`` on will be in time in a batch of ``size``."""
        latency_ns = self.profile.latency_ns(size)
        end = start + count
        in_time = 0
        for stretch in self.stretches:
            in_time += end - bisect_left(due_ns, ready_ns + stretch * latency_ns, start, end)
        return in_time / len(self.stretches)

    def _is_overtaken(self, start: int, size: int, ready_ns: int) -> bool:
        """Whether the one at ``start`` has a short deadline of its own, and all who do not go have
        time after it.

        Then it is no sign of a backlog.
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
