"""Memory files that can be frozen: made empty, filled by their maker, then immutable for everybody.

The numbers are those of linux/fcntl.h, for which a Python built on an old system has no names.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["is_sealed", "new_memfd", "seal_memfd"]

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _WRITE = 0x0001, 0x0002, 0x0004, 0x0008
_MFD_NOEXEC_SEAL = 0x0008  # since Linux 6.3


def new_memfd(name: str) -> int:
    """Make an empty memfd that can be sealed and, where the kernel supports it, not executed."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        descriptor = os.memfd_create(name, flags)
    # By default every user may write a memfd. Even past a seal they could then set its times, by
    # which it is identified, and its attributes.
    os.fchmod(descriptor, 0o400)
    return descriptor


def seal_memfd(descriptor: int) -> None:
    """Freeze content and size for everybody. Raises OSError while it is mapped writable."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW | _WRITE)


def is_sealed(descriptor: int) -> bool:
    """Whether the bytes of a file can no longer change."""
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:  # a file on a file system without seals
        return False
    return bool(seals & _WRITE and seals & _SHRINK)
