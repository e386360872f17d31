"""Read a model file into a segment, in parallel, hashing on the way.

Readers claim chunks in order and read them straight into the segment's mapping; the calling thread
hashes the finished prefix behind them, so the bytes are hashed while they are warm and the digest
is that of the bytes in the segment. Nothing of the file is mapped: a file that shrinks while it is
read ends in a short read, not in SIGBUS.

The interpreter lock is released in reads and in BLAKE3; a Python loop of some hundred iterations
per gigabyte is what is left.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass, field

from blake3 import blake3

from trims_shim.errors import FileChanged, ReadFailed, RequestRefused

__all__ = ["Meter", "default_threads", "fill", "hash_file", "hash_segment"]

CHUNK_BYTES = 4 << 20
"""Large enough that the loop costs nothing, small enough that hashing follows in the cache."""
_THREADS_LIMIT = 4


@dataclass(slots=True)
class Meter:
    """How far a load is; written by the load, read by the server."""

    total_bytes: int
    done_bytes: int = 0


@dataclass(slots=True)
class _Reading:
    """State shared by the readers of one file."""

    descriptor: int
    view: memoryview
    next_bytes: int = 0
    finished: set[int] = field(default_factory=set)
    error: RequestRefused | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)


def default_threads() -> int:
    """Readers per file: enough to keep a disk and the memory bus busy, not the machine."""
    return max(1, min(_THREADS_LIMIT, len(os.sched_getaffinity(0))))


def fill(
    descriptor: int, view: memoryview, *, threads: int, meter: Meter, name: str = "file"
) -> str:
    """Read ``len(view)`` bytes from the start of a file into ``view``; the digest in hexadecimal.

    Blocks; call from a worker thread. Raises FileChanged when the file ends early, ReadFailed when
    the kernel reports an error. ``view`` is then partly written.
    """
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, len(view), os.POSIX_FADV_SEQUENTIAL)
    reading = _Reading(descriptor, view)
    workers = [
        threading.Thread(target=_read_chunks, args=(reading, name), daemon=True)
        for _ in range(threads)
    ]
    started = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
        digest = _hash_behind(reading, meter)
    finally:
        # Nothing may write to the view any more when this returns, however it returns.
        reading.next_bytes = len(view)
        for worker in started:
            worker.join()
    return digest


def hash_segment(descriptor: int, size_bytes: int) -> str:
    """The digest of a sealed segment."""
    with mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        digest: str = blake3(mapping, max_threads=blake3.AUTO).hexdigest()
    return digest


def hash_file(descriptor: int, size_bytes: int, *, meter: Meter, name: str = "file") -> str:
    """The digest of the first ``size_bytes`` of a file, read but kept nowhere. Raises as fill."""
    hasher = blake3(max_threads=blake3.AUTO)
    buffer = bytearray(min(CHUNK_BYTES, size_bytes))
    view = memoryview(buffer)
    done = 0
    while done < size_bytes:
        part = view[: min(len(view), size_bytes - done)]
        _read_fully(descriptor, part, done, name)
        hasher.update(part)
        done += len(part)
        meter.done_bytes += len(part)
    digest: str = hasher.hexdigest()
    return digest


def _hash_behind(reading: _Reading, meter: Meter) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    total = len(reading.view)
    done = 0
    while done < total:
        ready = _wait_for_prefix(reading, done, total)
        with reading.view[done:ready] as part:
            hasher.update(part)
        meter.done_bytes += ready - done
        done = ready
    digest: str = hasher.hexdigest()
    return digest


def _wait_for_prefix(reading: _Reading, done: int, total: int) -> int:
    with reading.changed:
        while done not in reading.finished and reading.error is None:
            reading.changed.wait()
        if reading.error is not None:
            raise reading.error
        ready = done
        while ready in reading.finished:
            reading.finished.discard(ready)
            ready += CHUNK_BYTES
    return min(ready, total)


def _read_chunks(reading: _Reading, name: str) -> None:
    total = len(reading.view)
    while True:
        with reading.changed:
            start = reading.next_bytes
            reading.next_bytes += CHUNK_BYTES
            if start >= total or reading.error is not None:
                return
        error: RequestRefused | None = None
        try:
            with reading.view[start : start + CHUNK_BYTES] as part:
                _read_fully(reading.descriptor, part, start, name)
        except RequestRefused as refused:
            error = refused
        # Border: the hasher waits for this chunk, whatever became of it.
        except Exception as failure:
            error = ReadFailed(f"{name}: {type(failure).__name__}: {failure}")
        with reading.changed:
            reading.error = reading.error or error
            reading.finished.add(start)
            reading.changed.notify_all()


def _read_fully(descriptor: int, part: memoryview, offset: int, name: str) -> None:
    """Views are released here: one kept by an error's traceback would keep the segment mapped."""
    done = 0
    while done < len(part):
        try:
            with part[done:] as rest:
                count = os.preadv(descriptor, [rest], offset + done)
        except OSError as error:
            raise ReadFailed(f"{name}: {error}") from error
        if count == 0:
            raise FileChanged(f"{name} became shorter while it was being read; load it again")
        done += count
