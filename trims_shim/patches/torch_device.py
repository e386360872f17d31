"""Torch storages over shared device memory, and the one way to them for all torch patches.

Owns which device a load may be served on (:func:`place_of`), the way from an open file or a host
image to its :class:`DeviceArena`, and the storages over it. Each tensor of a file has a storage of
its own, so that it is saved, copied and freed alone. A storage that lies in an arena holds the
arena. :func:`lend` and :func:`take_back` move existing tensors into and out of shared memory, with
all views and aliases (:mod:`.torch_repoint`).

The memory is mapped read-only, and a write to it is fatal to the writing process. So tensors that
programs are known to write are private from the start: those below :data:`MIN_SHARED_BYTES`
(running statistics, counters, biases: hundreds of them are a few megabytes) and, with ``access``
set to ``private``, all. :mod:`.torch_unshare` covers writes to the others.

Such a storage differs from one of torch's allocator: it cannot be resized, it is not counted by
``torch.cuda.memory_allocated``, and ``record_stream`` does nothing for it (its memory is unmapped
only after the device has been synchronised).

Without CUDA, importing this module imports torch and little else.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trims_shim.client.cache import cache
from trims_shim.errors import NotServed
from trims_shim.formats.device_layout import ALIGNMENT_BYTES
from trims_shim.late_imports import ensure_imported
from trims_shim.patches import torch_repoint
from trims_shim.patches.asking import absolute
from trims_shim.patches.device_skips import Skips
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_modes import unseen
from trims_shim.patches.torch_rebuild import Blanks
from trims_shim.specs import DeviceId

if TYPE_CHECKING:
    from trims_shim.client.arenas import Image, Original
    from trims_shim.client.device_arenas import DeviceArena

__all__ = [
    "ALIGNMENT_BYTES",
    "MIN_SHARED_BYTES",
    "CudaRuntime",
    "DevicePoint",
    "Parts",
    "Place",
    "access",
    "are_addresses_kept",
    "arena_of_file",
    "arena_of_image",
    "find",
    "is_any_shared",
    "is_private",
    "keep_addresses",
    "lend",
    "lies_in_arena",
    "missing_capability",
    "place_of",
    "record_of",
    "runtime",
    "shared_storage",
    "skip",
    "take_back",
    "tensor_at",
]

MIN_SHARED_BYTES = 64 << 10
"""Smaller tensors are private copies. Tensors that modules write in passing are smaller (running
statistics of fewer than 16384 channels are), and a copy on the device takes some microseconds."""
_ACCESS_PRIVATE = "private"

skip = Skips("device_off", "capturing", "forked", "no_such_device", "no_room_for_copies")
"""Count a tensor or load that does not end on shared device memory."""

access: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "trims_shim_device_access", default=None
)
"""``shared`` or ``private``: wins over the setting ``device_access`` for this context."""


class CudaRuntime:
    """The operations that need CUDA; tests put an emulation into :data:`runtime`."""

    def is_built(self) -> bool:
        """Whether this process could ever have tensors on a device. Cheap."""
        return torch.version.cuda is not None

    def index(self, device: torch.device) -> int:
        """Return a device's number in this process; the current one's if ``device`` has none.

        Raises NotServed for a device for which torch has to raise its own error, or which must be
        left alone just now.
        """
        if device.type != "cuda":
            raise NotServed("device", f"{device} is not a CUDA device")
        if torch.cuda._is_in_bad_fork():
            raise NotServed("forked", "CUDA cannot be used in a forked child")
        if not torch.cuda.is_available():
            raise NotServed("no_such_device", "torch.cuda is not available")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise NotServed("no_such_device", f"there is no {device}")
        is_set_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_set_up and torch.cuda.is_current_stream_capturing():
            raise NotServed("capturing", "a CUDA graph is being captured")
        return index

    def device(self, index: int) -> torch.device:
        """Return the value of ``tensor.device`` for tensors on this device."""
        return torch.device("cuda", index)

    def device_id(self, index: int) -> DeviceId:
        """Return the driver's name of the device. Raises DriverFailure."""
        device: DeviceId = _arenas().device_id(index)
        return device

    def ready(self, index: int) -> None:
        """Make sure that torch has set the device up."""
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def free_bytes(self, index: int) -> int:
        """Return the device's free memory."""
        return torch.cuda.mem_get_info(index)[0]

    def storage(self, address: int, size_bytes: int, index: int) -> torch.UntypedStorage:
        """Return a storage over memory that the caller keeps alive."""
        return _storage_over(address, torch.device("cuda", index), size_bytes)

    def settle(self, device: torch.device) -> None:
        """Block until copies just queued on a device can be read from every stream."""
        torch.cuda.current_stream(device).synchronize()


