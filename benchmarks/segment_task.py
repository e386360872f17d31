"""One sample of one kind of segment memory, in the process of :mod:`benchmarks.workers`.

Owns the timed steps: create and fill (by copying, as an ingest does), map privately, read a byte of
every page for the first time, and again. Opening the memory itself (mounting a tmpfs) is not timed,
because the daemon does it once.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["measure"]

_CHUNK_BYTES = 16 << 20
_TOUCH_STRIDE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Filled:
    """Filled memory: a descriptor to map, or anonymous memory that has no other mapping."""

    descriptor: int
    memory: mmap.mmap | None = None


def measure(kind: str, size_bytes: int, path: str) -> dict[str, float]:
    """Seconds of each step for a segment of ``size_bytes``; ``path`` is used by kind "file"."""
    fill = _FILLERS.get(kind) or _segment_filler(kind, size_bytes)
    start = time.perf_counter()
    filled = fill(size_bytes, path)
    end = time.perf_counter()
    if kind == "file":
        _settle(path)
    steps = {"fill_s": end - start}
    return steps | _read(filled, size_bytes)


def _read(filled: _Filled, size_bytes: int) -> dict[str, float]:
    import ctypes

    import numpy as np

    from trims_shim.memory.mapping import map_private, reserve

    start = time.perf_counter()
    if filled.memory is not None:
        pages = np.frombuffer(filled.memory, dtype=np.uint8)
    else:
        address = reserve(size_bytes)
        map_private(address, filled.descriptor, size_bytes)
        buffer = (ctypes.c_char * size_bytes).from_address(address)
        pages = np.frombuffer(memoryview(buffer), dtype=np.uint8)
    mapped = time.perf_counter()
    sums = [int(pages[::_TOUCH_STRIDE_BYTES].sum(dtype=np.int64))]
    touched = time.perf_counter()
    sums.append(int(pages[::_TOUCH_STRIDE_BYTES].sum(dtype=np.int64)))
    end = time.perf_counter()
    if sums[0] != sums[1] or not sums[0]:
        raise RuntimeError(f"read {sums} from memory that was filled with ones")
    return {
        "map_s": mapped - start,
        "first_touch_s": touched - mapped,
        "second_touch_s": end - touched,
    }


def _segment_filler(kind: str, size_bytes: int) -> Callable[[int, str], _Filled]:
    from trims_shim.memory.host import open_memory
    from trims_shim.specs import SegmentKind

    memory = open_memory(SegmentKind(kind), budget_bytes=2 * size_bytes)

    def fill(size_bytes: int, path: str) -> _Filled:
        segment = memory.create(size_bytes)
        _copy_into(segment.view)
        return _Filled(segment.seal().descriptor)

    return fill


def _fill_anonymous(size_bytes: int, path: str) -> _Filled:
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memoryview(memory) as view:
        _copy_into(view)
    return _Filled(-1, memory)


def _fill_hugetlb(size_bytes: int, path: str) -> _Filled:
    descriptor = os.memfd_create("trims-bench", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    os.ftruncate(descriptor, size_bytes)
    with mmap.mmap(descriptor, size_bytes) as memory, memoryview(memory) as view:
        _copy_into(view)
    return _Filled(descriptor)


def _fill_file(size_bytes: int, path: str) -> _Filled:
    source = b"\1" * _CHUNK_BYTES
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, size_bytes, _CHUNK_BYTES):
            file.write(source[: size_bytes - begin])
    return _Filled(os.open(path, os.O_RDONLY))


def _settle(path: str) -> None:
    """Bring a written file into the state that reading it leaves in the page cache."""
    from benchmarks.process_memory import drop_cached, warm_cached

    drop_cached(path)
    warm_cached(path)


def _copy_into(view: memoryview) -> None:
    source = memoryview(b"\1" * _CHUNK_BYTES)
    for begin in range(0, len(view), _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, len(view) - begin)
        view[begin : begin + length] = source[:length]


_FILLERS: dict[str, Callable[[int, str], _Filled]] = {
    "anonymous": _fill_anonymous,
    "hugetlb": _fill_hugetlb,
    "file": _fill_file,
}
