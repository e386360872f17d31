"""Check how much of its stack a thread has left, before it works for other callers.

If a dispatch's turn hit the recursion limit half-way, everybody's requests would fail, and the
thread would have no stack left to put things right. So the stack is checked beforehand.
"""

from __future__ import annotations

import sys

__all__ = ["has_stack"]

_TURN_CALLS = 64
"""Nested calls for which a turn needs stack. The deepest of this package are a third of it; the
rest is for rules and callbacks of users."""


def has_stack() -> bool:
    """Whether at most a quarter of this thread's stack is used, so that a batch may run on it, too.

    Raises RecursionError if not even a turn has room.
    """
    try:
        # Takes a hundredth of descending. Calls through C count up to three times (Python 3.11).
        sys._getframe(sys.getrecursionlimit() // 4)
    except ValueError:
        return True
    _descend(_TURN_CALLS)
    return False


def _descend(calls: int) -> None:
    if calls:
        _descend(calls - 1)
