"""is_pristine answers "yes" only where no page of a private mapping was written."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from forks import passes_in_child
from harness import open_descriptors

from trims_shim.client.arenas import Arena, Image
from trims_shim.memory import pages
from trims_shim.memory.mapping import HUGE_PAGE_BYTES, PAGE_BYTES
from trims_shim.memory.pages import PageScanner, are_equal

SIZE_BYTES = 2 * HUGE_PAGE_BYTES
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_PR_SET_DUMPABLE = 4


def is_pristine(address: int, size_bytes: int) -> bool:
    with PageScanner() as scanner:
        return scanner.is_pristine(address, size_bytes)


def is_blind() -> bool:
    with PageScanner() as scanner:
        return scanner.is_blind


def _memfd() -> int:
    return os.memfd_create("pages")


def _huge_tmpfs_file() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    context = libc.syscall(_SYS_FSOPEN, b"tmpfs", 0)
    if context < 0:
        pytest.skip("fsopen is not permitted here")
    try:
        key, value = b"huge", b"always"
        if libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, key, value, 0) < 0:
            pytest.skip("tmpfs has no huge= option here")
        if libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0) < 0:
            pytest.skip("a tmpfs cannot be created here")
        mount = libc.syscall(_SYS_FSMOUNT, context, 0, 0)
    finally:
        os.close(context)
    try:
        return os.open(f"/proc/self/fd/{mount}", os.O_TMPFILE | os.O_RDWR)
    finally:
        os.close(mount)


@pytest.fixture(params=[_memfd, _huge_tmpfs_file], ids=["4k", "huge"])
def arena(request: pytest.FixtureRequest) -> Arena:
    descriptor = request.param()
    os.pwrite(descriptor, b"a" * SIZE_BYTES, 0)
    return Image(descriptor, SIZE_BYTES, digest="pages").map()


def _by_ioctl(scanner: PageScanner) -> None:
    if not scanner._has_ioctl:
        pytest.skip("PAGEMAP_SCAN needs Linux 6.7")


def _by_entries(scanner: PageScanner) -> None:
    scanner._has_ioctl = False


@pytest.fixture(params=[_by_ioctl, _by_entries], ids=["ioctl", "entries"])
def scanner(request: pytest.FixtureRequest) -> Iterator[PageScanner]:
    choose: Callable[[PageScanner], None] = request.param
    with PageScanner() as scanner:
        choose(scanner)
        yield scanner


def _read_all(arena: Arena) -> None:
    assert bytes(memoryview(arena.buffer)[::PAGE_BYTES]) == b"a" * (SIZE_BYTES // PAGE_BYTES)


def _huge_bytes_mapped(address: int) -> int:
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(f"{address:x}-"):
                break
        for line in lines:
            if line.startswith(("FilePmdMapped:", "ShmemPmdMapped:")):
                size = int(line.split()[1])
                if size:
                    return size << 10
            if line.startswith("VmFlags:"):
                break
    return 0


def test_untouched_and_read_mappings_are_pristine(arena: Arena, scanner: PageScanner) -> None:
    assert scanner.is_pristine(arena.address, SIZE_BYTES)
    _read_all(arena)
    assert scanner.is_pristine(arena.address, SIZE_BYTES)


def test_one_written_byte_is_found_and_only_on_its_page(arena: Arena, scanner: PageScanner) -> None:
    _read_all(arena)
    at = 7 * PAGE_BYTES + 100
    arena.buffer[at] = b"b"
    assert not scanner.is_pristine(arena.address, SIZE_BYTES)
    assert not scanner.is_pristine(arena.address + at, 1)
    assert scanner.is_pristine(arena.address, 7 * PAGE_BYTES)
    assert scanner.is_pristine(arena.address + 8 * PAGE_BYTES, SIZE_BYTES - 8 * PAGE_BYTES)


def test_a_write_without_an_earlier_read_is_found(arena: Arena, scanner: PageScanner) -> None:
    arena.buffer[SIZE_BYTES - 1] = b"b"
    assert not scanner.is_pristine(arena.address, SIZE_BYTES)
    assert scanner.is_pristine(arena.address, SIZE_BYTES - PAGE_BYTES)


def test_writing_the_same_value_counts_as_written(arena: Arena, scanner: PageScanner) -> None:
    arena.buffer[0] = b"a"
    assert not scanner.is_pristine(arena.address, 1)


def test_a_write_beside_the_range_on_its_page_makes_it_no(
    arena: Arena, scanner: PageScanner
) -> None:
    start, size = PAGE_BYTES + 64, 2 * PAGE_BYTES  # touches pages 1, 2 and 3
    assert scanner.is_pristine(arena.address + start, size)
    arena.buffer[4 * PAGE_BYTES - 1] = b"b"
    assert not scanner.is_pristine(arena.address + start, size)


def test_discarded_writes_are_pristine_again(arena: Arena, scanner: PageScanner) -> None:
    arena.buffer[0] = b"b"
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.madvise(ctypes.c_void_p(arena.address), PAGE_BYTES, mmap.MADV_DONTNEED) == 0
    assert arena.buffer[0] == b"a"
    assert scanner.is_pristine(arena.address, SIZE_BYTES)


def test_a_huge_mapping_is_pristine_until_a_part_of_it_is_written(scanner: PageScanner) -> None:
    descriptor = _huge_tmpfs_file()
    os.pwrite(descriptor, b"a" * SIZE_BYTES, 0)
    arena = Image(descriptor, SIZE_BYTES, digest="huge").map()
    _read_all(arena)
    if _huge_bytes_mapped(arena.address) < SIZE_BYTES:
        pytest.skip("the kernel did not map huge pages")
    assert scanner.is_pristine(arena.address, SIZE_BYTES)
    arena.buffer[HUGE_PAGE_BYTES + 5 * PAGE_BYTES] = b"b"
    assert scanner.is_pristine(arena.address, HUGE_PAGE_BYTES)
    assert scanner.is_pristine(arena.address + HUGE_PAGE_BYTES, 5 * PAGE_BYTES)
    assert not scanner.is_pristine(arena.address + HUGE_PAGE_BYTES, 6 * PAGE_BYTES)


def test_anonymous_memory_is_not_pristine(scanner: PageScanner) -> None:
    memory = bytearray(b"x" * (4 * PAGE_BYTES))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not scanner.is_pristine(address, len(memory))


def test_a_forked_child_gets_no_from_the_parents_scanner(
    arena: Arena, scanner: PageScanner
) -> None:
    def check() -> bool:
        stale = scanner.is_pristine(arena.address, SIZE_BYTES)
        fresh = is_pristine(arena.address, SIZE_BYTES)
        arena.buffer[0] = b"b"
        written = is_pristine(arena.address, SIZE_BYTES)
        return (stale, fresh, written) == (False, True, False)

    assert passes_in_child(check)
    assert scanner.is_pristine(arena.address, SIZE_BYTES)


def test_a_closed_scanner_says_no(arena: Arena) -> None:
    with PageScanner() as scanner:
        assert scanner.is_pristine(arena.address, 1)
    assert not scanner.is_pristine(arena.address, 1)


def test_no_pagemap_means_no(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")
    assert not is_pristine(arena.address, SIZE_BYTES)
    assert is_blind()


def test_a_process_that_changed_its_user_is_blind(arena: Arena) -> None:
    """The kernel gives the files of its /proc to root, as it does for one that asks for it."""

    def check() -> bool:
        if os.geteuid() == 0:
            os.setuid(65534)
        else:
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
        return is_blind() and not is_pristine(arena.address, SIZE_BYTES)

    assert passes_in_child(check)
    assert not is_blind()


def test_a_pagemap_that_shows_nothing_is_not_believed(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_PAGEMAP", "/dev/zero")  # no ioctl, and every entry is zero
    assert not is_pristine(arena.address, SIZE_BYTES)
    assert is_blind()


def test_a_pagemap_that_is_taken_away_leaves_the_scanner_blind(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PageScanner() as scanner:
        _by_entries(scanner)
        assert not scanner.is_blind
        monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")
        assert not scanner.is_pristine(arena.address, SIZE_BYTES)
        assert scanner.is_blind


def test_equal_bytes(arena: Arena) -> None:
    other = arena.image.map()
    assert are_equal(arena.address, other.address, SIZE_BYTES)
    other.buffer[SIZE_BYTES - 1] = b"b"
    assert not are_equal(arena.address, other.address, SIZE_BYTES)
    assert are_equal(arena.address, other.address, SIZE_BYTES - 1)


def test_without_the_ioctl_the_entries_are_read(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_ioctl(*_: object) -> int:
        raise OSError("no such ioctl")

    monkeypatch.setattr(pages.fcntl, "ioctl", no_ioctl)
    assert is_pristine(arena.address, SIZE_BYTES)
    arena.buffer[0] = b"b"
    assert not is_pristine(arena.address, SIZE_BYTES)


def test_the_request_is_that_of_the_kernels_header() -> None:
    """With a wrong one all would go well, but slowly: by the entries."""
    assert pages._SCAN_REQUEST == 0xC0606610


def test_what_is_asked_is_what_the_kernels_header_calls_so(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few machines swap, and only there would it be seen that swapped pages are looked for."""
    asked: list[tuple[int, ...]] = []

    def ioctl(_descriptor: int, _request: int, argument: bytearray, *_: object) -> int:
        asked.append(struct.unpack("=12Q", argument))
        return 0

    with PageScanner() as scanner:
        monkeypatch.setattr(scanner, "_has_ioctl", True)
        monkeypatch.setattr(pages.fcntl, "ioctl", ioctl)
        scanner.is_pristine(arena.address + 1, PAGE_BYTES)
    ((size, flags, start, end, _, _, regions, most, inverted, needed, any_of, reported),) = asked
    assert (size, flags, regions, most) == (96, 0, 1, 1)
    assert (start, end) == (arena.address, arena.address + 2 * PAGE_BYTES)
    file, present_or_swapped = 4, 8 | 16
    assert (inverted, needed) == (file, file)
    assert (any_of, reported) == (present_or_swapped, present_or_swapped)


