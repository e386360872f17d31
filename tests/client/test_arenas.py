"""An image lives as long as somebody can reach its bytes, and is released exactly once."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from forks import passes_in_child
from harness import PATIENCE_S

from trims_shim.client import arenas
from trims_shim.client.addresses import AddressIndex
from trims_shim.client.arenas import Arena, Image
from trims_shim.errors import MemoryFailure

CONTENT = bytes(range(256)) * 64


class Held:
    """An image and how often it was released."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("image")
        os.write(descriptor, CONTENT)
        self.descriptor = descriptor
        self.releases = 0
        self.image: Image | None = Image(
            descriptor, len(CONTENT), digest="d", release=self._released
        )

    def _released(self) -> None:
        self.releases += 1

    def map(self) -> Arena:
        assert self.image is not None
        return self.image.map()

    def is_open(self) -> bool:
        return os.path.exists(f"/proc/self/fd/{self.descriptor}")


@pytest.fixture
def held(no_leak: None) -> Iterator[Held]:
    held = Held()
    yield held
    held.image = None
    assert held.releases == 1


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        return any(line.startswith(f"{address:x}-") for line in file)


HOLDERS: dict[str, Callable[[Arena], Any]] = {
    "buffer": lambda arena: arena.buffer,
    "memoryview": lambda arena: memoryview(arena.buffer),
    "slice": lambda arena: memoryview(arena.buffer)[5:9],
    "numpy": lambda arena: numpy.frombuffer(arena.buffer, dtype=numpy.uint8),
    "numpy view": lambda arena: numpy.frombuffer(arena.buffer, dtype=numpy.uint8)[5:].view(">u1"),
    "torch": lambda arena: torch.frombuffer(arena.buffer, dtype=torch.uint8),
    "torch view": lambda arena: torch.frombuffer(arena.buffer, dtype=torch.float32)[5:],
    "torch storage": lambda arena: torch.frombuffer(
        arena.buffer, dtype=torch.uint8
    ).untyped_storage()[64:128],
}


@pytest.mark.parametrize("name", HOLDERS)
def test_whoever_holds_bytes_keeps_the_mapping(held: Held, name: str) -> None:
    arena = held.map()
    address = arena.address
    holder = HOLDERS[name](arena)
    del arena
    held.image = None
    assert is_mapped(address)
    assert held.is_open()
    assert held.releases == 0
    assert arenas.find(address, 1) is not None
    del holder
    # No garbage collection: memory goes when its last user does.
    assert not is_mapped(address)
    assert not held.is_open()
    assert held.releases == 1
    assert arenas.find(address, 1) is None


def test_the_last_of_several_arenas_releases(held: Held) -> None:
    all_arenas = [held.map() for _ in range(5)]
    held.image = None
    while len(all_arenas) > 1:
        all_arenas.pop(2 % len(all_arenas))
        assert held.releases == 0
    all_arenas.clear()
    assert held.releases == 1


def test_arenas_do_not_see_each_others_writes(held: Held) -> None:
    first, second = held.map(), held.map()
    first.buffer[0] = b"\xff"
    assert bytes(memoryview(second.buffer)) == CONTENT
    assert bytes(memoryview(first.image.map().buffer)) == CONTENT
    assert bytes(memoryview(first.buffer))[0] == 0xFF


def test_an_image_that_cannot_be_mapped(held: Held) -> None:
    assert held.image is not None
    held.image.size_bytes = 0
    with pytest.raises(MemoryFailure):
        held.image.map()


def test_a_number_that_means_another_file_by_now_is_not_mapped(held: Held) -> None:
    other = os.memfd_create("another")
    os.write(other, CONTENT[::-1])
    os.dup2(other, held.descriptor)
    try:
        with pytest.raises(MemoryFailure, match="descriptor is closed"):
            held.map()
    finally:
        os.close(other)
        os.close(held.descriptor)


