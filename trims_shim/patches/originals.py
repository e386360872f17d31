"""Whether a library's private name is still the library's own.

Programs may replace such names, even before the shim is imported. So the value found there need not
be the original, however early it is looked up.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_own"]


def is_own(value: Any, home: str) -> bool:
    """Whether a function, a partial of one, or a class was written in the module named ``home``.

    A function's ``__module__`` and ``__name__`` prove nothing: ``functools.wraps`` copies them.
    """
    if isinstance(value, type):
        return value.__module__ == home
    function = getattr(value, "func", value)
    return getattr(function, "__globals__", None) is vars(sys.modules[home])
