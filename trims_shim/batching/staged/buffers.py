"""The buffers before the stages, as a table of transitions.

Each stage reads from a buffer and writes to the one before the next stage; there are as many
buffers before each stage as there are *pairs* (an input and the output that belongs to it), and a
batch keeps to the same number at every stage. A buffer holds parts of one batch only. Its state is
what keeps a stage from overwriting what another one still reads:

=========  =============================================================
invalid    empty: whoever comes may write
writing    the stage before is at it
available  its content is whole: to be read, or to be written to by
           those of the same batch that catch up
reading    its own stage is at it
=========  =============================================================

Source: DVABatch (ATC'22), section 5.3; where its published code marks pairs by a ring of tokens,
this states what the tokens are for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from trims_shim.batching.staged.batches import Batch

__all__ = ["BUFFER_TRANSITIONS", "Buffer", "BufferEvent", "BufferState"]


class BufferState(enum.Enum):
    """See the module docstring."""

    INVALID = "invalid"
    WRITING = "writing"
    AVAILABLE = "available"
    READING = "reading"

    __hash__ = object.__hash__  # that of Enum is a function in Python, called at each step


class BufferEvent(enum.Enum):
    """What happens to a buffer."""

    ENTER = "enter"
    """Something is put into it at once: items that begin, or what has skipped stages."""
    WRITE = "write"
    """The stage before begins."""
    WRITTEN = "written"
    """It has ended, and something is in the buffer."""
    NOTHING_WRITTEN = "nothing written"
    """It has ended, and nothing is: all of it are finished, or nobody waits for them."""
    READ = "read"
    """Its own stage begins."""
    REMAINDER = "remainder"
    """It has ended, and other parts are still there; or the stage is a loop and goes on."""
    CLEARED = "cleared"
    """It has ended, or everything was withdrawn, and nothing is left."""

    __hash__ = object.__hash__  # that of Enum is a function in Python, called at each step


_S, _E = BufferState, BufferEvent
BUFFER_TRANSITIONS: Mapping[tuple[BufferState, BufferEvent], BufferState] = {
    (_S.INVALID, _E.ENTER): _S.AVAILABLE,
    (_S.AVAILABLE, _E.ENTER): _S.AVAILABLE,
    (_S.INVALID, _E.WRITE): _S.WRITING,
    (_S.AVAILABLE, _E.WRITE): _S.WRITING,
    (_S.WRITING, _E.WRITTEN): _S.AVAILABLE,
    (_S.WRITING, _E.NOTHING_WRITTEN): _S.INVALID,
    (_S.AVAILABLE, _E.READ): _S.READING,
    (_S.READING, _E.REMAINDER): _S.AVAILABLE,
    (_S.READING, _E.CLEARED): _S.INVALID,
    (_S.AVAILABLE, _E.CLEARED): _S.INVALID,
}


class Buffer:
    """One buffer before one stage."""

    __slots__ = ("owner", "state")

    def __init__(self) -> None:
        self.state = BufferState.INVALID
        self.owner: Batch | None = None
        """Whose parts it holds, or is being written with."""

    def may_write(self, batch: Batch) -> bool:
        """Whether a part of this batch may be put into it."""
        if self.state is BufferState.INVALID:
            return True
        return self.state is BufferState.AVAILABLE and self.owner is batch

    def may_read(self, batch: Batch) -> bool:
        """Whether it holds parts of this batch, and nobody is at it."""
        return self.state is BufferState.AVAILABLE and self.owner is batch

    def handle(self, event: BufferEvent, batch: Batch) -> None:
        """Raises RuntimeError for what must not happen in this state, or to this batch."""
        state = BUFFER_TRANSITIONS.get((self.state, event))
        owner = self.owner
        if state is None or (owner is not batch and owner is not None):
            raise RuntimeError(
                f"a buffer that is {self.state.value} cannot take {event.value!r}"
                + (" of another batch" if owner not in (None, batch) else "")
            )
        self.state = state
        self.owner = None if state is BufferState.INVALID else batch
