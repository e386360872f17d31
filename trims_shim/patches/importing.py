"""Call back when a module has been imported.

A finder at the head of ``sys.meta_path`` that never finds anything itself: it asks those behind it
and wraps the loader of the few modules it waits for. Hooks run after the module's own code, outside
any lock of ours. An exception of a hook is counted and dropped, and does not break the import. What
a signal handler of the program raises does, and the hook runs once more when it is tried again.

Own code instead of ``wrapt.importer``: importing wrapt takes longer than ``import trims_shim`` may
take in all (docs/decisions/0003-no-wrapt.md).
"""

from __future__ import annotations

import os
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

__all__ = ["call_when_imported", "lock", "run_overdue"]

_OURS = "trims_shim."
_hooks: dict[str, list[Callable[[], None]]] = {}
_running: set[str] = set()
"""Modules whose code a :class:`_Loader` is running."""
_told: list[Exception] = []
"""What :func:`_warn_of_removal` has told."""


def _forget_lock() -> None:
    global lock
    lock = threading.RLock()


lock = threading.RLock()
"""Of who patches. It is held during imports: who waits for it must not hold what they may need."""
# A fork waits for the thread that holds it, but not for ever, and the child does not have that.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_lock)


def call_when_imported(name: str, hook: Callable[[], None]) -> None:
    """Call ``hook`` once: now if the module is already imported, else right after its import.

    A hook that waits already is not added again.
    """
    while True:
        if _is_imported(name):
            _run(hook)
            return
        hooks = _hooks.setdefault(name, [])
        if hook not in hooks:
            hooks.append(hook)
        if _hooks.get(name) is hooks:
            break
        # The module's import has just ended in another thread, maybe without this hook.
        try:
            hooks.remove(hook)
        except ValueError:
            return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if _is_imported(name):  # its import has ended since the first look
        _run_all(name)


def run_overdue() -> None:
    """Run the hooks of modules whose import was under way when the hooks were registered.

    Their loader had been chosen before, so the next import of any module runs the hooks; unless
    another thread patches, which may be waiting for that module.
    """
    held = lock  # In a child that a hook forks it is another.
    is_outermost = not held._is_owned()  # type: ignore[attr-defined]
    try:
        if not is_outermost or held.acquire(blocking=False):
            for name in _overdue():
                _run_all(name)
    finally:
        # Not as acquire has said: an interrupt may have come before it was heard.
        if is_outermost and held._is_owned():  # type: ignore[attr-defined]
            held.release()


def _overdue() -> list[str]:
    """None while modules of ours are half imported: hooks need these."""
    due = [name for name in list(_hooks) if _is_imported(name)]
    return due if due and not any(map(_is_half_ours, list(sys.modules))) else []


def _is_half_ours(name: str) -> bool:
    if not str(name).startswith(_OURS):  # Programs may use keys that are no strings.
        return False
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _is_imported(name: str) -> bool:
    """Whether all code of a module has run; False for one that the program made by itself.

    An unloaded module of LazyLoader gets a loader that runs the hooks: reading its attributes here
    would load it.
    """
    module = sys.modules.get(name)
    try:
        spec = object.__getattribute__(module, "__spec__")
    except AttributeError:
        return False
    if spec is None or name in _running or getattr(spec, "_initializing", False):
        return False
    if not _is_lazy(module):
        return True
    if not isinstance(spec.loader, _Loader):
        spec.loader = _Loader(spec.loader)
    return False


def _is_lazy(module: object) -> bool:
    """Whether importlib's LazyLoader made the module and nothing has used it yet."""
    kind = getattr(sys.modules.get("importlib.util"), "_LazyModule", None)
    return kind is not None and type(module) is kind


def _run_all(name: str) -> None:
    """Run the hooks of a module, each in the one thread that takes it from the list."""
    while hooks := _hooks.pop(name, []):  # again, as others may have come while these ran
        while hooks:
            try:
                hook = hooks.pop(0)
            except IndexError:
                break
            try:
                _run(hook)
            except BaseException:  # of a signal handler: the next import goes on
                _hooks.setdefault(name, []).extend([hook, *hooks])
                raise


def _run(hook: Callable[[], None]) -> None:
    try:
        hook()
    # Border: a failing hook would make the import of the user's library fail.
    except Exception as error:
        _count(error)


def _count(error: Exception) -> None:
    try:
        from trims_shim import diagnostics
    except ImportError:
        _warn_of_removal(error)
    else:
        diagnostics.fallback("import_hook", error, what="patching")


def _warn_of_removal(error: Exception) -> None:
    """Say once that the package was removed or replaced while the program ran."""
    if _told:
        return
    import logging

    _told.append(error)
    logging.getLogger("trims_shim").warning(
        "trims_shim stays inactive: it was removed or replaced under this program: %s", error
    )


class _Finder:
    """The finder at the head of ``sys.meta_path``; see the module docstring."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        # Hooks import, which could wait for ever here, as this thread has the lock of all imports:
        # also those of modules that a finder behind this one imports.
        if name in self._searching or not (name in _hooks or (not self._searching and _overdue())):
            return None
        try:
            self._searching.add(name)
            spec = self._ask_others(name, path, target)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec

    def _ask_others(self, name: str, *where: Any) -> ModuleSpec | None:
        """Return what the finders behind this one find: those before it have found nothing."""
        finders = iter(list(sys.meta_path))
        if self in finders:  # which leaves those behind it
            for finder in finders:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(name, *where)
                if spec is not None:
                    return spec
        return None


class _Loader:
    """Runs the real loader, then the hooks; removes itself from the module it loads."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # A copy is asked for more before it has one.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # Not the loader of another tool, which has wrapped this one.
        spec = getattr(module, "__spec__", None)  # A loader may make objects of any kind.
        for home, attribute in ((module, "__loader__"), (spec, "loader")):
            if getattr(home, attribute, None) is self:
                setattr(home, attribute, self._loader)
        name = getattr(module, "__name__", "")
        _running.add(name)
        try:
            self._loader.exec_module(module)
        finally:
            _running.discard(name)
        _run_all(name)
        run_overdue()
