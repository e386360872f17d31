"""What a connection makes of a daemon's packets; nothing it was handed is ever lost."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from harness import PATIENCE_S, wait_until

from trims_shim.client import connection as connections
from trims_shim.client.connection import Connection, check_protocol
from trims_shim.errors import (
    DaemonTimeout,
    DaemonUnavailable,
    IncompatibleDaemon,
    NoSpace,
    UnknownImage,
    WireError,
)
from trims_shim.specs import Variant
from trims_shim.wire import admin, codec, handover, messages
from trims_shim.wire.endpoint import Endpoint

SIZE = 4096
DEVICE = "GPU-00000000-0000-0000-0000-000000000001"
INSTANCE = "0123456789abcdef"


class Daemon:
    """The other end: says what a test tells it to, in the order it tells it to."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = Endpoint(str(directory))
        self.listener = handover.new_socket()
        self.listener.bind(self.endpoint.handover)
        self.listener.listen()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self.context.socket(zmq.ROUTER)
        self.control.bind(f"ipc://{self.endpoint.control(INSTANCE)}")
        self.control.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1e3))
        self.control.setsockopt(zmq.LINGER, 0)
        self.requests: list[messages.OpenImageRequest] = []
        self.files: list[tuple[int, int]] = []
        self.is_resident = False
        """Whether offers are answered at once, with :meth:`answer` instead of :meth:`reply`."""

    def serve(self, *turns: Callable[[int], None]) -> threading.Thread:
        """Greet one client, then answer its requests, one turn (which is told the ticket) each."""
        return self._start(lambda: self._serve(turns))

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        self.thread = threading.Thread(target=work)
        self.thread.start()
        return self.thread

    def talk(self, *steps: Callable[[], object]) -> threading.Thread:
        """Let one client in, then do this."""

        def run() -> None:
            self.accept()
            for step in steps:
                step()

        return self._start(run)

    def accept(self) -> None:
        self.peer, _ = self.listener.accept()

    def welcome(
        self, *, protocol: int = messages.PROTOCOL_VERSION, token: bytes = b"token"
    ) -> None:
        handover.send(self.peer, messages.Welcome(protocol, "1.0", 1, INSTANCE, token))

    def hear_offer(self) -> None:
        offer = self.hear()
        assert offer.descriptor is not None
        os.close(offer.descriptor)
        self.offer = offer.message

    def say_goodbye(self) -> None:
        handover.send(self.peer, messages.Goodbye("because"))

    def await_packet(self) -> None:
        assert select.select([self.peer], [], [], PATIENCE_S)[0]

    def _serve(self, turns: tuple[Callable[[int], None], ...]) -> None:
        self.accept()
        self.hear()
        self.welcome()
        for turn in turns:
            offer = self.hear()
            while not isinstance(offer.message, messages.FileOffer):
                offer = self.hear()
            assert offer.descriptor is not None
            os.close(offer.descriptor)
            self.offer = offer.message
            if self.is_resident:
                turn(offer.message.ticket)
                continue
            self.answer(None)
            self.routing, body = self.control.recv_multipart()
            self.envelope = codec.decode_envelope(body)
            self.requests.append(self.envelope.message)
            turn(offer.message.ticket)

    def hear(self) -> handover.Packet:
        self.peer.settimeout(PATIENCE_S)
        packet = handover.receive(self.peer)
        assert packet is not None
        return packet

    def grant(self, ticket: int, part: int = 0, *, size: int = SIZE, lease: int = 7) -> None:
        descriptor = os.memfd_create("part")
        os.truncate(descriptor, size)
        status = os.fstat(descriptor)
        self.files.append((status.st_dev, status.st_ino))
        packet = messages.SegmentGrant(ticket, lease, part)
        handover.send(self.peer, packet, descriptor=descriptor)
        os.close(descriptor)

    def reply(self, message: object) -> None:
        body = codec.encode_envelope(codec.Envelope(self.envelope.request_id, b"", message))
        self.control.send_multipart([self.routing, body])

    def answer(self, message: messages.OpenImageReply | None, *, ticket: int = 0) -> None:
        handover.send(self.peer, messages.OfferReply(ticket or self.offer.ticket, message))

    def open_parts(self) -> list[int]:
        """Descriptors of parts that this process (which is both ends) has open in the end."""
        self.thread.join(PATIENCE_S)  # what it has sent last is still open there
        return self.files_open()

    def files_open(self) -> list[int]:
        """Those of this moment."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                status = os.stat(f"/proc/self/fd/{name}")
            except OSError:
                continue
            if (status.st_dev, status.st_ino) in self.files:
                found.append(int(name))
        return found

    def close(self) -> None:
        self.peer.close()
        self.listener.close()
        self.control.close()
        self.context.term()


def reply(
    *allocations: int, handles: tuple[bytes, ...] = (), size: int = SIZE
) -> messages.OpenImageReply:
    """Of a device tier when there are allocations."""
    grant = messages.DeviceGrant("vmm", "layout", allocations, handles) if allocations else None
    return messages.OpenImageReply(7, "digest", size, "hit", True, grant)


@pytest.fixture
def daemon(socket_directory: Path, no_leak: None) -> Iterator[Daemon]:
    daemon = Daemon(socket_directory)
    yield daemon
    daemon.close()


class Opening:
    """A client that opens ``/dev/null`` at a tier, against the turns of a daemon."""

    def __init__(
        self, daemon: Daemon, *turns: Callable[[int], None], stall: float = PATIENCE_S
    ) -> None:
        self.thread = daemon.serve(*turns)
        self.connection = Connection(daemon.endpoint, stall_timeout_s=stall)

    def open(self, tier: str = DEVICE) -> connections.Granted:
        with open(os.devnull, "rb") as file:
            return self.connection.open_image(file.fileno(), "m", tier=tier)

    def open_variant(self) -> connections.Granted | None:
        with open(os.devnull, "rb") as file:
            return self.connection.open_variant(file.fileno(), "m", Variant(8))

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Requests within the block are soon given up; what comes before them may take its time."""

        def give_up_soon(message: Any) -> Any:
            self.connection._stall_timeout_s = 0.3
            return request(message)

        request = self.connection._request
        self.connection._request = give_up_soon  # type: ignore[method-assign]
        yield
        self.connection._request = request  # type: ignore[method-assign]
        self.connection._stall_timeout_s = PATIENCE_S

    def __enter__(self) -> Opening:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.connection.close()


