"""What onnxruntime makes of a recipe, and how it is put on the disk."""

from __future__ import annotations

import errno
import os
import platform
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import Graph, perceptron, save
from prepare_requests import prepare, recipe

from trims_shim.daemon.preparer import main as preparer
from trims_shim.daemon.preparer import optimising
from trims_shim.daemon.preparer.optimising import Sessions
from trims_shim.errors import FormatError
from trims_shim.wire.duties import PrepareReply


class TestRecipe:
    """Every part of it has its effect on what is made."""

    def outcome(self, model: Path, directory: Path, **fields: Any) -> tuple[bytes, bytes]:
        reply = prepare(model, directory, **fields)
        assert reply.reason == "", reply
        return (directory / "model.onnx").read_bytes(), (directory / "weights.bin").read_bytes()

    @pytest.mark.parametrize(
        "fields",
        [
            {"level": "ORT_ENABLE_BASIC"},
            {"disabled_optimizers": ("MatMulAddFusion", "GemmActivationFusion")},
            {"prepack": "off"},
            {"free_dimensions": (("name", "batch", "3"),)},
            {"free_dimensions": (("denotation", "DATA_BATCH", "3"),)},
            {"entries": (("optimization.disable_specified_optimizers", "MatMulAddFusion"),)},
        ],
        ids=lambda fields: next(iter(fields)),
    )
    def test_parts(self, fields: dict[str, Any], tmp_path: Path, directory: Path) -> None:
        sample = perceptron()
        sample.model.graph.input[0].type.denotation = "TENSOR"
        sample.model.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
        path = tmp_path / "model.onnx"
        save(sample)(path)
        assert self.outcome(path, directory, **fields) != self.outcome(path, directory)

    def test_what_no_file_shows(self) -> None:
        """Options of providers, which may change the graph; determinism; what a hit packs."""
        options = {"prefer_nhwc": "1", "use_tf32": "0"}
        flat = tuple(text for pair in options.items() for text in pair)
        providers = (("CUDAExecutionProvider", *flat), ("CPUExecutionProvider",))
        session = Mock()
        sessions = Sessions(recipe(providers=providers, is_deterministic=True, prepack="off"))
        sessions._binding = Mock(wraps=sessions._binding, InferenceSession=lambda *_: session)
        assert sessions.original("model.onnx") is session
        names, settings, _ = session.initialize_session.call_args.args
        assert dict(zip(names, settings, strict=True)) == {
            "CUDAExecutionProvider": options,
            "CPUExecutionProvider": {},
        }
        made = sessions._options("ORT_ENABLE_ALL")
        assert made.use_deterministic_compute
        assert made.get_session_config_entry("session.disable_prepacking") == "1"

    def test_threads_are_nobodys_business(self, model: Path, directory: Path) -> None:
        """Affinities have to agree with a number of threads that is not in the recipe."""
        entries = (("session.intra_op_thread_affinities", "1;1;1"),)
        assert self.outcome(model, directory, entries=entries) == self.outcome(model, directory)


