"""Waiting in tests of threads: always with an end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

from harness import PATIENCE_S, process_state, wait_until

from trims_shim.batching.drivers.replies import Seat

__all__ = ["LONG_S", "Endless", "Gate", "join", "start", "wait_until", "wait_until_main_sleeps"]

LONG_S = PATIENCE_S


def start(function: Callable[[], object]) -> threading.Thread:
    """A daemon thread; :func:`join` it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    """They end."""
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def wait_until_main_sleeps() -> None:
    """Until the main thread waits for its answer, and would see a signal.

    What it has asked for is queued before: in the middle of its turn, a handler may not wait. And a
    signal that comes between the last instruction and the sleep is seen by nobody (CPython).
    """
    main = threading.main_thread()

    def sleeps() -> bool:
        is_waiting = sys._current_frames()[main.ident or 0].f_code is Seat.sleep.__code__
        return is_waiting and process_state(main.native_id or 0) == "S"

    wait_until(sleeps, "the main thread sleeps")


class Gate:
    """A batch function that waits: ``entered`` batches are held until :meth:`open`."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []
        self._entered = threading.Semaphore(0)
        self._may_go = threading.Semaphore(0)

    def __call__(self, items: list[object]) -> list[object]:
        self.batches.append(list(items))
        self._entered.release()
        assert self._may_go.acquire(timeout=LONG_S)
        return items

    def wait_entered(self) -> None:
        """Until one more batch has begun."""
        assert self._entered.acquire(timeout=LONG_S)

    def open(self, times: int = 1) -> None:
        """Let so many batches go."""
        for _ in range(times):
            self._may_go.release()


class Endless:
    """A batch function that answers in pieces without end; ``ended`` once it was closed."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    def __call__(self, items: list[int]) -> Iterator[list[int]]:
        self.begun.set()
        try:
            while True:
                time.sleep(0.001)
                yield items
        finally:
            self.ended.set()
