"""Private mappings: aligned, copied on write, and gone when they are unmapped."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator

import pytest

from trims_shim.errors import MemoryFailure
from trims_shim.memory import mapping
from trims_shim.memory.mapping import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    map_private,
    reserve,
    round_up,
    unmap,
)

pytestmark = pytest.mark.usefixtures("no_leak")

SIZE = 3 * PAGE_BYTES + 17


@pytest.fixture
def segment(no_leak: None) -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.write(descriptor, bytes(range(256)) * (SIZE // 256 + 1))
    os.ftruncate(descriptor, SIZE)
    yield descriptor
    os.close(descriptor)


def mapped(descriptor: int, size_bytes: int = SIZE) -> int:
    address = reserve(size_bytes)
    try:
        map_private(address, descriptor, size_bytes)
    except MemoryFailure:
        unmap(address, size_bytes)
        raise
    return address


def at(address: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * SIZE).from_address(address)


def virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * PAGE_BYTES


@pytest.mark.parametrize(
    ("size", "unit", "expected"),
    [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (1 << 40, 3, (1 << 40) + 2)],
)
def test_round_up(size: int, unit: int, expected: int) -> None:
    assert round_up(size, unit) == expected


def test_mappings_are_aligned_for_huge_pages(segment: int) -> None:
    addresses = [mapped(segment) for _ in range(20)]
    assert all(address % HUGE_PAGE_BYTES == 0 for address in addresses)
    assert len(set(addresses)) == 20
    for address in addresses:
        unmap(address, SIZE)


def test_the_bytes_are_those_of_the_segment(segment: int) -> None:
    address = mapped(segment)
    assert at(address).raw == os.pread(segment, SIZE, 0)
    unmap(address, SIZE)


def test_writes_stay_private(segment: int) -> None:
    before = os.pread(segment, SIZE, 0)
    first, second = mapped(segment), mapped(segment)
    at(first)[5] = b"X"
    assert at(first)[5] == b"X"
    assert at(second).raw == before
    assert os.pread(segment, SIZE, 0) == before
    unmap(first, SIZE)
    unmap(second, SIZE)


def test_the_descriptor_may_be_closed_meanwhile(segment: int) -> None:
    copy = os.dup(segment)
    address = mapped(copy)
    os.close(copy)
    assert at(address)[1] == b"\x01"
    unmap(address, SIZE)


@pytest.mark.parametrize("beyond_bytes", [0, PAGE_BYTES])
def test_unmapping_returns_the_address_space(
    monkeypatch: pytest.MonkeyPatch, beyond_bytes: int
) -> None:
    """Wherever a reservation begins, which depends on the kernel and on the mappings there are."""
    reserve_some = mapping._reserve

    def reserve_beyond(length: int) -> tuple[int, int]:
        base, reserved = reserve_some(length + HUGE_PAGE_BYTES)
        start = round_up(base, HUGE_PAGE_BYTES) + beyond_bytes
        end = start + length + HUGE_PAGE_BYTES
        unmap(base, start - base)
        unmap(end, base + reserved - end)
        return start, end - start

    monkeypatch.setattr(mapping, "_reserve", reserve_beyond)
    descriptor = os.memfd_create("test")
    size = 64 << 20
    os.ftruncate(descriptor, size)
    unmap(mapped(descriptor, size), size)
    before = virtual_bytes()
    for _ in range(2000):
        unmap(mapped(descriptor, size), size)
    os.close(descriptor)
    # What the loop needs once, not two thousand times; the alignment's slack is returned as well.
    assert virtual_bytes() - before < 8 << 20


def test_a_refusal_leaves_nothing_mapped(segment: int) -> None:
    before = virtual_bytes()
    for descriptor, size in ((-1, SIZE), (segment, 1 << 47), (segment, 0)):
        for _ in range(100):
            with pytest.raises(MemoryFailure, match="mmap"):
                mapped(descriptor, size)
    assert virtual_bytes() - before < 8 << 20


@pytest.mark.parametrize("limited", [resource.RLIMIT_AS, resource.RLIMIT_DATA, None])
def test_addresses_are_scarce_where_one_limit_is_set(
    monkeypatch: pytest.MonkeyPatch, limited: int | None
) -> None:
    unlimited = resource.RLIM_INFINITY

    def limits(which: int) -> tuple[int, int]:
        return (1 << 40 if which == limited else unlimited), unlimited

    monkeypatch.setattr(resource, "getrlimit", limits)
    assert mapping.are_addresses_limited() == (limited is not None)
