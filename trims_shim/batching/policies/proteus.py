"""Adaptive batching of Proteus (ASPLOS'24): wait as long as the first request allows.

Proactive and not work conserving. With ``q`` requests queued and the device free, run them if they
are a full batch. Otherwise wait for request ``q + 1`` until ``D(1) - L(q + 1)``, the last moment at
which a batch with it would be in time for the first request (``D``: deadline, ``L``: latency of a
batch), and then run the ``q``. Batches are few and large, with no slack: a late timer, or a batch
slower than its profile, makes the first request late. So by default the wait ends earlier by the
recent lateness of timers and batches, which is 0 if times are exact. ``margin_ms=0`` is always the
paper's policy.

The paper does not say what happens to requests that became late while the device was busy; here
``drop`` decides. The paper has one model for each device; here the policy does not wait while
another key waits for a device.
"""

from __future__ import annotations

from typing import Literal, get_args

from trims_shim.batching.policies.early_drop import EarlyDrop
from trims_shim.batching.policies.recent import Recent
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Finished

__all__ = ["LateRequests", "Proteus"]

LateRequests = Literal["window", "head", "none"]

# Enough for a 99th percentile: one answer in a hundred may be late for want of a margin.
_REMEMBERED = 256
_QUANTILE = 0.99


class Proteus(EarlyDrop):
    """Wait for one more request until the last moment at which there would be time for it.

    ``margin_ms`` ends waits so much earlier, for late timers and batches; None by what they are
    late. Requests are given up for their deadlines alone.

    ``drop``: the requests to give up if not all in the queue can be in time. ``"window"``: the
    first ones that prevent a larger batch, as in :class:`EarlyDrop`. ``"head"``: only hopeless
    ones, and the batch is as small as the first request needs; fewer violations at low load, but a
    collapse at high load, since small batches never catch up. ``"none"``: none; late requests are
    served.
    """

    def __init__(
        self,
        profile: LatencyProfile,
        *,
        max_batch_size: int,
        margin_ms: float | None = None,
        drop: LateRequests = "window",
    ) -> None:
        fixed_ms = 0.0 if margin_ms is None else margin_ms
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=fixed_ms)
        choices = {"window": self.window, "head": self._as_head_needs, "none": self._all}
        if drop not in choices:
            raise ValueError(f"drop is {drop!r}; it has to be one of {get_args(LateRequests)}")
        self._candidates = choices[drop]
        self._is_learning = margin_ms is None
        self._lateness_ns = Recent(_REMEMBERED)
        self._overruns_ns = Recent(_REMEMBERED)
        self._overruns_of = profile
        # What has waited is not given up for a timer that is late by less than the margin.
        self._wait_margin_ns, self.margin_ns = self.margin_ns, 0

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        size = self._candidates(now_ns)
        if not size or self.has_shed or self.has_rivals or self.is_full(size):
            return size
        deadline_ns = self.queue.deadline_ns(size)
        last_ns = deadline_ns - self.profile.or_one_more_ns(size) - self._wait_margin_ns
        if now_ns >= last_ns or deadline_ns == NEVER_NS:
            return size
        self.wake_ns = last_ns
        return 0

    def on_wake(self, lateness_ns: int) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._lateness_ns.add(lateness_ns)
        self._learn()

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if self._overruns_of is not self.profile:
            self._overruns_of = self.profile
            self._overruns_ns.replace(())
        size = len(finished.batch)
        if finished.is_typical and size <= self.profile.max_batch_size:
            took_ns = now_ns - finished.started_ns
            self._overruns_ns.add(took_ns - self.profile.latency_ns(size))
            self._learn()

    def _learn(self) -> None:
        if self._is_learning:
            overrun_ns = max(0.0, self._overruns_ns.quantile(_QUANTILE))
            self._wait_margin_ns = int(overrun_ns + self._lateness_ns.quantile(_QUANTILE))

    def _as_head_needs(self, now_ns: int) -> int:
        self.drop_hopeless(now_ns)
        size = self.room()
        while size and self.queue.deadline_ns(size) < now_ns + self.profile.latency_ns(size):
            size -= 1
        return size

    def _all(self, now_ns: int) -> int:
        return self.room()
