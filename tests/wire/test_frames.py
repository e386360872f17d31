"""Messages over a stream: whole ones arrive, anything else is an error and never a wait."""

from __future__ import annotations

import io
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENCE_S

from trims_shim.errors import MalformedMessage, MessageTooLarge, UnknownMessage
from trims_shim.wire import codec, duties, frames
from trims_shim.wire.messages import CONTROL_MESSAGE_LIMIT_BYTES


def reply_of(size_bytes: int) -> duties.PrepareReply:
    """A long message that is encoded in so many bytes."""
    empty = duties.PrepareReply(message="x" * (1 << 16))
    spare = size_bytes - len(codec.encode(empty))
    return duties.PrepareReply(message=empty.message + "x" * spare)


LONGEST = reply_of(CONTROL_MESSAGE_LIMIT_BYTES)


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
    sent = [duties.PrepareReply(message="first"), duties.PrepareReply(message="second")]
    for message in sent:
        frames.send(ours, message)
    assert [frames.receive(theirs, deadline_s=soon()) for _ in sent] == sent


def test_the_longest_message(pair: Pair) -> None:
    """It is longer than a socket's buffer."""
    ours, theirs = pair
    sender = threading.Thread(target=frames.send, args=(ours, LONGEST))
    sender.start()
    assert frames.receive(theirs, deadline_s=soon()) == LONGEST
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


def test_a_message_that_comes_in_pieces() -> None:
    """And the next one right behind it."""
    sent = [duties.PrepareReply(message="first"), duties.PrepareReply(message="second")]
    encoded = map(codec.encode, sent)
    stream = io.BytesIO(b"".join(struct.pack("<I", len(data)) + data for data in encoded))
    dribble: Any = SimpleNamespace(recv=lambda size: stream.read(min(size, 3)))
    assert [frames.receive(dribble) for _ in sent] == sent
    assert frames.receive(dribble) is None


def test_the_end(pair: Pair) -> None:
    ours, theirs = pair
    frames.send(ours, duties.ContentWanted())
    ours.close()
    assert frames.receive(theirs, deadline_s=soon()) == duties.ContentWanted()
    assert frames.receive(theirs, deadline_s=soon()) is None


@pytest.mark.parametrize("kept", [1, 3, 4, 5, 20])
def test_an_end_inside_of_a_message(pair: Pair, kept: int) -> None:
    ours, theirs = pair
    data = codec.encode(duties.ContentWanted())
    ours.sendall((struct.pack("<I", len(data)) + data)[:kept])
    ours.close()
    with pytest.raises(MalformedMessage, match="ends"):
        frames.receive(theirs, deadline_s=soon())


def test_a_message_that_is_too_long_is_not_sent(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(MessageTooLarge):
        frames.send(ours, reply_of(CONTROL_MESSAGE_LIMIT_BYTES + 1))
    ours.close()
    assert frames.receive(theirs, deadline_s=soon()) is None


def test_an_announced_length_is_not_believed(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack("<I", CONTROL_MESSAGE_LIMIT_BYTES + 1))
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
        frames.send(ours, LONGEST, deadline_s=time.monotonic() + 0.05)


def test_a_deadline_that_is_now(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    with pytest.raises(TimeoutError, match="deadline has passed"):
        frames.send(ours, duties.ContentWanted(), deadline_s=5.0)
    with pytest.raises(TimeoutError, match="deadline has passed"):
        frames.receive(theirs, deadline_s=5.0)
    frames.send(ours, duties.ContentWanted(), deadline_s=5.5)
    assert frames.receive(theirs, deadline_s=5.5) == duties.ContentWanted()
