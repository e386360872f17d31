"""Applying a patch point costs the user nothing when it fails, and undoing takes only ours back."""

from __future__ import annotations

import functools
import importlib.machinery
import itertools
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import passes_in_child

from trims_shim import patches
from trims_shim.errors import PatchError
from trims_shim.patches import importing, points
from trims_shim.patches.importing import call_when_imported
from trims_shim.patches.points import PatchPoint, PatchState, apply, rebind, resolve, undo

SOURCE = """
number = 5
def load(x): return x * 10
class Base:
    def inherited(self): return "base"
class Loader(Base):
    def own(self): return "own"
    @staticmethod
    def static(x): return x
    @classmethod
    def make(cls): return cls.__name__
    @property
    def value(self): return 7
"""


@pytest.fixture
def library() -> Iterator[Any]:
    module = types.ModuleType("fake_library")
    exec(SOURCE, vars(module))
    sys.modules["fake_library"] = module
    yield module
    del sys.modules["fake_library"]


def wrapped(original: Any) -> Any:
    if isinstance(original, staticmethod):
        return staticmethod(wrapped(original.__func__))
    if isinstance(original, classmethod):
        return classmethod(wrapped(original.__func__))

    @functools.wraps(original)
    def replacement(*args: Any) -> Any:
        return ("ours", original(*args))

    return replacement


def point(
    target: str,
    probe: Callable[[], str | None] = lambda: None,
    wrap: Callable[[Any], Any] = wrapped,
    has_holders: bool = False,
) -> PatchPoint:
    return PatchPoint(f"fake_library:{target}", "1+", wrap, probe, has_holders)


