"""Segments of every kind: filled once, immutable after, exactly accounted, never a SIGBUS."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness import open_descriptors

from trims_shim.errors import MemoryFailure
from trims_shim.memory import host
from trims_shim.memory.held import Held
from trims_shim.memory.host import HostMemory, MemfdMemory, TmpfsMemory, WritableSegment
from trims_shim.memory.mapping import HUGE_PAGE_BYTES, PAGE_BYTES
from trims_shim.specs import SegmentKind

pytestmark = pytest.mark.usefixtures("no_leak")

BUDGET = 32 << 20
SIZES = (1, PAGE_BYTES, PAGE_BYTES + 1, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 12345)


@pytest.fixture(params=list(SegmentKind), ids=lambda kind: kind.value)
def memory(no_leak: None, request: pytest.FixtureRequest) -> Iterator[HostMemory]:
    try:
        memory = host.open_memory(request.param, budget_bytes=BUDGET)
    except MemoryFailure as error:
        pytest.skip(f"{request.param.value} is not available on this machine: {error}")
    yield memory
    memory.close()


def sealed(memory: HostMemory, content: bytes) -> host.SealedSegment:
    segment = memory.create(len(content))
    segment.view[:] = content
    return segment.seal()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_filled_in_is_what_is_read(memory: HostMemory, size: int) -> None:
    content = os.urandom(size)
    segment = sealed(memory, content)
    assert segment.size_bytes == size
    assert os.fstat(segment.descriptor).st_size == size
    assert os.pread(segment.descriptor, size + 1, 0) == content
    segment.close()
    segment.close()


class TestImmutable:
    @pytest.fixture
    def segment(self, memory: HostMemory) -> Iterator[host.SealedSegment]:
        segment = sealed(memory, b"x" * 10_000)
        yield segment
        assert os.pread(segment.descriptor, 20_000, 0) == b"x" * 10_000
        segment.close()

    def test_by_its_descriptor(self, segment: host.SealedSegment) -> None:
        for act in (
            lambda: os.pwrite(segment.descriptor, b"y", 0),
            lambda: os.ftruncate(segment.descriptor, 5),
            lambda: os.ftruncate(segment.descriptor, 50_000),
            lambda: os.posix_fallocate(segment.descriptor, 0, 50_000),
        ):
            with pytest.raises(OSError, match="Errno"):
                act()

    def test_not_even_its_times_by_another_user(self, segment: host.SealedSegment) -> None:
        """Who may write to a file may set its times and attributes, whatever seals it has."""
        assert stat.S_IMODE(os.fstat(segment.descriptor).st_mode) == 0o400

    @pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC])
    def test_by_opening_it_again(self, segment: host.SealedSegment, flags: int) -> None:
        try:
            descriptor = os.open(f"/proc/self/fd/{segment.descriptor}", flags)
        except OSError:
            return
        # A sealed memfd can be opened; the seals refuse the rest.
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"y", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 3)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 10_000, mmap.MAP_SHARED)
        os.close(descriptor)

    def test_by_mapping_it(self, segment: host.SealedSegment) -> None:
        with pytest.raises(PermissionError):
            mmap.mmap(segment.descriptor, 10_000, mmap.MAP_SHARED)
        private = mmap.mmap(segment.descriptor, 10_000, mmap.MAP_PRIVATE)
        private[0:1] = b"y"
        private.close()

    def test_by_making_a_mapping_writable(self, segment: host.SealedSegment) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
        address = libc.mmap(None, 10_000, mmap.PROT_READ, mmap.MAP_SHARED, segment.descriptor, 0)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        assert libc.mprotect(ctypes.c_void_p(address), 10_000, writable) == -1
        libc.munmap(ctypes.c_void_p(address), 10_000)

    def test_seals_cannot_be_lifted(self, segment: host.SealedSegment) -> None:
        with pytest.raises(OSError, match="Errno"):
            fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, 0)

    def test_the_descriptor_is_closed_on_exec(self, segment: host.SealedSegment) -> None:
        assert not os.get_inheritable(segment.descriptor)


class TestAccount:
    @pytest.mark.parametrize("size", SIZES)
    def test_the_footprint_is_what_the_kernel_charges(self, memory: HostMemory, size: int) -> None:
        segment = sealed(memory, b"x" * size)
        assert segment.resident_bytes() == memory.footprint_bytes(size)
        segment.close()

    def test_used_bytes(self, memory: HostMemory) -> None:
        if isinstance(memory, MemfdMemory):
            assert memory.used_bytes() is None
            return
        assert memory.used_bytes() == 0
        segments = [sealed(memory, b"x" * size) for size in SIZES]
        total = sum(memory.footprint_bytes(size) for size in SIZES)
        assert memory.used_bytes() == total
        assert total == sum(each.resident_bytes() for each in segments)
        for each in segments:
            each.close()
        assert memory.used_bytes() == 0

    def test_what_a_client_still_maps_counts(self, memory: HostMemory) -> None:
        if memory.used_bytes() is None:
            return
        segment = sealed(memory, b"x" * PAGE_BYTES)
        mapping = mmap.mmap(segment.descriptor, PAGE_BYTES, mmap.MAP_PRIVATE)
        segment.close()
        assert memory.used_bytes() == PAGE_BYTES
        mapping.close()
        assert memory.used_bytes() == 0

    def test_what_is_held_here(self, memory: HostMemory) -> None:
        """From the moment that a segment takes memory, until this process gives it up."""
        size = 3 * HUGE_PAGE_BYTES
        footprint = memory.footprint_bytes(size)
        assert memory.held_bytes() == 0
        growing = memory.create(size)
        assert memory.held_bytes() == footprint
        kept = sealed(memory, b"x" * size)
        assert memory.held_bytes() == 2 * footprint
        growing.discard()
        assert memory.held_bytes() == footprint
        mapping = mmap.mmap(kept.descriptor, size, mmap.MAP_PRIVATE)
        kept.close()
        kept.close()
        assert memory.held_bytes() == 0, "whoever maps it"
        mapping.close()

    @pytest.mark.parametrize("name", ["ftruncate", "open", "posix_fallocate"])
    def test_what_could_not_be_made_is_not_held(
        self, memory: HostMemory, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with contextlib.suppress(MemoryFailure):
                memory.create(PAGE_BYTES).discard()
        assert memory.held_bytes() == 0

    def test_discarding_frees(self, memory: HostMemory) -> None:
        before = open_descriptors()
        memory.create(BUDGET // 2).discard()
        assert memory.used_bytes() in (0, None)
        assert open_descriptors() <= before


class TestExhaustion:
    def test_a_full_tmpfs_is_an_error(self, memory: HostMemory) -> None:
        if isinstance(memory, MemfdMemory):
            pytest.skip("memfds have no limit of their own")
        before = open_descriptors()
        for _ in range(50):
            with pytest.raises(MemoryFailure, match="tmpfs segment"):
                memory.create(2 * BUDGET)
        assert open_descriptors() <= before
        assert memory.used_bytes() == 0
        sealed(memory, b"x" * (BUDGET // 2)).close()

    def test_a_size_no_machine_has(self, memory: HostMemory) -> None:
        if isinstance(memory, MemfdMemory):
            pytest.skip("the kernel would try: only the store's budget limits memfds")
        before = open_descriptors()
        with pytest.raises(MemoryFailure):
            memory.create(1 << 62)
        assert open_descriptors() <= before

    def test_a_limit_on_files_is_named(self, memory: HostMemory) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, before[1]))
        try:
            with pytest.raises(MemoryFailure, match="ulimit -H -f"):
                memory.create(2 * PAGE_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def test_a_failing_step_closes_what_was_opened(
        self, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("ftruncate", "open", "posix_fallocate"):
            before = open_descriptors()
            with monkeypatch.context() as patch:

                def fail(*_: object, **__: object) -> None:
                    raise OSError(28, "No space left on device")

                patch.setattr(os, name, fail)
                try:
                    memory.create(PAGE_BYTES).discard()
                except MemoryFailure:
                    pass
            assert open_descriptors() <= before, name

    def test_a_segment_that_cannot_be_mapped(self) -> None:
        before = open_descriptors()
        writable, readable = os.memfd_create("a"), os.memfd_create("b")
        with pytest.raises(MemoryFailure):
            WritableSegment(writable, readable, 0, is_memfd=True, wants_advice=False, held=Held())
        assert open_descriptors() <= before

    def test_a_segment_that_cannot_be_sealed(self) -> None:
        before = open_descriptors()
        writable, readable = os.open("/dev/zero", os.O_RDWR), os.open("/dev/zero", os.O_RDONLY)
        segment = WritableSegment(
            writable, readable, PAGE_BYTES, is_memfd=True, wants_advice=False, held=Held()
        )
        with pytest.raises(MemoryFailure, match="sealed"):
            segment.seal()
        assert open_descriptors() <= before


def test_a_forked_process_keeps_nothing_writable(memory: HostMemory) -> None:
    """The daemon forks to start others while it fills segments, and they close files at first."""
    segment = memory.create(PAGE_BYTES)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        segment.seal().close()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


class TestNames:
    """Those that files have on the way, here in an ordinary directory."""

    @pytest.fixture
    def memory(self, no_leak: None, tmp_path: Path) -> Iterator[TmpfsMemory]:
        mount = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        memory = TmpfsMemory(mount, os.dup(mount), SegmentKind.TMPFS_HUGE)
        yield memory
        memory.close()

    def test_segments_begun_at_the_same_moment_have_different_ones(
        self, memory: TmpfsMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: one of them could not be made."""
        names: list[str] = []
        others: list[None] = []
        really_open = os.open

        def noted(path: str, flags: int, *arguments: int, dir_fd: int) -> int:
            if flags & os.O_CREAT:
                names.append(path)
            return really_open(path, flags, *arguments, dir_fd=dir_fd)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if frame.f_code is not TmpfsMemory.create.__code__:
                return None
            # Between any two lines, until it has its name, as another thread would.
            if len(names) == len(others):
                others.append(None)
                memory.create(1).discard()
            return trace

        monkeypatch.setattr(os, "open", noted)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            segment = memory.create(1)
        finally:
            sys.settrace(before)
        segment.discard()
        assert len(names) == len(others) + 1 > 3
        assert len(set(names)) == len(names)

    def test_none_is_left(self, memory: TmpfsMemory, tmp_path: Path) -> None:
        """Found: if the second descriptor could not be had, the name stayed, and was an inode."""
        sealed, memory._sealed = memory._sealed, -1
        with pytest.raises(MemoryFailure, match="tmpfs segment"):
            memory.create(1)
        memory._sealed = sealed
        assert os.listdir(tmp_path) == []

    def test_how_much_is_used_is_unknown_where_a_sandbox_refuses_to_say(
        self, memory: TmpfsMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: each load ended with an internal error of the daemon."""
        assert memory.used_bytes() is not None

        def refuse(descriptor: int) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "fstatvfs", refuse)
        assert memory.used_bytes() is None


class TestChoice:
    def test_there_is_always_a_kind(self) -> None:
        memory, _ = host.open_best(BUDGET)
        memory.close()

    def test_the_best_available_kind_is_taken_and_says_why(self) -> None:
        probes = host.probe()
        assert [each.kind for each in probes] == list(SegmentKind)
        assert all(each.is_available or each.reason for each in probes)
        memory, reason = host.open_best(BUDGET)
        memory.close()
        position = next(i for i, each in enumerate(probes) if each.is_available)
        assert memory.kind is probes[position].kind
        for better in probes[:position]:
            assert better.kind.value in reason

    @pytest.mark.parametrize(
        ("setting", "works"),
        [
            ("always within_size advise [never] deny force", False),
            ("always within_size advise never [deny] force", False),
            ("[always] within_size advise never deny force", True),
            ("always [within_size] advise never deny force", True),
            ("always within_size advise never deny [force]", True),
            ("always within_size [advise] never deny force", True),
            ("", False),
        ],
    )
    def test_memfd_huge_follows_shmem_enabled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, works: bool
    ) -> None:
        file = tmp_path / "shmem_enabled"
        file.write_text(setting + "\n")
        monkeypatch.setattr(host, "_SHMEM_HUGE", str(file))
        if works:
            host.open_memory(SegmentKind.MEMFD_HUGE, budget_bytes=BUDGET).close()
        else:
            with pytest.raises(MemoryFailure, match="shmem_enabled"):
                host.open_memory(SegmentKind.MEMFD_HUGE, budget_bytes=BUDGET)

    def test_memfd_huge_without_the_setting(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host, "_SHMEM_HUGE", str(tmp_path / "gone"))
        with pytest.raises(MemoryFailure, match="gone"):
            host.open_memory(SegmentKind.MEMFD_HUGE, budget_bytes=BUDGET)

    def test_memory_that_makes_no_segment_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed: list[MemfdMemory] = []
        monkeypatch.setattr(MemfdMemory, "close", lambda memory: closed.append(memory))

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(MemoryFailure, match="No space left"):
            host.open_memory(SegmentKind.MEMFD, budget_bytes=BUDGET)
        assert len(closed) == 1

    def test_without_any_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(kind: SegmentKind, *, budget_bytes: int) -> HostMemory:
            raise MemoryFailure("no")

        monkeypatch.setattr(host, "open_memory", fail)
        with pytest.raises(MemoryFailure, match=r"no kind .* here: memfd-huge: no; tmpfs-huge: no"):
            host.open_best(BUDGET)


def test_segments_outlive_their_memory(no_leak: None) -> None:
    memory, _ = host.open_best(BUDGET)
    segment = sealed(memory, b"still here")
    memory.close()
    assert os.pread(segment.descriptor, 100, 0) == b"still here"
    segment.close()


def test_making_mounts_leaves_this_process_in_its_namespaces() -> None:
    """In a process of its own: a namespace that was entered cannot be left."""
    code = (
        "import os; from trims_shim.memory import host\n"
        "names = lambda: [os.readlink(f'/proc/self/ns/{n}') for n in ('user', 'mnt')]\n"
        "before = names(); host.probe(); assert names() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
