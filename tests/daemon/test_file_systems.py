"""What is relied on of file systems: times of changes, and that files take no memory."""

from __future__ import annotations

import os
from typing import Any

import pytest

from trims_shim.daemon import file_systems
from trims_shim.specs import Identity


def test_stamps_in_whole_seconds_take_longer_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ext4 inodes, FAT: found to be trusted before their second had ended."""
    monkeypatch.setattr(file_systems, "_LOCAL_DEVICE_MAJORS", frozenset({8}))
    for ctime_ns, quiet_ns in ((7 * 10**9, 2 * 10**9), (7 * 10**9 + 1, 10**8)):
        identity = Identity(os.makedev(8, 1), 1, 1, 5, ctime_ns)
        assert not file_systems.is_settled(identity, ctime_ns + quiet_ns)
        assert file_systems.is_settled(identity, ctime_ns + quiet_ns + 1)


@pytest.mark.parametrize(
    ("file_system", "major", "mtime_ns", "ctime_ns", "is_trusted"),
    [
        (0x73717368, 7, 5_000_000_000, 5_000_000_000, False),  # squashfs
        (0x0BD00BD0, 0, 5_000_000_000, 5_000_000_000, True),  # Lustre
        (0xEF53, 7, 5_000_000_000, 5_000_000_000, False),  # an image of ext4, on a loop device
        (0xEF53, 7, 5_000_000_000, 6_000_000_000, False),
        (0xEF53, 259, 5_000_000_000, 5_000_000_000, False),  # on a partition of one
        (0xEF53, 7, 5_000_000_001, 5_000_000_001, True),
        (0xEF53, 8, 5_000_000_000, 6_000_000_001, True),
        (0xE0F5E1E2, 0, 5_000_000_001, 5_000_000_001, False),  # EROFS
        (0x794C7630, 0, 5_000_000_001, 5_000_000_001, False),  # an overlay that hides one
        (0x794C7630, 0, 5_000_000_001, 6_000_000_001, True),
        (0, 8, 5_000_000_001, 5_000_000_001, True),
    ],
)
def test_what_may_be_no_change_time_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
    file_system: int,
    major: int,
    mtime_ns: int,
    ctime_ns: int,
    is_trusted: bool,
) -> None:
    """Found: an image mounted in the place of another of the same build date was a hit."""
    monkeypatch.setattr(file_systems, "_file_system", lambda descriptor: file_system)
    identity = Identity(os.makedev(major, 1), 1, 1, mtime_ns, ctime_ns)
    assert file_systems.has_change_time(-1, identity) is is_trusted


@pytest.mark.parametrize(("known", "is_trusted"), [(0xFFF, True), (0x7FF, False)])
def test_an_overlay_is_trusted_if_its_layer_tells_birth_times(
    monkeypatch: pytest.MonkeyPatch, known: int, is_trusted: bool
) -> None:
    """Found: of an EROFS image below it, which was replaced, it showed the same identity."""

    def statx(descriptor: int, path: bytes, flags: int, wanted: int, found: Any) -> int:
        found[0] = known & wanted
        return 0

    monkeypatch.setattr(file_systems, "_file_system", lambda descriptor: 0x794C7630)
    monkeypatch.setattr(file_systems, "_statx", statx)
    identity = Identity(5, 1, 1, 5_000_000_001, 5_000_000_001)
    assert file_systems.has_change_time(-1, identity) is is_trusted


def test_which_files_tell_their_birth_time() -> None:
    with open("/proc/self/status") as kernels:
        assert not file_systems._has_birth_time(kernels.fileno())
    assert not file_systems._has_birth_time(-1)


def test_the_file_system_of_a_file() -> None:
    shared = os.memfd_create("file")
    try:
        assert file_systems._file_system(shared) == 0x01021994
        assert file_systems.is_in_memory(shared)
    finally:
        os.close(shared)
    assert file_systems._file_system(shared) == 0


def test_what_depends_on_its_reader() -> None:
    with open("/proc/self/status") as kernels, open(__file__) as ours:
        assert file_systems.is_by_reader(kernels.fileno())
        assert not file_systems.is_by_reader(ours.fileno())
