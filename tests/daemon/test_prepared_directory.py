"""Where prepared models are kept: by the settings, and only where it is safe."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trims_shim import config
from trims_shim.daemon.prepared import directory as prepared_directory
from trims_shim.daemon.prepared.directory import (
    PreparedSettings,
    Space,
    examine,
    problem_of,
    space_of,
)
from trims_shim.daemon.prepared.files import PreparedFiles
from trims_shim.directories import directory_of
from trims_shim.errors import NotServed


def test_it_is_below_the_users_cache_directory_unless_set() -> None:
    assert (
        directory_of("", cache_home="/home/x/.cache", name="prepared")
        == "/home/x/.cache/trims/prepared"
    )
    assert (
        directory_of("/big/disk", cache_home="/home/x/.cache", name="prepared")
        == "/big/disk/prepared"
    )
    home = os.path.expanduser("~")
    assert directory_of("~/models", cache_home="/c", name="prepared") == f"{home}/models/prepared"
    assert os.path.isabs(directory_of("here", cache_home="/c", name="prepared"))


def test_settings() -> None:
    loaded = config.load({}, cache_dir="/big", prepared_bytes="25%")
    settings = PreparedSettings.of(loaded)
    assert (settings.directory, settings.problem) == ("/big/prepared", "")
    assert settings.budget.of(1000) == 250
    off = PreparedSettings.of(config.load({}, prepared_bytes="0"))
    assert off.problem == "TRIMS_PREPARED_BYTES=0"
    relative = PreparedSettings.of(config.load({}, cache_dir="here"))
    assert relative.problem == "TRIMS_CACHE_DIR=here is not an absolute path"
    for unset_or_home in ("", "~/x"):
        assert PreparedSettings.of(config.load({}, cache_dir=unset_or_home)).problem == ""


def test_a_name_that_fits_no_packet() -> None:
    assert PreparedSettings.of(config.load({}, cache_dir="/" + "x" * 1490)).problem == ""
    assert "too long" in PreparedSettings.of(config.load({}, cache_dir="/" + "é" * 760)).problem


def test_a_good_one(tmp_path: Path) -> None:
    assert examine(str(tmp_path / "a" / "b" / "prepared")) == ""
    (tmp_path / "prepared").mkdir(0o700)
    assert examine(str(tmp_path / "prepared")) == ""


def test_the_cache_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert examine(str(tmp_path / "link" / "prepared")) == ""


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda path: path.chmod(0o720), "writable by others"),
        (lambda path: path.chmod(0o702), "writable by others"),
        (lambda path: path.chmod(0o1777), "writable by others"),
        (lambda path: path.parent.chmod(0o770), "writable by others"),
        (lambda path: os.chown(path, 65534, -1), "belongs to user 65534"),
        (lambda path: os.chown(path.parent, 65534, -1), "belongs to user 65534"),
        (lambda path: _as_link(path), "is not a directory"),
        (lambda path: (path.rmdir(), path.write_text("")), "is not a directory"),
    ],
    ids=["group", "all", "sticky", "parent", "owner", "parents-owner", "link", "file"],
)
def test_a_bad_one(tmp_path: Path, spoil: Callable[[Path], object], what: str) -> None:
    path = tmp_path / "cache" / "prepared"
    path.mkdir(0o700, parents=True)
    path.parent.chmod(0o700)
    try:
        spoil(path)
    except PermissionError:
        pytest.skip("only root gives files away")
    assert what in examine(str(path))
    assert "TRIMS_CACHE_DIR" in examine(str(path))
    files = PreparedFiles(str(path))
    with pytest.raises(NotServed, match=what) as caught:
        files.open()
    assert caught.value.reason == "prepared_off"
    with pytest.raises((NotServed, OSError)):
        files.make()


def test_what_belongs_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be above our directory, but not be it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status: Any = SimpleNamespace(st_mode=stat.S_IFDIR | 0o755, st_uid=0)
    assert problem_of("/d", status, may_be_roots=True) == ""
    assert problem_of("/d", status, may_be_roots=False) == "/d belongs to user 0"
    status.st_uid = 1
    assert problem_of("/d", status, may_be_roots=True) == "/d belongs to user 1"


def test_a_sticky_cache_directory_will_do(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "prepared"
    path.mkdir(0o700, parents=True)
    path.parent.chmod(0o1777)
    assert examine(str(path)) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write in the home of others")
def test_the_home_of_another_user(tmp_path: Path) -> None:
    """As `sudo -E` leaves it: what root made there would keep that user from having any."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, -1)
    assert "belongs to user 65534" in examine(str(home / ".cache" / "trims" / "prepared"))


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot" in examine(str(tmp_path / "file" / "trims" / "prepared"))
    # Where root may write in principle, only trying shows it.
    with pytest.raises(NotServed, match="cannot be made") as caught:
        PreparedFiles("/proc/trims/prepared").make()
    assert caught.value.reason == "prepared_off"


