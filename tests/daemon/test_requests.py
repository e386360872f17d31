"""What each request does, and whose images it does it to. No socket: tests/faults has the whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from fronts import HostFront

from trims_shim.daemon import clock, ingest, requests
from trims_shim.daemon.front import Request
from trims_shim.daemon.loader import Finished, Hashing
from trims_shim.daemon.requests import Daemon, add_counters, handle
from trims_shim.daemon.sessions import Session
from trims_shim.daemon.values import Ingested, Opening, StartIngest
from trims_shim.errors import (
    AccessDenied,
    MalformedMessage,
    NoSpace,
    ReadFailed,
    TooManyRequests,
    UnknownDevice,
    UnknownImage,
    UnknownMessage,
)
from trims_shim.specs import Digest, Identity
from trims_shim.wire import admin, codec, messages
from trims_shim.wire.handover import Peer

ROOT, OWN, ALICE, BOB = 0, 70_000, 70_001, 70_002
LOADING = 99
"""The session that loads images in these tests."""


class Server(HostFront, Daemon):
    """What the handlers need of one."""

    memory_reason, started_ns, idle_exit_s, config_hash = "reason", 1, 5.0, "hash"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        storage = admin.PreparedStorage("/cache", 1, 2)
        self.prepared_rows: list[admin.PreparedStatus] = []
        self.prepared = SimpleNamespace(
            lease_count=lambda _: 100, rows=lambda: self.prepared_rows, storage=lambda: storage
        )
        self.jobs: list[Callable[[], Any]] = []
        self.may_verify = True
        self.inodes = itertools.count(1)

    def check_jobs(self, session: Session) -> None:
        if not self.may_verify:
            raise TooManyRequests("more than 0")

    def run_later(self, request: Request, tier: Any, work: Callable[[], Any]) -> None:
        self.jobs.append(work)

    def close(self) -> None:
        for work in self.jobs:
            work()  # it holds the image
        super().close()

    def stop(self) -> None:
        self.is_stopping = True

    def load(self, content: bytes, *, user: int, name: str = "/m.pt", now: int = 1) -> Digest:
        """An image that a user has loaded and leases no more."""
        identity = Identity(1, next(self.inodes), len(content), 0, 0)
        actions = self.host.store.open(Opening(LOADING, 1, user, identity, name), now)
        segment = self.memory.create(len(content))
        segment.view[:] = content
        sealed = segment.seal()
        digest = ingest.hash_segment(sealed.descriptor, len(content))
        (start,) = actions
        assert isinstance(start, StartIngest)
        result = Ingested(digest, sealed.resident_bytes(), True, 1)
        self.host.loader.deliver(Finished(start.ingest, result, sealed, None))
        self.openings.finish()
        self.tiers.close_session(LOADING, now)
        return digest

    def ask(self, session: Session, message: Any) -> Any:
        return handle(self, Request(session, 1, b"route"), message)

    def status(self, session: Session) -> admin.GetStatusReply:
        reply = self.ask(session, admin.GetStatusRequest())
        assert isinstance(reply, admin.GetStatusReply)
        return reply


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Not root's, whoever runs the test."""
    monkeypatch.setattr(os, "geteuid", lambda: OWN)
    session = Session(1, socket.socket(), Peer(1001, OWN, OWN), 3, b"token", "1.2", 77)
    server = Server(session)
    yield server
    server.close()


def own(server: Server) -> Session:
    session = server.sessions.get(1)
    assert session is not None
    return session


BY_IMAGE: dict[str, Callable[[str], Any]] = {
    "pin": lambda image: admin.PinImageRequest(image, True),
    "unpin": lambda image: admin.PinImageRequest(image, False),
    "evict": admin.EvictImageRequest,
    "evict from host": lambda image: admin.EvictImageRequest(image, "host"),
    "verify": admin.VerifyImageRequest,
}


