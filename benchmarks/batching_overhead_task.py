"""One batcher called in a closed loop with a function that does nothing, in a process of its own.

``python -m benchmarks.batching_overhead_task TASK JSON FD`` as :mod:`benchmarks.harness` runs it.
One client asks for one item after another, so every batch has one item, and the time of a request
is the time that the batcher adds. Several ``clients`` share batches. With ``read_mb`` the function
reads that much memory, as a model reads its weights. That takes the batcher's code and data out of
the processor's caches; the time for it is not counted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.batching_devices import Device
from benchmarks.peers import LoopPeer, make_peer
from benchmarks.tasks import emit, main

__all__: list[str] = []

_WARM_CALLS = 60
"""CorkDispatcher trains on 11; profiles are learned."""
_WARM_BURST = 16
_AT_MOST_S = 4.0
_SLO_MS = 100.0
_Measured = tuple[list[int], float, float]
"""Nanoseconds of each call; seconds of the processor and of the clock for all of them."""


class _NoDevice(Device):
    """Reads its memory, if it has any, and answers; keeps no record of batches."""

    def __init__(self, read_mb: float) -> None:
        super().__init__()
        self._weights = np.ones(int(read_mb * 1e6 / 8)) if read_mb else None
        self.read_ns = 0
        """Nanoseconds of all reads."""

    def _read(self) -> None:
        if self._weights is not None:
            begin_ns = time.perf_counter_ns()
            self._weights.sum()
            self.read_ns += time.perf_counter_ns() - begin_ns

    def others_ns(self) -> int:
        """A clock that stands still while the device reads."""
        return time.perf_counter_ns() - self.read_ns

    def item(self, number: int) -> int:
        return number

    def stacked(self, items: Sequence[Any]) -> Any:
        return items

    def _answer(self, batch: Any) -> tuple[tuple[int, ...], Any]:
        return (), batch

    def run(self, batch: Any) -> Any:
        self._read()
        return batch

    def run_list(self, items: Sequence[Any]) -> list[Any]:
        self._read()
        return list(items)

    @staticmethod
    def number_of(result: Any) -> int:
        return int(result)


def direct(*, calls: int, read_mb: float) -> dict[str, Any]:
    """Measure the function without any batcher."""
    device = _NoDevice(read_mb)
    taken_ns = []
    for number in range(calls):
        begin_ns = device.others_ns()
        device.run_list([number])[0]
        taken_ns.append(device.others_ns() - begin_ns)
    return _figures(taken_ns, 0.0, sum(taken_ns) / 1e9)


def batcher(
    *,
    policy: str,
    settings: dict[str, Any],
    calls: int,
    clients: int,
    read_mb: float,
) -> None:
    """Measure blocking calls if the adapter has ``call``, awaited ones if it has a loop."""
    device = _NoDevice(read_mb)
    peer = make_peer(policy, device, slo_ms=_SLO_MS, max_batch_size=16, settings=settings)
    peer.start()
    if isinstance(peer, LoopPeer) and not hasattr(peer, "call"):
        waiting = asyncio.run_coroutine_threadsafe(
            _awaited(peer, device, calls, clients), peer.loop
        )
        measured = waiting.result(60)
    else:
        measured = _blocking(peer, device, calls, clients)
    emit(_figures(*measured))
    os._exit(0)  # not all of these libraries stop


def _blocking(peer: Any, device: _NoDevice, calls: int, clients: int) -> _Measured:
    _ask(peer, device, _WARM_CALLS, [], time.monotonic() + _AT_MOST_S)
    taken_ns: list[int] = []
    busy_s, begin_s = time.process_time(), time.perf_counter()
    end = time.monotonic() + _AT_MOST_S
    share = (peer, device, calls // clients, taken_ns, end)
    others = [threading.Thread(target=_ask, args=share) for _ in range(clients - 1)]
    for thread in others:
        thread.start()
    _ask(*share)
    for thread in others:
        thread.join(_AT_MOST_S)
    return taken_ns, time.process_time() - busy_s, time.perf_counter() - begin_s


def _ask(peer: Any, device: _NoDevice, calls: int, taken_ns: list[int], end: float) -> None:
    for number in range(calls):
        begin_ns = device.others_ns()
        if peer.call(number) != number:
            raise RuntimeError(f"wrong answer to {number}")
        taken_ns.append(device.others_ns() - begin_ns)
        if time.monotonic() > end:
            return


async def _awaited(peer: LoopPeer, device: _NoDevice, calls: int, clients: int) -> _Measured:
    end = time.monotonic() + _AT_MOST_S
    await _await_each(peer, device, _WARM_CALLS, [], end)
    await asyncio.gather(*(_await_each(peer, device, 2, [], end) for _ in range(_WARM_BURST)))
    peer.end_warm_up()
    await asyncio.sleep(0)
    taken_ns: list[int] = []
    busy_s, begin_s = time.process_time(), time.perf_counter()
    end = time.monotonic() + _AT_MOST_S
    await asyncio.gather(
        *(_await_each(peer, device, calls // clients, taken_ns, end) for _ in range(clients))
    )
    return taken_ns, time.process_time() - busy_s, time.perf_counter() - begin_s


async def _await_each(
    peer: LoopPeer, device: _NoDevice, calls: int, taken_ns: list[int], end: float
) -> None:
    for number in range(calls):
        begin_ns = device.others_ns()
        if int(await peer.answer(number)) != number:
            raise RuntimeError(f"wrong answer to {number}")
        taken_ns.append(device.others_ns() - begin_ns)
        if time.monotonic() > end:
            return


def _figures(taken_ns: list[int], busy_s: float, elapsed_s: float) -> dict[str, Any]:
    ordered = sorted(taken_ns)
    return {
        "calls": len(ordered),
        "mean_us": sum(ordered) / len(ordered) / 1e3,
        "p50_us": ordered[len(ordered) // 2] / 1e3,
        "p99_us": ordered[int(len(ordered) * 0.99)] / 1e3,
        "processor_us": busy_s / len(ordered) * 1e6,
        "elapsed_us": elapsed_s / len(ordered) * 1e6,
    }


if __name__ == "__main__":
    main(direct, batcher)
