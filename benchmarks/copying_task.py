"""One sample of the copy engine, in a fresh process: ``python -m benchmarks.copying_task``.

Owns the clocked regions. Outside of them: imports, the target's memory (a segment's pages, the
device's context and mapping) and the state of the page cache. Digests are compared by the caller.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from blake3 import blake3

from benchmarks.process_memory import drop_cached, warm_cached
from benchmarks.tasks import main
from trims_shim.formats.device_layout import DeviceLayout, Placed
from trims_shim.memory import copying, copying_native, copying_python
from trims_shim.memory.driver import driver
from trims_shim.memory.host import open_best
from trims_shim.specs import AS_IS, Span

__all__: list[str] = []

_CHUNK_BYTES = 4 << 20
_RECORD_BYTES = 8 << 20
"""Record size of the files that go to a device; each has a header of one page."""
_HEADER_BYTES = 4096


# --- host memory ----------------------------------------------------------------------------------


def host(side: str, path: str, is_cached: bool) -> dict[str, Any]:
    """Seconds to read a file into a new segment, and the digest where the side makes one."""
    size = os.path.getsize(path)
    memory, _ = open_best(2 * size)
    segment = memory.create(size)
    _start_hashing()
    share = warm_cached(path) if is_cached else drop_cached(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        start = time.perf_counter()
        digest = _HOST[side](descriptor, segment.view)
        end = time.perf_counter()
    finally:
        os.close(descriptor)
        segment.discard()
        memory.close()
    return {"seconds": end - start, "digest": digest, "cached_before": share}


def _start_hashing() -> None:
    """Start BLAKE3's threads, as a daemon has them after its first load."""
    blake3(max_threads=blake3.AUTO).update(bytes(_CHUNK_BYTES))


def _plain(descriptor: int, view: memoryview) -> str:
    """The plain read that the others are compared with: no order, no hash, no error handling."""
    _read(descriptor, len(view), view, copying.default_threads())
    return ""


def _read(descriptor: int, size_bytes: int, view: memoryview, threads: int) -> None:
    """Read a file into a view, from its start again if the view is smaller than the file."""
    starts = iter(range(0, size_bytes, _CHUNK_BYTES))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            count = min(_CHUNK_BYTES, size_bytes - start)
            begin = start % len(view)
            with view[begin : begin + count] as part:
                if os.preadv(descriptor, [part], start) != count:
                    raise RuntimeError("a short read")

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()


