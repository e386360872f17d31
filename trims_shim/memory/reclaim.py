"""Give replaced memory back to the system without making the caller wait.

Unmapping written memory costs 70 us for each MiB of 4 KiB pages. For the parameters of a large
module that is more than replacing them saved. So a thread discards the pages, in steps and with the
interpreter lock released, and then drops the owner, when nothing is left to unmap. Discarding also
gives back memory that an allocator would keep in its free lists. There is at most one such thread,
and it ends when nothing is left to do.

Owns blocks from :func:`retire` until they are gone. Must be called only with memory whose content
may never be read again. A fork first hurries the thread to its end; a child that still has blocks
drops them.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap as _mmap
import os
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

from trims_shim.memory.limits import available_bytes
from trims_shim.memory.mapping import PAGE_BYTES, round_up

__all__ = ["RetiredBlock", "is_much", "retire"]

STEP_BYTES = 8 << 20
"""Bytes discarded per call: it takes half a millisecond, for which a concurrent mmap may wait."""
GRACE_S = 1.0
"""How long memory stays readable while other threads run. One of them may be in an operation that
took the old address before the replacement; with a copy in place that was only a data race."""
LITTLE_BYTES = 64 << 20
"""What may wait on any machine: asking what is available takes half a millisecond."""
FORK_PATIENCE_S = 0.5
"""How long a fork waits until the rest is discarded, which takes some 0.1 s per gigabyte."""
_POLL_S = 0.005

_libc = ctypes.CDLL(None, use_errno=True)  # calls through CDLL release the interpreter lock
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class RetiredBlock(NamedTuple):
    """Memory no longer in use; it is freed with the last reference to ``owner``."""

    owner: object
    address: int
    size_bytes: int


class _Batch(NamedTuple):
    """Blocks retired together, and the time from which they may be discarded."""

    blocks: list[RetiredBlock]
    due_s: float


_is_hurried = False
"""Not a threading.Event, whose lock a signal handler that forks or loads may find held by what it
interrupts."""
_batches: deque[_Batch] = deque()
_is_running = threading.Lock()
_runner = 0
"""The identifier of the thread that has the lock; 0 for none."""


def retire(blocks: list[RetiredBlock]) -> None:
    """Take over ``blocks`` (the list is emptied) and free them soon. Does not block."""
    global _is_hurried
    if not blocks:
        return
    # Not threading.active_count(): threads of every kind count, except ours, which reads nothing.
    # Not sys._current_frames() (see trims_shim.diagnostics).
    others = sys._current_exceptions().keys() - {threading.get_ident(), _runner}
    _batches.append(_Batch(blocks[:], time.monotonic() + (GRACE_S if others else 0.0)))
    blocks.clear()
    _is_hurried = False
    _start()


def is_much() -> bool:
    """Whether what waits to be freed is more than a quarter of the memory that is available."""
    held = sum(block.size_bytes for batch in _batches.copy() for block in batch.blocks[:])
    return held > LITTLE_BYTES and held > available_bytes() // 4


def _start() -> None:
    global _is_hurried
    if not _batches or not _is_running.acquire(blocking=False):
        return
    try:
        _thread.start_new_thread(_run, ())
    except (RuntimeError, MemoryError):  # no thread can start: discard here
        _is_hurried = True
        _run()


def _run() -> None:
    global _runner
    _runner = threading.get_ident()
    try:
        while _batches:
            batch = _batches[0]
            # Counted too: a test may have stopped the clock, as freezegun does.
            for _ in range(round(GRACE_S / _POLL_S)):
                if _is_hurried or time.monotonic() >= batch.due_s:
                    break
                time.sleep(_POLL_S)
            _release(batch.blocks)
            _batches.popleft()  # a fork waits for this
    finally:
        _runner = 0
        _is_running.release()
    # A retire() between the last look and the release started no thread.
    _start()


def _release(blocks: list[RetiredBlock]) -> None:
    while blocks:
        block = blocks.pop()
        _discard(block.address, block.size_bytes)
        del block  # the owner goes here


def _discard(address: int, size_bytes: int) -> None:
    """Discard the whole pages in the range. A refusal (locked memory) is harmless."""
    start = round_up(address, PAGE_BYTES)
    end = (address + size_bytes) // PAGE_BYTES * PAGE_BYTES
    for step in range(start, end, STEP_BYTES):
        _libc.madvise(step, min(STEP_BYTES, end - step), _mmap.MADV_DONTNEED)


def _finish_before_fork() -> None:
    """Let the thread end: Python warns of a fork with threads, and ours must not be the reason."""
    global _is_hurried
    _is_hurried = True
    patience = time.monotonic() + FORK_PATIENCE_S
    while _batches and time.monotonic() < patience:
        time.sleep(0.001)


def _forget_in_child() -> None:
    global _is_running, _runner
    # The old lock may have been held at the moment of the fork.
    _is_running, _runner = threading.Lock(), 0
    for batch in _batches:
        batch.blocks.clear()
    _batches.clear()


os.register_at_fork(before=_finish_before_fork, after_in_child=_forget_in_child)
