"""The public functions of the package.

Loads need none of them; they are for programs that want to look inside, warm the cache, or use
records without a framework.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trims_shim import diagnostics, patches
from trims_shim.client.cache import cache
from trims_shim.diagnostics import Stats
from trims_shim.errors import UnsupportedFormat
from trims_shim.formats import read_archive, read_header
from trims_shim.specs import Record, Span

if TYPE_CHECKING:
    import numpy
    import torch

    from trims_shim.client.arenas import Arena

__all__ = [
    "Handle",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "info",
    "open",
    "stats",
    "warm",
]

_ZIP_MAGIC = b"PK\x03\x04"


def enable() -> None:
    """Patch the configured libraries in this process, now or when they are imported."""
    config = cache().config
    patches.enable(config.patches, elide_copies=config.elide_copies)


def disable() -> None:
    """Undo the patches. What was loaded before stays valid and shared."""
    patches.disable()


def enabled() -> bool:
    """Whether loads of the calling thread or task use the cache."""
    return patches.active()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Loads of this thread or task go to the framework's own loader inside the block."""
    token = patches.overridden.set(False)
    try:
        yield
    finally:
        patches.overridden.reset(token)


def stats() -> Stats:
    """What the shim did in this process so far."""
    return diagnostics.stats()


def info() -> dict[str, Any]:
    """What ``trims info --json`` prints, for this process. Starts nothing."""
    from trims_shim.inspection import describe

    return describe()


def warm(path: str | os.PathLike[str], *, pin: bool = False) -> str:
    """Load a model file into the cache without using it; blocks until it is there.

    Starts the daemon when none runs. ``pin`` keeps it resident. Returns the digest. Raises OSError
    for the file, TrimsError when the cache cannot take it.
    """
    from trims_shim.wire.messages import PinImageRequest

    with open(path) as handle:
        if pin:
            cache().request(PinImageRequest(handle.digest, is_pinned=True))
        return handle.digest


def open(path: str | os.PathLike[str]) -> Handle:
    """Open a model file of any size through the cache; the caller closes the handle.

    Raises OSError for the file, TrimsError when the cache cannot take it. No fallback: this is the
    cache itself.
    """
    name = os.fsdecode(path)
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Handle(cache().open(descriptor, name=os.path.abspath(name), min_bytes=1), name)
    finally:
        os.close(descriptor)


class Handle:
    """A model in the cache, mapped into this process; a context manager.

    ``records`` are the named tensors of a safetensors file, or the named records of a torch zip
    archive (``data/0``, whose dtype and shape only its pickle knows). Views stay valid after
    :meth:`close`; the memory goes when the last of them goes. Writes to views stay private.
    """

    def __init__(self, arena: Arena, name: str) -> None:
        self._arena: Arena | None = arena
        self.name = name
        self.digest = arena.image.digest
        self.size_bytes = arena.size_bytes
        self._records: dict[str, Record] | None = None

    @property
    def records(self) -> Mapping[str, Record]:
        """Records by name. Raises FormatError for a file of neither format."""
        if self._records is None:
            self._records = _read_records(self.buffer())
        return self._records

    def buffer(self) -> memoryview:
        """All bytes of the file, writable and private."""
        return memoryview(self._open_arena().buffer).cast("B")

    def numpy(self, name: str) -> numpy.ndarray[Any, Any]:
        """A record as an array: with dtype and shape (safetensors), else as bytes [size].

        Raises KeyError, UnsupportedFormat for a dtype that numpy does not have.
        """
        import numpy

        record = self.records[name]
        buffer: Any = self._open_arena().buffer
        part: numpy.ndarray[Any, Any] = numpy.frombuffer(buffer, dtype=numpy.uint8)
        part = part[record.span.offset_bytes : record.span.end_bytes]
        if not record.dtype:
            return part
        from trims_shim.patches.safetensors_numpy import NUMPY_DTYPES

        if record.dtype not in NUMPY_DTYPES:
            raise UnsupportedFormat(f"{name}: numpy has no dtype {record.dtype}; use torch()")
        part = part.view(numpy.dtype(NUMPY_DTYPES[record.dtype]))
        return part.reshape(record.shape)

    def torch(self, name: str) -> torch.Tensor:
        """A record as a tensor on the CPU, as :meth:`numpy`. Raises KeyError."""
        import torch

        from trims_shim.patches.torch_storage import storage_of, torch_dtype

        record = self.records[name]
        storage = storage_of(self._open_arena())
        part = storage[record.span.offset_bytes : record.span.end_bytes]
        if not record.dtype:
            return torch.empty(0, dtype=torch.uint8).set_(part)
        tensor = torch.empty(0, dtype=torch_dtype(record.dtype)).set_(part)
        return tensor.view(record.shape)

    def close(self) -> None:
        """Let go of the mapping; views keep it alive for as long as they need it."""
        self._arena = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<trims_shim.Handle {self.name} {self.size_bytes} bytes {self.digest[:12]}>"

    def _open_arena(self) -> Arena:
        if self._arena is None:
            raise ValueError(f"handle of {self.name} is closed")
        return self._arena


def _read_records(view: memoryview) -> dict[str, Record]:
    if bytes(view[:4]) == _ZIP_MAGIC:
        archive = read_archive(view)
        return {name: _bytes_record(name, span) for name, span in archive.records.items()}
    return {record.name: record for record in read_header(view).records}


def _bytes_record(name: str, span: Span) -> Record:
    return Record(name, span, "", (span.size_bytes,))
