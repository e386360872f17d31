"""What a batcher did: counters since it was made, and percentiles of its last requests.

Counters are plain attributes, written under the lock of one dispatch, read without it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trims_shim.batching.protocol import Drop

__all__ = ["BatcherStats", "Percentiles", "Record", "percentiles"]

_LAST = 1024
"""Requests over which percentiles are taken: ten are above the 99th; 40 KiB for each quantity."""
_NS_PER_MS = 1e6
_SUMS = (
    "submitted",
    "in_time",
    "late",
    "failed",
    "cancelled",
    "rejected",
    "_wait_total_ns",
    "_latency_total_ns",
    "_busy_ns",
)
_WINDOWS = ("_waits_ns", "_latencies_ns", "_lateness_ns")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of the last requests, in milliseconds; zeros where there are none."""

    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """A snapshot. ``submitted`` is the sum of ``answered``, ``dropped``, ``failed``, ``cancelled``,
    ``queued`` and ``running``."""

    submitted: int
    """Requests taken; those rejected are not counted."""
    answered: int
    """With a result, in time or late."""
    late: int
    """Of ``answered``: after their deadline."""
    dropped: Mapping[str, int]
    """By reason: ``hopeless``, ``shed``."""
    failed: int
    """With an error of the batch function, or of the batcher's closing."""
    cancelled: int
    """Given up by their callers before their batch ran."""
    rejected: int
    """Refused with QueueFull."""
    queued: int
    running: int
    batch_sizes: Mapping[int, int]
    """How many batches of each size were run."""
    wait: Percentiles
    """From arrival to the start of the batch."""
    latency: Percentiles
    """From arrival to the answer."""
    wake_lateness: Percentiles
    """By how much the batcher's timers came too late."""
    busy_share: float
    """Share of the devices' time since the first request in which batches ran, 0 to 1."""
    wait_total_s: float
    latency_total_s: float
    busy_total_s: float
    """Summed over devices."""

    @property
    def batches(self) -> int:
        """How many batches were run."""
        return sum(self.batch_sizes.values())

    @property
    def mean_batch_size(self) -> float:
        """Requests for each batch; 0 before the first."""
        batches = self.batches
        return sum(size * n for size, n in self.batch_sizes.items()) / batches if batches else 0.0

    @property
    def violations(self) -> int:
        """Late or dropped."""
        return self.late + sum(self.dropped.values())


class Record:
    """The counters themselves; :meth:`snapshot` is what users see."""

    def __init__(self, *, devices: int) -> None:
        self._devices = devices
        self.submitted = 0
        self.in_time = 0
        self.late = 0
        self.failed = 0
        self.cancelled = 0
        self.rejected = 0
        self.dropped: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.first_ns: int | None = None
        self._waits_ns: deque[int] = deque(maxlen=_LAST)
        self._latencies_ns: deque[int] = deque(maxlen=_LAST)
        self._lateness_ns: deque[int] = deque(maxlen=_LAST)
        self._wait_total_ns = 0
        self._latency_total_ns = 0
        self._busy_ns = 0

    def add_request(self, arrival_ns: int) -> None:
        """Count a request."""
        self.submitted += 1
        if self.first_ns is None:
            self.first_ns = arrival_ns

    def add_rejection(self, now_ns: int) -> None:
        """Count a request that was refused."""
        self.rejected += 1

    def add_drop(self, drop: Drop) -> None:
        """Count requests that the policy gave up."""
        self.dropped[drop.reason.value] += len(drop.requests)

    def add_wake(self, lateness_ns: int) -> None:
        """Count a timer that came too late."""
        self._lateness_ns.append(lateness_ns)

    def add_batch(self, arrivals_ns: Sequence[int], started_ns: int, ended_ns: int) -> None:
        """Count a batch that has run, of requests with these arrivals."""
        self.add_start(arrivals_ns, started_ns)
        if arrivals_ns:
            self.batch_sizes[len(arrivals_ns)] += 1
        self._busy_ns += ended_ns - started_ns

    def add_start(self, arrivals_ns: Sequence[int], started_ns: int) -> None:
        """Count the waits of requests whose batch has started."""
        for arrival_ns in arrivals_ns:
            self._waits_ns.append(started_ns - arrival_ns)
            self._wait_total_ns += started_ns - arrival_ns

    def add_stage(self, started_ns: int, ended_ns: int) -> None:
        """Count the time in which a device was busy."""
        self._busy_ns += ended_ns - started_ns

    def add_answer(self, arrival_ns: int, deadline_ns: int, now_ns: int) -> None:
        """Count a request that was answered with a result."""
        if now_ns > deadline_ns:
            self.late += 1
        else:
            self.in_time += 1
        self._latencies_ns.append(now_ns - arrival_ns)
        self._latency_total_ns += now_ns - arrival_ns

    def merge(self, other: Record) -> None:
        """Add the counters of another record."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _WINDOWS:
            getattr(self, name).extend(getattr(other, name).copy())
        self.dropped.update(other.dropped.copy())
        self.batch_sizes.update(other.batch_sizes.copy())
        firsts_ns = [each for each in (self.first_ns, other.first_ns) if each is not None]
        self.first_ns = min(firsts_ns, default=None)

    def snapshot(self, *, queued: int, running: int, now_ns: int) -> BatcherStats:
        """As of ``now_ns``; ``running`` counts requests."""
        elapsed_ns = 0 if self.first_ns is None else (now_ns - self.first_ns) * self._devices
        late = self.late  # read once: `answered` is to be without answers that come meanwhile
        return BatcherStats(
            submitted=self.submitted,
            answered=self.in_time + late,
            late=late,
            dropped=dict(self.dropped.copy()),
            failed=self.failed,
            cancelled=self.cancelled,
            rejected=self.rejected,
            queued=queued,
            running=running,
            batch_sizes=dict(sorted(self.batch_sizes.copy().items())),
            wait=percentiles(self._waits_ns.copy()),
            latency=percentiles(self._latencies_ns.copy()),
            wake_lateness=percentiles(self._lateness_ns.copy()),
            busy_share=min(1.0, self._busy_ns / elapsed_ns) if elapsed_ns > 0 else 0.0,
            wait_total_s=self._wait_total_ns / 1e9,
            latency_total_s=self._latency_total_ns / 1e9,
            busy_total_s=self._busy_ns / 1e9,
        )


def percentiles(values_ns: Sequence[int]) -> Percentiles:
    """Of values in ns, in any order; zeros for none."""
    if not values_ns:
        return Percentiles()
    ordered = sorted(values_ns)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / _NS_PER_MS

    return Percentiles(at(0.5), at(0.9), at(0.99), ordered[-1] / _NS_PER_MS, len(ordered))
