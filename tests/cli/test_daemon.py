"""``stop`` and ``daemon``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import process_name, process_state, wait_until

from trims_shim import config
from trims_shim.cli.exits import Exit
from trims_shim.daemon import main
from trims_shim.errors import MemoryFailure

from .conftest import Trims


def test_stop_returns_when_the_process_is_gone(trims: Trims, model: Path) -> None:
    assert trims("warm", str(model)).returncode == Exit.OK
    pid = json.loads(trims("status", "--json").stdout)["pid"]
    assert process_name(pid) == "trims-daemon"
    done = trims("stop")
    assert process_state(pid) in ("", "Z"), "not every machine has an init that buries it"
    assert done.returncode == Exit.OK
    assert f"daemon {pid}" in done.stdout
    assert "0 hits, 1 miss, 0 joined loads, 0 refusals" in done.stdout
    assert trims("stop").returncode == Exit.NO_DAEMON


def test_stop_json_has_the_last_status(trims: Trims, model: Path) -> None:
    trims("warm", str(model))
    found = json.loads(trims("stop", "--json").stdout)
    assert found["stopped"]
    assert found["last_status"]["pid"] == found["pid"]
    assert found["last_status"]["images"][0]["names"] == [str(model)]


@pytest.mark.parametrize(
    ("number", "settings"), [(signal.SIGINT, {}), (signal.SIGHUP, {"TRIMS_LOG": "info"})]
)
def test_daemon_serves_in_the_foreground(
    trims: Trims, number: int, settings: dict[str, str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trims_shim", "daemon"],
        env=trims.environment | settings,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whatever runs the tests
    )
    try:
        wait_until(lambda: trims("status").returncode == Exit.OK, "it serves", interval_s=0.1)
        assert json.loads(trims("status", "--json").stdout)["pid"] == process.pid
        assert process_name(process.pid) == "trims-daemon"
        second = trims("daemon")
        assert second.returncode == Exit.FAILED
        assert f"{process.pid} serves {trims.sockets} already; `trims stop` stops" in second.stderr
        process.send_signal(number)
        _, log = process.communicate(timeout=120)
        assert process.returncode == Exit.OK
        assert log.count(f"serves {trims.sockets}") == 1
        assert log.endswith(f"daemon {process.pid} ends: it was stopped\n")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TRIMS_SOCKET_DIR", "/tmp/" + "x" * 120, "is too long: its socket names take"),
        ("TRIMS_GROUP", "no-such-group-of-trims", "no group 'no-such-group-of-trims'"),
    ],
)
def test_a_setting_that_it_cannot_serve_with_ends_it_as_other_commands(
    trims: Trims, name: str, value: str, message: str
) -> None:
    done = trims("daemon", **{name: value})
    assert done.returncode == Exit.USAGE, done.stderr
    assert message in done.stderr


def test_nohup_keeps_it_from_ending_with_the_terminal(trims: Trims) -> None:
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "trims_shim", "daemon"],
        env=trims.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: trims("status").returncode == Exit.OK, "it serves", interval_s=0.1)
        process.send_signal(signal.SIGHUP)
        assert trims("status").returncode == Exit.OK
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(120) == Exit.OK


@pytest.mark.parametrize("prefix", ["@", ""], ids=["abstract", "file"])
def test_a_service_manager_is_told_that_it_serves(
    trims: Trims, tmp_path: Path, prefix: str
) -> None:
    path = str(tmp_path / "notify@1")  # Only at the beginning does it mean anything.
    address = prefix + path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{path}" if prefix else path)
        manager.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-m", "trims_shim", "daemon"],
            env=trims.environment | {"NOTIFY_SOCKET": address},
        )
        try:
            assert manager.recv(100) == b"READY=1"
            assert trims("status").returncode == Exit.OK
        finally:
            process.terminate()
            process.wait()


def test_the_manager_of_a_program_is_told_nothing_of_the_daemon_it_starts(
    trims: Trims, model: Path, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        done = trims("warm", str(model), NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert done.returncode == Exit.OK
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_stop_of_a_daemon_that_hangs(trims: Trims, model: Path) -> None:
    trims("warm", str(model))
    pid = json.loads(trims("status", "--json").stdout)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        for words in (("stop", "--timeout", "0.5"), ("status",)):
            done = trims(*words)
            assert done.returncode == Exit.FAILED
            assert "does not answer" in done.stderr
            advice = re.search(r"`(kill.*)` ends it", done.stderr)
            assert advice is not None
            assert "trims status" not in done.stderr, "that asks the daemon, too"
        subprocess.run(shlex.split(advice.group(1)), check=True)
        wait_until(lambda: process_state(pid) in ("", "Z"), "what it says ends the daemon")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_kind_of_memory_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryFailure("why")

    monkeypatch.setattr(main.host, "open_memory", refuse)
    with pytest.raises(MemoryFailure, match="TRIMS_MEMORY_KIND=memfd does not work here: why"):
        main._memory(config.load({}, memory_kind="memfd"))
