"""Map a segment into this process: private, copy-on-write, aligned for huge pages.

Owns the system calls; the caller owns the mappings (:mod:`trims_shim.client.arenas`). Uses ctypes
because :mod:`mmap` duplicates the descriptor and cannot choose an address. A mapping is never
populated: MAP_POPULATE on a private writable mapping copies every page.
"""

from __future__ import annotations

import ctypes
import mmap as _mmap
import os
import resource

from trims_shim.errors import MemoryFailure

__all__ = [
    "HUGE_PAGE_BYTES",
    "PAGE_BYTES",
    "are_addresses_limited",
    "map_private",
    "reserve",
    "round_up",
    "unmap",
]

HUGE_PAGE_BYTES = 2 << 20
"""PMD size of x86-64 and arm64 (4 KiB granule). Only an alignment: a wrong value costs speed."""
PAGE_BYTES = _mmap.PAGESIZE
_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(_mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 has no name for it
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def round_up(size_bytes: int, unit_bytes: int) -> int:
    """Return the smallest multiple of ``unit_bytes`` that is at least ``size_bytes``."""
    return -(-size_bytes // unit_bytes) * unit_bytes


def are_addresses_limited() -> bool:
    """Whether a limit makes addresses scarce, so that the program lacks those that we waste."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(each)[0] != resource.RLIM_INFINITY for each in limits)


def reserve(size_bytes: int) -> int:
    """Reserve addresses for :func:`map_private`, aligned for huge pages; return the first.

    They take no memory. Raises MemoryFailure where the kernel refuses (address space).
    """
    length = round_up(size_bytes, PAGE_BYTES)
    base, reserved = _reserve(length)
    address = round_up(base, HUGE_PAGE_BYTES)
    end = address + length
    # The ends of the reservation; the kernel refuses an empty one.
    _libc.munmap(base, address - base)
    _libc.munmap(end, base + reserved - end)
    return address


def map_private(address: int, descriptor: int, size_bytes: int) -> None:
    """Map a whole segment privately and writable, at reserved addresses, which stay the caller's.

    The descriptor may be closed afterwards. Raises MemoryFailure where the kernel refuses (map
    count, seals).
    """
    _mmap_call(
        address,
        round_up(size_bytes, PAGE_BYTES),
        _mmap.PROT_READ | _mmap.PROT_WRITE,
        _mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE,
        descriptor,
    )


def unmap(address: int, size_bytes: int) -> None:
    """Give up reserved addresses, and what is mapped there. Takes no lock; safe in a finalizer."""
    _libc.munmap(address, round_up(size_bytes, PAGE_BYTES))


def _reserve(length: int) -> tuple[int, int]:
    reserved = length + HUGE_PAGE_BYTES
    flags = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return _mmap_call(None, reserved, 0, flags, -1), reserved


def _mmap_call(
    address: int | None, length: int, protection: int, flags: int, descriptor: int
) -> int:
    result = _libc.mmap(address, length, protection, flags, descriptor, 0)
    if result == _MAP_FAILED:
        error = ctypes.get_errno()
        raise MemoryFailure(f"mmap of {length} bytes failed: {os.strerror(error)}")
    return int(result)
