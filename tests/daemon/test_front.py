"""A request is answered where it came from; what goes wrong with it costs nobody else."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fronts import FakeFront

from trims_shim.daemon.front import Request
from trims_shim.daemon.sessions import Session
from trims_shim.errors import NoSpace
from trims_shim.wire import codec
from trims_shim.wire.handover import Peer
from trims_shim.wire.messages import HANDOVER_PACKET_LIMIT_BYTES, ErrorReply, LeaseRelease

ANSWER = LeaseRelease(1)


@pytest.fixture
def session() -> Iterator[Session]:
    with socket.socket() as nobody:
        yield Session(1, nobody, Peer(2, 3, 4), 0)


def test_each_is_answered_where_it_came_from(session: Session) -> None:
    front = FakeFront(session)
    front.serve(Request(session), lambda: ANSWER)
    front.serve(Request(session, 7, b"client"), lambda: ANSWER)
    assert (front.sent, front.replies) == ([ANSWER], [(b"client", 7, ANSWER)])


def test_what_is_answered_later_is_not_answered_now(session: Session) -> None:
    front = FakeFront(session)
    front.serve(Request(session), lambda: None)
    assert (front.sent, front.replies, front.ended) == ([], [], [])


def test_who_is_gone_is_sent_nothing(session: Session) -> None:
    front = FakeFront(session)
    front.sessions.close(session)
    front.answer(Request(session), ANSWER)
    assert (front.sent, front.ended) == ([], [])


def test_who_does_not_take_its_answer_is_let_go(session: Session) -> None:
    def full() -> None:
        raise BlockingIOError("its buffer is full")

    front = FakeFront(session, full)
    front.answer(Request(session), ANSWER)
    assert front.ended == ["the client does not take its answer: its buffer is full"]


def test_an_error_of_ours_is_told_in_one_packet(session: Session) -> None:
    front = FakeFront(session)

    def refuse() -> Any:
        raise NoSpace("\u20ac" * 9000)

    front.serve(Request(session), refuse)
    (reply,) = front.sent
    assert (reply.error, set(reply.message)) == ("NoSpace", {"\u20ac"})
    assert len(codec.encode(reply)) < HANDOVER_PACKET_LIMIT_BYTES
    assert front.counters["internal_errors"] == 0


def test_a_bug_costs_one_request(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    front = FakeFront(session)
    with caplog.at_level(logging.ERROR, "trims_shim.daemon"):
        front.serve(Request(session), lambda: {}["segment"])
    assert front.sent == [ErrorReply("DaemonError", "internal error; see the daemon's log")]
    assert front.counters["internal_errors"] == 1
    assert "KeyError: 'segment'" in caplog.text
