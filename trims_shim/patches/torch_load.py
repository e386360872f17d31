"""torch.load of zip checkpoints, through the two seams below the public function.

1. ``_open_zipfile_reader``, the class ``torch.load`` instantiates. Ours builds torch's own reader
   first, so every check, message and file position is torch's, and overrides only where a record's
   bytes come from: a slice of the arena instead of a fresh allocation that is read into.
2. ``_load``, which unpickles. For a plain state dict the pickle is read as a recipe, without
   executing it, and the tensors are built from that, on the CPU or (:mod:`.torch_device_load`) on a
   CUDA device; everything else goes to torch's ``_load``, which then meets the reader of seam 1.

Because both are module globals that ``torch.load`` looks up when called, programs that imported
``load`` by name are covered. Any condition that is not met leaves the real reader in charge.

``torch.load(mmap=True)`` maps the file between the two, before it says where its tensors go. Where
that may be a device, the file's own mapping, which costs nothing while nobody looks at it, stands
in for the cache's until seam 2 knows (:func:`defers`), so that no host image is loaded in vain.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.serialization

from trims_shim import diagnostics, patches
from trims_shim.client import arenas
from trims_shim.errors import FormatError
from trims_shim.formats import TorchArchive, read_archive, read_recipe
from trims_shim.patches import torch_device, torch_device_load, torch_from_file, torch_rebuild
from trims_shim.patches.asking import arena_of_file
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_modes import has_foreign_mode, has_mode, unseen
from trims_shim.patches.torch_rebuild import Built
from trims_shim.patches.torch_storage import bytes_over, storage_of

__all__ = ["POINTS", "defers"]

_config: Any = None
with contextlib.suppress(ImportError):  # Since torch 2.6; torch.load would import it just as well.
    from torch.utils.serialization import config as _config

# Private names, probed before use.
serialization: Any = torch.serialization
_FileReader: Any = torch._C.PyTorchFileReader

_RECORD_ALIGNMENT_BYTES = 64
"""torch.save aligns records to it; torch's kernels expect what its allocator gives, also 64."""


class _Served:
    """An archive in the cache: where its records are, and the storage they are slices of."""

    __slots__ = ("archive", "storage", "view")

    def __init__(self, storage: torch.UntypedStorage, view: memoryview) -> None:
        """Raises FormatError where this package reads the archive differently from torch."""
        self.storage = storage
        self.view = view
        self.archive: TorchArchive = read_archive(view)

    def record(self, name: str, size_bytes: int) -> torch.UntypedStorage | None:
        """A storage over a record, when it is exactly of this size and aligned."""
        span = self.archive.records.get(name)
        if span is None or span.size_bytes != size_bytes or size_bytes <= 0:
            return None
        if span.offset_bytes % _RECORD_ALIGNMENT_BYTES:
            return None
        part: torch.UntypedStorage = self.storage[span.offset_bytes : span.end_bytes]
        return part

    def end_of(self, name: str) -> int:
        """First byte after a record."""
        return self.archive.records[name].end_bytes


class _Reader(_FileReader):  # type: ignore[misc]
    """torch's reader, except that the bytes of tensors come from the cache where they can."""

    def __init__(self, file: Any) -> None:
        plain = _without_fsspec(file)
        position = _position_of(plain)
        super().__init__(file)
        self._file = plain if position == 0 else None
        self._is_asked = False
        self._served: _Served | None = None
        self._deferred = ""
        self._mapping: torch.UntypedStorage | None = None
        self.is_loading = False
        """Seam 2 was reached."""

    def served(self) -> _Served | None:
        """The archive in the cache; asked for on first use, so that lazy loads cost nothing."""
        if not self._is_asked:
            self._is_asked = True
            self._served = self._ask() if patches.active() else None
        return self._served

    def get_storage_from_record(self, name: str, numel: int, dtype: Any) -> Any:
        if dtype is torch.UntypedStorage and numel > 0:
            served = self.served()
            storage = served.record(name, numel) if served is not None else None
            if served is not None and storage is not None:
                self.leave_file_after(served.end_of(name))
                return bytes_over(storage)
        return super().get_storage_from_record(name, numel, dtype)

    def defer(self, filename: str) -> bool:
        """Whether :meth:`mapped` will be asked for a mapping of this file that torch makes now."""
        if self._file is None or self.is_loading or str(self._file.name) != filename:
            return False
        self._deferred = filename
        return True

    def mapped(self, mapping: Any) -> Any:
        """The file's mapping, now that it is looked at: in the cache where it can be."""
        self.is_loading = True
        filename, self._deferred = self._deferred, ""
        if filename and mapping is not None:
            self._mapping = torch_from_file.served(filename, mapping.nbytes())
        return mapping if self._mapping is None else self._mapping

    def leave_file_after(self, end_bytes: int) -> None:
        """Put the program's file where torch's reader would have left it."""
        if self._file is not None:
            self._file.seek(end_bytes)

    def build_on_device(self, map_location: Any) -> Built | None:
        """The result on the device that it goes to; None where the load has to go on otherwise."""
        if self._file is None:
            return None
        built = torch_device_load.build(self, map_location, file=self._file)
        if built is not None:
            self.log_load()
        return built

    def log_load(self) -> None:
        """What torch logs after a load."""
        torch._C._log_api_usage_metadata(
            "torch.load.metadata", {"serialization_id": self.serialization_id()}
        )

    def _ask(self) -> _Served | None:
        file = self._file
        if file is None:
            diagnostics.fallback("not_a_file", what="torch.load")
            return None
        arena = arena_of_file(file.fileno(), file.name)
        if arena is None:
            return None
        served = _serve(storage_of(arena), memoryview(arena.buffer).cast("B"), str(file.name))
        if served is not None:
            diagnostics.count("served", "torch_zip")
        return served


