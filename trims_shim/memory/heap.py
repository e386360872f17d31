"""The C library's heap: what a block of work allocated and freed again goes back to the system.

glibc keeps freed memory for the next allocation. To create a session onnxruntime packs one weight
after another into memory that it frees at once, and 10 to 25 MB stay with each process: as much as
all else that a session on shared weights needs (docs/decisions/0008-prepared-onnx-models.md).

Nothing changes but where the next allocations come from. Only what became free in the block is a
reason to act, and a large heap is left alone: to walk it takes time, and a program that frees much
may be about to need it again. Where the C library has none of this, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

__all__ = ["free_bytes", "given_back"]

_WORTH_BYTES = 4 << 20
_LARGE_BYTES = 64 << 20

_libc = ctypes.CDLL(None)


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
    """What the heap holds free; None where the C library does not tell. Takes microseconds."""
    try:
        information = _libc.mallinfo2
    except AttributeError:
        return None
    information.restype = _Information
    return int(information().fordblks)


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Return to the system what the block leaves free, unless it raises; takes a millisecond.

    Other threads that allocate wait meanwhile, as for any allocation.
    """
    before = free_bytes()
    yield
    after = free_bytes()
    if before is None or after is None or before > _LARGE_BYTES:
        return
    if after - before >= _WORTH_BYTES:
        _libc.malloc_trim(0)
