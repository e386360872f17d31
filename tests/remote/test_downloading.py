"""Bytes arrive in order, whichever part comes first, and again after they stopped coming."""

from __future__ import annotations

import errno
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness import PATIENCE_S

from trims_shim.errors import RemoteUnreachable
from trims_shim.remote import downloading
from trims_shim.remote.downloading import GivenUp, download
from trims_shim.remote.listing import Listing, RemoteFile
from trims_shim.remote.streams import STREAMS

CONTENT = os.urandom(100_000)
PART_BYTES = 1000


class Fake:
    """A remote with one file; ``fails`` is called for each part and says how much of it comes."""

    def __init__(self, *, is_concurrent: bool = True, is_seekable: bool = True) -> None:
        self.is_concurrent = is_concurrent
        self.file = RemoteFile("x.bin", "fake://x.bin", len(CONTENT), "1", is_seekable)
        self.starts: list[int] = []
        self.fails: Callable[[int, int], int] = lambda start, end: end

    def list(self) -> Listing:
        return Listing((self.file,))

    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
        self.starts.append(start)
        last = self.fails(start, len(CONTENT) if end is None else end)
        for at in range(start, last, 400):
            yield CONTENT[at : min(at + 400, last)]
        if end is not None and last < end:
            raise RemoteUnreachable("it stopped")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(downloading, "_FIRST_PAUSE_S", 0.0)


def completed(
    remote: Fake,
    listing: Listing,
    directory: Path,
    progress: Callable[[int], None] = lambda done_bytes: None,
    make_room: Callable[[int], None] = lambda needed_bytes: None,
) -> None:
    download(remote, listing, str(directory), progress=progress, make_room=make_room)


def downloaded(remote: Fake, directory: Path) -> bytes:
    seen: list[int] = []
    completed(remote, remote.list(), directory, seen.append)
    assert seen[-1:] == [len(CONTENT)]
    return (directory / "x.bin").read_bytes()


@pytest.mark.parametrize("is_seekable", [True, False])
@pytest.mark.parametrize("is_concurrent", [True, False])
def test_all_bytes_arrive(is_concurrent: bool, is_seekable: bool, tmp_path: Path) -> None:
    remote = Fake(is_concurrent=is_concurrent, is_seekable=is_seekable)
    assert downloaded(remote, tmp_path) == CONTENT
    assert len(remote.starts) == (100 if is_concurrent and is_seekable else 1)


