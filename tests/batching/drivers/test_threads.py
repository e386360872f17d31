"""Who runs what: callers their own batches, workers the rest; timers, interrupts, idle threads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batching.waiting import (
    LONG_S,
    Gate,
    join,
    start,
    wait_until,
    wait_until_main_sleeps,
)
from trims_shim.batching import Batcher
from trims_shim.batching.drivers import threads
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.replies import BatchFuture, Entry, Seat
from trims_shim.batching.policies.window import Window
from trims_shim.batching.protocol import NEVER_NS, Request

greedy = functools.partial(Batcher, policy="immediate")
# Until a batch is full, or the batcher is drained, however long a busy machine needs for that.
patient = functools.partial(Window, wait_ms=1e6)


def runners(items: list[Any]) -> list[int]:
    return [threading.get_ident()] * len(items)


def test_a_caller_runs_its_own_batch_and_starts_no_thread() -> None:
    before = set(threading.enumerate())  # those of other tests may end
    with greedy(runners) as batcher:
        assert batcher(1) == threading.get_ident()
        assert set(threading.enumerate()) <= before


def test_a_caller_keeps_the_time_for_its_own_batch() -> None:
    before = set(threading.enumerate())  # those of other tests may end
    with Batcher(runners, policy=functools.partial(Window, wait_ms=5)) as batcher:
        assert batcher(1) == threading.get_ident()
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("way", ["call", "submit"])
def test_a_policy_may_wait_for_longer_than_threads_can(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[object] = []
    with Batcher(runners, policy=functools.partial(Window, wait_ms=1e18)) as batcher:
        if way == "call":
            caller = start(lambda: answers.append(batcher(1)))
        else:
            caller = start(lambda: answers.append(batcher.submit(1).result(LONG_S)))
        wait_until(lambda: batcher.stats().queued == 1)
        time.sleep(0.02)  # for whoever keeps the time
        batcher.drain(LONG_S)
        join(caller)
    assert len(answers) == 1
    assert caplog.text == ""


def test_functions_that_care_run_in_workers_only() -> None:
    with greedy(runners, caller_runs=False) as batcher:
        idents = {batcher(1) for _ in range(5)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_a_caller_runs_nobody_elses_batches() -> None:
    """After its own answer is there it goes, however much is queued."""
    gate = Gate()
    with greedy(gate, max_batch_size=1) as batcher:
        answered = threading.Event()
        caller = start(lambda: (batcher(0), answered.set()))
        gate.wait_entered()
        rest = [batcher.submit(item) for item in range(1, 20)]
        gate.open()
        assert answered.wait(LONG_S)
        gate.open(19)
        assert [each.result(LONG_S) for each in rest] == list(range(1, 20))
        join(caller)


def test_the_next_batch_is_run_by_one_of_its_callers() -> None:
    gate = Gate()
    seen: list[int] = []

    def function(items: list[int]) -> list[int]:
        seen.append(threading.get_ident())
        return gate(items)

    with greedy(function) as batcher:
        callers = [start(lambda: batcher(0))]
        gate.wait_entered()
        callers += [start(functools.partial(batcher, item)) for item in (1, 2, 3)]
        wait_until(lambda: batcher.stats().queued == 3)
        gate.open(2)
        join(*callers)
    assert len(gate.batches) == 2
    assert seen[0] == callers[0].ident
    assert seen[1] in {each.ident for each in callers[1:]}


def test_time_is_kept_when_its_keeper_is_answered_and_gone() -> None:
    """Two devices: one caller's batch runs while others wait for the policy's timer."""
    with Batcher(runners, policy=functools.partial(Window, wait_ms=30), devices=2) as batcher:
        results: list[int] = []

        def call(priority: int) -> None:
            results.append(batcher(1, priority=priority))

        callers = []
        for index in range(6):
            callers.append(start(functools.partial(call, index % 2)))
            time.sleep(0.01)
        join(*callers)
        assert len(results) == 6


def test_time_is_kept_when_its_keepers_batch_is_run_by_another_caller() -> None:
    with Batcher(
        lambda rows: rows, max_batch_size=2, policy=functools.partial(Window, wait_ms=500)
    ) as batcher:
        keeper = start(lambda: batcher(np.ones(1)))
        wait_until(lambda: batcher.stats().queued == 1)
        other = batcher.submit(np.ones(2))
        batcher(np.ones(1))
        join(keeper)
        assert other.result(LONG_S).shape == (2,)


def test_a_worker_that_runs_a_batch_keeps_no_time() -> None:
    gate = Gate()
    with Batcher(gate, policy=functools.partial(Window, wait_ms=1), devices=2) as batcher:
        futures = []
        for item in range(2):
            futures.append(batcher.submit(item))
            gate.wait_entered()
        gate.open(2)
        assert [future.result(LONG_S) for future in futures] == [0, 1]


def test_many_threads_calling_at_once() -> None:
    """No answer is lost, none is somebody else's."""
    wrong: list[tuple[int, int]] = []
    with greedy(lambda items: [item + 1 for item in items], max_batch_size=7) as batcher:

        def call(start_at: int) -> None:
            for item in range(start_at, start_at + 100):
                if batcher(item) != item + 1:
                    wrong.append((item, start_at))

        join(*[start(functools.partial(call, 1000 * index)) for index in range(12)])
        stats = batcher.stats()
    assert wrong == []
    assert stats.answered == stats.submitted == 1200


