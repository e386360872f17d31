"""Files that clients offer: what the kernel knows of them, and how their descriptors are closed.

A file may be served by a process that answers nothing (FUSE) or by a machine that is gone (NFS).
Asking for its attributes or closing a descriptor may then block for ever, which the server's thread
must not. So it takes the attributes that the kernel has. They are up to date, because a client has
just asked for them, and what is kept of a file was checked with the file system itself after the
file was read. Threads close all descriptors but those of files that are known to be local and have
a name: the last close of a file without one frees all of it, and that of a device may wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
import struct
from typing import NamedTuple

from trims_shim.daemon.workers import Workers
from trims_shim.errors import AccessDenied, ReadFailed, TrimsError
from trims_shim.specs import Identity
from trims_shim.wire.handover import close_all
from trims_shim.wire.messages import FileOffer

__all__ = ["Closer", "FileStatus", "Offer", "check_readable_file", "is_file", "status_of"]

_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000
_STATX_BASIC_STATS = 0x7FF
_STATX_ATTR_NODUMP = 0x40
"""File systems with flags for chattr(1), on disks and in memory, report it; network file systems
have none. Overlays report what the layer below says."""
_STATX = struct.Struct("=16xI8xH2xQQ8xQ32xqI4xqI12xII")
"""Links, mode, inode, size, known attributes, ctime, mtime, device (linux/stat.h)."""
_STATX_BYTES = 256
_SECOND_NS = 1_000_000_000

_statx = getattr(ctypes.CDLL(None), "statx", None)


class FileStatus(NamedTuple):
    """``is_local``: no request about the file has to wait for another process or machine."""

    mode: int
    identity: Identity
    is_local: bool
    links: int

    @property
    def is_closed_at_once(self) -> bool:
        """Whether closing it waits for nothing, also if nobody else has it open any more."""
        return self.is_local and stat.S_ISREG(self.mode) and self.links > 0


_NOTHING = FileOffer(0)


class Offer:
    """A file that a client has offered; closed at the end of the block unless somebody took it."""

    def __init__(
        self, message: FileOffer = _NOTHING, descriptor: int = -1, closer: Closer | None = None
    ) -> None:
        """Owns the descriptor; by default there is none. ``message`` is what it came with."""
        self.message = message
        self.descriptor = descriptor
        self._closer = closer
        self._status: FileStatus | None = None
        self._refusal: TrimsError | None = None

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def refuse(self, error: TrimsError) -> None:
        """Close the descriptor; whoever asks for the file is told why."""
        self.close()
        self._refusal = error

    def check(self) -> None:
        """Raise the error with which it was refused."""
        if self._refusal is not None:
            raise self._refusal

    def identity(self) -> Identity:
        """The file's identity. Raises as :meth:`check`, and as :func:`check_readable_file`."""
        self.check()
        if self._status is None:
            self._status = check_readable_file(self.descriptor)
        return self._status.identity

    def replace(self, descriptor: int) -> None:
        """Stand for a duplicate of another descriptor. Raises OSError, and then changes nothing."""
        duplicate = os.dup(descriptor)
        self.close()
        self.descriptor, self._status = duplicate, None

    def take(self) -> int:
        """The descriptor; the caller owns it now."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """Close the descriptor, unless it was taken."""
        if self.descriptor < 0:
            return
        if self._closer is None:
            close_all([self.take()])
        else:  # It may have lost its name since it was looked at.
            self._closer.close(self.take())


class Closer:
    """Closes descriptors of clients without waiting for it. Used by the server's thread only."""

    def __init__(self) -> None:
        self._workers: Workers | None = None

    def close(self, descriptor: int) -> None:
        """Close at once if nothing is waited for, or if no thread can be had; else in a thread."""
        workers = None if _is_closed_at_once(descriptor) else self._started()
        if workers is None:
            close_all([descriptor])
        else:
            workers.submit(os.close, descriptor)

    def close_all(self, descriptors: list[int]) -> None:
        """Each of them."""
        for descriptor in descriptors:
            self.close(descriptor)

    def tend(self) -> None:
        """Replace stuck threads, so that others go on closing; call about every second."""
        if self._workers is not None:
            self._workers.replace_stuck()

    def shutdown(self) -> None:
        """Stop without waiting; a close that is stuck ends with the process."""
        if self._workers is not None:
            self._workers.shutdown(wait=False)

    def _started(self) -> Workers | None:
        with contextlib.suppress(RuntimeError):  # no more threads
            self._workers = self._workers or Workers(1)
        return self._workers


def _is_closed_at_once(descriptor: int) -> bool:
    try:
        return status_of(descriptor).is_closed_at_once
    except OSError:
        return False


def check_readable_file(descriptor: int) -> FileStatus:
    """Status of an offered file. Raises AccessDenied unless it is a regular file open for reading.

    A write-only or O_PATH descriptor can be had without the right to read. Raises ReadFailed if
    the kernel cannot tell the status.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_PATH:
        raise AccessDenied("the offered descriptor is not open for reading")
    try:
        status = status_of(descriptor)
    except OSError as error:
        raise ReadFailed(f"the offered file cannot be looked at: {error}") from error
    if not stat.S_ISREG(status.mode):
        raise AccessDenied("the offered descriptor is not a regular file")
    return status


def is_file(descriptor: int) -> bool:
    """Whether it may be kept: it is a file of any kind.

    A socket may be the client's own end of its connection, and what has no kind (io_uring) may hold
    that. Kept here, it would keep the connection from ending with the client.
    """
    try:
        return stat.S_IFMT(status_of(descriptor).mode) not in (0, stat.S_IFSOCK)
    except OSError:
        return True  # Its server is gone.


def status_of(descriptor: int) -> FileStatus:
    """What the kernel has cached, by statx(2); if that fails, fstat. Raises OSError."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if _statx is None or _statx(descriptor, b"", flags, _STATX_BASIC_STATS, found) != 0:
        status = os.fstat(descriptor)
        return FileStatus(status.st_mode, Identity.from_stat(status), True, status.st_nlink)
    links, mode, inode, size, attributes, *times, major, minor = _STATX.unpack_from(found)
    changed_s, changed_ns, modified_s, modified_ns = times
    identity = Identity(
        device=os.makedev(major, minor),
        inode=inode,
        size_bytes=size,
        mtime_ns=modified_s * _SECOND_NS + modified_ns,
        ctime_ns=changed_s * _SECOND_NS + changed_ns,
    )
    return FileStatus(mode, identity, bool(attributes & _STATX_ATTR_NODUMP), links)
