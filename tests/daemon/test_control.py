"""The control socket against peers: replies, closed connections, floods, a reset."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import selectors
import stat
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness import open_descriptors, wait_until

from trims_shim.daemon import control
from trims_shim.daemon.control import REQUEST_LIMIT_BYTES, ControlSocket
from trims_shim.wire import codec, messages

PATIENCE_MS = 60_000


class World:
    """A control socket, and peers that talk to it."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "control.sock")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.selector = selectors.DefaultSelector()
        self.control = ControlSocket(self.context, self.path, self.selector)
        self.peers: list[zmq.Socket[bytes]] = []

    def peer(self, *, reconnects: bool = False) -> tuple[zmq.Socket[bytes], zmq.Socket[Any]]:
        """(socket, monitor of its connection)."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if not reconnects:
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(f"ipc://{self.path}")
        self.peers += [socket, monitor]
        return socket, monitor

    def receive(self) -> list[zmq.Frame]:
        """The next message; raises AssertionError when none comes."""
        for _ in range(PATIENCE_MS // 10):
            for frames in self.control.receive():
                return frames
            self.selector.select(0.01)
        raise AssertionError("nothing arrived")

    def close(self) -> None:
        for each in self.peers:
            each.close(linger=0)
        self.control.close(linger_ms=0)
        self.context.term()
        self.selector.close()


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="trims-c-") as directory:
        made = World(directory)
        yield made
        made.close()


def answer(world: World, frames: list[zmq.Frame]) -> bool:
    return world.control.reply(frames[0].bytes, 7, messages.ErrorReply("WireError", "no"))


def test_a_reply_reaches_the_one_who_asked(world: World) -> None:
    asking, _ = world.peer()
    silent, _ = world.peer()
    asking.send(b"?")
    assert answer(world, world.receive())
    assert asking.poll(PATIENCE_MS)
    reply = codec.decode_envelope(asking.recv())
    assert (reply.request_id, reply.message.error) == (7, "WireError")
    assert not silent.poll(50)
    wait_until(lambda: world.control.connection_count() == 2)


def test_a_disconnected_peer_gets_the_error_first_and_others_stay(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, bad_monitor = world.peer()
    good, good_monitor = world.peer()
    now_s = 100.0
    monkeypatch.setattr(control, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    bad.send(b"garbage")
    frames = world.receive()
    assert answer(world, frames)
    world.control.condemn(frames[-1])
    assert bad.poll(PATIENCE_MS), "the error must arrive"
    for now_s in (100.0, 100.09):  # noqa: B007
        world.control.reap()
        assert not bad_monitor.poll(10)
    now_s = 100.11
    world.control.reap()
    assert bad_monitor.poll(PATIENCE_MS), "the connection must be closed"
    assert not good_monitor.poll(100)
    good.send(b"still here")
    assert world.receive()[-1].bytes == b"still here"


@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize("limit", [0, 64])
def test_nothing_is_left_of_who_is_condemned(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Whether there are too many of them, or the daemon ends first."""
    monkeypatch.setattr(control, "_CONDEMNED_LIMIT", limit)
    bad, _ = world.peer()
    bad.send(b"garbage")
    frames = world.receive()
    before = open_descriptors()
    world.control.condemn(frames[-1])
    assert len(open_descriptors() - before) == min(limit, 1)


