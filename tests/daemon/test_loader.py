"""Loads end in a segment that is adopted or discarded, or in an error; nothing else is left."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from fronts import Later
from harness import PATIENCE_S, open_descriptors, wait_until

from trims_shim.daemon import file_systems, ingest
from trims_shim.daemon import loader as loader_module
from trims_shim.daemon.loader import Finished, Loader
from trims_shim.daemon.values import Opening, StartIngest
from trims_shim.errors import FileChanged, MemoryFailure, NoSpace, ReadFailed
from trims_shim.memory.host import MemfdMemory, WritableSegment
from trims_shim.specs import Identity, SegmentKind

pytestmark = pytest.mark.usefixtures("no_leak")

OLD_NS = 1_000_000_000
CONTENT = os.urandom(100_000)
DIGEST = blake3(CONTENT).hexdigest()


class Harness:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(CONTENT)
        os.utime(path, ns=(OLD_NS, OLD_NS))
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.memory = MemfdMemory(SegmentKind.MEMFD)
        self.loader = Loader(self.memory, threads=2, wake=lambda: self.woken.put(None))
        self.count = 0

    def load(
        self,
        *,
        identity: Identity | None = None,
        is_likely_known: bool = False,
        is_only_hashed: bool = False,
    ) -> Finished:
        self.count += 1
        descriptor = os.open(self.path, os.O_RDONLY)
        identity = identity or Identity.from_stat(os.fstat(descriptor))
        opening = Opening(1, 1, 0, identity, "/model")
        action = StartIngest(self.count, opening, is_likely_known, is_only_hashed)
        self.loader.start(action, descriptor)
        self.woken.get(timeout=PATIENCE_S)
        (finished,) = self.loader.take_finished()
        assert finished.ingest == self.count
        return finished


@pytest.fixture
def harness(no_leak: None, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path / "model")
    yield harness
    harness.loader.close()


def test_adopt(harness: Harness) -> None:
    finished = harness.load()
    assert finished.error is None
    assert finished.result is not None
    assert finished.result.digest == DIGEST
    assert finished.result.resident_bytes >= len(CONTENT)
    harness.loader.adopt(finished.ingest, DIGEST)
    segment = harness.loader.segment(DIGEST)
    assert os.pread(segment.descriptor, len(CONTENT) + 1, 0) == CONTENT
    harness.loader.drop(DIGEST)
    assert segment.descriptor == -1
    with pytest.raises(KeyError):
        harness.loader.segment(DIGEST)


def test_how_long_it_took_whatever_the_clock_is_set_to(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_ns = itertools.count(time.time_ns(), -3600 * 10**9)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock_ns))
    finished = harness.load()
    assert finished.result is not None
    assert 0 < finished.result.load_ns < PATIENCE_S * 1e9
    harness.loader.discard(finished.ingest)


def test_a_segment_of_ours_is_settled_however_young(harness: Harness) -> None:
    """A client may offer it: it never changes, as long as it is an image."""
    began_ns = time.time_ns()
    finished = harness.load()
    assert finished.result is not None
    assert 0 <= finished.result.load_ns <= time.time_ns() - began_ns
    harness.loader.adopt(finished.ingest, DIGEST)
    held = os.dup(harness.loader.segment(DIGEST).descriptor)
    harness.path = Path(f"/proc/self/fd/{held}")
    for is_own in (True, False):
        again = harness.load()
        assert again.result is not None
        assert (again.result.digest, again.result.is_settled) == (DIGEST, is_own)
        harness.loader.discard(again.ingest)
        if is_own:
            harness.loader.drop(DIGEST)
    os.close(held)


def test_discard(harness: Harness) -> None:
    before = open_descriptors()
    finished = harness.load()
    harness.loader.discard(finished.ingest)
    harness.loader.discard(finished.ingest)
    assert open_descriptors() <= before


def test_a_known_image_is_only_hashed(harness: Harness) -> None:
    harness.loader.adopt(harness.load().ingest, DIGEST)
    finished = harness.load(is_likely_known=True)
    assert finished.segment is None
    assert finished.result is not None
    assert (finished.result.digest, finished.result.resident_bytes) == (DIGEST, 0)


def test_without_room_a_wrong_hint_takes_none(harness: Harness) -> None:
    harness.loader.adopt(harness.load().ingest, DIGEST)
    held = harness.memory.held_bytes()
    finished = harness.load(is_likely_known=True, is_only_hashed=True)
    assert finished.result is not None
    assert (finished.result.digest, finished.segment) == (DIGEST, None)
    harness.path.write_bytes(b"other")
    finished = harness.load(is_likely_known=True, is_only_hashed=True)
    assert (finished.result, finished.segment) == (None, None)
    assert isinstance(finished.error, FileChanged)
    assert harness.memory.held_bytes() == held


def test_a_wrong_hint_costs_a_second_read(harness: Harness) -> None:
    harness.loader.adopt(harness.load().ingest, DIGEST)
    harness.path.write_bytes(b"other")
    finished = harness.load(is_likely_known=True)
    assert finished.segment is not None
    assert finished.result is not None
    assert finished.result.digest == blake3(b"other").hexdigest()
    harness.loader.discard(finished.ingest)


def test_the_meter_never_goes_back(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client takes a meter that stands still for a daemon that does."""
    seen = []

    class Watched(loader_module.Meter):
        def __setattr__(self, name: str, value: int) -> None:
            if name == "done_bytes":
                seen.append(value)
            super().__setattr__(name, value)

    monkeypatch.setattr(loader_module, "Meter", Watched)
    harness.load(is_likely_known=True)
    assert seen == sorted(seen)
    assert seen[-1] == 2 * len(CONTENT)
    assert len(set(seen)) > 2


