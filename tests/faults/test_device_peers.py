"""Several devices, on an emulated machine: copies from one to another, and MIG.

Promises: an image that is on a device reaches another one without the file or the host tier; what
goes wrong on the way costs time, never a wrong byte or the load; no image goes while another device
copies it, and none stays longer for it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import emulated_cuda
import pytest
from device_images import MIB, open_on
from harness import World, wait_until

from faults.device_worlds import (
    GPU,
    GPU2,
    Background,
    MakeWorld,
    connected,
    content,
    image_memory,
    machine,
    maps_of,
    model,
    opened,
    tiers,
    touch,
    uploaders,
)
from trims_shim.errors import NoSpace, UnknownDevice
from trims_shim.wire import admin

THIRD = emulated_cuda.device_ids(3)[2]


def copies(world: World) -> tuple[int, int, int]:
    """(from other devices, failed ones, from the host tier)."""
    counters = world.status().counters
    names = ("images_copied_from_peer", "peer_copies_failed", "images_promoted")
    found = [counters.get(name, 0) for name in names]
    return found[0], found[1], found[2]


def read_bytes(pid: int) -> int:
    """Bytes that a process has read by system calls, from files above all."""
    with open(f"/proc/{pid}/io") as file:
        return int(file.readline().split()[1])


def wait_for_copy(world: World) -> int:
    """The process that copies, once it has both sides mapped."""

    def found() -> int:
        for pid in uploaders(world):
            if maps_of(pid).count("/allocations/") >= 2:
                return pid
        return 0

    return int(wait_until(found, "a copy between devices", interval_s=0.002))


def test_an_image_on_another_device_is_copied_from_there(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2, "context_bytes": 2 * MIB})
    pid = world.start()
    path = model(world)
    first = touch(world, path, GPU)
    before = read_bytes(pid)
    second = touch(world, path, GPU2)
    assert (second.outcome, second.digest) == ("miss", first.digest)
    assert copies(world) == (1, 0, 0)
    assert tiers(world) == {GPU: {first.digest}, GPU2: {first.digest}}
    assert read_bytes(pid) - before < MIB
    # Its uploader has seen both devices, and taken a context on its own only.
    contexts = [each for each in machine(world).allocations() if each.kind == "context"]
    assert sorted(each.device for each in contexts) == sorted([GPU, GPU2])
    status = {each.device: each for each in world.status().devices}
    assert [status[each].resident_bytes for each in (GPU, GPU2)] == [8 * MIB] * 2
    assert [status[each].reserved_bytes for each in (GPU, GPU2)] == [0, 0]
    assert touch(world, path, GPU2).outcome == "hit", "the identity is trusted there"


def test_numbers_are_copied_as_they_are(make_device_world: MakeWorld) -> None:
    """The first that come over a link are read back, by the same layout."""
    world = make_device_world({"devices": 2})
    world.start()
    numbers = world.file(1, 7 * MIB)
    time.sleep(0.12)  # as in model()
    with connected(world) as connection:
        for device in (GPU, GPU2):
            image = open_on(connection, numbers, device, is_numbers=True)
            assert image.content() == content(numbers)
            image.close()
    assert copies(world) == (1, 0, 0)


def test_a_device_comes_before_the_host_tier(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2})
    world.start()
    path = model(world)
    touch(world, path, "host")
    touch(world, path, GPU)
    assert copies(world) == (0, 0, 1)
    touch(world, path, GPU2)
    assert copies(world) == (1, 0, 1)


def test_the_best_link_is_taken(make_device_world: MakeWorld) -> None:
    """Neighbours have it on this machine; the first device is damaged, so that it would show."""
    world = make_device_world({"devices": 3})
    world.start()
    path = model(world)
    touch(world, path, GPU)
    touch(world, path, GPU2)
    with connected(world) as connection, opened(connection, path, GPU) as far:
        os.pwrite(far.granted.allocations[0], b"damage", 1000)
        with opened(connection, path, THIRD) as image:
            assert image.content() == content(path)
    assert copies(world) == (2, 0, 0)


@pytest.mark.parametrize("held", ["nothing", "host"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fail": "cuMemcpyDtoDAsync"}, "cuMemcpyDtoDAsync"),
        ({"fail": "cuMemcpyDtoDAsync=kill"}, "died"),
        ({"peer": 2}, "arrives damaged"),
    ],
    ids=["driver", "death", "damage"],
)
def test_a_copy_that_fails_costs_time_only(
    make_device_world: MakeWorld, settings: dict[str, object], reason: str, held: str
) -> None:
    """The image comes from the host tier then, or from the file."""
    world = make_device_world({"devices": 2, **settings})
    world.start()
    paths = [model(world, seed) for seed in (1, 2)]
    for path in paths:
        if held == "host":
            touch(world, path, "host")
        touch(world, path, GPU)
    promoted = 2 if held == "host" else 0
    touch(world, paths[0], GPU2)
    assert copies(world) == (0, 1, promoted + bool(promoted))
    assert reason in world.log()
    # Once bitten: it is not tried again at once.
    touch(world, paths[1], GPU2)
    assert copies(world) == (0, 1, 2 * promoted)
    assert image_memory(world) == 4 * 8 * MIB


@pytest.mark.parametrize(
    ("settings", "device_peers"), [({"peer": 0}, "1"), ({}, "0")], ids=["no peers", "off"]
)
def test_devices_that_do_not_copy(
    make_device_world: MakeWorld, settings: dict[str, object], device_peers: str
) -> None:
    world = make_device_world({"devices": 2, **settings}, device_peers=device_peers)
    world.start()
    path = model(world)
    for device in (GPU, GPU2):
        touch(world, path, device)
    assert copies(world) == (0, 0, 0)
    assert len(uploaders(world)) == 2


def test_with_the_backend_ipc_nothing_is_copied(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2}, device_backend="ipc")
    world.start()
    path = model(world)
    with connected(world) as connection:
        for device in (GPU, GPU2):
            with opened(connection, path, device):
                pass
    assert copies(world) == (0, 0, 0)
    assert set(tiers(world)) == {GPU, GPU2}


def test_the_source_stays_while_it_is_copied(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2}, device_bytes="16M")
    world.start()
    paths = [model(world, seed) for seed in (1, 2)]
    digest = touch(world, paths[0], GPU).digest
    with connected(world) as connection:
        with machine(world).copies_held():
            load = Background(world, paths[0], GPU2)
            wait_for_copy(world)
            with pytest.raises(NoSpace, match="being copied"):
                connection.request(admin.EvictImageRequest(paths[0], tier=GPU))
            with pytest.raises(NoSpace, match="TRIMS_DEVICE_BYTES"):
                open_on(connection, paths[1], GPU)
            assert tiers(world)[GPU] == {digest}
        assert load.join() == ("miss", True)
        assert copies(world) == (1, 0, 0)
        assert connection.request(admin.EvictImageRequest(paths[0], tier=GPU)).digests
    assert digest not in tiers(world).get(GPU, set())


def test_who_asked_may_die_while_it_is_copied(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2})
    world.start()
    path = model(world)
    touch(world, path, GPU)
    with machine(world).copies_held():
        child = world.spawn(
            "c = Connection(cache().endpoint, stall_timeout_s=60)\n"
            f"c.open_image(os.open({path!r}, os.O_RDONLY), {path!r}, tier={GPU2!r})\n"
        )
        wait_for_copy(world)
        child.kill()
    wait_until(lambda: tiers(world).get(GPU2), "the image is there")
    with connected(world) as connection:
        assert len(connection.request(admin.EvictImageRequest(path)).digests) == 1
    assert image_memory(world) == 0


def slow_copy(make_device_world: MakeWorld, **settings: Any) -> tuple[World, Background]:
    """A load on the second device, of what the first one has, that takes its time."""
    world = make_device_world({"devices": 2, **settings})
    world.start()
    path = model(world)
    touch(world, path, GPU)
    load = Background(world, path, GPU2)
    return world, load


def test_a_killed_copier_costs_one_copy(make_device_world: MakeWorld) -> None:
    world, load = slow_copy(make_device_world, fail="cuMemcpyDtoDAsync=hang")
    os.kill(wait_for_copy(world), signal.SIGKILL)
    assert load.join() == ("miss", True)
    assert copies(world) == (0, 1, 0)
    assert image_memory(world) == 16 * MIB


def test_a_killed_daemon_takes_a_copy_with_it(make_device_world: MakeWorld) -> None:
    world, load = slow_copy(make_device_world, fail="cuMemcpyDtoDAsync=hang")
    wait_for_copy(world)
    world.kill_daemon()
    assert isinstance(load.join(), Exception)
    wait_until(lambda: not uploaders(world), "the uploaders end")
    wait_until(lambda: not machine(world).allocations(), "device memory is given back")


def test_a_stopping_daemon_finishes_a_copy(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2})
    world.start()
    path = model(world)
    touch(world, path, GPU)
    with machine(world).copies_held(), connected(world) as connection:
        load = Background(world, path, GPU2)
        wait_for_copy(world)
        connection.request(admin.StopDaemonRequest())
    assert load.join() == ("miss", True)
    wait_until(lambda: not uploaders(world), "the uploaders end")


def test_anothers_identity_is_no_reason_to_copy(make_device_world: MakeWorld) -> None:
    """A file that was changed has another identity, whatever its name is."""
    world = make_device_world({"devices": 2})
    world.start()
    path = model(world)
    old = touch(world, path, GPU)
    other = content(model(world, 2))
    with open(path, "wb") as file:
        file.write(other)
    new = touch(world, path, GPU2)
    assert new.digest != old.digest
    assert copies(world) == (0, 0, 0)


# --- room that is not there -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["vmm", "ipc"])
def test_others_memory_is_made_up_for_by_free_images(
    make_device_world: MakeWorld, backend: str
) -> None:
    """NVML is silent, so the account says that there is room; the driver has none."""
    world = make_device_world({"memory_bytes": 32 * MIB, "nvml": 0}, device_backend=backend)
    world.start()
    paths = [model(world, seed) for seed in (1, 2, 3, 4)]
    digests = [_take(world, path) for path in paths[:2]]
    other = world.spawn(
        "from trims_shim.memory.driver import driver\n"
        f"handle = driver().create(0, {16 * MIB})\nsay('taken'); hear()\n"
    )
    assert other.hear() == "taken"
    third = _take(world, paths[2])
    assert tiers(world)[GPU] == {digests[1], third}
    assert tiers(world)["host"] == {digests[0]}, "it was kept where there is room"
    assert world.status().counters["evicted_under_pressure"] == 1
    with connected(world) as connection:
        held = [open_on(connection, path, GPU) for path in (paths[1], paths[2])]
        with pytest.raises(NoSpace):
            open_on(connection, paths[3], GPU)
        assert tiers(world)[GPU] == {digests[1], third}, "leased images stay"
        for each in held:
            each.close()
    assert world.status().devices[0].reserved_bytes == 0
    other.say()
    assert other.wait() == 0


def test_room_is_made_for_an_uploaders_context(make_device_world: MakeWorld) -> None:
    """The load gives its own memory back meanwhile, or nothing could be copied away."""
    settings = {"memory_bytes": 32 * MIB, "context_bytes": 16 * MIB, "nvml": 0}
    world = make_device_world(settings, uploader_idle="0.1")
    world.start()
    digests = []
    for seed in (1, 2, 3):
        digests.append(_take(world, model(world, seed)))
        wait_until(
            lambda: image_memory(world) == machine(world).used_bytes(), "no uploader has a context"
        )
    assert tiers(world) == {GPU: set(digests[1:]), "host": {digests[0]}}
    assert world.status().counters["evicted_under_pressure"] == 1


def _take(world: World, path: str) -> str:
    """Loaded, and nobody's."""
    with connected(world) as connection, opened(connection, path) as image:
        digest = image.digest
    wait_until(lambda: not any(each.leases for each in world.status().images), "no lease")
    return digest


