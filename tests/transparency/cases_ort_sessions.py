"""What is done with a session: runs of every kind, providers, profiles, classes, copies."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import pickle
import queue
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from .registry import Work, attempt, case, cases
from .sessions import CPU, described, made, model_file, options, ran

Session = onnxruntime.InferenceSession


def _session(work: Work, kind: str = "perceptron", seed: int = 90, **attributes: Any) -> Any:
    sample = made(kind, seed)
    session = Session(model_file(work, sample, f"{kind}.onnx"), options(**attributes))
    return session, dict(sample.feeds[-1])


# --- runs -----------------------------------------------------------------------------------------


@case(served=True)
def outputs_by_name(work: Work) -> object:
    session, feed = _session(work, "many_types")
    return [
        session.run([], feed),
        session.run(["y3"], feed),
        session.run(("flag", "y0", "y3"), feed),
        attempt(session.run, ["y3", "y3"], feed),
        attempt(session.run, ["nobody"], feed),
        attempt(session.run, "y3", feed),
        attempt(session.run, [1], feed),
    ]


WRONG: dict[str, Any] = {
    "none": lambda feed: None,
    "empty": lambda feed: {},
    "missing": lambda feed: {"x": feed["x"]},
    "more": lambda feed: {**feed, "nobody": feed["x"]},
    "rank": lambda feed: {**feed, "x": feed["x"][0]},
    "size": lambda feed: {**feed, "x": feed["x"][:, :5]},
    "batches_differ": lambda feed: {**feed, "ids": feed["ids"][:1]},
    "double": lambda feed: {**feed, "x": feed["x"].astype(np.float64)},
    "list": lambda feed: {**feed, "x": feed["x"].tolist()},
    "text": lambda feed: {**feed, "x": "text"},
    "nothing": lambda feed: {**feed, "x": None},
    "out_of_range": lambda feed: {**feed, "ids": feed["ids"] + 100_000},
    "no_rows": lambda feed: {"x": feed["x"][:0], "ids": feed["ids"][:0]},
    "transposed": lambda feed: {**feed, "x": np.asfortranarray(feed["x"])},
    "strided": lambda feed: {**feed, "x": np.repeat(feed["x"], 2, axis=1)[:, ::2]},
    "initializer": lambda feed: {**feed, "first": feed["x"]},
}


@case(served=True)
def odd_inputs(work: Work) -> object:
    """Errors of a run are the model's, and the session works afterwards."""
    session, feed = _session(work)
    return {
        name: [attempt(session.run, None, change(feed)), session.run(None, feed)]
        for name, change in WRONG.items()
    }


@case(served=True)
def asynchronous_runs(work: Work) -> object:
    session, feed = _session(work, "recogniser", intra_op_num_threads=2)
    answers: queue.Queue[Any] = queue.Queue()

    def answer(results: Any, number: int, error: str) -> None:
        answers.put((number, results, error))

    for number in range(4):
        session.run_async(None, feed, answer, number)
    collected = sorted((answers.get(timeout=30) for _ in range(4)), key=lambda each: each[0])
    alone, _ = _session(work, "recogniser")
    return [[list(each) for each in collected], attempt(alone.run_async, None, feed, answer, 1)]


@case(served=True)
def bound_inputs_and_outputs(work: Work) -> object:
    session, feed = _session(work)
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    seen: list[Any] = [binding.copy_outputs_to_cpu()]
    target = np.zeros((3, 10), np.float32)
    binding.clear_binding_outputs()
    binding.bind_output("y", "cpu", 0, np.float32, target.shape, target.ctypes.data)
    session.run_with_iobinding(binding)
    seen.append(target)
    other, _ = _session(work)
    seen.append(attempt(other.run_with_iobinding, binding))
    return [*seen, binding.copy_outputs_to_cpu()]


