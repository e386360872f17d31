"""No room, and the account: what the daemon says it holds is what the kernel charges, always."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from typing import Any

import pytest
from harness import World, content, open_descriptors, open_path, wait_until

from trims_shim.client.arenas import Arena
from trims_shim.client.cache import Cache
from trims_shim.client.connection import Connection
from trims_shim.errors import NoSpace, TooManyRequests, TrimsError
from trims_shim.memory import host
from trims_shim.specs import SegmentKind
from trims_shim.wire import admin

MIB = 1 << 20
KINDS = ["memfd", "tmpfs-huge", "tmpfs-huge-userns"]


def available(kind: str) -> str:
    """The kind; skips the test where the kernel does not offer it."""
    probe = next(each for each in host.probe() if each.kind is SegmentKind(kind))
    if not probe.is_available:
        pytest.skip(f"{kind}: {probe.reason}")
    return kind


def bytes_of(arena: Arena) -> bytes:
    return bytes(memoryview(arena.buffer))


@pytest.mark.parametrize("kind", KINDS)
def test_room_is_made_from_what_nobody_uses(make_world: Any, kind: str) -> None:
    world = make_world(host_bytes="8M", memory_kind=available(kind))
    world.start()
    cache = world.cache()
    for seed in range(1, 13):
        assert bytes_of(open_path(cache, world.file(seed, 3 * MIB))) == content(seed, 3 * MIB)
        world.assert_account()
    status = world.status()
    assert len(status.images) == 2
    assert status.memory.resident_bytes == 6 * MIB
    assert status.counters["images_evicted"] == 10


@pytest.mark.parametrize("kind", KINDS)
def test_leased_and_pinned_images_stay(make_world: Any, kind: str) -> None:
    world = make_world(host_bytes="8M", memory_kind=available(kind))
    world.start()
    cache = world.cache()
    leased = open_path(cache, world.file(1, 3 * MIB))
    pinned = open_path(cache, world.file(2, 3 * MIB)).image.digest
    cache.request(admin.PinImageRequest(pinned, True))
    for _ in range(3):
        with pytest.raises(NoSpace, match="TRIMS_HOST_BYTES"):
            open_path(cache, world.file(3, 3 * MIB))
        world.assert_account()
    assert {image.digest for image in world.status().images} == {pinned, leased.image.digest}
    with pytest.raises(NoSpace, match="pinned"):
        cache.request(admin.EvictImageRequest(pinned))
    with pytest.raises(NoSpace, match="in use"):
        cache.request(admin.EvictImageRequest(leased.image.digest))
    cache.request(admin.PinImageRequest(pinned, False))
    assert bytes_of(open_path(cache, world.file(3, 3 * MIB))) == content(3, 3 * MIB)
    assert bytes_of(leased) == content(1, 3 * MIB)


def test_what_nobody_uses_goes_at_once_if_it_is_not_to_be_kept(make_world: Any) -> None:
    world = make_world(host_bytes="64M", memory_kind="memfd", keep_unused="0")
    world.start()
    cache = world.cache()
    leased = open_path(cache, world.file(1, 3 * MIB))
    open_path(cache, world.file(2, 3 * MIB))
    wait_until(lambda: len(world.status().images) == 1, "it has gone")
    assert world.status().images[0].digest == leased.image.digest
    world.assert_account()
    assert bytes_of(leased) == content(1, 3 * MIB)
    assert bytes_of(open_path(cache, world.file(2, 3 * MIB))) == content(2, 3 * MIB)


def test_what_is_never_evicted_fills_the_tier(make_world: Any) -> None:
    world = make_world(host_bytes="8M", memory_kind="memfd", eviction="never")
    world.start()
    cache = world.cache()
    digests = {open_path(cache, world.file(seed, 3 * MIB)).image.digest for seed in (1, 2)}
    with pytest.raises(NoSpace, match="TRIMS_HOST_BYTES"):
        open_path(cache, world.file(3, 3 * MIB))
    assert {image.digest for image in world.status().images} == digests


@pytest.mark.parametrize("kind", KINDS)
def test_larger_than_the_tier(make_world: Any, kind: str) -> None:
    """Refused, and nothing is thrown away for it."""
    world = make_world(host_bytes="8M", memory_kind=available(kind))
    world.start()
    cache = world.cache()
    open_path(cache, world.file(1, 2 * MIB))
    before = len(world.descriptors(world.pid()))
    for _ in range(5):
        with pytest.raises(NoSpace):
            open_path(cache, world.sparse_file(9 * MIB))
        with pytest.raises(NoSpace):
            open_path(cache, world.sparse_file(1 << 42))
    assert len(world.status().images) == 1
    pid = world.pid()
    wait_until(lambda: len(world.descriptors(pid)) <= before, "descriptors are closed")
    world.assert_account()


def test_a_load_falls_back_when_there_is_no_room(make_world: Any, model_file: str) -> None:
    world = make_world(host_bytes="1M")
    said = world.run(
        f"from safetensors.numpy import load_file\nstate = load_file({model_file!r})\n"
        "say([state['weight'].sum().item(), trims_shim.stats().fallbacks])\n"
    )
    assert said == [sum(range(1 << 19)), {"no_space": 1}]


@pytest.mark.parametrize("kind", ["tmpfs-huge", "tmpfs-huge-userns"])
def test_evicted_but_mapped_is_counted_apart(make_world: Any, kind: str) -> None:
    """A lease given up while the memory is still mapped: the bytes are lingering, not free."""
    world = make_world(host_bytes="8M", memory_kind=available(kind))
    world.start()
    path = world.file(1, 3 * MIB)
    child = world.spawn(
        f"arena = open_file({path!r})\n"
        "for each in cache()._pool._idle: each._handover.close()\n"
        "say()\nhear()\n"
        f"say(data(arena) == open({path!r}, 'rb').read())\nhear()\n"
    )
    child.hear()
    wait_until(lambda: not world.status().images[0].leases, "the lease is gone")
    cache = world.cache()
    evicted = cache.request(admin.EvictImageRequest())
    assert evicted.freed_bytes == 3 * MIB
    memory = world.status().memory
    assert (memory.resident_bytes, memory.lingering_bytes) == (0, 3 * MIB)
    with pytest.raises(
        NoSpace, match=r"still mapped elsewhere, left to programs or not to be had 3\.0 MiB"
    ):
        open_path(cache, world.file(2, 6 * MIB))
    child.say()
    assert child.hear() is True
    child.kill()
    wait_until(lambda: world.status().memory.lingering_bytes == 0, "the memory is free")
    assert bytes_of(open_path(cache, world.file(2, 6 * MIB))) == content(2, 6 * MIB)
    world.assert_account()


@pytest.mark.parametrize("kind", KINDS)
def test_many_clients_compete(make_world: Any, kind: str) -> None:
    """More models than room: each load is right or refused, and the account is exact after it."""
    world = make_world(host_bytes="6M", memory_kind=available(kind))
    world.start()
    paths = [world.file(seed, MIB + seed * 40_000) for seed in range(1, 9)]
    outcomes: list[str] = []

    def work(number: int) -> None:
        cache = Cache(world.config())
        arena: Arena | None = None
        for turn in range(25):
            seed = (number * 5 + turn * 3) % 8 + 1
            try:
                arena = open_path(cache, paths[seed - 1])
            except TrimsError as error:
                outcomes.append(error.reason)
                arena = None
                time.sleep(0.01)
                continue
            right = bytes_of(arena) == content(seed, MIB + seed * 40_000)
            outcomes.append("right" if right else "WRONG")
        arena = None
        cache.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(outcomes) == 150
    assert set(outcomes) <= {"right", "no_space", "file_changed"}
    assert outcomes.count("right") > 50
    wait_until(lambda: not any(each.leases for each in world.status().images), "leases released")
    world.assert_account()
    memory = world.status().memory
    assert memory.resident_bytes <= memory.budget_bytes
    assert memory.lingering_bytes in (0, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_refuses_memory(make_world: Any, kind: str) -> None:
    """RLIMIT_FSIZE in the daemon: no crash, no leak, smaller loads go on."""
    world = make_world(memory_kind=available(kind))
    pid = world.start()
    cache = world.cache()
    open_path(cache, world.file(1, MIB))
    before = len(world.descriptors(pid))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
    for _ in range(8):
        with pytest.raises(NoSpace):
            open_path(cache, world.file(2, 5 * MIB))
    wait_until(lambda: len(world.descriptors(pid)) <= before, "descriptors are closed")
    world.assert_account()
    assert bytes_of(open_path(cache, world.file(3, MIB))) == content(3, MIB)
    assert world.pid() == pid


@pytest.mark.parametrize("kind", ["tmpfs-huge", "tmpfs-huge-userns"])
def test_the_tmpfs_is_full(kind: str) -> None:
    """ENOSPC from fallocate leaves no descriptor, no name and no byte behind."""
    memory = host.open_memory(SegmentKind(available(kind)), budget_bytes=4 * MIB)
    try:
        before = open_descriptors()
        for _ in range(5):
            with pytest.raises(TrimsError, match="No space"):
                memory.create(64 * MIB)
        assert open_descriptors() <= before
        assert memory.used_bytes() == 0
        memory.create(2 * MIB).discard()
    finally:
        memory.close()


# --- descriptors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_daemon_is_out_of_descriptors(make_world: Any, kind: str) -> None:
    """No crash; loads fall back; when descriptors are free again, all is well."""
    world = make_world(memory_kind=available(kind))
    pid = world.start()
    path = world.file(1)
    open_path(world.cache(autostart="0"), path)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(world.descriptors(pid)) + 1
    outcomes: list[str] = []
    for spare in range(8):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + spare, limits[1]))
        for _ in range(2):
            other = Cache(world.config(stall_timeout="1", autostart="0"))
            try:
                assert bytes_of(open_path(other, world.file(9))) == content(9)
            except TrimsError:
                outcomes.append("refused")
            finally:
                other.close()
    time.sleep(1.2)  # the daemon's housekeeping comes once a second
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert "refused" in outcomes
    assert world.pid() == pid, world.log()
    assert bytes_of(open_path(world.cache(), world.file(4))) == content(4)
    wait_until(
        lambda: not any(each.leases for each in world.status().images[:1]), "leases released"
    )
    assert world.log().count("WARNING") < 60, world.log()


@pytest.mark.parametrize("is_held", [False, True])
def test_more_images_than_the_daemon_has_descriptors(running: World, is_held: bool) -> None:
    """Found: ZeroMQ aborted the daemon, which had none left to accept clients with."""
    pid = running.pid()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
    paths = [running.file(seed, 4096) for seed in range(1, 80)]
    said = running.run(
        "held, refused = [], 0\n"
        f"for path in {paths!r}:\n"
        "  try: arena = open_file(path)\n"
        "  except errors.NoSpace: refused += 1\n"
        "  else:\n"
        "    assert data(arena) == open(path, 'rb').read()\n"
        f"    if {is_held}: held.append(arena)\n"
        "say(refused)\n"
    )
    assert (said > 0) is is_held
    assert running.pid() == pid, running.log()
    for _ in range(3):
        assert bytes_of(open_path(running.cache(), paths[0])) == content(1, 4096)
    running.assert_account()


def test_more_clients_than_the_daemon_has_descriptors(running: World) -> None:
    """Found: each took the daemon for dead, tried to start another, and warned of `daemon_died`."""
    pid = running.pid()
    path = running.file(1)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
    endpoint = running.cache().endpoint
    connections: list[Connection] = []
    with contextlib.suppress(TooManyRequests):
        while True:
            connections.append(Connection(endpoint, stall_timeout_s=5))
            assert connections[-1].welcome.pid == pid
    assert len(connections) > 4
    said = running.run(
        "from trims_shim import diagnostics\n"
        f"try: open_file({path!r}); said = ''\n"
        "except errors.TooManyRequests as error: said = str(error)\n"
        "say([said, diagnostics.stats().events.get('daemon:started', 0)])\n"
    )
    assert "ulimit" in said[0]
    assert said[1] == 0
    for each in connections:
        each.close()
    wait_until(lambda: len(running.status().clients) < 3, "the connections closed")
    assert bytes_of(open_path(running.cache(), path)) == content(1)


def test_more_clients_and_images_than_the_daemon_has_descriptors(running: World) -> None:
    """Found: what had higher numbers than the newest went uncounted, and ZeroMQ aborted."""
    pid = running.pid()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
    endpoint = running.cache().endpoint
    with contextlib.ExitStack() as closing:
        connections = []
        for _ in range(6):
            connections.append(Connection(endpoint, stall_timeout_s=30))
            closing.callback(connections[-1].close)
            assert connections[-1].welcome.pid == pid
        holder = running.spawn(
            f"held, paths = [], {[running.file(seed, 4096) for seed in range(1, 40)]!r}\n"
            "try:\n for path in paths: held.append(open_file(path))\n"
            "except errors.NoSpace: pass\n"
            "say(len(held)); hear()\n"
        )
        assert 0 < holder.hear() < 39
        for each in connections:
            control = closing.enter_context(each._control_socket())
            each._exchange(admin.GetStatusRequest(), control)
    assert running.pid() == pid, running.log()


@pytest.mark.parametrize("spare", [0, 1, 2, 4, 6, 8, 12, 16, 18, 20, 24])
def test_the_client_is_out_of_descriptors(running: World, spare: int) -> None:
    """Our error, never an abort, and it works again afterwards."""
    path = running.file(1)
    said = running.run(
        "import resource\n"
        f"path = {path!r}\n"
        "f = os.open(path, os.O_RDONLY)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "used = max(int(n) for n in os.listdir('/proc/self/fd')) + 1\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (used + {spare} - 1, hard))\n"
        "words = []\n"
        "for _ in range(2):\n"
        "  try:\n"
        "    arena = cache().open(f, name=path, min_bytes=1)\n"
        "    words.append('right' if data(arena) == os.pread(f, 1 << 30, 0) else 'WRONG')\n"
        "  except errors.TrimsError as error:\n"
        "    words.append(error.reason)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "arena = cache().open(f, name=path, min_bytes=1)\n"
        "say([words, data(arena) == os.pread(f, 1 << 30, 0)])\n",
        stall_timeout="30",
    )
    words, is_right = said
    assert is_right
    assert set(words) <= {"right", "daemon_unavailable", "memory"}
    if spare >= 24:
        assert words == ["right", "right"]
    if spare == 0:
        assert "right" not in words


def test_the_client_has_no_room_for_a_segment(running: World) -> None:
    """On a connection that is there: our error, and what it has mapped stays leased."""
    paths = [running.file(1), running.file(2)]
    running.run(f"open_file({paths[1]!r})\n")
    child = running.spawn(
        "import resource\n"
        f"kept, path = open_file({paths[0]!r}), {paths[1]!r}\n"
        "f = os.open(path, os.O_RDONLY)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "lowest = os.dup(f); os.close(lowest)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))\n"
        "try: cache().open(f, name=path, min_bytes=1)\n"
        "except errors.TrimsError as error: reason = error.reason\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "say(reason); hear()\n"
        "say(data(cache().open(f, name=path, min_bytes=1)) == os.pread(f, 1 << 30, 0)); hear()\n"
    )
    assert child.hear() == "daemon_unavailable"
    wait_until(
        lambda: (
            [each.leases for each in running.status().images if paths[0] in each.names] == [1]
            and sum(each.leases for each in running.status().images) == 1
        ),
        "one lease",
    )
    child.say()
    assert child.hear() is True


def test_the_client_has_no_address_space(running: World) -> None:
    """RLIMIT_AS: the mapping fails with our error, and the lease is given back."""
    path = running.sparse_file(200 * MIB)
    said = running.run(
        "import resource\n"
        f"open_file({running.file(1)!r})\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), -1))\n"
        f"try:\n open_file({path!r})\nexcept errors.TrimsError as error:\n say(error.reason)\n"
    )
    assert said == "memory"
    wait_until(lambda: not any(each.leases for each in running.status().images), "leases released")
