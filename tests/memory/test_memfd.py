"""Memory files: writable by their maker only, then frozen for everybody."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from trims_shim.memory.memfd import is_sealed, new_memfd, seal_memfd

SEAL, SHRINK, GROW, WRITE = 1, 2, 4, 8  # linux/fcntl.h
ADD_SEALS, GET_SEALS = 1033, 1034
NOEXEC_SEAL = 8  # linux/memfd.h


@pytest.fixture(params=["new kernel", "old kernel"])
def memfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """An empty one, of a kernel that knows the newest flag and of one that refuses it."""
    create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if flags & NOEXEC_SEAL:
            raise OSError(22, "Invalid argument")
        return create(name, flags)

    if request.param == "old kernel":
        monkeypatch.setattr(os, "memfd_create", refuse)
    descriptor = new_memfd("test")
    yield descriptor
    os.close(descriptor)


def test_a_new_one_is_its_makers_alone(memfd: int) -> None:
    assert not os.get_inheritable(memfd)
    assert os.fstat(memfd).st_mode & 0o777 == 0o400


def test_a_sealed_one_keeps_its_bytes_and_its_seals(memfd: int) -> None:
    os.write(memfd, b"frozen")
    assert not is_sealed(memfd)
    seal_memfd(memfd)
    assert is_sealed(memfd)
    assert fcntl.fcntl(memfd, GET_SEALS) & 0xF == SEAL | SHRINK | GROW | WRITE
    for change in (
        lambda: os.pwrite(memfd, b"x", 0),
        lambda: os.ftruncate(memfd, 1),
        lambda: os.ftruncate(memfd, 100),
        lambda: fcntl.fcntl(memfd, ADD_SEALS, SEAL),
    ):
        with pytest.raises(PermissionError):
            change()
    assert os.pread(memfd, 100, 0) == b"frozen"


@pytest.mark.parametrize("seals", [WRITE, SHRINK, SHRINK | GROW | SEAL])
def test_one_that_may_still_change_in_some_way_is_not_sealed(memfd: int, seals: int) -> None:
    fcntl.fcntl(memfd, ADD_SEALS, seals)
    assert not is_sealed(memfd)


def test_a_file_without_seals_is_not_sealed() -> None:
    with open("/proc/self/status") as file:
        assert not is_sealed(file.fileno())
