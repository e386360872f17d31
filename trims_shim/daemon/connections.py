"""Limits how many connections a ZeroMQ socket may have: further ones are closed at once.

ZeroMQ accepts every connection, in a thread of its own, and aborts the process when no descriptor
is left for the next one (ipc_listener.cpp of libzmq 4.3 takes ENFILE for an error, EMFILE for a
bug). So a thread that does nothing else counts the connections as ZeroMQ reports them. At most some
1000 reports can be unread: then ZeroMQ's thread waits, and accepts nobody. That many descriptors
must stay unused (:mod:`.descriptors`). A flood of connections can still abort
a process that may not have some thousand descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import Counter

import zmq

from trims_shim.daemon import descriptors
from trims_shim.wire.handover import peer_of

__all__ = ["Doorkeeper", "connection_at"]

_OF_ONE_USER = 2
"""Each user but the daemon's own may have at most one connection in this many."""
_REPORT = struct.Struct("=Hi")
"""zmq_socket_monitor(3): event, value. (The reader in pyzmq imports all of asyncio.)"""
_HANDSHAKE_MS = 5000
"""A silent connection is closed after this time; ZeroMQ's default is 30 s."""


def connection_at(descriptor: int, path: str) -> socket.socket | None:
    """Duplicate the connection to ``path`` that ZeroMQ has reported under this number.

    None if it is closed by now, and the number is another's. A duplicate stays valid.
    """
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # no socket at all
        os.close(duplicate)
        return None
    with contextlib.suppress(OSError):  # some kinds of sockets have no names
        if connection.getsockname() == path:
            return connection
    connection.close()
    return None


class Doorkeeper:
    """Watches one socket, from before it is bound until before it is closed."""

    def __init__(self, watched: zmq.Socket[bytes], path: str, *, share: int, limit: int) -> None:
        """``path``: where it will be bound.

        There may be ``limit`` connections, but not more than one part in ``share`` of the
        descriptors that this process may have.
        """
        self.limit = max(1, min(limit, descriptors.limit() // share))
        self._watched = watched
        self._path = path
        self._users: dict[int, int] = {}
        """The user of each connection that was let in, by descriptor."""
        self._counts: Counter[int] = Counter()
        watched.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._reports: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        self._reports.setsockopt(zmq.RCVHWM, 1)  # beside the 1000 of the sending end
        address = f"inproc://trims-connections-{id(self)}"
        watched.monitor(
            address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        )
        self._reports.connect(address)
        self._thread = threading.Thread(target=self._watch, name="trims-door", daemon=True)
        self._thread.start()

    def count(self) -> int:
        """How many connections were let in and are still there."""
        return len(self._users)

    def close(self) -> None:
        """Stop watching. Blocks until the thread has ended."""
        # The thread reads every report up to the last: else ZeroMQ's thread might wait for ever.
        self._watched.disable_monitor()
        self._thread.join()

    def _watch(self) -> None:
        with self._reports:
            while True:
                event, descriptor = _REPORT.unpack(self._reports.recv_multipart()[0])
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._forget(descriptor)
                if event == zmq.EVENT_ACCEPTED:
                    self._admit(descriptor)

    def _admit(self, descriptor: int) -> None:
        connection = connection_at(descriptor, self._path)
        if connection is None:
            return
        with contextlib.suppress(OSError), connection:
            user = peer_of(connection).uid
            of_user = self.limit if user == os.geteuid() else self.limit // _OF_ONE_USER
            if len(self._users) >= self.limit or self._counts[user] >= max(1, of_user):
                connection.shutdown(socket.SHUT_RDWR)
                return
            self._users[descriptor] = user
            self._counts[user] += 1

    def _forget(self, descriptor: int) -> None:
        user = self._users.pop(descriptor, None)
        if user is not None:
            self._counts[user] -= 1
            if not self._counts[user]:
                del self._counts[user]
