"""The kernel's accounts of processes and cached files. Linux, /proc; standard library only.

Owns the parsing of /proc/PID/smaps and the page cache calls. Nothing here asks the product, because
a benchmark's claims rest on the kernel's independent accounts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Area",
    "CpuTime",
    "anonymous_bytes",
    "areas",
    "areas_holding",
    "ballast",
    "cached_fraction",
    "cpu_time",
    "drop_cached",
    "is_segment",
    "machine_cpu_time",
    "own_pages",
    "peak_bytes",
    "processes_with_environment",
    "pss_bytes",
    "reset_peak",
    "settle",
    "wait_for_reporting",
    "warm_cached",
]

PAGE_BYTES = mmap.PAGESIZE
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_HEADER = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S+) [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) (\d+)\s*(.*)$"
)
_PROPORTIONAL = re.compile(r"^Pss:\s+(\d+) kB$")
_READ_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_SETTLE_S = 3.5
_REPORTING_S = 35.0


@dataclass(slots=True)
class Area:
    """One memory area of a process. ``inode`` is 0 for anonymous memory."""

    start: int
    end: int
    device: str
    inode: int
    path: str
    pss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds that a process, or the whole machine, was busy and available."""

    busy_s: float
    total_s: float = 0.0


def areas(pid: int | str, *, with_pss: bool = False) -> list[Area]:
    """The memory areas of a process in address order; PSS costs the kernel a page table walk."""
    found: list[Area] = []
    source = Path(f"/proc/{pid}/{'smaps' if with_pss else 'maps'}")
    for line in source.read_text(errors="replace").splitlines():
        if header := _HEADER.match(line):
            start, end, _, device, inode, path = header.groups()
            found.append(Area(int(start, 16), int(end, 16), device, int(inode), path))
        elif pss := _PROPORTIONAL.match(line):
            found[-1].pss_bytes = int(pss[1]) * 1024
    return found


def areas_holding(
    mapped: Iterable[Area], ranges: Iterable[tuple[int, int]]
) -> Iterator[tuple[Area, int]]:
    """(area, bytes of ``ranges`` in it) for each area that holds any; ranges are [start, end)."""
    ordered = sorted(ranges)
    for area in mapped:
        inside = sum(max(0, min(e, area.end) - max(s, area.start)) for s, e in ordered)
        if inside:
            yield area, inside


def is_segment(area: Area, checkpoint: os.PathLike[str] | str) -> bool:
    """Whether an area is shared file memory that is not the checkpoint's own page cache."""
    return area.inode != 0 and area.path != os.path.realpath(checkpoint)


def own_pages() -> None:
    """Copy the pages of Python's objects now, which a fork leaves to be copied at the first write.

    A kernel before Linux 5.14 cannot; the timed code is then a little slower.
    """
    libc = ctypes.CDLL(None)
    for area in areas("self"):
        if area.path in ("", "[heap]"):  # fails for areas that cannot be written
            size = ctypes.c_size_t(area.end - area.start)
            libc.madvise(ctypes.c_void_p(area.start), size, _MADV_POPULATE_WRITE)


def cached_fraction(path: os.PathLike[str] | str) -> float:
    """The share of a file's pages that is in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    pages = -(-size // PAGE_BYTES)
    resident = (ctypes.c_ubyte * pages)()
    view = ctypes.c_char.from_buffer(mapped)
    try:
        address = ctypes.c_void_p(ctypes.addressof(view))
        if libc.mincore(address, ctypes.c_size_t(size), resident):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        del view
        mapped.close()
    return sum(page & 1 for page in bytes(resident)) / pages


def wait_for_reporting() -> None:
    """Wait until a hypervisor has taken back freed memory.

    A virtual machine's memory comes from its host on first touch. Some machines give it back once
    it is free (free page reporting: every 2 s a sixteenth of it, mm/page_reporting.c). Meanwhile,
    reading memory was measured to take up to five times as long.
    """
    time.sleep(_REPORTING_S)


def settle(size_bytes: int) -> None:
    """Wait for reporting, then touch and free this much memory; do nothing for 0 bytes.

    The next allocation then need not wait for the hypervisor: filling 1.4 GB took 0.1 or 2.8 s, by
    chance.
    """
    if not size_bytes:
        return
    time.sleep(_SETTLE_S)
    with mmap.mmap(-1, max(size_bytes, PAGE_BYTES)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE)


@contextlib.contextmanager
def ballast(leave_bytes: int) -> Iterator[int]:
    """Touch and hold all free memory but ``leave_bytes``; yield how much is held.

    The rest is small enough for :func:`settle` to touch all of it.
    """
    with open("/proc/meminfo") as file:
        free_kib = next(int(line.split()[1]) for line in file if line.startswith("MemFree:"))
    held = (free_kib << 10) - leave_bytes
    if held <= 0:
        yield 0
        return
    with mmap.mmap(-1, held) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE)
        yield held


def drop_cached(path: os.PathLike[str] | str) -> float:
    """Drop a file from the page cache; return the share that stayed (dirty or mapped pages)."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_fraction(path)


def warm_cached(path: os.PathLike[str] | str) -> float:
    """Read a file into the page cache; return the share that is in it."""
    with open(path, "rb", buffering=0) as file:
        while file.read(_READ_BYTES):
            pass
    return cached_fraction(path)


def pss_bytes(pid: int) -> int:
    """The proportional set size of a process: shared pages count by the number of their users."""
    return _memory_field(f"/proc/{pid}/smaps_rollup", "Pss")


def anonymous_bytes() -> int:
    """The memory of this process that is of no file: what it allocated, or wrote."""
    return _memory_field("/proc/self/smaps_rollup", "Anonymous")


def reset_peak() -> int:
    """Reset this process's peak; return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return _memory_field("/proc/self/status", "VmRSS")


def peak_bytes() -> int:
    """The peak of this process's resident bytes since :func:`reset_peak`."""
    return _memory_field("/proc/self/status", "VmHWM")


def _memory_field(path: str, name: str) -> int:
    with open(path) as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:")) * 1024


def cpu_time(pid: int) -> CpuTime:
    """User and system time of a process so far, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return CpuTime((int(fields[11]) + int(fields[12])) * TICK_S)


def machine_cpu_time() -> CpuTime:
    """Busy and total time of all processors so far."""
    with open("/proc/stat") as file:
        ticks = [int(value) for value in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return CpuTime((sum(ticks) - idle) * TICK_S, sum(ticks) * TICK_S)


def processes_with_environment(variable: str, value: str) -> dict[int, str]:
    """Command lines by pid of this user's processes that started with ``variable=value``."""
    wanted = f"{variable}={value}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace").strip()
        except OSError:  # it has ended, or belongs to another user
            continue
    return found