def test_a_turn_ends_however_much_comes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, _ = world.peer()
    for _ in range(100):
        peer.send(b"?")
    world.receive()
    clock = itertools.count(0.0, 0.004)
    monkeypatch.setattr(control, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    turns: list[int] = []
    for _ in range(PATIENCE_MS // 10):
        turns.append(len(list(world.control.receive())))
        if sum(turns) == 99:
            break
        if not turns[-1]:
            world.selector.select(0.01)
    assert (sum(turns), max(turns)) == (99, 3)


def test_replies_that_are_not_read_do_not_pile_up(world: World) -> None:
    peer = world.context.socket(zmq.DEALER)
    peer.setsockopt(zmq.RCVHWM, 1)
    peer.connect(f"ipc://{world.path}")
    world.peers.append(peer)
    peer.send(b"?")
    frames = world.receive()
    reply = messages.ErrorReply("WireError", "x" * 250_000)
    taken = 0
    while world.control.reply(frames[0].bytes, 7, reply):
        taken += 1
        assert taken < 200


def test_a_descriptor_that_is_not_a_control_connection_is_left_alone(world: World) -> None:
    """The number a frame names may belong to something else by the time it is read."""
    bystander = os.memfd_create("bystander")

    class Stale:
        def get(self, option: int) -> int:
            return bystander

    world.control.condemn(Stale())  # type: ignore[arg-type]
    time.sleep(0.15)
    world.control.reap()
    assert os.write(bystander, b"x") == 1
    os.close(bystander)


def test_a_reply_to_somebody_gone_is_dropped(world: World) -> None:
    assert not world.control.reply(b"nobody", 1, messages.ErrorReply("WireError", "no"))


def test_a_frame_beyond_the_limit_closes_the_connection(world: World) -> None:
    socket, monitor = world.peer()
    socket.send(b"x" * (REQUEST_LIMIT_BYTES + 1))
    assert monitor.poll(PATIENCE_MS)
    assert not world.control.has_messages()


def test_memory_that_was_freed_is_given_back_and_is_no_bloat(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: after floods of messages the daemon kept hundreds of megabytes, more each time."""
    monkeypatch.setattr(control, "_BLOAT_LIMIT_BYTES", 64 << 20)
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    control._trim_heap()  # of what earlier tests have left, which would be used again
    world.control._first = world.control._baseline = world.control._statm.private_bytes()
    piece_bytes = 64 << 10
    pieces = [libc.malloc(piece_bytes) for _ in range((128 << 20) // piece_bytes)]
    for each in pieces:
        ctypes.memset(each, 1, piece_bytes)
    assert world.control.is_bloated()
    held = world.control._statm.private_bytes()
    for each in pieces[:-1]:  # The last is in the way of the others.
        libc.free(each)
    assert not world.control.is_bloated()
    assert world.control._statm.private_bytes() < held - (96 << 20)
    libc.free(pieces[-1])


def test_memory_that_is_shared_is_no_bloat(world: World) -> None:
    piece = bytes(1 << 20)  # not all at once: the heap may keep that
    before = world.control._statm.private_bytes()
    with mmap.mmap(-1, 32 << 20) as segment:
        for _ in range(32):
            segment.write(piece)
        assert world.control._statm.private_bytes() - before < 16 << 20


def test_bloat_is_what_came_since_the_start_or_a_reset(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reset did not free may be something else, and may be freed later."""
    held = first = 1000
    left: int | None = None
    trims: list[int] = []

    def trim() -> None:
        nonlocal held
        trims.append(held)
        held = held if left is None else left

    def is_bloated(now: int, *, then: int | None = None) -> bool:
        nonlocal held, left
        held, left = now, then
        return world.control.is_bloated()

    sleeps: list[float] = []
    clock = types.SimpleNamespace(monotonic=itertools.count().__next__, sleep=sleeps.append)
    monkeypatch.setattr(control, "time", clock)
    monkeypatch.setattr(control, "_trim_heap", trim)
    monkeypatch.setattr(world.control._statm, "private_bytes", lambda: held << 20)
    world.control._first = world.control._baseline = first << 20
    assert not is_bloated(first + 31)
    assert trims == []
    assert not is_bloated(first + 255)
    assert trims == [first + 255]
    assert not is_bloated(first + 300, then=first + 255)
    assert is_bloated(first + 256)
    world.control.reset()
    assert len(sleeps) == 1, "until its patience ends"
    assert not is_bloated(first + 256 + 255)
    assert is_bloated(first + 256 + 256)
    assert not is_bloated(first + 256, then=first + 40)
    assert is_bloated(first + 40 + 256)
    assert not is_bloated(first + 40, then=first - 100)
    assert not is_bloated(first + 255)
    sleeps.clear()
    world.control.reset()
    assert sleeps == []


def test_a_reset_keeps_the_name_and_its_mode(world: World) -> None:
    group = 12345 if os.geteuid() == 0 else os.getegid()
    os.chown(world.path, -1, group)
    os.chmod(world.path, 0o660)
    socket, _ = world.peer(reconnects=True)
    socket.send_multipart([b"one", b"two"])
    world.receive()
    world.control.reset()
    status = Path(world.path).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, group)
    fresh, _ = world.peer()
    fresh.send(b"hello")
    assert world.receive()[-1].bytes == b"hello"
