"""Start the daemon when none answers.

The starter takes ``start.lock``, checks once more whether a daemon listens, and only then spawns.
The report pipe exists before the spawn, so no outcome is lost. The new process detaches by a second
fork: the daemon must not be a child of the user's program, which may wait for its own children.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator

from trims_shim import diagnostics
from trims_shim.children import NoInterpreter, interpreter, search_path
from trims_shim.client.descriptors import above_streams
from trims_shim.directories import open_own
from trims_shim.errors import (
    DaemonStartFailed,
    DaemonTimeout,
    DaemonUnavailable,
    UnusableSocketDir,
)
from trims_shim.late_imports import no_fork
from trims_shim.wire.endpoint import Endpoint
from trims_shim.wire.handover import wait_until_ready

__all__ = ["start", "take_statuses"]

_POLL_S = 0.02
_REASON_LIMIT_BYTES = 4000
_STREAMS = (0, 1, 2)
_children: list[int] = []
"""Process ids of first forks, which end at once."""
_locks: list[int] = []
"""Descriptors of locks that are held or waited for."""
_BOOT = (
    "import json, os, sys; "
    "os.chdir('/'); "
    "passed = list(map(int, sys.argv[3:])); "
    "[os.dup2(each, stream) for stream, each in enumerate(passed[:3])]; "
    "[os.closerange(each, each + 1) for each in passed]; "  # some may be gone
    "sys.path[:] = json.loads(sys.argv[2]); "
    "os.fork() and os._exit(0); "
    "os.setsid(); "
    "from trims_shim.daemon.detached import main; "
    "main(int(sys.argv[1]))"
)


def start(endpoint: Endpoint, *, timeout_s: float, has_group: bool = False) -> None:
    """Start a daemon and wait until one answers, also if another process has won the race.

    ``has_group``: see :meth:`Endpoint.create`.

    Raises DaemonStartFailed with the daemon's reason, DaemonTimeout, DaemonUnavailable,
    UnusableSocketDir.
    """
    endpoint.create(has_group=has_group)
    deadline = time.monotonic() + timeout_s
    try:
        # What a program prints to a stream that it has closed would be taken for the report.
        with above_streams(), _start_lock(endpoint, deadline) as (lock, has_waited):
            if lock is None:
                return
            if has_waited:
                _raise_failure_before(lock)
                if os.path.exists(endpoint.handover):
                    return
            os.ftruncate(lock, 0)
            executable = _interpreter()  # Who waits for the lock may have one all the same.
            try:
                _spawn(executable, endpoint, deadline)
            except DaemonStartFailed as error:
                with contextlib.suppress(OSError):  # no room, which may be why it cannot start
                    os.pwrite(lock, str(error).encode()[:_REASON_LIMIT_BYTES], 0)
                raise
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS):
            first = ""
            if error.errno == errno.EACCES:
                is_member = os.access(endpoint.directory, os.X_OK)  # the group's daemon is down
                join = "join the group for which it is (TRIMS_GROUP), or "
                first = "whoever may write there can start one, or " if is_member else join
            raise UnusableSocketDir(
                f"no daemon can be reached or started in {endpoint.directory}: {error.strerror}; "
                f"{first}set TRIMS_SOCKET_DIR to a directory that you may write"
            ) from error
        if error.errno == errno.EMFILE:  # The next load may find the program with fewer files.
            raise DaemonUnavailable(
                f"the daemon cannot be started in {endpoint.directory}: {error}"
            ) from error
        # Such as no room or, on some network file systems, no locks.
        raise DaemonStartFailed(
            f"the daemon cannot be started in {endpoint.directory}: {error}; set TRIMS_SOCKET_DIR "
            "to another directory"
        ) from error


@contextlib.contextmanager
def _start_lock(endpoint: Endpoint, deadline: float) -> Iterator[tuple[int | None, bool]]:
    """Yield the held lock, and whether another starter has held it in the meantime.

    Yields None instead of the lock once there is a new socket: it gets its name only when it
    listens. The lock's holder may be stopped, and then never reports the daemon.
    """
    before = endpoint.stamp()
    descriptor = open_own(endpoint.start_lock, os.O_RDWR)
    _locks.append(descriptor)
    has_waited = False
    try:
        while not (is_held := _lock(descriptor)):
            has_waited = True
            if endpoint.stamp() not in (None, before):
                break
            if time.monotonic() > deadline:
                raise DaemonTimeout(
                    f"another process has been starting the daemon in {endpoint.directory} for "
                    f"too long; raise TRIMS_START_TIMEOUT, or see {endpoint.log}"
                )
            time.sleep(_POLL_S)
        is_served = has_waited and endpoint.stamp() not in (None, before)
        yield None if is_served or not is_held else descriptor, has_waited
    finally:
        if descriptor in _locks:  # Else it is a child that a signal handler has forked meanwhile.
            # Closing is not enough: a child that another thread has forked has it open.
            with contextlib.suppress(OSError):  # file systems and sandboxes without locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            _locks.remove(descriptor)
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _raise_failure_before(lock: int) -> None:
    """Raise the failure of the starter before us, so that a crowd does not fail one by one."""
    reason = os.pread(lock, _REASON_LIMIT_BYTES, 0).decode(errors="replace")
    if reason:
        raise DaemonStartFailed(reason)


def _spawn(executable: str, endpoint: Endpoint, deadline: float) -> None:
    take_statuses()
    with contextlib.ExitStack() as stack:
        # A child that another thread forks here would keep the pipe open, and we miss its end.
        with no_fork():
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            try:
                child = _launch(executable, endpoint, writer)
            except OSError as error:
                if error.errno == errno.EMFILE:  # Who waits for the lock may have some left.
                    raise
                is_limit = error.errno == errno.EAGAIN  # of processes
                next_step = "raise `ulimit -u`" if is_limit else "run `trims daemon`"
                raise DaemonStartFailed(
                    f"the daemon cannot be started with {executable}: {error}; {next_step}"
                ) from error
            finally:
                os.close(writer)
        _children.append(child)
        stack.callback(take_statuses)  # also if it does not report: there may be no next start
        line = _read_line(reader, deadline, endpoint)
    while child in take_statuses() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    word, _, reason = line.partition(" ")
    if word not in ("ready", "lost-race"):
        detail = reason.strip() or f"it died without a word; see {endpoint.log}"
        raise DaemonStartFailed(f"the daemon could not start: {detail}")
    if word == "ready":
        diagnostics.count("daemon", "started")


def _launch(executable: str, endpoint: Endpoint, writer: int) -> int:
    """Launch the first fork and return its process id.

    Without ``site``: it would run the hooks of all that is installed (editable packages, coverage),
    some of them for longer than ours takes to import, for a ``sys.path`` that is replaced.

    Not subprocess.Popen, which reads from its own pipe until the last copy of the other end is
    closed: a child that another thread forks meanwhile has a copy.
    """
    environment = dict(os.environ)
    environment.update(TRIMS_ENABLED="0", TRIMS_SOCKET_DIR=endpoint.directory)
    with contextlib.ExitStack() as stack:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, null)
        log = open_own(endpoint.log, os.O_WRONLY | os.O_APPEND)
        stack.callback(os.close, log)
        sources = (writer, null, log)
        report, null, log = kept = [_above_streams(each, stack) for each in sources]
        streams = (null, log, log)
        # Not closed by file actions, which refuse numbers beyond the limit (`ulimit -S -n`).
        surplus = [each for each in _inheritable() if each not in _STREAMS]
        # An argument each: one may have 128 KiB.
        arguments = [str(report), json.dumps(search_path()), *map(str, [*streams, *surplus])]
        # No thread of ours runs before the child runs its program, and to replace a stream that is
        # a file may wait for a server that does not answer. The child's program does that.
        pairs = [*zip(sources, kept, strict=True), *zip(streams, _STREAMS, strict=True)]
        held = {number for number in _STREAMS if _is_file(number)}
        return os.posix_spawn(
            executable,
            [executable, "-I", "-S", "-c", _BOOT, *arguments],
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, *pair) for pair in pairs if pair[1] not in held],
            setpgroup=0,  # the terminal's Ctrl-C is not for it
        )


def _above_streams(descriptor: int, stack: contextlib.ExitStack) -> int:
    """Return a duplicate above the streams: the program may have closed its own."""
    duplicate = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, len(_STREAMS))
    stack.callback(os.close, duplicate)
    return duplicate


def _is_file(number: int) -> bool:
    """Whether a descriptor is open on a file, other than a device; asks no server."""
    try:
        name = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return False
    return name.startswith("/") and not name.startswith("/dev/")


def _inheritable() -> list[int]:
    """Return the program's descriptors that a new process would inherit."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.get_inheritable(number):
                found.append(number)
    return found


def take_statuses() -> list[int]:
    """Reap first forks that have ended, so that no zombie is left; return the others.

    Some end after a start was given up.
    """
    for child in list(_children):
        try:
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                continue
        except ChildProcessError:
            pass  # The program has reaped it.
        with contextlib.suppress(ValueError):  # another thread has
            _children.remove(child)
    return _children


def _interpreter() -> str:
    try:
        return interpreter()
    except NoInterpreter as error:
        raise DaemonStartFailed(
            f"{error} and cannot start the daemon; run `trims daemon` first"
        ) from error


def _read_line(reader: int, deadline: float, endpoint: Endpoint) -> str:
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not wait_until_ready(reader, left):
            raise DaemonTimeout(
                "the daemon did not report in time; raise TRIMS_START_TIMEOUT, or see "
                f"{endpoint.log}"
            )
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        data += chunk
    return data.decode(errors="replace")


def _after_fork_in_child() -> None:
    """Close inherited locks, so that they end with the process that took them."""
    for descriptor in _locks:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
