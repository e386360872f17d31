"""The harness of two-process tests: a private daemon, client processes, and what the kernel says.

Every wait has a timeout; :meth:`World.close` kills what is left and reports it. A process belongs
to a world when its environment names the world's socket directory, so that a daemon which detached
itself is found as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import processes

from trims_shim import config
from trims_shim.client.arenas import Arena
from trims_shim.client.cache import Cache
from trims_shim.client.connection import Connection
from trims_shim.errors import DaemonError, TooManyRequests, TrimsError
from trims_shim.wire import admin, messages

__all__ = [
    "CONTENT_BYTES",
    "PATIENCE_S",
    "Child",
    "InProcessDaemon",
    "World",
    "close_worlds",
    "content",
    "open_descriptors",
    "process_name",
    "process_state",
    "wait_until",
]

PATIENCE_S = 60.0
"""Far beyond what anything takes, on a busy machine, too: a test that waits so long has failed."""
CONTENT_BYTES = 1 << 20
LARGE_BYTES = 896 << 20
"""Slow enough to load that a test can interfere, on a busy machine, too."""

_PRELUDE = """\
import faulthandler, json, os, signal, sys, time
faulthandler.enable()
import trims_shim
from trims_shim import config, errors
from trims_shim.client import cache as cache_module
from trims_shim.client.cache import Cache, cache
from trims_shim.client.connection import Connection
from trims_shim.specs import Variant
from trims_shim.wire import handover, messages, admin
def say(value=None):
    sys.stdout.write(json.dumps(value) + "\\n"); sys.stdout.flush()
def hear():
    return json.loads(sys.stdin.readline())
def open_file(path, name=None, shared=None):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return (shared or cache()).open(descriptor, name=name or path, min_bytes=1)
    finally:
        os.close(descriptor)
def data(arena):
    return bytes(memoryview(arena.buffer))
"""


def content(seed: int, size_bytes: int = CONTENT_BYTES) -> bytes:
    """Bytes that differ for each seed, everywhere, so that a torn image is noticed."""
    pattern = (seed * 2654435761 % (1 << 32)).to_bytes(4, "little") + seed.to_bytes(4, "little")
    return (pattern * (-(-size_bytes // 8)))[:size_bytes]


def open_path(cache: Cache, path: str) -> Arena:
    """The arena of a file of any size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return cache.open(descriptor, name=path, min_bytes=1)
    finally:
        os.close(descriptor)


def wait_until(
    condition: Callable[[], Any],
    what: str = "it",
    *,
    timeout_s: float = PATIENCE_S,
    interval_s: float = 0.002,
) -> Any:
    """The first true value of ``condition``; an error after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(interval_s)


def open_descriptors() -> set[tuple[int, str]]:
    """Descriptors of this process, and what they lead to.

    Nothing of a test is left open if they are ``<=`` those of before. Not ``==``: a thread of an
    earlier test, or the collector, may close some of its own meanwhile.
    """
    return set(World.descriptors(os.getpid()).items())


def process_name(pid: int) -> str:
    """What ``ps -e`` calls it."""
    with open(f"/proc/{pid}/comm") as file:
        return file.read().rstrip()


def process_state(pid: int) -> str:
    """One letter of proc(5): R, S, T, Z...; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True)
class Segment:
    """A segment descriptor that a process has open."""

    descriptor: int
    inode: int
    resident_bytes: int


