"""``trims completion``: what bash offers."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main

BASH = shutil.which("bash") or ""
LIMIT_S = 120

pytestmark = pytest.mark.skipif(not BASH, reason="no bash")


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion"]) == Exit.OK
    return capsys.readouterr().out


def offered(script: str, *words: str) -> list[str]:
    """What is offered for the last of the words, which may be the beginning of one."""
    line = " ".join(f"'{word}'" for word in ("trims", *words))
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _trims; printf "%s|" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        [BASH, "--norc", "-c", f"set -u; IFS=,; {script}\n{ask}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return [each for each in done.stdout.split("|") if each]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], ["status", "stage"]),
        (["--v"], ["--version"]),
        (["warm", "--d"], ["--device"]),
        (["warm", "model.pt", "--p"], ["--pin"]),
        (["batch", "p"], ["profile", "plot"]),
        (["batch", "profile", "app:f", "--sh"], ["--shape"]),
        (["stage", "profile", "--la"], ["--lanes"]),
        (["autostart", "i"], ["install"]),
        (["autostart", ""], ["install", "remove", "status"]),
        (["batch", "plot", ""], ["profile", "latency", "load"]),
        (["batch", "plot", "load", "-o", "lo"], []),  # files
        (["batch", "plot", "-o", "lo"], []),
        (["batch", "plot", "--output", "=", "lo"], []),  # as bash splits --output=lo
        (["batch", "plot", "-o", "x.png", "lo"], ["load"]),
        (["batch", "plot", "--json", "lo"], ["load"]),
        (["batch", "plot", "load", "--lo"], ["--load", "--loads"]),
        (["batch", "plot", "load", "lo"], []),
        (["completion", "-"], ["--help"]),
        (["warm", ""], []),
        (["run", "--"], []),
        (["nosuch", ""], []),
    ],
)
def test_words_that_are_offered(script: str, words: list[str], expected: list[str]) -> None:
    assert offered(script, *words) == expected


def test_every_command_is_offered(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    help = capsys.readouterr().out
    commands = offered(script, "")
    assert {"status", "run", "completion"} <= set(commands)
    assert all(f"\n  {each} " in help for each in commands if not each.startswith("-"))
