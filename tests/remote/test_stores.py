"""What fsspec's file systems say, on those that need no network."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from trims_shim.errors import RemoteError, RemoteUnreachable
from trims_shim.remote.stores import StoreFiles, _file

CONTENT = os.urandom(100_000)


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def read(files: StoreFiles, start: int = 0) -> bytes:
    (file,) = files.list().files
    return b"".join(files.read(file, start, file.size_bytes))


def test_a_file(memory: MemoryFileSystem) -> None:
    memory.pipe("/models/vit.pt", CONTENT)
    files = StoreFiles("memory://models/vit.pt")
    (found,) = files.list().files
    assert (found.name, found.size_bytes, found.is_seekable) == ("vit.pt", len(CONTENT), True)
    assert not files.is_concurrent, "nobody says that threads may use it"
    assert read(files) == CONTENT
    assert read(files, 70_000) == CONTENT[70_000:]
    before = files.list().version
    assert files.list().version == before
    memory.pipe("/models/vit.pt", CONTENT[::-1])
    assert files.list().version != before


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder(memory: MemoryFileSystem, end: str) -> None:
    for name in ("config.json", "deep/model.bin"):
        memory.pipe(f"/models/bert/{name}", CONTENT)
    memory.pipe("/models/bertha", CONTENT)
    listing = StoreFiles(f"memory://models/bert{end}").list()
    assert [file.name for file in listing.files] == ["bert/config.json", "bert/deep/model.bin"]


def test_a_folder_on_a_mounted_disk(tmp_path: Path) -> None:
    (tmp_path / "bert" / "deep").mkdir(parents=True)
    (tmp_path / "bert" / "deep" / "model.bin").write_bytes(CONTENT)
    files = StoreFiles(f"file://{tmp_path}/bert")
    (file,) = files.list().files
    assert file.name == "bert/deep/model.bin"
    assert b"".join(files.read(file, 10, file.size_bytes)) == CONTENT[10:]
    before = files.list()
    os.utime(tmp_path / "bert" / "deep" / "model.bin", ns=(1, 1))
    assert files.list() != before


def test_links_in_a_folder_on_a_mounted_disk(tmp_path: Path) -> None:
    """They are what they lead to: also a change of that is seen, and that it is gone."""
    folder, target = tmp_path / "bert", tmp_path / "blob"
    folder.mkdir()
    target.write_bytes(CONTENT)
    (folder / "model.bin").symlink_to("../blob")
    files = StoreFiles(f"file://{folder}")
    before = files.list()
    (file,) = before.files
    assert (file.name, file.size_bytes) == ("bert/model.bin", len(CONTENT))
    assert b"".join(files.read(file, 0, file.size_bytes)) == CONTENT
    os.utime(target, ns=(1, 1))
    assert files.list() != before
    target.unlink()
    with pytest.raises(FileNotFoundError, match="not there"):
        files.list()


def test_what_is_no_file_on_a_mounted_disk(tmp_path: Path) -> None:
    """A pipe seems to be an empty file, and a link to a folder one that cannot be read."""
    pipe, link = tmp_path / "pipes" / "model.bin", tmp_path / "links" / "deep"
    pipe.parent.mkdir()
    link.parent.mkdir()
    os.mkfifo(pipe)
    link.symlink_to("../pipes")
    for asked, what in ((pipe, pipe), (pipe.parent, pipe), (link.parent, link)):
        with pytest.raises(RemoteError, match=f"{what} is no file") as error:
            StoreFiles(f"file://{asked}").list()
        assert not isinstance(error.value, RemoteUnreachable), "no older copy is to be taken"


def test_links_in_a_folder_whose_list_has_sizes_of_links(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of sftp does."""
    memory.pipe("/models/bert/model.bin", CONTENT)
    files = StoreFiles("memory://models/bert")
    find = memory.find

    def listed(*arguments: Any, **keywords: Any) -> dict[str, Any]:
        found: dict[str, Any] = find(*arguments, **keywords)
        return {name: {**info, "type": "link", "size": 7} for name, info in found.items()}

    monkeypatch.setattr(files._files, "find", listed)
    (file,) = files.list().files
    assert file.size_bytes == len(CONTENT)


