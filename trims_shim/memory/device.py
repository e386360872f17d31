"""Device memory that images live in: how it is made, handed on, mapped, and given back.

With the backend ``vmm`` memory is *descriptors*. The daemon creates physical allocations, exports
them and keeps only the exports (an export holds its memory as a handle does: CUDA Driver API,
cuMemRelease). Closing them frees the image; a client's mapping lives on until the client unmaps it
or dies. With ``ipc`` memory is *one allocation of a process with a context*. That process has to
live as long as the image, and its handle opens the memory writable.

The bytes of an image that are no tensor's are its *outline*, a sealed file with holes. Reading a
hole through a mapping, also a private one, gives the hole a page of memory for good (read(2) does
not). So parse outlines, but never read tensors' spans in them.

Invariants: each function here either succeeds or leaves nothing behind, whichever call failed.
With ``vmm``, allocations are multiples of the granularity and at most 4 GiB; those of one image lie
back to back in one reservation. Nothing waits for the device: callers synchronise before they
unmap. A forked child unmaps and frees nothing; closing descriptors is right in any process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from trims_shim.errors import DriverFailure, MemoryFailure, NoSpace
from trims_shim.formats.device_layout import layout_of_numbers
from trims_shim.memory.driver import OUT_OF_MEMORY, RESERVATION_ALIGNMENT_BYTES, Word, driver
from trims_shim.memory.mapping import round_up
from trims_shim.memory.memfd import new_memfd, seal_memfd
from trims_shim.specs import DeviceId

__all__ = [
    "ALLOCATION_LIMIT_BYTES",
    "DeviceAllocation",
    "DeviceMapping",
    "DeviceMemory",
    "DeviceSegment",
    "map_allocations",
    "open_handles",
    "seal_outline",
    "sparse_outline",
]

ALLOCATION_LIMIT_BYTES = 4 << 30
"""Large enough for few descriptors, small enough that no single huge free range is needed."""
_PADDING_SHARE = 16
"""A file may grow by a sixteenth when its tensors are aligned; real models grow by far less."""


@dataclass(slots=True)
class DeviceAllocation:
    """New memory of one image. ``descriptors`` (vmm) or ``handles`` (ipc), one for each allocation.

    ``address`` is set where this process has it mapped already (ipc). The owner closes it.
    """

    device: DeviceId
    allocations: tuple[int, ...]
    descriptors: tuple[int, ...] = ()
    handles: tuple[bytes, ...] = ()
    address: int = 0
    _pid: int = field(default_factory=os.getpid, repr=False)

    def close(self) -> None:
        """Give up this process's hold. The memory goes with the last hold (ipc: now)."""
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        address, self.address = self.address, 0
        if address and self._pid == os.getpid():
            with driver().context(driver().index_of(self.device)):
                driver().free(address)


@dataclass(slots=True)
class DeviceSegment:
    """Immutable memory of one image on a device, as the daemon holds it; the owner closes it.

    ``outline`` is a read-only descriptor. ``size_bytes`` is the file's size, ``layout`` the
    fingerprint of its tensors' places (:mod:`trims_shim.formats.device_layout`). With ``ipc``,
    ``job`` is the other process that made and keeps the memory; 0: the descriptors keep it.
    """

    device: DeviceId
    backend: str
    allocations: tuple[int, ...]
    descriptors: tuple[int, ...]
    handles: tuple[bytes, ...]
    outline: int
    size_bytes: int
    layout: str
    job: int = 0

    @property
    def is_numbers(self) -> bool:
        """Whether it is no model file, and was copied as it is."""
        return self.layout == layout_of_numbers(self.size_bytes).fingerprint()

    def resident_bytes(self) -> int:
        """Return the device memory that it takes."""
        return sum(self.allocations)

    def hold(self) -> DeviceSegment:
        """Return a second hold with its own descriptors; the caller closes it. Raises OSError."""
        with contextlib.ExitStack() as undo:
            copies = []
            for descriptor in (self.outline, *self.descriptors):
                copies.append(os.dup(descriptor))
                undo.callback(os.close, copies[-1])
            undo.pop_all()
        return replace(self, outline=copies[0], descriptors=tuple(copies[1:]))

    def close(self) -> None:
        """Give up the daemon's hold; device memory goes with a client's last mapping.

        With the backend ``ipc`` it goes when the process that allocated it frees it.
        """
        descriptors = (*self.descriptors, self.outline)
        self.descriptors, self.outline = (), -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


