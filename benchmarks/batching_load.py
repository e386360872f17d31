"""Open-loop load on a batcher, with the outcome of every request.

Each request has an intended time, whether earlier ones are answered or not. Its latency and its
deadline count from there. So a batcher gains nothing if a busy interpreter makes the generator
late; the lateness is measured and reported.

A violation is a request that was answered late, dropped, or not answered at all.
"""

from __future__ import annotations

import itertools
import random
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.batching_devices import Batch, Device
from benchmarks.peers import Dropped, Peer

__all__ = ["Record", "arrivals_s", "offer", "summarise"]

_GRACE_S = 1.0
"""Wait for answers after the last deadline; a request without one by then is unanswered."""
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


def arrivals_s(rate: float, cv: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times with gamma distributed gaps (a renewal process); ``cv`` 1 is Poisson."""
    generator = random.Random(seed)
    shape = 1 / cv**2
    times = [generator.gammavariate(shape, 1 / (shape * rate))]
    while times[-1] < duration_s:
        times.append(times[-1] + generator.gammavariate(shape, 1 / (shape * rate)))
    return times[:-1]


@dataclass(slots=True)
class Record:
    """By the number of each request: its intended time, its real one, and when it was settled."""

    intended_ns: list[int] = field(default_factory=list)
    submitted_ns: list[int] = field(default_factory=list)
    settled_ns: list[int] = field(default_factory=list)
    """0: not settled."""
    errors: dict[int, str] = field(default_factory=dict)
    """``dropped``, ``wrong answer``, or the name of an unexpected error."""
    processor_s: float = 0.0
    switches: int = 0
    """Times that a thread of the process gave up its processor to wait."""
    elapsed_s: float = 0.0


def offer(
    peer: Peer, device: Device, times_s: Sequence[float], *, slo_s: float, first: int = 0
) -> Record:
    """Submit a request at each time; return when all are settled, or too late to matter.

    Numbers of requests begin at ``first``. Blocks, and sleeps in the calling thread.
    """
    record = Record(settled_ns=[0] * len(times_s))
    items = [device.item(first + index) for index in range(len(times_s))]
    settled = _Countdown(len(times_s))
    processor_s, switches = time.process_time(), _switches()
    start_ns = time.monotonic_ns()
    for index, at_s in enumerate(times_s):
        intended_ns = start_ns + int(at_s * 1e9)
        wait_ns = intended_ns - time.monotonic_ns()
        if wait_ns > 0:
            time.sleep(wait_ns / 1e9)
        record.intended_ns.append(intended_ns)
        record.submitted_ns.append(time.monotonic_ns())
        peer.submit(items[index], _settler(record, settled, device, index, first + index))
    settled.wait(slo_s + _GRACE_S)
    record.elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
    record.processor_s = time.process_time() - processor_s
    record.switches = _switches() - switches
    return record


class _Countdown:
    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._zero = threading.Event()

    def decrease(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._zero.set()

    def wait(self, timeout_s: float) -> None:
        self._zero.wait(timeout_s)


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _settler(
    record: Record, settled: _Countdown, device: Device, index: int, number: int
) -> Callable[[Any, BaseException | None], None]:
    def settle(result: Any, error: BaseException | None) -> None:
        record.settled_ns[index] = time.monotonic_ns()
        if isinstance(error, Dropped):
            record.errors[index] = "dropped"
        elif error is not None:
            record.errors[index] = type(error).__name__
        elif device.number_of(result) != number:
            record.errors[index] = "wrong answer"
        settled.decrease()

    return settle


def summarise(record: Record, batches: Sequence[Batch], *, slo_s: float) -> dict[str, Any]:
    """The figures of one cell, for JSON; every request is in exactly one of the counts.

    ``batches`` are those of this load only. Latencies are of answered and of overdue requests (an
    overdue one is above all others; a quantile that falls on it is None), not of dropped ones.
    """
    count = len(record.intended_ns)
    latencies_ms: list[float] = []
    on_time = late = unanswered = 0
    for index, intended_ns in enumerate(record.intended_ns):
        if index in record.errors:
            continue
        if not record.settled_ns[index]:
            unanswered += 1
            continue
        latency_ns = record.settled_ns[index] - intended_ns
        latencies_ms.append(latency_ns / 1e6)
        on_time += latency_ns <= slo_s * 1e9
        late += latency_ns > slo_s * 1e9
    dropped = sum(error == "dropped" for error in record.errors.values())
    failed = len(record.errors) - dropped
    if on_time + late + unanswered + dropped + failed != count:
        raise RuntimeError("a request is counted twice or not at all")
    busy_ns = sum(batch.ended_ns - batch.started_ns for batch in batches)
    span_ns = max(record.settled_ns, default=0) - record.intended_ns[0]
    served = sum(len(batch.numbers) for batch in batches)
    late_s = [
        (at - intended) / 1e9
        for at, intended in zip(record.submitted_ns, record.intended_ns, strict=True)
    ]
    return {
        "requests": count,
        "on_time": on_time,
        "late": late,
        "dropped": dropped,
        "unanswered": unanswered,
        "failed": failed,
        "errors": sorted(set(record.errors.values())),
        "violations": 1 - on_time / count,
        "goodput": on_time / (record.intended_ns[-1] - record.intended_ns[0]) * 1e9,
        "latency_ms": _quantiles(latencies_ms, overdue=unanswered),
        "batches": len(batches),
        "mean_batch": served / len(batches) if batches else 0.0,
        "busy": busy_ns / span_ns if span_ns > 0 else 0.0,
        "handover_us": _quantiles(_handovers_us(record, batches)),
        "generator_late_ms": _quantiles([value * 1e3 for value in late_s]),
        "switches_per_s": record.switches / record.elapsed_s,
    }


def _quantiles(values: list[float], overdue: int = 0) -> dict[str, float | None]:
    ordered = sorted(values)
    count = len(ordered) + overdue
    found: dict[str, float | None] = {"count": float(count)}
    for quantile in _QUANTILES:
        index = min(count - 1, int(quantile * count))
        found[f"p{quantile * 100:g}"] = ordered[index] if 0 <= index < len(ordered) else None
    return found


def _handovers_us(record: Record, batches: Sequence[Batch]) -> list[float]:
    """How long the device idled although its next batch was full and waiting.

    This is the batcher's own delay. No policy wants it, because the batch had nothing to wait for.
    """
    full = max((len(batch.numbers) for batch in batches), default=0)
    first = min((number for batch in batches for number in batch.numbers), default=0)
    gaps = []
    for before, after in itertools.pairwise(batches):
        if len(after.numbers) < full or full == 1:
            continue
        newest = max(record.submitted_ns[number - first] for number in after.numbers)
        if newest <= before.ended_ns:
            gaps.append((after.started_ns - before.ended_ns) / 1e3)
    return gaps
