"""Whether the number of a descriptor of ours still means what it meant.

A program may close descriptors that are not its own: one that becomes a daemon closes all there
are. What it opens next gets their numbers, and must be neither mapped, nor written to, nor closed.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["OwnDescriptor"]


class OwnDescriptor:
    """A descriptor that the program may close, and what it was open on."""

    __slots__ = ("_stamp", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._stamp = _stamp(number)

    def is_open(self) -> bool:
        """Whether the program has left it open; else its number means another file, or none."""
        return _stamp(self.number) == self._stamp

    def close(self) -> None:
        """Close it, if it is still ours. Raises nothing; safe in a finalizer."""
        if self.is_open():
            with contextlib.suppress(OSError):
                os.close(self.number)


def _stamp(number: int) -> tuple[int, int] | None:
    """Which file a descriptor is open on, None where it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