class DeviceMemory:
    """Makes memory on one device; ``backend`` is ``vmm`` or ``ipc``."""

    def __init__(self, device: DeviceId, backend: str) -> None:
        """Ask the driver about the device. Raises DriverFailure when it cannot be shared so."""
        self.device = device
        self.backend = backend
        self._index = driver().index_of(device)
        self._is_vmm = backend == "vmm"
        info = driver().devices()[self._index]
        if info.is_exclusive:
            # An uploader would have the context that the program needs.
            raise DriverFailure(
                f"the compute mode of {device} lets one process at a time use it; run `nvidia-smi "
                "-c DEFAULT`, or MPS"
            )
        if self._is_vmm and not info.can_share:
            raise DriverFailure(
                f"the driver cannot export memory of {device} as a descriptor; set "
                "TRIMS_DEVICE_BACKEND=ipc, or TRIMS_DEVICE=0"
            )
        self.granularity_bytes = (
            driver().granularity(self._index) if self._is_vmm else RESERVATION_ALIGNMENT_BYTES
        )

    def footprint_bytes(self, file_bytes: int) -> int:
        """Return a bound on the image of an honest file of this size; refuse larger images."""
        return file_bytes + file_bytes // _PADDING_SHARE + 2 * self.granularity_bytes

    def create(self, device_bytes: int) -> DeviceAllocation:
        """Allocate ``device_bytes`` > 0, all or nothing. The content is undefined.

        Raises NoSpace when the device is full, DriverFailure. ``ipc`` takes a context.
        """
        try:
            return self._share(device_bytes) if self._is_vmm else self._allocate(device_bytes)
        except DriverFailure as error:
            if error.result == OUT_OF_MEMORY:
                raise NoSpace(f"{self.device}: {error}") from error
            raise

    def _share(self, device_bytes: int) -> DeviceAllocation:
        sizes = _split(round_up(device_bytes, self.granularity_bytes))
        descriptors: list[int] = []
        try:
            for size in sizes:
                handle = driver().create(self._index, size)
                try:
                    descriptors.append(driver().export(handle))
                finally:
                    driver().release(handle)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return DeviceAllocation(self.device, sizes, descriptors=tuple(descriptors))

    def _allocate(self, device_bytes: int) -> DeviceAllocation:
        # A handle opens the whole block around the memory: whole pages make it a block of its own.
        size = round_up(device_bytes, self.granularity_bytes)
        with driver().context(self._index):
            address = driver().allocate(size)
            try:
                handle = driver().ipc_handle(address)
            except BaseException:
                driver().free(address)
                raise
        return DeviceAllocation(self.device, (size,), handles=(handle,), address=address)


