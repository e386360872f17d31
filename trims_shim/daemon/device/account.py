"""The account of a device's memory: what was made, what of it goes, and what the driver denies.

Owns figures and waiting, no memory. Images leave in the order in which they began to, so a load
that was started after some began needs to wait for as many ends.
"""

from __future__ import annotations

import threading

__all__ = ["Account", "Shortage"]


class Shortage:
    """A load that the driver has no memory for; its thread waits until it is answered."""

    def __init__(self, wanted_bytes: int, *, may_demote: bool) -> None:
        """``may_demote``: what has to go may be copied to the host tier first."""
        self.wanted_bytes = wanted_bytes
        self.may_demote = may_demote
        self._is_answered = threading.Event()
        self._is_relieved = False

    def answer(self, *, is_relieved: bool) -> None:
        """Go on; try again if something was, or is being, given up. A second answer is nothing."""
        if not self._is_answered.is_set():
            self._is_relieved = is_relieved
            self._is_answered.set()

    def wait(self) -> bool:
        """Whether to try again."""
        self._is_answered.wait()
        return self._is_relieved


class Account:
    """How much device memory we made, and what of it goes. Any thread may call."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.leaving_bytes = 0
        self._changed = threading.Condition()
        self._begun = 0
        self._ended = 0
        self._begun_before: dict[int, int] = {}

    def add(self, size_bytes: int) -> None:
        """Memory was made, or (negative) given back."""
        with self._changed:
            self.allocated_bytes += size_bytes

    def begin_leaving(self, size_bytes: int) -> None:
        """Memory will be given back by the next one that leaves; they do so in order."""
        with self._changed:
            self._begun += 1
            self.leaving_bytes += size_bytes

    def end_leaving(self, size_bytes: int) -> None:
        """The first of those that leave has left."""
        with self._changed:
            self._ended += 1
            self.leaving_bytes -= size_bytes
            self._changed.notify_all()

    def note_start(self, ingest: int) -> None:
        """A load begins: it has to wait for those that leave now."""
        self._begun_before[ingest] = self._begun

    def wait_for_leavers(self, ingest: int) -> None:
        """Block until all have left that were leaving when the load began."""
        begun = self._begun_before[ingest]
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= begun)

    def forget_start(self, ingest: int) -> None:
        """The load has ended."""
        self._begun_before.pop(ingest, None)
