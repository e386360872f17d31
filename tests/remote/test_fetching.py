"""``trims_shim.fetch``: one download, of what the remote has now, whatever happens meanwhile."""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import trims_shim
from trims_shim.daemon.prepared.directory import Space
from trims_shim.errors import ConfigError, RemoteError, RemoteUnreachable, WrongDigest
from trims_shim.remote import copies, downloading, fetching, streams
from trims_shim.remote import web as web_module
from trims_shim.remote.listing import Listing, RemoteFile
from trims_shim.remote.web import WebFiles

from .conftest import forget, names_in
from .web_server import WebServer

CONTENT = os.urandom(200_000)
OTHER = os.urandom(200_000)
LIMIT_S = 60

pytestmark = pytest.mark.usefixtures("home")


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def wait_until(is_so: Callable[[], object]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "PART_BYTES", 20_000)


# --- once -----------------------------------------------------------------------------------------


def test_it_is_downloaded_once(web: WebServer, home: Path) -> None:
    url = web.put("models/vit.pt", CONTENT)
    path = trims_shim.fetch(url)
    assert read(path) == CONTENT
    assert path.startswith(f"{home}/")
    assert path.endswith("/vit.pt")
    assert web.asked == {"look": 2, "body": 1}
    assert trims_shim.fetch(url) == path
    assert web.asked == {"look": 3, "body": 1}, "one request asks whether it is current"
    events = trims_shim.stats().events
    assert events["fetched:downloaded"] >= 1
    assert events["fetched:there"] >= 1


def test_a_url_that_is_signed_anew_is_the_same_model(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT) + "?X-Amz-Signature="
    path = trims_shim.fetch(url + "one")
    assert trims_shim.fetch(url + "other") == path
    assert web.asked["body"] == 1
    web.files["vit.pt"].status = 403
    with pytest.raises(PermissionError):
        trims_shim.fetch(url + "expired")


def test_a_name_with_a_slash_in_its_last_part_is_one_file(web: WebServer) -> None:
    """As Google Cloud Storage and Firebase have it in the URLs of their API."""
    web.put("o/models/vit.pt", CONTENT)
    url = web.url("o/models%2Fvit.pt?alt=media")
    path = trims_shim.fetch(url)
    assert (os.path.basename(path), read(path)) == ("vit.pt", CONTENT)
    assert trims_shim.fetch(url) == path
    assert web.asked["body"] == 1, "it was there"
    assert read(trims_shim.fetch(url, digest=digest_of(CONTENT))) == CONTENT


def test_large_files_come_in_parts(web: WebServer, small_parts: None) -> None:
    url = web.put("vit.pt", CONTENT)
    assert read(trims_shim.fetch(url)) == CONTENT
    assert web.asked["body"] == 10


def test_a_file_whose_size_nobody_says(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT, has_ranges=False, is_chunked=True)
    path = trims_shim.fetch(url)
    assert read(path) == CONTENT
    assert trims_shim.fetch(url) == path
    assert web.asked["body"] == 1


def test_a_folder_is_a_directory(web: WebServer) -> None:
    url = web.put("bert/", b'<a href="config.json">x</a><a href="deep/">x</a>')
    web.put("bert/deep/", b'<a href="model.bin">x</a>')
    web.put("bert/config.json", b"{}")
    web.put("bert/deep/model.bin", CONTENT)
    path = Path(trims_shim.fetch(url))
    assert path.name == "bert"
    assert (path / "config.json").read_bytes() == b"{}"
    assert (path / "deep" / "model.bin").read_bytes() == CONTENT
    web.put("bert/config.json", b"{1}")
    assert (Path(trims_shim.fetch(url)) / "config.json").read_bytes() == b"{1}"
    assert (path / "config.json").read_bytes() == b"{}"


def test_any_file_system_of_fsspec() -> None:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pipe("/bert/model.bin", CONTENT)
    path = trims_shim.fetch("memory://bert/model.bin")
    assert read(path) == CONTENT
    files.pipe("/bert/model.bin", OTHER)
    assert read(trims_shim.fetch("memory://bert/model.bin")) == OTHER
    assert read(path) == CONTENT
    assert sorted(os.listdir(trims_shim.fetch("memory://bert"))) == ["model.bin"]
    files.store.clear()