@case(served=True)
def ort_values(work: Work) -> object:
    session, feed = _session(work)
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(v) for n, v in feed.items()}
    results = session.run_with_ort_values(None, values)
    by_value = session.run(None, values)
    own = session.create_ortvalue_from_shape_and_type([3, 64], np.float32, "cpu")
    own.update_inplace(feed["x"])
    mixed = session.run_with_ort_values(["y"], {**values, "x": own})
    return [
        [value.numpy() for value in results],
        by_value,
        [value.numpy() for value in mixed],
        [results[0].shape(), results[0].data_type(), results[0].device_name()],
    ]


@case(served=True)
def vectors_of_values(work: Work) -> object:
    from onnxruntime.capi import _pybind_state as C

    session, feed = _session(work)
    feeds, fetches = C.OrtValueVector(), C.OrtValueVector()
    for value in feed.values():
        feeds.push_back(onnxruntime.OrtValue.ortvalue_from_numpy(value)._ortvalue)
    device = C.OrtDevice(C.OrtDevice.cpu(), C.OrtDevice.default_memory(), 0)
    session.run_with_ortvaluevector(
        onnxruntime.RunOptions(), list(feed), feeds, ["y"], fetches, [device]
    )
    return [onnxruntime.OrtValue(value).numpy() for value in fetches]


@case(served=True)
def run_options(work: Work) -> object:
    session, feed = _session(work, "transformer")
    seen: list[Any] = []
    for configure in (
        lambda o: setattr(o, "logid", "mine"),
        lambda o: setattr(o, "terminate", True),
        lambda o: setattr(o, "only_execute_path_to_fetches", True),
        lambda o: o.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0"),
        lambda o: o.add_run_config_entry("gpu_graph_id", "x"),
    ):
        given = onnxruntime.RunOptions()
        configure(given)
        seen.append(attempt(session.run, None, feed, given))
    return [*seen, session.run(None, feed)]


@case()
def adapters(work: Work) -> object:
    """A LoRA adapter's values replace overridable initializers for a run."""
    session, feed = _session(work, "overridable", seed=90)
    feed.pop("w", None)
    values = {"w": onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((64, 48), np.float32))}

    def export(path: Path) -> None:
        made_format = onnxruntime.AdapterFormat()
        made_format.set_adapter_version(1)
        made_format.set_model_version(1)
        made_format.set_parameters(values)
        made_format.export_adapter(str(path))

    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(work.file("w.onnx_adapter", export)))
    given = onnxruntime.RunOptions()
    given.add_active_adapter(adapter)
    return [attempt(session.run, None, feed, given), session.run(None, feed)]


# --- the session ----------------------------------------------------------------------------------


@case(served=True)
def providers_set_anew(work: Work) -> object:
    session, feed = _session(work)
    seen = [described(session), session.run(None, feed)]
    before = session._sess
    session.set_providers(CPU)
    seen += [described(session), session.run(None, feed), session._sess is before]
    session.set_providers([(CPU[0], {"use_arena": "0"})])
    seen += [described(session), session.run(None, feed)]
    session.set_providers(["AzureExecutionProvider", *CPU], [{}, {}])
    seen += [described(session), session.run(None, feed)]
    session.set_providers()
    return [*seen, described(session), session.run(None, feed)]


@case()
def wrong_providers_set(work: Work) -> object:
    session, feed = _session(work, seed=90)
    seen = [attempt(session.set_providers, ["NoSuchExecutionProvider"])]
    seen.append(attempt(session.set_providers, 5))
    return [*seen, attempt(session.run, None, feed), attempt(described, session)]


