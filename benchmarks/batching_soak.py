"""All features at once, for long: ``python -m benchmarks.batching_soak --seconds 600``.

Threads call, submit and cancel; event loops await and give up; items fail, and whole batches at
random; deadlines are tight, queues short, priorities mixed; objectives change, batchers are made,
closed and forgotten, and the process forks. At the end, every request must have exactly one of its
allowed outcomes, every answer must be the request's own, and no thread or descriptor may be left.

Prints a JSON object of counts; status 1 if something was lost, wrong or left behind. The order of
events depends on the machine; ``--seed`` draws what each actor does.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from trims_shim.batching import Batcher
from trims_shim.errors import BatcherClosed, QueueFull, RequestDropped

__all__ = ["main"]

_WAIT_S = 20.0
"""Longer than any request may take here; a request that is not settled by then is lost."""
_POISON = 23
"""Items divisible by this fail, always and alone."""
_FLAKY_BATCHES = 0.01
_POLICIES = ("auto", "early_drop", "proteus", "window", "immediate", "aimd", "cork")


class _Poisoned(Exception):
    """This item fails."""


class _Flaky(Exception):
    """This batch failed, by chance."""


class _Ledger:
    """Counts of what happened, and problems, from all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.open: dict[concurrent.futures.Future[int], str] = {}

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)

    def settle(self, item: int, result: Any, error: BaseException | None) -> None:
        """Record a client's outcome; right answers and expected errors are counted."""
        if error is None:
            if result != 2 * item or item % _POISON == 0:
                self.problem(f"item {item} was answered {result!r}")
            self.count("answered")
        elif isinstance(error, _Poisoned):
            if item % _POISON:
                self.problem(f"item {item} failed for a neighbour's fault")
            self.count("poisoned")
        elif isinstance(error, _EXPECTED):
            self.count(type(error).__name__)
        else:
            self.problem(f"item {item}: {error!r}")

    def keep(self, item: int, future: concurrent.futures.Future[int], whose: str) -> None:
        """Keep a future that must be settled some time."""
        with self._lock:
            self.open[future] = whose
        future.add_done_callback(lambda done: self._close(item, done))

    def _close(self, item: int, future: concurrent.futures.Future[int]) -> None:
        with self._lock:
            if self.open.pop(future, None) is None:
                self.problems.append(f"item {item} was settled twice")
        if future.cancelled():
            self.count("cancelled")
        else:
            error = future.exception()
            self.settle(item, None if error else future.result(), error)

    def await_open(self, what: str) -> None:
        """Wait for the open futures."""
        with self._lock:
            waiting = dict(self.open)
        lost = concurrent.futures.wait(waiting, _WAIT_S).not_done
        if lost:
            whose = collections.Counter(waiting[future] for future in lost)
            self.problem(f"{what} some futures were never settled: {dict(whose)}")


_EXPECTED = (_Flaky, RequestDropped, QueueFull, BatcherClosed)


def _check_items(items: Sequence[int], chance: random.Random) -> list[int]:
    if chance.random() < _FLAKY_BATCHES:
        raise _Flaky
    if any(item % _POISON == 0 for item in items):
        raise _Poisoned
    return [2 * item for item in items]


def _blocking_function(seed: int) -> Callable[[Sequence[int]], list[int]]:
    chance = random.Random(seed)

    def work(items: Sequence[int]) -> list[int]:
        time.sleep(chance.uniform(0.0002, 0.003))
        return _check_items(items, chance)

    return work


