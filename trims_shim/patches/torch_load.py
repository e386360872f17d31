"""torch.load of zip checkpoints, through the two seams below the public function.

1. ``_open_zipfile_reader``, the class that ``torch.load`` instantiates. Ours makes a reader that
   takes the bytes of records from the cache (:mod:`.torch_archive`).
2. ``_load``, which unpickles. The pickle of a plain state dict is read as a recipe, without
   executing it, and the tensors are built from that, on the CPU or (:mod:`.torch_device_load`) on a
   CUDA device. Everything else goes to torch's ``_load``, which then uses the reader of seam 1.

Because ``torch.load`` looks up both module globals when called, programs that imported ``load`` by
name are covered. If any condition is not met, torch's own reader does the work.

``torch.load(mmap=True)`` maps the file between the two seams, before it is known where its tensors
go. Where that may be a device, the file's own mapping stands in for the cache's until seam 2 knows
(``_Reader.defer``). An unread mapping costs nothing, and no host image is loaded in vain.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.serialization

from trims_shim import diagnostics, patches
from trims_shim.client import arenas
from trims_shim.errors import FormatError
from trims_shim.formats import read_recipe
from trims_shim.patches import torch_device, torch_device_load, torch_from_file, torch_rebuild
from trims_shim.patches.asking import or_none
from trims_shim.patches.points import PatchPoint, is_own
from trims_shim.patches.torch_archive import ArchiveReader, ServedArchive, missing_method, serve
from trims_shim.patches.torch_from_file import loads
from trims_shim.patches.torch_modes import has_foreign_mode, has_mode, uncompiled
from trims_shim.patches.torch_rebuild import Built, collector_paused
from trims_shim.specs import Identity

__all__ = ["POINTS"]

_config: Any = None
with contextlib.suppress(ImportError):  # Since torch 2.6; torch.load would import it just as well.
    from torch.utils.serialization import config as _config

# Private names, probed before use.
serialization: Any = torch.serialization

_CPU = torch.device("cpu")


class _Reader(ArchiveReader):
    """The reader of a torch.load; it may map its file (``mmap=True``) before it unpickles."""

    api = "torch.load"
    counted_as = "torch_zip"

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._is_deferred = False

    def defer(self, filename: str) -> bool:
        """Whether the mapping that is now made of this file will be handed to :meth:`mapped`."""
        if self.file is None or type(self.file.name) is not str or self.file.name != filename:
            return False
        if torch_device.missing_capability() is not None:
            return False
        self._is_deferred = getattr(serialization._load, "_asks_again", False)
        return self._is_deferred

    @or_none
    def mapped(self, mapping: Any) -> Any | None:
        """Return the cache's mapping in place of the deferred one; None where that one stays."""
        if not self._is_deferred or self.file is None or mapping is None:
            return None
        file = torch_from_file.file_at(self.file.name, mapping.nbytes())
        if file is None:
            return None
        # The device was asked meanwhile, and another file may have the name by now.
        identity = Identity.from_stat(os.fstat(self.file.fileno()))
        return torch_from_file.served(file._replace(identity=identity))

    def end_load(self) -> None:
        """Do what torch does after a load; an earlier one that failed left its argument there."""
        serialization._serialization_tls.map_location = None
        torch._C._log_api_usage_metadata(
            "torch.load.metadata", {"serialization_id": self.serialization_id()}
        )


# --- seam 1 ---------------------------------------------------------------------------------------


def _wrap_reader(original: type) -> type:
    is_torchs_own = is_own(original, "torch.serialization")
    opener = serialization._opener  # programs may replace the name, not the base

    class _open_zipfile_reader(original):  # type: ignore[misc]
        @uncompiled
        def __init__(self, name_or_buffer: Any) -> None:
            is_file = not isinstance(name_or_buffer, (str, os.PathLike))
            if is_torchs_own and is_file and patches.active():
                opener.__init__(self, _Reader(name_or_buffer))
            else:
                super().__init__(name_or_buffer)

        @uncompiled
        def __enter__(self) -> Any:
            reader = super().__enter__()
            if isinstance(reader, _Reader):
                loads.open.append(reader)
            return reader

        @uncompiled
        def __exit__(self, *error: Any) -> Any:
            _maps_no_more(self.file_like)
            return super().__exit__(*error)

    functools.update_wrapper(_open_zipfile_reader, original, updated=())
    return _open_zipfile_reader


def _maps_no_more(reader: Any) -> None:
    """End the time in which a load maps its file; later mappings are not the load's."""
    with contextlib.suppress(ValueError):
        loads.open.remove(reader)


