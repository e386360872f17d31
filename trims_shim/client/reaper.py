"""Device images that are no longer used, until they can be unmapped.

The last user of an image is often a kernel that is still running, so the device is synchronised
before anything is unmapped. That blocks and a finalizer must not, so a thread does it: the first
retirement starts the thread, which ends when nothing is left to do. Until it is unmapped, an image
can be revived.

Invariants: finalizers call :meth:`Reaper.retire` anywhere and in any thread; it does one dictionary
operation and tries a lock without waiting. Each retirement has its own number, and whoever pops the
number owns the image. An image that is revived and retired again during a synchronisation waits for
the next one, because work may have been queued in between.
"""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["Reaper", "Retired"]

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
_POLL_S = 0.002


class Retired(Protocol):
    """The part of an image that the reaper needs."""

    @property
    def index(self) -> int:
        """The device's number in this process."""

    def drop(self) -> None:
        """Unmap and give up the lease; called once, when the device has finished all work."""


_Image = TypeVar("_Image", bound=Retired)


class Reaper(Generic[_Image]):
    """Unmaps retired images. Not for use across a fork: the child makes a new one."""

    def __init__(self, synchronize: Callable[[int], bool]) -> None:
        """``synchronize`` waits for all work on a device, or returns False if it cannot now."""
        self.dropped = 0
        self._synchronize = synchronize
        self._retired: dict[int, _Image] = {}
        self._numbers = itertools.count()
        self._is_running = threading.Lock()

    def retire(self, image: _Image) -> None:
        """Drop the image as soon as possible. Never blocks; safe in a finalizer."""
        self._retired[next(self._numbers)] = image
        self._wake()

    def revive(self, is_wanted: Callable[[_Image], bool]) -> _Image | None:
        """Return a retired image that is still mapped; the caller owns it again."""
        # A copy is one operation: between the steps of an iteration, the collector may run and
        # retire more.
        for number, image in self._retired.copy().items():
            if is_wanted(image) and self._retired.pop(number, None) is not None:
                return image
        return None

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything retired is dropped; False when that takes longer.

        Leaves the work to the thread: a device may be busy for ever, and callers must not wait so.
        """
        deadline = time.monotonic() + timeout_s
        while self._retired or self._is_running.locked():
            if time.monotonic() > deadline:
                return False
            self._wake()
            time.sleep(_POLL_S)
        return True

    def _reap(self) -> bool:
        """Synchronise, then drop retired images; blocks. False when a device has to wait."""
        due = self._retired.copy()
        indices = {image.index for image in due.values()}
        idle = {index for index in indices if self._synchronize(index)}
        for number, image in due.items():
            if image.index in idle and self._retired.pop(number, None) is not None:
                image.drop()
                self.dropped += 1
        return idle == indices

    def _wake(self) -> None:
        if not self._retired or not self._is_running.acquire(blocking=False):
            return
        try:
            # Not threading.Thread: its start takes locks that the interrupted code may hold.
            _thread.start_new_thread(self._run, ())
        except (RuntimeError, MemoryError):
            # No thread can start; the next retirement tries again, for this image too.
            self._is_running.release()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while self._retired:
                if self._reap():
                    continue
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._is_running.release()
        # A retire() between the last look and the release started no thread.
        self._wake()
