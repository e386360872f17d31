"""The daemon is killed. Promises: a client gets the right bytes or an error it can fall back from,
what is mapped stays right, and the next load starts a new daemon."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from typing import Any

import pytest
from harness import LARGE_BYTES, PATIENCE_S, World, content, open_path, wait_until

from trims_shim.client import pool
from trims_shim.errors import DaemonTimeout, DaemonUnavailable, TrimsError
from trims_shim.wire.admin import GetStatusRequest


def kill_while_loading(world: World) -> None:
    world.wait_for_load()
    world.kill_daemon()


def test_killed_while_it_loads_the_client_starts_another(make_world: Any) -> None:
    world = make_world(host_bytes="1G")
    path = world.sparse_file(LARGE_BYTES)
    first = world.start()
    child = world.spawn(
        f"arena = open_file({path!r})\n"
        "view = memoryview(arena.buffer)\n"
        "say([len(view), bytes(view[:4096]).count(0), cache().welcome().pid])\n"
    )
    kill_while_loading(world)
    size, zeros, second = child.hear()
    assert (size, zeros) == (LARGE_BYTES, 4096)
    assert second != first


def test_killed_twice_the_load_fails_with_our_error(make_world: Any) -> None:
    world = make_world(host_bytes="1G", autostart="0")
    path = world.sparse_file(LARGE_BYTES)
    world.start(autostart="1")
    child = world.spawn(
        f"try:\n open_file({path!r})\nexcept errors.TrimsError as error:\n say(error.reason)\n"
        "else:\n say('no error')\n"
    )
    kill_while_loading(world)
    assert child.hear() == "daemon_died"


def test_mappings_survive_and_the_next_load_starts_a_daemon(running: World) -> None:
    world = running
    paths = [world.file(seed) for seed in range(1, 5)]
    child = world.spawn(
        f"paths = {paths!r}\n"
        "arenas = [open_file(path) for path in paths]\n"
        "say(cache().welcome().pid)\n"
        "while hear():\n"
        "  same = [data(arena) == open(path, 'rb').read() for arena, path in zip(arenas, paths)]\n"
        "  arenas[0].buffer[0:4] = b'mine'\n"
        "  other = open_file(paths[-1])\n"
        "  clone = arenas[0].image.map()\n"
        "  say([same, data(clone) == open(paths[0], 'rb').read()])\n"
        "  arenas[0] = clone\n"
        "fresh = open_file(hear())\n"
        "say([data(fresh)[:8].hex(), cache().welcome().pid])\n"
    )
    first = child.hear()
    world.kill_daemon()
    for _ in range(5):
        child.say(True)
        assert child.hear() == [[True] * 4, True]
    child.say(False)
    child.say(world.file(9))
    begin, second = child.hear()
    assert begin == content(9)[:8].hex()
    assert second != first


@pytest.mark.parametrize("repeat", range(2))
def test_killed_at_random_moments(running: World, repeat: int) -> None:
    """Four clients load without a break; the daemon dies again and again."""
    world = running
    paths = [world.file(seed, (1 << 20) + seed * 4096) for seed in range(1, 9)]
    end = os.path.join(world.root, "end")
    script = (
        f"paths, end = {paths!r}, {end!r}\n"
        "expected = [open(path, 'rb').read() for path in paths]\n"
        "good, reasons, keep = 0, [], []\n"
        "while not good or not os.path.exists(end):\n"
        "  for path, right in zip(paths, expected):\n"
        "    try:\n"
        "      arena = open_file(path, shared=Cache(config.load()))\n"
        "    except errors.TrimsError as error:\n"
        "      reasons.append(error.reason)\n"
        "      continue\n"
        "    if data(arena) != right:\n"
        "      say('WRONG BYTES in ' + path); sys.exit(1)\n"
        "    good += 1\n"
        "say([good, reasons])\n"
    )
    children = [world.spawn(script) for _ in range(3)]
    kills = 0
    until = time.monotonic() + 2.5
    while time.monotonic() < until or kills < 3:
        time.sleep(0.05 + 0.07 * (kills % 4) + 0.01 * repeat)
        try:
            world.signal(world.pid(), signal.SIGKILL)
        except TrimsError:
            continue
        kills += 1
    open(end, "w").close()
    for child in children:
        good, reasons = child.hear()
        assert good > 0
        assert set(reasons) <= {
            "daemon_died",
            "daemon_unavailable",
            "daemon_timeout",
            "load_stalled",
            "daemon_start_failed",
        }
    arena = open_path(world.cache(), paths[0]) if world.is_answering() else None
    assert arena is None or bytes(memoryview(arena.buffer)) == content(1, (1 << 20) + 4096)


def test_killed_between_offer_and_request(running: World) -> None:
    """The file is offered, then the daemon dies before it is asked for."""
    world = running
    path = world.file(3)
    child = world.spawn(
        "real = Connection._request\n"
        "def request(self, message):\n"
        "  if isinstance(message, messages.OpenImageRequest) and not hasattr(Connection, 'done'):\n"
        "    Connection.done = True\n"
        "    say('offered'); hear()\n"
        "  return real(self, message)\n"
        "Connection._request = request\n"
        f"arena = open_file({path!r})\n"
        f"say(data(arena) == open({path!r}, 'rb').read())\n"
    )
    assert child.hear() == "offered"
    world.kill_daemon()
    child.say()
    assert child.hear() is True


def test_killed_between_reply_and_grant(running: World) -> None:
    """All that was sent before the death can still be received after it."""
    world = running
    path = world.file(3)
    child = world.spawn(
        "real = Connection._request\n"
        "def request(self, message):\n"
        "  reply = real(self, message)\n"
        "  say(type(reply).__name__); hear()\n"
        "  return reply\n"
        "Connection._request = request\n"
        f"arena = open_file({path!r})\n"
        f"say(data(arena) == open({path!r}, 'rb').read())\n"
    )
    assert child.hear() == "OpenImageReply"
    world.kill_daemon()
    child.say()
    assert child.hear() is True


def test_killed_during_the_handshake(running: World) -> None:
    """The daemon takes the connection into its backlog and dies without an answer to Hello."""
    world = running
    path = world.file(4)
    pid = world.pid()
    world.signal(pid, signal.SIGSTOP)
    child = world.spawn(
        f"say('go')\narena = open_file({path!r})\nsay(data(arena) == open({path!r}, 'rb').read())\n"
    )
    assert child.hear() == "go"
    time.sleep(0.2)
    world.signal(pid, signal.SIGKILL)
    assert child.hear() is True


def test_a_daemon_that_hangs_is_given_up(running: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, not dead: the load falls back in bounded time, the next ones at once; they work
    again some time after it goes on."""
    world = running
    path = world.file(5)
    cache = world.cache(stall_timeout="1")

    def opened(path: str) -> bytes:
        try:
            return bytes(memoryview(open_path(cache, path).buffer))
        except DaemonTimeout:
            return b""

    assert wait_until(lambda: opened(path), "an answer", interval_s=0.1) == content(5)
    pid = world.pid()
    other = world.file(6)
    monkeypatch.setattr(pool, "_LEAST_PAUSE_S", 3.0)
    began = time.monotonic()
    with world.stopped(pid):
        for _ in range(100):
            with pytest.raises(DaemonTimeout):
                open_path(cache, other)
    assert time.monotonic() - began < 50, "most of them waited, for a second each"

    assert wait_until(lambda: opened(other), "an answer", interval_s=0.1) == content(6)
    wait_until(lambda: len(world.status().clients) <= 2, "the abandoned connection is gone")


