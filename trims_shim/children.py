"""The search path for interpreters that we start."""

from __future__ import annotations

import os
import sys

from trims_shim.config import PACKAGE_DIRECTORY

__all__ = ["search_path"]


def search_path() -> list[str]:
    """Return their ``sys.path``: this package's directory, then the absolute ones of ours.

    Relative entries would let the owner of the working directory choose the code. Python ignores
    entries that are no strings.
    """
    ours = [each for each in sys.path if isinstance(each, str) and os.path.isabs(each)]
    return [os.path.dirname(PACKAGE_DIRECTORY), *ours]
