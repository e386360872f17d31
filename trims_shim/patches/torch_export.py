"""torch.export.load of ``.pt2`` archives: the weights and constants of exported programs.

``PT2ArchiveReader`` opens the file by its path, and torch asks its ``archive_file`` for the bytes
of each weight: for a storage, before torch 2.13 for a ``bytes`` object, over which it makes the
tensor. Torch's reader is made first, so that what is no archive raises torch's errors. Ours, of the
same file, then takes its place. Graphs, pickled tensors and custom objects are torch's to read; so
are the libraries of AOTInductor, whose weights are compiled in.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch.export.pt2_archive._package as package

from trims_shim import diagnostics, patches
from trims_shim.patches.points import PatchPoint, is_own
from trims_shim.patches.torch_archive import ArchiveReader, missing_method
from trims_shim.patches.torch_modes import uncompiled

__all__ = ["POINTS"]


class _Reader(ArchiveReader):
    api = "torch.export.load"
    counted_as = "torch_export"

    def __init__(self, path: str) -> None:
        self._opened = io.FileIO(path)
        super().__init__(self._opened)
        self.gives_views = False
        """Whether records come as views of the cached archive instead of ``bytes``."""

    def __del__(self) -> None:
        # Python would warn of a file that nobody has closed; torch's own readers have no such file.
        if (opened := getattr(self, "_opened", None)) is not None:
            opened.close()

    def get_record(self, name: str) -> Any:
        served = self.served() if self.gives_views else None
        view = None if served is None else served.view_of(name)
        return super().get_record(name) if view is None else view


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    is_torchs_own = is_own(original, package.__name__)

    @uncompiled
    @functools.wraps(original)
    def __init__(self: Any, archive_path_or_buffer: Any) -> None:
        original(self, archive_path_or_buffer)
        if is_torchs_own and patches.active():
            reader = _reader_of(archive_path_or_buffer)
            if reader is not None:
                self.archive_file = reader

    return __init__


def _reader_of(path: Any) -> _Reader | None:
    """Return a reader that asks the cache; None where torch's own goes on."""
    if type(path) is not str:
        diagnostics.fallback("not_a_file", what=_Reader.api)
        return None
    try:
        return _Reader(path)
    # Border: the file is gone or another one since torch opened it.
    except Exception as error:
        diagnostics.pass_on(error)
        diagnostics.fallback("model_changed", error, what=path)
        return None


def _probe() -> str | None:
    if _reads_by("get_storage_from_record") or _reads_by("read_bytes"):
        return missing_method()
    return "weights are read in an unknown way"


def _wrap_file_map(original: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled
    @functools.wraps(original)
    def _build_file_map(archive_reader: Any, *args: Any, **kwargs: Any) -> Any:
        reader = archive_reader.archive_file
        if not isinstance(reader, _Reader):
            return original(archive_reader, *args, **kwargs)
        reader.gives_views = True
        try:
            return original(archive_reader, *args, **kwargs)
        finally:
            reader.gives_views = False

    return _build_file_map


def _probe_file_map() -> str | None:
    return None if _reads_by("read_bytes") else "weights are read as storages, if at all"


def _reads_by(method: str) -> bool:
    """Whether torch reads the bytes of weights by this method."""
    code = getattr(getattr(package, "_build_file_map", None), "__code__", None)
    return method in getattr(code, "co_names", ())


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "torch.export.pt2_archive._package:PT2ArchiveReader.__init__", "2.9+", _wrap, probe=_probe
    ),
    PatchPoint(
        "torch.export.pt2_archive._package:_build_file_map",
        "2.9 to 2.12",
        _wrap_file_map,
        probe=_probe_file_map,
    ),
)
