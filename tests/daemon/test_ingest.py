"""The digest is that of the bytes in the segment, and those are the bytes of the file."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from blake3 import blake3

from trims_shim.daemon import ingest
from trims_shim.daemon.ingest import Meter
from trims_shim.errors import FileChanged, ReadFailed
from trims_shim.memory import copying

pytestmark = pytest.mark.usefixtures("no_leak", "no_thread_left")

CHUNK = 1 << 12
MakeFile = Callable[..., str]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", CHUNK)


class Opened:
    """A file and memory of its size, closed at the end; closing fails while a view is alive."""

    def __init__(self, path: str, size: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.memory = mmap.mmap(-1, max(1, size))
        self.view = memoryview(self.memory)[:size]

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.view.release()
        os.close(self.descriptor)
        self.memory.close()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    "size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 7 * CHUNK + 13, 40 * CHUNK]
)
def test_fill(make_file: MakeFile, threads: int, size: int) -> None:
    content = os.urandom(size)
    meter = Meter()
    with Opened(make_file(content), size) as file:
        digest = ingest.fill(file.descriptor, file.view, threads=threads, meter=meter)
        assert bytes(file.view) == content
    assert digest == blake3(content).hexdigest()
    assert meter.done_bytes == size


@pytest.mark.parametrize("size", [0, 1, CHUNK, 3 * CHUNK + 1])
def test_hash_file_and_segment_agree(make_file: MakeFile, size: int) -> None:
    content = os.urandom(size)
    meter = Meter()
    with Opened(make_file(content), size) as file:
        digest = ingest.hash_file(file.descriptor, size, meter=meter)
        if size:
            assert ingest.hash_segment(file.descriptor, size) == digest
    assert digest == blake3(content).hexdigest()
    assert meter.done_bytes == size


WITHOUT_THREADS = """
import os, resource, tempfile
from trims_shim.daemon import ingest
from trims_shim.patches.onnxruntime_models import digest_of
content = os.urandom(3 << 20)
file = tempfile.TemporaryFile()
file.write(content)
file.flush()
if os.geteuid() == 0:  # whom no limit stops
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
digests = {ingest.hash_segment(file.fileno(), len(content)), digest_of(content * 8)}
digests |= {digest_of(content * 8), ingest.hash_segment(file.fileno(), len(content))}
print(len(digests), ingest.hash_file(file.fileno(), len(content), meter=ingest.Meter()) in digests)
"""


def test_hashes_where_the_system_has_no_more_threads() -> None:
    """Found: they panicked, then and ever after, and nobody who waited for a load was told."""
    command = [sys.executable, "-c", WITHOUT_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 True\n", done.stderr


def test_only_the_announced_part_is_read(make_file: MakeFile) -> None:
    """A file that grows meanwhile: its new identity will be read next time."""
    content = os.urandom(3 * CHUNK)
    with Opened(make_file(content + b"more"), len(content)) as file:
        digest = ingest.fill(file.descriptor, file.view, threads=2, meter=Meter())
    assert digest == blake3(content).hexdigest()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("there", [0, 1, CHUNK, 5 * CHUNK + 7])
def test_a_file_that_became_shorter(make_file: MakeFile, threads: int, there: int) -> None:
    size = 10 * CHUNK
    with Opened(make_file(os.urandom(there)), size) as file:
        with pytest.raises(FileChanged, match="became shorter") as caught:
            ingest.fill(file.descriptor, file.view, threads=threads, meter=Meter())
        file.view.release()
        # The error (held by pytest, as by a log) must not keep the segment's memory mapped.
        file.memory.close()
        assert caught.value.__traceback__ is not None


def test_hash_file_of_a_file_that_became_shorter(make_file: MakeFile) -> None:
    with Opened(make_file(b"12"), 3) as file, pytest.raises(FileChanged):
        ingest.hash_file(file.descriptor, 3, meter=Meter())


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_kernel(threads: int) -> None:
    with Opened("/", 3 * CHUNK) as directory:
        with pytest.raises(ReadFailed, match=r"model: .*[Dd]irectory"):
            ingest.fill(
                directory.descriptor, directory.view, threads=threads, meter=Meter(), name="model"
            )
        with pytest.raises(ReadFailed):
            ingest.hash_file(directory.descriptor, 5, meter=Meter())


def test_a_reader_that_dies_ends_the_load(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a reader dies of: the hasher must not wait for ever."""

    def die(*_: object) -> int:
        raise MemoryError("none left")

    with Opened(make_file(bytes(3 * CHUNK)), 3 * CHUNK) as file:
        monkeypatch.setattr(os, "preadv", die)
        with pytest.raises(ReadFailed, match="MemoryError"):
            ingest.fill(file.descriptor, file.view, threads=2, meter=Meter())


def test_no_reader_is_left_when_threads_run_out(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    size = 100 * CHUNK
    with Opened(make_file(bytes(size)), size) as file:
        monkeypatch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(RuntimeError, match="new thread"):
            ingest.fill(file.descriptor, file.view, threads=2, meter=Meter())
        assert not begun[0].is_alive()


def test_short_reads_are_continued(make_file: MakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:100]], at))
    content = os.urandom(2 * CHUNK + 5)
    with Opened(make_file(content), len(content)) as file:
        digest = ingest.fill(file.descriptor, file.view, threads=2, meter=Meter())
        assert bytes(file.view) == content
    assert digest == blake3(content).hexdigest()
