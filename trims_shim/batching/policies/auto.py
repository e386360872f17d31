"""The default policy: early drop by goodput, waiting that pays, and margins that are measured.

What is given up and how many go is :class:`~trims_shim.batching.policies.goodput.Goodput`'s. Here
is when.

All that starting at once can cost in answers is that those who come while the batch runs find the
device busy. Where as many as came at worst of late would be answered in time after it, waiting
cannot lower violations. Then it starts at once, however few there are, unless another one is
expected so soon that all are answered sooner on average
(:class:`~trims_shim.batching.policies.company.Company`). What is rare is not taken to come
together: of the batch and of the next one, the longer may be slow, and the other takes what is
usual. The worst of the last batches is forgotten only after as many others, so this does not change
with each.

Else a batch that could still grow waits for a limited time, in which the device idles. As with
skis that are rented or bought (Karp, 1990; acknowledgements of TCP, Dooly et al., 1998), not longer
than what the next request could save by joining: the device time ``L(n) + L(1) - L(n + 1)``, which
is the fixed cost of a batch. And only where another one did come in time lately when as many were
queued.

Two things bound both. Waiting ends while there is time for a batch of one more. And it happens not
while another key waits for the device.

No time is certain. What batches really took, over what their profile says, is kept as quantiles.
What goes is chosen by how many are expected to be in time, from the quickest of them to the
slowest; hopeless is only what would be late even with the quickest, because a late answer costs no
more than none. Waiting ends by what few batches exceed, and by how late timers have come.
"""

from __future__ import annotations

from collections import deque

from trims_shim.batching.policies.company import Company
from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.policies.recent import Recent
from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Finished, Request

__all__ = ["Auto"]

# Measured on a grid of loads, arrivals, profiles and jitters: docs/decisions/0009. All of them are
# flat around these values.
_REMEMBERED = 256  # enough for a 99th percentile
_SIZE_QUANTILES = (0.3, 0.5, 0.7)  # with tails up to .9 the same where times vary little
_USUAL_QUANTILE = 0.5
_WAIT_QUANTILE = 0.9
_WORST_QUANTILE = 0.99
_COMPANY_WORTH_IT = 0.1  # .25 costs violations at low loads
_NO_SLO_NS = NEVER_NS // 2
"""Beyond it there is no deadline."""


class Auto(Goodput):
    """Run what is worth running, when waiting for more is not worth it any longer."""

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, margin_ms: float = 0.0
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=margin_ms)
        self._taken = Recent(_REMEMBERED)
        self._lateness_ns = Recent(_REMEMBERED)
        self._paces = Recent(_REMEMBERED)
        """Arrivals in a nanosecond while a batch ran."""
        self._durations_ns: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Sizes and times of what the stretches are made of."""
        self._usual_stretch = self._wait_stretch = self._worst_stretch = 1.0
        self._wait_margin_ns = 0
        self._worst_pace = 0.0
        self._company = Company()

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        size = self.fitting(now_ns)
        if not size:
            return 0
        if not (self.has_shed or self.has_rivals or self.is_full(size)):
            start_ns = self._start_ns(size, now_ns)
            if start_ns > now_ns:
                self.wake_ns = start_ns
                return 0
        return self.efficient(size)

    def on_arrival(self, now_ns: int, request: Request) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._company.came(now_ns)

    def on_wake(self, lateness_ns: int) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._lateness_ns.add(lateness_ns)
        self._wait_margin_ns = int(self._lateness_ns.quantile(_WORST_QUANTILE))

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._company.answered(len(self.queue))
        size, took_ns = len(finished.batch), now_ns - finished.started_ns
        if not finished.is_typical or size > self.profile.max_batch_size:
            return
        if self._known is not self.profile:
            self._know(self.profile)
        self._durations_ns.append((size, took_ns))
        self._taken.add(took_ns / self.profile.latency_ns(size))
        self._learn_stretches()
        self._paces.add(len(self.queue) / max(1, took_ns))
        self._worst_pace = self._paces.quantile(_WORST_QUANTILE)

    def _start_ns(self, size: int, now_ns: int) -> int:
        """Until when a batch of ``size`` waits for one more."""
        company, arrival_ns = self._company, self.queue[0].arrival_ns
        since_ns, saving_ns = company.expect(size, now_ns), company.savings_ns[size]
        due_ns = self.queue.deadline_ns(size) - self.margin_ns
        next_ns = int(self._wait_stretch * self.profile.latency_ns(size + 1))
        last_ns = due_ns - self._wait_margin_ns - next_ns
        if self._spares_the_next(size, due_ns - arrival_ns):
            company.until_ns = min(last_ns, since_ns + saving_ns)
            return min(last_ns, since_ns + company.patience_ns[size])
        company.until_ns = min(last_ns, arrival_ns + saving_ns)
        return company.until_ns if company.shares[size] >= _COMPANY_WORTH_IT else 0

    def _spares_the_next(self, size: int, slo_ns: int) -> bool:
        """Whether those that come while ``size`` run are few enough to be in time after them."""
        latency_ns, usual = self.profile.latency_ns, self._usual_stretch
        duration_ns = latency_ns(size)
        arrivals = int(self._worst_pace * usual * duration_ns) + 1
        if arrivals > self.max_batch_size:
            return slo_ns > _NO_SLO_NS
        next_ns = latency_ns(arrivals)
        longer_ns = max(duration_ns, next_ns)
        slow_ns = (self._worst_stretch - usual) * longer_ns
        return usual * (duration_ns + next_ns) + slow_ns <= slo_ns

    def _know(self, profile: LatencyProfile) -> None:
        super()._know(profile)
        self._company.know(profile)
        # Past ones are seen as they would have been with the new one.
        self._taken.clear()
        for size, took_ns in self._durations_ns:
            if size <= profile.max_batch_size:
                self._taken.add(took_ns / profile.latency_ns(size))
        self._learn_stretches()

    def _learn_stretches(self) -> None:
        if not self._taken:
            self.stretches = (1.0,)
            self._usual_stretch = self._wait_stretch = self._worst_stretch = 1.0
            return
        quantile = self._taken.quantile
        self.stretches = [quantile(share) for share in _SIZE_QUANTILES]
        if self.stretches[0] == self.stretches[-1]:
            del self.stretches[1:]
        self._usual_stretch = quantile(_USUAL_QUANTILE)
        self._wait_stretch = quantile(_WAIT_QUANTILE)
        self._worst_stretch = quantile(_WORST_QUANTILE)