# --- interrupts -----------------------------------------------------------------------------------


def interrupt_main() -> None:
    # A real signal, which ends the wait for a lock.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextlib.contextmanager
def interrupted_wait(
    batcher: Batcher[int, int], meanwhile: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """What the main thread waits for in this block is interrupted, once ``meanwhile`` was done."""

    def interrupt() -> None:
        wait_until(lambda: batcher.stats().queued == 1)
        meanwhile()
        wait_until_main_sleeps()
        interrupt_main()

    other = start(interrupt)
    with pytest.raises(KeyboardInterrupt):
        yield
    join(other)


@pytest.mark.usefixtures("python_handler")
def test_an_interrupted_caller_loses_nobody_elses_answer() -> None:
    runs: list[list[int]] = []
    waiting = threading.Event()

    def function(items: list[int]) -> list[int]:
        runs.append(list(items))
        if len(items) > 1 and threading.current_thread() is threading.main_thread():
            interrupt_main()
            time.sleep(LONG_S)
        return items

    with Batcher(function, policy=patient, max_batch_size=3) as batcher:
        others: list[Any] = []

        def submit() -> None:
            wait_until(lambda: batcher.stats().queued == 1)
            others.append(batcher.submit(1))
            others.append(batcher.submit(2))
            waiting.set()

        other = start(submit)
        with pytest.raises(KeyboardInterrupt):
            batcher(0)
        join(other)
        assert waiting.is_set()
        batcher.drain(LONG_S)
        assert [each.result(0) for each in others] == [1, 2]
        assert sorted(runs[0]) == [0, 1, 2]
        assert sorted(runs[1]) == [1, 2]
        later = batcher.submit(5)
        batcher.drain(LONG_S)
        assert later.result(0) == 5
        assert batcher.stats().cancelled == 1


@pytest.mark.usefixtures("python_handler")
def test_an_interrupted_wait_gives_the_request_up() -> None:
    gate = Gate()
    with greedy(gate) as batcher:
        running = batcher.submit(0)
        gate.wait_entered()
        with interrupted_wait(batcher):
            batcher(1)
        wait_until(lambda: batcher.stats().cancelled == 1)
        gate.open()
        assert running.result(LONG_S) == 0
    assert gate.batches == [[0]]


@pytest.mark.usefixtures("python_handler")
def test_an_interrupted_caller_keeps_no_time() -> None:
    now_ns, others = [0], list[BatchFuture[int]]()
    window = functools.partial(Window, wait_ms=1)
    with Batcher(lambda items: items, policy=window, clock_ns=lambda: now_ns[0]) as batcher:
        with interrupted_wait(batcher, lambda: others.append(batcher.submit(1))):
            batcher(0)
        now_ns[0] += 1_000_000
        assert others[0].result(LONG_S) == 1


@pytest.mark.usefixtures("python_handler")
def test_an_interrupted_caller_runs_nothing_and_nothing_runs_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if its batch is made before its request has left the queue."""
    cancel, others = threads.ThreadDispatch.cancel, list[BatchFuture[int]]()
    runs: list[list[int]] = []

    def late(dispatch: threads.ThreadDispatch, request: Request) -> None:
        join(start(lambda: others.append(batcher.submit(1))))
        cancel(dispatch, request)

    def function(items: list[int]) -> list[int]:
        runs.append(list(items))
        return items

    monkeypatch.setattr(threads.ThreadDispatch, "cancel", late)
    with Batcher(function, policy=patient, max_batch_size=2) as batcher:
        with interrupted_wait(batcher):
            batcher(0)
        assert others[0].result(LONG_S) == 1
    assert runs == [[1]]
    assert batcher.stats().cancelled == 1


def test_a_caller_that_is_interrupted_as_its_batch_begins_is_in_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter = threads.ThreadDispatch._enter

    def interrupted(dispatch: threads.ThreadDispatch) -> int:
        enter(dispatch)
        raise KeyboardInterrupt

    with greedy(lambda items: items) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(threads.ThreadDispatch, "_enter", interrupted)
            with pytest.raises(KeyboardInterrupt):
                batcher(0)
        batcher.drain(LONG_S)
        assert batcher.submit(1).result(LONG_S) == 1


@pytest.mark.usefixtures("python_handler")
def test_a_policy_that_is_interrupted_gets_its_requests_back() -> None:
    class Interrupted(Window):
        count = 0

        def choose(self, now_ns: int) -> int:
            Interrupted.count += 1
            if Interrupted.count == 2:
                raise KeyboardInterrupt
            return super().choose(now_ns)

    policy = functools.partial(Interrupted, wait_ms=1e6)
    with Batcher(lambda items: items, policy=policy) as batcher:
        first = batcher.submit(1)
        with pytest.raises(KeyboardInterrupt):
            batcher.submit(2)
        batcher.drain(LONG_S)
        assert first.result(0) == 1
        later = batcher.submit(3)
        batcher.drain(LONG_S)
        assert later.result(0) == 3


def test_a_time_limit_ends_its_caller_and_is_no_failure_of_a_batch(
    time_limit: type[Exception],
) -> None:
    def function(items: list[int]) -> list[int]:
        if len(items) > 1 and threading.current_thread() is threading.main_thread():
            interrupt_main()
            time.sleep(LONG_S)
        return items

    with Batcher(function, policy=patient, max_batch_size=2) as batcher:
        futures: list[Any] = []

        def submit() -> None:
            wait_until(lambda: batcher.stats().queued == 1)
            futures.append(batcher.submit(1))

        other = start(submit)
        with pytest.raises(time_limit):
            batcher(0)
        join(other)
        batcher.drain(LONG_S)
        assert futures[0].result(0) == 1


def test_a_time_limit_within_a_policy_is_no_failure_of_it(time_limit: type[Exception]) -> None:
    class Limited(Window):
        count = 0

        def choose(self, now_ns: int) -> int:
            Limited.count += 1
            if Limited.count == 2:
                interrupt_main()
                time.sleep(LONG_S)
            return super().choose(now_ns)

    with Batcher(lambda items: items, policy=functools.partial(Limited, wait_ms=1e6)) as batcher:
        first = batcher.submit(1)
        with pytest.raises(time_limit):
            batcher.submit(2)
        batcher.drain(LONG_S)
        assert first.result(0) == 1
        later = batcher.submit(3)
        batcher.drain(LONG_S)
        assert later.result(0) == 3


def test_a_failed_policy_never_oversubscribes_a_device() -> None:
    class Broken(Window):
        def choose(self, now_ns: int) -> int:
            if any(request.priority == 13 for request in self.queue):
                raise RuntimeError("thirteen")
            return super().choose(now_ns)

    gate = Gate()
    busy = []
    lock = threading.Lock()

    def function(items: list[int]) -> list[int]:
        assert lock.acquire(blocking=False), "two batches at once"
        try:
            busy.append(items)
            return gate(items)
        finally:
            lock.release()

    with Batcher(function, policy=functools.partial(Broken, wait_ms=0), devices=1) as batcher:
        first = batcher.submit(0)
        gate.wait_entered()
        # The policy is asked about it when the device is free; a timer would ask as well.
        batcher._engine.threads()._start_over(RuntimeError("as if"))
        second = batcher.submit(1)
        time.sleep(0.02)
        gate.open(2)
        assert [first.result(LONG_S), second.result(LONG_S)] == [0, 1]
    assert busy == [[0], [1]]


@contextlib.contextmanager
def on_interrupt(handler: Callable[[], object]) -> Iterator[None]:
    """A program's own handler of a signal, which returns."""
    old = signal.signal(signal.SIGINT, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize("caller_runs", [True, False])
@pytest.mark.parametrize("way", ["close", "drain", "call", "submit", "stream"])
def test_a_signal_handler_may_wait_while_its_thread_waits(way: str, caller_runs: bool) -> None:
    """As programs do to end gently: the handler waits for what its thread would have run."""
    found: list[object] = []
    batcher = Batcher(
        lambda items: items, policy=patient, max_batch_size=2, caller_runs=caller_runs
    )
    ways: dict[str, Callable[[], object]] = {
        "close": lambda: batcher.close(timeout_s=LONG_S),
        "drain": lambda: batcher.drain(LONG_S),
        "call": lambda: batcher(2),
        "submit": lambda: batcher.submit(2).result(LONG_S),
        "stream": lambda: next(iter(batcher.stream(2))),
    }

    begun: list[None] = []

    def interrupt() -> None:
        wait_until(lambda: batcher.stats().queued == 1)
        while not begun:  # Python sees one that comes just before a thread sleeps when it wakes
            interrupt_main()
            time.sleep(0.01)

    def handle() -> None:
        if not begun:
            begun.append(None)
            found.append(ways[way]())

    with on_interrupt(handle):
        other = start(interrupt)
        assert batcher(1) == 1
        join(other)
    assert found == [None if way in ("close", "drain") else 2]
    batcher.close()
    assert batcher.stats().answered == len([1, *filter(None, found)])


def test_a_handler_in_the_middle_of_a_turn_does_not_wait_for_its_end() -> None:
    found: list[object] = []

    class Interrupted(Window):
        count = 0

        def choose(self, now_ns: int) -> int:
            Interrupted.count += 1
            if Interrupted.count == 2:
                interrupt_main()
            return super().choose(now_ns)

    def handle() -> None:
        found.append(batcher(0))
        with pytest.raises(RuntimeError, match="comes after it"):
            batcher.drain()
        with pytest.raises(RuntimeError, match="comes after it"):
            batcher.submit(3).result()
        batcher.close()

    batcher = Batcher(lambda items: items, policy=functools.partial(Interrupted, wait_ms=1e6))
    with on_interrupt(handle):
        futures = [batcher.submit(1), batcher.submit(2)]
        assert [future.result(LONG_S) for future in futures] == [1, 2]
    assert found == [0]
    batcher.close()


def test_a_handler_before_anybody_has_seen_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = threads.ThreadDispatch.settle
    drained: list[object] = []

    def interrupted(dispatch: threads.ThreadDispatch, me: Any = None) -> None:
        if not isinstance(me, Seat):
            return settle(dispatch, me)
        monkeypatch.setattr(threads.ThreadDispatch, "settle", settle)
        interrupt_main()
        return settle(dispatch, me)

    with (
        Batcher(lambda items: items, policy=patient) as batcher,
        on_interrupt(lambda: drained.append(batcher.drain(LONG_S))),
    ):
        monkeypatch.setattr(threads.ThreadDispatch, "settle", interrupted)
        assert batcher(1) == 1
    assert drained == [None]


def test_a_handler_while_a_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start
    found: list[object] = []

    def interrupted(thread: threading.Thread) -> None:
        interrupt_main()
        begin(thread)

    with (
        greedy(lambda items: items, caller_runs=False) as batcher,
        on_interrupt(lambda: found.append(batcher(2))),
    ):
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        assert batcher(1) == 1
    assert found == [2]


def test_a_handler_before_a_worker_is_started_that_it_would_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = threads.ThreadDispatch._start
    found: list[object] = []

    def handle() -> None:
        with pytest.raises(RuntimeError, match="comes after it"):
            batcher.submit(2).result(LONG_S)
        found.append(batcher(3))

    def interrupted(dispatch: threads.ThreadDispatch, *worker: Any) -> None:
        if not found:
            interrupt_main()
        begin(dispatch, *worker)

    with greedy(lambda items: items) as batcher, on_interrupt(handle):
        monkeypatch.setattr(threads.ThreadDispatch, "_start", interrupted)
        assert batcher.submit(1).result(LONG_S) == 1
    assert found == [3]


@pytest.mark.parametrize("way", ["call", "submit", "wait"])
@pytest.mark.parametrize("has_caller", [False, True])
def test_a_callback_may_wait_in_the_thread_of_those_it_waits_for(
    way: str, has_caller: bool
) -> None:
    """Of a request that is dropped while its thread gets the next batch."""
    again: list[object] = []

    def retry(future: object) -> None:
        if way == "call":
            again.append(batcher("again"))
        else:
            future = batcher.submit("again")  # the queue is full
            again.append(future.result(LONG_S) if way == "wait" else future.result)

    gate = Gate()
    with Batcher(gate, policy="early_drop", max_batch_size=1, queue_size=2) as batcher:
        first = start(lambda: batcher(0)) if has_caller else batcher.submit(0)
        gate.wait_entered()
        batcher.submit(1, deadline_ms=0.001).add_done_callback(retry)
        rest = [batcher.submit(2)]
        threads = [start(lambda: rest.append(batcher.submit(3))) for _ in range(4)]
        wait_until(lambda: batcher.stats().queued == 6)
        gate.open(7)
        join(*threads)
        assert sorted(future.result(LONG_S) for future in rest) == [2, 3, 3, 3, 3]
        wait_until(lambda: len(again) == 1)
        assert again == ["again"] or again[0](LONG_S) == "again"  # type: ignore[operator]
        if isinstance(first, threading.Thread):
            join(first)


# --- workers --------------------------------------------------------------------------------------


def batch_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("batch-")}


def test_idle_workers_end_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.02)
    before = batch_threads()
    with greedy(runners) as batcher:
        first = batcher.submit(1).result(LONG_S)
        wait_until(lambda: batch_threads() <= before, "the end of the worker")
        assert isinstance(first, int)
        assert batcher.submit(1).result(LONG_S) is not None


