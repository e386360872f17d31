"""The default policy: early drop by goodput, waits that pay, and measured margins.

:class:`~trims_shim.batching.policies.goodput.Goodput` decides which requests are given up and how
many run. This module decides when.

Starting a batch early can cost answers in one way only: requests that arrive while it runs find the
device busy. If the next batch could still answer the largest recent number of such arrivals (a high
quantile, which does not change with each batch) in time, waiting cannot reduce violations. The
batch then starts at once, whatever its size, unless the next request is expected so soon that
waiting for it lowers the mean latency (:class:`~trims_shim.batching.policies.company.Company`).
Rare delays are not assumed to coincide: of both batches the longer may be slow, and the other takes
its usual time.

Otherwise a batch that could still grow waits for a limited time while the device idles. As in ski
rental (Karp, 1990; for TCP acknowledgements Dooly et al., 1998), it waits no longer than the device
time that the next request could save by joining: ``L(n) + L(1) - L(n + 1)`` (``L``: latency of a
batch), the fixed cost of a batch. And it waits only if, with as many requests queued, another one
recently did arrive in time.

Two rules bound both kinds of waiting. A wait ends while there is still time for a batch with one
more request. And no batch waits while another key waits for the device.

Latencies vary. The ratios of batch durations to the profile and the present tempo
(:class:`~trims_shim.batching.policies.tempo.Tempo`) are kept as quantiles. Sizes are chosen by how
many requests are expected to be in time over these quantiles. A request is hopeless only if it
would be late even at the fastest one, because a late answer costs no more than none. Waits end
early enough for the 90th percentile, and for the recent lateness of timers.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from trims_shim.batching.policies.company import Company
from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.policies.recent import Recent
from trims_shim.batching.policies.tempo import Tempo
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Finished, Request

__all__ = ["Auto"]

# Measured on a grid of loads, arrivals, profiles and jitters: docs/decisions/0009. All are flat
# around these values.
_REMEMBERED = 256  # enough for a 99th percentile
_AS_BEFORE = 0.05  # of a latency: past batches are not compared anew for a smaller change
_WORST_QUANTILE = 0.99
_QUANTILES = (
    *(1 / 6, 0.5, 5 / 6),  # for sizes: the middles of three equal shares
    0.9,  # for the end of waiting
    _WORST_QUANTILE,
)
_SURE = 64  # after so many batches a profile is reliable, and changes only with the device
_CHANGED = 1.7
_COMPANY_WORTH_IT = 0.1  # .25 costs violations at low loads
_NO_SLO_NS = NEVER_NS // 2
"""A longer objective counts as none."""


class Auto(Goodput):
    """Run the batch that :class:`Goodput` chooses, once waiting for more no longer pays."""

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, margin_ms: float = 0.0
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size, margin_ms=margin_ms)
        self._taken = Recent(_REMEMBERED)
        self._lateness_ns = Recent(_REMEMBERED)
        self._paces = Recent(_REMEMBERED)
        """Requests queued at the end of a batch, over its duration in nanoseconds."""
        self._weight_paces = Recent(_REMEMBERED)
        """The same with their weights, if the weight of batches is limited."""
        self._durations_ns: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Sizes and durations of the batches from which the stretches are computed."""
        self._expected_ns: dict[int, int] = {}
        """By size: the latency in the profile that these batches were last compared with."""
        self._tempo = Tempo()
        self._usual_stretch = self._wait_stretch = self._worst_stretch = 1.0
        self._wait_margin_ns = 0
        self._worst_pace = self._worst_weight_pace = 0.0
        self._times_ns: dict[int, tuple[float, int]] = {}
        """Results of :meth:`_learn_times` by size; cleared when anything else is learned."""
        self._company = Company()
        self._waits_for_company = True
        """Whether to wait also where that cannot lower violations."""

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
        return self._efficient[size]

    def on_arrival(self, now_ns: int, request: Request) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._company.came(now_ns)

    def on_wake(self, lateness_ns: int) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._lateness_ns.add(lateness_ns)
        self._wait_margin_ns = int(self._lateness_ns.quantile(_WORST_QUANTILE))

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        queued, profile = len(self.queue), self.profile
        self._company.answered(queued)
        size, took_ns = len(finished.batch), max(1, now_ns - finished.started_ns)
        if not finished.is_typical or size > profile.max_batch_size:
            return
        if self._known is not profile:
            self._know(profile)
        self._durations_ns.append((size, took_ns))
        expected_ns = profile.latency_ns(size)
        self._expected_ns.setdefault(size, expected_ns)
        ratio = took_ns / expected_ns
        has_news = self._taken.add(ratio / self._tempo.now)
        if self._tempo.add(ratio) or has_news:
            self._learn_stretches()
        self._worst_pace = self._worst(self._paces, queued / took_ns, self._worst_pace)
        if self.max_weight is not None:
            pace = sum(request.weight for request in self.queue) / took_ns
            self._worst_weight_pace = self._worst(self._weight_paces, pace, self._worst_weight_pace)

    def _worst(self, paces: Recent, pace: float, worst: float) -> float:
        """Add a pace; return the worst one, which was ``worst`` before."""
        if not paces.add(pace):
            return worst
        now = paces.quantile(_WORST_QUANTILE)
        if now != worst:
            self._times_ns.clear()
        return now

    def _start_ns(self, size: int, now_ns: int) -> int:
        """Return until when a batch of ``size`` waits for one more request."""
        company, arrival_ns = self._company, self.queue[0].arrival_ns
        since_ns = company.expect(size, now_ns)
        due_ns = self.due_ns - self.margin_ns
        needed_ns, next_ns = self._times_ns.get(size) or self._learn_times(size)
        last_ns = due_ns - self._wait_margin_ns - next_ns
        if needed_ns <= due_ns - arrival_ns:
            if company.until_ns > last_ns:
                company.until_ns = last_ns
            patience_ns = company.patience_ns[size] if self._waits_for_company else 0
            return min(last_ns, since_ns + patience_ns) if patience_ns else 0
        company.until_ns = min(last_ns, arrival_ns + company.savings_ns[size])
        return company.until_ns if company.shares[size] >= _COMPANY_WORTH_IT else 0

    def _learn_times(self, size: int) -> tuple[float, int]:
        """Return two times for a batch of ``size``.

        The objective that requests which arrive while it runs need to be in time after it, and how
        long a batch with one request more takes.
        """
        latency_ns, usual = self.profile.latency_ns, self._usual_stretch
        duration_ns = latency_ns(size)
        arrivals = int(self._worst_pace * usual * duration_ns) + 1
        needed_ns: float = _NO_SLO_NS
        if arrivals <= self.max_batch_size and self._weighs_little(arrivals):
            after_ns = latency_ns(arrivals)
            slow_ns = (self._worst_stretch - usual) * max(duration_ns, after_ns)
            needed_ns = usual * (duration_ns + after_ns) + slow_ns
        times_ns = needed_ns, int(self._wait_stretch * self.profile.or_one_more_ns(size))
        self._times_ns[size] = times_ns
        return times_ns

    def _weighs_little(self, arrivals: int) -> bool:
        """Whether one batch can hold ``arrivals`` requests of the largest recent weight."""
        if self.max_weight is None or not self._worst_pace:
            return True
        weight = self._worst_weight_pace / self._worst_pace
        return arrivals * weight <= self.max_weight

    def _know(self, profile: LatencyProfile) -> None:
        super()._know(profile)
        self._company.know(profile)
        # Compare past batches with the new profile.
        before_ns, largest = self._expected_ns, profile.max_batch_size
        now_ns = {size: profile.latency_ns(size) for size in before_ns if size <= largest}
        is_as_before = len(now_ns) == len(before_ns) and all(
            abs(now_ns[size] - each) <= _AS_BEFORE * each for size, each in before_ns.items()
        )
        if not is_as_before:
            changes = [now_ns[size] / before_ns[size] for size in now_ns]
            if len(self._durations_ns) >= _SURE and _is_another_speed(changes):
                self._durations_ns.clear()  # past batches say nothing of future ones
            known = [each for each in self._durations_ns if each[0] in now_ns]
            self._tempo = Tempo()
            self._taken.replace(self._tempo.follow([took / now_ns[size] for size, took in known]))
            self._expected_ns = now_ns
        self._learn_stretches()

    def _learn_stretches(self) -> None:
        self._times_ns.clear()
        if not self._taken:
            self.stretches = (1.0,)
            self._usual_stretch = self._wait_stretch = self._worst_stretch = 1.0
            return
        tempo = self._tempo.now
        few, usual, many, wait, worst = [tempo * each for each in self._taken.quantiles(_QUANTILES)]
        self.stretches = [few] if few == many else [few, usual, many]
        self._usual_stretch, self._wait_stretch, self._worst_stretch = usual, wait, worst


def _is_another_speed(ratios: Sequence[float]) -> bool:
    """Whether latencies have changed by much, in the median."""
    return bool(ratios) and not 1 / _CHANGED < statistics.median(ratios) < _CHANGED
