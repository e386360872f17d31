"""The interpreters that we start: their search path, and the names that people see."""

from __future__ import annotations

import ctypes
import os
import sys

from trims_shim.config import PACKAGE_DIRECTORY

__all__ = ["be_called", "search_path"]

_PR_SET_NAME = 15


def search_path() -> list[str]:
    """Return their ``sys.path``: this package's directory, then the absolute ones of ours.

    Relative entries would let the owner of the working directory choose the code. Python ignores
    entries that are no strings.
    """
    ours = [each for each in sys.path if isinstance(each, str) and os.path.isabs(each)]
    return [os.path.dirname(PACKAGE_DIRECTORY), *ours]


def be_called(name: str) -> None:
    """Give this process a name for ``top`` and ``ps -e``, of at most 15 bytes; a main thread may.

    Otherwise it would be one of many called python.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