def _probe_reader() -> str | None:
    opener = getattr(serialization, "_open_zipfile_reader", None)
    if not isinstance(opener, type) or not issubclass(opener, serialization._opener):
        return "torch.serialization._open_zipfile_reader is not the class it was"
    return missing_method()


# --- seam 2 ---------------------------------------------------------------------------------------


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    is_torchs_own = is_own(original, "torch.serialization")

    @uncompiled
    @functools.wraps(original)
    def _load(
        zip_file: Any,
        map_location: Any,
        pickle_module: Any,
        pickle_file: str = "data.pkl",
        overall_storage: Any = None,
        **pickle_load_args: Any,
    ) -> Any:
        if isinstance(zip_file, _Reader):
            _maps_no_more(zip_file)
            is_plain = (
                is_torchs_own
                and patches.active()
                and _is_plain(pickle_module, pickle_file, pickle_load_args)
            )
            interns = pickle_module is pickle
            built = _build_on_device(zip_file, map_location, interns) if is_plain else None
            if built is None:
                served = zip_file.mapped(overall_storage)
                overall_storage = overall_storage if served is None else served
                if is_plain:
                    built = _build_on_host(zip_file, map_location, overall_storage, interns)
            if built is not None:
                return built.result
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


@or_none
def _is_plain(pickle_module: Any, pickle_file: str, arguments: dict[str, Any]) -> bool | None:
    return _is_plain_call(pickle_module, pickle_file, arguments) and _is_plain_torch()


def _is_plain_call(pickle_module: Any, pickle_file: str, arguments: dict[str, Any]) -> bool:
    return (
        pickle_module in (pickle, serialization._weights_only_unpickler)
        and pickle_file == "data.pkl"
        and arguments.get("encoding") == "utf-8"
        # torch 2.14 also passes weights_only, which matters for sparse tensors: no recipe has any.
        and arguments.keys() <= {"encoding", "weights_only"}
    )


def _is_cpu(location: Any) -> bool:
    # torch refuses "cpu:0", so only the plain name counts.
    return type(location) in (str, torch.device) and str(location) == "cpu"


def _is_plain_torch() -> bool:
    """Whether no setting, registry or replacement sees or changes how torch builds tensors."""
    return (
        _IS_TORCHS
        and not torch.is_inference_mode_enabled()
        and torch._guards.TracingContext.try_get() is None  # a compiler gets tensors without bytes
        and not serialization._serialization_tls.skip_data
        and list(serialization._package_registry) == _STOCK_REGISTRY
        and tuple(_rebuilders()) == _STOCK_REBUILDERS
        and not _sparse_tensors()
    )


def _sparse_tensors() -> Any:
    """Return the sparse tensors that torch has yet to validate, also those of a load that failed.

    Raises AttributeError in a torch that keeps them elsewhere.
    """
    name = "sparse_tensors_to_validate"  # this thread's own, from torch 2.15 on
    of_thread = getattr(serialization._serialization_tls, name, None)
    return torch._utils._sparse_tensors_to_validate if of_thread is None else of_thread


def _rebuilders() -> tuple[Any, ...]:
    return (
        torch._utils._rebuild_tensor,
        torch._utils._rebuild_tensor_v2,
        torch._utils._rebuild_parameter,
        torch.nn.Parameter,
        torch.storage.TypedStorage,
        pickle.Unpickler,
        serialization._weights_only_unpickler.Unpickler,
        serialization.default_restore_location,
        serialization._get_restore_location,
    )


_STOCK_REGISTRY = list(serialization._package_registry)
_STOCK_REBUILDERS = _rebuilders()
_HOMES = (
    *("torch._utils", "torch._utils", "torch._utils", "torch.nn.parameter", "torch.storage"),
    *("_pickle", "torch._weights_only_unpickler", "torch.serialization", "torch.serialization"),
)
_IS_TORCHS = all(map(is_own, _STOCK_REBUILDERS, _HOMES)) and all(
    is_own(function, "torch.serialization")
    for _, *functions in _STOCK_REGISTRY
    for function in functions
)
"""Whether none had been replaced or registered by others when this module was imported."""


@or_none
def _build_on_device(reader: _Reader, map_location: Any, interns: bool) -> Built | None:
    """Return the result on its device; None where the host tier or torch has to build it.

    ``interns``: names of attributes (:func:`read_recipe`).
    """
    if reader.file is None or not torch_device_load.may_apply(map_location) or has_foreign_mode():
        return None
    built = torch_device_load.build(reader, map_location, file=reader.file, interns_names=interns)
    if built is not None:
        reader.end_load()
    return built


