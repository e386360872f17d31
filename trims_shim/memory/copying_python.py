"""The copy engine in Python: for machines where the extension was not built, and for host memory.

Owns the work on a chunk (:mod:`~trims_shim.memory.chunks`) in each direction. Called through
:mod:`~trims_shim.memory.copying`, which states the promises; the interface is
:class:`~trims_shim.memory.copying.Engine`. Reads, writes and driver calls release the interpreter
lock; only a Python loop of some hundred iterations per gigabyte holds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from trims_shim.errors import DriverFailure, FileChanged, MemoryFailure, ReadFailed
from trims_shim.formats.device_layout import DeviceLayout, Placed
from trims_shim.memory.chunks import Chunk, Chunks, Route, Sizes
from trims_shim.memory.driver import driver

__all__ = [
    "Pieces",
    "Source",
    "WholeFile",
    "became_shorter",
    "download",
    "fill",
    "read_fully",
    "upload",
    "write_fully",
]

_STREAMS = 2
"""One stream copies while the next copy of the other is being set up."""
_DIRECT_ALIGNMENT_BYTES = 4096
"""The largest alignment that O_DIRECT needs on today's disks; if one needs more, reads fail."""


def fill(source: Source, view: memoryview, *, threads: int, chunk_bytes: int, name: str) -> Chunks:
    """Read ``len(view)`` bytes of a source into ``view``, from its start."""
    sizes = Sizes(len(view), chunk_bytes, -(-len(view) // chunk_bytes))
    return Chunks(_FileToMemory(source, view), sizes, threads=threads, name=name)


def upload(source: int, direct: int | None, outline: int | None, route: Route) -> Chunks:
    """See :class:`~trims_shim.memory.copying.Engine`."""
    step = _FileToDevice(route, WholeFile(source, direct, route.name), outline)
    return Chunks(step, route.sizes, threads=route.threads, name=route.name)


def download(outline: int, target: int, route: Route) -> Chunks:
    """See :class:`~trims_shim.memory.copying.Engine`."""
    step = _DeviceToFile(route, outline, target)
    return Chunks(step, route.sizes, threads=route.threads, name=route.name)


def became_shorter(name: str) -> FileChanged:
    """Return the error for a file that ends before its announced size."""
    return FileChanged(f"{name} became shorter while it was being read; load it again")


def read_fully(descriptor: int, part: memoryview, offset: int, name: str) -> None:
    """Fill ``part`` from a file. Raises FileChanged when the file ends early, ReadFailed.

    Views are released here: one kept by an error's traceback would keep the segment mapped.
    """
    done = 0
    while done < len(part):
        try:
            with part[done:] as rest:
                count = os.preadv(descriptor, [rest], offset + done)
        except OSError as error:
            raise ReadFailed(f"{name}: {error}") from error
        if count == 0:
            raise became_shorter(name)
        done += count


def write_fully(descriptor: int, part: memoryview, offset: int, name: str) -> None:
    """Write ``part`` to a file of ours. Raises MemoryFailure. Releases its views."""
    done = 0
    while done < len(part):
        try:
            with part[done:] as rest:
                count = os.pwrite(descriptor, rest, offset + done)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise MemoryFailure(f"{name}: its memory cannot be written: {error}") from error
        done += count


class Source(Protocol):
    """What is to be read: a file's bytes, or what is made of them. Threads read it at once."""

    def read(self, part: memoryview, offset: int) -> None:
        """Fill ``part`` from an offset on. Raises as :func:`read_fully`."""


class WholeFile(NamedTuple):
    """A file that may also be open with O_DIRECT, past the page cache."""

    descriptor: int
    direct: int | None
    name: str

    def read(self, part: memoryview, offset: int) -> None:
        """Read directly as far as that works, and the rest as :func:`read_fully`."""
        done = 0 if self.direct is None else _read_directly(self.direct, part, offset)
        with part[done:] as rest:
            read_fully(self.descriptor, rest, offset + done, self.name)


class Pieces(NamedTuple):
    """Pieces of a file, equally long, read as if they were one behind the other."""

    descriptor: int
    offsets: tuple[int, ...]
    piece_bytes: int
    name: str

    def read(self, part: memoryview, offset: int) -> None:
        """See :class:`Source`."""
        done = 0
        while done < len(part):
            number, begin = divmod(offset + done, self.piece_bytes)
            end = min(len(part), done + self.piece_bytes - begin)
            with part[done:end] as piece:
                read_fully(self.descriptor, piece, self.offsets[number] + begin, self.name)
            done = end


def _read_directly(descriptor: int, part: memoryview, offset: int) -> int:
    """Read whole blocks and return how many bytes could be read; never the unaligned end."""
    done = 0
    blocks = len(part) // _DIRECT_ALIGNMENT_BYTES * _DIRECT_ALIGNMENT_BYTES
    with contextlib.suppress(OSError):
        while done < blocks and done % _DIRECT_ALIGNMENT_BYTES == 0:
            with part[done:blocks] as rest:
                count = os.preadv(descriptor, [rest], offset + done)
            if count == 0:
                break
            done += count
    return done


class _FileToMemory:
    """Reads into the target itself: the slots are the caller's view."""

    def __init__(self, source: Source, view: memoryview) -> None:
        self._source = source
        self._view = view

    def open(self) -> memoryview:
        return self._view

    def in_thread(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def process(self, chunk: Chunk) -> None:
        self._source.read(chunk.part, chunk.offset)

    def drain(self) -> None:
        """Do nothing: ``process`` only returns when the bytes are there."""

    def close(self) -> None:
        """Do nothing: the memory is the caller's."""


class _DeviceStep:
    """A step to or from a device: pinned memory, two streams, and the device's context.

    Opened and closed by one thread.
    """

    def __init__(self, route: Route) -> None:
        self.parts = _Parts(route.layout, route.address)
        self.name = route.name
        self._device_index = route.device_index
        self._size_bytes = route.sizes.slots * route.sizes.chunk_bytes
        self._cleanup = contextlib.ExitStack()
        self._streams: list[int] = []
        self._is_lost = False
        self.address = 0

    def open(self) -> memoryview:
        self.driver = driver()
        self._cleanup.enter_context(self.in_thread())
        memory = self._allocate()
        self.address = ctypes.addressof(memory)
        view = memoryview(memory).cast("B")
        self._cleanup.callback(view.release)
        for _ in range(_STREAMS):
            stream = self.driver.new_stream()
            self._streams.append(stream)
            self._cleanup.callback(self.driver.destroy_stream, stream)
        self._cleanup.callback(self._settle)
        return view

    def in_thread(self) -> contextlib.AbstractContextManager[object]:
        return self.driver.context(self._device_index)

    def stream(self, slot: int) -> int:
        return self._streams[slot % _STREAMS]

    def wait(self, slot: int) -> None:
        """Wait until the slot is free. Without events, that is until all of its stream is done."""
        self.driver.synchronize_stream(self.stream(slot))

    def drain(self) -> None:
        for stream in self._streams:
            self.driver.synchronize_stream(stream)

    def close(self) -> None:
        self._cleanup.close()

    def _allocate(self) -> ctypes.Array[ctypes.c_char]:
        """Allocate pinned memory; plain where the driver refuses: copies block then, but work."""
        kind = ctypes.c_char * max(1, self._size_bytes)
        try:
            address = self.driver.allocate_pinned(ctypes.sizeof(kind))
        except DriverFailure:
            return kind()
        self._cleanup.callback(self._free, address)
        return kind.from_address(address)

    def _settle(self) -> None:
        """Wait for every copy, also failed ones: their memory is freed next."""
        for stream in self._streams:
            try:
                self.driver.synchronize_stream(stream)
            except DriverFailure:
                self._is_lost = True

    def _free(self, address: int) -> None:
        # If the wait failed, the device is broken and may still write to the memory. The process
        # ends soon.
        if not self._is_lost:
            self.driver.free_pinned(address)


class _Part(NamedTuple):
    """Bytes of the file for one place: an address on the device, or (None) the outline."""

    offset: int
    size: int
    address: int | None


class _Parts:
    """A layout, looked up by offsets of the file."""

    def __init__(self, layout: DeviceLayout, address: int) -> None:
        self._placed: list[Placed] = [each for each in layout.placed if each.source.size_bytes]
        self._starts = [each.source.offset_bytes for each in self._placed]
        self._address = address

    def between(self, begin: int, end: int) -> Iterator[_Part]:
        """Yield the parts of the file's bytes ``[begin, end)``, in order."""
        position = begin
        index = max(0, bisect_right(self._starts, begin) - 1)
        while position < end:
            record = self._placed[index] if index < len(self._placed) else None
            if record is not None and record.source.end_bytes <= position:
                index += 1
                continue
            part = self._part(record, position, end)
            yield part
            position += part.size

    def _part(self, record: Placed | None, position: int, end: int) -> _Part:
        if record is None:
            return _Part(position, end - position, None)
        start = record.source.offset_bytes
        if position < start:
            return _Part(position, min(end, start) - position, None)
        address = self._address + record.offset_bytes + position - start
        return _Part(position, min(end, record.source.end_bytes) - position, address)


class _FileToDevice(_DeviceStep):
    def __init__(self, route: Route, source: Source, outline: int | None) -> None:
        super().__init__(route)
        self._source = source
        self._outline = outline

    def process(self, chunk: Chunk) -> None:
        self.wait(chunk.slot)
        self._source.read(chunk.part, chunk.offset)
        stream = self.stream(chunk.slot)
        for part in self.parts.between(chunk.offset, chunk.offset + len(chunk.part)):
            begin = part.offset - chunk.offset
            if part.address is not None:
                address = self.address + chunk.position + begin
                self.driver.copy_to_device(part.address, address, part.size, stream)
            elif self._outline is not None:
                with chunk.part[begin : begin + part.size] as rest:
                    write_fully(self._outline, rest, part.offset, self.name)


class _DeviceToFile(_DeviceStep):
    def __init__(self, route: Route, outline: int, target: int) -> None:
        super().__init__(route)
        self._outline = outline
        self._target = target

    def process(self, chunk: Chunk) -> None:
        stream = self.stream(chunk.slot)
        for part in self.parts.between(chunk.offset, chunk.offset + len(chunk.part)):
            begin = part.offset - chunk.offset
            if part.address is not None:
                address = self.address + chunk.position + begin
                self.driver.copy_to_host(address, part.address, part.size, stream)
            else:
                with chunk.part[begin : begin + part.size] as rest:
                    read_fully(self._outline, rest, part.offset, self.name)
        self.wait(chunk.slot)
        write_fully(self._target, chunk.part, chunk.offset, self.name)