PROGRAM = """
import sys
import trims_shim
from trims_shim.remote import downloading, fetching, web
fetching._POLL_S = 0.01
downloading.PART_BYTES = int(sys.argv[2])
web._PATIENCE_S = 600
path = trims_shim.fetch(sys.argv[1])
print(len(open(path, "rb").read()))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that fetches a URL."""
    started = []
    environment = dict(os.environ, TRIMS_CACHE_DIR=str(tmp_path / "cache"), TRIMS_LOG="info")

    def begin(url: str, *, part_bytes: int = 1 << 20) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, str(part_bytes)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def downloading_and_waiting(
    web: WebServer, start: Callable[..., subprocess.Popen[str]], gate: threading.Event
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """A process that downloads until the gate is open, and one that waits for it."""
    url = web.put("vit.pt", CONTENT, gate=gate)
    first = start(url)
    wait_until(lambda: web.asked["body"] == 1)
    second = start(url)
    assert second.stderr is not None
    assert "waited for" in second.stderr.readline()
    return first, second


def test_processes_that_ask_at_once_wait_for_one(
    web: WebServer, start: Callable[..., subprocess.Popen[str]]
) -> None:
    gate = threading.Event()
    url = web.put("vit.pt", CONTENT, gate=gate) + "?X-Amz-Signature=secret"
    processes = [start(url) for _ in range(4)]
    wait_until(lambda: web.asked["look"] == 4 and web.asked["body"] == 1)
    gate.set()
    said = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert [out for out, _ in said] == [f"{len(CONTENT)}\n"] * 4
    waited = [error.count("is being downloaded by another process") for _, error in said]
    assert sorted(waited)[0] == 0
    assert set(waited) <= {0, 1}, "it is said once"
    assert not any("secret" in error for _, error in said)
    assert web.asked["body"] == 1


def test_it_is_said_once_that_another_download_is_waited_for(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(fetching, "_POLL_S", 0.01)
    gate = threading.Event()
    url = web.put("vit.pt", CONTENT, gate=gate)
    first = threading.Thread(target=trims_shim.fetch, args=(url,))
    first.start()
    wait_until(lambda: web.asked["body"] == 1)
    waits = itertools.count(1)
    fetching.fetch(url, waiting=lambda: gate.set() if next(waits) == 3 else None)
    first.join(LIMIT_S)
    assert caplog.text.count("is being downloaded by another process") == 1


def test_a_waiting_process_takes_over_from_a_killed_one(
    web: WebServer, start: Callable[..., subprocess.Popen[str]], home: Path
) -> None:
    gate = threading.Event()
    first, second = downloading_and_waiting(web, start, gate)
    assert web.asked["body"] == 1
    first.kill()
    wait_until(lambda: web.asked["body"] == 2)
    gate.set()
    assert second.communicate(timeout=LIMIT_S)[0] == f"{len(CONTENT)}\n"
    assert [name for name in names_in(home) if name.endswith(".partial")] == []


def test_a_cache_directory_that_is_deleted_is_made_again_by_who_waits(
    web: WebServer, start: Callable[..., subprocess.Popen[str]], home: Path
) -> None:
    gate = threading.Event()
    first, second = downloading_and_waiting(web, start, gate)
    gone = home.parent.rename(home.parent.with_name("gone"))  # as a whole: who waits makes it anew
    shutil.rmtree(gone)
    wait_until(lambda: web.asked["body"] == 2)
    gate.set()
    assert second.communicate(timeout=LIMIT_S)[0] == f"{len(CONTENT)}\n"
    out, err = first.communicate(timeout=LIMIT_S)
    # It finds the other's copy if that is there by then.
    assert out == f"{len(CONTENT)}\n" or "deleted by others meanwhile" in err


def test_a_cache_directory_that_is_deleted_is_not_made_again_as_folders_are(
    web: WebServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the umask, others might write to it, and no later fetch would."""
    web.put("bert/", b'<a href="vit.pt">x</a>')
    web.put("bert/vit.pt", CONTENT)
    download = downloading.download

    def late(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(fetching, "download", download)
        shutil.rmtree(home.parent)
        download(*arguments, **options)

    monkeypatch.setattr(fetching, "download", late)
    with pytest.raises(RemoteError, match="deleted by others meanwhile; fetch it again"):
        trims_shim.fetch(web.url("bert/"))
    assert not home.parent.exists()
    assert read(f"{trims_shim.fetch(web.url('bert/'))}/vit.pt") == CONTENT


def test_waiting_can_be_interrupted(
    web: WebServer, start: Callable[..., subprocess.Popen[str]]
) -> None:
    url = web.put("vit.pt", CONTENT, gate=threading.Event())
    start(url)
    wait_until(lambda: web.asked["body"] == 1)
    second = start(url)
    assert second.stderr is not None
    assert "waited for" in second.stderr.readline()
    second.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in second.communicate(timeout=LIMIT_S)[1]


def test_a_download_can_be_interrupted_though_nothing_comes(
    web: WebServer, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """In all streams; the process does not wait for them."""
    url = web.put("vit.pt", CONTENT, gate=threading.Event())
    process = start(url, part_bytes=20_000)
    wait_until(lambda: web.asked["body"] == streams.STREAMS)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=LIMIT_S)[1]


def test_a_child_that_is_forked_in_the_middle_writes_nothing(web: WebServer) -> None:
    """Found: one of a signal handler's wrote, at its end, what its parent was still to write."""
    parent = os.getpid()

    def fork(*_: int) -> None:
        child = os.fork()
        if child == 0:
            raise SystemExit
        os.waitpid(child, 0)

    try:
        path = fetching.fetch(web.put("vit.pt", CONTENT[:1000]), progress=fork).path
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert read(path) == CONTENT[:1000]


def test_threads_wait_for_one(web: WebServer) -> None:
    gate = threading.Event()
    url = web.put("vit.pt", CONTENT, gate=gate)
    paths: list[str] = []
    threads = [threading.Thread(target=lambda: paths.append(trims_shim.fetch(url))) for _ in "123"]
    for thread in threads:
        thread.start()
    wait_until(lambda: web.asked["look"] == 3 and web.asked["body"] == 1)
    gate.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert web.asked["body"] == 1


def test_a_copy_that_comes_before_the_claim_is_taken(
    web: WebServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has downloaded it after this one looked."""
    url = web.put("vit.pt", CONTENT)
    claim = copies.Copies.claim

    def late(self: copies.Copies, name: str) -> copies.Partial | None:
        monkeypatch.setattr(copies.Copies, "claim", claim)
        trims_shim.fetch(url)
        return claim(self, name)

    monkeypatch.setattr(copies.Copies, "claim", late)
    assert read(trims_shim.fetch(url)) == CONTENT
    assert web.asked["body"] == 1
    assert not any(name.endswith(".partial") for name in names_in(home))


# --- current --------------------------------------------------------------------------------------


def test_a_changed_remote_is_downloaded_and_the_old_copy_stays(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    old = trims_shim.fetch(url)
    web.put("vit.pt", OTHER)
    new = trims_shim.fetch(url)
    assert (read(old), read(new)) == (CONTENT, OTHER)


def test_a_change_during_the_download_begins_it_again(web: WebServer, small_parts: None) -> None:
    """Its parts are of both; equal lengths do not tell."""
    url = web.put("vit.pt", CONTENT, changes_to=[OTHER])
    assert read(trims_shim.fetch(url)) == OTHER


def test_servers_of_one_name_with_different_versions_are_not_mixed(
    web: WebServer, small_parts: None
) -> None:
    """Before and after the download, it is the same one that is asked."""
    url = web.put("vit.pt", CONTENT, odd_one=OTHER)
    assert read(trims_shim.fetch(url)) == CONTENT
    assert not web.files["vit.pt"].odd_one


def test_without_a_tag_two_versions_are_not_mixed(
    web: WebServer, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would tell a part, or the rest of what broke off, from that of another version."""
    url = web.put("vit.pt", CONTENT, tag="", changes_to=[OTHER])
    assert read(trims_shim.fetch(url)) == CONTENT
    url = web.put("broken.pt", CONTENT, tag="", cut_bytes=150_000)
    monkeypatch.setattr(downloading, "_TRIES", 1)
    with pytest.raises(RemoteUnreachable, match="150000 bytes came, of 200000"):
        trims_shim.fetch(url)
    web.put("broken.pt", OTHER, tag="")
    assert read(trims_shim.fetch(url)) == OTHER


@pytest.mark.parametrize("tag", ["", '"1-gzip"', '"2"', 'W/"2"'])
def test_parts_that_may_be_of_another_version_are_given_up(
    tag: str, web: WebServer, small_parts: None, home: Path
) -> None:
    """Those of a server that has no tag for them, too; each stream asks a few times at most."""
    url = web.put("vit.pt", CONTENT, tag='"1"', body_tag=tag)
    with pytest.raises(RemoteUnreachable, match="other bytes than were asked for"):
        trims_shim.fetch(url)
    assert web.asked["body"] <= downloading._TRIES * streams.STREAMS
    (partial,) = names_in(home)
    assert (home / partial / "vit.pt").stat().st_size == 0


@pytest.mark.parametrize("tags", [('"1"', 'W/"1"'), ('W/"1"', '"1"')])
def test_a_tag_may_be_weak_in_one_answer_only(
    tags: tuple[str, str], web: WebServer, small_parts: None
) -> None:
    """As Apache's is in the first second of a file."""
    url = web.put("vit.pt", CONTENT, tag=tags[0], body_tag=tags[1])
    assert read(trims_shim.fetch(url)) == CONTENT


@pytest.mark.parametrize("after", [b"", OTHER[:50_000], OTHER + CONTENT])
def test_a_change_of_the_length_begins_it_again(
    after: bytes, web: WebServer, small_parts: None
) -> None:
    url = web.put("vit.pt", CONTENT, changes_to=[after])
    assert read(trims_shim.fetch(url)) == after


def test_a_file_that_goes_during_the_download_is_a_change(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.put("bert/", b'<a href="a">a</a><a href="b">b</a>')
    web.put("bert/a", CONTENT)
    web.put("bert/b", OTHER)
    read_web = WebFiles.read

    def going(self: WebFiles, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
        web.files.pop("bert/b", None)
        web.put("bert/", b'<a href="a">a</a>')
        return read_web(self, file, start, end)

    monkeypatch.setattr(WebFiles, "read", going)
    assert os.listdir(trims_shim.fetch(url)) == ["a"]


def test_what_another_has_checked_meanwhile_is_not_replaced(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in use; this download is of a version with another tag, so both downloaded."""
    digest = digest_of(CONTENT)
    url = web.put("vit.pt", CONTENT, tag="one")
    download = downloading.download
    inodes = []

    def late(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(fetching, "download", download)
        download(*arguments, **options)
        web.put("vit.pt", CONTENT, tag="two")
        inodes.append(os.stat(trims_shim.fetch(url, digest=digest)).st_ino)
        web.put("vit.pt", CONTENT, tag="one")

    monkeypatch.setattr(fetching, "download", late)
    assert os.stat(trims_shim.fetch(url, digest=digest)).st_ino == inodes[0]


def test_a_remote_that_always_changes(web: WebServer, home: Path) -> None:
    url = web.put("vit.pt", CONTENT, changes_to=[os.urandom(10 + n) for n in range(9)])
    with pytest.raises(RemoteError, match="changes while it is downloaded"):
        trims_shim.fetch(url)
    assert names_in(home) == []


def test_without_a_tag_the_size_decides_and_it_is_said(
    web: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    trims_shim.fetch(web.put("tagged", CONTENT))
    trims_shim.fetch(web.put("empty", b"", tag=""))  # no change of it has the same size
    assert caplog.text == ""
    url = web.put("vit.pt", CONTENT, tag="")
    assert read(trims_shim.fetch(url)) == CONTENT
    assert "neither ETag nor date" in caplog.text
    web.put("vit.pt", OTHER[:-1], tag="")
    assert read(trims_shim.fetch(url)) == OTHER[:-1]
    assert caplog.text.count("neither ETag nor date") == 1  # though it was downloaded twice
    trims_shim.fetch(web.put("resnet.pt", CONTENT, tag=""))
    assert caplog.text.count("neither ETag nor date") == 2


def test_an_unreachable_remote_has_a_copy(web: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    url = web.put("vit.pt", CONTENT)
    first = trims_shim.fetch(url)
    web.put("vit.pt", OTHER)
    second = trims_shim.fetch(url)
    os.utime(Path(first).parent, ns=(1, 1))
    web.put("vit.pt", status=503)
    assert trims_shim.fetch(f"{url}") == second, "the newer one"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "may not be current" in record.getMessage()
    assert "503" in record.getMessage()


def test_a_download_that_breaks_off_has_a_copy_too(
    web: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = web.put("vit.pt", CONTENT)
    path = trims_shim.fetch(url)
    web.put("vit.pt", OTHER, has_ranges=False, cut_bytes=500)
    assert trims_shim.fetch(url) == path
    assert "may not be current" in caplog.text


def test_a_server_that_became_busy_is_not_asked_for_a_change(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been asked often enough."""
    url = web.put("vit.pt", CONTENT)
    monkeypatch.setattr(web_module, "_PAUSES_S", (0.0, 0.0, 0.0))
    look = WebFiles.list
    left: list[str | None] = [None] * 20

    def looked(self: WebFiles) -> Listing:
        found = look(self)
        web.files["vit.pt"].busy = left
        return found

    monkeypatch.setattr(WebFiles, "list", looked)
    with pytest.raises(RemoteUnreachable, match="429 Too Many Requests"):
        trims_shim.fetch(url)
    assert len(left) == 20 - 4


def test_an_unreachable_remote_without_a_copy(web: WebServer) -> None:
    with pytest.raises(RemoteUnreachable, match="503"):
        trims_shim.fetch(web.put("vit.pt", status=503))


@pytest.mark.parametrize(("status", "kind"), [(404, FileNotFoundError), (403, PermissionError)])
def test_what_is_gone_or_forbidden_is_not_given(
    web: WebServer, status: int, kind: type[OSError]
) -> None:
    url = web.put("vit.pt", CONTENT)
    trims_shim.fetch(url)
    web.put("vit.pt", status=status)
    with pytest.raises(kind):
        trims_shim.fetch(url)


def test_a_copy_that_was_damaged_is_replaced(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    path = trims_shim.fetch(url)
    os.unlink(path)
    assert read(trims_shim.fetch(url)) == CONTENT
    os.chmod(path, 0o600)
    os.truncate(path, 5)
    assert read(trims_shim.fetch(url)) == CONTENT


def test_a_folder_that_lacks_a_file_is_replaced(web: WebServer) -> None:
    url = web.put("bert/", b'<a href="config.json">x</a><a href="model.bin">x</a>')
    web.put("bert/config.json", b"{}")
    web.put("bert/model.bin", CONTENT)
    path = Path(trims_shim.fetch(url))
    (path / "model.bin").unlink()
    assert (Path(trims_shim.fetch(url)) / "model.bin").read_bytes() == CONTENT


def test_a_checked_copy_that_was_damaged_is_replaced(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    path = trims_shim.fetch(url, digest=digest_of(CONTENT))
    os.unlink(path)
    assert read(trims_shim.fetch(url, digest=digest_of(CONTENT))) == CONTENT


def test_a_copy_without_its_file_is_not_given(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    os.unlink(trims_shim.fetch(url))
    web.put("vit.pt", status=503)
    with pytest.raises(RemoteUnreachable):
        trims_shim.fetch(url)


def test_a_copy_that_goes_after_it_was_found(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand; its path must not become one of the working directory."""
    url = web.put("vit.pt", CONTENT)
    directory = Path(trims_shim.fetch(url)).parent
    use = copies.Copies.use
    used = []

    def goes(self: copies.Copies, name: str) -> str:
        used.append(name)
        if len(used) == 2:
            shutil.rmtree(directory)
        return use(self, name)

    monkeypatch.setattr(copies.Copies, "use", goes)
    assert trims_shim.fetch(url) == str(directory / "vit.pt")


def test_a_file_of_the_working_directory_is_no_copy(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit.pt").write_bytes(OTHER)
    monkeypatch.chdir(tmp_path)
    assert read(trims_shim.fetch(web.put("vit.pt", CONTENT))) == CONTENT


def test_an_error_after_the_claim_gives_it_up(
    web: WebServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this process would wait for itself when it tries again."""
    url = web.put("vit.pt", CONTENT)
    use = copies.Copies.use
    asked = []

    def fail(self: copies.Copies, name: str) -> str:
        asked.append(name)
        if len(asked) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return use(self, name)

    monkeypatch.setattr(copies.Copies, "use", fail)
    with pytest.raises(OSError, match="Too many open files"):
        trims_shim.fetch(url)
    assert not copies._filling
    assert [name.endswith(".partial") for name in names_in(home)] == [True], "what came stays"
    assert read(trims_shim.fetch(url)) == CONTENT


def test_a_page_in_another_order_is_no_change(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.put("bert/", b'<a href="a">a</a><a href="b">b</a>')
    web.put("bert/a", CONTENT)
    web.put("bert/b", OTHER)
    in_order = WebFiles.list
    steps = itertools.cycle((1, -1))
    monkeypatch.setattr(
        WebFiles, "list", lambda self: Listing(in_order(self).files[:: next(steps)])
    )
    trims_shim.fetch(url)
    assert web.asked["body"] == 4, "two pages, two files"


# --- whole ----------------------------------------------------------------------------------------


def test_what_came_before_the_connection_broke_is_not_asked_for_again(
    web: WebServer, home: Path
) -> None:
    url = web.put("vit.pt", CONTENT, cut_bytes=150_000)
    served = web.files["vit.pt"]
    web.files["vit.pt"].cuts = 1
    assert read(trims_shim.fetch(url)) == CONTENT
    assert served.cuts == 0
    assert web.asked["body"] == 2


def test_parts_are_completed_though_each_connection_breaks(
    web: WebServer, small_parts: None
) -> None:
    url = web.put("vit.pt", CONTENT, cut_bytes=downloading.PART_BYTES // 3)
    assert read(trims_shim.fetch(url)) == CONTENT


def test_a_broken_off_download_is_resumed_by_the_next_call(
    web: WebServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.put("vit.pt", CONTENT, cut_bytes=150_000)
    monkeypatch.setattr(downloading, "_TRIES", 1)
    with pytest.raises(RemoteUnreachable, match="150000 bytes came, of 200000"):
        trims_shim.fetch(url)
    (partial,) = names_in(home)
    assert partial.endswith(".partial")
    assert (home / partial / "vit.pt").stat().st_size == 150_000
    asked: list[int] = []
    read_web = WebFiles.read

    def watched(self: WebFiles, file: object, start: int, end: int | None) -> Iterator[bytes]:
        asked.append(start)
        return read_web(self, file, start, end)  # type: ignore[arg-type]

    monkeypatch.setattr(WebFiles, "read", watched)
    web.files["vit.pt"].cuts = 0
    assert read(trims_shim.fetch(url)) == CONTENT
    assert asked == [150_000]


def test_what_another_version_left_is_not_resumed(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.put("vit.pt", CONTENT, cut_bytes=150_000)
    monkeypatch.setattr(downloading, "_TRIES", 1)
    with pytest.raises(RemoteUnreachable):
        trims_shim.fetch(url)
    web.put("vit.pt", OTHER)
    assert read(trims_shim.fetch(url)) == OTHER


def test_a_wrong_length_is_no_file(web: WebServer, home: Path) -> None:
    url = web.put("vit.pt", CONTENT, has_ranges=False, length=len(CONTENT) + 7)
    with pytest.raises(RemoteUnreachable, match="200000 bytes came, of 200007"):
        trims_shim.fetch(url)
    assert all(name.endswith(".partial") for name in names_in(home))


def test_nothing_is_seen_of_it_before_it_is_whole(web: WebServer, home: Path) -> None:
    gate = threading.Event()
    url = web.put("vit.pt", CONTENT, gate=gate)
    thread = threading.Thread(target=trims_shim.fetch, args=(url,))
    thread.start()
    wait_until(lambda: web.asked["body"])
    assert all(name.endswith(".partial") for name in names_in(home))
    gate.set()
    thread.join(LIMIT_S)
    assert not any(name.endswith(".partial") for name in names_in(home))


def test_a_disk_that_fails_at_the_end_is_told(
    web: WebServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the copy had its name by then, and it was said that others had deleted it."""
    url = web.put("vit.pt", CONTENT)
    sync = copies.sync

    def fail(path: str) -> None:
        if path == str(home):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "sync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            trims_shim.fetch(url)
    assert Path(trims_shim.fetch(url)).read_bytes() == CONTENT
    assert web.asked["body"] == 1


@pytest.mark.parametrize(
    ("when", "number"),
    [
        *(("make_room", errno.ENOSPC), ("download", errno.ENOSPC), ("publish", errno.ENOSPC)),
        *(("download", errno.EDQUOT), ("download", errno.EFBIG)),
    ],
)
def test_a_full_disk_is_an_error_and_nothing_is_left(
    when: str, number: int, web: WebServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where a quota or a limit of the size of files ends it."""
    url = web.put("vit.pt", CONTENT)
    full = OSError(number, os.strerror(number))

    def fail(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr(fetching if when == "download" else copies.Copies, when, fail)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        trims_shim.fetch(url)
    assert raised.value.errno == number
    assert raised.value.filename == str(home)
    assert names_in(home) == []


def test_a_file_without_a_size_may_fill_only_what_is_to_spare(
    web: WebServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloading, "_ROOM_BYTES", len(CONTENT) // 8)
    monkeypatch.setattr(web_module, "_CHUNK_BYTES", len(CONTENT) // 20)
    spare_bytes = len(CONTENT) // 2

    def space(directory: str) -> Space:
        used_bytes = sum(each.stat().st_size for each in home.rglob("*") if each.is_file())
        return Space(1 << 40, spare_bytes - used_bytes, is_memory=False)

    monkeypatch.setattr(copies, "space_of", space)
    url = web.put("vit.pt", CONTENT, has_ranges=False, is_chunked=True)
    with pytest.raises(OSError, match=r"are needed, .* to spare"):
        trims_shim.fetch(url)
    assert names_in(home) == []
    spare_bytes = 2 * len(CONTENT)
    assert read(trims_shim.fetch(url)) == CONTENT


def test_room_is_made_for_what_is_to_be_written(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what a download has left there; and for a copy that has the digest."""
    room: list[int] = []
    monkeypatch.setattr(
        copies.Copies, "make_room", lambda _, needed_bytes: room.append(needed_bytes)
    )
    monkeypatch.setattr(downloading, "_TRIES", 1)
    url = web.put("vit.pt", CONTENT, cut_bytes=150_000, cuts=1)
    with pytest.raises(RemoteUnreachable):
        trims_shim.fetch(url)
    trims_shim.fetch(url)
    trims_shim.fetch(url, digest=digest_of(CONTENT))
    assert room == [200_000, 50_000, 200_000]


def test_a_server_with_hostile_names(web: WebServer, home: Path) -> None:
    web.put("x/../..", CONTENT)
    with pytest.raises(RemoteError, match="no name for a file"):
        trims_shim.fetch(web.url("x/..%2f.."))
    assert names_in(home) == []


# --- digests --------------------------------------------------------------------------------------


def test_a_digest_is_checked_before_the_file_is_there(web: WebServer, home: Path) -> None:
    url = web.put("vit.pt", OTHER)
    with pytest.raises(WrongDigest, match=r"vit.pt: its digest is sha256:.*, not sha256:"):
        trims_shim.fetch(url, digest=digest_of(CONTENT))
    assert names_in(home) == []
    assert read(trims_shim.fetch(url, digest=digest_of(OTHER))) == OTHER


def test_a_digest_that_was_checked_needs_no_server(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    digest = digest_of(CONTENT)
    path = trims_shim.fetch(url, digest=digest)
    web.files.clear()
    web.asked.clear()
    assert trims_shim.fetch(url, digest=digest.upper().replace("SHA", "sha")) == path
    assert web.asked == {}


def test_a_copy_that_has_the_digest_is_not_downloaded_again(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    unchecked = trims_shim.fetch(url)
    web.asked.clear()
    found = fetching.fetch(url, digest=digest_of(CONTENT))
    assert read(found.path) == CONTENT
    assert found.path != unchecked, "the one that needs no server from now on"
    assert found.outcome is fetching.Outcome.THERE
    assert web.asked == {"look": 1}


def test_a_copy_that_was_damaged_is_not_taken_for_the_digest(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    unchecked = trims_shim.fetch(url)
    os.chmod(unchecked, 0o600)
    Path(unchecked).write_bytes(OTHER)
    assert read(trims_shim.fetch(url, digest=digest_of(CONTENT))) == CONTENT


def test_each_digest_has_a_copy_of_its_own(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    assert read(trims_shim.fetch(url, digest=digest_of(CONTENT))) == CONTENT
    web.put("vit.pt", OTHER)
    assert read(trims_shim.fetch(url, digest=digest_of(OTHER))) == OTHER
    assert read(trims_shim.fetch(url, digest=digest_of(CONTENT))) == CONTENT


def test_a_copy_of_another_digest_is_not_given(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    trims_shim.fetch(url)
    web.put("vit.pt", status=503)
    with pytest.raises(RemoteUnreachable):
        trims_shim.fetch(url, digest=digest_of(OTHER))


@pytest.mark.parametrize(
    "digest", ["", "sha256:12", "0" * 64, f"sha256:{'g' * 64}", f"md5:{'0' * 32}", 5]
)
def test_what_is_no_digest(digest: str, web: WebServer) -> None:
    with pytest.raises(ConfigError, match="is no digest"):
        trims_shim.fetch(web.put("vit.pt", CONTENT), digest=digest)


def test_a_folder_has_no_digest(web: WebServer) -> None:
    url = web.put("bert/", b'<a href="a">a</a>')
    web.put("bert/a", CONTENT)
    with pytest.raises(ConfigError, match="a digest is of one file"):
        trims_shim.fetch(url, digest=digest_of(CONTENT))


def test_no_message_has_the_signature_of_a_url(
    web: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    web.put("plain.pt", CONTENT, tag="")
    web.put("bert/", b'<a href="a">a</a>')
    web.put("bert/a", CONTENT)
    web.put("busy.pt", CONTENT, changes_to=[os.urandom(10 + n) for n in range(9)])
    messages = []
    for name, digest in (("plain.pt", OTHER), ("bert/", CONTENT), ("busy.pt", None)):
        url = web.url(name) + "?X-Amz-Signature=secret"
        with pytest.raises((ConfigError, RemoteError)) as raised:
            trims_shim.fetch(url, digest=digest and digest_of(digest))
        messages.append(str(raised.value))
    told = caplog.text + "".join(messages)
    for text in ("neither ETag", "downloading", "its digest is", "is a folder", "changes while"):
        assert text in told
    assert "secret" not in told


# --- room -----------------------------------------------------------------------------------------


def test_what_is_asked_for_stays_even_without_a_budget(
    web: WebServer, home: Path, settings: Callable[..., None]
) -> None:
    settings(TRIMS_REMOTE_BYTES="0")
    one = trims_shim.fetch(web.put("one.pt", CONTENT))
    forget()  # the process has ended
    two = trims_shim.fetch(web.put("two.pt", OTHER))
    assert not os.path.exists(one)
    three = trims_shim.fetch(web.put("three.pt", CONTENT))
    assert read(two) == OTHER, "this process fetched it"
    assert read(three) == CONTENT


def test_paths_are_no_urls() -> None:
    with pytest.raises(ConfigError, match=r"PosixPath\('model.pt'\) is no URL"):
        trims_shim.fetch(Path("model.pt"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is no URL"):
        trims_shim.fetch("/models/vit.pt")


def test_no_descriptor_is_left_by_what_fails(web: WebServer, no_leak: None) -> None:
    with pytest.raises(RemoteUnreachable):
        trims_shim.fetch(web.put("broken", status=500))
    with pytest.raises(WrongDigest):
        trims_shim.fetch(web.put("vit.pt", OTHER), digest=digest_of(CONTENT))