def test_a_folder_with_the_name_of_an_object() -> None:
    """As s3fs says it; some programs mark a folder by an empty object of its name."""
    sizes = {"b/bert": 0, "b/bert/model.bin": 9, "b/vit.pt": 9}
    objects = {place: {"type": "file", "size": size, "ETag": "1"} for place, size in sizes.items()}

    def find(path: str, *, detail: bool) -> dict[str, Any]:
        below = {place: objects[place] for place in objects if place.startswith(f"{path}/")}
        return below or {path: objects[path]}

    def names(url: str) -> list[str]:
        files = StoreFiles(f"memory://{url}")
        files._path = url.rstrip("/")
        files._files = SimpleNamespace(
            invalidate_cache=lambda: None, info=objects.__getitem__, find=find
        )
        return [file.name for file in files.list().files]

    assert names("b/bert") == ["bert"]
    assert names("b/bert/") == ["bert/model.bin"]
    assert names("b/vit.pt/") == ["vit.pt"]


def test_what_is_not_there(memory: MemoryFileSystem) -> None:
    with pytest.raises(FileNotFoundError, match="not there") as missing:
        StoreFiles("memory://models/none").list()
    assert missing.value.filename == "memory://models/none"
    memory.mkdir("/models/empty")
    with pytest.raises(FileNotFoundError, match="no files"):
        StoreFiles("memory://models/empty/").list()


def test_hostile_names(memory: MemoryFileSystem) -> None:
    # A store may have any key; the memory's own functions would tidy it.
    for key in ("/m/bert/a", "/m/bert/../../x"):
        memory.store[key] = memory.open("/m/x", "wb")
    files = StoreFiles("memory://m/bert")
    found = {key: {"size": 1, "type": "file"} for key in memory.store}
    files._files = SimpleNamespace(
        invalidate_cache=lambda: None,
        info=lambda path: {"type": "directory"},
        find=lambda path, detail: found,
    )
    with pytest.raises(RemoteError, match="no name for a file"):
        files.list()


def test_objects_that_stand_for_folders_are_none(memory: MemoryFileSystem) -> None:
    files = StoreFiles("memory://m/bert")
    found = {"/m/bert/": {"size": 0}, "/m/bert/a": {"size": 1}, "/m/bert/deep/": {"size": 0}}
    files._files = SimpleNamespace(
        invalidate_cache=lambda: None,
        info=lambda path: {"type": "directory"},
        find=lambda path, detail: found,
    )
    assert [file.name for file in files.list().files] == ["bert/a"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="cannot be read: Protocol not known: s4") as error:
        StoreFiles("s4://bucket/x")
    assert not isinstance(error.value, RemoteUnreachable), "no older copy is to be taken"
    with pytest.raises(RemoteError, match=r"cannot be read: .*dropbox"):
        StoreFiles("dropbox://x/y")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(RemoteError, match=r'pip install "trims-shim\[remote\]"'):
        StoreFiles("s3://bucket/x")


def test_what_a_store_remembers_is_not_believed() -> None:
    """s3fs keeps listings, with the ETags of then."""
    files = StoreFiles("memory://bucket/x")
    now, remembered = {"type": "file", "size": 1, "ETag": "2"}, [{"size": 1, "ETag": "1"}]
    files._files = SimpleNamespace(
        invalidate_cache=remembered.clear,
        info=lambda path: now | (remembered[0] if remembered else {}),
    )
    assert files.list().files[0].token == "ETag=2;"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (FileNotFoundError("bucket/x"), FileNotFoundError),
        (PermissionError(13, "Forbidden"), PermissionError),
        (RuntimeError("unable to locate credentials"), RemoteUnreachable),
        (TimeoutError(), RemoteUnreachable),
    ],
)
def test_errors(raised: Exception, expected: type[Exception]) -> None:
    files = StoreFiles("memory://bucket/x")
    asked: list[str] = []

    def info(path: str) -> None:
        asked.append(path)
        raise raised

    files._files = SimpleNamespace(invalidate_cache=lambda: None, info=info)
    files.is_concurrent = True
    with pytest.raises(expected, match="memory://bucket/x") as error:
        files.list()
    assert error.value.__cause__ is raised
    assert (raised.args or ("TimeoutError()",))[-1] in str(error.value)
    assert len(asked) == 1, "there is no connection that may have ended"