def _profile(name: str) -> list[Any]:
    events = json.loads(Path(name).read_text())
    kernels = [
        [event["name"], event["args"].get("op_name"), event["args"].get("provider")]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    return sorted(kernels, key=str)


@case()
def profile(work: Work) -> object:
    """A profile names the nodes that ran."""
    for old in work.directory.glob("profile*"):
        old.unlink()
    session, feed = _session(
        work, "recogniser", enable_profiling=True, profile_file_prefix="profile"
    )
    started = session.get_profiling_start_time_ns() > 0
    session.run(None, feed)
    name = session.end_profiling()
    again = session.end_profiling()
    return [started, name.startswith("profile_"), again, _profile(name), session.run(None, feed)]


@case(served=True)
def no_profile(work: Work) -> object:
    session, feed = _session(work)
    return [
        session.end_profiling(),
        session.get_profiling_start_time_ns() > 0,
        ran(session, [feed]),
    ]


@case(served=True)
def other_methods(work: Work) -> object:
    session, feed = _session(work)
    tuning = session.get_tuning_results()
    return [
        tuning,
        attempt(session.set_tuning_results, tuning),
        attempt(session.set_ep_dynamic_options, {"ep.dynamic.workload_type": "Default"}),
        attempt(session.release_captured_graph),
        attempt(session.get_provider_graph_assignment_info),
        session.disable_fallback(),
        session.enable_fallback(),
        ran(session, [feed]),
    ]


@case(served=True)
def copies(work: Work) -> object:
    session, _ = _session(work)
    return [
        repr(attempt(pickle.dumps, session)),
        repr(attempt(copy.deepcopy, session)),
        type(attempt(copy.copy, session)).__name__,
    ]


class Picklable(Session):  # type: ignore[misc]
    """As many projects have it: pickled by its path."""

    def __init__(self, model_path: Any, **keywords: Any) -> None:
        super().__init__(str(model_path), options(), **keywords)
        self.model_path = str(model_path)

    def __getstate__(self) -> Any:
        return {"model_path": self.model_path}

    def __setstate__(self, values: Any) -> None:
        self.__init__(values["model_path"])  # type: ignore[misc]


@case(served=True)
def pickled_by_path(work: Work) -> object:
    sample = made("recogniser", seed=90)
    session = Picklable(model_file(work, sample), providers=CPU)
    other = pickle.loads(pickle.dumps(session))
    third = copy.deepcopy(session)
    return [
        described(other),
        ran(session, sample.feeds),
        ran(other, sample.feeds),
        ran(third, sample.feeds),
        isinstance(other, Session),
    ]


class Counting(Session):  # type: ignore[misc]
    """Overrides what the library calls itself."""

    created = 0

    def _create_inference_session(self, *arguments: Any, **keywords: Any) -> Any:
        type(self).created += 1
        self.seen = [len(arguments), sorted(keywords)]
        return super()._create_inference_session(*arguments, **keywords)

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        self.runs = getattr(self, "runs", 0) + 1
        return super().run(*arguments, **keywords)


@case(served=True)
def overridden_methods(work: Work) -> object:
    sample = made(seed=90)
    session = Counting(model_file(work, sample), options(), providers=CPU)
    results = ran(session, sample.feeds)
    session.set_providers(CPU)
    return [results, session.runs, session.seen, Counting.created, described(session)]


class Lazy:
    """Wraps a session and makes it late, as many libraries do."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = Session(self._path, options())
        return getattr(self._made, name)


@case(served=True)
def made_late_and_again_from_its_path(work: Work) -> object:
    sample = made(seed=90)
    lazy = Lazy(model_file(work, sample))
    results = ran(lazy, sample.feeds)
    # Some libraries make a second session from what the first says of itself.
    again = Session(
        lazy._model_path, sess_options=lazy._sess_options, providers=lazy.get_providers()
    )
    return [results, ran(again, sample.feeds), described(again), Path(lazy._model_path).parent]


@case(served=True)
def the_class_itself(work: Work) -> object:
    session, _ = _session(work)
    method = Session._create_inference_session
    return [
        Session is onnxruntime.capi.onnxruntime_inference_collection.InferenceSession,
        type(session) is Session,
        [cls.__qualname__ for cls in Session.__mro__],
        sorted(vars(Session)),
        str(inspect.signature(Session)),
        str(inspect.signature(method)),
        [method.__name__, method.__qualname__, method.__module__, method.__doc__],
        inspect.isfunction(method),
        str(inspect.signature(Session.run)),
        [cls.__name__ for cls in Session.__subclasses__()],
    ]


@case(served=True)
def life_of_a_session(work: Work) -> object:
    session, feed = _session(work)
    reference = weakref.ref(session)
    counts = [len(gc.get_referrers(session)) > 20]
    session.own = "attribute"
    session.itself = session
    results = session.run(None, feed)
    del session
    gc.collect()
    return [results, reference() is None, counts]


def _generated(session: Any, feed: Any) -> Iterator[Any]:
    for _ in range(2):
        yield session.run(None, feed)


@case(served=True)
def sessions_come_and_go(work: Work) -> object:
    seen = []
    for _ in range(10):
        session, feed = _session(work, "recogniser")
        seen.append(list(_generated(session, feed)))
    return seen


@case(served=True)
def inputs_and_results_are_the_callers(work: Work) -> object:
    """Writing to what went in and came out changes no later run."""
    session, feed = _session(work, "transformer")
    first = session.run(None, feed)
    kept = first[0].copy()
    first[0][:] = 0
    feed["ids"][:] += 1
    other = session.run(None, feed)
    feed["ids"][:] -= 1
    return [kept, other, session.run(None, feed)]


@cases({"lower": -1, "thousand": 1000}, served=True)
def many_runs(work: Work, number: int) -> object:
    """Many shapes, one after another: nothing of one run is in another."""
    session, _ = _session(work, "recogniser", seed=90)
    seen = []
    for width in (16, 200, 17, 64, 16):
        x = np.full((1, 1, 16, width), number, np.float32)
        seen.append(session.run(None, {"x": x}))
    return seen


@case(served=True)
def sizes_that_contradict_their_names(work: Work) -> object:
    """Two inputs of one named size that differ: what fails then hangs on the order of the nodes.

    Buffers are shared between values of the same declared sizes, in the order in which nodes run.
    """
    return _contradicted(work, in_branch=False)


@case(served=True)
def sizes_that_contradict_their_names_in_a_branch(work: Work) -> object:
    """The same nodes in a sub-graph."""
    return _contradicted(work, in_branch=True)


def _contradicted(work: Work, *, in_branch: bool) -> object:
    steps = ["x a", "a b", "b c", "b d", "y e", "e f", "x g"]
    operators = ["Tanh", "Exp", "Sin", "Cos", "Sigmoid", "Sin", "Tanh"]
    sizes = ["rows", "columns"]
    nodes = [
        onnx.helper.make_node(operator, [step[0]], [step[2]], name=step)
        for operator, step in zip(operators, steps, strict=True)
    ]
    value = functools.partial(
        onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=sizes
    )
    inputs, outputs = [value("x"), value("y")], [value(each) for each in "cdfg"]
    given = {}
    if in_branch:
        branch = onnx.helper.make_graph(nodes, "branch", [], outputs)
        inputs.append(onnx.helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, []))
        nodes = [
            onnx.helper.make_node(
                "If", ["which"], list("cdfg"), then_branch=branch, else_branch=branch
            )
        ]
        given["which"] = np.array(True)
    graph = onnx.helper.make_graph(nodes, "sizes", inputs, outputs)
    opset = onnx.helper.make_opsetid("", 17)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9)
    path = work.file("model.onnx", lambda p: p.write_bytes(model.SerializeToString()))
    session = onnxruntime.InferenceSession(path, options())
    shapes = [(2, 3), (4, 5), (64, 64)]
    return [
        attempt(
            session.run,
            None,
            {"x": np.ones(x, np.float32), "y": np.ones(y, np.float32), **given},
        )
        for x in shapes
        for y in shapes
    ]
