"""How much memory this process has in segments: while they grow, and until they are given up.

Owns figures, no memory. A segment takes its memory by and by, and the kernel is asked how far it
is; one that is sealed has all that it will ever have, so that many of them cost nothing to add up.
"""

from __future__ import annotations

import os
import threading

__all__ = ["Held", "charged_bytes"]


class Held:
    """See the module docstring. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._growing: set[int] = set()
        self._sealed_bytes = 0

    def bytes(self) -> int:
        """Of all segments that were begun and not given up."""
        with self._lock:
            return self._sealed_bytes + sum(map(charged_bytes, self._growing))

    def begin(self, descriptor: int) -> None:
        """A segment grows. Its descriptor stays open until :meth:`seal` or :meth:`discard`."""
        with self._lock:
            self._growing.add(descriptor)

    def discard(self, descriptor: int) -> None:
        """It will not be filled."""
        with self._lock:
            self._growing.discard(descriptor)

    def seal(self, descriptor: int) -> int:
        """It grows no more; what it has, for :meth:`give_up`."""
        with self._lock:
            self._growing.discard(descriptor)
            size_bytes = charged_bytes(descriptor)
            self._sealed_bytes += size_bytes
        return size_bytes

    def give_up(self, size_bytes: int) -> None:
        """A sealed segment is given up, whoever may map it still."""
        with self._lock:
            self._sealed_bytes -= size_bytes


def charged_bytes(descriptor: int) -> int:
    """What the kernel charges for a file in memory. Raises OSError."""
    return os.fstat(descriptor).st_blocks * 512
