"""The connections of this process to the daemon, and what happens where no daemon runs.

Owns the number of connections, the choice of one for each request, the start of a daemon, the
replacement of an older daemon, and the pause after a daemon that does not start, hangs, or dies of
a request.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from trims_shim import diagnostics
from trims_shim._version import __version__
from trims_shim.children import installed_constant
from trims_shim.client import spawn
from trims_shim.client.connection import Connection, DaemonDied, Granted, check_protocol
from trims_shim.config import Config
from trims_shim.errors import (
    DaemonError,
    DaemonStartFailed,
    DaemonTimeout,
    DaemonUnavailable,
    FormatError,
    IncompatibleDaemon,
    LoadStalled,
    RequestRefused,
    TooManyRequests,
    WireError,
)
from trims_shim.specs import HOST_TIER, Variant
from trims_shim.wire import handover, messages
from trims_shim.wire.endpoint import Endpoint

__all__ = ["Line", "Pool", "is_older"]

_CONNECTIONS_LIMIT = 16
_COUNTERS_IN_A_PACKET = 32
"""With names of the largest length they are below messages.HANDOVER_PACKET_LIMIT_BYTES."""
_DRAIN_PATIENCE_S = 5.0
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_Result = TypeVar("_Result")


class Line(Protocol):
    """The methods of a connection that the cache needs; see :class:`Connection`."""

    @property
    def welcome(self) -> messages.Welcome: ...
    def open_image(
        self, descriptor: int, name: str, *, tier: str = HOST_TIER, is_numbers: bool = False
    ) -> Granted: ...
    def open_variant(self, descriptor: int, name: str, variant: Variant) -> Granted | None: ...
    def open_prepared(
        self,
        request: messages.OpenPreparedRequest,
        *,
        descriptor: int | None = None,
        directory: int | None = None,
        externals: Mapping[str, int] | None = None,
    ) -> messages.OpenPreparedReply: ...
    def request(self, message: Any) -> Any: ...
    def report(self, counters: dict[str, int]) -> None: ...
    def release(self, lease: int) -> None: ...
    def withdraw(self) -> bool: ...
    def is_alive(self) -> bool: ...
    def is_replaced(self) -> bool: ...
    def close(self) -> None: ...


class _Pause(NamedTuple):
    """Until then no daemon is asked: one that does not start, hangs or dies costs seconds a try."""

    until_s: float
    length_s: float
    socket: tuple[int, int] | None
    """The failed daemon's :meth:`Endpoint.stamp`; another daemon is asked at once."""
    kind: type[DaemonError]
    reason: str


