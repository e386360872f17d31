"""Tasks of the serving benchmark of staged models, for :mod:`benchmarks.forking`.

``python -m benchmarks.staged_cell serve JSON FD`` imports once and forks a process for each task.
Every side of the comparison is this package's batcher on the same model: as one function under a
policy without stages, or in stages. The compared sides live in one process and take turns, so the
machine affects all of them alike. Latencies count from the intended arrival.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks.batching_load import Record, arrivals_s, offer
from benchmarks.forking import serve
from benchmarks.staged_models import Served, make_served
from trims_shim.batching import Batcher
from trims_shim.batching.collating.collate import collate_of
from trims_shim.batching.policies.window import Window
from trims_shim.errors import QueueFull, RequestDropped

__all__: list[str] = []

MAX_BATCH_SIZE = {"cpu": 16, "cuda": 64}
"""64 is the paper's; on a processor, larger batches than 16 gain nothing."""
_CHECKED = 4
"""Number of items whose answers are compared with those of the model for the item alone."""
_TOLERANCE = {"cpu": 1e-3, "cuda": 5e-2}
"""Relative to the largest value; GPUs compute with TF32."""
_WARM_SIZES = (1, 2, 4, 8, 16)
_ANSWER_DEADLINE_S = 20.0
Result = dict[str, Any]
Sides = Mapping[str, Mapping[str, Any]]
"""By name, as :data:`benchmarks.staged_serving.SIDES` has them."""
Phases = Sequence[Sequence[float]]
"""(requests a second, seconds) of each phase."""
_PHASES = 16
"""More phases than any load has, so that seeds of phases differ from those of other repeats."""


class _Wrong(Exception):
    """An answer is not the model's."""


def _limit(device: str) -> int:
    return MAX_BATCH_SIZE[device.partition(":")[0]]


# --- a batcher of one side ------------------------------------------------------------------------


def _make_batcher(served: Served, side: Mapping[str, Any], device: str, slo_ms: Any) -> Any:
    settings = dict(side)
    stages, policy = settings.pop("stages"), settings.pop("policy")
    if settings:
        policy = functools.partial({"window": Window}[policy], **settings)
    function = served.whole if stages == 0 else served.staged(stages)
    if stages == 0 and device != "cpu":
        function = functools.partial(_synchronised, served.whole)
    # A GPU runs two stages at once, and so two batches, if they are large enough.
    lanes = [device] * 2 if stages != 0 and device != "cpu" else None
    return Batcher(
        function,
        policy=policy,
        devices=lanes,
        slo_ms=slo_ms,
        max_batch_size=_limit(device),
        queue_size=1 << 16,
        collate=served.collate,
        name=f"{served.name}-{side['policy']}-{stages}",
    )


def _synchronised(whole: Callable[[Any], Any], batch: Any) -> Any:
    """Wait for the GPU: an answer that is only queued there is none."""
    result = whole(batch)
    torch.cuda.current_stream().synchronize()
    return result


class _Peer:
    """A peer for :func:`offer`; its answer is the number of the request, or _Wrong."""

    def __init__(self, batcher: Any, served: Served, device: str) -> None:
        self.batcher = batcher
        self._served = served
        self._expected = [
            served.whole(collate_of(served.collate).join([served.item(number)]))[0]
            for number in range(_CHECKED)
        ]
        self._tolerance = _TOLERANCE[device.partition(":")[0]]

    def item(self, number: int) -> tuple[int, Any]:
        """The item of a request; ``offer`` takes this object for the device, too."""
        return number, self._served.item(number)

    @staticmethod
    def number_of(result: int) -> int:
        """The answer itself, which is the number already."""
        return result

    def submit(self, item: tuple[int, Any], done: Callable[..., None]) -> None:
        """See :class:`benchmarks.peers.Peer`."""
        number, content = item

        def settle(future: Future[Any]) -> None:
            error = future.exception()
            if error is None and not self._is_right(number, future.result()):
                error = _Wrong()
            done(number, error)

        try:
            self.batcher.submit(content).add_done_callback(settle)
        except QueueFull as error:
            done(number, error)

    def _is_right(self, number: int, answer: torch.Tensor) -> bool:
        index = number % len(self._served.items)
        if index >= _CHECKED:
            return True
        expected = self._expected[index]
        scale = self._tolerance * float(expected.abs().max())
        return answer.shape == expected.shape and bool(
            torch.allclose(answer, expected, rtol=0, atol=scale)
        )