def test_an_idle_worker_that_ends_does_not_keep_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.001)
    before, now_ns = batch_threads(), [1]
    with Batcher(
        runners, policy=functools.partial(Window, wait_ms=1), clock_ns=lambda: now_ns[0]
    ) as batcher:
        assert batcher.submit(1).cancel()
        now_ns[0] += 1_000_000  # its worker wakes for nothing
        wait_until(lambda: batch_threads() <= before, "the end of the worker")
        future = batcher.submit(1)
        now_ns[0] += 1_000_000
        assert future.result(LONG_S) is not None


@pytest.mark.parametrize("given", ["job", "wake_ns"])
def test_a_worker_that_got_something_to_do_meanwhile_does_not_end(given: str) -> None:
    with greedy(runners) as batcher:
        dispatch, worker = batcher._engine.threads(), Seat()
        dispatch.sit_down(worker)
        dispatch._idle.append(worker)
        setattr(worker, given, Job(0, [], 0) if given == "job" else 1)
        assert not dispatch.retire(worker)
        assert dispatch._seats[threading.get_ident()] is worker
        setattr(worker, given, None)
        assert dispatch.retire(worker)
        assert dispatch._idle == []
        assert dispatch._seats == {}


def test_what_is_asked_while_a_worker_ends_is_seen() -> None:
    futures: list[BatchFuture[Any]] = []

    class Idle(list[Seat]):
        def remove(self, seat: Seat) -> None:
            if seat is worker:
                join(start(lambda: futures.append(batcher.submit(1))))
            super().remove(seat)

    with greedy(runners) as batcher:
        dispatch, worker = batcher._engine.threads(), Seat()
        dispatch._idle = Idle([worker])
        assert dispatch.retire(worker)
        assert futures[0].result(LONG_S) is not None


