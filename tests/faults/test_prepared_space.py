"""Prepared ONNX models and scarce things: disk, memory, descriptors, other users."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import World, wait_until

from faults.prepared_worlds import (
    SESSIONS,
    MakeWorld,
    directory,
    entries,
    evict,
    expected,
    model,
    prepare,
    rows,
    sessions,
    settled,
    wait_for_preparer,
)
from trims_shim.errors import NoSpace

MIB = 1 << 20
WIDE = 2048
"""A model of this width has about 5 MiB."""


# --- disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(make_prepared_world: MakeWorld) -> Iterator[World]:
    """A world whose prepared models are on a file system of 24 MiB, and may fill it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    world = make_prepared_world(prepared_bytes="100%")
    place = world.settings["cache_dir"]
    os.makedirs(place, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=24M,mode=700", "trims-test", place]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield world
    world.stop_daemon()
    for child in world.children:
        child.close()
    subprocess.run(["umount", "-l", place], timeout=120, check=True)


def test_a_full_disk(small_disk: World) -> None:
    """Refused for now, not for ever; nothing half made stays, nothing that is there is harmed."""
    world = small_disk
    small, large = model(world, 1), model(world, 2, width=WIDE)
    right = expected(world, small, large)
    prepare(world, small)
    filler = Path(world.settings["cache_dir"]) / "filler"
    filler.write_bytes(bytes(21 * MIB))
    client = sessions(world)
    assert client.create(large) == (right[1], False)
    states = settled(world)
    assert states.pop("ready") == 1
    assert set(states) <= {"disk_full", "no_space"}
    assert len(states) == 1
    assert client.create(small) == (right[0], True)
    assert len(entries(world)) == 1
    filler.unlink()
    evict(world, large)
    client.create(large)
    assert settled(world) == {"ready": 2}
    assert client.create(large) == (right[1], True)


def _free_bytes(world: World) -> int:
    status = os.statvfs(world.settings["cache_dir"])
    return status.f_bavail * status.f_frsize


def test_a_full_disk_on_which_room_is_made(small_disk: World) -> None:
    """Models that are dropped for another one are not dropped in vain."""
    world = small_disk
    new = model(world, 9)
    right = expected(world, new)[0]
    prepare(world, *(model(world, seed, width=700) for seed in range(1, 5)))
    filler = Path(world.settings["cache_dir"]) / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _free_bytes(world))
    client = sessions(world)
    assert client.create(new) == (right, False)
    assert set(settled(world)) == {"ready"}
    assert client.create(new) == (right, True)


