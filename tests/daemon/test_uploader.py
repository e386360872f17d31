"""The uploader and the daemon's side of it: what is planned, who is to blame, when it ends."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from device_images import MIB, safetensors
from emulated_cuda import Emulated
from harness import PATIENCE_S, World, process_name, process_state, wait_until

from trims_shim import children
from trims_shim.daemon.device import uploader as process_module
from trims_shim.daemon.device import uploading
from trims_shim.daemon.device.uploading import Job, Uploader
from trims_shim.errors import (
    DriverFailure,
    FileChanged,
    FormatError,
    NoSpace,
    ReadFailed,
    TruncatedFile,
    UnsupportedFormat,
    WireError,
)
from trims_shim.formats.device_layout import layout_of, layout_of_numbers
from trims_shim.memory import copying
from trims_shim.memory.device import DeviceAllocation, DeviceMemory, sparse_outline
from trims_shim.wire import codec, duties, handover, messages

CONTENT = safetensors((3 * MIB, 5, MIB))

_HASHING_THREADS = len(os.sched_getaffinity(0))
"""BLAKE3's, which stay."""

_STREAM_THREADS = 2 if copying.engine() == "native" else 0
"""The emulated driver's, for the streams that go with the buffers that are kept."""

_IDLE_DESCRIPTORS = 4
"""Standard streams and the socket."""

MakeFile = Callable[..., str]


