"""The daemon process: detach, claim the endpoint, serve, clean up.

Start-up reports exactly one typed outcome through an inherited pipe (:class:`Outcome`), so that the
client that started it never guesses: ready, somebody else won the race, or a reason. Whoever holds
the flock on ``daemon.lock`` owns the socket names; a socket found without a holder is stale.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import glob
import grp
import itertools
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator

from trims_shim import config as configuration
from trims_shim.config import Config
from trims_shim.daemon import descriptors
from trims_shim.daemon.eviction import eviction_policy
from trims_shim.daemon.front import Front
from trims_shim.daemon.loader import Loader
from trims_shim.daemon.prepared.directory import PreparedSettings
from trims_shim.daemon.prepared.preparing import Preparer
from trims_shim.daemon.prepared.serving import PreparedModels
from trims_shim.daemon.server import Server
from trims_shim.daemon.sessions import Limits, Sessions
from trims_shim.daemon.store import Store
from trims_shim.daemon.tiers import DeviceSettings, HostTier, Tiers
from trims_shim.directories import open_own
from trims_shim.errors import ConfigError, DaemonStartFailed, MemoryFailure, TrimsError
from trims_shim.memory import host
from trims_shim.memory.copying import default_threads
from trims_shim.specs import SegmentKind
from trims_shim.wire import endpoint as endpoints
from trims_shim.wire import handover
from trims_shim.wire.endpoint import Endpoint

__all__ = ["Outcome", "run"]

_logger = logging.getLogger("trims_shim.daemon")
_LOCK_PATIENCE_S = 5.0
_DESCRIPTORS_NEEDED = 96
"""Some twenty of its own, a quarter kept free (:mod:`.descriptors`), and a few clients' with some
images each. Of fewer, nearly every load would be refused."""


class Outcome(enum.Enum):
    """First word of the line a starting daemon reports; the rest of it is for people."""

    READY = "ready"
    LOST_RACE = "lost-race"
    FAILED = "failed"


def run(*, report_descriptor: int | None = None, settings: Config | None = None) -> int:
    """Serve until idle, stopped or replaced; return the exit status. Blocks.

    ``report_descriptor``: a pipe for the outcome, closed after it.
    """
    report = _Report(report_descriptor)
    try:
        config = settings or configuration.load()
        endpoint = endpoints.choose(config)
        endpoint.create(has_group=bool(config.group))
        lock = _claim(endpoint)
        if lock is None:
            report.send(Outcome.LOST_RACE, "another daemon serves this socket directory")
            return 0
        try:
            server = _build(endpoint, config)
        except RuntimeError as error:  # no more threads
            raise DaemonStartFailed(
                f"the daemon cannot start its threads: {error}; raise `ulimit -u`"
            ) from error
    except TrimsError as error:
        report.send(Outcome.FAILED, str(error))
        return 2 if isinstance(error, ConfigError) else 1  # as all commands of `trims`
    # Border: the client that waits must hear of every failure.
    except Exception as error:
        report.send(Outcome.FAILED, f"{type(error).__name__}: {error}")
        raise
    return _serve(server, lock, report)


class _Report:
    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def send(self, outcome: Outcome, text: str) -> None:
        if outcome is Outcome.FAILED:
            _logger.error("%s", text)
        if self._descriptor is None:
            if outcome is Outcome.READY:
                _tell_service_manager("READY=1")
            return
        line = f"{outcome.value} {text}\n"
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line.encode()[:4000])
        os.close(self._descriptor)
        self._descriptor = None


def _tell_service_manager(state: str) -> None:
    """Do as systemd's ``Type=notify`` services do (sd_notify(3)); elsewhere nobody listens.

    Not for a daemon that a load has started: the variable is then the starting program's.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as manager:
        manager.settimeout(1.0)
        manager.sendto(state.encode(), name)


def _claim(endpoint: Endpoint) -> int | None:
    """The held lock, or None when a live daemon has it and answers. Raises DaemonStartFailed."""
    lock = open_own(endpoint.lock, os.O_RDWR)
    patience = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if _answers(endpoint):
                os.close(lock)
                return None
            if time.monotonic() > patience:
                os.close(lock)
                raise DaemonStartFailed(
                    f"the daemon that has locked {endpoint.lock} neither answers nor ends; "
                    f"`fuser -k {endpoint.lock}` ends it"
                ) from None
        # A daemon that drains gives the lock up at once; one that starts will answer soon.
        time.sleep(0.02)


def _answers(endpoint: Endpoint) -> bool:
    with handover.new_socket() as probe:
        return _listens(probe, endpoint.handover)


def _listens(probe: socket.socket, path: str) -> bool:
    """Whether a process has the socket at ``path``, though it may be stopped."""
    probe.setblocking(False)
    try:
        probe.connect(path)
    except BlockingIOError:
        return True  # Its backlog is full.
    except OSError:
        return False
    return True


def _build(endpoint: Endpoint, config: Config) -> Server:
    _raise_descriptor_limit()
    memory, reason = _memory(config)
    _remove_stale(endpoint)
    instance = os.urandom(8).hex()
    wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    numbers = itertools.count(1)

    def wake() -> None:
        os.eventfd_write(wake_descriptor, 1)

    gid = _group_id(config.group)
    with _umask(0o177 if gid is None else 0o117):
        listener = _listen(endpoint)
        server = Server(
            endpoint,
            instance=instance,
            listener=listener,
            tiers=_tiers(config, memory, numbers, wake),
            prepared=lambda front: _prepared(front, config, numbers, wake),
            sessions=Sessions(Limits()),
            wake_descriptor=wake_descriptor,
            idle_exit_s=config.idle_exit,
            keep_unused_s=config.keep_unused,
            config_hash=config.daemon_hash(),
            memory_reason=reason,
        )
    if gid is not None:
        _give_to_group(endpoint, instance, gid)
    return server


