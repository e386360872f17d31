"""The handover channel: packets with descriptors over a UNIX SEQPACKET socket.

A descriptor is part of its packet: it is received with the packet, and closed if the packet is
refused. The kernel keeps packets whole, so there is no framing and no partial read. One ``send`` is
atomic, so a finalizer may release a lease from any thread without a lock.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from trims_shim.errors import MalformedMessage
from trims_shim.wire import codec
from trims_shim.wire.messages import HANDOVER_PACKET_LIMIT_BYTES

__all__ = [
    "Packet",
    "Peer",
    "clipped",
    "close_all",
    "has_unread",
    "new_socket",
    "peer_of",
    "receive",
    "send",
    "wait_until_ready",
    "watch_senders",
]

_CREDENTIALS = struct.Struct("i2I")
"""A process, its user and its group. Numbers of users go up to 2**32 - 2."""
_DESCRIPTORS_OF_A_PACKET = 253
"""SCM_MAX_FD (linux/include/net/scm.h)."""
# Room for more than allowed, so that surplus descriptors are received, not truncated: the kernel
# would close them here, and that of a socket may last as long as its owner likes (SO_LINGER).
_ANCILLARY_BYTES = socket.CMSG_SPACE(
    _DESCRIPTORS_OF_A_PACKET * array.array("i").itemsize
) + socket.CMSG_SPACE(_CREDENTIALS.size)
_CLIPPED_BYTES = 1000


class Peer(NamedTuple):
    """The process at the other end, according to the kernel (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


class Packet(NamedTuple):
    """One received message; the receiver owns ``descriptor`` (None when there is none)."""

    message: Any
    descriptor: int | None
    user: int | None = None
    """The sender's real uid, according to the kernel; None without :func:`watch_senders`."""


def new_socket() -> socket.socket:
    """Make an unconnected handover socket; as all of Python's, it is closed on exec."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer_of(connection: socket.socket) -> Peer:
    """Return the credentials of the connected peer."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def watch_senders(connection: socket.socket) -> None:
    """Let packets name their senders: processes that drop rights inherit connections.

    Call it on a listener before any client can reach it; it holds for all accepted connections.
    Packets sent before the call would seem to come from the user nobody.
    """
    with contextlib.suppress(OSError):  # sandboxes without the option
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def send(connection: socket.socket, message: Any, *, descriptor: int | None = None) -> None:
    """Send one message over a non-blocking socket.

    Raises OSError (BlockingIOError when the peer does not read).
    """
    data = codec.encode(message)
    if descriptor is None:
        connection.send(data, socket.MSG_NOSIGNAL)
        return
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(
    connection: socket.socket, *, discard: Callable[[list[int]], None] | None = None
) -> Packet | None:
    """Return the next packet, or None when the peer has closed.

    Raises WireError for a packet that is too long, malformed or carries more than one descriptor
    (its descriptors are closed, by ``discard`` if given), OSError of the socket, or with EMFILE
    where this process has no room for its descriptor.
    """
    received: list[tuple[bytes, list[tuple[int, int, bytes]], int, Any]] = []
    arguments = ((HANDOVER_PACKET_LIMIT_BYTES,), (_ANCILLARY_BYTES,), (socket.MSG_CMSG_CLOEXEC,))
    try:
        # Kept in the call that receives: an interrupt comes between calls, and loses none.
        received.extend(map(connection.recvmsg, *arguments))
        data, ancillary, message_flags, _ = received[0]
        return _packet(data, ancillary, message_flags)
    except BaseException:
        for _, ancillary, _, _ in received:
            (discard or close_all)(_descriptors(ancillary))
        raise


def has_unread(connection: socket.socket) -> bool:
    """Whether there is a packet that was not received; False if the peer has only closed."""
    try:
        # Without room for ancillary data a packet that has some is marked, even an empty one.
        data, _, message_flags, _ = connection.recvmsg(1, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return bool(data or message_flags & socket.MSG_CTRUNC)


def wait_until_ready(
    descriptor: int | socket.socket, timeout_s: float, *, is_for_room: bool = False
) -> bool:
    """Whether there is something to read, or room for a packet, in time."""
    if not hasattr(select, "poll"):  # eventlet removes calls that would block all its threads
        readers, writers = ([], [descriptor]) if is_for_room else ([descriptor], [])
        return any(select.select(readers, writers, [], timeout_s))
    poll = select.poll()  # select has no room for descriptors beyond 1023
    poll.register(descriptor, select.POLLOUT if is_for_room else select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def clipped(text: str, *, limit_bytes: int = _CLIPPED_BYTES) -> str:
    """Return the beginning of a text of any length and origin, short enough for a packet."""
    return text.encode(errors="backslashreplace")[:limit_bytes].decode(errors="ignore")


def close_all(descriptors: list[int]) -> None:
    """Close descriptors; ignores errors."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _packet(
    data: bytes, ancillary: list[tuple[int, int, bytes]], message_flags: int
) -> Packet | None:
    descriptors = _descriptors(ancillary)
    if not data and not descriptors:
        return None
    if message_flags & socket.MSG_CTRUNC and not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if message_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise MalformedMessage("handover packet is too long or carries too many descriptors")
    if len(descriptors) > 1:
        raise MalformedMessage(f"handover packet carries {len(descriptors)} descriptors")
    message = codec.decode(data)
    return Packet(message, descriptors[0] if descriptors else None, _sender(ancillary))


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            _, user, _ = _CREDENTIALS.unpack(data)
            return int(user)
    return None


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data)  # The kernel passes whole ones only.
    return list(found)