def _async_function(seed: int) -> Callable[..., Any]:
    chance = random.Random(seed)

    async def work(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(chance.uniform(0.0002, 0.003))
        return _check_items(items, chance)

    return work


class _Soak:
    """The actors; each runs in a thread of its own until the time is up."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.end = time.monotonic() + seconds
        self.seed = seed
        self.ledger = _Ledger()
        self.batcher = Batcher(
            _blocking_function(seed), slo_ms=60, max_batch_size=8, queue_size=64, name="soak"
        )

    def is_going_on(self) -> bool:
        return time.monotonic() < self.end and not self.ledger.problems

    # --- clients ----------------------------------------------------------------------------------

    def call(self, chance: random.Random) -> None:
        """Block for one answer at a time."""
        while self.is_going_on():
            item = chance.randrange(1 << 30)
            try:
                result = self.batcher(item, priority=chance.choice((0, 0, 0, 1)))
            except Exception as error:
                self.ledger.settle(item, None, error)
            else:
                self.ledger.settle(item, result, None)

    def submit(self, chance: random.Random) -> None:
        """Submit many at once, some with little time; cancel some, sooner or later."""
        while self.is_going_on():
            futures = []
            for _ in range(chance.randrange(1, 24)):
                item = chance.randrange(1 << 30)
                deadline_ms = chance.choice((None, None, 5, 15, 100))
                try:
                    future = self.batcher.submit(item, deadline_ms=deadline_ms)
                except Exception as error:
                    self.ledger.settle(item, None, error)
                else:
                    self.ledger.keep(item, future, "the shared one")
                    futures.append(future)
            time.sleep(chance.choice((0, 0.001, 0.01)))
            for future in chance.sample(futures, len(futures) // 4):
                future.cancel()
            time.sleep(chance.uniform(0, 0.02))

    def run_loops(self, chance: random.Random) -> None:
        """Run event loops one after another, which await a threaded and an asynchronous batcher."""
        while self.is_going_on():
            asyncio.run(self._await_for(chance, min(self.end, time.monotonic() + 2.0)))
            self.ledger.count("loops")

    async def _await_for(self, chance: random.Random, end: float) -> None:
        batcher = Batcher(
            _async_function(self.seed),
            slo_ms=60,
            max_batch_size=8,
            policy=chance.choice(_POLICIES),
            name="soak-loop",
        )
        async with batcher:
            while time.monotonic() < end and not self.ledger.problems:
                target = chance.choice((self.batcher, batcher))
                clients = [self._await_one(target, chance) for _ in range(chance.randrange(1, 16))]
                await asyncio.wait_for(asyncio.gather(*clients), 2 * _WAIT_S)

    async def _await_one(self, batcher: Batcher, chance: random.Random) -> None:
        item = chance.randrange(1 << 30)
        patience_s = chance.choice((_WAIT_S, _WAIT_S, 0.001, 0.01))
        try:
            result = await asyncio.wait_for(batcher.aio(item), patience_s)
        except asyncio.TimeoutError:
            if patience_s == _WAIT_S:
                self.ledger.problem(f"item {item} got no answer in {_WAIT_S} s")
            self.ledger.count("given up")
        except Exception as error:
            self.ledger.settle(item, None, error)
        else:
            self.ledger.settle(item, result, None)

    # --- disturbances -----------------------------------------------------------------------------

    def make_batchers(self, chance: random.Random) -> None:
        """Make short-lived batchers: drained, closed with or without a drain, or forgotten."""
        while self.is_going_on():
            ending = chance.choice(("drain", "close", "cancel", "forget"))
            options = {
                "slo_ms": chance.choice((None, 20, 100)),
                "max_batch_size": chance.randrange(1, 9),
                "policy": chance.choice(_POLICIES),
                "devices": chance.choice((1, 1, 2)),
                "when_full": chance.choice(("wait", "reject")),
                "when_late": chance.choice(("drop", "serve")),
            }
            function = _blocking_function(chance.randrange(1 << 30))
            batcher = Batcher(function, queue_size=8, name=f"soak-{ending}", **options)
            for _ in range(chance.randrange(1, 12)):
                item = chance.randrange(1 << 30)
                try:
                    self.ledger.keep(item, batcher.submit(item), f"{ending}: {options}")
                except Exception as error:
                    self.ledger.settle(item, None, error)
            if ending == "drain":
                batcher.drain(timeout_s=_WAIT_S)
                batcher.close()
            elif ending != "forget":
                batcher.close(cancel=ending == "cancel")
            self.ledger.count(f"made, then {ending}")
            del batcher
            time.sleep(chance.uniform(0, 0.05))

    def change(self, chance: random.Random) -> None:
        """Change objectives and sizes while batches run, and read statistics."""
        while self.is_going_on():
            self.batcher.update(
                slo_ms=chance.choice((10, 40, 80)), max_batch_size=chance.randrange(1, 9)
            )
            self.batcher.stats()
            self.ledger.count("updates")
            time.sleep(chance.uniform(0.01, 0.1))

    def fork(self, chance: random.Random) -> None:
        """Fork children that use the same batcher, and one of their own."""
        while self.is_going_on():
            pid = os.fork()
            if not pid:
                self._be_child(chance.randrange(1 << 30))
            # The child ends itself after a while.
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                self.ledger.problem(f"a forked child ended with status {status}")
            self.ledger.count("forks")
            time.sleep(chance.uniform(0.2, 0.6))

    def _be_child(self, seed: int) -> None:
        status = 1
        # Whatever happens, the child ends here.
        with contextlib.suppress(BaseException):
            signal.alarm(int(2 * _WAIT_S))
            faulthandler.dump_traceback_later(_WAIT_S, exit=True)
            own = Batcher(
                _blocking_function(seed), slo_ms=1000, max_batch_size=4, name="soak-child"
            )
            for batcher in (self.batcher, own):
                for item in (_POISON + 1, _POISON + 2, _POISON + 3):
                    _check_child(batcher, item)
            status = 0
        os._exit(status)

    # --- all --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the time is up or something is wrong; then wait for open requests."""
        actors = [self.call] * 3 + [self.submit] * 2 + [self.run_loops] * 2
        actors += [self.make_batchers, self.change, self.fork]
        threads = [
            threading.Thread(target=self._act, args=(actor, number), name=actor.__name__)
            for number, actor in enumerate(actors)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.end - time.monotonic()) + 3 * _WAIT_S)
            if thread.is_alive():
                self.ledger.problem(f"{thread.name} did not end")
        self.ledger.await_open("at the end")
        self.batcher.drain(timeout_s=_WAIT_S)
        self._check_statistics()
        self.batcher.close()

    def _act(self, actor: Callable[[random.Random], None], number: int) -> None:
        try:
            actor(random.Random(f"{self.seed}-{number}"))
        except BaseException as error:  # a border: an unexpected error is a finding
            self.ledger.problem(f"{actor.__name__}: {error!r}")

    def _check_statistics(self) -> None:
        stats = self.batcher.stats()
        ends = stats.answered + stats.failed + stats.cancelled + sum(stats.dropped.values())
        if stats.queued or stats.running or ends != stats.submitted:
            self.ledger.problem(f"the statistics do not add up: {stats}")