def _prepare(
    model: str, sides: Sides, device: str, slo_ms: float | None = None
) -> dict[str, _Peer]:
    """Make warm batchers, with their kernels chosen and their profiles read."""
    torch.set_num_threads(1)
    served = make_served(model, device)
    batchers = {name: _make_batcher(served, side, device, slo_ms) for name, side in sides.items()}
    collate = collate_of(served.collate)
    for example in served.examples:
        for size in _WARM_SIZES:
            served.whole(collate.join([served.item(example)] * size))
    for batcher in batchers.values():
        for example in served.examples:
            batcher(served.item(example))
    gc.collect()
    gc.freeze()
    return {name: _Peer(batcher, served, device) for name, batcher in batchers.items()}


def _shuffled(peers: Mapping[str, _Peer], seed: int) -> Iterable[tuple[str, _Peer]]:
    """The sides in the order of one turn."""
    return random.Random(seed).sample(list(peers.items()), len(peers))


# --- tasks ----------------------------------------------------------------------------------------


def calibrate(*, model: str, device: str, batches: int) -> Result:
    """Milliseconds of a batch by size, padded as by the baselines; means over the same items."""
    torch.set_num_threads(1)
    served = make_served(model, device)
    collate, limit = collate_of(served.collate), _limit(device)
    count = batches * limit
    found: dict[int, float] = {}
    for size in (1 << n for n in range(limit.bit_length())):
        joined = [
            collate.join([served.item(first + n) for n in range(size)])
            for first in range(0, count, size)
        ]
        _timed_s(served, joined[:2], device)
        found[size] = _timed_s(served, joined, device) / len(joined) * 1e3
    return {"durations_ms": found}


def _timed_s(served: Served, batches: Sequence[Any], device: str) -> float:
    began_s = time.perf_counter()
    for batch in batches:
        served.whole(batch)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def learn(*, model: str, side: Result, device: str, limit_s: float) -> Result:
    """Measure the profile that the side's policy uses, and keep it for the later processes."""
    torch.set_num_threads(1)
    served = make_served(model, device)
    batcher = _make_batcher(served, side, device, None)
    for example in served.examples:
        batcher.warm(served.item(example), limit_s=limit_s)
    profile = repr(batcher.profile)
    batcher.close()
    return {"profile": profile}


def load(
    *,
    model: str,
    sides: Sides,
    device: str,
    phases: Phases,
    seeds: Sequence[int],
    qos_ms: float,
) -> Result:
    """Offer a load for each seed; return the figures of all requests, by side.

    No batcher knows the objective.
    """
    peers = _prepare(model, sides, device)
    records: dict[str, list[Record]] = {name: [] for name in peers}
    for seed in seeds:
        times_s = _times_s(phases, seed)
        for name, peer in _shuffled(peers, seed):
            record = offer(peer, peer, times_s, slo_s=qos_ms / 1e3)  # type: ignore[arg-type]
            records[name].append(record)
    return {
        name: _figures(records[name], qos_ms) | {"facts": _facts(peer.batcher, sides[name])}
        for name, peer in peers.items()
    }


def saturated(
    *, model: str, sides: Sides, device: str, clients: Sequence[int], seconds: float, qos_ms: float
) -> Result:
    """Run clients in closed loops; return the answered rate by side and number of clients."""
    peers = _prepare(model, sides, device, qos_ms)
    by_clients: dict[str, Result] = {name: {} for name in peers}
    for count in clients:
        for name, peer in _shuffled(peers, count):
            latencies_ms, elapsed_s = _closed_loop(peer, count, seconds)
            late = sum(each is None or each > qos_ms for each in latencies_ms)
            answered = sorted(each for each in latencies_ms if each is not None)
            by_clients[name][str(count)] = {
                "throughput": (len(latencies_ms) - late) / elapsed_s,
                "violations": late / len(latencies_ms),
                "p99_ms": answered[int(0.99 * len(answered))] if answered else None,
            }
    return {
        name: {"by_clients": by_clients[name], "facts": _facts(peer.batcher, sides[name])}
        for name, peer in peers.items()
    }


