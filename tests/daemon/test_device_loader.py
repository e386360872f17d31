"""Loads of a device tier: what is in memory afterwards, and that nothing is when they fail."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from blake3 import blake3
from device_images import MIB, safetensors
from emulated_cuda import Emulated
from harness import wait_until

from trims_shim.daemon.device_loader import DeviceLoader
from trims_shim.daemon.loader import Finished
from trims_shim.daemon.store import Opening, StartIngest
from trims_shim.daemon.uploading import Uploader
from trims_shim.errors import (
    FileChanged,
    MemoryFailure,
    NoSpace,
    ReadFailed,
    UnknownDevice,
    UnsupportedFormat,
)
from trims_shim.memory.device import DeviceMemory, DeviceSegment
from trims_shim.memory.host import MemfdMemory, SealedSegment
from trims_shim.specs import Identity, SegmentKind

PATIENCE_S = 20
CONTENT = safetensors((3 * MIB, 5, MIB))
DIGEST = blake3(CONTENT).hexdigest()
RESIDENT = 6 * MIB


class Harness:
    def __init__(self, machine: Emulated, path: str) -> None:
        self.machine = machine
        self.path = path
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.host = MemfdMemory(SegmentKind.MEMFD)
        uploader = Uploader(machine.ids[0], backend="vmm", idle_s=60)
        memory = DeviceMemory(machine.ids[0], "vmm")
        self.loader = DeviceLoader(memory, uploader, wake=lambda: self.woken.put(None))
        self.count = 0

    def start(
        self, *, digest: str = "", is_likely_known: bool = False, identity: Identity | None = None
    ) -> int:
        self.count += 1
        descriptor = os.open(self.path, os.O_RDONLY)
        identity = identity or Identity.from_stat(os.fstat(descriptor))
        opening = Opening(1, 1, 0, identity, "/model")
        self.loader.start(
            StartIngest(self.count, opening, is_likely_known), descriptor, digest=digest
        )
        return self.count

    def finish(self) -> Finished[DeviceSegment]:
        self.woken.get(timeout=PATIENCE_S)
        (finished,) = self.loader.take_finished()
        return finished

    def load(self, **settings: object) -> Finished[DeviceSegment]:
        number = self.start(**settings)  # type: ignore[arg-type]
        finished = self.finish()
        assert finished.ingest == number
        return finished

    def adopted(self) -> DeviceSegment:
        self.loader.adopt(self.load().ingest, DIGEST)
        return self.loader.segment(DIGEST)

    def image_bytes(self) -> int:
        found = self.machine.allocations()
        return sum(each.size_bytes for each in found if each.kind == "vmm")


@pytest.fixture
def harness(emulated_cuda: Emulated, make_file: Callable[..., str]) -> Iterator[Harness]:
    harness = Harness(emulated_cuda, make_file(CONTENT))
    before = len(os.listdir("/proc/self/fd"))
    yield harness
    harness.loader.close()
    assert harness.loader.allocated_bytes() == 0
    assert len(os.listdir("/proc/self/fd")) <= before


def test_adopt_and_drop(harness: Harness) -> None:
    finished = harness.load()
    assert finished.error is None
    assert finished.result is not None
    assert (finished.result.digest, finished.result.resident_bytes) == (DIGEST, RESIDENT)
    harness.loader.adopt(finished.ingest, DIGEST)
    segment = harness.loader.segment(DIGEST)
    assert segment.size_bytes == len(CONTENT)
    assert harness.loader.allocated_bytes() == harness.image_bytes() == RESIDENT
    assert 0 < harness.loader.outline_bytes() < 64 << 10
    with pytest.raises(OSError, match=r"not permitted|Bad file"):
        os.pwrite(segment.outline, b"x", 0)
    harness.loader.drop(DIGEST)
    assert harness.loader.allocated_bytes() == harness.image_bytes() == 0
    assert harness.loader.outline_bytes() == 0


def test_discard(harness: Harness) -> None:
    harness.loader.discard(harness.load().ingest)
    assert harness.loader.allocated_bytes() == harness.image_bytes() == 0


def test_a_known_digest_is_not_worked_out_again(harness: Harness) -> None:
    """The descriptor is then of an image, whose identity nobody asks for."""
    finished = harness.load(digest="d" * 64)
    assert finished.result is not None
    assert finished.result.digest == "d" * 64
    assert finished.result.is_settled


def test_a_known_image_is_only_hashed(harness: Harness) -> None:
    harness.adopted()
    finished = harness.load(is_likely_known=True)
    assert finished.segment is None
    assert finished.result is not None
    assert (finished.result.digest, finished.result.resident_bytes) == (DIGEST, 0)
    assert harness.image_bytes() == RESIDENT


def test_a_wrong_hint_costs_a_second_read(harness: Harness) -> None:
    number = harness.start(is_likely_known=True)
    meter = harness.loader.meters()[number]
    finished = harness.finish()
    assert finished.segment is not None
    assert meter.done_bytes == meter.total_bytes == 2 * len(CONTENT)
    harness.loader.discard(number)


def test_jobs_do_not_wait_for_loads(harness: Harness) -> None:
    results: list[object] = []
    harness.loader.run(lambda: 6 * 7, results.append)
    harness.woken.get(timeout=PATIENCE_S)
    for job in harness.loader.take_jobs():
        job()
    assert results == [42]


class TestErrors:
    def test_no_model(self, harness: Harness, make_file: Callable[..., str]) -> None:
        harness.path = make_file(b"PK\x05\x06" * 10_000, "other")
        finished = harness.load()
        assert isinstance(finished.error, UnsupportedFormat)
        assert finished.segment is None
        assert harness.image_bytes() == 0

    def test_a_full_device(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(device_bytes: int) -> object:
            raise NoSpace("full")

        monkeypatch.setattr(harness.loader.memory, "create", full)
        assert isinstance(harness.load().error, NoSpace)
        assert harness.loader.allocated_bytes() == 0

    def test_no_outline(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(size_bytes: int) -> int:
            raise MemoryFailure("no memfd")

        monkeypatch.setattr("trims_shim.daemon.device_loader.sparse_outline", fail)
        error = harness.load().error
        assert isinstance(error, NoSpace)
        assert str(error) == "/model: no memfd"

    def test_an_outline_that_cannot_be_sealed(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int) -> int:
            raise MemoryFailure("busy")

        monkeypatch.setattr("trims_shim.daemon.device_loader.seal_outline", fail)
        assert isinstance(harness.load().error, NoSpace)
        assert harness.loader.allocated_bytes() == harness.image_bytes() == 0

    def test_a_file_that_is_not_what_it_was(self, harness: Harness) -> None:
        seen = Identity.from_stat(os.stat(harness.path))
        os.utime(harness.path, ns=(5, 5))
        assert isinstance(harness.load(identity=seen).error, FileChanged)
        assert harness.loader.allocated_bytes() == harness.image_bytes() == 0

    @pytest.mark.parametrize(
        "emulated_environment", [{"fail": "cuMemcpyHtoDAsync=kill"}], indirect=True, ids=["kill"]
    )
    def test_an_uploader_that_always_dies(self, harness: Harness) -> None:
        error = harness.load().error
        assert isinstance(error, UnknownDevice)
        assert "/model cannot be put on GPU-" in str(error)
        assert harness.loader.allocated_bytes() == harness.image_bytes() == 0

    @pytest.mark.parametrize(
        "emulated_environment", [{"copy_delay_ms": 200}], indirect=True, ids=["slow"]
    )
    def test_an_uploader_that_dies_of_another_one(self, harness: Harness) -> None:
        harness.start()
        wait_until(lambda: harness.image_bytes() and harness.loader.uploader.pid, "it uploads")
        first = harness.loader.uploader.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        finished = harness.finish()
        assert finished.error is None
        assert harness.loader.uploader.pid not in (first, None)
        harness.loader.discard(finished.ingest)


class TestLeaving:
    def demote(self, harness: Harness, ingest: int = 99) -> Finished[SealedSegment]:
        delivered: queue.SimpleQueue[Finished[SealedSegment]] = queue.SimpleQueue()
        harness.loader.demote(DIGEST, ingest, to=harness.host, deliver=delivered.put)
        finished = delivered.get(timeout=PATIENCE_S)
        assert finished.ingest == ingest
        return finished

    def test_it_arrives(self, harness: Harness) -> None:
        harness.adopted()
        finished = self.demote(harness)
        assert finished.error is None
        assert finished.segment is not None
        assert finished.result is not None
        assert (finished.result.digest, finished.result.is_settled) == (DIGEST, True)
        assert os.pread(finished.segment.descriptor, len(CONTENT) + 1, 0) == CONTENT
        finished.segment.close()
        assert harness.loader.allocated_bytes() == harness.image_bytes() == 0
        assert harness.loader.leaving_bytes() == 0
        with pytest.raises(KeyError):
            harness.loader.segment(DIGEST)

    def test_damaged_memory_does_not(self, harness: Harness) -> None:
        segment = harness.adopted()
        os.pwrite(segment.descriptors[0], b"damage", 1000)
        finished = self.demote(harness)
        assert isinstance(finished.error, ReadFailed)
        assert "damaged" in str(finished.error)
        assert finished.segment is None
        assert harness.image_bytes() == 0

    def test_no_host_memory(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(size_bytes: int) -> object:
            raise MemoryFailure("none")

        harness.adopted()
        monkeypatch.setattr(harness.host, "create", fail)
        assert isinstance(self.demote(harness).error, MemoryFailure)
        assert harness.image_bytes() == 0

    def test_whatever_else(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        harness.adopted()
        monkeypatch.setattr(harness.host, "create", lambda size: None)
        assert isinstance(self.demote(harness).error, ReadFailed)
        assert harness.image_bytes() == 0

    def test_loads_that_begin_later_wait_with_their_memory(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.adopted()
        gate = threading.Event()
        create = harness.host.create

        def slow(size_bytes: int) -> object:
            assert gate.wait(PATIENCE_S)
            return create(size_bytes)

        monkeypatch.setattr(harness.host, "create", slow)
        delivered: queue.SimpleQueue[Finished[SealedSegment]] = queue.SimpleQueue()
        harness.loader.demote(DIGEST, 99, to=harness.host, deliver=delivered.put)
        harness.start()
        time.sleep(0.5)
        assert harness.image_bytes() == RESIDENT
        assert harness.loader.leaving_bytes() == RESIDENT
        gate.set()
        copied = delivered.get(timeout=PATIENCE_S).segment
        assert copied is not None
        copied.close()
        finished = harness.finish()
        assert finished.error is None
        assert harness.image_bytes() == RESIDENT
        harness.loader.discard(finished.ingest)

    def test_hashing_holds_what_it_hashes(self, harness: Harness) -> None:
        harness.adopted()
        work = harness.loader.hashing(DIGEST, to=harness.host)
        harness.loader.drop(DIGEST)
        assert harness.image_bytes() == RESIDENT
        assert work() == DIGEST
        assert harness.image_bytes() == 0

    def test_hashing_sees_damage(self, harness: Harness) -> None:
        segment = harness.adopted()
        os.pwrite(segment.descriptors[0], b"damage", 1000)
        assert harness.loader.hashing(DIGEST, to=harness.host)() != DIGEST