@or_none
def _build_on_host(
    reader: _Reader, map_location: Any, overall_storage: Any, interns: bool
) -> Built | None:
    """Return the result over the cached archive; None where torch has to unpickle it.

    ``interns``: names of attributes (:func:`read_recipe`).
    """
    if not (map_location is None or _is_cpu(map_location)) or has_mode():
        return None
    served = _served_by(reader, overall_storage)
    if served is None or not torch_rebuild.is_little_endian(served.archive):
        return None
    try:
        is_on_cpu = map_location is not None
        built = _assemble(reader, served, is_on_cpu=is_on_cpu, interns_names=interns)
    except FormatError:
        return None  # Not a plain state dict: torch unpickles it, over the same bytes.
    # Border: torch unpickles it, and raises an error of its own where it has to.
    except Exception as error:
        diagnostics.pass_on(error)
        diagnostics.log(logging.DEBUG, "torch.load: torch unpickles, building failed", error=error)
        diagnostics.count("recipe_error", type(error).__name__)
        return None
    if built is None:
        return None
    result, end_bytes = built
    if overall_storage is None:
        reader.leave_file_at(end_bytes)
    reader.end_load()
    diagnostics.count("built", "recipe")
    return Built(result)


@collector_paused()
def _assemble(
    reader: _Reader, served: ServedArchive, *, is_on_cpu: bool, interns_names: bool
) -> tuple[Any, int] | None:
    """Return the result, and where in the file torch would have read last; or None.

    ``is_on_cpu``: all of it goes there, whatever the pickle says. Raises FormatError.
    """
    recipe = read_recipe(served.pickle(), interns_names=interns_names)
    storages = []
    end_bytes = served.archive.records["data.pkl"].end_bytes
    for spec in recipe.storages:
        if not is_on_cpu and spec.location != "cpu":
            return None
        name = f"data/{spec.key}"
        if not spec.size_bytes:
            storage = _empty(reader, name)
            if storage is None:
                return None
        else:
            span = served.record(name, spec.size_bytes)
            if span is None:
                return None
            end_bytes = span.end_bytes
            storage = served.storage[span.offset_bytes : end_bytes]
        storages.append(storage)
    return torch_rebuild.assemble(recipe, storages, torch_rebuild.Blanks(_CPU)), end_bytes


def _served_by(reader: _Reader, overall_storage: Any) -> ServedArchive | None:
    if overall_storage is None:
        return reader.served()
    # torch.load(mmap=True): from_file made the mapping, perhaps ours.
    if _torch_computes_offsets():
        return None
    address, size_bytes = overall_storage.data_ptr(), overall_storage.nbytes()
    found = arenas.find(address, size_bytes)
    if found is None or found[1] != 0 or found[0].size_bytes != size_bytes:
        return None
    content = (ctypes.c_char * size_bytes).from_address(address)  # numpy may not be there
    view = memoryview(content).cast("B")
    return serve(overall_storage, view, "torch.load(mmap=True)")


def _torch_computes_offsets() -> bool:
    """Whether torch.load(mmap=True) computes the offsets of records instead of reading them."""
    return _config is not None and bool(_config.load.calculate_storage_offsets)


def _empty(reader: Any, name: str) -> Any:
    if not reader.has_record(name):
        return None
    record = reader.get_storage_from_record(name, 0, torch.UntypedStorage)
    return record._typed_storage()._untyped_storage


def _probe_load() -> str | None:
    for path in (
        "torch._utils:_rebuild_tensor_v2",
        "torch.serialization:_package_registry",
        "torch.serialization:_serialization_tls",
    ):
        module, _, name = path.partition(":")
        if name not in vars(sys.modules[module]):
            return f"{path} is gone"
    _sparse_tensors()
    return None


# --- counting -------------------------------------------------------------------------------------


def _wrap_legacy(original: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled
    @functools.wraps(original)
    def _legacy_load(*args: Any, **kwargs: Any) -> Any:
        if patches.active():
            diagnostics.fallback("legacy_format", what="torch.load")
        return original(*args, **kwargs)

    return _legacy_load


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "torch.serialization:_open_zipfile_reader", "2.4+", _wrap_reader, probe=_probe_reader
    ),
    PatchPoint("torch.serialization:_load", "2.5+", _wrap_load, probe=_probe_load),
    PatchPoint("torch.serialization:_legacy_load", "2.4+", _wrap_legacy),
)
