"""Runs of a model: which inputs it is given, and when its outputs count as equal."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import onnx
import onnx_kinds  # noqa: F401  (adds to SAMPLES)
import onnxruntime
import pytest
from harness import PATIENCE_S
from onnx import TensorProto, helper
from onnx_models import BOOL, FLOAT, INT64, SAMPLES, STRING, Graph

from trims_shim.daemon.preparer import probing
from trims_shim.daemon.preparer.fingerprints import fingerprint
from trims_shim.daemon.preparer.probe_inputs import Argument
from trims_shim.daemon.preparer.probing import EQUAL, Probe, Probes

ONNXRUNTIME = onnxruntime.capi.onnxruntime_pybind11_state


def arguments(session: Any) -> tuple[Argument, ...]:
    return tuple(Argument(n.name, n.type, tuple(n.shape or ())) for n in session.inputs_meta)


def opened(model: onnx.ModelProto | bytes) -> Any:
    content = model if isinstance(model, bytes) else model.SerializeToString()
    options = ONNXRUNTIME.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ONNXRUNTIME.InferenceSession(options, content, False, False)
    session.initialize_session(["CPUExecutionProvider"], [{}], set())
    return session


def collect(model: onnx.ModelProto | bytes) -> Probes:
    session = opened(model)
    return probing.collect(session, arguments(session), [n.name for n in session.outputs_meta])


class Session:
    """A session of a function."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.seen: list[dict[str, Any]] = []

    def run(self, names: list[str], feeds: dict[str, Any], options: Any) -> list[Any]:
        self.seen.append(feeds)
        result = self.function(feeds)
        return [result[name] for name in names]


X = (Argument("x", "tensor(float)", ("n",)),)


class TestCollect:
    def test_two_sizes_are_run_twice(self) -> None:
        session = Session(lambda feeds: {"y": feeds["x"] + 1})
        found = probing.collect(session, X, ["y"])
        assert [each["x"].shape for each in session.seen] == [(1,), (1,), (2,), (2,)]
        assert [len(probe.runs) for probe in found.probes] == [2, 2]
        assert found.differences(session) == ((), EQUAL)

    def test_a_model_without_open_dimensions_is_run_at_once(self) -> None:
        session = Session(lambda feeds: {"y": feeds["x"]})
        probing.collect(session, [Argument("x", "tensor(float)", (3,))], ["y"])
        assert len(session.seen) == 2

    def test_what_a_model_refuses_is_not_used(self) -> None:
        def only_from_eight(feeds: dict[str, Any]) -> dict[str, Any]:
            if len(feeds["x"]) < 8 or feeds["x"][0] != 0:
                raise RuntimeError("too small")
            return {"y": feeds["x"]}

        found = probing.collect(Session(only_from_eight), X, ["y"])
        assert [probe.feeds["x"].tolist() for probe in found.probes] == [[0.0] * 8, [0.0] * 16]

    def test_a_model_that_refuses_everything(self) -> None:
        def refuse(feeds: dict[str, Any]) -> dict[str, Any]:
            raise RuntimeError("no")

        found = probing.collect(Session(refuse), X, ["y"])
        assert found.probes == ()
        assert found.differences(Session(refuse)) == ((), "no inputs could be made: no")

    def test_a_run_that_does_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is told to, and what it raises then counts as refused."""
        monkeypatch.setattr(probing, "_RUN_LIMIT_S", 0.2)
        monkeypatch.setattr(probing, "_COLLECT_LIMIT_S", 0.1)
        found = collect(endless())
        assert found.probes == ()
        assert "terminate" in found.note.lower()

    def test_a_slow_model_is_run_no_more_than_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once the time is over, nothing further is tried."""
        monkeypatch.setattr(probing, "_COLLECT_LIMIT_S", -1.0)
        session = Session(lambda feeds: {"y": feeds["x"]})
        assert len(probing.collect(session, X, ["y"]).probes) == 1
        refusing = Session(lambda feeds: {})
        assert probing.collect(refusing, X, ["y"]).probes == ()
        assert len(refusing.seen) == 1

    def test_a_run_that_waits_and_does_nothing(self) -> None:
        """It may take longer by the clock than one that computes, but not forever."""
        given_up = threading.Event()
        watch = probing._Watch(0.01)
        watch.start()
        with watch.over(given_up.set):
            assert given_up.wait(PATIENCE_S)
        watch.stop()

    def test_runs_that_end_are_not_given_up(self) -> None:
        given_up = threading.Event()
        watch = probing._Watch(0.0)
        watch.start()
        watch.stop()
        with watch.over(given_up.set):
            pass
        assert not given_up.is_set()
        assert watch._current is None

    @pytest.mark.usefixtures("no_thread_left")
    def test_no_thread_stays(self) -> None:
        probing.collect(Session(lambda feeds: {"y": 1}), X, ["y"])


