"""The server: one thread that moves messages between sockets and the tiers' stores.

Theory of operation
-------------------
An epoll loop watches the listener, every handover connection, the ROUTER's descriptor and a wake-up
event. Each event is handed to a store (:mod:`trims_shim.daemon.openings`) or a request handler; the
actions that come back are executed at once. Loads run in the loaders' threads, which only fill
memory and wake the loop, so the state needs no lock and a slow disk never delays an answer.

Trust: a client is who the kernel says (SO_PEERCRED); what it sends is data. A request beyond a
limit is refused; an offer beyond one, or what cannot be decoded, also ends the connection.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import selectors
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import zmq

from trims_shim._version import __version__
from trims_shim.daemon import clock
from trims_shim.daemon.control import REQUEST_LIMIT_BYTES, ControlSocket
from trims_shim.daemon.events import EventSocket
from trims_shim.daemon.front import Front, Request
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.openings import Openings
from trims_shim.daemon.prepared.serving import PreparedModels
from trims_shim.daemon.requests import Daemon, add_counters, handle
from trims_shim.daemon.sessions import Session, Sessions
from trims_shim.daemon.tiers import Tier, Tiers
from trims_shim.daemon.values import Announce
from trims_shim.errors import (
    AccessDenied,
    MalformedMessage,
    RequestRefused,
    TooManyRequests,
    TrimsError,
    WireError,
)
from trims_shim.wire import admin, codec, handover, messages
from trims_shim.wire.endpoint import Endpoint

__all__ = ["Server"]

_logger = logging.getLogger("trims_shim.daemon")

_PROGRESS_INTERVAL_S = 0.25
_HOUSEKEEPING_INTERVAL_S = 1.0
_ACCEPTS_PER_TURN = 64
_PACKETS_PER_TURN = 64
"""Of all clients together; at least one of each, while there is time for its user."""
_SHARE_OF_A_USER_S = 0.02
"""Of the processor's time in a turn: one may have thousands of connections, all with packets."""
_PACKETS_OF_A_GREETING = 2
_PACKETS_BEFORE_AN_OFFER = 4096
"""More than the kernel queues on one socket (net.core.wmem_default, 212992 bytes)."""
_SEARCH_S = 0.05
"""Of the processor's time in a turn, for the packets before a client's offers: a request may name
hundreds. Some hundred releases, all that an honest client has waiting, take a tenth of it; one that
goes on sending is not followed."""
_WARNING_INTERVAL_S = 60.0
_WATCHING = (admin.GetStatusRequest, admin.ListImagesRequest)
"""Answers to these are long."""


