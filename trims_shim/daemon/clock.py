"""The clock that orders uses: nobody sets it, and it goes on while the machine sleeps.

The time of day may be set, by minutes or by years, where a virtual machine resumes or the network
comes up late. The last use of an image is long ago only if that time has passed. Moments of
this clock mean nothing to another process, nor to one after the next start of the machine.
"""

from __future__ import annotations

import time

__all__ = ["now_ns", "time_of_day_ns"]


def now_ns() -> int:
    """This moment."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def time_of_day_ns(moment_ns: int) -> int:
    """What time.time_ns() would have been at a moment, had it been set as it is now."""
    return time.time_ns() - (now_ns() - moment_ns)
