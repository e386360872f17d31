"""What threads share without a lock holds in each step, also without the interpreter's lock.

Most of these can fail on free-threaded Python only, where steps of several elements are no single
steps: a tuple of a deque, a look into the values of a dictionary, an increment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest

from trims_shim import diagnostics
from trims_shim.batching import Batcher
from trims_shim.batching.drivers.replies import BatchFuture, Seat
from trims_shim.batching.statistics import Record
from trims_shim.client import cache as caches
from trims_shim.memory import reclaim

THREADS = 8
LASTING_S = 0.3


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


def together(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, all begun at once; raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            barrier.wait(60)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def lasting(step: Callable[[], object]) -> Callable[[], None]:
    """Do this again and again for a moment."""

    def work() -> None:
        end_s = time.monotonic() + LASTING_S
        while time.monotonic() < end_s:
            step()

    return work


def test_no_count_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "_by_thread", {})
    times = 5000

    def count() -> None:
        for _ in range(times):
            diagnostics.count("open", "hit")

    together(*[count] * THREADS)
    assert diagnostics.stats().hits == THREADS * times


def test_counters_of_ended_threads_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "_by_thread", {})
    monkeypatch.setattr(diagnostics, "_reported", Counter())
    monkeypatch.setattr(diagnostics, "_MOST_ENDED", 1)
    threads = 60 + 2 * len(sys._current_exceptions())  # there may be some of other tests
    sys.setswitchinterval(0.005)  # A hundred threads that switch often may take minutes.
    together(*[lambda: diagnostics.count("open", "hit")] * threads)
    diagnostics.count("open", "miss")  # the first of this thread
    assert len(diagnostics._by_thread) < threads // 2
    events = {"open:hit": threads, "open:miss": 1}
    assert (diagnostics.stats().events, diagnostics.take_unreported()) == (events, events)


def test_no_count_is_lost_while_those_of_ended_threads_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnostics, "_by_thread", {})
    monkeypatch.setattr(diagnostics, "_MOST_ENDED", -1000)  # at each first count
    threads, rounds = 8, 100

    def start_others() -> None:
        for _ in range(rounds):
            other = threading.Thread(target=diagnostics.count, args=("open", "hit"))
            other.start()
            other.join(60)

    together(*[start_others] * threads)
    assert diagnostics.stats().hits == threads * rounds


def test_counts_are_reported_once_while_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "_by_thread", {})
    monkeypatch.setattr(diagnostics, "_reported", Counter())
    monkeypatch.setattr(diagnostics, "reporter", None)
    reported: list[dict[str, int]] = []
    numbers = iter(range(1 << 60))
    together(
        *[lasting(lambda: diagnostics.count("event", str(next(numbers) % 50)))] * 4,
        *[lasting(lambda: reported.append(diagnostics.take_unreported()))] * 2,
    )
    reported.append(diagnostics.take_unreported())
    totals: Counter[str] = Counter()
    for each in reported:
        totals.update(each)
    assert dict(totals) == diagnostics.stats().events


def test_statistics_are_read_while_batches_are_counted() -> None:
    record = Record(devices=1)
    for number in range(5000):  # as full as they get
        record.add_batch([number], number, number + 1)
        record.add_answer(number, number, number)
        record.add_wake(number)

    def count() -> None:
        record.add_batch([1, 2], 3, 4)
        record.add_answer(1, 2, 3)
        record.add_wake(1)

    together(
        lasting(count),
        lasting(lambda: record.snapshot(queued=0, running=0, now_ns=10)),
        lasting(lambda: Record(devices=1).merge(record)),
    )


def test_threads_begin_and_cease_to_wait_while_others_are_woken() -> None:
    future: BatchFuture[int] = BatchFuture()

    def wait() -> None:
        with pytest.raises(futures.TimeoutError):
            future.result(timeout=0)

    together(*[lasting(wait)] * 4, lasting(future._wake_sleepers))
    future.answer(1)
    assert future.result() == 1


def test_asking_whether_a_batch_runs_here_while_workers_start() -> None:
    batcher = Batcher(lambda items: items)
    dispatch = batcher._engine.threads()
    assert batcher(1) == 1

    seats = [Seat() for _ in range(200)]

    def start() -> None:
        for seat in seats:
            dispatch._starting[seat] = 0
        for seat in seats:
            del dispatch._starting[seat]

    together(lasting(start), lasting(dispatch.is_running_here))
    batcher.close()


def test_what_waits_to_be_freed_is_added_up_while_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = reclaim._batches.copy()
    monkeypatch.setattr(reclaim, "_batches", batches)

    def change() -> None:
        for _ in range(100):
            batches.append(reclaim._Batch([], 0.0))
        for _ in range(100):
            batches.popleft()

    together(lasting(change), lasting(reclaim.is_much))


def test_threads_that_load_first_get_one_cache() -> None:
    before = caches.exchange(None)
    try:
        for _ in range(50):
            found: list[object] = []
            together(*[lambda found=found: found.append(caches.cache())] * THREADS)  # type: ignore[misc]
            assert len(set(map(id, found))) == 1
            caches.exchange(None)
    finally:
        caches.exchange(before)
