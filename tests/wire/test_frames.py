"""Messages over a stream: whole ones arrive, anything else is an error and never a wait."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from harness import PATIENCE_S

from trims_shim.errors import MalformedMessage, MessageTooLarge, UnknownMessage
from trims_shim.wire import codec, duties, frames

LONG = duties.PrepareReply(message="x" * 900_000)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


def soon() -> float:
    return time.monotonic() + 20


def test_messages_arrive_in_order(pair: Pair) -> None:
    ours, theirs = pair
    sent = [duties.PrepareVerdict(True), duties.PrepareVerdict(False)]
    for message in sent:
        frames.send(ours, message)
    assert [frames.receive(theirs, deadline_s=soon()) for _ in sent] == sent


def test_a_message_longer_than_a_socket_buffer(pair: Pair) -> None:
    ours, theirs = pair
    sender = threading.Thread(target=frames.send, args=(ours, LONG))
    sender.start()
    assert frames.receive(theirs, deadline_s=soon()) == LONG
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


def test_the_end(pair: Pair) -> None:
    ours, theirs = pair
    frames.send(ours, duties.PrepareVerdict(True))
    ours.close()
    assert frames.receive(theirs, deadline_s=soon()) == duties.PrepareVerdict(True)
    assert frames.receive(theirs, deadline_s=soon()) is None


@pytest.mark.parametrize("kept", [1, 3, 4, 5, 20])
def test_an_end_inside_of_a_message(pair: Pair, kept: int) -> None:
    ours, theirs = pair
    data = codec.encode(duties.PrepareVerdict(True))
    ours.sendall((struct.pack("<I", len(data)) + data)[:kept])
    ours.close()
    with pytest.raises(MalformedMessage, match="ends"):
        frames.receive(theirs, deadline_s=soon())


def test_a_message_that_is_too_long_is_not_sent(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(MessageTooLarge):
        frames.send(ours, duties.PrepareReply(message="x" * (1 << 20)))
    ours.close()
    assert frames.receive(theirs, deadline_s=soon()) is None


def test_an_announced_length_is_not_believed(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack("<I", (1 << 20) + 1))
    with pytest.raises(MessageTooLarge):
        frames.receive(theirs, deadline_s=soon())


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"\xc1nonsense", MalformedMessage), (b"\x81\xa4verb\xa3Foo", UnknownMessage)],
)
def test_what_is_no_message(pair: Pair, content: bytes, error: type[Exception]) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack("<I", len(content)) + content)
    with pytest.raises(error):
        frames.receive(theirs, deadline_s=soon())


def test_silence_ends_at_the_deadline(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        frames.receive(theirs, deadline_s=time.monotonic() + 0.05)
    ours.sendall(b"\1")
    with pytest.raises(TimeoutError):
        frames.receive(theirs, deadline_s=time.monotonic() + 0.05)


def test_a_receiver_that_does_not_read(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(TimeoutError):
        frames.send(ours, LONG, deadline_s=time.monotonic() + 0.05)


def test_a_deadline_that_has_passed(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        frames.send(ours, duties.PrepareVerdict(True), deadline_s=time.monotonic())
    with pytest.raises(TimeoutError):
        frames.receive(theirs, deadline_s=time.monotonic())