def test_files_may_not_grow(prepared_world: World) -> None:
    """RLIMIT_FSIZE, which the preparer inherits: as if the disk were full while it writes."""
    world = prepared_world
    small, large = model(world, 1), model(world, 2, width=WIDE)
    right = expected(world, small, large)
    prepare(world, small)
    resource.prlimit(world.pid(), resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
    client = sessions(world)
    assert client.create(large) == (right[1], False)
    states = settled(world)
    assert states.pop("ready") == 1
    assert sum(states.values()) == 1
    assert client.create(large) == (right[1], False)
    assert client.create(small) == (right[0], True)
    wait_until(lambda: len(os.listdir(directory(world))) <= 2, "nothing half made is left")


def test_the_directory_cannot_be_made(make_prepared_world: MakeWorld) -> None:
    """A file in the way: no prepared models, and everything else as ever."""
    world = make_prepared_world()
    world.settings["cache_dir"] = os.path.join(world.root, "file")
    Path(world.settings["cache_dir"]).write_text("in the way")
    path = model(world)
    client = sessions(world)
    right = expected(world, path)[0]
    assert [client.create(path) for _ in range(2)] == [(right, False)] * 2
    assert client.fallbacks() == {"prepared_off": 2}
    assert world.status().storage is not None


# --- memory ---------------------------------------------------------------------------------------


def test_too_little_memory_to_prepare(prepared_world: World) -> None:
    """RLIMIT_AS of a preparer that has just started: it fails in whatever way, and that is all."""
    world = prepared_world
    path = model(world, width=WIDE)
    right = expected(world, path)[0]
    client = sessions(world)
    assert client.create(path) == (right, False)
    preparer = wait_for_preparer(world)
    resource.prlimit(preparer, resource.RLIMIT_AS, (64 * MIB, 64 * MIB))
    states = settled(world)
    assert "ready" not in states
    assert sum(states.values()) == 1
    assert client.create(path) == (right, False)
    evict(world)
    client.create(path)
    assert settled(world) == {"ready": 1}
    assert client.create(path) == (right, True)


def test_the_client_has_no_address_space_for_a_hit(prepared_world: World) -> None:
    """Mapping the prepared model fails; what onnxruntime says to its own attempt is what counts."""
    world = prepared_world
    path = model(world, width=WIDE)
    prepare(world, path)
    said = world.run(
        SESSIONS + "import resource\n"
        f"first = create({path!r})\n"
        "right = bits(first)\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 20), -1))\n"
        "try:\n"
        f"  create({path!r})\n"
        "  said = 'made'\n"
        "except Exception as error:\n"
        "  said = type(error).__name__\n"
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        f"again = create({path!r})\n"
        "say([said, bits(first) == right, bits(again) == right, trims_shim.stats().served])\n"
    )
    assert said[1:] == [True, True, 2 + (said[0] == "made")]


# --- eviction -------------------------------------------------------------------------------------


def test_the_budget_is_kept(make_prepared_world: MakeWorld) -> None:
    """Models that nobody uses go for new ones; those that sessions use stay."""
    world = make_prepared_world(prepared_bytes="4M")
    paths = [model(world, seed) for seed in range(1, 5)]
    right = expected(world, *paths)
    prepare(world, paths[0])
    [first] = entries(world)
    size_bytes = rows(world)[0].size_bytes
    client = sessions(world)
    assert client.create(paths[0]) == (right[0], True)
    prepare(world, *paths[1:])
    status = world.status()
    assert status.storage is not None
    assert status.storage.resident_bytes <= 4 * MIB
    assert first in entries(world)
    assert size_bytes * len(entries(world)) <= 4 * MIB
    assert client.run() == [right[0]]


def test_evicted_while_sessions_run(prepared_world: World) -> None:
    """In use it stays; afterwards it goes, and is prepared again when somebody wants it."""
    world = prepared_world
    path = model(world)
    prepare(world, path)
    client = sessions(world)
    right, _ = client.create(path)
    [key] = entries(world)
    with pytest.raises(NoSpace, match="in use"):
        evict(world, key)
    assert evict(world).keys == ()
    assert client.create(path) == (right, True)
    client.drop()
    wait_until(lambda: not any(row.leases for row in rows(world)), "the leases are given up")
    assert evict(world, path).keys == (key,)
    wait_until(lambda: not os.listdir(directory(world)), "its files are gone")
    assert client.create(path) == (right, False)
    assert settled(world) == {"ready": 1}


def test_unlinked_under_a_session(prepared_world: World) -> None:
    """What a session has mapped is as it was, whatever becomes of the names and of the room."""
    world = prepared_world
    path = model(world, width=WIDE)
    prepare(world, path)
    client = sessions(world)
    right, _ = client.create(path)
    [key] = entries(world)
    for name in ("model.onnx", "weights.bin"):
        os.unlink(os.path.join(directory(world), key, name))
    others = [model(world, seed, width=WIDE) for seed in (2, 3)]
    prepare(world, *others)
    assert client.run() == [right]
    assert client.create(path) == (right, False)
    assert settled(world) == {"ready": 3}
    assert client.run() == [right] * 2


def test_more_models_than_may_wait(prepared_world: World) -> None:
    """Too many at once: the daemon says that it is busy, and every session is made."""
    world = prepared_world
    paths = [model(world, seed, width=16) for seed in range(1, 41)]
    child = world.spawn(
        SESSIONS + f"say([bits(create(path)) for path in {paths!r}])\nsay(counted())\n"
    )
    computed = child.hear(60)
    assert len(set(computed)) == len(paths)
    served, fallbacks = child.hear()
    assert served + sum(fallbacks.values()) == len(paths)
    assert set(fallbacks) <= {"preparing", "busy"}


# --- users ----------------------------------------------------------------------------------------

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_served(make_prepared_world: MakeWorld) -> None:
    """Of a machine-wide daemon only its own user gets prepared models, and nobody's are made."""
    import grp

    world = make_prepared_world(group=grp.getgrgid(NOBODY).gr_name)
    path = model(world)
    right = expected(world, path)[0]
    prepare(world, path)
    os.chmod(world.root, 0o755)
    os.chmod(path, 0o644)
    other = model(world, 2)
    os.chmod(other, 0o644)
    said = world.run(
        SESSIONS + "import trims_shim.client.spawn, zmq, zmq.backend, encodings.idna\n"
        "import zmq.utils.strtypes\n"
        "zmq.Poller(); zmq.Context().term()\n"
        f"os.setgroups([{NOBODY}]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"computed = [bits(create(path)) for path in ({path!r}, {other!r})]\n"
        f"try:\n  os.listdir({directory(world)!r}); seen = 'listed'\n"
        "except OSError as error:\n  seen = type(error).__name__\n"
        "say([computed[0], counted(), seen])\n"
    )
    assert said == [right, [0, {"other_user": 2}], "PermissionError"]
    assert settled(world) == {"ready": 1}