def test_a_daemon_that_hangs_does_not_keep_its_clients_from_the_next(running: World) -> None:
    world = running
    cache = world.cache()
    held = open_path(cache, world.file(1))
    with world.stopped(world.pid()):
        shutil.rmtree(world.sockets)
        second = world.start()
        for seed in (2, 3):
            assert bytes(memoryview(open_path(cache, world.file(seed)).buffer)) == content(seed)
            assert cache.welcome().pid == second
    assert bytes(memoryview(held.buffer)) == content(1)


def test_a_socket_that_is_touched_costs_no_connection(running: World) -> None:
    cache = running.cache()
    path = os.path.join(running.sockets, "handover.sock")
    for seed in (1, 2, 3):
        open_path(cache, running.file(seed))
        before = os.stat(path).st_ctime_ns
        while os.stat(path).st_ctime_ns == before:
            os.utime(path)
    mine = [client for client in cache.request(GetStatusRequest()).clients if client.requests]
    assert [client.pid for client in mine] == [os.getpid()]


def test_without_autostart_a_dead_daemon_is_an_error(running: World) -> None:
    path = running.file(1)
    running.kill_daemon()
    with pytest.raises(DaemonUnavailable):
        open_path(running.cache(autostart="0"), path)
    assert running.processes() == []


def test_threads_of_one_client_share_the_fate(running: World) -> None:
    """Eight threads load while the daemon dies; each has the right bytes or our error."""
    world = running
    paths = [world.file(seed) for seed in range(1, 9)]
    cache = world.cache(autostart="0")
    outcomes: list[object] = []

    def work(path: str, seed: int) -> None:
        for _ in range(30):
            try:
                arena = open_path(cache, path)
                outcomes.append(bytes(memoryview(arena.buffer)[:64]) == content(seed)[:64])
                del arena
            except TrimsError as error:
                outcomes.append(error.reason)

    threads = [
        threading.Thread(target=work, args=(path, seed)) for seed, path in enumerate(paths, 1)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) > 20, "loads")
    world.kill_daemon()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert True in outcomes
    assert "daemon_unavailable" in outcomes
    reasons = {"daemon_died", "daemon_unavailable", "daemon_timeout", "load_stalled"}
    assert set(outcomes) <= {True} | reasons


LOADS = """
from safetensors.numpy import load_file
load_file({path!r})
import gc; gc.collect()
say(trims_shim.stats().served)
hear()
state = load_file({path!r})
say([state['weight'].sum().item(), list(state['weight'].shape), trims_shim.stats().fallbacks])
"""


@pytest.mark.parametrize("autostart", ["0", "1"])
def test_a_load_gives_the_right_result_all_the_same(
    running: World, model_file: str, autostart: str
) -> None:
    world = running
    child = world.spawn(LOADS.format(path=model_file), autostart=autostart)
    assert child.hear() == 1
    world.kill_daemon()
    child.say()
    total, shape, fallbacks = child.hear()
    assert (total, shape) == (sum(range(1 << 19)), [1 << 19])
    if autostart == "0":  # one that is dying may still accept the connection
        assert fallbacks in ({"daemon_unavailable": 1}, {"daemon_died": 1})
    else:
        assert fallbacks == {}
