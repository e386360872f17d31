"""Shared memory in which samples wait for workers: anonymous, gone with its last user.

Buffers are used again, because the first touch of new memory costs more than the copy into it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from trims_shim.ensemble.messages import Layout
from trims_shim.memory.memfd import new_memfd

__all__ = ["Buffer", "Buffers"]

_ALIGNMENT = 64
"""Of arrays in a buffer: numpy's and torch's own memory has it."""
_MOST_UNUSED = 4
"""A buffer that is larger than needed by more than this factor is not used."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Some shared memory."""

    number: int
    descriptor: int
    memory: mmap.mmap

    def close(self) -> None:
        """Unmap it here."""
        self.memory.close()
        os.close(self.descriptor)


class Buffers:
    """Buffers in use and free ones. Any thread may call."""

    def __init__(self, most_free: int) -> None:
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._most_free = most_free
        self._count = 0

    def filled(self, parts: Sequence[memoryview]) -> tuple[Buffer, Layout]:
        """Copy ``parts`` into a buffer. Raises OSError if there is no memory."""
        spans = []
        end = 0
        for part in parts:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            spans.append((start, part.nbytes))
            end = start + part.nbytes
        buffer = self._taken(end)
        try:
            for part, (start, size) in zip(parts, spans, strict=True):
                buffer.memory[start : start + size] = part
        except BaseException:  # Ctrl-C, for one: copies take time
            buffer.close()
            raise
        return buffer, Layout(buffer.number, tuple(spans))

    def give_back(self, buffer: Buffer) -> Buffer | None:
        """A buffer is no longer used; return one that was closed because there are too many."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) <= self._most_free:
                return None
            oldest = self._free.pop(0)
        oldest.close()
        return oldest

    def close(self) -> None:
        """Close the free ones."""
        with self._lock:
            while self._free:
                self._free.pop().close()

    def _taken(self, size_bytes: int) -> Buffer:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if (
                    size_bytes
                    <= len(buffer.memory)
                    <= _MOST_UNUSED * max(size_bytes, mmap.PAGESIZE)
                ):
                    return self._free.pop(index)
            self._count += 1
            number = self._count
        return _new_buffer(number, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def _new_buffer(number: int, size_bytes: int) -> Buffer:
    descriptor = new_memfd("trims-ensemble")
    try:
        os.ftruncate(descriptor, size_bytes)
        return Buffer(number, descriptor, mmap.mmap(descriptor, size_bytes))
    except BaseException:
        os.close(descriptor)
        raise