ORDERS = {
    "as a daemon sends it": ("0", "1", "2", "reply"),
    "reply first": ("reply", "0", "1", "2"),
    "backwards": ("2", "1", "reply", "0"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_parts_in_any_order(daemon: Daemon, order: str) -> None:
    def turn(ticket: int) -> None:
        for each in ORDERS[order]:
            if each == "reply":
                daemon.reply(reply(1000, 2000))
            else:
                daemon.grant(ticket, int(each), size=SIZE + int(each))

    with Opening(daemon, turn) as opening:
        granted = opening.open()
        assert granted.reply.device == messages.DeviceGrant("vmm", "layout", (1000, 2000))
        assert daemon.offer.tier == DEVICE
        descriptors = [granted.descriptor, *granted.allocations]
        assert [os.fstat(each).st_size - SIZE for each in descriptors] == [0, 1, 2]
        assert sorted(daemon.open_parts()) == sorted(descriptors)
        handover.close_all(descriptors)


def test_the_host_tier_has_one_part(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.reply(reply())

    with Opening(daemon, turn) as opening:
        granted = opening.open("host")
        assert (granted.allocations, daemon.offer.tier) == ((), "host")
        os.close(granted.descriptor)


def test_handles_come_in_the_reply(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.reply(reply(1000, handles=(b"h" * 64,)))

    with Opening(daemon, turn) as opening:
        granted = opening.open()
        assert granted.reply.device is not None
        assert (granted.allocations, granted.reply.device.handles) == ((), (b"h" * 64,))
        os.close(granted.descriptor)


BROKEN: dict[str, tuple[tuple[int, ...], messages.OpenImageReply, str]] = {
    "a part is missing": ((0, 1), reply(1000, 2000), "2 of 3 parts"),
    "all are missing": ((), reply(1000), "0 of 2 parts"),
    "a part of another number": ((0, 1, 5), reply(1000, 2000), r"\[0, 1, 5\]"),
    "one part twice": ((0, 1, 1), reply(1000, 2000), "2 of 3 parts"),
    "an outline that is too short": ((0, 1), reply(1000, size=SIZE + 1), "shorter"),
    "an image of no bytes": ((0, 1), reply(1000, size=0), "image of 0 bytes"),
    "an image of less": ((0, 1), reply(1000, size=-(1 << 20)), "image of -1048576 bytes"),
    "no allocation": ((0,), reply(), "another tier"),
    "an empty allocation": ((0, 1), reply(0), "0,"),
    "a negative one": ((0, 1), reply(-5), "-5"),
    "handles of something else": ((0,), reply(1000, 1000, handles=(b"h",)), "1 handles of 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_grant_that_does_not_fit(daemon: Daemon, name: str) -> None:
    parts, answer, message = BROKEN[name]

    def turn(ticket: int) -> None:
        for part in parts:
            daemon.grant(ticket, part)
        daemon.reply(answer)

    with Opening(daemon, turn) as opening:
        opening.connection._answer_timeout_s = 1  # for parts that do not come
        with pytest.raises(WireError, match=message):
            opening.open()
    assert daemon.open_parts() == []


def test_device_memory_for_a_host_request(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.reply(reply(1000))

    with (
        Opening(daemon, turn) as opening,
        pytest.raises(WireError, match="another tier than host"),
    ):
        opening.open("host")
    assert daemon.open_parts() == []


def test_parts_of_a_refused_request(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.grant(ticket, 1)
        # Received before the refusal comes; the control socket would win otherwise.
        wait_until(lambda: len(daemon.files_open()) == 2)
        daemon.reply(messages.ErrorReply("NoSpace", "full"))

    with Opening(daemon, turn) as opening:
        with pytest.raises(NoSpace, match="full"):
            opening.open()
        assert daemon.open_parts() == []
        assert daemon.hear().message == messages.LeaseRelease(7)


def test_parts_of_a_request_that_was_given_up(daemon: Daemon) -> None:
    """They come while the next request waits; its own are told apart, and their lease ends."""

    given_up: list[int] = []

    def late(ticket: int) -> None:
        given_up.append(ticket)
        daemon.reply(messages.ErrorReply("UnknownImage", "not now"))

    def second(ticket: int) -> None:
        for part in range(3):
            daemon.grant(given_up[0], part, lease=6)
        for part in range(2):
            daemon.grant(ticket, part)
        daemon.reply(reply(1000))
        assert daemon.hear().message == messages.LeaseRelease(6)

    with Opening(daemon, late, second) as opening:
        with pytest.raises(UnknownImage):
            opening.open()
        granted = opening.open()
        descriptors = [granted.descriptor, *granted.allocations]
        assert sorted(daemon.open_parts()) == sorted(descriptors)
        handover.close_all(descriptors)


def test_parts_that_come_between_requests(daemon: Daemon) -> None:
    """The pool looks at an idle connection; what lies there is of no use to anybody."""

    def turn(ticket: int) -> None:
        daemon.reply(messages.ErrorReply("UnknownImage", "not now"))
        assert given_up.wait(PATIENCE_S)
        daemon.grant(ticket)

    given_up = threading.Event()
    with Opening(daemon, turn) as opening:
        with pytest.raises(UnknownImage):
            opening.open()
        given_up.set()
        opening.thread.join(PATIENCE_S)
        assert opening.connection.is_alive()
        assert daemon.open_parts() == []
        assert daemon.hear().message == messages.LeaseRelease(7)


def test_parts_of_a_load_that_stalls(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        for part in range(3):
            daemon.grant(ticket, part)

    with Opening(daemon, turn) as opening:
        with opening.stalling(), pytest.raises(DaemonTimeout, match="no progress"):
            opening.open()
        assert daemon.open_parts() == []


def test_an_answer_that_came_while_this_process_was_stopped(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(ticket: int) -> None:
        assert waiting.wait(PATIENCE_S)
        daemon.reply(reply())
        daemon.grant(ticket)

    def exchange(connection: Connection, message: Any, control: zmq.Socket[bytes]) -> Any:
        controls.append(control)
        return original(connection, message, control)

    def wait_and_stop(poller: zmq.Poller, timeout_ms: int) -> Any:
        waiting.set()
        ready = wait(poller, timeout_ms)  # perhaps only for a greeting
        if not stopped_s:
            wait_until(lambda: int(controls[-1].getsockopt(zmq.EVENTS)) & zmq.POLLIN)
            stopped_s.append(2 * PATIENCE_S)
        return ready

    waiting = threading.Event()
    stopped_s: list[float] = []
    controls: list[zmq.Socket[bytes]] = []
    wait, now_s, original = zmq.Poller.poll, time.monotonic, Connection._exchange
    monkeypatch.setattr(Connection, "_exchange", exchange)
    with Opening(daemon, turn) as opening:
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Poller, "poll", wait_and_stop)
            patch.setattr(time, "monotonic", lambda: now_s() + sum(stopped_s))
            granted = opening.open("host")
        assert stopped_s
        os.close(granted.descriptor)


@pytest.mark.parametrize("is_answered", [False, True], ids=["stalled", "in the last moment"])
def test_a_load_is_withdrawn(daemon: Daemon, is_answered: bool) -> None:
    """Its parts may still come; the next load is not confused by them."""
    tickets: list[int] = []

    def stall(ticket: int) -> None:
        tickets.append(ticket)
        if is_answered:
            assert given_up.wait(PATIENCE_S)
            daemon.grant(ticket, lease=6)

    def answer(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.grant(ticket, 1)
        daemon.reply(reply(1000))

    given_up = threading.Event()
    hear = daemon.hear
    heard: list[Any] = []

    def listen() -> handover.Packet:
        packet = hear()
        heard.append(packet.message)
        return packet

    daemon.hear = listen  # type: ignore[method-assign]
    with Opening(daemon, stall, answer) as opening:
        with opening.stalling(), pytest.raises(DaemonTimeout, match="no progress"):
            opening.open()
        assert opening.connection.withdraw()
        given_up.set()
        granted = opening.open()
        handover.close_all([granted.descriptor, *granted.allocations])
        opening.thread.join(PATIENCE_S)
    assert heard.count(messages.OfferWithdrawal(tickets[0])) == 1
    assert sum(isinstance(each, messages.OfferWithdrawal) for each in heard) == 1


def test_what_is_withdrawn_without_a_load(daemon: Daemon) -> None:
    """Other requests leave nothing behind that could come late; the last load is untouched."""

    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.answer(reply())
        daemon.control.recv_multipart()

    daemon.is_resident = True
    with Opening(daemon, turn) as opening:
        os.close(opening.open("host").descriptor)
        with opening.stalling(), pytest.raises(DaemonTimeout, match="no progress"):
            opening.connection.request(messages.OpenImageRequest(1))
        assert opening.connection.withdraw()
        opening.connection.release(7)
        opening.thread.join(PATIENCE_S)
        assert daemon.hear().message == messages.LeaseRelease(7)


def test_a_load_that_is_over_is_not_withdrawn(daemon: Daemon) -> None:
    """An interrupt comes before the next request has begun."""

    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.answer(reply())

    daemon.is_resident = True
    with Opening(daemon, turn) as opening:
        os.close(opening.open("host").descriptor)
        assert opening.connection.is_alive()
        assert opening.connection.withdraw()
        opening.connection.release(7)
        opening.thread.join(PATIENCE_S)
        assert daemon.hear().message == messages.LeaseRelease(7)


def test_nothing_can_be_withdrawn_before_the_welcome(daemon: Daemon) -> None:
    thread = daemon.talk(daemon.hear)
    connection = connect(daemon)
    thread.join(PATIENCE_S)
    assert not connection.withdraw()
    connection.close()


def test_nor_after_a_request_whose_answer_names_none(daemon: Daemon) -> None:
    """The answer for one model could be taken for that of another."""
    thread = daemon.talk(daemon.hear, daemon.welcome, daemon.hear)
    connection = Connection(daemon.endpoint, stall_timeout_s=0.3)
    recipe = messages.SessionRecipe("1", "1", (), "all")
    with pytest.raises(DaemonTimeout):
        connection.open_prepared(messages.OpenPreparedRequest(0, "", "d", recipe, "", ()))
    thread.join(PATIENCE_S)
    assert not connection.withdraw()
    connection.close()


def test_a_resident_image_needs_no_request(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.grant(ticket, 1)
        daemon.answer(reply(1000))

    daemon.is_resident = True
    with Opening(daemon, turn) as opening:
        granted = opening.open()
        assert granted.reply.outcome == "hit"
        assert len(granted.allocations) == 1
        assert (daemon.offer.tier, daemon.offer.name) == (DEVICE, "m")
        assert daemon.requests == []
        handover.close_all([granted.descriptor, *granted.allocations])


def test_an_answer_without_its_parts(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.answer(reply(1000))

    daemon.is_resident = True
    with Opening(daemon, turn) as opening:
        opening.connection._answer_timeout_s = 1  # for the part that does not come
        with pytest.raises(WireError, match="1 of 2 parts"):
            opening.open()
        assert daemon.open_parts() == []
        assert daemon.hear().message == messages.LeaseRelease(7)


def test_an_answer_to_another_offer(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.answer(reply(), ticket=ticket + 1)
        daemon.grant(ticket)
        daemon.answer(reply())

    daemon.is_resident = True
    with Opening(daemon, turn) as opening:
        os.close(opening.open("host").descriptor)


def test_an_offer_that_is_not_answered(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        daemon.grant(ticket)

    daemon.is_resident = True
    with Opening(daemon, turn, stall=0.3) as opening:
        with pytest.raises(DaemonTimeout, match="does not answer"):
            opening.open()
        assert daemon.open_parts() == []


def test_what_answers_nothing_does_not_prolong_the_wait(daemon: Daemon) -> None:
    given_up = threading.Event()
    said: list[int] = []

    def turn(ticket: int) -> None:
        while not given_up.wait(0.02) and len(said) < 500:
            daemon.answer(None, ticket=999)
            said.append(999)

    daemon.is_resident = True
    with Opening(daemon, turn, stall=0.3) as opening:
        with pytest.raises(DaemonTimeout, match="does not answer"):
            opening.open()
        given_up.set()
    assert len(said) < 500


def test_a_program_without_descriptors_left(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_socket() -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    thread = daemon.talk()
    with monkeypatch.context() as patch:
        patch.setattr(handover, "new_socket", new_socket)
        with pytest.raises(DaemonUnavailable, match=r"no socket can be opened: .* Too many"):
            connect(daemon)
    connection = connect(daemon)
    thread.join(PATIENCE_S)
    connection.close()


def test_a_daemon_of_another_user(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = os.geteuid() + 1
    thread = daemon.talk()
    monkeypatch.setattr(handover, "peer_of", lambda _: handover.Peer(1, stranger, 0))
    with pytest.raises(DaemonUnavailable, match=f"served by user {stranger}"):
        connect(daemon)
    thread.join(PATIENCE_S)


def test_a_descriptor_that_the_program_has_closed(daemon: Daemon) -> None:
    """The daemon has not died of a request: it may be asked again at once."""
    thread = daemon.talk()
    connection = connect(daemon)
    thread.join(PATIENCE_S)
    assert connection.is_alive()
    os.close(connection._handover.fileno())
    assert not connection.is_alive()
    with pytest.raises(DaemonUnavailable) as raised:
        connection.drain()
    assert type(raised.value) is DaemonUnavailable
    connection.close()


def test_time_that_is_up_is_not_waited_for(daemon: Daemon) -> None:
    """Not even for what is there: more may follow without end."""
    thread = daemon.talk(daemon.hear, daemon.welcome)
    connection = connect(daemon)
    thread.join(PATIENCE_S)
    with pytest.raises(DaemonTimeout, match="does not answer"):
        connection._next_packet(time.monotonic())
    assert connection.welcome.instance == INSTANCE
    connection.close()


def test_a_program_that_has_no_poll(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """eventlet's ``monkey_patch`` takes it away."""
    monkeypatch.delattr(select, "poll")

    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.answer(reply())

    daemon.is_resident = True
    with Opening(daemon, turn, lambda ticket: None) as opening:
        os.close(opening.open("host").descriptor)
        opening.connection._stall_timeout_s = 0.3
        with pytest.raises(DaemonTimeout, match="does not answer"):
            opening.open("host")


@pytest.mark.parametrize("has_poll", [True, False])
def test_a_daemon_that_reads_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, has_poll: bool
) -> None:
    if not has_poll:
        monkeypatch.delattr(select, "poll")
    thread = daemon.talk()
    connection = Connection(daemon.endpoint, stall_timeout_s=0.3)

    def fill() -> None:
        for _ in range(10_000):
            connection.drain()

    with pytest.raises(DaemonTimeout, match="does not read"):
        fill()
    thread.join(PATIENCE_S)
    connection.close()


def test_an_interrupt_while_the_control_socket_is_made(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the program waited for ever for a socket of which nobody knew any more."""
    programs_own = zmq.Context().socket(zmq.PAIR)

    def interrupted(*_: object) -> int:
        assert not programs_own.closed  # A signal handler may use it.
        raise KeyboardInterrupt

    thread = daemon.talk(daemon.hear, daemon.welcome)
    connection = connect(daemon)
    assert connection.welcome.instance == INSTANCE
    thread.join(PATIENCE_S)
    outcomes: list[str] = []

    def ask() -> None:
        try:
            connection.request(messages.OpenImageRequest(1))
        except KeyboardInterrupt:
            outcomes.append("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "get", interrupted)  # It is made, and looks at itself.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
    connection.close()
    assert outcomes == ["interrupted"]
    assert not programs_own.closed
    programs_own.close()
    programs_own.context.term()


@pytest.mark.usefixtures("no_leak")
@pytest.mark.parametrize(("place", "name"), [(os, "eventfd"), (select, "epoll")])
def test_where_no_event_can_be_waited_for(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    """Found: ZeroMQ aborted programs in sandboxes that refuse these calls, or without watches."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    thread = daemon.talk(daemon.hear, daemon.welcome)
    connection = connect(daemon)
    monkeypatch.setattr(place, name, refuse)
    with pytest.raises(DaemonUnavailable, match="cannot wait for events"):
        connection.request(admin.GetStatusRequest())
    thread.join(PATIENCE_S)
    connection.close()


@pytest.mark.usefixtures("no_leak")
def test_where_threads_may_not_set_their_priority(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: ZeroMQ aborted programs under a seccomp filter that refuses it."""
    thread = daemon.talk(daemon.hear, daemon.welcome)
    connection = connect(daemon)
    monkeypatch.setattr(connections, "may_set_priority", lambda: False)
    with pytest.raises(DaemonUnavailable, match="may not set their priority"):
        connection.request(admin.GetStatusRequest())
    thread.join(PATIENCE_S)
    connection.close()


@pytest.mark.usefixtures("no_leak")
def test_interrupts_while_descriptors_are_counted() -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        nonlocal is_counting
        if is_counting:
            is_counting = False  # the alarm of the turn before may be late
            raise Interrupt

    interrupted = 0
    is_counting = False
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(3000):
            try:
                is_counting = True
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + turn % 60))
                connections._check_descriptors()
                is_counting = False
            except Interrupt:
                interrupted += 1
    finally:
        is_counting = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted


def filled(daemon: Daemon) -> Connection:
    """A connection without room for another packet."""
    accepting = daemon.talk()
    connection = connect(daemon)
    accepting.join(PATIENCE_S)

    def fill() -> None:
        while True:
            handover.send(connection._handover, messages.DrainRequest("1"))

    with pytest.raises(BlockingIOError):
        fill()
    return connection


def test_a_release_that_finds_no_room_goes_before_the_next_request(daemon: Daemon) -> None:
    connection = filled(daemon)
    connection.release(7)
    heard: list[object] = []

    def serve() -> None:
        while (packet := daemon.hear()).descriptor is None:
            heard.append(packet.message)
        os.close(packet.descriptor)
        daemon.welcome()
        daemon.grant(packet.message.ticket)
        daemon.answer(reply(), ticket=packet.message.ticket)

    thread = daemon._start(serve)
    os.close(open_null(connection).descriptor)
    thread.join(PATIENCE_S)
    connection.close()
    assert heard[-1] == messages.LeaseRelease(7)
    # The thread that waits for room, and this one, may send it at the same moment.
    assert heard.count(heard[-1]) <= 2


@pytest.mark.timeout(20)
def test_a_signal_handler_may_load_while_a_lease_is_given_up(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the handler waited for ever for what it had interrupted."""

    def turn(ticket: int) -> None:
        daemon.grant(ticket)
        daemon.answer(reply())

    daemon.is_resident = True
    thread = daemon.serve(turn)
    connection = connect(daemon)
    granted: list[int] = []
    send = handover.send

    def interrupted(place: socket.socket, message: object, **others: Any) -> None:
        if isinstance(message, messages.LeaseRelease) and not granted:
            granted.append(-1)
            granted.append(open_null(connection).descriptor)
        send(place, message, **others)

    monkeypatch.setattr(handover, "send", interrupted)
    connection.release(7)
    thread.join(PATIENCE_S)
    os.close(granted[1])
    assert not connection._unsent
    connection.close()


def test_releases_that_find_no_room_need_no_further_request(
    daemon: Daemon, no_thread_left: None
) -> None:
    """Found: a program that let go of many models, and loaded no other, kept their memory."""
    connection = filled(daemon)
    for lease in range(1000):
        connection.release(lease)
    released: list[int] = []
    while len(released) < 1000:
        message = daemon.hear().message
        if isinstance(message, messages.LeaseRelease):
            released.append(message.lease)
    assert released == list(range(1000))
    wait_until(lambda: not connection._is_waiting.locked(), "nothing waits any more")
    connection.close()


def test_a_lease_with_the_number_of_a_withdrawn_offer_is_given_up(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: of two that send at once, one took the other's message off as its own."""
    daemon.talk(daemon.hear, daemon.welcome)
    connection = connect(daemon)
    assert connection.welcome
    connection._ticket = connection._asked_under = 7

    def full() -> None:
        raise BlockingIOError

    # In the middle of the withdrawal a finalizer gives a lease up, and finds no room for that.
    meanwhile = [lambda: connection.release(7), lambda: None, full]
    send = handover.send

    def interrupted(place: socket.socket, message: object) -> None:
        if meanwhile:
            meanwhile.pop(0)()
        send(place, message)

    monkeypatch.setattr(handover, "send", interrupted)
    monkeypatch.setattr(connection, "_send_later", lambda: None)
    connection.withdraw()
    connection.release(8)
    last = [daemon.hear().message for _ in range(4)][-2:]
    assert list(map(repr, last)) == ["LeaseRelease(lease=7)", "LeaseRelease(lease=8)"]
    connection.close()


@pytest.mark.parametrize("end", ["ours", "the daemon's"])
def test_what_waits_for_room_ends_with_the_connection(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    if end == "ours":
        monkeypatch.setattr(connections, "_RELEASE_PATIENCE_S", 0.01)  # nobody tells it
    connection = filled(daemon)
    connection.release(1)
    if end == "ours":
        connection.close()
    else:
        daemon.peer.close()
    wait_until(lambda: not connection._is_waiting.locked(), "nothing waits any more")
    connection.close()


def test_a_release_between_the_last_look_of_the_thread_and_its_end_gets_another(
    daemon: Daemon,
) -> None:
    daemon.talk(daemon.hear, daemon.welcome)
    connection = connect(daemon)
    assert connection.welcome
    lock, sent = connection._is_waiting, threading.Event()

    def release() -> None:
        if not sent.is_set():
            connection._unsent.append(sent.set)
        lock.release()

    between: Any = SimpleNamespace(acquire=lock.acquire, release=release)
    connection._is_waiting = between
    connection._send_later()
    assert sent.wait(PATIENCE_S)
    wait_until(lambda: not lock.locked(), "nothing waits any more")
    connection.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_releases_without_a_thread_go_with_the_next_one(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    connection = filled(daemon)
    with monkeypatch.context() as patch:
        patch.setattr(connections._thread, "start_new_thread", refuse)
        connection.release(1)
    while select.select([daemon.peer], [], [], 0)[0]:
        daemon.hear()
    connection.release(2)
    assert [daemon.hear().message.lease for _ in range(2)] == [1, 2]
    connection.close()


def test_an_aligned_image_is_leased_where_it_is(daemon: Daemon) -> None:
    def turn(ticket: int) -> None:
        assert (daemon.offer.tier, daemon.offer.variant) == ("host", Variant(8))
        daemon.grant(ticket)
        daemon.answer(reply())

    daemon.is_resident = True
    with Opening(daemon, turn) as opening:
        granted = opening.open_variant()
        assert granted is not None
        os.close(granted.descriptor)


def test_an_aligned_image_that_is_not_there_is_not_waited_for(daemon: Daemon) -> None:
    daemon.is_resident = True
    with Opening(daemon, lambda _: daemon.answer(None)) as opening:
        assert opening.open_variant() is None
        assert opening.connection._parts is None


def test_an_aligned_image_that_is_being_loaded_is(daemon: Daemon) -> None:
    def loading(ticket: int) -> None:
        handover.send(daemon.peer, messages.OfferReply(ticket, is_loading=True))
        daemon.routing, body = daemon.control.recv_multipart()
        daemon.envelope = codec.decode_envelope(body)
        assert daemon.envelope.message == messages.OpenImageRequest(ticket)
        daemon.grant(ticket)
        daemon.reply(reply())

    daemon.is_resident = True
    with Opening(daemon, loading) as opening:
        granted = opening.open_variant()
        assert granted is not None
        os.close(granted.descriptor)


def test_only_a_reply_answers_a_request_for_a_prepared_model(daemon: Daemon) -> None:
    thread = daemon.talk(
        daemon.hear,
        daemon.hear,
        daemon.welcome,
        lambda: daemon.answer(None, ticket=9),
        lambda: handover.send(daemon.peer, messages.ErrorReply("NoSpace", "full")),
    )
    connection = connect(daemon)
    with pytest.raises(NoSpace, match="full"):
        connection.open_prepared(REQUEST)
    thread.join(PATIENCE_S)
    connection.close()


def test_what_an_older_daemon_does_not_take_is_withdrawn(daemon: Daemon) -> None:
    """Found: it closed the connection, and ended its leases, as more and more was left."""
    heard: list[Any] = []

    def listen() -> None:
        packet = daemon.hear()
        heard.append(packet.message)
        if packet.descriptor is not None:
            os.close(packet.descriptor)

    def refuse() -> None:
        reply = messages.OpenPreparedReply("refused", reason="other_namespace")
        handover.send(daemon.peer, reply)

    offers = [listen] * 4
    thread = daemon.talk(listen, daemon.welcome, *offers, listen, refuse, listen, listen, listen)
    connection = Connection(daemon.endpoint, stall_timeout_s=PATIENCE_S)
    with open("/dev/null") as file:
        null = file.fileno()
        connection.open_prepared(
            REQUEST, descriptor=null, directory=null, externals={"a": null, "b": null}
        )
    thread.join(PATIENCE_S)
    assert [each.ticket for each in heard[1:5]] == [1, 2, 3, 4]
    assert heard[6:] == [messages.OfferWithdrawal(ticket) for ticket in (2, 3, 4)]
    connection.close()


def test_a_reply_to_another_request(daemon: Daemon) -> None:
    def answer() -> None:
        daemon.routing, body = daemon.control.recv_multipart()
        daemon.envelope = codec.decode_envelope(body)
        daemon.reply(reply())

    thread = daemon.talk(daemon.hear, daemon.welcome, answer)
    connection = connect(daemon)
    with pytest.raises(WireError, match="OpenImageReply answers GetStatusRequest"):
        connection.request(admin.GetStatusRequest())
    thread.join(PATIENCE_S)
    connection.close()


def test_a_control_socket_that_is_gone(daemon: Daemon) -> None:
    os.unlink(daemon.endpoint.control(INSTANCE))
    thread = daemon.talk(daemon.hear, daemon.welcome)
    connection = connect(daemon)
    with pytest.raises(DaemonUnavailable, match="is gone"):
        connection.request(REQUEST)
    thread.join(PATIENCE_S)
    connection.close()


def test_a_control_socket_that_nobody_reads(daemon: Daemon) -> None:
    """What was not sent does not keep the client from giving up."""
    path = daemon.endpoint.control(INSTANCE)
    os.unlink(path)
    thread = daemon.talk(daemon.hear, daemon.welcome)
    said: list[str] = []

    def run() -> None:
        connection = Connection(daemon.endpoint, stall_timeout_s=PATIENCE_S)
        assert connection.welcome
        connection._stall_timeout_s = 0.2
        with pytest.raises(DaemonTimeout) as raised:
            connection.request(REQUEST)
        connection.close()
        said.append(str(raised.value))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = threading.Thread(target=run, daemon=True)
        client.start()
        client.join(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert len(said) == 1, "it waits for ever"
    assert "no progress" in said[0]


# --- the first request goes out with the Hello ----------------------------------------------------

REQUEST = messages.OpenPreparedRequest(
    0, "/m.onnx", "", messages.SessionRecipe("1", "b", (), "ORT_ENABLE_ALL"), "", ()
)


def connect(
    daemon: Daemon, check: Callable[[messages.Welcome], None] | None = check_protocol
) -> Connection:
    return Connection(daemon.endpoint, stall_timeout_s=PATIENCE_S, check=check)


def open_null(connection: Connection) -> connections.Granted:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        return connection.open_image(descriptor, "m")
    finally:
        os.close(descriptor)


def test_the_first_request_does_not_wait_for_the_welcome(daemon: Daemon) -> None:
    thread = daemon.talk(
        daemon.hear,
        daemon.hear_offer,
        daemon.welcome,
        lambda: daemon.grant(daemon.offer.ticket),
        lambda: daemon.answer(reply()),
    )
    connection = connect(daemon)
    os.close(open_null(connection).descriptor)
    assert connection.welcome.instance == INSTANCE
    thread.join(PATIENCE_S)
    connection.close()


def test_a_welcome_that_is_refused(daemon: Daemon) -> None:
    """What was granted in the meantime is not taken."""
    thread = daemon.talk(
        daemon.hear,
        daemon.hear_offer,
        lambda: daemon.welcome(protocol=0),
        lambda: daemon.grant(daemon.offer.ticket),
        lambda: daemon.answer(reply()),
    )
    connection = connect(daemon)
    with pytest.raises(IncompatibleDaemon):
        open_null(connection)
    thread.join(PATIENCE_S)
    connection.close()
    assert daemon.open_parts() == []


@pytest.mark.parametrize(
    "ask",
    [
        open_null,
        lambda connection: connection.open_prepared(REQUEST),
        lambda connection: connection.request(REQUEST),
        lambda connection: connection.welcome,
    ],
    ids=["image", "prepared model", "control request", "nothing"],
)
def test_hello_is_answered_with_goodbye(
    daemon: Daemon, ask: Callable[[Connection], object]
) -> None:
    said: list[BaseException] = []

    def run() -> None:
        connection = connect(daemon)
        try:
            ask(connection)
        except DaemonUnavailable as error:
            connection.close()  # while the error, and all that its frames hold, is still there
            said.append(error)

    talk = daemon.talk(daemon.hear, daemon.say_goodbye)
    client = threading.Thread(target=run, daemon=True)
    client.start()
    client.join(PATIENCE_S)
    talk.join(PATIENCE_S)
    assert len(said) == 1, "it waits for ever"
    assert "because" in str(said[0])
    said.clear()


def test_a_daemon_that_closes_before_it_has_read_all(daemon: Daemon) -> None:
    """The kernel then reports a reset first: who hears the Welcome behind it knows the reason."""
    thread = daemon.talk(
        daemon.hear,
        lambda: daemon.welcome(protocol=0, token=b""),
        daemon.hear_offer,
        daemon.say_goodbye,
        daemon.await_packet,
        lambda: daemon.peer.close(),
    )
    connection = connect(daemon)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    connection._send_handover(messages.FileOffer(1), descriptor)
    connection._send_handover(REQUEST, None)
    os.close(descriptor)
    thread.join(PATIENCE_S)
    with pytest.raises(IncompatibleDaemon):
        _ = connection.welcome
    connection.close()


def test_a_daemon_that_closes_before_the_request(daemon: Daemon) -> None:
    thread = daemon.talk(
        daemon.hear,
        lambda: daemon.welcome(protocol=0, token=b""),
        lambda: daemon.peer.close(),
    )
    connection = connect(daemon)
    thread.join(PATIENCE_S)
    with pytest.raises(IncompatibleDaemon):
        open_null(connection)
    connection.close()