def test_files_are_written_from_memory_of_its_own(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a mapping of another file they are in the page cache in small pieces: slow to map."""
    kinds: set[type] = set()
    pwrite = os.pwrite

    def spy(descriptor: int, data: Any, offset: int) -> int:
        kinds.add(type(data))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", spy)
    assert prepare(model, directory).reason == ""
    assert kinds == {bytes}


def stored_weight(directory: Path) -> Any:
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    (tensor,) = model.graph.initializer
    (offset,) = [int(each.value) for each in tensor.external_data if each.key == "offset"]
    content = (directory / "weights.bin").read_bytes()
    return np.frombuffer(content, np.float32, np.prod(tensor.dims), offset).reshape(tensor.dims)


@pytest.mark.parametrize(("machine", "is_transposed"), [("x86_64", True), ("aarch64", False)])
def test_packed_weights_of_products_are_transposed(
    machine: str,
    is_transposed: bool,
    tmp_path: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    graph = Graph("product")
    graph.input("x", ["n", 96])
    graph.node("Gemm", "x", graph.weight("w", 96, 256), outputs=["y"])
    graph.output("y", ["n", 256])
    (weight,) = map(numpy_helper.to_array, graph.initializers)
    path = tmp_path / "model.onnx"
    path.write_bytes(graph.model().SerializeToString())
    assert prepare(path, directory) == PrepareReply(probe="equal")
    if b"prepacked_" not in (directory / "model.onnx").read_bytes():
        pytest.skip("this onnxruntime saves no packed weights")
    expected = weight.T if is_transposed else weight
    np.testing.assert_array_equal(stored_weight(directory), expected)
    assert prepare(path, directory, prepack="off") == PrepareReply(probe="equal")
    np.testing.assert_array_equal(stored_weight(directory), weight)


class TestLimits:
    """What is short at the moment says nothing about a model."""

    def test_a_disk_without_room(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preparer, "_DISK_FACTOR", 1 << 60)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("disk_full", False)

    @pytest.mark.parametrize(
        ("number", "reason"),
        [
            (errno.ENOSPC, "disk_full"),
            (errno.EDQUOT, "disk_full"),
            (errno.EIO, "preparer_failed"),
        ],
    )
    def test_a_disk_that_fills_up_or_fails(
        self,
        number: int,
        reason: str,
        model: Path,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", full)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == (reason, False)
        assert "saved.bin" not in os.listdir(directory)

    def test_a_disk_that_fills_up_while_onnxruntime_writes(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(optimising, "_SAVED_WEIGHTS", "no/such/directory")
        monkeypatch.setattr(optimising, "_is_full", lambda directory: True)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("disk_full", False)
        assert f"{directory.parent} has no room" in reply.message
        assert "ONNXRuntimeError" not in reply.message

    def test_a_disk_that_was_full_while_onnxruntime_wrote(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may not have noticed: then what it saved is too short."""
        save_model = Sessions.save

        def save_part(self: Sessions, path: str, directory: str, *, is_packed: bool) -> None:
            save_model(self, path, directory, is_packed=is_packed)
            os.truncate(os.path.join(directory, "saved.bin"), 100)

        monkeypatch.setattr(Sessions, "save", save_part)
        monkeypatch.setattr(optimising, "_WRITE_BYTES", 1 << 60)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("disk_full", False)

    def test_a_disk_with_room_is_not_to_blame(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What onnxruntime saved has another form than it had in any version that is known."""

        def unknown(*_: Any, **__: Any) -> None:
            raise FormatError("a field of another kind")

        monkeypatch.setattr(optimising, "relayout", unknown)
        monkeypatch.setattr(optimising, "_is_full", lambda directory: False)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("not_relaid", True)
        assert os.listdir(directory) == []

    def test_a_file_that_is_as_long_as_it_may_be(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def limited(_: int) -> tuple[int, int]:
            return 1000, 1000

        monkeypatch.setattr(optimising.resource, "getrlimit", limited)
        assert not optimising._is_full(str(directory))
        (directory / "saved.bin").write_bytes(bytes(999))
        assert not optimising._is_full(str(directory))
        (directory / "saved.bin").write_bytes(bytes(1000))
        assert optimising._is_full(str(directory))

    def test_onnxruntime_that_cannot_write(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(optimising, "_SAVED_WEIGHTS", "no/such/directory")
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("not_saved", True)

    @pytest.mark.parametrize(
        "error",
        [MemoryError("short"), RuntimeError("std::bad_alloc"), RuntimeError("bad allocation")],
    )
    def test_memory(
        self, error: Exception, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(Sessions, "_create", fail)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("no_memory", False)

    def test_memory_of_our_own(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(directory: str, **_: Any) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(optimising, "place", fail)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("no_memory", False)

    @pytest.mark.parametrize(
        ("text", "is_lasting"),
        [("Too many open files", False), ("Type Error: Type (tensor(float))", True)],
    )
    def test_what_says_nothing_about_the_model(
        self,
        text: str,
        is_lasting: bool,
        model: Path,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(Sessions, "_create", fail)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("invalid_model", is_lasting)

    def test_messages_are_clipped(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("x" * 5_000_000)

        monkeypatch.setattr(Sessions, "_create", fail)
        assert len(prepare(model, directory).message) <= 1000


def test_kinds_of_initializers(tmp_path: Path, directory: Path) -> None:
    """Small ones stay in the model; a model of nothing else has an empty file of weights."""
    graph = Graph("small")
    graph.input("x", ["n", 4])
    graph.node("MatMul", "x", graph.weight("w", 4, 4), outputs=["y"])
    graph.output("y", ["n", 4])
    path = tmp_path / "model.onnx"
    path.write_bytes(graph.model().SerializeToString())
    assert prepare(path, directory).reason == ""
    assert (directory / "weights.bin").read_bytes() == b""
