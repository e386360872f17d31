"""``stop`` and ``daemon``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import process_name, process_state, wait_until

from trims_shim import config
from trims_shim.cli import daemon
from trims_shim.cli import main as cli
from trims_shim.cli.exits import Exit
from trims_shim.daemon import main
from trims_shim.errors import MemoryFailure
from trims_shim.wire import handover, messages
from trims_shim.wire.endpoint import Endpoint

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


@pytest.mark.parametrize("name", ["trims-load", "trims-door"])
def test_daemon_without_threads(trims: Trims, name: str) -> None:
    """Found: it ended with a traceback."""
    program = (
        "import sys, threading\n"
        "start = threading.Thread.start\n"
        "def refuse(self):\n"
        f'    if self.name == {name!r}: raise RuntimeError("can\'t start new thread")\n'
        "    start(self)\n"
        "threading.Thread.start = refuse\n"
        "from trims_shim.cli.main import main\n"
        "sys.exit(main(['daemon']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=trims.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.FAILED
    assert "can't start new thread; raise `ulimit -u`" in done.stderr
    assert "Traceback" not in done.stderr


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


class Connected:
    """A connection to a daemon that does not end by itself; what it was asked."""

    def __init__(self, welcome: messages.Welcome) -> None:
        self.welcome = welcome
        self.asked: list[str] = []
        self.is_open = True

    def request(self, message: object) -> object:
        self.asked.append(type(message).__name__)
        return message

    def drain(self) -> None:
        self.asked.append("drain")

    def is_alive(self) -> bool:
        return self.is_open and self.asked != ["drain"]

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Connected]:
    """What ``trims stop`` is connected to."""
    monkeypatch.setenv("TRIMS_SOCKET_DIR", str(tmp_path))

    def connect(**fields: Any) -> Connected:
        values = {"protocol": messages.PROTOCOL_VERSION, "pid": 7, "package": "1.0", "token": b"t"}
        made = Connected(messages.Welcome(**values | {"instance": "i"} | fields))
        monkeypatch.setattr(daemon, "Connection", lambda *_, **__: made)
        return made

    return connect


@pytest.mark.parametrize(("pid", "advice"), [(70, "run `kill -9 70`"), (0, "end its container")])
def test_stop_of_a_daemon_that_is_still_at_work(
    pid: int,
    advice: str,
    connected: Callable[..., Connected],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found: of one in a container it gave the number there, which is another process's here."""
    monkeypatch.setattr(daemon, "_pid", lambda endpoint: pid)
    monkeypatch.setattr(daemon, "_watch", lambda pid: contextlib.nullcontext(lambda: True))
    connection = connected()
    assert cli.main(["stop", "--timeout", "0.05"]) == Exit.FAILED
    said = capsys.readouterr().err
    assert "daemon 7 has not finished within 0.05 s" in said
    assert said.endswith(f", or {advice}\n")
    assert connection.asked == ["GetStatusRequest", "StopDaemonRequest"]
    assert not connection.is_open


@pytest.mark.parametrize("fields", [{"protocol": messages.PROTOCOL_VERSION + 1}, {"token": b""}])
def test_stop_of_a_daemon_that_takes_no_requests(
    fields: dict[str, Any],
    connected: Callable[..., Connected],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As one of another version: it can be told to make room."""
    connection = connected(**fields)
    assert cli.main(["stop"]) == Exit.OK
    assert capsys.readouterr().out == "daemon 7 (trims_shim 1.0) has stopped\n"
    assert connection.asked == ["drain"]
    assert not connection.is_open


@pytest.mark.parametrize(
    ("user", "advice"), [(0, "`trims stop` stops it"), (11, "stops it"), (12, "is another user's")]
)
def test_who_may_stop_what_serves_already(
    user: int,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRIMS_SOCKET_DIR", str(tmp_path))
    monkeypatch.setattr(daemon, "_pid", lambda endpoint: 7)
    monkeypatch.setattr(Endpoint, "owner", lambda self: 11)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert cli.main(["daemon"]) == Exit.FAILED
    said = capsys.readouterr().err
    assert said.startswith(f"trims daemon: 7 serves {tmp_path} already; ")
    assert said.endswith(f"{advice}\n")


def test_a_daemon_without_room_for_a_connection_is_not_waited_for(tmp_path: Path) -> None:
    endpoint = Endpoint(str(tmp_path))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(handover.new_socket())
        listener.bind(endpoint.handover)
        listener.listen(0)
        assert daemon._pid(endpoint) == os.getpid()
        error = 0
        while not error:
            waiting = stack.enter_context(handover.new_socket())
            waiting.setblocking(False)
            error = waiting.connect_ex(endpoint.handover)
        assert error == errno.EAGAIN
        assert daemon._pid(endpoint) is None


def test_whether_a_daemon_has_gone() -> None:
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process,
        daemon._watch(process.pid) as has_gone,
    ):
        assert not has_gone()
        process.kill()
        process.wait()
        assert has_gone()
    for pid in (process.pid, 0, None):  # ended before, in another namespace, none
        with daemon._watch(pid) as has_gone:
            assert has_gone()
