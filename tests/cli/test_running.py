"""``trims run``: which command is executed, and that the program notices nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trims_shim.cli.exits import Exit
from trims_shim.cli.running import bootstrap_directory, environment, resolve

from .conftest import Trims

SHOW = "import sys; print('trims_shim' in sys.modules, sys.argv[1:])"


def test_python_files_and_options_go_to_this_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("print()")
    (tmp_path / "no-command").write_text("#!/bin/sh\n")
    (tmp_path / "no-command").chmod(0o755)
    (tmp_path / "sh").mkdir()
    for words in (["app.py", "-x"], ["-m", "pkg"], ["-c", "code"], ["plain"], ["./plain"]):
        assert resolve(words) == [sys.executable, *words]
    (tmp_path / "package").mkdir()  # with a __main__.py
    for words in (["app.pyc"], ["app.pyz", "-x"], ["package"]):
        assert resolve(words) == [sys.executable, *words]
    (tmp_path / "bin").mkdir()
    for name in ("bin/tool.py", "bin/both.py", "both.py"):
        shutil.copy(tmp_path / "no-command", tmp_path / name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert resolve(["both.py", "-x"]) == [sys.executable, "both.py", "-x"]
    assert resolve(["tool.py", "-x"]) == ["tool.py", "-x"], "a command"
    for words in (["python", "app.py"], ["./no-command"], ["no-command"], ["sh"], ["nosuch"]):
        assert resolve(words) == words


def test_environment_puts_the_bootstrap_first_once() -> None:
    ours = bootstrap_directory()
    once = environment({"PYTHONPATH": "/a:/b"})
    assert once["PYTHONPATH"] == f"{ours}:/a:/b"
    assert environment(once)["PYTHONPATH"] == once["PYTHONPATH"]
    assert environment({})["PYTHONPATH"] == ours, "no empty entry: it means the working directory"
    assert environment({})["TRIMS_ENABLED"] == "1"
    assert environment({"TRIMS_ENABLED": "0"})["TRIMS_ENABLED"] == "0"


def test_argv_stdin_and_exit_status_are_the_programs(trims: Trims, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import sys, trims_shim\n"
        "print(trims_shim.enabled(), sys.argv[1:], sys.stdin.read())\n"
        "print('to stderr', file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    words = ("app.py", "--json", "-h", "a b")
    for command in (words, ("--", *words), (sys.executable, *words)):
        done = trims("run", *command, stdin="from stdin", cwd=tmp_path)
        assert done.stdout == "True ['--json', '-h', 'a b'] from stdin\n"
        assert (done.stderr, done.returncode) == ("to stderr\n", 7)
    assert not trims.sockets.exists(), "a program that loads nothing starts nothing"


def test_child_processes_are_covered_and_sys_path_is_clean(trims: Trims) -> None:
    child = "import sys; print('trims_shim' in sys.modules, *sys.path, sep='\\n')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    is_in, *path = trims("run", "-c", parent).stdout.splitlines()
    assert is_in == "True"
    assert not any("_bootstrap" in entry for entry in path)


def test_disabled_by_the_environment(trims: Trims) -> None:
    code = "import trims_shim; print(trims_shim.enabled())"
    assert trims("run", "-c", code, TRIMS_ENABLED="0").stdout == "False\n"


def test_own_sitecustomize_runs_as_without_the_shim(trims: Trims, tmp_path: Path) -> None:
    theirs = tmp_path / "sitecustomize.py"
    show = "import sys; print(getattr(sys, 'seen', None), sys.modules['sitecustomize'].__file__)"
    python_path = f"{tmp_path}:{trims.environment['PYTHONPATH']}"
    theirs.write_text("import sys\nsys.seen = 'trims_shim' in sys.modules\n")
    assert trims("run", "-c", show, PYTHONPATH=python_path).stdout == f"True {theirs}\n"
    theirs.write_text("1 / 0\n")
    plain = trims.python("-c", "print('on')", PYTHONPATH=python_path)
    under = trims("run", "-c", "print('on')", PYTHONPATH=python_path)
    assert "ZeroDivisionError" in plain.stderr
    assert (under.stdout, under.stderr.splitlines()[-1:]) == (
        plain.stdout,
        plain.stderr.splitlines()[-1:],
    )


def test_a_helper_of_python_2_starts_as_without_the_shim(trims: Trims, tmp_path: Path) -> None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    old = next((str(each) for each in pyenv.glob("versions/2.7.*/bin/python")), None)
    old = old or shutil.which("python2.7")
    if old is None:
        pytest.skip("there is no Python 2")
    show = "import sys; print([each for each in sys.path if '_bootstrap' in each])"
    helper = f"import subprocess; subprocess.run([{old!r}, '-c', {show!r}])"
    theirs = tmp_path / "sitecustomize.py"
    variables = {"PYTHONPATH": f"{tmp_path}:{trims.environment['PYTHONPATH']}"}
    for content in ("", "import sys; sys.version_info < (3,) and sys.stdout.write('theirs\\n')"):
        if content:
            theirs.write_text(content)
        plain = trims.python("-c", helper, **variables)
        under = trims("run", "-c", helper, **variables)
        assert (under.stdout, under.stderr) == (plain.stdout, plain.stderr)
    assert plain.stdout == "theirs\n[]\n"


def test_a_working_directory_that_is_gone(trims: Trims, tmp_path: Path) -> None:
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        # As the editable install of a package has it.
        "sys.path.append('__editable__.app.__path_hook__')\n"
        f"sys.path.insert(0, {bootstrap_directory()!r}); sys.modules.pop('sitecustomize', None)\n"
        "import sitecustomize; print(*sys.path)\n"
    )
    done = trims.python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "__path_hook__" in done.stdout
    assert "_bootstrap" not in done.stdout


def test_shim_that_cannot_be_imported_does_not_stop_the_program(
    trims: Trims, tmp_path: Path
) -> None:
    (tmp_path / "trims_shim.py").write_text("raise RuntimeError('broken')\n")
    path = os.pathsep.join([bootstrap_directory(), str(tmp_path)])
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"
    code = f"import os; os.environ['_TRIMS_RUN_PID'] = str(os.getpid()); os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {child!r}])"  # noqa: E501
    done = trims.python("-S", "-c", code, PYTHONPATH=path)
    assert done.returncode == 0
    assert done.stdout == "False []\n"
    assert done.stderr.count("runs without the cache: RuntimeError: broken") == 1, done.stderr


def test_command_that_cannot_be_started(trims: Trims, tmp_path: Path) -> None:
    done = trims("run", "no-such-command")
    assert (done.returncode, "no-such-command" in done.stderr) == (Exit.NOT_FOUND, True)
    done = trims("run", "")
    assert (done.returncode, done.stderr) == (
        Exit.NOT_FOUND,
        "trims run: '': no such command or file\n",
    )
    (tmp_path / "bad").write_bytes(b"\x7fELF")
    (tmp_path / "bad").chmod(0o755)
    done = trims("run", str(tmp_path / "bad"))
    assert (done.returncode, "trims run: " in done.stderr) == (Exit.NOT_EXECUTABLE, True)
    for words in (("run",), ("run", "--")):
        done = trims(*words)
        assert (done.returncode, done.stderr[:16]) == (Exit.USAGE, "usage: trims run")


def test_a_program_gets_the_signals_that_python_ignores(trims: Trims) -> None:
    """Else `yes | head -1` in a script complains instead of ending."""
    shown = ("grep", "SigIgn", "/proc/self/status")
    plain = subprocess.run(shown, capture_output=True, text=True, check=True)
    assert trims("run", *shown).stdout == plain.stdout


@pytest.mark.parametrize("more", [{}, {"LC_CTYPE": "C"}, {"LANG": "C.UTF-8"}, {"LC_ALL": "C"}])
def test_a_program_gets_the_locale_that_python_replaces(trims: Trims, more: dict[str, str]) -> None:
    """Else a shell script counts characters where it would count bytes."""
    kept = {k: v for k, v in trims.environment.items() if k != "LANG" and not k.startswith("LC_")}
    script = 'x=$(printf "\\303\\251"); echo ${#x} $(env | grep ^LC_CTYPE)'
    plain = subprocess.run(
        ("bash", "-c", script), env=kept | more, capture_output=True, text=True, check=True
    )
    under = Trims(trims.sockets, kept | more)("run", "bash", "-c", script)
    assert (under.stdout, under.stderr) == (plain.stdout, plain.stderr)