def test_a_scan_that_ends_early_has_not_seen_all(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PageScanner() as scanner:
        monkeypatch.setattr(scanner, "_has_ioctl", True)
        monkeypatch.setattr(pages.fcntl, "ioctl", lambda *_: 0)
        assert not scanner.is_pristine(arena.address, SIZE_BYTES)


@pytest.mark.parametrize(
    ("bits", "pristine"),
    [
        ((), True),
        ((61, 63), True),  # the file's page, mapped
        ((61, 62), True),  # the file's page, being migrated
        ((63,), False),  # anonymous
        ((62,), False),  # anonymous, swapped out
        ((63, 55), False),  # soft-dirty makes no difference
        ((61, 63, 55), True),
    ],
)
def test_meaning_of_an_entry(bits: tuple[int, ...], pristine: bool) -> None:
    assert pages._is_file_page(sum(1 << bit for bit in bits)) is pristine


def test_no_descriptor_is_left_open_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise MemoryError

    monkeypatch.setattr(PageScanner, "is_pristine", fail)
    before = open_descriptors()
    with pytest.raises(MemoryError):
        PageScanner()
    assert open_descriptors() <= before


def test_an_interrupt_before_there_is_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: Python printed an error that it ignored."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is PageScanner.__init__.__code__:
            raise KeyboardInterrupt

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    sys.setprofile(interrupt)  # until it raises
    with pytest.raises(KeyboardInterrupt):
        PageScanner()
    assert ignored == []


@pytest.mark.parametrize("choose", [lambda _: None, _by_entries], ids=["any", "entries"])
def test_no_descriptor_is_left_open(arena: Arena, choose: Callable[[PageScanner], None]) -> None:
    before = open_descriptors()
    for _ in range(3):
        with PageScanner() as scanner:
            choose(scanner)
            scanner.is_pristine(arena.address, SIZE_BYTES)
    assert open_descriptors() <= before
