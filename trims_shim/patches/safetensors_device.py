"""safetensors.safe_open onto a CUDA device: tensors over the shared image of the file.

``safe_open`` is a compiled class that cannot be subclassed; given a device, it fills a pinned
buffer and copies. So the name ``safetensors.safe_open`` is replaced by a class that hands every
call on to the compiled one, except where the device is CUDA and the file can be had there: then the
program gets a :class:`_DeviceFile`. That holds a compiled ``safe_open`` of the same file for
everything else (names, metadata, shapes, errors, tensors that cannot be served), whose mapping of
the file costs nothing until it is read. ``safetensors.torch.load_file`` and ``load_model`` look the
name up in their module and are covered; ``isinstance`` works with both classes.

``device="cuda"`` is device 0 in safetensors, not torch's current device.

A caller that opens files on the CPU and then moves every tensor, as transformers does, sets
:data:`destination` while it opens them. Its slices are the compiled class's and also know where on
the device their bytes are (:class:`DeferredSlice`), so no host image is needed.

A slice that is a contiguous block with the allocator's alignment is a view of the shared image with
a storage of its own; any other slice is copied on the device.
"""

from __future__ import annotations

import contextvars
import inspect
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trims_shim import diagnostics, patches
from trims_shim.errors import UnsupportedFormat
from trims_shim.formats.torch_zip import TorchArchive
from trims_shim.patches import torch_device
from trims_shim.patches.asking import opened, or_none
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint, Place
from trims_shim.patches.torch_modes import unseen
from trims_shim.patches.torch_storage import torch_dtype

if TYPE_CHECKING:
    from trims_shim.client.device_arenas import DeviceArena
    from trims_shim.specs import Record

__all__ = ["POINTS", "DeferredSlice", "destination"]

destination: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "trims_shim_destination", default=None
)
"""The CUDA device to which files opened on the CPU in this context will be moved, by number."""

_CUDA = re.compile("cuda:([0-9]{1,4})")
_FRAMEWORKS = ("pt", "torch", "pytorch")
_BACKENDS = ("mmap", "pread")


def _wrap(original: Any) -> Any:
    class _SafeOpenType(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            file = _open(original, args, kwargs) if patches.active() else None
            return original(*args, **kwargs) if file is None else file

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original | _DeviceFile)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original | _DeviceFile)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    _SafeOpenType.__name__ = _SafeOpenType.__qualname__ = type(original).__name__
    namespace = {"__doc__": original.__doc__, "__module__": original.__module__}
    replacement: Any = _SafeOpenType(original.__name__, (), namespace)
    replacement.__signature__ = inspect.signature(original)
    return replacement