class Connected(AbstractFileSystem):
    """As fsspec's for SFTP: each has one connection, and is kept for its thread."""

    protocol = "connected"
    made: ClassVar[list[Connected]] = []

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = False
        self.made.append(self)

    def check(self) -> None:
        if self.has_ended:
            raise OSError("Socket is closed")

    def info(self, path: str, **_: object) -> dict[str, object]:
        self.check()
        return {"name": path, "type": "file", "size": len(CONTENT), "mtime": 1}

    def open(self, path: str, mode: str = "rb", **_: object) -> io.BytesIO:
        self.check()
        return io.BytesIO(CONTENT)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connected]]:
    monkeypatch.setitem(_registry, "connected", Connected)
    Connected.made.clear()
    yield Connected.made
    Connected.clear_instance_cache()


def test_a_connection_that_has_ended_since_the_last_fetch(connected: list[Connected]) -> None:
    for _ in range(2):
        assert read(StoreFiles("connected://host/vit.pt")) == CONTENT
    (first,) = connected
    first.has_ended = True
    for _ in range(2):
        assert read(StoreFiles("connected://host/vit.pt")) == CONTENT
    assert len(connected) == 2, "one more is kept from then on"


def test_a_connection_that_ends_within_a_download(connected: list[Connected]) -> None:
    files = StoreFiles("connected://host/vit.pt")
    (file,) = files.list().files
    connected[0].has_ended = True
    with pytest.raises(RemoteUnreachable, match="Socket is closed"):
        list(files.read(file, 70_000, file.size_bytes))
    assert b"".join(files.read(file, 70_000, file.size_bytes)) == CONTENT[70_000:]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            PermissionError("the object is\n archived"),
            "access is denied: the object is\\n archived",
        ),
        (PermissionError(13, "Forbidden"), "access is denied: Forbidden"),
        (PermissionError(), "access is denied"),
    ],
)
def test_why_access_is_denied(raised: Exception, said: str) -> None:
    """Not only because of credentials: an object may be archived, or a clock be wrong."""
    files = StoreFiles("memory://bucket/x")

    def info(path: str) -> None:
        raise raised

    files._files = SimpleNamespace(invalidate_cache=lambda: None, info=info)
    with pytest.raises(PermissionError) as error:
        files.list()
    assert error.value.strerror == said


@pytest.mark.parametrize("kind", [RuntimeError, PermissionError])
def test_what_a_store_says_has_no_query_of_a_web_url(kind: type[Exception]) -> None:
    """As aiohttp's errors have it, of ``zip://vit.pt::https://...``; it may hold a signature."""
    files = StoreFiles("memory://bucket/x")

    def info(path: str) -> None:
        raise kind("403, message='Forbidden', url='https://host/x.zip?sp=r&sig=secret', again")

    files._files = SimpleNamespace(invalidate_cache=lambda: None, info=info)
    files.is_concurrent = True
    with pytest.raises((RemoteUnreachable, PermissionError)) as error:
        files.list()
    assert "message='Forbidden', url='https://host/x.zip', again" in str(error.value)


@pytest.mark.parametrize(("is_concurrent", "has_size"), [(False, True), (True, False)])
def test_what_does_not_come_in_parts_comes_in_pieces(
    memory: MemoryFileSystem, is_concurrent: bool, has_size: bool
) -> None:
    """A whole file may be larger than the memory."""
    memory.pipe("/models/vit.pt", bytes((2 << 20) + 1))
    files = StoreFiles("memory://models/vit.pt")
    (file,) = files.list().files
    files.is_concurrent = is_concurrent
    pieces = list(files.read(file, 1, file.size_bytes if has_size else None))
    assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20]


