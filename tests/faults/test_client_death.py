"""A client is killed. Promises: its leases, offers and descriptors are gone, nothing leaks over
many deaths, and the daemon's account returns to what it was."""

from __future__ import annotations

import os
import signal

import pytest
from harness import LARGE_BYTES, InProcessDaemon, World, wait_until

from trims_shim.wire import admin

_HANG = "signal.pause()\n"

STEPS = {
    "after Hello": "c = Connection(cache().endpoint, stall_timeout_s=10)\nsay('here')\n" + _HANG,
    "after FileOffer": (
        "c = Connection(cache().endpoint, stall_timeout_s=10)\n"
        "f = os.open(PATH, os.O_RDONLY)\n"
        "for ticket in range(1, 20): handover.send(c._handover, messages.FileOffer(ticket),"
        " descriptor=f)\n"
        "say('here')\n" + _HANG
    ),
    "after the offer of a request": (
        "def answer_to_offer(self, parts):\n"
        "  say('here'); signal.pause()\n"
        "Connection._answer_to_offer = answer_to_offer\n"
        "open_file(PATH)\n"
    ),
    "after the request": (
        "from trims_shim.client.session import Conversation\n"
        "Connection._answer_to_offer = lambda self, parts: messages.OfferReply(0)\n"
        "def check_stall(self, now):\n"
        "  say('here'); signal.pause()\n"
        "Conversation.check_stall = check_stall\n"
        "open_file(PATH)\n"
    ),
    "after the grant": (
        "import trims_shim.client.connection as module\n"
        "def Granted(*_):\n"
        "  say('here'); signal.pause()\n"
        "module.Granted = Granted\n"
        "open_file(PATH)\n"
    ),
    "while mapped": "arena = open_file(PATH)\nsay('here')\n" + _HANG,
    "with private pages": "arena = open_file(PATH)\narena.buffer[0:4096] = b'x' * 4096\n"
    "say('here')\n" + _HANG,
}


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(running: World, step: str) -> None:
    world = running
    path = world.file(1)
    pid = world.pid()
    world.run(f"open_file({path!r})\n")
    before = len(world.descriptors(pid))
    memory = world.status().memory
    for _ in range(4):
        children = [world.spawn(f"PATH = {path!r}\n{STEPS[step]}") for _ in range(2)]
        for child in children:
            assert child.hear() == "here"
        if step == "while mapped":
            assert sum(image.leases for image in world.status().images) == 2
        if step == "after FileOffer":
            wait_until(lambda: len(world.descriptors(pid)) >= before + 38, "offers are held")
        for child in children:
            child.kill()
            child.close()
        world.children.clear()
        world.assert_quiet(before)
    assert world.pid() == pid
    assert world.status().memory == memory
    world.assert_account()


def test_killed_while_its_load_runs(make_world: object) -> None:
    """The load runs to its end without anybody waiting, then the image may be evicted."""
    world: World = make_world(host_bytes="1G")  # type: ignore[operator]
    path = world.sparse_file(LARGE_BYTES)
    pid = world.start()
    before = len(world.descriptors(pid))
    for _ in range(3):
        child = world.spawn(f"open_file({path!r})\n")
        world.wait_for_load()
        child.kill()
        wait_until(lambda: world.status().memory.reserved_bytes == 0, "the load ends")
        world.assert_account()
        connection = world.connection()
        try:
            connection.request(admin.EvictImageRequest())
        finally:
            connection.close()
        world.assert_quiet(before)
        assert world.status().memory.resident_bytes == 0
        assert world.segments(pid) == []


def test_one_waiter_killed_the_others_are_served(make_world: object) -> None:
    world: World = make_world(host_bytes="1G")  # type: ignore[operator]
    path = world.sparse_file(LARGE_BYTES)
    pid = world.start()
    # All begin at once: the load may be over before the fourth process has started.
    script = f"say()\nhear()\narena = open_file({path!r})\nsay(arena.size_bytes)\n"
    children = [world.spawn(script) for _ in range(4)]
    for child in children:
        child.hear()
    for child in children:
        child.say()
    world.wait_for_load()
    world.signal(pid, signal.SIGSTOP)
    children[0].kill()
    children[1].kill()
    world.signal(pid, signal.SIGCONT)
    assert [child.hear() for child in children[2:]] == [LARGE_BYTES] * 2
    counters = world.status().counters
    assert counters.get("open_joined", 0) + counters.get("open_hit", 0) >= 1
    assert counters["images_loaded"] == 1


def test_many_deaths_leak_nothing(running: World) -> None:
    """A forked crowd opens files and dies in the middle, forty times five."""
    world = running
    paths = [world.file(seed, (256 << 10) + seed) for seed in range(1, 6)]
    world.run("".join(f"open_file({path!r})\n" for path in paths))
    pid = world.pid()
    before = len(world.descriptors(pid))
    memory = world.status().memory
    rss = world.rss_bytes(pid)
    world.run(
        f"paths = {paths!r}\n"
        "import random\n"
        "for round in range(40):\n"
        "  pids = []\n"
        "  for n in range(5):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "      while True:\n"
        "        for path in paths: open_file(path, shared=Cache(config.load()))\n"
        "    pids.append(pid)\n"
        "  time.sleep(random.Random(round).uniform(0, 0.06))\n"
        "  for pid in pids:\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    os.waitpid(pid, 0)\n",
        timeout_s=120,
    )
    world.assert_quiet(before)
    assert world.pid() == pid
    assert world.status().memory == memory
    wait_until(lambda: world.rss_bytes(pid) < rss + (32 << 20), "memory is given back")
    world.assert_account()


def test_a_client_that_ends_reports_and_releases(running: World) -> None:
    path = running.file(2)
    before = len(running.descriptors(running.pid()))
    running.run(f"arena = open_file({path!r})\nassert data(arena) == open({path!r}, 'rb').read()\n")
    status = running.status()
    assert status.counters["client.open:miss"] == 1
    assert [image.leases for image in status.images] == [0]
    running.assert_quiet(before + 1)


def test_many_releases_before_an_offer_are_no_reason_to_refuse(
    make_world: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offer may lie behind any number of packets that the daemon has not read yet."""
    from trims_shim.daemon import server as server_module

    monkeypatch.setattr(server_module, "_PACKETS_PER_TURN", 1)
    world: World = make_world()  # type: ignore[operator]
    daemon = InProcessDaemon(world)
    connection = world.connection()
    path = world.file(3)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _ in range(20):
            leases = [connection.open_image(descriptor, path) for _ in range(20)]
            for each in leases:
                os.close(each.descriptor)
                connection.release(each.reply.lease)
        granted = connection.open_image(descriptor, path)
        os.close(granted.descriptor)
        assert [image.leases for image in world.status().images] == [1]
    finally:
        os.close(descriptor)
        connection.close()
        daemon.close()
