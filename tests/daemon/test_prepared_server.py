"""Prepared models over the wire: a real server and real clients, with a preparer that is a fake."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import PATIENCE_S, InProcessDaemon, World, close_worlds, wait_until
from prepared_models import RECIPE, FakePreparer, digest_of

from trims_shim.client.cache import Cache
from trims_shim.client.prepared import PreparedModel
from trims_shim.daemon import main as daemon_main
from trims_shim.daemon import requests
from trims_shim.daemon.front import Request
from trims_shim.daemon.prepared.values import Entry
from trims_shim.errors import DaemonUnavailable, NotServed, UnknownImage
from trims_shim.memory.memfd import seal_memfd
from trims_shim.wire import admin, codec, messages
from trims_shim.wire.duties import PrepareReply
from trims_shim.wire.handover import Peer

DATA = b"an ONNX model " * 1000


class Setting:
    """A world, its daemon in a thread, and the fake in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
        self.world = World(prepared_bytes="64M", **settings)
        self.preparer = FakePreparer()
        monkeypatch.setattr(daemon_main, "Preparer", lambda **_: self.preparer)
        monkeypatch.setattr("trims_shim.daemon.prepared.jobs.is_settled", lambda *_: True)
        self.daemon = InProcessDaemon(self.world)
        self.cache = self.world.cache(autostart="0")
        self.model = self.world.file(name="m.onnx")

    def open(self, cache: Cache | None = None, path: str = "") -> PreparedModel:
        path = path or self.model
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return (cache or self.cache).open_prepared(
                RECIPE, package="/site", search_path=("/site",), descriptor=descriptor, path=path
            )
        finally:
            os.close(descriptor)

    def reason(self, path: str = "") -> str:
        with pytest.raises(NotServed) as caught:
            self.open(path=path)
        return caught.value.reason

    def make(self, path: str = "") -> None:
        assert self.reason(path) == "preparing"
        self.settle()

    def settle(self) -> None:
        rows = self.daemon.server.prepared.rows
        wait_until(lambda: not any(row.state == "preparing" for row in rows()), "prepared")

    def row(self) -> admin.PreparedStatus:
        (row,) = self.world.status().prepared
        return row


@pytest.fixture
def make_setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(**settings: str) -> Setting:
        made.append(Setting(monkeypatch, **settings))
        return made[-1]

    yield make
    for each in made:
        each.preparer.gate.set()
        each.cache.close()
        each.daemon.close()
    close_worlds(each.world for each in made)


@pytest.fixture
def setting(make_setting: Callable[..., Setting]) -> Setting:
    return make_setting()


def test_a_client_gets_a_model_under_a_lease(setting: Setting) -> None:
    setting.make()
    model = setting.open()
    assert Path(model.path).read_bytes() == b"prepared " + Path(setting.model).read_bytes()
    assert os.path.dirname(model.path).startswith(setting.world.root + "/cache/prepared/")
    assert setting.row().leases == 1
    status = setting.world.status()
    assert sum(client.leases for client in status.clients) == 1
    model.release()
    wait_until(lambda: setting.row().leases == 0, "the lease released")
    assert status.counters["prepared_hit"] == status.counters["prepared_made"] == 1


def test_the_end_of_a_connection_is_the_end_of_its_leases(setting: Setting) -> None:
    setting.make()
    other = setting.world.cache(autostart="0")
    models = setting.open(other), setting.open(setting.cache)
    assert setting.row().leases == len(models)
    other.close()
    wait_until(lambda: setting.row().leases == 1, "the other's lease released")


