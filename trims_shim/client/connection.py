"""One connection to the daemon: the handover socket and, when needed, the control socket.

Used by one thread at a time (:mod:`trims_shim.client.pool` sees to that), except
:meth:`Connection.release`, which any thread, also a finalizer, may call at any time. The leases
taken over a connection end with it. So it outlives a load that is given up
(:meth:`Connection.withdraw`).

A resident image or a prepared model is opened over the handover socket alone. The first request
does not wait for the Welcome: it follows the Hello at once, so that a process waits once for its
first model. The control socket is opened only for a request that needs it, and closed after it:
ZeroMQ starts threads, which must not exist when the program forks, and aborts a process that has
closed its descriptors.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import functools
import itertools
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trims_shim import diagnostics
from trims_shim._version import __version__
from trims_shim.children import installed_constant
from trims_shim.client.descriptors import OwnDescriptor, above_streams
from trims_shim.client.session import Conversation, error_from
from trims_shim.client.threads import can_start, may_set_priority
from trims_shim.errors import (
    DaemonTimeout,
    DaemonUnavailable,
    IncompatibleDaemon,
    TrimsError,
    WireError,
)
from trims_shim.late_imports import ensure_imported
from trims_shim.specs import AS_IS, HOST_TIER, Variant
from trims_shim.wire import codec, handover, messages
from trims_shim.wire.endpoint import Endpoint

if TYPE_CHECKING:
    import zmq  # elsewhere where it is used: many processes need none of it

__all__ = ["Connection", "DaemonDied", "Granted", "check_protocol"]

_ANSWER_PATIENCE_S = 3.0
"""What needs no file to be read is answered at once. It is waited for so long, on a machine for
which a long stall timeout was chosen a third of that, and never longer than that."""
_LAST_WORDS_MS = 100
_RELEASE_PATIENCE_S = 60.0
"""How long a thread waits for a daemon that does not read. The next lease to be given up, or the
next request, tries again."""
_DESCRIPTORS_NEEDED = 16
"""A ZeroMQ context with one connected socket takes 8 (libzmq 4.3); a segment and some to spare."""
_THREADS_NEEDED = 4
"""A ZeroMQ context takes 2 (libzmq 4.3), and some to spare."""


class DaemonDied(DaemonUnavailable):
    """The daemon closed the connection in the middle of a request."""

    reason = "daemon_died"


class Granted(NamedTuple):
    """An opened image. The receiver owns the descriptors.

    ``descriptor`` is the segment; on a device tier, the outline. ``allocations`` are device memory,
    in order of address. They are empty on the host tier, and where the reply has handles instead.
    """

    reply: messages.OpenImageReply
    descriptor: int
    allocations: tuple[int, ...] = ()


class _Parts(NamedTuple):
    """The descriptors by part, leases and answers that have arrived for the current request."""

    ticket: int
    descriptors: dict[int, int]
    leases: set[int]
    answers: list[messages.OfferReply]


class Connection:
    """A connection to the daemon; see the module docstring."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        stall_timeout_s: float,
        check: Callable[[messages.Welcome], None] | None = None,
    ) -> None:
        """Connect and send Hello, without waiting for the answer.

        Raises DaemonUnavailable; DaemonTimeout if the daemon accepts no connections.

        The first call that waits receives the Welcome and passes it to ``check``, which may raise.
        """
        self.pid = os.getpid()
        self.endpoint = endpoint
        self._stall_timeout_s = stall_timeout_s
        patience_s = max(_ANSWER_PATIENCE_S, stall_timeout_s / 3)
        self._answer_timeout_s = min(patience_s, stall_timeout_s)
        self._socket = endpoint.stamp()
        self._handover = _connect(endpoint, timeout_s=self._answer_timeout_s)
        self._own = OwnDescriptor(self._handover.fileno())
        self._check = check
        self._welcome: messages.Welcome | None = None
        self._numbers = itertools.count(1)
        self._unsent: deque[Callable[[], None]] = deque()
        """What sends each. Not the messages: those of two kinds are equal if their numbers are."""
        self._is_waiting = threading.Lock()
        self._ticket = 0
        self._asked_under: int | None = 0
        """The ticket of the last request; 0: it had none; None: its answer would name none."""
        self._parts: _Parts | None = None
        self._replies: list[messages.OpenPreparedReply | messages.ErrorReply] = []
        hello = messages.Hello(messages.PROTOCOL_VERSION, __version__, os.getpid())
        try:
            self._send_handover(hello, None)
        except BaseException:
            self._handover.close()
            raise

    @property
    def welcome(self) -> messages.Welcome:
        """The daemon's Welcome; blocks until it arrives.

        Raises DaemonUnavailable, DaemonTimeout, WireError, and the errors of ``check``.
        """
        while self._welcome is None:
            self._receive_welcome()
        return self._welcome

    # --- requests ---------------------------------------------------------------------------------

    def open_image(
        self, descriptor: int, name: str, *, tier: str = HOST_TIER, is_numbers: bool = False
    ) -> Granted:
        """Lease the image of an open file at a tier. Blocks while the daemon reads it.

        ``is_numbers``: it is no model file, and a device has to hold it as it is. Raises
        RequestRefused, DaemonError, WireError.
        """
        variant = Variant.in_one_piece(os.fstat(descriptor).st_size) if is_numbers else AS_IS
        granted = self._open(descriptor, name, tier, variant)
        if granted is None:
            raise WireError(f"the offer of {name} was not taken")
        return granted

    def open_variant(self, descriptor: int, name: str, variant: Variant) -> Granted | None:
        """Lease a variant of an open file's image, on the host tier.

        Returns None where there is none yet: the daemon may load it for later requests. Blocks only
        while it is already being loaded. Raises as :meth:`open_image`.
        """
        return self._open(descriptor, name, HOST_TIER, variant)

    def _open(
        self, descriptor: int, name: str, tier: str, variant: Variant = AS_IS
    ) -> Granted | None:
        self._asked_under = 0
        self._flush_releases()
        self._asked_under = self._ticket = self._ticket + 1
        parts = self._parts = _Parts(self._ticket, {}, set(), [])
        shown = handover.clipped(name, limit_bytes=messages.NAME_LIMIT_BYTES)
        try:
            offer = messages.FileOffer(parts.ticket, tier, shown, variant)
            self._send_handover(offer, descriptor)
            answer = self._answer_to_offer(parts)
            reply = answer.opened
            if reply is None:
                if variant != AS_IS and tier == HOST_TIER and not answer.is_loading:
                    return None
                reply = self._request(messages.OpenImageRequest(parts.ticket))
            descriptors = self._receive_parts(parts, _part_count(reply, tier), name)
            if os.fstat(descriptors[0]).st_size < reply.size_bytes:
                raise WireError(f"segment of {name} is shorter than its image")
            return Granted(reply, descriptors[0], descriptors[1:])
        except BaseException:
            handover.close_all(list(parts.descriptors.values()))
            for lease in parts.leases:
                self.release(lease)
            raise
        finally:
            self._parts = None

    def _answer_to_offer(self, parts: _Parts) -> messages.OfferReply:
        """Wait for the answer; a resident image comes with it, in one round trip without ZeroMQ."""
        self._receive_until(lambda: parts.answers, self._stall_timeout_s)
        return parts.answers[0]

    def _receive_parts(self, parts: _Parts, count: int, name: str) -> tuple[int, ...]:
        """Wait for the parts ``0 .. count - 1`` of the current request."""
        came = parts.descriptors
        while (before := len(came)) < count:
            try:
                self._receive_until(lambda: len(came) > before, self._answer_timeout_s)
            except DaemonTimeout as error:
                raise WireError(f"{len(came)} of {count} parts of {name} came") from error
        if sorted(came) != list(range(count)):
            raise WireError(f"parts {sorted(came)} of {name} came, not the first {count}")
        return tuple(came[part] for part in range(count))

    def open_prepared(
        self,
        request: messages.OpenPreparedRequest,
        *,
        descriptor: int | None = None,
        directory: int | None = None,
        externals: Mapping[str, int] | None = None,
    ) -> messages.OpenPreparedReply:
        """Ask for a prepared ONNX model; the descriptors, if any, are offered with the request.

        ``externals`` are descriptors by location, see :class:`OpenPreparedRequest`.

        Never waits for a preparation. Raises as :meth:`open_image`.
        """
        self._asked_under = None
        self._flush_releases()
        request = request._replace(
            ticket=self._offer(descriptor),
            directory=self._offer(directory),
            externals=tuple(
                messages.OfferedExternal(location, self._offer(file))
                for location, file in (externals or {}).items()
            ),
        )
        if len(codec.encode(request)) > messages.HANDOVER_PACKET_LIMIT_BYTES:
            reply = self._request(request)
        else:
            reply = self._exchange_packets(request)
        if not isinstance(reply, messages.OpenPreparedReply):
            raise WireError(f"{type(reply).__name__} answers OpenPreparedRequest")
        if reply.reason == "other_namespace":
            # An older daemon has not taken what it does not know of.
            for ticket in (request.directory, *(each.ticket for each in request.externals)):
                if ticket:
                    self._post(messages.OfferWithdrawal(ticket))
        return reply

    def _offer(self, descriptor: int | None) -> int:
        """Offer what a request will name; its ticket, 0 for nothing."""
        if descriptor is None:
            return 0
        self._ticket += 1
        self._send_handover(messages.FileOffer(self._ticket), descriptor)
        return self._ticket

    def _exchange_packets(self, request: messages.OpenPreparedRequest) -> Any:
        """Make one round trip over the handover socket, without ZeroMQ."""
        self._replies.clear()
        self._send_handover(request, None)
        self._receive_until(lambda: self._replies, self._stall_timeout_s)
        reply = self._replies.pop()
        if isinstance(reply, messages.ErrorReply):
            raise error_from(reply)
        return reply

    def request(self, message: Any) -> Any:
        """Send a control request and wait for its reply. Raises as :meth:`open_image`."""
        self._asked_under = 0
        reply = self._request(message)
        asked, answers = type(message).__name__, type(reply).__name__
        if answers != asked.replace("Request", "Reply"):
            raise WireError(f"{answers} answers {asked}")
        return reply

    def _request(self, message: Any) -> Any:
        if "zmq" not in sys.modules:
            _check_descriptors()  # Python would fail to import it, perhaps half-way.
        ensure_imported("zmq")
        import zmq

        try:
            with self._control_socket() as control:
                return self._exchange(message, control)
        except zmq.ZMQError as error:
            raise DaemonUnavailable(f"the control socket fails: {error}") from error

    def _exchange(self, message: Any, control: zmq.Socket[bytes]) -> Any:
        import zmq

        number = next(self._numbers)
        envelope = codec.Envelope(number, self.welcome.token, message)
        conversation = Conversation(number, time.monotonic(), stall_timeout_s=self._stall_timeout_s)
        self._check_process()
        # On a socket of its own nothing is waiting to be sent: this never blocks.
        control.send(codec.encode_envelope(envelope), zmq.NOBLOCK)
        poller = zmq.Poller()
        # Its descriptor, which only says that something may have come. In a child that a signal
        # handler forks meanwhile, pyzmq would wait for the socket itself for ever (EINTR).
        poller.register(control.fileno(), zmq.POLLIN)
        poller.register(self._handover.fileno(), zmq.POLLIN)
        while True:
            has_answer = int(control.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            ready = {}
            if not has_answer:  # One that is there is taken, also by a process that was stopped.
                left = conversation.check_stall(time.monotonic())
                ready = dict(poller.poll(int(left * 1000) + 1))
            self._check_process()
            if control.fileno() in ready:
                continue
            if has_answer:
                answer = codec.decode_envelope(control.recv(zmq.NOBLOCK))
                reply = conversation.receive(answer, time.monotonic())
                if reply is not None:
                    return reply
            elif self._handover.fileno() in ready:
                try:
                    self._receive_handover(time.monotonic() + self._answer_timeout_s)
                except DaemonUnavailable:
                    # A stopping daemon answers on one socket and says goodbye on the other.
                    if not control.poll(_LAST_WORDS_MS):
                        raise

    def report(self, counters: dict[str, int]) -> None:
        """Add counters to the daemon's totals. Never blocks; best effort."""
        if counters and self._is_ours():
            with contextlib.suppress(OSError):
                handover.send(self._handover, messages.StatsReport(counters))

    def release(self, lease: int) -> None:
        """Give up a lease. Never blocks or raises; safe in a finalizer."""
        self._post(messages.LeaseRelease(lease))

    def withdraw(self) -> bool:
        """Give up what the last request asked for; say whether other requests may follow.

        For a request that has raised an error. Leases of others are kept. Never blocks.
        """
        if self._asked_under is None or self._welcome is None:
            return False
        if self._asked_under:
            self._post(messages.OfferWithdrawal(self._asked_under))
        return True

    def _post(self, message: messages.LeaseRelease | messages.OfferWithdrawal) -> None:
        if not self._is_ours():
            return
        self._unsent.append(functools.partial(handover.send, self._handover, message))
        if not self._send_unsent():
            self._send_later()

    def _is_ours(self) -> bool:
        """Whether this process has made the connection, and the program has not closed it."""
        return self.pid == os.getpid() and self._own.is_open()

    def drain(self) -> None:
        """Ask the daemon to finish its requests and make room for a newer one."""
        self._send_handover(messages.DrainRequest(__version__), None)

    # --- life -------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Whether neither the daemon has closed its end nor the program ours.

        To be asked between requests: the last one is over, and cannot be withdrawn any more.
        """
        self._asked_under = 0
        if not self._is_ours():
            return False
        try:
            data = self._handover.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        with contextlib.suppress(DaemonUnavailable, WireError, OSError):
            self._receive_handover(time.monotonic() + self._answer_timeout_s)
            return True
        return False

    def is_replaced(self) -> bool:
        """Whether new connections get another daemon; this one may hang, or is about to end."""
        stamp = self.endpoint.stamp()
        if stamp in (None, self._socket):
            return False
        # Perhaps only its times have changed, as by chmod or touch: ask who listens there.
        daemon = handover.peer_of(self._handover).pid  # 0 in another namespace
        try:
            with _connect(self.endpoint, timeout_s=0) as current:
                if daemon and handover.peer_of(current).pid == daemon:
                    self._socket = stamp
        except TrimsError as error:
            diagnostics.pass_on(error)
        return stamp != self._socket

    def close(self) -> None:
        """Close the connection; the daemon releases the leases. A forked child leaves it open."""
        if not self._is_ours():
            self._handover.detach()
        self._handover.close()

    # --- inside -----------------------------------------------------------------------------------

    def _receive_welcome(self) -> None:
        packet = self._next_packet(time.monotonic() + self._answer_timeout_s)
        if packet.descriptor is not None:
            os.close(packet.descriptor)
        if isinstance(packet.message, messages.ErrorReply):
            raise error_from(packet.message)  # It is one connection too many.
        if not isinstance(packet.message, messages.Welcome):
            raise DaemonUnavailable(f"the daemon answered Hello with {packet.message!r:.200}")
        if self._check is not None:
            self._check(packet.message)
        self._welcome = packet.message

    @contextlib.contextmanager
    def _control_socket(self) -> Iterator[zmq.Socket[bytes]]:
        import zmq

        path = self.endpoint.control(self.welcome.instance)
        if not os.path.exists(path):
            # The directory was cleaned; ZeroMQ would wait for the socket to come back.
            raise DaemonUnavailable(f"the daemon's socket {path} is gone")
        _check_descriptors()
        _check_threads()
        _check_events()
        # What a program prints to a stream that it has closed would make ZeroMQ abort the process.
        # At its end, a context waits for ever for a socket that is still open.
        with above_streams(), zmq.Context(io_threads=1) as context:
            try:
                with context.socket(zmq.DEALER) as control:
                    control.setsockopt(zmq.LINGER, 0)
                    control.setsockopt(zmq.MAXMSGSIZE, messages.CONTROL_MESSAGE_LIMIT_BYTES)
                    control.connect(f"ipc://{path}")
                    yield control
            except BaseException as error:
                _close_sockets(error, context)
                raise

    def _timeout(self, what: str) -> DaemonTimeout:
        """Make the error for a silent daemon; it names no command that would ask the daemon."""
        pid = handover.peer_of(self._handover).pid  # 0 in another namespace
        end = f"; `kill -9 {pid}` ends it, and loads start another within a minute" if pid else ""
        return DaemonTimeout(f"the daemon {what}: it hangs, or the machine is very busy{end}")

    def _check_process(self) -> None:
        """A signal handler may have forked in the middle of a request, and the child goes on."""
        if self.pid != os.getpid():
            raise DaemonUnavailable("this connection to the daemon is the parent process's")

    def _send_handover(self, message: Any, descriptor: int | None) -> None:
        self._check_process()
        try:
            try:
                handover.send(self._handover, message, descriptor=descriptor)
            except BlockingIOError:  # Rare: there is room for hundreds of packets.
                if not self._has_room(self._answer_timeout_s):
                    raise self._timeout("does not read") from None
                handover.send(self._handover, message, descriptor=descriptor)
        except OSError as error:
            if isinstance(error, ConnectionError) and self._welcome is None:
                self._receive_welcome()  # May say why the daemon has closed the connection.
            raise _lost(error) from error

    def _receive_until(self, is_there: Callable[[], object], timeout_s: float) -> None:
        """Receive until ``is_there()``. Other packets do not extend it. Raises DaemonTimeout."""
        deadline_s = time.monotonic() + timeout_s
        while not is_there():
            self._receive_handover(deadline_s)

    def _receive_handover(self, deadline_s: float) -> None:
        if self._welcome is None:
            self._receive_welcome()
        packet = self._next_packet(deadline_s)
        is_taken = False
        try:
            message, parts = packet.message, self._parts
            if isinstance(message, messages.SegmentGrant):
                is_taken = self._takes(message, packet.descriptor)
            is_answer = isinstance(message, messages.OfferReply)
            if is_answer and parts and message.ticket == parts.ticket:
                parts.answers.append(message)
            if isinstance(message, messages.OpenPreparedReply | messages.ErrorReply):
                self._replies.append(message)
        finally:  # also after an interrupt
            if packet.descriptor is not None and not is_taken:
                os.close(packet.descriptor)
        if isinstance(message, messages.Goodbye):
            raise DaemonUnavailable(f"the daemon closes the connection: {message.reason}")

    def _takes(self, grant: messages.SegmentGrant, descriptor: int | None) -> bool:
        """Take the descriptor if it is a part that the current request lacks; say whether it is."""
        parts = self._parts
        if parts is None or grant.ticket != parts.ticket:
            # For a request that was given up.
            self.release(grant.lease)
            return False
        parts.leases.add(grant.lease)
        if descriptor is None or grant.part in parts.descriptors:
            return False
        parts.descriptors[grant.part] = descriptor
        return True

    def _next_packet(self, deadline_s: float) -> handover.Packet:
        left_s = deadline_s - time.monotonic()
        try:
            if left_s <= 0 or not handover.wait_until_ready(self._handover, left_s):
                raise self._timeout("does not answer")
            self._check_process()
            packet = _receive(self._handover)
        except OSError as error:
            raise _lost(error) from error
        if packet is None:
            raise DaemonDied("the daemon has closed the connection")
        return packet

    # --- leases and loads that are given up -------------------------------------------------------

    def _flush_releases(self) -> None:
        while not self._send_unsent():
            if not self._has_room(self._answer_timeout_s):
                raise self._timeout("does not read")

    def _send_unsent(self) -> bool:
        """Give up leases while there is room; say whether none is left. Never blocks.

        No lock: a signal handler, or a finalizer, may come in the middle. Of two that send at once
        both may give up a lease; to the daemon the second says nothing.
        """
        try:
            while True:
                send = self._unsent[0]
                send()
                with contextlib.suppress(ValueError):
                    self._unsent.remove(send)
        except IndexError:
            return True
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()  # The connection is gone, and all of its leases with it.
            return True

    def _send_later(self) -> None:
        """Let a thread wait for room: there may be no further request, and no end of the program.

        The daemon would keep the memory until then.
        """
        if not self._is_waiting.acquire(blocking=False):
            return
        try:
            # Not threading.Thread: its start takes locks that the interrupted code may hold.
            _thread.start_new_thread(self._wait_and_send, ())
        except (RuntimeError, MemoryError):
            self._is_waiting.release()  # No thread can start; the next one to give up tries again.

    def _wait_and_send(self) -> None:
        try:
            while self._is_ours() and not self._send_unsent():
                if not self._has_room(_RELEASE_PATIENCE_S):
                    return
        finally:
            self._is_waiting.release()
        # One that found no room between the last look and the release started no thread.
        if self._unsent and self._is_ours():
            self._send_later()

    def _has_room(self, timeout_s: float) -> bool:
        try:
            return handover.wait_until_ready(self._handover, timeout_s, is_for_room=True)
        except (OSError, ValueError):  # It is closed.
            return True


def _receive(connection: socket.socket) -> handover.Packet | None:
    try:
        return handover.receive(connection)
    except ConnectionResetError:
        # The daemon left packets of ours unread. The kernel reports that first, and only once; the
        # daemon's earlier packets can still be read.
        return handover.receive(connection)


def check_protocol(welcome: messages.Welcome) -> None:
    """Raise IncompatibleDaemon when the daemon speaks another version."""
    if welcome.protocol != messages.PROTOCOL_VERSION or not welcome.token:
        advice = "let the daemon's user run `trims stop`"
        installed = installed_constant("wire/messages.py", "PROTOCOL_VERSION")
        if str(messages.PROTOCOL_VERSION) != installed == str(welcome.protocol):
            # The next daemon would be like this one.
            advice = "start this program again, as another trims_shim was installed under it"
        raise IncompatibleDaemon(
            f"the daemon (trims_shim {welcome.package}, protocol {welcome.protocol}) "
            f"and this process (trims_shim {__version__}, protocol "
            f"{messages.PROTOCOL_VERSION}) do not understand each other; {advice}"
        )


def _part_count(reply: Any, tier: str) -> int:
    """Return how many descriptors come with a reply. Raises WireError for a senseless reply."""
    if not isinstance(reply, messages.OpenImageReply):
        raise WireError(f"{type(reply).__name__} answers OpenImageRequest")
    if reply.size_bytes <= 0:
        raise WireError(f"an image of {reply.size_bytes} bytes was granted")
    grant = reply.device
    if (grant is None) != (tier == HOST_TIER):
        raise WireError(f"an image at another tier than {tier} was granted")
    if grant is None:
        return 1
    if not grant.allocations or min(grant.allocations) <= 0:
        raise WireError(f"allocations of {grant.allocations} bytes were granted")
    if not grant.handles:
        return 1 + len(grant.allocations)
    if len(grant.handles) != len(grant.allocations):
        raise WireError(f"{len(grant.handles)} handles of {len(grant.allocations)} allocations")
    return 1


def _lost(error: OSError) -> DaemonUnavailable:
    """Make the error for a connection that fails; DaemonDied only if the daemon has ended it."""
    if error.errno == errno.EMFILE:
        return _too_few_descriptors(error)
    kind = DaemonDied if isinstance(error, ConnectionError) else DaemonUnavailable
    return kind(f"the daemon has closed the connection: {error}")


def _connect(endpoint: Endpoint, *, timeout_s: float) -> socket.socket:
    endpoint.check_path()
    endpoint.check_owner()
    try:
        # What a program prints to a stream that it has closed would go to the daemon.
        with above_streams():
            connection = handover.new_socket()
    except OSError as error:
        raise DaemonUnavailable(f"no socket can be opened: {error}") from error
    connection.settimeout(timeout_s)
    try:
        _connect_patiently(connection, endpoint.handover, timeout_s)
        # Non-blocking from here on: with a timeout, Python waits even under MSG_DONTWAIT.
        connection.setblocking(False)
        peer = handover.peer_of(connection)
    except BlockingIOError as error:
        connection.close()
        raise DaemonTimeout(
            f"the daemon at {endpoint.handover} takes no connections: it hangs, or the machine is "
            f"very busy; `fuser -k {endpoint.lock}` ends it"
        ) from error
    except OSError as error:
        connection.close()
        # A missing socket needs no reason: no daemon was started, or it ended as it should.
        why = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror or error})"
        advice = endpoint.how_to_start()
        if isinstance(error, PermissionError):  # one may run all the same
            advice = (
                "join the group for which it is (TRIMS_GROUP), or set TRIMS_SOCKET_DIR to a "
                "directory of yours"
            )
        raise DaemonUnavailable(
            f"no daemon answers at {endpoint.handover}{why}; {advice}"
        ) from error
    if peer.uid not in (os.geteuid(), 0):
        connection.close()
        raise DaemonUnavailable(
            f"{endpoint.handover} is served by user {peer.uid}, whom you need not trust"
        )
    return connection


def _connect_patiently(connection: socket.socket, path: str, timeout_s: float) -> None:
    """Connect, retrying while the backlog is full: UNIX sockets do not wait for room in it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _close_sockets(error: BaseException, context: zmq.Context[Any]) -> None:
    """Close what an interrupt has left of a context: a socket half made, or half closed.

    Not the program's, which a signal handler may use.
    """
    import zmq

    place = error.__traceback__
    while place is not None:
        for each in list(place.tb_frame.f_locals.values()):
            if isinstance(each, zmq.Socket) and getattr(each, "context", context) is context:
                each.close()
        place = place.tb_next


def _check_descriptors() -> None:
    """Raise DaemonUnavailable where ZeroMQ would lack descriptors and abort the process."""
    held: list[int] = []
    closing = map(os.close, held)
    count, flags = _DESCRIPTORS_NEEDED, os.O_PATH | os.O_CLOEXEC
    try:
        # All in one call, as they are closed: an interrupt comes between calls, and loses none.
        held.extend(map(os.open, ("/",) * count, (flags,) * count))
    except OSError as error:
        raise _too_few_descriptors(error) from error
    finally:
        deque(closing, maxlen=0)


def _too_few_descriptors(error: OSError) -> DaemonUnavailable:
    return DaemonUnavailable(f"this process has too few descriptors left: {error}")


def _check_threads() -> None:
    """Raise DaemonUnavailable where ZeroMQ would get no threads and abort the process."""
    if not can_start(_THREADS_NEEDED):
        raise DaemonUnavailable("this process can start too few threads (see `ulimit -u`)")
    if not may_set_priority():
        raise DaemonUnavailable(
            "threads of this process may not set their priority (a seccomp filter?)"
        )


def _check_events() -> None:
    """Raise DaemonUnavailable where ZeroMQ could not wait for events and would abort the process.

    A sandbox may refuse these calls, and a user has so many watches (fs.epoll.max_user_watches).
    """
    if not hasattr(select, "epoll"):  # eventlet removes it from the module, not from the kernel
        return
    held: list[int] = []
    closing = map(os.close, held)
    try:
        held.extend(map(os.eventfd, (0,), (os.EFD_CLOEXEC,)))  # see _check_descriptors
        with select.epoll() as poll:
            poll.register(held[0], select.EPOLLIN)
    except OSError as error:
        raise DaemonUnavailable(f"this process cannot wait for events: {error}") from error
    finally:
        deque(closing, maxlen=0)
