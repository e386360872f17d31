"""How much memory this process may use, and what is left of it: the machine's, or a cgroup's.

A process is in nested cgroups, each of which may have a limit; the tightest counts. Everything is
read anew with each call, because limits change and processes are moved. Imports nothing heavy:
settings need it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["available_bytes", "machine_bytes", "memory_limit_bytes"]

_UNKNOWN = 1 << 62


class _Version:
    """Names of files, and of what memory.stat calls page cache, in a version of cgroups."""

    __slots__ = ("cached", "limits", "root", "used")

    def __init__(self, root: str, limits: tuple[str, ...], used: str, prefix: str) -> None:
        self.root = root
        self.limits = limits
        self.used = used
        self.cached = (f"{prefix}active_file", f"{prefix}inactive_file")


# Above memory.high no process is killed, but all are slowed down.
_V2 = _Version("/sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "")
_V1 = _Version(
    "/sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"
)


def machine_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit_bytes() -> int:
    """Return the memory this process may use: RAM, or the tightest cgroup limit around it."""
    return min([machine_bytes(), *(limit for limit, _, _ in _limited())])


def available_bytes() -> int:
    """Return the memory available without swapping, page cache included.

    What the machine has (MemAvailable), or the room in the fullest cgroup around this process.
    """
    machine = _figures("/proc/meminfo").get("MemAvailable:", _UNKNOWN >> 10) << 10
    return max(0, min([machine, *(_room(*each) for each in _limited())]))


def _room(limit: int, directory: str, version: _Version) -> int:
    used = _number(f"{directory}/{version.used}")
    if used is None:
        return _UNKNOWN
    cached = _figures(f"{directory}/memory.stat")
    return limit - used + sum(cached.get(name, 0) for name in version.cached)


def _limited() -> Iterator[tuple[int, str, _Version]]:
    """The cgroups around this process with limits below the machine's memory, and these limits."""
    machine = machine_bytes()
    for directory, version in _cgroups():
        for name in version.limits:
            limit = _number(f"{directory}/{name}")
            if limit is not None and limit < machine:
                yield limit, directory, version


def _cgroups() -> Iterator[tuple[str, _Version]]:
    for line in _text("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and "memory" not in controllers.split(","):
            continue
        version = _V2 if number == "0" else _V1
        while True:
            yield version.root + path.rstrip("/"), version
            if path in ("/", ""):
                break
            path = os.path.dirname(path)


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _figures(path: str) -> dict[str, int]:
    """The numbers in a file with a name and a number in each line."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: str) -> str:
    """What a file says; nothing if it cannot be read."""
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
