"""Sessions from prepared models against sessions of onnxruntime alone.

The preparer is the real one; what stands in for the daemon is in :mod:`preparations`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pathlib
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from harness import PATIENCE_S, World
from onnx_models import Graph, Sample, sample, save, save_external
from onnxruntime.capi import onnxruntime_inference_collection as collection
from ort_sessions import (
    CPU,
    READABLE,
    break_model,
    changed,
    described,
    hit,
    is_hit,
    new,
    outcomes,
    outputs,
    plain,
)
from preparations import Preparations, apply_points

import trims_shim
from trims_shim import diagnostics, patches
from trims_shim.client import cache as caches
from trims_shim.errors import DaemonUnavailable
from trims_shim.patches import onnxruntime_session

# --- hits -----------------------------------------------------------------------------------------


class TestHits:
    @pytest.mark.parametrize("kind", ["perceptron", "recogniser", "transformer"])
    def test_equal_outputs_and_answers(
        self, preparations: Preparations, tmp_path: Path, kind: str
    ) -> None:
        made = sample(kind)
        save(made)(tmp_path / "model.onnx")
        path = str(tmp_path / "model.onnx")
        expected = plain(path)
        session = hit(path)
        assert outputs(session, made) == outputs(expected, made)
        assert described(session) == described(expected)
        assert outcomes() == {"preparing": 1}

    def test_its_weights_are_those_of_the_prepared_file(
        self, preparations: Preparations, path: str
    ) -> None:
        session = hit(path)
        weights = next(iter(preparations.made.values())) / "weights.bin"
        with open("/proc/self/maps") as maps:
            assert any(str(weights) in line for line in maps)
        del session

    def test_what_packing_leaves_free_goes_back(
        self, preparations: Preparations, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered: list[str] = []
        room = []

        @contextlib.contextmanager
        def given_back(*, room_bytes: int) -> Iterator[None]:
            room.append(room_bytes)
            entered.append("begin")
            yield
            entered.append("end")

        monkeypatch.setattr("trims_shim.memory.heap.given_back", given_back)
        new(path)
        assert entered == []  # onnxruntime's own session is left as it is
        assert is_hit(new(path))
        assert entered == ["begin", "end"]
        assert room[0] > os.path.getsize(path)  # as much as can be packed at a time, and more

    @pytest.mark.usefixtures("no_leak")
    def test_a_path_object(self, preparations: Preparations, path: str, made: Sample) -> None:
        session = hit(pathlib.Path(path))
        assert session._model_path == path
        assert outputs(session, made) == outputs(plain(path), made)

    def test_a_relative_path(
        self, preparations: Preparations, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(os.path.dirname(path))
        session = hit(os.path.basename(path))
        assert session._model_path == os.path.basename(path)
        assert {request.path for request in preparations.requests} == {path}

    def test_bytes(self, preparations: Preparations, made: Sample) -> None:
        content = made.content
        expected = plain(content)
        first = new(content)
        assert outcomes() == {"unknown": 1}
        assert diagnostics.stats().events["offered:preparing"] == 1
        session = new(content)
        assert is_hit(session)
        assert session._model_bytes is content
        assert session._model_path is None
        assert described(session) == described(expected) == described(first)
        assert outputs(session, made) == outputs(expected, made)

    def test_bytes_and_a_file_share_one_prepared_model(
        self, preparations: Preparations, path: str, made: Sample
    ) -> None:
        new(path)
        assert is_hit(new(made.content))
        assert len(preparations.made) == 1

    def test_external_data(self, preparations: Preparations, tmp_path: Path, made: Sample) -> None:
        path = tmp_path / "external" / "model.onnx"
        path.parent.mkdir()
        save_external(made)(path)
        session = hit(str(path))
        assert outputs(session, made) == outputs(plain(str(path)), made)

    def test_two_sessions_on_one_model(
        self, preparations: Preparations, path: str, made: Sample
    ) -> None:
        one, two = hit(path), new(path)
        expected = outputs(plain(path), made)
        assert outputs(one, made) == expected
        del one
        gc.collect()
        assert outputs(two, made) == expected

    def test_many_threads(self, preparations: Preparations, path: str, made: Sample) -> None:
        expected = outputs(plain(path), made)
        new(path)
        found: list[list[bytes]] = []

        def use() -> None:
            found.append(outputs(new(path), made))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == [expected] * 4
        assert diagnostics.stats().served == 4

    def test_the_default_providers(
        self, preparations: Preparations, path: str, made: Sample
    ) -> None:
        expected = plain(path, providers=None)
        session = hit(path, providers=None)
        assert described(session) == described(expected)
        assert is_hit(new(path)), "the same recipe as the CPU alone"
        assert len(preparations.made) == 1

    @pytest.mark.filterwarnings("ignore:Specified provider")
    def test_a_provider_that_is_not_installed(self, preparations: Preparations, path: str) -> None:
        names = ["CUDAExecutionProvider", *CPU]
        assert described(hit(path, providers=names)) == described(plain(path, providers=names))

    @pytest.mark.filterwarnings("ignore:Specified provider")
    def test_a_provider_that_does_not_exist(
        self, preparations: Preparations, path: str, capfd: Any
    ) -> None:
        """onnxruntime says so, and tries again with the CPU: the second try is served."""
        names = ["NoSuchExecutionProvider", *CPU]
        expected = described(plain(path, providers=names)), capfd.readouterr().out
        for _ in range(2):
            assert (described(new(path, providers=names)), capfd.readouterr().out) == expected
        assert outcomes() == {"provider": 2, "preparing": 1}
        assert diagnostics.stats().served == 1

    def test_warnings_are_given_once(self, preparations: Preparations, path: str) -> None:
        names = ["CUDAExecutionProvider", *CPU, *CPU]

        def given(create: Any) -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                create(path, providers=names)
            return [f"{each.filename}: {each.message}" for each in caught]

        expected = given(plain)
        assert len(expected) == 2
        assert given(new) == given(new) == expected
        assert diagnostics.stats().served == 1


class TestOptions:
    def test_what_can_be_set(self, preparations: Preparations, path: str, made: Sample) -> None:
        def options() -> Any:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 2
            options.inter_op_num_threads = 3
            options.enable_cpu_mem_arena = False
            options.enable_mem_pattern = False
            options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            options.graph_optimization_level = (
                onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            )
            options.log_severity_level = 3
            options.log_verbosity_level = 1
            options.logid = "mine"
            options.use_deterministic_compute = True
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            options.add_session_config_entry("session.set_denormal_as_zero", "1")
            options.add_free_dimension_override_by_name("batch", 3)
            return options

        expected = plain(path, options())
        mine = options()
        session = hit(path, mine)
        after = {name: getattr(mine, name) for name in READABLE}
        assert after == {name: getattr(options(), name) for name in READABLE}
        ours, theirs = described(session), described(expected)
        assert ours.pop("initial") is mine
        theirs.pop("initial")
        assert ours == theirs
        shown = session.get_session_options()
        assert shown.get_session_config_entry("session.set_denormal_as_zero") == "1"
        assert shown.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        with pytest.raises(Exception, match="does not have"):
            shown.get_session_config_entry("session.disable_prepacking")
        feed = made.feeds[1]
        (result,), (truth,) = session.run(None, feed), expected.run(None, feed)
        assert result.tobytes() == truth.tobytes()

    def test_profiling(
        self, preparations: Preparations, path: str, made: Sample, tmp_path: Path
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / "profile")
        session = hit(path, options)
        session.run(None, made.feeds[0])
        assert session.get_profiling_start_time_ns() > 0
        name = session.end_profiling()
        assert name.startswith(str(tmp_path / "profile"))
        assert Path(name).stat().st_size > 100

    def test_options_of_a_session_are_used_again(
        self, preparations: Preparations, path: str
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("own.key", "1")
        first = new(path, options)
        second = new(path, first.get_session_options())
        third = new(path, second.get_session_options())
        assert diagnostics.stats().served == 2
        shown = third.get_session_options()
        assert shown.get_session_config_entry("own.key") == "1"
        assert shown.graph_optimization_level == options.graph_optimization_level

    def test_a_subclass_of_options(self, preparations: Preparations, path: str) -> None:
        class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
            def __init__(self, threads: int) -> None:
                super().__init__()
                self.intra_op_num_threads = threads

            def __eq__(self, other: object) -> bool:
                return True

        assert hit(path, Options(1)).get_session_options().intra_op_num_threads == 1

    def test_disabled_optimizers(self, preparations: Preparations, path: str, made: Sample) -> None:
        names = ["MatMulAddFusion"]
        expected = plain(path, disabled_optimizers=names)
        session = hit(path, disabled_optimizers=names)
        assert preparations.requests[-1].recipe.disabled_optimizers == ("MatMulAddFusion",)
        assert outputs(session, made) == outputs(expected, made)

    def test_provider_options(self, preparations: Preparations, path: str) -> None:
        options = {"arena_extend_strategy": "kSameAsRequested"}
        session = hit(path, providers=[("CPUExecutionProvider", options)])
        other = new(path, providers=CPU, provider_options=[options])
        assert diagnostics.stats().served == 2
        assert described(session) == described(other)


class TestUse:
    @pytest.fixture
    def session(self, preparations: Preparations, path: str) -> Any:
        return hit(path)

    def test_run_async(self, session: Any, made: Sample) -> None:
        found: list[Any] = []
        is_done = threading.Event()

        def take(results: Any, _: Any, error: str) -> None:
            found.append((results, error))
            is_done.set()

        session.run_async(None, made.feeds[0], take, None)
        assert is_done.wait(PATIENCE_S)
        ((results, error),) = found
        assert not error
        assert results[0].tobytes() == session.run(None, made.feeds[0])[0].tobytes()

    def test_binding(self, session: Any, made: Sample) -> None:
        binding = session.io_binding()
        for name, value in made.feeds[0].items():
            binding.bind_cpu_input(name, value)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        result = binding.copy_outputs_to_cpu()[0]
        assert result.tobytes() == session.run(None, made.feeds[0])[0].tobytes()

    def test_ort_values(self, session: Any, made: Sample) -> None:
        feed = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(value)
            for name, value in made.feeds[0].items()
        }
        (result,) = session.run_with_ort_values(None, feed)
        assert result.numpy().tobytes() == session.run(None, made.feeds[0])[0].tobytes()

    def test_wrong_input(self, session: Any, path: str) -> None:
        def complaint(each: Any, feed: dict[str, Any]) -> tuple[type, str]:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                each.run(None, feed)
            return caught.type, str(caught.value)

        other = plain(path)
        wrong = {"x": np.zeros((1, 3), np.float32), "ids": np.zeros(1, np.int64)}
        for feed in ({}, wrong, {"x": "text", "ids": 1}):
            assert complaint(session, feed) == complaint(other, feed)

    def test_set_providers(self, preparations: Preparations, session: Any, made: Sample) -> None:
        expected = outputs(session, made)
        session.set_providers(CPU)
        assert diagnostics.stats().served == 2
        assert outputs(session, made) == expected
        level = session.get_session_options().graph_optimization_level
        assert level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        gc.collect()
        assert len(preparations.leases) == 1

    def test_set_providers_after_the_daemon_went(
        self, preparations: Preparations, session: Any, made: Sample, path: str
    ) -> None:
        expected = outputs(session, made)
        preparations.answers = [DaemonUnavailable("gone")] * 2
        session.set_providers(CPU)
        assert outcomes()["daemon_unavailable"] == 1
        assert session._model_path == path
        assert outputs(session, made) == expected

    def test_it_can_be_pickled_and_copied_as_little_as_before(
        self, session: Any, path: str, made: Sample
    ) -> None:
        def outcome(call: Any, each: Any) -> Any:
            try:
                return outputs(call(each), made)
            except Exception as error:
                return type(error), str(error)

        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            assert outcome(call, session) == outcome(call, plain(path))

    def test_a_subclass_that_can_be_pickled(self, session: Any, path: str, made: Sample) -> None:
        again = pickle.loads(pickle.dumps(Pickable(path, providers=CPU)))
        assert diagnostics.stats().served == 3
        assert isinstance(again, onnxruntime.InferenceSession)
        assert outputs(again, made) == outputs(session, made)


class Pickable(onnxruntime.InferenceSession):  # type: ignore[misc]
    """As face recognition libraries have it."""

    def __init__(self, model_path: str, **kwargs: Any) -> None:
        super().__init__(model_path, **kwargs)
        self.model_path = model_path

    def __getstate__(self) -> dict[str, Any]:
        return {"model_path": self.model_path}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__init__(values["model_path"], providers=CPU)  # type: ignore[misc]


class TestLeases:
    def test_one_lives_as_long_as_the_session(self, preparations: Preparations, path: str) -> None:
        session = hit(path)
        assert len(preparations.leases) == 1
        del session
        gc.collect()
        assert not preparations.leases

    def test_a_binding_keeps_it(self, preparations: Preparations, path: str) -> None:
        session = hit(path)
        native = weakref.ref(session._sess)
        binding = session.io_binding()
        del session
        gc.collect()
        # onnxruntime before 1.30 lets the session go all the same.
        assert len(preparations.leases) == (native() is not None)
        del binding
        gc.collect()
        assert not preparations.leases

    def test_it_is_given_back_when_the_session_cannot_be_made(
        self, lenient: Preparations, path: str
    ) -> None:
        new(path)
        break_model(lenient)
        new(path)
        gc.collect()
        assert not lenient.leases

    def test_nor_do_wrong_files_keep_it(self, lenient: Preparations, path: str) -> None:
        new(path)
        lenient.answers = [changed(lenient)]
        new(path)
        assert outcomes() == {"preparing": 1, "prepared_changed": 1}
        assert not lenient.leases


def test_nothing_is_left_of_a_session_of_wrong_files(
    lenient: Preparations, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it stayed while the original made its own, and for good where that failed."""
    session = new(path)
    binding = collection.C
    left = []

    class Binding:
        def __getattr__(self, name: str) -> Any:
            return getattr(binding, name)

        def InferenceSession(self, options: Any, model: str, *arguments: Any) -> Any:
            if model == path:
                left.append((session._sess, session._inputs_meta))
                raise RuntimeError("no memory")
            made = binding.InferenceSession(options, model, *arguments)
            os.utime(model, (1, 1))
            return made

    monkeypatch.setattr(collection, "C", Binding())
    with pytest.raises(RuntimeError, match="no memory"):
        session.set_providers(CPU)
    assert left == [(None, None)]
    assert (session._sess, session._inputs_meta) == (None, None)
    assert not lenient.leases


