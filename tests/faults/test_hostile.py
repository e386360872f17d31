"""Hostile and broken peers. After each attack the daemon lives, answers an honest client at once,
and holds no more descriptors and memory than before."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import zmq
from harness import (
    PATIENCE_S,
    InProcessDaemon,
    World,
    content,
    open_path,
    raw_connection,
    wait_until,
)

from trims_shim.daemon import main as daemon_main
from trims_shim.daemon import server as server_module
from trims_shim.daemon.front import Request
from trims_shim.errors import AccessDenied, TooManyRequests, TrimsError
from trims_shim.wire import admin, codec, endpoint, handover, messages

ANSWER_S = 2.0
RSS_SLACK = 48 << 20


class Watch:
    """An honest client's view before, during and after an attack."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.path = world.file(1)
        self.honest()
        self.pid = world.pid()
        self.descriptors = len(world.descriptors(self.pid))
        self.rss = world.rss_bytes(self.pid)

    def honest(self, limit_s: float = ANSWER_S) -> None:
        """A whole load over a new connection, in time; one of some, as the machine may be slow."""
        took_s = []
        while not took_s or took_s[-1] >= limit_s:
            assert len(took_s) < 8, took_s
            took_s.append(self._load())

    def _load(self) -> float:
        cache = self.world.cache()
        began = time.monotonic()
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            arena = cache.open(descriptor, name=self.path, min_bytes=1)
            assert bytes(memoryview(arena.buffer)[:64]) == content(1)[:64]
            del arena
        finally:
            os.close(descriptor)
            cache.close()
        return time.monotonic() - began

    def check(self) -> None:
        """The attack is over."""
        self.honest()
        assert self.world.pid() == self.pid, self.world.log()
        self.world.assert_quiet(self.descriptors)
        wait_until(
            lambda: self.world.rss_bytes(self.pid) < self.rss + RSS_SLACK, "memory is given back"
        )
        self.world.assert_account()
        assert "Traceback" not in self.world.log(), self.world.log()


@pytest.fixture
def watch(running: World) -> Iterator[Watch]:
    watch = Watch(running)
    yield watch
    watch.check()


def pack(**body: Any) -> bytes:
    packed: bytes = msgpack.packb(body)
    return packed


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


HELLO = codec.encode(messages.Hello(messages.PROTOCOL_VERSION, "1.0.0", 1))
PACKETS: dict[str, bytes] = {
    "one byte": b"\xc1",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "truncated": HELLO[:-3],
    "trailing": HELLO + b"\x00",
    "oversize": HELLO + b"\0" * 8000,
    "list": msgpack.packb([1, 2]),
    "deep": nested(3000),
    "deep in a field": b"\x82"
    + msgpack.packb("verb")
    + msgpack.packb("Hello")
    + msgpack.packb("protocol")
    + nested(2000),
    "deep in the verb": b"\x81" + msgpack.packb("verb") + nested(1000),
    "a length of 4 GiB": b"\xdf\xff\xff\xff\xff",
    "a string of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "unknown verb": pack(verb="Format"),
    "verb is a number": pack(verb=7),
    "our reply": codec.encode(messages.Goodbye("x")),
    "a request": codec.encode(admin.GetStatusRequest()),
    "no fields": pack(verb="Hello"),
    "text for a number": pack(verb="Hello", protocol="1", package="x", pid=1),
    "a boolean for a number": pack(verb="Hello", protocol=True, package="x", pid=1),
    "huge numbers": pack(verb="Hello", protocol=(1 << 64) - 1, package="x", pid=-(1 << 63)),
    "not UTF-8": HELLO.replace(b"1.0.0", b"1\xff0.0"),
    "offer without file": codec.encode(messages.FileOffer(1)),
    "release before Hello": codec.encode(messages.LeaseRelease(1)),
    "negative release": codec.encode(messages.LeaseRelease(-5)),
    "many counters": codec.encode(messages.StatsReport({"x" * 90 + str(i): 1 for i in range(30)})),
    "a long counter": codec.encode(messages.StatsReport({"x" * 2000: 1})),
    "negative counters": codec.encode(messages.StatsReport({"served": -(1 << 63)})),
    "nan": pack(verb="Hello", protocol=float("nan"), package="x", pid=1),
    "map of maps": pack(verb="StatsReport", counters={"a": {"b": {}}}),
}


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("packet", PACKETS)
def test_bad_packets(shared_watch: Watch, packet: str, greeted: bool) -> None:
    world = shared_watch.world
    for _ in range(5):
        with raw_connection(world, hello=greeted) as connection, contextlib.suppress(OSError):
            connection.send(PACKETS[packet])
            connection.send(PACKETS[packet])
    shared_watch.check()


