"""A prepared model is the same in everything that can be seen, or it is thrown away."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import Graph, perceptron, save
from prepare_requests import prepare, recipe, request

from trims_shim.daemon.preparer import optimising, verifying
from trims_shim.daemon.preparer.optimising import Refusal, Sessions
from trims_shim.daemon.preparer.probe_inputs import Argument


class TestVerification:
    """What onnxruntime saved is not trusted."""

    def damaged(
        self, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], *, packed_only: bool
    ) -> list[bool]:
        """Damage what is placed; the list gets an entry for each attempt."""
        attempts: list[bool] = []
        save_model, place = Sessions.save, optimising.place

        def spoiled_save(self: Sessions, path: str, directory: str, *, is_packed: bool) -> None:
            attempts.append(is_packed)
            save_model(self, path, directory, is_packed=is_packed)

        def spoiled_place(directory: str, **rest: Any) -> None:
            place(directory, **rest)
            if attempts[-1] or not packed_only:
                damage(Path(directory))

        monkeypatch.setattr(Sessions, "save", spoiled_save)
        monkeypatch.setattr(optimising, "place", spoiled_place)
        return attempts

    @staticmethod
    def other_bits(directory: Path) -> None:
        path = directory / "weights.bin"
        content = bytearray(path.read_bytes())
        content[:] = bytes(len(content))
        path.chmod(0o600)
        path.write_bytes(content)

    @staticmethod
    def other_name(directory: Path) -> None:
        path = directory / "model.onnx"
        model = onnx.load(str(path), load_external_data=False)
        model.graph.input[0].name = "renamed"
        for node in model.graph.node:
            node.input[:] = ["renamed" if each == "x" else each for each in node.input]
        path.chmod(0o600)
        path.write_bytes(model.SerializeToString())

    @staticmethod
    def other_producer(directory: Path) -> None:
        path = directory / "model.onnx"
        model = onnx.load(str(path), load_external_data=False)
        model.producer_name = "somebody"
        path.chmod(0o600)
        path.write_bytes(model.SerializeToString())

    @staticmethod
    def other_shape(directory: Path) -> None:
        """As onnxruntime saves some models, with shapes that it has worked out."""
        path = directory / "model.onnx"
        model = onnx.load(str(path), load_external_data=False)
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
        path.chmod(0o600)
        path.write_bytes(model.SerializeToString())

    @staticmethod
    def no_such_row(directory: Path) -> None:
        """A session can be created, and never run."""
        path = directory / "model.onnx"
        model = onnx.load(str(path), load_external_data=False)
        model.graph.initializer.append(numpy_helper.from_array(np.array([1 << 20]), "beyond"))
        model.graph.node.append(helper.make_node("Gather", ["x", "beyond"], ["nothing"]))
        path.chmod(0o600)
        path.write_bytes(model.SerializeToString())

    @staticmethod
    def no_model(directory: Path) -> None:
        path = directory / "model.onnx"
        path.chmod(0o600)
        path.write_bytes(b"\x08")

    @pytest.mark.parametrize(
        ("damage", "reason", "attempts"),
        [
            ("other_bits", "outputs_differ", [True, False]),
            ("other_name", "metadata_differs", [True]),
            ("other_producer", "metadata_differs", [True]),
            ("other_shape", "metadata_differs", [True]),
            ("no_such_row", "does_not_run", [True, False]),
            ("no_model", "does_not_reload", [True, False]),
        ],
    )
    def test_what_is_wrong_is_refused(
        self,
        damage: str,
        reason: str,
        attempts: list[bool],
        model: Path,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        made = self.damaged(monkeypatch, getattr(self, damage), packed_only=False)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == (reason, True)
        assert made == attempts

    def test_without_packed_weights_it_may_work(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = self.damaged(monkeypatch, self.no_model, packed_only=True)
        reply = prepare(model, directory)
        assert made == [True, False]
        assert (reply.reason, reply.probe) == ("", "equal")
        assert reply.message.startswith("without packed weights: does_not_reload")
        assert b"prepacked_" not in (directory / "model.onnx").read_bytes()

    @pytest.mark.parametrize("prepack", ["share", "off"])
    @pytest.mark.parametrize(
        ("content", "reason"),
        [(None, "preparer_failed"), (b"other weights", "corrupt")],
        ids=["deleted", "replaced"],
    )
    def test_weights_that_somebody_deletes_or_replaces_meanwhile(
        self,
        content: bytes | None,
        reason: str,
        prepack: str,
        model: Path,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Found: the model was refused for good."""
        prepared = Sessions.prepared

        def meanwhile(self: Sessions, directory: str) -> Any:
            path = Path(directory, "weights.bin")
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
            return prepared(self, directory)

        monkeypatch.setattr(Sessions, "prepared", meanwhile)
        reply = prepare(model, directory, prepack=prepack)
        assert (reply.reason, reply.is_lasting) == (reason, False)

    def test_what_onnxruntime_writes_may_be_truncated(
        self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_model = Sessions.save

        def save_part(self: Sessions, path: str, directory: str, *, is_packed: bool) -> None:
            save_model(self, path, directory, is_packed=is_packed)
            if is_packed:
                os.truncate(os.path.join(directory, "saved.bin"), 70_000)

        monkeypatch.setattr(Sessions, "save", save_part)
        reply = prepare(model, directory)
        assert (reply.reason, reply.probe) == ("", "equal")
        assert reply.message.startswith("without packed weights: not_relaid")

    def test_a_model_that_no_inputs_fit(self, tmp_path: Path, directory: Path) -> None:
        """Published on the strength of everything else."""
        graph = Graph("choosy")
        graph.input("x", ["n", 64])
        graph.constant("split", np.array([40, 60]))
        value = graph.node("MatMul", "x", graph.weight("w", 64, 64))
        graph.node("Split", value, "split", axis=0, outputs=["y", "z"])
        graph.output("y", [40, 64])
        path = tmp_path / "model.onnx"
        path.write_bytes(graph.model().SerializeToString())
        reply = prepare(path, directory)
        assert reply.reason == ""
        assert reply.probe.startswith("no inputs could be made: ")

    def test_metadata_is_kept(self, tmp_path: Path, directory: Path) -> None:
        sample = perceptron(doc_string="text", model_version=7, domain="org.example")
        entry = sample.model.metadata_props.add()
        entry.key, entry.value = "names", "{}"
        path = tmp_path / "model.onnx"
        save(sample)(path)
        assert prepare(path, directory).reason == ""
        meta = Sessions(request(path, directory).recipe).prepared(str(directory)).model_meta
        assert (meta.description, meta.version, meta.domain) == ("text", 7, "org.example")
        assert meta.custom_metadata_map == {"names": "{}"}

    def test_no_gain(self, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Creating a session of what was prepared takes longer; unless much memory is shared."""
        monkeypatch.setattr(verifying, "_NOISE_S", -1e9)
        monkeypatch.setattr(verifying, "_SHARED_ANYWAY_BYTES", 1 << 30)
        made = self.damaged(monkeypatch, lambda directory: None, packed_only=False)
        reply = prepare(model, directory)
        assert (reply.reason, reply.is_lasting) == ("no_gain", True)
        assert made == [True]
        monkeypatch.setattr(verifying, "_SHARED_ANYWAY_BYTES", 1000)
        assert prepare(model, directory).reason == ""


class TestDescription:
    """What a program can ask a session for."""

    @staticmethod
    def described(change: Callable[[onnx.ModelProto], None] = lambda model: None) -> Any:
        sample = perceptron(doc_string="text")
        # A second one that could be given, but need not.
        sample.model.graph.input.append(
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, [256])
        )
        change(sample.model)
        descriptor = os.memfd_create("model")
        os.write(descriptor, sample.model.SerializeToString())
        session = Sessions(recipe()).original(f"/proc/self/fd/{descriptor}")
        os.close(descriptor)
        return verifying.describe(session)

    def test_all_of_it(self) -> None:
        found = self.described()
        assert [each.name for each in found.inputs] == ["x", "ids"]
        assert found.inputs[0] == Argument("x", "tensor(float)", ("batch", 64))
        assert [each.name for each in found.outputs] == ["y"]
        assert [each.name for each in found.overridable] == ["bias"]
        assert ("description", "'text'") in found.meta
        assert [name for name, _ in found.providers] == ["CPUExecutionProvider"]
        assert found == self.described()

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            (lambda model: setattr(model.graph, "name", "another"), "meta"),
            (lambda model: setattr(model, "producer_name", "another"), "meta"),
            (lambda model: setattr(model, "model_version", 5), "meta"),
            (lambda model: model.metadata_props.add(key="k", value="v"), "meta"),
            (lambda model: model.graph.input.pop(), "overridable"),
        ],
    )
    def test_a_change_shows(self, change: Callable[[onnx.ModelProto], None], part: str) -> None:
        found, changed = self.described(), self.described(change)
        assert getattr(found, part) != getattr(changed, part)

    def test_the_order_of_metadata_does_not_show(self) -> None:
        """It is that of a hash table."""
        both = ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
        one, other = (verifying._metadata(SimpleNamespace(custom=each)) for each in both)
        assert one == other

    def test_what_differs_is_said(self) -> None:
        found = self.described()
        x, ids = found.inputs
        with pytest.raises(Refusal, match=r"inputs: 1$"):
            verifying._check_description(found, replace(found, inputs=(x,)))
        other = replace(ids, name="other")
        with pytest.raises(Refusal, match="inputs: ") as raised:
            verifying._check_description(found, replace(found, inputs=(x, other)))
        assert str([(ids, other)]) in str(raised.value)


class TestTimes:
    def test_quick_sessions_are_created_more_than_once(self) -> None:
        made: list[object] = []

        def create() -> object:
            made.append(object())
            return made[-1]

        session, taken_s = verifying._created(create)
        assert len(made) == verifying._REPEATS
        assert session is made[-1]
        assert taken_s >= 0

    def test_slow_ones_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verifying, "_REPEATED_BELOW_S", -1)
        made: list[object] = []
        verifying._created(lambda: made.append(object()))
        assert len(made) == 1

    def test_the_least_time_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until so much has been spent that another one would take too long."""
        moments = itertools.accumulate([0, 70, 0, 30, 0, 60, 0, 50, 0, 10])
        clock = SimpleNamespace(thread_time=lambda: next(moments) / 1000)
        monkeypatch.setattr(verifying, "time", clock)
        made: list[object] = []
        _, taken_s = verifying._created(lambda: made.append(object()))
        assert len(made) == 4
        assert taken_s == pytest.approx(0.03)

    def test_a_session_is_gone_before_the_next_one(self) -> None:
        """The memory of one model is enough."""
        alive: list[weakref.ref[Any]] = []

        class Session:
            pass

        def create() -> Session:
            assert all(each() is None for each in alive)
            session = Session()
            alive.append(weakref.ref(session))
            return session

        verifying._created(create)
        assert len(alive) > 1

    def test_so_much_memory_is_shared_anyway(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verifying, "_SHARED_ANYWAY_BYTES", 1)
        verifying.share_from(77)
        assert verifying._SHARED_ANYWAY_BYTES == 77
