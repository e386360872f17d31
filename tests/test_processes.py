"""Processes of a test are found by their environment, without a look into those of others."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import processes
import pytest
from harness import wait_until

WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """One with a variable of this test's."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], env={"TESTED": "found"}, **pipes
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_is_found_by_the_whole_variable(child: subprocess.Popen[bytes]) -> None:
    since = processes.started_ticks(child.pid)
    assert processes.with_variable("TESTED=found", since_ticks=since) == [child.pid]
    assert processes.with_variable("TESTED=fou", since_ticks=since) == []


def test_older_ones_are_not_looked_at(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    since = processes.started_ticks(child.pid) + 2
    wait_until(lambda: processes.now_ticks() > since, "some time passed")
    opened: list[str] = []
    real = builtins.open

    def watched(file: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", watched)
    assert processes.with_variable("TESTED=found", since_ticks=since) == []
    assert f"/proc/{child.pid}/stat" in opened
    assert f"/proc/{child.pid}/environ" not in opened
