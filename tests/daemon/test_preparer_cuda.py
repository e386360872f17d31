"""The preparer asks onnxruntime which initializers it takes from a device, and lists exactly these.

In host memory; that a device's sessions are made at all is for tests/gpu.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnx_on_host
import onnxruntime
import pytest
from emulated_cuda import Emulated
from onnx_kinds import NOT_RELOADED
from onnx_models import SAMPLES, Graph, Sample, perceptron
from onnx_on_host import CPU, HostSessions, prepare, recipe

from trims_shim.daemon.preparer import cuda as preparer_cuda
from trims_shim.daemon.preparer import main as preparer
from trims_shim.daemon.preparer import verifying
from trims_shim.daemon.preparer.cuda import CudaSessions, candidates, sessions_of
from trims_shim.daemon.preparer.fingerprints import fingerprint
from trims_shim.daemon.preparer.installation import installation
from trims_shim.daemon.preparer.optimising import Refusal, Sessions
from trims_shim.formats import layout_of
from trims_shim.formats.onnx import OnnxModel, StoredTensor, read_model
from trims_shim.formats.onnx_directory import read_directory
from trims_shim.memory import dlpack
from trims_shim.specs import Span
from trims_shim.wire import duties, messages

CUDA_RECIPE = recipe(providers=(("CUDAExecutionProvider", "device_id", "GPU-1", "use_tf32", "0"),))


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    before = dlpack.offered()
    yield
    assert dlpack.offered() == before


def listed(directory: Path) -> dict[str, tuple[int, ...]]:
    content = (directory / "weights.bin").read_bytes()
    return {each.name: each.shape for each in read_directory(content)}


def shapes(directory: Path) -> set[tuple[int, ...]]:
    return set(listed(directory).values())


class TestListing:
    def test_what_is_packed_is_not_listed(self, tmp_path: Path) -> None:
        prepare(perceptron(), tmp_path)
        assert (512, 256) in shapes(tmp_path)
        assert (64, 256) not in shapes(tmp_path)

    def test_without_packing_it_is(self, tmp_path: Path) -> None:
        prepare(perceptron(), tmp_path, prepack="off")
        assert {(512, 256), (64, 256), (256, 10)} <= shapes(tmp_path)

    def test_small_ones_are_not(self, tmp_path: Path) -> None:
        graph = Graph()
        graph.input("x", [1])
        small = graph.node("Add", "x", graph.weight("small", 255))
        large = graph.node("Add", "x", graph.weight("large", 256))
        graph.node("Concat", small, large, axis=0, outputs=["y"])
        graph.output("y", [511])
        feeds = ({"x": np.ones(1, np.float32)},)
        prepare(Sample(graph.model(), feeds), tmp_path)
        assert list(listed(tmp_path)) == ["large"]

    @pytest.mark.parametrize("name", [each for each in SAMPLES if each not in NOT_RELOADED])
    @pytest.mark.parametrize("prepack", ["share", "off"])
    def test_outputs_are_the_originals(self, tmp_path: Path, name: str, prepack: str) -> None:
        sample = SAMPLES[name](1)
        prepare(sample, tmp_path, prepack=prepack)
        sessions = HostSessions(recipe(prepack=prepack))
        original = sessions.original(str(tmp_path / "source.onnx"))
        prepared = sessions.prepared(str(tmp_path))
        names = [each.name for each in original.outputs_meta]
        for feeds in sample.feeds:
            for ours, theirs in zip(
                prepared.run(names, feeds, None), original.run(names, feeds, None), strict=True
            ):
                assert fingerprint(ours) == fingerprint(theirs)

    def test_a_listed_session_reads_what_it_is_given(self, tmp_path: Path) -> None:
        """The file is not where a session has its weights from."""
        sample = perceptron()
        prepare(sample, tmp_path)

        class Negating(HostSessions):
            def put(self, data: memoryview) -> tuple[int, object]:
                array = -np.frombuffer(bytes(data), np.float32)
                return array.ctypes.data, array

        plain, other = (kind(recipe()).prepared(str(tmp_path)) for kind in (HostSessions, Negating))
        outputs = [each.run(["y"], sample.feeds[1], None)[0] for each in (plain, other)]
        assert not np.array_equal(*outputs)

    def test_once_and_only_behind_the_weights(self, tmp_path: Path) -> None:
        prepare(perceptron(), tmp_path)
        path = tmp_path / "weights.bin"
        before = path.read_bytes(), os.stat(path)
        HostSessions(recipe()).prepared(str(tmp_path))
        assert path.read_bytes() == before[0]
        assert os.stat(path).st_mtime_ns == before[1].st_mtime_ns
        assert stat.S_IMODE(before[1].st_mode) == 0o400
        layout = layout_of(before[0])
        assert len(layout.placed) == len(listed(tmp_path))
        model = read_model((tmp_path / "model.onnx").read_bytes())
        spans = {each.name: each.span for each in model.tensors}
        assert {each.source for each in layout.placed} <= set(spans.values())

    def test_the_same_model_gives_the_same_files(self, tmp_path: Path) -> None:
        contents = []
        for number in range(2):
            path = prepare(perceptron(), tmp_path / str(number))
            contents.append((Path(path).read_bytes(), Path(path).with_name("weights.bin")))
        assert contents[0][0] == contents[1][0]
        assert contents[0][1].read_bytes() == contents[1][1].read_bytes()

    def test_a_model_without_weights(self, tmp_path: Path) -> None:
        graph = Graph()
        graph.input("x", [2])
        graph.node("Relu", "x", outputs=["y"])
        graph.output("y", [2])
        prepare(Sample(graph.model(), ()), tmp_path)
        assert listed(tmp_path) == {}

    def test_values_that_are_refused_leave_nothing(self, tmp_path: Path) -> None:
        prepare(perceptron(), tmp_path)

        class Owning(HostSessions):
            def _value(self, record: Any, hold: Any) -> Any:
                array = np.zeros(record.shape, np.float32)
                binding: Any = onnxruntime.OrtValue
                return binding.ortvalue_from_shape_and_type(array.shape, np.float32, "cpu")

        with pytest.raises(Refusal) as refused:
            Owning(recipe()).prepared(str(tmp_path))
        assert refused.value.reason == "does_not_reload"


def tensor(name: str, offset: int = 0, size: int = 4096, **fields: Any) -> StoredTensor:
    fields = {
        "dtype": 1,
        "shape": (size // 4,),
        "location": "w",
        "span": Span(offset, size),
    } | fields
    return StoredTensor(name, **fields)


@pytest.mark.parametrize(
    ("tensors", "names"),
    [
        ([tensor("a"), tensor("b", 4096)], ["a", "b"]),
        ([tensor("b", 4096), tensor("a")], ["a", "b"]),
        ([tensor("a", 0, 1020)], []),
        ([tensor("a", 0, 1024)], ["a"]),
        # A sub-graph's of the same name would be given the other's.
        ([tensor("a"), tensor("a", 4096), tensor("b", 8192)], ["b"]),
        ([tensor("a"), tensor("b")], ["a"]),
        ([tensor("a"), tensor("b", 2048, 4096)], ["a"]),
        ([tensor("a", location="")], []),
        ([tensor("a", location="other")], []),
        ([tensor("a", span=None)], []),
        ([tensor("a", dtype=8)], []),
        ([tensor("a", dtype=9)], []),
        ([tensor("a", shape=(7,))], []),
        ([tensor("a", dtype=10, shape=(2048,))], ["a"]),
    ],
)
def test_candidates(tensors: list[StoredTensor], names: list[str]) -> None:
    model = OnnxModel(frozenset(), tuple(tensors), ("w",))
    assert [each.name for each in candidates(model, "w")] == names


class TestWithoutCuda:
    def test_other_recipes_have_ordinary_sessions(self) -> None:
        assert type(sessions_of(recipe())) is Sessions
        assert type(sessions_of(recipe(providers=()))) is Sessions

    def test_a_machine_without_the_device(self) -> None:
        with pytest.raises(Refusal, match="GPU-1") as refused:
            sessions_of(CUDA_RECIPE)
        assert (refused.value.reason, refused.value.is_lasting) == ("no_cuda", False)

    @pytest.mark.parametrize("emulated_environment", [{"exclusive": 1}], indirect=True)
    def test_a_device_for_one_process(self, emulated_cuda: Emulated) -> None:
        provider = ("CUDAExecutionProvider", "device_id", emulated_cuda.ids[0])
        with pytest.raises(Refusal, match="compute mode") as refused:
            sessions_of(recipe(providers=(provider,)))
        assert (refused.value.reason, refused.value.is_lasting) == ("no_cuda", False)

    def test_an_onnxruntime_of_another_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CudaSessions, "index_of", lambda self, provider: 3)
        with pytest.raises(Refusal, match="built without") as refused:
            sessions_of(CUDA_RECIPE)
        assert (refused.value.reason, refused.value.is_lasting) == ("no_cuda", False)

    def test_a_session_without_the_device(self, tmp_path: Path) -> None:
        """As onnxruntime makes one where CUDA does not work: of the CPU, without an error."""

        class Absent(HostSessions):
            provider = "AzureExecutionProvider"

        path = tmp_path / "model.onnx"
        path.write_bytes(perceptron().content)
        with pytest.raises(Refusal, match="CPUExecutionProvider") as refused:
            Absent(recipe()).original(str(path))
        assert (refused.value.reason, refused.value.is_lasting) == ("no_cuda", False)

    def test_an_onnxruntime_that_takes_no_capsules(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Binding:
            OrtValue = object

            def __getattr__(self, name: str) -> Any:
                return getattr(onnxruntime.capi._pybind_state, name)

        class Old(HostSessions):
            def __init__(self, recipe: messages.SessionRecipe) -> None:
                super().__init__(recipe)
                self._binding = Binding()

        monkeypatch.setattr(onnx_on_host, "HostSessions", Old)
        prepare(perceptron(), tmp_path)
        assert listed(tmp_path) == {}


class TestLibraries:
    def test_they_are_loaded_before_a_session_is_made(self) -> None:
        loaded = []

        class Loading(HostSessions):
            def prepare_libraries(self) -> None:
                loaded.append(self.index)

        Loading(recipe())
        assert loaded == [0]

    def test_what_is_not_found_is_not_printed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """And onnxruntime before 1.21 does not look for them."""
        sessions, called = HostSessions(recipe()), []

        def preload() -> None:
            called.append(1)
            print("Failed to load libcudnn.so")

        monkeypatch.setattr(onnxruntime, "preload_dlls", preload, raising=False)
        CudaSessions.prepare_libraries(sessions)
        monkeypatch.delattr(onnxruntime, "preload_dlls")
        CudaSessions.prepare_libraries(sessions)
        assert called == [1]
        assert capsys.readouterr().out == ""


class TestDevices:
    """A recipe names a device by its id; onnxruntime by its number here."""

    @pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
    @pytest.mark.parametrize(("visible", "numbers"), [("0,1", ["0", "1"]), ("1,0", ["1", "0"])])
    def test_the_number_is_this_processs(
        self,
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
        visible: str,
        numbers: list[str],
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(CudaSessions, "provider", CPU)
        found = []
        for device in emulated_cuda.ids:
            options = ("arena_extend_strategy", "x", "device_id", device, "use_tf32", "0")
            sessions = sessions_of(recipe(providers=(("CUDAExecutionProvider", *options), (CPU,))))
            assert isinstance(sessions, CudaSessions)
            (name, *texts), cpu = sessions._recipe.providers
            given = dict(zip(texts[::2], texts[1::2], strict=True))
            assert (name, cpu) == ("CUDAExecutionProvider", (CPU,))
            found.append(given.pop("device_id"))
            assert given == {"arena_extend_strategy": "x", "use_tf32": "0"}
        assert found == numbers


class TestThePreparer:
    def test_it_verifies_a_session_with_its_weights_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preparer_cuda, "sessions_of", HostSessions)
        monkeypatch.setattr(verifying, "_SHARED_ANYWAY_BYTES", 0)
        reply = self.prepare(tmp_path, recipe())
        assert (reply.reason, reply.probe) == ("", "equal")
        directory = tmp_path / "making"
        assert sorted(os.listdir(directory)) == ["model.onnx", "weights.bin"]
        assert (512, 256) in shapes(directory)

    @pytest.mark.parametrize(
        ("number", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "preparer_failed")]
    )
    def test_a_disk_that_fills_up_or_fails_while_weights_are_listed(
        self, number: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: the files were said to have changed while they were verified."""
        append = preparer_cuda._append

        def full(path: str, data: bytes) -> None:
            append(path, data[:100])
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(preparer_cuda, "sessions_of", HostSessions)
        monkeypatch.setattr(preparer_cuda, "_append", full)
        reply = self.prepare(tmp_path, recipe())
        assert (reply.reason, reply.is_lasting) == (reason, False)

    def prepare(self, tmp_path: Path, asked: messages.SessionRecipe) -> duties.PrepareReply:
        path = tmp_path / "model.onnx"
        path.write_bytes(perceptron().content)
        directory = tmp_path / "making"
        directory.mkdir()
        package = installation().package
        with path.open("rb") as file:
            source = file.fileno()
            request = duties.PrepareRequest(
                messages.PROTOCOL_VERSION, source, str(path), asked, package, str(directory)
            )
            reply = preparer.prepare(request, lambda hashed: True)
        assert reply is not None
        return reply

    def test_it_says_that_there_is_no_device(self, tmp_path: Path) -> None:
        reply = self.prepare(tmp_path, CUDA_RECIPE)
        assert (reply.reason, reply.is_lasting) == ("no_cuda", False)
        assert os.listdir(tmp_path / "making") == []
