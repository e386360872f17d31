"""Messages over a stream socket: the length in four bytes, then the message.

For a channel between two processes of this package, without descriptors, whose messages may be
longer than a handover packet. In each process one thread sends and one receives.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from trims_shim.errors import MalformedMessage, MessageTooLarge
from trims_shim.wire import codec
from trims_shim.wire.messages import CONTROL_MESSAGE_LIMIT_BYTES

__all__ = ["receive", "send"]

_LENGTH = struct.Struct("<I")


def send(connection: socket.socket, message: Any, *, deadline_s: float | None = None) -> None:
    """Send one message; ``deadline_s`` is a time of time.monotonic().

    Raises MessageTooLarge (nothing was sent), TimeoutError, OSError.
    """
    data = codec.encode(message)
    if len(data) > CONTROL_MESSAGE_LIMIT_BYTES:
        raise MessageTooLarge(
            f"message of {len(data)} bytes; the limit is {CONTROL_MESSAGE_LIMIT_BYTES}"
        )
    _wait_until(connection, deadline_s)
    connection.sendall(_LENGTH.pack(len(data)) + data, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, *, deadline_s: float | None = None) -> Any:
    """Return the next message, or None if the other end has closed after the last one.

    Raises WireError for anything but a message of the protocol, TimeoutError, OSError.
    """
    head = _read(connection, _LENGTH.size, deadline_s)
    if not head:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > CONTROL_MESSAGE_LIMIT_BYTES:
        raise MessageTooLarge(
            f"message of {size} bytes; the limit is {CONTROL_MESSAGE_LIMIT_BYTES}"
        )
    data = _read(connection, size, deadline_s)
    if len(data) < size:
        raise MalformedMessage(f"the stream ends before a message of {size} bytes")
    return codec.decode(data, limit_bytes=CONTROL_MESSAGE_LIMIT_BYTES)


def _read(connection: socket.socket, size: int, deadline_s: float | None) -> bytes:
    """Read ``size`` bytes, or none at the end. Raises MalformedMessage if it ends within."""
    parts = bytearray()
    while len(parts) < size:
        _wait_until(connection, deadline_s)
        part = connection.recv(size - len(parts))
        if not part:
            if parts:
                raise MalformedMessage(f"the stream ends after {len(parts)} of {size} bytes")
            break
        parts += part
    return bytes(parts)


def _wait_until(connection: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is not None:
        left = deadline_s - time.monotonic()
        if left <= 0:  # A timeout of 0 would mean not to wait, and another error.
            raise TimeoutError("the deadline has passed")
        connection.settimeout(left)