class Pool:
    """The connections to one daemon. Thread-safe."""

    def __init__(
        self, config: Config, endpoint: Endpoint, *, dial: Callable[[], Line] | None = None
    ) -> None:
        """``dial`` connects to something other than the daemon; then no daemon is started."""
        self._config = config
        self._endpoint = endpoint
        self._dial_other = dial
        # No lock: a signal handler of the program may load in the middle of anything here.
        self._idle: list[Line] = []
        self._under_way: set[object] = set()
        self._pause: _Pause | None = None

    def close(self) -> None:
        """At exit: report the counters and close idle connections."""
        self.report()
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def report(self) -> None:
        """Add the counters of this process to the daemon's, if a connection is idle; best effort.

        Never blocks.
        """
        connection = self._take_idle()
        if connection is None:
            return
        try:
            for counters in _in_packets(diagnostics.take_unreported()):
                connection.report(counters)
        finally:
            self._idle.append(connection)

    def ask(self, ask: Callable[[Line], _Result], *, may_start: bool) -> _Result:
        """Run ``ask`` on a connection; ``may_start`` a daemon where none or an older one runs.

        During a pause, raises the error that began it. Raises the errors of ``ask``,
        DaemonUnavailable when no daemon runs and none may start, any other DaemonError.
        """
        before = self._pause
        if before is not None and self._is_paused(before):
            raise before.kind(before.reason)
        try:
            result = self._ask_twice(ask, may_start)
        except (DaemonDied, DaemonStartFailed, DaemonTimeout) as error:
            # With may_start, the daemon has died twice, perhaps for lack of memory.
            if may_start or not isinstance(error, DaemonDied):
                self._pause_after(error, before)
            raise
        self._pause = None
        return result

    def _is_paused(self, pause: _Pause) -> bool:
        is_same = self._endpoint.stamp() == pause.socket
        # More is left than there was: the clock had been set forward, as by freezegun in a test.
        return is_same and 0.0 < pause.until_s - time.monotonic() <= pause.length_s

    def _pause_after(self, error: DaemonError, before: _Pause | None) -> None:
        if (
            isinstance(error, LoadStalled)
            or self._dial_other is not None
            or diagnostics.signalled(error)
        ):
            return
        length_s = min(2 * before.length_s, _LONGEST_PAUSE_S) if before else _LEAST_PAUSE_S
        socket = self._endpoint.stamp()
        until_s = time.monotonic() + length_s
        self._pause = _Pause(until_s, length_s, socket, type(error), str(error))

    def _ask_twice(self, ask: Callable[[Line], _Result], may_start: bool) -> _Result:
        """Run ``ask`` on a connection; if the daemon has gone, once more on a new one."""
        try:
            return self._ask_current(ask, may_start)
        except DaemonUnavailable as error:
            if not may_start or diagnostics.signalled(error):
                raise
        return self._ask_current(ask, may_start, is_new=True)

    def _ask_current(
        self, ask: Callable[[Line], _Result], may_start: bool, *, is_new: bool = False
    ) -> _Result:
        """Run ``ask``; first replace an older daemon if this process may start another."""
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
        except WireError:
            raise
        except BaseException:
            # A further one that fails holds no lease. Kept, there would be one more with each load
            # that this process has too few descriptors or threads for.
            if connection is not None and not is_new:
                is_usable = connection.withdraw() and connection.is_alive()
            raise
        finally:
            self._under_way.discard(ours)
            if connection is not None and is_usable:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()

    def _take_idle(self) -> Line | None:
        """Take a connection to the current daemon. Others only keep their leases."""
        for _ in range(len(self._idle)):
            try:
                # In turn: an unread packet, granted to a load that was given up, holds memory.
                connection = self._idle.pop(0)
            except IndexError:
                return None
            try:
                is_alive = connection.is_alive()
                if is_alive and not connection.is_replaced():
                    return connection
            except BaseException:  # An interrupt: leases depend on it.
                self._idle.append(connection)
                raise
            if is_alive:
                self._idle.append(connection)
            else:
                connection.close()
        return None

    def _connect(self, may_start: bool, *, is_heard: bool) -> Line:
        """Connect. ``is_heard``: wait for the Welcome, since a dying daemon accepts connections."""
        if self._dial_other is not None:
            return self._dial_other()
        try:
            connection = self._dial(_check_age if may_start else check_protocol)
            if is_heard:
                _hear(connection)
            return connection
        except DaemonUnavailable:
            if not may_start:
                raise
        config = self._config
        spawn.start(self._endpoint, timeout_s=config.start_timeout, has_group=bool(config.group))
        return self._dial(check_protocol)

    def _dial(self, check: Callable[[messages.Welcome], None] | None) -> Connection:
        spawn.take_statuses()
        return Connection(self._endpoint, stall_timeout_s=self._config.stall_timeout, check=check)

    def _replace(self) -> None:
        """Drain an older daemon; its clients' mappings live on."""
        before = self._endpoint.stamp()
        try:
            connection = self._dial(None)
        except DaemonUnavailable:
            return  # Another process has replaced it.
        try:
            welcome = connection.welcome
            if not is_older(welcome):
                return
            connection.drain()
            deadline = time.monotonic() + _DRAIN_PATIENCE_S
            # A dead connection means that it has ended, or is another user's and refuses.
            while before is not None and connection.is_alive() and self._endpoint.stamp() == before:
                if time.monotonic() > deadline:
                    raise IncompatibleDaemon(
                        f"daemon {welcome.pid} (trims_shim {welcome.package}) does not make room; "
                        "let its user run `trims stop`"
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
    if is_older(welcome):
        raise _OlderDaemon(
            f"daemon {welcome.pid} (trims_shim {welcome.package}) is older than this process and "
            "could not be replaced; let its user run `trims stop`"
        )
    check_protocol(welcome)


def is_older(welcome: messages.Welcome) -> bool:
    """Return whether a daemon is one that a process of this version replaces.

    After a downgrade below this process a successor is as old as the daemon: replacing that would
    never end.
    """
    theirs = _key(welcome.protocol, welcome.package)
    ours = _key(messages.PROTOCOL_VERSION, __version__)
    return theirs < ours and theirs < _key(
        installed_constant("wire/messages.py", "PROTOCOL_VERSION", messages.PROTOCOL_VERSION),
        installed_constant("_version.py", "__version__", __version__),
    )


def _key(protocol: int | str, package: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _version_key(str(protocol)), _version_key(package)


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _in_packets(counters: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield the counters in parts that fit a packet each."""
    rows = iter(counters.items())
    limit = messages.COUNTER_NAME_LIMIT
    while part := list(itertools.islice(rows, _COUNTERS_IN_A_PACKET)):
        yield {handover.clipped(name, limit_bytes=limit): count for name, count in part}
