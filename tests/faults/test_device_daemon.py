"""The daemon's device tiers, on an emulated machine: a real daemon, its uploader, raw clients.

Promises: a client gets the bytes of its file or an error that says why; one copy is in device
memory however many ask; what must go goes to the host tier where there is room.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from device_images import MIB, open_on
from harness import wait_until

from faults.device_worlds import (
    GPU,
    GPU2,
    Background,
    MakeWorld,
    connected,
    content,
    image_memory,
    machine,
    model,
    opened,
    tiers,
    touch,
    uploaders,
    wait_for_upload,
)
from trims_shim.errors import (
    NoSpace,
    UnknownDevice,
    UnknownImage,
    UnsupportedFormat,
)
from trims_shim.wire import admin

# --- serving --------------------------------------------------------------------------------------


def test_a_miss_then_hits_share_one_copy(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    pid = world.start()
    path = model(world)
    with connected(world) as connection, connected(world) as other:
        with opened(connection, path) as first, opened(other, path) as second:
            assert (first.outcome, second.outcome) == ("miss", "hit")
            assert first.digest == second.digest
            assert first.content() == second.content() == content(path)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(first.granted.descriptor, b"x", 0)
        assert image_memory(world) == 8 * MIB
        status = world.status()
        (device,) = status.devices
        (image,) = status.images
        assert (image.tier, image.leases, image.resident_bytes) == (GPU, 2, 8 * MIB)
        assert (device.device, device.backend) == (GPU, "vmm")
        assert (device.resident_bytes, device.reserved_bytes) == (8 * MIB, 0)
        assert status.memory.resident_bytes == 0
    assert world.pid() == pid


def test_the_daemon_takes_no_context(make_device_world: MakeWorld) -> None:
    world = make_device_world({"context_bytes": 16 * MIB}, uploader_idle="0.2")
    pid = world.start()
    touch(world, model(world))
    creators = {each.creator for each in machine(world).allocations() if each.kind == "context"}
    assert pid not in creators
    wait_until(lambda: creators.isdisjoint(uploaders(world)), "the idle uploader ends")
    wait_until(
        lambda: [each.kind for each in machine(world).allocations()] == ["vmm"],
        "its context is gone",
    )
    touch(world, model(world, 2))


def test_requests_for_a_loading_image_wait_for_it(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    world.start()
    path = model(world)
    with machine(world).copies_held():
        first = Background(world, path)
        wait_for_upload(world)
        others = [Background(world, path) for _ in range(3)]
        asking = [2] * 3  # an offer, and what it asks for
        wait_until(lambda: [e.requests for e in world.status().clients][-3:] == asking, "all ask")
    results = [each.join() for each in (first, *others)]
    assert results == [("miss", True), *[("joined", True)] * 3]
    assert world.status().counters["images_loaded"] == 1


def test_several_loads_run_side_by_side(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    world.start()
    paths = [model(world, seed) for seed in (1, 2, 3)]
    with machine(world).copies_held():
        loads = [Background(world, path) for path in paths]
        wait_until(lambda: image_memory(world) == 24 * MIB, "all have memory")
    assert [each.join() for each in loads] == [("miss", True)] * 3
    assert len(uploaders(world)) == 1


def test_an_image_of_the_host_tier_is_promoted(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    pid = world.start()
    path = model(world)
    host = touch(world, path, "host")
    before = _read_bytes(pid)
    with connected(world) as connection, opened(connection, path) as image:
        assert (image.outcome, image.digest) == ("miss", host.digest)
        assert image.granted.reply.is_settled
        assert image.content() == content(path)
    assert world.status().counters["images_promoted"] == 1
    assert _read_bytes(pid) - before < MIB
    assert tiers(world) == {"host": {host.digest}, GPU: {host.digest}}


def test_an_image_stays_while_it_is_promoted(make_device_world: MakeWorld) -> None:
    """Found: it was evicted for another one, and the daemon then held more than the budget."""
    world = make_device_world(host_bytes="8M", memory_kind="memfd")
    pid = world.start()
    path, other = model(world), model(world, 2)
    host = touch(world, path, "host")
    with machine(world).copies_held(), connected(world) as connection:
        load = Background(world, path)
        wait_for_upload(world)
        with pytest.raises(NoSpace, match="do not fit the host tier"):
            open_on(connection, other, "host")
        with pytest.raises(NoSpace, match="being copied"):
            connection.request(admin.EvictImageRequest(host.digest, "host"))
        segments = {each.inode: each.resident_bytes for each in world.segments(pid)}
        assert sum(segments.values()) < 8 * MIB
    assert load.join() == ("miss", True)
    touch(world, other, "host")
    assert host.digest not in tiers(world)["host"]


def _read_bytes(pid: int) -> int:
    """Bytes that a process and the children it has waited for have read by system calls."""
    with open(f"/proc/{pid}/io") as file:
        return int(file.readline().split()[1])


def test_two_devices(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2})
    world.start()
    path = model(world)
    with (
        connected(world) as connection,
        opened(connection, path, GPU) as one,
        opened(connection, path, GPU2) as two,
    ):
        assert one.content() == two.content() == content(path)
        assert (one.outcome, two.outcome) == ("miss", "miss")
    assert [machine(world).used_bytes(each) >= 8 * MIB for each in (0, 1)] == [True, True]
    assert {each.device for each in world.status().devices} == {GPU, GPU2}


def test_the_starters_visible_devices_are_not_the_daemons(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2})
    world.variables["CUDA_VISIBLE_DEVICES"] = "1"
    world.start()
    touch(world, model(world), GPU)


@pytest.mark.parametrize(
    ("backend", "device", "machine_settings", "words"),
    [
        ("off", GPU, {}, "TRIMS_DEVICE_BACKEND=off"),
        ("vmm", "GPU-" + "0" * 8 + GPU[12:], {}, "the daemon cannot share"),
        ("vmm", "cuda:0", {}, "not the id of a device"),
        ("vmm", GPU, {"vmm": 0}, "cannot export memory"),
        ("vmm", GPU, {"fail": "cuInit=100"}, "cuInit"),
    ],
)
def test_no_such_device(
    make_device_world: MakeWorld, backend: str, device: str, machine_settings: Any, words: str
) -> None:
    world = make_device_world(machine_settings, device_backend=backend)
    world.start()
    path = model(world)
    with connected(world) as connection:
        for _ in range(2):
            with pytest.raises(UnknownDevice, match=words):
                open_on(connection, path, device)
        with opened(connection, path, "host") as image:
            assert image.content() == content(path)
    assert world.status().devices == ()


def test_a_device_for_one_process_is_left_to_the_program(make_device_world: MakeWorld) -> None:
    world = make_device_world({"exclusive": 1})
    world.start()
    path = model(world)
    with connected(world) as connection, pytest.raises(UnknownDevice, match="compute mode"):
        open_on(connection, path, GPU)
    world.run("from trims_shim.memory.driver import driver\nwith driver().context(0): pass\n")


# --- room -----------------------------------------------------------------------------------------


def test_what_nobody_uses_makes_room_and_moves_to_the_host(
    make_device_world: MakeWorld,
) -> None:
    world = make_device_world(device_bytes="16M")
    world.start()
    paths = [model(world, seed) for seed in (1, 2)]
    first = touch(world, paths[0])
    second = touch(world, paths[1])
    assert tiers(world) == {"host": {first.digest}, GPU: {second.digest}}
    status = world.status()
    assert status.counters["images_demoted"] == 1
    assert image_memory(world) == 8 * MIB
    with connected(world) as connection, opened(connection, paths[0], "host") as image:
        assert image.outcome == "hit", "the identity is still trusted"
        assert image.content() == content(paths[0])
    # And back, without the file.
    assert touch(world, paths[0]).outcome == "miss"
    assert world.status().counters["images_promoted"] == 1
    assert tiers(world)["host"] == {first.digest, second.digest}


def test_nothing_of_the_host_makes_room_for_what_leaves_a_device(
    make_device_world: MakeWorld,
) -> None:
    world = make_device_world(device_bytes="16M", host_bytes="10M")
    world.start()
    kept = touch(world, model(world, 3), "host")
    touch(world, model(world, 1))
    last = touch(world, model(world, 2))
    assert tiers(world) == {"host": {kept.digest}, GPU: {last.digest}}
    assert "images_demoted" not in world.status().counters


def test_what_is_not_to_be_kept_does_not_move_to_the_host(make_device_world: MakeWorld) -> None:
    world = make_device_world(keep_unused="0")
    world.start()
    touch(world, model(world, 1))
    wait_until(lambda: not world.status().images, "it has gone")
    assert "images_demoted" not in world.status().counters
    wait_until(lambda: not image_memory(world), "its memory is free")


def test_leased_images_stay(make_device_world: MakeWorld) -> None:
    world = make_device_world(device_bytes="16M")
    world.start()
    paths = [model(world, seed) for seed in (1, 2)]
    with connected(world) as connection, opened(connection, paths[0]) as image:
        with pytest.raises(NoSpace, match="TRIMS_DEVICE_BYTES"):
            open_on(connection, paths[1], GPU)
        assert image.content() == content(paths[0])
    touch(world, paths[1])


def test_head_room_is_kept_from_others(make_device_world: MakeWorld) -> None:
    """What other programs take of the device is taken from free images, not from the head-room."""
    world = make_device_world({"memory_bytes": 128 * MIB}, device_headroom_bytes="32M")
    world.start()
    path = model(world)
    digest = touch(world, path).digest
    free = world.status().devices[0].free_bytes
    other = world.spawn(
        "from trims_shim.memory.driver import driver\n"
        f"handle = driver().create(0, {free - 16 * MIB})\n"
        "say('taken'); hear()\n"
    )
    assert other.hear() == "taken"
    wait_until(lambda: tiers(world) == {"host": {digest}}, "the free image leaves")
    wait_until(lambda: world.status().devices[0].free_bytes < 32 * MIB, "it is noticed")
    with connected(world) as connection, pytest.raises(NoSpace, match="not to be had"):
        open_on(connection, path, GPU)
    other.say()
    assert other.wait() == 0
    wait_until(lambda: world.status().devices[0].free_bytes > 64 * MIB, "it is given back")
    touch(world, path)


def test_memory_that_a_full_device_has_not(make_device_world: MakeWorld) -> None:
    """Without NVML nobody knows before the driver does."""
    world = make_device_world({"memory_bytes": 16 * MIB, "nvml": 0})
    world.start()
    held_path = model(world, 1)
    held = touch(world, held_path)
    large = model(world, 2, (9 * MIB,))
    with connected(world) as connection, opened(connection, held_path), pytest.raises(NoSpace):
        open_on(connection, large, GPU)
    assert tiers(world)[GPU] == {held.digest}
    assert world.status().devices[0].reserved_bytes == 0


# --- requests -------------------------------------------------------------------------------------


def test_pin_evict_and_verify(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    world.start()
    path = model(world)
    digest = touch(world, path).digest
    with connected(world) as connection:
        verified = connection.request(admin.VerifyImageRequest(path))
        assert (verified.digest, verified.computed) == (digest, digest)
        assert world.status().memory.reserved_bytes == 0
        connection.request(admin.PinImageRequest(path, True))
        with pytest.raises(NoSpace, match="pinned"):
            connection.request(admin.EvictImageRequest(path))
        connection.request(admin.PinImageRequest(path, False))
        with pytest.raises(UnknownImage):
            connection.request(admin.EvictImageRequest(path, tier="host"))
        with pytest.raises(UnknownDevice):
            connection.request(admin.EvictImageRequest(tier=GPU2))
        # From one tier: it may move. From all: it is to be gone.
        reply = connection.request(admin.EvictImageRequest(path, tier=GPU))
        assert (reply.digests, reply.freed_bytes) == ((digest,), 8 * MIB)
        wait_until(lambda: tiers(world) == {"host": {digest}}, "it moves to the host")
        assert image_memory(world) == 0
        touch(world, path)
        reply = connection.request(admin.EvictImageRequest(path))
        assert reply.digests == (digest,)
        assert reply.freed_bytes > 16 * MIB - 2 * MIB
        assert tiers(world) == {}
        touch(world, path)
        connection.request(admin.EvictImageRequest())
        assert tiers(world) == {}


# --- the legacy backend ---------------------------------------------------------------------------


def test_legacy_memory_belongs_to_the_uploader(make_device_world: MakeWorld) -> None:
    world = make_device_world(device_backend="ipc", uploader_idle="0.2", device_bytes="16M")
    world.start()
    paths = [model(world, seed) for seed in (1, 2)]
    with connected(world) as connection, opened(connection, paths[0]) as image:
        grant = image.granted.reply.device
        assert grant is not None
        assert (grant.backend, len(grant.handles), len(grant.handles[0])) == ("ipc", 1, 64)
        assert image.granted.allocations == ()
        assert sum(grant.allocations) == 8 * MIB
        time.sleep(1.5)
        assert len(uploaders(world)) == 1, "it stays as long as the image"
        digest = image.digest
    with connected(world) as connection, opened(connection, paths[1]) as other:
        wait_until(lambda: digest in tiers(world).get("host", ()), "the first moves to the host")
        assert tiers(world)[GPU] == {other.digest}
        # Its owner dies, and so does the memory: nobody is granted it any more.
        os.kill(uploaders(world)[0], signal.SIGKILL)
        wait_until(lambda: GPU not in tiers(world), "the image is forgotten")
    status = world.status()
    assert status.devices[0].resident_bytes == 0
    assert status.counters["images_demoted"] == 1, "only the first could be copied"
    with connected(world) as connection, opened(connection, paths[1]) as again:
        assert again.outcome == "miss"


# --- with the package's own client ----------------------------------------------------------------

_CLIENT = """
import ctypes
def check(arena, path):
    content = open(path, 'rb').read()
    return all(
        ctypes.string_at(arena.address + each.offset_bytes, each.source.size_bytes)
        == content[each.source.offset_bytes : each.source.end_bytes]
        for each in arena.layout.placed
    )
