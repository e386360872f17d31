"""Modules that imported a function by name before it was patched.

Reads module ``__dict__``s only: ``getattr`` and ``dir`` would wake lazy modules. Undo goes through
the same list, and only where the name still is ours.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["rebind"]


def rebind(old: Any, new: Any, *, home: str) -> int:
    """Make every module global that is ``old`` be ``new``, except in ``home``; how many were."""
    found = 0
    for name, module in list(sys.modules.items()):
        if name == home or type(module).__name__ not in ("module",):
            continue
        namespace = vars(module)
        for key, value in list(namespace.items()):
            if value is old:
                namespace[key] = new
                found += 1
    return found
