"""The daemon that a client has started: its imports, and its log, which does not grow for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import logging, os, subprocess, sys
from trims_shim.daemon import detached
detached._LOG_LIMIT_BYTES = 10_000
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[detached.LogHandler()])
for number in range(100):
    {before}
    logging.info("%d %s", number, 990 * "x")
os.write(1, b"output\\n")
subprocess.run(["/bin/sh", "-c", "echo a process of ours >&2"])
"""


def run(log: Path, before: str = "pass") -> None:
    with open(log, "ab") as file:
        subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(before=before)],
            stdout=file,
            stderr=file,
            check=True,
            timeout=60,
        )


def test_is_begun_anew_when_it_is_long(tmp_path: Path) -> None:
    log, old = tmp_path / "daemon.log", tmp_path / "daemon.log.old"
    run(log)
    assert sorted(tmp_path.iterdir()) == [log, old]
    assert log.stat().st_mode & 0o777 == 0o600
    assert all(each.stat().st_size < 12_000 for each in (log, old))
    lines = (old.read_text() + log.read_text()).splitlines()
    assert lines[-2:] == ["output", "a process of ours"]
    numbers = [int(line.split()[0]) for line in lines[:-2]]
    assert numbers == list(range(100 - len(numbers), 100))


def test_what_is_no_record_counts_too(tmp_path: Path) -> None:
    run(tmp_path / "daemon.log", "os.write(2, 5_000 * b'y' + b'\\n')")
    assert all(each.stat().st_size < 17_000 for each in tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.touch()
    tmp_path.chmod(0o500)
    try:
        run(log)
    finally:
        tmp_path.chmod(0o700)
    assert log.stat().st_size > 90_000


def test_a_file_that_was_removed(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    run(log, f"number or os.unlink({str(log)!r})")
    assert log.read_text().endswith("a process of ours\n")


def test_a_pipe_is_left_alone() -> None:
    piped = [sys.executable, "-c", _PROGRAM.format(before="pass")]
    said = subprocess.run(piped, stderr=subprocess.PIPE, check=True, timeout=60).stderr
    assert len(said) > 90_000


def test_a_python_whose_handlers_take_no_types() -> None:
    """Found: with Python 3.10 no daemon could be started."""
    program = (
        "import contextlib, logging\n"
        "with contextlib.suppress(AttributeError):\n"
        "    del logging.StreamHandler.__class_getitem__\n"
        "import trims_shim.daemon.detached\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
