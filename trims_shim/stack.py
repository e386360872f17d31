"""Check how much of its stack a thread has left, before it begins what must not break off half-way.

A batcher's turn that hit the recursion limit would fail everybody's requests, and leave no stack to
put things right. An import that did could leave a module that can never be imported again.
"""

from __future__ import annotations

import sys

__all__ = ["check_room", "check_stack"]

_TURN_CALLS = 64
"""Nested calls for which a batcher's turn needs stack. The deepest of this package are a third of
it; the rest is for rules and callbacks of users."""


def check_room(calls: int) -> None:
    """Raise RecursionError if the stack has no room for so many nested calls."""
    if calls:
        check_room(calls - 1)


def check_stack() -> bool:
    """Raise RecursionError in a thread whose stack has no room for a batcher's turn.

    Returns whether at most a quarter of the stack is used, so that a batch may run on it, too.
    """
    try:
        # Takes a hundredth of descending. Calls through C count up to three times (Python 3.11).
        sys._getframe(sys.getrecursionlimit() // 4)
    except ValueError:
        return True
    check_room(_TURN_CALLS)
    return False