class Server(Daemon):
    """See the module docstring."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        instance: str,
        listener: socket.socket,
        tiers: Tiers,
        prepared: Callable[[Front], PreparedModels],
        sessions: Sessions,
        wake_descriptor: int,
        idle_exit_s: float,
        keep_unused_s: float = math.inf,
        config_hash: str = "",
        memory_reason: str = "",
    ) -> None:
        """Take over a bound and listening ``listener``; ``wake_descriptor`` is an eventfd.

        ``prepared`` makes what serves prepared models.
        """
        self.endpoint = endpoint
        self.instance = instance
        self.tiers = tiers
        self.sessions = sessions
        self.idle_exit_s = idle_exit_s
        self.config_hash = config_hash
        self.memory_reason = memory_reason
        self.started_ns = clock.now_ns()
        self.counters: Counter[str] = Counter()
        self.counters_of_user: Counter[int] = Counter()
        self._listener = listener
        self._wake_descriptor = wake_descriptor
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(wake_descriptor, selectors.EVENT_READ, self._woken)
        self._context = zmq.Context(io_threads=1)
        self._control = ControlSocket(self._context, endpoint.control(instance), self._selector)
        sessions.control_count = self._control.connection_count
        self._events = EventSocket(self._context, endpoint.events(instance))
        self.openings = Openings(self, tiers, keep_unused_s=keep_unused_s)
        self.prepared = prepared(self)
        self.on_stop: Callable[[], None] = lambda: None
        self.is_reachable: Callable[[], bool] = lambda: True
        self.is_stopping = False
        self._watchers: dict[int, tuple[Request, Any]] = {}
        """Requests for the status, by session. It takes long, and must not delay others."""
        self._jobs: Counter[int] = Counter()
        """Images being verified, by user."""
        self._searched_s: defaultdict[int, float] = defaultdict(float)
        """How long offers were looked for in this turn, by session."""
        self._last_active = time.monotonic()
        self._next_housekeeping = 0.0
        self._next_progress = 0.0
        self._next_accept_warning = 0.0

    # --- life -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until idle, stopped or drained; then close everything."""
        self.prepared.start()
        try:
            while not self._is_finished():
                self._turn()
            why = "it was stopped" if self.is_stopping else f"idle for {self.idle_exit_s:g} s"
            _logger.info("daemon %d ends: %s", os.getpid(), why)
        finally:
            self.stop()  # A successor need not wait until all memory is given back.
            self._close()

    def stop(self) -> None:
        """Accept no client any more, finish what is in flight, then end :meth:`run`.

        May be called from a signal handler, also before :meth:`run`. ``on_stop`` runs once, so that
        a successor can start while loads under way are finished here.
        """
        if self.is_stopping:
            return
        self.is_stopping = True
        self.on_stop()
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(self._listener)
        self._listener.close()
        os.eventfd_write(self._wake_descriptor, 1)

    def _turn(self) -> None:
        ready = self._selector.select(self._timeout())
        self._searched_s.clear()
        packets = max(1, _PACKETS_PER_TURN // max(1, len(ready)))
        # From anywhere on, so that it is always others of a user's for whom no time is left.
        first = random.randrange(len(ready)) if ready else 0
        spent_s: defaultdict[int, float] = defaultdict(float)
        for key, _ in ready[first:] + ready[:first]:
            if not isinstance(key.data, Session):
                key.data()
            elif spent_s[user := key.data.peer.uid] < _SHARE_OF_A_USER_S:
                began_s = time.thread_time()
                self._read_session(key.data, packets)
                spent_s[user] += time.thread_time() - began_s
        for frames in self._control.receive():
            self._on_frames(frames)
        if self._watchers:
            request, message = self._watchers.pop(next(iter(self._watchers)))
            self.serve(request, lambda: handle(self, request, message))
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_INTERVAL_S
            self.openings.report_progress()
            self._control.reap()
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_INTERVAL_S
            self._make_way_if_lost()
            self._events.tend()
            self._guard_against_bloat()
            self.sessions.closer.tend()
            self.tiers.tend()
            self.prepared.tend()
            self.openings.relieve_pressure()
            self.openings.expire()

    def _timeout(self) -> float:
        if self._watchers or self._control.has_messages():
            return 0.0
        return _PROGRESS_INTERVAL_S if self.tiers.ingest_count() else _HOUSEKEEPING_INTERVAL_S

    def _is_finished(self) -> bool:
        if self.is_stopping:
            is_busy = self.tiers.is_loading() or self.tiers.is_making() or self._jobs.total()
            return not is_busy
        if self.tiers.is_needed() or self.prepared.is_needed() or self._jobs.total():
            self._last_active = time.monotonic()
        idle = time.monotonic() - self._last_active
        return 0 < self.idle_exit_s < idle

    def _close(self) -> None:
        for session in self.sessions:
            self.end_session(session, "the daemon has stopped")
        self.sessions.closer.shutdown()
        self._listener.close()
        self.prepared.close()
        self.tiers.close()
        self._control.close(linger_ms=200)
        self._events.close()
        self._context.term()
        self._selector.close()

    def _make_way_if_lost(self) -> None:
        """Stop if the socket directory was cleaned: no client would ever find this daemon."""
        with contextlib.suppress(OSError):  # It cannot be seen now.
            if not self.is_stopping and not self.is_reachable():
                _logger.warning(
                    "a socket in %s is gone; another daemon is to serve", self.endpoint.directory
                )
                self.stop()

    # --- handover ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self.is_stopping:
                    return  # A signal or a packet came meanwhile, and the listener is closed.
                # Out of descriptors: leave it in the backlog, do not spin on it.
                self._warn_of_accept(error)
                time.sleep(0.01)
                return
            try:
                session = self.sessions.accept(connection, clock.now_ns())
            except RequestRefused as error:
                self._turn_away(connection, error)
                self.sessions.hang_up(connection)
                continue
            try:
                self._selector.register(connection, selectors.EVENT_READ, session)
            except OSError as error:  # fs.epoll.max_user_watches: all of a user share them
                self._turn_away(connection, TooManyRequests(f"no connection can be added: {error}"))
                self.end_session(session, "")
                continue
            # Its Hello, and the request behind it, may have arrived.
            self._read_session(session, _PACKETS_OF_A_GREETING)

    def _turn_away(self, connection: socket.socket, error: RequestRefused) -> None:
        self._warn_of_accept(error)
        # Without a word, it would take us for dead and try to start another daemon.
        with contextlib.suppress(OSError):
            handover.send(connection, self.error_reply(error))

    def _warn_of_accept(self, reason: object) -> None:
        self.counters["refused_clients"] += 1
        now = time.monotonic()
        if now >= self._next_accept_warning:
            self._next_accept_warning = now + _WARNING_INTERVAL_S
            _logger.warning("a client cannot be accepted: %s", reason)

    def _read_session(
        self, session: Session, packets: int, *, is_enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Read at most ``packets`` packets, or as many as are enough."""
        try:
            for _ in range(packets):
                if is_enough():
                    return
                packet = self.sessions.receive(session)
                if packet is None:
                    self.end_session(session, "")
                    return
                self._on_packet(session, packet.message)
                if self.sessions.get(session.number) is None:
                    return
        except BlockingIOError:
            return
        except ConnectionError:  # The client has gone, and did not read all that we sent.
            self.end_session(session, "")
        except (TrimsError, OSError) as error:
            self.counters["rejected_packets"] += 1
            self.end_session(session, str(error))

    def _on_packet(self, session: Session, message: Any) -> None:
        if isinstance(message, messages.LeaseRelease):
            self.tiers.release(session.number, message.lease, clock.now_ns())
            self.prepared.release(session.number, message.lease)
        elif isinstance(message, messages.OfferWithdrawal):
            self.openings.withdraw(session, message.ticket)
        elif isinstance(message, messages.Hello):
            self._greet(session, message)
        elif isinstance(message, messages.StatsReport):
            add_counters(self, session, message)
        elif isinstance(message, messages.DrainRequest):
            self._drain(session, message)
        elif isinstance(message, messages.FileOffer):
            self._last_active = time.monotonic()
            if message.tier:  # The whole request; else it follows on the control socket.
                self._count(session)
                self.openings.offer(session, message)
        elif isinstance(message, messages.OpenPreparedRequest):
            if not session.is_greeted:
                raise MalformedMessage("OpenPreparedRequest before Hello")
            self._on_request(Request(session), message)
        else:
            raise MalformedMessage(f"{type(message).__name__} is not for the daemon")

    def _greet(self, session: Session, hello: messages.Hello) -> None:
        if hello.protocol != messages.PROTOCOL_VERSION:
            # Not greeted: the client learns both versions and may ask to drain.
            token = b""
        else:
            token = self.sessions.greet(session, hello.package, hello.pid)
        welcome = messages.Welcome(
            messages.PROTOCOL_VERSION,
            __version__,
            os.getpid(),
            self.instance,
            token,
            self.config_hash,
        )
        handover.send(session.connection, welcome)

    def _drain(self, session: Session, request: messages.DrainRequest) -> None:
        if not session.is_privileged:
            raise AccessDenied("only the daemon's own user may replace it")
        _logger.info("replaced by a client of version %.40s", request.package)
        self.stop()

    def end_session(self, session: Session, reason: str) -> None:
        """Close a connection; tell the client the reason, empty if the client has closed it."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(session.connection)
        if reason:
            with contextlib.suppress(OSError):
                handover.send(session.connection, messages.Goodbye(reason[:500]))
        self.sessions.close(session)
        number = session.number
        self._watchers.pop(number, None)
        if self.tiers.lease_count(number) or self.prepared.lease_count(number):
            self._last_active = time.monotonic()  # Without leases, it only watched or was idle.
        self.tiers.close_session(number, clock.now_ns())
        self.openings.close_session(number)
        self.prepared.close_session(number)

    # --- control ----------------------------------------------------------------------------------

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        routing = frames[0].bytes
        try:
            if len(frames) != 2:
                raise MalformedMessage(f"control message of {len(frames) - 1} parts")
            envelope = codec.decode_envelope(frames[1].buffer, limit_bytes=REQUEST_LIMIT_BYTES)
            session = self.sessions.authenticated(envelope.token)
            if session is None:
                raise AccessDenied("unknown session; say Hello on the handover socket first")
        except (WireError, AccessDenied) as error:
            self.counters["rejected_messages"] += 1
            if self._control.reply(routing, 0, self.error_reply(error)):
                self._control.condemn(frames[-1])
            return
        self._on_request(Request(session, envelope.request_id, routing), envelope.message)

    def _on_request(self, request: Request, message: Any) -> None:
        self._count(request.session)
        if isinstance(message, _WATCHING):
            self.serve(request, lambda: self._watch(request, message))
            return
        self._last_active = time.monotonic()  # Being watched is not being used.
        self.serve(request, lambda: handle(self, request, message))

    def _watch(self, request: Request, message: Any) -> None:
        """Answer at the end of a turn, one session a turn. Raises TooManyRequests."""
        session = request.session.number
        if session in self._watchers:
            raise TooManyRequests("more than one open request for the status")
        self._watchers[session] = request, message

    def _count(self, session: Session) -> None:
        self.counters["requests"] += 1
        session.requests += 1

    def run_later(self, request: Request, tier: Tier, work: Callable[[], Any]) -> None:
        """See :class:`Daemon`."""

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                result = messages.ErrorReply("ReadFailed", str(result)[:1000])
            self._jobs[user] -= 1
            self.answer(request, result)

        user = request.session.peer.uid
        self._jobs[user] += 1
        tier.loader.run(work, done)

    def check_jobs(self, session: Session) -> None:
        """See :class:`Daemon`."""
        limit = self.sessions.limits.checks_per_user
        if self._jobs[session.peer.uid] >= limit:
            raise TooManyRequests(f"more than {limit} images to verify at a time")

    # --- what openings and preparations need ------------------------------------------------------

    def take_offer(self, request: Request, ticket: int) -> Offer:
        """See :class:`Front`."""
        session = request.session
        offer = session.offers.pop(ticket, None)
        if offer is None and request.routing is not None:
            # The offer was sent first but on another socket: it is in that socket's buffer now.
            self._search(session, ticket)
            offer = session.offers.pop(ticket, None)
        if offer is None:
            raise AccessDenied(f"no file was offered under ticket {ticket}")
        return offer

    def _search(self, session: Session, ticket: int) -> None:
        began_s = time.thread_time()
        end_s = began_s + _SEARCH_S - self._searched_s[session.number]
        self._read_session(
            session,
            _PACKETS_BEFORE_AN_OFFER,
            is_enough=lambda: ticket in session.offers or time.thread_time() >= end_s,
        )
        self._searched_s[session.number] += time.thread_time() - began_s

    def hand_over(self, session: Session, message: Any, descriptor: int | None = None) -> None:
        """See :class:`Front`."""
        handover.send(session.connection, message, descriptor=descriptor)

    def reply(self, routing: bytes, number: int, message: Any) -> None:
        """See :class:`Front`."""
        self._control.reply(routing, number, message)

    def publish(self, event: Announce) -> None:
        """See :class:`Front`."""
        self._events.publish(event)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_descriptor, 8)
        self.openings.finish()
        self.prepared.finish()

    # --- defence ----------------------------------------------------------------------------------

    def _guard_against_bloat(self) -> None:
        if not self._control.is_bloated():
            return
        _logger.warning("messages pile up without end; all connections of ZeroMQ are closed")
        self.counters["control_resets"] += 1
        for session in self.sessions:
            self.end_session(session, "the control socket was reset; connect again")
        self._events.reset()
        self._control.reset()
