"""How much of its stack a thread has left, before it does what concerns others.

A turn that runs into the limit of recursion half-way would take everybody's requests along, and
whoever ran into it has no stack left for putting things right. So it is looked at beforehand.
"""

from __future__ import annotations

import sys

__all__ = ["has_stack"]

_TURN_CALLS = 64
"""Within each other, of a turn. The longest of this package is a third of it; the rest is for
rules and callbacks of users."""


def has_stack() -> bool:
    """Whether the stack of this thread is hardly used, so that a batch may run on it, too.

    Raises RecursionError where not even a turn would come to its end.
    """
    try:
        # Takes a hundredth of trying out. Calls through C count up to three times (Python 3.11).
        sys._getframe(sys.getrecursionlimit() // 4)
    except ValueError:
        return True
    _descend(_TURN_CALLS)
    return False


def _descend(calls: int) -> None:
    if calls:
        _descend(calls - 1)
