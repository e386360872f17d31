"""Copy device memory to device memory, also of another device, by the device itself.

Both sides are mapped for the device that copies (``map_allocations`` of :mod:`.device`). For memory
of cuMemCreate, access between devices depends on mappings only; neither cuCtxEnablePeerAccess nor a
context on the other device is needed (CUDA C++ Programming Guide, "Virtual Memory Management", and
NVIDIA's sample vectorAddMMAP, which has one context).

Invariant: when :func:`copy` returns or raises, nothing of it runs on the device, unless the device
itself is broken; then the process's context is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from trims_shim.memory.driver import driver

__all__ = ["STEP_BYTES", "copy"]

STEP_BYTES = 64 << 20
"""A step takes a few ms over PCIe, some tenths of a ms over NVLink. Waiting for each costs nothing,
and gives the progress of the copy."""


def copy(
    source: int,
    target: int,
    size_bytes: int,
    *,
    device_index: int,
    on_progress: Callable[[int], None],
) -> None:
    """Copy ``size_bytes`` from one address to another, both accessible to the device.

    Blocks. ``on_progress`` is called with the bytes done so far; its exception ends the copy.
    Raises DriverFailure.
    """
    with driver().context(device_index):
        stream = driver().new_stream()
        try:
            for begin in range(0, size_bytes, STEP_BYTES):
                part = min(STEP_BYTES, size_bytes - begin)
                driver().copy_on_device(target + begin, source + begin, part, stream)
                driver().synchronize_stream(stream)
                on_progress(begin + part)
        finally:
            driver().destroy_stream(stream)
