"""What one client may hold open, and that nothing of it stays open after it."""

from __future__ import annotations

import array
import os
import resource
import select
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import World, wait_until

from trims_shim.daemon import descriptors
from trims_shim.daemon import sessions as sessions_module
from trims_shim.daemon.sessions import Limits, Session, Sessions
from trims_shim.errors import AccessDenied, MalformedMessage, TooManyRequests
from trims_shim.wire import handover, messages
from trims_shim.wire.handover import Peer

pytestmark = pytest.mark.usefixtures("no_leak")


class Client:
    """A session and the client's end of its connection."""

    def __init__(self, sessions: Sessions) -> None:
        self.connection, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sessions = sessions
        self.session: Session = sessions.accept(ours, 5)

    def offer(self, ticket: int) -> None:
        handover.send(self.connection, messages.FileOffer(ticket), descriptor=0)
        packet = self.sessions.receive(self.session)
        assert packet is not None
        assert packet.message == messages.FileOffer(ticket)

    def close(self) -> None:
        self.sessions.close(self.session)
        self.connection.close()


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(Limits(offers=3, sessions_per_user=2))


@pytest.fixture
def client(no_leak: None, sessions: Sessions) -> Iterator[Client]:
    client = Client(sessions)
    yield client
    client.close()


def test_a_new_session(client: Client, sessions: Sessions) -> None:
    session = client.session
    assert session.peer.pid == os.getpid()
    assert session.connected_ns == 5
    assert not session.is_greeted
    assert list(sessions) == [session]
    assert sessions.get(session.number) is session
    assert not session.connection.getblocking()


def test_the_token_authenticates(client: Client, sessions: Sessions) -> None:
    assert sessions.authenticated(b"") is None
    token = sessions.greet(client.session, "1.2.3" * 100, 42)
    assert len(token) >= 16
    assert sessions.authenticated(token) is client.session
    assert (client.session.pid, len(client.session.package)) == (42, 64)
    with pytest.raises(MalformedMessage, match="second Hello"):
        sessions.greet(client.session, "", 0)
    sessions.close(client.session)
    assert sessions.authenticated(token) is None
    assert sessions.get(client.session.number) is None


