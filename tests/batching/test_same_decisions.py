"""One event log gives one sequence of decisions, whoever drives the policy.

What threads and event loops told a policy, at the times at which they did, is told to a fresh
policy of the same kind, and the arrivals, service times and timer lateness of that log are given to
the simulator: all of them decide the same at the same nanosecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random

import pytest

from trims_shim.batching import Batcher
from trims_shim.batching.drivers.learning import Learning
from trims_shim.batching.policies import POLICIES
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Cancelled, Finished, Policy, Request
from trims_shim.batching.simulator import gamma, requests, simulate
from trims_shim.batching.single import Batching
from trims_shim.errors import RequestDropped

from .decisions import Recorder, Step, decisions, replayed, simulated

PROFILE = LatencyProfile.linear(0.5, 3, max_batch_size=8)
SLO_MS = 20.0
REQUESTS = 60
LIMIT_S = 30


def fresh(name: str, *, devices: int = 1) -> Batching:
    return Batching(lambda key: POLICIES[name](PROFILE, max_batch_size=8), devices=devices)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("devices", [1, 2])
def test_log_of_a_simulation(name: str, devices: int) -> None:
    """With late timers and batches that take longer than the profile says."""
    random = Random(1)
    recorder = Recorder(fresh(name, devices=devices))
    stream = requests(gamma(700 * devices, 2, Random(2)), slo_ms=SLO_MS, count=500)
    simulate(
        recorder,
        stream,
        service_ns=lambda _, batch: PROFILE.latency_ns(len(batch)) + random.randrange(1_000_000),
        lateness_ns=lambda: random.randrange(1_000_000),
    )
    made = decisions(recorder.log)
    assert len(made) > 60
    assert decisions(replayed(recorder.log, fresh(name, devices=devices))) == made
    log, outcome = simulated(recorder.log, fresh(name, devices=devices))
    assert decisions(log) == made
    assert outcome.requests == 500


def test_another_decision_is_noticed() -> None:
    """The comparison itself: a log of one policy is not that of another."""
    recorder = Recorder(fresh("proteus"))
    stream = requests(gamma(300, 2, Random(2)), slo_ms=SLO_MS, count=100)
    simulate(recorder, stream, service_ns=lambda _, batch: PROFILE.latency_ns(len(batch)))
    log = replayed(recorder.log[:2], fresh("immediate"))
    assert decisions(log) != decisions(recorder.log[:2])


# --- real time ------------------------------------------------------------------------------------


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Of every policy that a batcher makes. What it learns does not reach a recorded policy."""
    made: list[Recorder] = []
    make_policy = Learning.make_policy

    def recorded(learning: Learning) -> Policy:
        made.append(Recorder(make_policy(learning)))
        return made[-1]

    monkeypatch.setattr(Learning, "make_policy", recorded)
    return made


def answer(items: list[int]) -> list[int]:
    time.sleep(PROFILE.latency_ns(len(items)) / 1e9)
    return items


async def answer_later(items: list[int]) -> list[int]:
    await asyncio.sleep(PROFILE.latency_ns(len(items)) / 1e9)
    return items


def gaps_s() -> Iterator[float]:
    """Twice what one batch of one after another could answer, in bursts."""
    random = Random(1)
    return (random.gammavariate(0.5, 0.003 / 0.5) for _ in range(REQUESTS))


def call_from_threads(batcher: Batcher, *, cancels: bool) -> None:
    """Blocking calls, futures, and futures that are cancelled."""
    random = Random(1)
    open_futures: list[Future[int]] = []
    with ThreadPoolExecutor(REQUESTS) as callers:
        for number, gap_s in enumerate(gaps_s()):
            time.sleep(gap_s)
            if number % 2:
                open_futures.append(callers.submit(batcher, number, priority=number % 3))
                continue
            future = batcher.submit(number)
            open_futures.append(future)
            if cancels and random.random() < 0.4:
                open_futures.pop()
                future.cancel()
        for future in open_futures:
            with contextlib.suppress(RequestDropped):
                future.result(LIMIT_S)


def call_from_a_loop(batcher: Batcher, *, cancels: bool) -> None:
    """Awaited calls, some of which are cancelled."""

    async def call_all() -> None:
        random = Random(1)
        tasks = []
        for number, gap_s in enumerate(gaps_s()):
            await asyncio.sleep(gap_s)
            task = asyncio.create_task(batcher.aio(number, priority=number % 3))
            tasks.append(task)
            if cancels and random.random() < 0.4:
                await asyncio.sleep(0)
                task.cancel()
        done, open_tasks = await asyncio.wait(tasks, timeout=LIMIT_S)
        assert not open_tasks
        for task in done:
            with contextlib.suppress(RequestDropped, asyncio.CancelledError):
                task.result()

    asyncio.run(call_all())


def longest(recorders: Sequence[Recorder]) -> list[Step]:
    """Of the policy that was used; a batcher may make others."""
    return max((recorder.log for recorder in recorders), key=len)


DRIVERS: dict[str, tuple[Callable[..., object], Callable[..., None]]] = {
    "threads": (answer, call_from_threads),
    "asyncio": (answer_later, call_from_a_loop),
    "threads called from asyncio": (answer, call_from_a_loop),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", POLICIES)
def test_log_of_an_executor(name: str, driver: str, recorders: list[Recorder]) -> None:
    function, call = DRIVERS[driver]
    with Batcher(
        function, slo_ms=SLO_MS, max_batch_size=8, policy=name, profile=PROFILE
    ) as batcher:
        call(batcher, cancels=False)
    log = longest(recorders)
    assert sum(isinstance(step.event, Request) for step in log) == REQUESTS
    made = decisions(log)
    assert decisions(replayed(log, fresh(name))) == made
    steps, outcome = simulated(log, fresh(name))
    assert decisions(steps) == made
    assert outcome.requests == REQUESTS
    ends = [step.now_ns for step in log if isinstance(step.event, Finished)]
    assert [each.ended_ns for each in outcome.executions] == ends


@pytest.mark.parametrize("driver", DRIVERS)
def test_log_with_cancellations(driver: str, recorders: list[Recorder]) -> None:
    function, call = DRIVERS[driver]
    options = {"slo_ms": SLO_MS, "max_batch_size": 8, "profile": PROFILE}
    with Batcher(function, policy="proteus", **options) as batcher:
        call(batcher, cancels=True)
    log = longest(recorders)
    assert any(isinstance(step.event, Cancelled) for step in log)
    assert decisions(replayed(log, fresh("proteus"))) == decisions(log)
