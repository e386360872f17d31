"""Counters add up, and a cause is reported once."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trims_shim import diagnostics


@pytest.fixture(autouse=True)
def _from_zero(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_by_thread", "_reported"):
        monkeypatch.setattr(diagnostics, name, type(getattr(diagnostics, name))())
    monkeypatch.setattr(diagnostics, "_warned", set())
    monkeypatch.setattr(diagnostics, "_paid_until_s", 0.0)
    return


def test_events_are_counted_by_reason() -> None:
    diagnostics.count("open", "hit")
    diagnostics.count("open", "local")
    diagnostics.count("open", "miss")
    diagnostics.count("open", "joined")
    diagnostics.count("served", "torch_zip")
    diagnostics.count("served", "safetensors")
    diagnostics.count("elided", "load_state_dict")
    diagnostics.count("bytes_shared", amount=5)
    diagnostics.count("bytes_shared", amount=6)
    stats = diagnostics.stats()
    assert (stats.served, stats.hits, stats.misses, stats.joined) == (2, 2, 1, 1)
    assert (stats.elided_copies, stats.bytes_shared) == (1, 11)
    assert stats.events["open:joined"] == 1
    assert stats.fallbacks == {}


def test_a_snapshot_does_not_change() -> None:
    stats = diagnostics.stats()
    diagnostics.count("served", "x")
    assert stats == diagnostics.Stats(
        served=0,
        hits=0,
        misses=0,
        joined=0,
        elided_copies=0,
        bytes_shared=0,
        fallbacks={},
        events={},
    )


def test_a_warning_names_the_file_once(caplog: pytest.LogCaptureFixture) -> None:
    diagnostics.fallback("no_space", ValueError("/model: full"), what="/model")
    assert caplog.messages[0].startswith(
        "/model: the framework's own loader is used (no_space): full."
    )


def test_an_unexpected_cause_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trims_shim"):
        for _ in range(3):
            diagnostics.fallback("no_space", ValueError("full"), what="/model")
        diagnostics.fallback("wire", ValueError())
    assert [each.levelname for each in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages[1].startswith(
        "load: the framework's own loader is used (wire): ValueError."
    )
    text = caplog.records[0].getMessage()
    for part in ("/model", "no_space", "full", "trims info"):
        assert part in text
    assert diagnostics.stats().fallbacks == {"no_space": 3, "wire": 1}


class _Failing(logging.Handler):
    """As one that lets a test fail for each warning."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage())


@pytest.mark.parametrize("reason", ["broken", "not_a_model"])
def test_the_name_of_a_file_does_not_steer_the_terminal(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "/models/\x1b[2J\nWARNING all is well.pt"
    with caplog.at_level(logging.DEBUG, "trims_shim"):
        diagnostics.fallback(reason, ValueError(f"{name}: no model"), what=name)
        diagnostics.log(logging.INFO, "%s: %d, %s", name, 5, OSError(2, "gone", name))
    assert len(caplog.messages) == 2
    assert all(each.isprintable() for each in caplog.messages)


@pytest.mark.parametrize("reason", ["no_space", "small_file"])
def test_a_logging_handler_that_raises_fails_no_load(reason: str) -> None:
    logger = logging.getLogger("trims_shim")
    handler, level = _Failing(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        diagnostics.fallback(reason, ValueError("full"), what="/model")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert diagnostics.stats().fallbacks == {reason: 1}


@pytest.mark.parametrize("reason", sorted(diagnostics.EXPECTED_REASONS))
def test_expected_reasons_are_counted_and_never_warned_about(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trims_shim"):
        diagnostics.fallback(reason, ValueError("x"))
    assert caplog.records == []
    assert diagnostics.stats().fallbacks == {reason: 1}


def test_expected_reasons_are_explained_for_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "trims_shim"):
        diagnostics.fallback("daemon_unavailable", ValueError("no room"), what="/model")
        diagnostics.fallback("not_a_file", what="/model")
    assert [each.getMessage().partition(" is used ")[2] for each in caplog.records] == [
        "(daemon_unavailable): no room",
        "(not_a_file)",
    ]


def test_counters_are_reported_once() -> None:
    diagnostics.count("served", "x", amount=2)
    assert diagnostics.take_unreported() == {"served:x": 2}
    assert diagnostics.take_unreported() == {}
    diagnostics.count("served", "x")
    diagnostics.count("open", "hit")
    assert diagnostics.take_unreported() == {"served:x": 1, "open:hit": 1}
    assert diagnostics.stats().served == 3


def test_what_the_cache_did_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, int]] = []
    monkeypatch.setattr(diagnostics, "reporter", lambda: told.append(diagnostics.take_unreported()))
    diagnostics.take_unreported()
    diagnostics.count("open", "hit")
    diagnostics.fallback("small_file")
    assert told == []
    diagnostics.count("served", "torch_zip")
    assert told == [{"open:hit": 1, "fallback:small_file": 1, "served:torch_zip": 1}]
    diagnostics.count("elided", "load_state_dict", 3)
    diagnostics.fallback("no_space_of_this_test", OSError())
    assert told[1:] == [{"elided:load_state_dict": 3}, {"fallback:no_space_of_this_test": 1}]


