"""Read a file past the page cache where that is faster: when the kernel has cached little of it.

Measured (native/DESIGN.md): O_DIRECT reads a file from the disk 1.3 times faster, and does not take
as much memory again beside the segment. A cached file is read faster from the page cache. Owns the
decision and the second descriptor. If the kernel cannot be asked or the file not opened again, it
is read through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
from collections.abc import Iterator

from trims_shim.memory.mapping import PAGE_BYTES

__all__ = ["opened_directly"]

_SIZE_FROM_BYTES = 16 << 20
"""For smaller files, the read takes no longer than the decision."""
_CACHED_AT_MOST = 0.25
"""With more cached, the page cache is faster also for the rest (rates in native/DESIGN.md)."""
_SYS_CACHESTAT = 451
"""Since Linux 6.5, the same on every architecture (asm-generic/unistd.h)."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    """struct cachestat_range."""

    _fields_ = (("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """struct cachestat: numbers of pages."""

    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


@contextlib.contextmanager
def opened_directly(descriptor: int, size_bytes: int) -> Iterator[int | None]:
    """Yield a second descriptor of the file, with O_DIRECT; None where it is not to be used."""
    direct = _open(descriptor) if _is_worth_it(descriptor, size_bytes) else None
    try:
        yield direct
    finally:
        if direct is not None:
            os.close(direct)


def _is_worth_it(descriptor: int, size_bytes: int) -> bool:
    if size_bytes < _SIZE_FROM_BYTES:
        return False
    status = os.fstat(descriptor)
    # Network and stacked file systems have no device of their own (major 0), and may be slower.
    if not stat.S_ISREG(status.st_mode) or os.major(status.st_dev) == 0:
        return False
    return _cached_bytes(descriptor, size_bytes) <= size_bytes * _CACHED_AT_MOST


def _cached_bytes(descriptor: int, size_bytes: int) -> int:
    """Return the cached bytes of a file; all of it where the kernel does not tell."""
    pages = _Pages()
    range_ = _Range(0, size_bytes)
    arguments = (ctypes.byref(range_), ctypes.byref(pages), ctypes.c_uint(0))
    if _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), descriptor, *arguments) != 0:
        return size_bytes
    return int(pages.cached) * PAGE_BYTES


def _open(descriptor: int) -> int | None:
    # Opening uses this process's rights. A client's descriptor that cannot be read does not prove
    # that the client may read the file, so it must not become readable here.
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_PATH:
        return None
    # The holder of a lease on a file (F_SETLEASE) can keep an open waiting for 45 seconds.
    flags = os.O_RDONLY | os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return None
