"""Hooks run once, right after their module's own code, and never disturb the import."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from harness import PATIENCE_S

from trims_shim import diagnostics, patches
from trims_shim.patches import importing
from trims_shim.patches.importing import call_when_imported

MakeModule = Callable[[str, str], str]
Overdue = Callable[[Callable[[], None]], None]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModule]:
    """Write an importable module; its name. All is as before at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importing, "_hooks", {})
    modules, finders = set(sys.modules), list(sys.meta_path)

    def make(name: str, source: str) -> str:
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != tmp_path:
            (path.parent / "__init__.py").touch()
        path.with_suffix(".py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield make
    for name in set(sys.modules) - modules:
        if name.startswith("waited_"):
            del sys.modules[name]
    sys.meta_path[:] = finders


def test_a_module_that_is_imported_already() -> None:
    calls: list[int] = []
    call_when_imported("sys", lambda: calls.append(1))
    assert calls == [1]


def test_after_the_modules_own_code(module: MakeModule) -> None:
    name = module("waited_a", "value = 5")
    seen: list[Any] = []
    call_when_imported(name, lambda: seen.append(sys.modules[name].value))
    assert seen == []
    importlib.import_module(name)
    assert seen == [5]


def test_once_and_in_order(module: MakeModule) -> None:
    name = module("waited_b", "")
    seen: list[int] = []
    call_when_imported(name, lambda: seen.append(1))
    call_when_imported(name, lambda: seen.append(2))
    importlib.reload(importlib.import_module(name))
    del sys.modules[name]
    importlib.import_module(name)
    assert seen == [1, 2]
    call_when_imported(name, lambda: seen.append(3))
    assert seen == [1, 2, 3]


def test_a_submodule(module: MakeModule) -> None:
    name = module("waited_c.inner", "value = 1")
    seen: list[str] = []
    call_when_imported(name, lambda: seen.append(name))
    importlib.import_module("waited_c")
    assert seen == []
    importlib.import_module(name)
    assert seen == [name]


def test_the_module_looks_untouched(module: MakeModule) -> None:
    name = module("waited_d", "loader_seen_inside = __spec__.loader")
    call_when_imported(name, lambda: None)
    waited = importlib.import_module(name)
    other = importlib.import_module(module("waited_e", ""))
    assert type(waited.__loader__) is type(other.__loader__)
    assert waited.__spec__.loader is waited.__loader__
    assert waited.loader_seen_inside is waited.__loader__


def test_a_loader_of_another_tool_that_wraps_ours_stays(module: MakeModule) -> None:
    name = module("waited_t", "loader_seen_inside = __spec__.loader")
    seen: list[int] = []
    call_when_imported(name, lambda: seen.append(1))
    spec = importlib.util.find_spec(name)
    assert spec is not None
    inner = spec.loader

    class Loader:
        def create_module(self, spec: object) -> None:
            return None

        def exec_module(self, module: ModuleType) -> None:
            inner.exec_module(module)  # type: ignore[union-attr]

    spec.loader = Loader()  # type: ignore[assignment]
    waited = importlib.util.module_from_spec(spec)
    sys.modules[name] = waited
    spec.loader.exec_module(waited)  # type: ignore[union-attr]
    assert waited.loader_seen_inside is waited.__loader__ is waited.__spec__.loader is spec.loader
    assert type(spec.loader) is Loader
    assert seen == [1]


def test_an_import_that_fails_fails_and_may_be_tried_again(module: MakeModule) -> None:
    name = module("waited_f", "raise ValueError('its own')")
    seen: list[int] = []
    call_when_imported(name, lambda: seen.append(1))
    with pytest.raises(ValueError, match="its own"):
        importlib.import_module(name)
    assert seen == []
    module(name, "fixed = True  # and of another length")
    importlib.import_module(name)
    assert seen == [1]


def test_a_hook_that_fails_is_counted(module: MakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(diagnostics, "fallback", lambda *args, **_: reported.append(args))
    name = module("waited_g", "value = 1")
    seen: list[int] = []

    def fail() -> None:
        raise RuntimeError("ours")

    call_when_imported(name, fail)
    call_when_imported(name, lambda: seen.append(1))
    assert importlib.import_module(name).value == 1
    assert seen == [1]
    ((reason, error),) = reported
    assert (reason, str(error)) == ("import_hook", "ours")


def test_hooks_that_a_signal_handler_ends_run_when_the_import_is_tried_again(
    module: MakeModule,
) -> None:
    """Found: after Ctrl-C during an import that was tried again, its library was not patched."""
    name = module("waited_interrupted", "")
    seen: list[str] = []

    def interrupted() -> None:
        seen.append("first")
        if len(seen) == 1:
            raise KeyboardInterrupt

    call_when_imported(name, interrupted)
    call_when_imported(name, lambda: seen.append("second"))
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(name)
    importlib.import_module(name)
    assert seen == ["first", "first", "second"]
    importlib.reload(sys.modules[name])
    assert len(seen) == 3


def test_a_module_that_does_not_exist(module: MakeModule) -> None:
    call_when_imported("waited_nowhere", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="waited_nowhere"):
        importlib.import_module("waited_nowhere")
    assert importlib.util.find_spec("waited_nowhere") is None


def test_looking_without_importing(module: MakeModule) -> None:
    """Libraries ask find_spec whether another one is installed; that is no import."""
    name = module("waited_h", "")
    seen: list[int] = []
    call_when_imported(name, lambda: seen.append(1))
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.endswith("waited_h.py")
    assert spec.loader is not None
    assert spec.loader.get_source(name) == ""  # type: ignore[attr-defined]
    assert copy.deepcopy(spec).origin == spec.origin
    assert seen == []
    importlib.import_module(name)
    assert seen == [1]


def test_looking_elsewhere(module: MakeModule, tmp_path: Path) -> None:
    """A program that asks the finders itself names the folders."""
    name = module("waited_o.inner", "")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "inner.py").touch()
    call_when_imported(name, lambda: None)
    found = sys.meta_path[0].find_spec(name, [str(tmp_path / "elsewhere")])
    assert found is not None
    assert found.origin == str(tmp_path / "elsewhere" / "inner.py")


def test_reloading_what_a_program_put_in_a_modules_place(module: MakeModule) -> None:
    name = module("waited_p", "value = 7")
    seen: list[Any] = []
    call_when_imported(name, lambda: seen.append(sys.modules[name].value))
    sys.modules[name] = ModuleType(name)
    importlib.reload(sys.modules[name])
    assert seen == [7]


def test_a_hook_that_comes_in_the_middle_of_the_import(module: MakeModule) -> None:
    """As of a program that imports torch in one thread, and the shim in another."""
    source = (
        "from trims_shim.patches.importing import call_when_imported\n"
        "seen = []\ncall_when_imported(__name__, lambda: seen.append(value))\nvalue = 5\n"
    )
    waited = importlib.import_module(module("waited_early", source))
    assert waited.seen == []
    importlib.import_module(module("waited_next", ""))
    assert waited.seen == [5]


@pytest.fixture
def overdue(module: MakeModule) -> Overdue:
    """Register a hook in the middle of its module's import, which then ends."""

    def register(hook: Callable[[], None]) -> None:
        middle = ModuleType("waited_middle")
        vars(middle)["come"] = lambda: call_when_imported("waited_early", hook)
        sys.modules["waited_middle"] = middle
        importlib.import_module(
            module("waited_early", "import waited_middle\nwaited_middle.come()")
        )

    return register


def test_other_threads_import_while_an_overdue_hook_runs(
    module: MakeModule, overdue: Overdue
) -> None:
    module("waited_other", "")
    ended: list[bool] = []

    def import_elsewhere() -> None:
        other = threading.Thread(target=importlib.import_module, args=("waited_other",))
        other.start()
        other.join(PATIENCE_S)
        ended.append(not other.is_alive())

    overdue(import_elsewhere)
    importlib.import_module(module("waited_next", ""))
    assert ended == [True]


def test_overdue_hooks_do_not_run_while_a_finder_imports(
    module: MakeModule, overdue: Overdue
) -> None:
    """As setuptools' for distutils: the interpreter's lock of all imports is held."""
    helper = module("waited_helper", "")
    is_searching: list[bool] = []
    ended: list[bool] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "waited_next":
                is_searching.append(True)
                importlib.import_module(helper)
                is_searching.clear()

    overdue(lambda: ended.append(not is_searching))
    sys.meta_path.insert(1, Finder())  # type: ignore[arg-type]
    importlib.import_module(module("waited_next", ""))
    assert ended == [True]


def test_overdue_hooks_do_not_wait_for_a_thread_that_patches(
    module: MakeModule,
    overdue: Overdue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be waiting for the very import after which they would run."""
    monkeypatch.setattr(importing, "lock", threading.RLock())  # interrupts in tests leave it held
    seen: list[int] = []
    overdue(lambda: seen.append(1))
    has_lock, may_end = threading.Event(), threading.Event()

    def patch() -> None:
        with importing.lock:
            has_lock.set()
            may_end.wait(60)

    patching = threading.Thread(target=patch)
    patching.start()
    has_lock.wait(60)
    importlib.import_module(module("waited_next", ""))
    assert seen == []
    may_end.set()
    patching.join()
    importlib.import_module(module("waited_last", ""))
    assert seen == [1]


def test_who_patches_runs_overdue_hooks(overdue: Overdue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_is_enabled", patches._is_enabled)
    seen: list[int] = []
    overdue(lambda: seen.append(1))
    patches.enable(())
    assert seen == [1]


def test_overdue_hooks_wait_until_modules_of_ours_are_whole(
    module: MakeModule,
    overdue: Overdue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    overdue(lambda: seen.append(1))
    half = ModuleType("trims_shim.half")
    half.__spec__ = importlib.machinery.ModuleSpec(half.__name__, None)
    vars(half.__spec__)["_initializing"] = True
    monkeypatch.setitem(sys.modules, half.__name__, half)
    importlib.import_module(module("waited_next", ""))
    assert seen == []
    vars(half.__spec__)["_initializing"] = False
    importlib.import_module(module("waited_last", ""))
    assert seen == [1]


def test_an_interrupt_as_overdue_hooks_begin_leaves_the_lock_free(
    overdue: Overdue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads would wait for ever where they import a library that is patched."""

    class Interrupted:
        """An interrupt comes right after the lock has been taken."""

        def __init__(self) -> None:
            self._lock = threading.RLock()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._lock, name)

        def acquire(self, *, blocking: bool) -> bool:
            self._lock.acquire(blocking=blocking)
            raise KeyboardInterrupt

    overdue(lambda: None)
    monkeypatch.setattr(importing, "lock", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        importing.run_overdue()
    assert not importing.lock._is_owned()  # type: ignore[attr-defined]


def test_an_interrupt_as_a_search_begins_is_over_with_it(module: MakeModule) -> None:
    """The module was searched for ever: its hooks, and overdue ones, waited."""

    class Interrupted(set[str]):
        def add(self, name: str) -> None:
            super().add(name)
            if not interrupts:
                interrupts.append(name)
                raise KeyboardInterrupt

    name = module("waited_searched", "")
    interrupts: list[str] = []
    seen: list[int] = []
    finder = importing._Finder()
    finder._searching = Interrupted()
    others = [each for each in sys.meta_path if not isinstance(each, importing._Finder)]
    sys.meta_path[:] = [finder, *others]
    call_when_imported(name, lambda: seen.append(1))
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(name)
    importlib.import_module(name)
    assert (interrupts, seen) == ([name], [1])


def test_modules_that_are_not_under_a_name(
    module: MakeModule,
    overdue: Overdue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    overdue(lambda: seen.append(1))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 5, ModuleType("five"))  # type: ignore[arg-type]
        importlib.import_module(module("waited_next", ""))
    assert seen == [1]


def _finder(found: str, loader: Any) -> Any:
    """Of one module, with a loader that is no :class:`importlib.abc.Loader`."""

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: Any) -> Any:
            return importlib.machinery.ModuleSpec(name, loader) if name == found else None

    return Finder()


def test_what_is_no_module_is_imported_while_hooks_are_overdue(
    overdue: Overdue,
) -> None:
    """As JPype's packages: their loader makes objects of its own."""

    class Bare:
        __slots__ = ("value",)

    class Loader:
        def create_module(self, spec: object) -> Any:
            return Bare()

        def exec_module(self, module: Any) -> None:
            module.value = 3

    seen: list[int] = []
    overdue(lambda: seen.append(1))
    sys.meta_path.append(_finder("waited_bare", Loader()))
    assert importlib.import_module("waited_bare").value == 3
    assert seen == [1]


@pytest.mark.skipif(sys.version_info >= (3, 15), reason="Python calls no load_module any more")
@pytest.mark.filterwarnings("ignore:.*load_module:ImportWarning")
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
def test_a_loader_of_the_old_kind(module: MakeModule) -> None:
    """It has load_module, and no exec_module. The hook runs with the next import."""

    class Loader:
        @staticmethod
        def load_module(name: str) -> ModuleType:
            return sys.modules.setdefault(name, ModuleType(name, "old"))

    seen: list[int] = []
    call_when_imported("waited_old", lambda: seen.append(1))
    sys.meta_path.append(_finder("waited_old", Loader()))
    assert importlib.import_module("waited_old").__doc__ == "old"
    importlib.import_module(module("waited_next", ""))
    assert seen == [1]


def test_a_lazy_loader(module: MakeModule) -> None:
    name = module("waited_i", "value = 3")
    seen: list[int] = []
    call_when_imported(name, lambda: seen.append(1))
    lazy = make_lazy(name)
    assert seen == []
    assert lazy.value == 3
    assert seen == [1]


def make_lazy(name: str) -> ModuleType:
    """As lazy_loader and others make a module that is imported with its first use."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    sys.modules[name] = lazy
    spec.loader.exec_module(lazy)
    return lazy


@pytest.mark.parametrize("is_late", [False, True])
def test_a_lazy_module_stays_lazy(module: MakeModule, *, is_late: bool) -> None:
    other, inner = module("waited_k", ""), module("waited_l", "")
    name = module("waited_m", f"import sys\nsys.waited_m = 1\nimport {inner}\nvalue = 3")
    seen: list[int] = []

    def wait() -> None:
        call_when_imported(name, lambda: seen.append(sys.modules[name].value))

    if not is_late:
        wait()
    lazy = make_lazy(name)
    if is_late:
        wait()
    importlib.import_module(other)
    assert not hasattr(sys, "waited_m")
    assert lazy.value == 3
    assert seen == [3]
    del sys.waited_m  # type: ignore[attr-defined]


def test_what_a_test_puts_in_a_modules_place(module: MakeModule) -> None:
    name = module("waited_n", "")
    seen: list[Any] = []
    for stub in (ModuleType(name), MagicMock()):
        sys.modules[name] = stub
        call_when_imported(name, lambda: seen.append(sys.modules[name]))
        importlib.import_module(module(f"waited_n{type(stub).__name__}", ""))
        assert seen == []
    del sys.modules[name]
    real = importlib.import_module(name)
    assert seen == [real, real]


def test_one_finder_however_many_hooks(module: MakeModule) -> None:
    for number in range(3):
        call_when_imported(module(f"waited_j{number}", ""), lambda: None)
    assert sum(isinstance(each, importing._Finder) for each in sys.meta_path) == 1


def test_patches_that_are_turned_on_again_wait_once(
    module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trims_shim import patches

    names = tuple(module(f"waited_{letter}", "") for letter in "rs")
    monkeypatch.setattr(patches, "PATCH_FILES", (("file", ("library",), names, False),))
    monkeypatch.setattr(patches, "_requested", set())
    monkeypatch.setattr(patches, "_is_enabled", False)
    for _ in range(3):
        patches.enable(("library",))
        patches.disable()
    assert [len(hooks) for hooks in importing._hooks.values()] == [1]


def test_hooks_that_wait_for_several_modules(module: MakeModule) -> None:
    from trims_shim import patches

    names = tuple(module(f"waited_{letter}", "") for letter in "abc")
    called: list[int] = []
    patches._when_imported(names, lambda: called.append(1))()
    for name in ("waited_c", "waited_a"):
        importlib.import_module(name)
        assert called == []
    importlib.import_module("waited_b")
    assert called == [1]


def test_hooks_that_come_while_others_run_in_another_thread(module: MakeModule) -> None:
    name = module("waited_p", "")
    seen: list[int] = []

    def wait_for_another() -> None:
        later = (name, lambda: seen.append(1))
        registering = threading.Thread(target=call_when_imported, args=later)
        registering.start()
        registering.join()

    call_when_imported(name, wait_for_another)
    importlib.import_module(name)
    assert seen == [1]
    assert importing._hooks == {}


@pytest.mark.parametrize("is_before", [False, True])
def test_a_hook_that_comes_as_the_import_ends_in_another_thread(
    module: MakeModule, monkeypatch: pytest.MonkeyPatch, *, is_before: bool
) -> None:
    name = module("waited_q", "")
    seen: list[int] = []

    class Hooks(dict[str, list[Callable[[], None]]]):
        def setdefault(self, *arguments: Any) -> Any:
            if is_before:
                importlib.import_module(name)
            found = super().setdefault(*arguments)
            importlib.import_module(name)  # with the hooks there are so far
            return found

    monkeypatch.setattr(importing, "_hooks", Hooks())
    sys.meta_path.insert(0, importing._Finder())
    call_when_imported(name, lambda: seen.append(1))
    assert seen == [1]
    assert importing._hooks == {}
