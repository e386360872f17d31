"""Preparing a model, in this process: what is published is the same model, or nothing is."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from blake3 import blake3
from onnx_kinds import BROKEN, NOT_RELOADED
from onnx_models import FLOAT, INT64, SAMPLES, Graph, images, perceptron, save, save_external
from prepare_requests import Daemon, opened, prepare, request

from trims_shim.daemon.preparer import main as preparer
from trims_shim.daemon.preparer import verifying
from trims_shim.daemon.preparer.fingerprints import fingerprint
from trims_shim.daemon.preparer.installation import Installation
from trims_shim.daemon.preparer.optimising import Refusal, Sessions
from trims_shim.errors import CorruptFile, FileChanged, MessageTooLarge, WireError
from trims_shim.formats.onnx import read_model
from trims_shim.wire import duties, frames, messages
from trims_shim.wire.duties import PrepareReply, SourceHashed


def run(session: Any, feeds: dict[str, Any]) -> list[str]:
    names = [each.name for each in session.outputs_meta]
    return [fingerprint(each) for each in session.run(names, feeds, None)]


class TestPublished:
    """Files, and what sessions make of them."""

    @pytest.mark.parametrize("name", SAMPLES)
    def test_a_sample_gives_the_same_bits(self, name: str, tmp_path: Path, directory: Path) -> None:
        sample = SAMPLES[name](3)
        path = tmp_path / f"{name}.onnx"
        save(sample)(path)
        reply = prepare(path, directory)
        if name in NOT_RELOADED:
            assert reply.reason == "does_not_reload"
            return
        assert reply.reason == "", reply
        sessions = Sessions(request(path, directory).recipe)
        for feeds in sample.feeds:
            original, prepared = sessions.original(str(path)), sessions.prepared(str(directory))
            expected = run(original, feeds)
            if run(original, feeds) == expected:
                assert run(prepared, feeds) == expected

    def test_the_files(self, model: Path, directory: Path) -> None:
        reply = prepare(model, directory)
        assert reply == PrepareReply(probe="equal")
        assert sorted(os.listdir(directory)) == ["model.onnx", "weights.bin"]
        for name in os.listdir(directory):
            status = os.stat(directory / name)
            assert stat.S_IMODE(status.st_mode) == 0o400
        found = read_model((directory / "model.onnx").read_bytes())
        assert found.locations == ("weights.bin",)
        assert all(each.span.offset_bytes % 64 == 0 for each in found.tensors if each.location)

    def test_packed_weights_are_in_the_file(self, model: Path, directory: Path) -> None:
        prepare(model, directory)
        assert b"prepacked_" in (directory / "model.onnx").read_bytes()

    def test_without_packed_weights(self, model: Path, directory: Path) -> None:
        assert prepare(model, directory, prepack="off").probe == "equal"
        assert b"prepacked_" not in (directory / "model.onnx").read_bytes()

    def test_the_same_files_again(self, model: Path, directory: Path, tmp_path: Path) -> None:
        prepare(model, directory)
        again = tmp_path / "again"
        again.mkdir()
        prepare(model, again)
        for name in os.listdir(directory):
            assert (directory / name).read_bytes() == (again / name).read_bytes()

    def test_graph_optimisation_has_been_done(self, model: Path, directory: Path) -> None:
        prepare(model, directory)
        operators = read_model((directory / "model.onnx").read_bytes()).operators
        assert ("com.microsoft", "FusedGemm") in operators or ("", "Gemm") in operators
        unoptimised = read_model(model.read_bytes()).operators
        assert prepare(model, directory, level="ORT_DISABLE_ALL").reason == ""
        assert read_model((directory / "model.onnx").read_bytes()).operators == unoptimised

    def test_external_data(self, tmp_path: Path, directory: Path) -> None:
        path = tmp_path / "outside" / "model.onnx"
        path.parent.mkdir()
        save_external(perceptron(), "data/weights.bin")(path)
        daemon = Daemon()
        assert prepare(path, directory, daemon) == PrepareReply(probe="equal")
        (hashed,) = daemon.hashed
        (external,) = hashed.externals
        content = (path.parent / "data/weights.bin").read_bytes()
        assert external.location == "data/weights.bin"
        assert external.digest == blake3(content).hexdigest()
        assert external.path == str(path.parent / "data/weights.bin")
        status = os.stat(external.path)
        assert (external.identity.inode, external.identity.size_bytes) == (
            status.st_ino,
            len(content),
        )

    def test_a_model_in_memory(self, directory: Path) -> None:
        content = perceptron().content
        descriptor = os.memfd_create("model")
        os.write(descriptor, content)
        daemon = Daemon()
        reply = preparer.prepare(request("", directory, source=descriptor), daemon)
        os.close(descriptor)
        assert reply == PrepareReply(probe="equal")
        assert daemon.hashed == [SourceHashed(blake3(content).hexdigest())]


class TestCasts:
    """onnxruntime removes casts of some models that it saved when it loads them again."""

    @staticmethod
    def rounded(graph: Graph, *kinds: int) -> str:
        """``x`` through casts and a product, which takes 130 columns."""
        value = "x"
        for kind in kinds:
            value = graph.node("Cast", value, to=kind)
        value = graph.node("Cast", graph.node("Tanh", value), to=FLOAT)
        return graph.node("MatMul", value, graph.weight("w", 130, 512))

    @staticmethod
    def published(graph: Graph, tmp_path: Path, directory: Path) -> bool:
        """Whether it is; then it gives the bits of the original for 130 columns."""
        path = tmp_path / "model.onnx"
        save(graph.model())(path)
        reply = prepare(path, directory)
        assert reply.reason in ("", "outputs_differ"), reply
        if reply.reason:
            return False
        assert sorted(os.listdir(directory)) == ["model.onnx", "weights.bin"]
        sessions = Sessions(request(path, directory).recipe)
        feeds = {"x": images(1, 3, 130)}
        assert run(sessions.prepared(str(directory)), feeds) == run(
            sessions.original(str(path)), feeds
        )
        return True

    def test_of_a_model_for_which_no_inputs_can_be_made(
        self, tmp_path: Path, directory: Path
    ) -> None:
        """Found: it was published, and sessions did not round to float16."""
        half = onnx.TensorProto.FLOAT16
        graph = Graph("casts")
        graph.input("x", ["batch", "columns"])
        graph.output(self.rounded(graph, half, FLOAT, half), ["batch", 512])
        self.published(graph, tmp_path, directory)

    def test_in_a_branch_that_made_up_inputs_do_not_take(
        self, tmp_path: Path, directory: Path
    ) -> None:
        half = onnx.TensorProto.FLOAT16
        branches = []
        for name, kinds in (("then", (half, FLOAT, half)), ("else", (FLOAT,))):
            branch = Graph(name)
            branch.output(self.rounded(branch, *kinds), None)
            branches.append(branch.finish())
        graph = Graph("casts")
        graph.input("x", ["batch", 130])
        width = graph.node("ReduceMax", graph.node("Shape", "x"), keepdims=0)
        rows = graph.node("Div", graph.node("Size", "x"), width)
        three = graph.node("Equal", rows, graph.constant("three", np.array(3)))
        graph.node("If", three, outputs=["y"], then_branch=branches[0], else_branch=branches[1])
        graph.output("y", None)
        self.published(graph, tmp_path, directory)

    def test_that_are_kept(self, tmp_path: Path, directory: Path) -> None:
        graph = Graph("casts")
        graph.input("x", ["batch", 130])
        graph.output(self.rounded(graph, INT64, FLOAT), ["batch", 512])
        assert self.published(graph, tmp_path, directory)


class TestNotWanted:
    def test_nothing_is_made(self, model: Path, directory: Path) -> None:
        daemon = Daemon(is_wanted=False)
        with opened(model) as source:
            assert preparer.prepare(request(model, directory, source=source), daemon) is None
        assert daemon.hashed[0].digest == blake3(model.read_bytes()).hexdigest()
        assert os.listdir(directory) == []


class TestRefusals:
    """A reason, and whether it lasts."""

    @pytest.mark.parametrize("name", BROKEN)
    def test_what_cannot_be_loaded(self, name: str, tmp_path: Path, directory: Path) -> None:
        path = tmp_path / "model.onnx"
        path.write_bytes(BROKEN[name]())
        daemon = Daemon()
        reply = prepare(path, directory, daemon)
        assert reply.reason in ("invalid_model", "unknown_model", "ep_context")
        assert reply.is_lasting
        assert reply.message
        assert daemon.hashed == [SourceHashed(blake3(path.read_bytes()).hexdigest())]

    def test_another_onnxruntime(self, model: Path, directory: Path) -> None:
        for fields in ({"runtime": "onnxruntime 1.0"}, {"build": "x"}, {"package": "/x"}):
            reply = prepare(model, directory, **fields)
            assert (reply.reason, reply.is_lasting) == ("other_onnxruntime", False)

    def test_the_same_onnxruntime_in_another_container(self, model: Path, directory: Path) -> None:
        """Its directory there says nothing here."""
        assert prepare(model, directory, package="", build="x").reason == "other_onnxruntime"
        assert prepare(model, directory, package="").reason in ("", "no_gain")

    def test_an_onnxruntime_that_cannot_be_imported(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may be half installed: the model is not to blame."""

        def broken() -> Installation:
            raise ImportError("libonnxruntime.so is missing")

        asked = request(model, directory)
        monkeypatch.setattr(preparer, "installation", broken)
        with opened(model) as source:
            reply = preparer.prepare(asked._replace(source=source), Daemon())
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("not_importable", False)
        assert f"{asked.package}: ImportError: libonnxruntime.so is missing" in reply.message

    def test_another_protocol(self, model: Path, directory: Path) -> None:
        reply = prepare(model, directory, protocol=messages.PROTOCOL_VERSION + 1)
        assert (reply.reason, reply.is_lasting) == ("other_protocol", False)

    def test_a_recipe_that_no_client_of_ours_has(
        self, model: Path, directory: Path, tmp_path: Path
    ) -> None:
        """One in another container may ask for anything, such as files of any name."""
        written = tmp_path / "statistics.csv"
        entry = ("session.collect_node_memory_stats_to_file", str(written))
        reply = prepare(model, directory, entries=(entry,))
        assert (reply.reason, reply.is_lasting) == ("config_entry", False)
        assert not written.exists()
        for providers in (
            (("CUDAExecutionProvider", "gpu_external_alloc", "4096"), ("CPUExecutionProvider",)),
            (("CPUExecutionProvider",), ("OtherExecutionProvider", "path", "/lib.so")),
            (),
        ):
            assert prepare(model, directory, providers=providers).reason == "provider"
        assert os.listdir(directory) == []

    def test_what_has_taken_the_place_of_a_model(self, tmp_path: Path, directory: Path) -> None:
        """What is wrong with it says nothing, for good, of the content that was hashed."""
        path = tmp_path / "model.onnx"
        save_external(perceptron(), "weights.bin")(path)
        daemon = Daemon()

        def replace(hashed: SourceHashed) -> bool:
            (tmp_path / "weights.bin").write_bytes(b"")
            return daemon(hashed)

        with opened(path) as source:
            reply = preparer.prepare(request(path, directory, source=source), replace)
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == (FileChanged.reason, False)

    @pytest.mark.parametrize("is_refused", [False, True])
    def test_what_is_replaced_while_it_is_verified(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
    ) -> None:
        """What was found is not true of what is there."""

        def verify(*found: object, **rest: object) -> str:
            (directory / "weights.bin").unlink()
            (directory / "weights.bin").write_bytes(b"other")
            if is_refused:
                raise Refusal("outputs_differ", "")
            return "equal"

        monkeypatch.setattr(verifying, "verify", verify)
        monkeypatch.setattr(Sessions, "check_casts", lambda *_: None)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == (CorruptFile.reason, False)

    def test_a_model_that_is_written_to_while_it_is_prepared(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sessions may have read other bytes than those that were hashed."""

        def verify(*found: object, **rest: object) -> str:
            with open(model, "ab") as file:
                file.write(b"more")
            return "equal"

        monkeypatch.setattr(verifying, "verify", verify)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == (FileChanged.reason, False)

    def test_a_disk_without_room_for_what_is_made_of_a_model(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is not filled first: others write to it."""
        needed_bytes = 3 * model.stat().st_size
        status = SimpleNamespace(f_bavail=needed_bytes - 1, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda path: status)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("disk_full", False)
        status.f_bavail = needed_bytes
        assert prepare(model, directory).reason == ""

    def test_a_directory_that_is_gone(self, model: Path, tmp_path: Path) -> None:
        reply = prepare(model, tmp_path / "nowhere")
        assert (reply.reason, reply.is_lasting) == ("preparer_failed", False)


class TestServing:
    """The process's end of the conversation."""

    @pytest.fixture
    def serve(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[[], socket.socket]]:
        """Serves a request in a thread; the daemon's end of the socket."""
        monkeypatch.setattr(preparer, "_end_with", lambda connection: None)
        with contextlib.ExitStack() as open_ends:

            def start() -> socket.socket:
                ours, theirs = map(open_ends.enter_context, socket.socketpair())
                source = open_ends.enter_context(opened(model))
                frames.send(ours, request(model, directory, source=source))
                thread = threading.Thread(target=preparer._serve, args=(theirs,), daemon=True)
                thread.start()
                open_ends.callback(thread.join, 60)
                return ours

            yield start

    @staticmethod
    def hear(connection: socket.socket) -> Any:
        return frames.receive(connection, deadline_s=time.monotonic() + 60)

    def test_a_conversation(
        self,
        serve: Callable[[], socket.socket],
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        watched: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        monkeypatch.setattr(preparer, "_end_with", watched.put)
        connection = serve()
        assert self.hear(connection) == SourceHashed(blake3(model.read_bytes()).hexdigest())
        frames.send(connection, duties.ContentWanted())
        assert self.hear(connection) == PrepareReply(probe="equal")
        watched.get(timeout=60)  # It would have ended with the daemon meanwhile.

    def test_so_many_files_that_there_is_no_message_for_them(
        self, serve: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send = frames.send

        def refuse(connection: socket.socket, message: Any, **rest: Any) -> None:
            if isinstance(message, SourceHashed):
                raise MessageTooLarge("too long")
            send(connection, message, **rest)

        monkeypatch.setattr(frames, "send", refuse)
        reply = self.hear(serve())
        assert (reply.reason, reply.is_lasting) == ("too_many_files", True)

    def test_a_daemon_that_is_gone_before_the_files_are_hashed(
        self, model: Path, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Found: the log of the next daemon had it as a model that could not be prepared."""
        ours, theirs = socket.socketpair()
        with theirs, opened(model) as source:
            with ours:
                frames.send(ours, request(model, directory, source=source))
            with pytest.raises(WireError):
                preparer._serve(theirs)
        assert caplog.messages == []

    def test_what_is_no_request(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frames.send(ours, duties.ContentWanted())
            preparer._serve(theirs)
            ours.settimeout(0)
            with pytest.raises(BlockingIOError):
                ours.recv(1)

    def test_it_ends_at_once_where_the_content_is_not_wanted(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "_exit", sys.exit)
        ours, theirs = socket.socketpair()
        with ours, theirs, opened(model) as source:
            frames.send(ours, request(model, directory, source=source))
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(SystemExit):
                preparer._serve(theirs)
        assert os.listdir(directory) == []

    def test_it_ends_with_a_daemon_that_had_not_read_all(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends: list[int] = []
        monkeypatch.setattr(os, "_exit", ends.append)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.send(b"unread")
            ours.close()
            preparer._end_with(theirs)
        assert ends == [0]
