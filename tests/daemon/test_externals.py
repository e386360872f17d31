"""Who may change files of a model, or where their paths lead."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trims_shim.daemon.prepared.externals import (
    external_identities,
    is_private,
    links_to,
    may_others_write,
)
from trims_shim.specs import Identity

SOMEBODY = 12345


def of_somebody(status: os.stat_result, *, mode: int | None = None) -> os.stat_result:
    """The same file if it were another user's."""
    fields = list(status)
    fields[stat.ST_UID] = SOMEBODY
    if mode is not None:
        fields[stat.ST_MODE] = stat.S_IFMT(status.st_mode) | mode
    return os.stat_result(fields)


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Let a path look like another user's, of this mode."""
    look = os.stat

    def give(path: Path, mode: int) -> None:
        def stat_of(asked: Any, **how: Any) -> os.stat_result:
            found = look(asked, **how)
            return of_somebody(found, mode=mode) if asked == str(path) else found

        monkeypatch.setattr(os, "stat", stat_of)

    return give


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs" / "w.bin"
    path.parent.mkdir()
    path.write_bytes(b"w")
    assert is_private(str(path))
    return path


def test_a_file_of_another_user(file: Path) -> None:
    status = os.stat(file)
    assert not may_others_write(status)
    assert may_others_write(of_somebody(status))


@pytest.mark.parametrize("mode", [0o755, 0o1755, 0o1777])
def test_in_a_directory_of_another_user(
    file: Path, mode: int, given_away: Callable[[Path, int], None]
) -> None:
    """Its owner may rename what is in it, sticky or not."""
    given_away(file.parent, mode)
    assert not is_private(str(file))


def test_in_a_sticky_directory_of_ours(file: Path) -> None:
    file.parent.chmod(0o1777)
    assert is_private(str(file))
    file.parent.chmod(0o777)
    assert not is_private(str(file))


def test_a_file_that_others_may_write(file: Path) -> None:
    file.chmod(0o620)
    assert not is_private(str(file))


def test_a_link_to_a_file_of_ours(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    assert not is_private(str(link))


def test_data_are_those_of_the_model_only_inside_its_directory(file: Path, tmp_path: Path) -> None:
    model = str(file.with_name("m.onnx"))
    (file.parent / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").touch()
    assert external_identities(model, ["w.bin"]) == (Identity.from_stat(os.stat(file)),)
    for location in ("link", "../outside", "missing", "\0"):
        assert external_identities(model, ["w.bin", location]) is None


def test_open_files_without_a_name(tmp_path: Path) -> None:
    with (tmp_path / "gone").open("wb") as file:
        (tmp_path / "gone").unlink()
        assert links_to(f"/proc/{os.getpid()}/fd/{file.fileno()}") == ()
    (tmp_path / "link").symlink_to(tmp_path)
    link = Identity.from_stat(os.lstat(tmp_path / "link"))
    assert link in links_to(f"/proc/{os.getpid()}/root{tmp_path}/link")


def test_links_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "w.bin").write_bytes(b"w")
    (tmp_path / "one").symlink_to(tmp_path / "real")
    (tmp_path / "two").symlink_to("real/../one/")
    plain, path = str(tmp_path / "real" / "w.bin"), str(tmp_path / "two" / "w.bin")
    outside = links_to(plain)
    links = [Identity.from_stat(os.lstat(tmp_path / each)) for each in ("two", "one")]
    assert [each for each in links_to(path) if each not in outside] == links
    (tmp_path / "one").unlink()
    (tmp_path / "one").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        links_to(path)
