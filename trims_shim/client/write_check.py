"""Whether memory in an arena still has the bytes of its image."""

from __future__ import annotations

from trims_shim.client import arenas
from trims_shim.client.arenas import Arena, Image
from trims_shim.memory.pages import PageScanner, are_equal

__all__ = ["WriteCheck"]


class WriteCheck:
    """Asks, during one load or move, what the program has written since its image was mapped.

    The kernel tells. Where it does not (:mod:`trims_shim.memory.pages`), the memory is compared
    with a fresh mapping of its image, at the speed of memory. A context manager; not for sharing
    between threads.
    """

    __slots__ = ("_fresh", "_scanner")

    def __init__(self) -> None:
        self._scanner: PageScanner | None = PageScanner()
        self._fresh: dict[Image, Arena] = {}

    def __enter__(self) -> WriteCheck:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what the answers need: every later one is "no"."""
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            scanner.close()
        self._fresh.clear()

    def is_unwritten(self, address: int, size_bytes: int) -> bool:
        """Whether ``[address, address + size_bytes)``, in one arena, is as its image has it.

        Of other memory the kernel may say so, too. Raises MemoryFailure where the image cannot be
        mapped.
        """
        if self._scanner is None:
            return False
        if self._scanner.is_pristine(address, size_bytes):
            return True
        if not self._scanner.is_blind:
            return False
        found = arenas.find(address, size_bytes)
        if found is None or not found[0].is_open:
            return False
        image, offset_bytes = found
        fresh = self._fresh.get(image)
        if fresh is None:
            fresh = self._fresh[image] = image.map()
        return are_equal(address, fresh.address + offset_bytes, size_bytes)
