"""Device arenas: images in device memory as this process sees them.

Owns the mappings, the index from a device address back to its arena, and the way from a granted
image to a mapping. Device memory is mapped read-only, so one mapping serves every load of the
process: there is one :class:`DeviceArena` for an image and a device, and users of its memory keep
it alive:

    tensor -> storage -> (finalizer) DeviceArena gone -> DeviceImage retired
        -> (reaper: device synchronised) unmapped -> lease released

Invariants: as in :mod:`trims_shim.client.arenas`, finalizers take no lock and do no blocking I/O.
A forked child only forgets: device memory is not usable there. Nothing is unmapped at interpreter
exit; the driver does that.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from trims_shim import diagnostics
from trims_shim.client.addresses import AddressIndex
from trims_shim.client.arenas import Arena, Image
from trims_shim.client.descriptors import OwnDescriptor
from trims_shim.client.reaper import Reaper
from trims_shim.errors import DriverFailure, FormatError, WireError
from trims_shim.formats import DeviceLayout, layout_of, layout_of_numbers
from trims_shim.memory.device import DeviceMapping, map_allocations, open_handles
from trims_shim.memory.driver import driver
from trims_shim.specs import DeviceId, Digest
from trims_shim.wire.messages import DeviceGrant

__all__ = [
    "DeviceArena",
    "DeviceImage",
    "adopt",
    "begin_capture",
    "device_id",
    "dropped",
    "end_capture",
    "find",
    "held",
    "reap",
]

_CAPTURE = "STREAM_CAPTURE"
"""Part of the name of every result of a call that a capture forbids."""
_LONGEST_CAPTURE_S = 300.0
"""Far longer than any capture: one whose end is never reported must not keep memory for ever."""


class DeviceImage:
    """One leased image in device memory, mapped until the reaper drops it."""

    __slots__ = ("_release", "device", "digest", "index", "layout", "mapping", "outline", "pid")

    def __init__(
        self,
        mapping: DeviceMapping,
        outline: Arena,
        layout: DeviceLayout,
        *,
        device: DeviceId,
        index: int,
        release: Callable[[], None],
    ) -> None:
        """Take over the mapping, which may be empty yet, and, with ``release``, the lease."""
        self.mapping = mapping
        self._release = release
        self.outline = outline
        self.layout = layout
        self.digest: Digest = outline.image.digest
        self.device = device
        self.index = index
        self.pid = os.getpid()

    @property
    def address(self) -> int:
        """The mapping's first address in this process."""
        return self.mapping.address

    def drop(self) -> None:
        """Unmap, then give up the lease. For the reaper."""
        # Remove from the index first: the driver may hand out the address again right after.
        _process.index.remove(self.address)
        try:
            self.mapping.unmap()
        except DriverFailure as error:
            # A context that died of a fault ends with the process; the driver unmaps then.
            _note("unmap_failed", error)
        self._release()


class DeviceArena:
    """The read-only memory of an image on a device; a write is fatal to the writer's context.

    Tensors are at ``address`` + ``layout.find(...)``; the rest of the file is in ``outline``. Keep
    the arena alive while the memory is used.
    """

    __slots__ = ("__weakref__", "device", "image", "index", "layout", "size_bytes")

    def __init__(self, image: DeviceImage) -> None:
        self.image = image
        self.device = image.device
        self.index = image.index
        self.layout = image.layout
        self.size_bytes = image.layout.size_bytes
        finalizer = weakref.finalize(self, _retire, image)
        finalizer.atexit = False

    @property
    def address(self) -> int:
        """The mapping's first address in this process."""
        return self.image.address

    @property
    def outline(self) -> Arena:
        """The file, with holes in place of tensors; shared by all users, so never write it."""
        return self.image.outline

    @property
    def digest(self) -> Digest:
        """The digest of the image's content."""
        return self.image.digest