class TestSettled:
    def test_depends_on_the_age_of_the_change(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """ctime counts too: mtime can be set back by anybody who writes."""
        status = os.stat(harness.path)
        changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
        major = os.major(status.st_dev)
        for local, quiet_ns in ((True, 100_000_000), (False, 2_000_000_000)):
            majors = frozenset({major} if local else ())
            monkeypatch.setattr(file_systems, "_LOCAL_DEVICE_MAJORS", majors)
            for age_ns, expected in ((quiet_ns, False), (quiet_ns + 1, True)):
                monkeypatch.setattr(time, "time_ns", lambda age=age_ns: changed_ns + age)
                result = harness.load().result
                assert result is not None
                assert result.is_settled is expected, (local, age_ns)


class TestErrors:
    def test_a_file_that_is_not_what_it_was(self, harness: Harness) -> None:
        status = os.stat(harness.path)
        os.utime(harness.path, ns=(5, 5))
        finished = harness.load(identity=Identity.from_stat(status))
        assert isinstance(finished.error, FileChanged)
        assert (finished.result, finished.segment) == (None, None)

    def test_a_file_that_became_shorter(self, harness: Harness) -> None:
        status = os.stat(harness.path)
        os.truncate(harness.path, 10)
        finished = harness.load(identity=Identity.from_stat(status))
        assert isinstance(finished.error, FileChanged), finished.error
        assert "shorter" in str(finished.error)

    def test_no_memory_is_no_space(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(size_bytes: int) -> WritableSegment:
            raise MemoryFailure("nothing left")

        monkeypatch.setattr(harness.memory, "create", fail)
        error = harness.load().error
        assert isinstance(error, NoSpace)
        assert str(error) == "/model: nothing left"

    def test_an_error_of_the_system(
        self,
        harness: Harness,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fail(size_bytes: int) -> WritableSegment:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(harness.memory, "create", fail)
        assert str(harness.load().error) == "/model: [Errno 5] Input/output error"
        assert caplog.records == [], "who asked is told"

    def test_a_bug_is_written_down(
        self,
        harness: Harness,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(harness.memory, "create", lambda size: None)
        assert isinstance(harness.load().error, ReadFailed)
        (record,) = caplog.records
        assert record.getMessage() == "load of /model failed"
        assert record.exc_info

    def test_a_panic(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        """Libraries in Rust raise what is no Exception."""

        def panic(size_bytes: int) -> WritableSegment:
            raise BaseException("no threads")

        monkeypatch.setattr(harness.memory, "create", panic)
        assert isinstance(harness.load().error, ReadFailed)


def test_a_server_with_an_error_for_who_closes_its_file(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a load whose file (FUSE) could not be closed without one never ended."""
    close = os.close

    def fail(descriptor: int) -> None:
        is_the_file = os.readlink(f"/proc/self/fd/{descriptor}") == str(harness.path)
        close(descriptor)
        if is_the_file:
            raise OSError(errno.EIO, "the server is not content")

    monkeypatch.setattr(os, "close", fail)
    finished = harness.load()
    assert finished.error is None
    harness.loader.discard(finished.ingest)


def test_jobs_come_back_to_the_caller(harness: Harness) -> None:
    results: list[object] = []
    harness.loader.run(lambda: 6 * 7, results.append)
    harness.loader.run(lambda: 1 // 0, results.append)
    harness.loader.run(lambda: sys.exit("a panic"), results.append)
    for _ in range(3):
        harness.woken.get(timeout=PATIENCE_S)
    assert results == []
    for job in harness.loader.take_jobs():
        job()
    assert 42 in results
    assert any(isinstance(each, ZeroDivisionError) for each in results)
    assert any(isinstance(each, ReadFailed) and "a panic" in str(each) for each in results)


def test_closing_frees_what_was_not_fetched(no_leak: None, tmp_path: Path) -> None:
    harness = Harness(tmp_path / "model")
    harness.load()
    harness.loader.close()


def test_closing_closes_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Harness(tmp_path / "model").loader
    closed: list[None] = []
    monkeypatch.setattr(loader.memory, "close", lambda: closed.append(None))
    loader.close()
    assert len(closed) == 1


def test_meters_show_loads_under_way(harness: Harness) -> None:
    work: list[Callable[[], None]] = []

    harness.loader._pool.submit = lambda f, *args: work.append(lambda: f(*args))  # type: ignore[method-assign, assignment, return-value, misc]
    descriptor = os.open(harness.path, os.O_RDONLY)
    opening = Opening(1, 1, 0, Identity.from_stat(os.fstat(descriptor)), "/model")
    harness.loader.start(StartIngest(9, opening, False), descriptor)
    assert harness.loader.meters()[9].done_bytes == 0
    work[0]()
    assert harness.loader.meters()[9].done_bytes == len(CONTENT)
    harness.loader.take_finished()
    assert harness.loader.meters() == {}


def test_loads_that_are_stuck_keep_nobody_waiting(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are threads read from a server that is gone."""
    monkeypatch.setattr(loader_module, "_STUCK_AFTER_S", 0.05)
    is_back, fill = threading.Event(), ingest.fill

    def hang(descriptor: int, view: memoryview, **arguments: Any) -> str:
        if arguments["name"] == "/hung":
            is_back.wait()
        return fill(descriptor, view, **arguments)

    monkeypatch.setattr(ingest, "fill", hang)
    identity = Identity.from_stat(harness.path.stat())
    for number in range(100, 100 + loader_module.CONCURRENT_LOADS):
        opening = Opening(1, 1, 0, identity, "/hung")
        descriptor = os.open(harness.path, os.O_RDONLY)
        harness.loader.start(StartIngest(number, opening, False), descriptor)
    wait_until(lambda: harness.loader.stuck_count() == loader_module.CONCURRENT_LOADS)
    harness.loader.tend()
    assert harness.load().error is None
    is_back.set()
    ended: list[Finished] = []
    wait_until(lambda: ended.extend(harness.loader.take_finished()) or len(ended) == 4)
    assert [each.error for each in ended] == [None] * 4
    assert harness.loader.stuck_count() == 0
    for each in ended:
        harness.loader.discard(each.ingest)


def test_what_goes_on_counting_is_not_stuck_before_a_worker_has_it(tmp_path: Path) -> None:
    """Found: a load for those who had waited for another one was, where it waited for its turn."""
    path = tmp_path / "model"
    path.write_bytes(CONTENT)
    pool = Later()
    memory = MemfdMemory(SegmentKind.MEMFD)
    loader = Loader(memory, threads=1, wake=lambda: None, pool=pool)
    opening = Opening(1, 1, 0, Identity.from_stat(path.stat()), "/model")
    meter = ingest.Meter(len(CONTENT))
    loader.start(StartIngest(1, opening, False), os.open(path, os.O_RDONLY), meter=meter)
    (load,) = loader._loads.values()
    assert not any(load.is_stuck(now_s) for now_s in (0.0, 1000.0))
    pool.run()
    (finished,) = loader.take_finished()
    assert finished.error is None
    assert meter.done_bytes == 2 * len(CONTENT)
    loader.discard(1)
    loader.close()


def test_the_end_waits_for_loads_that_are_not_stuck(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back, is_closing = threading.Event(), threading.Event()
    begun: list[str] = []
    ended: list[str] = []

    def fill(*_: Any, name: str, meter: ingest.Meter, **__: Any) -> str:
        begun.append(name)
        if name == "/hung":
            meter.done_bytes = 1
            assert is_back.wait(PATIENCE_S)
        else:
            assert is_closing.wait(PATIENCE_S)
            time.sleep(0.05)  # It works.
        ended.append(name)
        return DIGEST

    def is_stuck(load: Any, _: float) -> bool:
        return bool(load.meter.done_bytes == 1)

    monkeypatch.setattr(ingest, "fill", fill)
    monkeypatch.setattr(loader_module.Load, "is_stuck", is_stuck)
    identity = Identity.from_stat(harness.path.stat())
    for number, name in enumerate(("/hung", "/fine")):
        opening = Opening(1, 1, 0, identity, name)
        descriptor = os.open(harness.path, os.O_RDONLY)
        harness.loader.start(StartIngest(number, opening, False), descriptor)
    wait_until(lambda: len(begun) == 2)
    is_closing.set()
    harness.loader.close()
    is_back.set()
    assert ended[:1] == ["/fine"]
    finished: list[Finished] = []
    wait_until(lambda: finished.extend(harness.loader.take_finished()) or finished != [])
    harness.loader.discard(0)