def test_no_descriptor_is_left(preparations: Preparations, path: str, tmp_path: Path) -> None:
    """Neither here nor, as far as it runs in this process, by the preparer."""
    hit(path)
    before = World.descriptors(os.getpid()).items()
    external = tmp_path / "external.onnx"
    save_external(sample("perceptron", 3))(external)
    for model in (str(external), sample("perceptron", 4).content):
        hit(model)
    gc.collect()
    assert World.descriptors(os.getpid()).items() <= before


# --- in place -------------------------------------------------------------------------------------


def test_the_class_stays_and_everything_is_undone() -> None:
    patches.disable()
    before = dict(vars(collection.InferenceSession))
    options_before = dict(vars(onnxruntime.SessionOptions))
    kind, options_kind = onnxruntime.InferenceSession, onnxruntime.SessionOptions
    undo_points = apply_points()
    assert onnxruntime.InferenceSession is kind is collection.InferenceSession
    assert onnxruntime.SessionOptions is options_kind
    assert dict(vars(collection.InferenceSession)) != before
    undo_points()
    assert dict(vars(collection.InferenceSession)) == before
    assert dict(vars(onnxruntime.SessionOptions)) == options_before


def test_a_class_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_other_arguments(self: Any, providers: Any, options: Any, disabled: Any) -> None:
        """What a newer version might have."""

    def of_other_attributes(
        self: Any, providers: Any, provider_options: Any, disabled_optimizers: Any
    ) -> None:
        """The model is elsewhere."""

    assert onnxruntime_session._probe() is None
    for method in (None, of_other_arguments, of_other_attributes):
        monkeypatch.setattr(collection.InferenceSession, "_create_inference_session", method)
        assert onnxruntime_session._probe() is not None


