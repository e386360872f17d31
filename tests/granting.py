"""The daemon's end of a line, for tests of the client side of device memory.

Images are in real (emulated) device memory, one copy each, filled through a writable mapping as an
uploader would; what the client gets is what a daemon would send. Decisions are a test's to make.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any

from trims_shim import config
from trims_shim.client.cache import Cache
from trims_shim.client.connection import Granted
from trims_shim.client.device_arenas import DeviceArena
from trims_shim.errors import UnknownImage
from trims_shim.formats import DeviceLayout, layout_of
from trims_shim.memory import device as device_memory
from trims_shim.memory.device import DeviceAllocation, DeviceMemory
from trims_shim.specs import DeviceId
from trims_shim.wire import messages

__all__ = ["Grantor", "Stored", "bytes_on_device", "outline_of"]


def outline_of(content: bytes, layout: DeviceLayout) -> int:
    """A sealed outline; the caller closes it."""
    writable = device_memory.sparse_outline(len(content))
    try:
        for span in layout.outline():
            part = content[span.offset_bytes : span.end_bytes]
            assert os.pwrite(writable, part, span.offset_bytes) == len(part)
        return device_memory.seal_outline(writable)
    finally:
        os.close(writable)


def bytes_on_device(arena: DeviceArena, content: bytes) -> bool:
    """Whether every tensor of the file is where the layout says."""
    return all(
        ctypes.string_at(arena.address + each.offset_bytes, each.source.size_bytes)
        == content[each.source.offset_bytes : each.source.end_bytes]
        for each in arena.layout.placed
    )


class Stored:
    """An image as the daemon holds it."""

    def __init__(self, content: bytes, memory: DeviceMemory) -> None:
        self.content = content
        self.digest = hashlib.sha256(content).hexdigest()
        self.layout = layout_of(content)
        self.outline = outline_of(content, self.layout)
        self.memory: DeviceAllocation = memory.create(self.layout.size_bytes)
        self.backend = memory.backend
        self._fill()

    def _fill(self) -> None:
        mapping = device_memory.map_allocations(
            self.memory.device, self.memory.descriptors, self.memory.allocations, is_writable=True
        )
        for each in self.layout.placed:
            part = self.content[each.source.offset_bytes : each.source.end_bytes]
            ctypes.memmove(mapping.address + each.offset_bytes, part, len(part))
        mapping.unmap()

    def grant(self) -> messages.DeviceGrant:
        return messages.DeviceGrant(
            self.backend, self.layout.fingerprint(), self.memory.allocations, self.memory.handles
        )

    def close(self) -> None:
        self.memory.close()
        os.close(self.outline)


class Grantor:
    """Grants every file; a cache's lines to it are made by :meth:`cache`. Thread-safe."""

    def __init__(self, device: DeviceId) -> None:
        self.memory = DeviceMemory(device, "vmm")
        self.images: dict[str, Stored] = {}
        self.leases: dict[int, str] = {}
        self.released: list[int] = []
        self.tiers: list[str] = []
        self.requests = 0
        self.is_settled = True
        self.on_request: Callable[[], None] = lambda: None
        self.on_release: Callable[[], None] = lambda: None
        self.change: Callable[[messages.OpenImageReply], messages.OpenImageReply] = lambda r: r
        self._lock = threading.Lock()

    def cache(self, **settings: str) -> Cache:
        settings = {"autostart": "0", "min_bytes": "1", **settings}
        return Cache(config.load({}, **settings), dial=lambda: _Line(self))

    def granted(self, descriptor: int) -> Granted:
        """As the client's end of a connection returns it; the receiver owns the descriptors."""
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        with self._lock:
            self.requests += 1
            self.on_request()
            outcome = "miss" if self._image(content) is None else "hit"
            stored = self._image(content) or self._store(content)
            lease = self.requests
            self.leases[lease] = stored.digest
            reply = messages.OpenImageReply(
                lease, stored.digest, len(content), outcome, self.is_settled, stored.grant()
            )
            parts = tuple(os.dup(each) for each in stored.memory.descriptors)
            return Granted(self.change(reply), os.dup(stored.outline), parts)

    def load(self, path: str) -> None:
        """Have the image before anybody asks for it."""
        with open(path, "rb") as file:
            self._store(file.read())

    def _image(self, content: bytes) -> Stored | None:
        return self.images.get(hashlib.sha256(content).hexdigest())

    def _store(self, content: bytes) -> Stored:
        stored = Stored(content, self.memory)
        self.images[stored.digest] = stored
        return stored

    def release(self, lease: int) -> None:
        self.on_release()
        self.released.append(lease)
        del self.leases[lease]

    def evict(self) -> None:
        """Every image without a lease."""
        for digest in set(self.images) - set(self.leases.values()):
            self.images.pop(digest).close()

    def close(self) -> None:
        for each in self.images.values():
            each.close()
        self.images.clear()


class _Line:
    welcome = messages.Welcome(messages.PROTOCOL_VERSION, "1", 1, "i", b"t")

    def __init__(self, grantor: Grantor) -> None:
        self._grantor = grantor

    def open_image(
        self, descriptor: int, name: str, *, tier: str = "host", is_numbers: bool = False
    ) -> Granted:
        self._grantor.tiers.append(tier)
        return self._grantor.granted(descriptor)

    def request(self, message: Any) -> Any:
        raise UnknownImage("no such request here")

    def release(self, lease: int) -> None:
        self._grantor.release(lease)

    def withdraw(self) -> bool:
        return False

    def report(self, counters: dict[str, int]) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def is_replaced(self) -> bool:
        return False
