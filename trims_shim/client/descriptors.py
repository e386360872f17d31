"""Whether the number of a descriptor of ours still means the same file.

A program may close descriptors that are not its own: one that becomes a daemon closes all. Files
that it opens next get their numbers; we must not map, write or close those files. Nor may what we
open get the number of a standard stream that it has closed, where it may print all the same.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator

from trims_shim import diagnostics

__all__ = ["OwnDescriptor", "above_streams"]

_STREAMS = 3
"""Standard input, output and error."""
_users: set[object] = set()
_placeholders: list[OwnDescriptor] = []
"""They have the numbers of closed streams while there are users, and can be neither read nor
written."""


class OwnDescriptor:
    """A descriptor that the program may close, and the file that it was open on."""

    __slots__ = ("_stamp", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._stamp = _stamp(number)

    def is_open(self) -> bool:
        """Whether the program has left it open; else the number means another file, or none."""
        return self._stamp is not None and _stamp(self.number) == self._stamp

    def close(self) -> None:
        """Close it, if it is still ours. Raises nothing; safe in a finalizer, and once more."""
        if self.is_open():
            with contextlib.suppress(OSError):
                self._stamp = None  # the number may come to mean the same file again
                os.close(self.number)


@contextlib.contextmanager
def above_streams() -> Iterator[None]:
    """Whatever is opened in the block, by other threads too, is above the standard streams."""
    user = object()
    _users.add(user)
    try:
        try:
            while _takes_stream():
                pass
        except OSError as error:  # Without descriptors, nothing is opened.
            diagnostics.pass_on(error)
        yield
    finally:
        _users.discard(user)
        while _placeholders and not _users:
            with contextlib.suppress(IndexError):  # another thread has closed it
                _placeholders.pop().close()


def _takes_stream() -> bool:
    """Open a placeholder; return whether it has got the number of a stream. Else it is closed."""
    held: list[int] = []
    closing = map(os.close, held)
    try:
        # A device that no program opens for its streams: that would be taken for ours. Opened and
        # kept in one call, as an interrupt comes between calls.
        held.extend(map(os.open, ("/dev/full",), (os.O_PATH | os.O_CLOEXEC,)))
        if held[0] >= _STREAMS:
            return False
        _placeholders.append(OwnDescriptor(held[0]))
        held.clear()
        return True
    finally:
        deque(closing, maxlen=0)


def _stamp(number: int) -> tuple[int, int] | None:
    """Return which file a descriptor is open on; None where it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
