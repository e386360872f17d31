"""A daemon inside the test: no process, no socket, no ZeroMQ, but the real decisions.

:class:`FakeDaemon` takes the place of the connection to the daemon, below this process's cache.
Everything above it is production code (patches, cache, leases, arenas), and so are the daemon's
store, loader and request handlers and the message codec: every message is encoded and decoded,
every segment is a sealed memfd that is really mapped. Left out are the causes of slow and flaky
tests: start-up, sockets, the wait for a young file's time stamp to settle. A CUDA device has a tier
too, filled by an uploader process as in production. The request that finds no prepared ONNX model
prepares it in this process; the next session uses it.

    def test_the_second_request_finds_the_model():
        with trims_shim.testing.FakeDaemon() as daemon:
            first = my_service.load("model.pt")
            second = my_service.load("model.pt")
            assert daemon.reads("model.pt") == 1

:meth:`FakeDaemon.refuse`, :meth:`FakeDaemon.stall` and :meth:`FakeDaemon.go_away` inject faults.
Loads run in the thread that requests them, so a test has no thread of ours and may fork; a forked
child finds no daemon and loads privately.

:class:`TrimsDaemon` is the real daemon of a run of ``pytest --trims``.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from trims_shim import api
from trims_shim import config as configuration
from trims_shim._version import __version__
from trims_shim.cli.daemon import stop_if_running
from trims_shim.client import cache as caches
from trims_shim.client.connection import Granted
from trims_shim.client.pool import Line
from trims_shim.client.session import Conversation
from trims_shim.config import Config
from trims_shim.daemon import clock
from trims_shim.daemon.eviction import eviction_policy
from trims_shim.daemon.front import Request
from trims_shim.daemon.loader import Loader
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.openings import Openings
from trims_shim.daemon.prepared.directory import PreparedSettings
from trims_shim.daemon.prepared.preparing import Order
from trims_shim.daemon.prepared.serving import PreparedModels
from trims_shim.daemon.requests import Daemon, add_counters, handle
from trims_shim.daemon.sessions import Limits, Session, Sessions
from trims_shim.daemon.store import Store
from trims_shim.daemon.tiers import DeviceSettings, HostTier, Tier, Tiers
from trims_shim.daemon.values import Announce, ImageRow
from trims_shim.errors import DaemonUnavailable, RequestRefused, TrimsError, WireError
from trims_shim.memory.host import open_memory
from trims_shim.specs import HOST_TIER, SegmentKind, Variant
from trims_shim.wire import admin, codec, duties, messages
from trims_shim.wire.handover import Peer, clipped

__all__ = ["FakeDaemon", "Opened", "TrimsDaemon"]

_Open = (messages.OpenImageRequest, messages.OpenPreparedRequest)


@dataclass(frozen=True, slots=True)
class Opened:
    """An answered open request. ``outcome`` is ``miss``, ``hit`` or ``joined``.

    For ONNX models it is ``hit``, ``preparing``, ``unknown`` or ``refused``, and ``digest`` is the
    prepared model's key.
    """

    name: str
    outcome: str
    digest: str


class FakeDaemon:
    """A daemon inside the test. A context manager; thread-safe inside its block.

    ``settings`` are settings of :mod:`trims_shim.config` as text, for example
    ``FakeDaemon(host_bytes="64M", strict="1")``; they win over the environment. Unlike in
    production, files of any size are shared (``min_bytes="1"``). Patches stay as they are: the
    block changes where loads go, not whether they are patched. Models loaded inside the block stay
    valid after it. One block at a time: entering it again inside raises RuntimeError.
    """

    def __init__(self, **settings: str) -> None:
        """Raises ConfigError."""
        self.opened: list[Opened] = []
        self._config = configuration.load(
            None, **{"min_bytes": "1", "host_bytes": "1G", **settings}
        )
        self._pid = os.getpid()
        self._server: _Server | None = None
        self._faults = _Faults()
        self._cache: caches.Cache | None = None
        self._before: caches.Cache | None = None

    def __enter__(self) -> FakeDaemon:
        if self._cache is not None:
            raise RuntimeError("this FakeDaemon is entered already; make another one")
        self.come_back()
        self._cache = caches.Cache(self._config, dial=self._dial)
        self._before = caches.exchange(self._cache)
        return self

    def __exit__(self, *_: object) -> None:
        caches.exchange(self._before)
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self.go_away()

    # --- what happened ----------------------------------------------------------------------------

    def reads(self, name: str | os.PathLike[str]) -> int:
        """Return how often the file of this path was read into the cache."""
        return self._outcomes(name).count("miss")

    def hits(self, name: str | os.PathLike[str]) -> int:
        """Return how often an open request for this path found it resident or being loaded.

        A load that finds the model still held by this process asks no daemon;
        ``trims_shim.stats()`` counts it.
        """
        outcomes = self._outcomes(name)
        return outcomes.count("hit") + outcomes.count("joined")

    @property
    def images(self) -> list[ImageRow]:
        """Resident images, most recently used first; none while the daemon is away."""
        return self._server.images() if self._server else []

    @property
    def prepared(self) -> list[admin.PreparedStatus]:
        """ONNX models that are prepared, or that cannot be (``refused``, with the reason)."""
        return self._server.prepared_models() if self._server else []

    @property
    def leases(self) -> int:
        """Leases that clients hold."""
        return self._server.lease_count() if self._server else 0

    @property
    def counters(self) -> dict[str, int]:
        """The daemon's counters, as in ``trims status``; from zero after :meth:`come_back`."""
        return dict(self._server.counters) if self._server else {}

    # --- faults -----------------------------------------------------------------------------------

    def refuse(self, error: RequestRefused, *, times: int = 1) -> None:
        """Answer the next open requests with this error. Raises TypeError for other errors."""
        if not isinstance(error, RequestRefused):
            raise TypeError(f"{error!r} is no RequestRefused, which is what a daemon answers with")
        self._faults.refusals.extend([error] * times)

    def stall(self, *, times: int = 1) -> None:
        """Leave the next open requests unanswered; their stall timeout expires at once."""
        self._faults.stalls += times

    def go_away(self) -> None:
        """Act as a crashed daemon: connections end, images and leases are forgotten."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def come_back(self) -> None:
        """Serve again, with an empty cache."""
        if self._server is None:
            self._server = _Server(self._config, self._faults, self.opened)

    def _outcomes(self, name: str | os.PathLike[str]) -> list[str]:
        path = os.path.abspath(os.fspath(name))
        shown = _shown(path)  # ONNX models are named by their whole path
        return [each.outcome for each in self.opened if each.name in (path, shown)]

    def _dial(self) -> Line:
        server = self._server
        if server is None or os.getpid() != self._pid:
            raise DaemonUnavailable("the fake daemon is away")
        return _Line(server, self._config)


class TrimsDaemon:
    """What the fixture ``trims_daemon`` is: the daemon of this test run, to look into it."""

    @property
    def socket_dir(self) -> str:
        """Where its sockets are."""
        return caches.cache().endpoint.directory

    def status(self) -> admin.GetStatusReply:
        """Its images, clients and counters. Raises DaemonUnavailable before the first load."""
        reply: admin.GetStatusReply = caches.cache().request(admin.GetStatusRequest())
        return reply

    def warm(self, path: str | os.PathLike[str]) -> str:
        """Load a file into it, starting it when needed; the digest."""
        return api.warm(path)

    def stop(self) -> None:
        """Stop it, and wait until it is gone; the next load starts another."""
        stop_if_running(caches.cache().endpoint)


@dataclass(slots=True)
class _Faults:
    refusals: deque[RequestRefused]
    stalls: int

    def __init__(self) -> None:
        self.refusals, self.stalls = deque(), 0


class _Deferred(Executor):
    """Keeps work until the thread that waits for it calls :meth:`run`."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], Any]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        self._work.append(lambda: function(*args, **keywords))
        return Future()

    def run(self) -> None:
        while self._work:
            try:
                work = self._work.popleft()
            except IndexError:  # another thread took it
                return
            work()


