"""What is asked of a remote at the same time: its answers come in the order of the questions."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["STREAMS", "in_order"]

T = TypeVar("T")

STREAMS = 8
"""So many answers are waited for at once."""


def in_order(calls: Iterable[Callable[[], T]]) -> Iterator[Future[T]]:
    """A future for each call, in order; ``STREAMS`` calls begin before the first is given."""
    begun: deque[Future[T]] = deque()
    for call in calls:
        begun.append(_begun(call))
        if len(begun) == STREAMS:
            yield begun.popleft()
    while begun:
        yield begun.popleft()  # who took an answer decides how long it is kept


def _begun(call: Callable[[], T]) -> Future[T]:
    """A call that a thread makes. No pool: at its exit, Python waits for those of a pool."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        # Whatever it is, it is raised where the answer is waited for.
        except BaseException as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=run, name="trims-fetch", daemon=True).start()
    except RuntimeError:
        run()  # There may be no more threads.
    return answer
