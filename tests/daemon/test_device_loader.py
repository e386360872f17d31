"""Loads of a device tier: what is in memory afterwards, and that nothing is when they fail."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
from blake3 import blake3
from device_images import MIB, safetensors
from emulated_cuda import Emulated
from harness import PATIENCE_S, World, wait_until

from trims_shim.daemon import loader
from trims_shim.daemon.device import uploading
from trims_shim.daemon.device.account import Shortage
from trims_shim.daemon.device.loader import DeviceLoader
from trims_shim.daemon.device.peer_copying import PeerCopies, PeerImage
from trims_shim.daemon.device.uploading import Job, Uploader
from trims_shim.daemon.loader import Finished
from trims_shim.daemon.values import Opening, StartIngest
from trims_shim.errors import (
    DriverFailure,
    FileChanged,
    MemoryFailure,
    NoSpace,
    ReadFailed,
    UnknownDevice,
    UnsupportedFormat,
)
from trims_shim.formats.device_layout import layout_of
from trims_shim.memory.device import (
    DeviceAllocation,
    DeviceMemory,
    DeviceSegment,
    seal_outline,
    sparse_outline,
)
from trims_shim.memory.host import MemfdMemory, SealedSegment
from trims_shim.memory.mapping import round_up
from trims_shim.specs import Identity, SegmentKind
from trims_shim.wire import duties

CONTENT = safetensors((3 * MIB, 5, MIB))
DIGEST = blake3(CONTENT).hexdigest()
RESIDENT = 6 * MIB


class Harness:
    def __init__(self, machine: Emulated, path: str, backend: str = "vmm") -> None:
        self.machine = machine
        self.path = path
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.host = MemfdMemory(SegmentKind.MEMFD)
        uploader = Uploader(machine.ids[0], backend=backend, idle_s=60)
        memory = DeviceMemory(machine.ids[0], backend)
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
        return sum(each.size_bytes for each in found if each.kind in ("vmm", "linear"))


def wait_for_another(uploader: Uploader, pid: int | None) -> None:
    wait_until(lambda: uploader.pid not in (None, pid), "the next one waits")


@pytest.fixture
def harness(
    emulated_cuda: Emulated, make_file: Callable[..., str], request: pytest.FixtureRequest
) -> Iterator[Harness]:
    harness = Harness(emulated_cuda, make_file(CONTENT), getattr(request, "param", "vmm"))
    before = World.descriptors(os.getpid()).items()
    yield harness
    harness.loader.close()
    assert harness.loader.allocated_bytes() == 0
    # A retired uploader's thread closes its socket when it has seen the end.
    wait_until(lambda: World.descriptors(os.getpid()).items() <= before, "no descriptor is left")


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
    assert harness.loader.descriptor_count() == 2, "the outline and an allocation"
    with pytest.raises(OSError, match=r"not permitted|Bad file"):
        os.pwrite(segment.outline, b"x", 0)
    harness.loader.drop(DIGEST)
    assert harness.loader.allocated_bytes() == harness.image_bytes() == 0
    assert harness.loader.outline_bytes() == harness.loader.descriptor_count() == 0


def test_nothing_is_left_of_what_was_in_the_memory_before(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: between and behind its records, an image could show bytes of others' files."""
    create = harness.loader.memory.create

    def used_before(device_bytes: int) -> DeviceAllocation:
        memory = create(device_bytes)
        for descriptor, size in zip(memory.descriptors, memory.allocations, strict=True):
            os.pwrite(descriptor, b"x" * size, 0)
        return memory

    monkeypatch.setattr(harness.loader.memory, "create", used_before)
    segment = harness.adopted()
    found = bytearray()
    for descriptor, size in zip(segment.descriptors, segment.allocations, strict=True):
        found += os.pread(descriptor, size, 0)
    for each in layout_of(CONTENT).placed:
        start, size = each.source.offset_bytes, each.source.size_bytes
        place = slice(each.offset_bytes, each.offset_bytes + size)
        assert found[place] == CONTENT[start : start + size]
        found[place] = bytes(size)
    assert not any(found)