class _Preparer:
    """Prepares models of any size in this process, with its onnxruntime."""

    timeout_s = math.inf

    def run(
        self, order: Order, decide: Callable[[duties.SourceHashed], bool]
    ) -> duties.PrepareReply | None:
        from trims_shim.daemon.preparer import main as preparer
        from trims_shim.daemon.preparer import verifying

        verifying.share_from(0)
        return preparer.prepare(order.request, decide)

    def give_up(self) -> None:
        """Do nothing: no process runs."""

    def close(self) -> None:
        """Do nothing: no process runs."""


class _HostTier(HostTier):
    """A host tier that ignores the machine's other load, which must not decide a test."""

    def withheld_bytes(self, image_bytes: int) -> int:
        return 0


class _Server(Daemon):
    """The daemon's half, in place of :class:`trims_shim.daemon.server.Server` and its sockets.

    One lock stands for the server's single thread.
    """

    memory_reason = "a fake daemon for tests"
    idle_exit_s = 0.0
    is_stopping = False

    def __init__(self, config: Config, faults: _Faults, opened: list[Opened]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.counters: Counter[str] = Counter()
        self.counters_of_user: Counter[int] = Counter()
        self.started_ns = clock.now_ns()
        self.config_hash = config.daemon_hash()
        self.sessions = Sessions(Limits())
        self._pool = _Deferred()
        numbers = count(1)
        self.tiers = self._make_tiers(config, numbers)
        self.openings = Openings(self, self.tiers)
        self._directory = os.path.join(tempfile.gettempdir(), f"trims-fake-{secrets.token_hex(8)}")
        self.prepared = self._make_prepared(config, numbers)
        self._faults = faults
        self._opened = opened
        self._lines: dict[int, _Line] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._released: deque[tuple[int, int]] = deque()

    def _make_tiers(self, config: Config, numbers: Iterator[int]) -> Tiers:
        memory = open_memory(SegmentKind.MEMFD, budget_bytes=config.host_bytes)
        store = Store(
            config.host_bytes,
            policy=eviction_policy(config.eviction, config.host_bytes),
            footprint_bytes=memory.footprint_bytes,
            numbers=numbers,
        )
        loader = Loader(
            memory, threads=1, wake=self._woken, pool=self._pool, trusts_young_files=True
        )
        return Tiers(
            _HostTier(store, loader),
            DeviceSettings.of(config),
            numbers=numbers,
            wake=self._woken,
            pool=self._pool,
            trusts_young_files=True,
        )

    def _make_prepared(self, config: Config, numbers: Iterator[int]) -> PreparedModels:
        """Make the prepared models, with their own directory, which the first request creates."""
        settings = PreparedSettings.of(config)
        directory = os.path.join(self._directory, "prepared")
        prepared = PreparedModels(
            self,
            settings._replace(directory=directory),
            preparer=_Preparer(),
            numbers=numbers,
            wake=self._woken,
            pool=self._pool,
            trusts_young_files=True,
        )
        prepared.start()
        return prepared

    def stop(self) -> None:
        """Serve StopDaemonRequest: end all sessions; its answer still arrives."""
        for session in self.sessions:
            self.leave(session)

    def close(self) -> None:
        with self.changed:
            self.stop()
            self.prepared.close()
            self.tiers.close()
            self.changed.notify_all()
        shutil.rmtree(self._directory, ignore_errors=True)

    def images(self) -> list[ImageRow]:
        with self.changed:
            self._take_released()
            rows = [row for tier in self.tiers for row in tier.store.images()]
            return sorted(rows, key=lambda row: -row.used_ns)

    def prepared_models(self) -> list[admin.PreparedStatus]:
        with self.changed:
            self._take_released()
            return self.prepared.rows()

    def lease_count(self) -> int:
        with self.changed:
            self._take_released()
            return self.tiers.lease_count() + self.prepared.lease_count()

    # --- sessions ---------------------------------------------------------------------------------

    def join(self, line: _Line, hello: messages.Hello) -> tuple[Session, messages.Welcome]:
        peer = Peer(os.getpid(), os.geteuid(), os.getegid())
        with self.changed:
            session = self.sessions.add(cast(Any, _NoSocket()), peer, clock.now_ns())
            token = self.sessions.greet(session, hello.package, hello.pid)
            self._lines[session.number] = line
        welcome = messages.Welcome(
            messages.PROTOCOL_VERSION, __version__, os.getpid(), "fake", token, self.config_hash
        )
        return session, welcome

    def leave(self, session: Session) -> None:
        with self.changed:
            if self.sessions.get(session.number) is None:
                return
            self._take_released()
            self.tiers.close_session(session.number, clock.now_ns())
            self.openings.close_session(session.number)
            self.prepared.close_session(session.number)
            self.sessions.close(session)
            self.changed.notify_all()

    def release(self, session: Session, lease: int) -> None:
        """Only note a release: finalizers call this and may run inside the lock."""
        self._released.append((session.number, lease))

    def report(self, session: Session, report: messages.StatsReport) -> None:
        with self.changed:
            add_counters(self, session, report)

    # --- requests ---------------------------------------------------------------------------------

    def deliver(self, session: Session, data: bytes) -> bool:
        """Take an encoded request and do its work; False if a fault leaves it unanswered."""
        envelope = codec.decode_envelope(data)
        with self.changed:
            self._take_released()
            self.counters["requests"] += 1
            session.requests += 1
            is_open = isinstance(envelope.message, _Open)
            if is_open and self._faults.stalls:
                self._faults.stalls -= 1
                return False
            request = Request(session, envelope.request_id, _routing(session.number))
            try:
                if is_open:
                    self._note_open(request, envelope.message)
                reply = handle(self, request, envelope.message)
            except TrimsError as error:
                reply = self.error_reply(error)
            if reply is not None:
                self.answer(request, reply)
        self._pool.run()
        return True

    def _note_open(self, request: Request, message: Any) -> None:
        """Note the name of an open request. Raises an error that the test has injected."""
        if self._faults.refusals:
            self.counters["refused"] += 1
            if message.ticket:
                request.session.offers.pop(message.ticket).close()
            raise self._faults.refusals.popleft()
        is_image = isinstance(message, messages.OpenImageRequest)
        name = request.session.offers[message.ticket].message.name if is_image else message.path
        self._names[(request.session.number, request.number)] = name

    def check_jobs(self, session: Session) -> None:
        """Allow any number of waiting requests, unlike the real server."""

    def run_later(self, request: Request, tier: Tier, work: Callable[[], Any]) -> None:
        """Do the work at once: no other client waits for the thread."""
        self.answer(request, work())

    def _woken(self) -> None:
        with self.changed:
            self.openings.finish()
            self.prepared.finish()
        self._pool.run()  # What the work that woke it waits for may be there now.

    def _take_released(self) -> None:
        while self._released:
            session, lease = self._released.popleft()
            self.tiers.release(session, lease, clock.now_ns())
            self.prepared.release(session, lease)

    # --- the way to the clients -------------------------------------------------------------------

    def take_offer(self, request: Request, ticket: int) -> Offer:
        return request.session.offers.pop(ticket)

    def hand_over(self, session: Session, message: Any, descriptor: int | None = None) -> None:
        # Offers here name no tier, so only grants are handed over.
        if descriptor is not None:
            grants = self._lines[session.number].grants
            grants[(message.ticket, message.part)] = os.dup(descriptor)

    def reply(self, routing: bytes, number: int, message: Any) -> None:
        session = int.from_bytes(routing, "big")
        if not isinstance(message, messages.Progress):
            name = self._names.pop((session, number), "")
            if isinstance(message, messages.OpenImageReply):
                self._opened.append(Opened(name, message.outcome, message.digest))
            elif isinstance(message, messages.OpenPreparedReply):
                self._opened.append(Opened(name, message.outcome, message.key))
        data = codec.encode_envelope(codec.Envelope(number, b"", message))
        self._lines[session].answers.append(data)
        self.changed.notify_all()

    def end_session(self, session: Session, reason: str) -> None:
        self.leave(session)

    def publish(self, event: Announce) -> None:
        """Do nothing: there are no listeners."""


class _NoSocket:
    """Stands in for a session's connection: there is none, and nothing to read."""

    def shutdown(self, how: int) -> None:
        """Do nothing."""

    def recvmsg(self, *arguments: int) -> None:
        """Raise OSError."""
        raise OSError(errno.ENOTCONN, "no socket")

    def close(self) -> None:
        """Do nothing."""


def _routing(number: int) -> bytes:
    """Return the routing of replies to a session."""
    return number.to_bytes(8, "big")


class _Line:
    """The client's half, in place of :class:`trims_shim.client.connection.Connection`."""

    def __init__(self, server: _Server, config: Config) -> None:
        self.grants: dict[tuple[int, int], int] = {}
        self.answers: deque[bytes] = deque()
        self._pid = os.getpid()
        self._server = server
        self._stall_timeout_s: float = config.stall_timeout
        self._ticket = 0
        hello = messages.Hello(messages.PROTOCOL_VERSION, __version__, os.getpid())
        self._session, welcome = server.join(self, _through_codec(hello))
        self.welcome: messages.Welcome = _through_codec(welcome)
        self._numbers = count(1)

    def open_image(
        self, descriptor: int, name: str, *, tier: str = HOST_TIER, is_numbers: bool = False
    ) -> Granted:
        self._offer(messages.FileOffer(self._ticket + 1, tier, _shown(name)), descriptor)
        reply = self.request(messages.OpenImageRequest(self._ticket))
        if not isinstance(reply, messages.OpenImageReply):
            raise WireError(f"{type(reply).__name__} answers OpenImageRequest")
        parts = sorted(part for ticket, part in self.grants if ticket == self._ticket)
        granted = [self.grants.pop((self._ticket, part)) for part in parts]
        return Granted(reply, granted[0], tuple(granted[1:]))

    def open_variant(self, descriptor: int, name: str, variant: Variant) -> Granted | None:
        return None  # Copies stay private: a test's result must not depend on how often it ran.

    def open_prepared(
        self,
        request: messages.OpenPreparedRequest,
        *,
        descriptor: int | None = None,
        directory: int | None = None,
        externals: Mapping[str, int] | None = None,
    ) -> messages.OpenPreparedReply:
        # This daemon sees what its client sees: nothing has to be shown.
        if descriptor is not None:
            self._offer(messages.FileOffer(self._ticket + 1), descriptor)
            request = request._replace(ticket=self._ticket)
        reply = self.request(request)
        if not isinstance(reply, messages.OpenPreparedReply):
            raise WireError(f"{type(reply).__name__} answers OpenPreparedRequest")
        return reply

    def _offer(self, offer: messages.FileOffer, descriptor: int) -> None:
        self._ticket = offer.ticket
        self._session.offers[offer.ticket] = Offer(_through_codec(offer), os.dup(descriptor))

    def request(self, message: Any) -> Any:
        self._check_open()
        envelope = codec.Envelope(next(self._numbers), self.welcome.token, message)
        now_s, stall_timeout_s = time.monotonic(), self._stall_timeout_s
        conversation = Conversation(envelope.request_id, now_s, stall_timeout_s=stall_timeout_s)
        if not self._server.deliver(self._session, codec.encode_envelope(envelope)):
            conversation.check_stall(now_s + stall_timeout_s)
        while True:
            answer = codec.decode_envelope(self._next_answer(conversation))
            reply = conversation.receive(answer, time.monotonic())
            if reply is not None:
                return reply

    def report(self, counters: dict[str, int]) -> None:
        if counters and self.is_alive():
            report = _through_codec(messages.StatsReport(counters))
            self._server.report(self._session, report)

    def release(self, lease: int) -> None:
        if self._pid == os.getpid():
            self._server.release(self._session, lease)

    def withdraw(self) -> bool:
        return False

    def is_alive(self) -> bool:
        session = self._server.sessions.get(self._session.number)
        return self._pid == os.getpid() and session is self._session

    def is_replaced(self) -> bool:
        return False

    def close(self) -> None:
        self._server.leave(self._session)
        for descriptor in self.grants.values():
            os.close(descriptor)
        self.grants.clear()

    def _next_answer(self, conversation: Conversation) -> bytes:
        with self._server.changed:
            while not self.answers:
                self._check_open()
                left = conversation.check_stall(time.monotonic())
                self._server.changed.wait(left)
            return self.answers.popleft()

    def _check_open(self) -> None:
        if not self.is_alive():
            raise DaemonUnavailable("the daemon has closed the connection")


def _shown(name: str) -> str:
    """A file's name as messages have it: with an end, and without bytes that are no text."""
    return clipped(name, limit_bytes=messages.NAME_LIMIT_BYTES)


def _through_codec(message: Any) -> Any:
    return codec.decode(codec.encode(message))