def test_who_is_away_from_its_seat_gets_nothing_to_do() -> None:
    with greedy(runners) as batcher:
        dispatch = batcher._engine.threads()
        seat, other = Seat(), Seat()
        dispatch.sit_down(seat)
        dispatch._idle += [other, seat]
        for keeper, left in ((seat, None), (other, other)):
            dispatch._keeper = keeper
            dispatch._seats[threading.get_ident()] = seat
            dispatch.check_may_wait()
            assert dispatch._keeper is left
        assert seat.is_away
        assert dispatch._idle == [other]
        dispatch._idle.clear()
        dispatch._keeper = None


def test_who_gets_a_batch_keeps_the_time_no_longer() -> None:
    with greedy(runners) as batcher:
        dispatch, keeper = batcher._engine.threads(), Seat()
        dispatch._keeper, keeper.wake_ns = keeper, 1
        dispatch._give(Job(0, [], 0), keeper)
        assert (dispatch._keeper, keeper.wake_ns) == (None, None)


def test_the_end_of_a_job_takes_no_later_one_from_its_runner() -> None:
    with greedy(runners) as batcher:
        job, later = Job(0, [], 0), Job(0, [], 0)
        job.runner = seat = Seat()
        for given, left in ((job, None), (later, later)):
            seat.job = given
            batcher._engine.threads()._free_seat(job)
            assert seat.job is left


