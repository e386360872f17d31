"""The directory of prepared models: what may be in it, and what becomes of what may not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import PATIENCE_S, wait_until
from prepared_models import RECIPE

from trims_shim._version import __version__
from trims_shim.daemon.prepared import files as prepared_files
from trims_shim.daemon.prepared import manifest as prepared_manifest
from trims_shim.daemon.prepared.files import (
    PreparedFiles,
    Published,
    Scan,
)
from trims_shim.daemon.prepared.key import LAYOUT_VERSION
from trims_shim.daemon.prepared.manifest import (
    FileStamp,
    Manifest,
    RefusalRecord,
    parse,
    render,
    with_source,
)
from trims_shim.daemon.prepared.values import Content, Entry, Known
from trims_shim.errors import CorruptFile
from trims_shim.specs import Identity

A, B, C = "a" * 64, "b" * 64, "c" * 64


def identity(inode: int = 1, device: int = 1) -> Identity:
    return Identity(device=device, inode=inode, size_bytes=10, mtime_ns=3, ctime_ns=4)


KNOWN = Known(identity(), Content("d" * 64, (("w.bin", "e" * 64),)), "/models", (identity(2),))


def manifest(key: str = A) -> Manifest:
    return Manifest(
        layout=LAYOUT_VERSION,
        key=key,
        package=__version__,
        content=KNOWN.content,
        recipe=RECIPE,
        probe="equal",
        made_ns=2,
        prepare_ns=1,
        names=("/models/m.onnx",),
        sources=(KNOWN,),
        model=FileStamp(0, 0, 0, 0),
        weights=None,
    )


def refusal(key: str = A, *, refused_ns: int = 1) -> RefusalRecord:
    return RefusalRecord(
        layout=LAYOUT_VERSION,
        key=key,
        package=__version__,
        reason="metadata_differs",
        message="other shapes",
        runtime="1.31.1",
        refused_ns=refused_ns,
        names=("/models/m.onnx",),
        sources=(KNOWN,),
    )


def keep(files: PreparedFiles, key: str = A, *, refused_ns: int = 1) -> None:
    files.keep_refusal(refusal(key).refusal, KNOWN, refused_ns)


@pytest.fixture
def open_files(tmp_path: Path) -> Iterator[Callable[[], PreparedFiles]]:
    made: list[PreparedFiles] = []

    def make() -> PreparedFiles:
        made.append(PreparedFiles(str(tmp_path / "trims" / "prepared")))
        made[-1].open()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def files(open_files: Callable[[], PreparedFiles]) -> PreparedFiles:
    return open_files()


def publish(files: PreparedFiles, key: str = A, *, weights: bytes | None = b"w" * 30) -> Published:
    making = files.make()
    Path(making, "model.onnx").write_bytes(b"model")
    if weights is not None:
        Path(making, "weights.bin").write_bytes(weights)
    try:
        return files.publish(making, manifest(key))
    finally:
        files.delete(making)


def test_whatever_a_preparer_leaves_is_deleted(files: PreparedFiles, tmp_path: Path) -> None:
    """In the place of its directory, too; a link is not followed."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    for leave in (
        lambda path: path.write_text("a file"),
        lambda path: path.symlink_to(kept),
        lambda path: path.symlink_to("nowhere"),
        lambda path: (path.mkdir(), (path / "link").symlink_to(kept)),
    ):
        path = tmp_path / "left"
        leave(path)
        files.delete(str(path))
        assert not os.path.lexists(path)
    files.delete(str(path))
    assert (kept / "file").exists()


def names(files: PreparedFiles) -> list[str]:
    return sorted(os.listdir(files.directory))


