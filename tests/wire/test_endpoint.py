"""Who owns the directory decides which bytes become weights: nobody else may have made it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trims_shim.config import Config
from trims_shim.errors import ConfigError, DaemonUnavailable, UnusableSocketDir
from trims_shim.wire import endpoint
from trims_shim.wire.endpoint import Endpoint


@pytest.fixture
def short_path() -> Iterator[Path]:
    # Not tmp_path, whose names can be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="trims-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def absent(short_path: Path) -> Endpoint:
    return Endpoint(str(short_path / "trims"))


def _choose(socket_dir: str, *, runtime_dir: str, temp_dir: str = "") -> Endpoint:
    texts = {"socket_dir": socket_dir}
    return endpoint.choose(Config(texts, {}, runtime_dir=runtime_dir, temp_dir=temp_dir))


class TestChoice:
    def test_the_setting_wins(self, tmp_path: Path) -> None:
        chosen = _choose(str(tmp_path / "mine"), runtime_dir=str(tmp_path))
        assert chosen.directory == str(tmp_path / "mine")

    def test_the_setting_is_made_absolute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir("/tmp")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert _choose("here", runtime_dir="").directory == "/tmp/here"
        assert _choose("~/x", runtime_dir="").directory == "/home/somebody/x"

    def test_then_the_runtime_directory(self, short_path: Path) -> None:
        chosen = _choose("", runtime_dir=str(short_path))
        assert chosen.directory == str(short_path / "trims")

    def test_a_relative_one_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run").mkdir()
        assert os.path.isabs(_choose("", runtime_dir="run").directory)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    def test_another_users_are_none(self, tmp_path: Path) -> None:
        """As `su` leaves them to root, who may write there all the same."""
        os.chown(tmp_path, 65534, -1)
        chosen = _choose("", runtime_dir=str(tmp_path), temp_dir=str(tmp_path))
        assert not chosen.directory.startswith(str(tmp_path))

    def test_then_run_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run_user = f"/run/user/{os.geteuid()}"
        monkeypatch.setattr(os.path, "isdir", lambda path: path == run_user)
        monkeypatch.setattr(os, "access", lambda path, mode: True)
        assert _choose("", runtime_dir="/gone").directory == f"{run_user}/trims"

    def test_then_the_temporary_directory(
        self, monkeypatch: pytest.MonkeyPatch, short_path: Path
    ) -> None:
        user = f"trims-{os.geteuid()}"
        monkeypatch.setattr(os.path, "isdir", lambda path: path in ("/tmp", str(short_path)))
        file = short_path / "file"
        file.touch(0o700)
        monkeypatch.chdir(short_path)
        for temp_dir, expected in (
            (short_path, short_path / user),
            ("", f"/tmp/{user}"),
            (".", short_path / user),
            ("/gone", f"/tmp/{user}"),
            (file, f"/tmp/{user}"),
        ):
            chosen = _choose("", runtime_dir="/gone", temp_dir=str(temp_dir))
            assert chosen.directory == str(expected)

    @pytest.mark.parametrize("name", ["d" * 80, b"\xff"], ids=["long", "not_utf_8"])
    def test_one_that_can_hold_no_socket_is_none(
        self, short_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | bytes
    ) -> None:
        """Found: below a job's own, long TMPDIR nothing was shared, although /tmp is there."""
        base = short_path / os.fsdecode(name)
        base.mkdir()
        usable = (str(base), "/tmp")
        monkeypatch.setattr(endpoint, "_is_writable", lambda directory: directory in usable)
        for where in ({"runtime_dir": str(base)}, {"runtime_dir": "", "temp_dir": str(base)}):
            assert _choose("", **where).directory == f"/tmp/trims-{os.geteuid()}"
        assert _choose(str(base), runtime_dir="").directory == str(base)  # and is refused later

    @pytest.mark.parametrize(("usable", "expected"), [("/var/tmp", "/var/tmp"), ("/", "/tmp")])
    def test_at_last_one_of_the_system(
        self, monkeypatch: pytest.MonkeyPatch, usable: str, expected: str
    ) -> None:
        monkeypatch.setattr(endpoint, "_is_writable", lambda directory: directory == usable)
        assert os.path.dirname(_choose("", runtime_dir="/gone").directory) == expected

    @pytest.mark.parametrize("right", [os.W_OK, os.X_OK])
    def test_rights_that_lack(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: int
    ) -> None:
        monkeypatch.setattr(os, "access", lambda _, asked: not asked & right)
        chosen = _choose("", runtime_dir=str(tmp_path))
        assert not chosen.directory.startswith(str(tmp_path))

    def test_a_program_may_still_choose_its_own_temporary_directory(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(endpoint, "_is_writable", lambda directory: directory == "/tmp")
        _choose("", runtime_dir="/gone")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        assert tempfile.gettempdir() == str(tmp_path)


class TestLength:
    def test_the_longest_path_that_works_is_allowed(self, tmp_path: Path) -> None:
        room = 107 - len("/control-0123456789abcdef.sock")
        Endpoint("/" + "x" * (room - 1)).check_path()
        with pytest.raises(ConfigError, match="107"):
            Endpoint("/" + "x" * room).check_path()
        with pytest.raises(ConfigError, match="107"):
            Endpoint(str(tmp_path / ("x" * room))).create()
        assert list(tmp_path.iterdir()) == []

    def test_bytes_count_not_characters(self) -> None:
        with pytest.raises(ConfigError):
            Endpoint("/" + "ü" * 50).check_path()

    def test_not_utf_8(self) -> None:
        with pytest.raises(ConfigError, match=r"not UTF-8.*TRIMS_SOCKET_DIR"):
            Endpoint(os.fsdecode(b"/run/\xff")).check_path()

    def test_no_name_is_longer_than_the_one_that_is_checked(self) -> None:
        names = Endpoint("")
        instance = "0" * 16
        longest = max(
            len(name) for name in (names.control(instance), names.events(instance), names.handover)
        )
        assert longest == len("control-0123456789abcdef.sock")


class TestOwner:
    def test_created_closed_to_others(self, absent: Endpoint) -> None:
        absent.create()
        assert os.stat(absent.directory).st_mode & 0o777 == 0o700
        absent.create()

    def test_parents_are_made(self, tmp_path: Path) -> None:
        deep = Endpoint(str(tmp_path / "a" / "b"))
        deep.create()
        deep.check_owner()

    def test_a_wide_umask(self, tmp_path: Path) -> None:
        """Found: whoever may write to one above it could put another directory in its place."""
        before = os.umask(0)
        try:
            Endpoint(str(tmp_path / "a" / "b" / "c")).create()
        finally:
            os.umask(before)
        modes = [os.stat(tmp_path / each).st_mode & 0o777 for each in ("a", "a/b", "a/b/c")]
        assert modes == [0o755, 0o755, 0o700]

    @pytest.mark.parametrize("umask", [0o777, 0o277])
    def test_a_narrow_umask(self, tmp_path: Path, umask: int) -> None:
        """Found: no program of this user could use the directory, until somebody removed it."""
        before = os.umask(umask)
        try:
            Endpoint(str(tmp_path / "a" / "b")).create()
        finally:
            os.umask(before)
        modes = [os.stat(tmp_path / each).st_mode & 0o777 for each in ("a", "a/b")]
        assert [mode & 0o700 for mode in modes] == [0o700, 0o700]
        assert not any(mode & umask & 0o077 for mode in modes)

    def test_missing(self, absent: Endpoint) -> None:
        with pytest.raises(DaemonUnavailable, match=r"no daemon has run; .*so does a load"):
            absent.check_owner()

    def test_without_a_socket_nobody_owns_it(self, absent: Endpoint) -> None:
        assert absent.owner() is None
        assert absent.stamp() is None

    def test_missing_where_none_can_be_started(
        self, absent: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        advice = f"may not write to {os.path.dirname(absent.directory)}:.*TRIMS_SOCKET_DIR"
        with pytest.raises(DaemonUnavailable, match=advice):
            absent.check_owner()

    def test_a_file_in_its_place(self, absent: Endpoint) -> None:
        Path(absent.directory).touch()
        with pytest.raises(DaemonUnavailable, match="not a directory"):
            absent.create()

    def test_a_link_is_not_followed(self, absent: Endpoint, tmp_path: Path) -> None:
        os.symlink(tmp_path, absent.directory)
        with pytest.raises(DaemonUnavailable, match="not a directory"):
            absent.check_owner()

    @pytest.mark.parametrize("mode", [0o777, 0o702])
    def test_writable_by_everybody(self, absent: Endpoint, mode: int) -> None:
        absent.create()
        os.chmod(absent.directory, mode)
        with pytest.raises(DaemonUnavailable, match=r"chmod go-w .*, or set .*/trims,"):
            absent.check_owner()

    def test_everybodys_by_intent_is_to_stay_so(self, absent: Endpoint) -> None:
        absent.create()
        os.chmod(absent.directory, 0o1777)
        with pytest.raises(UnusableSocketDir, match=r"by everybody; set .*/trims,"):
            absent.check_owner()

    def test_of_another_user(self, absent: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        absent.create()
        owner = os.stat(absent.directory).st_uid
        if owner == 0:
            os.chown(absent.directory, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(UnusableSocketDir, match="belongs to user"):
            absent.check_owner()

    @pytest.mark.parametrize("is_owner", [True, False])
    def test_of_a_user_that_a_container_does_not_know(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_owner: bool
    ) -> None:
        """All of them have the number of nobody there, so the kernel is asked."""
        opened, asked = os.open, []

        def open_as_its_owner(path: str, flags: int) -> int:
            asked.append(flags & os.O_NOATIME)
            if not is_owner:
                raise PermissionError
            return opened(path, flags & ~os.O_NOATIME)

        status: Any = SimpleNamespace(st_mode=stat.S_IFDIR | 0o700, st_uid=65534)
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        monkeypatch.setattr(os, "open", open_as_its_owner)
        with contextlib.nullcontext() if is_owner else pytest.raises(UnusableSocketDir):
            endpoint._check_status(str(tmp_path), status)
        assert asked == [os.O_NOATIME]

    def test_of_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who could change everything anyway."""
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        status: Any = SimpleNamespace(st_mode=stat.S_IFDIR | 0o750, st_uid=0)
        monkeypatch.setattr(os, "stat", lambda _: status)
        endpoint._check_status("/d", status)
        assert endpoint._unless_others("/d") == "/d"
        status.st_uid = 1
        with pytest.raises(UnusableSocketDir, match="belongs to user 1"):
            endpoint._check_status("/d", status)
        assert endpoint._unless_others("/d") == ""

    def test_writable_by_its_group(self, absent: Endpoint) -> None:
        """A machine-wide daemon's group may enter, not write: it could swap the socket."""
        absent.create()
        os.chmod(absent.directory, 0o750)
        absent.check_owner()
        os.chmod(absent.directory, 0o770)
        with pytest.raises(DaemonUnavailable, match="by its group"):
            absent.check_owner()

    def test_cannot_be_made(self) -> None:
        with pytest.raises(DaemonUnavailable, match="TRIMS_SOCKET_DIR"):
            Endpoint("/proc/trims").create()

    def test_a_name_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DaemonUnavailable):
            Endpoint(str(tmp_path / "file" / "trims")).check_owner()
