"""The limit on connections of a ZeroMQ socket: kept, given back, and no way to hang at the end."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator

import pytest
import zmq
from harness import wait_until

from trims_shim.daemon import connections
from trims_shim.daemon.connections import Doorkeeper, connection_at
from trims_shim.wire.handover import Peer

LIMIT = 20


class World:
    """A ROUTER that lets few in."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "x.sock")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.door = Doorkeeper(self.router, self.path, share=4, limit=LIMIT)
        self.router.bind(f"ipc://{self.path}")
        self.connections: list[socket.socket] = []

    def connect(self, number: int) -> None:
        for _ in range(number):
            connection = socket.socket(socket.AF_UNIX)
            self.connections.append(connection)
            wait_until(lambda to=connection: to.connect_ex(self.path) == 0)

    def open(self) -> list[socket.socket]:
        """Those that were not closed from the other end."""
        found = []
        for connection in self.connections:
            connection.setblocking(False)
            try:
                while connection.recv(100):
                    pass
            except BlockingIOError:
                found.append(connection)
            except ConnectionError:
                pass
        return found

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.door.close()
        self.router.close(linger=0)
        self.context.term()


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="trims-d-") as directory:
        made = World(directory)
        yield made
        made.close()


def accepted_at(path: str) -> int | None:
    """The number of a connection to it in this process."""
    for name in os.listdir("/proc/self/fd"):
        connection = connection_at(int(name), path)
        if connection is not None:
            with connection:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                    return int(name)
    return None


def test_who_comes_beyond_the_limit_is_let_go(world: World) -> None:
    world.connect(3 * LIMIT)
    wait_until(lambda: len(world.open()) == LIMIT)


def test_who_goes_makes_room(world: World) -> None:
    for _ in range(3):
        world.connect(LIMIT)
        wait_until(lambda: world.door.count() == LIMIT)
        for connection in world.connections:
            connection.close()
        world.connections.clear()
        wait_until(lambda: world.door.count() == 0)
    wait_until(lambda: not world.door._counts)


def test_all_users_together_have_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    users = itertools.count(70_000)
    monkeypatch.setattr(connections, "peer_of", lambda _: Peer(1, next(users), 0))
    world.connect(3 * LIMIT)
    wait_until(lambda: len(world.open()) == LIMIT)


def test_another_user_leaves_room_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    world.connect(3 * LIMIT)
    wait_until(lambda: len(world.open()) == LIMIT // 2)


def test_a_share_of_the_descriptors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 4000))
    with world.context.socket(zmq.ROUTER) as other:
        door = Doorkeeper(other, "unused", share=8, limit=4096)
        assert door.limit == 50
        door.close()


def test_the_end_in_the_midst_of_a_flood(world: World) -> None:
    """More reports than ZeroMQ keeps wait for the thread when it is told to end."""
    for _ in range(40):
        world.connect(50)
        for connection in world.connections:
            connection.close()
        world.connections.clear()


def test_a_peer_that_never_speaks_is_let_go(world: World) -> None:
    assert world.router.getsockopt(zmq.HANDSHAKE_IVL) <= 5000


@pytest.mark.usefixtures("no_leak")
def test_a_socket_without_a_name_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the thread ended, ZeroMQ's waited for it, and the daemon could not be stopped."""

    class Nameless(socket.socket):
        def getsockname(self) -> str:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with socket.socket(socket.AF_UNIX) as other, monkeypatch.context() as patch:
        patch.setattr(connections.socket, "socket", Nameless)
        assert connection_at(other.fileno(), "x.sock") is None


def test_a_number_may_be_anothers_by_now(world: World) -> None:
    """Found: of what was no socket any more, the duplicate stayed open."""
    world.connect(1)
    accepted = wait_until(lambda: accepted_at(world.path))
    duplicate = connection_at(accepted, world.path)
    assert duplicate is not None
    assert duplicate.getsockname() == world.path
    duplicate.close()
    with open(os.devnull) as file, socket.socket(socket.AF_UNIX) as other:
        assert connection_at(file.fileno(), world.path) is None
        assert connection_at(other.fileno(), world.path) is None
        closed = file.fileno()
    assert connection_at(closed, world.path) is None
