"""Offers and requests: who gets which image, and that what goes wrong costs nobody else.

Here with a host tier and without sockets; tests/faults and tests/client have a whole daemon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from fronts import FakeFront, HostFront
from harness import open_descriptors

from trims_shim.daemon import clock, descriptors
from trims_shim.daemon.eviction import FirstInFirstOut, LeastRecentlyUsed
from trims_shim.daemon.front import Request
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.openings import Openings
from trims_shim.daemon.sessions import Limits, Session, Sessions
from trims_shim.daemon.store import Store
from trims_shim.daemon.tiers import DeviceTier
from trims_shim.daemon.values import (
    Announce,
    GrantLease,
    Ingested,
    Opening,
    RefuseRequest,
    StartIngest,
)
from trims_shim.daemon.waiting import Waiting
from trims_shim.errors import (
    AccessDenied,
    DaemonUnavailable,
    NoSpace,
    ReadFailed,
    TooManyRequests,
    TrimsError,
    UnsupportedFormat,
)
from trims_shim.memory import copying
from trims_shim.memory.device import DeviceSegment
from trims_shim.specs import PIECES_LIMIT, Conversion, Variant
from trims_shim.wire import codec, messages
from trims_shim.wire.handover import Peer

WIDENING = Conversion("float16", "float32")


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
    offer = Offer(messages.FileOffer(1), os.dup(descriptor))
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
            asked = messages.FileOffer(number, "GPU-1", "x")
            each.offers[number] = Offer(asked, os.open(__file__, os.O_RDONLY))
            message = messages.OpenImageRequest(number)
            with contextlib.suppress(TooManyRequests):
                openings.open(Request(each, number, b"r"), message)
                taken[each.number] += 1
    assert (taken[session.number], taken.total()) == (of_session, of_user)
    for each in (session, other):
        openings.close_session(each.number)


# --- with a host tier -----------------------------------------------------------------------------

OWN, OTHER = os.geteuid(), 70_001
GPU = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def front(session: Session) -> Iterator[HostFront]:
    front = HostFront(session)
    yield front
    front.close()


class File:
    """A file that clients offer."""

    def __init__(self, path: Path, content: bytes = b"weights") -> None:
        self.path, self.content = path, content
        path.write_bytes(content)
        self.tickets = itertools.count(1)

    def offered(
        self, session: Session, *, flags: int = os.O_RDONLY, tier: str = "host", **fields: Any
    ) -> messages.FileOffer:
        """An open descriptor, and what is asked for with it."""
        asked = messages.FileOffer(next(self.tickets), tier, **{"name": str(self.path), **fields})
        session.offers[asked.ticket] = Offer(asked, os.open(self.path, flags))
        return asked

    def request(self, front: HostFront, session: Session, **fields: Any) -> int:
        """Ask for the image, with a number that is returned."""
        number = self.offered(session, **fields).ticket
        message = messages.OpenImageRequest(number)
        front.openings.open(Request(session, number, b"route"), message)
        return number

    def offer(self, front: HostFront, session: Session, **fields: Any) -> messages.OfferReply:
        """Offer it as one packet; what comes back as one."""
        offer = self.offered(session, **fields)
        front.openings.offer(session, offer)
        reply = front.sent.pop()
        assert isinstance(reply, messages.OfferReply)
        assert reply.ticket == offer.ticket
        return reply


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "m.pt")


def set_clock(monkeypatch: pytest.MonkeyPatch, by_s: int) -> None:
    """Somebody sets the time of day."""
    now_ns = time.time_ns() + by_s * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)


def replies(front: HostFront) -> dict[int, Any]:
    return {number: message for _, number, message in front.replies}


@pytest.mark.usefixtures("no_leak")
class TestOpening:
    def test_one_loads_and_the_others_share(self, front: HostFront, file: File) -> None:
        session, other = front.client(OWN), front.client(OWN)
        first, second = (file.request(front, each) for each in (session, other))
        assert (front.replies, front.sent) == ([], []), "nobody has it yet"
        front.work()
        third = file.request(front, other)
        assert {n: each.outcome for n, each in replies(front).items()} == {
            first: "miss",
            second: "joined",
            third: "hit",
        }
        assert {(each.digest, each.size_bytes) for each in replies(front).values()} == {
            (front.host.store.images()[0].digest, len(file.content))
        }
        leases = {number: each.lease for number, each in replies(front).items()}
        assert front.sent == [
            messages.SegmentGrant(ticket, leases[ticket]) for ticket in (first, second, third)
        ]
        assert all(os.pread(each, 100, 0) == file.content for each in front.descriptors)
        opens = {name: count for name, count in front.counters.items() if "open_" in name}
        assert opens == {"open_miss": 1, "open_joined": 1, "open_hit": 1}
        assert front.counters["images_loaded"] == 1
        digest = front.host.store.images()[0].digest
        assert front.published == [Announce("loaded", digest, len(file.content))]

    def test_who_waits_for_the_load_of_another_holds_no_file_open(
        self, front: HostFront, file: File
    ) -> None:
        """A hundred processes that load the same model wait with two descriptors."""
        for _ in range(4):
            file.request(front, front.client(OWN))
        opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert opened.count(str(file.path)) == 2
        front.work()

    @pytest.mark.parametrize("is_withdrawn", [False, True])
    def test_who_came_while_a_young_file_was_read(
        self, front: HostFront, file: File, is_withdrawn: bool
    ) -> None:
        """It is read once more for all of them, unless the file is closed that was kept for it."""
        front.host.loader._trusts_young_files = False
        clients = [front.client(OWN) for _ in range(3)]
        first, second, third = (file.request(front, each) for each in clients)
        if is_withdrawn:
            front.openings.withdraw(clients[1], second)
        front.work()
        assert replies(front)[first].outcome == "miss"
        for meter in front.host.loader.meters().values():
            assert meter.done_bytes == len(file.content), "it goes on counting"
        assert (third in replies(front)) == is_withdrawn
        front.work()
        last = replies(front)[third]
        assert getattr(last, "error", "") == ("FileChanged" if is_withdrawn else "")
        if not is_withdrawn:
            assert (replies(front)[second].outcome, last.outcome) == ("miss", "joined")

    def test_a_load_that_is_withdrawn_goes_on_for_nobody(
        self, front: HostFront, file: File
    ) -> None:
        other, client = front.client(OWN), front.client(OWN)  # the lease has the number of `other`
        number = file.request(front, client)
        front.openings.withdraw(client, number)
        front.work()
        assert (replies(front), front.sent) == ({}, [])
        (image,) = front.host.store.images()
        assert image.leases == 0
        assert file.offer(front, other).opened is not None

    def test_one_that_others_wait_for_is_granted_to_them(
        self, front: HostFront, file: File
    ) -> None:
        client, other = front.client(OWN), front.client(OWN)
        first, second = file.request(front, client), file.request(front, other)
        front.openings.withdraw(client, first)
        front.work()
        assert list(replies(front)) == [second]
        assert front.host.store.images()[0].leases == 1

    def test_a_lease_of_what_is_withdrawn_ends(self, front: HostFront, file: File) -> None:
        """The client may not have got it; of its other leases none ends."""
        client = front.client(OWN)
        first = file.request(front, client)
        front.work()
        second = file.request(front, client)
        for ticket, leases in ((first, 2), (second + 1, 2), (second, 1), (second, 1)):
            front.openings.withdraw(client, ticket)
            assert front.host.store.images()[0].leases == leases

    def test_an_offer_that_is_withdrawn_is_closed(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        offer = file.offered(client)
        front.openings.withdraw(client, offer.ticket)
        assert client.offers == {}

    def test_progress_is_told_to_all_who_wait(self, front: HostFront, file: File) -> None:
        number = file.request(front, front.client(OWN))
        front.openings.report_progress()
        assert replies(front) == {number: messages.Progress(0)}
        front.work()

    def test_what_is_another_users_is_read_again(self, front: HostFront, file: File) -> None:
        """An equal identity proves nothing; the file is read by what this user has opened."""
        file.request(front, front.client(OWN))
        front.work()
        other = front.client(OTHER)
        assert file.offer(front, other).opened is None
        number = file.request(front, other)
        assert number not in replies(front)
        front.work()
        assert replies(front)[number].outcome == "miss"
        assert len(front.host.store.images()) == 1
        assert file.offer(front, other).opened is not None

    @pytest.mark.parametrize(
        ("spoil", "error"),
        [
            (lambda path: path.write_bytes(b""), ReadFailed),
            (lambda path: (path.unlink(), os.mkfifo(path)), AccessDenied),
        ],
        ids=["empty", "no file"],
    )
    def test_what_is_no_model_is_refused(
        self,
        front: HostFront,
        file: File,
        spoil: Callable[[Path], object],
        error: type[TrimsError],
    ) -> None:
        spoil(file.path)
        client = front.client(OWN)
        file.offered(client, flags=os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(error):
            front.openings.open(Request(client, 1), messages.OpenImageRequest(1))
        assert client.offers == {}

    def test_what_is_not_open_for_reading_is_refused(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        file.request(front, client)
        front.work()
        for flags in (os.O_WRONLY, os.O_PATH):
            offer = file.offered(client, flags=flags)
            front.openings.offer(client, offer)
            assert front.sent.pop() == messages.OfferReply(offer.ticket), "to be told at a request"
            with pytest.raises(AccessDenied):
                front.openings.open(Request(client, 1), messages.OpenImageRequest(offer.ticket))

    @pytest.mark.parametrize(("tier", "lead"), [("host", -1), ("host", 1024), ("GPU-1", 1)])
    def test_an_image_begins_with_few_zeros(
        self, front: HostFront, file: File, tier: str, lead: int
    ) -> None:
        client = front.client(OWN)
        with pytest.raises(AccessDenied, match="bytes before the file"):
            file.request(front, client, tier=tier, variant=Variant(lead))
        file.request(front, client, variant=Variant(1023))
        front.work()
        assert os.pread(front.descriptors[0], 1100, 0) == bytes(1023) + file.content

    def test_limits(self, front: HostFront, file: File) -> None:
        front.sessions.limits = Limits(leases=2)
        client = front.client(OWN)
        for _ in range(2):
            number = file.request(front, client)
            front.work()
        assert file.offer(front, client).opened is None, "to be told at a request"
        with pytest.raises(TooManyRequests, match="more than 2 leases"):
            file.request(front, client)
        front.host.store.release(client.number, replies(front)[number].lease, 1)
        assert file.offer(front, client).opened is not None
        front.sessions.limits = Limits()
        number = file.request(front, client, tier=GPU)
        assert file.offer(front, client).opened is not None, "whatever numbers requests have"
        ticket = file.offered(client).ticket
        with pytest.raises(TooManyRequests, match=f"request {number} is open"):
            front.openings.open(Request(client, number), messages.OpenImageRequest(ticket))
        front.is_stopping = True
        with pytest.raises(DaemonUnavailable, match="stopping"):
            file.request(front, client)

    def test_a_device_that_is_none(self, front: HostFront, file: File) -> None:
        number = file.request(front, front.client(OWN), tier="cuda:0")
        assert replies(front)[number].error == "UnknownDevice"
        assert (front.counters["refused"], front.counters["internal_errors"]) == (1, 0)

    def test_who_has_gone_is_given_nothing(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        file.request(front, client)
        front.openings.close_session(client.number)
        front.work()
        assert (front.sent, front.replies) == ([], [])

    def test_who_takes_no_segments_is_let_go(self, front: HostFront, file: File) -> None:
        def full() -> None:
            raise BlockingIOError("its buffer is full")

        file.request(front, front.client(OWN))
        front.send = full
        front.work()
        (reason,) = front.ended
        assert "does not take its segments: its buffer is full" in reason
        assert front.replies == []

    def test_a_bug_costs_one_request(
        self, front: HostFront, file: File, caplog: pytest.LogCaptureFixture
    ) -> None:
        front.host.store.open = None  # type: ignore[method-assign, assignment]
        with caplog.at_level(logging.CRITICAL, "trims_shim.daemon"):
            number = file.request(front, front.client(OWN))
        assert replies(front)[number].error == "DaemonError"
        assert front.counters["refused"] == front.counters["internal_errors"] == 1

    def test_a_bug_in_an_offer_leaves_nothing_open(
        self, front: HostFront, file: File, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = front.client(OWN)
        file.request(front, client)
        front.work()
        before = open_descriptors()
        front.host.store.open = None  # type: ignore[method-assign, assignment]
        offer = file.offered(client)
        with caplog.at_level(logging.CRITICAL, "trims_shim.daemon"):
            front.openings.offer(client, offer)
        assert open_descriptors() == before
        assert front.openings._waiting.count(client.number) == 0

    @pytest.mark.parametrize(("parts", "is_granted"), [(32, True), (33, False)])
    def test_what_is_granted_at_once_fits_a_packet(
        self,
        front: HostFront,
        file: File,
        monkeypatch: pytest.MonkeyPatch,
        parts: int,
        is_granted: bool,
    ) -> None:
        """An image of more parts has to be requested: such an answer may be longer."""
        client = front.client(OWN)
        file.request(front, client)
        front.work()
        (image,) = front.host.store.images()
        outline = front.host.loader.segment(image.digest).descriptor
        sizes, handles = (1 << 40,) * parts, (bytes(64),) * parts
        segment = DeviceSegment(GPU, "ipc", sizes, (), handles, outline, 7, "0" * 64)
        monkeypatch.setattr(front.host.loader, "segment", lambda _: segment)
        reply = file.offer(front, client)
        assert (reply.opened is not None) == is_granted
        assert len(codec.encode(reply)) <= messages.HANDOVER_PACKET_LIMIT_BYTES

    def test_an_equal_image_that_went_meanwhile(self, front: HostFront, file: File) -> None:
        """The load was only hashed, and there is nothing to share any more: memory was lost."""
        file.request(front, front.client(OWN))
        front.work()
        number = file.request(front, front.client(OTHER))
        (image,) = front.host.store.images()
        front._pool.run()
        front.openings.execute(front.host, front.host.store.forget(image.digest))
        front.work()
        reply = replies(front)[number]
        assert (reply.error, "evicted meanwhile" in reply.message) == ("FileChanged", True)

    def test_images_hold_half_of_the_descriptors_at_most(
        self, front: HostFront, file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unused ones make room; without any, who comes is told why."""
        monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
        monkeypatch.setattr(descriptors, "_open_count", lambda: -100)
        for name in "abc":
            client = front.client(OWN)
            number = File(tmp_path / name, name.encode()).request(front, client)
            front.work()
            assert replies(front)[number].outcome == "miss"
            front.tiers.close_session(client.number, 1)
        assert len(front.host.store.images()) == 2
        for image in front.host.store.images():
            front.host.store.pin(image.digest, OWN)
        number = file.request(front, front.client(OWN))
        reply = replies(front)[number]
        assert (reply.error, "ulimit -n" in reply.message) == ("NoSpace", True)
        resident = File(tmp_path / "c", b"c")
        other = resident.request(front, client := front.client(OWN))
        front.tiers.close_session(client.number, 1)
        assert replies(front)[other].error == "NoSpace", "the file is another one"

    def test_images_that_leave_a_device_for_descriptors_are_not_demoted(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the host tier they would hold one as well."""
        device, dropped = DeviceTier.__new__(DeviceTier), []
        device.store = Store(1000, policy=LeastRecentlyUsed())
        device.store.ingest_done(device.store.admit(7), Ingested("0" * 64, 7, True, 1), 1)
        device.loader = SimpleNamespace(  # type: ignore[assignment]
            descriptor_count=lambda: 1 - len(dropped),
            drop=dropped.append,
            outline_bytes=lambda: 0,
        )
        monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))
        monkeypatch.setattr(descriptors, "_open_count", lambda: -100)
        with monkeypatch.context() as patch:
            patch.setitem(front.tiers._devices, GPU, device)
            number = file.request(front, front.client(OWN))
            assert (dropped, number in replies(front)) == (["0" * 64], False)
        front.work()

    @pytest.mark.parametrize(("limit", "for_images"), [(80, 50), (4000, 2936)])
    def test_images_leave_descriptors_for_clients_where_few_are_left(
        self,
        front: HostFront,
        file: File,
        monkeypatch: pytest.MonkeyPatch,
        limit: int,
        for_images: int,
    ) -> None:
        """Of 80, 60 may be open: 10 (of many, 64) for who may still come, one each for others."""
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        client = front.client(OWN)
        most = for_images - len(front.sessions)
        for used, error in ((most + 1, "NoSpace"), (most, "")):
            monkeypatch.setattr(descriptors, "_open_count", lambda used=used: used)
            number = file.request(front, client)
            front.work()
            assert getattr(replies(front)[number], "error", "") == error

    def test_unused_images_go_when_the_machine_is_short_of_memory(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = front.client(OWN)
        file.request(front, client)
        front.work()
        for missing, leases, left in ((1, 1, 1), (0, 0, 1), (1, 0, 0)):
            if not leases:
                front.tiers.close_session(client.number, 1)
            monkeypatch.setattr(front.host, "missing_bytes", lambda missing=missing: missing)
            front.openings.relieve_pressure()
            assert len(front.host.store.images()) == left
        assert front.counters["evicted_under_pressure"] == 1
        assert front.counters["images_evicted"] == 1

    @pytest.mark.parametrize(("leaving_bytes", "is_relieved"), [(0, False), (1, True), (10, True)])
    def test_what_leaves_a_device_relieves_a_shortage(
        self, front: HostFront, leaving_bytes: int, is_relieved: bool
    ) -> None:
        answers: list[bool] = []

        def answer(*, is_relieved: bool) -> None:
            answers.append(is_relieved)

        shortage = SimpleNamespace(wanted_bytes=10, may_demote=True, answer=answer)
        loader = SimpleNamespace(
            take_shortages=lambda: [shortage], leaving_bytes=lambda: leaving_bytes
        )
        device: Any = SimpleNamespace(loader=loader, store=front.host.store)
        front.openings._relieve_shortages(device)
        assert answers == [is_relieved]

    def test_unused_images_go_after_a_while(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        file.request(front, client)
        front.work()
        front.openings.keep_unused_s = 0.0
        front.openings.expire()
        front.tiers.close_session(client.number, clock.now_ns())
        for unused_s, left in ((math.inf, 1), (3600.0, 1), (0.0, 0)):
            front.openings.keep_unused_s = unused_s
            front.openings.expire()
            assert len(front.host.store.images()) == left
        assert front.counters["expired"] == front.counters["images_evicted"] == 1

    @pytest.mark.parametrize("by_s", [-86400, 86400])
    def test_unused_images_stay_when_the_clock_is_set(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch, by_s: int
    ) -> None:
        """Found: all of them went at once."""
        file.request(front, client := front.client(OWN))
        front.work()
        front.tiers.close_session(client.number, clock.now_ns())
        set_clock(monkeypatch, by_s)
        front.openings.keep_unused_s = 3600.0
        front.openings.expire()
        assert len(front.host.store.images()) == 1

    def test_what_was_loaded_first_goes_first_when_the_clock_is_set_back(
        self, front: HostFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        front.host.store._policy = FirstInFirstOut()
        client = front.client(OWN)
        for name, by_s in (("first", 0), ("second", -86400)):
            set_clock(monkeypatch, by_s)
            File(tmp_path / name, name.encode()).request(front, client)
            front.work()
        front.tiers.close_session(client.number, clock.now_ns())
        front.openings.execute(front.host, front.host.store.relieve(1))
        assert [row.names for row in front.host.store.images()] == [
            ((OWN, str(tmp_path / "second")),)
        ]


@pytest.mark.usefixtures("no_leak")
class TestVariants:
    """Variants of images: nobody waits for one, and the second who asks has it made."""

    def test_it_is_made_for_later(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        assert not file.offer(front, client, variant=Variant(8)).is_loading
        front.work()
        assert front.host.store.images() == []
        assert not file.offer(front, client, variant=Variant(8)).is_loading, "but it begins"
        assert client.offers == {}, "these offers do not stand"
        assert file.offer(front, client, variant=Variant(8)).is_loading
        assert len(client.offers) == 1, "this one does, to wait for it"
        front.work()
        opened = file.offer(front, client, variant=Variant(8)).opened
        assert opened is not None
        assert (opened.outcome, opened.size_bytes) == ("hit", 8 + len(file.content))
        client.offers.popitem()[1].close()

        front.tiers.close_session(client.number, clock.now_ns())
        front.openings.execute(front.host, front.host.store.relieve(1))
        assert not file.offer(front, client, variant=Variant(8)).is_loading
        assert front.host.store.ingest_count() == 0, "once it is gone, it is as never asked for"

    def test_it_is_not_made_if_it_would_be_gone_before_the_next(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: with TRIMS_KEEP_UNUSED=0 every second load had it made, and no load got it."""
        client = front.client(OWN)
        now_s = 100.0
        monkeypatch.setattr(clock, "now_ns", lambda: int(now_s * 1e9))
        front.openings.keep_unused_s = 0.0
        for _ in range(3):
            file.offer(front, client, variant=Variant(8))
        front.openings.keep_unused_s = 60.0
        for _ in range(2):
            now_s += 61.0
            file.offer(front, client, variant=Variant(8))
        assert front.host.store.ingest_count() == 0
        now_s += 59.0
        file.offer(front, client, variant=Variant(8))
        assert front.host.store.ingest_count() == 1
        front.work()

    def test_other_zeros_are_another_image(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        for lead in (8, 16):
            file.offer(front, client, variant=Variant(lead))
        front.work()
        assert front.host.store.ingest_count() == 0
        assert front.host.store.images() == []

    def test_where_there_is_no_room_it_is_tried_again(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = front.client(OWN)
        with monkeypatch.context() as patch:
            patch.setattr(front.host, "withheld_bytes", lambda image_bytes: 1 << 30)
            for _ in range(3):
                file.offer(front, client, variant=Variant(8))
        assert front.host.store.ingest_count() == 0
        file.offer(front, client, variant=Variant(8))
        assert front.host.store.ingest_count() == 1
        front.work()

    def test_those_without_room_beside_each_other_do_not_take_turns(
        self, front: HostFront, file: File
    ) -> None:
        store, sessions = front.host.store, [front.client(OWN) for _ in range(4)]
        store._budget_bytes = store._footprint_bytes(16 + len(file.content))
        served = []
        for client in sessions:
            for lead in (8, 16):
                if file.offer(front, client, variant=Variant(lead)).opened is not None:
                    served.append(lead)
                front.work()
            front.tiers.close_session(client.number, clock.now_ns())
        assert served == [8, 8]
        assert front.counters["images_evicted"] == 0
        for _ in range(2):
            file.offer(front, sessions[0], variant=Variant(16))
            front.work()
        assert file.offer(front, sessions[0], variant=Variant(16)).opened is not None, "wanted now"

    def test_it_leaves_descriptors_for_clients(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = front.client(OWN)
        for is_short, loads in ((True, 0), (False, 1)):
            monkeypatch.setattr(descriptors, "are_scarce", lambda _, found=is_short: found)
            for _ in range(2 - loads):
                file.offer(front, client, variant=Variant(8))
            assert front.host.store.ingest_count() == loads
        front.work()

    @pytest.mark.parametrize(
        ("tier", "variant"),
        [
            ("host", Variant(7, WIDENING)),
            ("host", Variant(2, Conversion("float32", "float16"))),
            ("host", Variant(0, Conversion("float99", "float32"))),
            ("host", Variant(0, Conversion("float32", "float64"))),
            ("host", Variant(0, Conversion("float32", "float32"))),
            ("host", Variant(0, Conversion("", ""))),
            ("host", Variant(0, Conversion("x" * 1000, "y" * 1000))),
            ("host", Variant(0, WIDENING, 3, (0,))),
            ("host", Variant(0, WIDENING, 2, (3,))),
            ("GPU-1", Variant(0, WIDENING)),
        ],
    )
    def test_what_is_not_converted(
        self,
        front: HostFront,
        file: File,
        monkeypatch: pytest.MonkeyPatch,
        tier: str,
        variant: Variant,
    ) -> None:
        monkeypatch.setattr(copying, "can_convert", lambda: True)
        assert variant.conversion is not None
        source = variant.conversion.source[:20]
        with pytest.raises(AccessDenied, match=f"converted from '{source}'") as refused:
            file.request(front, front.client(OWN), tier=tier, variant=variant)
        assert len(str(refused.value)) < 200, "names are cut"

    def test_pieces(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        variant = Variant(0, None, 3, (4, 0))
        for _ in range(2):
            assert not file.offer(front, client, variant=variant).is_loading
            other = variant._replace(pieces=(0, 4))
            assert not file.offer(front, client, variant=other).is_loading, "another image"
        front.work()
        opened = file.offer(front, client, variant=variant).opened
        assert opened is not None
        expected = b"".join(file.content[at : at + 3] for at in variant.pieces)
        assert opened.digest == blake3(expected).hexdigest()
        assert opened.size_bytes == 6

    def test_other_pieces_are_another_image(self) -> None:
        count = 1000
        variants = [Variant(0, None, 8, (n, count - n)) for n in range(count)]
        assert len({each.key for each in variants}) == count

    def test_other_results_of_the_same_pieces_are_other_images(self) -> None:
        pieces = Variant(0, None, 8, (4, 0))
        others = [pieces._replace(piece_bytes=4), pieces._replace(conversion=WIDENING)]
        assert len({each.key for each in (pieces, *others)}) == 3

    @pytest.mark.parametrize(
        "variant",
        [
            Variant(0, None, 0, (0,)),
            Variant(0, None, -1, (0,)),
            Variant(0, None, 4, ()),
            Variant(0, None, 4, (-1,)),
            Variant(0, None, 4, (1 << 63,)),
            Variant(0, None, 4, (4,)),  # of a file of seven bytes
            Variant(0, None, 4, (0, 0)),
            Variant(0, None, 8, (0,)),
            Variant(0, None, 1 << 63, (0,)),
            Variant(8, None, 4, (0,)),
        ],
    )
    def test_pieces_that_make_no_sense(
        self, front: HostFront, file: File, variant: Variant
    ) -> None:
        client = front.client(OWN)
        for _ in range(3):
            assert file.offer(front, client, variant=variant).opened is None
            client.offers.popitem()[1].close()
        assert front.host.store.ingest_count() == 0
        with pytest.raises(AccessDenied, match=f"is {len(variant.pieces)} pieces of"):
            file.request(front, client, variant=variant)

    @pytest.mark.parametrize(("count", "loads"), [(PIECES_LIMIT, 1), (PIECES_LIMIT + 1, 0)])
    def test_so_many_pieces(self, front: HostFront, tmp_path: Path, count: int, loads: int) -> None:
        file, client = File(tmp_path / "large", bytes(2 * PIECES_LIMIT)), front.client(OWN)
        for _ in range(2):
            file.offer(front, client, variant=Variant(0, None, 1, (0,) * count))
        assert front.host.store.ingest_count() == loads
        front.work()

    def test_without_the_extension_it_is_said_why(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(copying, "can_convert", lambda: False)
        with pytest.raises(UnsupportedFormat, match="without a compiler"):
            file.request(front, front.client(OWN), variant=Variant(8, WIDENING))
        for variant in (Variant(8), Variant(0, None, 3, (4, 0))):
            assert not file.offer(front, front.client(OWN), variant=variant).is_loading, (
                "not refused"
            )

    def test_a_file_of_one_byte_is_no_number(
        self, front: HostFront, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(copying, "can_convert", lambda: True)
        file.path.write_bytes(b"1")
        with pytest.raises(ReadFailed, match="is empty"):
            file.request(front, front.client(OWN), variant=Variant(0, WIDENING))

    def test_what_will_be_refused_stands(self, front: HostFront, file: File) -> None:
        client = front.client(OWN)
        assert file.offer(front, client, variant=Variant(1024)).is_loading
        assert len(client.offers) == 1
        client.offers.popitem()[1].close()


@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize(
    ("failing", "is_promoted", "is_copied"),
    [((), True, True), ((1,), False, True), ((2,), True, False), ((1, 2), False, False)],
    ids=["enough", "for the promotion", "for the copy", "for both"],
)
def test_a_load_onto_a_device_without_descriptors(
    front: HostFront,
    file: File,
    monkeypatch: pytest.MonkeyPatch,
    failing: tuple[int, ...],
    is_promoted: bool,
    is_copied: bool,
) -> None:
    """It takes the file: neither the image of the host tier nor that of another device."""
    client = front.client(OWN)
    file.request(front, client)
    front.work()
    (image,) = front.host.store.images()
    segment = front.host.loader.segment(image.digest)
    offer = client.offers[file.offered(client).ticket]
    opening = Opening(client.number, 9, OWN, offer.identity(), str(file.path))
    peer, tier = DeviceTier.__new__(DeviceTier), DeviceTier.__new__(DeviceTier)
    outlined = DeviceSegment(GPU, "vmm", (1,), (), (), segment.descriptor, 7, "0" * 64)
    held, unheld, started = [], [], []
    peer.store = SimpleNamespace(hold=held.append, unhold=unheld.append)  # type: ignore[assignment]
    peer.loader = SimpleNamespace(segment=lambda _: outlined)  # type: ignore[assignment]

    def start(action: StartIngest, descriptor: int, *, digest: str, source: Any) -> None:
        started.append((os.fstat(descriptor).st_ino, digest, source))
        os.close(descriptor)
        if source is not None:
            source.segment.close()

    tier.loader = SimpleNamespace(start=start, was_copied=lambda _: True)  # type: ignore[assignment]
    monkeypatch.setattr(front.tiers, "peer_with", lambda *_: peer)
    calls, duplicate = itertools.count(1), os.dup

    def dup(descriptor: int) -> int:
        if next(calls) in failing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return duplicate(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", dup)
        front.openings.execute(tier, [StartIngest(5, opening, False)], offer=offer)
    ((inode, digest, source),) = started
    expected = os.fstat(segment.descriptor) if is_promoted else os.stat(file.path)
    assert inode == expected.st_ino
    assert digest == (image.digest if is_promoted else "")
    assert ((source is not None), held) == (is_copied, [image.digest] if is_copied else [])
    assert list(front.openings._copies) == ([5] if is_copied else [])
    assert front.counters["images_promoted"] == (is_promoted and not is_copied)
    in_store = front.host.store._images[image.digest]
    assert (in_store.holds, unheld) == (is_promoted, [])
    front.openings._end_copy(tier, 5)
    assert (in_store.holds, unheld) == (0, held), "both may be evicted again"
    assert front.counters["images_copied_from_peer"] == is_copied


@pytest.mark.usefixtures("no_leak")
def test_an_image_that_no_tier_has_any_more_is_read_from_the_file(
    front: HostFront, file: File
) -> None:
    client = front.client(OWN)
    offer = client.offers[file.offered(client).ticket]
    assert not front.openings._promote("0" * 64, offer)
    tier = DeviceTier.__new__(DeviceTier)
    assert front.openings._begin_copy(tier, 5, "0" * 64, is_promoted=False) is None
    assert offer.identity().inode == os.stat(file.path).st_ino
    offer.close()