@pytest.mark.parametrize("kind", BY_IMAGE)
def test_an_image_is_its_users(server: Server, kind: str) -> None:
    """Not even that somebody uses a path is told to others; who knows a digest learns no more."""
    alice, bob = server.client(ALICE), server.client(BOB)
    digest = server.load(b"alice's", user=ALICE, name="/alice.pt")
    for path in ("/alice.pt", "/nobodys.pt"):
        with pytest.raises(UnknownImage, match=f"no resident .*{path}.*; load its file first if"):
            server.ask(bob, BY_IMAGE[kind](path))
    for text in (digest, digest[:8]):
        with pytest.raises(AccessDenied, match="is not yours"):
            server.ask(bob, BY_IMAGE[kind](text))
    assert (server.jobs, server.host.store.is_resident(digest)) == ([], True)
    server.ask(alice, BY_IMAGE[kind]("/alice.pt"))


@pytest.mark.parametrize("user", [OWN, ROOT])
@pytest.mark.parametrize("kind", BY_IMAGE)
def test_the_daemons_own_user_and_root_may_do_all(server: Server, kind: str, user: int) -> None:
    server.load(b"alice's", user=ALICE, name="/alice.pt")
    server.ask(server.client(user), BY_IMAGE[kind]("/alice.pt"))


def test_only_privileged_users_stop_the_daemon_or_evict_everything(server: Server) -> None:
    digest = server.load(b"alice's", user=ALICE)
    for tier in ("", "host"):
        with pytest.raises(AccessDenied):
            server.ask(server.client(ALICE), admin.EvictImageRequest(tier=tier))
    with pytest.raises(AccessDenied):
        server.ask(server.client(ALICE), admin.StopDaemonRequest())
    assert (server.is_stopping, server.host.store.is_resident(digest)) == (False, True)
    evicted = server.ask(own(server), admin.EvictImageRequest())
    assert evicted == admin.EvictImageReply((digest,), 4096)
    assert server.memory.held_bytes() == 0
    assert server.ask(own(server), admin.EvictImageRequest()) == admin.EvictImageReply((), 0)
    assert server.ask(own(server), admin.StopDaemonRequest()) == admin.StopDaemonReply()
    assert server.is_stopping


def test_the_status_tells_each_what_is_theirs(server: Server) -> None:
    server.load(b"shared", user=ALICE, name="/alice.pt")
    server.load(b"shared", user=BOB, name="/bob.pt")
    alice = server.client(ALICE)
    server.client(BOB).token = b""  # has not said Hello
    server.prepared_rows = [admin.PreparedStatus("key", "ready", 1, 0, 0, 0, 0, (), "1.20")]
    asked_by_alice, asked_by_us = server.status(alice), server.status(own(server))
    assert [each.names for each in asked_by_alice.images] == [("/alice.pt",)]
    assert [each.names for each in asked_by_us.images] == [("/alice.pt", "/bob.pt")]
    assert [(each.pid, each.user) for each in asked_by_alice.clients] == [(alice.peer.pid, ALICE)]
    assert [each.pid for each in asked_by_us.clients] == [77, alice.peer.pid]
    assert [each.leases for each in asked_by_us.clients] == [100, 100]
    assert (asked_by_alice.storage, asked_by_alice.prepared) == (None, ())
    assert asked_by_us.storage == server.prepared.storage()


@pytest.mark.parametrize("by_s", [-86400, 86400])
def test_how_long_ago_is_right_when_the_clock_was_set(
    server: Server, monkeypatch: pytest.MonkeyPatch, by_s: int
) -> None:
    """Found: after the clock was set forward, what was loaded a moment ago was a day old."""
    moment_ns = clock.now_ns()
    server.started_ns = own(server).connected_ns = moment_ns
    server.load(b"model", user=OWN, now=moment_ns)
    set_ns = time.time_ns() + by_s * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: set_ns)
    status = server.status(own(server))
    (image,), (client,) = status.images, status.clients
    for then_ns in (status.started_ns, client.connected_ns, image.loaded_ns, image.used_ns):
        assert 0 <= status.now_ns - then_ns < 3600 * 10**9


