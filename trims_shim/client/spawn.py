"""Start the daemon when none answers.

The starter takes ``start.lock``, looks once more whether somebody listens, and only then spawns;
the report pipe exists before the spawn, so no outcome is lost. The new process detaches by a second
fork: the daemon is never a child of the user's program, which must not find a stranger when it
waits for its own children.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from trims_shim.children import search_path
from trims_shim.errors import DaemonStartFailed, DaemonTimeout, DaemonUnavailable
from trims_shim.late_imports import no_fork
from trims_shim.wire.endpoint import Endpoint
from trims_shim.wire.handover import wait_until_ready

__all__ = ["start"]

_POLL_S = 0.02
_REASON_LIMIT_BYTES = 4000
_BOOT = (
    "import json, os, sys; "
    "sys.path[:] = json.loads(sys.argv[2]); "
    "os.fork() and os._exit(0); "
    "from trims_shim.daemon.detached import main; "
    "main(int(sys.argv[1]))"
)


def start(endpoint: Endpoint, *, timeout_s: float) -> None:
    """Start a daemon and wait until one answers. Returns also when somebody else won the race.

    Raises DaemonStartFailed with the daemon's reason, DaemonTimeout, DaemonUnavailable.
    """
    endpoint.create()
    deadline = time.monotonic() + timeout_s
    try:
        with _start_lock(endpoint, deadline) as (lock, has_waited):
            if has_waited and os.path.exists(endpoint.handover):
                return
            if has_waited:
                _raise_failure_before(lock)
            os.ftruncate(lock, 0)
            try:
                _spawn(endpoint, deadline)
            except DaemonStartFailed as error:
                with contextlib.suppress(OSError):  # no room, which may be why it cannot start
                    os.pwrite(lock, str(error).encode()[:_REASON_LIMIT_BYTES], 0)
                raise
    except OSError as error:
        raise DaemonUnavailable(
            f"the daemon cannot be started in {endpoint.directory}: {error}"
        ) from error


@contextlib.contextmanager
def _start_lock(endpoint: Endpoint, deadline: float) -> Iterator[tuple[int, bool]]:
    """The held lock, and whether another starter has had it in the meantime."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(endpoint.start_lock, flags, 0o600)
    has_waited = False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                has_waited = True
            if time.monotonic() > deadline:
                raise DaemonTimeout(
                    f"another process has been starting the daemon in {endpoint.directory} for "
                    f"too long; see {endpoint.log}"
                )
            time.sleep(_POLL_S)
        yield descriptor, has_waited
    finally:
        # To close it is not enough: a child that another thread has forked meanwhile has it open.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _raise_failure_before(lock: int) -> None:
    """Take the word of the starter before us: a crowd must not fail one after the other."""
    reason = os.pread(lock, _REASON_LIMIT_BYTES, 0).decode(errors="replace")
    if reason:
        raise DaemonStartFailed(reason)


def _spawn(endpoint: Endpoint, deadline: float) -> None:
    executable = _interpreter()
    with contextlib.ExitStack() as stack:
        # A child that another thread forks meanwhile has all pipes that there are, Popen's own too,
        # and who reads from them would wait for its end.
        with no_fork():
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            try:
                process = _launch(executable, endpoint, writer)
            except (OSError, RuntimeError) as error:  # RuntimeError: in a subinterpreter
                raise DaemonStartFailed(
                    f"the daemon cannot be started with {executable}: {error}; run `trims daemon`"
                ) from error
            finally:
                os.close(writer)
        line = _read_line(reader, deadline, endpoint)
        # The first fork ends at once; its status is taken so that no zombie is left.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
    word, _, reason = line.partition(" ")
    if word not in ("ready", "lost-race"):
        detail = reason.strip() or f"it died without a word; see {endpoint.log}"
        raise DaemonStartFailed(f"the daemon could not start: {detail}")


def _launch(executable: str, endpoint: Endpoint, writer: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment.update(TRIMS_ENABLED="0", TRIMS_SOCKET_DIR=endpoint.directory)
    # Nobody's link may make us write somewhere else.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(endpoint.log, flags, 0o600), "ab") as log:
        return subprocess.Popen(
            [executable, "-I", "-c", _BOOT, str(writer), json.dumps(search_path())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=environment,
            pass_fds=(writer,),
            start_new_session=True,
        )


def _interpreter() -> str:
    executable = sys.executable or ""
    name = os.path.basename(executable).lower()
    # One that is frozen (PyInstaller, cx_Freeze) would run the program a second time.
    is_python = "python" in name and not getattr(sys, "frozen", False)
    if not is_python or not os.path.exists(executable):
        raise DaemonUnavailable(
            f"this program's interpreter ({executable or 'unknown'}) cannot start the daemon; "
            f"run `trims daemon` first"
        )
    return executable


def _read_line(reader: int, deadline: float, endpoint: Endpoint) -> str:
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not wait_until_ready(reader, left):
            raise DaemonTimeout(f"the daemon did not report in time; see {endpoint.log}")
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        data += chunk
    return data.decode(errors="replace")
