"""What can be relied on of a file system: when a change shows in its times; where its files are."""

from __future__ import annotations

import ctypes
import os

from trims_shim.specs import Identity

__all__ = ["has_change_time", "is_by_reader", "is_in_memory", "is_settled"]

_SETTLED_AFTER_NS = 100_000_000
"""Local file systems stamp changes at least every 10 ms (CONFIG_HZ=100); ten times that."""
_SETTLED_AFTER_REMOTE_NS = 2_000_000_000
"""FAT has 2 s stamps, network file systems have the server's. For devices not known as local."""
_LOCAL_DEVICE_MAJORS = frozenset({8, 65, 66, 67, 68, 69, 70, 71, 202, 252, 253, 254, 259})
"""SCSI, Xen, virtio, device mapper and NVMe disks (Documentation/admin-guide/devices.txt)."""
_SECOND_NS = 1_000_000_000
_LUSTRE = 0x0BD00BD0
"""Stamps changes in whole seconds (lustre_user.h)."""
_WITHOUT_CHANGE_TIMES = frozenset({0xE0F5E1E2, 0x2011BAB0})
"""EROFS and exFAT, which show the mtime, with a fraction of a second (linux/magic.h)."""
_OVERLAY = 0x794C7630
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""tmpfs and ramfs (linux/magic.h)."""
_PROC = 0x9FA0
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800

_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)


def is_settled(identity: Identity, at_ns: int) -> bool:
    """Whether every change of the file from ``at_ns`` on also changes its identity."""
    is_fine = identity.ctime_ns % _SECOND_NS != 0
    is_local = os.major(identity.device) in _LOCAL_DEVICE_MAJORS
    quiet_ns = _SETTLED_AFTER_NS if is_local and is_fine else _SETTLED_AFTER_REMOTE_NS
    return at_ns - max(identity.mtime_ns, identity.ctime_ns) > quiet_ns


def has_change_time(descriptor: int, identity: Identity) -> bool:
    """Whether the ctime is a real one. False in doubt: the file is read again each time.

    FAT, squashfs, EROFS and other images have none and show the mtime, which writers and builders
    can set freely. Builders of ext4 images choose both, in whole seconds, and an image may take
    another one's place on any kind of device: with its numbers of device and inode.
    """
    if identity.ctime_ns % _SECOND_NS == 0:
        return _file_system(descriptor) == _LUSTRE
    if identity.ctime_ns != identity.mtime_ns:
        return True
    kind = _file_system(descriptor)
    if kind == _OVERLAY:  # The layer with the file may be EROFS, which knows no birth times either.
        return _has_birth_time(descriptor)
    return kind not in _WITHOUT_CHANGE_TIMES


def is_in_memory(descriptor: int) -> bool:
    """Whether the file takes memory instead of room on a disk."""
    return _file_system(descriptor) in _IN_MEMORY


def is_by_reader(descriptor: int) -> bool:
    """Whether what is read depends on who reads, whoever has opened the file.

    Files in /proc/bus/pci show 64 bytes to users, and all to root.
    """
    return _file_system(descriptor) == _PROC


def _file_system(descriptor: int) -> int:
    """``f_type`` of statfs(2), the first field; 0 if the call fails."""
    status = (ctypes.c_long * 64)()
    kind = ctypes.c_uint32(status[0] if _libc.fstatfs(descriptor, status) == 0 else 0)
    return kind.value


def _has_birth_time(descriptor: int) -> bool:
    """Whether statx(2) can tell when the file was made: ``stx_mask``, the first field."""
    found = (ctypes.c_uint32 * 64)()
    if _statx is None or _statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_BTIME, found) != 0:
        return False
    return bool(found[0] & _STATX_BTIME)
