"""The file changes, while it is read and between loads. Promises: changed bytes are a new image,
old leases keep the old bytes, and bytes of two versions are never served as one to be trusted.

The server runs in a thread here, so that its reads can be held at a known place.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import (
    CONTENT_BYTES,
    PATIENCE_S,
    InProcessDaemon,
    World,
    content,
    open_path,
    wait_until,
)

from trims_shim.client.arenas import Arena
from trims_shim.client.cache import Cache
from trims_shim.daemon import file_systems
from trims_shim.errors import FileChanged, RequestRefused, TrimsError
from trims_shim.memory import copying, copying_python

SIZE_BYTES = 3 * copying.CHUNK_BYTES
SETTLED_S = file_systems._SETTLED_AFTER_NS / 1e9
TICK_S = 0.02  # of the clock that stamps files, and more


class Gate:
    """Holds the second chunk of a load back until it is opened."""

    def __init__(self) -> None:
        self.is_armed = False
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._read = copying_python.read_fully

    def read_fully(self, descriptor: int, part: memoryview, offset: int, name: str) -> None:
        if self.is_armed and offset == copying.CHUNK_BYTES:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        self._read(descriptor, part, offset, name)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(copying_python, "read_fully", gate.read_fully)
    return gate


@pytest.fixture
def served(make_world: Any, gate: Gate) -> Iterator[World]:
    world = make_world()
    daemon = InProcessDaemon(world)
    yield world
    for cache in world.caches:
        cache.close()
    gate.opened.set()
    daemon.close()


@pytest.fixture
def held_before() -> set[int]:
    """Inodes of the segments that this process has from tests before."""
    return own_segments()


def own_segments() -> set[int]:
    return {each.inode for each in World.segments(os.getpid())}


def bytes_of(arena: Arena) -> bytes:
    return bytes(memoryview(arena.buffer))


def truncate(path: str) -> None:
    os.truncate(path, copying.CHUNK_BYTES + 100)


def shorten_slightly(path: str) -> None:
    os.truncate(path, SIZE_BYTES - 1)


def append(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def overwrite(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(content(2, SIZE_BYTES))


def overwrite_and_restore_mtime(path: str) -> None:
    before = os.stat(path)
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate_and_write_again(path: str) -> None:
    with open(path, "wb") as file:
        file.write(content(2, SIZE_BYTES))


CHANGES = [
    truncate,
    shorten_slightly,
    append,
    overwrite,
    overwrite_and_restore_mtime,
    truncate_and_write_again,
]


def replace(path: str) -> None:
    with open(path + ".new", "wb") as file:
        file.write(content(2, SIZE_BYTES))
    os.rename(path + ".new", path)


def age(path: str, quiet_s: float = 0.15) -> None:
    """Wait until the file's identity may be trusted (local disk: 100 ms after its last change)."""
    left = os.stat(path).st_ctime + quiet_s - time.time()
    if left > 0:
        time.sleep(left)


def load_in_thread(cache: Cache, path: str) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(open_path(cache, path))
        except TrimsError as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_while_it_is_read(
    held_before: set[int],
    served: World,
    gate: Gate,
    change: Callable[[str], None],
    is_settled: bool,
) -> None:
    """The load is refused, nothing of it is kept, and the next load has the new bytes."""
    path = served.file(1, SIZE_BYTES)
    if is_settled:
        age(path)
    cache = served.cache()
    gate.is_armed = True
    thread, outcome = load_in_thread(cache, path)
    assert gate.reached.wait(PATIENCE_S)
    time.sleep(TICK_S)
    change(path)
    gate.is_armed = False
    gate.opened.set()
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], RequestRefused)
    assert outcome[0].reason == "file_changed", outcome[0]
    memory = served.status().memory
    assert (memory.resident_bytes, memory.reserved_bytes) == (0, 0)
    assert memory.lingering_bytes in (0, -1)
    assert own_segments() <= held_before
    with open(path, "rb") as file:
        assert bytes_of(open_path(cache, path)) == file.read()


@pytest.mark.parametrize("repeat", range(3))
def test_refused_loads_leak_no_descriptor_and_no_memory(
    held_before: set[int], served: World, gate: Gate, repeat: int
) -> None:
    for number in range(6):
        path = served.file(1, SIZE_BYTES)
        gate.reached.clear()
        gate.opened.clear()
        gate.is_armed = True
        thread, outcome = load_in_thread(served.cache(), path)
        assert gate.reached.wait(PATIENCE_S)
        truncate(path)
        gate.is_armed = False
        gate.opened.set()
        thread.join(PATIENCE_S)
        assert outcome[0].reason == "file_changed"
        served.caches.pop().close()
        if not number:
            before = _kept_descriptors(served)
    # Not "as many": what ZeroMQ or a thread of another test closes may come at any time.
    wait_until(lambda: len(served.descriptors(os.getpid())) <= before, f"{before} again")
    assert own_segments() <= held_before


def _kept_descriptors(world: World) -> int:
    """Descriptors once those that ZeroMQ closes in its own time are gone: the least of some."""
    least = 1 << 20
    for _ in range(20):
        least = min(least, len(world.descriptors(os.getpid())))
        time.sleep(0.005)
    return least


@pytest.mark.parametrize(
    "removal", [os.unlink, lambda path: os.chmod(path, 0)], ids=["rm", "chmod"]
)
def test_deleted_or_closed_to_all_while_it_is_read(
    served: World, gate: Gate, removal: Callable[[str], None]
) -> None:
    """Both change the ctime, so the load is refused; chmod back, and it works."""
    path = served.file(1, SIZE_BYTES)
    age(path)
    gate.is_armed = True
    thread, outcome = load_in_thread(served.cache(), path)
    assert gate.reached.wait(PATIENCE_S)
    removal(path)
    gate.opened.set()
    thread.join(PATIENCE_S)
    assert outcome[0].reason == "file_changed"
    assert served.status().memory.resident_bytes == 0


