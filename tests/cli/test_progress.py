"""What progress says is there, whatever the terminal."""

from __future__ import annotations

import sys

import pytest

from trims_shim.cli.progress import Progress


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
