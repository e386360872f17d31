"""Modules that are imported on the way, and never in the middle of a fork.

A child that is forked while another thread imports a module can never import it, nor what that was
importing in turn: nobody is there to release the modules' locks, and Python makes no new ones
(CPython 3.10 to 3.13). So what threads of a program import late through us, they import where a
fork waits for them. That takes some ten milliseconds, once in a process; a fork waits for a second
at most, and an import as long for a fork.

No lock is held during an import: threads that import would wait for each other in any order, as
they hold locks of modules.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ensure_imported", "no_fork"]

_LONGEST_S = 1.0
_whole: set[str] = set()
_turn = threading.Condition()  # its lock is re-entrant, for signal handlers that fork
_importing: dict[int, int] = {}
"""How deep in :func:`no_fork` each thread is."""
_forking = 0
"""The thread that is about to fork, if any."""


def ensure_imported(*names: str) -> None:
    """After this, importing these modules takes no lock. Raises what importing them raises."""
    for name in names:
        if name not in _whole:
            with no_fork():
                importlib.import_module(name)
                _whole.add(name)


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Forks of other threads wait until this has ended; what is imported in it may fork."""
    thread = threading.get_ident()
    with _turn:
        _turn.wait_for(lambda: _forking in (0, thread), _LONGEST_S)
        _importing[thread] = _importing.get(thread, 0) + 1
    try:
        yield
    finally:
        with _turn:
            _importing[thread] -= 1
            if not _importing[thread]:
                del _importing[thread]
                _turn.notify_all()


def _before_fork() -> None:
    global _forking
    thread = threading.get_ident()
    with _turn:
        _turn.wait_for(
            lambda: _forking in (0, thread) and _importing.keys() <= {thread}, _LONGEST_S
        )
        _forking = thread


def _after_fork_in_parent() -> None:
    global _forking
    with _turn:
        _forking = 0
        _turn.notify_all()


def _after_fork_in_child() -> None:
    global _turn, _importing, _forking
    thread = threading.get_ident()
    _turn = threading.Condition()
    _importing = {thread: _importing[thread]} if thread in _importing else {}
    _forking = 0


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
