"""The account of a device's memory: what is allocated, what is leaving, what the driver denies.

Owns figures and waiting, no memory. Images are numbered as they begin to leave, and finish in that
order. So a load waits for the last one that began before it.
"""

from __future__ import annotations

import threading

__all__ = ["Account", "Shortage"]


class Shortage:
    """A load for which the driver has no memory; its thread waits until it is answered."""

    def __init__(self, wanted_bytes: int, *, may_demote: bool) -> None:
        """``may_demote``: evicted images may be copied to the host tier first."""
        self.wanted_bytes = wanted_bytes
        self.may_demote = may_demote
        self._is_answered = threading.Event()
        self._is_relieved = False

    def answer(self, *, is_relieved: bool) -> None:
        """Go on; try again if memory was, or is being, given up. The first answer counts."""
        if not self._is_answered.is_set():
            self._is_relieved = is_relieved
            self._is_answered.set()

    def wait(self) -> bool:
        """Block; whether to try again."""
        self._is_answered.wait()
        return self._is_relieved


class Account:
    """Device memory that we allocated, and how much is leaving. Any thread may call."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.leaving_bytes = 0
        self._changed = threading.Condition()
        self._begun = 0
        self._ended = 0

    def add(self, size_bytes: int) -> None:
        """Memory was allocated, or (negative) freed."""
        with self._changed:
            self.allocated_bytes += size_bytes

    def begin_leaving(self, size_bytes: int) -> None:
        """An image begins to leave, and will free this much. Images leave in order."""
        with self._changed:
            self._begun += 1
            self.leaving_bytes += size_bytes

    def end_leaving(self, size_bytes: int) -> None:
        """The first of the leaving images has left."""
        with self._changed:
            self._ended += 1
            self.leaving_bytes -= size_bytes
            self._changed.notify_all()

    def last_leaver(self) -> int:
        """The number of the last image that began to leave, for :meth:`wait_for`."""
        return self._begun

    def wait_for(self, leaver: int) -> None:
        """Block until this image, and with it all before, has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= leaver)
