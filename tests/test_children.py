"""What other interpreters are told of this one, what they are called, and what they answer."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

import trims_shim
from trims_shim import children
from trims_shim.children import NoAnswer, NoInterpreter, ask_child, interpreter, search_path
from trims_shim.daemon.prepared.key import LAYOUT_VERSION
from trims_shim.wire import messages


def test_directories_that_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = ["/one", Path("/two"), b"/three", None, "four", "", "/five:/six", "/\udcff"]
    monkeypatch.setattr(sys, "path", strange)
    own = str(Path(trims_shim.__file__).parents[1])
    assert search_path() == [own, "/one", "/five:/six", "/\udcff"]


def test_modules_of_python_are_python_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the daemon imported a script's neighbour in place of ``bisect``."""
    library = str(Path(os.__file__).parent)
    own = str(Path(trims_shim.__file__).parents[1])
    monkeypatch.setattr(sys, "path", ["/script", own, library, f"{library}/lib-dynload", "/site"])
    assert search_path() == [library, f"{library}/lib-dynload", own, "/script", "/site"]


def test_info_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/")])
    assert trims_shim.info()


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoAnswer, match="ValueError: broken"):
        ask_child("raise ValueError('broken')")
    with pytest.raises(NoAnswer, match="status 7"):
        ask_child("sys.exit(7)")
    with pytest.raises(NoAnswer):
        ask_child("print('no json')")
    monkeypatch.setattr(children, "_TIMEOUT_S", 0.2)
    with pytest.raises(NoAnswer, match=r"^no answer within 0.2 s$"):
        ask_child("import time; time.sleep(60)")


# --- which interpreter ----------------------------------------------------------------------------


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The program of this process, by the kernel's word; it notes that it was started."""
    program = tmp_path / "pythonic-server"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o700)
    running = tmp_path / "running"
    running.symlink_to(program)
    monkeypatch.setattr(children, "_RUNNING", str(running))
    monkeypatch.setattr(sys, "executable", str(program))
    return program


@pytest.mark.parametrize("executable", ["", None, "/usr/bin/uwsgi", "/no/such/python3"])
def test_the_running_interpreter_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    """For example, it was started without a path."""
    monkeypatch.setattr(sys, "executable", executable)
    assert os.path.samefile(interpreter(), "/proc/self/exe")


@pytest.mark.parametrize("executable", ["", "the program", shutil.which("python3")])
def test_a_program_that_embeds_python(
    monkeypatch: pytest.MonkeyPatch, embedding: Path, tmp_path: Path, executable: str
) -> None:
    """A server such as uWSGI: the interpreter beside its library is as good.

    Found: the server was to be started a second time; and where Python knew no path, no daemon was
    started. Another Python, the first in PATH, may be of another version.
    """
    monkeypatch.setattr(sys, "executable", executable.replace("the program", str(embedding)))
    assert interpreter().startswith(sys.exec_prefix)
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    with pytest.raises(NoInterpreter, match="is no Python"):
        interpreter()


def test_without_proc_the_name_counts(
    monkeypatch: pytest.MonkeyPatch, embedding: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(children, "_RUNNING", "/no/such/link")
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    with pytest.raises(NoInterpreter):
        interpreter()
    python = embedding.rename(tmp_path / "python3")
    monkeypatch.setattr(sys, "executable", str(python))
    assert interpreter() == str(python)


def test_an_interpreter_out_of_reach_is_named_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found: root's Python was no Python to a server that had given up root's rights."""
    python = str(tmp_path / "root" / "python3")
    for module, name in ((children, "_RUNNING"), (sys, "executable")):
        monkeypatch.setattr(module, name, python)
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    with pytest.raises(NoInterpreter, match="is gone or out of this user's reach"):
        interpreter()


def test_a_frozen_program_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, embedding: Path, tmp_path: Path
) -> None:
    """Found: it was started by ``trims_shim.info()``, called that again, and so on."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(embedding.rename(tmp_path / "python3")))
    with pytest.raises(NoAnswer, match="is no Python"):
        ask_child("print(1)")
    assert trims_shim.info()
    assert not (tmp_path / "ran").exists()


def test_what_is_installed_under_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another version than the one that it has imported, perhaps half written, or none."""
    constant = children.installed_constant
    assert constant("_version.py", "__version__") == trims_shim.__version__
    assert constant("wire/messages.py", "PROTOCOL_VERSION") == str(messages.PROTOCOL_VERSION)
    assert constant("daemon/prepared/key.py", "LAYOUT_VERSION") == str(LAYOUT_VERSION)
    monkeypatch.setattr(children, "PACKAGE_DIRECTORY", str(tmp_path))
    assert constant("_version.py", "__version__") == ""
    (tmp_path / "_version.py").write_bytes(b'"""\xff"""\n__version__ = "9.9')
    assert constant("_version.py", "__version__") == ""
    (tmp_path / "_version.py").write_bytes(b'"""\xff"""\n__version__ = "9.9.0rc1"\n')
    assert constant("_version.py", "__version__") == "9.9.0rc1"