def open_device(path, device):
    descriptor = os.open(path, os.O_RDONLY)
    arena = cache().open_device(descriptor, name=path, device=device, min_bytes=1)
    os.close(descriptor)
    return arena
"""


@pytest.mark.parametrize("backend", ["vmm", "ipc"])
def test_processes_map_one_copy(make_device_world: MakeWorld, backend: str) -> None:
    world = make_device_world(device_backend=backend)
    world.start()
    path = model(world)
    script = f"{_CLIENT}arena = open_device({path!r}, {GPU!r})\n"
    script += f"say(check(arena, {path!r}))\nhear()\nsay(check(arena, {path!r}))\n"
    children = [world.spawn(script) for _ in range(3)]
    assert [child.hear() for child in children] == [True] * 3
    assert image_memory(world) == 8 * MIB
    (image,) = world.status().images
    assert image.leases == 3
    if backend == "vmm":
        world.kill_daemon()
    for child in children:
        child.say()
    assert [child.hear() for child in children] == [True] * 3
    assert [child.wait() for child in children] == [0] * 3


# --- images that are no model files ---------------------------------------------------------------


def test_numbers_are_served_as_they_are(make_device_world: MakeWorld) -> None:
    """Only to who asks for numbers; moved to the host tier, checked and put back like others."""
    world = make_device_world(device_bytes="16M")
    world.start()
    numbers = world.file(1, 7 * MIB)
    time.sleep(0.12)  # as in model()
    with connected(world) as connection, connected(world) as other:
        with pytest.raises(UnsupportedFormat, match="no zip archive"):
            open_on(connection, numbers, GPU)
        first = open_on(connection, numbers, GPU, is_numbers=True)
        second = open_on(other, numbers, GPU, is_numbers=True)
        assert (first.outcome, second.outcome) == ("miss", "hit")
        assert first.content() == second.content() == content(numbers)
        first.close()
        second.close()
        checked = connection.request(admin.VerifyImageRequest(first.digest))
        assert checked.tiers == (admin.TierCheck(GPU, first.digest),)
    touch(world, model(world))
    wait_until(lambda: first.digest in tiers(world).get("host", ()), "it moves to the host")
    assert world.status().counters["images_demoted"] == 1
    with connected(world) as connection:
        again = open_on(connection, numbers, GPU, is_numbers=True)
        assert (again.outcome, again.digest) == ("miss", first.digest)
        assert again.content() == content(numbers)
        again.close()


@pytest.mark.parametrize("backend", ["vmm", "ipc"])
def test_processes_map_one_copy_of_converted_numbers(
    make_device_world: MakeWorld, backend: str
) -> None:
    world = make_device_world(device_backend=backend)
    world.start()
    script = f"""
import ctypes, time
from trims_shim.specs import Conversion, Variant
descriptor = os.open({model(world)!r}, os.O_RDONLY)
plain = cache().open(descriptor, name="model", min_bytes=1).image
while (image := cache().variant(plain, Variant(8, Conversion("float16", "bfloat16")))) is None:
    time.sleep(0.01)
options = dict(name="numbers", device={GPU!r}, min_bytes=1, is_numbers=True)
arena = cache().open_device(image.descriptor, **options)
expected = bytes(memoryview(image.map().buffer))
say(ctypes.string_at(arena.address, arena.size_bytes) == expected); hear()
"""
    children = [world.spawn(script) for _ in range(3)]
    assert [child.hear() for child in children] == [True] * 3
    assert image_memory(world) == 8 * MIB
    assert [image.leases for image in world.status().images if image.tier == GPU] == [3]
    for child in children:
        child.say()
    assert [child.wait() for child in children] == [0] * 3
