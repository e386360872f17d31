"""``trims autostart``: a .pth file that acts only when the environment says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trims_shim.cli.autostart import FILE_NAME, LINE
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main

from .conftest import Trims

START = "import site, sys; site.addsitedir(sys.argv[1]); print('trims_shim' in sys.modules)"


def test_install_status_remove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(action: str) -> dict[str, object]:
        words = ["autostart", action, "--site-packages", str(tmp_path), "--json"]
        assert main(words) == Exit.OK
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        assert found["path"] == str(tmp_path / FILE_NAME)
        return found

    assert not run("status")["installed"]
    assert run("install")["is_current"]
    assert run("install")["installed"]
    assert (tmp_path / FILE_NAME).read_text() == LINE
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert not run("remove")["installed"]
    assert not run("remove")["installed"], "removing twice is fine"


@pytest.mark.parametrize("content", [b"import os\n", b"import os  # \xff\n"])
def test_file_of_another_version_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert main(["autostart", "status", "--site-packages", str(tmp_path)]) == Exit.OK
    assert "another version" in capsys.readouterr().out


def test_directory_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        assert main(["autostart", "install", "--site-packages", str(directory)]) == Exit.FAILED
        assert "cannot be written" in capsys.readouterr().err


def test_what_is_no_file_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE_NAME).mkdir()
    for action, problem in (("install", "cannot be written"), ("remove", "cannot be removed")):
        assert main(["autostart", action, "--site-packages", str(tmp_path)]) == Exit.FAILED
        assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_it_is_said_whether_it_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action, said in (
        ("status", "not installed"),
        ("install", "programs of this Python use the cache when TRIMS_ENABLED=1 is set"),
        ("remove", "not installed"),
    ):
        assert main(["autostart", action, "--site-packages", str(tmp_path)]) == Exit.OK
        assert said in capsys.readouterr().out


def test_this_interpreters_directory_is_taken_if_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    assert main(["autostart", "install"]) == Exit.OK
    assert (tmp_path / FILE_NAME).read_text() == LINE


def test_an_empty_directory_is_not_this_interpreters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    assert main(["autostart", "install", "--site-packages", ""]) == Exit.USAGE
    assert "--site-packages is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_acts_only_when_the_variable_is_set_to_true(trims: Trims, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(LINE)
    assert LINE.startswith("import ")
    assert LINE.count("\n") == 1
    off, on = ("", "0", "nonsense"), ("1", "True", "YES", "on")
    for value, expected in [(each, False) for each in off] + [(each, True) for each in on]:
        done = trims.python("-c", START, str(tmp_path), TRIMS_ENABLED=value)
        assert (done.stdout, done.stderr) == (f"{expected}\n", "")


def test_cannot_break_the_start_of_an_interpreter(trims: Trims, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(LINE)
    done = trims.python("-I", "-S", "-c", START, str(tmp_path), TRIMS_ENABLED="1")
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert len(done.stderr.splitlines()) == 1
    assert "remove that file" in done.stderr


def test_a_virtual_environment_reads_it_twice_and_it_speaks_once(
    trims: Trims, tmp_path: Path
) -> None:
    (tmp_path / FILE_NAME).write_text(LINE)
    twice = f"import site, sys; site.addsitedir(sys.argv[1]); {START}"
    done = trims.python("-I", "-S", "-c", twice, str(tmp_path), TRIMS_ENABLED="1")
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
