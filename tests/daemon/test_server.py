"""What the server makes of packets and frames, turn by turn; tests/faults has it as a process."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from trims_shim import config
from trims_shim._version import __version__
from trims_shim.daemon import main as daemon_main
from trims_shim.daemon import sessions
from trims_shim.daemon.front import Request
from trims_shim.daemon.server import Server
from trims_shim.daemon.sessions import Limits
from trims_shim.errors import AccessDenied, TooManyRequests
from trims_shim.wire import admin, codec, endpoint, handover, messages

OTHER = 70_001
HELLO = messages.Hello(messages.PROTOCOL_VERSION, "1.2", 5)
RECIPE = messages.SessionRecipe("1", "b", (), "all")


class Client:
    """A connection of a user, and the session at its other end."""

    def __init__(self, server: Server, user: int) -> None:
        self.server = server
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.connection.setblocking(False)
        peer = handover.Peer(os.getpid(), user, user)
        self.session = server.sessions.add(theirs, peer, 0)

    def send(self, message: Any, *, descriptor: int | None = None) -> None:
        handover.send(self.connection, message, descriptor=descriptor)

    def say(self, message: Any, *, descriptor: int | None = None) -> list[Any]:
        """Send a packet, which is read; the answers."""
        self.send(message, descriptor=descriptor)
        self.server._read_session(self.session, 1)
        return self.heard()

    def heard(self) -> list[Any]:
        found = []
        try:
            while (packet := handover.receive(self.connection)) is not None:
                found.append(packet.message)
        except BlockingIOError:
            pass
        return found

    @property
    def is_open(self) -> bool:
        return self.server.sessions.get(self.session.number) is self.session


@pytest.fixture
def server(socket_directory: Path, tmp_path: Path) -> Iterator[Server]:
    settings = config.load(
        {},
        socket_dir=str(socket_directory / "s"),
        cache_dir=str(tmp_path),
        memory_kind="memfd",
        host_bytes="16M",
        prepared_bytes="0",
        idle_exit="600",
    )
    directory = endpoint.choose(settings)
    directory.create()
    server = daemon_main._build(directory, settings)
    yield server
    if server._selector.get_map() is not None:
        server.stop()
        server.run()
    os.close(server._wake_descriptor)


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connect(user: int = os.geteuid(), *, hello: bool = True) -> Client:
        clients.append(Client(server, user))
        if hello:
            clients[-1].say(HELLO)
        return clients[-1]

    yield connect
    for each in clients:
        each.connection.close()


Connect = Callable[..., Client]


class TestGreeting:
    def test_the_token_is_for_control_requests(self, server: Server, connect: Connect) -> None:
        client = connect(hello=False)
        (welcome,) = client.say(HELLO)
        assert (welcome.protocol, welcome.package) == (messages.PROTOCOL_VERSION, __version__)
        assert (welcome.instance, welcome.pid) == (server.instance, os.getpid())
        assert server.sessions.authenticated(welcome.token) is client.session

    def test_another_version_gets_no_token(self, server: Server, connect: Connect) -> None:
        """It learns ours, and may ask again or take leave."""
        client = connect(hello=False)
        for protocol in (0, messages.PROTOCOL_VERSION + 1):
            (welcome,) = client.say(messages.Hello(protocol, "9", 5))
            assert (welcome.protocol, welcome.token) == (messages.PROTOCOL_VERSION, b"")
        assert client.is_open
        assert not client.session.is_greeted

    @pytest.mark.parametrize(
        "message",
        [
            messages.OpenPreparedRequest(0, "/m", "", RECIPE, "/o"),
            messages.Goodbye("no message of a client"),
            admin.GetStatusRequest(),
        ],
        ids=lambda message: type(message).__name__,
    )
    def test_what_comes_instead_ends_the_connection(
        self, server: Server, connect: Connect, message: Any
    ) -> None:
        client = connect(hello=False)
        (goodbye,) = client.say(message)
        assert isinstance(goodbye, messages.Goodbye)
        assert type(message).__name__ in goodbye.reason
        assert not client.is_open
        assert (server.counters["rejected_packets"], server.counters["requests"]) == (1, 0)

    def test_only_a_newer_client_of_our_own_makes_us_go(
        self, server: Server, connect: Connect
    ) -> None:
        (goodbye,) = connect(OTHER).say(messages.DrainRequest("9"))
        assert "own user" in goodbye.reason
        assert not server.is_stopping
        assert connect().say(messages.DrainRequest("9")) == []
        assert server.is_stopping


class TestPackets:
    def test_a_reason_is_cut(self, server: Server, connect: Connect) -> None:
        client = connect()
        server.end_session(client.session, "x" * 501)
        assert client.heard() == [messages.Goodbye("x" * 500)]

    def test_so_many_are_read_at_a_time(self, server: Server, connect: Connect) -> None:
        client = connect()
        for _ in range(3):
            client.send(messages.StatsReport({"n": 1}))
        server._read_session(client.session, 2)
        assert server.counters["client.n"] == 2
        server._read_session(client.session, 2)
        assert server.counters["client.n"] == 3
        client.connection.close()
        server._read_session(client.session, 2)
        assert not client.is_open
        assert server.counters["rejected_packets"] == 0, "it has only gone"

    def test_who_goes_without_reading_is_not_rejected(
        self, server: Server, connect: Connect
    ) -> None:
        """Found: each client that was killed before it read its segment was counted."""
        killed, hasty = connect(), connect(hello=False)
        server.hand_over(killed.session, messages.SegmentGrant(1, 1))
        hasty.send(HELLO)
        for client in (killed, hasty):
            client.connection.close()
            server._read_session(client.session, 2)
            assert not client.is_open
        assert server.counters["rejected_packets"] == 0

    def test_those_of_a_turn_are_shared_among_clients(
        self, server: Server, connect: Connect
    ) -> None:
        for client in (connect(), connect()):
            connection = client.session.connection
            server._selector.register(connection, selectors.EVENT_READ, client.session)
            for _ in range(40):
                client.send(messages.StatsReport({"n": 1}))
        server._turn()
        assert 0 < server.counters["client.n"] <= 64

    def test_what_is_offered_later_is_found(self, server: Server, connect: Connect) -> None:
        """The offer was sent before the request, but on another socket."""
        client = connect()
        with open(__file__) as file:
            for ticket in (4, 5, 6):
                client.send(messages.FileOffer(ticket), descriptor=file.fileno())
            expected = os.fstat(file.fileno()).st_ino
        offer = server.take_offer(Request(client.session, 1, b"route"), 5)
        assert offer.identity().inode == expected
        offer.close()
        assert list(client.session.offers) == [4], "what follows is left in its place"
        with pytest.raises(AccessDenied, match="ticket 6"):
            server.take_offer(Request(client.session), 6)
        with pytest.raises(AccessDenied, match="ticket 5"):
            server.take_offer(Request(client.session, 2, b"route"), 5)

    def test_a_packet_that_is_a_request_is_counted(self, server: Server, connect: Connect) -> None:
        client = connect()
        with open(__file__) as file:
            (reply,) = client.say(messages.FileOffer(1, "host", "x"), descriptor=file.fileno())
            assert isinstance(reply, messages.OfferReply)
            assert client.say(messages.FileOffer(2), descriptor=file.fileno()) == []
        (refused,) = client.say(messages.OpenPreparedRequest(0, "/m", "", RECIPE, "/o"))
        assert refused.reason == "prepared_off"
        assert (server.counters["requests"], client.session.requests) == (2, 2)

    def test_a_lease_is_given_up_at_every_kind_of_store(
        self, server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        released: list[tuple[int, int]] = []
        for part in (server.tiers, server.prepared):
            monkeypatch.setattr(part, "release", lambda *found: released.append(found[:2]))
        client = connect()
        assert client.say(messages.LeaseRelease(7)) == []
        assert released == [(client.session.number, 7)] * 2

    def test_what_was_asked_for_is_withdrawn(
        self, server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        withdrawn: list[tuple[Any, int]] = []
        monkeypatch.setattr(server.openings, "withdraw", lambda *asked: withdrawn.append(asked))
        client = connect()
        assert client.say(messages.OfferWithdrawal(7)) == []
        assert withdrawn == [(client.session, 7)]


class TestFrames:
    @pytest.fixture
    def control(self, server: Server) -> Any:
        """Notes what the control socket is told to do."""
        control = SimpleNamespace(replies=[], condemned=[], is_there=True)

        def reply(routing: bytes, number: int, message: Any) -> bool:
            control.replies.append((routing, number, message))
            return bool(control.is_there)

        server._control.reply = reply  # type: ignore[method-assign]
        server._control.condemn = control.condemned.append  # type: ignore[method-assign]
        return control

    @staticmethod
    def frames(*parts: bytes) -> Any:
        return [SimpleNamespace(bytes=part, buffer=memoryview(part)) for part in (b"r", *parts)]

    def test_a_request_with_a_token_is_served(
        self, server: Server, connect: Connect, control: Any
    ) -> None:
        client = connect()
        request = codec.Envelope(7, client.session.token, admin.PinImageRequest("x", True))
        server._on_frames(self.frames(codec.encode_envelope(request)))
        ((routing, number, reply),) = control.replies
        assert (routing, number, reply.error) == (b"r", 7, "UnknownImage")
        assert (control.condemned, client.session.requests) == ([], 1)

    @pytest.mark.parametrize("is_there", [True, False])
    def test_without_one_the_connection_is_closed(
        self, server: Server, connect: Connect, control: Any, is_there: bool
    ) -> None:
        """After the answer, if it was sent: the number could be another connection's by now."""
        control.is_there = is_there
        token = connect().session.token
        good = codec.encode_envelope(codec.Envelope(7, token, admin.StopDaemonRequest()))
        forged = codec.encode_envelope(codec.Envelope(7, b"x" * 16, admin.StopDaemonRequest()))
        none = codec.encode_envelope(codec.Envelope(7, b"", admin.StopDaemonRequest()))
        long = codec.encode_envelope(codec.Envelope(7, token, messages.Goodbye("x" * (64 << 10))))
        bad = [(forged,), (none,), (long,), (good, good), (), (b"?",)]
        for parts in bad:
            server._on_frames(self.frames(*parts))
        assert {number for _, number, _ in control.replies} == {0}, "of no request"
        assert [reply.error for _, _, reply in control.replies] == [
            "AccessDenied",
            "AccessDenied",
            "MessageTooLarge",
            "MalformedMessage",
            "MalformedMessage",
            "MalformedMessage",
        ]
        assert len(control.condemned) == (len(bad) if is_there else 0)
        assert (server.is_stopping, server.counters["rejected_messages"]) == (False, len(bad))


