"""Sessions: one for each handover connection, and the limits on what one client may hold open.

Owns the connections and the descriptors that clients offered; knows nothing of images. A session
ends when its connection does; whoever closes it tells the store.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trims_shim.daemon.descriptors import are_scarce, check_descriptors, limit
from trims_shim.daemon.offers import Closer, Offer, is_file
from trims_shim.errors import AccessDenied, MalformedMessage, TooManyRequests
from trims_shim.wire.endpoint import UNMAPPED_USER
from trims_shim.wire.handover import Packet, Peer, clipped, has_unread, peer_of, receive
from trims_shim.wire.messages import FileOffer

__all__ = ["Limits", "Session", "Sessions"]

_PACKAGE_LIMIT_BYTES = 64
_UID_MAP = "/proc/self/uid_map"
_ALL_USERS = 2**32 - 1
"""So many are mapped outside of user namespaces (user_namespaces(7))."""


class Limits(NamedTuple):
    """What a client may have open at once. Too many offers or sessions cost the connection."""

    offers: int = 32
    requests: int = 64
    leases: int = 4096
    sessions_per_user: int = 2048
    requests_per_user: int = 4096
    checks_per_user: int = 8


@dataclass(slots=True)
class Session:
    """One client connection. ``offers`` are files that no request has claimed yet.

    ``granted`` is the last lease of an image and the ticket of its file.
    """

    number: int
    connection: socket.socket
    peer: Peer
    connected_ns: int
    token: bytes = b""
    package: str = ""
    pid: int = 0
    sender: int | None = None
    """The user who sent the first packet, and must send all others."""
    requests: int = 0
    offers: dict[int, Offer] = field(default_factory=dict)
    granted: tuple[int, int] = (0, 0)

    @property
    def is_greeted(self) -> bool:
        """Whether Hello has been received."""
        return bool(self.token)

    @property
    def is_privileged(self) -> bool:
        """Whether it is the daemon's own user's, or root's, who may see and do everything."""
        return self.peer.uid in (0, os.geteuid())


