"""``trims run``: a program with the cache, by way of ``sitecustomize``.

The bootstrap directory goes first into PYTHONPATH and this process becomes the program: same pid,
streams and exit status. Child processes inherit PYTHONPATH and are covered too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence

from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.printable import printable

__all__ = ["bootstrap_directory", "environment", "given_environment", "resolve", "run"]

_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""By Python, for itself; what it becomes would inherit that, and shells cannot undo it."""


def run(words: Sequence[str]) -> Exit:
    """Become the program. Returns only when it cannot be started."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        command = resolve(words)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, environment(given_environment()))
    except FileNotFoundError:
        name = printable(words[0]) or repr("")
        say(f"trims run: {name}: no such command or file")
        return Exit.NOT_FOUND
    except OSError as error:
        say(f"trims run: {printable(words[0])}: {error.strerror}")
        return Exit.NOT_EXECUTABLE


def resolve(words: Sequence[str]) -> list[str]:
    """The command line to execute: Python files and options go to this interpreter.

    Raises FileNotFoundError for an empty name.
    """
    first = words[0]
    if not first:  # Perhaps a variable that was not set.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), first)
    is_command = shutil.which(first) is not None
    is_source = first.endswith((".py", ".pyc", ".pyz"))
    # Packages install commands of such names (rst2html.py), which are not in this directory.
    is_python = is_source and (os.path.exists(first) or not is_command)
    if first.startswith("-") or is_python or (not is_command and _is_plain(first)):
        return [sys.executable, *words]
    return list(words)


def _is_plain(path: str) -> bool:
    """Whether it is a directory, or a file nobody can execute: only Python can run it."""
    return os.path.isdir(path) or (os.path.isfile(path) and not os.access(path, os.X_OK))


def bootstrap_directory() -> str:
    """The directory whose sitecustomize imports the package."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_bootstrap")


def given_environment() -> dict[str, str]:
    """The environment without what Python adds to its own: LC_CTYPE in the C locale (PEP 538)."""
    ours = dict(os.environ)
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        given = dict(each.split(b"=", 1) for each in file.read().split(b"\0") if b"=" in each)
        ours.pop("LC_CTYPE", None)
        if b"LC_CTYPE" in given:
            ours["LC_CTYPE"] = os.fsdecode(given[b"LC_CTYPE"])
    return ours


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The program's environment; an explicit TRIMS_ENABLED=0 stays in force."""
    ours = bootstrap_directory()
    # An empty entry would mean the working directory.
    others = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path != ours]
    path = os.pathsep.join([ours, *others] if any(others) else [ours])
    return {
        "TRIMS_ENABLED": "1",
        **inherited,
        "PYTHONPATH": path,
        # Not a setting, so not TRIMS_: tells the bootstrap which process was asked for by name.
        "_TRIMS_RUN_PID": str(os.getpid()),
    }
