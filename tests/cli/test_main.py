"""Arguments, help and exit statuses that all commands share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main, make_parser

from .conftest import ROOT, Trims

FIRST = ["demo", "run", "warm", "fetch"]
LOOKING = ["status", "top", "info", "ls", "metrics"]
STEERING = ["pin", "unpin", "evict", "verify", "stop"]
SETTING_UP = ["autostart", "completion", "daemon"]
BESIDES = ["batch", "stage", "plan"]
COMMANDS = [*FIRST, *LOOKING, *STEERING, *SETTING_UP, *BESIDES]
GROUPED = [
    "batch profile",
    "batch simulate",
    "batch plot",
    "stage profile",
    "stage plot",
]
PRINTS_DATA = set(COMMANDS) - {"metrics", "run", "daemon", "completion", *BESIDES}
NEEDS_DAEMON = (
    ("status",),
    ("ls",),
    ("ls", "--json"),
    ("top", "--once"),
    ("pin", "abcdef"),
    ("unpin", "abcdef"),
    ("evict", "--all"),
    ("verify", "--all"),
    ("stop",),
)


def test_help_documents_every_command_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    places = [text.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places), "what people need first comes first"
    choices = make_parser()._subparsers._group_actions[0].choices
    assert sorted(choices) == sorted(COMMANDS)
    assert all(f"{code.value}  {code.meaning}" in text for code in Exit)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert "example:\n  " in text
    assert f"trims {name}" in text
    assert ("\n  --json" in text) == (name in PRINTS_DATA)


@pytest.mark.parametrize("name", [*COMMANDS, *GROUPED])
def test_help_fits_a_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["pin"],
        ["evict"],
        ["evict", "x", "--all"],
        ["top", "--interval=0"],
        ["top", "--interval=x"],
        ["stop", "--timeout=nan"],
        ["stop", "--timeout=-1"],
        ["demo", "--size-mb=0"],
        ["demo", "--processes=1"],
    ],
    ids=" ".join,
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == Exit.USAGE
    error = capsys.readouterr().err
    assert "usage: trims" in error
    assert "invalid _" not in error, "the name of a function says nothing to users"


def test_without_a_command_all_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == Exit.USAGE
    shown = capsys.readouterr()
    assert "\n  demo " in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("words", "meant", "help"),
    [
        (["stauts"], "'status'", "trims --help"),
        (["batch", "simulat"], "'simulate'", "trims batch --help"),
        (["warm", "model.pt", "--devcie=cuda:0"], "'--device'", "trims warm --help"),
        (["autostart", "instal"], "'install'", "trims autostart --help"),
        (["--vresion", "status"], "'--version'", "trims --help"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_a_mistyped_word_is_guessed(
    words: list[str], meant: str, help: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == Exit.USAGE
    error = capsys.readouterr().err
    assert error.count(f"did you mean {meant}?") == 1
    assert f"`{help}`" in error


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["batch", "simulate", "--profile", "nope.json", "--slo-ms", "100"]
    assert main(words) == Exit.FAILED
    assert capsys.readouterr().err == "trims: nope.json: No such file or directory\n"


def test_output_that_is_no_file_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["batch", "plot", "load", "--line", "2,20", "-o", "/dev/null"])
    assert end.value.code == Exit.USAGE
    assert "'/dev/null' is a device or a pipe, not a file\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "new/"])
def test_output_without_a_name_is_refused_before_the_work(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["batch", "profile", "m:f", "--shape", "2", "-o", name])
    assert end.value.code == Exit.USAGE
    assert f"{name!r} is not the name of a file\n" in capsys.readouterr().err


def test_output_through_a_link_to_nowhere_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "load.png"
    link.symlink_to(tmp_path / "nowhere" / "load.png")
    with pytest.raises(SystemExit) as end:
        main(["batch", "plot", "load", "--line", "2,20", "-o", str(link)])
    assert end.value.code == Exit.USAGE
    assert "there is no such directory\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", NEEDS_DAEMON, ids=" ".join)
def test_without_a_daemon_status_3_and_none_is_started(
    words: tuple[str, ...],
    trims: Trims,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from trims_shim import config
    from trims_shim.client import cache

    monkeypatch.setenv("TRIMS_SOCKET_DIR", str(trims.sockets))
    monkeypatch.setitem(cache._ours, os.geteuid(), cache.Cache(config.load()))
    assert main(words) == Exit.NO_DAEMON
    assert "trims: no socket directory" in capsys.readouterr().err
    assert main([*words, "--json"]) == Exit.NO_DAEMON
    printed = capsys.readouterr().out
    assert not printed or json.loads(printed)["running"] is False, "what reads it can rely on it"
    assert not trims.sockets.exists()


def test_unusable_setting(trims: Trims) -> None:
    for words in (("status",), ("stop",), ("warm", __file__), ("daemon",)):
        done = trims(*words, TRIMS_HOST_BYTE="1G")
        assert done.returncode == Exit.USAGE
        assert done.stderr.count("did you mean TRIMS_HOST_BYTES?") == 1
        assert done.stdout == ""


def test_reader_that_leaves_early_is_no_error(warmed: Trims) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trims_shim", "status", "--json"],
        env=warmed.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=120), errors) == (Exit.OK, b"")


def test_closed_streams_are_no_error(warmed: Trims) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        for words in ("ls", "top", "status --json"):
            done = subprocess.run(
                ["sh", "-c", f'"{sys.executable}" -m trims_shim {words} {closed}'],
                env=warmed.environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert (done.returncode, done.stderr) == (Exit.OK, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["info"], ["--help"], ["--version"], ["plan", "herd", "-h"]])
def test_stdout_without_room_is_named(words: list[str], unbuffered: str, trims: Trims) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trims_shim", *words],
            env=trims.environment | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        Exit.FAILED,
        "trims: stdout: No space left on device\n",
    )


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["status"], Exit.NO_DAEMON),
        (["nothing"], Exit.USAGE),
        (["run", "no-such-command"], Exit.NOT_FOUND),
    ],
)
def test_stderr_without_room_changes_no_status(
    words: list[str], status: Exit, trims: Trims
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trims_shim", *words],
            env=trims.environment,
            stderr=full,
            timeout=120,
            check=False,
        )
    assert done.returncode == status


@pytest.mark.parametrize(
    "start",
    [
        "runpy.run_module('trims_shim', run_name='__main__')",
        "sys.exit(pkgutil.resolve_name({script!r})())",
    ],
    ids=["python -m", "script"],
)
def test_ctrl_c_amid_the_imports(trims: Trims, start: str) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (script,) = re.findall(r'^trims = "(trims_shim.*)"$', project, re.MULTILINE)
    code = (
        "import os, pkgutil, runpy, signal, sys\n"
        "class CtrlC:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'trims_shim.cli.arguments':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC)\n"
    )
    done = trims.python("-c", code + start.format(script=script), "--version")
    assert (done.returncode, done.stdout, done.stderr) == (Exit.INTERRUPTED, "", "")


@pytest.mark.parametrize(
    "words", ["warm model.pt", "warm --json model.pt", "batch profile app:model --shape 3"]
)
def test_working_directory_that_is_gone_is_named(warmed: Trims, tmp_path: Path, words: str) -> None:
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "from trims_shim.cli.main import main; sys.exit(main())"
    )
    done = warmed.python("-c", code, *words.split(), cwd=tmp_path)
    problem = "trims: the working directory has been deleted; cd to another one\n"
    assert (done.returncode, done.stderr) == (Exit.FAILED, problem)


MEASURED = """
from trims_shim.batching.staged import StagedModel
from trims_shim.ensemble import Member