class _Process:
    """The device images that this process has mapped."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may load, too
        self.arenas: weakref.WeakValueDictionary[tuple[Digest, DeviceId], DeviceArena]
        self.arenas = weakref.WeakValueDictionary()
        self.index: AddressIndex[DeviceArena] = AddressIndex()
        self.reaper: Reaper[DeviceImage] = Reaper(_synchronize)
        self.captures: dict[int, float] = {}

    def held(self, digest: Digest, device: DeviceId) -> DeviceArena | None:
        """Return the live arena, or one of the revived image; the caller holds the lock."""
        arena = self.arenas.get((digest, device))
        if arena is not None:
            return arena
        image = self.reaper.revive(lambda each: (each.digest, each.device) == (digest, device))
        return None if image is None else self.serve(DeviceArena(image))

    def serve(self, arena: DeviceArena) -> DeviceArena:
        """Let the arena be found, and return it; the caller holds the lock."""
        self.index.add(arena.address, arena.size_bytes, weakref.ref(arena))
        self.arenas[arena.digest, arena.device] = arena
        return arena


def held(digest: Digest, device: DeviceId) -> DeviceArena | None:
    """Return the arena of an image that this process has mapped; revives a retired image."""
    arena = _process.arenas.get((digest, device))
    if arena is not None:
        return arena
    with _process.lock:
        return _process.held(digest, device)


def adopt(
    outline: Image,
    grant: DeviceGrant | None,
    allocations: Sequence[OwnDescriptor],
    *,
    device: DeviceId,
    name: str,
) -> DeviceArena:
    """Return the arena of a granted image: the existing one, else a mapping of its memory.

    The lease is the outline's, and given up where this call does not map it; ``allocations`` are
    closed in any case. The end of the outline does both, wherever an interrupt comes. Raises
    WireError for a grant that does not fit its outline, DriverFailure, MemoryFailure.
    """
    mapping = DeviceMapping()
    try:
        with _process.lock:
            arena = _process.held(outline.digest, device)
            if arena is None:
                arena = _process.serve(_map(outline, grant, allocations, device, name, mapping))
        return arena
    finally:
        # The mapping keeps the memory, so the descriptors are not needed.
        for each in allocations:
            each.close()
        # Of what is mapped the lease goes after the mapping, also if an interrupt came in between:
        # without a lease, the memory of a handle may be freed.
        if mapping.is_empty:
            outline.release()


def find(address: int, size_bytes: int) -> tuple[DeviceArena, int] | None:
    """Return (arena, offset in bytes) of the live arena of ``[address, address + size_bytes)``."""
    return _process.index.find(address, size_bytes)


def device_id(index: int) -> DeviceId:
    """Return the id of the device with this number in this process. Raises DriverFailure."""
    for each in driver().devices():
        if each.index == index:
            return each.id
    raise DriverFailure(f"this process sees no CUDA device {index}; see `trims info`")


def dropped() -> int:
    """Return how many images this process has unmapped so far."""
    return _process.reaper.dropped


def reap(timeout_s: float = 10.0) -> bool:
    """Wait until unused images are unmapped and their leases given up; False: not in time."""
    return _process.reaper.settle(timeout_s)


def begin_capture(graph: int) -> None:
    """Note that a CUDA graph, known as ``graph``, is being captured: until its end, do not wait."""
    _process.captures[graph] = time.monotonic()


def end_capture(graph: int) -> None:
    """Note that the capture has ended, also by an error."""
    _process.captures.pop(graph, None)


def _map(
    outline: Image,
    grant: DeviceGrant | None,
    allocations: Sequence[OwnDescriptor],
    device: DeviceId,
    name: str,
    mapping: DeviceMapping,
) -> DeviceArena:
    if grant is None:
        raise WireError(f"no device memory was granted for {name}")
    mapped_outline = outline.map()
    outline.spare_descriptor()
    layout = layout_of_numbers(outline.size_bytes)
    if layout.fingerprint() != grant.layout:
        layout = _read_layout(mapped_outline, name)
    if layout.fingerprint() != grant.layout or layout.size_bytes > sum(grant.allocations):
        raise WireError(
            f"the daemon lays {name} out as {grant.layout} in {sum(grant.allocations)} bytes, this "
            f"process as {layout.fingerprint()}; run `trims stop` if the versions differ"
        )
    index = driver().index_of(device)
    # Before anything is mapped: the arena's end unmaps it, wherever an interrupt comes.
    arena = DeviceArena(
        DeviceImage(
            mapping, mapped_outline, layout, device=device, index=index, release=outline.release
        )
    )
    if grant.handles:
        open_handles(device, grant.handles, grant.allocations, into=mapping)
    else:
        numbers = [each.number for each in allocations]
        map_allocations(device, numbers, grant.allocations, is_writable=False, into=mapping)
    return arena


def _read_layout(outline: Arena, name: str) -> DeviceLayout:
    try:
        return layout_of(memoryview(outline.buffer).cast("B"))
    except FormatError as error:
        raise WireError(f"the outline of {name} is not that of a model: {error}") from error


def _synchronize(index: int) -> bool:
    """Wait for all work on a device; False while a CUDA graph is being captured."""
    # CUDA refuses to wait then, and trying may spoil the capture: try only if none is known.
    earliest = time.monotonic() - _LONGEST_CAPTURE_S
    if any(began > earliest for began in _process.captures.copy().values()):
        return False
    try:
        driver().synchronize(index)
    except DriverFailure as error:
        if _CAPTURE in error.result:
            return False
        # All work ended with the context; nothing is left to wait for.
        _note("synchronize_failed", error)
    return True


def _note(reason: str, error: DriverFailure) -> None:
    # No warning: the program's own next call on the device fails as well.
    diagnostics.count("device", reason)
    diagnostics.log(logging.DEBUG, "%s: %s", reason, error)


def _retire(image: DeviceImage) -> None:
    if image.pid == os.getpid() and not image.mapping.is_empty:
        _process.reaper.retire(image)


# --- the process ----------------------------------------------------------------------------------

_process = _Process()
_forgotten: list[_Process] = []


def _after_fork_in_child() -> None:
    """Only forget; the old object is kept so that its destructors do not run in the child."""
    global _process
    _forgotten.append(_process)
    _process = _Process()


os.register_at_fork(after_in_child=_after_fork_in_child)
