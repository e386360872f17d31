"""Chunks of a file, made ready by threads and handed out in the order of the file.

A chunk has a slot in some memory. With host memory as the target, each chunk has its own slot, its
place there. With a device, the slots are a ring of pinned buffers, and a slot is reused after its
chunk was handed out and released. Chunks are claimed in order, so the next chunk to hand out never
waits for a later one, whatever the number of threads.

A :class:`Step` processes a chunk. Invariant: after the ``with`` block no thread runs.
native/pipeline.cpp is the same in C++.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from trims_shim.errors import ReadFailed, TrimsError
from trims_shim.formats.device_layout import DeviceLayout

__all__ = ["Chunk", "Chunks", "Route", "Sizes", "Step"]


class Sizes(NamedTuple):
    """How a file is cut: chunk n of it goes to slot ``n % slots``."""

    total_bytes: int
    chunk_bytes: int
    slots: int

    @property
    def chunks(self) -> int:
        return -(-self.total_bytes // self.chunk_bytes)

    @property
    def batch(self) -> int:
        """Most chunks handed out at once; a ring keeps the others for the threads."""
        return self.slots if self.slots >= self.chunks else max(1, self.slots // 4)


class Route(NamedTuple):
    """The device's side of a transfer: where a file's tensors are, and how the work is divided.

    ``address`` is that of the layout's first byte. Errors call the file ``name``.
    """

    layout: DeviceLayout
    address: int
    device_index: int
    threads: int
    chunk_bytes: int
    ring_chunks: int
    name: str

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.layout.file_bytes, self.chunk_bytes, self.ring_chunks)


class Chunk(NamedTuple):
    """A chunk of the file. ``part`` is its slot's memory, ``position`` the offset of the slot."""

    slot: int
    offset: int
    position: int
    part: memoryview


class Step(Protocol):
    """The work of the threads on a chunk. Opened and closed by the calling thread."""

    def open(self) -> memoryview:
        """Return the memory of all slots."""

    def in_thread(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager around all work of one thread."""

    def process(self, chunk: Chunk) -> None:
        """Wait for copies that still use the slot, then put the chunk's bytes into it."""

    def drain(self) -> None:
        """Wait for copies that ``process`` only started. Raises DriverFailure."""

    def close(self) -> None:
        """Drain, and give everything back."""


class Chunks:
    """See :class:`~trims_shim.memory.copying.Transfer`."""

    def __init__(self, step: Step, sizes: Sizes, *, threads: int, name: str) -> None:
        self._step = step
        self._sizes = sizes
        self._name = name
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        self._started: list[threading.Thread] = []
        # Guarded by the condition. Chunks [0, released) are done, [released, taken) handed out.
        self._changed = threading.Condition()
        self._released = self._taken = self._claimed = 0
        self._ready: set[int] = set()
        self._error: TrimsError | None = None
        self._is_stopping = False

    def __enter__(self) -> Chunks:
        try:
            self._address = _address_of(self._step.open())
            for worker in self._workers:
                worker.start()
                self._started.append(worker)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def next(self) -> memoryview | None:
        with self._changed:
            if self._released < self._taken:
                self._released = self._taken
                self._changed.notify_all()
            if self._taken == self._sizes.chunks:
                return None
            while self._taken not in self._ready and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            return self._take()

    def finish(self) -> None:
        self._step.drain()

    def _take(self) -> memoryview:
        """Hand out as many ready chunks as follow in one piece of memory."""
        sizes = self._sizes
        first = self._taken
        room = min(sizes.batch, sizes.slots - first % sizes.slots)
        while self._taken < first + room and self._taken in self._ready:
            self._ready.discard(self._taken)
            self._taken += 1
        end = min(self._taken * sizes.chunk_bytes, sizes.total_bytes)
        begin = first % sizes.slots * sizes.chunk_bytes
        return self._view(begin, end - first * sizes.chunk_bytes)

    def _view(self, begin: int, size_bytes: int) -> memoryview:
        """Return a view for one thread.

        All slices of one view are counted together, without a lock: threads that slice at once on
        free-threaded Python (3.14, 3.15) get the count wrong, and the view is taken for released.
        """
        part = (ctypes.c_char * size_bytes).from_address(self._address + begin)
        return memoryview(part).cast("B")

    def _close(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        try:
            _join(self._started)
        finally:
            self._step.close()

    def _work(self) -> None:
        error: TrimsError
        try:
            with self._step.in_thread():
                while (number := self._claim()) is not None:
                    self._process(number)
            return
        except TrimsError as failure:
            error = failure
        # Border: the caller waits for this chunk and has to learn of any error.
        except Exception as failure:
            error = ReadFailed(f"{self._name}: {type(failure).__name__}: {failure}")
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _claim(self) -> int | None:
        with self._changed:
            while True:
                if self._is_stopping or self._error or self._claimed == self._sizes.chunks:
                    return None
                if self._claimed < self._released + self._sizes.slots:
                    self._claimed += 1
                    return self._claimed - 1
                self._changed.wait()

    def _process(self, number: int) -> None:
        sizes = self._sizes
        offset = number * sizes.chunk_bytes
        slot = number % sizes.slots
        position = slot * sizes.chunk_bytes
        size = min(sizes.chunk_bytes, sizes.total_bytes - offset)
        with self._view(position, size) as part:
            self._step.process(Chunk(slot, offset, position, part))
        with self._changed:
            self._ready.add(number)
            self._changed.notify_all()


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for all threads, even if the user interrupts the wait: they write to memory."""
    interrupted: KeyboardInterrupt | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as interrupt:
                interrupted = interrupt
    if interrupted is not None:
        raise interrupted
