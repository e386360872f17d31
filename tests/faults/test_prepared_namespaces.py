"""Prepared ONNX models between containers. They share the sockets and the directory of prepared
models, under another name, but neither process ids nor the names of other files."""

from __future__ import annotations

import os
import shutil
import subprocess

import onnx_models
import pytest
from harness import World

from faults.prepared_worlds import (
    SESSIONS,
    Sessions,
    expected,
    model,
    prepare,
    rows,
    sessions,
    settled,
)

_APART = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--mount")
# The directory $0 is called $1 there, read-only, and in $2 there are other files of the same names.
_MOVE = """
mount --bind "$0" "$1" && mount -o remount,bind,ro "$1" && mount -t tmpfs tmpfs "$0" &&
cp -r "$2/." "$0" && mount -t tmpfs tmpfs "$2" && cp -r "$0/." "$2" && shift 2 && exec "$@"
"""


class Container:
    """``models`` are copies there; elsewhere they have the same names."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cache = os.path.join(world.root, "cache-there")
        self.models = os.path.join(world.root, "copied")
        for each in (world.settings["cache_dir"], self.cache, self.models):
            os.mkdir(each, 0o700)
        world.start()

    @property
    def prefix(self) -> tuple[str, ...]:
        there = (self.world.settings["cache_dir"], self.cache, self.models)
        return (*_APART, "sh", "-c", _MOVE, *there)

    def sessions(self, **settings: str) -> Sessions:
        settings = {"cache_dir": self.cache, "autostart": "0", **settings}
        return sessions(self.world, prefix=self.prefix, **settings)


@pytest.fixture
def container(prepared_world: World) -> Container:
    container = Container(prepared_world)
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command")
    done = subprocess.run(
        [*container.prefix, "true"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip(f"no new namespaces: {done.stderr.strip()}")
    return container


def test_a_model_of_another_container_is_prepared_and_served(container: Container) -> None:
    world = container.world
    path = model(world, name="copied/m.onnx")
    right = expected(world, path)[0]
    client = container.sessions()
    assert client.create(path) == (right, False)
    assert client.fallbacks() == {"preparing": 1}
    assert settled(world) == {"ready": 1}
    assert client.create(path) == (right, True)
    assert client.run() == [right] * 2
    (row,) = rows(world)
    assert row.leases == 1
    # Equal content is prepared once, whoever has it.
    ours = sessions(world)
    assert ours.create(path) == (right, False)
    settled(world)
    assert ours.create(path) == (right, True)
    assert world.status().counters["prepared_made"] == 1


def test_bytes_are_prepared_there(container: Container) -> None:
    world = container.world
    path = model(world)
    right = expected(world, path)[0]
    script = SESSIONS + (
        f"content = open({path!r}, 'rb').read()\n"
        "for _ in iter(hear, None):\n    say([bits(create(content)), *counted()])\n"
    )
    settings = {"cache_dir": container.cache, "autostart": "0"}
    client = world.spawn(script, prefix=container.prefix, **settings)
    client.say("once")
    assert client.hear(60) == [right, 0, {"unknown": 1}]
    assert settled(world) == {"ready": 1}
    client.say("again")
    assert client.hear(60) == [right, 1, {"unknown": 1}]


def test_what_was_prepared_here_is_served_there(container: Container) -> None:
    world = container.world
    path = model(world)
    right = expected(world, path)[0]
    prepare(world, path)
    assert container.sessions().create(path) == (right, True)


def test_who_does_not_see_the_prepared_models_gets_none(container: Container) -> None:
    world = container.world
    path = model(world)
    right = expected(world, path)[0]
    prepare(world, path)
    os.mkdir(os.path.join(container.models, "prepared"))
    for other in (container.models, os.path.join(world.root, "nowhere")):
        client = container.sessions(cache_dir=other)
        assert client.create(path) == (right, False)
        assert client.fallbacks() == {"other_namespace": 1}


@pytest.mark.parametrize("place", ["", "copied"])
def test_external_data_there(container: Container, place: str) -> None:
    """Files that both see by the same names, and files that only the container has."""
    world = container.world
    path = os.path.join(world.root, place, "m.onnx")
    onnx_models.save_external(onnx_models.perceptron(3, width=256))(path)
    right = expected(world, path)[0]
    client = container.sessions()
    assert client.create(path) == (right, False)
    assert settled(world) == {"ready": 1}
    assert client.create(path) == (right, True)
    assert client.fallbacks() == {"preparing": 1}
    prepare(world, path)
    assert sessions(world).create(path) == (right, True)
    assert world.status().counters["prepared_made"] == 1
    if not place:
        # The same model, of other data.
        onnx_models.save_external(onnx_models.perceptron(4, width=256))(path + ".other")
        other = expected(world, path)[0]
        assert other != right
        assert client.create(path) == (other, False)
        assert settled(world) == {"ready": 2}
        assert client.create(path) == (other, True)
