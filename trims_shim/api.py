"""The public functions of the package.

Loads need none of them; they are for programs that want to look inside, warm the cache, or use
records without a framework.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from trims_shim import diagnostics, patches
from trims_shim.config import platform_problem
from trims_shim.diagnostics import Stats
from trims_shim.errors import DaemonUnavailable, FormatError, UnsupportedFormat
from trims_shim.formats import read_archive, read_header
from trims_shim.late_imports import ensure_imported
from trims_shim.specs import DeviceId, Record, Span

if not platform_problem:
    from trims_shim.client.cache import cache

if TYPE_CHECKING:
    import numpy
    import torch

    from trims_shim.client.arenas import Arena
    from trims_shim.client.device_arenas import DeviceArena

__all__ = [
    "DeviceHandle",
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

_Access = Literal["shared", "private"]

_ZIP_MAGIC = b"PK\x03\x04"
_DEVICE_ID_PREFIXES = ("GPU-", "MIG-")
_ONNX_SUFFIX = ".onnx"


def enable() -> None:
    """Patch the configured libraries in this process, now or when they are imported."""
    _check_platform()
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
    _check_platform()
    ensure_imported("trims_shim.inspection")
    from trims_shim.inspection import describe

    return describe()


def warm(
    path: str | os.PathLike[str],
    *,
    pin: bool = False,
    device: str | int | torch.device | None = None,
    waiting: Callable[[], None] | None = None,
) -> str:
    """Load a model file into the cache without using it; blocks until it is there.

    Starts the daemon when none runs. ``pin`` keeps it resident. ``device`` as for :func:`open`.
    Returns the digest. Raises OSError for the file, TrimsError when the cache cannot take it.

    An ONNX model (``.onnx``) is prepared, for sessions on the CPU without options; that needs
    onnxruntime in this interpreter, knows neither ``pin`` nor ``device``, and returns the key.
    ``waiting`` is called now and then while it is prepared, to show that something goes on.
    """
    _check_platform()
    ensure_imported("trims_shim.wire.admin")
    from trims_shim.wire.admin import PinImageRequest

    if os.fsdecode(path).endswith(_ONNX_SUFFIX):
        return _warm_onnx(os.fsdecode(path), is_plain=not pin and device is None, waiting=waiting)
    with open(path, device=device) as handle:
        if pin:
            cache().request(PinImageRequest(handle.digest, is_pinned=True))
        return handle.digest


def _warm_onnx(path: str, *, is_plain: bool, waiting: Callable[[], None] | None) -> str:
    if not is_plain:
        raise UnsupportedFormat(f"{path}: prepared ONNX models are neither pinned nor on a device")
    try:
        ensure_imported("trims_shim.patches.onnxruntime_warm")
        from trims_shim.patches.onnxruntime_warm import prepare
    except ImportError as error:
        raise UnsupportedFormat(
            f"{path}: preparing it needs onnxruntime: pip install onnxruntime ({error})"
        ) from error
    model = prepare(path, waiting=waiting)
    model.release()
    return model.key


@overload
def open(path: str | os.PathLike[str], *, device: None = None, access: _Access = ...) -> Handle: ...


@overload
def open(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device | None,
    access: _Access = ...,
) -> Handle | DeviceHandle: ...


def open(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device | None = None,
    access: _Access = "shared",
) -> Handle | DeviceHandle:
    """Open a model file of any size through the cache; the caller closes the handle.

    ``device``: ``"cuda"``, ``"cuda:1"``, an index, or a device's own id (``"GPU-..."``) opens it in
    that device's memory and returns a :class:`DeviceHandle`; ``"cpu"`` is the same as None.
    ``access="private"`` makes every view of device memory a copy that may be written; on the host
    views are private anyway.

    Raises OSError for the file, ValueError for a device or access that is none, TrimsError when the
    cache cannot take it. No fallback: this is the cache itself.
    """
    _check_platform()
    if access not in ("shared", "private"):
        raise ValueError(f"access is 'shared' or 'private', not {access!r}")
    target = None if device is None else _device_id(device)
    name = os.fsdecode(path)
    # O_NONBLOCK: a pipe is refused, not waited for.
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        full_name = os.path.abspath(name)
        if target is None:
            return Handle(cache().open(descriptor, name=full_name, min_bytes=1), name)
        arena = cache().open_device(descriptor, name=full_name, device=target, min_bytes=1)
        return DeviceHandle(arena, name, is_private=access == "private")
    finally:
        os.close(descriptor)


def _check_platform() -> None:
    if platform_problem:
        raise DaemonUnavailable(platform_problem)


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
            self._records = _read_records(self.buffer(), self.name)
        return self._records

    def buffer(self) -> memoryview:
        """All bytes of the file, writable and private."""
        return memoryview(self._open_arena().buffer).cast("B")

    def numpy(self, name: str) -> numpy.ndarray[Any, Any]:
        """A record as an array: with dtype and shape (safetensors), else as bytes [size].

        Raises KeyError, UnsupportedFormat for a dtype that numpy does not have.
        """
        ensure_imported("numpy")
        import numpy

        record = self.records[name]
        dtype = _numpy_dtype(record, "numpy")
        buffer: Any = self._open_arena().buffer
        part: numpy.ndarray[Any, Any] = numpy.frombuffer(buffer, dtype=numpy.uint8)
        part = part[record.span.offset_bytes : record.span.end_bytes]
        return part.view(dtype).reshape(record.shape)

    def torch(self, name: str) -> torch.Tensor:
        """A record as a tensor on the CPU, as :meth:`numpy`. Raises KeyError."""
        ensure_imported("torch", "trims_shim.patches.torch_storage")
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


class DeviceHandle:
    """A model in the memory of a device; a context manager.

    ``records`` are the named tensors of a safetensors file, or the storages of a torch zip archive
    (``data/0``, whose dtype and shape only its pickle knows). Views stay valid after :meth:`close`;
    the memory goes when the last of them goes. It is mapped read-only: a write to a view is a fault
    that ends this process's use of the device, and harms nobody else. Open with
    ``access="private"`` to write.
    """

    def __init__(self, arena: DeviceArena, name: str, *, is_private: bool = False) -> None:
        self._arena: DeviceArena | None = arena
        self._is_private = is_private
        self.name = name
        self.digest = arena.digest
        self.device = arena.device
        self.size_bytes = arena.outline.size_bytes
        self._records: dict[str, Record] | None = None

    @property
    def records(self) -> Mapping[str, Record]:
        """Records that are in device memory, by name; their spans are those in the file."""
        if self._records is None:
            arena = self._open_arena()
            found = _read_records(memoryview(arena.outline.buffer).cast("B"), self.name)
            self._records = {
                name: record
                for name, record in found.items()
                if _device_address(arena, record) is not None
            }
        return self._records

    def torch(self, name: str) -> torch.Tensor:
        """A record as a tensor on the device: with dtype and shape (safetensors), else as bytes.

        It has ``__dlpack__`` like any other. Raises KeyError.
        """
        ensure_imported("torch", "trims_shim.patches.torch_device")
        import torch

        from trims_shim.patches import torch_device
        from trims_shim.patches.torch_modes import unseen
        from trims_shim.patches.torch_storage import torch_dtype

        arena, record, address = self._find(name)
        dtype = torch_dtype(record.dtype) if record.dtype else torch.uint8
        torch_device.runtime.ready(arena.index)
        offset, size_bytes = address - arena.address, record.span.size_bytes
        storage = torch_device.shared_storage(arena, offset, size_bytes)
        with unseen():
            tensor = torch.empty(0, dtype=dtype, device=storage.device)
            tensor = tensor.set_(storage).view(record.shape)
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

    def close(self) -> None:
        """Let go of the memory; views keep it alive for as long as they need it."""
        self._arena = None

    def __enter__(self) -> DeviceHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<trims_shim.DeviceHandle {self.name} {self.size_bytes} bytes {self.digest[:12]} "
            f"on {self.device}>"
        )

    def _find(self, name: str) -> tuple[DeviceArena, Record, int]:
        arena, record = self._open_arena(), self.records[name]
        address = _device_address(arena, record)
        assert address is not None
        return arena, record, address

    def _open_arena(self) -> DeviceArena:
        if self._arena is None:
            raise ValueError(f"handle of {self.name} is closed")
        return self._arena


def _device_id(device: str | int | torch.device) -> DeviceId | None:
    """The device that is meant; None: the host. Raises ValueError, DriverFailure."""
    ensure_imported("trims_shim.client.device_arenas")
    from trims_shim.client.device_arenas import device_id

    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    if text.startswith(_DEVICE_ID_PREFIXES):
        return text
    kind, _, number = text.partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f"{device!r} is no device: say 'cuda', 'cuda:0', an index or 'GPU-...'")
    return device_id(int(number) if number else _current_index())


def _current_index() -> int:
    # Whoever has not imported torch cannot have chosen another device with it.
    torch = sys.modules.get("torch")
    is_chosen = torch is not None and torch.cuda.is_initialized()
    return int(torch.cuda.current_device()) if torch is not None and is_chosen else 0


def _device_address(arena: DeviceArena, record: Record) -> int | None:
    if not record.span.size_bytes:
        return arena.address
    offset = arena.layout.find(record.span.offset_bytes, record.span.size_bytes)
    return None if offset is None else arena.address + offset


def _numpy_dtype(record: Record, library: str) -> numpy.dtype[Any]:
    """Of a record; bytes where the file says none. Raises UnsupportedFormat."""
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


def _read_records(view: memoryview, file: str) -> dict[str, Record]:
    if bytes(view[:4]) == _ZIP_MAGIC:
        archive = read_archive(view)
        return {name: _bytes_record(name, span) for name, span in archive.records.items()}
    try:
        return {record.name: record for record in read_header(view)}
    except FormatError as error:
        raise type(error)(
            f"{file} has no records: no zip archive of torch, and read as safetensors: {error}"
        ) from error


def _bytes_record(name: str, span: Span) -> Record:
    return Record(name, span, "", (span.size_bytes,))