def test_a_status_fits_a_reply(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "IMAGES_IN_REPLY", 2)
    monkeypatch.setattr(requests, "_CLIENTS_IN_STATUS", 2)
    monkeypatch.setattr(admin, "PREPARED_IN_REPLY", 2)
    monkeypatch.setattr(requests, "_STATUS_NAMES_LIMIT_BYTES", 2 * (8 + 9) - 1)
    monkeypatch.setattr(requests, "_PREPARED_NAMES_LIMIT_BYTES", 8 + 9)
    for number, content in enumerate((b"old", b"new", b"newest"), 1):
        server.load(content, user=OWN, name=f"/name-{number}00", now=number)
        server.client(OWN)
    server.prepared_rows = [
        admin.PreparedStatus(key, "ready", 1, 0, 0, 0, 0, ("/name-\udcff", "/x"), "1.20")
        for key in "abc"
    ]
    status = server.status(own(server))
    assert [each.names for each in status.images] == [("/name-300",), ()]
    monkeypatch.setattr(requests, "_STATUS_NAMES_LIMIT_BYTES", 2 * (8 + 9))
    names = [each.names for each in server.status(own(server)).images]
    assert names == [("/name-300",), ("/name-200",)]
    assert (len(status.clients), status.more_clients) == (2, 2)
    newest = server.client(OWN)
    named = server.status(newest).clients
    assert named[0].pid == newest.peer.pid, "who asks does not count itself"
    # What is not UTF-8 is sent as an escape, which is longer.
    assert [(each.key, each.names) for each in status.prepared] == [("a", ()), ("b", ())]


def test_a_list_goes_on_behind_what_it_had(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "IMAGES_IN_REPLY", 2)
    digests = sorted(
        server.load(bytes([number]), user=OWN, name=f"/name-{number}") for number in range(5)
    )
    stranger = server.client(ALICE)

    def page(digest: str, tier: str, session: Session) -> list[admin.ImageStatus]:
        reply = server.ask(session, admin.ListImagesRequest(digest, tier))
        assert isinstance(reply, admin.ListImagesReply)
        assert not any(each.names for each in reply.images if session is stranger)
        return list(reply.images)

    for session in (own(server), stranger):
        first = page("", "", session)
        second = page(first[-1].digest, first[-1].tier, session)
        third = page(second[-1].digest, second[-1].tier, session)
        assert [each.digest for each in (*first, *second, *third)] == digests
        assert page(digests[-1], "host", session) == []
    # Of two tiers, the second follows with the same digest.
    assert page(digests[0], "", stranger)[0].digest == digests[0]
    assert page(digests[0], "host", stranger)[0].digest == digests[1]


def test_what_clients_say_takes_no_more_of_a_status_than_is_reckoned(server: Server) -> None:
    """Letters of four bytes counted as one: a row could be longer than was reckoned."""
    session = server.client(OWN)
    session.token = b""
    server.sessions.greet(session, "\U0001f600" * 64, 1 << 62)
    for name in ("\U0001f600" * 25, "\U0001f600" * 100):
        with contextlib.suppress(MalformedMessage):
            add_counters(server, session, messages.StatsReport({name: 1 << 50}))
    status = server.status(own(server))
    assert len(msgpack.packb(codec.plain(status.clients[-1]))) < 200
    assert len(msgpack.packb(status.counters)) < 120