def test_of_many_loads_the_first_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    now_s = 100.0
    monkeypatch.setattr(diagnostics, "reporter", lambda: told.append(1))
    monkeypatch.setattr(diagnostics, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    for _ in range(1000):
        diagnostics.count("served", "torch_zip")
    assert len(told) == 16
    now_s += 2
    for _ in range(1000):
        diagnostics.count("served", "torch_zip")
    assert len(told) == 18


def test_a_forked_child_reports_at_once_whatever_its_parent_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    monkeypatch.setattr(diagnostics, "reporter", lambda: told.append(1))
    for _ in range(1000):
        diagnostics.count("served", "torch_zip")
    told.clear()
    diagnostics.reset_after_fork()
    diagnostics.count("served", "torch_zip")
    assert told == [1]


def test_a_report_that_fails_fails_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def report() -> None:
        raise MemoryError

    monkeypatch.setattr(diagnostics, "reporter", report)
    diagnostics.count("served", "torch_zip")


def test_nothing_is_reported_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a signal handler loads while the counters are taken."""
    diagnostics.take_unreported()
    nested: list[dict[str, int]] = []

    class Reported(Counter[str]):
        def update(self, *counts: Any, **more: int) -> None:
            nested.append(diagnostics.take_unreported())
            super().update(*counts, **more)

    monkeypatch.setattr(diagnostics, "_reported", Reported(diagnostics._reported))
    nested.clear()
    diagnostics.count("open", "hit")
    assert diagnostics.take_unreported() == {"open:hit": 1}
    assert nested == [{}]
    assert diagnostics.take_unreported() == {}


def test_a_forked_child_starts_from_zero() -> None:
    diagnostics.count("served", "x")
    diagnostics.take_unreported()
    diagnostics.count("served", "x")
    diagnostics.reset_after_fork()
    assert diagnostics.take_unreported() == {}
    assert diagnostics.stats().served == 0
    diagnostics.count("served", "x")
    assert diagnostics.take_unreported() == {"served:x": 1}


def test_a_warning_is_seen_without_logging_set_up(capfd: pytest.CaptureFixture[str]) -> None:
    """Python's last resort prints it; a handler of our own would decide for the program."""
    code = "from trims_shim import diagnostics as d; d.fallback('wire', ValueError('?'), what='/m')"
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
    written = capfd.readouterr()
    assert written.out == ""
    assert written.err.startswith("/m: the framework's own loader is used (wire): ?.")
    assert written.err.count("\n") == 1


class _Blocked(RuntimeError):
    """As pytest-socket raises it, whoever wants to have a socket."""


def test_an_error_that_something_raises_is_none_of_another_thread() -> None:
    """The load falls back: the program itself would not have had a socket."""

    def block() -> None:
        raise _Blocked

    with pytest.raises(_Blocked) as caught:
        block()
    assert diagnostics.signalled(caught.value) is None


def test_an_error_that_was_never_raised_is_none_of_another_thread() -> None:
    """As a cause that is told in no words."""
    with pytest.raises(ValueError, match="full") as caught:
        raise ValueError("full") from _Blocked()
    assert diagnostics.signalled(caught.value) is None


@pytest.mark.parametrize(("arguments", "is_thrown"), [("", True), ("'out of memory'", False)])
def test_an_error_with_arguments_is_that_of_a_library(arguments: str, is_thrown: bool) -> None:
    """One in C has no frame of its own: it seems to be raised where we called it."""
    here = {"__name__": "trims_shim.client.cache", "Late": type("Late", (Exception,), {})}
    with pytest.raises(here["Late"]) as caught:  # type: ignore[call-overload]
        exec(f"raise Late({arguments})", here)
    assert diagnostics.signalled(caught.value) is (caught.value if is_thrown else None)


@pytest.mark.parametrize(
    ("kind", "module", "is_thrown"),
    [
        ("Late", "trims_shim.client.pool", True),
        ("Late", "somebodys_library", False),
        ("Late", "concurrent.futures._base", False),  # set_exception(Late())
        ("TimeoutError", "trims_shim.client.pool", True),
        ("TimeoutError", "concurrent.futures._base", False),
        ("MemoryError", "trims_shim.client.pool", False),
    ],
)
def test_which_bare_errors_another_thread_may_have_thrown(
    kind: str, module: str, is_thrown: bool
) -> None:
    here = {"__name__": module, "Late": type("Late", (Exception,), {"__module__": "somebodys"})}
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(f"raise {kind}", here)
    assert diagnostics.signalled(caught.value) is (caught.value if is_thrown else None)


class _Late(Exception):
    """The time is up."""


def _handle(*_: Any) -> None:
    raise _Late


class _Handler:
    def __call__(self, *_: Any) -> None:
        raise _Late

    def handle(self, *_: Any) -> None:
        raise _Late


@pytest.mark.parametrize(
    "handler",
    [_handle, functools.partial(_handle, 1), _Handler().handle, _Handler()],
    ids=["function", "partial", "method", "object"],
)
def test_what_a_signal_handler_raises_is_the_programs(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(_Late) as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert diagnostics.signalled(caught.value) is caught.value
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_of_an_enum_is_none_of_a_signal_handler() -> None:
    """As the constants that stand for no handler are."""
    with pytest.raises(ValueError, match="77") as caught:
        signal.Handlers(77)
    assert diagnostics.signalled(caught.value) is None


def test_a_log_file_that_was_renamed_is_begun_anew(tmp_path: Path) -> None:
    """As logrotate renames it; lines went on into the old file, which is then compressed."""
    path, old = tmp_path / "log", tmp_path / "log.1"
    with contextlib.closing(diagnostics.LogFile(str(path))) as file:
        file.handle(_line("before"))
        path.rename(old)
        file.handle(_line("after"))
        file.handle(_line("later"))
        assert (old.read_text(), path.read_text()) == ("before\n", "after\nlater\n")
        path.unlink()
        file.handle(_line("deleted"))
        assert path.read_text() == "deleted\n"


def test_a_log_file_whose_name_is_out_of_reach_takes_more_lines(tmp_path: Path) -> None:
    """As in a chroot, or after rights were given up."""
    place, moved = tmp_path / "place", tmp_path / "moved"
    place.mkdir()
    with contextlib.closing(diagnostics.LogFile(str(place / "log"))) as file:
        file.handle(_line("before"))
        place.rename(moved)
        file.handle(_line("after"))
        assert (moved / "log").read_text() == "before\nafter\n"


def test_a_line_that_no_file_takes_keeps_its_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(diagnostics.LogFile(str(tmp_path / "missing" / "log"))) as file:
        file.setFormatter(logging.Formatter("trims: %(message)s"))
        file.handle(_line("before"))
    assert capsys.readouterr().err.startswith("trims: before (TRIMS_LOG_FILE: [Errno 2] ")


def _line(text: str) -> logging.LogRecord:
    return logging.LogRecord("trims_shim", logging.INFO, __file__, 1, text, None, None)
