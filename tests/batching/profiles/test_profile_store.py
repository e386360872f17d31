"""Profiles as files: what is read is what was written, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim import config
from trims_shim.batching.collating.collate import collate_of
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_json import LARGEST_SIZE
from trims_shim.batching.profiles.profile_store import (
    ProfileStore,
    SavedProfile,
    key_text,
    load_profile,
    load_saved,
    machine_text,
    save_profile,
)
from trims_shim.daemon.prepared.directory import examine
from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat

SAVED = SavedProfile({1: 5e6, 8: 12e6}, 16, note="measured once")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(str(tmp_path / "profiles"))


def test_what_is_written_is_read(path: Path) -> None:
    save_profile(path, SAVED)
    assert load_saved(path) == SAVED
    expected = LatencyProfile.measured({1: 5e6, 8: 12e6}, max_batch_size=16, pads=False)
    assert load_profile(path) == expected
    save_profile(path, dataclasses.replace(SAVED, pads=True))
    assert load_profile(path).latency_ns(2) == 12e6
    assert os.listdir(path.parent) == [path.name]


def test_the_largest_size_that_is_written_is_read(path: Path) -> None:
    largest = SavedProfile({1: 5e6, LARGEST_SIZE: 12e6}, LARGEST_SIZE)
    save_profile(path, largest)
    assert load_saved(path) == largest


def test_a_child_that_is_forked_in_the_middle_may_exit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: one of a signal handler's deleted the file that its parent was writing."""
    replace, parent = os.replace, os.getpid()

    def fork_and_replace(*arguments: Any) -> None:
        child = os.fork()
        if child == 0:
            raise SystemExit
        os.waitpid(child, 0)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", fork_and_replace)
    try:
        save_profile(path, SavedProfile({1: 1e6}, 1))
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert load_saved(path).latencies_ns == {1: 1e6}


def test_a_file_of_the_users_has_the_mode_of_any_file_and_keeps_its_own(path: Path) -> None:
    umask = os.umask(0o027)
    try:
        save_profile(path, SAVED)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o664)
        save_profile(path, SAVED)
        assert stat.S_IMODE(path.stat().st_mode) == 0o664
    finally:
        os.umask(umask)


def test_a_file_that_is_replaced_gives_nobody_the_users_rights(path: Path) -> None:
    """Found: one that another user had put there, setuid, became one of the user's."""
    path.touch()
    path.chmod(0o6777)
    save_profile(path, SAVED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777


def test_a_users_link_stays_one_and_one_among_kept_profiles_is_replaced(
    path: Path, store: ProfileStore
) -> None:
    target = path.with_name("target.json")
    path.symlink_to(target)
    for _ in "new", "old":
        save_profile(path, SAVED)
        assert path.is_symlink()
        assert load_saved(target) == SAVED
    kept = Path(store.path("f"))
    kept.parent.mkdir()
    kept.symlink_to(target)
    assert store.save("f", None, SAVED)
    assert not kept.is_symlink()
    assert load_saved(target) == SAVED


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(path, SAVED)

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        save_profile(path, dataclasses.replace(SAVED, note="new"))
    assert load_saved(path) == SAVED
    assert os.listdir(path.parent) == [path.name]


GOOD = {"format": "trims latency profile", "version": 1, "max_batch_size": 2}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", TruncatedFile, "is empty"),
        ("{", CorruptFile, "is not a latency profile"),
        ("[" * 100_000, CorruptFile, "is not a latency profile"),
        ("\x00\xff", CorruptFile, "is not a latency profile"),
        (" " * (5 << 20) + "{}", CorruptFile, None),
        ("[1]", CorruptFile, "is not a latency profile"),
        ({**GOOD, "version": 2}, UnsupportedFormat, "version 2"),
        (GOOD, CorruptFile, "no latencies"),
        ({**GOOD, "latencies_ns": {}}, CorruptFile, "no latencies"),
        ({**GOOD, "latencies_ns": {"0": 1}}, CorruptFile, "batch of '0'"),
        ({**GOOD, "latencies_ns": {"-1": 1}}, CorruptFile, "batch of '-1'"),
        ({**GOOD, "latencies_ns": {"99999": 1}}, CorruptFile, "batch of '99999'"),
        ({**GOOD, "latencies_ns": {"\u00b2": 1}}, CorruptFile, "batch of '\u00b2'"),
        ({**GOOD, "latencies_ns": {"00000000019": 1}}, CorruptFile, "batch of"),
        ({**GOOD, "latencies_ns": {"1": 0}}, CorruptFile, "latency of 0 ns"),
        ({**GOOD, "latencies_ns": {"1": "2"}}, CorruptFile, "latency of 2 ns"),
        ({**GOOD, "latencies_ns": {"1": True}}, CorruptFile, "latency of True ns"),
        ({**GOOD, "latencies_ns": {"1": float("nan")}}, CorruptFile, "latency of nan ns"),
        ({**GOOD, "latencies_ns": {"1": float("inf")}}, CorruptFile, "latency of inf ns"),
        ({**GOOD, "latencies_ns": {"1": 10**30}}, CorruptFile, "latency of 1000"),
        ({**GOOD, "latencies_ns": {"1": 1}, "max_batch_size": 0}, CorruptFile, "max_batch_size"),
        ({**GOOD, "latencies_ns": {"1": 1}, "max_batch_size": 1 << 40}, CorruptFile, "size"),
        ({**GOOD, "latencies_ns": {"1": 1}, "max_batch_size": "2"}, CorruptFile, "size of '2'"),
    ],
)
def test_anything_else_is_refused_by_name(
    path: Path, content: Any, error: type[FormatError], message: str | None
) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content), "latin-1")
    with pytest.raises(error, match=message) as raised:
        load_profile(path)
    assert str(path) in str(raised.value)


