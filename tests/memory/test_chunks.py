"""Chunks come in order, from any number of threads; after the block no thread runs."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest

from trims_shim.errors import DriverFailure, ReadFailed
from trims_shim.memory.chunks import Chunk, Chunks, Sizes

pytestmark = pytest.mark.usefixtures("no_thread_left")

CHUNK = 8


class Recorder:
    """A step that writes each chunk's offset into it, after a while."""

    def __init__(self, sizes: Sizes) -> None:
        self.memory = bytearray(sizes.slots * sizes.chunk_bytes)
        self.offsets: list[int] = []
        self.sizes_bytes: list[int] = []
        self.ends: list[str] = []
        self.slowest_s = 0.0005

    def open(self) -> memoryview:
        return memoryview(self.memory)

    def in_thread(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def process(self, chunk: Chunk) -> None:
        time.sleep(random.random() * self.slowest_s)
        self.offsets.append(chunk.offset)
        self.sizes_bytes.append(len(chunk.part))
        for index in range(len(chunk.part)):
            chunk.part[index] = (chunk.offset + index) % 251

    def drain(self) -> None:
        self.ends.append("drain")

    def close(self) -> None:
        self.ends.append("close")


def transfer(step: Recorder, sizes: Sizes, threads: int = 4) -> Chunks:
    return Chunks(step, sizes, threads=threads, name="model")


def read_all(transfer: Chunks) -> bytes:
    read = bytearray()
    with transfer as ready:
        while (part := ready.next()) is not None:
            with part:
                read += part
        ready.finish()
    return bytes(read)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("slots", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("total", [0, 1, CHUNK, 13 * CHUNK + 5, 40 * CHUNK])
def test_in_order(threads: int, slots: int, total: int) -> None:
    sizes = Sizes(total, CHUNK, slots)
    step = Recorder(sizes)
    assert read_all(transfer(step, sizes, threads)) == bytes(index % 251 for index in range(total))
    assert sorted(step.offsets) == list(range(0, total, CHUNK))
    assert sum(step.sizes_bytes) == total, "nothing behind the end of the memory is written"
    assert step.ends == ["drain", "close"]


def test_threads_do_not_run_ahead_of_the_ring() -> None:
    """A slot that was handed out is not written before the next call."""
    sizes = Sizes(100 * CHUNK, CHUNK, 4)
    step = Recorder(sizes)
    step.slowest_s = 0
    with transfer(step, sizes) as ready:
        position = 0
        for number in range(10):
            part = ready.next()
            assert part is not None
            with part:
                before = bytes(part)
                time.sleep(0.005)
                assert bytes(part) == before, f"piece {number} was overwritten"
                assert max(step.offsets) < position + sizes.slots * CHUNK
                position += len(part)


def test_the_first_error_ends_it() -> None:
    sizes = Sizes(100 * CHUNK, CHUNK, 4)
    step = Recorder(sizes)
    process = step.process

    def fail(chunk: Chunk) -> None:
        if chunk.offset >= 10 * CHUNK:
            raise ZeroDivisionError("ten")
        process(chunk)

    step.process = fail  # type: ignore[method-assign]
    with pytest.raises(ReadFailed, match="model: ZeroDivisionError: ten"):
        read_all(transfer(step, sizes))
    assert len(step.offsets) <= 10
    assert step.ends == ["close"]


def test_a_thread_that_cannot_begin() -> None:
    sizes = Sizes(100 * CHUNK, CHUNK, 4)
    step = Recorder(sizes)

    @contextlib.contextmanager
    def refuse() -> Iterator[None]:
        raise DriverFailure("cuCtxSetCurrent")
        yield

    step.in_thread = refuse  # type: ignore[method-assign]
    with pytest.raises(DriverFailure), transfer(step, sizes) as ready:
        ready.next()


def test_memory_that_cannot_be_had() -> None:
    """Whatever was opened before is closed, though the block was never entered."""
    sizes = Sizes(CHUNK, CHUNK, 1)
    step = Recorder(sizes)

    def refuse() -> memoryview:
        raise MemoryError

    step.open = refuse  # type: ignore[method-assign]
    with pytest.raises(MemoryError), transfer(step, sizes):
        pass
    assert step.ends == ["close"]


def test_a_user_who_interrupts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C meets the wait for the threads, which is not given up: they write."""
    sizes = Sizes(100 * CHUNK, CHUNK, 100)
    step = Recorder(sizes)
    step.slowest_s = 0.05
    join, interrupts = threading.Thread.join, [KeyboardInterrupt("second"), KeyboardInterrupt("3")]

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if interrupts:
            raise interrupts.pop(0)
        join(thread, timeout)

    def interrupt() -> None:
        with transfer(step, sizes):
            monkeypatch.setattr(threading.Thread, "join", interrupted)
            raise KeyboardInterrupt("first")

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not interrupts
    written = len(step.offsets)
    time.sleep(0.1)
    assert len(step.offsets) == written
    assert step.ends == ["close"]


def test_no_two_views_are_counted_together() -> None:
    """On free-threaded Python, threads that slice one view, or slices of it, at once break it."""

    class Collecting(Recorder):
        def process(self, chunk: Chunk) -> None:
            super().process(chunk)
            owners.append(chunk.part.obj)

    owners: list[object] = []
    sizes = Sizes(6 * CHUNK, CHUNK, 6)
    with transfer(Collecting(sizes), sizes) as ready:
        while (part := ready.next()) is not None:
            with part:
                owners.append(part.obj)
    assert len(set(map(id, owners))) == len(owners) > 6
