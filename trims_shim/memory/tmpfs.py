"""A private tmpfs with huge pages: one writable mount of it, and one read-only mount.

A short-lived child mounts both in a mount namespace of its own and sends descriptors of their
roots. The namespace ends with the child: the mounts are then in no mount table, and live as long as
a descriptor or a mapping does. All is done by mount(2), since its successors need recent kernels
(mount_setattr Linux 5.12; open_tree of a mount that is attached nowhere, 6.15).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket

from trims_shim.errors import MemoryFailure
from trims_shim.memory.mapping import HUGE_PAGE_BYTES, round_up

__all__ = ["open_tmpfs"]

_PLACE = b"/proc"
"""Where the child mounts: a mount point on every system, of which it needs nothing."""

# linux/mount.h, linux/sched.h
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_PRIVATE = 1, 0x20, 0x1000, 0x40000
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000

_PATIENCE_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]


def open_tmpfs(budget_bytes: int, *, in_user_namespace: bool) -> tuple[int, int]:
    """Return descriptors of the writable mount and of the read-only one.

    The child needs CAP_SYS_ADMIN, or a user namespace in which it has that. The caller stays out
    of the latter: inside, a daemon would see its clients' users as nobody. Forks, so call it before
    any thread starts. Raises MemoryFailure where the machine does not allow it.
    """
    try:
        answer, descriptors = _ask_child(budget_bytes, in_user_namespace)
    except OSError as error:
        raise MemoryFailure(f"the child that mounts a tmpfs: {error}") from error
    if len(descriptors) != 2:
        reason = answer.decode(errors="replace")
        raise MemoryFailure(reason or "the child that mounts a tmpfs died")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors[0], descriptors[1]


def _ask_child(budget_bytes: int, in_user_namespace: bool) -> tuple[bytes, list[int]]:
    """Return what a new child says, and its descriptors. Raises OSError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            _send_mounts_and_exit(theirs, budget_bytes, in_user_namespace)
        theirs.close()
        ours.settimeout(_PATIENCE_S)
        try:
            answer, descriptors, _, _ = socket.recv_fds(ours, 1024, 2)
        except OSError:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
            raise
        finally:
            with contextlib.suppress(OSError):
                os.waitpid(child, 0)
    return answer, descriptors


def _send_mounts_and_exit(
    connection: socket.socket, budget_bytes: int, in_user_namespace: bool
) -> None:
    try:
        if in_user_namespace:
            _enter_user_namespace()
        else:
            _unshare(_CLONE_NEWNS)
        socket.send_fds(connection, [b"ok"], list(_mounts(budget_bytes)))
    # Border: this is a forked child; nothing may unwind into the daemon's stack.
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(str(error).encode()[:1000])
    finally:
        os._exit(0)


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _mounts(budget_bytes: int) -> tuple[int, int]:
    # Room for the budget, rounded up, and more; the store keeps the exact account.
    size = round_up(budget_bytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
    _mount(_MS_PRIVATE)  # otherwise the mounts would show in other namespaces
    _mount(0, options=f"huge=within_size,size={size},mode=0700")
    writable = _root()
    _mount(_MS_BIND, source=_PLACE)
    _mount(_MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    return writable, _root()


def _root() -> int:
    """Open what is mounted now; a later mount at the same place leaves it as it is."""
    return os.open(_PLACE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _mount(flags: int, *, source: bytes = b"tmpfs", options: str = "") -> None:
    """Call mount(2), which ignores source, type and options where ``flags`` do not need them."""
    if _libc.mount(source, _PLACE, b"tmpfs", flags, options.encode()) != 0:
        raise MemoryFailure(f"mount tmpfs {options}: {_last_error()}")


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        raise MemoryFailure(f"unshare: {_last_error()}")


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