@given(st.binary(max_size=200))
def test_no_content_breaks_the_reader(tmp_path_factory: Any, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_bytes(content)
    with pytest.raises(FormatError):
        load_profile(file)


# --- the store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["a", "\u5206", "\U0002070e"])
def test_profiles_of_long_names_are_kept(store: ProfileStore, letter: str) -> None:
    assert store.save(300 * letter, None, SAVED)
    assert letter in os.path.basename(store.path(300 * letter))
    assert store.load(300 * letter) is not None
    assert store.load(299 * letter) is None


def test_profiles_are_kept_by_name_and_key(store: ProfileStore) -> None:
    assert store.load("classify") is None
    assert store.save("classify", None, SAVED)
    assert store.save("classify", ("float32", (3, 4)), dataclasses.replace(SAVED, max_batch_size=4))
    found = store.load("classify")
    assert found is not None
    assert found.profile == SAVED.profile
    other = store.load("classify", ("float32", (3, 4)))
    assert other is not None
    assert other.max_batch_size == 4
    assert store.load("classify", ("float32", (3, 5))) is None
    assert store.load("other") is None
    assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700


def test_profiles_of_another_machine_are_not_used(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save("classify", None, SAVED)
    monkeypatch.setattr(
        "trims_shim.batching.profiles.profile_store.machine_text", lambda: "another"
    )
    assert store.load("classify") is None


def test_profiles_for_another_number_of_processors_are_not_used(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many as this process may use."""
    monkeypatch.setattr(
        "trims_shim.batching.profiles.profile_store.machine_text", machine_text.__wrapped__
    )
    store.save("classify", None, SAVED)
    assert store.load("classify") is not None
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(1 << 20))
    assert store.load("classify") is None


def test_a_file_of_another_batcher_is_not_used(store: ProfileStore) -> None:
    """Whoever renames files, or finds two texts of one digest."""
    store.save("classify", None, SAVED)
    os.rename(store.path("classify"), store.path("other"))
    assert store.load("other") is None


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", ".hidden", "n" * 400, "x y\n\udcff"])
def test_names_stay_in_the_directory(store: ProfileStore, name: str) -> None:
    path = store.path(name)
    assert os.path.dirname(path) == store.directory
    assert not os.path.basename(path).startswith(".")
    assert store.save(name, None, SAVED)
    assert store.load(name) is not None


def test_a_broken_file_is_ignored_with_one_warning(
    store: ProfileStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save("classify", None, SAVED)
    Path(store.path("classify")).write_text("{broken")
    with caplog.at_level(logging.WARNING):
        assert store.load("classify") is None
        assert store.load("classify") is None
    assert len(caplog.records) == 1
    assert store.path("classify") in caplog.text
    assert store.save("classify", None, SAVED)
    assert store.load("classify") is not None


def test_a_store_that_cannot_be_written_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(str(tmp_path / "file" / "profiles"))
    with caplog.at_level(logging.WARNING):
        assert not store.save("classify", None, SAVED)
        assert not store.save("classify", None, SAVED)
    assert len(caplog.records) == 1
    assert store.load("classify") is None


def test_the_oldest_of_too_many_are_deleted(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trims_shim.batching.profiles.profile_store._LIMIT_FILES", 3)
    os.mkdir(store.directory)
    others = ["photo.jpg", "notes.json", ".hidden"]
    for name in others:
        Path(store.directory, name).write_text("of somebody")
    for number in range(5):
        store.save("classify", number, SAVED)
        os.utime(store.path("classify", number), ns=(number, number))
    store.save("classify", 5, SAVED)
    assert [n for n in range(6) if store.load("classify", n)] == [3, 4, 5]
    assert set(others) < set(os.listdir(store.directory)), "it deletes nothing but profiles"


def test_a_pipe_in_the_place_of_a_profile_is_not_waited_for(store: ProfileStore) -> None:
    os.mkdir(store.directory)
    os.mkfifo(store.path("classify"))
    assert store.load("classify") is None


def test_the_store_is_in_the_cache_directory(tmp_path: Path) -> None:
    given = config.load({"HOME": "/home/u", "TRIMS_CACHE_DIR": str(tmp_path)})
    assert ProfileStore.of(given).directory == str(tmp_path / "profiles")
    default = config.load({"HOME": "/home/u"})
    assert ProfileStore.of(default).directory == "/home/u/.cache/trims/profiles"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_root_makes_nothing_in_the_home_of_another_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found: under `sudo -E`, ~/.cache became root's, and its user could keep nothing there."""
    os.chown(tmp_path, 2001, 2001)
    store = ProfileStore.of(config.load({"HOME": str(tmp_path)}))
    assert not store.save("name", None, SAVED)
    assert f"is not kept: {tmp_path} belongs to user 2001" in caplog.text
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said_once_for_all_keys(
    store: ProfileStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, saved: SavedProfile) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr("trims_shim.batching.profiles.profile_store._write", full)
    for key in range(3):
        assert not store.save("classify", key, SAVED)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert store.path("classify", 0) in caplog.text


def test_prepared_models_may_be_kept_beside_it(tmp_path: Path) -> None:
    before = os.umask(0o002)  # the default of many systems
    try:
        assert ProfileStore(str(tmp_path / "trims" / "profiles")).save("name", None, SAVED)
    finally:
        os.umask(before)
    assert examine(str(tmp_path / "trims" / "prepared")) == ""


PRINT_KEY = """
import numpy as np
from trims_shim.batching.collating.collate import collate_of
from trims_shim.batching.profiles.profile_store import key_text
print(key_text(collate_of("auto").key({"b": np.zeros(3), "a": ("x", np.int8(1)), "c": [1]})))
"""


def test_keys_are_the_same_text_in_every_process() -> None:
    """Sets come in an order that changes from process to process."""
    import numpy as np

    key = collate_of("auto").key({"b": np.zeros(3), "a": ("x", np.int8(1)), "c": [1]})
    found = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.strip()
        for seed in "12"
    }
    assert found == {key_text(key)}


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("part", [Unspeakable(), functools.reduce(lambda x, _: (x,), range(9999))])
def test_a_key_without_text_is_not_kept_and_raises_nothing(
    store: ProfileStore, caplog: pytest.LogCaptureFixture, part: Any
) -> None:
    """Policies look for the profile of a new key: an error would fail all who wait."""
    with caplog.at_level(logging.WARNING):
        assert store.load("classify", (part,)) is None
        assert not store.save("classify", (part,), SAVED)
    assert len(caplog.records) == 1