print("imported")

def double(batch):
    print("called")
    return [2 * each for each in batch]

def load(device):
    print("loaded")
    return double

def members():
    return [Member("a", load)]

def item():
    return 3

stages = StagedModel([double], name="stages")
"""


MEASURING = [
    ("batch", "profile", "measured:double", "--item=measured:item", "--max-batch-size=2"),
    ("stage", "profile", "measured:stages", "--item=measured:item", "--max-batch-size=2"),
    ("plan", "ensemble", "measured:members", "--item=measured:item", "--batch-sizes=2"),
]


@pytest.mark.parametrize("words", MEASURING, ids=lambda words: " ".join(words[:2]))
def test_progress_that_nobody_reads_stops_no_work(
    words: tuple[str, ...], trims: Trims, tmp_path: Path
) -> None:
    (tmp_path / "measured.py").write_text(MEASURED.replace("print", "repr"))
    process = subprocess.Popen(
        [sys.executable, "-m", "trims_shim", *words, "-o", "saved.json"],
        cwd=tmp_path,
        env=trims.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    process.stderr.close()
    with process:
        assert process.stdout is not None
        assert process.stdout.read()
    assert process.returncode == Exit.OK
    assert (tmp_path / "saved.json").exists()


@pytest.mark.parametrize(
    ("words", "file"),
    [
        *((words, "saved.json") for words in MEASURING[:2]),
        (("batch", "plot", "profile", "--line=2,20"), "plot.png"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[:2]),
)
def test_a_file_without_room_is_named_and_not_left(
    words: tuple[str, ...], file: str, trims: Trims, tmp_path: Path
) -> None:
    (tmp_path / "measured.py").write_text(MEASURED)
    done = subprocess.run(
        [
            "sh",
            "-c",
            f'ulimit -f 0; exec "{sys.executable}" -B -m trims_shim "$@" -o {file}',
            "sh",
            *words,
        ],
        cwd=tmp_path,
        env=trims.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == Exit.FAILED
    assert done.stderr.endswith(f"trims: {file}: File too large\n")
    assert [each.name for each in tmp_path.iterdir()] == ["measured.py"]


@pytest.mark.parametrize("words", MEASURING, ids=lambda words: " ".join(words[:2]))
def test_what_is_measured_prints_into_no_data(
    words: tuple[str, ...], trims: Trims, tmp_path: Path
) -> None:
    (tmp_path / "measured.py").write_text(MEASURED)
    done = trims(*words, "--json", cwd=tmp_path)
    assert done.returncode == Exit.OK, done.stderr
    assert json.loads(done.stdout)
    assert "imported" in done.stderr
    assert "called" in done.stderr


def test_an_empty_name_of_a_file_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be a variable that was not set."""
    assert main(["batch", "simulate", "--line", "2,20", "--trace", ""]) == Exit.FAILED
    assert capsys.readouterr().err == "trims: '': No such file or directory\n"
