"""Whether this process can start more threads, asked before a library starts them.

Native libraries end the process, or panic, where the system refuses a thread: under a limit on
processes (`ulimit -u`, a container's).
"""

from __future__ import annotations

import ctypes

__all__ = ["can_start"]

_LOCK_BYTES = 256
"""At least sizeof(pthread_rwlock_t) on every system."""

_libc = ctypes.CDLL(None)
_locks: list[ctypes.Array[ctypes.c_char]] = []
"""Locks at which threads may wait. One stays if an interrupt comes before they have ended:
they would write to whatever is at its address next."""


def can_start(count: int) -> bool:
    """Whether ``count`` threads can start; starts and ends them, at some 50 us each.

    They are C threads: a program may have replaced Python's (gevent).
    """
    lock = ctypes.create_string_buffer(_LOCK_BYTES)
    _locks.append(lock)
    _libc.pthread_rwlock_init(lock, None)
    _libc.pthread_rwlock_wrlock(lock)
    wait = ctypes.cast(_libc.pthread_rwlock_rdlock, ctypes.c_void_p)
    threads = [ctypes.c_ulong() for _ in range(count)]
    try:
        return all(_start(thread, wait, lock) for thread in threads)
    finally:
        _libc.pthread_rwlock_unlock(lock)  # One call, so that no interrupt lets some of them wait.
        for thread in threads:
            if thread.value:
                _libc.pthread_join(thread, None)
        _locks.remove(lock)


def _start(thread: ctypes.c_ulong, work: ctypes.c_void_p, argument: object) -> bool:
    """Start a thread; ``thread`` stays 0 if that is not possible."""
    if _libc.pthread_create(ctypes.byref(thread), None, work, argument) == 0:
        return True
    thread.value = 0
    return False
