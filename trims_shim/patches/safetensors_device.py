"""safetensors.safe_open onto a CUDA device: tensors over the shared image of the file.

``safe_open`` is a compiled class that cannot be subclassed; given a device, it fills a pinned
buffer and copies. So the name ``safetensors.safe_open`` is replaced by a class that hands every
call on to the compiled one, except where the device is CUDA: then the program gets a
:class:`_DeviceFile`. That holds a compiled ``safe_open`` of the same file for everything else
(names, metadata, shapes, errors, tensors that cannot be served), whose mapping of the file costs
nothing until it is read. The first tensor asks for the device image: names and shapes cost nothing,
and CUDA is not set up for them, as a process could then fork none that use it.
``safetensors.torch.load_file`` and ``load_model`` look the name up in their module and are covered;
``isinstance`` works with both classes.

``device="cuda"`` is device 0 in safetensors, not torch's current device.

A caller that opens files on the CPU and then moves every tensor, as transformers does, sets
:data:`destination` while it opens them. Its slices are the compiled class's and also know where on
the device their bytes are (:class:`DeferredSlice`), so no host image is needed.

A slice that is a contiguous block with the allocator's alignment is a view of the shared image with
a storage of its own; any other slice is copied on the device.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trims_shim import diagnostics, patches
from trims_shim.errors import NotServed, UnsupportedFormat
from trims_shim.formats.torch_zip import TorchArchive
from trims_shim.patches import torch_device
from trims_shim.patches.asking import from_anywhere, opened, or_none
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint, Place
from trims_shim.patches.torch_modes import unseen
from trims_shim.patches.torch_storage import torch_dtype
from trims_shim.specs import Identity

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
            return _open(original, args, kwargs)

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


def _open(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _found(args, kwargs) if patches.active() else None
    if found is None:
        return original(*args, **kwargs)
    kind, image = found
    with kind.opening():
        file = original(*args, **kwargs)
    return kind(file, image)


@or_none
def _found(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[type[_DeviceFile], _DeviceImage] | None:
    """Return what a call's file is served with; None (counted) where safetensors has to open it."""
    is_call = len(args) <= len(_NAMES) and kwargs.keys() <= {*_NAMES[len(args) :], "backend"}
    call = _arguments(*args, **kwargs) if is_call else None
    if call is None:
        return None
    filename, named = call
    index = destination.get() if named is None else named
    if index is None or not torch_device.runtime.is_built():
        return None
    image = _DeviceImage.of(filename, index)
    if image is None or named is not None:
        return None if image is None else (_DeviceFile, image)
    return None if image.found() is None else (_DeferredFile, image)


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


class _DeviceImage:
    """The image of a file on a device, for which the first tensor asks."""

    def __init__(self, path: str, identity: Identity, index: int) -> None:
        self.index = index
        self._path = path
        self._identity = identity
        self._found: _Found | None = None
        self._is_asked = False
        self._asking = threading.RLock()
        self._process = os.getpid()

    @classmethod
    def of(cls, filename: str, index: int) -> _DeviceImage | None:
        """Return that of a file on a CUDA device; None where safetensors has to raise its error."""
        with opened(filename) as descriptor:
            if descriptor is None:
                return None
            identity = Identity.from_stat(os.fstat(descriptor))
        return cls(from_anywhere(filename), identity, index)

    def found(self) -> _Found | None:
        """Return the image; None (counted once) where there is none, or the file has changed.

        None as well while loads are left to the library, which knows no shared memory: what keeps
        programs from writing to that may be gone.
        """
        if not patches.active():
            return None
        if not self._is_asked:
            # Once for all threads; but a forked child may find the lock held by nobody.
            is_ours = self._process == os.getpid()
            with self._asking if is_ours else contextlib.nullcontext():
                if not self._is_asked:
                    self._found = self._ask()
                    self._is_asked = True
        return self._found

    @or_none
    def is_current(self) -> bool | None:
        """Whether its name still leads to the file; if not, that is counted."""
        with opened(self._path) as descriptor:
            if descriptor is not None and self._is_of(descriptor):
                return True
        torch_device.skip("model_changed", what=self._path)
        return False

    def source(self, name: Any) -> _Source | None:
        """Return a tensor's; None where the compiled file has to answer, or refuse the name."""
        found = self.found() if type(name) is str else None
        record = None if found is None else found.records.get(name)
        if found is None or record is None:
            return None
        return _Source(record, found.arena, found.place)

    def _ask(self) -> _Found | None:
        place = torch_device.place_of(torch.device("cuda", self.index))
        if place is None:
            return None
        try:
            return self._on(place)
        # Border: the shim never makes a load fail; the compiled class goes on.
        except Exception as error:
            torch_device.skip.error(error, what=self._path)
            return None

    def _on(self, place: Place) -> _Found | None:
        with opened(self._path) as descriptor:
            if descriptor is None or not self._is_of(descriptor):
                raise NotServed("model_changed", "it has changed since it was opened")
            arena = torch_device.arena_of_file(descriptor, self._path, place)
        if arena is None:
            return None
        records = arena.layout.contents
        if isinstance(records, TorchArchive):  # this package reads another format
            raise UnsupportedFormat("the image is no safetensors file")
        diagnostics.count("served", "safetensors_device")
        return _Found(arena, {record.name: record for record in records}, place)

    def _is_of(self, descriptor: int) -> bool:
        return Identity.from_stat(os.fstat(descriptor)) == self._identity


