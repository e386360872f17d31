"""Shared memory is used again where it fits, and closed where it is no longer needed."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from trims_shim.ensemble.buffers import Buffer, Buffers

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.usefixtures("no_leak")


def filled(buffers: Buffers, size_bytes: int) -> Buffer:
    return buffers.filled([memoryview(bytes(size_bytes))])[0]


def test_parts_lie_apart_where_arrays_are_aligned() -> None:
    parts = [b"pickle", b"", b"x" * 64, b"array" * 1000]
    buffer, layout = Buffers(most_free=0).filled([memoryview(part) for part in parts])
    assert [buffer.memory[at : at + size] for at, size in layout.spans] == parts
    assert [at % 64 for at, _ in layout.spans] == [0] * 4
    assert layout.buffer == buffer.number
    assert len(buffer.memory) == os.fstat(buffer.descriptor).st_size == 2 * PAGE
    buffer.close()


def test_a_free_buffer_is_used_where_it_fits() -> None:
    buffers = Buffers(most_free=2)
    small, large = filled(buffers, PAGE), filled(buffers, 5 * PAGE)
    assert buffers.give_back(small) is buffers.give_back(large) is None
    between = filled(buffers, PAGE + 1)
    assert between.number not in (small.number, large.number)
    assert filled(buffers, PAGE) is small, "the other one is far too large"
    assert filled(buffers, 2 * PAGE) is large
    for buffer in (small, between, large):
        buffer.close()


def test_the_oldest_of_too_many_is_closed() -> None:
    buffers = Buffers(most_free=2)
    made = [filled(buffers, PAGE) for _ in range(3)]
    assert [buffers.give_back(buffer) for buffer in made] == [None, None, made[0]]
    assert [buffer.memory.closed for buffer in made] == [True, False, False]
    buffers.close()
    assert all(buffer.memory.closed for buffer in made)


def test_where_no_memory_is_left_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="No space left"):
        filled(Buffers(most_free=1), PAGE)


def test_a_copy_that_is_broken_off_leaves_nothing() -> None:
    parts: Any = [memoryview(b"pickle"), SimpleNamespace(nbytes=PAGE)]
    with pytest.raises(TypeError, match="bytes-like"):
        Buffers(most_free=1).filled(parts)


@pytest.mark.parametrize("step", range(6))
def test_who_closes_them_at_a_step_of_who_takes_one_does_not_wait(step: int) -> None:
    buffers, taken = Buffers(most_free=1), []
    buffers.give_back(filled(buffers, PAGE))
    steps = iter(range(100))

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and next(steps) == step:
            buffers.close()
        return trace

    def take() -> None:
        sys.settrace(lambda frame, *_: trace if frame.f_code.co_name == "_taken" else None)
        try:
            taken.append(filled(buffers, PAGE))
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(60)
    for each in taken:
        each.close()
    assert taken
    assert next(steps) > step
