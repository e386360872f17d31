"""The interpreters that we start: their search path, the names that people see, and answers."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from trims_shim.config import PACKAGE_DIRECTORY, is_setting

__all__ = ["NoAnswer", "ask_child", "be_called", "library_first", "search_path"]

_PR_SET_NAME = 15
_TIMEOUT_S = 20
_PREPARE = "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"


class NoAnswer(Exception):
    """A child interpreter gave no answer."""


def ask_child(code: str) -> Any:
    """What ``code`` prints as JSON in an interpreter of its own, which leaves this process alone.

    ``json`` and ``sys`` are imported. Raises NoAnswer.
    """
    import subprocess

    # The child needs no settings, and those of this process may be unusable.
    environment = {k: v for k, v in os.environ.items() if not is_setting(k)}
    try:
        answer = subprocess.run(
            [sys.executable or "python3", "-I", "-c", _PREPARE + code, json.dumps(search_path())],
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
    # For example, the interpreter is embedded, or no process can start.
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise NoAnswer(str(error)) from error


def search_path() -> list[str]:
    """Return their ``sys.path``: Python's library, this package's directory, the others of ours.

    Relative entries would let the owner of the working directory choose the code. Python ignores
    entries that are no strings.
    """
    ours = [each for each in sys.path if isinstance(each, str) and os.path.isabs(each)]
    return library_first([os.path.dirname(PACKAGE_DIRECTORY), *ours])


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
