"""Starts that fail say why; starts that work are in tests/faults."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trims_shim.client import spawn
from trims_shim.errors import DaemonStartFailed, DaemonUnavailable
from trims_shim.wire.endpoint import Endpoint

pytestmark = pytest.mark.usefixtures("no_leak")


@pytest.fixture
def endpoint(socket_directory: Path) -> Endpoint:
    return Endpoint(str(socket_directory / "s"))


@pytest.fixture
def run_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Lines for bash take the place of the interpreter."""

    def replace(script: str) -> None:
        python = tmp_path / "python3"
        python.write_text(f"#!/bin/bash\n{script}\n")
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))

    return replace


def test_an_interpreter_that_cannot_be_run(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text("not a program")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DaemonStartFailed, match="trims daemon"):
        spawn.start(endpoint, timeout_s=5)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "died without a word"),
        ('eval "echo failed no memory here >&$4"; exit 1', "no memory here"),
    ],
    ids=["silence", "a reason"],
)
def test_a_daemon_that_fails(
    endpoint: Endpoint, run_instead: Callable[[str], None], script: str, reason: str
) -> None:
    run_instead(script)
    with pytest.raises(DaemonStartFailed, match=reason):
        spawn.start(endpoint, timeout_s=10)


def test_a_daemon_that_fails_where_there_is_no_room_for_the_reason(
    endpoint: Endpoint, run_instead: Callable[[str], None]
) -> None:
    """So that whoever asked does not have it started again for each file."""
    run_instead('eval "echo failed no memory here >&$4"; exit 1')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(DaemonStartFailed, match="no memory here"):
            spawn.start(endpoint, timeout_s=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_program_with_thousands_of_descriptors(
    endpoint: Endpoint, run_instead: Callable[[str], None]
) -> None:
    """``select`` has no room for those beyond 1023."""
    run_instead('eval "echo failed heard >&$4"; exit 1')
    held = [os.open("/", os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(DaemonStartFailed, match="heard"):
            spawn.start(endpoint, timeout_s=10)
    finally:
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("executable", ["", None, "/usr/bin/uwsgi", "/no/such/python3"])
def test_a_program_that_is_no_python(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(DaemonUnavailable, match="trims daemon"):
        spawn.start(endpoint, timeout_s=5)


def test_a_frozen_program_is_not_run_again(
    endpoint: Endpoint,
    run_instead: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its executable is the program, whatever it is called, and takes no ``-c``."""
    run_instead(f"touch {tmp_path}/ran")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(DaemonUnavailable, match="trims daemon"):
        spawn.start(endpoint, timeout_s=5)
    assert not (tmp_path / "ran").exists()