def test_a_last_part_may_be_shorter_than_the_others(tmp_path: Path) -> None:
    remote = Fake()
    remote.file = replace(remote.file, size_bytes=len(CONTENT) - PART_BYTES // 3)
    completed(remote, remote.list(), tmp_path)
    assert (tmp_path / "x.bin").read_bytes() == CONTENT[: remote.file.size_bytes]


def test_parts_are_read_at_the_same_time_and_not_more_than_memory_is_for(tmp_path: Path) -> None:
    """The first part comes after all others that may be under way, and no further ones begin."""
    remote = Fake()
    others = threading.Semaphore(0)

    def fails(start: int, end: int) -> int:
        if start == 0:
            for _ in range(STREAMS - 1):
                assert others.acquire(timeout=30)
            assert not others.acquire(timeout=0.05), "more parts than streams"
        else:
            others.release()
        return end

    remote.fails = fails
    assert downloaded(remote, tmp_path) == CONTENT


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_goes_on_where_it_ended(is_concurrent: bool, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(CONTENT[:60_500])
    remote = Fake(is_concurrent=is_concurrent)
    assert downloaded(remote, tmp_path) == CONTENT
    assert min(remote.starts) == 60_500


def test_without_ranges_it_begins_again(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"x" * 60_500)
    remote = Fake(is_seekable=False)
    assert downloaded(remote, tmp_path) == CONTENT
    assert remote.starts == [0]


def test_what_is_longer_than_the_file_is_not_of_it(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"x" * (len(CONTENT) + 1))
    assert downloaded(Fake(is_concurrent=False), tmp_path) == CONTENT


def test_nothing_is_asked_for_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(CONTENT)
    remote = Fake()
    completed(remote, remote.list(), tmp_path)
    assert remote.starts == []


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_ends_are_survived_as_long_as_it_goes_on(is_concurrent: bool, tmp_path: Path) -> None:
    """Each attempt brings a little; many more of them than may fail in a row."""
    remote = Fake(is_concurrent=is_concurrent)
    failed: set[int] = set()

    def fails(start: int, end: int) -> int:
        if not is_concurrent:
            return min(end, start + 8000)
        is_first = start % 7000 == 0 and start not in failed
        failed.add(start)
        return start if is_first else end

    remote.fails = fails
    assert downloaded(remote, tmp_path) == CONTENT
    assert len(remote.starts) > downloading._TRIES


def test_ends_within_each_part_are_survived(tmp_path: Path) -> None:
    remote = Fake()
    remote.fails = lambda start, end: min(end, start + 300)
    assert downloaded(remote, tmp_path) == CONTENT
    assert len(remote.starts) == 400, "nothing is asked for twice"


@pytest.mark.parametrize("is_seekable", [True, False])
def test_it_is_given_up_when_nothing_comes(is_seekable: bool, tmp_path: Path) -> None:
    remote = Fake(is_concurrent=False, is_seekable=is_seekable)
    remote.fails = lambda start, end: 5000
    with pytest.raises(RemoteUnreachable, match="it stopped"):
        completed(remote, remote.list(), tmp_path)
    assert (tmp_path / "x.bin").read_bytes() == CONTENT[:5000], "what came can be resumed"
    assert len(remote.starts) == downloading._TRIES


def test_pauses_between_tries_become_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(downloading, "_FIRST_PAUSE_S", 0.25)
    monkeypatch.setattr(time, "sleep", pauses.append)
    remote = Fake(is_concurrent=False)
    remote.fails = lambda start, end: start
    with pytest.raises(RemoteUnreachable, match="it stopped"):
        completed(remote, remote.list(), tmp_path)
    assert pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_what_was_given_up_is_not_tried_again(is_concurrent: bool, tmp_path: Path) -> None:
    """Nor after a piece has come; it stays what it is, for who would ask for a change."""

    class Busy(Fake):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            self.starts.append(start)
            if start >= PART_BYTES:
                raise GivenUp("it is busy")
            yield CONTENT[start:PART_BYTES]
            raise RemoteUnreachable("it stopped")

    remote = Busy(is_concurrent=is_concurrent)
    with pytest.raises(GivenUp):
        completed(remote, remote.list(), tmp_path)
    assert max(map(remote.starts.count, remote.starts)) == 1


@pytest.mark.parametrize("size_bytes", [len(CONTENT) - 5, len(CONTENT) + 5])
def test_another_length_than_was_said_is_an_error(size_bytes: int, tmp_path: Path) -> None:
    class Liar(Fake):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            self.starts.append(start)
            yield CONTENT[start:]

    remote = Liar(is_concurrent=False, is_seekable=False)
    remote.file = RemoteFile("x.bin", "fake://x.bin", size_bytes, "1", False)
    with pytest.raises(RemoteUnreachable, match=f"100000 bytes came, of {size_bytes}"):
        completed(remote, remote.list(), tmp_path)


def test_a_short_part_is_an_error(tmp_path: Path) -> None:
    class Short(Fake):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            yield CONTENT[start : (end or 0) - (end == 6000)]

    remote = Short()
    with pytest.raises(RemoteUnreachable, match="has not its length"):
        completed(remote, remote.list(), tmp_path)
    assert (tmp_path / "x.bin").read_bytes() == CONTENT[:5000]


def test_room_is_made_for_what_was_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a server that says no size, and never ends, filled the disk."""
    monkeypatch.setattr(downloading, "_ROOM_BYTES", 10_000)
    remote = Fake(is_concurrent=False, is_seekable=False)
    announced: list[int] = []
    completed(remote, remote.list(), tmp_path, make_room=announced.append)
    assert announced == []
    remote.file = replace(remote.file, size_bytes=None)
    room: list[int] = []

    def make_room(needed_bytes: int) -> None:
        if sum(room) > len(CONTENT) // 2:
            raise OSError(errno.ENOSPC, "full")
        room.append(needed_bytes)

    completed(remote, remote.list(), tmp_path, make_room=room.append)
    assert (tmp_path / "x.bin").read_bytes() == CONTENT
    assert room[0] == 400, "little is not refused for want of much"
    assert max(room) == 10_000
    assert len(CONTENT) <= sum(room) < len(CONTENT) + 10_000
    room.clear()
    with pytest.raises(OSError, match="full"):
        completed(remote, remote.list(), tmp_path, make_room=make_room)
    assert (tmp_path / "x.bin").stat().st_size <= sum(room)


def test_files_are_counted_together(tmp_path: Path) -> None:
    remote = Fake()
    names = ("bert/a", "bert/deep/b")
    files = tuple(RemoteFile(name, name, len(CONTENT), "1", True) for name in names)
    seen: list[int] = []
    completed(remote, Listing(files), tmp_path, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 2 * len(CONTENT)
    assert {(tmp_path / name).read_bytes() for name in names} == {CONTENT}


SMALL = {f"bert/{number:02}": os.urandom(number + 1) for number in range(3 * STREAMS)}


class Folder(Fake):
    """Many small files, and a large one among them."""

    is_seekable = True

    def __init__(self, **how: bool) -> None:
        super().__init__(**how)
        self.contents = SMALL | {"bert/10": CONTENT}
        self.asked: list[str] = []

    def list(self) -> Listing:
        files = sorted(self.contents.items())
        return Listing(tuple(RemoteFile(n, n, len(c), "1", self.is_seekable) for n, c in files))

    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
        self.asked.append(file.name)
        yield self.contents[file.name][start:end]

    def arrived(self, directory: Path) -> bool:
        return all((directory / n).read_bytes() == c for n, c in self.contents.items())


def test_small_files_are_read_at_the_same_time_and_not_more_than_streams(tmp_path: Path) -> None:
    others = threading.Semaphore(0)

    class Gated(Folder):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            if file.name == "bert/00":
                for _ in range(STREAMS - 1):
                    assert others.acquire(timeout=30)
                assert not others.acquire(timeout=0.05), "more files than streams"
            elif file.name in SMALL:
                others.release()
            yield from super().read(file, start, end)

    remote = Gated()
    remote.contents |= {"bert/0": b"", "bert/01a": b""}  # Which are not asked for.
    seen: list[int] = []
    completed(remote, remote.list(), tmp_path, seen.append)
    assert remote.arrived(tmp_path)
    assert seen == sorted(seen)
    assert seen[-1] == remote.list().size_bytes
    assert {remote.asked.count(name) for name in SMALL if name != "bert/10"} == {1}


def test_files_as_large_as_a_part_are_read_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloading, "PART_BYTES", 2 << 20)
    both = threading.Barrier(2)

    class Meeting(Folder):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            both.wait(timeout=30)
            yield from super().read(file, start, end)

    remote = Meeting()
    remote.contents = {f"bert/{number}": os.urandom(2 << 20) for number in range(2)}
    completed(remote, remote.list(), tmp_path)
    assert remote.arrived(tmp_path)


@pytest.mark.parametrize(("kind", "gone"), [(Folder, ("bert/00", 0)), (Fake, ("x.bin", 0))])
def test_what_is_read_at_once_ends_with_the_download(
    kind: type[Fake], gone: tuple[str, int], tmp_path: Path
) -> None:
    """The other files of a folder, and the other parts of a large file."""
    has_begun, is_over = threading.Event(), threading.Event()

    class Going(kind):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            if (file.name, start) == gone:
                assert has_begun.wait(PATIENCE_S), "nothing else is read"
                raise FileNotFoundError(errno.ENOENT, "it went")
            has_begun.set()
            try:
                for _ in range(30_000):
                    time.sleep(0.01)
                    yield b""
            finally:
                is_over.set()

    with pytest.raises(FileNotFoundError):
        completed(Going(), Going().list(), tmp_path)
    assert is_over.wait(PATIENCE_S)


def test_no_more_than_a_part_of_a_large_file_is_read_ahead(tmp_path: Path) -> None:
    """It would be in memory as a whole."""
    spans: list[int] = []

    class Noting(Folder):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            assert end is not None
            spans.append(end - start)
            yield from super().read(file, start, end)

    remote = Noting()
    completed(remote, remote.list(), tmp_path)
    assert remote.arrived(tmp_path)
    assert max(spans) == PART_BYTES


@pytest.mark.parametrize("kind", ["large file", "folder"])
def test_small_pieces_take_no_more_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may send chunks of two bytes."""
    monkeypatch.setattr(downloading, "PART_BYTES", len(CONTENT))
    files = [RemoteFile(f"x/{each}", "fake://x", len(CONTENT), "1", True) for each in "ab"]
    if kind == "large file":
        files = [RemoteFile("x.bin", "fake://x", 2 * len(CONTENT), "1", True)]

    class Dripping(Fake):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            return (CONTENT[at : at + 2] for at in range(0, len(CONTENT), 2))

    tracemalloc.start()
    try:
        completed(Dripping(), Listing(tuple(files)), tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    whole = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert whole == 2 * CONTENT
    assert peak_bytes < 10 * len(CONTENT), "the pieces of both would take 43 times as much"


@pytest.mark.parametrize("is_seekable", [True, False])
def test_a_small_file_that_fails_is_read_again(is_seekable: bool, tmp_path: Path) -> None:
    class Failing(Folder):
        def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
            if file.name in ("bert/00", "bert/05") and file.name not in self.asked:
                self.asked.append(file.name)
                raise RemoteUnreachable("it stopped")
            yield from super().read(file, start, end)

    remote = Failing()
    remote.is_seekable = is_seekable
    completed(remote, remote.list(), tmp_path)
    assert remote.arrived(tmp_path)
    assert {remote.asked.count(name) for name in ("bert/00", "bert/05")} == {2}


def test_a_folder_is_resumed_without_asking_for_what_is_there(tmp_path: Path) -> None:
    remote = Folder()
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "00").write_bytes(remote.contents["bert/00"])
    (tmp_path / "bert" / "03").write_bytes(remote.contents["bert/03"][:1])
    completed(remote, remote.list(), tmp_path)
    assert remote.arrived(tmp_path)
    assert "bert/00" not in remote.asked
    assert remote.asked.count("bert/03") == 1


def test_files_come_one_after_the_other_where_the_remote_allows_no_more(tmp_path: Path) -> None:
    remote = Folder(is_concurrent=False)
    completed(remote, remote.list(), tmp_path)
    assert remote.arrived(tmp_path)
    assert remote.asked == sorted(remote.contents)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"mine")
    (tmp_path / "x.bin").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"symbolic links"):
        completed(Fake(), Fake().list(), tmp_path)
    assert (tmp_path / "other").read_bytes() == b"mine"


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_a_body_without_end_is_given_up(is_concurrent: bool, tmp_path: Path) -> None:
    """It would fill the memory, or the disk."""
    remote = Fake(is_concurrent=is_concurrent)
    pieces = 0

    def read(*_: object) -> Iterator[bytes]:
        nonlocal pieces
        while True:
            pieces += 1
            assert pieces < 10_000
            yield bytes(400)

    remote.read = read  # type: ignore[method-assign]
    with pytest.raises(RemoteUnreachable, match=r"bytes came|has not its length"):
        completed(remote, remote.list(), tmp_path)
    assert (tmp_path / "x.bin").read_bytes() == b"", "nothing to go on with"


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_messages_have_no_signatures(is_concurrent: bool, tmp_path: Path) -> None:
    remote = Fake(is_concurrent=is_concurrent)
    remote.file = replace(remote.file, place="https://b.example/x.bin?signature=secret")
    remote.read = lambda *_: iter(())  # type: ignore[method-assign]
    with pytest.raises(RemoteUnreachable, match=r"x\.bin: (0 bytes came|a part has)"):
        completed(remote, remote.list(), tmp_path)


def test_without_threads_parts_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert downloaded(Fake(), tmp_path) == CONTENT
