"""Whether this process can start more threads, asked before a library starts them.

Native libraries end the process, or panic, where the system refuses a thread: under a limit on
processes (`ulimit -u`, a container's).
"""

from __future__ import annotations

import ctypes

__all__ = ["can_start"]

_SEMAPHORE_BYTES = 64
"""At least sizeof(sem_t) on every system."""

_libc = ctypes.CDLL(None)


def can_start(count: int) -> bool:
    """Whether ``count`` threads can start; starts and ends them, at some 50 us each.

    They are C threads: a program may have replaced Python's (gevent).
    """
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    _libc.sem_init(semaphore, 0, 0)
    wait = ctypes.cast(_libc.sem_wait, ctypes.c_void_p)
    threads = [ctypes.c_ulong() for _ in range(count)]
    try:
        for thread in threads:
            if _libc.pthread_create(ctypes.byref(thread), None, wait, semaphore) != 0:
                thread.value = 0
                return False
        return True
    finally:
        # After an interrupt, too: they wait at an address that is soon used for something else.
        for _ in threads:
            _libc.sem_post(semaphore)
        for thread in threads:
            if thread.value:
                _libc.pthread_join(thread, None)
