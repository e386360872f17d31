"""Who uses a copy keeps it; everything else may go, and half a copy never has its name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import open_descriptors

from trims_shim.client import descriptors
from trims_shim.client.descriptors import OwnDescriptor
from trims_shim.config import ShareOrSize
from trims_shim.daemon.prepared.directory import Space
from trims_shim.errors import RemoteError
from trims_shim.remote import copies as module
from trims_shim.remote.copies import Copies

from .conftest import forget, names_in

LIMIT_S = 60


@pytest.fixture
def copies(home: Path) -> Copies:
    made = Copies(str(home), ShareOrSize(size_bytes=1000))
    made.prepare()
    return made


def keep(copies: Copies, name: str, size_bytes: int = 100, *, used_ns: int = 0) -> Path:
    """A copy that nobody uses; its directory."""
    partial = copies.claim(name)
    assert partial is not None
    (Path(partial.path) / "x.pt").write_bytes(bytes(size_bytes))
    path = copies.publish(partial, name)
    forget()
    os.utime(path, ns=(used_ns, used_ns))
    return Path(path)


# --- the directory --------------------------------------------------------------------------------


def test_nobody_else_can_read_or_change_it(copies: Copies, home: Path) -> None:
    path = keep(copies, "k-1")
    assert [each.stat().st_mode & 0o777 for each in (home.parent, home, path)] == [0o700] * 3
    assert (path / "x.pt").stat().st_mode & 0o777 == 0o400
    home.chmod(0o770)
    with pytest.raises(RemoteError, match="writable by others"):
        copies.prepare()


def test_a_directory_of_another_user_or_a_link_is_refused(home: Path, tmp_path: Path) -> None:
    home.parent.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RemoteError, match="is not a directory"):
        Copies(str(home), ShareOrSize(share=0.5)).prepare()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RemoteError, match=r"is not a directory.*TRIMS_CACHE_DIR"):
        Copies(str(tmp_path / "file" / "remote"), ShareOrSize(share=0.5)).prepare()


def test_no_umask_opens_the_directories_above(home: Path, tmp_path: Path) -> None:
    base = tmp_path / "home" / "cache"
    before = os.umask(0)
    try:
        Copies(str(base / "trims" / "remote"), ShareOrSize(share=0.5)).prepare()
    finally:
        os.umask(before)
    made = (base.parent, base, base / "trims", base / "trims" / "remote")
    assert [each.stat().st_mode & 0o777 for each in made] == [0o700] * 4


def test_root_makes_nothing_in_the_home_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(RemoteError, match="belongs to user"):
        Copies(str(tmp_path / "trims" / "remote"), ShareOrSize(share=0.5)).prepare()
    assert names_in(tmp_path) == []


def test_a_copy_that_others_may_change_is_not_used(copies: Copies) -> None:
    path = keep(copies, "k-1")
    assert copies.use("k-1")
    path.chmod(0o777)
    assert copies.use("k-1") == ""


# --- in use ---------------------------------------------------------------------------------------


def test_what_this_process_uses_is_not_evicted(copies: Copies, home: Path) -> None:
    keep(copies, "k-1")
    assert copies.use("k-1") == str(home / "k-1") == copies.use("k-1")
    assert len(module._held) == 1, "one descriptor, however often it is asked for"
    assert not copies.evict("k-1")
    forget()
    assert copies.evict("k-1")
    assert not copies.evict("k-1")
    assert copies.use("k-1") == ""
    assert names_in(home) == []


def test_a_descriptor_that_another_thread_closes_is_opened_again(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that first use a copy at the same time both open it."""
    keep(copies, "k-1")
    copies.use("k-1")
    is_open = OwnDescriptor.is_open

    def close(self: OwnDescriptor) -> bool:
        monkeypatch.setattr(OwnDescriptor, "is_open", is_open)
        os.close(self.number)
        return True

    monkeypatch.setattr(OwnDescriptor, "is_open", close)
    assert copies.use("k-1")