def test_an_interrupt_while_it_is_indexed(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the index kept the image, and the mapping, for ever."""
    before, add = set(arenas._index._entries), arenas._index.add

    def add_and_interrupt(*arguments: Any) -> None:
        add(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(arenas._index, "add", add_and_interrupt)
        held.map()
    gc.collect()
    assert set(arenas._index._entries) <= before


def test_a_reference_cycle_does_not_matter(held: Held) -> None:
    class Node:
        pass

    node = Node()
    node.itself, node.arena = node, held.map()  # type: ignore[attr-defined]
    held.image = None
    del node
    assert held.releases == 0
    gc.collect()
    assert held.releases == 1


def test_a_forked_child_reads_on_but_releases_nothing() -> None:
    """The child's releases would be those of the parent's lease."""
    reader, writer = os.pipe()
    released: list[int] = []
    descriptor = os.memfd_create("image")
    os.write(descriptor, CONTENT)
    image = Image(
        descriptor, len(CONTENT), digest="d", release=lambda: os.write(writer, b"released") and None
    )
    arena = image.map()
    del image

    def check() -> bool:
        nonlocal arena
        same = bytes(memoryview(arena.buffer)) == CONTENT
        address = arena.address
        del arena
        return same and not is_mapped(address)

    assert passes_in_child(check)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 100)
    assert bytes(memoryview(arena.buffer)) == CONTENT
    del arena
    assert os.read(reader, 100) == b"released"
    os.close(reader)
    os.close(writer)
    assert released == []


class TestFind:
    def test_the_borders(self, held: Held) -> None:
        arena = held.map()
        start, size = arena.address, arena.size_bytes
        assert arenas.find(start, size) == (held.image, 0)
        assert arenas.find(start, 0) == (held.image, 0)
        assert arenas.find(start + 7, size - 7) == (held.image, 7)
        assert arenas.find(start + size - 1, 1) == (held.image, size - 1)
        for address, length in ((start, size + 1), (start + size, 1), (start - 1, 2), (0, 1)):
            assert arenas.find(address, length) is None

    def test_among_many(self, held: Held) -> None:
        many = [held.map() for _ in range(50)]
        random.Random(1).shuffle(many)
        for arena in many:
            found = arenas.find(arena.address + 11, 1)
            assert found == (held.image, 11)
        survivors, dropped = many[::2], [arena.address for arena in many[1::2]]
        del many, arena
        assert all(arenas.find(each.address, 1) for each in survivors)
        assert not any(arenas.find(address, 1) for address in dropped)

    def test_what_was_mapped_since_the_last_look(self, held: Held) -> None:
        first = held.map()
        assert arenas.find(first.address, 1) == (held.image, 0)
        second = held.map()
        assert arenas.find(second.address, 1) == (held.image, 0)

    def test_in_the_middle_of_a_removal(self) -> None:
        index: AddressIndex[str] = AddressIndex()
        index.add(64, 8, lambda: "owner")
        assert index.find(64, 8) == ("owner", 0)
        del index._entries[64]
        assert index.find(64, 8) is None

    def test_threads_and_the_collector(self, held: Held) -> None:
        """Whoever loses a race is told "unknown", never another image."""
        other = Held()
        images = [held.image, other.image]
        problems: list[object] = []
        stop = threading.Event()

        def churn(seed: int) -> None:
            chance = random.Random(seed)
            mine: list[tuple[Arena, Image]] = []
            while not stop.is_set():
                image = chance.choice(images)
                assert image is not None
                mine.append((image.map(), image))
                for arena, expected in mine:
                    found = arenas.find(arena.address + 3, 5)
                    if found != (expected, 3):
                        problems.append((found, expected))
                if len(mine) > 8:
                    mine.pop(chance.randrange(len(mine)))
                if chance.random() < 0.02:
                    gc.collect(0)

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
        for each in threads:
            each.start()
        stop.wait(0.7)
        stop.set()
        for each in threads:
            each.join(PATIENCE_S)
        assert problems == []
        other.image = None
        images.clear()
        assert other.releases == 1


def test_nothing_runs_at_exit(held: Held) -> None:
    """At exit the kernel unmaps; finalizers would run while other threads still read."""
    arena = held.map()
    (finalizer,) = (
        each
        for each in list(weakref.finalize._registry)  # type: ignore[attr-defined]
        if each.peek() and each.peek()[0] is arena.buffer
    )
    assert finalizer.atexit is False
