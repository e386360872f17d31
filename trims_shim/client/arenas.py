"""Arenas: segments as this process sees them.

Owns the mappings and the index from an address back to its image. An :class:`Image` is this
process's hold on a leased image (descriptor and lease); an :class:`Arena` is one private mapping of
it. Both live exactly as long as something holds one of their buffers:

    tensor -> storage -> Arena.buffer -> (finalizer) unmap -> last arena gone -> Image released

Invariants: the garbage collector may run finalizers anywhere, in any thread, so they take no lock
and do no blocking I/O, and every shared structure here is changed by single dictionary operations.
An arena inherited through fork stays readable in the child; the child never releases the parent's
lease.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

from trims_shim.client.addresses import AddressIndex
from trims_shim.client.descriptors import OwnDescriptor
from trims_shim.errors import MemoryFailure
from trims_shim.memory.mapping import map_private, reserve, unmap
from trims_shim.specs import Variant

__all__ = ["Arena", "Image", "Original", "find"]

_PROGRAMS_SHARE = 4
"""Images keep their descriptors while three of four are left to the program. Its own loads keep
none, so a program with a thousand small models would else run out of them because of us."""


class Original(NamedTuple):
    """The image that another one is a variant of.

    No hold on it: that would keep the bytes in memory twice. Its file is where ``path`` says,
    if nobody has changed that.
    """

    digest: str
    variant: Variant
    image: weakref.ref[Image]
    path: str


class Image:
    """One leased image. The end of the last reference closes its descriptor and its lease."""

    __slots__ = ("__weakref__", "_end", "_segment", "digest", "name", "original", "size_bytes")

    def __init__(
        self,
        descriptor: int | OwnDescriptor,
        size_bytes: int,
        *,
        digest: str,
        name: str = "",
        release: Callable[[], None] | None = None,
    ) -> None:
        """Take ownership of ``descriptor``, an open segment of ``size_bytes`` bytes.

        It is an OwnDescriptor where the caller closes it, too, after an error. ``name`` is the
        file's name, for people.
        """
        self.name = name
        if not isinstance(descriptor, OwnDescriptor):
            descriptor = OwnDescriptor(descriptor)
        self._segment = descriptor
        self.size_bytes = size_bytes
        self.digest = digest
        self.original: Original | None = None
        # Not __del__: it runs before weak references are cleared. Another thread could get a dying
        # image from a weak dictionary, and map whatever file has its descriptor's number by then.
        self._end = weakref.finalize(self, _release_image, self._segment, release, os.getpid())
        self._end.atexit = False

    @property
    def is_open(self) -> bool:
        """Whether our descriptor is still open: not closed to spare it, nor by the program."""
        return self._segment.is_open()

    @property
    def descriptor(self) -> int:
        """The descriptor of the segment. Raises MemoryFailure where it is closed."""
        if not self.is_open:
            raise MemoryFailure(f"{self.name}: the segment's descriptor is closed")
        return self._segment.number

    def spare_descriptor(self) -> bool:
        """Close the descriptor if the program is short of them; return whether it was closed.

        The image then cannot be mapped again. Call only before any other thread has the image,
        which might otherwise map the file that is opened next.
        """
        limit = os.sysconf("SC_OPEN_MAX")
        # The kernel hands out the lowest free number, so about this many are open.
        if not 0 <= limit <= _PROGRAMS_SHARE * self._segment.number:
            return False
        self._segment.close()
        return True

    def release(self) -> None:
        """Close the descriptor and give up the lease now; a second call does nothing."""
        self._end()

    def map(self) -> Arena:
        """Make a fresh private mapping; writes to other arenas do not show in it.

        Raises MemoryFailure where the kernel refuses, or the descriptor is closed.
        """
        return Arena(self)


class Arena:
    """One private, writable, copy-on-write mapping of an image.

    ``buffer`` is a ctypes array over all of it and the sole owner of the mapping: keep it (or an
    object made from it with the buffer protocol) alive for as long as the address is used.
    """

    __slots__ = ("__weakref__", "address", "buffer", "image", "size_bytes")

    def __init__(self, image: Image) -> None:
        self.image = image
        self.size_bytes = image.size_bytes
        self.address = reserve(image.size_bytes)
        self.buffer = (ctypes.c_char * self.size_bytes).from_address(self.address)
        # Before the image is mapped and indexed: an interrupt would leave its memory, or an entry,
        # that nothing removes. It may leave addresses.
        finalizer = weakref.finalize(self.buffer, _release_mapping, self.address, image)
        finalizer.atexit = False
        map_private(self.address, image.descriptor, image.size_bytes)
        is_alive = weakref.ref(self.buffer)
        _index.add(self.address, self.size_bytes, lambda: None if is_alive() is None else image)


_index: AddressIndex[Image] = AddressIndex()


def find(address: int, size_bytes: int) -> tuple[Image, int] | None:
    """Return (image, offset in bytes) of the live arena of ``[address, address + size_bytes)``."""
    return _index.find(address, size_bytes)


def _release_image(segment: OwnDescriptor, release: Callable[[], None] | None, pid: int) -> None:
    segment.close()
    if release is not None and pid == os.getpid():
        release()


def _release_mapping(address: int, image: Image) -> None:
    # Remove from the index first: the kernel may hand out the address again right after munmap.
    _index.remove(address)
    unmap(address, image.size_bytes)