# --- verify ---------------------------------------------------------------------------------------


def test_every_tier_is_verified_or_the_one_that_is_named(make_device_world: MakeWorld) -> None:
    world = make_device_world({"devices": 2})
    world.start()
    path = model(world)
    digest, _, _ = (touch(world, path, tier).digest for tier in ("host", GPU, GPU2))
    with connected(world) as connection, opened(connection, path, GPU) as image:
        sound = connection.request(admin.VerifyImageRequest(path))
        assert sound.computed == digest
        assert [each.tier for each in sound.tiers] == ["host", GPU, GPU2]
        assert {each.computed for each in sound.tiers} == {digest}
        os.pwrite(image.granted.allocations[0], b"damage", 1000)
        damaged = connection.request(admin.VerifyImageRequest(path))
        assert damaged.computed not in ("", digest)
        verdicts = {each.tier: each.computed == digest for each in damaged.tiers}
        assert verdicts == {"host": True, GPU: False, GPU2: True}
        for tier, is_sound in verdicts.items():
            one = connection.request(admin.VerifyImageRequest(path, tier))
            assert [each.tier for each in one.tiers] == [tier]
            assert (one.computed == digest) == is_sound
        with pytest.raises(UnknownDevice):
            connection.request(admin.VerifyImageRequest(path, THIRD))


