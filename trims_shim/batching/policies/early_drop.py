"""Early drop over a sliding window (Nexus, SOSP'19, section 6.3; its code's default policy).

Work conserving. Requests that would force a batch too small to keep up are given up, so that the
requests behind them are answered in time. Starting from the largest batch that the queue could
fill, the window drops requests at the head that cannot wait for the end of that batch, and the
batch shrinks with the queue.

Nexus has no priorities. Here no request is given up for one of lower priority: the window slides
over each priority separately, and lower priorities only fill the batch up.
"""

from __future__ import annotations

from trims_shim.batching.protocol import DropReason, Request
from trims_shim.batching.rules import Rule

__all__ = ["EarlyDrop"]


class EarlyDrop(Rule):
    """The largest batch that is all in time, after giving up heads that prevent it."""

    has_shed = False
    """Whether :meth:`window` last gave up a request that alone would have been in time. If so, the
    batch has to start now: otherwise the request was given up for nothing."""

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        return self.window(now_ns)

    def window(self, now_ns: int) -> int:
        """Drop requests that do not fit, and return how many of the rest go."""
        ready_ns = now_ns + self.margin_ns
        size = self.room()
        self.has_shed = False
        if self.queue.deadline_ns(size) >= ready_ns + self.profile.latency_ns(size):
            return size
        self.drop_hopeless(now_ns)
        shed: list[Request] = []
        size, limit = 0, self.room()
        while size < limit:
            size = self._slide(size, limit, ready_ns, shed)
            budget_ns = self.queue.deadline_ns(size) - ready_ns
            limit = min(self.room(), self.profile.largest_within(budget_ns, limit))
        self.drop(shed, DropReason.SHED)
        self.has_shed = bool(shed)
        return limit

    def _slide(self, size: int, limit: int, ready_ns: int, shed: list[Request]) -> int:
        """Return the size of a batch of ``size``, enlarged from the next priority to ``limit``."""
        queue, latency_ns = self.queue, self.profile.latency_ns
        start, end = size, queue.peers(size)
        while start < end:
            fill = min(limit, size + end - start)
            if queue[start].deadline_ns >= ready_ns + latency_ns(fill):
                break
            start += 1
        shed += queue.cut(size, start)
        return min(limit, size + end - start)