def test_a_directory_that_the_kernel_cannot_examine_is_not_locked(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the lock stayed, and this process and all others waited for it without end."""
    with monkeypatch.context() as patch:
        patch.setattr(descriptors, "_stamp", lambda _: None)
        with pytest.raises(OSError, match="does not say which directory"):
            copies.claim("k-1")
    partial = copies.claim("k-1")
    assert partial is not None
    partial.release()


def test_threads_that_use_a_copy_at_once_hold_it_once(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(copies, "k-1")
    others = [threading.Thread(target=copies.use, args=("k-1",)) for _ in range(3)]

    def let_another() -> None:
        if others:
            other = others.pop()
            other.start()
            other.join()

    class Held(dict[str, OwnDescriptor]):
        def pop(self, *arguments: Any) -> Any:
            found = super().pop(*arguments)
            let_another()
            return found

        def setdefault(self, *arguments: Any) -> Any:
            let_another()
            return super().setdefault(*arguments)

    monkeypatch.setattr(module, "_held", Held())
    before = open_descriptors()
    assert copies.use("k-1") == str(path)
    assert len(open_descriptors() - before) == 1
    assert not copies.evict("k-1")
    forget()
    assert copies.evict("k-1")


def test_a_copy_that_took_the_place_of_another_is_held_too(copies: Copies) -> None:
    """By hand, or by another process after that."""
    path = keep(copies, "k-1")
    assert copies.use("k-1")
    before = module._held[str(path)]
    shutil.rmtree(path)
    path.mkdir(0o700)
    assert copies.use("k-1")
    assert not copies.evict("k-1")
    assert not before.is_open()


def test_a_directory_that_is_deleted_is_no_copy(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(copies, "k-1")
    utime = os.utime

    def late(*arguments: Any, **options: Any) -> None:
        shutil.rmtree(path)
        utime(*arguments, **options)

    monkeypatch.setattr(os, "utime", late)
    assert copies.use("k-1") == ""


def test_what_was_just_downloaded_is_in_use(copies: Copies) -> None:
    partial = copies.claim("k-1")
    assert partial is not None
    os.utime(partial.path, ns=(10, 10))  # the download took long
    copies.publish(partial, "k-1")
    partial.release()  # what a `finally` does
    assert not copies.evict("k-1")
    assert copies.copies()[0].used_ns > 10


def test_what_is_evicted_before_its_download_is_in_use(
    copies: Copies, before_lock: Callable[..., None], no_leak: None
) -> None:
    """The kernel gives an exclusive lock up before it makes it a shared one."""
    partial = copies.claim("k-1")
    assert partial is not None

    def evict() -> None:
        fcntl.flock(partial.descriptor.number, fcntl.LOCK_UN)
        assert copies.evict("k-1")

    before_lock(evict)
    with pytest.raises(RemoteError, match="fetch it again"):
        copies.publish(partial, "k-1")
    partial.release()
    assert copies.copies() == []


def test_what_others_delete_does_not_give_its_name_to_another_download(
    copies: Copies, home: Path
) -> None:
    """One that is not whole yet, and was begun since."""
    first = copies.claim("k-1")
    assert first is not None
    shutil.rmtree(first.path)
    second = copies.claim("k-1")
    assert second is not None
    (home / "k-1.partial" / "x.pt").write_bytes(b"half")
    with pytest.raises(RemoteError, match="deleted by others meanwhile; fetch it again"):
        copies.publish(first, "k-1")
    first.discard()
    assert second.size_bytes() == 4
    copies.publish(second, "k-1")
    assert names_in(home) == ["k-1"]


HOLDER = """
import os, sys
from trims_shim import config
from trims_shim.remote.copies import Copies
copies = Copies(sys.argv[1], config.current().remote_bytes)
if sys.argv[2] == "use":
    assert copies.use("k-1")
else:
    assert copies.claim("k-1")
if sys.argv[3] == "fork" and os.fork():
    os._exit(0)
if sys.argv[3] == "exec":
    os.execv(sys.executable, [sys.executable, "-c", "print('ready', flush=True); input()"])
print("ready", flush=True)
input()
"""


class Holder:
    """A process that holds a lock; ``how``: it is the one that took it, or a forked child is."""

    def __init__(self, home: Path, what: str, how: str = "itself") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(home), what, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LIMIT_S)[0]
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        """The process, and its child."""
        os.killpg(self.process.pid, signal.SIGKILL)
        with self.process as process:
            assert process.stdout is not None
            process.stdout.read()  # ends with the child


@pytest.fixture
def hold(home: Path) -> Callable[..., Holder]:
    return lambda *how: Holder(home, *how)


def test_a_process_that_takes_each_new_version_does_not_keep_all(copies: Copies) -> None:
    names = ["other-1", "k-1", "k-2", "k-3", "k-4"]
    for name in names:
        keep(copies, name)
    for name in names:
        assert copies.use(name)
    assert [name for name in names if copies.evict(name)] == ["k-1", "k-2"]
    assert len(module._held) == 3


def test_a_version_that_is_asked_for_again_is_one_of_the_newest(copies: Copies) -> None:
    """By digests, or as the remote went back to it."""
    for name in ("k-1", "k-2", "k-3"):
        keep(copies, name)
    for name in ("k-1", "k-2", "k-1", "k-3"):
        assert copies.use(name)
    assert [name for name in ("k-1", "k-2", "k-3") if copies.evict(name)] == ["k-2"]


def test_a_process_that_takes_ever_new_urls_keeps_its_descriptors(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        keep(copies, f"k{number}-1")
    monkeypatch.setattr(os, "sysconf", {"SC_OPEN_MAX": 12}.__getitem__)
    for number in (0, 1, 2, 0, 3):
        assert copies.use(f"k{number}-1")
    assert len(module._held) == 3
    assert module._asked.keys() == module._held.keys()
    assert [copies.evict(f"k{number}-1") for number in range(4)] == [False, True, False, False]


def test_another_process_keeps_it_until_it_is_killed(
    copies: Copies, hold: Callable[..., Holder]
) -> None:
    keep(copies, "k-1")
    holder = hold("use")
    assert not copies.evict("k-1")
    assert copies.use("k-1"), "many may use it"
    forget()
    holder.kill()
    assert copies.evict("k-1")


def test_a_forked_child_keeps_what_its_parent_used(
    copies: Copies, hold: Callable[..., Holder]
) -> None:
    keep(copies, "k-1")
    holder = hold("use", "fork")
    holder.process.wait(LIMIT_S)
    assert not copies.evict("k-1"), "the child lives"
    holder.kill()
    assert copies.evict("k-1")


def test_another_program_does_not_keep_it(copies: Copies, hold: Callable[..., Holder]) -> None:
    keep(copies, "k-1")
    holder = hold("use", "exec")
    assert copies.evict("k-1")
    holder.kill()


# --- in -------------------------------------------------------------------------------------------


def test_one_downloads(copies: Copies, hold: Callable[..., Holder], home: Path) -> None:
    holder = hold("claim")
    assert copies.claim("k-1") is None
    assert not copies.evict("k-1.partial")
    holder.kill()
    (home / "k-1.partial" / "x.pt").write_bytes(b"half")
    partial = copies.claim("k-1")
    assert partial is not None
    assert partial.size_bytes() == 4, "what the killed process left can be resumed"
    assert copies.claim("k-1") is None, "nor another thread"
    partial.release()
    again = copies.claim("k-1")
    assert again is not None
    again.discard()
    assert names_in(home) == []


@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
def test_what_has_the_name_of_a_copy_but_is_no_directory_goes(
    copies: Copies, home: Path, is_link: bool
) -> None:
    """Found: it stayed for good, by the name of what is on the way out."""
    if is_link:
        (home / "k-1").symlink_to(home.parent)
    else:
        (home / "k-1").write_bytes(bytes(400))
    assert (keep(copies, "k-1") / "x.pt").stat().st_size == 100
    assert names_in(home) == ["k-1"]


def test_a_forked_child_does_not_hold_a_download(
    copies: Copies, hold: Callable[..., Holder]
) -> None:
    """Else all would wait for it, although nobody downloads."""
    holder = hold("claim", "fork")
    holder.process.wait(LIMIT_S)
    partial = copies.claim("k-1")
    assert partial is not None
    partial.discard()
    holder.kill()


def test_a_lock_ends_though_a_child_was_forked_at_a_bad_moment(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread, between a descriptor's opening and what says that a child has to close it."""
    inherited = []
    opened = module._opened

    def fork(path: str) -> OwnDescriptor | None:
        descriptor = opened(path)
        if descriptor is not None:
            inherited.append(os.dup(descriptor.number))
        return descriptor

    monkeypatch.setattr(module, "_opened", fork)
    partial = copies.claim("k-1")
    assert partial is not None
    partial.release()
    again = copies.claim("k-1")
    assert again is not None
    copies.publish(again, "k-1")
    forget()
    for number in inherited:
        os.close(number)
    inherited.clear()

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(copies, "_remove", fail)
    with pytest.raises(PermissionError):
        copies.evict("k-1")
    descriptor = opened(os.path.join(copies.directory, "k-1"))
    assert descriptor is not None
    fcntl.flock(descriptor.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    for number in (*inherited, descriptor.number):
        os.close(number)


def test_an_interrupt_does_not_leave_a_claim(
    copies: Copies, before_lock: Callable[..., None]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before_lock(interrupt)
    with pytest.raises(KeyboardInterrupt):
        copies.claim("k-1")
    partial = copies.claim("k-1")
    assert partial is not None
    partial.discard()


def test_a_copy_is_on_the_disk_before_it_has_its_name(
    copies: Copies, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could be empty after a power failure, and look whole."""
    done: list[str] = []
    rename, partial = os.rename, copies.claim("k-1")
    assert partial is not None
    (home / "k-1.partial" / "deep").mkdir()
    (home / "k-1.partial" / "deep" / "x.pt").write_bytes(b"x")

    def renamed(*names: str) -> None:
        done.append("rename")
        rename(*names)

    def synced(number: int) -> None:
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{number}"), home))

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    copies.publish(partial, "k-1")
    before = {"k-1.partial", "k-1.partial/deep", "k-1.partial/deep/x.pt"}
    assert (set(done[:-2]), done[-2:]) == (before, ["rename", "."])


def test_what_was_nearly_published_can_be_resumed(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files can be written to, also by others than root; with its name, never."""
    partial = copies.claim("k-1")
    assert partial is not None
    file = Path(partial.path) / "x.pt"
    file.write_bytes(b"half")

    def end(*_: object) -> None:
        assert file.stat().st_mode & 0o777 == 0o400
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", end)
    with pytest.raises(KeyboardInterrupt):
        copies.publish(partial, "k-1")
    partial.release()
    again = copies.claim("k-1")
    assert again is not None
    assert file.stat().st_mode & 0o777 == 0o600
    again.discard()


def test_a_damaged_copy_is_replaced(copies: Copies, home: Path) -> None:
    path = keep(copies, "k-1", 100)
    os.unlink(path / "x.pt")
    (path / "y").write_bytes(b"")
    keep(copies, "k-1", 200)
    assert names_in(path) == ["x.pt"]
    assert names_in(home) == ["k-1"]


def test_what_is_no_copy_does_not_keep_its_name(copies: Copies, home: Path) -> None:
    for make in (Path.touch, lambda path: path.symlink_to("/nonexistent")):
        make(home / "k-1")
        keep(copies, "k-1")
        assert names_in(home / "k-1") == ["x.pt"]
        assert copies.evict("k-1")


def test_what_a_link_leads_to_keeps_its_mode(copies: Copies, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch()
    other.chmod(0o640)
    for _ in range(2):
        partial = copies.claim("k-1")
        assert partial is not None
        with contextlib.suppress(FileExistsError):
            (Path(partial.path) / "link").symlink_to(other)
        partial.release()
    assert other.stat().st_mode & 0o777 == 0o640


def test_a_copy_stays_where_another_cannot_take_its_place(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(copies, "k-1")
    partial = copies.claim("k-1")
    assert partial is not None
    rename = os.rename

    def fail(source: str, target: str) -> None:
        if source == partial.path:
            raise PermissionError(errno.EACCES, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(PermissionError):
        copies.publish(partial, "k-1")
    assert names_in(path) == ["x.pt"]
    partial.discard()


def test_directories_that_have_nothing_to_sync(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems say EINVAL."""
    sync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    assert names_in(keep(copies, "k-1")) == ["x.pt"]


def test_who_has_it_open_keeps_the_bytes(copies: Copies) -> None:
    path = keep(copies, "k-1", 100)
    with open(path / "x.pt", "rb") as file:
        assert copies.evict("k-1")
        assert file.read() == bytes(100)


def test_the_newest_copy_of_a_url(copies: Copies) -> None:
    assert copies.newest("k") == ""
    keep(copies, "k-1", used_ns=3)
    keep(copies, "k-2", used_ns=5)
    keep(copies, "other-3", used_ns=7)
    partial = copies.claim("k-4")
    assert partial is not None
    assert copies.newest("k") == "k-2"
    partial.discard()


# --- out ------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes(copies: Copies, home: Path) -> None:
    for name, used_ns in (("a-1", 30), ("b-1", 10), ("c-1", 20)):
        keep(copies, name, 300, used_ns=used_ns)
    copies.make_room(100)
    assert names_in(home) == ["a-1", "b-1", "c-1"]
    copies.make_room(101)
    assert names_in(home) == ["a-1", "c-1"]
    copies.use("c-1")
    forget()
    copies.make_room(500)
    assert names_in(home) == ["c-1"]


def test_what_is_in_use_stays_whatever_the_budget(copies: Copies, home: Path) -> None:
    keep(copies, "a-1", 900, used_ns=10)
    keep(copies, "b-1", 100, used_ns=20)
    copies.use("a-1")
    copies.make_room(5000)
    assert names_in(home) == ["a-1"]


def test_what_was_left_half_done_goes_too(copies: Copies, home: Path) -> None:
    keep(copies, "a-1", 400, used_ns=20)
    partial = copies.claim("b-1")
    assert partial is not None
    (home / "b-1.partial" / "x.pt").write_bytes(bytes(400))
    partial.release()
    os.utime(home / "b-1.partial", ns=(10, 10))
    removed = home / ".removed-0123"
    removed.mkdir()
    (removed / "x").write_bytes(bytes(200))
    assert sum(each.size_bytes for each in copies.copies()) == 1000
    copies.make_room(1)
    assert names_in(home) == ["a-1", "b-1.partial"]
    copies.make_room(300)
    assert names_in(home) == ["a-1"]


def test_the_disk_counts_as_well_as_the_budget(
    copies: Copies, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(copies, "a-1", 100, used_ns=10)
    keep(copies, "b-1", 100, used_ns=20)

    def space(directory: str) -> Space:
        return Space(1 << 40, 250 - 100 * len(names_in(home)), is_memory=False)

    monkeypatch.setattr(module, "space_of", space)
    copies.make_room(150)
    assert names_in(home) == ["b-1"]
    with pytest.raises(OSError, match=r"251 B are needed, 101 B more than .*TRIMS") as full:
        copies.make_room(251)
    assert full.value.errno == errno.ENOSPC
    assert names_in(home) == ["b-1"], "all is not enough, so nothing goes"
    copies.make_room(250)
    assert names_in(home) == [], "all is just enough"


# --- at the same moment ---------------------------------------------------------------------------


@pytest.fixture
def before_lock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Do something once, between the opening of a directory and its lock."""
    lock = fcntl.flock

    def arrange(action: Callable[[], object]) -> None:
        def flock(descriptor: int, how: int) -> None:
            monkeypatch.setattr(fcntl, "flock", lock)
            action()
            lock(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", flock)

    return arrange


def test_a_copy_that_goes_while_it_is_taken_is_none(
    copies: Copies, before_lock: Callable[..., None]
) -> None:
    keep(copies, "k-1")
    before_lock(lambda: copies.evict("k-1"))
    assert copies.use("k-1") == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOLCK, "no locks")])
def test_what_cannot_be_locked_is_closed(
    copies: Copies, before_lock: Callable[..., None], no_leak: None, error: BaseException
) -> None:
    """Found: each such call left a descriptor open."""

    def fail() -> None:
        raise error

    keep(copies, "k-1")
    before_lock(fail)
    with pytest.raises(type(error)):
        copies.use("k-1")


def test_a_copy_that_is_replaced_while_it_is_taken_is_none(
    copies: Copies, before_lock: Callable[..., None], no_leak: None
) -> None:
    """What is locked is the old one; anybody may evict the new one."""
    path = keep(copies, "k-1")

    def replace() -> None:
        copies.evict("k-1")
        path.mkdir(0o700)

    before_lock(replace)
    assert copies.use("k-1") == ""


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/nonexistent")])
def test_what_is_no_directory_does_not_keep_a_download_from_its_name(
    copies: Copies, make: Callable[[Path], object]
) -> None:
    """Found: every fetch of this file waited for ever."""
    make(Path(copies.directory) / "k-1.partial")
    assert copies.claim("k-1") is None
    partial = copies.claim("k-1")
    assert partial is not None
    partial.discard()
    partial.release()


def test_a_download_that_goes_while_it_is_claimed_is_none(
    copies: Copies, home: Path, before_lock: Callable[..., None]
) -> None:
    (home / "k-1.partial").mkdir(0o700)
    before_lock(lambda: copies.evict("k-1.partial"))
    assert copies.claim("k-1") is None


@pytest.mark.parametrize("is_back", [False, True], ids=["gone", "back again"])
def test_a_download_that_goes_before_it_is_opened_is_none(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    def opened(path: str) -> None:
        if not is_back:
            os.rmdir(path)

    monkeypatch.setattr(module, "_opened", opened)
    assert copies.claim("k-1") is None


def test_a_copy_that_came_after_another_went_is_not_evicted(
    copies: Copies, home: Path, before_lock: Callable[..., None]
) -> None:
    """What was chosen is the old one; the new one may be in use."""
    keep(copies, "k-1")

    def replace() -> None:
        copies.evict("k-1")
        keep(copies, "k-1")
        assert copies.use("k-1")

    before_lock(replace)
    assert not copies.evict("k-1")
    assert names_in(home) == ["k-1"]


def test_half_a_copy_has_no_name(
    copies: Copies, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends while it deletes."""
    keep(copies, "k-1")

    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", end)
    with pytest.raises(KeyboardInterrupt):
        copies.evict("k-1")
    (left,) = names_in(home)
    assert left.startswith(".removed-")
    assert copies.use("k-1") == ""
    monkeypatch.undo()
    assert copies.evict(left)


def test_a_copy_that_goes_while_it_is_counted(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process evicts it; those beside it are counted all the same."""
    keep(copies, "k-1")
    path = str(keep(copies, "k-2"))
    walk = os.walk

    def going(top: str) -> Iterator[Any]:
        for each in walk(top):
            if top == path:
                shutil.rmtree(path)
            yield each

    monkeypatch.setattr(os, "walk", going)
    monkeypatch.setattr(os, "listdir", lambda _: ["k-0", "k-1", "k-2"])  # k-0 has just gone
    assert {each.name: each.size_bytes for each in copies.copies()} == {"k-1": 100, "k-2": 0}


def test_copies_without_a_directory(home: Path) -> None:
    assert Copies(str(home), ShareOrSize(share=0.5)).copies() == []
    assert Copies(str(home), ShareOrSize(share=0.5)).budget_bytes() > 0