def test_what_is_in_use_is_not_evicted(server: Server) -> None:
    kept, free = server.load(b"kept", user=OWN, name="/kept"), server.load(b"free", user=OWN)
    server.ask(own(server), admin.PinImageRequest(kept, True))
    with pytest.raises(NoSpace, match="pinned"):
        server.ask(own(server), admin.EvictImageRequest("/kept"))
    assert server.ask(own(server), admin.EvictImageRequest()).digests == (free,)
    with pytest.raises(UnknownDevice):
        server.ask(own(server), admin.EvictImageRequest(tier="GPU-1"))
    assert server.ask(own(server), admin.PinImageRequest(kept, False)).digest == kept
    assert server.ask(own(server), admin.EvictImageRequest("/kept")).digests == (kept,)


def test_what_is_unpinned_is_the_version_that_was_pinned(server: Server) -> None:
    alice = server.client(ALICE)
    pinned = server.load(b"one", user=ALICE, name="/m.pt")
    server.ask(alice, admin.PinImageRequest("/m.pt", True))
    server.load(b"other", user=ALICE, name="/m.pt", now=2)
    assert server.ask(alice, admin.PinImageRequest("/m.pt", False)).digest == pinned
    assert not server.host.store.is_pinned(pinned)


def test_privileged_users_unpin_for_all(server: Server) -> None:
    digest = server.load(b"alice's", user=ALICE)
    server.ask(server.client(ALICE), admin.PinImageRequest(digest, True))
    server.ask(own(server), admin.PinImageRequest(digest, False))
    assert not server.host.store.is_pinned(digest)


def test_what_another_user_has_pinned_stays_and_who_can_unpin_it_is_said(server: Server) -> None:
    digest = server.load(b"both's", user=ALICE)
    assert server.load(b"both's", user=BOB) == digest
    server.ask(server.client(ALICE), admin.PinImageRequest(digest, True))
    with pytest.raises(AccessDenied, match="only that one, the daemon's user or root can unpin"):
        server.ask(server.client(BOB), admin.PinImageRequest(digest, False))
    assert server.host.store.is_pinned(digest)


class TestTwoTiers:
    @pytest.fixture
    def device(self, server: Server) -> Iterator[Server]:
        """Its memory is the second tier."""
        device = Server(own(server))
        device.host.name = "GPU-1"
        device.host.loader.lost = device.host.loader.take_shortages = tuple  # type: ignore[attr-defined]
        server.tiers._devices["GPU-1"] = device.host  # type: ignore[assignment]
        yield device
        del server.tiers._devices["GPU-1"]
        device.close()

    def test_a_list_is_by_image(self, server: Server, device: Server) -> None:
        digests = sorted(
            each.load(text, user=OWN) for each in (server, device) for text in (b"a", b"b")
        )
        images = server.ask(own(server), admin.ListImagesRequest()).images
        assert [each.digest for each in images] == digests
        assert [each.tier for each in images] == ["GPU-1", "host"] * 2

    def test_what_one_tier_drops_is_evicted_though_another_keeps_it(
        self, server: Server, device: Server
    ) -> None:
        digest = server.load(b"a", user=OWN)
        server.host.store.pin(digest, OWN)
        device.load(b"a", user=OWN)
        assert server.ask(own(server), admin.EvictImageRequest(digest)).digests == (digest,)
        assert server.host.store.is_resident(digest)
        assert not device.host.store.is_resident(digest)

    @pytest.mark.parametrize("tier", ["", "GPU-1"])
    def test_an_image_may_move_only_if_it_is_the_memory_that_is_wanted(
        self, server: Server, device: Server, monkeypatch: pytest.MonkeyPatch, tier: str
    ) -> None:
        told: list[bool] = []
        execute = server.openings.execute

        def tell(*arguments: Any, may_demote: bool) -> None:
            told.append(may_demote)
            execute(*arguments, may_demote=False)

        monkeypatch.setattr(server.openings, "execute", tell)
        server.ask(own(server), admin.EvictImageRequest(device.load(b"a", user=OWN), tier))
        assert told == [bool(tier)]


