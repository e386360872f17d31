"""Prepared ONNX models while processes die. Promises: a session is always made and computes what it
would without the shim; what is half made never appears; what is there stays there."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from harness import World, process_state, wait_until

from faults.prepared_worlds import (
    SESSIONS,
    MakeWorld,
    directory,
    entries,
    evict,
    expected,
    model,
    prepare,
    preparers,
    rows,
    sessions,
    settled,
    wait_for_preparer,
)


def test_a_killed_preparer_costs_one_preparation(prepared_world: World) -> None:
    world = prepared_world
    path = model(world)
    client = sessions(world)
    right = expected(world, path)[0]
    assert client.create(path) == (right, False)
    os.kill(wait_for_preparer(world), signal.SIGKILL)
    assert settled(world) == {"preparer_killed": 1}
    assert client.create(path) == (right, False)
    assert client.fallbacks().get("preparer_killed") == 1
    wait_until(lambda: not os.listdir(directory(world)), "nothing is left of it")
    evict(world)
    client.create(path)
    assert settled(world) == {"ready": 1}
    assert client.create(path) == (right, True)
    assert client.run() == [right] * 4


def test_a_preparer_that_hangs_is_given_up(make_prepared_world: MakeWorld) -> None:
    world = make_prepared_world(prepare_timeout="3")
    path = model(world)
    client = sessions(world)
    bits, _ = client.create(path)
    pid = wait_for_preparer(world)
    os.kill(pid, signal.SIGSTOP)
    assert settled(world) == {"preparer_stalled": 1}
    wait_until(lambda: process_state(pid) in ("", "Z"), "the preparer is ended")
    assert client.create(path) == (bits, False)
    wait_until(lambda: not os.listdir(directory(world)), "nothing is left of it")


def test_a_preparer_ends_with_its_daemon(prepared_world: World) -> None:
    """What it has left half made is deleted by the daemon that comes."""
    world = prepared_world
    path = model(world)
    client = sessions(world)
    bits, _ = client.create(path)
    pid = wait_for_preparer(world)
    os.kill(pid, signal.SIGSTOP)
    world.kill_daemon()
    assert entries(world) == []
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: process_state(pid) in ("", "Z"), "the preparer ends")
    assert client.create(path) == (bits, False)
    assert settled(world) == {"ready": 1}
    assert client.create(path) == (bits, True)
    wait_until(lambda: len(os.listdir(directory(world))) == 1, "nothing half made is left")


def test_the_daemon_dies_while_sessions_run(prepared_world: World) -> None:
    """Sessions go on; the next one finds the same prepared model with the next daemon."""
    world = prepared_world
    path = model(world)
    prepare(world, path)
    made = {row.key: row.prepare_ns for row in rows(world)}
    inodes = [os.stat(f"{directory(world)}/{key}/weights.bin").st_ino for key in made]
    client = sessions(world)
    right, is_served = client.create(path)
    assert is_served
    first = world.kill_daemon()
    assert client.run() == [right]
    assert client.create(path) == (right, True)
    assert world.pid() != first
    assert {row.key: row.prepare_ns for row in rows(world)} == made
    assert [os.stat(f"{directory(world)}/{key}/weights.bin").st_ino for key in made] == inodes
    assert world.status().counters.get("prepared_made", 0) == 0
    assert client.run() == [right, right]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_daemon_dies_while_it_is_asked(prepared_world: World, moment: str) -> None:
    """Between the offer of a model and the answer, and between the answer and the session."""
    world = prepared_world
    path = model(world)
    prepare(world, path)
    child = world.spawn(
        SESSIONS + "real, send = Connection.open_prepared, Connection._send_handover\n"
        "def wait(): say('asks'); hear()\n"
        "def open_prepared(self, *args, **kwargs):\n"
        "  reply = real(self, *args, **kwargs)\n"
        "  wait()\n"
        "  return reply\n"
        "def send_handover(self, message, *args):\n"
        "  send(self, message, *args)\n"
        "  if isinstance(message, messages.FileOffer): wait()\n"
        f"if {moment!r} == 'before': Connection._send_handover = send_handover\n"
        "else: Connection.open_prepared = open_prepared\n"
        f"session = create({path!r})\n"
        "say([bits(session), counted()])\n"
    )
    assert child.hear() == "asks"
    world.kill_daemon()
    child.say()
    again = child.hear()
    # It asks another daemon then, and the test lets it.
    while again == "asks":
        child.say()
        again = child.hear()
    assert again[0] == expected(world, path)[0]
    assert again[1] == [1, {}]


def test_a_daemon_that_hangs_is_given_up(make_prepared_world: MakeWorld) -> None:
    world = make_prepared_world(stall_timeout="1")
    path = model(world)
    prepare(world, path)
    client = sessions(world)
    right, _ = client.create(path)
    wait_until(lambda: client.create(path) == (right, True), "a session that is served")
    timeouts = client.fallbacks().get("daemon_timeout", 0)  # on a busy machine
    pid = world.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert client.create(path) == (right, False)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert client.fallbacks().get("daemon_timeout") == timeouts + 1
    wait_until(lambda: client.create(path) == (right, True), "a session after the pause")


def test_without_a_daemon_sessions_are_made_all_the_same(prepared_world: World) -> None:
    world = prepared_world
    path = model(world)
    said: Any = world.run(
        SESSIONS + f"session = create({path!r})\nsay([bits(session), counted()])\n", autostart="0"
    )
    assert said == [expected(world, path)[0], [0, {"daemon_unavailable": 1}]]


def test_leases_end_with_sessions_and_processes(prepared_world: World) -> None:
    world = prepared_world
    path = model(world)
    prepare(world, path)

    def leases() -> int:
        return sum(row.leases for row in rows(world))

    wait_until(lambda: leases() == 0, "the client's lease that is gone")
    clients = [sessions(world) for _ in range(2)]
    for client in clients:
        client.create(path)
        client.create(path)
    assert leases() == 4
    clients[0].drop()
    wait_until(lambda: leases() == 2, "the leases of dropped sessions")
    clients[1].child.kill()
    wait_until(lambda: leases() == 0, "the leases of a killed client")


def test_a_forked_child_takes_no_lease_along(prepared_world: World) -> None:
    """The parent's session is leased as long as the parent has it, whatever children do."""
    world = prepared_world
    path = model(world)
    prepare(world, path)
    child = world.spawn(
        SESSIONS + f"session = create({path!r})\n"
        "right = bits(session)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "  same = bits(session) == right\n"
        f"  other = create({path!r})\n"
        "  same = same and bits(other) == right and trims_shim.stats().served > 0\n"
        "  del session, other\n"
        "  os._exit(0 if same else 3)\n"
        "say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "hear()\n"
        "say(bits(session) == right)\n"
        "hear()\n"
    )
    assert child.hear() == 0
    wait_until(lambda: [row.leases for row in rows(world)] == [1], "one lease is left")
    child.say()
    assert child.hear() is True