def _check_child(batcher: Batcher, item: int) -> None:
    """Expect a right answer or an allowed error; anything else ends the child."""
    with contextlib.suppress(*_EXPECTED):
        if batcher(item) != 2 * item:
            raise AssertionError
    with contextlib.suppress(*_EXPECTED):
        if batcher.submit(item).result(_WAIT_S) != 2 * item:
            raise AssertionError


def _leftovers(threads: set[threading.Thread], descriptors: int) -> list[str]:
    """Threads, descriptors and batchers that are new since the start; some take a moment to end."""
    end = time.monotonic() + _WAIT_S
    while True:
        gc.collect()
        left = [each.name for each in threading.enumerate() if each not in threads]
        opened = len(os.listdir("/proc/self/fd")) - descriptors
        batchers = sum(isinstance(each, Batcher) for each in gc.get_objects())
        if not left and not batchers and opened <= 0:
            return []
        if time.monotonic() > end:
            faulthandler.dump_traceback()
            return [f"left behind: threads {left}, {opened} descriptors, {batchers} batchers"]
        time.sleep(0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; 1 when something was lost, wrong or left behind."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batching_soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    faulthandler.enable()
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    soak = _Soak(options.seconds, options.seed)
    soak.run()
    ledger, stats = soak.ledger, repr(soak.batcher.stats())
    del soak
    problems = ledger.problems + _leftovers(threads, descriptors)
    found = {"counts": dict(sorted(ledger.counts.items())), "stats": stats, "problems": problems}
    print(json.dumps(found, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