class TestLife:
    def test_who_connects_is_let_in(self, server: Server) -> None:
        watched = len(server._selector.get_map())
        clients = [handover.new_socket() for _ in range(3)]
        for each in clients:
            each.connect(server.endpoint.handover)
            handover.send(each, HELLO)
            each.setblocking(False)
        server.sessions.limits = Limits(sessions_per_user=2)
        server._turn()
        for each in clients[:2]:
            packet = handover.receive(each)
            assert packet is not None
            assert len(packet.message.token) == 16
        refusal = None
        with contextlib.suppress(ConnectionResetError):  # Its Hello was not read: may come first.
            refusal = handover.receive(clients[2])
        refusal = refusal or handover.receive(clients[2])
        assert refusal is not None
        assert refusal.message.error == "TooManyRequests"
        assert server.counters["refused_clients"] == 1
        with pytest.raises(ConnectionError):
            clients[2].send(b"?")
        assert len(server.sessions) == 2
        handover.send(clients[0], messages.StatsReport({"n": 1}))
        server._turn()
        assert server.counters["client.n"] == 1
        for each in clients:
            each.close()
        server._turn()
        assert len(server.sessions) == 0
        assert len(server._selector.get_map()) == watched, "others may get the same descriptors"

    def test_a_signal_among_clients_that_are_let_in(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Found: it closes the listener, and of a client that could not be accepted was warned."""
        server.stop()
        server._accept()
        assert caplog.messages == []
        assert server.counters["refused_clients"] == 0

    def test_a_request_to_stop_among_clients_that_are_let_in(self, server: Server) -> None:
        with handover.new_socket() as client:
            client.connect(server.endpoint.handover)
            handover.send(client, messages.DrainRequest("9"))
            server._accept()
        assert server.is_stopping
        assert server.counters["refused_clients"] == 0

    def test_descriptors_are_kept_for_the_control_connections_that_are_to_come(
        self, server: Server, connect: Connect
    ) -> None:
        connect()
        assert server.sessions.missing_controls() == 1
        with server._context.socket(zmq.DEALER) as control:
            control.linger = 0
            control.connect(f"ipc://{server.endpoint.control(server.instance)}")
            while server.sessions.missing_controls():
                server._turn()

    def test_a_client_for_whom_no_descriptor_is_left_waits(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full() -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with handover.new_socket() as client:
            client.connect(server.endpoint.handover)
            handover.send(client, HELLO)
            with monkeypatch.context() as patch:
                patch.setattr(server, "_listener", SimpleNamespace(accept=full))
                server._turn()
            assert (len(server.sessions), server.counters["refused_clients"]) == (0, 1)
            server._turn()
            packet = handover.receive(client)
            assert packet is not None
            assert len(packet.message.token) == 16

    def test_a_client_that_cannot_be_watched(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: it ended the daemon, where other programs had all watches of the user."""

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        refused, served = handover.new_socket(), handover.new_socket()
        with refused, served:
            refused.connect(server.endpoint.handover)
            with monkeypatch.context() as patch:
                patch.setattr(server._selector, "register", full)
                server._turn()
            packet = handover.receive(refused)
            assert packet is not None
            assert packet.message.error == "TooManyRequests"
            assert "No space left" in packet.message.message
            assert handover.receive(refused) is None
            assert (len(server.sessions), server.counters["refused_clients"]) == (0, 1)
            served.connect(server.endpoint.handover)
            handover.send(served, HELLO)
            server._turn()
            packet = handover.receive(served)
            assert packet is not None
            assert len(packet.message.token) == 16

    def test_a_client_who_cannot_be_identified(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: it ended the daemon."""

        def refuse(_: socket.socket) -> handover.Peer:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(sessions, "peer_of", refuse)
        with handover.new_socket() as client:
            client.connect(server.endpoint.handover)
            server._turn()
            packet = handover.receive(client)
            assert packet is not None
            assert packet.message.error == "AccessDenied"
            assert handover.receive(client) is None
            assert (len(server.sessions), server.counters["refused_clients"]) == (0, 1)

    def test_the_end_of_a_session_is_told_to_all(
        self, server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = connect()
        told: list[int] = []
        for part in (server.tiers, server.openings, server.prepared):
            monkeypatch.setattr(part, "close_session", lambda number, *_: told.append(number))
        client.connection.close()
        server._turn()
        server._read_session(client.session, 1)
        assert told == [client.session.number] * 3

    def test_all_ends_with_it(
        self, server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[str] = []
        for name in ("prepared", "tiers", "_control", "_events"):
            part = getattr(server, name)

            def close(*, name: str = name, close: Any = part.close, **arguments: Any) -> None:
                closed.append(name)
                close(**arguments)

            monkeypatch.setattr(part, "close", close)
        client = connect()
        server.stop()
        server.run()
        assert closed == ["prepared", "tiers", "_control", "_events"]
        assert client.heard() == [messages.Goodbye("the daemon has stopped")]

    def test_what_is_done_now_and_then(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        often = [(server.openings, "report_progress"), (server._control, "reap")]
        seldom = [
            (server, "_make_way_if_lost"),
            (server._events, "tend"),
            (server, "_guard_against_bloat"),
            (server.sessions.closer, "tend"),
            (server.tiers, "tend"),
            (server.openings, "relieve_pressure"),
            (server.openings, "expire"),
        ]
        for part, name in [*often, *seldom]:
            monkeypatch.setattr(part, name, lambda *_, name=name: done.append(name))
        started = time.monotonic()
        expected: list[str] = []
        for seconds, due in (
            (0, [*often, *seldom]),
            (0, []),
            (0.25, often),
            (1, [*often, *seldom]),
        ):
            monkeypatch.setattr(time, "monotonic", lambda now=started + seconds: now)
            os.eventfd_write(server._wake_descriptor, 1)
            server._turn()
            expected += [name for _, name in due]
            assert done == expected, seconds
        monkeypatch.undo()

    @pytest.mark.parametrize("is_bloated", [True, False])
    def test_messages_without_end_cost_all_connections(
        self,
        server: Server,
        connect: Connect,
        monkeypatch: pytest.MonkeyPatch,
        is_bloated: bool,
    ) -> None:
        reset: list[str] = []
        monkeypatch.setattr(server._control, "is_bloated", lambda: is_bloated)
        monkeypatch.setattr(server._control, "reset", lambda: reset.append("control"))
        monkeypatch.setattr(server._events, "reset", lambda: reset.append("events"))
        client = connect()
        server._guard_against_bloat()
        assert (len(reset), client.is_open) == ((2, False) if is_bloated else (0, True))
        assert server.counters["control_resets"] == int(is_bloated)

    def test_what_threads_have_done_wakes_it(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        finished: list[str] = []
        for name in ("openings", "prepared"):
            part = getattr(server, name)
            monkeypatch.setattr(part, "finish", lambda name=name: finished.append(name))
        server._turn()
        assert finished == []
        server.tiers.host.loader._wake()
        server._turn()
        assert finished == ["openings", "prepared"]

    def test_jobs_of_a_user_are_limited(self, server: Server, connect: Connect) -> None:
        server.sessions.limits = Limits(checks_per_user=1)
        client, other = connect(), connect(OTHER)
        request = Request(client.session)
        server.check_jobs(client.session)
        server.run_later(request, server.tiers.host, lambda: messages.Goodbye("done"))
        assert not server._is_finished()
        with pytest.raises(TooManyRequests):
            server.check_jobs(client.session)
        server.check_jobs(other.session)
        server.stop()
        while not server._is_finished():
            server._turn()
        server.check_jobs(client.session)
        assert messages.Goodbye("done") in client.heard()

    def test_a_job_that_fails_is_answered(self, server: Server, connect: Connect) -> None:
        client = connect()

        def fail() -> None:
            raise OSError("it cannot be read" + "." * 1000)

        server.run_later(Request(client.session), server.tiers.host, fail)
        while server._jobs.total():
            server._turn()
        (reply,) = client.heard()
        assert reply == messages.ErrorReply("ReadFailed", "it cannot be read".ljust(1000, "."))

    def test_one_who_watches_is_answered_a_turn(self, server: Server, connect: Connect) -> None:
        """It takes long: others are served in between, and nobody is ahead twice."""
        replies: list[tuple[bytes, str]] = []
        server.reply = lambda routing, _, message: replies.append(  # type: ignore[method-assign]
            (routing, getattr(message, "error", ""))
        )
        first, second, gone = (connect() for _ in range(3))
        for client, routing in ((first, b"1"), (gone, b"3"), (second, b"2"), (first, b"again")):
            server._on_request(Request(client.session, 1, routing), admin.GetStatusRequest())
        assert replies == [(b"again", "TooManyRequests")]
        server.end_session(gone.session, "")
        for answered, routing in ((2, b"1"), (3, b"2")):
            assert server._timeout() == 0
            server._turn()
            assert (len(replies), replies[-1]) == (answered, (routing, ""))
        assert server._timeout() > 0

    def test_the_log_does_not_fill_with_who_cannot_be_accepted(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = time.monotonic()
        for seconds, warnings in ((0, 1), (59.9, 1), (60, 2), (61, 2)):
            with monkeypatch.context() as patch:
                patch.setattr(time, "monotonic", lambda at=now + seconds: at)
                server._warn_of_accept("full")
            assert len(caplog.messages) == warnings
        assert server.counters["refused_clients"] == 4

    def test_who_waits_for_a_job_uses_it(
        self, server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: a daemon ended as idle in the midst of a verification that took long."""
        client = connect()
        server.idle_exit_s = 10.0
        now = server._last_active
        with monkeypatch.context() as later:
            later.setattr(time, "monotonic", lambda: now + 10.01)
            assert server._is_finished()
            server.run_later(
                Request(client.session), server.tiers.host, lambda: messages.Goodbye("done")
            )
            assert not server._is_finished()
        while server._jobs.total():
            server._turn()
        assert messages.Goodbye("done") in client.heard()

    @pytest.mark.parametrize("idle_exit_s", [0.0, 10.0])
    def test_it_ends_when_it_was_not_used_for_long(
        self, server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch, idle_exit_s: float
    ) -> None:
        server.idle_exit_s = idle_exit_s
        now = server._last_active
        monkeypatch.setattr(time, "monotonic", lambda: now + 10)
        assert not server._is_finished()
        monkeypatch.setattr(time, "monotonic", lambda: now + 10.01)
        assert server._is_finished() == (idle_exit_s > 0)
        monkeypatch.setattr(server.tiers, "is_needed", lambda: True)
        assert not server._is_finished(), "it is in use"
        monkeypatch.undo()

    def test_it_makes_way_where_its_socket_is_gone(self, server: Server) -> None:
        def fail() -> bool:
            raise PermissionError("it cannot be seen")

        stopped: list[int] = []
        server.on_stop = lambda: stopped.append(1)
        for is_reachable in (lambda: True, fail):
            server.is_reachable = is_reachable
            server._make_way_if_lost()
        assert stopped == []
        server.is_reachable = lambda: False
        for _ in range(2):
            server._make_way_if_lost()
        assert stopped == [1]