def _serve(storage: torch.UntypedStorage, view: memoryview, name: str) -> _Served | None:
    try:
        return _Served(storage, view)
    except FormatError as error:
        diagnostics.fallback("unsupported_format", error, what=name)
        return None


def _without_fsspec(file: Any) -> Any:
    """What ``open`` returned, where fsspec did nothing but call it: Lightning loads such files."""
    local = sys.modules.get("fsspec.implementations.local")
    opener = getattr(local, "LocalFileOpener", None)
    return file.f if opener is not None and type(file) is opener else file


def _position_of(file: Any) -> int:
    """Position of a file whose descriptor holds what its reads return; -1 for any other object."""
    raw = file.raw if type(file) is io.BufferedReader else file
    if type(raw) is not io.FileIO or not raw.readable():
        return -1
    try:
        # The archive begins at the file's position; only a whole file is an image.
        return int(file.tell())
    except (OSError, ValueError):
        return -1


# --- seam 1 ---------------------------------------------------------------------------------------


def _wrap_reader(original: type) -> type:
    class _open_zipfile_reader(original):  # type: ignore[misc]
        def __init__(self, name_or_buffer: Any) -> None:
            if patches.active() and not isinstance(name_or_buffer, (str, os.PathLike)):
                serialization._opener.__init__(self, _Reader(name_or_buffer))
            else:
                super().__init__(name_or_buffer)

        def __enter__(self) -> Any:
            reader = super().__enter__()
            if isinstance(reader, _Reader):
                _open.readers.append(reader)
            return reader

        def __exit__(self, *error: Any) -> Any:
            if _open.readers and _open.readers[-1] is self.file_like:
                _open.readers.pop()
            return super().__exit__(*error)

    functools.update_wrapper(_open_zipfile_reader, original, updated=())
    return _open_zipfile_reader


class _Open(threading.local):
    """The readers of this thread's loads, innermost last."""

    def __init__(self) -> None:
        self.readers: list[_Reader] = []


_open = _Open()


def defers(filename: str) -> bool:
    """Whether a mapping of this file is for a load that may end on a device, and will ask again."""
    return (
        bool(_open.readers)
        and getattr(serialization._load, "_asks_again", False)
        and torch_device.missing_capability() is None
        and _open.readers[-1].defer(filename)
    )


def _probe_reader() -> str | None:
    opener = getattr(serialization, "_open_zipfile_reader", None)
    if not isinstance(opener, type) or not issubclass(opener, serialization._opener):
        return "torch.serialization._open_zipfile_reader is not the class it was"
    if not hasattr(_FileReader, "get_storage_from_record"):
        return "PyTorchFileReader.get_storage_from_record is gone"
    return None


# --- seam 2 ---------------------------------------------------------------------------------------


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _load(
        zip_file: Any,
        map_location: Any,
        pickle_module: Any,
        pickle_file: str = "data.pkl",
        overall_storage: Any = None,
        **pickle_load_args: Any,
    ) -> Any:
        if (
            isinstance(zip_file, _Reader)
            and patches.active()
            and _is_plain_call(pickle_module, pickle_file, pickle_load_args)
            and _is_plain_torch()
        ):
            with _collector_paused():
                built = _build_anywhere(zip_file, map_location, overall_storage)
            if built is not None:
                return built.result
        if isinstance(zip_file, _Reader):
            overall_storage = zip_file.mapped(overall_storage)
        return original(
            zip_file,
            map_location,
            pickle_module,
            pickle_file,
            overall_storage=overall_storage,
            **pickle_load_args,
        )

    loading: Any = _load
    loading._asks_again = True
    return _load


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection while thousands of short-lived objects make a state dict.

    A full collection takes 80 ms in a program that has imported torch, ten times the load. Should
    another thread turn the collector off meanwhile, it is on again afterwards, which is harmless.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _build_anywhere(reader: _Reader, map_location: Any, overall_storage: Any) -> Built | None:
    if torch_device_load.may_apply(map_location) and not has_foreign_mode():
        built = reader.build_on_device(map_location)
        if built is not None:
            return built
    if (map_location is None or _is_cpu(map_location)) and not has_mode():
        return _build(reader, map_location, reader.mapped(overall_storage))
    return None


