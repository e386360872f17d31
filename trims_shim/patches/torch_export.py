"""torch.export.load of ``.pt2`` archives: the weights and constants of exported programs.

``PT2ArchiveReader`` opens the file by its path, and torch asks its ``archive_file`` for the bytes
of each weight. Torch's reader is made first, so that what is no archive raises torch's errors.
Ours, of the same file, then takes its place. Graphs, pickled tensors and custom objects are torch's
to read; so are the libraries of AOTInductor, whose weights are compiled in.
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

    def __del__(self) -> None:
        # Python would warn of a file that nobody has closed; torch's own readers have no such file.
        if (opened := getattr(self, "_opened", None)) is not None:
            opened.close()


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
    read: Any = getattr(package, "_build_file_map", None)
    if "get_storage_from_record" not in getattr(getattr(read, "__code__", None), "co_names", ()):
        return "weights are not read as storages"
    return missing_method()


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "torch.export.pt2_archive._package:PT2ArchiveReader.__init__", "2.13+", _wrap, probe=_probe
    ),
)
