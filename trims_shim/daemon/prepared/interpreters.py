"""The interpreter that prepares for a client, by the kernel's word, and which processor this is.

Owns the checks before the daemon starts a client's interpreter: same user, same files, a Python.
What the client says of itself does not count. For a client that sees other files it is the
daemon's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from typing import NamedTuple

from trims_shim import children
from trims_shim.errors import NotServed

__all__ = ["Interpreter", "cpu_identity", "interpreter_of", "namespace_problem", "our_interpreter"]

_PYTHON = re.compile(r"(python|pypy)[0-9.]*[a-z]?(-[a-z]+)?")
_LIBRARY = f"libpython{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}.so"
_DELETED = " (deleted)"
_START_FIELD = 22 - 3
"""Of /proc/PID/stat, counted from the one behind the name (proc(5))."""
_SECOND_NS = 1_000_000_000
_CPU_FIELDS = frozenset(
    {
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "flags",
        "CPU implementer",
        "CPU architecture",
        "CPU variant",
        "CPU part",
        "CPU revision",
        "Features",
        "cpu",
        "revision",
        "machine",
        "isa",
        "features",
    }
)
"""Fields of /proc/cpuinfo, on x86, ARM, POWER, RISC-V and s390, by which code may be chosen."""


class Interpreter(NamedTuple):
    """A Python and its ``sys.path``; ``package`` is its onnxruntime's, empty for any directory."""

    path: str
    search_path: tuple[str, ...]
    package: str = ""


def our_interpreter() -> Interpreter:
    """The daemon's own. Raises NotServed (``not_python``)."""
    try:
        return Interpreter(children.interpreter(), tuple(children.search_path()))
    except children.NoInterpreter as error:
        raise NotServed("not_python", str(error)) from error


def interpreter_of(pid: int, uid: int) -> str:
    """The Python that a process runs in, or one that is as good.

    Raises NotServed: ``other_user`` (or the kernel does not tell), ``other_namespace`` (it does not
    see the files that this process sees), ``not_python``.
    """
    process = f"/proc/{pid}"
    try:
        if pid <= 0:
            raise NotServed("other_namespace", namespace_problem(pid))
        if os.stat(process).st_uid != uid:
            raise NotServed("other_user", f"process {pid} is another user's")
        problem = namespace_problem(pid)
        if problem:
            raise NotServed("other_namespace", problem)
        path = os.readlink(f"{process}/exe")
        if path.endswith(_DELETED) or not _is_same(path, f"{process}/exe"):
            raise NotServed("not_python", f"the program of process {pid} was replaced: {path}")
        if _PYTHON.fullmatch(os.path.basename(path)):
            return path
        # A program that embeds Python, such as a web server: ours will do if its version is equal.
        if sys.executable and _has_library(process):
            return sys.executable
    except OSError as error:
        raise NotServed("other_user", f"process {pid} cannot be looked at: {error}") from error
    raise NotServed("not_python", f"process {pid} runs {path}, which is no Python")


def namespace_problem(pid: int, connected_ns: float = math.inf) -> str:
    """Why paths may mean other files to a process than to us; empty if they do not.

    ``connected_ns`` is when it has connected, by :mod:`trims_shim.daemon.clock`.
    """
    if pid <= 0:
        return "the client is in another PID namespace (a container?)"
    for place in ("ns/mnt", "root"):
        try:
            if not _is_same(f"/proc/{pid}/{place}", f"/proc/self/{place}"):
                return "the client sees other files than the daemon (a container?)"
        except OSError as error:
            return f"what files the client sees is not known: {error}"
    # Looked at last: so long it was the same process.
    if _started_ns(pid) > connected_ns:
        return "the client has ended, and another process has its number"
    return ""


def cpu_identity() -> str:
    """Everything by which programs may choose other code on another processor."""
    found = {os.uname().machine}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in _CPU_FIELDS:
                found.add(f"{name.strip()}={value.strip()}")
    return "\n".join(sorted(found))


def _is_same(path: str, other: str) -> bool:
    ours, theirs = os.stat(path), os.stat(other)
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


def _started_ns(pid: int) -> float:
    """When a process began, by the daemon's clock, rounded down; infinite if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            _, _, fields = file.read().rpartition(b")")  # its name may be anything
    except OSError:
        return math.inf
    return int(fields.split()[_START_FIELD]) * (_SECOND_NS // os.sysconf("SC_CLK_TCK"))


def _has_library(process: str) -> bool:
    with open(f"{process}/maps", errors="replace") as file:
        return any(os.path.basename(line.rstrip("\n")).startswith(_LIBRARY) for line in file)