@pytest.fixture(scope="module")
def shared_watch() -> Iterator[Watch]:
    """One daemon for all bad packets: what one of them leaves behind, the next finds."""
    world = World(idle_exit="600")  # long stretches of tests do not use it
    try:
        world.start()
        yield Watch(world)
    finally:
        world.close()


def test_random_bytes(shared_watch: Watch) -> None:
    generator = random.Random(1)
    for _ in range(300):
        with raw_connection(shared_watch.world, hello=generator.random() < 0.5) as connection:
            for _ in range(5):
                data = bytearray(HELLO if generator.random() < 0.5 else generator.randbytes(60))
                for _ in range(3):
                    data[generator.randrange(len(data))] = generator.randrange(256)
                with contextlib.suppress(OSError):
                    connection.send(bytes(data))
    shared_watch.check()


@pytest.mark.parametrize("number", [2, 9, 100, 253])
@pytest.mark.parametrize("greeted", [False, True])
def test_many_descriptors_in_a_packet(watch: Watch, number: int, greeted: bool) -> None:
    """The kernel allows 253; the surplus is closed with the packet."""
    descriptors = array.array("i", [0] * number)
    for data in (codec.encode(messages.FileOffer(1)), HELLO, b"?"):
        for _ in range(20):
            surplus = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
            with (
                raw_connection(watch.world, hello=greeted) as connection,
                contextlib.suppress(OSError),
            ):
                connection.sendmsg([data], surplus)


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """A connection whose last close lasts an hour, or until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with theirs, ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until nobody takes any more
                ours.send(bytes(1 << 16))
        yield ours


@pytest.mark.parametrize("number", [0, 1, 12, 253])
def test_sockets_that_take_long_to_close(watch: Watch, number: int) -> None:
    """Found: with surplus ones, or in a packet that was not read, the daemon hung for an hour."""
    with lingering() as socket_:
        descriptors = array.array("i", [0] * max(0, number - 1) + [socket_.fileno()])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        with raw_connection(watch.world) as connection:
            connection.recv(4096)
            with watch.world.stopped(watch.pid):
                if not number:
                    connection.send(b"?")
                connection.sendmsg([b"?"], rights)
                socket_.close()
        watch.honest()


def test_offers_without_end(watch: Watch) -> None:
    """More unclaimed offers than allowed, one ticket twice: the connection and they are closed."""
    offered = array.array("i", [0])
    for tickets in (range(100), [1] * 50):
        for _ in range(20):
            with raw_connection(watch.world) as connection:
                connection.recv(4096)
                with contextlib.suppress(OSError):
                    for ticket in tickets:
                        connection.sendmsg(
                            [codec.encode(messages.FileOffer(ticket))],
                            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, offered)],
                        )


def test_a_client_that_offers_its_own_end_of_the_connection(watch: Watch) -> None:
    """Found: it stayed connected for ever after its death, and its leases with it."""
    with raw_connection(watch.world) as connection:
        connection.recv(4096)
        offered = array.array("i", [connection.fileno()])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, offered)]
        connection.sendmsg([codec.encode(messages.FileOffer(1))], rights)
    wait_until(lambda: len(watch.world.status().clients) == 1, "only who asks is connected")


def test_packets_without_hello(watch: Watch) -> None:
    with raw_connection(watch.world, hello=False) as connection:
        with contextlib.suppress(OSError):
            for number in range(5000):
                connection.send(codec.encode(messages.LeaseRelease(number)))
        watch.honest()


def prepared_request(ticket: int) -> bytes:
    recipe = messages.SessionRecipe("1", "b", (("CPUExecutionProvider",),), "ORT_ENABLE_ALL")
    return codec.encode(messages.OpenPreparedRequest(ticket, "/m.onnx", "", recipe, "/o", ()))


def test_a_request_before_hello(watch: Watch) -> None:
    with raw_connection(watch.world, hello=False) as connection:
        connection.send(prepared_request(0))
        assert isinstance(codec.decode(connection.recv(4096)), messages.Goodbye)


def test_answers_that_nobody_reads(watch: Watch) -> None:
    with raw_connection(watch.world) as connection, contextlib.suppress(OSError):
        for _ in range(20_000):
            connection.send(prepared_request(0))
        raise AssertionError("the daemon goes on")


def test_requests_without_their_offers(watch: Watch) -> None:
    """Found: each was handled within the one before, until Python allowed no further call."""
    requests = 100
    with raw_connection(watch.world) as connection:
        connection.recv(4096)
        connection.setblocking(False)  # a timeout waits until most of the room is free
        with watch.world.stopped(watch.pid):
            for _ in range(requests):
                connection.send(prepared_request(7))
        connection.settimeout(PATIENCE_S)
        for _ in range(requests):
            reply = codec.decode(connection.recv(4096))
            assert (reply.error, "ticket 7" in reply.message) == ("AccessDenied", True)


def take_a_millisecond() -> None:
    """Of the processor's time."""
    end_s = time.thread_time() + 0.001
    while time.thread_time() < end_s:
        pass