runtime = CudaRuntime()


def _storage_over(address: int, device: torch.device, size_bytes: int) -> torch.UntypedStorage:
    construct: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = construct(address, device, size_bytes)
    return storage


# --- where --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A device on which memory can be shared."""

    index: int
    id: DeviceId
    device: torch.device


def place_of(device: torch.device) -> Place | None:
    """Return the place for tensors on ``device``; None (counted) where torch goes its own way."""
    if not runtime.is_built():
        return None
    try:
        if not cache().config.device:
            raise NotServed("device_off", "TRIMS_DEVICE=0")
        index = runtime.index(device)
        runtime.ready(index)
        return Place(index, runtime.device_id(index), runtime.device(index))
    # Border: torch's own code meets the same error of torch or the driver, and raises it.
    except Exception as error:
        skip.error(error, what=str(device))
        return None


def is_private() -> bool:
    """Whether loads get private copies instead of shared memory."""
    return (access.get() or cache().config.device_access) == _ACCESS_PRIVATE


# --- arenas ---------------------------------------------------------------------------------------


def arena_of_file(descriptor: int, name: object, place: Place) -> DeviceArena | None:
    """Return the device memory of an open file; None (counted) where there is none."""
    return _arena(descriptor, absolute(name), place)


def _arena(
    descriptor: int, name: str, place: Place, *, is_numbers: bool = False
) -> DeviceArena | None:
    try:
        if is_private():
            _check_room_for_copies(descriptor, name, place)
        return cache().open_device(descriptor, name=name, device=place.id, is_numbers=is_numbers)
    # Border: the shim never makes a load fail; the host tier or torch goes on.
    except Exception as error:
        skip.error(error, what=name)
        return None


def _check_room_for_copies(descriptor: int, name: str, place: Place) -> None:
    """Raises NotServed unless private copies of an image all fit, and itself if it is not there.

    Torch needs room for one copy only.
    """
    size_bytes, free_bytes = os.fstat(descriptor).st_size, runtime.free_bytes(place.index)
    is_there = _arenas().held(cache().digest_of(descriptor), place.id) is not None
    if (1 if is_there else 2) * size_bytes > free_bytes:
        raise NotServed(
            "no_room_for_copies",
            f"{name}: {size_bytes} bytes and private copies do not fit {free_bytes} free bytes",
        )


def arena_of_image(image: Image, place: Place) -> DeviceArena | None:
    """Return the device memory of an image in host memory; None (counted) where there is none.

    Of an aligned image, that of the file, whose tensors are aligned on a device in any case.
    Converted numbers and stacked tensors lie there as they do in host memory.
    """
    original = image.original
    is_numbers = original is not None and not original.variant.is_shifted
    if is_numbers:
        original = None  # it is another image
    digest = image.digest if original is None else original.digest
    arena: DeviceArena | None = _arenas().held(digest, place.id)
    if arena is not None:
        return arena
    plain = image if original is None else original.image()
    if plain is not None and plain.is_open:
        name = image.name if is_numbers else f"image {digest[:12]}"
        return _arena(plain.descriptor, name, place, is_numbers=is_numbers)
    if original is not None:
        return _arena_of_original(original, place)
    skip("memory", what=f"image {digest[:12]}")
    return None


