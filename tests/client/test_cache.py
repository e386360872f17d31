"""The cache and its connections, on lines that a test makes up; real daemons are in faults."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENCE_S

import trims_shim
from trims_shim import config, diagnostics
from trims_shim.client import cache as caches
from trims_shim.client import device_arenas, pool
from trims_shim.client.arenas import Image
from trims_shim.client.cache import Cache, exchange
from trims_shim.client.connection import DaemonDied, Granted, check_protocol
from trims_shim.errors import (
    DaemonStartFailed,
    DaemonTimeout,
    DaemonUnavailable,
    IncompatibleDaemon,
    LoadStalled,
    NoSpace,
    NotServed,
    TooManyRequests,
    TrimsError,
    UnknownImage,
    UnsupportedFormat,
    WireError,
)
from trims_shim.specs import Variant
from trims_shim.testing import FakeDaemon
from trims_shim.wire import handover, messages

WELCOME = messages.Welcome(messages.PROTOCOL_VERSION, "1", 1, "i", b"t")


class StubLine:
    """Answers every request with what ``answer`` returns or raises."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.welcome = WELCOME
        self.answer = answer
        self.is_open = True
        self.is_closed = False
        self.is_current = True
        self.may_go_on = False
        self.reported: dict[str, int] = {}

    def open_image(
        self, descriptor: int, name: str, *, tier: str = "host", is_numbers: bool = False
    ) -> Granted:
        granted: Granted = self.answer(name)
        return granted

    def open_variant(self, descriptor: int, name: str, variant: Variant) -> Granted | None:
        granted: Granted | None = self.answer(name)
        return granted

    def request(self, message: Any) -> Any:
        return self.answer(message)

    def report(self, counters: dict[str, int]) -> None:
        self.reported = counters

    def release(self, lease: int) -> None: ...

    def withdraw(self) -> bool:
        return self.may_go_on

    def is_alive(self) -> bool:
        return self.is_open

    def is_replaced(self) -> bool:
        return not self.is_current

    def close(self) -> None:
        self.is_open = False
        self.is_closed = True


