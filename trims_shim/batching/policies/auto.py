"""The default policy: early drop by goodput, waiting that pays, and margins that are measured.

What is given up and how many go is :class:`~trims_shim.batching.policies.goodput.Goodput`'s. Here
is when: a batch that could still grow waits for a limited time, in which the device idles. As with
skis that are rented or bought (Karp, 1990; acknowledgements of TCP, Dooly et al., 1998), not longer
than what the next request could save by joining: the device time ``L(n) + L(1) - L(n + 1)``, which
is the fixed cost of a batch. Where there is device time to spare, waiting is free, and takes up to
half of the time that the first request has, if a full batch saves and takes as much. That is where
even twice the arrivals of the worst of the last batches, coming while this one runs, would be
answered in time after it.

Three things bound both. Waiting ends while there is time for a batch of one more. It happens only
where another one did come in time lately when as many were queued: a caller that waits for each
answer before it asks again never waits for company. And not while another key waits for the device.

No time is certain. What batches really took, over what their profile says, is kept as quantiles.
What goes is chosen by how many are expected to be in time, from the quickest of them to the
slowest; hopeless is only what would be late even with the quickest, because a late answer costs no
more than none. Waiting that saves device time ends by what few batches exceed, free waiting by what
hardly any does, and both by how late timers have come.
"""

from __future__ import annotations

from collections import deque

from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.policies.recent import Recent
from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Finished, Request

__all__ = ["Auto"]

# Measured on a grid of loads, arrivals, profiles and jitters: docs/decisions/0009. All of them are
# flat around these values.
_REMEMBERED = 256  # enough for a 99th percentile
_SIZE_QUANTILES = (0.3, 0.5, 0.7)  # with tails up to .9 the same where times vary little
_WAIT_QUANTILE = 0.9
_FREE_WAIT_QUANTILE = 0.99
_WORST_TIMES = 2  # 1.5 saves more device time, and misses more bursts
_FREE_WAIT_SHARE = 0.5
_COMPANY_WORTH_IT = 0.1  # .25 costs violations at low loads
_COMPANY_WEIGHT = 1 / 32


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
        self._wait_stretch = self._free_wait_stretch = 1.0
        self._wait_margin_ns = 0
        self._savings_ns: list[int] = []
        """What one more saves by joining, by the number of those queued."""
        self._worst_pace = 0.0
        self._free_wait_ns: list[int] = []
        self._company: list[float] = []
        """How often another one came in time, by the number of those queued."""
        self._chances: list[int] = []
        self._expecting = 0
        self._expected_by_ns = 0

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        size = self.fitting(now_ns)
        if not size:
            return 0
        if not (self.has_shed or self.has_rivals or self.is_full(size)):
            start_ns = self._start_ns(size)
            if start_ns > now_ns:
                self._expecting, self._expected_by_ns = size, start_ns
                if self._company[size] >= _COMPANY_WORTH_IT:
                    self.wake_ns = start_ns
                    return 0
            elif self._expecting == size:
                self._learn_company(came=False)
        return self.efficient(size)

    def on_arrival(self, now_ns: int, request: Request) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if self._expecting:
            self._learn_company(came=now_ns <= self._expected_by_ns)

    def on_wake(self, lateness_ns: int) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._lateness_ns.add(lateness_ns)
        self._wait_margin_ns = int(self._lateness_ns.quantile(_FREE_WAIT_QUANTILE))

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if self._expecting:  # who comes from now on may do so because of this answer
            self._learn_company(came=False)
        size, took_ns = len(finished.batch), now_ns - finished.started_ns
        if not finished.is_typical or size > self.profile.max_batch_size:
            return
        if self._known is not self.profile:
            self._know(self.profile)
        self._durations_ns.append((size, took_ns))
        self._taken.add(took_ns / self.profile.latency_ns(size))
        self._learn_stretches()
        self._paces.add(len(self.queue) / max(1, took_ns))
        self._worst_pace = self._paces.quantile(_FREE_WAIT_QUANTILE)

    def _start_ns(self, size: int) -> int:
        """Until when a batch of ``size`` waits for one more."""
        deadline_ns = self.queue.deadline_ns(size)
        if deadline_ns == NEVER_NS:
            return 0
        arrival_ns = self.queue[0].arrival_ns
        next_ns = self.profile.latency_ns(size + 1)
        due_ns = deadline_ns - self.margin_ns - self._wait_margin_ns
        wait_ns = self._savings_ns[size]
        start_ns = min(due_ns - int(self._wait_stretch * next_ns), arrival_ns + wait_ns)
        last_ns = due_ns - int(self._free_wait_stretch * next_ns)
        free_ns = min(self._free_wait_ns[size], int(_FREE_WAIT_SHARE * (last_ns - arrival_ns)))
        if free_ns > wait_ns and self._has_time_to_spare(size, deadline_ns - arrival_ns):
            start_ns = max(start_ns, min(last_ns, arrival_ns + free_ns))
        return start_ns

    def _has_time_to_spare(self, size: int, slo_ns: int) -> bool:
        """Whether those that come while ``size`` run are few enough to be in time after them."""
        latency_ns = self.profile.latency_ns
        duration_ns = self._free_wait_stretch * latency_ns(size)
        arrivals = max(1, int(_WORST_TIMES * self._worst_pace * duration_ns) + 1)
        if arrivals > self.max_batch_size:
            return False
        return duration_ns + self._free_wait_stretch * latency_ns(arrivals) <= slo_ns

    def _learn_company(self, *, came: bool) -> None:
        size, self._expecting = self._expecting, 0
        self._chances[size] += 1
        weight = max(_COMPANY_WEIGHT, 1 / self._chances[size])
        self._company[size] += weight * (came - self._company[size])

    def _know(self, profile: LatencyProfile) -> None:
        super()._know(profile)
        latency_ns, full = profile.latency_ns, self.max_batch_size
        sizes = range(1, profile.max_batch_size)
        savings_ns = [latency_ns(size) + latency_ns(1) - latency_ns(size + 1) for size in sizes]
        self._savings_ns = [0, *savings_ns, 0]
        in_turns_ns = [full * latency_ns(size) // size for size in sizes]
        full_ns = latency_ns(full)
        self._free_wait_ns = [0, *(min(each - full_ns, full_ns) for each in in_turns_ns), 0]
        unknown = profile.max_batch_size + 1 - len(self._company)
        self._company += [0.0] * unknown
        self._chances += [0] * unknown
        # Past ones are seen as they would have been with the new one.
        self._taken.clear()
        for size, took_ns in self._durations_ns:
            if size <= profile.max_batch_size:
                self._taken.add(took_ns / latency_ns(size))
        self._learn_stretches()

    def _learn_stretches(self) -> None:
        if not self._taken:
            self.stretches, self._wait_stretch, self._free_wait_stretch = (1.0,), 1.0, 1.0
            return
        quantile = self._taken.quantile
        self.stretches = [quantile(share) for share in _SIZE_QUANTILES]
        if self.stretches[0] == self.stretches[-1]:
            del self.stretches[1:]
        self._wait_stretch = quantile(_WAIT_QUANTILE)
        self._free_wait_stretch = quantile(_FREE_WAIT_QUANTILE)
