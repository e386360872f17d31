"""The buffers before the stages, as a table of transitions.

Each stage reads from a buffer before it and writes to one before the next stage. An input and its
output form a *pair*; each stage has one buffer for each pair, and a batch uses the same pair number
at every stage. A buffer holds parts of one batch only. Its state keeps a stage from overwriting
data that another stage still reads:

=========  =============================================================
invalid    empty: any batch may write
writing    the stage before is writing it
available  complete: may be read, or written to by parts of the same batch
           that catch up
reading    its own stage is reading it
=========  =============================================================

Source: DVABatch (ATC'22), section 5.3. Its published code marks pairs by a ring of tokens; this
table states the rule that the tokens enforce.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from trims_shim.batching.staged.mechanism.batches import Batch

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
    """A part appears without a write: new requests, or a part that ran on through stages."""
    WRITE = "write"
    """The stage before starts."""
    WRITTEN = "written"
    """The stage before has ended and left a part in the buffer."""
    NOTHING_WRITTEN = "nothing written"
    """The stage before has ended and left nothing: all requests are finished or cancelled."""
    READ = "read"
    """Its own stage starts."""
    REMAINDER = "remainder"
    """Its own stage has ended, and parts remain: others, or the same one if the stage is a loop."""
    CLEARED = "cleared"
    """Its own stage has ended, or all requests were cancelled, and nothing remains."""

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
        """The batch whose parts it holds or is being written with."""

    def may_write(self, batch: Batch) -> bool:
        """Whether a part of this batch may be put into it."""
        if self.state is BufferState.INVALID:
            return True
        return self.state is BufferState.AVAILABLE and self.owner is batch

    def may_read(self, batch: Batch) -> bool:
        """Whether it holds parts of this batch and no stage is reading or writing it."""
        return self.state is BufferState.AVAILABLE and self.owner is batch

    def handle(self, event: BufferEvent, batch: Batch) -> None:
        """Raise RuntimeError if this state, or another owner, does not permit the event."""
        state = BUFFER_TRANSITIONS.get((self.state, event))
        owner = self.owner
        if state is None or (owner is not batch and owner is not None):
            raise RuntimeError(
                f"a buffer that is {self.state.value} cannot take {event.value!r}"
                + (" of another batch" if owner not in (None, batch) else "")
            )
        self.state = state
        self.owner = None if state is BufferState.INVALID else batch
