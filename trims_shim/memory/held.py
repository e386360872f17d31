"""How much memory this process has in segments, from their beginning until they are given up.

Owns figures, no memory. A segment takes its memory gradually, so the kernel is asked for its size.
A sealed segment no longer grows: its size is kept, so that adding up many costs nothing.
"""

from __future__ import annotations

import os
import threading

__all__ = ["Held", "charged_bytes"]


class Held:
    """The account of this process's segments. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._growing: set[int] = set()
        self._sealed_bytes = 0

    def bytes(self) -> int:
        """Return the bytes of all segments that were begun and not given up."""
        with self._lock:
            return self._sealed_bytes + sum(map(charged_bytes, self._growing))

    def begin(self, descriptor: int) -> None:
        """Add a growing segment; its descriptor is open until :meth:`seal` or :meth:`discard`."""
        with self._lock:
            self._growing.add(descriptor)

    def discard(self, descriptor: int) -> None:
        """Remove a segment that will not be filled."""
        with self._lock:
            self._growing.discard(descriptor)

    def seal(self, descriptor: int) -> int:
        """Note that a segment grows no more; return its size, for :meth:`give_up`."""
        with self._lock:
            self._growing.discard(descriptor)
            size_bytes = charged_bytes(descriptor)
            self._sealed_bytes += size_bytes
        return size_bytes

    def give_up(self, size_bytes: int) -> None:
        """Remove a sealed segment, even if a client still maps it."""
        with self._lock:
            self._sealed_bytes -= size_bytes


def charged_bytes(descriptor: int) -> int:
    """Return the bytes that the kernel charges for a file in memory. Raises OSError."""
    return os.fstat(descriptor).st_blocks * 512
