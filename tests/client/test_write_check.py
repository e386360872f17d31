"""Whether memory has the bytes of its image: the same answer from the kernel and by comparing."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator

import pytest

from trims_shim.client import arenas
from trims_shim.client.arenas import Arena, Image
from trims_shim.client.write_check import WriteCheck
from trims_shim.errors import MemoryFailure
from trims_shim.memory import pages
from trims_shim.memory.mapping import PAGE_BYTES

SIZE_BYTES = 4 * PAGE_BYTES


@pytest.fixture
def _blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")


@pytest.fixture(params=["told", "blind"])
def check(request: pytest.FixtureRequest) -> Iterator[WriteCheck]:
    if request.param == "blind":
        request.getfixturevalue("_blind")
    with WriteCheck() as check:
        yield check


@pytest.fixture
def blind(_blind: None) -> Iterator[WriteCheck]:
    with WriteCheck() as check:
        yield check


@pytest.fixture
def arena() -> Arena:
    descriptor = os.memfd_create("image")
    os.write(descriptor, os.urandom(SIZE_BYTES))
    return Image(descriptor, SIZE_BYTES, digest="d").map()


def write(arena: Arena, offset_bytes: int) -> None:
    """Change one byte."""
    byte = ctypes.c_ubyte.from_address(arena.address + offset_bytes)
    byte.value ^= 1


@pytest.mark.parametrize("written", [PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES - 1])
def test_one_byte_tells(check: WriteCheck, arena: Arena, written: int) -> None:
    """The first, one in the middle, the last; and only for what it is in."""
    inner = arena.address + PAGE_BYTES, 2 * PAGE_BYTES
    assert check.is_unwritten(*inner)
    write(arena, written)
    assert not check.is_unwritten(*inner)
    assert check.is_unwritten(arena.address, PAGE_BYTES)
    assert check.is_unwritten(arena.address + 3 * PAGE_BYTES, PAGE_BYTES)


def test_other_arenas_of_the_image_do_not_count(check: WriteCheck, arena: Arena) -> None:
    other = arena.image.map()
    write(other, 0)
    assert check.is_unwritten(arena.address, SIZE_BYTES)
    assert not check.is_unwritten(other.address, SIZE_BYTES)


def test_after_its_end_every_answer_is_no(check: WriteCheck, arena: Arena) -> None:
    with check:
        assert check.is_unwritten(arena.address, SIZE_BYTES)
    assert not check.is_unwritten(arena.address, SIZE_BYTES)
    check.close()


def test_its_end_gives_up_the_descriptor(arena: Arena) -> None:
    check = WriteCheck()
    scanner = check._scanner
    assert scanner is not None
    check.close()
    assert not scanner.is_pristine(arena.address, SIZE_BYTES)


def test_what_the_kernel_says_is_not_compared(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "map", lambda _: pytest.fail("mapped"))
    write(arena, 0)
    with WriteCheck() as check:
        assert not check.is_unwritten(arena.address, SIZE_BYTES)


def test_an_image_is_mapped_once_until_the_end(
    blind: WriteCheck, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Arena]] = []
    plainly = Image.map

    def mapped(image: Image) -> Arena:
        arena = plainly(image)
        made.append(weakref.ref(arena))
        return arena

    monkeypatch.setattr(Image, "map", mapped)
    for offset in range(0, SIZE_BYTES, PAGE_BYTES):
        assert blind.is_unwritten(arena.address + offset, PAGE_BYTES)
    assert [each() is not None for each in made] == [True]
    blind.close()
    assert [each() for each in made] == [None]


def test_an_image_that_cannot_be_mapped(
    blind: WriteCheck, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose descriptor was closed to spare it is ordinary."""
    with monkeypatch.context() as patched:
        patched.setattr(arenas, "reserve", lambda _: (_ for _ in ()).throw(MemoryFailure("full")))
        with pytest.raises(MemoryFailure, match="full"):
            blind.is_unwritten(arena.address, SIZE_BYTES)
    assert blind.is_unwritten(arena.address, SIZE_BYTES)
    monkeypatch.setattr(Image, "is_open", False)
    assert not blind.is_unwritten(arena.address, SIZE_BYTES)