class Child:
    """A client process that runs a script and talks JSON lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def hear(self, timeout_s: float = PATIENCE_S) -> Any:
        """The next value the child said."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"child {self.pid} said nothing in {timeout_s:g} s") from None
        if not line:
            raise AssertionError(f"child {self.pid} ended: {self.wait()}, {self.errors()}")
        return json.loads(line)

    def say(self, value: Any = None) -> None:
        """A value for the child's ``hear()``."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)

    def errors(self) -> str:
        """What an ended child wrote to its standard error."""
        assert self.process.stderr is not None
        self.process.stderr.seek(0)
        return self.process.stderr.read()

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        if self.process.poll() is None:
            self.kill()
        self._reader.join(PATIENCE_S)
        if self._reader.is_alive():
            # What it has forked holds the other end, and a pipe that is read cannot be closed.
            raise AssertionError(f"a child of {self.pid} is still there: {self.errors()}")
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class World:
    """A private socket directory with everything that lives in it."""

    def __init__(self, **settings: str) -> None:
        """``settings`` (``host_bytes="8M"``) hold for the daemon and for every client."""
        self.root = tempfile.mkdtemp(prefix="tf-", dir="/tmp")
        self.sockets = os.path.join(self.root, "s")
        self.settings = {
            "idle_exit": "60",
            "host_bytes": "256M",
            "start_timeout": "60",
            "stall_timeout": "30",
            "ingest_threads": "1",
            "cache_dir": os.path.join(self.root, "cache"),
            **settings,
        }
        self.variables: dict[str, str] = {}
        """Further ones of every process, for example those of ``emulated_environment``."""
        self.children: list[Child] = []
        self.caches: list[Cache] = []
        self._files = 0
        self._made_ticks = processes.now_ticks()

    # --- files and settings -----------------------------------------------------------------------

    def file(self, seed: int = 1, size_bytes: int = CONTENT_BYTES, *, name: str = "") -> str:
        """A model file with :func:`content` of this seed."""
        self._files += 1
        path = os.path.join(self.root, name or f"model-{self._files}.bin")
        with open(path, "wb") as file:
            file.write(content(seed, size_bytes))
        return path

    def sparse_file(self, size_bytes: int) -> str:
        """A file of zeros that takes no disk: slow enough to load that a test can interfere."""
        self._files += 1
        path = os.path.join(self.root, f"sparse-{self._files}.bin")
        with open(path, "wb") as file:
            file.truncate(size_bytes)
        return path

    def environment(self, **settings: str) -> dict[str, str]:
        """The environment of a process of this world."""
        # Programs compute in as many threads as those of users.
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("TRIMS_") and key != "OMP_NUM_THREADS"
        }
        environment.update(self.variables)
        environment["TRIMS_SOCKET_DIR"] = self.sockets
        for name, value in {**self.settings, **settings}.items():
            environment[f"TRIMS_{name.upper()}"] = value
        return environment

    def config(self, **settings: str) -> config.Config:
        """Settings for a client inside this process."""
        return config.load({}, socket_dir=self.sockets, **{**self.settings, **settings})

    def cache(self, **settings: str) -> Cache:
        """A cache of its own inside this process; closed with the world.

        A daemon that it starts inherits this process's environment: use :meth:`start` first.
        """
        cache = Cache(self.config(**settings))
        self.caches.append(cache)
        return cache

    def connection(self) -> Connection:
        """A bare connection; the caller closes it."""
        cache = Cache(self.config())
        return Connection(cache.endpoint, stall_timeout_s=30)

    # --- processes --------------------------------------------------------------------------------

    def start(self, **settings: str) -> int:
        """Start the daemon as a client does; its process id."""
        self.run("cache().welcome(may_start=True)", **settings)
        return self.pid()

    def spawn(self, script: str, *, prefix: tuple[str, ...] = (), **settings: str) -> Child:
        """A client process; the script finds say(), hear(), open_file() and data()."""
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _PRELUDE + script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=self.environment(**settings),
        )
        process.stderr = errors  # type: ignore[assignment]
        child = Child(process)
        self.children.append(child)
        return child

    def run(self, script: str, *, timeout_s: float = 120.0, **settings: str) -> Any:
        """Run a script to its end; the last value it said. An error when it failed."""
        child = self.spawn(script, **settings)
        try:
            status = child.wait(timeout_s)
        finally:
            errors = child.errors()
            child.close()
            self.children.remove(child)
        said = []
        while not child._lines.empty():
            said.append(child._lines.get())
        assert status == 0, f"script ended with {status}: {errors}\ndaemon.log:\n{self.log()}"
        values = [line for line in said if line]
        return json.loads(values[-1]) if values else None

    def status(self) -> admin.GetStatusReply:
        """The daemon's status, over a connection of its own. Raises DaemonError."""
        connection = self.connection()
        try:
            reply: admin.GetStatusReply = connection.request(admin.GetStatusRequest())
            return reply
        finally:
            connection.close()

    def is_answering(self) -> bool:
        """Whether a daemon tells its status."""
        try:
            self.status()
        except TrimsError:
            return False
        return True

    def pid(self) -> int:
        """The process id of the daemon that answers now."""
        connection = self.connection()
        try:
            return connection.welcome.pid
        finally:
            connection.close()

    def wait_for_load(self) -> None:
        """Returns while a load is in progress; asks often, so as not to miss it."""
        connection = self.connection()
        try:
            wait_until(
                lambda: connection.request(admin.GetStatusRequest()).memory.reserved_bytes > 0,
                "a load in progress",
                interval_s=0.0005,
            )
        finally:
            connection.close()

    def log(self) -> str:
        """The daemon's log."""
        try:
            with open(os.path.join(self.sockets, "daemon.log")) as file:
                return file.read()
        except OSError as error:
            return str(error)

    def kill_daemon(self) -> int:
        """SIGKILL the daemon; returns when the kernel has closed everything of it."""
        pid = self.pid()
        self.signal(pid, signal.SIGKILL)
        wait_until(lambda: process_state(pid) in ("", "Z"), f"daemon {pid} gone")
        return pid

    def stop_daemon(self) -> None:
        """Ask it to stop and wait until it is gone."""
        with contextlib.suppress(DaemonError):
            connection = wait_until(self._accepted, "the daemon accepts a client")
            try:
                pid = connection.welcome.pid
                connection.request(admin.StopDaemonRequest())
            finally:
                connection.close()
            wait_until(lambda: process_state(pid) in ("", "Z"), f"daemon {pid} gone")

    def _accepted(self) -> Connection | None:
        """None while it is out of descriptors: it may not have seen yet that others have ended."""
        with contextlib.suppress(TooManyRequests):
            return self.connection()
        return None

    @staticmethod
    def signal(pid: int, number: int) -> None:
        """Send a signal to a process that may be gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """A process that does nothing within the block, and goes on after it."""
        self.signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(pid, signal.SIGCONT)

    def processes(self) -> list[int]:
        """Every live process whose environment names this socket directory."""
        variable = f"TRIMS_SOCKET_DIR={self.sockets}"
        found = processes.with_variable(variable, since_ticks=self._made_ticks)
        return [pid for pid in found if process_state(pid) != "Z"]

    def running(self, module: str) -> list[int]:
        """Those of them that run a module of the package."""
        return [pid for pid in self.processes() if f"trims_shim.{module}" in self._command(pid)]

    # --- what the kernel says ---------------------------------------------------------------------

    @staticmethod
    def descriptors(pid: int) -> dict[int, str]:
        """Open descriptors of a process and what they lead to."""
        found = {}
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        return found

    @classmethod
    def segments(cls, pid: int) -> list[Segment]:
        """Segment descriptors of a process."""
        found = []
        for descriptor, target in cls.descriptors(pid).items():
            if "trims-segment" in target or "/segment-" in target:
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    found.append(Segment(descriptor, status.st_ino, status.st_blocks * 512))
        return found

    @staticmethod
    def rss_bytes(pid: int) -> int:
        """Private resident memory of a process."""
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = file.read().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def assert_account(self) -> None:
        """The daemon's account of its memory is what the kernel charges for its segments."""
        status = self.status()
        segments = {each.inode: each.resident_bytes for each in self.segments(status.pid)}
        assert status.memory.reserved_bytes == 0
        assert status.memory.resident_bytes == sum(segments.values())
        assert len(segments) == len(status.images)
        assert len(self.segments(status.pid)) == len(segments)

    def assert_quiet(self, descriptors: int) -> None:
        """No lease, no session but ours, and as many descriptors as before."""
        pid = self.pid()
        wait_until(
            lambda: sum(image.leases for image in self.status().images) == 0, "every lease released"
        )
        wait_until(
            lambda: len(self.descriptors(pid)) <= descriptors,
            f"{descriptors} descriptors, not {self.descriptors(pid)}",
        )

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop everything. An AssertionError names what had to be killed or would not go."""
        for cache in self.caches:
            cache.close()
        for child in self.children:
            child.close()
        with contextlib.suppress(Exception):
            self.stop_daemon()
        try:
            wait_until(lambda: not self.processes(), "all processes gone")
        except AssertionError:
            left = {pid: self._command(pid)[:300] for pid in self.processes()}
            for pid in left:
                self.signal(pid, signal.SIGCONT)
                self.signal(pid, signal.SIGKILL)
            wait_until(lambda: not self.processes(), "all processes killed")
            if left:
                raise AssertionError(f"processes were left behind: {left}\n{self.log()}") from None
        finally:
            shutil.rmtree(self.root)

    @staticmethod
    def _command(pid: int) -> str:
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                return file.read().replace("\0", " ")
        except OSError:
            return ""


class InProcessDaemon:
    """A real server in a thread of this process, so that a test can hold its reads back."""

    def __init__(self, world: World, **settings: str) -> None:
        from trims_shim.daemon import main as daemon_main
        from trims_shim.wire import endpoint

        settings_of_daemon = world.config(**settings)
        directory = endpoint.choose(settings_of_daemon)
        directory.create()
        self.server = daemon_main._build(directory, settings_of_daemon)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop the server and wait for its thread."""
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the server's thread does not end"
        os.close(self.server._wake_descriptor)


@contextlib.contextmanager
def raw_connection(world: World, *, hello: bool = True) -> Iterator[socket.socket]:
    """A handover socket without the client's good manners; blocking, with a timeout."""
    from trims_shim.wire import codec

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(os.path.join(world.sockets, "handover.sock"))
        if hello:
            greeting = messages.Hello(messages.PROTOCOL_VERSION, "1.0.0", os.getpid())
            connection.send(codec.encode(greeting))
        yield connection


def close_worlds(worlds: Iterable[World]) -> None:
    """Close all of them; then fail when any left something behind."""
    problems = []
    for world in worlds:
        try:
            world.close()
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, problems
