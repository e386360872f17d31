"""Requests that wait: counted by session and by user, and forgotten with either."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from trims_shim.daemon.front import Request
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.sessions import Session
from trims_shim.daemon.waiting import Waiting, WaitingRequests
from trims_shim.wire.handover import Peer
from trims_shim.wire.messages import FileOffer

ALICE, BOB = 1000, 1001


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        yield made


def asked(connection: socket.socket, session: int, number: int, user: int = ALICE) -> Request:
    return Request(Session(session, connection, Peer(1, user, user), 0), number)


def test_counted_by_session_and_user(connection: socket.socket) -> None:
    waiting = WaitingRequests()
    first = asked(connection, 1, 7)
    offer = Offer()
    waiting.put(first, offer)
    for request in (
        asked(connection, 1, 8),
        asked(connection, 2, 7),
        asked(connection, 3, 7, BOB),
    ):
        waiting.put(request, Offer())
    assert [waiting.count(session) for session in (1, 2, 3, 4)] == [2, 1, 1, 0]
    assert [waiting.count_of_user(user) for user in (ALICE, BOB, 0)] == [3, 1, 0]
    assert waiting.get(1, 7) == Waiting(first, offer)
    assert waiting.get(2, 8) is None
    waiting.pop(1, 8)
    assert waiting.pop(1, 7) == Waiting(first, offer)


def test_an_answer_makes_room_once(connection: socket.socket) -> None:
    waiting = WaitingRequests()
    request, offer = asked(connection, 1, 7), Offer()
    waiting.put(request, offer)
    assert waiting.pop(1, 7) == Waiting(request, offer)
    assert waiting.pop(1, 7) is None
    assert (waiting.count(1), waiting.count_of_user(ALICE)) == (0, 0)
    assert (waiting._by_session, waiting._of_user) == ({}, {})


def test_a_session_takes_its_requests_and_their_files_along(connection: socket.socket) -> None:
    waiting = WaitingRequests()
    offers = [Offer(FileOffer(number), os.open(os.devnull, os.O_RDONLY)) for number in range(5)]
    for session in (1, 2):
        for number in range(5):
            offer = offers[number] if session == 1 else Offer()
            waiting.put(asked(connection, session, number), offer)
    waiting.close_session(1)
    waiting.close_session(9)
    assert (waiting.count(1), waiting.count(2), waiting.count_of_user(ALICE)) == (0, 5, 5)
    assert [each.descriptor for each in offers] == [-1] * 5


def test_what_is_withdrawn_takes_its_file_along(connection: socket.socket) -> None:
    waiting = WaitingRequests()
    offers = [Offer(FileOffer(ticket), os.open(os.devnull, os.O_RDONLY)) for ticket in (1, 2)]
    for number, offer in enumerate(offers):
        waiting.put(asked(connection, 1, number), offer)
    waiting.withdraw(1, 1)
    waiting.withdraw(9, 2)
    assert [waiting.get(1, number) is None for number in (0, 1)] == [True, False]
    assert [each.descriptor == -1 for each in offers] == [True, False]
    offers[1].close()
