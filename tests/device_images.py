"""Model files for a device, and what a raw client sees of their images there.

The emulated device's allocations are files, so that a test can read what was granted without a
driver: :meth:`Opened.content` puts the model file together again from exactly the descriptors that
a client gets.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from trims_shim.client.connection import Connection, Granted
from trims_shim.formats.device_layout import layout_of, layout_of_numbers

__all__ = ["MIB", "Opened", "open_on", "safetensors"]

MIB = 1 << 20


def safetensors(sizes: Iterable[int], *, seed: int = 1) -> bytes:
    """A safetensors file of byte tensors of these sizes; its bytes differ everywhere."""
    header = {}
    end = 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pattern = b"".join((seed * 1_000_003 + n).to_bytes(8, "little") for n in range(4096))
    data = (pattern * (end // len(pattern) + 1))[:end]
    return len(text).to_bytes(8, "little") + text + data


@dataclass
class Opened:
    """A grant, with its descriptors."""

    granted: Granted

    @property
    def outcome(self) -> str:
        return self.granted.reply.outcome

    @property
    def digest(self) -> str:
        return self.granted.reply.digest

    def content(self) -> bytes:
        """The file that the outline and the allocations make."""
        reply = self.granted.reply
        found = bytearray(os.pread(self.granted.descriptor, reply.size_bytes, 0))
        if reply.device is None:
            return bytes(found)
        layout = layout_of_numbers(reply.size_bytes)
        if layout.fingerprint() != reply.device.layout:
            with mmap.mmap(
                self.granted.descriptor, reply.size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ
            ) as mapping:
                layout = layout_of(mapping)
        assert layout.fingerprint() == reply.device.layout
        memory = b"".join(
            os.pread(descriptor, size, 0)
            for descriptor, size in zip(
                self.granted.allocations, reply.device.allocations, strict=True
            )
        )
        for each in layout.placed:
            part = memory[each.offset_bytes : each.offset_bytes + each.source.size_bytes]
            found[each.source.offset_bytes : each.source.end_bytes] = part
        return bytes(found)

    def close(self) -> None:
        """Close the descriptors; the lease stays."""
        for descriptor in (self.granted.descriptor, *self.granted.allocations):
            os.close(descriptor)


def open_on(connection: Connection, path: str, tier: str, *, is_numbers: bool = False) -> Opened:
    """Open a file's image at a tier."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return Opened(connection.open_image(descriptor, path, tier=tier, is_numbers=is_numbers))
    finally:
        os.close(descriptor)
