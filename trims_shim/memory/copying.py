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
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from trims_shim.errors import CorruptFile
from trims_shim.formats.device_layout import DeviceLayout
from trims_shim.memory import copying_native, copying_python
from trims_shim.memory.chunks import Route
from trims_shim.memory.copying_python import Pieces, Source, WholeFile
from trims_shim.memory.uncached import opened_directly
from trims_shim.specs import AS_IS, Conversion, Digest, Variant

__all__ = [
    "CHUNK_BYTES",
    "RING_CHUNKS",
    "Engine",
    "Transfer",
    "can_convert",
    "default_threads",
    "download",
    "engine",
    "fill",
    "hasher",
    "kept_buffers",
    "source_of",
    "upload",
]

CHUNK_BYTES = 4 << 20
"""Large enough that the loop costs nothing, small enough that hashing follows in the cache."""
_CONVERTED_BYTES = 256 << 10
"""Read and converted at a time, within the second-level cache."""
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
        # O_DIRECT needs memory aligned as the file is.
        made = source_of(source, variant, name, direct=direct if variant == AS_IS else None)
        transfer = copying_python.fill(
            made, body, threads=threads, chunk_bytes=CHUNK_BYTES, name=name
        )
        return _run(transfer, behind)


class _Converted(NamedTuple):
    """Numbers of a source as ones of another dtype."""

    source: Source
    conversion: Conversion

    def read(self, part: memoryview, offset: int) -> None:
        """Fill ``part`` with whole numbers. Raises as :func:`~.copying_python.read_fully`."""
        from_bytes, to_bytes = self.conversion.source_bytes, self.conversion.target_bytes
        buffer = memoryview(bytearray(min(_CONVERTED_BYTES, len(part) // to_bytes * from_bytes)))
        step = len(buffer) // from_bytes * to_bytes
        for done in range(0, len(part), step):
            size = min(step, len(part) - done)
            with (
                buffer[: size // to_bytes * from_bytes] as numbers,
                part[done : done + size] as results,
            ):
                self.source.read(numbers, (offset + done) // to_bytes * from_bytes)
                copying_native.convert(numbers, results, self.conversion)


def source_of(file: int, variant: Variant, name: str, *, direct: int | None = None) -> Source:
    """Return what reads a variant of a file, from its lead's end on."""
    source: Source = WholeFile(file, direct, name)
    if variant.pieces:
        source = Pieces(file, variant.pieces, variant.piece_bytes, name)
    if variant.conversion is not None:
        source = _Converted(source, variant.conversion)
    return source


def can_convert() -> bool:
    """Whether numbers can be converted here: it needs the extension.

    The bits are those of torch's own conversion, except for NaNs: which ones torch makes of these
    depends on where in a tensor they are.
    """
    return copying_native.is_available()


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
