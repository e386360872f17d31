"""What may be written and read when: each row of the table, and everything that is in none."""

from __future__ import annotations

from itertools import product

import pytest

from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import Batch, BatchTable
from trims_shim.batching.staged.mechanism.buffers import (
    BUFFER_TRANSITIONS,
    Buffer,
    BufferEvent,
    BufferState,
)

_WAYS = {
    BufferState.INVALID: (),
    BufferState.WRITING: (BufferEvent.WRITE,),
    BufferState.AVAILABLE: (BufferEvent.WRITE, BufferEvent.WRITTEN),
    BufferState.READING: (BufferEvent.WRITE, BufferEvent.WRITTEN, BufferEvent.READ),
}


def batch() -> Batch:
    return BatchTable(stages=1).new(0, [Request(0, 0)], pair=0).batch


def buffer_in(state: BufferState, owner: Batch) -> Buffer:
    buffer = Buffer()
    for event in _WAYS[state]:
        buffer.handle(event, owner)
    assert buffer.state is state
    return buffer


@pytest.mark.parametrize(("state", "event"), list(product(BufferState, BufferEvent)))
def test_only_what_is_in_the_table_can_happen(state: BufferState, event: BufferEvent) -> None:
    owner = batch()
    buffer = buffer_in(state, owner)
    after = BUFFER_TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(RuntimeError, match=f"is {state.value} cannot take '{event.value}'"):
            buffer.handle(event, owner)
        assert buffer.state is state
    else:
        buffer.handle(event, owner)
        assert buffer.state is after
        assert buffer.owner is (None if after is BufferState.INVALID else owner)


@pytest.mark.parametrize("event", BufferEvent)
@pytest.mark.parametrize("state", [each for each in BufferState if each is not BufferState.INVALID])
def test_a_buffer_is_that_of_one_batch(state: BufferState, event: BufferEvent) -> None:
    owner = batch()
    buffer = buffer_in(state, owner)
    with pytest.raises(RuntimeError, match="of another batch"):
        buffer.handle(event, batch())
    assert buffer.owner is owner


@pytest.mark.parametrize(
    ("state", "own_write", "others_write", "own_read"),
    [
        (BufferState.INVALID, True, True, False),
        (BufferState.WRITING, False, False, False),
        (BufferState.AVAILABLE, True, False, True),
        (BufferState.READING, False, False, False),
    ],
)
def test_who_may_do_what(
    state: BufferState, own_write: bool, others_write: bool, own_read: bool
) -> None:
    owner, other = batch(), batch()
    buffer = buffer_in(state, owner)
    assert buffer.may_write(owner) is own_write
    assert buffer.may_write(other) is others_write
    assert buffer.may_read(owner) is own_read
    assert not buffer.may_read(other)