def test_a_tier_that_cannot_be_verified_does_not_hide_the_others(
    make_device_world: MakeWorld,
) -> None:
    world = make_device_world({"fail": "cuMemcpyDtoHAsync=kill"})
    world.start()
    path = model(world)
    digest = touch(world, path, "host").digest
    touch(world, path, GPU)
    with connected(world) as connection:
        reply = connection.request(admin.VerifyImageRequest(path))
    host, device = reply.tiers
    assert (host.computed, host.error) == (digest, "")
    assert (device.computed, reply.computed) == ("", "")
    assert "died" in device.error


def test_verifying_takes_no_host_memory(make_device_world: MakeWorld) -> None:
    world = make_device_world(host_bytes="1M")
    world.start()
    path = model(world)
    digest = touch(world, path, GPU).digest
    with connected(world) as connection:
        assert connection.request(admin.VerifyImageRequest(path)).computed == digest


# --- MIG ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instance", [0, 1])
def test_a_daemon_serves_the_instance_it_is_shown(
    make_device_world: MakeWorld, instance: int
) -> None:
    """CUDA shows a process one instance at most; its uploader sees the same one."""
    ids = emulated_cuda.device_ids(1, mig=2)
    world = make_device_world({"mig": 2})
    world.variables["CUDA_VISIBLE_DEVICES"] = ids[instance]
    world.start()
    path = model(world)
    digest = touch(world, path, ids[instance]).digest
    assert tiers(world) == {ids[instance]: {digest}}
    assert machine(world).used_bytes(ids[instance]) == 8 * MIB
    (uploader,) = uploaders(world)
    with open(f"/proc/{uploader}/environ", "rb") as file:
        assert f"CUDA_VISIBLE_DEVICES={ids[instance]}\0".encode() in file.read()
    with connected(world) as connection, pytest.raises(UnknownDevice, match="daemon cannot share"):
        open_on(connection, path, ids[1 - instance])


def test_instances_are_no_peers(make_device_world: MakeWorld) -> None:
    """Two daemons, each with an instance: nothing passes between them but by the file."""
    ids = emulated_cuda.device_ids(2, mig=2)
    world = make_device_world({"mig": 2, "devices": 2})
    world.variables["CUDA_VISIBLE_DEVICES"] = ids[3]
    world.start()
    touch(world, model(world), ids[3])
    assert copies(world) == (0, 0, 0)
    assert [machine(world).used_bytes(each) for each in ids] == [0, 0, 0, 8 * MIB]
