"""Check how much of its stack a thread has left, before it works for other callers.

If a dispatch's turn hit the recursion limit half-way, everybody's requests would fail, and the
thread would have no stack left to put things right. So the stack is checked beforehand.
"""

from __future__ import annotations

import sys

__all__ = ["check_stack"]

_TURN_CALLS = 64
"""Nested calls for which a turn needs stack. The deepest of this package are a third of it; the
rest is for rules and callbacks of users."""


def check_stack() -> bool:
    """Raise RecursionError in a thread whose stack has no room for a turn.

    Returns whether at most a quarter of the stack is used, so that a batch may run on it, too.
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
