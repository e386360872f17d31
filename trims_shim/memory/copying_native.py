"""The copy engine in C++ (native/, built as ``trims_shim._native``): its status codes as errors.

Owns the table of codes and the ``with`` block around the extension's threads.
:mod:`~trims_shim.memory.copying` states its promises, native/DESIGN.md how it works. Importing this
works without the extension; :func:`is_available` says whether it may be called.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trims_shim.errors import DriverFailure, MemoryFailure, ReadFailed, TrimsError
from trims_shim.memory.chunks import Route
from trims_shim.memory.copying_python import became_shorter
from trims_shim.specs import Conversion

if TYPE_CHECKING:
    from trims_shim import _native as extension
else:
    try:
        from trims_shim import _native as extension
    except ImportError:  # there was no compiler
        extension = None

__all__ = ["Code", "convert", "download", "is_available", "kept_buffers", "upload"]

_INTERFACE = 3
"""The extension's interface version; an extension built from other sources is not used."""
_NONE = -1
"""Stands for no descriptor."""


class Code(enum.IntEnum):
    """``Code`` of native/status.hpp."""

    OK = 0
    FILE_CHANGED = 1
    READ_FAILED = 2
    WRITE_FAILED = 3
    NO_DRIVER = 4
    DRIVER_FAILED = 5
    NO_MEMORY = 6
    NO_THREAD = 7


def is_available() -> bool:
    """Whether the extension was built, and from the sources that belong to this file."""
    return extension is not None and extension.INTERFACE == _INTERFACE


def convert(part: memoryview, target: memoryview, conversion: Conversion) -> None:
    """Write as many numbers as ``target`` has room for as numbers of another dtype."""
    extension.convert(part, conversion.source, target, conversion.target)


def upload(source: int, direct: int | None, outline: int | None, route: Route) -> _Transfer:
    """See :class:`~trims_shim.memory.copying.Engine`."""
    transfer = extension.upload(
        source,
        _NONE if direct is None else direct,
        _NONE if outline is None else outline,
        *_arguments(route),
    )
    return _Transfer(transfer, route.threads, route.name)


def download(outline: int, target: int, route: Route) -> _Transfer:
    """See :class:`~trims_shim.memory.copying.Engine`."""
    transfer = extension.download(outline, target, *_arguments(route))
    return _Transfer(transfer, route.threads, route.name)


@contextlib.contextmanager
def kept_buffers(size_bytes: int) -> Iterator[None]:
    """See :func:`~trims_shim.memory.copying.kept_buffers`."""
    extension.hold_buffers(size_bytes)
    try:
        yield
    finally:
        extension.release_buffers()


class _Transfer:
    """See :class:`~trims_shim.memory.copying.Transfer`."""

    def __init__(self, native: extension.Transfer, threads: int, name: str) -> None:
        self._native = native
        self._threads = threads
        self._name = name

    def __enter__(self) -> _Transfer:
        try:
            self._check(self._native.start(self._threads))
        except BaseException:
            self._native.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._native.close()

    def next(self) -> memoryview | None:
        part = self._native.next()
        if part is None:
            self._check(self._native.failure())
        return part

    def finish(self) -> None:
        self._check(self._native.finish())

    def _check(self, status: tuple[int, int, str]) -> None:
        code, number, call = status
        if code != Code.OK:
            raise _error(Code(code), number, call, self._name)


def _arguments(route: Route) -> tuple[list[tuple[int, int, int]], int, int, int, int]:
    records = [
        (each.source.offset_bytes, each.source.size_bytes, route.address + each.offset_bytes)
        for each in route.layout.placed
    ]
    sizes = (route.layout.file_bytes, route.device_index, route.chunk_bytes, route.ring_chunks)
    return (records, *sizes)


def _error(code: Code, number: int, call: str, name: str) -> TrimsError:
    if code is Code.FILE_CHANGED:
        return became_shorter(name)
    if code is Code.DRIVER_FAILED:
        return _driver_failure(call, number)
    if code is Code.NO_DRIVER:
        return DriverFailure(
            f"{call} cannot be loaded; install NVIDIA's driver, or give the container its devices"
        )
    reason = OSError(number, os.strerror(number))
    if code is Code.READ_FAILED:
        return ReadFailed(f"{name}: {reason}")
    if code is Code.NO_THREAD:
        return ReadFailed(f"{name}: no thread can be started to read it: {reason}")
    if code is Code.WRITE_FAILED:
        return MemoryFailure(f"{name}: its memory cannot be written: {reason}")
    return MemoryFailure(f"{name}: no memory for the buffers of the copy ({call})")


def _driver_failure(call: str, number: int) -> DriverFailure:
    result = extension.driver_error(number)
    failure = DriverFailure(
        f"{call} failed: {result or number}; look at `nvidia-smi`; "
        "TRIMS_DEVICE=0 keeps this package off the device"
    )
    failure.result = result
    return failure
