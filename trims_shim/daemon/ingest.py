"""Read a model file into a segment, and the digests of files and segments, with a meter.

:mod:`trims_shim.memory.copying` reads the files. This module adds what belongs to the daemon: the
meter that the server shows, and hashing without keeping.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from trims_shim.memory import copying
from trims_shim.specs import AS_IS, Variant

__all__ = ["Meter", "fill", "hash_file", "hash_segment"]


@dataclass(slots=True)
class Meter:
    """How far a load is; written by the load, read by the server.

    It only grows: what is read a second time counts again.
    """

    done_bytes: int = 0

    def from_here(self) -> Callable[[int], None]:
        """What takes the bytes that are done from now on."""
        before = self.done_bytes

        def on_progress(done_bytes: int) -> None:
            self.done_bytes = before + done_bytes

        return on_progress


def fill(
    descriptor: int,
    view: memoryview,
    *,
    threads: int,
    meter: Meter,
    variant: Variant = AS_IS,
    name: str = "file",
) -> str:
    """As :func:`trims_shim.memory.copying.fill`. Blocks; call from a worker thread."""
    return copying.fill(
        descriptor,
        view,
        threads=threads,
        on_progress=meter.from_here(),
        variant=variant,
        name=name,
    )


def hash_segment(descriptor: int, size_bytes: int) -> str:
    """The digest of a sealed segment."""
    with mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        hasher = copying.hasher(size_bytes)
        hasher.update(mapping)
        digest: str = hasher.hexdigest()
    return digest


def hash_file(
    descriptor: int,
    size_bytes: int,
    *,
    meter: Meter,
    variant: Variant = AS_IS,
    name: str = "file",
) -> str:
    """The digest of a variant of the first ``size_bytes`` of a file. Raises as fill."""
    lead_bytes = variant.offset_bytes(0)
    body_bytes = variant.size_bytes(size_bytes) - lead_bytes
    hasher = copying.hasher(lead_bytes + body_bytes, lead_bytes=lead_bytes)
    buffer = memoryview(bytearray(min(copying.CHUNK_BYTES, body_bytes)))
    source = copying.source_of(descriptor, variant, name)
    done = 0
    while done < body_bytes:
        part = buffer[: min(len(buffer), body_bytes - done)]
        source.read(part, done)
        done += len(part)
        hasher.update(part)
        meter.done_bytes += len(part)
    digest: str = hasher.hexdigest()
    return digest
