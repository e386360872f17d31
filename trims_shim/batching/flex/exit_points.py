"""Exit points: where a running batch can be given up for a better one.

There is one between any two stages of a model. Inside a stage that is a loop, or makes many calls,
:func:`exit_point` adds more. Each costs a look at a flag. A batch is never stopped anywhere else.

A batch is stopped by an exception that is no ``Exception``, so that ``except Exception`` in a model
does not swallow it; ``finally`` and context managers work as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from trims_shim.batching.drivers.lanes import Lane

__all__ = ["ExitPoints", "GivenUp", "exit_point"]

_here = threading.local()


class GivenUp(BaseException):
    """This batch is no longer wanted. Only the executor catches it."""


class ExitPoints:
    """The exit points of one running batch: a context manager of the thread that runs it.

    ``is_unwanted`` is asked at each exit point. ``marks_ns`` has the times at which they were
    passed, from which the executor learns where they are.
    """

    def __init__(
        self, is_unwanted: Callable[[], bool], lane: Lane, clock_ns: Callable[[], int]
    ) -> None:
        self.marks_ns: list[int] = []
        self._is_unwanted = is_unwanted
        self._lane = lane
        self._clock_ns = clock_ns
        self._outer: ExitPoints | None = None

    def check(self) -> None:
        """Pass one. Raises GivenUp if the batch is not wanted."""
        self._lane.stage_done()
        self.marks_ns.append(self._clock_ns())
        if self._is_unwanted():
            raise GivenUp

    def __enter__(self) -> ExitPoints:
        self._outer = getattr(_here, "points", None)
        _here.points = self
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _here.points = self._outer


def exit_point() -> None:
    """Let a batch of :class:`~trims_shim.batching.flex.batcher.FlexBatcher` be given up here.

    Models call it in the thread that runs their stage, between pieces of work whose results are not
    needed if the batch runs again. Anywhere else it does nothing.
    """
    points = getattr(_here, "points", None)
    if points is not None:
        points.check()
