"""Whether a library's private name still is the library's own.

Programs replace such names, with or without thinking of a cache, and perhaps before the shim is
imported: what is found there then is not the original, however early it is looked up.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_own"]


def is_own(value: Any, home: str) -> bool:
    """Whether a function, a partial of one, or a class was written in the module named ``home``.

    The name a function gives itself says nothing: ``functools.wraps`` copies it.
    """
    if isinstance(value, type):
        return value.__module__ == home
    function = getattr(value, "func", value)
    return getattr(function, "__globals__", None) is vars(sys.modules[home])