def test_options_changed_while_patches_are_off(preparations: Preparations, path: str) -> None:
    options = onnxruntime.SessionOptions()
    with trims_shim.disabled():
        options.add_session_config_entry("own.key", "1")
    new(path, options)
    assert ("own.key", "1") in preparations.requests[0].recipe.entries


def test_sessions_may_have_been_made_before_the_patches(
    preparations: Preparations, path: str, tmp_path: Path
) -> None:
    assert onnxruntime_session._has_sessions is not False
    onnxruntime_session._has_sessions = False
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(Exception, match="broken"):
        onnxruntime.InferenceSession(str(tmp_path / "broken.onnx"))
    assert onnxruntime_session._has_sessions is None
    new(path)
    assert onnxruntime_session._has_sessions is True


def test_wrong_calls_are_the_originals(preparations: Preparations, path: str) -> None:
    session = new(path)
    for call in ((), (None,), (None, None, None, None)):
        with pytest.raises(TypeError, match="_create_inference_session"):
            session._create_inference_session(*call)
    session._create_inference_session(providers=CPU, provider_options=None)
    assert is_hit(session)


def test_the_graph_of_other_weights_is_another_model(
    preparations: Preparations, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    for seed in (1, 2):
        save(sample("perceptron", seed))(path)
        new(str(path))
    assert outcomes() == {"preparing": 2}


def test_a_model_without_weights(preparations: Preparations, tmp_path: Path) -> None:
    graph = Graph("tiny")
    graph.input("x", [2])
    graph.node("Neg", "x", outputs=["y"])
    graph.output("y", [2])
    save(graph.model())(tmp_path / "tiny.onnx")
    path = str(tmp_path / "tiny.onnx")
    feed = {"x": np.ones(2, np.float32)}
    for _ in range(2):
        assert new(path).run(None, feed)[0].tolist() == [-1, -1]


def test_the_cache_of_the_process_is_used(preparations: Preparations, path: str) -> None:
    assert caches.cache().dial is not None
    assert patches.active()
    new(path)
    assert preparations.requests[0].package == os.path.dirname(onnxruntime.__file__)
    assert os.path.dirname(preparations.requests[0].package) in preparations.requests[0].search_path