def test_packets_without_end_before_an_offer(make_world: Any) -> None:
    """Found: nobody else was served for seconds while an offer was looked for among them."""
    world = make_world()
    daemon = InProcessDaemon(world)
    connection = world.connection()
    on_packet, take_offer = daemon.server._on_packet, daemon.server.take_offer
    handled: list[int] = []
    searched: list[int] = []

    def go_on(session: Any, message: Any) -> None:
        if not isinstance(message, messages.LeaseRelease):
            return on_packet(session, message)
        take_a_millisecond()
        handled.append(session.number)
        if not searched:
            connection.release(1)
        return None

    def search(request: Request, ticket: int) -> Any:
        before = len(handled)
        try:
            return take_offer(request, ticket)
        finally:
            searched.append(len(handled) - before)

    daemon.server._on_packet = go_on  # type: ignore[method-assign]
    daemon.server.take_offer = search  # type: ignore[method-assign]
    try:
        connection.release(1)
        with pytest.raises(AccessDenied, match="no file was offered under ticket 7"):
            connection.request(messages.OpenImageRequest(7))
    finally:
        connection.close()
        daemon.close()
    assert 0 < searched[0] < 1000, searched


def test_packets_between_the_offers_of_a_request(make_world: Any) -> None:
    """Found: nobody else was served for ten seconds, as each offer had a time of its own."""
    world = make_world()
    daemon = InProcessDaemon(world)
    connection = world.connection()
    on_packet, on_request = daemon.server._on_packet, daemon.server._on_request
    tickets = iter(range(100, 150))
    handled: list[bool] = []
    is_asked = threading.Event()

    def go_on(session: Any, message: Any) -> None:
        if not isinstance(message, messages.LeaseRelease):
            return on_packet(session, message)
        take_a_millisecond()
        handled.append(is_asked.is_set())
        if is_asked.is_set() and handled.count(True) % 10 == 0:
            offer = messages.FileOffer(next(tickets))
            connection._send_handover(offer, descriptor)
        connection.release(1)
        return None

    def ask(request: Request, message: Any) -> None:
        is_asked.set()
        on_request(request, message)

    daemon.server._on_packet = go_on  # type: ignore[method-assign]
    daemon.server._on_request = ask  # type: ignore[method-assign]
    recipe = messages.SessionRecipe("1.20", "build", (("CPUExecutionProvider",),), "")
    externals = tuple(messages.OfferedExternal(str(ticket), ticket) for ticket in range(100, 140))
    request = messages.OpenPreparedRequest(0, "/model", "", recipe, "", externals=externals)
    descriptor = os.open(world.file(1), os.O_RDONLY)
    try:
        connection.release(1)
        with pytest.raises(AccessDenied, match="no file was offered under ticket"):
            connection.request(request)
    finally:
        os.close(descriptor)
        connection.close()
        daemon.close()


