"""Modules that are imported on the way, and never in the middle of a fork.

A child that is forked while another thread imports a module can never import it, nor what that was
importing in turn: nobody is there to release the modules' locks, and Python makes no new ones
(CPython 3.10 to 3.14). So what threads of a program import late through us, they import where a
fork waits for them. That takes some ten milliseconds, once in a process; a fork waits for a second
at most, and an import as long for a fork.

No lock is held during an import: threads that import would wait for each other in any order, as
they hold locks of modules. And there is none at all: each side says what it is about to do before
it looks at the other. So a signal handler may fork anywhere in here, and a library that exchanges
locks that exist (eventlet's ``monkey_patch``) finds none.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ensure_imported", "no_fork"]

_LONGEST_S = 1.0
_POLL_S = 0.001
_whole: set[str] = set()
_importing: dict[int, int] = {}
"""How deep in :func:`no_fork` each thread is."""
_forking: set[int] = set()
"""The threads that are about to fork."""


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
    is_outermost = thread not in _importing
    deadline = time.monotonic() + _LONGEST_S
    _enter(thread)
    # One that is in already is waited for: it must not wait in turn.
    while is_outermost and set(_forking) - {thread} and time.monotonic() < deadline:
        _leave(thread)
        time.sleep(_POLL_S)
        _enter(thread)
    try:
        yield
    finally:
        _leave(thread)


def _enter(thread: int) -> None:
    _importing[thread] = _importing.get(thread, 0) + 1


def _leave(thread: int) -> None:
    _importing[thread] -= 1
    if not _importing[thread]:
        del _importing[thread]


def _before_fork() -> None:
    thread = threading.get_ident()
    deadline = time.monotonic() + _LONGEST_S
    _forking.add(thread)
    while set(_importing) - {thread} and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _after_fork_in_parent() -> None:
    _forking.discard(threading.get_ident())


def _after_fork_in_child() -> None:
    global _importing
    thread = threading.get_ident()
    _importing = {thread: _importing[thread]} if thread in _importing else {}
    _forking.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