def _open(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _DeviceFile | None:
    found = _found(args, kwargs)
    if found is None:
        return None
    kind, arena, place = found
    token = patches.overridden.set(False)
    try:
        file = original(*args, **kwargs)
    finally:
        patches.overridden.reset(token)
    try:
        return kind(file, arena, place)
    # Border: the shim never makes a load fail; the compiled class goes on.
    except Exception as error:
        filename = args[0] if args else kwargs["filename"]
        torch_device.skip.error(error, what=f"{filename}: {error}")
        return None


@or_none
def _found(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[type[_DeviceFile], DeviceArena, Place] | None:
    """Return what a call's file is served with; None (counted) where safetensors has to open it."""
    is_call = len(args) <= len(_NAMES) and kwargs.keys() <= {*_NAMES[len(args) :], "backend"}
    call = _arguments(*args, **kwargs) if is_call else None
    if call is None:
        return None
    filename, named = call
    index = destination.get() if named is None else named
    if index is None:
        return None
    place = torch_device.place_of(torch.device("cuda", index))
    arena = None if place is None else _arena(filename, place)
    if place is None or arena is None:
        return None
    return _DeviceFile if named is not None else _DeferredFile, arena, place


_NAMES = ("filename", "framework", "device")


def _arguments(
    filename: Any = None, framework: Any = None, device: Any = "cpu", *, backend: Any = "mmap"
) -> tuple[str, int | None] | None:
    """The file and the number of the CUDA device (None: CPU); None if safetensors is to serve."""
    if not isinstance(filename, (str, os.PathLike)) or framework not in _FRAMEWORKS:
        return None
    path = os.fspath(filename)
    if type(path) is not str or backend not in _BACKENDS:
        return None
    if type(device) is int and device >= 0:
        return path, device
    if type(device) is not str:
        return None
    match = _CUDA.fullmatch(device)
    if match is not None:
        return path, int(match[1])
    return (path, {"cuda": 0, "cpu": None}[device]) if device in ("cuda", "cpu") else None


def _arena(filename: str, place: Place) -> DeviceArena | None:
    with opened(filename) as descriptor:
        if descriptor is None:
            return None
        return torch_device.arena_of_file(descriptor, filename, place)


class _DeviceFile:
    """Stands in for a compiled ``safe_open``."""

    def __init__(self, file: Any, arena: DeviceArena, place: Place) -> None:
        """Raises UnsupportedFormat where this package reads another format."""
        records = arena.layout.contents
        if isinstance(records, TorchArchive):
            raise UnsupportedFormat("the image is no safetensors file")
        self._file = file
        self._place = place
        self._open: tuple[DeviceArena, dict[str, Record]] | None
        self._open = arena, {record.name: record for record in records}
        diagnostics.count("served", "safetensors_device")

    def metadata(self) -> Any:
        return self._file.metadata()

    def keys(self) -> Any:
        return self._file.keys()

    def offset_keys(self) -> Any:
        return self._file.offset_keys()

    def get_tensor(self, name: Any) -> Any:
        return self._tensor(name)

    def get_tensors(self) -> Any:
        if self._open is None:
            return self._file.get_tensors()
        with torch_device.Parts(self._open[0]) as parts:
            return {name: self._tensor(name, parts) for name in self._file.offset_keys()}

    def get_slice(self, name: Any) -> Any:
        return _DeviceSlice(self._file.get_slice(name), self._source(name))

    def __getattr__(self, name: str) -> Any:
        """Return what a newer safetensors has besides: the compiled one's. ``prefetch`` copies."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._file, name)

    def __enter__(self) -> _DeviceFile:
        return self

    def __exit__(self, *exception: Any) -> Any:
        self._open = None  # from now on the compiled one answers: it raises that it is closed
        return self._file.__exit__(*exception)

    def _tensor(self, name: Any, parts: torch_device.Parts | None = None) -> Any:
        source = self._source(name)
        tensor = None if source is None else source.tensor(parts)
        return self._file.get_tensor(name) if tensor is None else tensor

    def _source(self, name: Any) -> _Source | None:
        """Return None where the compiled file has to answer, and refuse a wrong name."""
        if self._open is None or type(name) is not str:
            return None
        arena, records = self._open
        record = records.get(name)
        return None if record is None else _Source(record, arena, self._place)


class _DeferredFile(_DeviceFile):
    """Stands in for a file opened on the CPU whose tensors will be moved."""

    def get_tensor(self, name: Any) -> Any:
        return self._file.get_tensor(name)

    def get_tensors(self) -> Any:
        return self._file.get_tensors()

    def get_slice(self, name: Any) -> Any:
        return DeferredSlice(self._file.get_slice(name), self._source(name))


class _Source(NamedTuple):
    """A record and the image that holds it."""

    record: Record
    arena: DeviceArena
    place: Place

    def tensor(self, parts: torch_device.Parts | None = None) -> torch.Tensor | None:
        """Return the tensor on the device; None where the compiled file has to make it.

        ``parts`` is of the same arena, for a caller that wants more tensors of it.
        """
        record, span = self.record, self.record.span
        try:
            dtype = torch_dtype(record.dtype)
        except UnsupportedFormat as error:
            torch_device.skip(error.reason, what=f"{record.name}: {error}")
            return None
        if not span.size_bytes:
            with unseen():
                return torch.empty(record.shape, dtype=dtype, device=self.place.device)
        offset = torch_device.record_of(self.arena, span.offset_bytes, span.size_bytes)
        if offset is None:
            return None
        if parts is not None:
            return parts.tensor(offset, dtype, record.shape)
        return torch_device.tensor_at(self.arena, offset, dtype, record.shape)


class _DeviceSlice:
    """Stands in for a compiled slice."""

    def __init__(self, inner: Any, source: _Source | None) -> None:
        self._inner = inner
        self._source = source

    def get_shape(self) -> Any:
        return self._inner.get_shape()

    def get_dtype(self) -> Any:
        return self._inner.get_dtype()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> Any:
        whole = None if self._source is None or not _is_basic(index) else self._source.tensor()
        if whole is None:
            return self._inner[index]
        try:
            part = whole[index]
        except (IndexError, ValueError, TypeError):
            return self._inner[index]  # raises safetensors' own error
        return _own_storage(part)


class DeferredSlice(_DeviceSlice):
    """A slice of the file in host memory whose tensor is on a device as well."""

    def __getitem__(self, index: Any) -> Any:
        return self._inner[index]

    def on_device(self, index: int, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Return the whole tensor on a device; None where it has to be copied from host memory."""
        source = self._source
        if source is None or source.place.index != index:
            return None
        if dtype is not None and torch_dtype(source.record.dtype) is not dtype:
            return None
        return source.tensor()


def _is_basic(index: Any) -> bool:
    """Whether an index has only numbers, slices and ellipses, so that it makes a view."""
    parts = index if type(index) is tuple else (index,)
    return all(type(part) in (int, slice, type(...)) for part in parts)


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """Return a view as ``to(device)`` would: a tensor that is all of its own storage."""
    found = torch_device.find(part)
    is_block = part.is_contiguous() and part.nbytes > 0
    if found is not None and is_block and found[1] % torch_device.ALIGNMENT_BYTES == 0:
        return torch_device.tensor_at(*found, part.dtype, tuple(part.shape))
    with unseen():
        copy = part.clone()
    torch_device.runtime.settle(copy.device)
    return copy


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("safetensors:safe_open", "0.4+", _wrap, has_holders=True),
)