class TestVerifying:
    def test_what_is_as_it_was(self, server: Server) -> None:
        digest = server.load(b"sound", user=OWN)
        assert server.ask(own(server), admin.VerifyImageRequest(digest)) is None
        work = server.jobs.pop()
        check = admin.TierCheck("host", digest)
        assert work() == admin.VerifyImageReply(digest, digest, (check,))

    def test_what_cannot_be_read_or_is_something_else(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> Digest:
            raise ReadFailed("x" * 2000)

        digest = server.load(b"damaged", user=OWN)
        closed: list[None] = []
        for compute in (lambda: "f" * 64, fail):
            hashing = Hashing(compute, lambda: closed.append(None))
            monkeypatch.setattr(server.host.loader, "hashing", lambda _, made=hashing: made)
            server.ask(own(server), admin.VerifyImageRequest(digest))
        other, failed = (server.jobs.pop(0)() for _ in range(2))
        assert (other.computed, failed.computed) == ("f" * 64, "")
        assert failed.tiers == (admin.TierCheck("host", "", "x" * 1000),)
        assert len(closed) == 2

    def test_without_a_descriptor(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: Digest) -> Hashing:
            raise OSError(errno.EMFILE, "Too many open files")

        digest = server.load(b"sound", user=OWN)
        monkeypatch.setattr(server.host.loader, "hashing", fail)
        with pytest.raises(ReadFailed, match="Too many open files"):
            server.ask(own(server), admin.VerifyImageRequest(digest))
        assert not server.jobs

    def test_only_so_many_at_a_time(self, server: Server) -> None:
        digest = server.load(b"sound", user=OWN)
        server.may_verify = False
        with pytest.raises(TooManyRequests):
            server.ask(own(server), admin.VerifyImageRequest(digest))


def test_models_are_opened_where_they_are_kept(server: Server) -> None:
    """Images of files by the openings, which answer later; prepared ones by their own."""
    asked: list[Any] = []
    recipe = messages.SessionRecipe("1", "b", (), "all")
    for place, name, message in (
        (server.openings, "open", messages.OpenImageRequest(1)),
        (server.prepared, "open", messages.OpenPreparedRequest(1, "/m", "", recipe, "/o")),
        (server.prepared, "evict", admin.EvictPreparedRequest()),
    ):
        setattr(place, name, lambda request, message: asked.append(message) or "answer")
        assert server.ask(own(server), message) == "answer"
        assert asked.pop() == message


def test_what_is_no_request(server: Server) -> None:
    for message in (messages.DrainRequest("1"), admin.StopDaemonReply()):
        with pytest.raises(UnknownMessage, match="is not a request"):
            server.ask(own(server), message)


class TestCounters:
    @staticmethod
    def report(server: Server, user: int = ALICE, **amounts: int) -> None:
        add_counters(server, server.client(user), messages.StatsReport(amounts))

    def test_they_add_up_and_stay_within_64_bits(self, server: Server) -> None:
        for amount in (3, 4, -5):
            self.report(server, served=amount)
        assert server.counters == {"client.served": 7}
        for _ in range(1 << 14):
            self.report(server, served=1 << 63)
        assert server.counters["client.served"] == 1 << 62

    def test_names_are_short(self, server: Server) -> None:
        self.report(server, **{"x" * 100: 1})
        with pytest.raises(MalformedMessage):
            self.report(server, y=1, **{"x" * 101: 1})
        assert server.counters == {"client." + "x" * 100: 1}

    def test_names_that_one_user_makes_up_leave_room_for_those_of_others(
        self, server: Server
    ) -> None:
        """Found: after 600 of them, nothing new was counted of anybody."""
        self.report(server, served=1)
        self.report(server, **{f"made_up_{number}": 1 for number in range(600)})
        self.report(server, BOB, served=1, elided=1)
        assert (server.counters["client.served"], server.counters["client.elided"]) == (2, 1)
        for user in range(1, 8):
            self.report(server, user, **{f"of_{user}_{number}": 1 for number in range(600)})
        assert len(server.counters) == 512
