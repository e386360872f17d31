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

No time is certain. What batches really took, over what their profile and the present tempo
(:class:`~trims_shim.batching.policies.tempo.Tempo`) say, is kept as quantiles. What goes is chosen
by how many are expected to be in time, from the quickest of them to the slowest; hopeless is only
what would be late even with the quickest, because a late answer costs no more than none. Waiting
ends by what few batches exceed, and by how late timers have come.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from trims_shim.batching.policies.company import Company
from trims_shim.batching.policies.goodput import Goodput
from trims_shim.batching.policies.recent import Recent
from trims_shim.batching.policies.tempo import Tempo
from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Finished, Request

__all__ = ["Auto"]

# Measured on a grid of loads, arrivals, profiles and jitters: docs/decisions/0009. All of them are
# flat around these values.
_REMEMBERED = 256  # enough for a 99th percentile
_AS_BEFORE = 0.05  # of a latency: past batches are not judged anew for less
_WORST_QUANTILE = 0.99
_QUANTILES = (
    *(1 / 6, 0.5, 5 / 6),  # for sizes: the middles of three equal shares
    0.9,  # for the end of waiting
    _WORST_QUANTILE,
)
_SURE = 64  # after so many batches a profile is no guess any more, and changes with the device
_CHANGED = 1.7
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
        self._weight_paces = Recent(_REMEMBERED)
        """What these weigh, where batches are limited by that."""
        self._durations_ns: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Sizes and times of what the stretches are made of."""
        self._expected_ns: dict[int, int] = {}
        """By size, what they took by the profile that they were last judged by."""
        self._tempo = Tempo()
        self._usual_stretch = self._wait_stretch = self._worst_stretch = 1.0
        self._wait_margin_ns = 0
        self._worst_pace = self._worst_weight_pace = 0.0
        self._times_ns: dict[int, tuple[float, int]] = {}
        """By size, as :meth:`_learn_times` has them, until something else is learned."""
        self._company = Company()
        self._waits_for_company = True
        """Also where that cannot lower violations."""

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
        """What is the worst with one more, where ``worst`` was."""
        if not paces.add(pace):
            return worst
        now = paces.quantile(_WORST_QUANTILE)
        if now != worst:
            self._times_ns.clear()
        return now

    def _start_ns(self, size: int, now_ns: int) -> int:
        """Until when a batch of ``size`` waits for one more."""
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
        """What those who come while ``size`` run need to be in time after them, and one more."""
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
        """Whether so many find room in one batch, if they are as heavy as the worst of late."""
        if self.max_weight is None or not self._worst_pace:
            return True
        weight = self._worst_weight_pace / self._worst_pace
        return arrivals * weight <= self.max_weight

    def _know(self, profile: LatencyProfile) -> None:
        super()._know(profile)
        self._company.know(profile)
        # Past ones are seen as they would have been with the new one.
        before_ns, largest = self._expected_ns, profile.max_batch_size
        now_ns = {size: profile.latency_ns(size) for size in before_ns if size <= largest}
        is_as_before = len(now_ns) == len(before_ns) and all(
            abs(now_ns[size] - each) <= _AS_BEFORE * each for size, each in before_ns.items()
        )
        if not is_as_before:
            changes = [now_ns[size] / before_ns[size] for size in now_ns]
            if len(self._durations_ns) >= _SURE and _is_another_speed(changes):
                self._durations_ns.clear()  # these say nothing of those to come
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
    """Whether most of what batches take has changed by much."""
    return bool(ratios) and not 1 / _CHANGED < statistics.median(ratios) < _CHANGED