@pytest.mark.parametrize("harness", ["vmm", "ipc"], indirect=True)
def test_discard(harness: Harness) -> None:
    harness.loader.discard(harness.load().ingest)
    assert harness.loader.allocated_bytes() == 0
    wait_until(lambda: harness.image_bytes() == 0, "the uploader has freed what it made")


@pytest.mark.parametrize("is_likely_known", [False, True])
def test_a_known_digest_is_not_worked_out_again(harness: Harness, is_likely_known: bool) -> None:
    """The descriptor is then of an image, whose identity nobody asks for."""
    number = harness.start(digest="d" * 64, is_likely_known=is_likely_known)
    meter = harness.loader.meters()[number]
    finished = harness.finish()
    assert meter.done_bytes == len(CONTENT)
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


def test_a_file_without_a_hint_is_read_once(harness: Harness) -> None:
    number = harness.start()
    meter = harness.loader.meters()[number]
    assert harness.finish().error is None
    assert meter.done_bytes == len(CONTENT)
    harness.loader.discard(number)


def test_a_wrong_hint_costs_a_second_read(harness: Harness) -> None:
    number = harness.start(is_likely_known=True)
    meter = harness.loader.meters()[number]
    finished = harness.finish()
    assert finished.segment is not None
    assert meter.done_bytes == 2 * len(CONTENT)
    harness.loader.discard(number)


def test_jobs_do_not_wait_for_loads(harness: Harness) -> None:
    results: list[object] = []
    harness.loader.run(lambda: 6 * 7, results.append)
    harness.woken.get(timeout=PATIENCE_S)
    for job in harness.loader.take_jobs():
        job()
    assert results == [42]


def test_no_thread_is_woken_where_no_uploader_is_idle(harness: Harness) -> None:
    """Found: one was in each second, also where there was no uploader."""
    harness.loader.tend()
    assert harness.loader._retiring is None
    harness.loader.discard(harness.load().ingest)
    harness.loader.tend()
    assert harness.loader._retiring is None


