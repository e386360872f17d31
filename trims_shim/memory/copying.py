"""Copy a model file into memory: a host segment, or device memory through pinned buffers.

One algorithm serves every direction: threads make chunks of the file ready (read them, and start
their copies); the calling thread hashes ready chunks in file order and reports progress. The
threads run the code of an engine: :mod:`~trims_shim.memory.copying_native` (C++, see
native/DESIGN.md), or :mod:`~trims_shim.memory.copying_python` where the extension was not built.

Device memory holds a file's tensors, where a DeviceLayout says; its other bytes are the outline.

Invariants: when a function here returns or raises, no thread and no copy of the device touches the
memory it was given, and every view it made is released. The digest is that of the bytes that were
put there. The file is not mapped: if it shrinks while it is read, the result is a short read, not
SIGBUS. Descriptors and their file positions stay the caller's.

Functions block. Each call has its own threads, so concurrent calls are independent.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3

from trims_shim.errors import CorruptFile
from trims_shim.formats.device_layout import DeviceLayout
from trims_shim.memory import copying_native, copying_python
from trims_shim.memory.chunks import Route
from trims_shim.memory.copying_python import read_fully
from trims_shim.memory.uncached import opened_directly
from trims_shim.specs import AS_IS, Digest, Variant

__all__ = [
    "CHUNK_BYTES",
    "RING_CHUNKS",
    "Engine",
    "Transfer",
    "can_widen",
    "default_threads",
    "download",
    "engine",
    "fill",
    "hasher",
    "kept_buffers",
    "upload",
    "widen",
]

CHUNK_BYTES = 4 << 20
"""Large enough that the loop costs nothing, small enough that hashing follows in the cache."""
RING_CHUNKS = 16
"""Pinned buffers: 64 MiB, two for each reader; more only takes longer to pin."""
_THREADS_LIMIT = 4
_DEVICE_THREADS_LIMIT = 8
"""A thread copies 6 to 10 GB/s out of the page cache; PCIe 5 x16 takes 50 GB/s and more."""
_HASHED_BY_THREADS_BYTES = 1 << 20
_REPORT_EVERY_BYTES = 8 * CHUNK_BYTES

OnProgress = Callable[[int], None]
"""Called in the calling thread, every few chunks and at the end, with the bytes done so far.