def test_batches_in_pieces_are_run_by_workers_only() -> None:
    """A caller would have its answer before the others have all of theirs."""

    def pieces(items: list[int]) -> Iterator[list[int]]:
        yield runners(items)

    with greedy(pieces) as batcher:
        assert batcher(1) != [threading.get_ident()]


def test_closing_ends_the_workers() -> None:
    before = batch_threads()
    batcher = greedy(runners)
    batcher.submit(1).result(LONG_S)
    batcher.close()
    wait_until(lambda: batch_threads() <= before, "the end of the worker")


def test_closing_ends_a_worker_whose_time_nobody_waits_for() -> None:
    before = batch_threads()
    batcher = Batcher(runners, max_batch_size=2, policy=patient)
    future = batcher.submit(1)  # a worker keeps the time
    assert batcher(2) == future.result(LONG_S) == threading.get_ident()
    batcher.close(timeout_s=LONG_S)
    wait_until(lambda: batch_threads() <= before, "the end of the worker")


def test_closing_ends_a_worker_that_an_interrupt_left_without_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = batch_threads()
    batcher = greedy(runners)
    batcher.submit(1).result(LONG_S)
    batcher.drain(LONG_S)
    free_worker = threads.ThreadDispatch._free_worker

    def interrupted(dispatch: threads.ThreadDispatch) -> Any:
        monkeypatch.setattr(threads.ThreadDispatch, "_free_worker", free_worker)
        free_worker(dispatch)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads.ThreadDispatch, "_free_worker", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batcher.submit(2)
    batcher.close(timeout_s=LONG_S)
    assert batch_threads() <= before


