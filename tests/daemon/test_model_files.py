"""The files of a model: what they are, what cannot be prepared, and that they do not change."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
from onnx_kinds import BROKEN
from onnx_models import perceptron, save, save_external
from prepare_requests import Daemon, opened, prepare, request

from trims_shim.daemon.preparer import main as preparer
from trims_shim.daemon.preparer import model_files, verifying
from trims_shim.daemon.preparer.optimising import Refusal
from trims_shim.errors import FileChanged
from trims_shim.specs import Identity
from trims_shim.wire.duties import ExternalSource, PrepareReply, SourceHashed


class TestModelFiles:
    def test_what_is_loaded(self, model: Path) -> None:
        """By the descriptor, so that a replaced path changes nothing."""
        with opened(model) as source:
            files = model_files.ModelFiles(source, str(model))
            files.hash()
            files.look_inside()
            with files.loadable("/nowhere") as path:
                assert path == f"/proc/self/fd/{source}"
            assert (files.size_bytes, files.copied_bytes) == (model.stat().st_size, 0)

    def test_a_file_that_becomes_shorter(self, model: Path) -> None:
        with opened(model) as source:
            files = model_files.ModelFiles(source, str(model))
            os.truncate(model, 100)
            with pytest.raises(FileChanged):
                files.hash()
            os.truncate(model, 0)
            with pytest.raises((FileChanged, Refusal)):
                files.look_inside()

    def test_a_model_in_memory_that_changes(self) -> None:
        source = os.memfd_create("model")
        os.write(source, perceptron().content)
        files = model_files.ModelFiles(source, "")
        files.check_unchanged()
        os.write(source, b"x")
        with pytest.raises(FileChanged):
            files.check_unchanged()
        os.close(source)

    def test_a_path_that_goes(self, model: Path, tmp_path: Path) -> None:
        link = tmp_path / "link.onnx"
        link.symlink_to(model)
        with opened(link) as source:
            files = model_files.ModelFiles(source, str(link))
            link.unlink()
            with pytest.raises(FileChanged):
                files.check_unchanged()

    def test_the_size_is_that_of_all_files(self, tmp_path: Path, no_leak: None) -> None:
        path = tmp_path / "model.onnx"
        save_external(perceptron())(path)
        with opened(path) as source:
            files = model_files.ModelFiles(source, str(path))
            files.look_inside()
            sizes = [each.stat().st_size for each in (path, tmp_path / "weights.bin")]
            assert files.size_bytes == sum(sizes)

    def test_a_symbolic_link(self, model: Path, tmp_path: Path) -> None:
        link = tmp_path / "link.onnx"
        link.symlink_to(model)
        with opened(link) as source:
            files = model_files.ModelFiles(source, str(link))
            files.hash()
            files.check_unchanged()

    @pytest.mark.parametrize("name", ["here", "links/model.onnx", "links/weights.bin"])
    def test_a_link_that_led_elsewhere_meanwhile(self, name: str, tmp_path: Path) -> None:
        """Found: what was made of another version got the key of the one before and after."""
        (tmp_path / "real").mkdir()
        (tmp_path / "links").mkdir()
        save_external(perceptron())(tmp_path / "real" / "model.onnx")
        for each in ("model.onnx", "weights.bin"):
            (tmp_path / "links" / each).symlink_to(f"../real/{each}")
        (tmp_path / "here").symlink_to("links/")
        path, link = tmp_path / "here" / "model.onnx", tmp_path / name
        with opened(path) as source:
            files = model_files.ModelFiles(source, str(path))
            files.hash()
            files.look_inside()
            files.check_unchanged()
            for target in ("elsewhere", os.readlink(link)):
                (tmp_path / "new").symlink_to(target)
                (tmp_path / "new").rename(link)
            with pytest.raises(FileChanged):
                files.check_unchanged()


class TestOfferedFiles:
    """Of a client in another container: they have no names here."""

    @pytest.fixture
    def offered(self, tmp_path: Path, no_leak: None) -> Iterator[tuple[int, dict[str, int]]]:
        path = tmp_path / "model.onnx"
        save_external(perceptron(), "sub/weights.bin")(path)
        with opened(path) as source, opened(tmp_path / "sub" / "weights.bin") as weights:
            path.unlink()
            (tmp_path / "sub" / "weights.bin").unlink()
            yield source, {"sub/weights.bin": weights}

    def prepare(
        self, source: int, offered: dict[str, int], directory: Path, daemon: Daemon
    ) -> PrepareReply:
        externals = tuple(ExternalSource(*each) for each in offered.items())
        asked = request("", directory, source=source, externals=externals, package="")
        reply = preparer.prepare(asked, daemon)
        assert reply is not None
        return reply

    def test_they_are_prepared(
        self, offered: tuple[int, dict[str, int]], tmp_path: Path, directory: Path
    ) -> None:
        source, externals = offered
        daemon = Daemon()
        assert self.prepare(source, externals, directory, daemon).reason == ""
        (file,) = daemon.hashed[0].externals
        weights = os.fstat(externals["sub/weights.bin"])
        assert (file.location, file.identity) == ("sub/weights.bin", Identity.from_stat(weights))
        assert sorted(os.listdir(directory)) == ["model.onnx", "weights.bin"]
        again = tmp_path / "again"
        again.mkdir()
        save_external(perceptron(), "sub/weights.bin")(tmp_path / "model.onnx")
        assert prepare(tmp_path / "model.onnx", again).reason == ""
        for name in ("model.onnx", "weights.bin"):
            assert (again / name).read_bytes() == (directory / name).read_bytes()

    def test_room_is_wanted_for_the_copies(self, offered: tuple[int, dict[str, int]]) -> None:
        source, externals = offered
        files = model_files.ModelFiles(source, "", externals)
        files.look_inside()
        sizes = [os.fstat(each).st_size for each in (source, *externals.values())]
        assert files.copied_bytes == files.size_bytes == sum(sizes)

    def test_they_need_not_be_opened_again(
        self, offered: tuple[int, dict[str, int]], directory: Path
    ) -> None:
        """Found: a container's root can open what the daemon's cannot, and offer that."""
        source, externals = offered
        for each in (source, *externals.values()):
            os.fchmod(each, 0)
        assert self.prepare(source, externals, directory, Daemon()).reason == ""

    def test_two_names_of_one_file(
        self, offered: tuple[int, dict[str, int]], directory: Path, tmp_path: Path
    ) -> None:
        _, externals = offered
        path = tmp_path / "twice.onnx"
        save_external(perceptron(), "sub/weights.bin")(path)
        model = onnx.load(str(path), load_external_data=False)
        for entry in model.graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = "./sub/weights.bin"
        path.write_bytes(model.SerializeToString())
        (tmp_path / "sub" / "weights.bin").unlink()
        both = dict.fromkeys((*externals, "./sub/weights.bin"), externals["sub/weights.bin"])
        with opened(path) as source:
            assert self.prepare(source, both, directory, Daemon()).reason == ""

    def test_a_name_that_leads_back(
        self, offered: tuple[int, dict[str, int]], directory: Path, tmp_path: Path
    ) -> None:
        """Found: the model was refused to all for good, or another file's weights were taken: what
        is before the dots may be a link."""
        (data,) = offered[1].values()
        path = tmp_path / "back.onnx"
        save_external(perceptron(), "weights.bin")(path)
        model = onnx.load(str(path), load_external_data=False)
        for initializer in model.graph.initializer:
            for entry in initializer.external_data:
                if entry.key == "location":
                    entry.value = "sub/../weights.bin"
        path.write_bytes(model.SerializeToString())
        daemon = Daemon()
        with opened(path) as source:
            reply = self.prepare(source, {"sub/../weights.bin": data}, directory, daemon)
        assert (reply.reason, reply.is_lasting) == ("external_path", False)
        assert daemon.hashed == []

    def test_a_name_of_many_directories(self, tmp_path: Path, directory: Path) -> None:
        """Found: nobody could delete the copies, and the daemon's next start failed of them."""
        path = tmp_path / "deep.onnx"
        locations = ["a/" * count + "weights.bin" for count in (32, 33)]
        reasons = []
        for location in locations:
            save_external(perceptron(), location)(path)
            with opened(path) as source, opened(tmp_path / location) as weights:
                reply = self.prepare(source, {location: weights}, directory, Daemon())
            reasons.append(reply.reason)
        assert reasons == ["", "external_path"]

    def test_names_that_the_directory_takes_for_one(
        self,
        offered: tuple[int, dict[str, int]],
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As one that ignores the case of letters."""
        monkeypatch.setattr(
            model_files, "external_path", lambda model, location: f"{directory}/source/w"
        )
        source, externals = offered
        again = dict.fromkeys(("sub/weights.bin", "w"), externals["sub/weights.bin"])
        read = model_files._read
        monkeypatch.setattr(
            model_files, "_read", lambda view: replace(read(view), locations=tuple(again))
        )
        reply = self.prepare(source, again, directory, Daemon())
        assert (reply.reason, reply.is_lasting) == ("preparer_failed", False)
        assert "FileExistsError" in reply.message

    def test_one_that_is_missing(
        self, offered: tuple[int, dict[str, int]], directory: Path
    ) -> None:
        daemon = Daemon()
        reply = self.prepare(offered[0], {}, directory, daemon)
        assert (reply.reason, reply.is_lasting) == ("external_missing", False)
        assert "more than 16 such files, or the model is larger than 16 MB" in reply.message
        assert "sub/weights.bin" in reply.message
        assert daemon.hashed == []

    def test_one_that_changes_meanwhile(
        self,
        offered: tuple[int, dict[str, int]],
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        source, externals = offered
        observe = verifying.observe

        def touching(create: Callable[[], Any]) -> Any:
            os.utime(externals["sub/weights.bin"], ns=(1, 1))
            return observe(create)

        monkeypatch.setattr(verifying, "observe", touching)
        reply = self.prepare(source, externals, directory, Daemon())
        assert (reply.reason, reply.is_lasting) == ("file_changed", False)
        assert os.listdir(directory) == ["model.onnx", "weights.bin"] or not os.listdir(directory)

    @pytest.mark.parametrize("has_externals", [False, True])
    def test_what_is_written_to_a_mapping(
        self, has_externals: bool, tmp_path: Path, directory: Path, no_leak: None
    ) -> None:
        """Found: it does not show in an identity, and got the key of what it was before."""
        path = changed = tmp_path / "model.onnx"
        if has_externals:
            changed = tmp_path / "weights.bin"
            save_external(perceptron(2))(path)
            after = changed.read_bytes()
            save_external(perceptron(1))(path)
        else:
            path.write_bytes(perceptron(1).content)
            after = perceptron(2).content
        with open(changed, "r+b") as file, mmap.mmap(file.fileno(), len(after)) as mapping:
            mapping[:] = changed.read_bytes()  # From now on no time shows it.

            class Writing(Daemon):
                def __call__(self, hashed: SourceHashed) -> bool:
                    before = os.stat(changed)
                    mapping[:] = after
                    assert os.stat(changed) == before
                    return super().__call__(hashed)

            with opened(path) as source, opened(changed) as external:
                offered = {"weights.bin": external} if has_externals else {}
                reply = self.prepare(source, offered, directory, Writing())
        assert reply.reason == "file_changed"
        assert os.listdir(directory) == []

    def test_one_that_grows_before_it_is_copied(
        self,
        offered: tuple[int, dict[str, int]],
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Found: it could fill the disk."""
        source, externals = offered
        weights = externals["sub/weights.bin"]
        expected = os.fstat(source).st_size + os.fstat(weights).st_size
        copied = []
        observe = verifying.observe

        class Growing(Daemon):
            def __call__(self, hashed: SourceHashed) -> bool:
                os.truncate(f"/proc/self/fd/{weights}", 1 << 24)
                return super().__call__(hashed)

        def measuring(create: Callable[[], Any]) -> Any:
            files = (directory / "source").rglob("*.*")
            copied.append(sum(each.stat().st_size for each in files))
            return observe(create)

        monkeypatch.setattr(verifying, "observe", measuring)
        assert self.prepare(source, externals, directory, Growing()).reason == "file_changed"
        assert copied == [expected]

    def test_a_disk_that_is_full(
        self,
        offered: tuple[int, dict[str, int]],
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(model_files, "_copy", full)
        reply = self.prepare(*offered, directory, Daemon())
        assert (reply.reason, reply.is_lasting) == ("disk_full", False)
        assert os.listdir(directory) == []

    def test_room_for_copies(
        self,
        offered: tuple[int, dict[str, int]],
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        source, externals = offered
        size = sum(os.fstat(each).st_size for each in (source, *externals.values()))

        class Status(NamedTuple):
            f_bavail: int
            f_frsize: int = 1

        monkeypatch.setattr(preparer.os, "statvfs", lambda _: Status(4 * size - 1))
        assert self.prepare(source, externals, directory, Daemon()).reason == "disk_full"
        monkeypatch.setattr(preparer.os, "statvfs", lambda _: Status(4 * size))
        assert self.prepare(source, externals, directory, Daemon()).reason == ""


class TestStructure:
    """What a file says of itself, before onnxruntime sees it."""

    def test_the_ort_format(self, tmp_path: Path, directory: Path) -> None:
        path = tmp_path / "model.bin"
        path.write_bytes(b"\x10\0\0\0ORTM" + bytes(1000))
        assert prepare(path, directory).reason == "ort_format"
        named = tmp_path / "model.ort"
        save(perceptron())(named)
        assert prepare(named, directory).reason == "ort_format"

    def test_an_empty_file(self, tmp_path: Path, directory: Path) -> None:
        path = tmp_path / "model.onnx"
        path.touch()
        reply = prepare(path, directory)
        assert (reply.reason, reply.is_lasting) == ("unknown_model", True)

    def test_a_file_of_something_else(self, tmp_path: Path, directory: Path) -> None:
        path = tmp_path / "model.onnx"
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
        reply = prepare(path, directory)
        assert reply.reason == "unknown_model"
        assert reply.message.startswith("cannot be read as an ONNX model: ")

    def test_an_ep_context(self, tmp_path: Path, directory: Path) -> None:
        path = tmp_path / "model.onnx"
        path.write_bytes(BROKEN["ep_context"]())
        assert prepare(path, directory).reason == "ep_context"

    def external(self, tmp_path: Path, location: str) -> Path:
        path = tmp_path / "model.onnx"
        save_external(perceptron())(path)
        model = onnx.load(str(path), load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        path.write_bytes(model.SerializeToString())
        return path

    @pytest.mark.parametrize(
        "location", ["/etc/passwd", "../weights.bin", "a/../../weights.bin", "..", "a\0b"]
    )
    def test_external_data_elsewhere(self, location: str, tmp_path: Path, directory: Path) -> None:
        daemon = Daemon()
        reply = prepare(self.external(tmp_path, location), directory, daemon)
        assert (reply.reason, reply.is_lasting) == ("external_path", True)
        assert daemon.hashed[0].externals == ()

    def test_external_data_that_are_linked_to(self, tmp_path: Path, directory: Path) -> None:
        """Inside the model's directory, or that of the file which the model is a link to."""
        (tmp_path / "models").mkdir()
        (tmp_path / "links").mkdir()
        path = self.external(tmp_path / "models", "link.bin")
        data = path.with_name("weights.bin")
        path.with_name("link.bin").symlink_to(data.name)
        assert prepare(path, directory).reason == ""
        linked = tmp_path / "links" / path.name
        linked.symlink_to(path)
        linked.with_name("link.bin").symlink_to(data)
        assert prepare(linked, directory).reason == ""
        # What is refused is this place, not the content.
        linked.unlink()
        linked.write_bytes(path.read_bytes())
        daemon = Daemon()
        reply = prepare(linked, directory, daemon)
        assert (reply.reason, reply.is_lasting) == ("external_path", False)
        assert daemon.hashed == []

    @pytest.mark.parametrize("location", ["missing.bin", ".", "x" * 300, "pipe"])
    def test_external_data_that_is_not_there(
        self, location: str, tmp_path: Path, directory: Path
    ) -> None:
        os.mkfifo(tmp_path / "pipe")
        daemon = Daemon()
        reply = prepare(self.external(tmp_path, location), directory, daemon)
        assert (reply.reason, reply.is_lasting) == ("external_missing", False)
        assert daemon.hashed == []

    def test_external_data_of_a_model_in_memory(self, tmp_path: Path, directory: Path) -> None:
        path = tmp_path / "model.onnx"
        save_external(perceptron())(path)
        with opened(path) as source:
            reply = preparer.prepare(request("", directory, source=source), Daemon())
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("external_data_of_bytes", True)

    def test_too_many_files(
        self, tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_files, "_EXTERNALS_LIMIT", 0)
        path = tmp_path / "model.onnx"
        save_external(perceptron())(path)
        assert prepare(path, directory).reason == "too_many_files"

    def test_a_pipe(self, directory: Path) -> None:
        reader, writer = os.pipe()
        reply = preparer.prepare(request("", directory, source=reader), Daemon())
        os.close(reader)
        os.close(writer)
        assert reply is not None
        assert reply.reason == "no_file"


class TestChanges:
    """Nothing is made of a mixture."""

    def test_a_model_whose_path_is_another_files_by_now(self, model: Path, directory: Path) -> None:
        with opened(model) as source:
            save(perceptron(2))(model.with_suffix(".new"))
            os.replace(model.with_suffix(".new"), model)
            reply = preparer.prepare(request(model, directory, source=source), Daemon())
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("file_changed", False)

    def test_a_source_that_changes_meanwhile(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        observe = verifying.observe

        def touching(create: Callable[[], Any]) -> Any:
            os.utime(model, ns=(1, 1))
            return observe(create)

        monkeypatch.setattr(verifying, "observe", touching)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("file_changed", False)

    def test_external_data_that_changes_meanwhile(
        self, tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "model.onnx"
        save_external(perceptron())(path)
        observe = verifying.observe

        def touching(create: Callable[[], Any]) -> Any:
            reference = observe(create)
            os.utime(tmp_path / "weights.bin", ns=(1, 1))
            return reference

        monkeypatch.setattr(verifying, "observe", touching)
        reply = prepare(path, directory)
        assert (reply.reason, reply.is_lasting) == ("file_changed", False)

    def test_a_model_that_was_broken_meanwhile(self, model: Path, directory: Path) -> None:
        """The error is not that of the content that was hashed."""
        content = model.read_bytes()

        def overwrite(hashed: SourceHashed) -> bool:
            model.write_bytes(content[:-100])
            os.utime(model, ns=(1, 1))
            return True

        with opened(model) as source:
            reply = preparer.prepare(request(model, directory, source=source), overwrite)
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("file_changed", False)

    def test_one_that_was_broken_in_the_beginning(self, model: Path, directory: Path) -> None:
        model.write_bytes(b"\x08" + model.read_bytes()[1:-100])
        reply = prepare(model, directory)
        assert reply.is_lasting
        assert reply.reason in ("invalid_model", "unknown_model")
