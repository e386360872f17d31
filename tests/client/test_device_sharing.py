"""Several processes, a real daemon and one copy of a model in (emulated) device memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import numpy
import pytest
import safetensors.numpy
from emulated_cuda import GRANULARITY, Emulated
from harness import Child, World, process_state, wait_until

MIB = 1 << 20

CLIENT = """\
import ctypes, gc, hashlib, threading
from trims_shim.client import device_arenas
def open_device(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        device = device_arenas.device_id(0)
        return cache().open_device(descriptor, name=path, device=device, min_bytes=1)
    finally:
        os.close(descriptor)
def digest(arena):
    found = hashlib.sha256()
    for each in arena.layout.placed:
        found.update(ctypes.string_at(arena.address + each.offset_bytes, each.source.size_bytes))
    return found.hexdigest()
"""
READER = (
    CLIENT
    + """\
arena = open_device(hear())
while True:
    say(digest(arena))
    hear()
"""
)
"""Maps a model and reads all of it whenever it is asked to."""


class DeviceWorld(World):
    """A world on an emulated machine."""

    def __init__(self, variables: dict[str, str], **settings: str) -> None:
        super().__init__(**{"device_headroom_bytes": "0", **settings})
        self.variables = variables
        self.machine = Emulated.of(variables)

    def environment(self, **settings: str) -> dict[str, str]:
        return {**super().environment(**settings), **self.variables}

    def model(self, seed: int, size_bytes: int = 8 * MIB) -> str:
        generator = numpy.random.default_rng(seed)
        arrays = {
            "a": generator.integers(0, 256, size_bytes - 5000, dtype=numpy.uint8),
            "b": generator.random(1000, dtype=numpy.float32),
        }
        path = os.path.join(self.root, f"{seed}.safetensors")
        safetensors.numpy.save_file(arrays, path)
        return path

    def reader(self, path: str) -> tuple[Child, str]:
        """A process that has the model mapped, and the digest of what it reads there."""
        child = self.spawn(READER)
        child.say(path)
        return child, child.hear()

    def leases(self) -> int:
        return sum(image.leases for image in self.status().images if image.tier != "host")

    def image_bytes(self) -> int:
        """Of the one image on the device, as the daemon accounts for it."""
        (image,) = (image for image in self.status().images if image.tier != "host")
        return image.resident_bytes


@pytest.fixture
def make_device_world(
    make_emulated_environment: Callable[..., dict[str, str]],
) -> Iterator[Callable[..., DeviceWorld]]:
    worlds: list[DeviceWorld] = []

    def make(**settings: str) -> DeviceWorld:
        worlds.append(DeviceWorld(make_emulated_environment(), **settings))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


@pytest.fixture
def world(make_device_world: Callable[..., DeviceWorld]) -> DeviceWorld:
    return make_device_world()


def still_reads(child: Child, digest: str) -> None:
    child.say()
    assert child.hear() == digest


def test_one_copy_for_all(world: DeviceWorld) -> None:
    path = world.model(1)
    first, digest = world.reader(path)
    used = world.machine.used_bytes()
    assert used == world.image_bytes() <= os.path.getsize(path) + 2 * GRANULARITY
    others = [world.reader(path) for _ in range(2)]
    assert {other_digest for _, other_digest in others} == {digest}
    assert world.machine.used_bytes() == used
    assert world.leases() == 3
    assert {world.reader(world.model(2))[1]} != {digest}
    still_reads(first, digest)


def test_a_write_is_the_end_of_the_writer_alone(world: DeviceWorld) -> None:
    path = world.model(1)
    neighbour, digest = world.reader(path)
    writer = world.spawn(
        CLIENT + "arena = open_device(hear()); say(); hear(); ctypes.memset(arena.address, 0, 1)"
    )
    writer.say(path)
    writer.hear()
    assert world.leases() == 2
    writer.say()
    assert writer.wait() == -signal.SIGSEGV
    still_reads(neighbour, digest)
    wait_until(lambda: world.leases() == 1, "the writer's lease is released")
    assert world.reader(path)[1] == digest


def test_a_client_that_is_killed_leaves_nothing(world: DeviceWorld) -> None:
    path = world.model(1)
    child, _ = world.reader(path)
    child.kill()
    wait_until(lambda: world.leases() == 0, "its lease is released")
    world.run("cache().request(admin.EvictImageRequest())")
    wait_until(lambda: world.machine.used_bytes() == 0, "the memory is freed")


def test_the_daemon_dies_and_its_clients_go_on(world: DeviceWorld) -> None:
    path = world.model(1)
    first, digest = world.reader(path)
    second, _ = world.reader(path)
    world.kill_daemon()
    still_reads(first, digest)
    second.kill()
    still_reads(first, digest)
    # The next load starts a new daemon, which has a copy of its own.
    late, late_digest = world.reader(path)
    assert late_digest == digest
    assert world.leases() == 1
    first.kill()
    wait_until(lambda: world.machine.used_bytes() == world.image_bytes(), "the old copy is freed")
    still_reads(late, digest)


def test_a_client_of_a_dead_daemon_loads_again(world: DeviceWorld) -> None:
    paths = [world.model(1), world.model(2)]
    child = world.spawn(
        CLIENT
        + "first, second = hear()\n"
        + "arena = open_device(first); say(digest(arena)); hear()\n"
        + "say([digest(arena), open_device(first) is arena, digest(open_device(second))])\n"
        + "hear(); del arena; gc.collect(); device_arenas.reap(); say(); hear()\n"
    )
    child.say(paths)
    digest = child.hear()
    old = world.kill_daemon()
    child.say()
    again, is_same, other = child.hear()
    assert (again, is_same) == (digest, True)
    assert other != digest
    assert world.pid() != old
    child.say()
    child.hear()
    world.run("cache().request(admin.EvictImageRequest())")
    wait_until(lambda: world.machine.used_bytes() == 0, "nothing of either daemon is left")


def test_the_daemon_stops_and_its_clients_go_on(world: DeviceWorld) -> None:
    child, digest = world.reader(world.model(1))
    world.stop_daemon()
    still_reads(child, digest)
    assert world.machine.used_bytes() > 0
    child.kill()
    wait_until(lambda: world.machine.used_bytes() == 0, "the memory is freed")


def test_loading_and_dropping_in_a_loop(make_device_world: Callable[..., DeviceWorld]) -> None:
    """With room for one model: each needs what the one before has let go of."""
    world = make_device_world(device_bytes="20M")
    paths = [world.model(seed) for seed in range(3)]
    said = world.run(
        CLIENT
        + f"paths = {paths!r}\n"
        + "def footprint():\n"
        + "    threads, files = os.listdir('/proc/self/task'), os.listdir('/proc/self/fd')\n"
        + "    return [len(open('/proc/self/maps').readlines()), len(files), len(threads)]\n"
        + "def turn():\n"
        + "    found = [digest(open_device(path)) for path in paths]\n"
        + "    device_arenas.reap()\n"
        + "    return found\n"
        + "wanted, before = turn(), footprint()\n"
        + "assert len(set(wanted)) == 3\n"
        + "for _ in range(8): assert turn() == wanted\n"
        + "before[0] += 7  # the heap may have grown; what a turn leaves behind is there 8 times\n"
        + "def is_as_before(): return all(map(int.__le__, footprint(), before))\n"
        + "deadline = time.monotonic() + 60\n"
        + "while not is_as_before() and time.monotonic() < deadline: time.sleep(0.01)\n"
        + "say([before, footprint()])\n"
    )
    before, after = said
    assert all(now <= then for now, then in zip(after, before, strict=True)), said
    assert world.leases() == 0
    assert world.machine.used_bytes() <= 20 * MIB


def test_threads_of_one_process_at_once(world: DeviceWorld) -> None:
    path = world.model(1)
    child = world.spawn(
        CLIENT
        + f"path = {path!r}\n"
        + "found, barrier = [], threading.Barrier(8)\n"
        + "def load(): barrier.wait(); found.append(open_device(path))\n"
        + "threads = [threading.Thread(target=load) for _ in range(8)]\n"
        + "[each.start() for each in threads]; [each.join() for each in threads]\n"
        + "say([len(found), len(set(found))]); hear()\n"
    )
    assert child.hear() == [8, 1]
    wait_until(lambda: world.leases() == 1, "seven leases are given back")
    child.say()
    assert child.wait() == 0


def test_a_fork_goes_its_own_way(world: DeviceWorld) -> None:
    """The child can use neither the device nor its parent's lease; the parent goes on."""
    path = world.model(1)
    said = world.run(
        CLIENT
        + f"path = {path!r}\n"
        + "arena = open_device(path); wanted = digest(arena)\n"
        + "child = os.fork()\n"
        + "if child == 0:\n"
        + "    del arena; gc.collect()\n"
        + "    try: open_device(path); os._exit(2)\n"
        + "    except errors.DriverFailure: os._exit(0)\n"
        + "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        + "reply = cache().request(admin.GetStatusRequest())\n"
        + "leases = [image.leases for image in reply.images if image.tier != 'host']\n"
        + "say([status, digest(arena) == wanted, leases])\n"
    )
    assert said == [0, True, [1]]


def test_a_stopped_client_does_not_hold_others_up(world: DeviceWorld) -> None:
    path = world.model(1)
    stopped, digest = world.reader(path)
    world.signal(stopped.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(stopped.pid) == "T", "stopped")
    assert world.reader(path)[1] == digest
    world.signal(stopped.pid, signal.SIGCONT)
    still_reads(stopped, digest)