An exception from it ends the transfer and passes to the caller."""


class Transfer(Protocol):
    """One file on its way. Threads run inside the ``with`` block only."""

    def __enter__(self) -> Transfer: ...

    def __exit__(self, *exception: object) -> None: ...

    def next(self) -> memoryview | None:
        """Return the next bytes of the file, in order; None after the last. Blocks for them.

        The caller releases the view before it calls anything else. Raises FileChanged, ReadFailed,
        MemoryFailure (the target cannot be written) or DriverFailure.
        """

    def finish(self) -> None:
        """Wait for the copies. Raises DriverFailure when one failed."""


class Engine(Protocol):
    """Makes transfers between files and devices; both engines are modules of this form."""

    def upload(
        self, source: int, direct: int | None, outline: int | None, route: Route
    ) -> Transfer:
        """Scatter a file over device memory and ``outline``.

        ``direct`` is the file again, opened with O_DIRECT.
        """

    def download(self, outline: int, target: int, route: Route) -> Transfer:
        """Gather the file from device memory and ``outline``, and write it to ``target``."""


def engine() -> str:
    """Return which engine copies to and from devices here: ``native`` or ``python``.

    There is no setting: it depends on the build. Host memory is always filled from Python, since
    C++ was not faster (native/DESIGN.md has the figures).
    """
    return "native" if copying_native.is_available() else "python"


def default_threads() -> int:
    """Return the readers per file: enough to keep a disk and the memory bus busy, no more."""
    return max(1, min(_THREADS_LIMIT, len(os.sched_getaffinity(0))))


def hasher(size_bytes: int, *, lead_bytes: int = 0) -> Any:
    """Return a BLAKE3 hasher for ``size_bytes`` that has taken ``lead_bytes`` zeros already.

    From 1 MiB on it uses a thread for each processor, or one where the system gives no more.
    """
    threads = _hash_threads() if size_bytes >= _HASHED_BY_THREADS_BYTES else 1
    return blake3(bytes(lead_bytes), max_threads=threads)


@functools.cache
def _hash_threads() -> int:
    """Return ``max_threads`` for large hashes, the first of which makes the process's thread pool.

    If it cannot, every large hash panics, which is no Exception.
    """
    try:
        blake3(bytes(_HASHED_BY_THREADS_BYTES), max_threads=blake3.AUTO)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return 1
    return int(blake3.AUTO)


def fill(
    source: int,
    view: memoryview,
    *,
    threads: int,
    on_progress: OnProgress,
    variant: Variant = AS_IS,
    name: str = "file",
) -> Digest:
    """Make a variant of a file in ``view``, until that is full.

    The lead is not touched and has to be zero. Returns the digest of the whole view. Raises
    FileChanged when the file ends early, ReadFailed when the kernel reports an error; ``view`` is
    then partly written.
    """
    lead_bytes = variant.offset_bytes(0)
    behind = _Behind(on_progress, hasher(len(view), lead_bytes=lead_bytes))
    with view[lead_bytes:] as body, _reading(source, len(body)) as direct:
        if variant.widened:
            return _run(_Widening(source, body, variant.widened, name), behind)
        # O_DIRECT needs memory aligned as the file is.
        transfer = copying_python.fill(
            source,
            None if lead_bytes else direct,
            body,
            threads=threads,
            chunk_bytes=CHUNK_BYTES,
            variant=variant,
            name=name,
        )
        return _run(transfer, behind)


class _Widening:
    """A :class:`Transfer` that reads numbers of 16 bits and writes them as ones of 32."""

    def __init__(self, source: int, body: memoryview, numbers: str, name: str) -> None:
        self._source, self._body, self._numbers, self._name = source, body, numbers, name
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, len(body) // 2)))
        self._done = 0

    def __enter__(self) -> _Widening:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.release()

    def next(self) -> memoryview | None:
        done = self._done
        result = self._body[done : done + 2 * len(self._buffer)]
        if not result:
            return None
        try:
            with self._buffer[: len(result) // 2] as part:
                read_fully(self._source, part, done // 2, self._name)
                widen(part, result, self._numbers)
        except BaseException:
            result.release()
            raise
        self._done = done + len(result)
        return result

    def finish(self) -> None:
        """Everything is done."""


def can_widen() -> bool:
    """Whether :func:`widen` works here: it needs the extension."""
    return copying_native.is_available()


def widen(part: memoryview, target: memoryview, numbers: str) -> None:
    """Write numbers of 16 bits, of a kind in :data:`~trims_shim.specs.WIDENED`, as ones of 32.

    As many as ``target`` has room for. The bits are those of torch's own conversion, except for
    NaNs of float16: which ones torch makes of these depends on where in a tensor they are.
    """
    copying_native.widen(part, target, is_bfloat16=numbers == "bfloat16")


def upload(
    source: int,
    layout: DeviceLayout,
    address: int,
    outline: int | None,
    *,
    device_index: int,
    is_hashed: bool,
    on_progress: OnProgress,
    name: str = "file",
) -> Digest:
    """Copy a file (or host segment) to device memory; return its digest, "" unless ``is_hashed``.

    ``address``: mapped read-write on the device, ``layout.size_bytes`` long. ``outline``: a
    writable file for the bytes that are no tensor's, at their own offsets; None drops them.
    Raises FileChanged, ReadFailed, MemoryFailure (the outline cannot be written), DriverFailure.
    """
    _check(layout, name)
    behind = _Behind(on_progress, hasher(layout.file_bytes) if is_hashed else None)
    route = _route(layout, address, device_index, name)
    with _reading(source, layout.file_bytes) as direct:
        return _run(_engine().upload(source, direct, outline, route), behind)


def download(
    outline: int,
    layout: DeviceLayout,
    address: int,
    target: int,
    *,
    device_index: int,
    on_progress: OnProgress,
    name: str = "image",
) -> Digest:
    """Write the file that :func:`upload` took apart to ``target``, at offset 0; return its digest.

    Raises FileChanged when the outline is too short, ReadFailed when it cannot be read,
    MemoryFailure when ``target`` cannot be written, DriverFailure.
    """
    _check(layout, name)
    behind = _Behind(on_progress, hasher(layout.file_bytes))
    route = _route(layout, address, device_index, name)
    return _run(_engine().download(outline, target, route), behind)


def kept_buffers() -> contextlib.AbstractContextManager[None]:
    """Keep pinned buffers from one transfer to the next, inside the block.

    For a process that exists to make transfers: pinning takes longer than copying a small model. It
    holds 64 MiB and the device's primary context. The Python engine pins anew each time.
    """
    if not copying_native.is_available():
        return contextlib.nullcontext()
    return copying_native.kept_buffers(RING_CHUNKS * CHUNK_BYTES)


@dataclass(slots=True)
class _Behind:
    """Follows a transfer: hashes the ready bytes and reports progress."""

    on_progress: OnProgress
    hasher: Any
    done_bytes: int = 0
    reported_bytes: int = 0

    def take(self, part: memoryview) -> None:
        if self.hasher is not None:
            self.hasher.update(part)
        self.done_bytes += len(part)
        if self.done_bytes - self.reported_bytes >= _REPORT_EVERY_BYTES:
            self.report()

    def report(self) -> None:
        self.reported_bytes = self.done_bytes
        self.on_progress(self.done_bytes)

    def digest(self) -> Digest:
        return "" if self.hasher is None else str(self.hasher.hexdigest())


def _run(transfer: Transfer, behind: _Behind) -> Digest:
    with transfer:
        while (part := transfer.next()) is not None:
            # Released also on an error: a traceback that kept the view would keep the mapping.
            with part:
                behind.take(part)
        transfer.finish()
    if behind.done_bytes > behind.reported_bytes:
        behind.report()
    return behind.digest()


def _engine() -> Engine:
    return copying_native if copying_native.is_available() else copying_python


def _route(layout: DeviceLayout, address: int, device_index: int, name: str) -> Route:
    """Return the route, with no more buffers and threads than chunks."""
    chunks = max(1, -(-layout.file_bytes // CHUNK_BYTES))
    return Route(
        layout,
        address,
        device_index,
        threads=min(_DEVICE_THREADS_LIMIT, len(os.sched_getaffinity(0)), chunks),
        chunk_bytes=min(CHUNK_BYTES, max(1, layout.file_bytes)),
        ring_chunks=min(RING_CHUNKS, chunks),
        name=name,
    )


@contextlib.contextmanager
def _reading(source: int, size_bytes: int) -> Iterator[int | None]:
    """Announce a sequential read; yield an O_DIRECT descriptor where that is faster, else None."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(source, 0, size_bytes, os.POSIX_FADV_SEQUENTIAL)
    with opened_directly(source, size_bytes) as direct:
        yield direct


def _check(layout: DeviceLayout, name: str) -> None:
    """Check the layout: the engines walk its spans once, in order, and write where they say."""
    file_end = device_end = 0
    for each in layout.placed:
        if each.source.offset_bytes < file_end or each.offset_bytes < device_end:
            raise CorruptFile(f"{name}: its records overlap or are out of order")
        file_end = each.source.end_bytes
        device_end = each.offset_bytes + each.source.size_bytes
    if file_end > layout.file_bytes or device_end > layout.size_bytes:
        raise CorruptFile(f"{name}: a record ends after the file or after its device memory")