def test_a_finalizer_in_a_worker_waits_for_no_batch_that_this_worker_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[Exception] = []

    def finalize() -> None:
        try:
            batcher.drain(0.01)
        except (RuntimeError, TimeoutError) as error:
            errors.append(error)

    class Idle(list[Seat]):
        def append(self, seat: Seat) -> None:
            finalize()
            super().append(seat)

    with greedy(runners) as batcher:
        monkeypatch.setattr(threads, "adopt_torch_threads", finalize)
        batcher._engine.threads()._idle = Idle()
        assert batcher.submit(1).result(LONG_S) is not None
        batcher.drain(LONG_S)
    assert [type(error) for error in errors] == [RuntimeError] * 2


def test_a_finalizer_in_a_thread_that_begins_waits_for_no_batch_that_is_meant_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, errors = threads._begin, []

    def begins(*arguments: Any) -> None:
        try:
            batcher.drain(0.01)
        except (RuntimeError, TimeoutError) as error:
            errors.append(type(error))
        begin(*arguments)

    monkeypatch.setattr(threads, "_begin", begins)
    with greedy(lambda items: items) as batcher:
        assert batcher.submit(1).result(LONG_S) == 1
    assert errors == [RuntimeError]


def test_a_finalizer_in_a_thread_that_is_in_no_list_yet_waits_for_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_number, errors = threading.Thread._set_native_id, []  # type: ignore[attr-defined]

    def sets_number(thread: threading.Thread) -> None:
        set_number(thread)
        try:
            batcher.drain(0.01)
        except (RuntimeError, TimeoutError) as error:
            errors.append(type(error))

    with greedy(lambda items: items) as batcher:
        monkeypatch.setattr(threading.Thread, "_set_native_id", sets_number)
        assert batcher.submit(1).result(LONG_S) == 1
        monkeypatch.undo()
    assert errors == [RuntimeError]