class DeviceMapping:
    """An image in this process's address space, until :meth:`unmap`.

    It is empty until :func:`map_allocations` or :func:`open_handles` fills it. An owner that has it
    before can undo all that was done when a signal handler raises, at whichever call.
    """

    __slots__ = ("_address", "_pid", "_undo", "size_bytes")

    def __init__(self) -> None:
        self._address = Word()
        self._undo: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self.size_bytes = 0

    @property
    def address(self) -> int:
        """The first address; 0 while it is empty."""
        return self._address.value

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to unmap."""
        return not self._undo

    def unmap(self) -> None:
        """Remove the mapping; no work that uses it may still run. Raises DriverFailure.

        Removes all that can be removed, even if a part fails. A second call does nothing.
        """
        undo, self._undo = self._undo, []
        if not undo or self._pid != os.getpid():
            return
        with driver().relaxed_capture(), contextlib.ExitStack() as last_first:
            for each in undo:
                last_first.callback(each)

    # Each step is noted before it is made: what was made and not noted would stay.

    def _reserve(self, size_bytes: int) -> None:
        self._undo.append(partial(_if_made, driver().free_address, self._address, size_bytes))
        driver().reserve(size_bytes, into=self._address)
        self.size_bytes = size_bytes

    def _map(self, offset_bytes: int, size_bytes: int, descriptor: int) -> None:
        address, handle = self.address + offset_bytes, Word()
        self._undo.append(partial(_if_made, driver().release, handle))
        driver().import_descriptor(descriptor, into=handle)
        self._undo.append(partial(driver().unmap, address, size_bytes))
        driver().map(address, size_bytes, handle.value)
        # The handle is kept until then: a release that was interrupted could be made twice, and
        # give up what has got the same number meanwhile.

    def _open(self, handle: bytes, size_bytes: int, index: int) -> None:
        self._undo.append(partial(_if_made, partial(_close_handle, index), self._address))
        driver().ipc_open(handle, into=self._address)
        self.size_bytes = size_bytes


def map_allocations(
    device: DeviceId,
    descriptors: Sequence[int],
    allocations: Sequence[int],
    *,
    is_writable: bool,
    into: DeviceMapping | None = None,
) -> DeviceMapping:
    """Map exported allocations back to back, for this device to read (or write).

    They may be of another device, which has to be a peer; only ``device`` gets access.

    The descriptors stay the caller's and may be closed: the mapping holds the memory. Unless
    ``is_writable``, a write is a fault that ends the writer's context and harms no other process.
    Takes a context. Returns ``into``, an empty mapping, or a new one. Raises DriverFailure,
    MemoryFailure.
    """
    if len(descriptors) != len(allocations):
        raise MemoryFailure(f"{len(descriptors)} descriptors for {len(allocations)} allocations")
    index = driver().index_of(device)
    size = sum(allocations)
    with _filled(into, index) as mapping:
        mapping._reserve(size)
        offset = 0
        for descriptor, part in zip(descriptors, allocations, strict=True):
            mapping._map(offset, part, descriptor)
            offset += part
        driver().set_access(mapping.address, size, index, is_writable=is_writable)
    return mapping


def open_handles(
    device: DeviceId,
    handles: Sequence[bytes],
    allocations: Sequence[int],
    *,
    into: DeviceMapping | None = None,
) -> DeviceMapping:
    """Open the one allocation of an image of the backend ``ipc``, readable and writable.

    The process that allocated it must be alive and another one. Takes a context. Returns ``into``,
    an empty mapping, or a new one. Raises DriverFailure.
    """
    if len(handles) != 1 or len(allocations) != 1:
        raise DriverFailure(f"an image has one IPC handle, not {len(handles)}; run `trims stop`")
    index = driver().index_of(device)
    with _filled(into, index) as mapping:
        mapping._open(handles[0], allocations[0], index)
    return mapping


@contextlib.contextmanager
def _filled(into: DeviceMapping | None, index: int) -> Iterator[DeviceMapping]:
    """A mapping that is empty again if the block, or leaving the context after it, fails."""
    mapping = DeviceMapping() if into is None else into
    try:
        with driver().relaxed_capture(), driver().context(index):
            yield mapping
    except BaseException:
        # An interrupted step may not have been made, or not be undone twice; the cause is raised.
        with contextlib.suppress(DriverFailure):
            mapping.unmap()
        raise


def _if_made(undo: Callable[..., None], made: Word, *arguments: int) -> None:
    if made.value:
        undo(made.value, *arguments)


def _close_handle(index: int, address: int) -> None:
    with driver().context(index):
        driver().ipc_close(address)


def sparse_outline(size_bytes: int) -> int:
    """Make a writable file of ``size_bytes``, all hole, for pwrite. Raises MemoryFailure."""
    descriptor = -1
    try:
        descriptor = new_memfd("trims-outline")
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise MemoryFailure(f"outline of {size_bytes} bytes: {error}") from error
    return descriptor


def seal_outline(descriptor: int) -> int:
    """Seal an outline against all changes; return a read-only descriptor of it.

    ``descriptor`` stays the caller's; writing through it or a copy of it fails from now on. Raises
    MemoryFailure, also while any process has the outline mapped writable.
    """
    try:
        readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise MemoryFailure(f"outline cannot be opened: {error}") from error
    try:
        seal_memfd(descriptor)
    except OSError as error:
        os.close(readable)
        raise MemoryFailure(f"outline cannot be sealed: {error}") from error
    return readable


def _split(size_bytes: int) -> tuple[int, ...]:
    whole, rest = divmod(size_bytes, ALLOCATION_LIMIT_BYTES)
    return (ALLOCATION_LIMIT_BYTES,) * whole + ((rest,) if rest else ())