class TestPublication:
    def test_what_is_published_is_complete_private_and_read_only(
        self, files: PreparedFiles, no_leak: None
    ) -> None:
        assert files.open() == Scan()
        assert not os.path.exists(files.directory), "made only when it is needed"
        published = publish(files)
        assert names(files) == [A]
        directory = Path(files.directory, A)
        modes = {each.name: each.stat().st_mode & 0o777 for each in directory.iterdir()}
        assert modes == {"model.onnx": 0o400, "weights.bin": 0o400, "entry.json": 0o400}
        assert directory.stat().st_mode & 0o777 == 0o700
        assert Path(published.model).read_bytes() == b"model"
        assert Path(published.weights).read_bytes() == b"w" * 30
        assert published.is_sound()
        entry = published.entry
        assert (entry.key, entry.size_bytes, entry.runtime) == (A, 35, "1.31.1")
        files.close()

    def test_the_name_is_given_to_what_is_on_the_disk(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a loss of power, stamps may be right where bytes were never written."""
        done: list[str] = []
        sync, rename = os.fsync, os.rename

        def synced(descriptor: int) -> None:
            done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
            sync(descriptor)

        def renamed(source: str, target: str) -> None:
            done.append("rename")
            rename(source, target)

        making = files.make()
        for name in ("model.onnx", "weights.bin"):
            Path(making, name).write_bytes(b"bytes")
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)
        files.publish(making, manifest())
        within = ["model.onnx", "weights.bin", "entry.json"]
        assert done == [*within, os.path.basename(making), "rename", "prepared"]

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
    def test_a_directory_that_cannot_be_synced(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Some file systems have nothing to sync; others fail to, and nothing gets its name."""
        sync = os.fsync

        def fail(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", fail)
        if number == errno.EINVAL:
            assert publish(files) == files.load(A)
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                publish(files)
            assert names(files) == []

    def test_what_is_damaged_as_soon_as_it_has_its_name(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "load", lambda key: None)
        with pytest.raises(CorruptFile, match="just after it was published"):
            publish(files)

    def test_a_model_without_weights(self, files: PreparedFiles) -> None:
        published = publish(files, weights=None)
        assert published.weights == ""
        assert published.weights_identity is None
        assert published.is_sound()
        assert files.load(A) == published

    def test_nothing_else_is_taken_along(self, files: PreparedFiles) -> None:
        making = files.make()
        Path(making, "model.onnx").write_bytes(b"model")
        Path(making, "raw.onnx").write_bytes(b"what onnxruntime wrote")
        files.publish(making, manifest())
        assert sorted(os.listdir(os.path.join(files.directory, A))) == ["entry.json", "model.onnx"]

    @pytest.mark.parametrize("kind", ["nothing", "link", "hard link", "fifo", "directory"])
    def test_what_a_preparer_must_not_leave(self, files: PreparedFiles, kind: str) -> None:
        making = files.make()
        model = Path(making, "model.onnx")
        other = Path(files.directory).parent / "other"
        other.write_bytes(b"somebody else's")
        if kind == "link":
            model.symlink_to(other)
        elif kind == "hard link":
            model.hardlink_to(other)
        elif kind == "fifo":
            os.mkfifo(model)
        elif kind == "directory":
            model.mkdir()
        with pytest.raises(OSError if kind == "link" else CorruptFile):
            files.publish(making, manifest())
        files.delete(making)
        assert names(files) == []
        assert other.stat().st_mode & 0o777 != 0o400

    def test_a_directory_that_cannot_be_renamed(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(13, "Permission denied")

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(PermissionError):
            publish(files)
        assert names(files) == []

    def test_who_is_second_takes_what_is_there(
        self, open_files: Callable[[], PreparedFiles]
    ) -> None:
        ours, theirs = open_files(), open_files()
        first = publish(ours)
        assert publish(theirs) == first
        assert names(ours) == [A]

    def test_what_is_damaged_makes_room(self, files: PreparedFiles) -> None:
        publish(files)
        os.unlink(os.path.join(files.directory, A, "weights.bin"))
        assert files.load(A) is None
        assert publish(files).is_sound()
        assert names(files) == [A]


class TestDamage:
    @pytest.mark.parametrize("name", ["model", "weights"])
    @pytest.mark.parametrize("how", ["removed", "replaced", "touched", "chmod", "linked"])
    def test_any_change_of_a_file_is_seen(self, files: PreparedFiles, name: str, how: str) -> None:
        published = publish(files)
        path = Path(getattr(published, name))
        if how == "removed":
            path.unlink()
        elif how == "replaced":
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        elif how == "touched":
            os.utime(path)
        elif how == "chmod":
            path.chmod(0o600)
        else:
            path.rename(path.with_suffix(".moved"))
            path.symlink_to(path.with_suffix(".moved"))
        assert not published.is_sound()
        assert files.load(A) is None

    def test_a_directory_that_was_taken_away(self, files: PreparedFiles) -> None:
        published = publish(files)
        files.delete(files.directory)
        assert not published.is_sound()
        assert publish(files).is_sound(), "it is made again"


class TestScan:
    def test_a_restart_finds_what_is_there(self, files: PreparedFiles) -> None:
        first = publish(files, A)
        publish(files, B)
        os.utime(os.path.join(files.directory, A), ns=(10, 10))
        keep(files, C)
        scan = PreparedFiles(files.directory).open()
        assert {each.manifest.key: each.used_ns for each in scan.published}[A] == 10
        assert [each.manifest.key for each in scan.published] == [A, B]
        assert scan.published[0].model_identity == first.model_identity
        assert scan.refusals == (refusal(C),)
        assert list(scan.sources()) == [KNOWN] * 3

    @pytest.mark.parametrize(
        "damage",
        [
            lambda path: path.joinpath("entry.json").unlink(),
            lambda path: path.joinpath("model.onnx").unlink(),
            lambda path: path.chmod(0o777),
            lambda path: _rewrite(path, key=B),
            lambda path: _rewrite(path, names=3),
            lambda path: _rewrite(path, model=None),
            lambda path: _replace(path / "entry.json", b"{" * 100_000),
            lambda path: _replace(path / "entry.json", b'{"layout": %d}' % LAYOUT_VERSION),
            lambda path: _replace(path / "entry.json", b"\xff"),
            lambda path: _move(path / "entry.json"),
        ],
        ids=[
            "no-manifest",
            "no-model",
            "writable",
            "key",
            "names",
            "stamp",
            "nested",
            "fields",
            "unicode",
            "link",
        ],
    )
    def test_what_is_not_whole_is_deleted(
        self, files: PreparedFiles, damage: Callable[[Path], None]
    ) -> None:
        publish(files, A)
        publish(files, B)
        damage(Path(files.directory, A))
        scan = PreparedFiles(files.directory).open()
        assert [each.manifest.key for each in scan.published] == [B]
        assert names(files) == [B]

    @pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM])
    def test_what_cannot_be_read_now_stays_for_the_next_scan(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Found: one EIO deleted a good model and a refusal, which were then made again."""
        publish(files, A)
        keep(files, B)
        files.close()

        def fail(path: str) -> bytes:
            raise OSError(number, os.strerror(number), path)

        with monkeypatch.context() as patch:
            patch.setattr(prepared_files, "_read", fail)
            with contextlib.closing(PreparedFiles(files.directory)) as unlucky:
                assert unlucky.open() == Scan()
        with contextlib.closing(PreparedFiles(files.directory)) as later:
            scan = later.open()
        assert [each.manifest.key for each in scan.published] == [A]
        assert [each.key for each in scan.refusals] == [B]

    def test_the_log_tells_whose_record_it_is(
        self, files: PreparedFiles, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Found: it said "of layout 4, not 4" of exchanged directories."""
        publish(files, A)
        os.rename(os.path.join(files.directory, A), os.path.join(files.directory, B))
        assert files.load(B) is None
        assert f"model {B[:12]} is not used: its record is that of {A[:12]}" in caplog.text

    def test_models_of_another_layout_stay_and_count(self, files: PreparedFiles) -> None:
        """Found: two versions that took turns deleted each other's, and made all anew each time."""
        for key in (A, B):
            publish(files, key)
        _rewrite(Path(files.directory, A), layout=LAYOUT_VERSION + 1)
        os.utime(os.path.join(files.directory, A), ns=(10, 10))
        files.close()
        with contextlib.closing(PreparedFiles(files.directory)) as alone:
            scan = alone.open()
        size_bytes = sum(each.stat().st_size for each in Path(files.directory, A).iterdir())
        assert [each.manifest.key for each in scan.published] == [B]
        assert scan.others == (Entry(A, size_bytes, "", 0, 10),)
        assert names(files) == [A, B]

    def test_a_record_that_another_version_replaces_meanwhile(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: its model was deleted. It has written the new one in the model's directory."""
        publish(files, A)
        _rewrite(Path(files.directory, A), layout=LAYOUT_VERSION + 1)
        listdir = os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: [*listdir(path), ".making-renamed"])
        (other,) = files.open().others
        monkeypatch.undo()
        assert other.key == A
        assert names(files) == [A]

    def test_the_longest_record(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish(files, A)
        size = os.stat(os.path.join(files.directory, A, "entry.json")).st_size
        monkeypatch.setattr(prepared_files, "_RECORD_LIMIT_BYTES", size)
        assert files.load(A) is not None
        monkeypatch.setattr(prepared_files, "_RECORD_LIMIT_BYTES", size - 1)
        assert files.load(A) is None

    def test_a_record_that_cannot_be_written_leaves_nothing(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files.delete(files.make())

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="No space left"):
            keep(files)
        assert names(files) == []

    def test_a_link_is_not_followed(self, files: PreparedFiles, tmp_path: Path) -> None:
        publish(files, A)
        moved = tmp_path / "moved"
        os.rename(os.path.join(files.directory, A), moved)
        os.symlink(moved, os.path.join(files.directory, A))
        assert PreparedFiles(files.directory).open().published == ()
        assert sorted(os.listdir(moved)) == ["entry.json", "model.onnx", "weights.bin"]

    def test_other_names_are_left_alone(self, files: PreparedFiles) -> None:
        publish(files)
        for name in ("README", "A" * 64, "a" * 63, "x.refused"):
            Path(files.directory, name).write_text("mine")
        PreparedFiles(files.directory).open()
        assert len(names(files)) == 5

    @pytest.mark.parametrize("field", ["layout", "package", "key", "reason"])
    def test_a_refusal_that_is_not_what_its_name_says_is_forgotten(
        self, files: PreparedFiles, field: str
    ) -> None:
        files.make()
        keep(files)
        path = refusals_of(files)[0]
        wrong = {"layout": 0, "package": "0.0.1", "key": B, "reason": 5}
        _replace(path, json.dumps({**json.loads(path.read_bytes()), field: wrong[field]}).encode())
        assert PreparedFiles(files.directory).open().refusals == ()
        assert not path.exists()

    def test_a_refusal_of_a_file_that_nothing_is_known_of(self, files: PreparedFiles) -> None:
        files.make()
        files.keep_refusal(refusal(A).refusal, None, 1)
        (found,) = PreparedFiles(files.directory).open().refusals
        assert (found.key, found.sources) == (A, ())

    def test_a_refusal_under_other_settings_is_not_ours_and_stays(
        self, files: PreparedFiles
    ) -> None:
        files.make()
        keep(files)
        assert len(PreparedFiles(files.directory).open().refusals) == 1
        other = PreparedFiles(files.directory, judgement="1G")
        assert other.open().refusals == ()
        keep(other, B)
        other.drop_refusal(A)
        assert [each.key for each in other.open().refusals] == [B]
        assert [each.key for each in PreparedFiles(files.directory).open().refusals] == [A]

    def test_two_versions_of_the_package_leave_each_others_refusals(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files.make()
        keep(files)
        with monkeypatch.context() as patch:
            patch.setattr(prepared_files, "__version__", "0.0.1")
            assert PreparedFiles(files.directory).open().refusals == ()
        assert PreparedFiles(files.directory).open().refusals == (refusal(),)

    def test_refusals_are_bounded(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_files, "_REFUSALS_KEPT", 2)
        files.make()
        for moment, key in enumerate((C, A, B)):
            keep(files, key, refused_ns=moment)
        scan = PreparedFiles(files.directory).open()
        assert [each.key for each in scan.refusals] == [A, B]
        assert not [each for each in names(files) if each.startswith(C)]

    def test_refusals_of_others_are_bounded(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepared_files, "_REFUSALS_KEPT", 2)
        files.make()
        for moment, key in enumerate((C, A, B)):
            keep(files, key)
            os.utime(refusals_of(files, key)[0], ns=(moment, moment))
        PreparedFiles(files.directory, judgement="1G").open()
        assert [each.name[:64] for each in refusals_of(files)] == [A, B]

    def test_no_umask_opens_the_directories_above(self, tmp_path: Path) -> None:
        base = tmp_path / "home" / "cache"
        files = PreparedFiles(str(base / "trims" / "prepared"))
        before = os.umask(0)
        try:
            files.make()
        finally:
            os.umask(before)
            files.close()
        made = (base.parent, base, base / "trims", base / "trims" / "prepared")
        assert [each.stat().st_mode & 0o777 for each in made] == [0o700] * 4

    def test_half_made_ones_go_when_nobody_else_is_there(
        self, open_files: Callable[[], PreparedFiles]
    ) -> None:
        ours = open_files()
        making = ours.make()
        Path(making, "model.onnx").write_bytes(b"half")
        theirs = open_files()
        assert os.path.exists(making), "its daemon lives"
        ours.close()
        theirs.close()
        removed = os.path.join(ours.directory, ".removed-1-2")
        os.mkdir(removed)
        open_files()
        assert names(ours) == []

    def test_what_is_being_made_stays_where_another_is_begun(
        self, open_files: Callable[[], PreparedFiles]
    ) -> None:
        """As where a preparation is stuck, and others go on."""
        files = open_files()
        makings = [files.make(), files.make()]
        assert all(map(os.path.exists, makings))

    def test_another_one_was_just_cleaning_up(
        self, open_files: Callable[[], PreparedFiles], tmp_path: Path
    ) -> None:
        """Found: a daemon that started in this moment was taken for dead all its life."""
        directory = tmp_path / "trims" / "prepared"
        directory.mkdir(parents=True, mode=0o700)
        other = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            files = open_files()
            fcntl.flock(other, fcntl.LOCK_UN)
            files.make()
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)

    def test_a_leftover_that_is_too_deep(
        self, open_files: Callable[[], PreparedFiles], tmp_path: Path
    ) -> None:
        """Found: no daemon had prepared models any more."""
        files = open_files()
        path = files.make()
        files.close()
        deep = "/".join("a" * 500)
        for _ in range(3):  # One call cannot make them all.
            os.makedirs(tmp_path / deep)
            os.rename(path, tmp_path / deep / "a")
            os.mkdir(path)
            os.rename(tmp_path / "a", os.path.join(path, "a"))
        try:
            assert open_files().open().published == ()
        finally:
            subprocess.run(["rm", "-rf", path], check=True)

    def test_nothing_is_made_while_another_one_cleans_up(
        self, open_files: Callable[[], PreparedFiles]
    ) -> None:
        """It would take it for a leftover."""
        files = open_files()
        os.makedirs(files.directory, mode=0o700)
        other = os.open(files.directory, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            making = threading.Thread(target=files.make)
            making.start()
            inode = f":{os.fstat(other).st_ino} "
            wait_until(lambda: not making.is_alive() or _awaited(inode), "it waits")
            assert names(files) == []
            fcntl.flock(other, fcntl.LOCK_UN)
            making.join(PATIENCE_S)
            assert len(names(files)) == 1
        finally:
            os.close(other)

    def test_a_live_daemon_is_not_taken_for_dead(
        self, open_files: Callable[[], PreparedFiles]
    ) -> None:
        first = open_files()
        first.make()
        other = os.open(first.directory, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(other)


def _awaited(inode: str) -> bool:
    """Whether somebody waits for a lock of a file."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any(" -> " in line and inode in line for line in lines)


def refusals_of(files: PreparedFiles, key: str = "") -> list[Path]:
    return sorted(Path(files.directory).glob(f"{key}*.refused"))


def _move(path: Path) -> None:
    """Out of the way, behind a link."""
    target = path.parent.parent.parent / path.name
    path.rename(target)
    path.symlink_to(target)


def _replace(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


def _rewrite(directory: Path, **fields: object) -> None:
    path = directory / "entry.json"
    _replace(path, json.dumps({**json.loads(path.read_bytes()), **fields}).encode())


class TestChanges:
    def test_sources_are_added_to_entries_and_refusals(self, files: PreparedFiles) -> None:
        publish(files, A)
        keep(files, B)
        other = KNOWN._replace(directory="/copies")
        for key in (A, B, C):
            files.add_source(key, other)
        published = files.load(A)
        assert published is not None
        assert published.manifest.sources == (other, KNOWN)
        assert PreparedFiles(files.directory).open().refusals[0].sources == (other, KNOWN)
        assert names(files) == [A, refusals_of(files, B)[0].name]

    def test_a_daemon_that_is_killed_meanwhile_leaves_nothing(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: half a record stayed beside the model for good."""

        class Killed(BaseException):
            pass

        def kill(*_: object) -> None:
            raise Killed

        publish(files)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", kill)
            with pytest.raises(Killed):
                files.add_source(A, KNOWN._replace(directory="/copies"))
        files.close()
        with contextlib.closing(PreparedFiles(files.directory)) as later:
            later.open()
        assert names(files) == [A]
        left = sorted(os.listdir(os.path.join(files.directory, A)))
        assert left == ["entry.json", "model.onnx", "weights.bin"]

    def test_use_is_noted(self, files: PreparedFiles) -> None:
        publish(files, A)
        os.utime(os.path.join(files.directory, A), ns=(10, 10))
        files.touch(A, 20)
        published = files.load(A)
        assert published is not None
        assert published.used_ns == 20
        assert published.is_sound()
        files.touch(B, 20)

    def test_it_goes_in_two_steps(self, files: PreparedFiles) -> None:
        published = publish(files, A)
        with open(published.weights, "rb") as mapped:
            path = files.retire(A)
            assert files.load(A) is None
            assert os.path.exists(path)
            files.delete(path)
            assert mapped.read() == b"w" * 30, "what is in use stays whole"
        assert names(files) == []
        assert files.retire(A) == ""
        files.delete("")

    def test_what_cannot_be_deleted_goes_later(
        self, files: PreparedFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: what was half made when the file system became read-only stayed for good."""
        making = files.make()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            files.delete(making)
            other = files.make()
        assert sorted(names(files)) == sorted(map(os.path.basename, (making, other)))
        files.delete(other)
        files.delete(files.make())
        assert names(files) == []

    def test_a_refusal_is_forgotten(self, files: PreparedFiles) -> None:
        files.make()
        keep(files)
        files.drop_refusal(A)
        files.drop_refusal(A)
        assert refusals_of(files) == []


class TestManifest:
    def test_it_is_read_as_it_was_written(self) -> None:
        stamped = manifest()._replace(weights=FileStamp(1, 2, 3, 4))
        assert parse(Manifest, render(stamped)) == stamped
        assert parse(Manifest, render(manifest())) == manifest()
        assert parse(RefusalRecord, render(refusal())) == refusal()

    def test_names_that_are_no_text(self) -> None:
        odd = manifest()._replace(names=("/m\udcff.onnx", "/ü"))
        assert parse(Manifest, render(odd)) == odd

    @pytest.mark.parametrize("field", Manifest._fields)
    def test_every_field_is_needed_and_checked(self, field: str) -> None:
        whole = json.loads(render(manifest()))
        for value in ("missing", 1.5, {"a": 1}, [[]]):
            body = {**whole, field: value}
            if value == "missing":
                del body[field]
            with pytest.raises(CorruptFile):
                parse(Manifest, json.dumps(body).encode())

    def test_a_source_replaces_the_file_it_was(self) -> None:
        newer = KNOWN._replace(identity=identity()._replace(mtime_ns=9))
        assert with_source(manifest(), newer).sources == (newer,)

    def test_sources_are_bounded(self) -> None:
        record = refusal()
        for inode in range(20):
            record = with_source(record, Known(identity(inode), Content("d" * 64)))
        kept = [each.identity.inode for each in record.sources]
        assert kept == list(range(19, 19 - prepared_manifest._SOURCES_LIMIT, -1))