def test_no_more_workers_than_devices() -> None:
    gate = Gate()
    before = batch_threads()
    with greedy(gate, devices=2, max_batch_size=1) as batcher:
        futures = [batcher.submit(item) for item in range(10)]
        gate.open(10)
        assert [each.result(LONG_S) for each in futures] == list(range(10))
        assert len(batch_threads() - before) <= 2


def switches(thread: int) -> int:
    """How often a thread has given up the processor by itself, so far."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_idle_workers_use_no_processor() -> None:
    """Nobody polls: an idle batcher with a worker does not switch."""
    with greedy(lambda items: [threading.get_native_id()] * len(items)) as batcher:
        worker = batcher.submit(1).result(LONG_S)
        time.sleep(0.05)
        before = switches(worker)
        time.sleep(0.3)
        assert switches(worker) - before < 10  # some, if it was slow to fall asleep


def test_workers_adopt_torchs_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    torch = types.ModuleType("torch")
    torch.get_num_threads = lambda: asked.append(threading.get_ident())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    with greedy(runners, collate="list") as batcher:
        assert batcher.submit(1).result(LONG_S) == asked[0]
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # being imported
        assert batcher.submit(1).result(LONG_S) == asked[0]


def test_a_worker_without_memory_fails_its_batch_and_serves_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = iter([MemoryError])

    def without_memory() -> None:
        for error in errors:
            raise error

    monkeypatch.setattr("trims_shim.batching.drivers.threads.adopt_torch_threads", without_memory)
    with greedy(runners) as batcher:
        with pytest.raises(MemoryError):
            batcher.submit(1).result(LONG_S)
        assert batcher.submit(2).result(LONG_S) is not None


def test_a_batch_that_changes_hands_gets_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what comes right afterwards fails, and the event is taken once more."""
    with greedy(runners, collate="list") as batcher:
        assert batcher.submit(1).result(LONG_S)
        dispatch = batcher._engine.threads()
        future: BatchFuture[int] = BatchFuture()
        entry = Entry((2,), future, NEVER_NS, None)
        job = Job(0, [Request(0, 0, NEVER_NS, 0, None, 1, entry)], dispatch._era)
        dispatch._jobs.add(job)
        give, given = dispatch._give, list[Seat]()

        def give_and_fail(job: Job, seat: Seat) -> None:
            give(job, seat)
            given.append(seat)
            raise MemoryError

        monkeypatch.setattr(dispatch, "_give", give_and_fail)
        dispatch._hand_over(job)
        assert future.result(LONG_S)
        assert len(given) == 1


# Subinterpreters allow no daemon threads, and say so as one is made.
no_thread = pytest.mark.parametrize("step", ["__init__", "start"])


def refuse_thread(*args: object, **options: object) -> None:
    raise RuntimeError("can't start new thread")


@no_thread
def test_where_no_thread_can_be_had_requests_fail(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with greedy(runners) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, step, refuse_thread)
            future = batcher.submit(1)
            with pytest.raises(RuntimeError, match=r"runners needs a thread .*a plain call"):
                future.result(LONG_S)
            assert batcher(1) == threading.get_ident()
        assert batcher.submit(1).result(LONG_S) is not None


@no_thread
def test_where_no_thread_keeps_the_time_requests_fail(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with Batcher(runners, policy=functools.partial(Window, wait_ms=10)) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, step, refuse_thread)
            future = batcher.submit(1)
            assert isinstance(future.exception(LONG_S), RuntimeError)
        assert batcher.submit(1).result(LONG_S) is not None


