"""Prepared models in the daemon: requests, preparations, damage, restarts; nobody runs onnxruntime.

The preparer is a fake that writes two small files; everything else is real, threads and directory
included.
"""

from __future__ import annotations

import errno
import itertools
import os
import queue
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest
from harness import PATIENCE_S, open_descriptors, wait_until
from prepared_models import RECIPE, FakePreparer, digest_of, identity_of

from trims_shim.children import NoInterpreter, interpreter, search_path
from trims_shim.config import ShareOrSize
from trims_shim.daemon import clock, workers
from trims_shim.daemon.front import Front, Request
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.prepared import clients as prepared_clients
from trims_shim.daemon.prepared import files as prepared_files
from trims_shim.daemon.prepared import jobs as prepared_jobs
from trims_shim.daemon.prepared import key as prepared_key
from trims_shim.daemon.prepared import refusals as prepared_refusals
from trims_shim.daemon.prepared import serving as prepared_module
from trims_shim.daemon.prepared.directory import PreparedSettings, Space
from trims_shim.daemon.prepared.externals import external_identities
from trims_shim.daemon.prepared.files import PreparedFiles, Scan
from trims_shim.daemon.prepared.key import LAYOUT_VERSION
from trims_shim.daemon.prepared.serving import PreparedModels
from trims_shim.daemon.sessions import Limits, Session, Sessions
from trims_shim.daemon.values import Announce
from trims_shim.errors import (
    AccessDenied,
    DaemonUnavailable,
    MalformedMessage,
    NoSpace,
    NotServed,
    TooManyRequests,
    UnknownImage,
)
from trims_shim.memory.memfd import seal_memfd
from trims_shim.specs import Identity
from trims_shim.wire import admin, messages
from trims_shim.wire.duties import PrepareReply
from trims_shim.wire.handover import Peer
from trims_shim.wire.messages import OpenPreparedReply, OpenPreparedRequest

MIB = 1 << 20
ELSEWHERE = (1 << 22) + 1
"""The process id of a client that sees other files: no process has it."""


class _NoSocket:
    """There is none, and nothing unread in it."""

    def shutdown(self, how: int) -> None: ...
    def close(self) -> None: ...

    def recvmsg(self, *arguments: int) -> NoReturn:
        raise BlockingIOError


