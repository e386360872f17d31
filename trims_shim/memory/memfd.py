"""Memory files that can be frozen: made empty, filled by their maker, then the same for everybody.

The numbers are those of linux/fcntl.h: a Python that was built on an old system has no names for
them.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["is_sealed", "new_memfd", "seal_memfd"]

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _WRITE = 0x0001, 0x0002, 0x0004, 0x0008
_MFD_NOEXEC_SEAL = 0x0008  # since Linux 6.3


def new_memfd(name: str) -> int:
    """An empty memfd that can be sealed, and not executed where the kernel knows how."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        descriptor = os.memfd_create(name, flags)
    # The kernel lets everybody write to one: past a seal that means to set its times, by which it
    # is known, and attributes.
    os.fchmod(descriptor, 0o400)
    return descriptor


def seal_memfd(descriptor: int) -> None:
    """Freeze its content and size for everybody. Raises OSError while it is mapped writable."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW | _WRITE)


def is_sealed(descriptor: int) -> bool:
    """Whether nobody can change the bytes of a file any more."""
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:  # of another file system
        return False
    return bool(seals & _WRITE and seals & _SHRINK)
