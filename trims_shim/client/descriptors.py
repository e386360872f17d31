"""Whether the number of a descriptor of ours still means what it meant.

A program may close descriptors that are not its own: one that becomes a daemon closes all there
are. What it opens next gets their numbers, and must be neither mapped, nor written to, nor closed.
"""

from __future__ import annotations

import os

__all__ = ["stamp"]


def stamp(descriptor: int) -> tuple[int, int] | None:
    """Which file a descriptor is open on, None where it is closed; to be compared with another."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