class World(Front):
    """A :class:`PreparedModels` with its server's part; :meth:`turn` is one round of its loop."""

    def __init__(
        self,
        directory: Path,
        *,
        budget: int = 16 * MIB,
        trusts_young_files: bool = True,
        problem: str = "",
        is_started: bool = True,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.sessions = Sessions(Limits(requests=4, leases=5))
        self.is_stopping = False
        self.replies: list[tuple[int, Any]] = []
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.preparer = FakePreparer()
        self.directory = directory
        settings = PreparedSettings(str(directory), ShareOrSize(size_bytes=budget), problem)
        self.prepared = PreparedModels(
            self,
            settings,
            preparer=self.preparer,
            numbers=itertools.count(1),
            wake=lambda: self.woken.put(None),
            trusts_young_files=trusts_young_files,
        )
        self.session = self.join()
        self._ticket = 0
        if is_started:
            self.prepared.start()
            if not problem:
                self.turn()

    # --- what a server has ------------------------------------------------------------------------

    def join(self, uid: int | None = None, pid: int | None = None) -> Session:
        peer = Peer(pid or os.getpid(), os.geteuid() if uid is None else uid, 0)
        return self.sessions.add(_NoSocket(), peer, time.time_ns())  # type: ignore[arg-type]

    def take_offer(self, request: Request, ticket: int) -> Offer:
        if ticket not in request.session.offers:
            raise AccessDenied("no offer")
        return request.session.offers.pop(ticket)

    def reply(self, routing: bytes, number: int, message: Any) -> None:
        self.replies.append((number, message))

    def hand_over(self, session: Session, message: Any, descriptor: int | None = None) -> None:
        raise AssertionError("nobody asks by a packet here")

    def end_session(self, session: Session, reason: str) -> None:
        raise AssertionError(reason)

    def publish(self, event: Announce) -> None:
        raise AssertionError("nothing is announced")

    # --- what a client does -----------------------------------------------------------------------

    def ask(
        self,
        path: str | Path = "",
        *,
        data: bytes | None = None,
        digest: str = "",
        session: Session | None = None,
        shown: Path | None = None,
        externals: Mapping[str, Path] = MappingProxyType({}),
        recipe: messages.SessionRecipe = RECIPE,
        package: str = "/site/onnxruntime",
        name: str | None = None,
        waits: bool = True,
    ) -> OpenPreparedReply | None:
        """Offer a file, or bytes as memory, or nothing."""
        session = session or self.session
        ticket = 0
        if path or data is not None:
            self._ticket += 1
            ticket = self._ticket
            descriptor = _memory(data) if data is not None else os.open(path, os.O_RDONLY)
            session.offers[ticket] = Offer(messages.FileOffer(ticket), descriptor)
        message = OpenPreparedRequest(
            ticket, str(path) if name is None else name, digest, recipe, package
        )
        if shown is not None:
            self._ticket += 1
            offer = Offer(messages.FileOffer(self._ticket), os.open(shown, os.O_RDONLY))
            session.offers[self._ticket] = offer
            message = message._replace(directory=self._ticket)
        for location, file in externals.items():
            self._ticket += 1
            offer = Offer(messages.FileOffer(self._ticket), os.open(file, os.O_RDONLY))
            session.offers[self._ticket] = offer
            offered = messages.OfferedExternal(location, self._ticket)
            message = message._replace(externals=(*message.externals, offered))
        reply = self.prepared.open(Request(session, 7, b"client"), message)
        while reply is None and waits and self.prepared._is_open:
            self.turn()
            reply = self.replies.pop()[1] if self.replies else None
        return reply

    def elsewhere(self) -> dict[str, Any]:
        """Arguments of :meth:`ask` for a client in another container."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {"session": self.join(pid=ELSEWHERE), "shown": self.directory}

    def outcome(self, *arguments: Any, **keywords: Any) -> str:
        reply = self.ask(*arguments, **keywords)
        assert reply is not None
        return f"{reply.outcome} {reply.reason}".strip()

    def hit(self, *arguments: Any, **keywords: Any) -> OpenPreparedReply:
        reply = self.ask(*arguments, **keywords)
        assert reply is not None
        assert reply.outcome == "hit", reply
        return reply

    def make(self, *arguments: Any, **keywords: Any) -> None:
        """Ask, and wait until it is prepared or is not going to be."""
        assert self.outcome(*arguments, **keywords) == "preparing"
        self.settle()

    # --- the loop ---------------------------------------------------------------------------------

    def turn(self) -> None:
        self.woken.get(timeout=PATIENCE_S)
        self.prepared.finish()

    def is_preparing(self) -> bool:
        return any(row.state == "preparing" for row in self.prepared.rows())

    def settle(self) -> None:
        while self.is_preparing():
            self.turn()

    def end_aside(self) -> None:
        """Wait for the thread that deletes."""
        self.prepared._aside.submit(lambda: None).result(timeout=PATIENCE_S)

    def files(self) -> list[str]:
        self.end_aside()
        return sorted(os.listdir(self.directory)) if self.directory.exists() else []

    def row(self) -> admin.PreparedStatus:
        (row,) = self.prepared.rows()
        return row


def _memory(data: bytes) -> int:
    descriptor = os.memfd_create("model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    seal_memfd(descriptor)
    return descriptor


@pytest.fixture
def make_world(tmp_path: Path, no_leak: None) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(directory: Path | None = None, **settings: Any) -> World:
        made.append(World(directory or tmp_path / "cache" / "prepared", **settings))
        return made[-1]

    yield make
    for each in made:
        each.prepared.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "m.onnx"
    path.write_bytes(b"model" * 1000)
    return path


class TestLife:
    def test_it_is_prepared_once_and_then_served(self, world: World, model: Path) -> None:
        assert world.outcome(model) == "preparing"
        assert world.outcome(model) == "preparing"
        world.settle()
        reply = world.hit(model)
        assert Path(reply.model).read_bytes() == b"prepared " + model.read_bytes()
        assert Path(reply.weights).read_bytes() == b"packed weights"
        assert reply.model_identity is not None
        assert reply.model_identity.inode == os.stat(reply.model).st_ino
        assert reply.weights_identity is not None
        assert reply.weights_identity.size_bytes == len(b"packed weights")
        assert world.files() == [reply.key]
        assert len(world.preparer.orders) == 1
        assert world.prepared.lease_count(world.session.number) == 1
        assert world.hit(model).lease != reply.lease
        names = ("hit", "preparing", "made", "failed", "dropped")
        assert [world.counters[f"prepared_{name}"] for name in names] == [2, 2, 1, 0, 0]

    def test_what_the_preparer_is_given(self, world: World, model: Path) -> None:
        world.make(model)
        (order,) = world.preparer.orders
        assert (order.request.path, order.request.recipe) == (str(model), RECIPE)
        assert order.request.package == "/site/onnxruntime"
        assert os.path.basename(order.interpreter).startswith("python")
        assert os.path.dirname(order.request.directory) == str(world.directory)
        assert not os.path.exists(order.request.directory)

    def test_another_recipe_is_another_model(self, world: World, model: Path) -> None:
        world.make(model)
        other = RECIPE._replace(level="ORT_ENABLE_BASIC")
        world.make(model, recipe=other)
        assert world.hit(model, recipe=other).key != world.hit(model).key

    def test_a_copy_of_the_file_is_only_hashed(self, world: World, model: Path) -> None:
        world.make(model)
        copy = model.with_name("copy.onnx")
        shutil.copy(model, copy)
        world.make(copy)
        assert world.preparer.verdicts == [True, False]
        assert world.hit(copy).key == world.hit(model).key
        assert world.row().names == (str(copy), str(model))

    def test_a_changed_file_is_another_model(self, world: World, model: Path) -> None:
        world.make(model)
        model.write_bytes(b"MODEL" * 1000)
        world.make(model)
        assert len(world.files()) == 2

    def test_leases_end_with_the_session(self, world: World, model: Path) -> None:
        world.make(model)
        lease = world.hit(model).lease
        assert world.prepared.is_needed()
        world.prepared.release(world.session.number + 1, lease)
        assert world.row().leases == 1
        world.prepared.release(world.session.number, lease)
        assert world.row().leases == 0
        world.hit(model)
        world.prepared.close_session(world.session.number)
        assert not world.prepared.is_needed()

    def test_a_preparation_goes_on_without_who_asked(self, world: World, model: Path) -> None:
        world.preparer.gate.clear()
        assert world.outcome(model) == "preparing"
        world.prepared.close_session(world.session.number)
        assert world.prepared.is_needed()
        world.preparer.gate.set()
        world.settle()
        world.hit(model, session=world.join())

    def test_a_model_without_weights(self, world: World, model: Path) -> None:
        world.preparer.weights = None
        world.make(model)
        reply = world.hit(model)
        assert (reply.weights, reply.weights_identity) == ("", None)

    def test_a_server_with_an_error_for_who_closes_its_file(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        close = os.close

        def fail(descriptor: int) -> None:
            is_the_model = os.readlink(f"/proc/self/fd/{descriptor}") == str(model)
            close(descriptor)
            if is_the_model:
                raise OSError("the server is not content")

        monkeypatch.setattr(os, "close", fail)
        world.make(model)
        monkeypatch.undo()
        world.hit(model)

    def test_the_end_gives_up_what_runs_and_what_waits(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        world = make_world()
        world.preparer.gate.clear()
        for level in ("a", "b", "c"):
            recipe = RECIPE._replace(level=level)
            assert world.outcome(model, recipe=recipe) == "preparing"
        world.prepared.close()
        assert len(world.preparer.orders) <= 1
        assert world.directory.exists() is False or os.listdir(world.directory) == []

    @staticmethod
    def check_that_it_ends(world: World, is_asked: threading.Event, hangs: threading.Event) -> None:
        assert is_asked.wait(PATIENCE_S)
        began = time.monotonic()
        world.prepared.close()
        took_s = time.monotonic() - began
        hangs.set()
        assert took_s < PATIENCE_S / 2

    def test_the_end_does_not_wait_for_a_file_whose_server_is_gone(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_asked, answers = self.make_silent(model, monkeypatch, lambda: True)
        monkeypatch.setattr(prepared_jobs, "_END_PATIENCE_S", 0.05)
        assert world.outcome(model) == "preparing"
        self.check_that_it_ends(world, is_asked, answers)

    @staticmethod
    def make_silent(
        model: Path, monkeypatch: pytest.MonkeyPatch, is_gone: Callable[[], bool]
    ) -> tuple[threading.Event, threading.Event]:
        """Have the server of a file answer nothing once it is gone, until the second event."""
        is_asked, answers, fstat = threading.Event(), threading.Event(), os.fstat

        def hang(descriptor: int) -> os.stat_result:
            if is_gone() and os.readlink(f"/proc/self/fd/{descriptor}") == str(model):
                is_asked.set()
                answers.wait(PATIENCE_S)
            return fstat(descriptor)

        monkeypatch.setattr(os, "fstat", hang)
        return is_asked, answers

    @pytest.mark.parametrize("is_begun", [False, True], ids=["before", "while it is prepared"])
    def test_a_file_whose_server_is_gone_keeps_no_other_waiting(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
    ) -> None:
        """Found: nor did the daemon end when idle."""
        other = model.with_name("other.onnx")
        other.write_bytes(b"other")
        orders = world.preparer.orders
        is_asked, answers = self.make_silent(model, monkeypatch, lambda: bool(orders) == is_begun)
        assert world.outcome(model) == "preparing"
        assert is_asked.wait(PATIENCE_S)
        world.prepared.tend()
        assert world.is_preparing(), "it has time"
        now_s = time.monotonic() + world.preparer.timeout_s + 61
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now_s)
            world.prepared.tend()
        assert not world.prepared.is_needed()
        assert world.outcome(model) == "refused preparer_stalled"
        assert world.preparer.given_up == 1
        try:
            world.make(other)
            world.hit(other)
        finally:
            answers.set()
        wait_until(lambda: not self.goes_on(world), "the thread is done")
        assert world.outcome(model) == "refused preparer_stalled"
        assert world.preparer.verdicts == [True, False], "it is not wanted any more"

    def test_one_that_was_given_up_and_is_made_all_the_same(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: it was on the disk, in no account, and could not be evicted."""
        files = world.prepared._files
        is_asked, answers, publish = threading.Event(), threading.Event(), files.publish

        def hang(*arguments: Any) -> Any:
            is_asked.set()
            answers.wait(PATIENCE_S)
            return publish(*arguments)

        monkeypatch.setattr(files, "publish", hang)
        assert world.outcome(model) == "preparing"
        wait_until(
            lambda: world.prepared.finish() or is_asked.is_set(), "it is about to be published"
        )
        now_s = time.monotonic() + world.preparer.timeout_s + 61
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now_s)
            world.prepared.tend()
        answers.set()
        wait_until(lambda: not self.goes_on(world), "the thread is done")
        assert world.prepared.storage().resident_bytes > 0
        world.hit(model)

    @staticmethod
    def goes_on(world: World) -> bool:
        world.prepared.finish()
        world.prepared.tend()
        return bool(world.prepared._jobs._stuck)

    def test_the_end_does_not_wait_for_a_directory_whose_disk_is_gone(
        self, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: the daemon stayed for ever, with the memory of all images."""
        is_asked, answers = threading.Event(), threading.Event()

        def hang() -> Scan:
            is_asked.set()
            answers.wait(PATIENCE_S)
            return Scan()

        world = make_world(is_started=False)
        monkeypatch.setattr(prepared_module, "_END_PATIENCE_S", 0.05)
        monkeypatch.setattr(world.prepared._files, "open", hang)
        world.prepared.start()
        self.check_that_it_ends(world, is_asked, answers)

    def test_a_bug_costs_one_preparation(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: its thread waited for an answer for ever, and all other models for the thread."""

        def fail(*_: object, **__: object) -> None:
            raise ValueError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(world.prepared._store, "hashed", fail)
            assert world.outcome(model) == "preparing"
            world.turn()
        world.settle()
        assert world.counters["internal_errors"] == 1
        assert world.preparer.verdicts == [False]
        world.make(model)
        world.hit(model)

    def test_the_end_while_the_server_is_asked(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        world = make_world()
        assert world.outcome(model) == "preparing"
        world.woken.get(timeout=PATIENCE_S)  # The question is there, and never answered.
        world.prepared.close()
        assert world.preparer.verdicts == [False]


class TestBytes:
    DATA = b"bytes" * 1000

    def test_they_are_looked_for_by_digest_and_offered_afterwards(self, world: World) -> None:
        digest = digest_of(self.DATA)
        assert world.outcome(digest=digest) == "unknown"
        world.make(data=self.DATA, digest=digest)
        reply = world.hit(digest=digest)
        assert Path(reply.model).read_bytes() == b"prepared " + self.DATA
        assert world.row().names == ()
        assert world.hit(data=self.DATA, digest=digest).key == reply.key
        assert world.hit(name="/models/m.onnx", digest=digest).key == reply.key
        assert world.outcome(digest="0" * 64) == "unknown"

    def test_they_share_with_a_file(self, world: World, model: Path) -> None:
        world.make(model)
        world.hit(digest=digest_of(model.read_bytes()))
        assert world.outcome(digest=digest_of(self.DATA)) == "unknown"

    def test_a_lie_about_the_digest_serves_nobody(self, world: World) -> None:
        world.make(data=b"other bytes", digest=digest_of(self.DATA))
        assert world.outcome(digest=digest_of(self.DATA)) == "unknown"
        world.hit(digest=digest_of(b"other bytes"))

    def test_a_file_is_what_it_holds_whatever_the_digest(self, world: World, model: Path) -> None:
        world.make(data=self.DATA, digest=digest_of(self.DATA))
        world.make(model, digest=digest_of(self.DATA))
        reply = world.hit(model, digest=digest_of(self.DATA))
        assert Path(reply.model).read_bytes() == b"prepared " + model.read_bytes()

    def test_only_some_memory_may_wait(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_module, "available_bytes", lambda: 4 * 5000)
        world.preparer.gate.clear()
        assert world.outcome(model) == "preparing", "a file takes none"
        digest = digest_of(self.DATA)
        assert world.outcome(data=self.DATA, digest=digest) == "preparing"
        assert world.outcome(data=b"x", digest=digest_of(b"x")) == "refused no_memory"
        world.preparer.gate.set()
        world.settle()
        assert world.outcome(data=b"x", digest=digest_of(b"x")) == "preparing"


class TestExternalFiles:
    @pytest.fixture
    def external(self, world: World, model: Path) -> Path:
        world.preparer.externals = ("w.bin", "sub/v.bin")
        model.with_name("sub").mkdir()
        model.with_name("w.bin").write_bytes(b"w" * 100)
        (model.parent / "sub" / "v.bin").write_bytes(b"v" * 100)
        return model.with_name("w.bin")

    def test_they_are_part_of_the_model(self, world: World, model: Path, external: Path) -> None:
        world.make(model)
        first = world.hit(model)
        external.write_bytes(b"W" * 100)
        world.make(model)
        assert world.hit(model).key != first.key
        external.write_bytes(b"w" * 100)
        world.make(model)
        assert world.preparer.verdicts == [True, True, False]
        assert world.hit(model).key == first.key

    def test_without_any_a_model_is_the_same_everywhere(
        self, world: World, model: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other" / "m.onnx"
        other.parent.mkdir()
        other.hardlink_to(model)
        world.make(model)
        world.hit(other)

    def test_they_are_looked_for_beside_the_path(
        self, world: World, model: Path, external: Path
    ) -> None:
        """A hard link of a model elsewhere has other external files."""
        world.make(model)
        other = model.parent / "other"
        (other / "sub").mkdir(parents=True)
        (other / "m.onnx").hardlink_to(model)
        world.preparer.externals = ()
        world.make(other / "m.onnx")
        assert world.preparer.verdicts == [True, True]

    def test_one_that_is_gone(self, world: World, model: Path, external: Path) -> None:
        world.make(model)
        external.unlink()
        world.preparer.externals = ()
        assert world.outcome(model) == "preparing"
        world.settle()

    def test_one_that_is_linked_to_from_outside(
        self, world: World, model: Path, external: Path, tmp_path: Path
    ) -> None:
        """onnxruntime refuses it there, though it is the same file."""
        world.make(model)
        directory = model.parent / "sub"
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
        world.make(model)
        assert world.outcome(model) == "refused file_changed"

    def test_one_that_is_linked_to_inside(self, world: World, model: Path, external: Path) -> None:
        world.make(model)
        directory = model.parent / "sub"
        directory.rename(model.parent / "other")
        directory.symlink_to("other")
        world.hit(model)

    def test_what_is_shown_for_nothing_is_closed(
        self, world: World, model: Path, external: Path
    ) -> None:
        """Found: of a client that had once met a daemon in another container, it was not."""
        world.make(model)
        before = open_descriptors()
        world.hit(model, shown=world.directory, externals={"w.bin": external})
        assert open_descriptors() <= before

    def test_a_server_that_is_gone_keeps_nobody_else_waiting(
        self, world: World, model: Path, external: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: the daemon answered nobody meanwhile."""
        other = model.with_name("other.onnx")
        other.write_bytes(b"other")
        world.make(model)
        world.make(other)
        is_asked, answers, look = threading.Event(), threading.Event(), external_identities

        def hang(path: str, locations: Iterable[str]) -> tuple[Identity, ...] | None:
            if path == str(model):
                is_asked.set()
                answers.wait(PATIENCE_S)
            return look(path, locations)

        monkeypatch.setattr(prepared_module, "external_identities", hang)
        monkeypatch.setattr(workers, "_STUCK_AFTER_S", 0.0)
        gone = world.join()
        assert world.ask(model, session=gone, waits=False) is None
        assert is_asked.wait(PATIENCE_S)
        world.prepared.tend()
        world.hit(other)
        world.prepared.close_session(gone.number)
        world.sessions.close(gone)
        answers.set()
        world.turn()
        assert (world.prepared.lease_count(), world.replies) == (1, [])

    def test_a_young_one_is_not_trusted(
        self, world: World, model: Path, external: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = os.stat(external).st_size
        monkeypatch.setattr(
            prepared_jobs, "is_settled", lambda identity, at_ns: identity.size_bytes != size
        )
        monkeypatch.setattr(prepared_jobs, "_SETTLE_PATIENCE_S", 0.05)
        world.prepared._jobs._trusts_young_files = False
        world.make(model)
        assert world.preparer.verdicts == [False]
        assert world.outcome(model) == "refused unsettled_file"
        learned = world.prepared._store.recall(identity_of(model), str(model.parent))
        assert learned is None, "its digest may be of what it held before"

    def test_a_young_one_is_waited_for(
        self, world: World, model: Path, external: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = os.stat(external).st_size
        asked_ns = 0

        def is_settled(identity: Identity, at_ns: int) -> bool:
            nonlocal asked_ns
            if identity.size_bytes != size:
                return True
            asked_ns = asked_ns or time.time_ns()
            return at_ns > asked_ns

        monkeypatch.setattr(prepared_jobs, "is_settled", is_settled)
        monkeypatch.setattr(prepared_jobs, "_SETTLE_PATIENCE_S", 60.0)
        world.prepared._jobs._trusts_young_files = False
        world.make(model)
        assert world.preparer.verdicts == [False, True], "it is read again after the wait"
        world.hit(model)

    def test_a_young_one_of_a_model_that_is_there(
        self, world: World, model: Path, external: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That it had to be waited for is no failure."""
        world.make(model)
        os.utime(external)
        young = identity_of(external)
        answers = itertools.chain([False], itertools.repeat(True))
        monkeypatch.setattr(
            prepared_jobs, "is_settled", lambda identity, _: identity != young or next(answers)
        )
        world.prepared._jobs._trusts_young_files = False
        world.make(model)
        assert world.preparer.verdicts == [True, False, False]
        assert world.counters["prepared_failed"] == 0
        world.hit(model)

    def test_one_that_changes_meanwhile(self, world: World, model: Path, external: Path) -> None:
        world.preparer.on_made = lambda _: external.write_bytes(b"x")
        world.make(model)
        assert world.files() == []
        assert world.counters["prepared_failed"] == 1
        assert world.outcome(model) == "preparing", "it is another model now"
        world.settle()


class TestTrust:
    def test_another_user(self, world: World, model: Path) -> None:
        other = world.join(uid=os.geteuid() + 1)
        assert world.outcome(model, session=other) == "refused other_user"
        assert other.offers == {}

    def test_other_files(self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = world.join(pid=ELSEWHERE)
        assert world.outcome(model, session=gone) == "refused other_namespace"
        stat = os.stat

        def elsewhere(path: Any, **keywords: Any) -> Any:
            return stat("/proc/self/ns/pid" if str(path).endswith("self/ns/mnt") else path)

        monkeypatch.setattr(prepared_clients.os, "stat", elsewhere)
        assert world.outcome(model, session=world.join()) == "refused other_namespace"

    def test_other_files_but_the_same_prepared_models(self, world: World, model: Path) -> None:
        there = world.join(pid=ELSEWHERE)
        assert world.outcome(model, session=there) == "refused other_namespace"
        assert world.files() == [], "the directory is there, to be shown"
        assert world.outcome(model, session=there, shown=world.directory) == "preparing"
        world.settle()
        world.hit(model, session=there)
        assert world.outcome(model, session=world.join(pid=ELSEWHERE)) == "refused other_namespace"
        (order,) = world.preparer.orders
        assert (order.request.path, order.request.package) == ("", "")
        assert (order.interpreter, list(order.search_path)) == (interpreter(), search_path())
        assert there.offers == {}
        # Who sees the same files has it hashed once more, as nothing is known of data beside it.
        world.make(model)
        assert world.preparer.verdicts == [True, False]
        world.hit(model)

    @pytest.mark.parametrize("place", ["", "models", "models/m.onnx"])
    def test_another_directory_shows_nothing(
        self, world: World, model: Path, tmp_path: Path, place: str
    ) -> None:
        there = world.join(pid=ELSEWHERE)
        answer = world.outcome(model, session=there, shown=tmp_path / place)
        assert answer == "refused other_namespace"
        assert there.offers == {}

    def test_external_files_there_are_those_that_are_offered(
        self, world: World, model: Path, tmp_path: Path
    ) -> None:
        """Not those of the same names here."""
        world.preparer.externals = ("w.bin",)
        ours, theirs = model.with_name("w.bin"), tmp_path / "theirs.bin"
        ours.write_bytes(b"w" * 100)
        theirs.write_bytes(b"W" * 100)
        world.make(model)
        here = world.hit(model)
        asked = world.elsewhere()
        world.make(model, externals={"w.bin": theirs}, **asked)
        found = world.hit(model, externals={"w.bin": theirs}, **asked)
        assert found.key != here.key
        assert world.hit(model).key == here.key
        # They are looked at for each answer.
        assert world.outcome(model, **asked) == "preparing"
        world.settle()
        assert world.outcome(model, **asked) == "refused external_missing"
        assert asked["session"].offers == {}

    def test_what_one_container_lacks_another_may_have(
        self, world: World, model: Path, tmp_path: Path
    ) -> None:
        """Found: it was refused to all of them, for up to an hour."""
        world.preparer.externals = ("w.bin",)
        theirs = tmp_path / "theirs.bin"
        theirs.write_bytes(b"w" * 100)
        asked = world.elsewhere()
        for others in ({}, {"w.bin": tmp_path}):
            world.make(model, externals=others, **asked)
            assert world.outcome(model, externals=others, **asked).startswith("refused ")
        world.make(model, externals={"w.bin": theirs}, **asked)
        world.hit(model, externals={"w.bin": theirs}, **asked)

    def test_equal_external_files_are_equal_models(
        self, world: World, model: Path, tmp_path: Path
    ) -> None:
        world.preparer.externals = ("w.bin",)
        theirs = tmp_path / "theirs.bin"
        for each in (theirs, model.with_name("w.bin")):
            each.write_bytes(b"w" * 100)
        world.make(model)
        asked = world.elsewhere()
        world.make(model, externals={"w.bin": theirs}, **asked)
        assert world.preparer.verdicts == [True, False]
        key = world.hit(model).key
        assert world.hit(model, externals={"w.bin": theirs}, **asked).key == key
        # Another file of another content
        theirs.unlink()
        theirs.write_bytes(b"x" * 100)
        world.make(model, externals={"w.bin": theirs}, **asked)
        assert world.hit(model, externals={"w.bin": theirs}, **asked).key != key

    def test_two_containers_with_one_model_and_data_of_their_own(
        self, world: World, model: Path, tmp_path: Path
    ) -> None:
        """Found: each forgot what was known of the other's."""
        world.preparer.externals = ("w.bin",)
        asked = world.elsewhere()
        for name in ("one", "other"):
            (tmp_path / name).write_bytes(name.encode() * 100)
            world.make(model, externals={"w.bin": tmp_path / name}, **asked)
        keys = [
            world.hit(model, externals={"w.bin": tmp_path / name}, **asked).key
            for name in ("one", "other", "one", "other")
        ]
        assert keys[:2] == keys[2:]
        assert keys[0] != keys[1]

    def test_an_external_file_there_that_changes_meanwhile(
        self, world: World, model: Path, tmp_path: Path
    ) -> None:
        world.preparer.externals = ("w.bin",)
        theirs = tmp_path / "theirs.bin"
        theirs.write_bytes(b"w" * 100)
        world.preparer.on_made = lambda order: theirs.write_bytes(b"W" * 100) and None
        asked = world.elsewhere()
        world.make(model, externals={"w.bin": theirs}, **asked)
        assert world.counters["prepared_failed"] == 1
        assert world.files() == []

    @pytest.mark.parametrize("kind", ["own", "others"])
    def test_external_files_there_that_are_not_theirs_alone(
        self, world: World, model: Path, tmp_path: Path, kind: str
    ) -> None:
        """What somebody else may write stands for no equal file."""
        world.preparer.externals = ("w.bin",)
        theirs, other = tmp_path / "theirs.bin", tmp_path / "other.bin"
        for each in (theirs, other):
            each.write_bytes(b"w" * 100)
        if kind == "others":
            theirs.chmod(0o666)
        asked = world.elsewhere()
        world.make(model, externals={"w.bin": theirs}, **asked)
        world.make(model, externals={"w.bin": other}, **asked)
        assert world.preparer.verdicts == [True, kind == "others"]

    def test_a_file_of_which_root_reads_more_than_others(self, world: World, model: Path) -> None:
        """A container's root may have fewer rights than the daemon's."""
        kernels = Path("/proc/version")
        asked = world.elsewhere()
        world.make(model, externals={"w.bin": kernels}, **asked)
        assert (
            world.outcome(model, externals={"w.bin": kernels}, **asked) == "refused access_denied"
        )
        assert world.preparer.orders == []

    @pytest.mark.parametrize("reason", ["", "preparer_died"])
    def test_who_changes_a_file_spoils_nothing_for_others(
        self, world: World, model: Path, reason: str
    ) -> None:
        """Found: equal files were refused, and for good if the preparer died twice."""
        theirs = model.with_name("theirs.onnx")
        asked = world.elsewhere()
        world.preparer.reply = PrepareReply(reason=reason, is_lasting=False)
        world.preparer.on_made = lambda _: os.truncate(theirs, 100)
        for _ in range(2):
            theirs.write_bytes(model.read_bytes())
            world.make(theirs, **asked)
        assert world.counters["prepared_failed"] == 2
        assert world.prepared.rows() == []
        world.preparer.reply = PrepareReply(probe="equal")
        world.preparer.on_made = lambda _: None
        world.make(model)
        world.hit(model)

    def test_a_number_that_another_process_has_by_now(self, world: World, model: Path) -> None:
        """Its interpreter would run what a client in another container names."""
        session = world.join()
        session.connected_ns = 1  # before all that runs here
        assert world.outcome(model, session=session) == "refused other_namespace"
        assert world.outcome(model) == "preparing"

    def test_external_files_that_were_not_offered(self, world: World, model: Path) -> None:
        """Found: a file without a ticket was an internal error."""
        there = world.elsewhere()["session"]
        there.offers[1] = Offer(messages.FileOffer(1), os.open(model, os.O_RDONLY))
        there.offers[2] = Offer(messages.FileOffer(2), os.open(world.directory, os.O_RDONLY))
        nothing = (messages.OfferedExternal("w.bin", 0),)
        asked = OpenPreparedRequest(1, str(model), "", RECIPE, "", directory=2, externals=nothing)
        with pytest.raises(AccessDenied):
            world.prepared.open(Request(there, 7, b"client"), asked)

    def test_no_interpreter_of_ours(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse() -> str:
            raise NoInterpreter("frozen")

        monkeypatch.setattr("trims_shim.children.interpreter", refuse)
        world.make(model)
        there = world.join(pid=ELSEWHERE)
        other = model.with_name("other.onnx")
        other.write_bytes(b"other" * 1000)
        answer = world.outcome(other, session=there, shown=world.directory)
        assert answer == "refused not_python"
        assert not world.is_preparing()

    def test_no_interpreter(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(pid: int, uid: int) -> str:
            raise NotServed("not_python", "it is a web server")

        monkeypatch.setattr(prepared_module, "interpreter_of", refuse)
        world.make(model)
        world.hit(model)
        (order,) = world.preparer.orders
        assert (order.request.path, order.request.package) == (str(model), "")
        assert (order.interpreter, list(order.search_path)) == (interpreter(), search_path())

    @pytest.mark.parametrize("path", ["m.onnx", "/m\0.onnx", "/" + "m" * 5000])
    def test_a_path_that_is_none(self, world: World, model: Path, path: str) -> None:
        with pytest.raises(MalformedMessage):
            world.ask(model, name=path)
        assert world.session.offers == {}

    def test_what_cannot_be_read(self, world: World, model: Path) -> None:
        world.session.offers[99] = Offer(messages.FileOffer(99), os.open(model, os.O_WRONLY))
        message = OpenPreparedRequest(99, str(model), "", RECIPE, "")
        with pytest.raises(AccessDenied):
            world.prepared.open(Request(world.session, 1, b"client"), message)
        with pytest.raises(AccessDenied):
            world.prepared.open(Request(world.session, 1, b"client"), message)

    def test_what_was_refused_when_it_was_offered(self, world: World, model: Path) -> None:
        """Whatever else the request offers is taken, too."""
        for ticket in (98, 99):
            offer = Offer(messages.FileOffer(ticket), os.open(model, os.O_RDONLY))
            world.session.offers[ticket] = offer
        world.session.offers[98].refuse(TooManyRequests("none is left"))
        externals = (messages.OfferedExternal("weights.bin", 99),)
        message = OpenPreparedRequest(98, str(model), "", RECIPE, "", externals=externals)
        with pytest.raises(TooManyRequests, match="none is left"):
            world.prepared.open(Request(world.session, 1, b"client"), message)
        assert world.session.offers == {}

    def test_an_empty_file(self, world: World, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        assert world.outcome(tmp_path / "empty") == "refused not_a_model"

    def test_too_many_leases(self, world: World, model: Path) -> None:
        world.make(model)
        for _ in range(5):
            world.hit(model)
        with pytest.raises(TooManyRequests, match="5 leases"):
            world.ask(model)

    def test_a_daemon_that_stops(self, world: World, model: Path) -> None:
        world.is_stopping = True
        with pytest.raises(DaemonUnavailable):
            world.ask(model)

    def test_a_young_file_is_waited_for(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_jobs, "_SETTLE_PATIENCE_S", 60.0)
        world = make_world(trusts_young_files=False)
        os.utime(model)
        world.make(model)
        (order,) = world.preparer.orders
        started = time.time_ns() - world.row().prepare_ns
        assert started > os.stat(model).st_ctime_ns
        world.hit(model)
        assert order.request.path == str(model)

    def test_how_long_it_took_whatever_the_clock_is_set_to(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = make_world()
        clock_ns = itertools.count(time.time_ns(), -3600 * 10**9)
        monkeypatch.setattr(time, "time_ns", lambda: next(clock_ns))
        world.make(model)
        assert 0 < world.row().prepare_ns < PATIENCE_S * 1e9

    def test_a_file_that_is_gone_when_its_turn_comes(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def is_settled(*_: object) -> bool:
            model.unlink()
            return True

        monkeypatch.setattr(prepared_jobs, "is_settled", is_settled)
        world = make_world(trusts_young_files=False)
        world.make(model)
        assert world.counters["prepared_failed"] == 1
        assert world.preparer.orders == [], "no process is started in vain"

    def test_a_file_from_the_future_is_not_prepared(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_jobs, "_SETTLE_PATIENCE_S", 0.05)
        world = make_world(trusts_young_files=False)
        os.utime(model, (time.time() + 3600, time.time() + 3600))
        world.make(model)
        assert world.outcome(model) == "refused unsettled_file"
        assert world.preparer.orders == []

    def test_a_file_without_a_change_time_is_not_prepared(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_jobs, "has_change_time", lambda *_: False)
        world = make_world()
        world.make(model)
        assert world.outcome(model) == "refused unsettled_file"
        assert world.preparer.orders == []

    def test_nor_is_one_whose_external_data_have_none(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: with data on an EROFS image, a session had those of the image before it."""

        def has_change_time(descriptor: int, identity: Identity) -> bool:
            return identity == identity_of(model)

        world = make_world()
        world.preparer.externals = ("w.bin",)
        model.with_name("w.bin").write_bytes(b"w" * 100)
        with monkeypatch.context() as patched:
            patched.setattr(prepared_jobs, "has_change_time", has_change_time)
            world.make(model)
        assert world.outcome(model) == "refused unsettled_file"
        assert world.preparer.verdicts == [False]
        assert world.prepared._store.recall(identity_of(model), str(model.parent)) is None

    def test_sealed_memory_cannot_change(
        self, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_jobs, "_SETTLE_PATIENCE_S", 0.0)
        monkeypatch.setattr(prepared_jobs, "is_settled", lambda identity, at_ns: False)
        world = make_world(trusts_young_files=False)
        world.make(data=b"sealed", digest=digest_of(b"sealed"))
        world.hit(digest=digest_of(b"sealed"))

    @pytest.mark.parametrize("kind", ["memory", "file"])
    def test_what_is_not_sealed_is_no_model_in_memory(
        self, world: World, model: Path, kind: str
    ) -> None:
        """Found: what was written to a mapping of it was served to all who have equal bytes."""
        descriptor = os.memfd_create("model") if kind == "memory" else os.open(model, os.O_RDWR)
        os.write(descriptor, b"open to all")
        offer = world.session.offers[99] = Offer(messages.FileOffer(99), descriptor)
        message = OpenPreparedRequest(99, "", digest_of(b"open to all"), RECIPE, "")
        reply = world.prepared.open(Request(world.session, 1, b"client"), message)
        assert reply is not None
        assert reply.reason == "unsettled_file"
        assert offer.descriptor < 0
        # Nobody else is refused because of it.
        world.make(data=b"open to all", digest=digest_of(b"open to all"))
        world.hit(digest=digest_of(b"open to all"))

    def test_what_others_may_write_stands_for_no_equal_file(
        self, world: World, model: Path, tmp_path: Path
    ) -> None:
        """Who has mapped a file may change it after it was hashed, and no time of it tells."""
        theirs = tmp_path / "theirs.onnx"
        shutil.copy(model, theirs)
        theirs.chmod(0o666)
        world.make(theirs)
        assert world.outcome(model) == "preparing"
        world.settle()
        assert world.preparer.verdicts == [True, True]
        assert world.hit(model).key != world.hit(theirs).key

    @pytest.mark.parametrize(
        "place", ["model", "file", "directory", "parent", "link", "linked model"]
    )
    def test_what_others_may_put_beside_a_model(
        self, world: World, model: Path, tmp_path: Path, place: str
    ) -> None:
        world.preparer.externals = ("sub/w.bin",)
        theirs = tmp_path / "theirs" / "models"
        (model.parent / "sub").mkdir()
        (model.parent / "sub" / "w.bin").write_bytes(b"w" * 100)
        shutil.copytree(model.parent, theirs)
        if place == "link":
            (theirs / "sub").rename(theirs / "data")
            (theirs / "sub").symlink_to("data")
        elif place == "linked model":
            (theirs / model.name).rename(theirs / "data.onnx")
            (theirs / model.name).symlink_to("data.onnx")
        else:
            spoilt = {
                "model": theirs / model.name,
                "file": theirs / "sub" / "w.bin",
                "directory": theirs / "sub",
                "parent": theirs.parent,
            }[place]
            spoilt.chmod(0o777)
        world.make(theirs / model.name)
        world.make(model)
        assert world.preparer.verdicts == [True, True]
        assert world.hit(model).key != world.hit(theirs / model.name).key

    def test_a_file_that_changes_while_it_is_prepared(self, world: World, model: Path) -> None:
        world.preparer.on_made = lambda _: model.write_bytes(b"changed")
        before = os.open(model, os.O_RDONLY)
        try:
            world.make(model)
        finally:
            os.close(before)
        assert world.files() == []
        assert world.counters["prepared_failed"] == 1


class TestRefusals:
    def test_a_lasting_one_survives_a_restart(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        world = make_world()
        world.preparer.reply = PrepareReply(reason="metadata_differs", message="other shapes")
        world.make(model)
        reply = world.ask(model)
        assert reply is not None
        assert (reply.outcome, reply.reason) == ("refused", "metadata_differs")
        assert reply.message == "other shapes"
        assert world.row().state == "refused"
        world.prepared.close()
        again = make_world()
        assert again.outcome(model) == "refused metadata_differs"
        assert again.preparer.orders == []

    def test_there_are_as_many_files_as_it_remembers(
        self, make_world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: those of forgotten refusals stayed until the next start, without a limit."""
        monkeypatch.setattr(prepared_refusals, "_REFUSALS_LIMIT", 2)
        world = make_world()
        world.preparer.reply = PrepareReply(reason="metadata_differs")
        for number in range(4):
            path = tmp_path / f"{number}.onnx"
            path.write_text(path.name)
            world.make(path)
        assert len(world.prepared.rows()) == len(world.files()) == 2

    def test_another_does_not(self, make_world: Callable[..., World], model: Path) -> None:
        world = make_world()
        world.preparer.reply = PrepareReply(reason="preparer_stalled", is_lasting=False)
        world.make(model)
        assert world.outcome(model) == "refused preparer_stalled"
        assert world.files() == []
        world.prepared.close()
        assert make_world().outcome(model) == "preparing"

    def test_what_one_file_is_an_equal_one_need_not_be(self, world: World, model: Path) -> None:
        equal = model.with_name("equal.onnx")
        equal.write_bytes(model.read_bytes())
        world.preparer.reply = PrepareReply(reason="unsettled_file", is_lasting=False)
        world.make(model)
        assert world.outcome(model) == "refused unsettled_file"
        world.preparer.reply = PrepareReply(probe="equal")
        world.make(equal)
        world.hit(equal)

    @pytest.mark.parametrize("reason", ["not_importable", "other_onnxruntime"])
    @pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "elsewhere"])
    def test_what_one_installation_lacks_another_may_have(
        self, world: World, model: Path, reason: str, is_elsewhere: bool
    ) -> None:
        """Found: a model was refused to all who have the same build of onnxruntime."""
        theirs = world.elsewhere() if is_elsewhere else {"package": "/frozen/onnxruntime"}
        world.preparer.reply = PrepareReply(reason=reason, is_lasting=False)
        world.make(model, **theirs)
        assert world.outcome(model, **theirs) == f"refused {reason}"
        world.preparer.reply = PrepareReply(probe="equal")
        world.make(model)
        world.hit(model)
        world.hit(model, **theirs)

    def test_two_deaths_are_lasting(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world.preparer.reply = PrepareReply(reason="preparer_died", is_lasting=False)
        world.make(model)
        now = time.time_ns()
        monkeypatch.setattr(prepared_module.time, "time_ns", lambda: now + 10**12)
        world.make(model)
        monkeypatch.setattr(prepared_module.time, "time_ns", lambda: now + 10**18)
        assert world.outcome(model) == "refused preparer_died"
        assert world.files()[0].endswith(".refused")

    def test_evicting_it_is_another_try(self, world: World, model: Path) -> None:
        world.preparer.reply = PrepareReply(reason="metadata_differs")
        world.make(model)
        assert world.prepared.evict(Request(world.session, 1, b"client"), _evict(str(model))) == (
            admin.EvictPreparedReply((), 0)
        )
        world.preparer.reply = PrepareReply(probe="equal")
        world.make(model)
        world.hit(model)
        assert [each for each in world.files() if each.endswith(".refused")] == []

    def test_what_the_preparer_did_not_write(self, world: World, model: Path) -> None:
        world.preparer.on_made = lambda each: os.unlink(each.request.directory + "/model.onnx")
        world.make(model)
        assert world.outcome(model) == "refused corrupt"
        assert world.files() == []

    def test_what_the_preparer_did_not_say(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(world.preparer, "run", lambda order, decide: PrepareReply())
        world.make(model)
        assert world.outcome(model) == "refused preparer_confused"
        assert world.files() == []

    def test_a_bug_in_the_thread_is_a_refusal(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(world.preparer, "run", fail)
        world.make(model)
        assert world.outcome(model) == "refused not_prepared"

    def test_too_little_memory(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_jobs, "available_bytes", lambda: 10_000)
        world.make(model)
        assert world.preparer.verdicts == [], "no process is started for it"
        assert world.outcome(model) == "refused no_memory"

    def test_too_little_memory_for_external_data(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its size is known once the preparer has looked inside."""
        available = iter([1 << 40, 10_000])
        monkeypatch.setattr(prepared_jobs, "available_bytes", lambda: next(available))
        world.make(model)
        assert world.preparer.verdicts == [False]
        assert world.outcome(model) == "refused no_memory"

    def test_files_in_memory_need_more_of_it(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = model.stat().st_size
        monkeypatch.setattr(prepared_jobs, "available_bytes", lambda: 8 * size)
        in_memory = Space(1 << 40, 1 << 40, is_memory=True)
        monkeypatch.setattr(prepared_jobs, "space_of", lambda directory: in_memory)
        world.make(model)
        assert world.outcome(model) == "refused no_memory"


class TestRoom:
    def test_the_least_recently_used_goes(
        self, make_world: Callable[..., World], tmp_path: Path
    ) -> None:
        world = make_world(budget=25_000)
        paths = []
        for number in range(3):
            paths.append(tmp_path / f"{number}.onnx")
            paths[-1].write_bytes(bytes([number]) * 6000)
            world.make(paths[-1])
        assert len(world.files()) == 3
        first = world.hit(paths[0])
        # Twice its size is reserved until it is made.
        fourth = tmp_path / "3.onnx"
        fourth.write_bytes(b"3" * 6000)
        world.make(fourth)
        assert first.key in world.files()
        assert os.path.exists(first.model)
        assert world.counters["prepared_dropped"] == 1
        assert world.outcome(paths[1]) == "preparing"
        world.settle()

    def test_the_preparer_goes_on_once_the_room_is_there(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = make_world(budget=25_000)
        world.make(model)
        other = model.with_name("other.onnx")
        other.write_bytes(bytes(12_000))
        found: list[list[str]] = []
        world.preparer.on_made = lambda _: found.append(
            [each for each in os.listdir(world.directory) if each.startswith(".removed-")]
        )
        delete = PreparedFiles.delete

        def delete_slowly(files: PreparedFiles, path: str) -> None:
            time.sleep(0.3 if path else 0)
            delete(files, path)

        monkeypatch.setattr(PreparedFiles, "delete", delete_slowly)
        world.make(other)
        assert world.counters["prepared_dropped"] == 1
        assert found == [[]]

    def test_what_is_larger_than_the_budget(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        world = make_world(budget=9_999)
        world.make(model)
        reply = world.ask(model)
        assert reply is not None
        assert (reply.outcome, reply.reason) == ("refused", "no_space")
        assert "TRIMS_PREPARED_BYTES" in reply.message
        assert world.files() == []

    @pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "elsewhere"])
    @pytest.mark.parametrize("missing_bytes", [0, 1])
    def test_a_disk_that_is_full(
        self,
        world: World,
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
        missing_bytes: int,
        is_elsewhere: bool,
    ) -> None:
        """Files of another container are copied, too."""
        spare_bytes = (25_000 if is_elsewhere else 20_000) - missing_bytes
        space = Space(10**12, spare_bytes, is_memory=False)
        monkeypatch.setattr(prepared_jobs, "space_of", lambda _: space)
        theirs = world.elsewhere() if is_elsewhere else {}
        world.make(model, **theirs)
        assert world.outcome(model, **theirs) == ("refused no_space" if missing_bytes else "hit")
        assert world.preparer.verdicts == [not missing_bytes]

    def test_a_disk_that_fills_up_meanwhile(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(path: str, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("trims_shim.daemon.prepared.files._write", full)
        world.make(model)
        assert world.outcome(model) == "refused not_prepared"
        assert world.files() == []


class TestDamage:
    @pytest.mark.parametrize("name", ["model", "weights"])
    def test_it_is_made_again(self, world: World, model: Path, name: str) -> None:
        world.make(model)
        reply = world.hit(model)
        os.unlink(getattr(reply, name))
        world.make(model)
        assert world.counters["prepared_damaged"] == 1
        assert world.prepared.lease_count() == 0, "its leases went with it"
        world.prepared.release(world.session.number, reply.lease)
        again = world.hit(model)
        assert again.key == reply.key
        assert os.path.exists(getattr(again, name))

    def test_the_whole_directory_is_gone(self, world: World, model: Path) -> None:
        world.make(model)
        world.end_aside()
        shutil.rmtree(world.directory.parent)
        world.make(model)
        world.hit(model)


class TestRestart:
    def test_what_was_used_last_is_known_also_if_the_clock_was_set_back(
        self, make_world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: no use was noted until the clock had caught up, and the wrong model went first."""
        world = make_world()
        last, other = tmp_path / "last.onnx", tmp_path / "other.onnx"
        for path in (last, other):
            path.write_text(path.name)
            world.make(path)
            world.hit(path)
        day_before_ns, later_ns = time.time_ns() - 86400 * 10**9, clock.now_ns() + 61 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: day_before_ns)
        monkeypatch.setattr(clock, "now_ns", lambda: later_ns)
        world.hit(last)
        world.prepared.close()
        rows = make_world().prepared.rows()
        assert [each.names for each in rows] == [(str(last),), (str(other),)]

    def test_what_was_there_is_a_hit_at_once(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        world = make_world()
        world.make(model)
        before = world.hit(model)
        world.prepared.close()
        again = make_world()
        reply = again.hit(model)
        assert (reply.key, reply.model_identity) == (before.key, before.model_identity)
        assert again.preparer.orders == []
        assert again.row().names == (str(model),)

    def test_what_was_made_for_another_processor_is_not_served(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = make_world()
        world.make(model)
        world.prepared.close()
        monkeypatch.setattr(prepared_module, "cpu_identity", lambda: "another")
        again = make_world()
        again.make(model)
        assert again.preparer.verdicts == [True]

    def test_what_was_learned_later_is_known_too(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        world = make_world()
        world.make(model)
        copy = model.with_name("copy.onnx")
        shutil.copy(model, copy)
        world.make(copy)
        world.prepared.close()
        again = make_world()
        again.hit(copy)
        again.hit(model)

    def test_who_asks_early_is_answered_later(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        make_world().make(model)
        world = make_world(is_started=False)
        assert world.ask(model) is None
        assert world.prepared.evict(Request(world.session, 8, b"client"), _evict("/other")) is None
        gone = world.join()
        assert world.ask(model, session=gone) is None
        world.prepared.close_session(gone.number)
        gone.offers.popitem()[1].close()
        assert world.prepared.is_needed()
        world.prepared.start()
        world.turn()
        (first, hit), (second, error) = world.replies
        assert (first, second) == (7, 8)
        assert hit.outcome == "hit"
        assert error.error == "UnknownImage"

    def test_only_so_many_may_be_early(self, make_world: Callable[..., World], model: Path) -> None:
        world = make_world(is_started=False)
        for _ in range(4):
            world.ask(digest="0" * 64)
        with pytest.raises(TooManyRequests):
            world.ask(digest="0" * 64)

    def test_two_daemons_share_a_directory(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        first, second = make_world(), make_world()
        first.make(model)
        second.make(model)
        assert second.preparer.verdicts == [False], "it is there already"
        assert second.hit(model).key == first.hit(model).key
        first.prepared.release(first.session.number, 2)
        first.prepared.close_session(first.session.number)
        first.prepared.evict(Request(first.session, 1, b"client"), _evict())
        first.end_aside()
        second.make(model)
        assert second.counters["prepared_damaged"] == 0, "the other one has evicted it"
        second.hit(model)

    def test_what_another_daemon_has_made_again_is_not_damaged(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        first, second = make_world(), make_world()
        first.make(model)
        second.make(model)
        second.prepared.evict(Request(second.session, 1, b"client"), _evict())
        second.end_aside()
        second.make(model)
        assert second.preparer.verdicts == [False, True]
        reply = second.hit(model)
        assert first.hit(model).model_identity == reply.model_identity
        assert first.counters["prepared_damaged"] == 0
        assert os.path.exists(reply.model)

    def test_a_smaller_budget(self, make_world: Callable[..., World], model: Path) -> None:
        make_world().make(model)
        world = make_world(budget=10)
        assert world.files() == []

    def test_no_budget_drops_nothing(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: where the size of the file system could not be asked for, all models went."""

        def fail(_: str) -> Space:
            raise OSError(errno.EMFILE, "Too many open files")

        world = make_world()
        world.make(model)
        key = world.row().key
        world.prepared.close()
        with monkeypatch.context() as patch:
            patch.setattr(prepared_module, "space_of", fail)
            unlucky = make_world()
        assert unlucky.outcome(model) == "refused prepared_off"
        assert unlucky.files() == [key]

    def test_two_versions_take_turns(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: each deleted what the other had made. Now both count, and what is older goes."""
        world = make_world()
        world.make(model)
        size_bytes = world.row().size_bytes
        world.prepared.close()
        with monkeypatch.context() as patch:
            for module in (prepared_key, prepared_files, prepared_jobs):
                patch.setattr(module, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
            newer = make_world()
            newer.make(model)
            newer.hit(model)
            assert newer.prepared.storage().resident_bytes > 2 * size_bytes
            newer.prepared.close()
        again = make_world()
        again.hit(model)
        assert again.preparer.orders == []
        assert len(again.files()) == 2
        again.prepared.close()
        small = make_world(budget=2 * size_bytes)
        small.hit(model)
        assert len(small.files()) == 1

    def test_what_is_said_to_be_of_another_version(
        self, make_world: Callable[..., World], model: Path
    ) -> None:
        """Under a key of this version: damage."""
        world = make_world()
        world.make(model)
        record = world.directory / world.row().key / "entry.json"
        world.prepared.close()
        text = record.read_text().replace(f'"layout": {LAYOUT_VERSION}', '"layout": 0')
        record.unlink()
        record.write_text(text)
        again = make_world()
        again.make(model)
        again.make(model)
        again.hit(model)

    def test_use_is_noted_for_the_next_one(self, world: World, model: Path) -> None:
        world.make(model)
        world.end_aside()
        key = world.files()[0]
        os.utime(world.directory / key, (10, 10))
        world.hit(model)
        world.end_aside()
        used = os.stat(world.directory / key).st_mtime
        assert used > 10
        os.utime(world.directory / key, (10, 10))
        world.hit(model)
        world.end_aside()
        assert os.stat(world.directory / key).st_mtime == 10, "once a minute is enough"


class TestOff:
    def test_by_its_settings(self, make_world: Callable[..., World], model: Path) -> None:
        world = make_world(problem="TRIMS_PREPARED_BYTES=0")
        reply = world.ask(model)
        assert reply is not None
        assert (reply.outcome, reply.reason) == ("refused", "prepared_off")
        assert "TRIMS_PREPARED_BYTES=0" in reply.message
        assert world.prepared.storage().problem == "TRIMS_PREPARED_BYTES=0"
        assert not world.directory.exists()

    def test_by_a_directory_that_cannot_be_used(
        self, make_world: Callable[..., World], model: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o777)
        world = make_world(tmp_path / "shared" / "prepared")
        assert world.outcome(model) == "refused prepared_off"
        assert "writable by others" in world.prepared.storage().problem
        assert world.session.offers == {}

    def test_a_directory_that_can_be_used_again(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: there were no prepared models until the daemon's end, which may be months."""
        world = make_world()
        world.make(model)
        world.prepared.close()
        world.directory.chmod(0o777)
        again = make_world()
        assert again.outcome(model) == "refused prepared_off"
        again.end_aside()
        assert again.woken.empty(), "not yet"
        world.directory.chmod(0o700)
        monkeypatch.setattr(again.prepared, "_look_again_s", 0.0)
        assert again.outcome(model) == "refused prepared_off"
        again.turn()
        again.hit(model)
        assert again.prepared.storage().problem == ""
        assert again.preparer.orders == []

    def test_a_scan_that_fails_is_no_silence(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also for those who have asked before."""

        def fail(self: Any) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr("trims_shim.daemon.prepared.files.PreparedFiles.open", fail)
        world = make_world(is_started=False)
        assert world.ask(model) is None
        world.prepared.start()
        world.turn()
        ((_, early),) = world.replies
        assert (early.outcome, early.reason) == ("refused", "prepared_off")
        assert world.outcome(model) == "refused prepared_off"


class TestEviction:
    def test_by_name_by_key_and_all(self, world: World, tmp_path: Path) -> None:
        paths = [tmp_path / f"{number}.onnx" for number in range(3)]
        for path in paths:
            path.write_bytes(path.name.encode() * 100)
            world.make(path)
        first = world.hit(paths[0])
        second = world.hit(paths[1])
        world.prepared.release(world.session.number, second.lease)
        with pytest.raises(NoSpace, match="in use"):
            world.prepared.evict(Request(world.session, 1, b"client"), _evict(str(paths[0])))
        reply = world.prepared.evict(Request(world.session, 1, b"client"), _evict(second.key[:10]))
        assert reply is not None
        assert reply.keys == (second.key,)
        assert reply.freed_bytes == 600 + len(b"prepared ") + len(b"packed weights")
        reply = world.prepared.evict(Request(world.session, 1, b"client"), _evict())
        assert reply is not None
        assert len(reply.keys) == 1
        assert world.files() == [first.key]
        with pytest.raises(UnknownImage):
            world.prepared.evict(Request(world.session, 1, b"client"), _evict("/nothing"))
        world.make(paths[2])
        assert world.counters["prepared_damaged"] == 0, "it was meant to go"

    def test_what_cannot_be_looked_at_stays(
        self, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths = [tmp_path / f"{number}.onnx" for number in range(2)]
        for path in paths:
            path.write_bytes(path.name.encode() * 100)
        world.make(paths[0])
        (first,) = world.files()
        lstat = os.lstat

        def failing(path: Any, **keywords: Any) -> os.stat_result:
            if path == str(world.directory / first):
                raise OSError(errno.EIO, "the disk")
            return lstat(path, **keywords)

        monkeypatch.setattr(prepared_files.os, "lstat", failing)
        world.make(paths[1])
        monkeypatch.undo()
        assert [world.outcome(path) for path in paths] == ["hit", "hit"]
        assert len(world.preparer.orders) == 2

    def test_what_another_daemon_has_evicted_takes_no_room(
        self, make_world: Callable[..., World], tmp_path: Path
    ) -> None:
        """Found: it did until the next start, and was evicted a second time."""
        paths = [tmp_path / f"{number}.onnx" for number in range(3)]
        for path in paths:
            path.write_bytes(path.name.encode() * 100)
        world = make_world()
        for path in paths[:2]:
            world.make(path)
        other = make_world()
        other.prepared.evict(Request(other.session, 1, b"client"), _evict(str(paths[0])))
        world.make(paths[2])
        assert {row.names for row in world.prepared.rows()} == {(str(each),) for each in paths[1:]}
        other.prepared.evict(Request(other.session, 1, b"client"), _evict(str(paths[1])))
        with pytest.raises(UnknownImage):
            world.prepared.evict(Request(world.session, 1, b"client"), _evict(str(paths[1])))
        (left,) = world.prepared.rows()
        assert world.prepared.storage().resident_bytes == left.size_bytes

    def test_what_cannot_be_removed_stays(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: on a file system that had become read-only, models were said to be evicted.

        They were neither served nor counted any more, and not evicted once it could be written.
        """

        def evict() -> admin.EvictPreparedReply | None:
            return world.prepared.evict(Request(world.session, 1, b"client"), _evict())

        world.make(model)
        size_bytes = world.row().size_bytes
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", _refuse_to_write)
            with pytest.raises(NoSpace, match=r"1 of 1 prepared models cannot be removed from /"):
                evict()
            world.end_aside()
        assert world.prepared.storage().resident_bytes == size_bytes
        assert world.counters["prepared_dropped"] == 0
        reply = world.hit(model)
        world.prepared.release(world.session.number, reply.lease)
        assert evict() == admin.EvictPreparedReply((reply.key,), size_bytes)
        assert world.files() == []

    def test_one_of_another_layout_that_cannot_be_removed(
        self, make_world: Callable[..., World], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: it was said to be evicted."""
        before = make_world()
        with monkeypatch.context() as patch:
            for module in (prepared_files, prepared_jobs, prepared_key):
                patch.setattr(module, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
            before.make(model)
        before.prepared.close()
        world = make_world()
        assert world.row().state == "ready"
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", _refuse_to_write)
            with pytest.raises(NoSpace, match="1 of 1 prepared models cannot be removed"):
                world.prepared.evict(Request(world.session, 1, b"client"), _evict())
            world.end_aside()
        assert len(world.files()) == 1

    def test_what_is_damaged_does_not_stay(
        self, world: World, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world.make(model)
        os.unlink(world.directory / world.row().key / "model.onnx")
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", _refuse_to_write)
            world.make(model)
        assert world.outcome(model) == "refused not_prepared"
        assert world.prepared.storage().resident_bytes == 0

    def test_it_is_not_for_others(self, world: World) -> None:
        other = world.join(uid=os.geteuid() + 1)
        with pytest.raises(AccessDenied):
            world.prepared.evict(Request(other, 1, b"client"), _evict())


def _refuse_to_write(*_: str) -> NoReturn:
    raise OSError(errno.EROFS, "Read-only file system")


def _evict(model: str = "") -> admin.EvictPreparedRequest:
    return admin.EvictPreparedRequest(model)


def test_storage(world: World, model: Path) -> None:
    world.make(model)
    storage = world.prepared.storage()
    assert storage.directory == str(world.directory)
    assert storage.budget_bytes == 16 * MIB
    assert storage.resident_bytes == world.row().size_bytes == 5023
    assert storage.problem == ""
