"""Modules that are imported on the way, and never in the middle of a fork.

A child that is forked while another thread imports a module can never import it: nobody is there
to release the module's lock, and Python makes no new one (CPython 3.10 to 3.13). So what threads of
a program import late through us is imported under a lock that a fork waits for. That takes some ten
milliseconds, once in a process; a fork waits for a second at most.
"""

from __future__ import annotations

import importlib
import os
import threading

__all__ = ["ensure_imported"]

_LONGEST_S = 1.0
_lock = threading.RLock()  # re-entrant: what is imported may fork
_whole: set[str] = set()
_forking = threading.local()


def ensure_imported(name: str) -> None:
    """After this, ``import name`` takes no lock. Raises what importing it raises."""
    if name not in _whole:
        with _lock:
            importlib.import_module(name)
            _whole.add(name)


def _before_fork() -> None:
    _forking.has_lock = _lock.acquire(timeout=_LONGEST_S)


def _after_fork_in_parent() -> None:
    if _forking.has_lock:
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
