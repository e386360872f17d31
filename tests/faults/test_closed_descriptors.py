"""A program closes descriptors that are not its own, as one does that becomes a daemon. Promises:
what it opens next is neither mapped, nor written to, nor closed; loads go on working."""

from __future__ import annotations

import errno
import os

import pytest
from harness import World

from trims_shim.client.descriptors import above_streams

CLOSING = """
import gc
def close_all():
    "Of the program's own, nothing but the standard streams; other files get the numbers."
    os.closerange(3, 1024)
    return [os.memfd_create("mine") for _ in range(40)]
def fill(files):
    for each in files:
        os.pwrite(each, b'm' * (1 << 20), 0)
def mine(files):
    return all(os.pread(each, 2, (1 << 20) - 1) == b"m" for each in files)
def is_right(arena, path):
    return data(arena) == open(path, 'rb').read()
def error(work):
    try: work()
    except errors.TrimsError as failure: return failure.reason
"""


@pytest.mark.parametrize("place", ["the process itself", "a child"])
def test_what_the_program_opens_next_is_left_alone(running: World, place: str) -> None:
    one, two = running.file(1), running.file(2)
    said = running.run(
        CLOSING + f"one, two = {one!r}, {two!r}\n"
        f"arena = open_file(one); is_child = {place == 'a child'!r}\n"
        "if is_child and os.fork(): os.wait(); os._exit(0)\n"
        "files = close_all(); fill(files)\n"
        "reason = error(arena.image.map)\n"
        "again, other = open_file(one), open_file(two)\n"
        "rights = [is_right(arena, one), is_right(again, one), is_right(other, two)]\n"
        "del arena, again, other; gc.collect()\n"
        "say([reason, rights, mine(files)])\n"
    )
    assert said == ["memory", [True, True, True], True]
    running.assert_account()


def test_a_socket_of_the_program_is_not_taken_for_ours(running: World) -> None:
    one = running.file(1)
    said = running.run(
        CLOSING + "import socket\n"
        f"arena = open_file({one!r})\n"
        "os.closerange(3, 1024)\n"
        "pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]\n"
        "del arena; gc.collect()\n"
        f"arena = open_file({one!r})\n"
        "for each in sum(pairs, ()): each.setblocking(False)\n"
        "def is_silent(end):\n"
        "    try: return not end.recv(1)\n"
        "    except BlockingIOError: return True\n"
        f"say([is_right(arena, {one!r}), all(map(is_silent, sum(pairs, ())))])\n",
        timeout_s=30,
    )
    assert said == [True, True]


def test_what_is_written_to_closed_streams_does_not_go_to_the_daemon(running: World) -> None:
    one = running.file(1)
    said = running.run(
        CLOSING + "os.dup2(1, 100); say = lambda it: os.write(100, json.dumps(it).encode())\n"
        "os.closerange(0, 3)\n"
        f"arena = open_file({one!r})\n"
        "def kind(number):\n"
        "    try: return os.write(number, b'lost')\n"
        "    except OSError as failure: return failure.errno\n"
        f"say([[kind(number) for number in range(3)], is_right(arena, {one!r})])\n",
    )
    assert said == [[errno.EBADF] * 3, True]
    running.assert_account()


def test_what_is_written_to_closed_streams_does_not_go_to_zeromq(running: World) -> None:
    """Found: it aborted the program, if that printed while a model was loaded."""
    one = running.file(1)
    said = running.run(
        CLOSING + "os.dup2(1, 100); say = lambda it: os.write(100, json.dumps(it).encode())\n"
        "os.closerange(0, 3)\n"
        "def kind(number):\n"
        "    try: return os.write(number, b'12345678')\n"
        "    except OSError as failure: return failure.errno\n"
        "from trims_shim.client.connection import Connection\n"
        "exchange, kinds = Connection._exchange, []\n"
        "def print_first(*asked):\n"
        "    kinds.extend(map(kind, range(3)))\n"
        "    return exchange(*asked)\n"
        "Connection._exchange = print_first\n"
        f"arena = open_file({one!r})\n"
        f"say([kinds, is_right(arena, {one!r}), os.open('/', os.O_PATH)])\n",
    )
    assert said == [[errno.EBADF] * 3, True, 0]
    running.assert_account()


def test_what_is_written_to_closed_streams_is_not_the_report_of_a_start(world: World) -> None:
    """Found: "the daemon could not start: ", and what the program had printed."""
    said = world.run(
        "os.dup2(1, 100); say = lambda it: os.write(100, json.dumps(it).encode())\n"
        "from trims_shim.client import spawn\n"
        "launch, failures = spawn._launch, []\n"
        "def print_first(*asked):\n"
        "    for number in range(3):\n"
        "        try: os.write(number, b'lost')\n"
        "        except OSError as failure: failures.append(failure.errno)\n"
        "    return launch(*asked)\n"
        "spawn._launch = print_first\n"
        "os.closerange(0, 3)\n"
        "cache().welcome(may_start=True)\n"
        "say(failures)\n",
    )
    assert said == [errno.EBADF] * 3
    with open(os.path.join(world.sockets, "start.lock"), "rb") as lock:
        assert lock.read() == b""


def test_a_program_that_holds_many_files_keeps_most_of_its_descriptors(running: World) -> None:
    """All are served, over few descriptors; what is loaded again, and aligned, too."""
    paths = [running.file(number) for number in range(60)]
    said = running.run(
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        f"paths = {paths!r}\n"
        "arenas = [open_file(path) for path in paths]\n"
        "free = [os.open('/', os.O_RDONLY) for _ in range(40)]\n"
        "for each in free: os.close(each)\n"
        "again = [open_file(path) for path in paths]\n"
        "images = [arena.image for arena in arenas]\n"
        "is_kept = [image.is_open for image in images]\n"
        "closed = images[is_kept.index(False)]\n"
        "def error(work):\n"
        "    try: work()\n"
        "    except errors.TrimsError as failure: return failure.reason\n"
        "reasons = [error(closed.map), error(lambda: cache().variant(closed, Variant(8)))]\n"
        "rights = [data(arena) == open(path, 'rb').read()\n"
        "          for arena, path in zip(arenas + again, paths + paths)]\n"
        "say([all(rights), is_kept[0], sum(is_kept) <= 16, reasons])\n"
    )
    assert said == [True, True, True, ["memory", "memory"]]
    running.assert_account()


def test_closed_streams_keep_their_numbers_until_the_last_block_ends() -> None:
    own = os.dup(0)
    os.close(0)
    try:
        with above_streams():
            with above_streams():
                pass
            made = os.open(os.devnull, os.O_RDONLY)
            os.close(made)
        lowest = os.open(os.devnull, os.O_RDONLY)
    finally:
        os.dup2(own, 0)
        os.close(own)
    assert (made >= 3, lowest) == (True, 0)
