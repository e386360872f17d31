"""When a file is read past the page cache, and that its bytes are the same either way."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from blake3 import blake3

from trims_shim.errors import FileChanged
from trims_shim.memory import copying, uncached
from trims_shim.memory.uncached import opened_directly

SIZE = uncached._SIZE_FROM_BYTES + 12345
MakeFile = Callable[..., str]

pytestmark = pytest.mark.usefixtures("no_leak")


@pytest.fixture
def on_disk(make_file: MakeFile) -> Iterator[int]:
    """A file that the kernel has written back and forgotten."""
    path = make_file(os.urandom(SIZE))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the temporary directory has no O_DIRECT: {error}")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.major(os.fstat(descriptor).st_dev) == 0:
            pytest.skip("the temporary directory is not on a disk of its own")
        forget(descriptor)
        if uncached._cached_bytes(descriptor, SIZE) == SIZE:
            pytest.skip("the kernel does not say what it has cached (Linux 6.5), or keeps it")
        yield descriptor
    finally:
        os.close(descriptor)


def forget(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(descriptor: int) -> int:
    return uncached._cached_bytes(descriptor, os.fstat(descriptor).st_size)


def fill(descriptor: int, view: memoryview) -> str:
    return copying.fill(descriptor, view, threads=2, on_progress=lambda _: None)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_file_that_is_not_cached(on_disk: int, shift: int) -> None:
    """Also into memory that O_DIRECT refuses, which is then read through the page cache."""
    with mmap.mmap(-1, SIZE + shift) as memory, memoryview(memory) as whole:
        with whole[shift:] as view:
            digest = fill(on_disk, view)
        assert cached_bytes(on_disk) < SIZE / 4 or shift
        content = os.pread(on_disk, SIZE, 0)
        assert whole[shift:] == content
    assert digest == blake3(content).hexdigest()


def test_the_second_descriptor(on_disk: int) -> None:
    with opened_directly(on_disk, SIZE) as direct:
        assert direct is not None
        assert os.path.samestat(os.fstat(direct), os.fstat(on_disk))
        assert not os.get_inheritable(direct)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(direct)


def test_a_file_that_is_cached(on_disk: int) -> None:
    os.pread(on_disk, SIZE, 0)
    with opened_directly(on_disk, SIZE) as direct:
        assert direct is None


def test_a_file_that_is_small(on_disk: int) -> None:
    with opened_directly(on_disk, uncached._SIZE_FROM_BYTES - 1) as direct:
        assert direct is None


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_PATH])
def test_a_descriptor_that_cannot_be_read(on_disk: int, flags: int) -> None:
    """It proves no right to the content; a second one with our rights would show it."""
    unreadable = os.open(f"/proc/self/fd/{on_disk}", flags)
    try:
        assert uncached._open(unreadable) is None
        with opened_directly(unreadable, SIZE) as direct:
            assert direct is None
    finally:
        os.close(unreadable)


def test_memory_is_no_disk() -> None:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, SIZE)
        with opened_directly(descriptor, SIZE) as direct:
            assert direct is None
    finally:
        os.close(descriptor)


def test_a_kernel_that_does_not_say(on_disk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncached, "_SYS_CACHESTAT", 100_000)
    with opened_directly(on_disk, SIZE) as direct:
        assert direct is None


def test_a_file_that_may_not_be_opened_again(on_disk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with opened_directly(on_disk, SIZE) as direct:
            assert direct is None


def test_a_file_that_became_shorter(on_disk: int) -> None:
    """Inside of a block, and before a chunk: the direct read never has the last word."""
    for size in (SIZE - 4096 * 3 - 7, 5000, 0):
        os.truncate(f"/proc/self/fd/{on_disk}", size)
        forget(on_disk)
        with (
            mmap.mmap(-1, SIZE) as memory,
            memoryview(memory) as view,
            pytest.raises(FileChanged),
        ):
            fill(on_disk, view)


def test_nobody_is_waited_for_who_holds_a_lease_on_the_file(
    make_file: MakeFile,
) -> None:
    """The kernel would let the holder keep those waiting who open it, for 45 seconds."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the holder is told with
    descriptor = os.open(make_file(b"x" * 4096), os.O_RDWR)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"the temporary directory has no leases: {error}")
        began = time.monotonic()
        assert uncached._open(descriptor) is None
        assert time.monotonic() - began < 20
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)
