"""Deaths and hostile files at a device tier, on an emulated machine.

Promises: whoever dies, at whichever step, takes nothing with it and leaves no memory behind (the
emulated machine has to be empty after every test); a file can harm only the load that it is for.
"""

from __future__ import annotations

import json
import os
import signal
import struct

import pytest
from device_images import MIB, open_on, safetensors
from harness import process_state, wait_until

from faults.device_worlds import (
    GPU,
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
    wait_for_upload,
)
from trims_shim.errors import (
    FileChanged,
    FormatError,
    TrimsError,
    UnknownDevice,
)
from trims_shim.wire import admin

# --- deaths ---------------------------------------------------------------------------------------


def test_an_uploader_killed_once_costs_nothing(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    world.start()
    path = model(world)
    with machine(world).copies_held():
        load = Background(world, path)
        os.kill(wait_for_upload(world), signal.SIGKILL)
    assert load.join() == ("miss", True)
    assert "died: signal 9" in world.log()
    assert image_memory(world) == 8 * MIB


def test_an_uploader_that_always_dies_costs_the_load(make_device_world: MakeWorld) -> None:
    world = make_device_world({"fail": "cuMemcpyHtoDAsync=kill"})
    pid = world.start()
    path = model(world)
    with connected(world) as connection:
        for _ in range(2):
            with pytest.raises(UnknownDevice, match=r"uploader .* died"):
                open_on(connection, path, GPU)
        with opened(connection, path, "host") as image:
            assert image.content() == content(path)
    assert world.pid() == pid
    assert image_memory(world) == 0
    status = world.status().devices[0]
    assert (status.resident_bytes, status.reserved_bytes) == (0, 0)


def test_an_uploader_whose_driver_fails_is_replaced(make_device_world: MakeWorld) -> None:
    world = make_device_world({"fail": "cuMemMap:1"})
    world.start()
    with connected(world) as connection:
        with pytest.raises(UnknownDevice, match="cuMemMap"):
            open_on(connection, model(world), GPU)
        wait_until(lambda: not uploaders(world), "the broken one ends")
    assert image_memory(world) == 0


def test_an_uploader_that_dies_of_what_leaves_costs_that_image(
    make_device_world: MakeWorld,
) -> None:
    """And not the one that takes its place."""
    world = make_device_world({"fail": "cuMemcpyDtoHAsync=kill"}, device_bytes="16M")
    world.start()
    touch(world, model(world, 1))
    last = touch(world, model(world, 2))
    assert tiers(world) == {GPU: {last.digest}}
    assert image_memory(world) == 8 * MIB
    assert world.status().memory.reserved_bytes == 0
    assert "died: signal 9" in world.log()


@pytest.mark.parametrize("moment", ["idle", "uploading"])
def test_a_killed_daemon_takes_its_uploader_and_nothing_else(
    make_device_world: MakeWorld, moment: str
) -> None:
    world = make_device_world({"fail": "cuMemcpyHtoDAsync=hang"} if moment == "uploading" else {})
    world.start()
    path = model(world)
    if moment == "uploading":
        load = Background(world, path)
        uploader = wait_for_upload(world)
        world.kill_daemon()
        assert isinstance(load.join(), TrimsError)
    else:
        with connected(world) as connection, opened(connection, path) as image:
            (uploader,) = uploaders(world)
            world.kill_daemon()
            wait_until(lambda: process_state(uploader) in ("", "Z"), "the uploader ends")
            assert image.content() == content(path), "memory lives as long as its clients"
    wait_until(lambda: process_state(uploader) in ("", "Z"), "the uploader ends")
    wait_until(lambda: not machine(world).allocations(), "device memory is given back")


@pytest.mark.parametrize("step", ["offered", "asked", "granted", "mapped"])
def test_clients_killed_at_a_step(make_device_world: MakeWorld, step: str) -> None:
    world = make_device_world({"copy_delay_ms": 30})
    pid = world.start()
    path = model(world)
    touch(world, path)
    before = len(world.descriptors(pid))
    scripts = {
        "offered": "handover.send(c._handover, messages.FileOffer(1), descriptor=f)\n"
        "say('here'); signal.pause()\n",
        "asked": "def answer_to_offer(self, parts):\n  say('here'); signal.pause()\n"
        "Connection._answer_to_offer = answer_to_offer\n"
        f"c.open_image(f, {path!r}, tier={GPU!r})\n",
        "granted": f"g = c.open_image(f, {path!r}, tier={GPU!r})\nsay('here'); signal.pause()\n",
        "mapped": f"g = c.open_image(f, {path!r}, tier={GPU!r})\n"
        "from trims_shim.memory.device import map_allocations\n"
        f"m = map_allocations({GPU!r}, g.allocations, g.reply.device.allocations,"
        " is_writable=False)\n"
        "say('here'); signal.pause()\n",
    }
    prelude = (
        "c = Connection(cache().endpoint, stall_timeout_s=10)\n"
        f"f = os.open({path!r}, os.O_RDONLY)\n"
    )
    for _ in range(2):
        children = [world.spawn(prelude + scripts[step]) for _ in range(2)]
        for child in children:
            assert child.hear() == "here"
        for child in children:
            child.kill()
            child.close()
        world.children.clear()
        world.assert_quiet(before)
    assert world.pid() == pid
    assert image_memory(world) == 8 * MIB


def test_a_load_nobody_waits_for_any_more_runs_to_its_end(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    world.start()
    path = model(world)
    with machine(world).copies_held():
        child = world.spawn(
            "c = Connection(cache().endpoint, stall_timeout_s=60)\n"
            f"c.open_image(os.open({path!r}, os.O_RDONLY), {path!r}, tier={GPU!r})\n"
        )
        wait_for_upload(world)
        child.kill()
    wait_until(lambda: tiers(world).get(GPU), "the image is there")
    assert touch(world, path).outcome == "hit"


def test_a_stopping_daemon_finishes_its_upload(make_device_world: MakeWorld) -> None:
    world = make_device_world()
    world.start()
    with machine(world).copies_held(), connected(world) as connection:
        load = Background(world, model(world))
        wait_for_upload(world)
        connection.request(admin.StopDaemonRequest())
    assert load.join() == ("miss", True)
    wait_until(lambda: not uploaders(world), "the uploader ends")


# --- hostile files --------------------------------------------------------------------------------


def _padding_bomb() -> bytes:
    """40000 tensors of a byte: 20 MiB once they are aligned."""
    return safetensors([1] * 40_000)


def _outline_bomb() -> bytes:
    """A little tensor and megabytes of metadata."""
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    text = json.dumps({"__metadata__": {"k": "v" * (8 * MIB)}, "t": entry}).encode()
    return len(text).to_bytes(8, "little") + text + b"tensors!"


HOSTILE = {
    "padding bomb": _padding_bomb,
    "outline bomb": _outline_bomb,
    "no model": lambda: b"no model at all" * 100_000,
    "a header of nothing": lambda: (1 << 40).to_bytes(8, "little") + b"{" * 100,
    "a zip that is cut": lambda: b"PK\x03\x04" + bytes(5 * MIB),
    "no tensor": lambda: safetensors([]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files(make_device_world: MakeWorld, kind: str) -> None:
    world = make_device_world()
    pid = world.start()
    path = world.file(name="hostile.bin")
    with open(path, "wb") as file:
        file.write(HOSTILE[kind]())
    good = model(world)
    touch(world, good)
    before = len(world.descriptors(pid))
    with connected(world) as connection:
        for _ in range(3):
            with pytest.raises(FormatError):
                open_on(connection, path, GPU)
    assert len(tiers(world)[GPU]) == 1
    assert image_memory(world) == 8 * MIB
    world.assert_quiet(before)
    assert touch(world, good).outcome == "hit"


def _archive(records: int) -> bytes:
    """A torch archive of so many storages of four bytes."""
    names = [b"m/version", *(b"m/data/%d" % number for number in range(records))]
    local, central = [], []
    offset = 0
    for name in names:
        data = b"3\n" if name.endswith(b"version") else b"data"
        sizes = (0, len(data), len(data), len(name))
        local.append(struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 0, *sizes, 0))
        local += [name, data]
        central.append(
            struct.pack(
                "<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, *sizes, *[0] * 5, offset
            )
        )
        central.append(name)
        offset += 30 + len(name) + len(data)
    directory = b"".join(central)
    end64 = struct.pack(
        "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, len(names), len(names), len(directory), offset
    )
    locator = struct.pack("<IIQI", 0x07064B50, 0, offset + len(directory), 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return b"".join([*local, directory, end64, locator, end])


def test_a_file_that_shrinks_while_it_is_parsed(make_device_world: MakeWorld) -> None:
    """SIGBUS in the uploader; the load that is uploading meanwhile is repeated."""
    world = make_device_world(device_bytes="900M")
    pid = world.start()
    good = model(world)
    path = world.file(name="archive.pt")
    with open(path, "wb") as file:
        file.write(_archive(200_000))
    with machine(world).copies_held():
        victim = Background(world, good)
        uploader = wait_for_upload(world)
        load = Background(world, path)
        wait_until(lambda: path in maps_of(uploader), "it is parsed", interval_s=0.001)
        os.truncate(path, 4096)
        error = load.join()
    assert isinstance(error, UnknownDevice), error
    assert "died" in str(error)
    assert f"died: signal {signal.SIGBUS.value}" in world.log()
    assert victim.join() == ("miss", True)
    assert world.pid() == pid


def test_a_file_that_shrinks_while_it_is_uploaded(make_device_world: MakeWorld) -> None:
    """Small copies: the end of the file is read when its begin has been copied."""
    world = make_device_world(device_bytes="900M")
    pid = world.start()
    path = model(world, 5, (64 * MIB,) * 3)
    with machine(world).copies_held():
        load = Background(world, path)
        wait_for_upload(world)
        os.truncate(path, 100 * MIB)
    assert isinstance(load.join(), FileChanged), load.result
    assert image_memory(world) == 0
    assert world.pid() == pid
    touch(world, model(world))


def test_a_file_that_is_rewritten_while_it_is_uploaded(make_device_world: MakeWorld) -> None:
    world = make_device_world(device_bytes="900M")
    world.start()
    path = model(world, 5, (64 * MIB,) * 3)
    other = safetensors((63 * MIB, 65 * MIB, 64 * MIB), seed=6)[: 4 * MIB]
    with machine(world).copies_held():
        load = Background(world, path)
        wait_for_upload(world)
        with open(path, "r+b") as file:
            file.write(other)
    assert isinstance(load.join(), FileChanged), load.result
    assert tiers(world) == {}
