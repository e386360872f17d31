"""``trims autostart``: the cache for every program of a Python installation that sets a variable.

Writes one ``.pth`` file into site-packages, never from the wheel: code at interpreter start is the
user's decision. Its line does nothing unless TRIMS_ENABLED is set to a true value *in the
environment*: a dictionary look-up is all that other programs pay. It cannot break the start of an
interpreter: it catches everything, and says in one line how to get rid of itself.

PEP 829 (Python 3.15) lets ``<name>.start`` files replace ``import`` lines in ``.pth`` files and
stops running those lines three releases later; this file must then be written as
``trims_autostart.start``.
"""

from __future__ import annotations

import argparse
import os
import sysconfig

from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.cli.text import print_json
from trims_shim.errors import ConfigError
from trims_shim.replacing import replace_file

__all__ = ["FILE_NAME", "LINE", "autostart"]

FILE_NAME = "trims_autostart.pth"

# site reads the files of a virtual environment twice, hence the mark: it is said once.
_CODE = """\
try:
    import trims_shim
except Exception as error:
    import sys
    if sys.stderr is not None and not hasattr(sys, "_trims_autostart"):
        sys._trims_autostart = "failed"
        sys.stderr.write("trims_autostart.pth: trims_shim is not active: %s; " % error)
        sys.stderr.write("unset TRIMS_ENABLED, or remove that file from site-packages\\n")
"""
# site executes each line that starts with "import"; `os` is imported by site itself.
LINE = (
    "import os; os.environ.get('TRIMS_ENABLED', '').lower() in ('1', 'true', 'yes', 'on') "
    f"and exec({_CODE!r}, {{}})\n"
)


def autostart(arguments: argparse.Namespace) -> Exit:
    """Install or remove the file, or say whether it is there."""
    directory = arguments.site_packages
    if directory is None:
        directory = sysconfig.get_paths()["purelib"]
    if not directory:  # Perhaps a variable that was not set.
        raise ConfigError("--site-packages is empty; name a directory, or leave it out")
    path = os.path.join(directory, FILE_NAME)
    if arguments.action == "install":
        problem = _install(directory, path)
    elif arguments.action == "remove":
        problem = _remove(path)
    else:
        problem = ""
    if problem:
        say(f"trims autostart: {problem}")
        return Exit.FAILED
    is_installed = os.path.exists(path)
    if arguments.json:
        print_json({"installed": is_installed, "path": path, "is_current": _is_current(path)})
    else:
        print(_describe(path, is_installed))
    return Exit.OK


def _install(directory: str, path: str) -> str:
    """Why it cannot be installed; empty if it was."""
    try:
        replace_file(path, LINE.encode())
    except OSError as error:
        return (
            f"{directory} cannot be written: {error.strerror}; run this in a virtual environment, "
            f"or use `trims run`"
        )
    return ""


def _remove(path: str) -> str:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror}"
    return ""


def _is_current(path: str) -> bool:
    try:
        with open(path, encoding="ascii") as file:
            return file.read() == LINE
    except (OSError, UnicodeDecodeError):
        return False


def _describe(path: str, is_installed: bool) -> str:
    if not is_installed:
        return f"not installed: there is no {path}"
    if not _is_current(path):
        return f"{path} is of another version of trims_shim; run `trims autostart install` again"
    return f"{path}: programs of this Python use the cache when TRIMS_ENABLED=1 is set"
