"""How many descriptors the daemon has left.

Running dry is no error that could be handled: libzmq aborts on EMFILE. So a part stays unused, for
what opens without being asked: connections of ZeroMQ, loads that are being read.
"""

from __future__ import annotations

import functools
import os
import resource
import sys

from trims_shim.errors import TooManyRequests

__all__ = ["are_scarce", "check_descriptors", "limit"]

_RESERVED = 8192
"""Also for ZeroMQ: 5120 connections that it may have, and twice 1000 that it accepts before it can
be stopped (:mod:`trims_shim.daemon.connections`)."""
_OPEN = "/proc/self/fd"


def check_descriptors(*, reserved: int = 0) -> None:
    """Raise TooManyRequests where the daemon has to keep what descriptors are left for itself."""
    if are_scarce(reserved):
        raise TooManyRequests(
            "the daemon is almost out of file descriptors; raise `ulimit -H -n`, and "
            f"`kill {os.getpid()}`"
        )


def are_scarce(reserved: int = 0) -> bool:
    """Whether only those are left that the daemon keeps for itself, and ``reserved`` others."""
    return _open_count() > limit() - min(_RESERVED, limit() // 4) - reserved


def limit() -> int:
    """How many this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _open_count() -> int:
    """How many are open. The number of the newest would not do: it may be below those of others."""
    try:
        return os.stat(_OPEN).st_size if _is_told() else len(os.listdir(_OPEN))
    except OSError:  # None is left to read the directory with.
        return limit()


@functools.cache
def _is_told() -> bool:
    """Whether the directory's size is their number, as since Linux 6.2; reading it takes long."""
    return 0 <= len(os.listdir(_OPEN)) - os.stat(_OPEN).st_size < 8  # threads open some meanwhile