def test_many_connections_share_a_turn(make_world: Any) -> None:
    """All have more packets than fit a turn; those of one are not all handled before another's."""
    world = make_world()
    daemon = InProcessDaemon(world)
    handled: list[int] = []
    may_go_on = threading.Event()
    on_packet = daemon.server._on_packet

    def note(session: Any, message: Any) -> None:
        if isinstance(message, messages.LeaseRelease):
            assert may_go_on.wait(PATIENCE_S)
            handled.append(session.number)
        on_packet(session, message)

    daemon.server._on_packet = note  # type: ignore[method-assign]
    clients, packets = 8, 100
    try:
        with contextlib.ExitStack() as opened:
            connections = [opened.enter_context(raw_connection(world)) for _ in range(clients)]
            for connection in connections:
                connection.recv(4096)
                connection.setblocking(False)
            for connection in connections * packets:
                connection.send(codec.encode(messages.LeaseRelease(1)))
            may_go_on.set()
            wait_until(lambda: len(handled) == clients * packets, "all packets")
    finally:
        may_go_on.set()
        daemon.close()
    # The first turn began with one of them; afterwards all are ready.
    shared = handled[server_module._PACKETS_PER_TURN :][: 2 * server_module._PACKETS_PER_TURN]
    runs = [len(list(run)) for _, run in itertools.groupby(shared)]
    # One may be the last of a turn and the first of the next, as a turn begins anywhere.
    assert max(runs) <= 2 * (server_module._PACKETS_PER_TURN // clients)


def test_many_connections_of_a_user_leave_time_to_others(make_world: Any) -> None:
    """Found: all of a user's thousands were served before each packet of another one."""
    world = make_world()
    daemon = InProcessDaemon(world)
    handled: list[int] = []
    has_begun, may_go_on = threading.Event(), threading.Event()
    on_packet = daemon.server._on_packet

    def note(session: Any, message: Any) -> None:
        if isinstance(message, messages.LeaseRelease):
            has_begun.set()
            assert may_go_on.wait(PATIENCE_S)
            end_s = time.thread_time() + 0.005
            while other not in handled and time.thread_time() < end_s:
                pass
            handled.append(session.number)
        on_packet(session, message)

    daemon.server._on_packet = note  # type: ignore[method-assign]
    try:
        with contextlib.ExitStack() as opened:
            connections = [opened.enter_context(raw_connection(world)) for _ in range(17)]
            for connection in connections:
                connection.recv(4096)
                connection.setblocking(False)
            session = list(daemon.server.sessions)[-1]
            session.peer = session.peer._replace(uid=session.peer.uid + 1)
            other = session.number
            connections[0].send(codec.encode(messages.LeaseRelease(1)))
            assert has_begun.wait(PATIENCE_S)
            for connection in [connections[0]] * 100 + connections[1:-1] * 10 + connections[-1:]:
                connection.send(codec.encode(messages.LeaseRelease(1)))
            may_go_on.set()
            wait_until(lambda: other in handled, "the other user's packet")
    finally:
        may_go_on.set()
        daemon.close()
    # In the first turn only the first was ready, in the next one all.
    before = handled[: handled.index(other)]
    assert len(before) - before.count(before[0]) < 20


Attacker = Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]]


