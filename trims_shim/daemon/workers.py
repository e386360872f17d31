"""Threads for work that may block for ever, such as a read from a server that is gone.

Work runs in the order in which it was submitted. As many threads as are stuck, by their owner's
word or by the clock, are replaced by others, so that no work waits for the file of another.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

__all__ = ["Workers"]

_MOST_REPLACED = 64
_STUCK_AFTER_S = 5.0
_Task = tuple["Future[Any]", Callable[[], Any]]


class Workers(Executor):
    """Some threads, all started at once, so that work never waits for one that cannot be started.

    They end with the process, stuck ones too.
    """

    def __init__(self, threads: int) -> None:
        """Raises RuntimeError where the system has no more threads."""
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._begun: dict[threading.Thread, float] = {}
        """Since when each that works has had its task."""
        self._least = self._wanted = threads
        self._is_shut = False
        try:
            self._start_missing()
        except RuntimeError:
            self.shutdown(wait=False)  # Those that started would wait for work for ever.
            raise

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See :class:`concurrent.futures.Executor`."""
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot submit work after shutdown")
            future: Future[Any] = Future()
            self._tasks.put((future, partial(fn, *args, **kwargs)))
            return future

    def replace(self, stuck: int) -> None:
        """As many threads more as are stuck, from now on, as far as possible."""
        with self._lock:
            self._wanted = self._least + min(stuck, _MOST_REPLACED)
            with contextlib.suppress(RuntimeError):  # no more threads to be had; perhaps later
                self._start_missing()

    def replace_stuck(self) -> None:
        """Replace those that have had one task for some seconds; call about every second."""
        since_s = time.monotonic() - _STUCK_AFTER_S
        self.replace(sum(each <= since_s for each in list(self._begun.values())))

    def shutdown(
        self,
        wait: bool = True,
        *,
        cancel_futures: bool = False,
        patience_s: float | None = None,
    ) -> None:
        """See :class:`concurrent.futures.Executor`. A thread is waited for no longer than this."""
        with self._lock:
            self._is_shut = True
            tasks = self._remaining() if cancel_futures else []
            threads = list(self._threads)
            for _ in threads:
                self._tasks.put(None)
        for future, _ in tasks:
            future.cancel()
        if wait:
            for thread in threads:
                thread.join(patience_s)

    def _remaining(self) -> list[_Task]:
        tasks = []
        with contextlib.suppress(queue.Empty):
            while task := self._tasks.get_nowait():
                tasks.append(task)
        return tasks

    def _start_missing(self) -> None:
        while len(self._threads) < self._wanted:
            thread = threading.Thread(target=self._work, name="trims-load", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _work(self) -> None:
        me = threading.current_thread()
        while task := self._tasks.get():
            future, work = task
            if future.set_running_or_notify_cancel():
                self._begun[me] = time.monotonic()
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
                del self._begun[me]
            del task, future, work  # what they hold is not kept until the next task comes
            with self._lock:
                if len(self._threads) > self._wanted:
                    self._threads.remove(me)
                    return
