"""Files whose server is gone cost those who load them, and nobody else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import World, content, process_state, wait_until

from faults.dead_server import DeadServer
from faults.device_worlds import GPU, Background, MakeWorld, model
from trims_shim.daemon.loader import CONCURRENT_LOADS

_CLIENT = """
descriptor = os.open({path!r}, os.O_RDONLY)
connection = Connection(cache().endpoint, stall_timeout_s=60)
def ask():
    return connection.open_image(descriptor, "on a server")
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., DeadServer]]:
    """Mounts it where that can be done."""
    servers = []

    def serve(**settings: int) -> DeadServer:
        try:
            servers.append(DeadServer(str(tmp_path), **settings))
        except OSError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def server(serve: Callable[..., DeadServer]) -> DeadServer:
    return serve()


def test_loads_of_dead_files_keep_nobody_waiting(running: World, server: DeadServer) -> None:
    pid, path = running.pid(), running.file(1)
    clients = []
    for number in range(CONCURRENT_LOADS + 1):
        hung = os.path.join(server.path, str(number))
        clients.append(running.spawn(f"say('begun'); open_file({hung!r})"))
        assert clients[-1].hear() == "begun"
    wait_until(lambda: server.loads >= CONCURRENT_LOADS, "all threads read")
    began = time.monotonic()
    assert running.run(f"arena = open_file({path!r}); say(len(data(arena)))") == len(content(1))
    assert time.monotonic() - began < 25, "as long as it takes until loads are given up"
    assert running.pid() == pid

    # Nor do they keep the daemon from stopping.
    for client in clients:
        client.kill()
    running.signal(pid, signal.SIGTERM)
    wait_until(lambda: process_state(pid) in ("", "Z"), "the daemon ends")


def _load_local(world: World) -> None:
    path = world.file(1)
    began = time.monotonic()
    assert world.run(f"arena = open_file({path!r}); say(len(data(arena)))") == len(content(1))
    assert time.monotonic() - began < 25, "as long as it takes until loads are given up"


def test_attributes_that_are_not_answered(running: World, serve: Callable[..., DeadServer]) -> None:
    server = serve(valid_s=0)
    pid = running.pid()
    client = running.spawn(
        _CLIENT.format(path=os.path.join(server.path, "a")) + "say(); hear(); ask()"
    )
    client.hear()
    server.die()
    client.say()
    wait_until(lambda: server.loads, "the load begins")
    _load_local(running)
    assert running.pid() == pid
    server.close()


def test_closing_that_is_not_answered(running: World, serve: Callable[..., DeadServer]) -> None:
    """Of files of answered requests, and of offers that are refused, or left."""
    server = serve(valid_s=0)
    server.is_alive = True
    pid, path = running.pid(), os.path.join(server.path, "a")
    client = running.spawn(
        _CLIENT.format(path=path) + "say(ask().reply.outcome)\n"
        "hear(); say(ask().reply.outcome)\n"
        "for ticket in (90, 91, 91):\n"
        "    connection._send_handover(messages.FileOffer(ticket), descriptor)\n"
        "say()\n"
    )
    assert client.hear() == "miss"
    server.die()
    client.say()
    assert client.hear() == "hit"
    client.hear()
    _load_local(running)
    assert running.pid() == pid

    # It cannot end either, and makes room for another one all the same.
    running.signal(pid, signal.SIGTERM)
    _load_local(running)
    assert running.pid() != pid
    server.close()
    wait_until(lambda: process_state(pid) in ("", "Z"), "the daemon ends")


def test_a_process_that_is_started_beside_a_dead_file(
    running: World, serve: Callable[..., DeadServer]
) -> None:
    """It waits for that server, as it closes what it inherits: its starter, but no other thread."""
    server = serve()
    server.is_alive = True
    child = running.spawn(
        "import threading, time\n"
        "from trims_shim.children import launch\n"
        f"descriptor = os.open({os.path.join(server.path, 'a')!r}, os.O_RDONLY)\n"
        "say(); hear()\n"
        "is_started = threading.Event()\n"
        "def start():\n"
        "    process = launch([sys.executable, '-c', ''], environment={}, descriptors=())\n"
        "    is_started.set()\n"
        "    process.wait()\n"
        "threading.Thread(target=start).start()\n"
        "time.sleep(0.5)\n"
        "say(is_started.is_set()); hear()\n"
        "say(is_started.wait(50))\n"
    )
    child.hear()
    server.die()
    child.say()
    assert not child.hear()
    server.close()
    child.say()
    assert child.hear()


@pytest.mark.parametrize("number", [2, 3])
def test_a_daemon_that_is_started_beside_a_dead_file(
    world: World, serve: Callable[..., DeadServer], number: int
) -> None:
    """The new process waits for that server: its starter for a time, and no other thread."""
    server = serve()
    server.is_alive = True
    child = world.spawn(
        "import threading\n"
        f"dead = os.open({os.path.join(server.path, 'a')!r}, os.O_RDONLY)\n"
        f"if dead != {number}: os.dup2(dead, {number})\n"
        "say(); hear()\n"
        "def load():\n"
        "    try: open_file('/proc/self/exe')\n"
        "    except errors.DaemonTimeout: say('given up')\n"
        "threading.Thread(target=load).start()\n"
        "time.sleep(0.5)\n"
        "say('others run')\n",
        start_timeout="3",
    )
    child.hear()
    server.die()
    child.say()
    assert [child.hear(), child.hear()] == ["others run", "given up"]
    server.close()
    wait_until(world.is_answering, "the daemon has started all the same")


def test_a_directory_of_temporary_files_that_is_not_needed(
    world: World, serve: Callable[..., DeadServer]
) -> None:
    """Sockets are below the first directory that can hold them."""
    server = serve(valid_s=0)
    server.die()
    child = world.spawn(
        "from trims_shim.wire.endpoint import choose\n"
        f"places = {{'XDG_RUNTIME_DIR': {world.root!r}, 'TMPDIR': {server.path!r}}}\n"
        "say(choose(config.load(places)).directory)\n"
    )
    assert child.hear() == os.path.join(world.root, "trims")


def test_loads_onto_a_device_beside_a_dead_file(
    make_device_world: MakeWorld, serve: Callable[..., DeadServer]
) -> None:
    """Found: the uploader hung in its mapping, with Python's lock held."""
    world, server = make_device_world(), serve()
    world.start()
    hung = world.spawn(
        _CLIENT.format(path=os.path.join(server.path, "a"))
        + f"connection.open_image(descriptor, 'on a server', tier={GPU!r})\n"
    )
    wait_until(lambda: server.loads, "it is read")
    began = time.monotonic()
    loads = [Background(world, model(world, seed)) for seed in (1, 2)]
    assert [each.join() for each in loads] == [("miss", True)] * 2
    assert time.monotonic() - began < 25, "as long as it takes until loads are given up"
    hung.kill()
    server.close()
