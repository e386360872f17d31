"""The control socket: a ZeroMQ ROUTER that cannot be bloated, wedged or brought down by its peers.

Owns the socket, its place in the event loop and its defences; knows nothing of requests. ZeroMQ
limits the length of a frame but not how many frames a message may have before it ends; so the
owner's memory is watched, and when it grows without reason the socket is closed with everything in
it and bound again under its name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from trims_shim.daemon.connections import Doorkeeper, connection_at
from trims_shim.wire import codec

__all__ = ["REQUEST_LIMIT_BYTES", "ControlSocket", "rebound"]

_logger = logging.getLogger("trims_shim.daemon")

REQUEST_LIMIT_BYTES = 64 << 10
"""Longest request; replies may be longer (messages.CONTROL_MESSAGE_LIMIT_BYTES)."""
_BLOAT_LIMIT_BYTES = 256 << 20
_TRIM_FROM_BYTES = 32 << 20
_TURN_S = 0.01
_UNREAD_REPLIES = 64
"""For each client, beside what the kernel buffers. A client waits for one reply at a time, and gets
its progress four times a second; a status takes a quarter of a megabyte."""
_REBIND_PATIENCE_MS = 2000
_LAST_WORDS_S = 0.1
_CONDEMNED_LIMIT = 64


class ControlSocket:
    """See the module docstring. Used by the server's thread only."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], path: str, selector: selectors.BaseSelector
    ) -> None:
        """Bind to ``path`` and wake ``selector`` when something arrives."""
        self._context = context
        self._path = path
        self._selector = selector
        self._statm = _Statm()
        self._condemned: list[tuple[float, socket.socket]] = []
        self._router = self._bind()
        self._first = self._baseline = self._statm.private_bytes()

    def has_messages(self) -> bool:
        """Whether :meth:`receive` would return something."""
        return bool(int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def connection_count(self) -> int:
        """How many connections there are."""
        return self._door.count()

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Yield messages as [routing, frame...], for a moment only: a flood must not keep the loop.

        The descriptor is edge-triggered: call this after every turn, whatever caused it.
        """
        end_s = time.monotonic() + _TURN_S
        while self.has_messages():
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield frames
            if time.monotonic() >= end_s:
                return

    def reply(self, routing: bytes, request: int, message: Any) -> bool:
        """Send a reply; False when the peer is gone (EHOSTUNREACH) or does not read (EAGAIN)."""
        data = codec.encode_envelope(codec.Envelope(request, b"", message))
        try:
            self._router.send_multipart([routing, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Its handover connection ends the session.
            _logger.debug("reply dropped: %s", error)
            return False
        return True

    def condemn(self, frame: zmq.Frame) -> None:
        """Close the connection that a frame came on, a moment after a :meth:`reply` succeeded.

        ZeroMQ reports the number of a descriptor, which could belong to something else by now. The
        reply shows that the peer was there an instant ago, the name that it is a control
        connection. A duplicate holds it until it is closed: the error has to arrive first.
        """
        with contextlib.suppress(Exception):
            connection = connection_at(int(frame.get(zmq.SRCFD)), self._path)
            if connection is None:
                return
            if len(self._condemned) >= _CONDEMNED_LIMIT:
                connection.close()
                return
            self._condemned.append((time.monotonic() + _LAST_WORDS_S, connection))

    def reap(self) -> None:
        """Close condemned connections whose time has come; call a few times a second."""
        now = time.monotonic()
        due = [connection for moment, connection in self._condemned if moment <= now]
        self._condemned = [each for each in self._condemned if each[0] > now]
        for connection in due:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def is_bloated(self) -> bool:
        """Whether this process holds far more memory than it did; ask once a second."""
        held = self._statm.private_bytes()
        if held - self._first >= _TRIM_FROM_BYTES:
            # The heap keeps what was freed, in pieces, and a flood leaves hundreds of megabytes.
            _trim_heap()
            held = self._statm.private_bytes()
            self._baseline = max(self._first, min(self._baseline, held))
        return held - self._baseline >= _BLOAT_LIMIT_BYTES

    def reset(self) -> None:
        """Close the socket with everything in it, and open it again under its name."""
        self._selector.unregister(int(self._router.getsockopt(zmq.FD)))
        self._door.close()
        self._router = rebound(self._path, self._router, self._bind)
        deadline_s = time.monotonic() + _REBIND_PATIENCE_MS / 1000
        _trim_heap()
        while self.is_bloated() and time.monotonic() < deadline_s:
            time.sleep(0.01)  # a thread of ZeroMQ frees what was in it
            _trim_heap()
        self._baseline = max(self._baseline, self._statm.private_bytes())

    def close(self, *, linger_ms: int) -> None:
        """Close, but give replies under way this long."""
        for _, connection in self._condemned:
            connection.close()
        self._condemned.clear()
        self._door.close()
        self._router.close(linger=linger_ms)
        self._statm.close()

    def _bind(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, REQUEST_LIMIT_BYTES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVHWM, 1000)
        router.setsockopt(zmq.SNDHWM, _UNREAD_REPLIES)
        router.setsockopt(zmq.BACKLOG, 512)
        self._door = Doorkeeper(router, self._path, share=4, limit=4096)
        router.bind(f"ipc://{self._path}")
        self._selector.register(int(router.getsockopt(zmq.FD)), selectors.EVENT_READ, _noop)
        return router


def rebound(
    path: str, old: zmq.Socket[bytes], bind: Callable[[], zmq.Socket[bytes]]
) -> zmq.Socket[bytes]:
    """Close the socket at ``path``, and bind another one there, of the same group and mode."""
    before = os.stat(path)
    with old.get_monitor_socket(zmq.EVENT_CLOSED) as monitor:
        old.unbind(f"ipc://{path}")
        # ZeroMQ closes it in a thread of its own, and some versions unlink the name then: wait, or
        # the name of the new socket is unlinked.
        monitor.poll(_REBIND_PATIENCE_MS)
        old.disable_monitor()
    old.close(linger=0)
    fresh = bind()
    os.chown(path, -1, before.st_gid)
    os.chmod(path, stat.S_IMODE(before.st_mode))
    return fresh


class _Statm:
    """Memory of this process, by a descriptor kept open: it is needed when none may be left."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def private_bytes(self) -> int:
        """Resident memory that is not segments or files."""
        _, resident, shared, *_ = os.pread(self._descriptor, 4096, 0).split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def _noop() -> None:
    """The socket is drained after every turn."""


def _trim_heap() -> None:
    import ctypes

    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
