"""Clockwork's choice of a batch (OSDI'20; ``infer5_scheduler`` in its code).

Work conserving. Each supported batch size has a queue of its own, which holds the requests that a
batch of that size, started now, would answer in time. The largest size whose queue holds a full
batch runs; requests in front of that batch are given up. Clockwork keeps 5 ms free before each
deadline (``margin_ms=5``) and uses the 99th percentile of the last runs as latency. Its worker
windows and its loading of weights have no counterpart here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from trims_shim.batching.ordering import DeadlineQueue
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import DropReason, Request
from trims_shim.batching.rules import Rule

__all__ = ["Clockwork"]


class Clockwork(Rule):
    """The largest supported batch that can be filled with requests that are all in time.

    ``batch_sizes``: the supported sizes; by default the powers of two, which Clockwork compiles.
    """

    def __init__(
        self,
        profile: LatencyProfile,
        *,
        max_batch_size: int,
        margin_ms: float = 0.0,
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=margin_ms)
        if batch_sizes is not None and 1 not in batch_sizes:
            raise ValueError(f"batch_sizes are {list(batch_sizes)}; 1 has to be among them")
        self._batch_sizes = None if batch_sizes is None else sorted(batch_sizes)

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self.drop_hopeless(now_ns)
        most = min(len(self.queue), self.max_batch_size)  # the heavy ones may be in front
        while most:
            size = self._supported(most)
            late = self._in_front(size, now_ns)
            if late is not None:
                for request in late:
                    self.queue.discard(request)
                self.drop(late, DropReason.SHED)
                return size
            most = size - 1
        return 0

    def _supported(self, most: int) -> int:
        """Return the largest supported size up to ``most``."""
        if self._batch_sizes is None:
            return 1 << most.bit_length() - 1
        return self._batch_sizes[bisect_right(self._batch_sizes, most) - 1]

    def _in_front(self, size: int, now_ns: int) -> list[Request] | None:
        """Return the requests that a batch of ``size`` passes over; None if it cannot be filled."""
        end_ns = now_ns + self.margin_ns + self.profile.latency_ns(size)
        late: list[Request] = []
        batch = DeadlineQueue()
        for request in self.queue:
            if request.deadline_ns < end_ns:
                late.append(request)
                continue
            batch.add(request)
            if len(batch) == size:
                return late if self._fits(batch) else None
        return None

    def _fits(self, batch: DeadlineQueue) -> bool:
        size = len(batch)
        return self.max_weight is None or batch.within_weight(size, self.max_weight) == size
