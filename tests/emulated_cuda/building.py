"""Compiles the emulated libraries, once for each content of their sources.

The result is kept below the temporary directory, named by a hash of everything it is made from, so
that a changed source is never run as an old library. Several processes may build at the same time:
each builds in a directory of its own and renames it into place, and the first one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["NoCompiler", "build"]

_SOURCES = Path(__file__).parent / "src"
_SHARED = ("machine.c", "registry.c")
_LIBRARIES = {
    "libcuda.so.1": (
        *_SHARED,
        "process.c",
        "faults.c",
        "symbols.c",
        "errors.c",
        "devices.c",
        "contexts.c",
        "streams.c",
        "events.c",
        "copies.c",
        "space.c",
        "memory.c",
        "linear.c",
        "host.c",
        "pointers.c",
    ),
    "libnvidia-ml.so.1": (*_SHARED, "nvml.c"),
}
_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    # A call between the files must never be bound to the real library of the same name.
    "-Wl,-Bsymbolic",
    "-Wl,-z,defs",
    "-ldl",
)
_TIMEOUT_S = 120


class NoCompiler(Exception):
    """There is no C compiler: the one reason to skip what needs the emulated libraries."""


@cache
def build() -> Path:
    """The directory that holds both libraries.

    Raises NoCompiler when there is no C compiler, RuntimeError with its messages when it fails.
    """
    compiler = os.environ.get("CC") or "cc"
    found = shutil.which(compiler)
    if found is None:
        raise NoCompiler(f"no C compiler ({compiler}); install gcc or clang, or set CC")
    base = _base()
    directory = base / _hash(found)
    if directory.is_dir():
        return directory
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=base))
    try:
        for name in _LIBRARIES:
            _compile(found, name, partial)
        # Fails when another process was first; its result is the same.
        with contextlib.suppress(OSError):
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _base() -> Path:
    base = Path(tempfile.gettempdir()) / f"trims-emulated-cuda-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    # What lies there is loaded into this process: it must not be someone else's.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RuntimeError(f"{base} is not a directory of this user; remove it")
    return base


def _hash(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(each for each in _SOURCES.iterdir() if each.suffix in (".c", ".h")):
        digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    digest.update(repr((compiler, _FLAGS, _LIBRARIES)).encode())
    return digest.hexdigest()[:20]


def _compile(compiler: str, name: str, directory: Path) -> None:
    command = [
        compiler,
        *_FLAGS,
        f"-Wl,-soname,{name}",
        "-o",
        str(directory / name),
        *(str(_SOURCES / source) for source in _LIBRARIES[name]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
