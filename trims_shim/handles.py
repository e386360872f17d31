"""A model that :func:`trims_shim.open` has opened, and views of its records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar

from trims_shim.errors import FormatError, UnsupportedFormat
from trims_shim.formats import TorchArchive
from trims_shim.formats.device_layout import Contents, read_contents
from trims_shim.late_imports import ensure_imported
from trims_shim.specs import Digest, Record

if TYPE_CHECKING:
    import numpy
    import torch

    from trims_shim.client.arenas import Arena
    from trims_shim.client.device_arenas import DeviceArena

    _NumpyArray: TypeAlias = numpy.ndarray[Any, Any]
    _TorchTensor: TypeAlias = torch.Tensor
else:  # annotations can be evaluated without a framework
    Arena = DeviceArena = _NumpyArray = _TorchTensor = Any

__all__ = ["DeviceHandle", "Handle"]

_Arena = TypeVar("_Arena", "Arena", "DeviceArena")
_Self = TypeVar("_Self", bound="_Opened[Any]")


class _Opened(ABC, Generic[_Arena]):
    """The common part of all handles."""

    _place = ""

    def __init__(self, arena: _Arena, name: str, *, digest: Digest, size_bytes: int) -> None:
        self._arena: _Arena | None = arena
        self.name = name
        """The file's name."""
        self.digest: Digest = digest
        """Of the file's bytes: what images are known by, as `trims status` shows it."""
        self.size_bytes: int = size_bytes
        """Of the file."""
        self._records: Mapping[str, Record] | None = None

    @property
    @abstractmethod
    def records(self) -> Mapping[str, Record]:
        """The records, by name."""

    def close(self) -> None:
        """Let go of the mapping; existing views keep it alive."""
        self._arena = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} is neither copied nor pickled: open the file where it is needed")

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind, state = type(self).__name__, self._place if self._arena is not None else ", closed"
        return f"<trims_shim.{kind} {self.name} {self.size_bytes} bytes {self.digest[:12]}{state}>"

    def _open_arena(self) -> _Arena:
        if self._arena is None:
            raise ValueError(f"handle of {self.name} is closed")
        return self._arena

    def _record(self, name: str) -> Record:
        try:
            return self.records[name]
        except KeyError:
            raise KeyError(f"{self.name} has no record {name!r}; .records has them all") from None


class Handle(_Opened["Arena"]):
    """A model in the cache, mapped into this process; a context manager.

    ``records`` are the named tensors of a safetensors file, or the named records of a torch zip
    archive (``data/0``, whose dtype and shape only its pickle knows). Views stay valid after
    :meth:`close`; the memory goes with the last view. Writes to views stay private.
    """

    def __init__(self, arena: Arena, name: str) -> None:
        super().__init__(arena, name, digest=arena.image.digest, size_bytes=arena.size_bytes)

    @property
    def records(self) -> Mapping[str, Record]:
        """By name; each has ``dtype`` (the format's name for it, or empty), ``shape`` and ``span``.

        Raises FormatError for a file of neither format.
        """
        if self._records is None:
            try:
                contents = read_contents(self.buffer())
            except FormatError as error:
                raise type(error)(f"{self.name} has no records: {error}") from error
            self._records = MappingProxyType(_records_of(contents))
        return self._records

    def buffer(self) -> memoryview:
        """All bytes of the file, writable and private."""
        return memoryview(self._open_arena().buffer).cast("B")

    def numpy(self, name: str) -> _NumpyArray:
        """A record as an array: with dtype and shape (safetensors), else as bytes [size].

        Raises KeyError, UnsupportedFormat for a dtype that numpy does not have.
        """
        ensure_imported("numpy")
        import numpy

        record = self._record(name)
        dtype = _numpy_dtype(record, "numpy")
        buffer: Any = self._open_arena().buffer
        part: numpy.ndarray[Any, Any] = numpy.frombuffer(buffer, dtype=numpy.uint8)
        part = part[record.span.offset_bytes : record.span.end_bytes]
        return part.view(dtype).reshape(record.shape)

    def torch(self, name: str) -> _TorchTensor:
        """A record as a tensor on the CPU, as :meth:`numpy`. Raises KeyError."""
        ensure_imported("torch", "trims_shim.patches.torch_storage")
        import torch

        from trims_shim.patches.torch_modes import unseen
        from trims_shim.patches.torch_storage import storage_of, torch_form

        record = self._record(name)
        storage = storage_of(self._open_arena())
        part = storage[record.span.offset_bytes : record.span.end_bytes]
        dtype, shape = torch_form(record)
        with unseen():
            # Not on the program's default device.
            return torch.empty(0, dtype=dtype, device="cpu").set_(part).view(shape)


