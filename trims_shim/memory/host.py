"""Host segments: memory of the daemon that clients map and that can no longer change.

A segment is made writable, filled once and sealed; then it is only handed out as a read-only
descriptor. Sealing depends on the memory. A memfd is sealed by F_ADD_SEALS. A file of our own
tmpfs, for which F_ADD_SEALS is refused, is opened through a read-only mount of it: every way to a
writable descriptor then ends in EROFS.

All memory is allocated before the first byte is written (fallocate, or populating where huge pages
depend on the mapping): a store into a hole that cannot be filled would be SIGBUS, not an error.

Huge pages decide the cost of the first touch, so kinds are tried in the order of
:class:`~trims_shim.specs.SegmentKind`; :func:`probe` says why a better kind does not work here.
"""

from __future__ import annotations

import abc
import errno
import itertools
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from trims_shim.errors import MemoryFailure
from trims_shim.memory.held import Held, charged_bytes
from trims_shim.memory.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, round_up
from trims_shim.memory.memfd import new_memfd, seal_memfd
from trims_shim.memory.tmpfs import open_tmpfs
from trims_shim.specs import SegmentKind

__all__ = [
    "HostMemory",
    "MemfdMemory",
    "Probe",
    "SealedSegment",
    "TmpfsMemory",
    "WritableSegment",
    "open_best",
    "open_memory",
    "probe",
]

_SHMEM_HUGE = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


@dataclass(slots=True)
class SealedSegment:
    """Immutable memory of one image. ``descriptor`` is read-only; the owner closes it."""

    descriptor: int
    size_bytes: int
    _held: Held = field(repr=False)
    _held_bytes: int = field(repr=False)

    def resident_bytes(self) -> int:
        """Return the bytes that the kernel charges for it."""
        return charged_bytes(self.descriptor)

    def close(self) -> None:
        """Give up the daemon's hold; the memory goes when the last mapping of a client goes."""
        if self.descriptor >= 0:
            self._held.give_up(self._held_bytes)
            os.close(self.descriptor)
            self.descriptor = -1


class WritableSegment:
    """A segment being filled. Exactly one of :meth:`seal` and :meth:`discard` ends it."""

    def __init__(
        self,
        writable: int,
        readable: int,
        size_bytes: int,
        *,
        is_memfd: bool,
        wants_advice: bool,
        held: Held,
    ) -> None:
        """Take ownership of both descriptors of one file that already has its final size.

        ``held`` already counts ``readable``.
        """
        self._held = held
        self._writable = writable
        self._readable = readable
        self._is_memfd = is_memfd
        self.size_bytes = size_bytes
        try:
            self._map = mmap.mmap(
                writable, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
            # A process that is being started (:func:`trims_shim.children.launch`) is at first a
            # copy of this one: with a mapping of its own, the memfd could not be sealed.
            self._map.madvise(mmap.MADV_DONTFORK)
            if wants_advice:
                self._map.madvise(mmap.MADV_HUGEPAGE)
                self._map.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError) as error:
            self._close_descriptors()
            raise MemoryFailure(f"segment of {size_bytes} bytes: {error}") from error
        self.view = memoryview(self._map)

    @property
    def descriptor(self) -> int:
        """The writable descriptor, for another process that fills it until :meth:`seal`."""
        return self._writable

    def seal(self) -> SealedSegment:
        """End writing. Afterwards neither daemon nor client can change a byte or the size."""
        self._unmap()
        try:
            if self._is_memfd:
                seal_memfd(self._writable)
        except OSError as error:
            self._close_descriptors()
            raise MemoryFailure(f"segment cannot be sealed: {error}") from error
        os.close(self._writable)
        held_bytes = self._held.seal(self._readable)
        return SealedSegment(self._readable, self.size_bytes, self._held, held_bytes)

    def discard(self) -> None:
        """Free the memory."""
        self._unmap()
        self._close_descriptors()

    def _unmap(self) -> None:
        self.view.release()
        self._map.close()

    def _close_descriptors(self) -> None:
        self._held.discard(self._readable)
        os.close(self._writable)
        os.close(self._readable)


class HostMemory(abc.ABC):
    """One kind of segment memory."""

    def __init__(self, kind: SegmentKind) -> None:
        self.kind = kind
        self._held = Held()

    @abc.abstractmethod
    def create(self, size_bytes: int) -> WritableSegment:
        """Make a new segment of ``size_bytes`` > 0. Raises MemoryFailure."""

    def footprint_bytes(self, size_bytes: int) -> int:
        """Return the memory that a segment of this size will take."""
        return round_up(size_bytes, PAGE_BYTES)

    def used_bytes(self) -> int | None:
        """Return the bytes of all segments that still exist or are mapped; None where unknown."""
        return None

    def held_bytes(self) -> int:
        """Return the bytes, so far, of segments that were made here and not given up."""
        return self._held.bytes()

    def close(self) -> None:  # noqa: B027
        """Give up the descriptors of this memory, if it has any; segments live on."""


class MemfdMemory(HostMemory):
    """Sealed memfds; huge pages where ``shmem_enabled`` gives them.

    The kernel does not add memfds up, so what is used is not known.
    """

    def create(self, size_bytes: int) -> WritableSegment:
        """See :class:`HostMemory`."""
        writable = readable = -1
        try:
            writable = new_memfd("trims-segment")
            os.ftruncate(writable, size_bytes)
            readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
            self._held.begin(readable)
            if self.kind is SegmentKind.MEMFD:
                os.posix_fallocate(writable, 0, size_bytes)
        except OSError as error:
            _close_failed(self._held, writable, readable)
            raise _failure(f"memfd of {size_bytes} bytes", error) from error
        return WritableSegment(
            writable,
            readable,
            size_bytes,
            is_memfd=True,
            wants_advice=self.kind is SegmentKind.MEMFD_HUGE,
            held=self._held,
        )

    def footprint_bytes(self, size_bytes: int) -> int:
        """See :class:`HostMemory`."""
        unit = HUGE_PAGE_BYTES if self.kind is SegmentKind.MEMFD_HUGE else PAGE_BYTES
        return round_up(size_bytes, unit)