class _Found(NamedTuple):
    """An image on a device and the tensors in it, by name."""

    arena: DeviceArena
    records: dict[str, Record]
    place: Place


class _DeviceFile:
    """Stands in for a compiled ``safe_open``."""

    def __init__(self, file: Any, image: _DeviceImage) -> None:
        self._file = file
        self._image: _DeviceImage | None = image

    @classmethod
    def opening(cls) -> contextlib.AbstractContextManager[Any]:
        """Return what the compiled file has to be opened in."""
        return contextlib.nullcontext()

    def metadata(self) -> Any:
        return self._file.metadata()

    def keys(self) -> Any:
        return self._file.keys()

    def get_tensor(self, name: Any) -> Any:
        return self._tensor(name)

    def _tensors(self) -> Any:
        found = None if self._image is None else self._image.found()
        if found is None:
            return self._file.get_tensors()
        with torch_device.Parts(found.arena) as parts:
            return {name: self._tensor(name, parts) for name in self._file.offset_keys()}

    def get_slice(self, name: Any) -> Any:
        return _DeviceSlice(self._file.get_slice(name), name, self._image)

    def __getattr__(self, name: str) -> Any:
        """Return what only newer safetensors have: the compiled one's. ``prefetch`` copies."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._file, name)
        return self._tensors if name == "get_tensors" else found

    def __enter__(self) -> _DeviceFile:
        return self

    def __exit__(self, *exception: Any) -> Any:
        self._image = None  # from now on the compiled one answers: it raises that it is closed
        return self._file.__exit__(*exception)

    def _tensor(self, name: Any, parts: torch_device.Parts | None = None) -> Any:
        source = None if self._image is None else self._image.source(name)
        tensor = None if source is None else source.tensor(parts)
        if tensor is not None:
            return tensor
        with _beside(source):
            return self._file.get_tensor(name)


class _DeferredFile(_DeviceFile):
    """Stands in for a file opened on the CPU whose tensors will be moved."""

    def __init__(self, file: Any, image: _DeviceImage) -> None:
        super().__init__(file, image)
        # The image was asked for first, and the file may be another one that has got its name.
        if not image.is_current():
            self._image = None

    @classmethod
    def opening(cls) -> contextlib.AbstractContextManager[Any]:
        return patches.inactive()  # few tensors are read here: no host image is needed for them

    def get_tensor(self, name: Any) -> Any:
        return self._file.get_tensor(name)

    def _tensors(self) -> Any:
        return self._file.get_tensors()

    def get_slice(self, name: Any) -> Any:
        return DeferredSlice(self._file.get_slice(name), name, self._image)


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

    def __init__(self, inner: Any, name: Any, image: _DeviceImage | None) -> None:
        self._inner = inner
        self._name = name
        self._image = image

    def get_shape(self) -> Any:
        return self._inner.get_shape()

    def get_dtype(self) -> Any:
        return self._inner.get_dtype()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> Any:
        source = self._source()
        whole = None if source is None or not _is_basic(index) else source.tensor()
        if whole is not None:
            try:
                part = whole[index]
            except (IndexError, ValueError, TypeError):
                pass  # safetensors raises its own error
            else:
                return _own_storage(part)
        with _beside(source):
            return self._inner[index]

    def _source(self) -> _Source | None:
        return None if self._image is None else self._image.source(self._name)


class DeferredSlice(_DeviceSlice):
    """A slice of the file in host memory whose tensor is on a device as well."""

    def __getitem__(self, index: Any) -> Any:
        return self._inner[index]

    def on_device(self, index: int, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Return the whole tensor on a device; None where it has to be copied from host memory."""
        source = self._source()
        if source is None or source.place.index != index:
            return None
        if dtype is not None and torch_dtype(source.record.dtype) is not dtype:
            return None
        return source.tensor()


def _beside(source: _Source | None) -> contextlib.AbstractContextManager[Any]:
    """Return what the compiled class has to answer in: beside a device image, without a host's."""
    return contextlib.nullcontext() if source is None else patches.inactive()


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
