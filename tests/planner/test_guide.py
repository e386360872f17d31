"""docs/planning.md: its files can be planned for, and its output is what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for language, text in BLOCKS:
        if language == "toml":
            name = text.split()[1]
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "session", [text for language, text in BLOCKS if language == "console" and "$ trims" in text]
)
def test_sessions_print_what_is_shown(
    session: str, directory: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, shown = session.partition("\n")
    assert main(command.split()[2:]) == Exit.OK
    if shown:
        assert capsys.readouterr().out == shown


def test_the_python_example_scales_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [text for language, text in BLOCKS if language == "python"]
    names: dict[str, Any] = {}
    exec(example, names)
    quiet, busy = names["quiet"], names["busy"]
    assert quiet.accuracy == pytest.approx(78.3)
    assert 69.8 < busy.accuracy < 78.3
    assert busy.headroom == pytest.approx(1.5)
