"""The bytes of remote files, into a directory: in parallel, resumed, tried again.

A file is written from its beginning to its end, although its parts are read at the same time: so
the size of an unfinished one says where to go on. Whether that is still of the same file is for the
caller to know.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import BinaryIO, Protocol

from trims_shim.errors import RemoteUnreachable
from trims_shim.remote.listing import Listing, RemoteFile, shown

__all__ = ["PART_BYTES", "STREAMS", "Remote", "download"]

STREAMS = 8
PART_BYTES = 8 << 20
"""What one stream reads at once; so much memory is taken for each."""
_ROOM_BYTES = 64 << 20
"""A file whose size nobody knows is given at most this much room at a time."""
_TRIES = 4
_FIRST_PAUSE_S = 0.25


class Remote(Protocol):
    """Where files come from; ``is_concurrent``: parts may be read at the same time."""

    is_concurrent: bool

    def list(self) -> Listing: ...
    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]: ...


def download(
    remote: Remote,
    listing: Listing,
    directory: str,
    *,
    progress: Callable[[int], None],
    make_room: Callable[[int], None],
) -> None:
    """Complete the files below a directory; ``progress`` gets the number of bytes that are there.

    ``make_room`` is called with a number of bytes before so many are written that the listing did
    not announce; it may raise OSError.

    Raises RemoteUnreachable if that fails again and again, OSError. What came is left there.
    """
    before_bytes = 0
    for file in listing.files:
        path = os.path.join(directory, file.name)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "r+b") as out:
            _complete(remote, file, out, _shifted(progress, before_bytes), make_room)
            before_bytes += out.tell()


def _shifted(progress: Callable[[int], None], before_bytes: int) -> Callable[[int], None]:
    return lambda done_bytes: progress(before_bytes + done_bytes)


def _complete(
    remote: Remote,
    file: RemoteFile,
    out: BinaryIO,
    progress: Callable[[int], None],
    make_room: Callable[[int], None],
) -> None:
    failures = 0
    while True:
        start = out.seek(0, os.SEEK_END)
        if file.size_bytes is None or not file.is_seekable or start > file.size_bytes:
            start = out.seek(out.truncate(0))
        try:
            _append(remote, file, out, progress, make_room)
            return
        except RemoteUnreachable:
            # As long as it goes on after where it ended, there may be any number of ends.
            failures = 1 if file.is_seekable and out.tell() > start else failures + 1
            if failures == _TRIES:
                raise
            time.sleep(_FIRST_PAUSE_S * 2**failures)


def _append(
    remote: Remote,
    file: RemoteFile,
    out: BinaryIO,
    progress: Callable[[int], None],
    make_room: Callable[[int], None],
) -> None:
    came_bytes, size_bytes = out.tell(), file.size_bytes
    room_bytes = 0
    if came_bytes != size_bytes:
        for piece in _pieces(remote, file, came_bytes):
            came_bytes += len(piece)
            if size_bytes is not None and came_bytes > size_bytes:
                out.truncate(out.seek(0))
                break  # Perhaps it never ends.
            if size_bytes is None and came_bytes > room_bytes:
                more_bytes = min(came_bytes, _ROOM_BYTES)
                make_room(more_bytes)
                room_bytes += more_bytes
            out.write(piece)
            progress(came_bytes)
    if size_bytes not in (None, came_bytes):
        raise RemoteUnreachable(
            f"{shown(file.place)}: {came_bytes} bytes came, of {size_bytes}; try again"
        )


def _pieces(remote: Remote, file: RemoteFile, start: int) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, in order."""
    end = file.size_bytes
    is_divided = remote.is_concurrent and file.is_seekable
    if end is None or end - start <= PART_BYTES or not is_divided:
        yield from remote.read(file, start, end)
        return
    is_over = threading.Event()

    def read(first: int) -> list[bytes]:
        pieces = []
        last = min(first + PART_BYTES, end)
        left_bytes = last - first
        for piece in remote.read(file, first, last):
            pieces.append(piece)
            left_bytes -= len(piece)
            if is_over.is_set() or left_bytes < 0:
                break
        if left_bytes != 0:
            raise RemoteUnreachable(f"{shown(file.place)}: a part has not its length; try again")
        return pieces

    parts: deque[Future[list[bytes]]] = deque()
    try:
        for first in range(start, end, PART_BYTES):
            parts.append(_begun(read, first))
            if len(parts) == STREAMS:
                yield from parts.popleft().result()
        while parts:
            yield from parts.popleft().result()
    finally:
        is_over.set()


def _begun(read: Callable[[int], list[bytes]], first: int) -> Future[list[bytes]]:
    """A part that a thread reads. No pool: at its exit, Python waits for those of a pool."""
    part: Future[list[bytes]] = Future()

    def run() -> None:
        try:
            part.set_result(read(first))
        # Whatever it is, it is raised where the part is waited for.
        except BaseException as error:
            part.set_exception(error)

    try:
        threading.Thread(target=run, name="trims-fetch", daemon=True).start()
    except RuntimeError:
        run()  # There may be no more threads.
    return part
