"""Offers that are answered where they came: whatever goes wrong costs that client, and nobody else.

What openings do otherwise is tested with a whole daemon (tests/faults, tests/client).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fronts import FakeFront

from trims_shim.daemon.front import Request
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.openings import Openings
from trims_shim.daemon.sessions import Limits, Session, Sessions
from trims_shim.daemon.store import GrantLease, Opening, RefuseRequest
from trims_shim.daemon.waiting import Waiting
from trims_shim.errors import NoSpace, TooManyRequests
from trims_shim.wire import messages
from trims_shim.wire.handover import Peer


class Tiers:
    """None of them is ready, or a look at one fails."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.look = look

    def ready(self, _: str) -> None:
        self.look()

    def when_ready(self, _: str, ready: Callable[[Any], None]) -> None:
        """It is being made, for ever."""

    def lease_count(self, session: int) -> int:
        return 0


def nothing() -> None:
    """Goes well."""


@pytest.fixture
def session() -> Iterator[Session]:
    ours, theirs = socket.socketpair()
    yield Sessions(Limits()).add(ours, Peer(os.getpid(), os.geteuid(), os.getegid()), 0)
    ours.close()
    theirs.close()


OFFER = messages.FileOffer(1, "host", "model.onnx")


def test_what_is_not_resident_stands(session: Session) -> None:
    front = FakeFront(session, nothing)
    Openings(front, Tiers(nothing)).offer(session, OFFER)  # type: ignore[arg-type]
    assert (front.sent, front.ended) == ([messages.OfferReply(1)], [])


def test_a_client_that_reads_no_answer_is_let_go(session: Session) -> None:
    """As nobody would try again, it would wait for it until its patience ends."""

    def full() -> None:
        raise BlockingIOError("its buffer is full")

    front = FakeFront(session, full)
    Openings(front, Tiers(nothing)).offer(session, OFFER)  # type: ignore[arg-type]
    assert len(front.ended) == 1
    assert "buffer is full" in front.ended[0]


def test_a_bug_costs_one_connection(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise KeyError("segment")

    front = FakeFront(session, nothing)
    with caplog.at_level(logging.CRITICAL, "trims_shim.daemon"):
        Openings(front, Tiers(fail)).offer(session, OFFER)  # type: ignore[arg-type]
    assert front.counters["internal_errors"] == 1
    assert front.ended == ["internal error; see the daemon's log"]


def test_a_ticket_cannot_take_the_place_of_a_request(session: Session) -> None:
    """Tickets are any numbers, and requests that wait are in the same table."""
    front = FakeFront(session, nothing)
    openings = Openings(front, Tiers(nothing))  # type: ignore[arg-type]
    waiting = Waiting(Request(session, 4), Offer())
    openings._waiting.put(*waiting)
    openings.offer(session, messages.FileOffer(-5, "host"))
    assert openings._waiting.get(session.number, 4) == waiting


@pytest.mark.parametrize("routing", [None, b"r"], ids=["packet", "request"])
@pytest.mark.parametrize("is_granted", [True, False], ids=["granted", "refused"])
def test_a_lock_on_an_offered_file_ends_before_the_answer(
    session: Session, tmp_path: Path, *, is_granted: bool, routing: bytes | None
) -> None:
    """A program that locks its file for a load, and closes it, has given the lock up."""
    path = tmp_path / "m.pt"
    path.write_bytes(b"PK")
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    offer = Offer(1, os.dup(descriptor))
    os.close(descriptor)

    def hand_over(_: Session, message: Any, descriptor: int | None = None) -> None:
        if descriptor is None:
            reply(b"", 0, message)

    def reply(_: bytes, number: int, message: Any) -> None:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        answered.append(message)

    answered: list[Any] = []
    front = FakeFront(session)
    front.hand_over, front.reply = hand_over, reply  # type: ignore[method-assign]
    openings = Openings(front, Tiers(nothing))  # type: ignore[arg-type]
    request = Request(session, 1, routing)
    opening = Opening(session.number, 1, 0, offer.identity(), "m.pt")
    openings._waiting.put(request, offer)
    segment = SimpleNamespace(descriptor=0, size_bytes=2)
    tier: Any = SimpleNamespace(loader=SimpleNamespace(segment=lambda _: segment))
    action: Any = RefuseRequest(opening, NoSpace("full"))
    if is_granted:
        action = GrantLease(opening, 1, "digest", "hit", is_settled=True)
    openings.execute(tier, [action])
    assert len(answered) == 1


@pytest.mark.parametrize(
    ("limits", "of_session", "of_user"),
    [(Limits(requests=3), 3, 6), (Limits(requests_per_user=5), 5, 5)],
    ids=["session", "user"],
)
def test_what_may_wait_is_limited(
    session: Session, limits: Limits, of_session: int, of_user: int
) -> None:
    """One user's requests may be spread over any number of connections."""
    front = FakeFront(session, limits=limits)
    openings = Openings(front, Tiers(nothing))  # type: ignore[arg-type]
    other = Session(session.number + 1, session.connection, session.peer, 0)
    taken: Counter[int] = Counter()
    for each in (session, other):
        for number in range(1, 11):
            each.offers[number] = Offer(number, os.open(__file__, os.O_RDONLY))
            message = messages.OpenImageRequest(number, "x", "GPU-1")
            with contextlib.suppress(TooManyRequests):
                openings.open(Request(each, number, b"r"), message)
                taken[each.number] += 1
    assert (taken[session.number], taken.total()) == (of_session, of_user)
    for each in (session, other):
        openings.close_session(each.number)