def test_sftp_is_asked_ahead_and_not_for_each_round_trip(memory: MemoryFileSystem) -> None:
    """As paramiko's files are: some megabytes, not all of a file that may not fit in memory."""
    size_bytes = (17 << 20) + 500
    asked: list[tuple[int, int]] = []

    class Ahead(io.BytesIO):
        def prefetch(self, until: int) -> None:
            asked.append((self.tell(), until))

    memory.pipe("/models/vit.pt", content := CONTENT * 180)
    files = StoreFiles("memory://models/vit.pt")
    (file,) = files.list().files
    files._files = SimpleNamespace(open=lambda path, mode: Ahead(content))
    assert b"".join(files.read(file, 5, size_bytes)) == content[5:size_bytes]
    ahead = 8 << 20
    assert asked == [(5, 5 + ahead), (5 + ahead, 5 + 2 * ahead), (5 + 2 * ahead, size_bytes)]


def test_parts_of_what_can_take_several_requests() -> None:
    asked: list[tuple[int, int]] = []

    def cat_file(path: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        return CONTENT[start:end]

    info = {"type": "file", "size": len(CONTENT), "ETag": '"1"'}
    files = StoreFiles("memory://bucket/x")
    files._files = SimpleNamespace(
        invalidate_cache=lambda: None, info=lambda path: info, cat_file=cat_file
    )
    files.is_concurrent = True
    assert read(files, 500) == CONTENT[500:]
    assert asked == [(500, len(CONTENT))]


@pytest.mark.parametrize(
    "name",
    [
        *("ETag", "etag", "generation", "md5Hash", "content_md5", "checksum", "mtime"),
        *("LastModified", "last_modified", "updated", "modified", "modify", "created"),
    ],
)
def test_what_tells_of_a_change(name: str) -> None:
    """Each store has its own name for it. Where there is one, nothing else but the size counts."""
    info = {"size": 1, name: "1", "read": 1}
    assert _file("x", "x", info | {"read": 2}) == _file("x", "x", info)
    assert _file("x", "x", info | {name: "2"}) != _file("x", "x", info)
    assert _file("x", "x", info | {"size": 2}) != _file("x", "x", info)


def test_a_file_that_was_read_has_not_changed() -> None:
    info = {"size": 1, "mtime": 1.0, "time": 1.0}
    assert _file("x", "x", info) == _file("x", "x", info | {"time": 2.0})
    assert not _file("x", "x", {"size": None}).is_seekable


def test_where_nothing_is_known_to_tell_all_has_to() -> None:
    info = {"name": "x", "size": 1, "type": "file", "CRC": 17, "handle": object()}
    assert _file("x", "x", info) == _file("x", "x", info | {"handle": object()})
    assert _file("x", "x", info) != _file("x", "x", info | {"CRC": 18})
    assert _file("x", "x", {"name": "x", "size": 1, "type": "file"}).token == ""


def test_one_that_connects_at_once_is_not_reachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        url = f"ftp://me:secret@127.0.0.1:{taken.getsockname()[1]}/x.pt"
        with pytest.raises(RemoteUnreachable, match=r"ftp://me@127.*refused") as raised:
            StoreFiles(url)
    assert "secret" not in str(raised.value)


def test_what_a_signal_handler_raises_is_no_error_of_the_store(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a time limit of the program's, which the copy from before would hide."""

    def handler(*_: object) -> None:
        raise TimeoutError("the program's own")

    memory.pipe("/models/vit.pt", CONTENT)
    files = StoreFiles("memory://models/vit.pt")
    monkeypatch.setattr(
        MemoryFileSystem, "info", lambda *_, **__: signal.raise_signal(signal.SIGALRM)
    )
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError, match="the program's own"):
            files.list()
    finally:
        signal.signal(signal.SIGALRM, before)