def _is_plain_call(pickle_module: Any, pickle_file: str, arguments: dict[str, Any]) -> bool:
    return (
        pickle_module in (pickle, serialization._weights_only_unpickler)
        and pickle_file == "data.pkl"
        and arguments.get("encoding") == "utf-8"
        # torch 2.14 says weights_only, too: it decides about sparse tensors, which no recipe has.
        and arguments.keys() <= {"encoding", "weights_only"}
    )


def _is_cpu(location: Any) -> bool:
    # torch refuses "cpu:0", so only the plain name is taken for it.
    return type(location) in (str, torch.device) and str(location) == "cpu"


def _is_plain_torch() -> bool:
    """No setting, registry or replacement that would see or change how torch builds tensors."""
    return (
        not torch.is_inference_mode_enabled()
        and not serialization._serialization_tls.skip_data
        and list(serialization._package_registry) == _STOCK_REGISTRY
        and tuple(_rebuilders()) == _STOCK_REBUILDERS
        and not torch._utils._sparse_tensors_to_validate
    )


def _rebuilders() -> tuple[Any, ...]:
    return (
        torch._utils._rebuild_tensor,
        torch._utils._rebuild_tensor_v2,
        torch._utils._rebuild_parameter,
        torch.nn.Parameter,
        torch.storage.TypedStorage,
        pickle.Unpickler,
        serialization._weights_only_unpickler.Unpickler,
    )


_STOCK_REGISTRY = list(serialization._package_registry)
_STOCK_REBUILDERS = _rebuilders()


def _build(reader: _Reader, map_location: Any, overall_storage: Any) -> Built | None:
    try:
        served = _served_by(reader, overall_storage)
        if served is None or not torch_rebuild.is_little_endian(served.archive):
            return None
        span = served.archive.records.get("data.pkl")
        if span is None:
            return None
        recipe = read_recipe(bytes(served.view[span.offset_bytes : span.end_bytes]))
    except FormatError:
        return None  # Not a plain state dict: torch unpickles it, over the same bytes.
    storages = []
    last = ""
    for spec in recipe.storages:
        if map_location is None and spec.location != "cpu":
            return None
        storage = (
            served.record(f"data/{spec.key}", spec.size_bytes)
            if spec.size_bytes
            else _empty(reader, spec.key)
        )
        if storage is None:
            return None
        storages.append(storage)
        last = f"data/{spec.key}" if spec.size_bytes else last
    blanks = torch_rebuild.Blanks()
    tensors = [
        torch_rebuild.tensor(spec, storages[spec.storage], blanks) for spec in recipe.tensors
    ]
    parameters = [torch_rebuild.parameter(spec, tensors[spec.tensor]) for spec in recipe.parameters]
    result = recipe.assemble(tensors, parameters)
    if last and overall_storage is None:
        reader.leave_file_after(served.end_of(last))
    reader.log_load()
    diagnostics.count("built", "recipe")
    return Built(result)


def _served_by(reader: _Reader, overall_storage: Any) -> _Served | None:
    if overall_storage is None:
        return reader.served()
    # torch.load(mmap=True): the mapping was made by from_file, perhaps ours.
    if _torch_computes_offsets():
        return None
    address, size_bytes = overall_storage.data_ptr(), overall_storage.nbytes()
    found = arenas.find(address, size_bytes)
    if found is None or found[1] != 0 or found[0].size_bytes != size_bytes:
        return None
    with unseen():
        array: Any = bytes_over(overall_storage).numpy()
    view = memoryview(array)
    return _serve(overall_storage, view, "torch.load(mmap=True)")


def _torch_computes_offsets() -> bool:
    """Whether torch.load(mmap=True) computes where records are instead of reading it."""
    return bool(_config.load.calculate_storage_offsets) if _config is not None else False


def _empty(reader: Any, key: str) -> Any:
    if not reader.has_record(f"data/{key}"):
        return None
    record = reader.get_storage_from_record(f"data/{key}", 0, torch.UntypedStorage)
    return record._typed_storage()._untyped_storage


def _probe_load() -> str | None:
    for path in (
        "torch._utils:_rebuild_tensor_v2",
        "torch._utils:_sparse_tensors_to_validate",
        "torch.serialization:_package_registry",
        "torch.serialization:_serialization_tls",
    ):
        module, _, name = path.partition(":")
        if name not in vars(sys.modules[module]):
            return f"{path} is gone"
    return None


# --- counting -------------------------------------------------------------------------------------


def _wrap_legacy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _legacy_load(*args: Any, **kwargs: Any) -> Any:
        if patches.active():
            diagnostics.fallback("legacy_format", what="torch.load")
        return original(*args, **kwargs)

    return _legacy_load


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        name="torch.load: reader",
        target="torch.serialization:_open_zipfile_reader",
        supported="2.4 and newer",
        probe=_probe_reader,
        wrap=_wrap_reader,
    ),
    PatchPoint(
        name="torch.load: unpickling",
        target="torch.serialization:_load",
        supported="2.4 and newer",
        probe=_probe_load,
        wrap=_wrap_load,
    ),
    PatchPoint(
        name="torch.load: legacy format (counted only)",
        target="torch.serialization:_legacy_load",
        supported="2.4 and newer",
        wrap=_wrap_legacy,
    ),
)