def test_a_preparation_that_does_not_end_is_given_up(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trims_shim.daemon.prepared.jobs._GRACE_S", 0.0)
    setting.preparer.timeout_s = 0.0
    setting.preparer.gate.clear()
    assert setting.reason() == "preparing"
    setting.settle()
    assert setting.row().reason == "preparer_stalled"
    setting.preparer.gate.set()
    prepared = os.path.join(setting.world.root, "cache", "prepared")
    wait_until(lambda: not os.listdir(prepared), "what it wrote is removed")


def test_nothing_in_the_log_steers_a_terminal(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """The message may quote a model, which anybody may have written."""
    path = setting.world.file(name="m\n\x1b]0;.onnx")
    setting.preparer.reply = PrepareReply(reason="odd", message="no \x1b[2J\nWARNING all is well")
    with caplog.at_level(logging.INFO, "trims_shim.daemon"):
        setting.make(path)
    (line,) = (each for each in caplog.messages if "odd" in each)
    assert line.endswith(r"m\n\x1b]0;.onnx: odd: no \x1b[2J\nWARNING all is well")


def test_bytes(setting: Setting) -> None:
    def look() -> PreparedModel:
        return setting.cache.open_prepared(
            RECIPE, package="/site", search_path=(), digest=digest_of(DATA)
        )

    with pytest.raises(NotServed, match="not prepared"):
        look()
    descriptor = os.memfd_create("model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, DATA)
    seal_memfd(descriptor)
    with pytest.raises(NotServed) as caught:
        setting.cache.open_prepared(
            RECIPE, package="/site", search_path=(), descriptor=descriptor, digest=digest_of(DATA)
        )
    os.close(descriptor)
    assert caught.value.reason == "preparing"
    setting.settle()
    assert Path(look().path).read_bytes() == b"prepared " + DATA


def test_eviction(setting: Setting) -> None:
    setting.make()
    reply = setting.cache.request(admin.EvictPreparedRequest(setting.model))
    assert len(reply.keys) == 1
    with pytest.raises(UnknownImage):
        setting.cache.request(admin.EvictPreparedRequest(setting.model))
    setting.make()


def test_who_comes_first_waits_for_the_scan(
    make_setting: Callable[..., Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client that has started a daemon asks before the directory is looked through."""
    from trims_shim.daemon.prepared.files import PreparedFiles

    slow = PreparedFiles.open

    def slowly(self: PreparedFiles) -> object:
        time.sleep(0.2)
        return slow(self)

    monkeypatch.setattr(PreparedFiles, "open", slowly)
    setting = make_setting()
    assert setting.reason() == "preparing"


def test_an_idle_daemon_ends_only_when_nothing_is_prepared(
    make_setting: Callable[..., Setting],
) -> None:
    setting = make_setting()
    setting.preparer.gate.clear()
    assert setting.reason() == "preparing"
    setting.cache.close()
    setting.daemon.server.idle_exit_s = 1.0  # not before: a busy machine takes long to ask
    setting.daemon.thread.join(2.5)
    assert setting.daemon.thread.is_alive()
    setting.preparer.gate.set()
    setting.daemon.thread.join(PATIENCE_S)
    assert not setting.daemon.thread.is_alive()
    assert len(os.listdir(os.path.join(setting.world.root, "cache", "prepared"))) == 1


def test_a_daemon_that_is_stopped_does_not_wait(setting: Setting) -> None:
    setting.preparer.gate.clear()
    assert setting.reason() == "preparing"
    setting.daemon.server.stop()
    setting.daemon.thread.join(PATIENCE_S)
    assert not setting.daemon.thread.is_alive()
    assert setting.preparer.is_closed
    with pytest.raises(DaemonUnavailable):
        setting.open()


def test_the_largest_status_fits_a_message(setting: Setting) -> None:
    store = setting.daemon.server.prepared._store
    wait_until(lambda: store.budget_bytes, "the scan")
    names = tuple("/" + "ü" * 900 + str(number) for number in range(16))
    for number in range(5000):
        key = f"{number:064d}"
        store.adopt(Entry(key, 1 << 40, "r" * 64, 1 << 60, number, names))
    reply = setting.world.status()
    assert len(reply.prepared) == admin.PREPARED_IN_REPLY
    assert reply.prepared[0].key.endswith("4999")
    only = (codec.encode(each) for each in reply.prepared)
    limit = 400 * admin.PREPARED_IN_REPLY + requests._PREPARED_NAMES_LIMIT_BYTES
    assert sum(map(len, only)) < limit


def test_parts_of_a_status_fit_together() -> None:
    """The arithmetic of what ``trims status`` may have to carry."""
    names = requests._STATUS_NAMES_LIMIT_BYTES + requests._PREPARED_NAMES_LIMIT_BYTES
    rows = 300 * admin.IMAGES_IN_REPLY + 200 * requests._CLIENTS_IN_STATUS
    rows += 400 * admin.PREPARED_IN_REPLY
    counters = requests._COUNTERS_LIMIT * 120
    assert names + rows + counters + (32 << 10) < messages.CONTROL_MESSAGE_LIMIT_BYTES


def test_other_users_see_nothing_of_it(setting: Setting) -> None:
    setting.make()
    server = setting.daemon.server
    session = next(iter(server.sessions))
    ours, session.peer = session.peer, Peer(1, os.geteuid() + 1, 1)
    try:
        reply = requests.handle(server, Request(session), admin.GetStatusRequest())
    finally:
        session.peer = ours
    assert (reply.prepared, reply.storage) == ((), None)
