"""Imports of modules during a program's run, never in the middle of a fork.

A child that is forked while another thread imports a module can never import that module, nor the
modules it was importing in turn: no thread is left to release their locks, and Python makes no new
ones (CPython 3.10 to 3.14). So forks wait for the late imports that threads make through us. These
take some ten milliseconds, once in a process. A fork waits for an import, and an import for a fork,
for a second at most. In the child of a fork that came all the same, or in the middle of an import
of the program's own, our imports of that module fail instead of waiting for ever.

An import needs stack. One that breaks off half-way on a stack that is nearly full may leave an
extension module that can never be imported again (ZeroMQ's; CPython 3.11), so it is not begun.

No lock is held during an import: importing threads hold locks of modules, and could wait for each
other in any order. There is no lock at all: each side announces its action before it looks at the
other. So a signal handler may fork anywhere in here, and a library that replaces existing locks
(eventlet's ``monkey_patch``) finds none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import time

from trims_shim._version import __version__
from trims_shim.stack import check_room

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["ensure_imported", "no_fork"]

_LONGEST_S = 1.0
_POLL_S = 0.001
_IMPORT_CALLS = 150
"""Nested calls for which an import needs stack: numpy's has 102, ZeroMQ's 84 (CPython 3.11)."""
_whole: set[str] = set()
_importing: dict[int, int] = {}
"""By thread, its depth of nested :func:`no_fork`."""
_forking: set[int] = set()
"""Threads that are about to fork."""


def ensure_imported(*names: str) -> None:
    """Import modules, so that later imports take no lock. Raises the errors of their imports."""
    for name in names:
        if name not in _whole:
            check_room(_IMPORT_CALLS)
            with no_fork():
                try:
                    importlib.import_module(name)
                except ImportError as error:
                    if name.startswith("trims_shim."):
                        _check_installed(error)
                    raise
                _whole.add(name)


def _check_installed(error: ImportError) -> None:
    """Raise another ImportError if another version was installed under this program."""
    from trims_shim.children import installed_constant

    installed = installed_constant("_version.py", "__version__", __version__)
    if installed != __version__:
        raise ImportError(
            f"start this program again, as trims_shim {installed} was installed under it "
            f"({error}; this process has imported {__version__})"
        ) from error


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Make forks of other threads wait for the block; modules imported in it may fork."""
    thread = threading.get_ident()
    depth = _importing.get(thread, 0)
    deadline = time.monotonic() + _LONGEST_S
    try:
        _importing[thread] = depth + 1
        # A nested block does not wait: a fork already waits for the outer one.
        while not depth and set(_forking) - {thread} and time.monotonic() < deadline:
            _return_to(depth, thread)
            time.sleep(_POLL_S)
            _importing[thread] = depth + 1
        yield
    finally:
        _return_to(depth, thread)


def _return_to(depth: int, thread: int) -> None:
    # Not a step down: an interrupt may have come before there was a step up.
    if depth:
        _importing[thread] = depth
    else:
        _importing.pop(thread, None)


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
    for name, lock in _locks_of_modules():
        if lock.owner not in (None, thread):
            with contextlib.suppress(AttributeError):  # of a Python whose locks are closed
                lock.acquire = functools.partial(_acquire_for_others, name, lock.acquire)


def _locks_of_modules() -> list[tuple[str, Any]]:
    """Return the locks of the modules that are being imported; none in a Python without such."""
    try:
        locks = importlib._bootstrap._module_locks.copy()  # type: ignore[attr-defined]
        found = [(name, lock()) for name, lock in locks.items()]
        return [(name, lock) for name, lock in found if hasattr(lock, "owner")]
    except (AttributeError, TypeError):
        return []


def _acquire_for_others(name: str, acquire: Callable[[], object]) -> object:
    """Acquire the lock of a module, as the program likes; for an import of ours, raise."""
    if threading.get_ident() in _importing:
        raise ImportError(
            f"{name} was being imported when another thread forked this process, which never can "
            "import it",
            name=name,
        )
    return acquire()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