@pytest.fixture
def source(make_file: MakeFile) -> Iterator[int]:
    descriptor = os.open(make_file(CONTENT), os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


class TestPlan:
    """What a file may cost is decided before anything is copied."""

    @staticmethod
    def plan(descriptor: int, size_bytes: int, limit_bytes: int = 1 << 40) -> object:
        request = duties.PlanUploadRequest(1, size_bytes, limit_bytes, True, "model")
        return process_module.plan(descriptor, request)

    def test_a_layout(self, source: int) -> None:
        assert self.plan(source, len(CONTENT)) == layout_of(CONTENT)

    def test_numbers_as_they_are(self, source: int, make_file: MakeFile) -> None:
        """Not of a model file, whose image others would then get without its tensors."""
        request = duties.PlanUploadRequest(1, len(CONTENT), 1 << 40, True, "model", True)
        with pytest.raises(UnsupportedFormat, match="is a model file"):
            process_module.plan(source, request)
        with open(make_file(CONTENT[1:]), "rb") as file:
            numbers = request._replace(size_bytes=len(CONTENT) - 1)
            planned = process_module.plan(file.fileno(), numbers)
        assert planned == layout_of_numbers(len(CONTENT) - 1)

    def test_alignment_has_a_limit(self, source: int) -> None:
        needed = layout_of(CONTENT).size_bytes
        self.plan(source, len(CONTENT), needed)
        with pytest.raises(UnsupportedFormat, match="more than"):
            self.plan(source, len(CONTENT), needed - 1)

    @pytest.mark.parametrize("tensor_bytes", [64, 3 * MIB])
    def test_what_is_no_tensor_has_a_limit(self, make_file: MakeFile, tensor_bytes: int) -> None:
        """As much as the tensors, or a MiB."""
        content = safetensors([tensor_bytes])
        header = int.from_bytes(content[:8], "little")
        limit = max(MIB, tensor_bytes)
        for size, is_fine in ((limit - 8, True), (limit, False)):
            text = content[8 : 8 + header] + b" " * (size - header)
            padded = len(text).to_bytes(8, "little") + text + content[8 + header :]
            descriptor = os.open(make_file(padded), os.O_RDONLY)
            try:
                if is_fine:
                    self.plan(descriptor, len(padded))
                else:
                    with pytest.raises(UnsupportedFormat, match="no tensor"):
                        self.plan(descriptor, len(padded))
            finally:
                os.close(descriptor)

    def test_a_file_that_became_shorter(self, source: int) -> None:
        with pytest.raises(FileChanged, match="shorter"):
            self.plan(source, len(CONTENT) + 1)

    def test_a_file_whose_end_cannot_be_read(
        self, source: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is waited for, and fails, before it is mapped: of a page there would be SIGBUS."""
        pread = os.pread

        def broken(descriptor: int, count: int, offset: int) -> bytes:
            if offset + count == len(CONTENT):
                raise OSError(errno.EIO, "Input/output error")
            return pread(descriptor, count, offset)

        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(ReadFailed, match=r"^model: .*Input/output error"):
            self.plan(source, len(CONTENT))

    def test_what_cannot_be_mapped(self) -> None:
        descriptor = os.open("/proc/self/stat", os.O_RDONLY)
        try:
            with pytest.raises((ReadFailed, FileChanged)):
                self.plan(descriptor, 100)
        finally:
            os.close(descriptor)


class Harness:
    def __init__(self, machine: Emulated, *, backend: str = "vmm", **settings: float) -> None:
        self.machine = machine
        self.device = machine.ids[0]
        self.deaths = 0
        arguments: dict[str, float] = {"idle_s": 60.0, **settings}
        self.uploader = Uploader(self.device, backend=backend, on_death=self._on_death, **arguments)
        self.memory = DeviceMemory(self.device, "vmm")

    def _on_death(self) -> None:
        self.deaths += 1

    def upload(self, source: int, content: bytes = CONTENT) -> tuple[DeviceAllocation, int, str]:
        """(memory, outline, digest); the caller closes both."""
        with self.uploader.job() as job:
            planned = job.plan(
                source,
                size_bytes=len(content),
                limit_bytes=2 * len(content),
                is_hashed=True,
                name="model",
            )
            memory = self.memory.create(planned.device_bytes)
            outline = sparse_outline(len(content))
            try:
                digest = job.upload(memory, outline, lambda done: None).digest
            except BaseException:
                os.close(outline)
                memory.close()
                raise
        return memory, outline, digest

    @property
    def pid(self) -> int:
        pid = self.uploader.pid
        assert pid is not None
        return pid


@pytest.fixture
def make(emulated_cuda: Emulated) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**settings: object) -> Harness:
        made.append(Harness(emulated_cuda, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.uploader.close()
        assert each.uploader.pid is None


def test_there_and_back(make: Callable[..., Harness], source: int) -> None:
    harness = make()
    memory, outline, digest = harness.upload(source)
    assert digest == blake3(CONTENT).hexdigest()
    assert process_name(harness.pid) == "trims-uploader"
    target = os.memfd_create("target")
    try:
        with harness.uploader.job() as job:
            reply = job.download(
                outline,
                target,
                size_bytes=len(CONTENT),
                allocations=memory.allocations,
                descriptors=memory.descriptors,
                memory=0,
            )
        assert reply.digest == digest
        assert os.pread(target, len(CONTENT) + 1, 0) == CONTENT
        assert os.fstat(outline).st_blocks * 512 < MIB, "tensors are not in the outline"
    finally:
        os.close(target)
        os.close(outline)
        memory.close()


def test_a_failed_job_leaves_the_process_and_nothing_else(
    make: Callable[..., Harness], source: int, make_file: MakeFile
) -> None:
    harness = make()
    memory, outline, _ = harness.upload(source)
    pid = harness.pid
    idle = (1 + _HASHING_THREADS + _STREAM_THREADS, _IDLE_DESCRIPTORS)
    wait_until(lambda: _state(pid) == idle, "the first job is over")
    broken = os.open(make_file(CONTENT[:-1], "broken"), os.O_RDONLY)
    for _ in range(3):
        with pytest.raises(TruncatedFile):
            harness.upload(broken, CONTENT[:-1])
    os.close(broken)
    # Planned, and then given up; a part comes late.
    for _ in range(3):
        with harness.uploader.job() as job:
            job.plan(source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m")
        job._send(duties.UploadPart(job.number, 0), source)
    wait_until(lambda: _state(pid) == idle, "no thread and no descriptor is left")
    assert harness.pid == pid
    os.close(outline)
    memory.close()


@pytest.mark.parametrize(
    "emulated_environment", [{"fail": "cuDevicePrimaryCtxRetain=2"}], indirect=True, ids=["full"]
)
def test_a_device_without_room_for_a_context_is_full(
    make: Callable[..., Harness], source: int
) -> None:
    """So that images are given up for it."""
    with pytest.raises(NoSpace, match="no room for a context"):
        make().upload(source)


@pytest.mark.parametrize(
    "packet",
    [
        None,
        handover.Packet(duties.UploadPart(1, 0), None),
        handover.Packet(duties.UploadPart(1, 1), 9),
    ],
    ids=["given up", "no descriptor", "another part"],
)
def test_only_the_parts_of_a_job_in_their_order_are_taken(packet: handover.Packet | None) -> None:
    inbox: queue.SimpleQueue[handover.Packet | None] = queue.SimpleQueue()
    inbox.put(packet)
    with pytest.raises(WireError, match="part 0 of 1 did not come"):
        process_module._collect(1, [], inbox)


def test_parts_that_reach_a_job_as_it_ends_are_closed(
    make: Callable[..., Harness], source: int
) -> None:
    """Found: those that came between its last look and its end stayed open."""
    harness = make()
    for _ in range(10):
        with harness.uploader.job() as job:
            job.plan(source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m")
            os.kill(harness.pid, signal.SIGSTOP)  # It finds all of them at once.
        for _ in range(10):
            job._send(duties.UploadPart(job.number, 0), source)
        os.kill(harness.pid, signal.SIGCONT)
    wait_until(lambda: _state(harness.pid)[1] == _IDLE_DESCRIPTORS, "all are closed")


def test_a_job_without_a_thread_fails_alone(source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the process ended, and with the backend ``ipc`` the memory of all images with it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    request = duties.PlanUploadRequest(1, len(CONTENT), 1 << 30, True, "model")
    given = [os.dup(source) for _ in range(2)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        jobs = process_module._Jobs(theirs, "GPU-1", "vmm")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            jobs._route(handover.Packet(request, given[0]))
        jobs._route(handover.Packet(duties.UploadPart(1, 0), given[1]))
        answer = handover.receive(ours)
    assert answer is not None
    assert isinstance(answer.message, duties.UploadFailed)
    assert (answer.message.job, answer.message.error) == (1, "ReadFailed")
    assert "can't start new thread" in answer.message.message
    for descriptor in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_one_that_is_killed_before_it_has_read_all_is_no_error(
    make: Callable[..., Harness], source: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make()
    with harness.uploader.job() as job:
        job.plan(source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m")
        os.kill(harness.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(harness.pid) == "T", "it is stopped")
        job._send(duties.UploadPart(job.number, 0), source)
        os.kill(harness.pid, signal.SIGKILL)
        wait_until(lambda: "died: signal 9" in caplog.text, "its death is noted")
    assert len(caplog.records) == 1


def test_a_daemon_that_is_gone_before_it_has_read_all_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        handover.send(theirs, duties.UploadProgress(1, 1))
        ours.close()
        process_module._Jobs(theirs, "GPU-1", "vmm").run()
    assert not caplog.records


_SAME_FINGERPRINT = (
    (5120, 3584, 5632, 4608, 1024, 2560, 1536, 3072, 4096, 2048),
    (3584, 1536, 5632, 4096, 3072, 2048, 5120, 4608, 2560, 1024),
)
"""Sizes of tensors. A second was enough to find them."""


@pytest.mark.parametrize(
    ("sizes", "sizes_anew"), [((3 * MIB, 5, MIB), (MIB, 5, 3 * MIB)), _SAME_FINGERPRINT]
)
def test_a_file_that_is_laid_out_anew_after_it_was_planned(
    make: Callable[..., Harness],
    make_file: MakeFile,
    sizes: tuple[int, ...],
    sizes_anew: tuple[int, ...],
) -> None:
    """Clients find tensors by the header that they are given, wherever they were put."""
    harness = make()
    assert len({layout_of(safetensors(each)).fingerprint() for each in _SAME_FINGERPRINT}) == 1
    planned_content, other = safetensors(sizes), safetensors(sizes_anew)
    assert len(other) == len(planned_content)
    path = make_file(planned_content, "rewritten")
    source, outline = os.open(path, os.O_RDONLY), sparse_outline(len(other))
    with harness.uploader.job() as job:
        planned = job.plan(
            source, size_bytes=len(other), limit_bytes=1 << 30, is_hashed=True, name="m"
        )
        memory = harness.memory.create(planned.device_bytes)
        with open(path, "r+b") as file:
            file.write(other)
        with pytest.raises(FileChanged):
            job.upload(memory, outline, lambda done: None)
    memory.close()
    os.close(outline)
    os.close(source)


def _state(pid: int) -> tuple[int, int]:
    """(threads, descriptors); not those of libraries that keep themselves open, as libffi does."""
    files = []
    for each in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/{pid}/fd/{each}"))
    return len(os.listdir(f"/proc/{pid}/task")), sum(".so" not in each for each in files)


@pytest.mark.parametrize("letter", ["n", "ü", "\N{SNOWMAN}", "\N{GRINNING FACE}", "\udcff"])
def test_a_name_of_any_length(make: Callable[..., Harness], source: int, letter: str) -> None:
    """In the request, and in the error, which quotes it."""
    harness = make()
    for limit_bytes, error in ((1 << 30, None), (1, UnsupportedFormat)):
        with harness.uploader.job() as job:
            settings = {"limit_bytes": limit_bytes, "is_hashed": True, "name": letter * 4096}
            with pytest.raises(error) if error else contextlib.nullcontext():
                job.plan(source, size_bytes=len(CONTENT), **settings)  # type: ignore[arg-type]


def test_only_one_job_is_parsed_at_a_time_and_that_one_is_to_blame(
    make: Callable[..., Harness], source: int
) -> None:
    harness = make()
    jobs: dict[str, Job] = {}
    errors: list[str] = []

    def run(name: str) -> None:
        with harness.uploader.job() as job:
            jobs[name] = job
            try:
                job.plan(
                    source,
                    size_bytes=len(CONTENT),
                    limit_bytes=1 << 40,
                    is_hashed=True,
                    name=name,
                )
                parsed.set()
                # Waits for parts that never come.
                job._wait(duties.UploadReply, lambda done: None)
            except DriverFailure as error:
                errors.append(str(error))

    parsed = threading.Event()
    threads = [start(functools.partial(run, "planned"))]
    assert parsed.wait(PATIENCE_S)
    os.kill(harness.pid, signal.SIGSTOP)  # The next one is parsed until it dies.
    threads.append(start(functools.partial(run, "parsed")))
    wait_until(lambda: "parsed" in jobs and jobs["parsed"]._is_blamed, "it is parsed")
    threads.append(start(functools.partial(run, "behind")))
    wait_until(lambda: "behind" in jobs, "all are there")
    os.kill(harness.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert {name: job.is_innocent for name, job in jobs.items()} == {
        "planned": True,
        "parsed": False,
        "behind": True,
    }
    assert len(errors) == 3
    assert all("died" in text or "does not take jobs" in text for text in errors)


def test_one_that_is_parsed_for_long_holds_no_other_up_and_stays_to_blame(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "_PARSING_PATIENCE_S", 0.1)
    harness = make(stall_timeout_s=20.0)
    plan = {"size_bytes": len(CONTENT), "limit_bytes": 1 << 30, "is_hashed": True, "name": "m"}
    with harness.uploader.job() as slow, harness.uploader.job() as other:
        hanging = threading.Event()

        def hang(request: object, source: int) -> None:
            hanging.set()  # The request is kept back: the process does not answer it.

        monkeypatch.setattr(slow, "_send", hang)

        def run() -> None:
            with pytest.raises(DriverFailure, match="died"):
                slow.plan(source, **plan)  # type: ignore[arg-type]

        thread = start(run)
        assert hanging.wait(PATIENCE_S)
        other.plan(source, **plan)  # type: ignore[arg-type]
        os.kill(harness.pid, signal.SIGSTOP)
        with harness.uploader.job() as beside:
            threading.Timer(0.5, os.kill, (harness.pid, signal.SIGKILL)).start()
            with pytest.raises(DriverFailure):
                beside.plan(source, **plan)  # type: ignore[arg-type]
        thread.join(PATIENCE_S)
    assert not slow.is_innocent
    assert beside.is_innocent


def start(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_one_that_hangs_is_killed(make: Callable[..., Harness], source: int) -> None:
    harness = make(stall_timeout_s=0.5)
    with harness.uploader.job():
        pid = harness.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DriverFailure, match="said nothing"):
            harness.upload(source)
    wait_until(lambda: process_state(pid) == "", "it is gone and reaped")


def test_one_that_hangs_as_it_is_closed_is_killed(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the daemon would end before it, and leave it with its context."""
    monkeypatch.setattr(uploading, "_END_PATIENCE_S", 0.2)
    harness = make()
    harness.uploader.start()
    pid = harness.pid
    os.kill(pid, signal.SIGSTOP)
    harness.uploader.close()
    wait_until(lambda: process_state(pid) == "", "it is gone and reaped")


def test_an_interrupt_is_not_for_uploaders(make: Callable[..., Harness], source: int) -> None:
    """Who stops a daemon with SIGINT may send it to all its processes; loads are finished."""
    harness = make()
    with harness.uploader.job() as job:
        plan = {"size_bytes": len(CONTENT), "limit_bytes": 1 << 30, "is_hashed": True, "name": "m"}
        job.plan(source, **plan)  # type: ignore[arg-type]
        pid = harness.pid
        os.kill(pid, signal.SIGINT)
    memory, outline, _ = harness.upload(source)
    assert harness.pid == pid
    os.close(outline)
    memory.close()


def test_a_job_that_hangs_is_to_blame_and_no_other(
    make: Callable[..., Harness], source: int
) -> None:
    """It would hang again, for as long; the others may be repeated."""
    harness = make()
    plan = {"size_bytes": len(CONTENT), "limit_bytes": 1 << 30, "is_hashed": True, "name": "m"}
    with harness.uploader.job() as other, harness.uploader.job() as job:
        for each in (other, job):
            each.plan(source, **plan)  # type: ignore[arg-type]
        os.kill(harness.pid, signal.SIGSTOP)
        job._stall_timeout_s = 0.1
        with pytest.raises(DriverFailure, match="said nothing"):
            job._wait(duties.UploadReply, lambda done: None)
        with pytest.raises(DriverFailure, match="died"):
            other._wait(duties.UploadReply, lambda done: None)
    assert not job.is_innocent
    assert other.is_innocent


def test_one_that_reads_nothing_is_killed(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for room in its socket for long."""
    monkeypatch.setattr(uploading, "_SEND_TIMEOUT_S", 1)
    harness = make()
    with harness.uploader.job() as job:
        pid = harness.pid
        os.kill(pid, signal.SIGSTOP)
        parts = itertools.repeat(duties.UploadPart(job.number, 0))
        with pytest.raises(DriverFailure, match="does not take jobs"):
            collections.deque(map(job._send, parts), maxlen=0)
    wait_until(lambda: process_state(pid) == "", "it is gone and reaped")


def test_one_that_is_dead_gets_no_other_job(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: until the thread that listens to it had noticed, a job that was repeated failed."""
    harness = make()
    is_gone, is_noticed = threading.Event(), threading.Event()
    bury = uploading._Process._bury

    def bury_late(process: uploading._Process) -> None:
        is_gone.set()
        is_noticed.wait(PATIENCE_S)
        bury(process)

    monkeypatch.setattr(uploading._Process, "_bury", bury_late)
    plan = {"size_bytes": len(CONTENT), "limit_bytes": 1 << 30, "is_hashed": True, "name": "m"}
    try:
        with harness.uploader.job() as job:
            first = harness.pid
            os.kill(first, signal.SIGKILL)
            # Not by its state: its first thread may be gone while another holds the socket.
            assert is_gone.wait(PATIENCE_S)
            with pytest.raises(DriverFailure, match="does not take jobs"):
                job.plan(source, **plan)  # type: ignore[arg-type]
            assert job.is_innocent
        with harness.uploader.job() as job:
            job.plan(source, **plan)  # type: ignore[arg-type]
    finally:
        is_noticed.set()


def test_one_that_dies_before_it_is_seen(
    make: Callable[..., Harness],
    source: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found: the thread that listens to it ended with an error, and left it to nobody."""
    harness = make()
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        thread.join(PATIENCE_S)

    with monkeypatch.context() as patch:
        patch.setattr(uploading, "_BOOT", "raise SystemExit(3)")
        patch.setattr(threading.Thread, "start", start_and_wait)
        with pytest.raises(DriverFailure, match="does not take jobs"):
            harness.upload(source)
    assert "died: status 3" in caplog.text


def test_one_that_has_worked_makes_room_for_one_without_a_context(
    make: Callable[..., Harness], source: int
) -> None:
    harness = make(idle_s=60.0)
    memory, outline, _ = harness.upload(source)
    os.close(outline)
    memory.close()
    first = harness.pid
    harness.uploader.retire_if_idle()
    assert harness.uploader.pid == first, "not at once"
    harness.uploader._idle_s = 0.0
    with harness.uploader.job():
        harness.uploader.retire_if_idle()
        assert harness.uploader.pid == first, "not with a job"
    harness.uploader.retire_if_idle()
    second = harness.uploader.pid
    assert second not in (None, first)
    wait_until(lambda: process_state(first) == "", "it is gone and reaped")
    harness.uploader.retire_if_idle()
    assert harness.uploader.pid == second, "it has not worked"
    memory, outline, _ = harness.upload(source)
    assert harness.pid == second
    os.close(outline)
    memory.close()
    assert harness.deaths == 0


@pytest.mark.parametrize("emulated_environment", [{"context_bytes": 64 << 20}], indirect=True)
def test_a_context_is_made_while_the_memory_is(make: Callable[..., Harness], source: int) -> None:
    """It takes longer, on the first load and on the first one after a pause."""
    harness = make()
    with harness.uploader.job() as job:
        assert harness.machine.allocations() == []
        job.plan(source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m")
        wait_until(
            lambda: [each.kind for each in harness.machine.allocations()] == ["context"],
            "a context, before there is memory",
        )


@pytest.mark.parametrize("backend", ["vmm", "ipc"])
def test_one_is_idle_since_its_last_work(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Not since its start: an uploader that is used now and then would lose its context."""
    now_s = 0.0
    monkeypatch.setattr(uploading, "time", SimpleNamespace(monotonic=lambda: now_s))
    harness = make(idle_s=60.0, backend=backend)
    harness.uploader.start()
    first = harness.pid

    def pid_after(seconds: float) -> int:
        nonlocal now_s
        now_s += seconds
        harness.uploader.retire_if_idle()
        return harness.pid

    with harness.uploader.job() as job:
        planned = job.plan(
            source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m"
        )
        memory = harness.memory.create(planned.device_bytes) if backend == "vmm" else None
        outline = sparse_outline(len(CONTENT))
        job.upload(memory, outline, lambda done: None)
        os.close(outline)
        now_s += 100.0
    if memory is None:
        assert pid_after(100.0) == first, "not with memory"
        harness.uploader.free(job.number)
    else:
        memory.close()
    assert pid_after(59.0) == first
    assert pid_after(1.0) != first


def test_it_sees_its_device_whatever_the_daemon_sees(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no client: what it reads is no model to take from a daemon."""
    harness = make()
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("TRIMS_ENABLED", "1")
        harness.uploader.start()
    with open(f"/proc/{harness.pid}/environ", "rb") as file:
        assert b"TRIMS_ENABLED=0" in file.read().split(b"\0")
    memory, outline, digest = harness.upload(source)
    assert digest == blake3(CONTENT).hexdigest()
    os.close(outline)
    memory.close()


@pytest.mark.parametrize(
    "emulated_environment", [{"fail": "cuMemMap:1"}], indirect=True, ids=["cuMemMap"]
)
def test_one_whose_driver_failed_gets_no_more_jobs(
    make: Callable[..., Harness], source: int
) -> None:
    harness = make()
    for _ in range(2):  # The first call of each process fails.
        with pytest.raises(DriverFailure, match="cuMemMap"):
            harness.upload(source)
        process = harness.uploader._process
        assert process is not None
        process.join()
        assert process.is_dead


def test_one_that_the_driver_fails_each_time_is_not_started_for_a_while(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: each load started a process and waited for it, 0.2 s, before it fell back."""
    harness, now_s = make(), [1000.0]
    uploader = harness.uploader
    boot = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).recv(1)"
    monkeypatch.setattr(uploading, "_BOOT", boot)
    monkeypatch.setattr(uploading, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def fail() -> None:
        failed = duties.UploadFailed(0, "DriverFailure", "no context")
        with pytest.raises(DriverFailure, match=r"^no context"), uploader.job() as job:
            raise job._failure(failed)

    fail()
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        fail()
        for _ in range(2):
            with pytest.raises(DriverFailure, match=r"in a row.*no context"), uploader.job():
                pass
            now_s[0] += pause_s / 2
    with uploader.job():
        pass  # A success: what fails now fails for the first time.
    fail()
    fail()


def test_a_job_under_way_outlives_the_failure_of_another(
    make: Callable[..., Harness], source: int
) -> None:
    harness = make()
    failed = duties.UploadFailed(0, "DriverFailure", "its context is broken")
    with harness.uploader.job() as job:
        planned = job.plan(
            source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m"
        )
        with harness.uploader.job() as other:
            assert isinstance(other._failure(failed), DriverFailure)
        memory, outline = harness.memory.create(planned.device_bytes), sparse_outline(len(CONTENT))
        try:
            reply = job.upload(memory, outline, lambda done: None)
        finally:
            os.close(outline)
            memory.close()
    assert reply.digest == blake3(CONTENT).hexdigest()


def test_it_cannot_be_started(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DriverFailure, match="cannot be started"):
        harness.upload(source)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[Any]]]:
    """A disk that does not answer until the event is set, and what has been started then."""
    may_start, started, launch = threading.Event(), [], uploading._launch

    def hang(*arguments: Any) -> subprocess.Popen[bytes]:
        may_start.wait(PATIENCE_S)
        started.append(launch(*arguments))
        return started[-1]

    monkeypatch.setattr(uploading, "_launch", hang)
    monkeypatch.setattr(uploading, "_START_PATIENCE_S", 0.05)
    yield may_start, started
    may_start.set()


def test_one_that_hangs_as_it_is_started_is_not_waited_for(
    make: Callable[..., Harness], source: int, hanging: tuple[threading.Event, list[Any]]
) -> None:
    """Found: all loads waited for the first, each until its client lost patience."""
    harness = make()
    may_start, started = hanging
    for _ in range(2):
        with pytest.raises(DriverFailure, match="did not start"):
            harness.upload(source)
    starting = harness.uploader._starting
    assert starting is not None
    may_start.set()
    wait_until(starting.done, "it has started")
    memory, outline, digest = harness.upload(source)
    assert digest == blake3(CONTENT).hexdigest()
    assert len(started) == 1
    os.close(outline)
    memory.close()


def test_one_that_starts_after_all_has_been_closed_ends(
    make: Callable[..., Harness], hanging: tuple[threading.Event, list[Any]]
) -> None:
    harness = make()
    may_start, started = hanging
    harness.uploader.start()
    harness.uploader.close()
    may_start.set()
    wait_until(lambda: started and started[0].poll() is not None, "it ends")


@pytest.mark.parametrize(
    ("path", "name"), [("wire/messages.py", "PROTOCOL_VERSION"), ("_version.py", "__version__")]
)
def test_another_version_that_was_installed_under_the_daemon(
    path: str,
    name: str,
    make: Callable[..., Harness],
    source: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Found: its uploader filled memory in its own way, and the daemon's clients got that."""
    harness = make()
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(f"{name} = 1000000\n")
    monkeypatch.setattr(children, "PACKAGE_DIRECTORY", str(tmp_path))
    harness.uploader.start()
    assert harness.uploader.pid is None
    with pytest.raises(DriverFailure, match="under the daemon; run `trims stop`, or restart"):
        harness.upload(source)


def test_one_that_talks_nonsense_is_replaced(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a message of another kind ended the thread that listens, and the device was lost."""
    harness = make()
    nonsense = codec.encode(messages.Goodbye("whoever has taken it over"))
    boot = (
        "import socket, sys; connection = socket.socket(fileno=int(sys.argv[2])); "
        f"connection.recv(4096); socket.send_fds(connection, [{nonsense!r}], [0]); "
        "connection.recv(4096)"
    )
    before = World.descriptors(os.getpid()).items()
    with monkeypatch.context() as patch:
        patch.setattr(uploading, "_BOOT", boot)
        with pytest.raises(DriverFailure, match="died"):
            harness.upload(source)
    wait_until(
        lambda: World.descriptors(os.getpid()).items() <= before, "nothing that it sent is kept"
    )
    memory, outline, digest = harness.upload(source)
    assert digest == blake3(CONTENT).hexdigest()
    os.close(outline)
    memory.close()


def test_one_that_dies_at_once_is_told_of(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: its listener did not know its number yet and failed; the job waited for a minute."""

    class Eager(threading.Thread):
        def start(self) -> None:
            super().start()
            self.join()  # All that it hears comes before it has been started.

    harness = make()
    with monkeypatch.context() as patch:
        patch.setattr(uploading, "_BOOT", "raise SystemExit(3)")
        patch.setattr(uploading, "threading", SimpleNamespace(Lock=threading.Lock, Thread=Eager))
        with pytest.raises(DriverFailure, match=r"died|does not take jobs"):
            harness.upload(source)
    memory, outline, _ = harness.upload(source)
    os.close(outline)
    memory.close()


def test_a_closed_one_starts_nothing(make: Callable[..., Harness], source: int) -> None:
    harness = make()
    harness.uploader.close()
    with pytest.raises(DriverFailure, match="stopping"):
        harness.upload(source)


def test_closing_ends_jobs_under_way(make: Callable[..., Harness], source: int) -> None:
    harness = make()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with harness.uploader.job() as job:
                job._wait(duties.UploadReply, lambda done: None)
        except DriverFailure as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: harness.uploader.pid, "it runs")
    harness.uploader.close()
    thread.join(PATIENCE_S)
    assert len(errors) == 1


def test_an_implausible_plan_is_not_believed(
    make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    with harness.uploader.job() as job:
        reply = duties.PlanUploadReply(job.number, 1 << 50, "x")
        monkeypatch.setattr(job, "_wait", lambda kind, on_progress: reply)
        with pytest.raises(WireError, match="plans"):
            job.plan(source, size_bytes=10, limit_bytes=100, is_hashed=True, name="m")


class TestLegacy:
    """Memory of the backend ipc is the process's own."""

    @staticmethod
    def upload(harness: Harness, source: int) -> tuple[int, duties.UploadReply]:
        outline = sparse_outline(len(CONTENT))
        try:
            with harness.uploader.job() as job:
                job.plan(
                    source,
                    size_bytes=len(CONTENT),
                    limit_bytes=1 << 30,
                    is_hashed=True,
                    name="model",
                )
                return job.number, job.upload(None, outline, lambda done: None)
        finally:
            os.close(outline)

    def test_it_stays_until_the_memory_is_freed(
        self, make: Callable[..., Harness], source: int
    ) -> None:
        harness = make(backend="ipc", idle_s=0.0)
        number, reply = self.upload(harness, source)
        assert len(reply.handles) == 1
        assert reply.allocations == (6 * MIB,)
        harness.uploader.retire_if_idle()
        pid = harness.pid
        assert harness.uploader.keeps(number)
        with harness.uploader.job() as job:  # It has then heard all that was said of the first.
            job.plan(source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m")
        assert self._linear(harness) == 6 * MIB
        harness.uploader.free(number)
        harness.uploader.free(number)
        assert not harness.uploader.keeps(number)
        wait_until(lambda: self._linear(harness) == 0, "it is freed")
        harness.uploader.retire_if_idle()
        wait_until(lambda: process_state(pid) == "", "it is gone")
        assert harness.deaths == 0

    @pytest.mark.parametrize(
        "emulated_environment", [{"fail": "cuMemFree:1"}], indirect=True, ids=["cuMemFree"]
    )
    def test_memory_that_cannot_be_freed_costs_no_other(
        self, make: Callable[..., Harness], source: int
    ) -> None:
        """Found: the process ended, while clients used the other images."""
        harness = make(backend="ipc")
        first, _ = self.upload(harness, source)
        second, _ = self.upload(harness, source)
        harness.uploader.free(first)
        third, _ = self.upload(harness, source)
        assert harness.deaths == 0
        for each in (second, third):
            assert harness.uploader.keeps(each)
            harness.uploader.free(each)
        wait_until(lambda: self._linear(harness) == 6 * MIB, "they are freed")

    def test_many_that_go_at_once_are_all_freed(
        self, make: Callable[..., Harness], source: int
    ) -> None:
        """Found: of 400 images a third was never freed, as the socket had no room."""
        harness = make(backend="ipc")
        number, _ = self.upload(harness, source)
        process = harness.uploader._process
        assert process is not None
        os.kill(harness.pid, signal.SIGSTOP)
        another = codec.encode(duties.JobRelease(0))
        with contextlib.suppress(BlockingIOError):
            while True:
                process._connection.send(another, socket.MSG_DONTWAIT)
        harness.uploader.free(number)
        os.kill(harness.pid, signal.SIGCONT)

        def is_freed() -> bool:
            harness.uploader.tend()
            return self._linear(harness) == 0

        wait_until(is_freed, "it is freed")

    def test_freeing_does_not_wait_for_a_process_that_is_started(
        self, make: Callable[..., Harness], source: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server's thread frees what was lost with a process, while a load starts another."""
        harness = make(backend="ipc")
        number, _ = self.upload(harness, source)
        os.kill(harness.pid, signal.SIGKILL)
        wait_until(lambda: not harness.uploader.keeps(number), "its memory is lost")
        is_starting, may_start = threading.Event(), threading.Event()
        launch = uploading._launch

        def hang(*arguments: Any) -> subprocess.Popen[bytes]:
            is_starting.set()
            may_start.wait(PATIENCE_S)
            return launch(*arguments)

        monkeypatch.setattr(uploading, "_launch", hang)
        starter = start(harness.uploader.start)
        assert is_starting.wait(PATIENCE_S)
        freer = start(lambda: harness.uploader.free(number))
        freer.join(PATIENCE_S / 2)
        is_freed = not freer.is_alive()
        may_start.set()
        starter.join(PATIENCE_S)
        freer.join(PATIENCE_S)
        assert is_freed

    def test_memory_that_is_read_is_freed_afterwards(self) -> None:
        """Found: an image that was evicted while it was verified was freed under the copy."""
        ours, theirs = socket.socketpair()
        freed: list[str] = []
        jobs = process_module._Jobs(theirs, "GPU-1", "ipc")
        jobs._memory[7] = SimpleNamespace(address=4096, close=lambda: freed.append("once"))
        request = duties.DownloadRequest(8, 10, (10,), 7)
        release = handover.Packet(duties.JobRelease(7), None)
        with ours, theirs:
            with jobs._readable(request, ()), jobs._readable(request, ()) as address:
                assert address == 4096
            assert freed == [], "nobody has given it up"
            with jobs._readable(request, ()):
                with jobs._readable(request, ()):
                    jobs._route(release)
                assert freed == []
            assert freed == ["once"]
            jobs._route(release)
            with pytest.raises(DriverFailure, match="no memory"), jobs._readable(request, ()):
                pass
        assert freed == ["once"]

    def test_memory_is_cleared_before_it_is_filled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between its records an image would show what was there before."""
        memory = SimpleNamespace(address=4096, allocations=(10, 20))
        of_device = SimpleNamespace(create=lambda size_bytes: memory)
        monkeypatch.setattr(process_module, "DeviceMemory", lambda *_: of_device)
        cleared: list[tuple[int, int]] = []
        monkeypatch.setattr(process_module._Jobs, "_clear", lambda _, *what: cleared.append(what))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            jobs = process_module._Jobs(theirs, "GPU-1", "ipc")
            with jobs._placed(7, layout_of(CONTENT), (), ()) as address:
                assert (address, cleared) == (4096, [(4096, 30)])

    def test_it_is_clear_before_it_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What fills it runs in other streams, which would not wait for this one."""
        done: list[str] = []
        driver = SimpleNamespace(
            index_of=lambda device: 0,
            context=lambda index: contextlib.nullcontext(),
            new_stream=lambda: 9,
            clear=lambda address, size_bytes, stream: done.append(
                f"clear {size_bytes} in {stream}"
            ),
            synchronize_stream=lambda stream: done.append(f"wait for {stream}"),
            destroy_stream=lambda stream: done.append(f"destroy {stream}"),
        )
        monkeypatch.setattr(process_module, "driver", lambda: driver)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process_module._Jobs(theirs, "GPU-1", "ipc")._clear(4096, 30)
        assert done == ["clear 30 in 9", "wait for 9", "destroy 9"]

    def test_its_death_is_told(self, make: Callable[..., Harness], source: int) -> None:
        harness = make(backend="ipc")
        number, _ = self.upload(harness, source)
        os.kill(harness.pid, signal.SIGKILL)
        wait_until(lambda: harness.deaths == 1, "it is told")
        assert not harness.uploader.keeps(number)
        assert self.upload(harness, source)[0] > number

    def test_a_failed_job_keeps_nothing(self, make: Callable[..., Harness], source: int) -> None:
        harness = make(backend="ipc")
        with pytest.raises(FormatError), harness.uploader.job() as job:
            job.plan(source, size_bytes=100, limit_bytes=1 << 30, is_hashed=True, name="m")
        assert self._linear(harness) == 0

    def test_an_upload_that_fails_keeps_nothing(
        self, make: Callable[..., Harness], make_file: MakeFile
    ) -> None:
        """Nor the process, which ends when it is idle."""
        harness = make(backend="ipc", idle_s=0.0)
        path = make_file(CONTENT, "shrinking")
        source, outline = os.open(path, os.O_RDONLY), sparse_outline(len(CONTENT))
        with harness.uploader.job() as job:
            job.plan(source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m")
            os.truncate(path, MIB)
            with pytest.raises(FileChanged):
                job.upload(None, outline, lambda done: None)
        os.close(source)
        os.close(outline)
        assert not harness.uploader.keeps(job.number)
        assert self._linear(harness) == 0
        pid = harness.pid
        harness.uploader.retire_if_idle()
        wait_until(lambda: process_state(pid) == "", "it is gone")

    def test_one_that_is_given_up_makes_no_more_images(
        self, make: Callable[..., Harness], source: int
    ) -> None:
        """Found: it ended with the job, and took along the image that had just been made."""
        harness = make(backend="ipc")
        outline = sparse_outline(len(CONTENT))
        failed = duties.UploadFailed(0, "DriverFailure", "its context is broken")
        with harness.uploader.job() as job, harness.uploader.job() as other:
            job.plan(source, size_bytes=len(CONTENT), limit_bytes=1 << 30, is_hashed=True, name="m")
            assert isinstance(other._failure(failed), DriverFailure)
            with pytest.raises(DriverFailure):
                job.upload(None, outline, lambda done: None)
            assert job.is_innocent, "it is repeated"
        os.close(outline)
        number, _ = self.upload(harness, source)
        assert harness.uploader.keeps(number)
        harness.uploader.free(number)

    def test_a_job_that_fails_costs_no_image(
        self, make: Callable[..., Harness], source: int
    ) -> None:
        """The process goes on with its memory, although its context may be broken."""
        harness = make(backend="ipc")
        first, _ = self.upload(harness, source)
        failed = duties.UploadFailed(0, "DriverFailure", "its context is broken")
        with harness.uploader.job() as job:
            assert isinstance(job._failure(failed), DriverFailure)
        second, _ = self.upload(harness, source)
        assert harness.deaths == 0
        for each in (first, second):
            assert harness.uploader.keeps(each)
            harness.uploader.free(each)

    @pytest.mark.parametrize(
        "emulated_environment", [{"fail": "cuMemcpyHtoDAsync:1"}], indirect=True, ids=["copy"]
    )
    def test_one_whose_driver_failed_makes_no_more_images(
        self, make: Callable[..., Harness], source: int
    ) -> None:
        harness = make(backend="ipc")
        with pytest.raises(DriverFailure, match="cuMemcpyHtoDAsync"):
            self.upload(harness, source)
        process = harness.uploader._process
        assert process is not None
        process.join()
        assert process.is_dead
        assert self._linear(harness) == 0

    @staticmethod
    def _linear(harness: Harness) -> int:
        allocations = harness.machine.allocations()
        return sum(each.size_bytes for each in allocations if each.kind == "linear")