def _closed_loop(peer: _Peer, clients: int, seconds: float) -> tuple[list[float | None], float]:
    """The latencies of the counted requests, and the time in which they were answered.

    At least one request counts, however busy the machine is.
    """
    done: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
    began_ns: dict[int, int] = {}
    number, latencies_ms = 0, list[float | None]()
    start_ns = time.monotonic_ns()
    while (now_ns := time.monotonic_ns()) - start_ns < seconds * 1e9 or not latencies_ms:
        if number - len(latencies_ms) < clients:
            began_ns[number] = now_ns
            peer.submit(peer.item(number), lambda n, error: done.put((n, error)))
            number += 1
            continue
        answered, error = done.get(timeout=_ANSWER_DEADLINE_S)
        latency_ms = (time.monotonic_ns() - began_ns[answered]) / 1e6
        latencies_ms.append(None if error is not None else latency_ms)
    for _ in range(number - len(latencies_ms)):
        done.get(timeout=_ANSWER_DEADLINE_S)
    return latencies_ms, (now_ns - start_ns) / 1e9


def lone(*, model: str, sides: Sides, device: str, turns: int, calls: int) -> Result:
    """Run one client in a closed loop; return the time of a lone request, by side."""
    peers = _prepare(model, sides, device)
    taken_ns: dict[str, list[int]] = {name: [] for name in peers}
    for turn in range(turns):
        for name, peer in _shuffled(peers, turn):
            item = peer.item(0)[1]
            for _ in range(calls):
                began_ns = time.perf_counter_ns()
                peer.batcher(item)
                taken_ns[name].append(time.perf_counter_ns() - began_ns)
    return {
        name: {"p50_us": statistics.median(taken) / 1e3, "mean_us": statistics.fmean(taken) / 1e3}
        for name, taken in taken_ns.items()
    }


def _times_s(phases: Phases, seed: int) -> list[float]:
    """Poisson arrivals, phase after phase."""
    times_s: list[float] = []
    begin_s = 0.0
    for number, (rate, seconds) in enumerate(phases):
        drawn_s = arrivals_s(rate, 1.0, seconds, _PHASES * seed + number)
        times_s += [begin_s + each for each in drawn_s]
        begin_s += seconds
    return times_s


def _figures(records: Collection[Record], qos_ms: float) -> Result:
    """The figures. Requests without an answer have waited until now; dropped ones do not count."""
    now_ns = time.monotonic_ns()
    count = sum(len(record.intended_ns) for record in records)
    errors = [error for record in records for error in record.errors.values()]
    latencies_ms = sorted(
        ((record.settled_ns[index] or now_ns) - intended_ns) / 1e6
        for record in records
        for index, intended_ns in enumerate(record.intended_ns)
        if index not in record.errors
    )
    in_time = sum(each <= qos_ms for each in latencies_ms)
    return {
        "requests": count,
        "dropped": errors.count(RequestDropped.__name__),
        "unanswered": sum(record.settled_ns.count(0) for record in records),
        "errors": sorted(set(errors) - {RequestDropped.__name__}),
        "violations": 1 - in_time / count,
        "mean_ms": sum(latencies_ms) / max(1, len(latencies_ms)),
        "p50_ms": latencies_ms[len(latencies_ms) // 2] if latencies_ms else None,
        "p99_ms": latencies_ms[int(0.99 * len(latencies_ms))] if latencies_ms else None,
        "processor_ms": sum(record.processor_s for record in records) / count * 1e3,
        "generator_late_ms": max(
            (submitted_ns - intended_ns) / 1e6
            for record in records
            for submitted_ns, intended_ns in zip(
                record.submitted_ns, record.intended_ns, strict=True
            )
        ),
    }


def _facts(batcher: Any, side: Mapping[str, Any]) -> Result:
    """The batcher's statistics, to explain the figures."""
    stats = batcher.stats()
    requests = sum(size * number for size, number in stats.batch_sizes.items())
    facts: Result = {
        "mean_batch": requests / max(1, sum(stats.batch_sizes.values())),
        "busy_share": stats.busy_share,
    }
    if side["stages"] != 0:
        stages = batcher.stage_stats()
        names = ("batches", "stretches", "splits", "failures")
        facts |= {name: getattr(stages, name) for name in names}
    return facts


if __name__ == "__main__":
    serve(
        {task.__name__: task for task in (calibrate, learn, load, lone, saturated)},
        int(sys.argv[3]),
    )