@pytest.mark.parametrize("step", ["__init__", "start"])
def test_an_interrupt_while_a_worker_is_started_keeps_no_device(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    do, errors = getattr(threading.Thread, step), iter([KeyboardInterrupt])

    def interrupted(*args: object, **options: object) -> None:
        for error in errors:
            raise error
        do(*args, **options)

    with greedy(runners) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                batcher.submit(1)
        assert batcher.submit(1).result(LONG_S) is not None


def test_a_second_interrupt_while_a_worker_is_replaced_keeps_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupts = [KeyboardInterrupt] * 2

    def interrupted(do: Callable[..., object]) -> Callable[..., object]:
        def raises(*args: object) -> object:
            if interrupts:
                raise interrupts.pop()
            return do(*args)

        return raises

    with greedy(runners) as batcher:
        with monkeypatch.context() as patch:
            for owner, name in [(threading.Thread, "start"), (threads.ThreadDispatch, "_replace")]:
                patch.setattr(owner, name, interrupted(getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                batcher.submit(1)
        assert not interrupts
        assert batcher.submit(1).result(LONG_S) is not None


def test_a_callback_that_raises_no_exception_ends_no_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def leave(future: object) -> None:
        raise SystemExit

    gate, before = Gate(), batch_threads()
    with Batcher(gate, policy="early_drop", max_batch_size=1) as batcher:
        answered = batcher.submit(0)
        answered.add_done_callback(leave)
        gate.wait_entered()
        dropped = batcher.submit(1, deadline_ms=0.001)
        dropped.add_done_callback(leave)
        gate.open(5)
        assert answered.result(LONG_S) == 0
        assert dropped.exception(LONG_S) is not None
        assert batcher.submit(2).result(LONG_S) == 2
        assert len(batch_threads() - before) == 1
    assert "callback" in caplog.text


def test_failures_are_counted_whatever_callbacks_raise() -> None:
    def leave(future: object) -> None:
        raise SystemExit

    gate = Gate()

    def fail(items: list[int]) -> list[int]:
        gate(items)
        raise ValueError

    with Batcher(fail, policy="early_drop", isolate_failures=False) as batcher:
        futures = [batcher.submit(0)]
        gate.wait_entered()
        futures += [batcher.submit(item) for item in (1, 2, 3)]
        for future in futures:
            future.add_done_callback(leave)
        gate.open(2)
        for future in futures:
            assert isinstance(future.exception(LONG_S), ValueError)
        batcher.drain(LONG_S)
        assert batcher.stats().failed == 4


@pytest.mark.parametrize("devices", [1, 2])
def test_nobody_waits_in_the_middle_of_a_batch(devices: int) -> None:
    """On another device it might go well, unless that is held by one who waits, too."""

    may_end = threading.Event()

    def nested(items: list[int]) -> list[int]:
        if items == [1]:
            batcher.submit(0).result(LONG_S)
        assert may_end.wait(LONG_S)
        return items

    with greedy(nested, devices=devices, max_batch_size=1) as batcher:
        with pytest.raises(RuntimeError, match="runs a batch"):
            batcher(1)
        may_end.set()
        assert batcher(2) == 2


async def _serve_and_aclose(batcher: Batcher[Any, Any, Any]) -> None:
    async with batcher:
        await batcher.aio(1)


def _serve_and_close(batcher: Batcher[Any, Any, Any]) -> None:
    with batcher:
        batcher.submit(1).result()


@pytest.mark.parametrize(
    "serve",
    [_serve_and_close, lambda batcher: asyncio.run(_serve_and_aclose(batcher))],
    ids=["close", "aclose"],
)
def test_no_thread_holds_the_function_of_a_closed_batcher(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[[Batcher[Any, Any, Any]], None]
) -> None:
    step = threads._step

    def slow_step(dispatch: threads.ThreadDispatch, worker: Seat) -> bool:
        found = step(dispatch, worker)
        time.sleep(0.05)  # the answer is there, the thread is still busy
        return found

    monkeypatch.setattr(threads, "_step", slow_step)
    model = types.MethodType(lambda self, items: items, "weights")
    held = weakref.ref(model)
    batcher = greedy(model)
    serve(batcher)
    del batcher, model
    gc.collect()
    assert held() is None