@contextlib.contextmanager
def flood(attacker: Attacker) -> Iterator[None]:
    """Two threads send while the block runs, over a new connection when theirs is closed.

    ``attacker`` connects; what it gives sends one message and says whether that was possible.
    """
    stop = threading.Event()
    sent = [0]

    def attack() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), attacker() as send:
                while not stop.is_set():
                    sent[0] += send()

    threads = [threading.Thread(target=attack) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
        wait_until(lambda: sent[0] > 1000, "a flood")
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_a_flood_of_packets_by_one_that_never_reads(watch: Watch) -> None:
    """The honest client is answered while the flood goes on."""
    packet = codec.encode(messages.LeaseRelease(1))

    @contextlib.contextmanager
    def attacker() -> Iterator[Callable[[], bool]]:
        with raw_connection(watch.world) as connection:
            yield lambda: connection.send(packet) > 0

    with flood(attacker):
        for _ in range(5):
            time.sleep(0.1)
            watch.honest(5)


def test_hellos_without_reading_the_answers(watch: Watch) -> None:
    """Of another protocol version, so that Hello may be repeated; the answers pile up unread."""
    hello = codec.encode(messages.Hello(99, "9", 1))
    with raw_connection(watch.world, hello=False) as connection:
        connection.settimeout(1)
        with contextlib.suppress(OSError):
            for _ in range(20_000):
                connection.send(hello)
        watch.honest()


def connect(connection: socket.socket, path: str) -> None:
    """Wait for room in the backlog, and out the moment in which the control socket is reset."""
    connection.settimeout(5)

    def is_connected() -> bool:
        try:
            connection.connect(path)
        except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            return False
        return True

    wait_until(is_connected, "room in the backlog")


@pytest.mark.usefixtures("many_descriptors")
def test_three_thousand_connections(watch: Watch) -> None:
    """Beyond the limit they are closed; honest clients work once there is room again."""
    connections = []
    try:
        for _ in range(3000):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections.append(connection)
            connect(connection, os.path.join(watch.world.sockets, "handover.sock"))
        wait_until(lambda: len(watch.world.descriptors(watch.pid)) > 2000, "connections")
        time.sleep(0.3)
        assert len(watch.world.descriptors(watch.pid)) < watch.descriptors + 2100
        # Its own user is at the limit: refused, not hung.
        cache = watch.world.cache(autostart="0")
        with pytest.raises(TrimsError):
            cache.welcome()
    finally:
        for connection in connections:
            connection.close()


def test_counters_cannot_grow_beyond_an_answer(watch: Watch) -> None:
    """Found: a sum beyond 64 bits could not be encoded, and the daemon died of the next status."""
    report = codec.encode(messages.StatsReport({"served": (1 << 64) - 1}))
    with raw_connection(watch.world) as connection:
        for _ in range((1 << 14) + 10):
            connection.send(report)
    assert watch.world.status().counters["client.served"] <= 1 << 63


def test_more_images_than_a_status_can_name(make_world: Any) -> None:
    """Found: a reply beyond 1 MiB was too long for every client, so that no status came at all."""
    world = make_world()
    world.start()
    long_name = "/" + "n" * 4000
    world.run(
        "c = Connection(cache().endpoint, stall_timeout_s=10)\n"
        f"for n in range(40):\n"
        f"  path = {world.root!r} + f'/small-{{n}}'\n"
        "  open(path, 'wb').write(b'%d' % n)\n"
        "  f = os.open(path, os.O_RDONLY)\n"
        "  for k in range(16):\n"
        f"    os.close(c.open_image(f, {long_name!r} + str(k)).descriptor)\n"
        "  os.close(f)\n"
    )
    status = world.status()
    assert len(status.images) == 40


# --- ZeroMQ ---------------------------------------------------------------------------------------


def socket_path(world: World, kind: str = "control-") -> str:
    """Of a socket of ZeroMQ, once it has its name: it may be reset now."""

    def named() -> list[str]:
        return [name for name in os.listdir(world.sockets) if name.startswith(kind)]

    (name,) = wait_until(named, f"a socket {kind}")
    return os.path.join(world.sockets, name)


@contextlib.contextmanager
def dealer(world: World, kind: int = zmq.DEALER) -> Iterator[Any]:
    path = socket_path(world)
    context: Any = zmq.Context()
    control = context.socket(kind)
    control.setsockopt(zmq.LINGER, 0)
    control.setsockopt(zmq.SNDTIMEO, 200)
    control.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1e3))
    control.connect(f"ipc://{path}")
    try:
        yield control
    finally:
        control.close(linger=0)
        context.term()


