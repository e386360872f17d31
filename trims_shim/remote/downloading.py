"""The bytes of remote files, into a directory: in parallel, resumed, tried again.

A file is written from its beginning to its end, although its parts are read at the same time: so
the size of an unfinished one says where to go on. Whether that is still of the same file is for the
caller to know.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, Protocol

from trims_shim.errors import RemoteUnreachable
from trims_shim.remote.listing import Listing, RemoteFile, shown
from trims_shim.remote.streams import in_order
from trims_shim.replacing import write_all

__all__ = ["PART_BYTES", "GivenUp", "Remote", "Source", "download"]

PART_BYTES = 8 << 20
"""What one stream reads at once; so much memory is taken for each. Files of a folder that are not
larger are read ahead, each by one stream."""
_ROOM_BYTES = 64 << 20
"""A file whose size nobody knows is given at most this much room at a time."""
_TRIES = 4
_FIRST_PAUSE_S = 0.25


class GivenUp(RemoteUnreachable):
    """No answer comes, and a source has asked often enough already: it is not tried again."""


class Source(Protocol):
    """Where files come from; ``is_concurrent``: parts may be read at the same time."""

    is_concurrent: bool

    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]: ...


class Remote(Source, Protocol):
    """What a URL names."""

    def list(self) -> Listing: ...


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
    small = [file for file in listing.files if _is_small(file, directory)]
    is_over = threading.Event()
    source: Source = (
        _ReadAhead(remote, small, is_over) if len(small) > 1 and remote.is_concurrent else remote
    )
    try:
        for file in listing.files:
            path = os.path.join(directory, file.name)
            _make_folders(directory, file.name)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            # Unbuffered: a child that is forked in the middle would write the rest, too.
            with open(os.open(path, flags, 0o600), "r+b", buffering=0) as out:
                _complete(source, file, out, _shifted(progress, before_bytes), make_room)
                before_bytes += out.tell()
    finally:
        is_over.set()


def _make_folders(directory: str, name: str) -> None:
    """Those of a file below a directory, which is not made again if others have deleted it: for
    that, those above it might be made, and be writable by others."""
    for at in (at for at, each in enumerate(name) if each == "/"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(directory, name[:at]), 0o700)


def _is_small(file: RemoteFile, directory: str) -> bool:
    """Whether all of it is read, and at once."""
    if file.size_bytes is None or not 0 < file.size_bytes <= PART_BYTES:
        return False
    return not os.path.lexists(os.path.join(directory, file.name))


def _shifted(progress: Callable[[int], None], before_bytes: int) -> Callable[[int], None]:
    return lambda done_bytes: progress(before_bytes + done_bytes)


def _complete(
    source: Source,
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
            _append(source, file, out, progress, make_room)
            return
        except GivenUp:
            raise
        except RemoteUnreachable:
            # As long as it goes on after where it ended, there may be any number of ends.
            failures = 1 if file.is_seekable and out.tell() > start else failures + 1
            if failures == _TRIES:
                raise
            time.sleep(_FIRST_PAUSE_S * 2**failures)


def _append(
    source: Source,
    file: RemoteFile,
    out: BinaryIO,
    progress: Callable[[int], None],
    make_room: Callable[[int], None],
) -> None:
    came_bytes, size_bytes = out.tell(), file.size_bytes
    room_bytes = 0
    if came_bytes != size_bytes:
        for piece in _pieces(source, file, came_bytes):
            came_bytes += len(piece)
            if size_bytes is not None and came_bytes > size_bytes:
                out.truncate(out.seek(0))
                break  # Perhaps it never ends.
            if size_bytes is None and came_bytes > room_bytes:
                more_bytes = min(came_bytes, _ROOM_BYTES)
                make_room(more_bytes)
                room_bytes += more_bytes
            write_all(out, piece)
            progress(came_bytes)
    if size_bytes not in (None, came_bytes):
        raise RemoteUnreachable(
            f"{shown(file.place)}: {came_bytes} bytes came, of {size_bytes}; try again"
        )


def _pieces(source: Source, file: RemoteFile, start: int) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, in order."""
    end = file.size_bytes
    is_divided = source.is_concurrent and file.is_seekable
    if end is None or end - start <= PART_BYTES or not is_divided:
        yield from source.read(file, start, end)
        return
    is_over = threading.Event()
    parts = (
        partial(_part, source, file, first, min(first + PART_BYTES, end), is_over)
        for first in range(start, end, PART_BYTES)
    )
    try:
        for part in in_order(parts):
            yield part.result()
    finally:
        is_over.set()


def _part(
    source: Source, file: RemoteFile, first: int, last: int, is_over: threading.Event
) -> bytes:
    """All bytes of a part. Raises RemoteUnreachable if there are fewer or more.

    Where a connection ends within it, the next one goes on, as long as anything comes.
    """
    # No list of pieces: some servers send two bytes at a time, which take 43 there.
    part = io.BytesIO()
    at, start = first, -1
    while start < at < last and not is_over.is_set():
        start = at
        try:
            for piece in source.read(file, start, last):
                part.write(piece)
                at += len(piece)
                if is_over.is_set() or at > last:
                    break
        except RemoteUnreachable:
            if at == start:
                raise
    if at != last:
        raise RemoteUnreachable(f"{shown(file.place)}: a part has not its length; try again")
    return part.getvalue()


class _ReadAhead:
    """A remote whose small files are read while those before them are written, until it is over.

    They are given in the order in which they will be read. One that could not be read is read
    again when it is asked for again, as everything else is.
    """

    def __init__(self, remote: Source, small: list[RemoteFile], is_over: threading.Event) -> None:
        self.is_concurrent = remote.is_concurrent
        self._remote = remote
        self._names = deque(file.name for file in small)
        wholes = (partial(_part, remote, file, 0, file.size_bytes or 0, is_over) for file in small)
        self._wholes = in_order(wholes)

    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
        """Pieces of the bytes from ``start`` on."""
        if self._names and self._names[0] == file.name:
            self._names.popleft()
            yield next(self._wholes).result()
        else:
            yield from self._remote.read(file, start, end)