class Dialled:
    """A cache whose lines are recorded."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.lines: list[StubLine] = []
        self.answer = answer
        self.cache = Cache(config.load(None, autostart="0"), dial=self.dial)

    def dial(self) -> StubLine:
        self.lines.append(StubLine(self.answer))
        return self.lines[-1]


def fail(error: Exception) -> Callable[[Any], Any]:
    def answer(_: Any) -> Any:
        raise error

    return answer


def grant(size_bytes: int, *, is_settled: bool = True) -> Granted:
    segment = os.memfd_create("segment")
    os.truncate(segment, size_bytes)
    reply = messages.OpenImageReply(1, "a" * 64, size_bytes, "hit", is_settled)
    return Granted(reply, segment)


def test_a_line_is_used_again() -> None:
    dialled = Dialled(lambda message: message)
    assert [dialled.cache.request(number) for number in range(3)] == [0, 1, 2]
    assert len(dialled.lines) == 1


def test_an_interrupt_while_an_image_is_noted(
    no_leak: None, make_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: its descriptor was lost, and with it the memory."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    dialled = Dialled(lambda name: grant(4096))
    with (
        open(make_file(b"x" * 4096), "rb") as file,
        monkeypatch.context() as patch,
        contextlib.suppress(KeyboardInterrupt),
    ):
        patch.setattr(caches, "_note", interrupted)
        dialled.cache.open(file.fileno(), name="x", min_bytes=1)
    assert [each.is_open for each in dialled.lines] == [False]


@pytest.mark.parametrize("is_settled", [True, False])
def test_what_may_still_change_is_asked_for_again(
    no_leak: None,
    make_file: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    is_settled: bool,
) -> None:
    """With the same times and size, a file that was written just now can get other bytes."""
    asked: list[str] = []

    def answer(name: str) -> Granted:
        asked.append(name)
        return grant(4096, is_settled=is_settled)

    arena = types.SimpleNamespace(digest="a" * 64, size_bytes=4096)
    monkeypatch.setattr(device_arenas, "adopt", lambda *_, **__: arena)
    digest = arena.digest if is_settled else ""
    with open(make_file(b"x" * 4096), "rb") as file:
        cache = Dialled(answer).cache
        cache.open_device(file.fileno(), name="x", device="GPU-1", min_bytes=1)
        assert cache.digest_of(file.fileno()) == digest
        cache, asked[:] = Dialled(answer).cache, []
        arenas = [cache.open(file.fileno(), name="x", min_bytes=1) for _ in range(2)]
        assert cache.digest_of(file.fileno()) == digest
    assert len(asked) == (1 if is_settled else 2)
    del arenas


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_full_device_is_asked_again_if_we_gave_memory_back(
    no_leak: None,
    make_file: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    is_dropped: bool,
) -> None:
    """An earlier model of this program may not have been unmapped yet."""
    dropped: list[float] = []
    asked: list[str] = []

    def answer(name: str) -> Granted:
        asked.append(name)
        if not dropped:
            raise NoSpace("full")
        return grant(4096)

    arena = types.SimpleNamespace(digest="a" * 64, size_bytes=4096)
    monkeypatch.setattr(device_arenas, "adopt", lambda *_, **__: arena)
    monkeypatch.setattr(device_arenas, "dropped", lambda: len(dropped))
    monkeypatch.setattr(device_arenas, "reap", dropped.append if is_dropped else lambda _: None)
    with (
        open(make_file(b"x" * 4096), "rb") as file,
        contextlib.nullcontext() if is_dropped else pytest.raises(NoSpace),
    ):
        Dialled(answer).cache.open_device(file.fileno(), name="x", device="GPU-1", min_bytes=1)
    assert len(asked) == (2 if is_dropped else 1)


@pytest.mark.parametrize("size_bytes", [4096, 4103, 4105])
def test_an_image_with_a_lead_of_another_size(no_leak: None, size_bytes: int) -> None:
    """Its bytes would be taken for those of the image."""
    dialled = Dialled(lambda name: grant(size_bytes))
    image = Image(os.memfd_create("m"), 4096, digest="b" * 64, name="m")
    with pytest.raises(WireError, match=f"{size_bytes} bytes for 4096"):
        dialled.cache.variant(image, Variant(8))


def test_a_daemon_without_the_image_with_a_lead_is_asked_again(no_leak: None) -> None:
    answers = iter([None, grant(4096 + 8)])
    dialled = Dialled(lambda name: next(answers))
    image = Image(os.memfd_create("m"), 4096, digest="b" * 64, name="m")
    assert dialled.cache.variant(image, Variant(8)) is None
    assert dialled.cache.variant(image, Variant(8)) is not None
    assert len(dialled.lines) == 1


def test_an_image_with_a_lead_is_kept_until_it_is_closed(no_leak: None) -> None:
    dialled = Dialled(lambda name: grant(4096 + 8))
    image = Image(os.memfd_create("m"), 4096, digest="b" * 64, name="m")
    first = dialled.cache.variant(image, Variant(8))
    assert first is not None
    assert dialled.cache.variant(image, Variant(8)) is first
    first.release()
    second = dialled.cache.variant(image, Variant(8))
    assert second is not None
    assert second.is_open


def test_a_line_that_ended_meanwhile_is_replaced() -> None:
    dialled = Dialled(lambda message: message)
    dialled.cache.request(1)
    dialled.lines[0].is_open = False
    dialled.cache.request(2)
    assert [line.is_closed for line in dialled.lines] == [True, False]


def test_a_line_to_a_daemon_that_was_replaced_is_kept_for_its_leases() -> None:
    dialled = Dialled(lambda message: message)
    dialled.cache.request(1)
    dialled.lines[0].is_current = False
    dialled.cache.request(2)
    assert [line.is_closed for line in dialled.lines] == [False, False]
    dialled.cache.close()
    assert [line.is_closed for line in dialled.lines] == [True, True]


@pytest.mark.parametrize("error", [UnknownImage("no"), UnsupportedFormat("no model")])
def test_a_refusal_keeps_the_line(error: TrimsError) -> None:
    dialled = Dialled(fail(error))
    for _ in range(2):
        with pytest.raises(type(error)):
            dialled.cache.request(1)
    assert len(dialled.lines) == 1


@pytest.mark.parametrize("error", [DaemonTimeout("slow"), ValueError("a bug")])
def test_any_other_error_gives_it_up(error: Exception) -> None:
    """A late answer must not become that of the next request."""
    dialled = Dialled(fail(error))
    with pytest.raises(type(error)):
        dialled.cache.request(1)
    assert not dialled.lines[0].is_open


def test_one_whose_load_can_be_withdrawn_is_kept() -> None:
    dialled = Dialled(fail(DaemonTimeout("slow")))
    dialled.cache.welcome()
    (line,) = dialled.lines
    line.may_go_on = True
    with pytest.raises(DaemonTimeout):
        dialled.cache.request(1)
    assert line.is_open
    assert dialled.cache.welcome() == WELCOME
    assert dialled.lines == [line]


def test_of_two_that_fail_in_turn_one_is_kept() -> None:
    """Found: near the limit of open files, each load kept a further one, until none were left."""

    def answer(_: Any) -> Any:
        for line in dialled.lines:
            line.may_go_on = True
        raise DaemonUnavailable("this process has too few descriptors left")

    dialled = Dialled(answer)
    for _ in range(3):
        with pytest.raises(DaemonUnavailable):
            dialled.cache._pool.ask(lambda line: line.request(1), may_start=True)
    assert [line.is_open for line in dialled.lines] == [True, False, False, False]


def test_one_that_has_ended_meanwhile_is_not() -> None:
    def answer(_: Any) -> Any:
        dialled.lines[0].may_go_on, dialled.lines[0].is_open = True, False
        raise DaemonTimeout("slow")

    dialled = Dialled(answer)
    with pytest.raises(DaemonTimeout):
        dialled.cache.request(1)
    assert dialled.cache._pool._idle == []


def test_idle_connections_are_used_in_turn() -> None:
    used: list[int] = []

    def nested(depth: int) -> None:
        if depth:
            dialled.cache.request(depth - 1)

    dialled = Dialled(nested)
    dialled.cache.request(2)  # needs three at a time
    assert len(dialled.lines) == 3
    for number, line in enumerate(dialled.lines):
        line.answer = lambda _, number=number: used.append(number)
    for _ in range(3):
        dialled.cache.request(0)
    assert sorted(used) == [0, 1, 2]


def test_an_interrupt_while_it_is_looked_at_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    dialled = Dialled(lambda message: message)
    dialled.cache.request(1)
    (line,) = dialled.lines
    with monkeypatch.context() as patch:
        patch.setattr(line, "is_alive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dialled.cache.request(1)
    assert dialled.cache.request(2) == 2
    assert dialled.lines == [line]


def test_nonsense_costs_the_connection() -> None:
    dialled = Dialled(fail(WireError("nonsense")))
    dialled.cache.welcome()
    dialled.lines[0].may_go_on = True
    with pytest.raises(WireError):
        dialled.cache.request(1)
    assert not dialled.lines[0].is_open


def test_once_more_when_the_daemon_went_away() -> None:
    answers = [fail(DaemonUnavailable("gone")), lambda message: message]
    dialled = Dialled(lambda message: answers.pop(0)(message))
    assert dialled.cache._pool.ask(lambda line: line.request(5), may_start=True) == 5
    assert len(dialled.lines) == 2


def test_not_more_than_once() -> None:
    dialled = Dialled(fail(DaemonUnavailable("gone")))
    with pytest.raises(DaemonUnavailable):
        dialled.cache._pool.ask(lambda line: line.request(5), may_start=True)
    assert len(dialled.lines) == 2


def test_what_a_signal_handler_has_ended_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool.diagnostics, "signalled", lambda error: error)
    dialled = Dialled(fail(DaemonUnavailable("interrupted")))
    with pytest.raises(DaemonUnavailable):
        dialled.cache._pool.ask(lambda line: line.request("once"), may_start=True)
    assert len(dialled.lines) == 1


def test_lines_are_limited() -> None:
    entered, leave = threading.Semaphore(0), threading.Event()

    def answer(message: Any) -> Any:
        entered.release()
        leave.wait(PATIENCE_S)
        return message

    dialled = Dialled(answer)
    threads = [threading.Thread(target=dialled.cache.request, args=(n,)) for n in range(16)]
    for each in threads:
        each.start()
    for _ in threads:
        assert entered.acquire(timeout=PATIENCE_S)
    with pytest.raises(TooManyRequests):
        dialled.cache.request(99)
    leave.set()
    for each in threads:
        each.join(PATIENCE_S)
    assert dialled.cache.request(100) == 100
    assert len(dialled.lines) == 16


@pytest.mark.timeout(20)
def test_a_signal_handler_may_load_in_the_midst_of_a_load() -> None:
    dialled = Dialled(lambda message: message)
    nested: list[int] = []

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (caches.__file__, pool.__file__):
            return None
        nested.append(dialled.cache.request(1))
        return trace

    sys.settrace(trace)
    try:
        dialled.cache.request(2)
        dialled.cache.close()
    finally:
        sys.settrace(None)
    assert len(nested) > 20
    assert dialled.cache.request(3) == 3


def test_a_start_that_fails_is_not_tried_for_each_file(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[object] = []

    def start(endpoint: object, *, timeout_s: float, has_group: bool) -> None:
        starts.append(endpoint)
        raise DaemonStartFailed("no /proc")

    monkeypatch.setattr(pool.spawn, "start", start)
    cache = Cache(config.load({}, socket_dir=str(socket_directory)))
    for _ in range(3):
        with pytest.raises(DaemonStartFailed, match="no /proc"):
            cache.welcome(may_start=True)
    assert len(starts) == 1
    later = time.monotonic() + pool._LEAST_PAUSE_S
    monkeypatch.setattr(pool.time, "monotonic", lambda: later)
    with pytest.raises(DaemonStartFailed):
        cache.welcome(may_start=True)
    assert len(starts) == 2


def test_a_version_with_digits_that_are_no_number() -> None:
    """Found: the load failed with ValueError, which is none of this package's errors."""
    assert pool.is_older(messages.Welcome(messages.PROTOCOL_VERSION, "0.0.²", 1, "i", b"t"))