def envelope(message: Any, token: bytes = b"", number: int = 1) -> bytes:
    return codec.encode_envelope(codec.Envelope(number, token, message))


FRAMES: dict[str, Callable[[], list[bytes]]] = {
    "empty": lambda: [b""],
    "noise": lambda: [os.urandom(200)],
    "three parts": lambda: [b"a", b"b", b"c"],
    "delimiter first": lambda: [b"", envelope(admin.GetStatusRequest())],
    "a thousand parts": lambda: [b"x"] * 1000,
    "just below the limit": lambda: [b"\x91" * 65_000],
    "oversize": lambda: [b"x" * 100_000],
    "far oversize": lambda: [b"x" * (64 << 20)],
    "no token": lambda: [envelope(admin.GetStatusRequest())],
    "a wrong token": lambda: [envelope(admin.StopDaemonRequest(), os.urandom(16))],
    "a long token": lambda: [envelope(admin.StopDaemonRequest(), b"x" * 5000)],
    "a handover message": lambda: [envelope(messages.DrainRequest("9"))],
    "a reply": lambda: [envelope(admin.StopDaemonReply())],
}


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.PUSH], ids=["DEALER", "REQ", "PUSH"])
def test_bad_frames(shared_watch: Watch, frames: str, kind: int) -> None:
    for _ in range(3):
        with dealer(shared_watch.world, kind) as control:
            with contextlib.suppress(zmq.ZMQError):
                control.send_multipart(FRAMES[frames]())
            if kind != zmq.PUSH:
                with contextlib.suppress(zmq.ZMQError):
                    control.poll(30)
    shared_watch.check()


def test_not_zeromq_at_all(watch: Watch) -> None:
    """Raw bytes on the control socket: the greeting of ZMTP never comes, or comes broken."""
    path = socket_path(watch.world)
    connections = []
    for data in (b"", b"\xff", b"GET /\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f\x03\x01", b"\0" * 99):
        for _ in range(20):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(5)
            connection.connect(path)
            with contextlib.suppress(OSError):
                connection.send(data)
            connections.append(connection)
    watch.honest()
    for connection in connections:
        connection.close()


def test_wrong_tokens_without_end(watch: Watch) -> None:
    with dealer(watch.world) as control:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            with contextlib.suppress(zmq.ZMQError):
                control.send(envelope(admin.GetStatusRequest(), os.urandom(16)))
        watch.honest(5)
        # ZeroMQ's own thread connects, and may come to it late.
        wait_until(lambda: watch.world.status().counters.get("rejected_messages"), "refused")


def test_requests_without_end_and_no_answer_read(watch: Watch) -> None:
    """A greeted client floods status requests; others are answered meanwhile."""

    @contextlib.contextmanager
    def attacker() -> Iterator[Callable[[], bool]]:
        with raw_connection(watch.world) as connection:
            welcome = codec.decode(connection.recv(4096))
            data = envelope(admin.GetStatusRequest(), welcome.token)
            with dealer(watch.world) as control:

                def send() -> bool:
                    try:
                        control.send(data)
                    except zmq.ZMQError:
                        return False
                    return True

                yield send

    with flood(attacker):
        for _ in range(5):
            time.sleep(0.3)
            watch.honest(8)