class TmpfsMemory(HostMemory):
    """Files of a tmpfs with huge pages that nobody else can reach.

    ``mount`` is the writable mount, ``sealed`` the read-only one; neither appears in any mount
    table, and the file system vanishes with its last descriptor and mapping.
    """

    def __init__(self, mount: int, sealed: int, kind: SegmentKind) -> None:
        """Take ownership of the descriptors of both mounts."""
        super().__init__(kind)
        self._mount = mount
        self._sealed = sealed
        self._numbers = itertools.count(1)

    def create(self, size_bytes: int) -> WritableSegment:
        """See :class:`HostMemory`."""
        name = f"segment-{next(self._numbers)}"
        writable = readable = -1
        try:
            # A name only until both descriptors exist; no other process can reach the mount.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            writable = os.open(name, flags, 0o400, dir_fd=self._mount)
            try:
                readable = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._sealed)
            finally:
                os.unlink(name, dir_fd=self._mount)
            self._held.begin(readable)
            # The size first: huge=within_size gives huge pages only within it, with no waste after.
            os.ftruncate(writable, size_bytes)
            os.posix_fallocate(writable, 0, size_bytes)
        except OSError as error:
            _close_failed(self._held, writable, readable)
            raise _failure(f"tmpfs segment of {size_bytes} bytes", error) from error
        return WritableSegment(
            writable,
            readable,
            size_bytes,
            is_memfd=False,
            wants_advice=False,
            held=self._held,
        )

    def used_bytes(self) -> int | None:
        """Return the bytes of all files of the mount, also evicted ones that a client maps."""
        try:
            status = os.fstatvfs(self._mount)
        except OSError:  # refused by a sandbox
            return None
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def close(self) -> None:
        """See :class:`HostMemory`."""
        os.close(self._mount)
        os.close(self._sealed)


def _close_failed(held: Held, writable: int, readable: int) -> None:
    held.discard(readable)
    for descriptor in (writable, readable):
        if descriptor >= 0:
            os.close(descriptor)


def _failure(what: str, error: OSError) -> MemoryFailure:
    hint = " (see `ulimit -H -f`)" if error.errno == errno.EFBIG else ""
    return MemoryFailure(f"{what}: {error}{hint}")


class Probe(NamedTuple):
    """Whether a kind of memory works here; if not, why."""

    kind: SegmentKind
    is_available: bool
    reason: str


def probe() -> list[Probe]:
    """Try every kind, best first, with a real segment."""
    found = []
    for kind in SegmentKind:
        try:
            memory = open_memory(kind, budget_bytes=4 * HUGE_PAGE_BYTES)
        except MemoryFailure as error:
            found.append(Probe(kind, False, str(error)))
            continue
        memory.close()
        found.append(Probe(kind, True, ""))
    return found


def open_best(budget_bytes: int) -> tuple[HostMemory, str]:
    """Open the best kind that works; also return why no better one does (empty: it is the best)."""
    reasons: list[str] = []
    for kind in SegmentKind:
        try:
            return open_memory(kind, budget_bytes=budget_bytes), "; ".join(reasons)
        except MemoryFailure as error:
            reasons.append(f"{kind.value}: {error}")
    raise MemoryFailure(f"no kind of shared memory works here: {'; '.join(reasons)}")


def open_memory(kind: SegmentKind, *, budget_bytes: int) -> HostMemory:
    """Open memory of this kind and try it out. Raises MemoryFailure where it does not work."""
    memory = _OPENERS[kind](budget_bytes)
    try:
        segment = memory.create(HUGE_PAGE_BYTES)
        segment.view[:1] = b"x"
        segment.seal().close()
    except BaseException:
        memory.close()
        raise
    return memory


def _open_memfd_huge(budget_bytes: int) -> HostMemory:
    try:
        with open(_SHMEM_HUGE) as file:
            setting = file.read()
    except OSError as error:
        raise MemoryFailure(f"{_SHMEM_HUGE}: {error}") from error
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen not in ("always", "advise", "within_size", "force"):
        raise MemoryFailure(f"shmem_enabled is '{chosen}', not 'advise' or 'always'")
    return MemfdMemory(SegmentKind.MEMFD_HUGE)


def _open_tmpfs(budget_bytes: int) -> HostMemory:
    mounts = open_tmpfs(budget_bytes, in_user_namespace=False)
    return TmpfsMemory(*mounts, SegmentKind.TMPFS_HUGE)


def _open_tmpfs_in_user_namespace(budget_bytes: int) -> HostMemory:
    mounts = open_tmpfs(budget_bytes, in_user_namespace=True)
    return TmpfsMemory(*mounts, SegmentKind.TMPFS_HUGE_USERNS)


def _open_memfd(budget_bytes: int) -> HostMemory:
    return MemfdMemory(SegmentKind.MEMFD)


_OPENERS: dict[SegmentKind, Callable[[int], HostMemory]] = {
    SegmentKind.MEMFD_HUGE: _open_memfd_huge,
    SegmentKind.TMPFS_HUGE: _open_tmpfs,
    SegmentKind.TMPFS_HUGE_USERNS: _open_tmpfs_in_user_namespace,
    SegmentKind.MEMFD: _open_memfd,
}
