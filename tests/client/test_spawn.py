"""Starts that fail say why; starts that work are in tests/faults."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import blake3
import msgpack
import pytest
import zmq
from harness import PATIENCE_S

from trims_shim import children, config, diagnostics
from trims_shim.cli.daemon import stop_daemon
from trims_shim.client import connection, spawn
from trims_shim.client.pool import Pool
from trims_shim.daemon import main as daemon
from trims_shim.errors import (
    DaemonStartFailed,
    DaemonTimeout,
    DaemonUnavailable,
    TrimsError,
    UnusableSocketDir,
)
from trims_shim.wire import handover
from trims_shim.wire.endpoint import Endpoint

pytestmark = pytest.mark.usefixtures("no_leak")


ROOT = Path(__file__).resolve().parent.parent.parent


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
        monkeypatch.setattr(children, "_RUNNING", "/no/such/link")

    return replace


def test_an_interpreter_that_cannot_be_run(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text("not a program")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(children, "_RUNNING", "/no/such/link")
    with pytest.raises(DaemonStartFailed, match="trims daemon"):
        spawn.start(endpoint, timeout_s=5)


@pytest.mark.parametrize(
    ("number", "may_enter", "advice"),
    [
        (errno.EROFS, True, "Read-only file system; set TRIMS_SOCKET_DIR"),
        (errno.EACCES, False, "join the group for which it is"),
        (errno.EACCES, True, "whoever may write there can start one"),
    ],
)
def test_a_directory_that_cannot_be_written(
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    may_enter: bool,
    advice: str,
) -> None:
    """A group has what others may write, but no read-only file system.

    Found: while the daemon of a group was down, its members were told to join the group.
    """

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    endpoint.create()
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda *_: may_enter)
    with pytest.raises(UnusableSocketDir, match="set TRIMS_SOCKET_DIR") as refused:
        spawn.start(endpoint, timeout_s=5)
    monkeypatch.undo()
    assert advice in str(refused.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOLCK, errno.ENOSYS])
def test_no_lock_can_be_taken(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Found: nobody was told why nothing was shared, as where no daemon may be started."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(spawn, "open_own", refuse)
    with pytest.raises(DaemonStartFailed, match="set TRIMS_SOCKET_DIR") as failed:
        spawn.start(endpoint, timeout_s=5)
    assert os.strerror(number) in str(failed.value)
    assert failed.value.reason not in diagnostics.EXPECTED_REASONS


def test_no_process_can_be_started(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "posix_spawn", refuse)
    with pytest.raises(DaemonStartFailed, match="raise `ulimit -u`"):
        spawn.start(endpoint, timeout_s=5)


def test_whoever_waits_for_a_program_without_descriptors_tries(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: processes that had some left failed with it, and asked no daemon for seconds."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "posix_spawn", refuse)
    with pytest.raises(DaemonUnavailable, match="Too many open files"):
        spawn.start(endpoint, timeout_s=5)
    assert Path(endpoint.start_lock).read_text() == ""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "died without a word"),
        ('eval "echo failed no memory here >&$5"; exit 1', "no memory here"),
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
    run_instead('eval "echo failed no memory here >&$5"; exit 1')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(DaemonStartFailed, match="no memory here"):
            spawn.start(endpoint, timeout_s=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_daemon_that_says_nothing_is_not_waited_for(
    endpoint: Endpoint, run_instead: Callable[[str], None]
) -> None:
    run_instead("exec sleep 2")
    with pytest.raises(DaemonTimeout, match="in time; raise TRIMS_START_TIMEOUT"):
        spawn.start(endpoint, timeout_s=0.1)


def test_a_daemon_that_does_not_report_leaves_no_zombie(
    endpoint: Endpoint, run_instead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead("exit")
    ended: list[int] = []

    def never(*_: object) -> str:
        ended.append(spawn._children[-1])
        os.waitid(os.P_PID, ended[0], os.WEXITED | os.WNOWAIT)
        raise DaemonTimeout("it does not report")

    monkeypatch.setattr(spawn, "_read_line", never)
    with pytest.raises(DaemonTimeout):
        spawn.start(endpoint, timeout_s=PATIENCE_S)
    with pytest.raises(ChildProcessError):
        os.waitpid(ended[0], os.WNOHANG)


def test_a_daemon_that_is_late_leaves_no_zombie(
    endpoint: Endpoint, run_instead: Callable[[str], None]
) -> None:
    run_instead("exec sleep 60")
    with pytest.raises(DaemonTimeout):
        spawn.start(endpoint, timeout_s=0.1)
    late = spawn._children[-1]
    os.kill(late, signal.SIGKILL)
    os.waitid(os.P_PID, late, os.WEXITED | os.WNOWAIT)
    pool = Pool(config.load({}, socket_dir=endpoint.directory), endpoint)
    with pytest.raises(DaemonUnavailable):
        pool.ask(lambda line: line.welcome, may_start=False)
    with pytest.raises(ChildProcessError):
        os.waitpid(late, os.WNOHANG)


@pytest.mark.parametrize(("word", "is_counted"), [("ready", True), ("lost-race", False)])
def test_only_who_has_started_a_daemon_counts_it(
    endpoint: Endpoint, run_instead: Callable[[str], None], word: str, is_counted: bool
) -> None:
    """Found: eight threads that loaded at once counted eight daemons."""
    run_instead(f'eval "echo {word} 1 >&$5"')
    pool = Pool(config.load({}, socket_dir=endpoint.directory), endpoint)
    before = diagnostics.stats().events.get("daemon:started", 0)
    with pytest.raises(DaemonUnavailable):
        pool.ask(lambda line: line.welcome, may_start=True)
    assert (diagnostics.stats().events.get("daemon:started", 0) > before) == is_counted


def test_a_failure_of_before_is_no_reason_not_to_try(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.create()
    Path(endpoint.start_lock).write_text("no memory then")
    spawned: list[Endpoint] = []
    monkeypatch.setattr(spawn, "_spawn", lambda _, endpoint, *__: spawned.append(endpoint))
    spawn.start(endpoint, timeout_s=5)
    assert spawned == [endpoint]
    assert Path(endpoint.start_lock).read_text() == ""


def test_the_lock_ends_although_another_process_has_it_open(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that another thread forks meanwhile inherits it."""
    inherited: list[int] = []
    monkeypatch.setattr(spawn, "_spawn", lambda *_: inherited.append(os.dup(spawn._locks[0])))
    spawn.start(endpoint, timeout_s=5)
    with open(endpoint.start_lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(inherited[0])


def test_a_program_with_thousands_of_descriptors(
    endpoint: Endpoint, run_instead: Callable[[str], None]
) -> None:
    """``select`` has no room for those beyond 1023."""
    run_instead('eval "echo failed heard >&$5"; exit 1')
    held = [os.open("/", os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(DaemonStartFailed, match="heard"):
            spawn.start(endpoint, timeout_s=10)
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_a_program_without_an_interpreter(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(DaemonStartFailed, match="cannot start the daemon; run `trims daemon`"):
        spawn.start(endpoint, timeout_s=5)


def test_whoever_waits_for_a_daemon_that_ends_at_once_does_not_hold_the_lock(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would start a daemon."""
    stamps = iter([None, (1, 1), None])
    monkeypatch.setattr(Endpoint, "stamp", lambda _: next(stamps))
    endpoint.create()
    Path(endpoint.start_lock).touch()
    with open(endpoint.start_lock) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with spawn._start_lock(endpoint, deadline=math.inf) as (lock, has_waited):
            assert (lock, has_waited) == (None, True)


def test_whoever_waits_for_a_program_without_an_interpreter_tries(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a program that ran beside one that was frozen started no daemon, either."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(DaemonStartFailed):
        spawn.start(endpoint, timeout_s=5)
    assert Path(endpoint.start_lock).read_text() == ""


def test_a_script_in_the_place_of_the_interpreter_is_not_run(
    endpoint: Endpoint,
    run_instead: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A profiler that wants to profile what the program starts would profile the daemon."""
    running = children._RUNNING
    run_instead(f"touch {tmp_path}/ran")
    monkeypatch.setattr(children, "_RUNNING", running)
    monkeypatch.setattr(
        spawn, "_BOOT", "import os, sys; os.write(int(sys.argv[1]), b'failed as asked\\n')"
    )
    with pytest.raises(DaemonStartFailed, match="as asked"):
        spawn.start(endpoint, timeout_s=30)
    assert not (tmp_path / "ran").exists()


# --- another starter has the lock -----------------------------------------------------------------


def test_a_directory_without_locks_starts_no_daemon_and_leaves_nothing_open(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(DaemonStartFailed, match="No locks available"):
        spawn.start(endpoint, timeout_s=PATIENCE_S)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not spawn._locks


@contextlib.contextmanager
def starting(endpoint: Endpoint) -> Iterator[tuple[int, queue.SimpleQueue[str]]]:
    """The lock, which another starter holds, and what becomes of a start that waits for it."""
    endpoint.create()
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    has_tried, lock_at_once = threading.Event(), spawn._lock

    def try_to_lock(descriptor: int) -> bool:
        is_held = lock_at_once(descriptor)
        has_tried.set()
        return is_held

    def start() -> None:
        try:
            spawn.start(endpoint, timeout_s=30)
            ended.put("started")
        except TrimsError as error:
            ended.put(str(error))

    waiter = threading.Thread(target=start)
    with (
        pytest.MonkeyPatch.context() as patch,
        open(endpoint.start_lock, "wb", buffering=0) as lock,
    ):
        patch.setattr(spawn, "_lock", try_to_lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter.start()
        assert has_tried.wait(PATIENCE_S)
        yield lock.fileno(), ended
    waiter.join()


def serve(endpoint: Endpoint) -> None:
    """Let the directory have another socket."""
    with handover.new_socket() as listener:
        listener.bind(endpoint.handover + ".new")
    os.rename(endpoint.handover + ".new", endpoint.handover)


HOOK = """
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {file!r}) if name == "msgpack" else None
sys.meta_path.append(Finder)
"""
START = """
import sys
from trims_shim.client import spawn
from trims_shim.wire.endpoint import Endpoint
spawn.start(Endpoint(sys.argv[1]), timeout_s=float(sys.argv[2]))
"""


def test_a_package_that_only_a_hook_of_site_finds(endpoint: Endpoint, tmp_path: Path) -> None:
    """Found: no daemon started, which runs without site, beside some editable packages."""
    venv.create(tmp_path / "env")
    (site_packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site_packages / "hook.pth").write_text("import hook_of_msgpack")
    (site_packages / "hook_of_msgpack.py").write_text(HOOK.format(file=msgpack.__file__))
    for package in (zmq, blake3):
        home = Path(package.__file__).parent
        (site_packages / home.name).symlink_to(home)
    done = subprocess.run(
        [tmp_path / "env/bin/python", "-c", START, endpoint.directory, str(PATIENCE_S)],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + Path(endpoint.log).read_text()
    stop_daemon(endpoint, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("is_left", [False, True], ids=["none", "a killed daemon's"])
def test_a_starter_that_is_stopped_once_the_daemon_serves(
    endpoint: Endpoint, is_left: bool
) -> None:
    """Found: whoever waited for it did so in vain, though the daemon was there."""
    endpoint.create()
    if is_left:
        serve(endpoint)
    with starting(endpoint) as (_, ended):
        assert ended.empty()
        serve(endpoint)
        assert ended.get(timeout=PATIENCE_S) == "started"


def test_a_starter_that_fails_where_a_killed_daemon_left_its_socket(endpoint: Endpoint) -> None:
    """Found: it was taken for a new one, and each of a crowd failed one after the other."""
    endpoint.create()
    serve(endpoint)
    with starting(endpoint) as (lock, ended):
        os.write(lock, b"no memory here")
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert ended.get(timeout=PATIENCE_S) == "no memory here"


# --- another daemon has the lock ------------------------------------------------------------------


@pytest.fixture
def silent(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What a daemon that is stopped has: the lock, and a socket without room for connections."""
    endpoint.create()
    monkeypatch.setattr(daemon, "_LOCK_PATIENCE_S", 0.1)
    with open(endpoint.lock, "wb") as lock, handover.new_socket() as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listener.bind(endpoint.handover)
        listener.listen(0)
        with handover.new_socket() as waiting:
            waiting.connect(endpoint.handover)
            yield listener


@pytest.mark.usefixtures("silent")
def test_a_daemon_that_many_wait_for_in_vain(endpoint: Endpoint) -> None:
    """Found: each daemon that was started beside it stayed, and so did `trims stop`."""
    assert daemon._claim(endpoint) is None
    with pytest.raises(DaemonTimeout, match="takes no connections"):
        connection.Connection(endpoint, stall_timeout_s=0.1)
    with pytest.raises(DaemonTimeout, match="takes no connections"):
        stop_daemon(endpoint, timeout_s=0.1)


def test_a_daemon_that_neither_answers_nor_ends(endpoint: Endpoint, silent: socket.socket) -> None:
    """A failure, so that nobody waits for it with each load."""
    silent.close()
    with pytest.raises(DaemonStartFailed, match="neither answers nor ends"):
        daemon._claim(endpoint)