def test_the_status_is_for_the_end_of_a_turn(make_world: Any) -> None:
    """Found: a hundred clients that asked for it kept others waiting for seconds."""
    config = make_world().config()
    directory = endpoint.choose(config)
    directory.create()
    server = daemon_main._build(directory, config)
    answers: list[tuple[int, str]] = []
    server.reply = lambda _, number, message: answers.append(  # type: ignore[method-assign]
        (number, type(message).__name__)
    )
    ends = [socket.socketpair() for _ in range(3)]
    sessions = [server.sessions.add(ours, handover.peer_of(ours), 0) for ours, _ in ends]
    for number, session in enumerate([*sessions, sessions[0]]):
        server._on_request(Request(session, number, b"route"), admin.GetStatusRequest())
    server._on_request(Request(sessions[2], 9, b"route"), admin.PinImageRequest("x", True))
    server.end_session(sessions[1], "")
    expected = [(3, "ErrorReply"), (9, "ErrorReply")]
    assert answers == expected
    for number in (0, 2):
        server._turn()
        expected.append((number, "GetStatusReply"))
        assert answers == expected
    server.stop()
    server.run()
    os.close(server._wake_descriptor)
    for _, theirs in ends:
        theirs.close()


def test_opens_without_end(watch: Watch) -> None:
    """Requests for tickets that were not offered, and one request number again and again."""
    with raw_connection(watch.world) as connection:
        welcome = codec.decode(connection.recv(4096))
        with dealer(watch.world) as control:
            for number in range(2000):
                message = messages.OpenImageRequest(number)
                with contextlib.suppress(zmq.ZMQError):
                    control.send(envelope(message, welcome.token, number % 3))
            watch.honest(5)


FLOOD_BYTES = 320 << 20
"""More than the daemon may grow by (256 MiB), also where that takes longer than a flood lasts."""


def multipart_without_end(world: World, seconds: float, part: bytes) -> int:
    """Parts of one message that never ends, through ZMTP by hand: a library would wait."""
    path = socket_path(world)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    ready_body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    frame = b"\x03" + struct.pack(">Q", len(part)) + part
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        connect(stream, path)
        stream.sendall(greeting)
        stream.recv(64, socket.MSG_WAITALL)
        stream.sendall(b"\x04" + bytes([len(ready_body)]) + ready_body)
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while time.monotonic() < until or sent < FLOOD_BYTES:
                stream.sendall(frame)
                sent += len(part)
    return sent


@pytest.mark.slow
def test_a_message_that_never_ends(running: World) -> None:
    """What ZeroMQ keeps of it is bounded: the control socket is reset, and honest clients go on."""
    world = running
    watch = Watch(world)
    holder = world.spawn(
        f"arena = open_file({watch.path!r})\nright = data(arena)\nsay()\nhear()\n"
        f"say(data(arena) == right)\nother = open_file({world.file(2)!r})\n"
        f"say(data(other)[:8].hex())\nhear()\n"
    )
    holder.hear()
    peak = [0]
    stop = threading.Event()

    def observe() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                peak[0] = max(peak[0], world.rss_bytes(watch.pid))
            time.sleep(0.01)

    observer = threading.Thread(target=observe)
    observer.start()
    sent = 0
    try:
        for attempt in range(20):
            if attempt < 2 or sent <= 300 << 20:  # a reset cuts one short, and refuses the next
                with contextlib.suppress(OSError):
                    sent += multipart_without_end(world, 4, b"x" * 60_000)
    finally:
        stop.set()
        observer.join(PATIENCE_S)
    assert sent > 300 << 20, "the flood was not one"
    assert peak[0] < 3 << 30
    wait_until(lambda: world.status().counters.get("control_resets", 0) > 0, "a reset")
    watch.honest()
    holder.say()
    assert holder.hear() is True
    assert holder.hear() == content(2)[:8].hex()
    assert os.stat(socket_path(world)).st_mode & 0o777 == 0o600
    holder.say()
    holder.wait()
    assert world.pid() == watch.pid
    wait_until(  # the daemon gives back once a second what a flood left in its heap
        lambda: world.rss_bytes(watch.pid) < watch.rss + RSS_SLACK, "memory is given back"
    )


def test_hundreds_of_control_connections(watch: Watch) -> None:
    path = socket_path(watch.world)
    connections = []
    try:
        for _ in range(700):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connections.append(connection)
            connect(connection, path)
        watch.honest()
    finally:
        for connection in connections:
            connection.close()