def test_several_processes_ask_at_once(prepared_world: World) -> None:
    """One preparation, whoever asks how often meanwhile; then all of them are served."""
    world = prepared_world
    path = model(world)
    right = expected(world, path)[0]
    children = [
        world.spawn(
            SESSIONS + "say('ready'); hear()\n"
            f"say([bits(create({path!r})) for _ in range(3)])\n"
            "hear()\n"
            f"session = create({path!r})\n"
            "say([bits(session), counted()[0] > 0])\n"
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.hear() == "ready"
    for child in children:
        child.say()
    for child in children:
        assert child.hear() == [right] * 3
    assert settled(world) == {"ready": 1}
    for child in children:
        child.say()
    for child in children:
        assert child.hear() == [right, True]
    counters = world.status().counters
    assert counters["prepared_made"] == 1
    assert len(entries(world)) == 1
    wait_until(lambda: not preparers(world), "the preparer ends")


def test_models_that_wait_leave_descriptors_to_other_clients(prepared_world: World) -> None:
    """Found: with all their files open, the daemon closed the connection of whoever offered one."""
    world = prepared_world
    world.run(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "cache().welcome(may_start=True)\n"
    )
    files = [world.file(seed) for seed in range(4)]
    holder = world.spawn(
        f"paths = iter({files!r})\n"
        "connection = Connection(cache().endpoint, stall_timeout_s=30)\n"
        "held = []\n"
        "for path in iter(hear, None):\n"
        "    try:\n"
        "        with open(path, 'rb') as file:\n"
        "            held.append(connection.open_image(file.fileno(), path).reply.lease)\n"
        "        say('granted')\n"
        "    except errors.TrimsError as error: say(type(error).__name__)\n",
        autostart="0",
    )
    holder.say(files[0])
    assert holder.hear() == "granted"
    sessions(world).create(model(world))
    pid = wait_for_preparer(world)
    os.kill(pid, signal.SIGSTOP)
    try:
        outcomes = world.run(
            "import onnxruntime\n"
            "recipe = messages.SessionRecipe('1', 'b', (('CPUExecutionProvider',),), 'all')\n"
            "package = os.path.dirname(onnxruntime.__file__)\n"
            "connection = Connection(cache().endpoint, stall_timeout_s=30)\n"
            "outcomes = []\n"
            "for number in range(20):\n"
            f"    path = {world.root!r} + f'/many-{{number}}.onnx'\n"
            "    with open(path, 'w+') as file:\n"
            "        file.write(path); file.flush()\n"
            "        request = messages.OpenPreparedRequest(0, path, '', recipe, package)\n"
            "        others = {f'{each}.bin': file.fileno() for each in range(16)}\n"
            "        reply = connection.open_prepared(\n"
            "            request, descriptor=file.fileno(), externals=others\n"
            "        )\n"
            "        outcomes.append(reply.reason or reply.outcome)\n"
            "say(outcomes)\n"
        )
        for path in files[1:]:
            holder.say(path)
            assert holder.hear() == "granted"
        assert world.status().counters.get("rejected_packets", 0) == 0
        assert outcomes[0] == "preparing"
        assert outcomes[-1] == "busy"
    finally:
        os.kill(pid, signal.SIGKILL)
