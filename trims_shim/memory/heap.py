"""The C library's heap: returns memory that a block of work leaves free, and makes room for it.

glibc keeps freed memory for the next allocation. To create a session, onnxruntime packs one weight
after another into memory that it frees at once, and 10 to 25 MB stay with each process: as much as
all else that a session on shared weights needs. So memory that a block leaves free goes back to the
system.

Room for such a block can also be made beforehand, in huge pages where the system gives them on
request: that saves thousands of page faults. It takes only what any program may do with its own
memory: allocate a few large pieces, advise the kernel, and free them. The lasting effect is that of
freeing an array of 31 MB: glibc takes smaller arrays from the heap from then on, and keeps
twice as much free at its end (docs/decisions/0008-prepared-onnx-models.md).

Nothing changes but where allocations come from. Memory is returned only if it became free in the
block. A large heap is left alone: walking it takes time, and a program that frees much may be about
to need it again. Where the C library lacks these functions, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from collections.abc import Iterator
from typing import Any

from trims_shim.memory.mapping import are_addresses_limited

__all__ = ["free_bytes", "given_back"]

_WORTH_BYTES = 4 << 20
_LARGE_BYTES = 64 << 20
_HEADER_BYTES = 16
"""The gap between consecutive pieces in glibc; another gap means another allocator."""
_PIECE_BYTES = (31 << 20) - _HEADER_BYTES
"""Once this much was freed, glibc takes pieces below 32 MiB from the heap (malloc/malloc.c)."""
_LIMIT_BYTES = 1 << 30
_SMALL_PAGE_BYTES = 4096
"""With larger pages, a huge page has 32 to 512 MiB: too much to clear for a part of it."""

_libc: Any = ctypes.CDLL(None)
# Not at each call: threads that ask for a function at the same time may get objects of their own.
# The one that stays would return half of an address.
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]


class _Information(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def free_bytes() -> int | None:
    """Return the free bytes of the heap; None where the C library cannot tell. Microseconds."""
    try:
        information = _libc.mallinfo2
    except AttributeError:
        return None
    information.restype = _Information
    return int(information().fordblks)


@contextlib.contextmanager
def given_back(*, room_bytes: int = 0) -> Iterator[None]:
    """Return to the system what the block leaves free, unless it raises; takes a millisecond.

    ``room_bytes`` (1 GiB at most) are free in huge pages when the block begins. That takes
    addresses; only written pages take memory. Other threads that allocate wait meanwhile, as for
    any allocation.
    """
    before = free_bytes()
    if before is None or before > _LARGE_BYTES:
        yield
        return
    if mmap.PAGESIZE > _SMALL_PAGE_BYTES or are_addresses_limited():
        room_bytes = 0
    with _room(min(room_bytes, _LIMIT_BYTES)):
        yield
    after = free_bytes()
    if after is not None and after - before >= _WORTH_BYTES:
        _libc.malloc_trim(0)


@contextlib.contextmanager
def _room(size_bytes: int) -> Iterator[None]:
    end = _make_room(size_bytes) if size_bytes else None
    try:
        yield
    finally:
        if end is not None:
            _libc.free(end)


def _make_room(size_bytes: int) -> ctypes.c_void_p:
    """Leave free memory below a piece that keeps it in the heap; return that piece to be freed."""
    # Freeing one mapped piece raises glibc's limit for mapping, so this is the last one mapped.
    _libc.free(ctypes.c_void_p(_libc.malloc(_PIECE_BYTES)))
    pieces: list[int] = []
    for _ in range(-(-size_bytes // _PIECE_BYTES) + 1):
        piece = _libc.malloc(_PIECE_BYTES)
        if piece is None:
            break
        pieces.append(piece)
    distance = _PIECE_BYTES + _HEADER_BYTES
    is_row = all(after - before == distance for before, after in itertools.pairwise(pieces))
    end = pieces.pop() if pieces else None
    if pieces and end and is_row:
        start = -(-pieces[0] // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (end - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    for piece in pieces:
        _libc.free(ctypes.c_void_p(piece))
    return ctypes.c_void_p(end)
