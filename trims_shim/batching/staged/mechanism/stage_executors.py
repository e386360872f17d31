"""The executors of the stages, as a table of transitions: one for each stage, one part at a time.

=========  ==================================================================
inactive   none of its buffer pairs is legal
active     a pair is legal, and the batch queue is empty
checking   it has a part, but the part's own pair is not legal or no device is free
working    it runs the part
=========  ==================================================================

A pair is legal if the input may be read and the output written. Source: DVABatch (ATC'22), section
5.3 and figure 9.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping

from trims_shim.batching.staged.mechanism.batches import Part

__all__ = ["EXECUTOR_TRANSITIONS", "ExecutorEvent", "ExecutorState", "StageExecutor"]


class ExecutorState(enum.Enum):
    """See the module docstring."""

    INACTIVE = "inactive"
    ACTIVE = "active"
    CHECKING = "checking"
    WORKING = "working"

    __hash__ = object.__hash__  # that of Enum is a function in Python, called at each step


class ExecutorEvent(enum.Enum):
    """What happens to an executor."""

    PAIR_LEGAL = "a pair is legal"
    NO_PAIR_LEGAL = "no pair is legal"
    TAKE = "take a part"
    WITHDRAWN = "the part was withdrawn"
    START = "start"
    DONE = "done"

    __hash__ = object.__hash__  # that of Enum is a function in Python, called at each step


_S, _E = ExecutorState, ExecutorEvent
EXECUTOR_TRANSITIONS: Mapping[tuple[ExecutorState, ExecutorEvent], ExecutorState] = {
    (_S.INACTIVE, _E.PAIR_LEGAL): _S.ACTIVE,
    (_S.ACTIVE, _E.NO_PAIR_LEGAL): _S.INACTIVE,
    (_S.ACTIVE, _E.TAKE): _S.CHECKING,
    (_S.CHECKING, _E.WITHDRAWN): _S.ACTIVE,
    (_S.CHECKING, _E.START): _S.WORKING,
    (_S.WORKING, _E.DONE): _S.ACTIVE,
}


class StageExecutor:
    """One stage: its batch queue, and what it is doing."""

    __slots__ = ("part", "queue", "state")

    def __init__(self) -> None:
        self.state = ExecutorState.INACTIVE
        self.queue: deque[Part] = deque()
        self.part: Part | None = None
        """The part it has taken or runs."""

    @property
    def is_idle(self) -> bool:
        """No part runs or is queued."""
        return self.part is None and not self.queue

    def handle(self, event: ExecutorEvent) -> None:
        """Raise RuntimeError if this state does not permit the event."""
        state = EXECUTOR_TRANSITIONS.get((self.state, event))
        if state is None:
            raise RuntimeError(f"an executor that is {self.state.value} cannot {event.value!r}")
        self.state = state

    def discard(self, part: Part) -> None:
        """Give up a part that must not run now: it was cancelled, split, or has to wait."""
        if self.part is part:
            self.part = None
            self.handle(ExecutorEvent.WITHDRAWN)
        elif part in self.queue:
            self.queue.remove(part)