def _arena_of_original(original: Original, place: Place) -> DeviceArena | None:
    """Return the device memory of a file that was loaded before, if it still is that file."""
    try:
        descriptor = os.open(original.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):  # It is gone, or never had a path.
        descriptor = -1
    try:
        if descriptor >= 0 and cache().digest_of(descriptor) == original.digest:
            arena = _arena(descriptor, original.path, place)
            if arena is None or arena.digest == original.digest:
                return arena
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    skip("aligned", what=original.path)
    return None


def record_of(arena: DeviceArena, offset_bytes: int, size_bytes: int) -> int | None:
    """Return the offset in ``arena`` of bytes of the file; None unless aligned in one tensor."""
    found = arena.layout.find(offset_bytes, size_bytes)
    return found if found is not None and found % ALIGNMENT_BYTES == 0 else None


def find(tensor: torch.Tensor) -> tuple[DeviceArena, int] | None:
    """Return (arena, offset in bytes) of a tensor; None unless in shared device memory."""
    if not _holds:
        return None
    try:
        storage = tensor.untyped_storage()
        found = _arenas().find(storage.data_ptr(), storage.nbytes())
    # Sparse, quantized, fake and lazy tensors have no storage, or one without an address.
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    if found is None:
        return None
    return found[0], found[1] + tensor.storage_offset() * tensor.element_size()


def lies_in_arena(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is over shared device memory."""
    return is_any_shared() and _arenas().find(storage.data_ptr(), storage.nbytes()) is not None


def is_any_shared() -> bool:
    """Whether this process has any tensor in shared device memory; cheap."""
    return bool(_holds)


@functools.cache
def _arenas() -> Any:
    # Not at the top: it imports the driver's binding, and most programs have no device.
    ensure_imported("trims_shim.client.device_arenas")
    from trims_shim.client import device_arenas

    return device_arenas


# --- storages -------------------------------------------------------------------------------------

_holds: dict[int, Callable[[], object]] = {}
"""Calls that end a storage's hold on its arena, by the address of torch's storage object."""


def shared_storage(arena: DeviceArena, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
    """Return a storage over a part of an arena; it holds the arena."""
    storage = runtime.storage(arena.address + offset_bytes, size_bytes, arena.index)
    _hold(storage, arena)
    return storage


class Parts:
    """The storages and tensors that one load makes over parts of an arena.

    Small parts are private copies, and with ``access`` set to ``private`` all are (see the module
    docstring). The end of the ``with`` block waits for all copies together, as torch waits for its
    own copies from host memory: the program may use them on any stream.
    """

    def __init__(self, arena: DeviceArena) -> None:
        self._arena = arena
        self._device = runtime.device(arena.index)
        self._shared_from_bytes = sys.maxsize if is_private() else MIN_SHARED_BYTES
        self._whole: torch.Tensor | None = None
        self._blanks = Blanks(self._device)

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._whole is not None:
            self._whole = None
            runtime.settle(self._device)

    def storage(self, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
        """Return a storage over a part, or over a private copy of it."""
        if size_bytes >= self._shared_from_bytes:
            return shared_storage(self._arena, offset_bytes, size_bytes)
        with unseen():
            if self._whole is None:
                self._whole = self._bytes()
            return self._whole.narrow(0, offset_bytes, size_bytes).clone().untyped_storage()

    def tensor(self, offset_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a contiguous tensor that is all of its storage."""
        size_bytes = dtype.itemsize * math.prod(shape)
        storage = self.storage(offset_bytes, size_bytes)
        with unseen():
            blank = self._blanks[dtype].new_empty(0)
            return blank.set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]

    def _bytes(self) -> torch.Tensor:
        arena = self._arena
        storage = runtime.storage(arena.address, arena.size_bytes, arena.index)
        return self._blanks[torch.uint8].new_empty(0).set_(storage)


