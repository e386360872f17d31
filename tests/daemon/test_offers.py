"""What clients offer is looked at and closed without waiting for whoever serves it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import wait_until

from trims_shim.daemon import offers, workers
from trims_shim.daemon.offers import (
    Closer,
    FileStatus,
    Offer,
    check_readable_file,
    is_file,
    status_of,
)
from trims_shim.daemon.workers import Workers
from trims_shim.errors import AccessDenied, ReadFailed
from trims_shim.memory.memfd import new_memfd
from trims_shim.specs import Identity
from trims_shim.wire.messages import FileOffer


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[int]:
    """A file of 5 bytes."""
    (tmp_path / "file").write_bytes(b"12345")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    with contextlib.suppress(OSError):
        os.close(descriptor)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are on servers."""
    monkeypatch.setattr(offers, "_STATX_ATTR_NODUMP", 0)


def is_open(descriptor: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")


class TestStatus:
    def test_is_that_of_fstat(self, opened: int) -> None:
        memory = new_memfd("test")
        try:
            for descriptor in (opened, memory):
                expected = os.fstat(descriptor)
                status = status_of(descriptor)
                assert status.identity == Identity.from_stat(expected)
                assert (status.mode, status.links) == (expected.st_mode, expected.st_nlink)
                assert status.is_local
        finally:
            os.close(memory)

    def test_without_statx(self, opened: int, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = status_of(opened)
        for absent in (None, lambda *_: -1):
            monkeypatch.setattr(offers, "_statx", absent)
            assert status_of(opened) == expected

    def test_a_file_that_the_kernel_says_nothing_of(
        self, opened: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int) -> FileStatus:
            raise OSError("Transport endpoint is not connected")

        monkeypatch.setattr(offers, "status_of", fail)
        with pytest.raises(ReadFailed, match="not connected"):
            check_readable_file(opened)

    def test_the_kernel_asks_no_server_for_it(
        self, opened: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []

        def note(descriptor: int, path: bytes, flags: int, mask: int, found: object) -> int:
            asked.append(flags)
            return -1  # as an old kernel does

        monkeypatch.setattr(offers, "_statx", note)
        assert status_of(opened).identity == Identity.from_stat(os.fstat(opened))
        assert asked[0] & 0x4000  # AT_STATX_DONT_SYNC

    def test_a_file_whose_server_is_gone_may_be_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(descriptor: int) -> FileStatus:
            raise OSError

        monkeypatch.setattr(offers, "status_of", fail)
        assert is_file(0)


class TestOffer:
    def test_there_may_be_none(self) -> None:
        offer = Offer()
        assert (offer.message.ticket, offer.descriptor) == (0, -1)

    def test_is_looked_at_once(self, opened: int, monkeypatch: pytest.MonkeyPatch) -> None:
        with Offer(FileOffer(1), opened, Closer()) as offer:
            identity = offer.identity()
            with monkeypatch.context() as unseen:
                unseen.setattr(offers, "status_of", None)
                assert offer.identity() == identity
        assert not is_open(opened)
        offer.close()

    def test_stands_for_another_file(self, opened: int) -> None:
        with open(os.devnull) as other:
            offer = Offer(FileOffer(1), opened)
            assert offer.identity().size_bytes == 5
            with pytest.raises(OSError, match="Bad file"):
                offer.replace(-1)
            assert offer.identity().size_bytes == 5
            offer.replace(other.fileno())
            assert not is_open(opened) or opened == offer.descriptor
            with pytest.raises(AccessDenied):
                offer.identity()
            offer.close()

    @pytest.mark.usefixtures("remote")
    def test_of_a_server_is_closed_by_a_thread(self, opened: int) -> None:
        """Whether it was looked at or not."""
        for is_looked_at in (True, False):
            closed: list[int] = []
            closer: Any = SimpleNamespace(close=closed.append)
            offer = Offer(FileOffer(1), opened, closer)
            if is_looked_at:
                offer.identity()
            offer.close()
            assert closed == [opened]


class TestCloser:
    def test_local_files_at_once(self, opened: int) -> None:
        before = set(threading.enumerate())  # those of other tests may end
        closer = Closer()
        closer.close(opened)
        assert not is_open(opened)
        closer.tend()
        closer.shutdown()
        assert set(threading.enumerate()) <= before

    @pytest.mark.parametrize("is_offered", [False, True])
    def test_an_error_of_the_close_is_the_end_of_it(
        self, opened: int, is_offered: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The number may be another file's by then."""
        closed: list[int] = []

        close = os.close

        def fail(descriptor: int) -> None:
            if descriptor != opened:  # of a thread of another test
                return close(descriptor)
            closed.append(descriptor)
            raise OSError("the server is not content")

        closer = Closer()
        offer = Offer(FileOffer(1), opened, closer)
        if is_offered:
            offer.identity()
        monkeypatch.setattr(os, "close", fail)
        offer.close()
        closer.shutdown()
        monkeypatch.undo()
        assert closed == [opened]

    def test_without_a_thread(
        self, opened: int, remote: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail)
        Closer().close(opened)
        assert not is_open(opened)

    def test_others_by_a_thread(self, opened: int, remote: None) -> None:
        before = set(threading.enumerate())
        closer = Closer()
        closer.close_all([os.dup(opened), opened])
        wait_until(lambda: not is_open(opened))
        closer.shutdown()
        wait_until(lambda: set(threading.enumerate()) <= before)

    @pytest.mark.parametrize("kind", ["memory", "deleted", "device"])
    def test_what_may_take_long_by_a_thread(
        self, kind: str, opened: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: nobody was answered while gigabytes were freed, or a device was let go."""
        closing: list[int] = []
        monkeypatch.setattr(
            Workers, "submit", lambda _, close, descriptor: closing.append(descriptor)
        )
        closer = Closer()
        if kind == "deleted":
            offer = Offer(FileOffer(1), opened, closer)
            offer.identity()
            (tmp_path / "file").unlink()
        else:
            taken = new_memfd("test") if kind == "memory" else os.open(os.devnull, os.O_RDONLY)
            offer = Offer(FileOffer(1), taken, closer)
        descriptor = offer.descriptor
        offer.close()
        closer.shutdown()
        assert closing == [descriptor]
        if descriptor != opened:
            os.close(descriptor)

    def test_a_file_whose_server_is_gone_by_a_thread(
        self, opened: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int) -> FileStatus:
            raise OSError

        monkeypatch.setattr(offers, "status_of", fail)
        closing: list[str] = []
        monkeypatch.setattr(Workers, "submit", lambda *_: closing.append("by a thread"))
        closer = Closer()
        closer.close(opened)
        closer.shutdown()
        assert closing == ["by a thread"]

    def test_what_is_stuck_is_left_to_another_thread(
        self, opened: int, remote: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers, begun = threading.Event(), threading.Event()
        close = os.close
        dead = os.dup(opened)

        def close_slowly(descriptor: int) -> None:
            if descriptor == dead:
                begun.set()
                assert answers.wait(60)
            close(descriptor)

        closer = Closer()
        monkeypatch.setattr(os, "close", close_slowly)
        closer.close(dead)
        assert begun.wait(60)
        closer.close(opened)
        closer.tend()
        assert is_open(opened), "not stuck for long"
        monkeypatch.setattr(workers, "_STUCK_AFTER_S", 0.0)
        closer.tend()
        wait_until(lambda: not is_open(opened))
        assert is_open(dead)
        closer.shutdown()
        answers.set()
        wait_until(lambda: not is_open(dead))
        wait_until(lambda: closer._workers is not None and not closer._workers._begun)


class TestReadableFile:
    @pytest.fixture
    def check(self) -> Callable[..., FileStatus]:
        def check(path: str, flags: int) -> FileStatus:
            descriptor = os.open(path, flags)
            try:
                return check_readable_file(descriptor)
            finally:
                os.close(descriptor)

        return check

    @pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
    def test_a_readable_file(
        self, check: Callable[..., object], tmp_path: Path, flags: int
    ) -> None:
        (tmp_path / "file").write_bytes(b"12345")
        status = check(str(tmp_path / "file"), flags)
        assert isinstance(status, FileStatus)
        assert status.identity.size_bytes == 5

    @pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_PATH], ids=["O_WRONLY", "O_PATH"])
    def test_not_open_for_reading(
        self, check: Callable[..., object], tmp_path: Path, flags: int
    ) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(AccessDenied, match="not open for reading"):
            check(str(tmp_path / "file"), flags)

    def test_not_a_file(self, check: Callable[..., object], tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for path in (str(tmp_path), str(tmp_path / "fifo"), "/dev/null"):
            with pytest.raises(AccessDenied, match="not a regular file"):
                check(path, os.O_RDONLY | os.O_NONBLOCK)
