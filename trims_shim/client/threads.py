"""Whether this process can start more threads, asked before a library starts them.

Native libraries end the process, or panic, where the system refuses a thread: under a limit on
processes (`ulimit -u`, a container's). ZeroMQ also ends it where its threads may not set their
priority.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

__all__ = ["can_start", "may_set_priority"]

_LOCK_BYTES = 256
"""At least sizeof(pthread_rwlock_t) on every system."""

_SCHED_PARAM_BYTES = 64
"""At least sizeof(struct sched_param) on every system."""

_libc = ctypes.CDLL(None)
_locks: list[ctypes.Array[ctypes.c_char]] = []
"""Locks at which threads may wait. One stays if an interrupt comes before they are known to have
ended: they would write to whatever is at its address next."""


def can_start(count: int) -> bool:
    """Whether ``count`` threads can start; starts and ends them, at some 50 us each."""
    with _waiting(count) as threads:
        return len(threads) == count


def may_set_priority() -> bool:
    """Whether a thread may set its policy and priority, here one of ours to those that it has.

    A seccomp filter may refuse that (systemd's ``SystemCallFilter=~@resources``).
    """
    # Not this thread: glibc notes what it is asked for, so that would undo what the program has
    # set since by the system's own call (os.sched_setscheduler).
    with _waiting(1) as threads:
        return all(map(_may_set_priority, threads))


def _may_set_priority(thread: ctypes.c_ulong) -> bool:
    policy = ctypes.c_int()
    parameters = ctypes.create_string_buffer(_SCHED_PARAM_BYTES)
    if _libc.pthread_getschedparam(thread, ctypes.byref(policy), parameters) != 0:
        return False
    is_allowed: bool = _libc.pthread_setschedparam(thread, policy, parameters) == 0
    return is_allowed


@contextlib.contextmanager
def _waiting(count: int) -> Iterator[list[ctypes.c_ulong]]:
    """So many threads that wait until the block ends, or those that can start.

    They are C threads: a program may have replaced Python's (gevent).
    """
    lock = ctypes.create_string_buffer(_LOCK_BYTES)
    _locks.append(lock)
    _libc.pthread_rwlock_init(lock, None)
    _libc.pthread_rwlock_wrlock(lock)
    wait = ctypes.cast(_libc.pthread_rwlock_rdlock, ctypes.c_void_p)
    threads: list[ctypes.c_ulong] = []
    try:
        all(_start(threads, wait, lock) for _ in range(count))
        yield threads
    finally:
        _libc.pthread_rwlock_unlock(lock)  # One call, so that no interrupt lets some of them wait.
    for thread in threads:
        _libc.pthread_join(thread, None)
    _locks.remove(lock)


def _start(threads: list[ctypes.c_ulong], work: ctypes.c_void_p, argument: object) -> bool:
    """Start a thread and add it to ``threads``, if that is possible."""
    thread = ctypes.c_ulong()
    is_started: bool = _libc.pthread_create(ctypes.byref(thread), None, work, argument) == 0
    if is_started:  # else the number may be there, and mean nothing
        threads.append(thread)
    return is_started
