"""One cell of the comparison, in a process of its own: a batcher, a device, a load.

``python -m benchmarks.batching_cell TASK JSON FD`` as :mod:`benchmarks.harness` runs it. The
process imports, warms the batcher up, reports that it is ready, waits for its release, and
measures.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

from benchmarks.batching_devices import MAX_BATCH_SIZE, Device, make_device
from benchmarks.batching_load import arrivals_s, offer, summarise
from benchmarks.peers import Peer, make_peer
from benchmarks.tasks import emit, main, pause

__all__: list[str] = []

# CorkDispatcher trains on 11 batches, of one to three requests.
_SINGLE_CALLS, _BURSTS = 12, (2, 3, 2, 3, 5, 8, 11, 14, 16, 4, 16)
_ANSWER_DEADLINE_S = 20.0
_WARM_LOAD_S, _WARM_SEED = 1.5, 7


def calibrate(*, device: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of each batch size on an otherwise idle device, medians."""
    model = make_device(device)
    durations_ms: dict[int, float] = {}
    for size in range(1, MAX_BATCH_SIZE + 1):
        batch = model.stacked([model.item(number) for number in range(size)])
        model.run(batch)
        model.batches.clear()
        for _ in range(repeats):
            model.run(batch)
        taken = sorted(each.ended_ns - each.started_ns for each in model.batches)
        durations_ms[size] = taken[len(taken) // 2] / 1e6
    return {"durations_ms": durations_ms}


def measure(
    *,
    policy: str,
    settings: dict[str, Any],
    device: str,
    slo_ms: float,
    rate: float,
    cv: float,
    seconds: float,
    seed: int,
) -> None:
    """Offer the load and return the figures of its requests."""
    model = make_device(device)
    peer = make_peer(policy, model, slo_ms=slo_ms, max_batch_size=MAX_BATCH_SIZE, settings=settings)
    peer.start()
    warm_s = -time.monotonic()
    _warm(peer, model, rate, slo_ms / 1e3)
    peer.end_warm_up()
    warm_s += time.monotonic()
    pause({"is_ready": True})
    model.batches.clear()
    busy_s = model.processor_s
    gc.collect()
    gc.freeze()
    times_s = arrivals_s(rate, cv, seconds, seed)
    record = offer(peer, model, times_s, slo_s=slo_ms / 1e3)
    batches = list(model.batches)
    own_s = record.processor_s - (model.processor_s - busy_s)
    result = summarise(record, batches, slo_s=slo_ms / 1e3)
    result["processor_us"] = own_s / len(times_s) * 1e6
    result["threads"] = threading.active_count()
    result["warm_s"] = warm_s
    result["facts"] = peer.facts()
    emit(result)
    # Not all of these libraries stop; nothing is lost but the process.
    os._exit(0)


def _warm(peer: Peer, device: Device, rate: float, slo_s: float) -> None:
    """Send single requests, bursts of several sizes, and a moderate load; equal for all."""
    number = 1_000_000
    for size in (*[1] * _SINGLE_CALLS, *_BURSTS):
        _burst(peer, device, range(number, number + size))
        number += size
    times_s = arrivals_s(rate / 2, 1.0, _WARM_LOAD_S, _WARM_SEED)
    offer(peer, device, times_s, slo_s=slo_s, first=number)


def _burst(peer: Peer, device: Device, numbers: range) -> None:
    settled = threading.Semaphore(0)
    for number in numbers:
        peer.submit(device.item(number), lambda result, error: settled.release())
    for number in numbers:
        if not settled.acquire(timeout=_ANSWER_DEADLINE_S):
            raise RuntimeError(f"request {number} of the warm-up got no answer")


if __name__ == "__main__":
    main(measure, calibrate)
