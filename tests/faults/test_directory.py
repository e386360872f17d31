"""The socket directory: who owns it decides which bytes become weights, so doubt means no."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

import pytest
from harness import World, process_state, wait_until

from trims_shim.errors import ConfigError, UnusableSocketDir

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
NOBODY = 65534


def refused(world: World) -> str:
    """The error of a load; nothing may have been started for it."""
    path = world.file(1)
    said = world.run(
        f"try:\n open_file({path!r})\nexcept errors.TrimsError as error:\n"
        " say([type(error).__name__, str(error)])\nelse:\n say(['served', ''])\n"
    )
    assert said[0] in (UnusableSocketDir.__name__, ConfigError.__name__), said
    assert world.processes() == []
    assert world.sockets in said[1]
    return str(said[1])


def foreign(world: World) -> None:
    os.mkdir(world.sockets, 0o700)
    os.chown(world.sockets, NOBODY, NOBODY)


def foreign_and_open(world: World) -> None:
    os.mkdir(world.sockets)
    os.chmod(world.sockets, 0o777)
    os.chown(world.sockets, NOBODY, NOBODY)


def world_writable(world: World) -> None:
    os.mkdir(world.sockets)
    os.chmod(world.sockets, 0o707)


def sticky_and_writable(world: World) -> None:
    os.mkdir(world.sockets)
    os.chmod(world.sockets, 0o1777)


def link(world: World) -> None:
    os.mkdir(world.sockets + ".real", 0o700)
    os.symlink(world.sockets + ".real", world.sockets)


def dangling_link(world: World) -> None:
    os.symlink(world.sockets + ".real", world.sockets)


def plain_file(world: World) -> None:
    with open(world.sockets, "w"):
        pass


@pytest.mark.parametrize(
    ("prepare", "word"),
    [
        pytest.param(foreign, "belongs to user 65534", marks=needs_root),
        pytest.param(foreign_and_open, "belongs to user 65534", marks=needs_root),
        (world_writable, "writable by everybody"),
        (sticky_and_writable, "writable by everybody"),
        (link, "not a directory"),
        (dangling_link, "not a directory"),
        (plain_file, "not a directory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_directory_in_doubt(world: World, prepare: Callable[[World], None], word: str) -> None:
    prepare(world)
    assert word in refused(world)
    assert not os.path.exists(os.path.join(world.sockets, "daemon.log"))


@needs_root
def test_group_writable(world: World) -> None:
    """A user's own directory must not be open to a group."""
    os.chmod(world.root, 0o755)
    os.mkdir(world.sockets)
    os.chown(world.sockets, NOBODY, NOBODY)
    os.chmod(world.sockets, 0o770)
    path = world.file(1)
    os.chmod(path, 0o644)
    said = world.run(
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"try:\n open_file({path!r})\nexcept errors.TrimsError as error:\n say(str(error))\n"
    )
    assert "writable by its group" in said
    assert os.listdir(world.sockets) == []


@pytest.mark.parametrize("name", ["daemon.log", "start.lock", "daemon.lock"])
def test_no_link_is_followed(world: World, name: str) -> None:
    """A link planted in the directory must not make anybody write or create its target."""
    os.mkdir(world.sockets, 0o700)
    target = os.path.join(world.root, "target")
    os.symlink(target, os.path.join(world.sockets, name))
    said = world.run(
        f"try:\n open_file({world.file(1)!r})\nexcept errors.TrimsError as error:\n"
        " say(error.reason)\n"
    )
    assert said in ("daemon_unavailable", "daemon_start_failed")
    assert not os.path.exists(target)
    wait_until(lambda: not world.processes(), "a daemon that could not start is gone")


@pytest.mark.parametrize("length", [77, 78, 120, 300])
def test_a_long_path(make_world: Any, length: int) -> None:
    """107 bytes for the longest name: a directory of 77 just fits."""
    world = make_world()
    room = length - len(world.root) - 1
    world.sockets = os.path.join(world.root, "d" * min(room, 200)) + "e" * max(0, room - 200)
    assert len(world.sockets) == length
    if length == 77:
        world.start()
        assert world.run(f"say(open_file({world.file(1)!r}).size_bytes)\n")
        return
    assert "too long" in refused(world)


def test_made_private_and_removable(running: World) -> None:
    status = os.stat(running.sockets)
    assert stat.S_IMODE(status.st_mode) == 0o700
    for name in os.listdir(running.sockets):
        mode = stat.S_IMODE(os.stat(os.path.join(running.sockets, name)).st_mode)
        assert mode & 0o077 == 0, (name, oct(mode))


def test_unwritable_parent(world: World) -> None:
    world.sockets = "/proc/self/nowhere/s"
    assert "cannot be made" in refused(world)


@needs_root
def test_a_directory_that_this_user_may_not_write(world: World, model_file: str) -> None:
    """A new volume of a container is root's: who mounts it has to hear why nothing is shared."""
    os.chmod(world.root, 0o755)
    os.chmod(model_file, 0o644)
    os.mkdir(world.sockets, 0o755)
    said = world.run(
        "import io, logging\nfrom safetensors.numpy import load_file\n"
        "log = io.StringIO()\n"
        "logging.getLogger('trims_shim').addHandler(logging.StreamHandler(log))\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"load_file({model_file!r})\n"
        "say([trims_shim.stats().fallbacks, log.getvalue()])\n"
    )
    assert said[0] == {"socket_dir": 1}
    assert f"or started in {world.sockets}: Permission denied" in said[1]


def test_a_directory_that_vanishes_is_made_again(running: World) -> None:
    """Somebody cleans the temp dir while the daemon runs: the next client starts another."""
    path = running.file(1)
    old = running.pid()
    child = running.spawn(
        f"arena = open_file({path!r})\nsay()\nhear()\n"
        f"say(data(arena) == open({path!r}, 'rb').read())\n"
        f"say(open_file({running.file(2)!r}).size_bytes)\n"
    )
    child.hear()
    for name in os.listdir(running.sockets):
        os.unlink(os.path.join(running.sockets, name))
    os.rmdir(running.sockets)
    assert running.run(f"open_file({path!r})\nsay(cache().welcome().pid)\n") != old
    child.say()
    assert child.hear() is True
    assert child.hear() > 0
    wait_until(lambda: process_state(old) in ("", "Z"), "the one that nobody finds has ended")


def test_a_socket_that_vanishes_is_made_again(running: World) -> None:
    """Found: the lock was still held, and each load waited in vain for twice five seconds."""
    path = running.file(1)
    old = running.pid()
    os.unlink(os.path.join(running.sockets, "handover.sock"))
    assert running.run(f"open_file({path!r})\nsay(cache().welcome().pid)\n") != old
    wait_until(lambda: process_state(old) in ("", "Z"), "the one that nobody finds has ended")


@pytest.mark.parametrize("name", ["control", "events"])
def test_a_daemon_of_which_another_socket_vanishes_ends(running: World, name: str) -> None:
    """Found: clients still connected to it, and each one waited for an answer in vain."""
    old = running.pid()
    (socket,) = (each for each in os.listdir(running.sockets) if each.startswith(f"{name}-"))
    os.unlink(os.path.join(running.sockets, socket))
    wait_until(lambda: process_state(old) in ("", "Z"), "the one that nobody reaches has ended")
    path = running.file(1)
    assert running.run(f"open_file({path!r})\nsay(cache().welcome().pid)\n") != old