def test_verifications_without_end(watch: Watch) -> None:
    """Each holds a descriptor until its turn comes."""
    expected = {"VerifyImageReply", "TooManyRequests"}
    with raw_connection(watch.world) as connection:
        welcome = codec.decode(connection.recv(4096))
        digest = watch.world.status().images[0].digest
        with dealer(watch.world) as control:
            sent = 0
            for number in range(3000):
                message = admin.VerifyImageRequest(digest)
                with contextlib.suppress(zmq.ZMQError):
                    control.send(envelope(message, welcome.token, number))
                    sent += 1
            assert len(watch.world.descriptors(watch.pid)) < watch.descriptors + 50
            watch.honest(5)
            kinds: set[str] = set()
            while sent and not expected <= kinds:
                reply = codec.decode_envelope(control.recv()).message
                kinds.add(getattr(reply, "error", type(reply).__name__))
                sent -= 1
    assert kinds == expected


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("name", ["control-", "events-"])
def test_more_zeromq_connections_than_the_daemon_has_descriptors(
    make_world: Any, name: str
) -> None:
    """ZeroMQ aborts where none is left, and takes 1000 before it can be kept from it."""
    world = make_world()
    world.run(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2600, 2600))\n"
        "cache().welcome(may_start=True)\n",
        stall_timeout="2",
    )
    watch = Watch(world)
    path = socket_path(world, name)
    connections = []
    try:
        for _ in range(3000):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connections.append(connection)
            connect(connection, path)
        # Who says nothing is let go soon; until then its user may find no place.
        wait_until(lambda: len(world.descriptors(watch.pid)) < 64, "refused")
        watch.honest()
    finally:
        for connection in connections:
            connection.close()
    watch.check()


def subscribe(world: World, topics: str) -> subprocess.Popen[bytes]:
    """In a process of its own: ZeroMQ walks through topics with one call for each byte."""
    path = socket_path(world, "events-")
    code = (
        "import os, sys, time, zmq\n"
        "listening = zmq.Context().socket(zmq.SUB)\n"
        "listening.setsockopt(zmq.SNDHWM, 0)\n"
        "listening.connect('ipc://' + sys.argv[1])\n"
        f"for topic in {topics}: listening.subscribe(topic)\n"
        "time.sleep(60)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code, path])


@pytest.mark.parametrize(
    "topics",
    ["[b'x' * (4 << 20)]", "(os.urandom(50) for _ in range(300_000))"],
    ids=["a long one", "many"],
)
def test_subscriptions_without_end(watch: Watch, topics: str) -> None:
    """ZeroMQ keeps a table of them, 60 times as large, and takes them in when there is an event."""
    listening = subscribe(watch.world, topics)
    try:
        for is_pinned in (True, False, True, False):
            time.sleep(1)
            with contextlib.closing(watch.world.connection()) as connection:
                connection.request(admin.PinImageRequest(watch.path, is_pinned))  # an event
            watch.honest()
    finally:
        listening.kill()
        listening.wait()


def test_who_offers_a_file_where_others_have_all_descriptors_keeps_its_connection(
    world: World,
) -> None:
    """Found: it was closed, and with it ended the leases of the client."""
    world.run(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        "cache().welcome(may_start=True)\n"
    )
    pid = world.pid()
    cache = world.cache(autostart="0")
    paths = [world.file(seed) for seed in range(2)]
    arena = open_path(cache, paths[0])
    with contextlib.ExitStack() as opened, open(paths[1], "rb") as file:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
        others = [opened.enter_context(raw_connection(world)) for _ in range(3)]
        for number in itertools.count(1):
            if len(world.descriptors(pid)) >= 128 - 32 - 4:  # a quarter, and for four clients
                break
            others[number % 3].sendmsg([codec.encode(messages.FileOffer(number))], rights)
            time.sleep(0.01)
        with pytest.raises(TooManyRequests, match="out of file descriptors"):
            open_path(cache, paths[1])
    wait_until(world.is_answering, "there are some again")
    (image,) = world.status().images
    assert image.leases == 1
    assert bytes(memoryview(open_path(cache, paths[1]).buffer)) == content(1)
    del arena
