"""torch's zip archives with records from the cache: the reader of torch.load and torch.export.load.

Torch's own reader is beneath, so every check, message and file position is torch's. Ours overrides
only where a record's bytes come from: a slice of the arena instead of a fresh allocation that is
read into.
"""

from __future__ import annotations

import io
import sys
from typing import Any, ClassVar

import torch

from trims_shim import diagnostics, patches
from trims_shim.client.cache import cache
from trims_shim.errors import FormatError, UnsupportedFormat
from trims_shim.formats import TorchArchive, read_archive
from trims_shim.formats.torch_zip import RECORD_ALIGNMENT_BYTES
from trims_shim.patches.asking import arena_of_file, or_none
from trims_shim.patches.torch_modes import uncompiled
from trims_shim.patches.torch_rebuild import collector_paused
from trims_shim.patches.torch_storage import bytes_over, storage_of
from trims_shim.specs import Span

__all__ = ["ArchiveReader", "ServedArchive", "missing_method", "serve"]

_FileReader: Any = torch._C.PyTorchFileReader


class ServedArchive:
    """An archive in the cache, and the storage of which its records are slices."""

    __slots__ = ("archive", "storage", "view")

    def __init__(self, storage: torch.UntypedStorage, view: memoryview) -> None:
        """Raises FormatError where this package reads the archive differently from torch."""
        self.storage = storage
        self.view = view
        self.archive: TorchArchive = read_archive(view)

    def pickle(self) -> bytes:
        """Return the pickle of the archive. Raises UnsupportedFormat where it has none."""
        span = self.archive.records.get("data.pkl")
        if span is None:
            raise UnsupportedFormat("record 'data.pkl': missing")
        return bytes(self.view[span.offset_bytes : span.end_bytes])

    def record(self, name: str, size_bytes: int | None = None) -> Span | None:
        """Return the place of a record; None unless it is aligned and of the size, if given."""
        span = self.archive.records.get(name)
        if span is None or size_bytes not in (None, span.size_bytes):
            return None
        return None if span.offset_bytes % RECORD_ALIGNMENT_BYTES else span

    def view_of(self, name: str) -> memoryview | None:
        """Return the bytes of a record, read-only as ``bytes`` are; None unless it is aligned."""
        span = self.record(name)
        return None if span is None else self.view[span.offset_bytes : span.end_bytes].toreadonly()


class ArchiveReader(_FileReader):  # type: ignore[misc]
    """torch's reader, except that the bytes of tensors come from the cache where they can."""

    api: ClassVar[str]
    """The function that reads, as messages name it."""
    counted_as: ClassVar[str]
    """Its name in the counters of what was served."""

    def __init__(self, file: Any) -> None:
        whole = _whole(file)
        super().__init__(file)
        self.file = whole
        """The program's file, if the archive is all of it; else None."""
        self._source = file
        self._is_asked = False
        self._served: ServedArchive | None = None

    def __repr__(self) -> str:
        # Errors of torch print it, where a damaged pickle gives a wrong argument.
        return f"<{_FileReader.__module__}.{_FileReader.__qualname__} object at {id(self):#x}>"

    def served(self) -> ServedArchive | None:
        """Return the cached archive; asks on first use, so that lazy loads cost nothing."""
        if not self._is_asked:
            self._is_asked = True
            self._served = self._ask() if patches.active() else None
        return self._served

    @uncompiled
    def get_storage_from_record(self, name: str, numel: int, dtype: Any) -> Any:
        found = self._find(name, numel, dtype)
        return super().get_storage_from_record(name, numel, dtype) if found is None else found

    @or_none
    def _find(self, name: str, numel: int, dtype: Any) -> torch.Tensor | None:
        if type(numel) is not int or numel <= 0:  # torch refuses them; a damaged pickle has them
            return None
        served = self.served()
        size_bytes = numel * (1 if dtype is torch.UntypedStorage else dtype.itemsize)
        span = None if served is None else served.record(name, size_bytes)
        if served is None or span is None:
            return None
        try:
            self.leave_file_at(span.end_bytes)
            return bytes_over(served.storage[span.offset_bytes : span.end_bytes])
        except Exception:
            self._served = None  # torch reads the rest: an error is of a load, not of each tensor
            raise

    def leave_file_at(self, position: int) -> None:
        """Put the program's file where torch's reader would have left it."""
        if self.file is not None:
            self.file.seek(position)

    @or_none
    def _ask(self) -> ServedArchive | None:
        file = self.file
        if file is None:
            reason = "small_file" if _is_small(self._source) else "not_a_file"
            diagnostics.fallback(reason, what=self.api)
            return None
        arena = arena_of_file(file.fileno(), file.name)
        if arena is None:
            return None
        served = serve(storage_of(arena), memoryview(arena.buffer).cast("B"), arena.image.name)
        if served is not None:
            diagnostics.count("served", self.counted_as)
        return served


@collector_paused()
def serve(storage: torch.UntypedStorage, view: memoryview, name: str) -> ServedArchive | None:
    """Return the archive that fills a storage; None (counted) where torch has to read it."""
    try:
        return ServedArchive(storage, view)
    except FormatError as error:
        diagnostics.fallback("unsupported_format", error, what=name)
        return None


def _is_small(source: Any) -> bool:
    """Whether a file in memory is one that would be left to torch on a disk, too.

    So are the example inputs that torch.export.load reads from an archive.
    """
    return type(source) is io.BytesIO and source.getbuffer().nbytes < cache().config.min_bytes


@or_none
def _whole(file: Any) -> Any:
    """Return the program's plain file, if the archive is all of it; else None."""
    plain = _without_fsspec(file)
    return plain if _position_of(plain) == 0 else None


def _without_fsspec(file: Any) -> Any:
    """Return the file inside fsspec's wrapper of a local file; Lightning loads such files."""
    local = sys.modules.get("fsspec.implementations.local")
    opener = getattr(local, "LocalFileOpener", None)
    return file.f if opener is not None and type(file) is opener else file


def _position_of(file: Any) -> int:
    """Return the position of a plain open file; -1 for objects that may read other bytes."""
    raw = file.raw if type(file) is io.BufferedReader else file
    if type(raw) is not io.FileIO or not raw.readable():
        return -1
    try:
        # The archive begins at the file's position, and only a whole file is an image.
        return int(file.tell())
    except (OSError, ValueError):
        return -1


def missing_method() -> str | None:
    """Return what this torch's reader lacks, as probes say it; None if nothing."""
    if not hasattr(_FileReader, "get_storage_from_record"):
        return "PyTorchFileReader.get_storage_from_record is gone"
    return None
