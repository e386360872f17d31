"""What interpreters that we start are told of this one."""

from __future__ import annotations

import os
import sys

from trims_shim.config import PACKAGE_DIRECTORY

__all__ = ["search_path"]


def search_path() -> list[str]:
    """Their ``sys.path``: where this package is, then the absolute directories of ours.

    Those that depend on the working directory would let whoever owns it choose the code. Python
    ignores entries that are no strings.
    """
    ours = [each for each in sys.path if isinstance(each, str) and os.path.isabs(each)]
    return [os.path.dirname(PACKAGE_DIRECTORY), *ours]