def test_replaced_by_rename_while_it_is_read(served: World, gate: Gate) -> None:
    """The open descriptor still is the old file (its ctime changed: refused); the name is new."""
    path = served.file(1, SIZE_BYTES)
    age(path)
    cache = served.cache()
    gate.is_armed = True
    thread, outcome = load_in_thread(cache, path)
    assert gate.reached.wait(PATIENCE_S)
    replace(path)
    gate.is_armed = False
    gate.opened.set()
    thread.join(PATIENCE_S)
    if isinstance(outcome[0], TrimsError):
        assert outcome[0].reason == "file_changed"
    else:
        assert bytes_of(outcome[0]) == content(1, SIZE_BYTES)
    assert bytes_of(open_path(cache, path)) == content(2, SIZE_BYTES)


def test_whoever_joins_after_the_change_does_not_get_the_old_read(
    served: World, gate: Gate
) -> None:
    path = served.file(1, SIZE_BYTES)
    age(path)
    gate.is_armed = True
    first, refused = load_in_thread(served.cache(), path)
    assert gate.reached.wait(PATIENCE_S)
    gate.is_armed = False
    overwrite(path)
    second, right = load_in_thread(served.cache(), path)
    second.join(PATIENCE_S)
    assert bytes_of(right[0]) == content(2, SIZE_BYTES)
    gate.opened.set()
    first.join(PATIENCE_S)
    assert refused[0].reason == "file_changed"


def test_no_thread_can_be_started(
    held_before: set[int], served: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on processes: the load is refused, nothing hangs or stays reserved."""
    path = served.file(1, SIZE_BYTES)
    cache = served.cache()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(6):
            with pytest.raises(RequestRefused, match="can't start new thread"):
                open_path(cache, path)
    memory = served.status().memory
    assert (memory.resident_bytes, memory.reserved_bytes) == (0, 0)
    assert own_segments() <= held_before
    assert bytes_of(open_path(cache, path)) == content(1, SIZE_BYTES)


BETWEEN = [*CHANGES[2:], replace, truncate]


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize("change", BETWEEN, ids=lambda change: change.__name__)
def test_changed_between_loads(
    served: World, change: Callable[[str], None], is_settled: bool
) -> None:
    """A new image each time; arenas of the old one keep the old bytes, in every process."""
    path = served.file(1, SIZE_BYTES)
    if is_settled:
        age(path)
    ours, theirs = served.cache(), served.cache()
    old = open_path(ours, path)
    also_old = open_path(theirs, path)
    assert bytes_of(old) == bytes_of(also_old) == content(1, SIZE_BYTES)
    change(path)
    with open(path, "rb") as file:
        expected = file.read()
    for cache in (ours, theirs, served.cache()):
        assert bytes_of(open_path(cache, path)) == expected
    assert bytes_of(old) == bytes_of(old.image.map()) == content(1, SIZE_BYTES)
    assert bytes_of(also_old) == content(1, SIZE_BYTES)
    assert old.image.digest != open_path(ours, path).image.digest


def test_a_writer_that_never_stops(running: World) -> None:
    """A file rewritten whole, in place, in one call: what is served is one version, or refused."""
    path = running.file(0, 1 << 16)
    stop = threading.Event()
    written_s = [time.monotonic()]

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY)
        seed = 0
        while not stop.is_set():
            seed += 1
            # ext4 holds the inode lock for a whole write, and for a whole read of one page only:
            # the test therefore compares what was trusted, not what was read once.
            os.pwrite(descriptor, content(seed, 1 << 16), 0)
            written_s.append(time.monotonic())
            time.sleep(0.0007)
        os.close(descriptor)

    writer = threading.Thread(target=write)
    writer.start()
    cache = running.cache()
    outcomes = {"refused": 0, "served": 0}
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until or sum(outcomes.values()) <= 20:
            try:
                open_path(cache, path)
                outcomes["served"] += 1
            except FileChanged:
                outcomes["refused"] += 1
            if cache._digests:
                # So it may be where the machine let nobody write for long enough.
                count = len(written_s)
                wait_until(lambda count=count: len(written_s) > count, "one more is written")
                pauses_s = (after - before for before, after in itertools.pairwise(written_s))
                assert max(pauses_s) > SETTLED_S - TICK_S, "trusted while it was being written"
                cache._digests.clear()
    finally:
        stop.set()
        writer.join()
    with open(path, "rb") as file:
        assert bytes_of(open_path(cache, path)) == file.read()


def test_equal_content_of_a_new_file_is_the_same_image(running: World) -> None:
    first, second = running.file(1), running.file(1)
    cache = running.cache()
    one, two = open_path(cache, first), open_path(cache, second)
    assert one.image.digest == two.image.digest
    assert len(running.status().images) == 1
    running.assert_account()


def test_unreadable_between_loads(running: World) -> None:
    """chmod 000: whoever can open it all the same gets it; a closed file is no hit by name."""
    path = running.file(1)
    cache = running.cache()
    arena = open_path(cache, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.chmod(path, 0)
        again = cache.open(descriptor, name=path, min_bytes=1)
    finally:
        os.close(descriptor)
    assert bytes_of(again) == bytes_of(arena) == content(1, CONTENT_BYTES)
    os.unlink(path)
    assert bytes_of(arena.image.map()) == content(1, CONTENT_BYTES)