def _memory(config: Config) -> tuple[host.HostMemory, str]:
    if config.memory_kind == "auto":
        return host.open_best(config.host_bytes)
    kind = SegmentKind(config.memory_kind)
    try:
        memory = host.open_memory(kind, budget_bytes=config.host_bytes)
    except MemoryFailure as error:
        raise MemoryFailure(
            f"TRIMS_MEMORY_KIND={kind.value} does not work here: {error}"
        ) from error
    return memory, "chosen by TRIMS_MEMORY_KIND"


def _tiers(
    config: Config, memory: host.HostMemory, numbers: Iterator[int], wake: Callable[[], None]
) -> Tiers:
    store = Store(
        config.host_bytes,
        policy=eviction_policy(config.eviction, config.host_bytes),
        footprint_bytes=memory.footprint_bytes,
        numbers=numbers,
    )
    loader = Loader(memory, threads=config.ingest_threads or default_threads(), wake=wake)
    host_tier = HostTier(store, loader, config.host_headroom_bytes)
    return Tiers(host_tier, DeviceSettings.of(config), numbers=numbers, wake=wake)


def _prepared(
    front: Front, config: Config, numbers: Iterator[int], wake: Callable[[], None]
) -> PreparedModels:
    preparer = Preparer(
        timeout_s=config.prepare_timeout,
        anyway_bytes=config.prepare_anyway_bytes,
        gives_way=config.prepare_priority == "low",
    )
    settings = PreparedSettings.of(config)
    return PreparedModels(front, settings, preparer=preparer, numbers=numbers, wake=wake)


def _listen(endpoint: Endpoint) -> socket.socket:
    """Bind under a temporary name and rename, so that a name that exists also listens."""
    listener = handover.new_socket()
    temporary = f"{endpoint.handover}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    listener.bind(temporary)
    handover.watch_senders(listener)
    listener.listen(512)
    os.rename(temporary, endpoint.handover)
    return listener


def _serve(server: Server, lock: int, report: _Report) -> int:
    endpoint = server.endpoint
    ours = _inode(endpoint.handover)
    server.on_stop = lambda: _retire(endpoint, ours, lock)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if not (number == signal.SIGHUP and is_ignored):  # as by nohup
            signal.signal(number, lambda *_: server.stop())
    others = endpoint.control(server.instance), endpoint.events(server.instance)
    server.is_reachable = lambda: _inode(endpoint.handover) == ours and all(map(_inode, others))
    _logger.info(
        "daemon %d serves %s from %s",
        os.getpid(),
        endpoint.directory,
        server.tiers.host.loader.memory.kind.value,
    )
    report.send(Outcome.READY, str(os.getpid()))
    try:
        server.run()
    finally:
        server.stop()
        for path in others:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return 0


def _inode(path: str) -> int:
    """The inode of a socket; 0 if there is none."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


def _retire(endpoint: Endpoint, ours: int, lock: int) -> None:
    """Make room for a successor: remove our name, free the lock."""
    with contextlib.suppress(OSError):
        if _inode(endpoint.handover) == ours:
            os.unlink(endpoint.handover)
    with contextlib.suppress(OSError):
        os.close(lock)


def _remove_stale(endpoint: Endpoint) -> None:
    """Sockets that a killed daemon left. Called with the lock held."""
    pattern = os.path.join(glob.escape(endpoint.directory), "*.sock*")
    for path in glob.glob(pattern):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.lstat(path).st_mode) and not _is_draining(path):
                os.unlink(path)


def _is_draining(path: str) -> bool:
    """Whether a predecessor still serves this control socket."""
    if os.path.basename(path).startswith("handover"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return _listens(probe, path)


def _raise_descriptor_limit() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = descriptors.limit()
    if limit < _DESCRIPTORS_NEEDED:
        raise DaemonStartFailed(
            f"the daemon may have {limit} open files and needs {_DESCRIPTORS_NEEDED}; raise "
            "`ulimit -H -n`"
        )


def _group_id(group: str) -> int | None:
    """A group's name, or its number: images of containers know few names."""
    if not group:
        return None
    with contextlib.suppress(KeyError):
        return grp.getgrnam(group).gr_gid
    # 2**32 - 1 is no group: it would tell chown to leave the group as it is.
    if group.isascii() and group.isdigit() and len(group) <= 10 and int(group) < 2**32 - 1:
        return int(group)
    raise ConfigError(f"TRIMS_GROUP: no group {group!r} on this machine")


def _give_to_group(endpoint: Endpoint, instance: str, gid: int) -> None:
    try:
        os.chown(endpoint.directory, -1, gid)
        os.chmod(endpoint.directory, 0o750)
        for path in (endpoint.handover, endpoint.control(instance), endpoint.events(instance)):
            os.chown(path, -1, gid)
            os.chmod(path, 0o660)
    except OSError as error:
        raise DaemonStartFailed(f"sockets cannot be given to the group: {error}") from error


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    """Create sockets with the right mode from their first moment."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