class TestDifferences:
    @staticmethod
    def probes(*runs: tuple[str, ...]) -> Probes:
        return Probes(("a", "b"), (Probe({}, runs),))

    @staticmethod
    def session(*runs: tuple[float, float]) -> Session:
        values = iter(runs)
        return Session(lambda feeds: dict(zip("ab", next(values), strict=True)))

    def test_an_output_with_other_bits(self) -> None:
        one, two = fingerprint(1.0), fingerprint(2.0)
        expected = self.probes((one, two), (one, two))
        assert expected.differences(self.session((1, 2.0), (1.0, 2.0))) == (("a",), EQUAL)
        assert expected.differences(self.session((1.0, 2.0), (1.0, 3.0))) == (("b",), EQUAL)
        assert expected.differences(self.session((1.0, 2.0), (1.0, 2.0))) == ((), EQUAL)

    def test_a_slow_model_has_longer_than_the_first_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What ran within the limit once may take a little more: that is no difference."""

        class Slow(Session):
            def run(self, names: list[str], feeds: dict[str, Any], options: Any) -> list[Any]:
                end_s = time.process_time() + 0.3
                while time.process_time() < end_s:
                    if options.terminate:
                        raise RuntimeError("terminated")
                return super().run(names, feeds, options)

        monkeypatch.setattr(probing, "_RUN_LIMIT_S", 0.15)
        one, two = fingerprint(1.0), fingerprint(2.0)
        expected = self.probes((one, two), (one, two))
        assert expected.differences(Slow(lambda feeds: {"a": 1.0, "b": 2.0})) == ((), EQUAL)

    def test_an_output_that_is_never_the_same(self) -> None:
        one, two, three = map(fingerprint, (1.0, 2.0, 3.0))
        expected = self.probes((one, two), (one, three))
        session = self.session((1.0, 4.0), (1.0, 5.0))
        assert expected.differences(session) == ((), "runs of the original differ: ['b']")

    def test_a_generator_with_a_seed_is_the_same_in_each_session(self) -> None:
        one, two, three = map(fingerprint, (1.0, 2.0, 3.0))
        expected = self.probes((one, two), (one, three))
        assert expected.differences(self.session((1.0, 2.0), (1.0, 3.0))) == ((), EQUAL)


def endless() -> onnx.ModelProto:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_in"], ["go_out"]),
            helper.make_node("Add", ["v_in", "one"], ["v_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go_in", BOOL, []),
            helper.make_tensor_value_info("v_in", FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("go_out", BOOL, []),
            helper.make_tensor_value_info("v_out", FLOAT, [1]),
        ],
    )
    graph = Graph("endless")
    graph.input("x", [1])
    graph.constant("one", np.ones(1, np.float32))
    graph.constant("go", np.array(True))
    graph.node("Loop", "", "go", "x", body=body, outputs=["y"])
    graph.output("y", [1])
    return graph.model()


def identity(kind: onnx.TypeProto) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [helper.make_value_info("x", kind)],
        [helper.make_value_info("y", kind)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class TestModels:
    @pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"sequence"}))
    def test_samples_are_run(self, name: str) -> None:
        model = SAMPLES[name](1).content
        found = collect(model)
        assert found.probes, found.note
        assert found.differences(opened(model)) == ((), EQUAL)

    def test_sequences_of_tensors_of_a_certain_shape(self) -> None:
        """A session does not say which."""
        assert collect(SAMPLES["sequence"](1).content).note.startswith("no inputs could be made")

    @pytest.mark.parametrize("name", ["perceptron", "transformer"])
    def test_other_weights_are_noticed(self, name: str) -> None:
        found = collect(SAMPLES[name](1).content)
        assert found.differences(opened(SAMPLES[name](2).content)) == (("y",), EQUAL)

    @pytest.mark.parametrize(
        "kind",
        [
            helper.make_tensor_type_proto(FLOAT, ["n"]),
            helper.make_tensor_type_proto(STRING, [2]),
            helper.make_tensor_type_proto(TensorProto.BFLOAT16, [3]),
            helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None)),
            helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [2])),
        ],
        ids=["tensor", "string", "bfloat16", "sequence", "optional"],
    )
    def test_values_of_every_kind(self, kind: onnx.TypeProto) -> None:
        model = identity(kind)
        found = collect(model)
        assert found.probes, found.note
        assert found.differences(opened(model)) == ((), EQUAL)

    def test_outputs_that_numpy_lacks_of_inputs_that_it_has(self) -> None:
        graph = Graph("cast")
        graph.node("Cast", graph.input("x", ["n"]), to=TensorProto.BFLOAT16, outputs=["y"])
        graph.output("y", ["n"], TensorProto.BFLOAT16)
        found = collect(graph.model())
        assert found.probes, found.note
        assert found.differences(opened(graph.model())) == ((), EQUAL)

    @staticmethod
    def dice(*, nodes_before: int) -> onnx.ModelProto:
        graph = Graph("dice")
        value = graph.input("x", [4])
        for _ in range(nodes_before):
            value = graph.node("Identity", value)
        graph.node("RandomUniformLike", value, outputs=["y"])
        graph.node("Identity", "x", outputs=["z"])
        graph.output("y", [4])
        graph.output("z", [4])
        return graph.model()

    def test_dice(self) -> None:
        """Without a seed the numbers depend on the node's place, which optimisation may change."""
        found = collect(self.dice(nodes_before=0))
        note = "runs of the original differ: ['y']"
        assert found.differences(opened(self.dice(nodes_before=2))) == ((), note)