def test_uploaders_are_told_later_what_they_had_no_room_for(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tended: list[Uploader] = []
    monkeypatch.setattr(Uploader, "tend", lambda uploader: tended.append(uploader))
    harness.loader.tend()
    assert tended == [harness.loader.uploader]


def test_an_uploader_is_replaced_whenever_it_is_idle(harness: Harness) -> None:
    harness.loader.uploader._idle_s = 0.0
    for _ in range(2):
        harness.loader.discard(harness.load().ingest)
        before = harness.loader.uploader.pid
        harness.loader.tend()
        assert harness.loader._retiring is not None
        harness.loader._retiring.result(PATIENCE_S)
        assert harness.loader.uploader.pid not in (None, before)


@pytest.mark.parametrize(
    ("harness", "lost"), [("vmm", []), ("ipc", [DIGEST])], indirect=["harness"]
)
def test_what_goes_with_the_uploader(harness: Harness, lost: list[str]) -> None:
    harness.adopted()
    assert harness.loader.lost() == []
    uploader = harness.loader.uploader
    assert uploader.pid is not None
    os.kill(uploader.pid, signal.SIGKILL)
    wait_until(lambda: uploader.pid is None, "it is gone")
    assert harness.loader.lost() == lost
    harness.loader.drop(DIGEST)


def test_nobody_waits_for_the_start_of_the_next_uploader(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the server did, and hung with the disk that its interpreter was on."""
    launch, may_start = uploading._launch, threading.Event()

    def launch_late(*arguments: Any) -> subprocess.Popen[bytes]:
        may_start.wait(PATIENCE_S)
        return launch(*arguments)

    harness.loader.discard(harness.load().ingest)
    first = harness.loader.uploader.pid
    harness.loader.uploader._idle_s = 0.0
    monkeypatch.setattr(uploading, "_launch", launch_late)
    for _ in range(2):
        harness.loader.tend()
    assert harness.loader.uploader.pid in (None, first)
    may_start.set()
    wait_for_another(harness.loader.uploader, first)


def test_the_end_does_not_wait_for_an_uploader_that_hangs_as_it_starts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: with the disk that its interpreter was on, the daemon that was to end hung."""
    is_starting, may_start = threading.Event(), threading.Event()

    def hang(*_: Any) -> NoReturn:
        is_starting.set()
        may_start.wait(PATIENCE_S)
        raise OSError

    harness.loader.discard(harness.load().ingest)
    harness.loader.uploader._idle_s = 0.0
    monkeypatch.setattr(uploading, "_launch", hang)
    monkeypatch.setattr(loader, "_END_PATIENCE_S", 0.1)
    monkeypatch.setattr(uploading, "_START_PATIENCE_S", 0.1)
    harness.loader.tend()
    assert is_starting.wait(PATIENCE_S)
    wait_until(lambda: harness.loader.uploader._starting is not None, "it is being started")
    starting = harness.loader.uploader._starting
    assert starting is not None
    ending = threading.Thread(target=harness.loader.close)
    ending.start()
    ending.join(PATIENCE_S / 4)
    has_ended = not ending.is_alive()
    may_start.set()
    ending.join()
    harness.loader._aside.shutdown()
    wait_until(starting.done, "nothing of it is left")
    assert has_ended


class TestErrors:
    def test_no_model(self, harness: Harness, make_file: Callable[..., str]) -> None:
        harness.path = make_file(b"PK\x05\x06" * 10_000, "other")
        finished = harness.load()
        assert isinstance(finished.error, UnsupportedFormat)
        assert finished.segment is None
        assert harness.image_bytes() == 0

    def test_no_image_takes_more_than_is_reserved_for_it(
        self, harness: Harness, make_file: Callable[..., str]
    ) -> None:
        """Whole granules are allocated: the last one counts, too."""
        content = safetensors([8] * 9000)
        harness.path = make_file(content, "tiny tensors")
        needed = layout_of(content).size_bytes
        reserved = harness.loader.memory.footprint_bytes(len(content))
        assert needed < reserved < round_up(needed, harness.loader.memory.granularity_bytes)
        assert isinstance(harness.load().error, UnsupportedFormat)
        assert harness.loader.allocated_bytes() == harness.image_bytes() == 0

    def test_no_outline(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(size_bytes: int) -> int:
            raise MemoryFailure("no memfd")

        monkeypatch.setattr("trims_shim.daemon.device.loader.sparse_outline", fail)
        error = harness.load().error
        assert isinstance(error, NoSpace)
        assert str(error) == "/model: no memfd"

    @pytest.mark.parametrize("harness", ["vmm", "ipc"], indirect=True)
    def test_an_outline_that_cannot_be_sealed(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int) -> int:
            raise MemoryFailure("busy")

        monkeypatch.setattr("trims_shim.daemon.device.loader.seal_outline", fail)
        assert isinstance(harness.load().error, NoSpace)
        assert harness.loader.allocated_bytes() == 0
        wait_until(lambda: harness.image_bytes() == 0, "the uploader has freed what it made")

    @pytest.mark.parametrize("harness", ["ipc"], indirect=True)
    def test_an_uploader_that_made_other_memory(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The account would be wrong from then on."""
        upload = Job.upload

        def upload_more(job: Job, *arguments: Any) -> duties.UploadReply:
            return upload(job, *arguments)._replace(allocations=(RESIDENT, RESIDENT))

        monkeypatch.setattr(Job, "upload", upload_more)
        assert isinstance(harness.load().error, ReadFailed)
        assert harness.loader.allocated_bytes() == 0
        wait_until(lambda: harness.image_bytes() == 0, "the uploader has freed what it made")

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
        "emulated_environment", [{"fail": "cuMemMap"}], indirect=True, ids=["driver"]
    )
    def test_a_failure_of_its_own_is_not_tried_again(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan, planned = Job.plan, list[str]()

        def watched(job: Job, source: int, **settings: Any) -> duties.PlanUploadReply:
            planned.append(settings["name"])
            return plan(job, source, **settings)

        monkeypatch.setattr(Job, "plan", watched)
        assert isinstance(harness.load().error, UnknownDevice)
        assert planned == ["/model"]

    @pytest.mark.parametrize(
        "emulated_environment", [{"fail": "cuMemMap"}], indirect=True, ids=["driver"]
    )
    def test_the_log_has_each_cause_once_a_minute(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Found: only the program that loaded was told, and an operator had nothing to go by."""
        errors = [harness.load().error for _ in range(2)]
        assert [type(each) for each in errors] == [UnknownDevice, UnknownDevice]
        assert caplog.messages == [str(errors[0])]
        assert "/model cannot be put on GPU-" in caplog.text
        assert "cuMemMap of 6291456 bytes failed" in caplog.text
        harness.loader.uploader.close()
        assert "is stopping" in str(harness.load().error)
        assert "is stopping" in caplog.messages[-1], "of another cause"
        monkeypatch.setattr("trims_shim.daemon.device.loader._WARNING_INTERVAL_S", 0.0)
        before = len(caplog.messages)
        harness.load()
        assert len(caplog.messages) == before + 1

    def test_an_uploader_that_dies_of_another_one(self, harness: Harness) -> None:
        with harness.machine.copies_held():
            harness.start()
            wait_until(lambda: harness.image_bytes() and harness.loader.uploader.pid, "it uploads")
            first = harness.loader.uploader.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
        finished = harness.finish()
        assert finished.error is None
        assert harness.loader.uploader.pid not in (first, None)
        harness.loader.discard(finished.ingest)

    def test_a_second_try_is_progress_from_its_first_byte_on(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a client would give it up while it reads again what the first try had read."""
        upload, steps = Job.upload, list[int]()

        def upload_once(
            job: Job,
            memory: DeviceAllocation | None,
            outline: int,
            on_progress: Callable[[int], None],
        ) -> duties.UploadReply:
            (meter,) = harness.loader.meters().values()
            before = meter.done_bytes
            on_progress(1000)
            steps.append(meter.done_bytes - before)
            if len(steps) == 1:
                job.is_innocent = True
                raise DriverFailure("it died of another job")
            return upload(job, memory, outline, on_progress)

        monkeypatch.setattr(Job, "upload", upload_once)
        finished = harness.load()
        assert finished.error is None
        assert len(steps) == 2
        assert all(step > 0 for step in steps)
        harness.loader.discard(finished.ingest)


class TestShortage:
    """The driver has no memory although the account says that there is some."""

    @staticmethod
    def fill(harness: Harness, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
        """So many creations fail; how often it was tried."""
        tries: list[int] = []
        create = harness.loader.memory.create

        def scarce(device_bytes: int) -> object:
            tries.append(device_bytes)
            if len(tries) <= times:
                raise NoSpace("full")
            return create(device_bytes)

        monkeypatch.setattr(harness.loader.memory, "create", scarce)
        return tries

    @staticmethod
    def shortage(harness: Harness) -> Shortage:
        harness.woken.get(timeout=PATIENCE_S)
        (shortage,) = harness.loader.take_shortages()
        assert harness.loader.take_finished() == []
        return shortage

    def test_it_is_tried_again_once_there_is_room(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries = self.fill(harness, monkeypatch, 2)
        harness.start()
        for _ in range(2):
            shortage = self.shortage(harness)
            assert (shortage.wanted_bytes, shortage.may_demote) == (len(CONTENT), True)
            shortage.answer(is_relieved=True)
            shortage.answer(is_relieved=False)
        finished = harness.finish()
        assert finished.error is None
        assert len(tries) == 3
        harness.loader.discard(finished.ingest)

    def test_not_when_there_is_nothing_to_give_up(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Found: the driver's refusal was not in the log, as its other errors are."""
        tries = self.fill(harness, monkeypatch, 99)
        harness.start()
        self.shortage(harness).answer(is_relieved=False)
        assert isinstance(harness.finish().error, NoSpace)
        assert len(tries) == 1
        assert harness.loader.allocated_bytes() == 0
        device = harness.loader.memory.device
        assert caplog.messages == [f"/model cannot be put on {device}: full"]

    def test_not_for_ever(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody else takes what we give up."""
        tries = self.fill(harness, monkeypatch, 99)
        harness.start()
        for _ in range(4):
            self.shortage(harness).answer(is_relieved=True)
        assert isinstance(harness.finish().error, NoSpace)
        assert len(tries) == 5

    def test_it_waits_for_what_leaves(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Room is made by images that are copied to the host tier first."""
        tries = self.fill(harness, monkeypatch, 1)
        harness.start()
        shortage = self.shortage(harness)
        harness.loader._account.begin_leaving(MIB)
        shortage.answer(is_relieved=True)
        time.sleep(0.3)
        assert len(tries) == 1
        harness.loader._account.end_leaving(MIB)
        finished = harness.finish()
        assert finished.error is None
        harness.loader.discard(finished.ingest)

    def test_closing_waits_for_nobody(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.fill(harness, monkeypatch, 99)
        harness.start()
        harness.woken.get(timeout=PATIENCE_S)
        closing = threading.Thread(target=harness.loader.close)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()

    def test_one_that_comes_after_the_end_is_answered(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Else the end would wait for its thread, as long as it waits for anything."""
        take, gate = harness.loader.take_shortages, threading.Event()

        def take_before_it_comes() -> list[Shortage]:
            found = take()
            gate.set()
            return found

        def full(device_bytes: int) -> NoReturn:
            gate.wait(PATIENCE_S)
            raise NoSpace("full")

        monkeypatch.setattr(harness.loader, "take_shortages", take_before_it_comes)
        monkeypatch.setattr(harness.loader.memory, "create", full)
        harness.start()
        wait_until(harness.loader.allocated_bytes, "it is about to allocate")
        closing = threading.Thread(target=harness.loader.close)
        closing.start()
        closing.join(PATIENCE_S)
        assert caplog.messages == [f"/model cannot be put on {harness.loader.memory.device}: full"]


two = pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True, ids=["two"])


class TestPeers:
    """The image is on the second device; the loader is the first one's."""

    @staticmethod
    def source(harness: Harness, *, digest: str = DIGEST) -> PeerImage:
        """The image, put together without an uploader."""
        layout = layout_of(CONTENT)
        memory = DeviceMemory(harness.machine.ids[1], "vmm").create(layout.size_bytes)
        outline = sparse_outline(len(CONTENT))
        for span in layout.outline():
            os.pwrite(outline, CONTENT[span.offset_bytes : span.end_bytes], span.offset_bytes)
        for each in layout.placed:
            part = CONTENT[each.source.offset_bytes : each.source.end_bytes]
            os.pwrite(memory.descriptors[0], part, each.offset_bytes)
        sealed = seal_outline(outline)
        os.close(outline)
        segment = DeviceSegment(
            harness.machine.ids[1],
            "vmm",
            memory.allocations,
            memory.descriptors,
            (),
            sealed,
            len(CONTENT),
            layout.fingerprint(),
        )
        return PeerImage(digest, segment)

    @staticmethod
    def connect(harness: Harness) -> PeerCopies:
        here, there = harness.machine.ids
        uploader = Uploader(here, backend="vmm", idle_s=60, peers=(there,))
        harness.loader.peers = PeerCopies({there: 0}, uploader)
        return harness.loader.peers

    def load(self, harness: Harness, source: PeerImage) -> Finished[DeviceSegment]:
        harness.count += 1
        descriptor = os.open(harness.path, os.O_RDONLY)
        identity = Identity.from_stat(os.fstat(descriptor))
        opening = Opening(1, 1, 0, identity, "/mo\x1b[2J\ndel")
        action = StartIngest(harness.count, opening, False)
        harness.loader.start(action, descriptor, source=source)
        return harness.finish()

    @two
    def test_it_is_copied_and_the_file_not_read(
        self, harness: Harness, make_file: Callable[..., str]
    ) -> None:
        peers = self.connect(harness)
        harness.path = make_file(bytes(len(CONTENT)), "other")
        pids = set()
        for _ in range(2):
            finished = self.load(harness, self.source(harness))
            assert finished.error is None
            assert finished.result is not None
            assert finished.result.digest == DIGEST
            assert finished.result.is_settled
            assert harness.loader.was_copied(finished.ingest)
            assert not harness.loader.was_copied(finished.ingest)
            segment = finished.segment
            assert segment is not None
            assert segment.device == harness.machine.ids[0]
            assert harness.image_bytes() == harness.loader.allocated_bytes() == RESIDENT
            harness.loader.adopt(finished.ingest, DIGEST)
            hashing = harness.loader.hashing(DIGEST)
            assert hashing.compute() == DIGEST
            hashing.close()
            harness.loader.drop(DIGEST)
            pids.add(peers.uploader.pid)
        assert len(pids) == 1
        assert pids != {harness.loader.uploader.pid}, "one of its own"

    @pytest.mark.parametrize(
        ("emulated_environment", "reason"),
        [
            ({"devices": 2, "peer": 0}, "cuMemSetAccess"),
            ({"devices": 2, "peer": 2}, "damaged"),
            ({"devices": 2, "fail": "cuMemcpyDtoDAsync=kill"}, "died"),
            ({"devices": 2, "fail": "cuMemcpyDtoDAsync"}, "cuMemcpyDtoDAsync"),
        ],
        indirect=["emulated_environment"],
        ids=["no peers", "damage", "death", "driver"],
    )
    def test_whatever_fails_the_file_is_read(
        self, harness: Harness, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.connect(harness)
        finished = self.load(harness, self.source(harness))
        assert finished.error is None
        assert finished.result is not None
        assert finished.result.digest == DIGEST
        assert not harness.loader.was_copied(finished.ingest)
        # Anybody may have chosen the name.
        assert r"/mo\x1b[2J\ndel cannot be copied from" in caplog.text
        assert reason in caplog.text
        harness.loader.adopt(finished.ingest, DIGEST)
        hashing = harness.loader.hashing(DIGEST)
        assert hashing.compute() == DIGEST
        hashing.close()
        assert harness.image_bytes() == RESIDENT

    @two
    def test_a_source_that_is_damaged_is_not_passed_on(self, harness: Harness) -> None:
        self.connect(harness)
        source = self.source(harness)
        os.pwrite(source.segment.descriptors[0], b"damage", 1000)
        finished = self.load(harness, source)
        assert finished.result is not None
        assert finished.result.digest == DIGEST
        assert not harness.loader.was_copied(finished.ingest)
        harness.loader.discard(finished.ingest)

    @two
    def test_no_room_for_a_copy_may_be_room_for_an_upload(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A copy needs a context more."""
        peers = self.connect(harness)
        source = self.source(harness)
        tries = TestShortage.fill(harness, monkeypatch, 1)
        harness.count += 1
        descriptor = os.open(harness.path, os.O_RDONLY)
        opening = Opening(1, 1, 0, Identity.from_stat(os.fstat(descriptor)), "/model")
        harness.loader.start(StartIngest(harness.count, opening, False), descriptor, source=source)
        TestShortage.shortage(harness).answer(is_relieved=False)
        finished = harness.finish()
        assert finished.error is None
        assert not harness.loader.was_copied(finished.ingest)
        assert len(tries) == 2
        assert peers.rank(harness.machine.ids[1]) == 0
        harness.loader.discard(finished.ingest)

    @two
    def test_a_copy_waits_for_what_leaves(self, harness: Harness) -> None:
        self.connect(harness)
        source = self.source(harness)
        harness.loader._account.begin_leaving(MIB)
        found: list[int] = []

        def leave() -> None:
            found.append(harness.image_bytes())
            harness.loader._account.end_leaving(MIB)

        threading.Timer(0.3, leave).start()
        finished = self.load(harness, source)
        assert found == [RESIDENT], "the source only"
        assert harness.loader.was_copied(finished.ingest)
        harness.loader.discard(finished.ingest)

    @two
    def test_a_source_whose_load_never_began_is_given_up(self, harness: Harness) -> None:
        source, gate = self.source(harness), threading.Event()
        descriptor = os.open(harness.path, os.O_RDONLY)
        opening = Opening(1, 1, 0, Identity.from_stat(os.fstat(descriptor)), "/model")
        with ThreadPoolExecutor(1) as pool:
            harness.loader._pool = pool
            pool.submit(gate.wait, PATIENCE_S)
            harness.loader.start(StartIngest(1, opening, False), descriptor, source=source)
            harness.loader.close()
            gate.set()
        assert harness.image_bytes() == 0

    @two
    def test_idle_uploaders_end(self, harness: Harness) -> None:
        peers = self.connect(harness)
        harness.loader.discard(self.load(harness, self.source(harness)).ingest)
        harness.adopted()
        processes = []
        for uploader in (peers.uploader, harness.loader.uploader):
            assert uploader._process is not None
            processes.append(uploader._process)
            uploader._idle_s = 0.0
        harness.loader.tend()
        for process, uploader in zip(
            processes, (peers.uploader, harness.loader.uploader), strict=True
        ):
            process.join()
            assert process.is_dead
            wait_for_another(uploader, process.pid)


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

    def test_how_long_it_took_whatever_the_clock_is_set_to(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.adopted()
        clock_ns = itertools.count(time.time_ns(), -3600 * 10**9)
        monkeypatch.setattr(time, "time_ns", lambda: next(clock_ns))
        finished = self.demote(harness)
        assert finished.result is not None
        assert finished.segment is not None
        finished.segment.close()
        assert 0 < finished.result.load_ns < PATIENCE_S * 1e9

    def test_damaged_memory_does_not(
        self, harness: Harness, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Found: nobody was told of it, nor of a driver that could not read it back."""
        segment = harness.adopted()
        os.pwrite(segment.descriptors[0], b"damage", 1000)
        finished = self.demote(harness)
        assert isinstance(finished.error, ReadFailed)
        assert "damaged" in str(finished.error)
        assert f"image {DIGEST[:12]} cannot be moved from GPU-" in caplog.text
        assert str(finished.error) in caplog.text
        assert finished.segment is None
        assert harness.image_bytes() == 0

    def test_no_host_memory(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(size_bytes: int) -> object:
            raise MemoryFailure("none")

        harness.adopted()
        monkeypatch.setattr(harness.host, "create", fail)
        assert isinstance(self.demote(harness).error, MemoryFailure)
        assert harness.image_bytes() == 0

    @pytest.mark.parametrize(
        "emulated_environment", [{"fail": "cuMemcpyDtoHAsync"}], indirect=True, ids=["driver"]
    )
    def test_what_cannot_be_read_back_leaves_no_host_memory(self, harness: Harness) -> None:
        harness.adopted()
        assert "cuMemcpyDtoHAsync" in str(self.demote(harness).error)
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
        hashing = harness.loader.hashing(DIGEST)
        harness.loader.drop(DIGEST)
        assert harness.image_bytes() == RESIDENT
        assert hashing.compute() == DIGEST
        hashing.close()
        assert harness.image_bytes() == 0

    def test_hashing_sees_damage(self, harness: Harness) -> None:
        segment = harness.adopted()
        os.pwrite(segment.descriptors[0], b"damage", 1000)
        hashing = harness.loader.hashing(DIGEST)
        assert hashing.compute() != DIGEST
        hashing.close()