def _plain_direct(descriptor: int, view: memoryview) -> str:
    direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
    try:
        with view[: len(view) // _HEADER_BYTES * _HEADER_BYTES] as whole_blocks:
            return _plain(direct, whole_blocks)
    finally:
        os.close(direct)


def _fill(descriptor: int, view: memoryview) -> str:
    threads = copying.default_threads()
    return copying.fill(descriptor, view, threads=threads, on_progress=lambda _: None)


def _fill_unhashed(descriptor: int, view: memoryview) -> str:
    """The engine without the hash: it adds order and bookkeeping to a read."""
    threads = copying.default_threads()
    with copying._reading(descriptor, len(view)) as direct:
        transfer = copying_python.fill(
            descriptor,
            direct,
            view,
            threads=threads,
            chunk_bytes=_CHUNK_BYTES,
            variant=AS_IS,
            name="file",
        )
        return copying._run(transfer, copying._Behind(lambda _: None, None))


def _fill_through_the_cache(descriptor: int, view: memoryview) -> str:
    setattr(copying, "opened_directly", lambda *_: contextlib.nullcontext(None))  # noqa: B010
    return _fill(descriptor, view)


_HOST: dict[str, Callable[[int, memoryview], str]] = {
    "plain read": _plain,
    "plain read, O_DIRECT": _plain_direct,
    "fill, not hashed": _fill_unhashed,
    "fill": _fill,
    "fill, never O_DIRECT": _fill_through_the_cache,
}


# --- a device -------------------------------------------------------------------------------------


def device(side: str, path: str, is_cached: bool, engine: str) -> dict[str, Any]:
    """Seconds to take a file to device 0, or back from there."""
    if engine == "python":
        setattr(copying_native, "extension", None)  # noqa: B010
    layout = _layout(os.path.getsize(path))
    _start_hashing()
    share = warm_cached(path) if is_cached else drop_cached(path)
    with _device_memory(layout.size_bytes) as address:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            answer = _DEVICE[side](descriptor, layout, address)
        finally:
            os.close(descriptor)
    return {**answer, "cached_before": share}


def _layout(file_bytes: int) -> DeviceLayout:
    placed = []
    step = _HEADER_BYTES + _RECORD_BYTES
    for number, start in enumerate(range(0, file_bytes - step + 1, step)):
        span = Span(start + _HEADER_BYTES, _RECORD_BYTES)
        placed.append(Placed(span, number * _RECORD_BYTES))
    return DeviceLayout(tuple(placed), len(placed) * _RECORD_BYTES, file_bytes)


@contextlib.contextmanager
def _device_memory(size_bytes: int) -> Iterator[int]:
    the_driver = driver()
    with the_driver.context(0):
        address = the_driver.allocate(size_bytes)
        try:
            the_driver.synchronize(0)
            yield address
        finally:
            the_driver.free(address)


def _pinned_rate(descriptor: int, layout: DeviceLayout, address: int) -> dict[str, Any]:
    """Copy one pinned buffer again and again on a stream: the rate of the bus."""
    the_driver = driver()
    size = 16 * _CHUNK_BYTES
    pinned = the_driver.allocate_pinned(size)
    stream = the_driver.new_stream()
    try:
        start = time.perf_counter()
        for begin in range(0, layout.size_bytes, size):
            count = min(size, layout.size_bytes - begin)
            the_driver.copy_to_device(address + begin, pinned, count, stream)
        the_driver.synchronize_stream(stream)
        end = time.perf_counter()
    finally:
        the_driver.destroy_stream(stream)
        the_driver.free_pinned(pinned)
    return {"seconds": end - start, "digest": ""}


def _plain_read(descriptor: int, layout: DeviceLayout, address: int) -> dict[str, Any]:
    """Read into reused buffers with as many threads as an upload has."""
    with memoryview(bytearray(copying.RING_CHUNKS * _CHUNK_BYTES)) as view:
        threads = copying._route(layout, address, 0, "file").threads
        start = time.perf_counter()
        _read(descriptor, layout.file_bytes, view, threads)
        end = time.perf_counter()
    return {"seconds": end - start, "digest": ""}


def _upload(descriptor: int, layout: DeviceLayout, address: int) -> dict[str, Any]:
    with _with_pinned_buffers(address):
        return _timed_upload(descriptor, layout, address, is_hashed=False)


def _upload_hashed(descriptor: int, layout: DeviceLayout, address: int) -> dict[str, Any]:
    with _with_pinned_buffers(address):
        return _timed_upload(descriptor, layout, address, is_hashed=True)


def _upload_first(descriptor: int, layout: DeviceLayout, address: int) -> dict[str, Any]:
    return _timed_upload(descriptor, layout, address, is_hashed=False)


@contextlib.contextmanager
def _with_pinned_buffers(address: int) -> Iterator[None]:
    """Run with pinned buffers, as in a process that has made an upload before."""
    tiny = DeviceLayout((Placed(Span(0, 1), 0),), 1, 1)
    source = os.memfd_create("tiny")
    try:
        os.ftruncate(source, 1)
        with copying.kept_buffers():
            _timed_upload(source, tiny, address, is_hashed=False)
            yield
    finally:
        os.close(source)


def _download(descriptor: int, layout: DeviceLayout, address: int) -> dict[str, Any]:
    """Download into a new segment's file, as for an image that is demoted."""
    outline, target = os.memfd_create("outline"), os.memfd_create("target")
    try:
        os.ftruncate(outline, layout.file_bytes)
        os.posix_fallocate(target, 0, layout.file_bytes)
        with _with_pinned_buffers(address):
            _timed_upload(descriptor, layout, address, is_hashed=False, outline=outline)
            start = time.perf_counter()
            digest = copying.download(
                outline, layout, address, target, device_index=0, on_progress=lambda _: None
            )
            end = time.perf_counter()
    finally:
        os.close(outline)
        os.close(target)
    return {"seconds": end - start, "digest": digest}


def _timed_upload(
    descriptor: int,
    layout: DeviceLayout,
    address: int,
    *,
    is_hashed: bool,
    outline: int | None = None,
) -> dict[str, Any]:
    start = time.perf_counter()
    digest = copying.upload(
        descriptor,
        layout,
        address,
        outline,
        device_index=0,
        is_hashed=is_hashed,
        on_progress=lambda _: None,
    )
    return {"seconds": time.perf_counter() - start, "digest": digest}


_DEVICE: dict[str, Callable[[int, DeviceLayout, int], dict[str, Any]]] = {
    "plain read": _plain_read,
    "pinned copy": _pinned_rate,
    "upload, not hashed": _upload,
    "upload": _upload_hashed,
    "upload, first of a process, not hashed": _upload_first,
    "download": _download,
}


if __name__ == "__main__":
    main(host, device)
