"""Processes by a variable of their environment, also those that have detached themselves.

Imports nothing of the package: ``conftest`` needs it before the environment is cleaned.
"""

from __future__ import annotations

import contextlib
import os
import time

__all__ = ["now_ticks", "started_ticks", "with_variable"]


def now_ticks() -> int:
    """The time in the unit of :func:`started_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def started_ticks(pid: int | str) -> int:
    """When a process was started, in clock ticks since the start of the machine. Raises OSError."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def with_variable(assignment: str, *, since_ticks: int) -> list[int]:
    """Other processes whose environment has this ``NAME=value``, if they are no older.

    Nothing is read of the memory of older ones: a process that is in trouble holds up whoever does
    that, for minutes, and on a shared machine it may be anybody's.
    """
    needle = f"{assignment}\0".encode()
    found = []
    for entry in os.listdir("/proc"):
        # Gone, a zombie, or someone else's.
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(entry) == os.getpid() or started_ticks(entry) < since_ticks - 1:
                continue
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle in file.read() + b"\0":
                    found.append(int(entry))
    return found
