from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
from harness import PATIENCE_S, wait_until

from trims_shim.daemon.workers import Workers


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Work that waits for it blocks until the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_results_and_errors() -> None:
    workers = Workers(2)
    assert workers.submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 7, 0).result(PATIENCE_S)
    workers.shutdown()


def test_what_a_task_was_given_is_not_kept_until_the_next_one() -> None:
    class Thing:
        """Can be watched."""

    thing = Thing()
    gone = weakref.ref(thing)
    workers = Workers(1)
    workers.submit(id, thing).result(PATIENCE_S)
    del thing
    wait_until(lambda: gone() is None)
    workers.shutdown()


def test_one_thread_works_in_order() -> None:
    workers = Workers(1)
    seen: list[int] = []
    for number in range(100):
        workers.submit(seen.append, number)
    workers.shutdown()
    assert seen == list(range(100))


def test_threads_that_are_stuck_are_replaced(stuck: threading.Event) -> None:
    workers = Workers(2)
    blocked = [workers.submit(stuck.wait) for _ in range(3)]
    waiting = workers.submit(str, 1)
    wait_until(lambda: blocked[1].running())
    workers.replace(1)
    wait_until(lambda: blocked[2].running())
    assert not waiting.done()
    workers.replace(3)
    assert waiting.result(PATIENCE_S) == "1"


def test_what_replaced_them_goes_when_they_are_back(stuck: threading.Event) -> None:
    before = set(threading.enumerate())  # those of other tests may end

    def count() -> int:
        return len(set(threading.enumerate()) - before)

    workers = Workers(2)
    blocked = [workers.submit(stuck.wait) for _ in range(2)]
    workers.replace(2)
    assert count() == 4
    stuck.set()
    for each in blocked:
        each.result(PATIENCE_S)
    workers.replace(0)

    def has_shrunk() -> bool:
        workers.submit(str, 1).result(PATIENCE_S)
        return count() == 2

    wait_until(has_shrunk)
    for _ in range(5):
        workers.submit(str, 1).result(PATIENCE_S)
    assert count() == 2, "as many as at first stay"
    workers.shutdown()
    assert count() == 0


def test_there_is_an_end_to_it(stuck: threading.Event) -> None:
    workers = Workers(1)
    before = set(threading.enumerate())
    workers.replace(10_000)
    assert len(set(threading.enumerate()) - before) < 100
    workers.shutdown()


def test_no_more_threads_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        workers.replace(1)
        with pytest.raises(RuntimeError):
            Workers(1)
    assert workers.submit(str, 1).result(PATIENCE_S) == "1"
    workers.shutdown()


def test_those_that_started_end_if_others_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: they waited for work for ever, and every further try took some more."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(RuntimeError):
            Workers(4)
    assert len(started) == 2
    wait_until(lambda: not any(each.is_alive() for each in started))


def test_one_that_is_stuck_is_waited_for_with_patience(stuck: threading.Event) -> None:
    workers = Workers(1)
    wait_until(workers.submit(stuck.wait).running)
    workers.shutdown(patience_s=0.01)
    assert not stuck.is_set()


def test_shutdown(stuck: threading.Event) -> None:
    workers = Workers(1)
    running = workers.submit(stuck.wait)
    wait_until(running.running)
    never = workers.submit(str, 1)
    workers.shutdown(wait=False, cancel_futures=True)
    assert never.cancelled()
    with pytest.raises(RuntimeError, match="shutdown"):
        workers.submit(str, 1)
