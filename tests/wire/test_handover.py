"""Descriptors belong to their packet: received with it, closed with it when it is refused."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import select
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENCE_S

from trims_shim.errors import MalformedMessage, UnknownMessage, WireError
from trims_shim.wire import codec, handover, messages

pytestmark = pytest.mark.usefixtures("no_leak")

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair(no_leak: None) -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.settimeout(PATIENCE_S)
    with ours, theirs:
        yield ours, theirs


def send_raw(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([data], [rights] if descriptors else [])


def test_a_message_without_a_descriptor(pair: Pair) -> None:
    handover.send(pair[0], messages.LeaseRelease(7))
    assert handover.receive(pair[1]) == handover.Packet(messages.LeaseRelease(7), None)


def test_a_descriptor_arrives_with_its_message(pair: Pair) -> None:
    reader, writer = os.pipe()
    handover.send(pair[0], messages.FileOffer(3), descriptor=reader)
    packet = handover.receive(pair[1])
    assert packet is not None
    assert packet.message == messages.FileOffer(3)
    assert packet.descriptor is not None
    assert packet.descriptor != reader
    os.write(writer, b"through the copy")
    assert os.read(packet.descriptor, 100) == b"through the copy"
    assert fcntl.fcntl(packet.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    handover.close_all([packet.descriptor, reader, writer])


def test_the_sender_is_who_the_kernel_says(pair: Pair) -> None:
    handover.watch_senders(pair[1])
    handover.send(pair[0], messages.FileOffer(3), descriptor=0)
    packet = handover.receive(pair[1])
    assert packet is not None
    assert (packet.message, packet.user) == (messages.FileOffer(3), os.getuid())
    assert packet.descriptor is not None
    os.close(packet.descriptor)


def test_a_sandbox_may_not_tell_senders() -> None:
    def refuse(*_: int) -> None:
        raise OSError(92, "Protocol not available")

    connection: Any = SimpleNamespace(setsockopt=refuse)
    handover.watch_senders(connection)


@pytest.mark.parametrize("has_poll", [True, False])
def test_readiness(pair: Pair, monkeypatch: pytest.MonkeyPatch, has_poll: bool) -> None:
    if not has_poll:
        monkeypatch.delattr(select, "poll")
    ours, theirs = pair
    assert handover.wait_until_ready(ours, 0, is_for_room=True)
    assert not handover.wait_until_ready(theirs, 0)
    handover.send(ours, messages.LeaseRelease(1))
    assert handover.wait_until_ready(theirs.fileno(), 0)
    with contextlib.suppress(BlockingIOError):
        while True:
            handover.send(ours, messages.LeaseRelease(1))
    assert not handover.wait_until_ready(ours, 0, is_for_room=True)


def test_packets_keep_their_borders(pair: Pair) -> None:
    for number in range(50):
        handover.send(pair[0], messages.LeaseRelease(number))
    received = [handover.receive(pair[1]) for _ in range(50)]
    assert [each.message.lease for each in received if each] == list(range(50))


@pytest.mark.parametrize("count", [2, 8, 20])
def test_surplus_descriptors_are_refused_and_closed(pair: Pair, count: int) -> None:
    send_raw(pair[0], codec.encode(messages.FileOffer(1)), [0] * count)
    with pytest.raises(MalformedMessage, match="descriptors"):
        handover.receive(pair[1])


@pytest.mark.parametrize("data", [b"\xc1", b"", b"\x81\xa4verb\xa1x"])
def test_descriptors_of_a_refused_message_are_closed(pair: Pair, data: bytes) -> None:
    send_raw(pair[0], data, [0])
    with pytest.raises((MalformedMessage, UnknownMessage)):
        handover.receive(pair[1])


def test_a_packet_that_is_too_long_is_refused(pair: Pair) -> None:
    send_raw(pair[0], b"x" * (messages.HANDOVER_PACKET_LIMIT_BYTES + 1), [0])
    with pytest.raises(WireError):
        handover.receive(pair[1])
    handover.send(pair[0], messages.LeaseRelease(1))
    assert handover.receive(pair[1]) is not None


def test_the_beginning_of_a_packet_that_is_too_long_is_no_message(pair: Pair) -> None:
    limit = messages.HANDOVER_PACKET_LIMIT_BYTES
    spare = limit - len(codec.encode(messages.Goodbye("x" * 1000)))
    longest = codec.encode(messages.Goodbye("x" * (1000 + spare)))
    send_raw(pair[0], longest, [])
    assert handover.receive(pair[1]) is not None
    send_raw(pair[0], longest + b"x", [])
    with pytest.raises(MalformedMessage, match="too long"):
        handover.receive(pair[1])


def test_a_packet_whose_descriptor_finds_no_room_is_refused(pair: Pair) -> None:
    handover.send(pair[0], messages.LeaseRelease(1), descriptor=0)
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            handover.receive(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [2, 253])
def test_the_receiver_may_say_how_descriptors_are_discarded(pair: Pair, count: int) -> None:
    """All that a packet can have: what is truncated is closed by the kernel, which may block."""
    discarded: list[int] = []
    send_raw(pair[0], b"?", [0] * count)
    with pytest.raises(MalformedMessage):
        handover.receive(pair[1], discard=discarded.extend)
    assert len(discarded) == count
    for descriptor in discarded:
        os.close(descriptor)


@pytest.mark.parametrize(("data", "numbers"), [(b"", [0]), (b"?", [0]), (b"?", [])])
def test_what_is_unread(pair: Pair, data: bytes, numbers: list[int]) -> None:
    pair[1].setblocking(False)  # as the daemon's: with a time limit Python waits for a packet
    assert not handover.has_unread(pair[1])
    send_raw(pair[0], data, numbers)
    assert handover.has_unread(pair[1])
    pair[0].close()
    pair[1].shutdown(socket.SHUT_RDWR)
    assert handover.has_unread(pair[1])
    with pytest.raises(MalformedMessage):
        handover.receive(pair[1])
    assert not handover.has_unread(pair[1])


def test_a_closed_peer_is_no_packet(pair: Pair) -> None:
    pair[0].close()
    assert handover.receive(pair[1]) is None


def test_what_was_sent_before_closing_arrives(pair: Pair) -> None:
    handover.send(pair[0], messages.Goodbye("bye"))
    pair[0].close()
    packet = handover.receive(pair[1])
    assert packet is not None
    assert packet.message == messages.Goodbye("bye")
    assert handover.receive(pair[1]) is None


def test_sending_to_a_peer_that_does_not_read_does_not_block(pair: Pair) -> None:
    def send_for_ever() -> None:
        for _ in range(100_000):
            handover.send(pair[0], messages.LeaseRelease(1))

    with pytest.raises(BlockingIOError):
        send_for_ever()


def test_sending_to_a_closed_peer_is_an_error_and_no_signal(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        handover.send(pair[0], messages.LeaseRelease(1))


def test_the_peer_is_who_the_kernel_says(pair: Pair) -> None:
    expected = handover.Peer(os.getpid(), os.geteuid(), os.getegid())
    assert handover.peer_of(pair[1]) == expected


def test_a_user_with_a_high_number() -> None:
    """Found: from 2**31 on it was taken for a negative one, whose daemon nobody trusts."""
    user = 2**32 - 2
    raw = struct.pack("=iII", 1, user, user)
    data = codec.encode(messages.LeaseRelease(7))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, raw)]
    connection: Any = SimpleNamespace(
        getsockopt=lambda *_: raw, recvmsg=lambda *_: (data, ancillary, 0, None)
    )
    assert handover.peer_of(connection) == handover.Peer(1, user, user)
    packet = handover.receive(connection)
    assert packet is not None
    assert packet.user == user


def test_new_sockets_are_closed_on_exec() -> None:
    with handover.new_socket() as connection:
        assert not connection.get_inheritable()
        assert connection.type == socket.SOCK_SEQPACKET


def test_a_text_is_cut_between_characters() -> None:
    """So that it fits a packet, whatever is in it."""
    assert handover.clipped("") == ""
    assert handover.clipped("x" * 1000) == "x" * 1000
    assert handover.clipped("x" * 1001) == "x" * 1000
    assert handover.clipped("x" + "\u20ac" * 400) == "x" + "\u20ac" * 333
    assert handover.clipped("\udcff") == r"\udcff"


def test_close_all_takes_closed_descriptors_in_its_stride() -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    handover.close_all([descriptor, descriptor, 10**6])