def test_a_downgrade_to_another_protocol_of_the_same_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found, with two states of the repository: each load replaced the daemon by its like."""
    protocol = messages.PROTOCOL_VERSION
    older = messages.Welcome(protocol, trims_shim.__version__, 1, "i", b"t")
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", protocol + 1)
    assert not pool.is_older(older)
    assert pool.is_older(older._replace(protocol=protocol - 1))


def test_an_upgrade_under_this_process_does_not_replace_a_daemon_of_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "installed_constant", lambda *_: "999")
    assert not pool.is_older(WELCOME._replace(package=trims_shim.__version__))
    assert pool.is_older(WELCOME._replace(package="0.0.1"))


@pytest.mark.parametrize("may_start", [True, False])
def test_a_daemon_that_hangs_is_asked_less_and_less(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch, may_start: bool
) -> None:
    cache = Cache(config.load({}, socket_dir=str(socket_directory)))
    asked: list[int] = []
    now_s = 0

    def hang(line: object) -> None:
        asked.append(now_s)
        raise DaemonTimeout("it hangs")

    connections = cache._pool
    monkeypatch.setattr(connections, "_ask_twice", lambda ask, may_start: ask(None))
    monkeypatch.setattr(pool.time, "monotonic", lambda: now_s)
    while now_s < 200:
        with pytest.raises(DaemonTimeout, match="it hangs"):
            connections.ask(hang, may_start=may_start)
        now_s += 1
    assert asked == [0, 5, 15, 35, 75, 135, 195]
    Path(cache.endpoint.handover).touch()  # another one
    assert connections.ask(lambda line: "answer", may_start=may_start) == "answer"
    with pytest.raises(DaemonTimeout):
        connections.ask(hang, may_start=may_start)
    assert connections._pause is not None
    assert connections._pause.length_s == pool._LEAST_PAUSE_S, "it had answered"


def test_a_pause_ends_with_the_clock_of_which_it_was(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, with freezegun: after a failure in its time no daemon was asked any more."""
    connections = Cache(config.load({}, socket_dir=str(socket_directory)))._pool

    def hang(line: object) -> None:
        raise DaemonTimeout("it hangs")

    monkeypatch.setattr(connections, "_ask_twice", lambda ask, may_start: ask(None))
    with monkeypatch.context() as stopped:
        stopped.setattr(pool.time, "monotonic", lambda: 1.7e9)
        for _ in range(2):
            with pytest.raises(DaemonTimeout):
                connections.ask(hang, may_start=True)
    assert connections.ask(lambda line: "answer", may_start=True) == "answer"


