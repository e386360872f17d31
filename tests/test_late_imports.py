"""A fork waits until what another thread imports is whole."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness import PATIENCE_S

import trims_shim
from trims_shim import late_imports
from trims_shim.late_imports import ensure_imported, no_fork

_SCRIPT = """
import os, signal, sys, threading, time
from trims_shim.late_imports import ensure_imported
sys.path.insert(0, sys.argv[1])
def load(): {load}
thread = threading.Thread(target=load)
thread.start()
while "slow_to_import" not in sys.modules: time.sleep(0.001)
pid = os.fork()
if pid == 0:
    signal.alarm(60)  # a child that waits for ever is killed
    import slow_to_import
    os._exit(slow_to_import.answer)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def _output_of(script: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(trims_shim.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _status_of_child(
    script: str, directory: Path, waits: str = "import time; time.sleep(0.4)"
) -> int:
    (directory / "slow_to_import.py").write_text(f"{waits}; answer = 42\n")
    return int(_output_of(script, str(directory)))


def test_a_child_can_import_what_a_thread_was_importing(tmp_path: Path) -> None:
    script = _SCRIPT.format(load="ensure_imported('slow_to_import')")
    assert _status_of_child(script, tmp_path) == 42


_AN_IMPORT_IS_CUT_OFF = """
import os, signal, sys, threading, time
from trims_shim import late_imports
from trims_shim.late_imports import ensure_imported
sys.path.insert(0, sys.argv[1])
late_imports._LONGEST_S = 0.01
have_forked = threading.Event()
def load(): {load}
thread = threading.Thread(target=load)
thread.start()
while "slow_to_import" not in sys.modules: time.sleep(0.001)

def fails(name):
    try:
        ensure_imported(name)
    except ImportError as error:
        return error.name == "slow_to_import"

def child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that waits for ever is killed
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def work():
    ensure_imported("colorsys")
    return 42 if fails("slow_to_import") and fails("needs_it") else 1

print(child(lambda: work() and child(work)))
have_forked.set()
thread.join()
ensure_imported("needs_it")
"""


@pytest.mark.parametrize("load", ["import slow_to_import", "ensure_imported('slow_to_import')"])
def test_an_import_that_a_fork_has_cut_off_fails_in_the_child(tmp_path: Path, load: str) -> None:
    """Found: a load in the child waited without end for a thread that it does not have; where the
    program itself was importing the module, or a busy machine for longer than forks wait."""
    (tmp_path / "needs_it.py").write_text("import slow_to_import\n")
    waits = "import __main__; __main__.have_forked.wait()"
    assert _status_of_child(_AN_IMPORT_IS_CUT_OFF.format(load=load), tmp_path, waits) == 42


_A_MODULE_FORKS = """
import os, sys
from trims_shim.late_imports import ensure_imported
sys.path.insert(0, sys.argv[1])
with open(os.path.join(sys.argv[1], "forks.py"), "w") as file:
    file.write("import os, signal; pid = os.fork(); pid or signal.alarm(60)")
ensure_imported("forks")
import forks
if forks.pid == 0:
    ensure_imported("slow_to_import")
    import slow_to_import
    pid = os.fork()
    if pid == 0:
        os._exit(slow_to_import.answer)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(os.waitstatus_to_exitcode(os.waitpid(forks.pid, 0)[1]))
"""


def test_a_module_may_fork(tmp_path: Path) -> None:
    assert _status_of_child(_A_MODULE_FORKS, tmp_path) == 42


def test_imports_do_not_wait_for_each_other() -> None:
    """Each may hold the lock of a module that another is about to import."""
    both = threading.Barrier(2, timeout=120)

    def work() -> None:
        with no_fork():
            both.wait()
            with no_fork():
                both.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not both.broken
    assert not late_imports._importing


_LOCKS_ARE_EXCHANGED = """
import gc, threading
from trims_shim.late_imports import ensure_imported
for each in gc.get_objects():
    if type(each) is threading.Condition:
        each._lock = threading.RLock()
ensure_imported("this")
"""


def test_locks_may_be_exchanged() -> None:
    """eventlet's ``monkey_patch`` does it to every re-entrant lock that it finds."""
    _output_of(_LOCKS_ARE_EXCHANGED)


_A_STACK_IS_NEARLY_FULL = """
from trims_shim.late_imports import ensure_imported

def down(calls):
    return down(calls - 1) if calls else ensure_imported("zmq")

for left in range(20, 400, 8):
    try:
        down(1000 - left)
        break
    except RecursionError:
        pass
import zmq
zmq.Context().term()
"""


def test_nothing_is_imported_half_way_for_lack_of_stack() -> None:
    """Found: no part of the program could use ZeroMQ any more."""
    _output_of(_A_STACK_IS_NEARLY_FULL)


def test_an_import_that_fails_is_tried_again() -> None:
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            ensure_imported("trims_shim.there_is_no_such_module")


_INSTALLED_UNDER_IT = """
import pathlib, sys
import trims_shim
package = pathlib.Path(trims_shim.__file__).parent
limits = package / "memory" / "limits.py"
limits.write_text(limits.read_text().replace("memory_limit_bytes", "limit_bytes"))
(package / "_version.py").write_text(sys.argv[1])
try:
    trims_shim.info()
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("version", [trims_shim.__version__, "99.0"])
def test_an_import_from_another_version_that_was_installed_under_it(
    tmp_path: Path, version: str
) -> None:
    source = Path(trims_shim.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(source, tmp_path / "trims_shim", ignore=ignore)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + _INSTALLED_UNDER_IT
    said = _output_of(script, f'__version__ = "{version}"\n')
    assert "memory_limit_bytes" in said
    assert str(copy) in said
    hint = f"start this program again, as trims_shim {version} was installed under it"
    assert (hint in said) == (version == "99.0")


def test_an_interrupt_at_any_line_leaves_no_thread_importing() -> None:
    """Forks of other threads would wait a second for it, each of them."""

    def raise_at(line: int) -> Callable[..., Any]:
        lines = itertools.count()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename == late_imports.__file__:
                if event == "line" and next(lines) == line:
                    raise KeyboardInterrupt
                return trace
            return None

        return trace

    before, line = sys.gettrace(), -1
    for line in itertools.count():
        try:
            sys.settrace(raise_at(line))
            with no_fork():
                sys.settrace(before)
            break
        except KeyboardInterrupt:
            assert late_imports._importing == {}
        finally:
            sys.settrace(before)
    assert line > 3
