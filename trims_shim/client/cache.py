"""The cache as this process uses it: connections, leases it holds, and the way to an arena.

Owns the process-wide :class:`Cache`. Fork rule: the child forgets everything by replacing the
object; nothing is closed, locked or logged there. What it inherits stays open in the child, which
is right: it still maps the memory, so the parent's lease must outlive the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trims_shim import config as configuration
from trims_shim import diagnostics
from trims_shim._version import __version__
from trims_shim.client import spawn
from trims_shim.client.arenas import Arena, Image
from trims_shim.client.connection import Connection, Granted, check_protocol
from trims_shim.client.prepared import PreparedModel, prepared_model
from trims_shim.config import Config
from trims_shim.errors import (
    DaemonError,
    DaemonStartFailed,
    DaemonTimeout,
    DaemonUnavailable,
    FormatError,
    IncompatibleDaemon,
    LoadStalled,
    NoSpace,
    NotServed,
    RequestRefused,
    TooManyRequests,
    WireError,
)
from trims_shim.late_imports import ensure_imported
from trims_shim.specs import HOST_TIER, DeviceId, Digest, Identity
from trims_shim.wire import endpoint as endpoints
from trims_shim.wire import messages

if TYPE_CHECKING:
    from trims_shim.client.device_arenas import DeviceArena

__all__ = ["Cache", "Line", "cache", "configure", "exchange"]

_CONNECTIONS_LIMIT = 16
_IDENTITIES_LIMIT = 4096
_DRAIN_PATIENCE_S = 5.0
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_REAP_PATIENCE_S = 1.0
"""For what this process has just let go of, when a device is full; the device may be busy."""
_Result = TypeVar("_Result")


class Line(Protocol):
    """What the cache needs of a connection; :class:`Connection` says what each method promises."""

    @property
    def welcome(self) -> messages.Welcome: ...
    def open_image(self, descriptor: int, name: str, *, tier: str = HOST_TIER) -> Granted: ...
    def open_aligned(self, descriptor: int, name: str, lead_bytes: int) -> Granted | None: ...
    def open_prepared(
        self, request: messages.OpenPreparedRequest, *, descriptor: int | None = None
    ) -> messages.OpenPreparedReply: ...
    def request(self, message: Any) -> Any: ...
    def report(self, counters: dict[str, int]) -> None: ...
    def release(self, lease: int) -> None: ...
    def drain(self) -> None: ...
    def is_alive(self) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Pause:
    """Nobody is asked until then: a daemon that does not start or hangs costs seconds each time."""

    until_s: float
    length_s: float
    socket: tuple[int, int] | None
    """Of the daemon in question, see :func:`_socket_stamp`; another one is asked at once."""
    kind: type[DaemonError]
    reason: str


class Cache:
    """See the module docstring. Thread-safe."""

    def __init__(self, config: Config, *, dial: Callable[[], Line] | None = None) -> None:
        """``dial`` connects to something else than the daemon; no daemon is started then."""
        self.config = config
        self.dial = dial
        self.endpoint = endpoints.choose(config)
        # No lock: a signal handler of the program may load in the midst of anything here.
        self._idle: list[Line] = []
        self._under_way: set[object] = set()
        self._pause: _Pause | None = None
        self._images: weakref.WeakValueDictionary[str, Image] = weakref.WeakValueDictionary()
        self._digests: dict[Identity, str] = {}
        self._aligned: weakref.WeakValueDictionary[tuple[str, int], Image] = (
            weakref.WeakValueDictionary()
        )

    # --- opening ----------------------------------------------------------------------------------

    def open(self, descriptor: int, *, name: str, min_bytes: int | None = None) -> Arena:
        """A fresh private mapping of the image of an open file; blocks while it is loaded.

        The descriptor stays the caller's. Raises NotServed where the cache gains nothing, any
        other TrimsError when it cannot help.
        """
        identity = self._check(descriptor, name, min_bytes)
        image = self._local(identity)
        if image is None:
            image = self._lease(descriptor, identity, name)
        arena = image.map()
        diagnostics.count("bytes_shared", amount=image.size_bytes)
        return arena

    def aligned(self, image: Image, lead_bytes: int) -> Image | None:
        """The image whose bytes are those of ``image`` behind ``lead_bytes`` zeros.

        None where it is not there (yet); see :meth:`Connection.open_aligned`. Starts no daemon.
        Raises TrimsError when the cache cannot help.
        """
        key = (image.digest, lead_bytes)
        found = self._aligned.get(key)
        if found is not None and found.is_open:
            diagnostics.count("open", "local")
            return found

        def ask(connection: Line) -> Image | None:
            name = f"{image.name} (aligned)"
            granted = connection.open_aligned(image.descriptor, name, lead_bytes)
            if granted is None:
                return None
            made = _image_of(granted, name, connection)
            if made.size_bytes != image.size_bytes + lead_bytes:
                raise WireError(f"{name}: {made.size_bytes} bytes for {image.size_bytes}")
            return made

        made = self._with_connection(ask, may_start=False)
        if made is not None:
            self._aligned[key] = made
            diagnostics.count("bytes_shared", amount=made.size_bytes)
        return made

    def open_device(
        self, descriptor: int, *, name: str, device: DeviceId, min_bytes: int | None = None
    ) -> DeviceArena:
        """The image of an open file in memory of a device; blocks while it is loaded.

        One arena for all loads of this process: it is read-only. The descriptor stays the caller's.
        Raises NotServed where the cache gains nothing, any other TrimsError when it cannot help.
        """
        if not self.config.device:
            raise NotServed("device_off", f"{name}: device memory is not shared (TRIMS_DEVICE=0)")
        # Not at the top: most programs have no device, and it is a tenth of what this file imports.
        ensure_imported("trims_shim.client.device_arenas")
        from trims_shim.client import device_arenas

        identity = self._check(descriptor, name, min_bytes)
        arena = device_arenas.held(self._digests.get(identity, ""), device)
        if arena is None:
            arena = self._lease_device(descriptor, identity, name, device)
        else:
            diagnostics.count("open", "local")
        diagnostics.count("bytes_shared", amount=arena.size_bytes)
        return arena

    def open_prepared(
        self,
        recipe: messages.SessionRecipe,
        *,
        package: str,
        search_path: tuple[str, ...],
        descriptor: int | None = None,
        path: str = "",
        digest: str = "",
    ) -> PreparedModel:
        """The prepared form of an ONNX model; has it made where there is none, and does not wait.

        The model is the open file ``descriptor`` (the caller's), found at the absolute ``path`` or,
        when that is empty, a memfd of its bytes; without a descriptor it is only looked for, by
        ``digest``. ``package`` and ``search_path`` are for the process that prepares (see
        :class:`OpenPreparedRequest`).

        Raises NotServed (``preparing``, ``unknown``, or the reason of a refusal), any other
        TrimsError when the cache cannot help.
        """
        request = messages.OpenPreparedRequest(0, path, digest, recipe, package, search_path)

        def ask(connection: Line) -> tuple[messages.OpenPreparedReply, Callable[[], None]]:
            reply = connection.open_prepared(request, descriptor=descriptor)
            return reply, lambda: connection.release(reply.lease)

        reply, release = self._with_connection(ask)
        model = prepared_model(reply, name=path or digest[:12], release=release)
        diagnostics.count("open", reply.outcome)
        return model

    def _check(self, descriptor: int, name: str, min_bytes: int | None) -> Identity:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotServed("not_regular", f"{name} is not a regular file")
        least = self.config.min_bytes if min_bytes is None else min_bytes
        if status.st_size < max(1, least):
            raise NotServed("small_file", f"{name} has {status.st_size} bytes")
        return Identity.from_stat(status)

    def _local(self, identity: Identity) -> Image | None:
        """An image this process still holds; a settled identity means equal content."""
        image = self._images.get(self._digests.get(identity, ""))
        if image is None or not image.is_open:
            return None
        diagnostics.count("open", "local")
        return image

    def _lease(self, descriptor: int, identity: Identity, name: str) -> Image:
        def ask(connection: Line) -> Image:
            granted = connection.open_image(descriptor, name)
            image = _image_of(granted, name, connection)
            if granted.reply.is_settled:
                self._settle(identity, image.digest)
                self._images[image.digest] = image
            return image

        return self._with_connection(ask)

    def _lease_device(
        self, descriptor: int, identity: Identity, name: str, device: DeviceId
    ) -> DeviceArena:
        from trims_shim.client import device_arenas

        def ask(connection: Line) -> tuple[Granted, Callable[[], None]]:
            granted = connection.open_image(descriptor, name, tier=device)
            lease = granted.reply.lease
            return granted, lambda: connection.release(lease)

        dropped_before = device_arenas.dropped()
        try:
            granted, release = self._with_connection(ask)
        except NoSpace:
            # The model before this one may have been let go of, but not unmapped yet.
            device_arenas.reap(_REAP_PATIENCE_S)
            if device_arenas.dropped() == dropped_before:
                raise
            granted, release = self._with_connection(ask)
        diagnostics.count("open", granted.reply.outcome)
        arena = device_arenas.adopt(granted, device=device, name=name, release=release)
        if granted.reply.is_settled:
            self._settle(identity, arena.digest)
        return arena

    def _settle(self, identity: Identity, digest: Digest) -> None:
        if len(self._digests) >= _IDENTITIES_LIMIT:
            self._digests.clear()
        self._digests[identity] = digest

    # --- requests ---------------------------------------------------------------------------------

    def request(self, message: Any, *, may_start: bool = False) -> Any:
        """A control request. Raises DaemonUnavailable when no daemon runs and none may start."""
        return self._with_connection(lambda each: each.request(message), may_start=may_start)

    def welcome(self, *, may_start: bool = False) -> messages.Welcome:
        """What the daemon said of itself."""
        return self._with_connection(lambda each: each.welcome, may_start=may_start)

    def close(self) -> None:
        """At exit: report the counters and close idle connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.report(diagnostics.take_unreported())
            connection.close()

    # --- connections ------------------------------------------------------------------------------

    def _with_connection(
        self, ask: Callable[[Line], _Result], *, may_start: bool | None = None
    ) -> _Result:
        """Run ``ask`` on a connection; fails as the last time where that was a moment ago."""
        may_start = self.config.autostart if may_start is None else may_start
        before = self._pause
        if before is not None and self._is_paused(before):
            raise before.kind(before.reason)
        try:
            result = self._ask_twice(ask, may_start)
        except (DaemonStartFailed, DaemonTimeout) as error:
            self._pause_after(error, before)
            raise
        self._pause = None
        return result

    def _is_paused(self, pause: _Pause) -> bool:
        is_same = _socket_stamp(self.endpoint.handover) == pause.socket
        return is_same and time.monotonic() < pause.until_s

    def _pause_after(self, error: DaemonError, before: _Pause | None) -> None:
        if isinstance(error, LoadStalled) or self.dial is not None or diagnostics.signalled(error):
            return
        length_s = min(2 * before.length_s, _LONGEST_PAUSE_S) if before else _LEAST_PAUSE_S
        socket = _socket_stamp(self.endpoint.handover)
        until_s = time.monotonic() + length_s
        self._pause = _Pause(until_s, length_s, socket, type(error), str(error))

    def _ask_twice(self, ask: Callable[[Line], _Result], may_start: bool) -> _Result:
        """Run ``ask`` on a connection; once more on a new one when the daemon went away."""
        try:
            return self._ask_current(ask, may_start)
        except DaemonUnavailable as error:
            if not may_start or diagnostics.signalled(error):
                raise
        return self._ask_current(ask, may_start, is_new=True)

    def _ask_current(
        self, ask: Callable[[Line], _Result], may_start: bool, *, is_new: bool = False
    ) -> _Result:
        """Run ``ask``; an older daemon, if this process may start another, is replaced first."""
        try:
            with self._connection(may_start, is_new=is_new) as connection:
                return ask(connection)
        except _OlderDaemon:
            self._replace()
        with self._connection(may_start, is_new=True) as connection:
            return ask(connection)

    @contextlib.contextmanager
    def _connection(self, may_start: bool, *, is_new: bool) -> Iterator[Line]:
        if len(self._under_way) >= _CONNECTIONS_LIMIT:
            raise TooManyRequests(f"{_CONNECTIONS_LIMIT} loads are under way in this process")
        ours = object()
        connection = None
        is_usable = False
        try:
            self._under_way.add(ours)
            idle = None if is_new else self._take_idle()
            connection = idle or self._connect(may_start, is_heard=is_new)
            yield connection
            is_usable = True
        except (FormatError, RequestRefused):
            is_usable = True
            raise
        finally:
            self._under_way.discard(ours)
            if connection is not None and is_usable:
                self._idle.append(connection)
            elif connection is not None:
                # An answer may still come for it, and its descriptors with it: start afresh.
                connection.close()

    def _take_idle(self) -> Line | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_alive():
                return connection
            connection.close()

    def _connect(self, may_start: bool, *, is_heard: bool = False) -> Line:
        """``is_heard``: of a daemon that says Welcome, as one that dies takes connections, too."""
        if self.dial is not None:
            return self.dial()
        try:
            connection = self._dial(_check_age if may_start else check_protocol)
            if is_heard:
                _hear(connection)
            return connection
        except DaemonUnavailable:
            if not may_start:
                raise
        spawn.start(self.endpoint, timeout_s=self.config.start_timeout)
        diagnostics.count("daemon", "started")
        return self._dial(check_protocol)

    def _dial(self, check: Callable[[messages.Welcome], None] | None) -> Connection:
        return Connection(
            self.endpoint,
            config_hash=self.config.daemon_hash(),
            stall_timeout_s=self.config.stall_timeout,
            check=check,
        )

    def _replace(self) -> None:
        """Drain an older daemon; its leases and mappings live on."""
        before = _socket_stamp(self.endpoint.handover)
        try:
            connection = self._dial(None)
        except DaemonUnavailable:
            return  # Somebody else has.
        try:
            welcome = connection.welcome
            if not _is_older(welcome):
                return
            connection.drain()
            deadline = time.monotonic() + _DRAIN_PATIENCE_S
            # Not alive: it has ended, or is somebody else's and refuses.
            while (
                before is not None
                and connection.is_alive()
                and _socket_stamp(self.endpoint.handover) == before
            ):
                if time.monotonic() > deadline:
                    raise IncompatibleDaemon(
                        f"daemon {welcome.pid} (trims_shim {welcome.package}) does not make room; "
                        "run `trims stop`"
                    )
                time.sleep(0.01)
        except DaemonUnavailable:
            pass  # It has just gone.
        finally:
            connection.close()


def _hear(connection: Connection) -> None:
    try:
        _ = connection.welcome
    except BaseException:
        connection.close()
        raise


class _OlderDaemon(IncompatibleDaemon):
    """The daemon is older than this process, which may start its successor."""


def _check_age(welcome: messages.Welcome) -> None:
    if _is_older(welcome):
        raise _OlderDaemon(
            f"daemon {welcome.pid} (trims_shim {welcome.package}) is older than this process and "
            "could not be replaced; run `trims stop`"
        )
    check_protocol(welcome)


def _image_of(granted: Granted, name: str, connection: Line) -> Image:
    reply = granted.reply
    diagnostics.count("open", reply.outcome)
    return Image(
        granted.descriptor,
        reply.size_bytes,
        digest=reply.digest,
        name=name,
        release=lambda: connection.release(reply.lease),
    )


def _is_older(welcome: messages.Welcome) -> bool:
    ours = (messages.PROTOCOL_VERSION, _version_key(__version__))
    return (welcome.protocol, _version_key(welcome.package)) < ours


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _socket_stamp(path: str) -> tuple[int, int] | None:
    """Tells one socket from the next under its name; inode numbers alone are reused at once."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


# --- the process-wide object ----------------------------------------------------------------------

_cache: Cache | None = None
_forgotten: list[Cache] = []
_has_hooks = False


def configure(config: Config) -> None:
    """Use these settings from now on; open connections and leases of the old ones stay."""
    global _cache
    if _cache is not None:
        _forgotten.append(_cache)
    _cache = Cache(config)
    _install_hooks()


def exchange(other: Cache | None) -> Cache | None:
    """Make ``other`` the cache of this process; the one before, which stays open. For tests."""
    global _cache
    before, _cache = _cache, other
    _install_hooks()
    return before


def cache() -> Cache:
    """The cache of this process."""
    if _cache is None:
        configure(configuration.load())
    assert _cache is not None
    return _cache


def _install_hooks() -> None:
    global _has_hooks
    if not _has_hooks:
        _has_hooks = True
        os.register_at_fork(after_in_child=_after_fork_in_child)
        atexit.register(_at_exit)


def _after_fork_in_child() -> None:
    """Only forget; the old object is kept so that no destructor of its runs here."""
    global _cache
    if _cache is not None:
        _forgotten.append(_cache)
        _cache = Cache(_cache.config, dial=_cache.dial)
    diagnostics.reset_after_fork()


def _at_exit() -> None:
    if _cache is not None:
        _cache.close()
