"""The dispatcher of BentoML 1.x (``CorkDispatcher``): latency and waits learned while running.

With ``n`` requests queued and the device free, wait for one more while the queued requests together
lose less than the recent mean wait of a request: ``n * (w + dt + a) <= 0.95 * W``. Here ``w`` is
the time since the newest arrival, ``dt`` the tick of BentoML's loop, ``a`` the latency of one more
item, and ``W`` the mean wait of the oldest request of the last 50 batches. The first request is
given up if a batch of the whole queue, ``a * n + b``, would make it late; a single request only
when its deadline has passed.

Differences: the line starts as the profile's, not from six training calls. A timer replaces the
loop that looks every millisecond and loses BentoML's own up to .005 of the requests
(docs/decisions/0009). Requests go by deadline; in BentoML 1.4.39 they go by arrival.
"""

from __future__ import annotations

import math
from collections import deque

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import DropReason, Finished, Request
from trims_shim.batching.rules import Rule

__all__ = ["Cork"]

# The constants of bentoml/_internal/marshal/dispatcher.py.
_KEPT_SAMPLES = 50
_REFRESH_NS = 5_000_000_000
_DECAY = 0.95
_TICK_NS = 1e6
_FIRST_WAIT_NS = 10_000_000
_LEAST_ALPHA_NS = 1_000


class Cork(Rule):
    """Wait while one more request should be worth it; drop requests that their batch makes late."""

    def __init__(self, profile: LatencyProfile, *, max_batch_size: int) -> None:
        super().__init__(profile, max_batch_size=max_batch_size)
        self._alpha_ns, self._beta_ns = profile.line_ns()
        self._mean_wait_ns = float(_FIRST_WAIT_NS)
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=_KEPT_SAMPLES)
        """(size, duration, wait of the oldest request) of each batch."""
        self._refreshed_ns: int | None = None
        self._newest_ns = 0

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._drop_late(now_ns)
        size = self.room()
        if not size or self.is_full(size):
            return size
        wait_ns = _DECAY * self._mean_wait_ns / size - _TICK_NS - self._alpha_ns
        end_ns = self._newest_ns + round(wait_ns)
        if now_ns >= end_ns:
            return size
        due_ns = math.ceil(self._due_ns(0))
        self.wake_ns = due_ns if due_ns < end_ns else end_ns
        return 0

    def on_arrival(self, now_ns: int, request: Request) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self._newest_ns = request.arrival_ns

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if not finished.is_typical:
            return
        started_ns = finished.started_ns
        wait_ns = started_ns - min([request.arrival_ns for request in finished.batch])
        self._samples.append((len(finished.batch), now_ns - started_ns, wait_ns))
        if self._refreshed_ns is None or now_ns - self._refreshed_ns >= _REFRESH_NS:
            self._refreshed_ns = now_ns
            self._learn()

    def _drop_late(self, now_ns: int) -> None:
        late, queued = 0, len(self.queue)
        while late < queued and now_ns >= self._due_ns(late):
            late += 1
        if late:
            self.drop(self.queue.take(late), DropReason.SHED)

    def _due_ns(self, index: int) -> float:
        """Return when the request at ``index`` is given up, if those before it are gone."""
        left = len(self.queue) - index
        busy_ns = self._alpha_ns * left + self._beta_ns if left > 1 else 0.0
        return self.queue[index].deadline_ns - busy_ns

    def _learn(self) -> None:
        samples = self._samples
        count = len(samples)
        mean_size = sum(size for size, _, _ in samples) / count
        mean_ns = sum(duration_ns for _, duration_ns, _ in samples) / count
        squares = sum((size - mean_size) ** 2 for size, _, _ in samples)
        if squares > 0:
            products = sum((size - mean_size) * taken_ns for size, taken_ns, _ in samples)
            self._alpha_ns = max(float(_LEAST_ALPHA_NS), products / squares)
        self._beta_ns = max(0.0, mean_ns - self._alpha_ns * mean_size)
        self._mean_wait_ns = max(0.0, sum(wait_ns for _, _, wait_ns in samples) / count)
