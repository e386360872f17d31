"""What progress says is there, whatever the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from trims_shim.cli.progress import Progress


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What stderr is from now on, with 80 columns."""
    shown = io.StringIO()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_nothing_is_shown_of_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with Progress([], is_quiet=False):
        pass
    assert shown.getvalue() == ""


def test_of_the_bar_the_end_of_the_path_is_shown_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch)
    path = "/models/" + "x" * 60 + "/model.pt"
    with Progress([1 << 20], is_quiet=False) as progress:
        progress.begin(path)
        assert progress._bar is not None
        progress._bar.refresh()
        drawn = shown.getvalue()
        progress.end("loaded", error="", note="")
    assert f"…{path[-41:]} " in drawn
    assert shown.getvalue().endswith("\x1b[1A\x1b[2K"), "the line of the bar is cleared"


@pytest.mark.parametrize("columns", ["0", "20"])
def test_a_message_is_whole_however_narrow_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress([0], is_quiet=False) as progress:
        progress.begin("https://example.org/model.pt")
        progress.end("", error="not reachable: Connection refused", note="")
    assert (
        "[1/1] https://example.org/model.pt: not reachable: Connection refused\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("is_quiet", [False, True])
def test_who_waits_says_so_once_for_each_file(
    is_quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress([1, 1], is_quiet=is_quiet) as progress:
        for number in (1, 2):
            progress.begin(f"{number}.onnx")
            for _ in range(3):
                progress.wait("being prepared")
            line = "" if is_quiet else f"[{number}/2] {number}.onnx: being prepared ...\n"
            assert capsys.readouterr().err == line
            progress.end("prepared", error="", note="")
            capsys.readouterr()