class TestResolve:
    def test_a_function(self, library: Any) -> None:
        expected = (library, "load", library.load, False)
        assert resolve("fake_library:load") == expected

    def test_raw_entries_of_a_class(self, library: Any) -> None:
        for name, kind in (("static", staticmethod), ("make", classmethod), ("value", property)):
            _, _, original, inherited = resolve(f"fake_library:Loader.{name}")
            assert type(original) is kind
            assert not inherited

    def test_along_the_mro(self, library: Any) -> None:
        parent, name, original, inherited = resolve("fake_library:Loader.inherited")
        assert (parent, name, inherited) == (library.Loader, "inherited", True)
        assert original is library.Base.inherited

    @pytest.mark.parametrize(
        "target",
        [
            "not_imported:load",
            "fake_library:missing",
            "fake_library:Missing.load",
            "fake_library:Loader.missing",
            "fake_library:load.x.y",
            "fake_library:number.real",
            "fake_library:number.x.y",
            "fake_library:",
        ],
    )
    def test_what_is_not_there(self, library: Any, target: str) -> None:
        with pytest.raises(PatchError, match=target.partition(":")[0]):
            resolve(target)

    def test_lazy_modules_are_not_woken(self) -> None:
        class Lazy(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                raise AssertionError("woken")

        sys.modules["lazy_library"] = Lazy("lazy_library")
        try:
            with pytest.raises(PatchError):
                resolve("lazy_library:load")
        finally:
            del sys.modules["lazy_library"]


class TestApply:
    @pytest.mark.parametrize(
        ("target", "call", "expected"),
        [
            ("load", lambda lib: lib.load(3), 30),
            ("Loader.own", lambda lib: lib.Loader().own(), "own"),
            ("Loader.inherited", lambda lib: lib.Loader().inherited(), "base"),
            ("Loader.static", lambda lib: lib.Loader.static(4), 4),
            ("Loader.make", lambda lib: lib.Loader.make(), "Loader"),
        ],
    )
    def test_and_undo(
        self, library: Any, target: str, call: Callable[[Any], Any], expected: Any
    ) -> None:
        before = dict(vars(library)), dict(vars(library.Loader))
        patch = apply(point(target))
        assert (patch.state, patch.reason) == (PatchState.APPLIED, "")
        assert call(library) == ("ours", expected)
        undo(patch)
        assert patch.state is PatchState.UNDONE
        assert call(library) == expected
        assert (dict(vars(library)), dict(vars(library.Loader))) == before

    def test_a_base_class_stays_as_it_is(self, library: Any) -> None:
        apply(point("Loader.inherited"))
        assert library.Base().inherited() == "base"

    def test_no_target(self, library: Any) -> None:
        patch = apply(point("a"))
        assert patch.state is PatchState.SKIPPED
        assert patch.reason == "fake_library:a: a not found"

    def test_a_probe_that_says_why_not(self, library: Any) -> None:
        original = library.load
        patch = apply(point("load", probe=lambda: "too old"))
        assert (patch.state, patch.reason) == (PatchState.SKIPPED, "too old")
        assert library.load is original

    @pytest.mark.parametrize("part", ["probe", "wrap"])
    def test_what_fails_is_skipped(self, library: Any, part: str) -> None:
        def fail(*_: Any) -> Any:
            raise AttributeError("unheard of")

        original = library.load
        patch = apply(point("load", **{part: fail}))
        assert (patch.state, patch.reason) == (PatchState.SKIPPED, "AttributeError: unheard of")
        assert library.load is original
        undo(patch)
        assert library.load is original

    def test_what_a_signal_handler_raises_passes(self, library: Any) -> None:
        def handle(*_: Any) -> None:
            raise AttributeError("the time is up")

        original = library.load
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            with pytest.raises(AttributeError, match="the time is up"):
                apply(point("load", probe=lambda: signal.raise_signal(signal.SIGUSR1)))
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert library.load is original

    def test_what_cannot_be_set_is_skipped(self) -> None:
        patch = apply(PatchPoint("builtins:int.bit_length", "", wrapped))
        assert patch.state is PatchState.SKIPPED
        assert "TypeError" in patch.reason


class TestInterrupts:
    """An import that Ctrl-C ends, wherever it is, and that is tried again, patches once."""

    @pytest.fixture
    def patch_file(self, library: Any, monkeypatch: pytest.MonkeyPatch) -> str:
        file = types.ModuleType("trims_shim.patches.fake_file")
        both = (point("load"), point("Loader.own"))
        monkeypatch.setattr(file, "POINTS", both, raising=False)
        monkeypatch.setitem(sys.modules, file.__name__, file)
        library.__spec__ = importlib.machinery.ModuleSpec("fake_library", None)
        line = ("fake_file", ("fake",), ("fake_library",), False)
        monkeypatch.setattr(patches, "PATCH_FILES", (line,))
        for name, fresh in (("_is_enabled", False), ("_applied", {}), ("_requested", set())):
            monkeypatch.setattr(patches, name, fresh)
        monkeypatch.setattr(patches, "_preload", lambda: None)
        return "fake_file"

    def test_at_every_instruction(self, library: Any, patch_file: str) -> None:
        """Found: between the change of the library and the note of it, which then came twice."""
        for moment in itertools.count(1):
            if not interrupted_after(moment, lambda: patches.enable(("fake",))):
                break
            patches.enable(("fake",))
            assert library.load(3) == ("ours", 30), moment
            assert library.Loader().own() == ("ours", "own"), moment
            patches.disable()
            assert (library.load(3), library.Loader().own()) == (30, "own"), moment
        assert moment > 100


def interrupted_after(moment: int, call: Callable[[], None]) -> bool:
    """Whether a call was ended by KeyboardInterrupt, before its ``moment``-th instruction."""
    traced = {function.__code__ for function in (patches.enable, patches._apply, apply)}
    seen = itertools.count(1)

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in traced:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(seen) == moment:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class TestUndo:
    def test_only_what_is_applied(self, library: Any) -> None:
        patch = apply(point("load", probe=lambda: "too old"))
        undo(patch)
        assert (patch.state, patch.reason) == (PatchState.SKIPPED, "too old")

    def test_twice(self, library: Any) -> None:
        original = library.load
        patch = apply(point("load"))
        undo(patch)
        library.load = other = lambda x: x
        undo(patch)
        assert library.load is other
        assert other is not original

    def test_what_another_tool_wrapped_later_stays(self, library: Any) -> None:
        patch = apply(point("load"))
        theirs = wrapped(library.load)
        library.load = theirs
        undo(patch)
        assert library.load is theirs
        assert "another tool" in patch.reason

    def test_ours_that_another_tool_puts_back_later_is_not_wrapped_again(
        self, library: Any
    ) -> None:
        original = library.load
        patch = apply(point("load"))
        library.load = wrapped(patch.replacement)
        undo(patch)
        library.load = patch.replacement
        again = apply(point("load"))
        assert library.load.__wrapped__ is original
        undo(again)
        assert library.load is original

    def test_what_another_tool_put_back_stays(self, library: Any) -> None:
        original = library.load
        patch = apply(point("load"))
        library.load = original
        undo(patch)
        assert library.load is original


class TestHolders:
    @pytest.fixture
    def holder(self, library: Any) -> Iterator[Any]:
        module = types.ModuleType("holder")
        module.load = module.alias = library.load  # type: ignore[attr-defined]
        module.other = library.Loader  # type: ignore[attr-defined]
        sys.modules["holder"] = module
        yield module
        del sys.modules["holder"]

    def test_names_that_were_imported_before(self, library: Any, holder: Any) -> None:
        original = library.load
        patch = apply(point("load", has_holders=True))
        assert holder.load is holder.alias is library.load is patch.replacement
        holder.alias = "reused"
        undo(patch)
        assert holder.load is library.load is original
        assert holder.alias == "reused"

    def test_at_the_end_of_the_import_nobody_is_looked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It takes longer than the rest of the patches, and nobody can have the name yet."""
        (tmp_path / "fresh_library.py").write_text("def load(x): return x * 10")
        monkeypatch.syspath_prepend(tmp_path)
        looked: list[str] = []
        monkeypatch.setattr(points, "rebind", lambda *_, home: looked.append(home))
        wanted = PatchPoint("fresh_library:load", "1+", wrapped, has_holders=True)
        call_when_imported("fresh_library", lambda: looked.append(apply(wanted).state.value))
        from fresh_library import load

        assert load(1) == ("ours", 10)
        assert looked == ["applied"]
        apply(wanted)
        assert looked == ["applied", "fresh_library"]
        del sys.modules["fresh_library"]

    def test_at_the_end_of_a_packages_import_older_modules_are_not_looked_at(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any
    ) -> None:
        """In a forked process, a look at all modules copies them."""
        package = tmp_path / "fresh_package"
        package.mkdir()
        (package / "inner.py").write_text("def load(x): return x * 10")
        (package / "__init__.py").write_text(
            f"import {holder.__name__} as holder; from .inner import load; holder.load = load\n"
            "import fresh_plugin"
        )
        (tmp_path / "fresh_plugin.py").write_text("from fresh_package.inner import load")
        monkeypatch.syspath_prepend(tmp_path)
        wanted = PatchPoint("fresh_package.inner:load", "1+", wrapped, has_holders=True)
        call_when_imported("fresh_package", lambda: apply(wanted))
        from fresh_package import load

        assert load(1) == ("ours", 10)
        assert sys.modules["fresh_plugin"].load(1) == ("ours", 10), "the import brought it"
        assert holder.load(1) == 10
        for name in ("fresh_plugin", "fresh_package.inner", "fresh_package"):
            del sys.modules[name]

    def test_not_without_being_asked(self, library: Any, holder: Any) -> None:
        original = library.load
        apply(point("load"))
        assert holder.load is original

    def test_all_names_but_those_of_the_home(self, library: Any, holder: Any) -> None:
        rebind(library.load, "new", home="fake_library")
        assert holder.load == holder.alias == "new"
        assert library.load(1) == 10

    def test_lazy_modules_are_left_alone(self, library: Any) -> None:
        class Lazy(types.ModuleType):
            pass

        lazy = Lazy("lazy_holder")
        lazy.load = library.load  # type: ignore[attr-defined]
        sys.modules["lazy_holder"] = lazy
        try:
            rebind(library.load, "new", home="fake_library")
        finally:
            del sys.modules["lazy_holder"]
        assert vars(lazy)["load"] is library.load

    def test_entries_that_are_no_modules(self, library: Any) -> None:
        sys.modules["not_a_module"] = None  # type: ignore[assignment]
        try:
            rebind(library.load, "new", home="fake_library")
        finally:
            del sys.modules["not_a_module"]


def test_what_a_module_has_written_itself() -> None:
    @functools.wraps(points.rebind)
    def wrapper() -> None:
        raise AssertionError

    for each in (points.AppliedPatch, points.rebind, functools.partial(points.rebind, home="x")):
        assert points.is_own(each, points.__name__)
    for each in (Path, wrapper, functools.partial(wrapper), 1):
        assert not points.is_own(each, points.__name__)


def test_a_child_can_patch_whatever_its_parent_was_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a fork while another thread patches, for longer than forks wait for it."""
    monkeypatch.setattr(importing, "lock", threading.RLock())  # interrupts in tests leave it held
    begun, done = threading.Event(), threading.Event()

    def hold() -> None:
        with importing.lock:
            begun.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(60)

    def switch() -> None:
        patches.disable()
        patches.enable(())
        assert patches.active()

    try:
        assert passes_in_child(switch)
    finally:
        done.set()
        thread.join()