class DeviceHandle(_Opened["DeviceArena"]):
    """A model in the memory of a device; a context manager.

    ``records`` are the named tensors of a safetensors file, or the storages of a torch zip archive
    (``data/0``, whose dtype and shape only its pickle knows). Views stay valid after :meth:`close`;
    the memory goes with the last view. It is mapped read-only: a write to a view is a fault that
    ends this process's use of the device, and harms no other process. Open with
    ``access="private"`` to write.
    """

    def __init__(self, arena: DeviceArena, name: str, *, is_private: bool = False) -> None:
        super().__init__(arena, name, digest=arena.digest, size_bytes=arena.outline.size_bytes)
        self._is_private = is_private
        self.device = arena.device
        self._place = f" on {arena.device}"

    @property
    def records(self) -> Mapping[str, Record]:
        """Records in device memory, by name; their spans are those in the file."""
        if self._records is None:
            arena = self._open_arena()
            there = {
                name: record
                for name, record in _records_of(arena.layout.contents).items()
                if _device_address(arena, record) is not None
            }
            self._records = MappingProxyType(there)
        return self._records

    def torch(self, name: str) -> _TorchTensor:
        """A record as a tensor on the device: with dtype and shape (safetensors), else as bytes.

        It has ``__dlpack__`` like any other. Raises KeyError.
        """
        ensure_imported("torch", "trims_shim.patches.torch_device")
        import torch

        from trims_shim.patches import torch_device
        from trims_shim.patches.torch_modes import unseen
        from trims_shim.patches.torch_storage import torch_form

        arena, record, address = self._find(name)
        dtype, shape = torch_form(record)
        torch_device.runtime.ready(arena.index)
        offset, size_bytes = address - arena.address, record.span.size_bytes
        storage = torch_device.shared_storage(arena, offset, size_bytes)
        with unseen():
            tensor = torch.empty(0, dtype=dtype, device=storage.device)
            tensor = tensor.set_(storage).view(shape)
            return tensor.clone() if self._is_private else tensor

    def as_cupy(self, name: str) -> Any:
        """A record as a ``cupy.ndarray``, as :meth:`torch`.

        Raises KeyError, ImportError without CuPy, UnsupportedFormat for a dtype it does not have.
        """
        try:
            ensure_imported("cupy")
            import cupy
        except ImportError as error:
            raise ImportError(
                "as_cupy() needs CuPy: pip install cupy-cuda13x (or cupy-cuda12x)"
            ) from error
        arena, record, address = self._find(name)
        dtype = _numpy_dtype(record, "CuPy")
        memory = cupy.cuda.UnownedMemory(
            address, record.span.size_bytes, arena, device_id=arena.index
        )
        array = cupy.ndarray(record.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
        return array.copy() if self._is_private else array

    def numpy(self, name: str) -> NoReturn:
        """Raises UnsupportedFormat: numpy cannot see device memory."""
        raise UnsupportedFormat(
            f"{name} is in device memory, which numpy cannot see; use torch() or as_cupy(), or "
            f"open the file without a device"
        )

    def _find(self, name: str) -> tuple[DeviceArena, Record, int]:
        arena, record = self._open_arena(), self._record(name)
        address = _device_address(arena, record)
        assert address is not None
        return arena, record, address


def _device_address(arena: DeviceArena, record: Record) -> int | None:
    if not record.span.size_bytes:
        return arena.address
    offset = arena.layout.find(record.span.offset_bytes, record.span.size_bytes)
    return None if offset is None else arena.address + offset


def _numpy_dtype(record: Record, library: str) -> numpy.dtype[Any]:
    """Return a record's dtype; uint8 if the file gives none. Raises UnsupportedFormat."""
    ensure_imported("numpy", "trims_shim.patches.safetensors_numpy")
    import numpy

    from trims_shim.patches.safetensors_numpy import NUMPY_DTYPES

    if not record.dtype:
        return numpy.dtype(numpy.uint8)
    if record.dtype not in NUMPY_DTYPES:
        raise UnsupportedFormat(
            f"{record.name}: {library} has no dtype {record.dtype}; use torch()"
        )
    return numpy.dtype(NUMPY_DTYPES[record.dtype])


def _records_of(contents: Contents) -> dict[str, Record]:
    """By name; those of a zip archive are bytes without a dtype."""
    if isinstance(contents, TorchArchive):
        return {
            name: Record(name, span, "", (span.size_bytes,))
            for name, span in contents.records.items()
        }
    return {record.name: record for record in contents}