@pytest.mark.parametrize("right", [os.R_OK, os.W_OK, os.X_OK])
def test_rights_that_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: int) -> None:
    """Also where the kernel asks more than the mode; root has all rights of the mode."""
    path = tmp_path / "prepared"
    monkeypatch.setattr(os, "access", lambda _, asked: not asked & right)
    expected = "" if right == os.R_OK else f"{path} cannot be made: {tmp_path} cannot be written"
    assert examine(str(path)).partition(";")[0] == expected
    path.mkdir(0o700)
    assert examine(str(path)).startswith(f"{path} cannot be written;")


def test_space(tmp_path: Path) -> None:
    space = space_of(str(tmp_path / "not" / "there"))
    status = os.statvfs(tmp_path)
    assert space.total_bytes == status.f_blocks * status.f_frsize
    assert space.spare_bytes < status.f_bavail * status.f_frsize


def test_a_file_system_in_memory() -> None:
    assert space_of("/dev/shm/not/there").is_memory
    assert not space_of("/proc").is_memory


@pytest.mark.parametrize(("total", "left"), [(20 << 30, 1 << 30), (2 << 30, (2 << 30) // 20)])
def test_a_part_of_the_space_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, total: int, left: int
) -> None:
    found = SimpleNamespace(f_blocks=total >> 12, f_frsize=1 << 12, f_bavail=1 << 17)
    monkeypatch.setattr(os, "fstatvfs", lambda _: found)
    assert space_of("/") == Space(total, (1 << 29) - left, is_memory=False)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "fuse.sshfs"])
def test_not_where_other_machines_delete_what_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, exists: bool
) -> None:
    path = tmp_path / "prepared"
    if exists:
        path.mkdir(0o700)
    assert examine(str(path)) == ""
    _mount(tmp_path, kind, monkeypatch)
    assert f"is on {kind}" in examine(str(path))
    assert "TRIMS_CACHE_DIR" in examine(str(path))
    with pytest.raises(NotServed, match="other machines"):
        PreparedFiles(str(path)).make()


@pytest.mark.parametrize("kind", ["ext4", "overlay", "tmpfs", "9p", "fuse.gocryptfs"])
def test_a_local_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _mount(tmp_path, kind, monkeypatch)
    assert examine(str(tmp_path / "prepared")) == ""
    monkeypatch.setattr(prepared_directory, "_MOUNTS", str(tmp_path / "no /proc"))
    assert examine(str(tmp_path / "prepared")) == ""


def _mount(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a directory's file system be of this kind."""
    device = path.stat().st_dev
    table = path / "mountinfo"
    table.write_text(
        "22 27 0:99999 / /proc rw,relatime - proc proc rw\n"
        f"23 27 {os.major(device)}:{os.minor(device)} / /home rw shared:1 - {kind} server:/x rw\n"
    )
    monkeypatch.setattr(prepared_directory, "_MOUNTS", str(table))


def _as_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))
