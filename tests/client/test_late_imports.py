"""A fork waits until what another thread imports is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trims_shim
from trims_shim.client.late_imports import ensure_imported

_SCRIPT = """
import os, signal, sys, threading, time
from trims_shim.client.late_imports import ensure_imported
sys.path.insert(0, sys.argv[1])
def load(): {load}
thread = threading.Thread(target=load)
thread.start()
while "slow_to_import" not in sys.modules: time.sleep(0.001)
pid = os.fork()
if pid == 0:
    signal.alarm(3)  # a child that waits for ever is killed
    import slow_to_import
    os._exit(slow_to_import.answer)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def _status_of_child(load: str, directory: Path) -> int:
    (directory / "slow_to_import.py").write_text("import time; time.sleep(0.4); answer = 42\n")
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(load=load), str(directory)],
        env=os.environ | {"PYTHONPATH": str(Path(trims_shim.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(ended.stdout)


def test_a_child_can_import_what_a_thread_was_importing(tmp_path: Path) -> None:
    assert _status_of_child("ensure_imported('slow_to_import')", tmp_path) == 42


def test_an_import_that_fails_is_tried_again() -> None:
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            ensure_imported("trims_shim.there_is_no_such_module")