@pytest.mark.parametrize("mapped", ["0 1000 1\n1 100000 65536\n", "0 0 4294967295\n"])
def test_a_user_who_may_be_any(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mapped: str
) -> None:
    """In a user namespace, all that it does not map look like nobody."""
    (tmp_path / "uid_map").write_text(mapped)
    monkeypatch.setattr(sessions_module, "_UID_MAP", str(tmp_path / "uid_map"))
    monkeypatch.setattr(sessions_module, "peer_of", lambda _: Peer(1, 65534, 65534))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ours:
        if mapped.startswith("0 1000"):
            with pytest.raises(AccessDenied, match="maps not all users"):
                sessions.accept(ours, 0)
        else:
            sessions.close(sessions.accept(ours, 0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("message", "descriptor"), [(messages.FileOffer(2), 0), (messages.LeaseRelease(2), None)]
)
def test_who_inherits_a_connection_and_has_fewer_rights_may_not_use_it(
    client: Client, sessions: Sessions, message: Any, descriptor: int | None
) -> None:
    handover.watch_senders(client.session.connection)
    sessions.greet(client.session, "", 0)
    client.offer(1)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            handover.send(client.connection, message, descriptor=descriptor)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(AccessDenied, match="user 65534 uses the connection of user 0"):
        sessions.receive(client.session)
    assert list(client.session.offers) == [1]


@pytest.mark.parametrize("kind", ["its own end", "no kind"])
def test_what_could_keep_a_connection_from_ending_is_not_kept(
    client: Client, sessions: Sessions, kind: str
) -> None:
    sessions.greet(client.session, "", 0)
    with select.epoll() as nameless:
        offered = client.connection if kind == "its own end" else nameless
        if stat.S_ISREG(os.fstat(offered.fileno()).st_mode):
            pytest.skip("this kernel gives it a kind")
        handover.send(client.connection, messages.FileOffer(1), descriptor=offered.fileno())
    with pytest.raises(AccessDenied, match="not a file"):
        sessions.receive(client.session)
    assert not client.session.offers


def test_tokens_differ(sessions: Sessions) -> None:
    clients = [Client(sessions), Client(sessions)]
    tokens = {sessions.greet(each.session, "", 0) for each in clients}
    assert len(tokens) == 2
    for each in clients:
        each.close()


def test_a_user_has_so_many_sessions(client: Client, sessions: Sessions) -> None:
    second = Client(sessions)
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(TooManyRequests, match="has 2 connections"):
        sessions.accept(ours, 0)
    ours.close()
    theirs.close()
    assert len(sessions) == 2
    second.close()
    Client(sessions).close()


def test_another_user_has_sessions_of_its_own(
    client: Client, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Client(sessions)
    monkeypatch.setattr(sessions_module, "peer_of", lambda _: handover.Peer(1, 70_001, 70_001))
    others = Client(sessions)
    assert len(sessions) == 3
    for each in sessions:
        sessions.close(each)
    assert len(sessions) == 0
    for each in (second, others):
        each.connection.close()


def test_an_offer_needs_a_greeting(client: Client) -> None:
    with pytest.raises(MalformedMessage, match="before Hello"):
        client.offer(1)


def test_an_offer_needs_a_descriptor(client: Client, sessions: Sessions) -> None:
    sessions.greet(client.session, "", 0)
    handover.send(client.connection, messages.FileOffer(1))
    with pytest.raises(MalformedMessage, match="without a descriptor"):
        sessions.receive(client.session)


def test_no_other_message_carries_a_descriptor(client: Client, sessions: Sessions) -> None:
    handover.send(client.connection, messages.LeaseRelease(1), descriptor=0)
    with pytest.raises(MalformedMessage, match="carries a descriptor"):
        sessions.receive(client.session)


def test_unclaimed_offers_are_limited(client: Client, sessions: Sessions) -> None:
    sessions.greet(client.session, "", 0)
    for ticket in (1, 2, 3):
        client.offer(ticket)
    with pytest.raises(TooManyRequests, match="more than 3 unclaimed file offers"):
        client.offer(4)


def test_a_ticket_is_of_one_offer(client: Client, sessions: Sessions) -> None:
    sessions.greet(client.session, "", 0)
    client.offer(7)
    with pytest.raises(MalformedMessage, match="offered under ticket 7"):
        client.offer(7)


def test_closing_closes_unclaimed_offers(client: Client, sessions: Sessions) -> None:
    sessions.greet(client.session, "", 0)
    before = World.descriptors(os.getpid()).items()
    client.offer(1)
    client.offer(2)
    assert len(World.descriptors(os.getpid()).items() - before) == 2
    sessions.close(client.session)
    wait_until(lambda: World.descriptors(os.getpid()).items() < before, "nor is its own there")
    assert client.session.offers == {}


@pytest.mark.parametrize("data", [b"", b"?"])
def test_a_thread_closes_what_is_unread(
    client: Client, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """The kernel closes the descriptors in it then, and that may block."""
    left: list[int] = []
    monkeypatch.setattr(sessions.closer, "close", left.append)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))
    client.connection.sendmsg([data], [rights])
    own = client.session.connection.fileno()
    sessions.close(client.session)
    assert left == [own]
    with pytest.raises(BrokenPipeError):
        client.connection.send(b"?")
    os.close(own)


def test_an_offer_leaves_descriptors_to_the_daemon(
    client: Client, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions.greet(client.session, "", 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    client.offer(1)  # It keeps its connection: others may have taken them all.
    offer = client.session.offers[1]
    assert offer.descriptor < 0
    with pytest.raises(TooManyRequests, match="out of file descriptors"):
        offer.identity()


def test_a_session_leaves_descriptors_for_the_control_connections_of_all(
    client: Client, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own, and that of the one that is there."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))

    def leave(room: int) -> None:
        monkeypatch.setattr(descriptors, "_open_count", lambda: 75 - room)

    with theirs, ours:
        leave(1)
        with pytest.raises(TooManyRequests):
            sessions.accept(ours, 5)
        leave(2)
        sessions.close(sessions.accept(ours, 5))
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sessions.control_count = lambda: 1
        leave(1)
        with theirs, ours:
            sessions.close(sessions.accept(ours, 5))


@pytest.mark.parametrize(
    ("is_own", "used", "is_refused"), [(False, 8, True), (False, 1, False), (True, 8, False)]
)
def test_another_user_leaves_a_quarter_of_the_descriptors(
    client: Client,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    is_own: bool,
    used: int,
    is_refused: bool,
) -> None:
    """Where few are left, a user has a quarter at most; what others have does not count."""
    with socket.socket(socket.AF_UNIX) as connection:
        sessions.add(connection, handover.Peer(1, 70_001, 70_001), 0)
        sessions.greet(client.session, "", 0)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
        monkeypatch.setattr(descriptors, "_open_count", lambda: used)
        if not is_own:
            monkeypatch.setattr(os, "geteuid", lambda: client.session.peer.uid + 1)
        client.offer(1)
        client.offer(2)
        if is_refused:
            with pytest.raises(TooManyRequests, match="has 4 of the daemon's file descriptors"):
                client.offer(3)
        else:
            client.offer(3)


def test_there_may_be_more_control_connections_than_sessions(sessions: Sessions) -> None:
    """That of a session which has just ended is still there."""
    sessions.control_count = lambda: 1
    assert sessions.missing_controls() == 0


@pytest.mark.parametrize(
    ("own", "user", "is_privileged"), [(5, 5, True), (5, 0, True), (5, 6, False), (0, 6, False)]
)
def test_who_is_privileged(
    client: Client, monkeypatch: pytest.MonkeyPatch, own: int, user: int, is_privileged: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: own)
    session = Session(1, client.connection, handover.Peer(1, user, user), 0)
    assert session.is_privileged == is_privileged


def test_nothing_to_read(client: Client, sessions: Sessions) -> None:
    with pytest.raises(BlockingIOError):
        sessions.receive(client.session)
    client.connection.close()
    assert sessions.receive(client.session) is None
