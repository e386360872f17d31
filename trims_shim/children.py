"""The interpreters that we start: their search path and version, names that people see, answers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trims_shim.config import PACKAGE_DIRECTORY, is_setting

if TYPE_CHECKING:
    import subprocess

__all__ = [
    "NoAnswer",
    "NoInterpreter",
    "ask_child",
    "be_called",
    "installed_constant",
    "interpreter",
    "launch",
    "library_first",
    "search_path",
]

_PR_SET_NAME = 15
_TIMEOUT_S = 20
_PREPARE = "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
_RUNNING = "/proc/self/exe"
_PYTHON = re.compile(r"(python|pypy)[0-9.]*[a-z]?")


class NoAnswer(Exception):
    """A child interpreter gave no answer."""


class NoInterpreter(Exception):
    """This program's Python is known to have no interpreter that could be started."""


def interpreter() -> str:
    """Return the path of an interpreter like this one. Raises NoInterpreter.

    Not always ``sys.executable``: that may be the program itself, which would run a second time
    (frozen, or a server that embeds Python), nothing, or a script that a profiler has put in its
    place to profile what the program starts (scalene).
    """
    executable = sys.executable or ""
    if not getattr(sys, "frozen", False):
        running = _running()
        if _is_python(running):
            is_same = os.path.exists(executable) and os.path.samefile(running, executable)
            return executable if is_same else running
        # Embedded. ``sys.executable`` may also be another Python, the first one in PATH.
        name = f"python{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
        installed = os.path.join(sys.exec_prefix, "bin", name)
        for path in (installed,) if running else (executable, installed):
            if _is_python(path):
                return path
    problem = "is no Python"
    if _PYTHON.fullmatch(os.path.basename(executable)) and not os.path.exists(executable):
        # As when a server gives up root's rights, and its Python is in root's home.
        problem = "is gone or out of this user's reach"
    raise NoInterpreter(f"this program's interpreter ({executable or 'unknown'}) {problem}")


def _running() -> str:
    try:
        return os.readlink(_RUNNING)
    except OSError:  # without /proc
        return ""


def _is_python(path: str) -> bool:
    return bool(_PYTHON.fullmatch(os.path.basename(path))) and os.path.exists(path)


def ask_child(code: str) -> Any:
    """What ``code`` prints as JSON in an interpreter of its own, which leaves this process alone.

    ``json`` and ``sys`` are imported. Raises NoAnswer.
    """
    import subprocess

    # The child needs no settings, and those of this process may be unusable.
    environment = {k: v for k, v in os.environ.items() if not is_setting(k)}
    try:
        answer = subprocess.run(
            [interpreter(), "-I", "-c", _PREPARE + code, json.dumps(search_path())],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return json.loads(answer.stdout)
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"no answer within {_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise NoAnswer(last or f"status {error.returncode}") from error
    # For example, no process can start.
    except (NoInterpreter, OSError, subprocess.SubprocessError, ValueError) as error:
        raise NoAnswer(str(error)) from error


def launch(
    arguments: Sequence[str], *, environment: Mapping[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a process of its own session beside the daemon, with these descriptors and stderr only.

    Never by vfork, after which no thread of ours runs before the child runs its program. It first
    closes what it has inherited, and so waits for the server of a file that somebody has handed
    over. Raises OSError.
    """
    import subprocess

    subprocess._USE_VFORK = False  # type: ignore[attr-defined]  # documented; from Python 3.11 on
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        pass_fds=descriptors,
        start_new_session=True,
    )


def search_path() -> list[str]:
    """Return their ``sys.path``: Python's library, this package's directory, the others of ours.

    Relative entries would let the owner of the working directory choose the code. Python ignores
    entries that are no strings.
    """
    ours = [each for each in sys.path if isinstance(each, str) and os.path.isabs(each)]
    return library_first([os.path.dirname(PACKAGE_DIRECTORY), *ours])


def installed_constant(path: str, name: str, ours: object = "") -> str:
    """Return a number or text of a module as they would import it; ``ours`` if it is not found.

    Another version of this package may have been installed under this process. ``path`` is below
    the package, which may be in a zip archive and have no files.
    """
    whole = os.path.join(PACKAGE_DIRECTORY, path)
    with contextlib.suppress(OSError), open(whole, encoding="utf-8", errors="replace") as file:
        found = re.search(rf'^{name} = ("?)([\w.+!-]+)\1$', file.read(), re.MULTILINE)
        if found is not None:
            return found[2]
    return str(ours)


def library_first(directories: Iterable[str]) -> list[str]:
    """Return each directory once, those of Python's library before all others.

    A script's directory may have modules named like Python's own. The program has often imported
    those by then, and runs; a child would not.
    """
    library = os.path.dirname(os.__file__)
    own = (library, os.path.join(library, "lib-dynload"))
    return sorted(dict.fromkeys(directories), key=lambda each: each not in own)


def be_called(name: str) -> None:
    """Give this process a name for ``top`` and ``ps -e``, of at most 15 bytes; a main thread may.

    Otherwise it would be one of many called python.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