def tensor_at(
    arena: DeviceArena, offset_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return one tensor over, or copied from, a part of an arena; see :class:`Parts`."""
    with Parts(arena) as parts:
        return parts.tensor(offset_bytes, dtype, shape)


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Queue a private copy; the caller waits for it."""
    with unseen():
        copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


def lend(tensor: torch.Tensor, arena: DeviceArena, offset_bytes: int) -> None:
    """Put a tensor on an equally large part of an arena; nothing else may read its old memory."""
    before = tensor.untyped_storage()
    shared = runtime.storage(arena.address + offset_bytes, before.nbytes(), arena.index)
    torch_repoint.replace(tensor, shared)
    storage = tensor.untyped_storage()
    end = _holds.pop(before._cdata, None) if storage._cdata == before._cdata else None
    _hold(storage, arena)
    if end is not None:
        end()


def take_back(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Give private memory to tensors on shared memory and to all others over the same storages.

    Returns the number of storages, and the number of those with a user that could not follow: that
    user keeps the shared memory.
    """
    tensors = list({id(each): each for each in tensors}.values())
    storages = (each.untyped_storage() for each in tensors)
    shared = list({each._cdata: each for each in storages}.values())
    arenas = {each._cdata: _arenas().find(each.data_ptr(), each.nbytes())[0] for each in shared}
    was_on = [each.untyped_storage()._cdata for each in tensors]
    copies = [_copy_of(each) for each in shared]
    for device in {each.device for each in copies}:
        runtime.settle(device)
    left = torch_repoint.move(shared, copies, tensors)
    for tensor, address in zip(tensors, was_on, strict=True):
        _end_hold(tensor.untyped_storage(), arenas[address])
    return len(shared), left


def _end_hold(storage: torch.UntypedStorage, arena: DeviceArena) -> None:
    """End the hold of a storage that became private; one that did not still needs its arena."""
    if lies_in_arena(storage):
        return
    end = _holds.pop(storage._cdata, None)
    if _is_address_kept:  # the graph goes on reading the shared memory
        _hold(storage, arena)
    if end is not None:
        end()


_is_address_kept = False


def keep_addresses() -> None:
    """Declare that from now on a CUDA graph, which torch cannot see into, may use addresses."""
    global _is_address_kept
    _is_address_kept = True


def are_addresses_kept() -> bool:
    """Whether a CUDA graph may notice that a tensor moves to other memory."""
    return _is_address_kept


def _hold(storage: torch.UntypedStorage, arena: DeviceArena) -> None:
    """Keep the arena until torch's storage object dies, with the last tensor over it."""
    key = storage._cdata
    finalizer = weakref.finalize(storage, _let_go, key, arena)
    finalizer.atexit = False
    _holds[key] = finalizer.detach


def _let_go(key: int, arena: DeviceArena) -> None:
    """End the hold of a dead storage; the arena lived until now. Runs in the garbage collector."""
    _holds.pop(key, None)


# --- what torch must be able to do ----------------------------------------------------------------


def missing_capability() -> str | None:
    """Say why this torch cannot have tensors on shared device memory, or None."""
    if not runtime.is_built():
        return "this torch is built without CUDA"
    for name in ("_construct_storage_from_data_pointer", "_get_function_stack_at"):
        if not hasattr(torch._C, name):
            return f"torch {torch.__version__} has no {name}"
    with unseen():
        return torch_repoint.missing_capability() or _broken_promise()


DevicePoint = functools.partial(PatchPoint, probe=missing_capability)
"""A patch point that is of use only where torch can have tensors on shared device memory."""


@functools.lru_cache(maxsize=1)
def _broken_promise() -> str | None:
    """Say which assumption about storages fails in this torch, or None; tried in host memory."""
    memory = (ctypes.c_char * 64)()
    storage = _storage_over(ctypes.addressof(memory), torch.device("cpu"), 64)
    gone: list[int] = []
    weakref.finalize(storage, gone.append, 1).atexit = False
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    del storage
    if gone:
        return "a storage is taken for dead while a tensor lies on it"
    del tensor
    return None if gone else "a storage outlives the last tensor on it"