class Sessions:
    """All open sessions."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.closer = Closer()
        self.control_count: Callable[[], int] = lambda: 0
        """How many control connections there are."""
        self._by_number: dict[int, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_number.values()))

    def accept(self, connection: socket.socket, now_ns: int) -> Session:
        """A new session. Raises TooManyRequests, or AccessDenied for a user who may be any.

        Then the connection is still the caller's.
        """
        connection.setblocking(False)
        try:
            peer = peer_of(connection)
        except OSError as error:  # a sandbox
            raise AccessDenied(f"it cannot be seen who you are: {error}") from error
        if peer.uid == UNMAPPED_USER != os.geteuid() and not _maps_all_users():
            raise AccessDenied("the daemon's user namespace maps not all users: you may be any")
        reserved = self.missing_controls() + 1  # Its control connection will take another one.
        check_descriptors(reserved=reserved)
        self._check_share(peer.uid, reserved=reserved)
        mine = sum(1 for each in self._by_number.values() if each.peer.uid == peer.uid)
        if mine >= self.limits.sessions_per_user:
            raise TooManyRequests(f"user {peer.uid} has {mine} connections to the daemon")
        return self.add(connection, peer, now_ns)

    def missing_controls(self) -> int:
        """How many control connections these sessions may still open, with a descriptor each."""
        return max(0, len(self) - self.control_count())

    def add(self, connection: socket.socket, peer: Peer, now_ns: int) -> Session:
        """A new session of a connection that was let in; owns it from here on."""
        session = Session(self._next, connection, peer, now_ns)
        self._next += 1
        self._by_number[session.number] = session
        return session

    def greet(self, session: Session, package: str, pid: int) -> bytes:
        """Give the session its token."""
        if session.is_greeted:
            raise MalformedMessage("a second Hello on one connection")
        session.package, session.pid = clipped(package, limit_bytes=_PACKAGE_LIMIT_BYTES), pid
        session.token = os.urandom(16)
        self._by_token[session.token] = session
        return session.token

    def authenticated(self, token: bytes) -> Session | None:
        """The session with this token."""
        return self._by_token.get(token)

    def get(self, number: int) -> Session | None:
        """The session with this number, while it is open."""
        return self._by_number.get(number)

    def receive(self, session: Session) -> Packet | None:
        """The next packet; a file offer is stored. None: the peer has closed.

        Raises BlockingIOError when there is nothing, WireError, AccessDenied or TooManyRequests
        when the session must be closed.
        """
        packet = receive(session.connection, discard=self.closer.close_all)
        if packet is None:
            return None
        self._check_sender(session, packet)
        if isinstance(packet.message, FileOffer):
            self._store_offer(session, packet)
        elif packet.descriptor is not None:
            self.closer.close(packet.descriptor)
            raise MalformedMessage(f"{type(packet.message).__name__} carries a descriptor")
        return packet

    def close(self, session: Session) -> None:
        """Close the connection and every unclaimed descriptor."""
        self._by_number.pop(session.number, None)
        self._by_token.pop(session.token, None)
        for offer in session.offers.values():
            offer.close()
        session.offers.clear()
        self.hang_up(session.connection)

    def hang_up(self, connection: socket.socket) -> None:
        """Close a connection, in a thread if packets are unread.

        With them the kernel closes their descriptors, and a close may block (:class:`Closer`).
        """
        with contextlib.suppress(OSError):  # The peer is gone.
            connection.shutdown(socket.SHUT_RDWR)  # No more come.
        if has_unread(connection):
            self.closer.close(connection.detach())
        else:
            connection.close()

    def _check_share(self, user: int, *, reserved: int) -> None:
        """A user who has a quarter leaves a quarter to others. Raises TooManyRequests."""
        share = limit() // 4
        if user == os.geteuid() or not are_scarce(reserved + share):
            return
        # Each has a control connection, too, or will have one.
        theirs = [each for each in self if each.peer.uid == user]
        held = sum(2 + sum(o.descriptor >= 0 for o in each.offers.values()) for each in theirs)
        if held >= share:
            raise TooManyRequests(f"user {user} has {held} of the daemon's file descriptors")

    def _check_sender(self, session: Session, packet: Packet) -> None:
        """A process that inherits a connection from one with more rights must not use them."""
        if session.sender is None:
            session.sender = packet.user
        if packet.user == session.sender:
            return
        if packet.descriptor is not None:
            self.closer.close(packet.descriptor)
        raise AccessDenied(f"user {packet.user} uses the connection of user {session.sender}")

    def _store_offer(self, session: Session, packet: Packet) -> None:
        if packet.descriptor is None:
            raise MalformedMessage("FileOffer without a descriptor")
        ticket = packet.message.ticket
        try:
            if not session.is_greeted:
                raise MalformedMessage("FileOffer before Hello")
            if not is_file(packet.descriptor):
                raise AccessDenied("the offered descriptor is not a file")
            self._check_share(session.peer.uid, reserved=self.missing_controls())
            if ticket in session.offers:
                raise MalformedMessage(f"a file has been offered under ticket {ticket}")
            if len(session.offers) >= self.limits.offers:
                raise TooManyRequests(f"more than {self.limits.offers} unclaimed file offers")
        except BaseException:
            self.closer.close(packet.descriptor)
            raise
        offer = session.offers[ticket] = Offer(packet.message, packet.descriptor, self.closer)
        try:
            check_descriptors(reserved=self.missing_controls())
        except TooManyRequests as error:  # Others may have them all: it keeps its leases.
            offer.refuse(error)


def _maps_all_users() -> bool:
    """Whether this process sees every user of the machine under a number of its own."""
    try:
        with open(_UID_MAP) as rows:
            return sum(int(row.split()[2]) for row in rows) >= _ALL_USERS
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # a kernel without user namespaces
