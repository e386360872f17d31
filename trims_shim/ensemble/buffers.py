"""Shared memory in which samples wait for workers: anonymous, gone with its last user.

Buffers are used again, because the first touch of new memory costs more than the copy into it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from trims_shim.ensemble.messages import Layout
from trims_shim.memory.memfd import new_memfd

__all__ = ["Buffer", "Buffers"]

_ALIGNMENT = 64
"""Of arrays in a buffer: numpy's and torch's own memory has it."""
_MOST_UNUSED = 4
"""A buffer that is larger than needed by more than this factor is not used."""


@dataclass(frozen=True, slots=True, eq=False)
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

    # No lock, but steps of lists: who closes it may be a signal handler in the middle of one here.

    def __init__(self, most_free: int) -> None:
        self._free: list[Buffer] = []
        self._most_free = most_free
        self._numbers = itertools.count(1)

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
        self._free.append(buffer)
        if len(self._free) > self._most_free:
            with contextlib.suppress(IndexError):  # others have taken them
                oldest = self._free.pop(0)
                oldest.close()
                return oldest
        return None

    def close(self) -> None:
        """Close the free ones."""
        with contextlib.suppress(IndexError):
            while True:
                self._free.pop().close()

    def _taken(self, size_bytes: int) -> Buffer:
        most_bytes = _MOST_UNUSED * max(size_bytes, mmap.PAGESIZE)
        for buffer in self._free.copy():
            with contextlib.suppress(ValueError):  # others have taken it, or closed it
                if size_bytes <= len(buffer.memory) <= most_bytes:
                    self._free.remove(buffer)
                    return buffer
        return _new_buffer(next(self._numbers), -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def _new_buffer(number: int, size_bytes: int) -> Buffer:
    descriptor = new_memfd("trims-ensemble")
    try:
        os.ftruncate(descriptor, size_bytes)
        return Buffer(number, descriptor, mmap.mmap(descriptor, size_bytes))
    except BaseException:
        os.close(descriptor)
        raise
