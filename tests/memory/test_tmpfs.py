"""The private tmpfs: two mounts of it, made by a child, visible to nobody else."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from trims_shim.errors import MemoryFailure
from trims_shim.memory import tmpfs

pytestmark = pytest.mark.usefixtures("no_leak")

BUDGET = 32 << 20
NAMESPACES = {False: ["--mount"], True: ["--mount", "--user", "--map-root-user"]}


@pytest.fixture(params=[False, True], ids=["root", "user_namespace"])
def in_user_namespace(request: pytest.FixtureRequest) -> bool:
    """Whether to use one; skips where the machine's own tools are not allowed to mount either.

    A bug would look like a machine that allows nothing, and the tests would be skipped.
    """
    namespaces = NAMESPACES[request.param]
    mount = "mount -t tmpfs -o huge=within_size none /proc"
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1)")
    if subprocess.run(["unshare", *namespaces, "sh", "-c", mount]).returncode != 0:
        pytest.skip(f"{' '.join(namespaces)}: not allowed on this machine")
    return bool(request.param)


@pytest.fixture
def mounts(in_user_namespace: bool) -> Iterator[tuple[int, int]]:
    mounts = tmpfs.open_tmpfs(BUDGET, in_user_namespace=in_user_namespace)
    yield mounts
    for each in mounts:
        os.close(each)


def test_the_second_mount_is_the_same_files_read_only(mounts: tuple[int, int]) -> None:
    writable, sealed = mounts
    made = os.open("file", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=writable)
    os.write(made, b"content")
    os.close(made)
    readable = os.open("file", os.O_RDONLY, dir_fd=sealed)
    assert os.read(readable, 100) == b"content"
    os.close(readable)
    for name, flags in (("file", os.O_RDWR), ("other", os.O_RDWR | os.O_CREAT)):
        with pytest.raises(OSError) as raised:  # noqa: PT011
            os.open(name, flags, 0o600, dir_fd=sealed)
        assert raised.value.errno == errno.EROFS


def test_they_are_in_no_mount_table(mounts: tuple[int, int]) -> None:
    assert not any(map(os.get_inheritable, mounts))
    device = os.fstat(mounts[0]).st_dev
    with open("/proc/self/mountinfo") as file:
        table = file.read()
    assert " /proc " in table
    assert f" {os.major(device)}:{os.minor(device)} " not in table


def test_this_process_stays_in_its_namespaces(in_user_namespace: bool) -> None:
    """In a process of its own: a namespace that was entered cannot be left."""
    code = (
        "import os; from trims_shim.memory.tmpfs import open_tmpfs\n"
        "names = lambda: [os.readlink(f'/proc/self/ns/{n}') for n in ('user', 'mnt')]\n"
        f"before = names(); open_tmpfs({BUDGET}, in_user_namespace={in_user_namespace})\n"
        "assert names() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class TestRefusal:
    @pytest.mark.parametrize("refused", range(4))
    def test_a_mount_that_is_refused(
        self, in_user_namespace: bool, monkeypatch: pytest.MonkeyPatch, refused: int
    ) -> None:
        real, calls = tmpfs._mount, []

        def mount(flags: int, *, source: bytes = b"tmpfs", options: str = "") -> None:
            calls.append(flags)
            real(-1 if len(calls) == refused + 1 else flags, source=source, options=options)

        monkeypatch.setattr(tmpfs, "_mount", mount)
        with pytest.raises(MemoryFailure, match=r"mount tmpfs .*: Invalid argument"):
            tmpfs.open_tmpfs(BUDGET, in_user_namespace=in_user_namespace)

    def test_a_namespace_that_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        children = []
        fork = os.fork

        def noted_fork() -> int:
            children.append(fork())
            return children[-1]

        monkeypatch.setattr(tmpfs, "_CLONE_NEWUSER", 1)  # no flag of unshare(2)
        monkeypatch.setattr(os, "fork", noted_fork)
        with pytest.raises(MemoryFailure, match="unshare: Invalid argument"):
            tmpfs.open_tmpfs(BUDGET, in_user_namespace=True)
        (child,) = children
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)

    def test_a_child_that_dies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tmpfs, "_send_mounts_and_exit", lambda *_: os._exit(1))
        with pytest.raises(MemoryFailure, match="died"):
            tmpfs.open_tmpfs(BUDGET, in_user_namespace=True)

    @pytest.mark.parametrize(("place", "name"), [(os, "fork"), (socket, "socketpair")])
    def test_a_child_that_cannot_be_asked(
        self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
    ) -> None:
        """Found: no other kind of memory was tried, and the daemon did not start."""

        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(place, name, refuse)
        with pytest.raises(MemoryFailure, match="Operation not permitted"):
            tmpfs.open_tmpfs(BUDGET, in_user_namespace=True)

    def test_a_child_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tmpfs, "_PATIENCE_S", 0.1)
        monkeypatch.setattr(tmpfs, "_send_mounts_and_exit", lambda *_: os.read(os.pipe()[0], 1))
        with pytest.raises(MemoryFailure, match="timed out"):
            tmpfs.open_tmpfs(BUDGET, in_user_namespace=True)
