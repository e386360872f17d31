"""One end of the socket between an ensemble's program and a worker.

Messages go through ``multiprocessing``'s connection; descriptors and large contents, which it would
copy several times, past it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Channel"]

_SKIPPED_BYTES = 1 << 16
"""At once, of contents for which there is no memory."""


class Channel:
    """Any one thread may send at a time.

    ``multiprocessing``'s way to send a descriptor needs another one, and there may be none left.
    """

    def __init__(self, ours: socket.socket) -> None:
        """Owns ``ours``. Raises OSError."""
        ours.setblocking(True)  # whatever `socket.setdefaulttimeout` was told
        self._socket = ours
        self.connection: Connection[Any, Any] = Connection(os.dup(ours.fileno()))

    def send_descriptor(self, descriptor: int) -> None:
        """Hand a descriptor over. Raises OSError."""
        socket.send_fds(self._socket, [b"."], [descriptor])

    def receive_descriptor(self) -> int:
        """Return a descriptor that was sent; the caller closes it. Raises OSError and EOFError."""
        content, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not content:
            raise EOFError
        if not descriptors:
            raise OSError("shared memory did not come: this process may have no more open files")
        return descriptors[0]

    def send_contents(self, contents: Iterable[memoryview]) -> None:
        """Send bytes as they are. Raises OSError."""
        for content in contents:
            self._socket.sendall(content)

    def receive_contents(self, sizes_bytes: Iterable[int]) -> list[bytearray]:
        """Return as many bytes as were sent, without a copy. Raises OSError and EOFError.

        Raises MemoryError if there is no room for them; all have been received then.
        """
        sizes = list(sizes_bytes)
        try:
            contents = [bytearray(size_bytes) for size_bytes in sizes]
        except MemoryError:
            self._skip(sum(sizes))
            raise
        for content in contents:
            self._fill(content)
        return contents

    def _fill(self, content: bytearray) -> None:
        left = memoryview(content)
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]

    def _skip(self, size_bytes: int) -> None:
        while size_bytes:
            count = len(self._socket.recv(min(size_bytes, _SKIPPED_BYTES)))
            if not count:
                raise EOFError
            size_bytes -= count

    def close(self) -> None:
        """Close this end."""
        self.connection.close()
        self._socket.close()