def test_a_daemon_that_dies_of_each_request_is_left_alone(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(config.load({}, socket_dir=str(socket_directory)))
    listener = handover.new_socket()
    listener.bind(cache.endpoint.handover)
    listener.listen()
    taken: list[None] = []

    def die_each_time() -> None:
        while True:
            connection, _ = listener.accept()
            connection.recv(1)
            taken.append(None)
            connection.close()

    threading.Thread(target=die_each_time, daemon=True).start()
    starts: list[object] = []
    monkeypatch.setattr(pool.spawn, "start", lambda endpoint, **_: starts.append(endpoint))
    for _ in range(3):
        with pytest.raises(DaemonDied):
            cache.welcome(may_start=False)
    assert len(taken) == 3, "somebody may start another one at any time"
    for _ in range(3):
        with pytest.raises(DaemonDied, match="has closed"):
            cache.welcome(may_start=True)
    assert len(starts) == 1
    asked = len(taken)
    later = time.monotonic() + pool._LEAST_PAUSE_S
    monkeypatch.setattr(pool.time, "monotonic", lambda: later)
    with pytest.raises(DaemonDied):
        cache.welcome(may_start=True)
    assert len(starts) == 2
    assert len(taken) > asked


def test_a_load_that_stalls_is_no_reason_to_ask_for_no_other(socket_directory: Path) -> None:
    cache = Cache(config.load({}, socket_dir=str(socket_directory)))
    line = StubLine(fail(LoadStalled("a dead disk")))
    cache._pool._idle = [line]
    with pytest.raises(LoadStalled):
        cache.request("slow")
    cache._pool._idle = [StubLine(lambda message: message)]
    assert cache.request("quick") == "quick"


def test_at_exit_counters_are_reported() -> None:
    dialled = Dialled(lambda message: message)
    dialled.cache.request(1)
    diagnostics.count("a_test", "ends", amount=3)
    dialled.cache.close()
    assert dialled.lines[0].reported["a_test:ends"] == 3
    assert not dialled.lines[0].is_open


def test_whoever_follows_loads_hears_what_became_of_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only of those that the framework's own loader made."""
    path = tmp_path / "model"
    path.write_bytes(bytes(1000))
    with FakeDaemon(), open(path, "rb") as file, caplog.at_level("DEBUG", "trims_shim"):
        kept = [caches.cache().open(file.fileno(), name="model", min_bytes=1) for _ in range(2)]
        assert len(kept) == 2
    assert caplog.messages == ["model: from the cache (miss)", "model: from the cache (local)"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/", "not_regular"), ("/dev/null", "not_regular"), (__file__, "small_file")],
)
def test_what_is_not_worth_asking_for(path: str, reason: str) -> None:
    dialled = Dialled(fail(AssertionError("asked")))
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(NotServed) as caught:
        dialled.cache.open(descriptor, name=path, min_bytes=1 << 40)
    assert caught.value.reason == reason
    os.close(descriptor)


@pytest.mark.parametrize(
    ("exclude", "is_excluded"),
    [
        ("", False),
        ("{0}/model.pt", True),
        ("{0}/*.pt", True),
        ("*.pt", True),
        ("/*/model.??", True),
        ("/elsewhere:{1}/*", True),
        ("{0}", False),
        ("*/model", False),
        ("*.PT", False),
    ],
)
def test_excluded_files(exclude: str, is_excluded: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(bytes(1000))
    patterns = exclude.format(tmp_path, tmp_path.parent)
    with FakeDaemon(exclude=patterns) as daemon, open(path, "rb") as file:
        refused = pytest.raises(NotServed, match=f"{path} is excluded")
        with refused if is_excluded else contextlib.nullcontext():
            caches.cache().open(file.fileno(), name=str(path))
        assert daemon.reads(path) == (not is_excluded)
        assert caches.cache().open(file.fileno(), name=str(path), min_bytes=1), "asked for by name"


def test_exchange_gives_the_one_before_back() -> None:
    mine = Dialled(fail(AssertionError())).cache
    before = exchange(mine)
    assert exchange(before) is mine


def test_each_effective_user_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: what had loaded as root went on to ask root's daemon as its own user, in vain."""
    before = exchange(mine := Dialled(fail(AssertionError())).cache)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        theirs = caches.cache()
        assert theirs is caches.cache() is exchange(None)
    assert theirs is not mine
    assert exchange(before) is mine


@pytest.mark.parametrize(
    "welcome",
    [
        messages.Welcome(messages.PROTOCOL_VERSION + 1, "9.9", 1, "i", b"token"),
        messages.Welcome(messages.PROTOCOL_VERSION, "9.9", 1, "i", b""),
    ],
    ids=["another protocol", "no token"],
)
def test_a_daemon_that_speaks_otherwise(welcome: messages.Welcome) -> None:
    with pytest.raises(IncompatibleDaemon, match=r"9\.9.*let the daemon's user run `trims stop`"):
        check_protocol(welcome)
    check_protocol(WELCOME)


def test_another_protocol_that_was_installed_under_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: it was to run `trims stop`, but started another daemon that it did not understand."""
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", messages.PROTOCOL_VERSION - 1)
    with pytest.raises(IncompatibleDaemon, match="start this program again"):
        check_protocol(WELCOME)
    with pytest.raises(IncompatibleDaemon, match="`trims stop`"):
        check_protocol(WELCOME._replace(protocol=WELCOME.protocol + 1))


def test_an_older_daemon_that_may_not_be_replaced_is_not_waited_for(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's daemon refuses to make room, and says so at once."""
    monkeypatch.setattr(pool, "_DRAIN_PATIENCE_S", 60.0)
    cache = Cache(config.load({}, socket_dir=str(socket_directory)))
    older = messages.Welcome(messages.PROTOCOL_VERSION, "0.0.1", 1, "i", b"t")
    heard: list[str] = []

    def serve() -> None:
        with handover.new_socket() as listener:
            listener.bind(cache.endpoint.handover)
            listener.listen()
            is_listening.set()
            listener.settimeout(PATIENCE_S)
            while heard.count("DrainRequest") < 1 or heard.count("Hello") < 4:
                _refuse_to_drain(listener.accept()[0], older, heard)

    is_listening = threading.Event()
    daemon = threading.Thread(target=serve)
    daemon.start()
    assert is_listening.wait(PATIENCE_S)
    content = Cache(config.load({}, socket_dir=str(socket_directory)))
    assert content.welcome() == older, "who may start no daemon takes it as it is"
    content._pool._idle.pop().close()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            cache.welcome(may_start=True)
        except IncompatibleDaemon as error:
            errors.append(error)

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    client.join(PATIENCE_S)
    daemon.join(PATIENCE_S)
    assert [str(error) for error in errors] == [
        "daemon 1 (trims_shim 0.0.1) is older than this process and could not be replaced; "
        "let its user run `trims stop`"
    ]
    assert heard == ["Hello", "Hello", "Hello", "DrainRequest", "Hello"]


@pytest.mark.parametrize(
    ("package", "patience_s", "looks", "drains", "error"),
    [
        ("0.0.1", 60.0, 3, 1, None),
        ("0.0.1", 0.0, sys.maxsize, 1, "does not make room; let its user run `trims stop`"),
        (trims_shim.__version__, 60.0, sys.maxsize, 0, None),
    ],
    ids=["ends soon", "stays", "has been replaced by another process"],
)
def test_an_older_daemon_is_drained_and_waited_for(
    socket_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    patience_s: float,
    looks: int,
    drains: int,
    error: str | None,
) -> None:
    monkeypatch.setattr(pool, "_DRAIN_PATIENCE_S", patience_s)
    cache = Cache(config.load({}, socket_dir=str(socket_directory)))
    Path(cache.endpoint.handover).touch()
    called: list[str] = []
    line = SimpleNamespace(
        welcome=WELCOME._replace(package=package),
        drain=lambda: called.append("drain"),
        is_alive=lambda: called.append("look") or called.count("look") < looks,
        close=lambda: called.append("close"),
    )
    monkeypatch.setattr(cache._pool, "_dial", lambda check: line)
    expected = pytest.raises(IncompatibleDaemon, match=error) if error else contextlib.nullcontext()
    with expected:
        cache._pool._replace()
    assert (called.count("drain"), called[-1]) == (drains, "close")


def test_a_daemon_that_dies_before_its_welcome_has_a_successor(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it still took connections, twice, and none was started in its place."""
    cache = Cache(config.load({}, socket_dir=str(socket_directory)))
    starts: list[object] = []
    monkeypatch.setattr(pool.spawn, "start", lambda endpoint, **_: starts.append(endpoint))
    peers: list[socket.socket] = []

    def serve() -> None:
        while True:
            peer, _ = listener.accept()
            peer.settimeout(PATIENCE_S)
            handover.receive(peer)
            if starts:
                handover.send(peer, WELCOME)
                peers.append(peer)
                return
            peer.close()

    with handover.new_socket() as listener:
        listener.bind(cache.endpoint.handover)
        listener.listen()
        listener.settimeout(PATIENCE_S)
        daemon = threading.Thread(target=serve)
        daemon.start()
        assert cache.welcome(may_start=True) == WELCOME
        daemon.join(PATIENCE_S)
    assert starts == [cache.endpoint]
    cache.close()
    peers[0].close()


def _refuse_to_drain(peer: socket.socket, welcome: messages.Welcome, heard: list[str]) -> None:
    with peer:
        peer.settimeout(PATIENCE_S)
        while (packet := handover.receive(peer)) is not None:
            heard.append(type(packet.message).__name__)
            if isinstance(packet.message, messages.DrainRequest):
                handover.send(peer, messages.Goodbye("only the daemon's own user may replace it"))
                return
            handover.send(peer, welcome)
