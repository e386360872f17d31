"""SessionOptions: each attribute and method of it, and what becomes of the object."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
from onnx_models import save_external, weights

from .registry import Work, attempt, case, cases
from .sessions import CPU, described, made, model_file, opened, options, options_seen, ran

Level = onnxruntime.GraphOptimizationLevel
Options = onnxruntime.SessionOptions

LEVELS = {
    "none": Level.ORT_DISABLE_ALL,
    "basic": Level.ORT_ENABLE_BASIC,
    "extended": Level.ORT_ENABLE_EXTENDED,
    "layout": Level.ORT_ENABLE_LAYOUT,
    "all": Level.ORT_ENABLE_ALL,
}


@cases(
    {
        f"{level}-{kind}": (level, kind)
        for level in LEVELS
        for kind in ("recogniser", "transformer", "quantised_static")
        if kind == "recogniser" or level in ("none", "extended")
    },
    served=True,
)
def level(work: Work, which: tuple[str, str]) -> object:
    level, kind = which
    sample = made(kind, seed=21)
    given = options(graph_optimization_level=LEVELS[level])
    return opened(sample, model_file(work, sample), given)


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "default_threads": {"intra_op_num_threads": 0},
    "two_threads": {"intra_op_num_threads": 2},
    "inter_threads": {
        "execution_mode": onnxruntime.ExecutionMode.ORT_PARALLEL,
        "inter_op_num_threads": 2,
    },
    "order": {"execution_order": onnxruntime.ExecutionOrder.PRIORITY_BASED},
    "no_arena": {"enable_cpu_mem_arena": False},
    "no_pattern": {"enable_mem_pattern": False},
    "no_reuse": {"enable_mem_reuse": False},
    "deterministic": {"use_deterministic_compute": True},
    "log": {"logid": "mine", "log_severity_level": 3, "log_verbosity_level": 1},
    "fatal_only": {"log_severity_level": 4},
    "profile_prefix": {"profile_file_prefix": "somewhere"},
}


@cases(ATTRIBUTES, served=True)
def attributes(work: Work, values: dict[str, Any]) -> object:
    sample = made("transformer", seed=21)
    return opened(sample, model_file(work, sample), options(**values))


ENTRIES: dict[str, tuple[str, str]] = {
    "disable_prepacking": ("session.disable_prepacking", "1"),
    "enable_prepacking": ("session.disable_prepacking", "0"),
    "denormal": ("session.set_denormal_as_zero", "1"),
    "spinning": ("session.intra_op.allow_spinning", "0"),
    "env_allocators": ("session.use_env_allocators", "1"),
    "inlining": ("session.disable_aot_function_inlining", "1"),
    "qdq_cleanup": ("session.enable_quant_qdq_cleanup", "1"),
    "no_qdq": ("session.disable_quant_qdq", "1"),
    "qdq_int8": ("session.qdqisint8allowed", "1"),
    "gelu_approximation": ("optimization.enable_gelu_approximation", "1"),
    "cast_chain": ("optimization.enable_cast_chain_elimination", "1"),
    "disabled": ("optimization.disable_specified_optimizers", "MatMulAddFusion;ConstantFolding"),
    "precision": ("session.x64quantprecision", "1"),
    "blocks": ("session.dynamic_block_base", "4"),
    "device_allocator": ("session.use_device_allocator_for_initializers", "1"),
    "unknown": ("nobody.knows.this", "1"),
    "empty_value": ("nobody.knows.this", ""),
}


@cases(ENTRIES, served=True)
def entries(work: Work, entry: tuple[str, str]) -> object:
    key, value = entry
    kind = "quantised_static" if "q" in key else "transformer"
    given = options()
    given.add_session_config_entry(key, value)
    sample = made("function" if "inlining" in key else kind, seed=21)
    return opened(sample, model_file(work, sample), given, entries=[key])


ODD_ENTRIES: dict[str, tuple[str, str]] = {
    "onnx_format": ("session.load_model_format", "ONNX"),
    "ort_format": ("session.load_model_format", "ORT"),
    "wrong_format": ("session.load_model_format", "PNG"),
    "save_format": ("session.save_model_format", "ORT"),
    "strict_shapes": ("session.strict_shape_type_inference", "1"),
    "context": ("ep.context_enable", "1"),
    "cpu_fallback": ("session.disable_cpu_ep_fallback", "1"),
    "assignment": ("session.record_ep_graph_assignment_info", "1"),
    "minimal_build": ("optimization.minimal_build_optimizations", "save"),
    "external_file": ("session.optimized_model_external_initializers_file_name", "w.bin"),
    "save_prepacked": ("session.save_external_prepacked_constant_initializers", "1"),
    "folder": ("session.model_external_initializers_file_folder_path", "/nowhere"),
    "affinity": ("session.intra_op_thread_affinities", "1;2"),
    "wrong_number": ("session.dynamic_block_base", "many"),
    "wrong_boolean": ("session.disable_prepacking", "yes"),
    "long_key": ("k" * 2000, "1"),
    "long_value": ("nobody.knows.this", "v" * 5000),
    "empty_key": ("", "1"),
}


@cases(ODD_ENTRIES)
def odd_entries(work: Work, entry: tuple[str, str]) -> object:
    sample = made("quantised_static", seed=21)
    path = model_file(work, sample)
    given = options()
    added = attempt(given.add_session_config_entry, *entry)
    seen = attempt(opened, sample, path, given, entries=[entry[0]])
    if entry[0] == "session.record_ep_graph_assignment_info" and isinstance(seen, dict):
        session = onnxruntime.InferenceSession(path, given)
        assigned = session.get_provider_graph_assignment_info()
        seen["assigned"] = [
            [part.ep_name, [[n.name, n.op_type] for n in part.get_nodes()]] for part in assigned
        ]
    return [added, seen, sorted(os.listdir("."))]


@case(served=True)
def entry_twice_and_many(work: Work) -> object:
    sample = made(seed=21)
    given = options()
    for number in range(200):
        given.add_session_config_entry(f"own.{number:03}", str(number))
    given.add_session_config_entry("own.007", "again")
    return opened(sample, model_file(work, sample), given, entries=["own.007", "own.199"])


# --- free dimensions ------------------------------------------------------------------------------

DIMENSIONS: dict[str, Callable[[Options], object]] = {
    "name": lambda o: o.add_free_dimension_override_by_name("batch", 3),
    "denotation": lambda o: o.add_free_dimension_override_by_denotation("DATA_BATCH", 3),
    "two": lambda o: [
        o.add_free_dimension_override_by_name("features", 64),
        o.add_free_dimension_override_by_name("batch", 3),
    ],
    "unknown": lambda o: o.add_free_dimension_override_by_name("nobody", 3),
}


@cases(DIMENSIONS, served=True)
def free_dimensions(work: Work, override: Callable[[Options], object]) -> object:
    sample = made("dimensions", seed=21)
    given = options()
    override(given)
    return opened(sample, model_file(work, sample), given)


@cases({"larger": (3, 9), "smaller": (9, 3), "equal": (3, 3)})
def free_dimension_overridden_twice(work: Work, sizes: tuple[int, int]) -> object:
    """The first one counts."""
    sample = made("dimensions", seed=21)
    given = options()
    for size in sizes:
        given.add_free_dimension_override_by_name("batch", size)
    return attempt(opened, sample, model_file(work, sample), given)


@cases({"other": 5, "zero": 0, "negative": -1})
def free_dimension_that_does_not_fit(work: Work, size: int) -> object:
    sample = made("dimensions", seed=21)
    given = options()
    given.add_free_dimension_override_by_name("batch", size)
    return attempt(opened, sample, model_file(work, sample), given)


# --- options with which nothing is served ---------------------------------------------------------


def _written(name: str) -> list[object]:
    files = sorted(path for path in Path().iterdir() if path.name.startswith(name))
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]


@case(served=False)
def optimised_model_is_written(work: Work) -> object:
    sample = made("transformer", seed=21)
    given = options(optimized_model_filepath="written.onnx")
    seen = opened(sample, model_file(work, sample), given)
    return [seen, _written("written")]


@case(served=False)
def given_initializers(work: Work) -> object:
    sample = made(seed=21)
    path = work.file("model.onnx", save_external(sample))
    value = onnxruntime.OrtValue.ortvalue_from_numpy(weights(99, "first", 64, 256))
    given = options()
    given.add_initializer("first", value)
    other = options()
    last = onnxruntime.OrtValue.ortvalue_from_numpy(weights(98, "last", 256, 10))
    added = attempt(other.add_external_initializers, ["last"], [last])
    return [opened(sample, path, given), added, attempt(opened, sample, path, other)]


@case(served=False)
def custom_operators(work: Work) -> object:
    given = options()
    missing = attempt(given.register_custom_ops_library, "no-such-library.so")
    text = work.file("text.so", lambda path: path.write_text("no library"))
    wrong = attempt(given.register_custom_ops_library, str(text))
    return [missing, wrong]


@case()
def session_after_a_failed_registration(work: Work) -> object:
    sample = made(seed=21)
    given = options()
    attempt(given.register_custom_ops_library, "no-such-library.so")
    return opened(sample, model_file(work, sample), given)


@case(served=False)
def cancelled(work: Work) -> object:
    sample = made(seed=21)
    given = options()
    given.set_load_cancellation_flag(True)
    first = attempt(opened, sample, model_file(work, sample), given)
    given.set_load_cancellation_flag(False)
    return [first, attempt(opened, sample, model_file(work, sample), given)]


@case(served=False)
def providers_in_options(work: Work) -> object:
    sample = made(seed=21)
    path = model_file(work, sample)
    seen: list[object] = []
    for configure in (
        lambda o: o.add_provider("CPUExecutionProvider", {}),
        lambda o: o.add_provider("NoSuchExecutionProvider", {}),
        lambda o: o.set_provider_selection_policy(
            onnxruntime.OrtExecutionProviderDevicePolicy.PREFER_CPU
        ),
    ):
        given = options()
        seen += [attempt(configure, given), attempt(opened, sample, path, given)]
        seen.append(attempt(opened, sample, path, given, CPU))
    return seen


@case()
def global_threads_that_are_not_there(work: Work) -> object:
    sample = made(seed=21)
    given = options(use_per_session_threads=False)
    return attempt(opened, sample, model_file(work, sample), given)


@case()
def global_threads(work: Work) -> object:
    sample = made(seed=21)
    pool = attempt(onnxruntime.set_global_thread_pool_sizes, 2, 1)
    given = options(use_per_session_threads=False)
    return [pool, attempt(opened, sample, model_file(work, sample), given)]


# --- the object -----------------------------------------------------------------------------------


@case(served=True)
def options_stay_as_they_were(work: Work) -> object:
    sample = made("recogniser", seed=21)
    given = options(graph_optimization_level=Level.ORT_ENABLE_BASIC, logid="mine")
    given.add_session_config_entry("own.key", "1")
    before = options_seen(given, ["own.key"])
    session = onnxruntime.InferenceSession(model_file(work, sample), given)
    after = options_seen(given, ["own.key"])
    own = session.get_session_options()
    return [
        before,
        after,
        own is given,
        session._sess_options_initial is given,
        attempt(vars, given),
    ]


@case(served=True)
def options_for_several_sessions(work: Work) -> object:
    sample, other = made("recogniser", seed=21), made("transformer", seed=21)
    paths = [model_file(work, sample, "a.onnx"), model_file(work, other, "b.onnx")]
    given = options()
    seen = [opened(sample, paths[0], given), opened(other, paths[1], given)]
    given.graph_optimization_level = Level.ORT_ENABLE_EXTENDED
    given.add_session_config_entry("session.disable_prepacking", "1")
    seen.append(opened(sample, paths[0], given))
    return [*seen, opened(sample, paths[0], given)]


@case(served=True)
def changed_after_creation(work: Work) -> object:
    sample = made("recogniser", seed=21)
    path = model_file(work, sample)
    given = options()
    session = onnxruntime.InferenceSession(path, given)
    given.graph_optimization_level = Level.ORT_DISABLE_ALL
    given.add_session_config_entry("session.disable_prepacking", "1")
    given.intra_op_num_threads = 2
    before = [described(session), ran(session, sample.feeds)]
    # The session is made anew from the options as they are now.
    session.set_providers(CPU)
    return [before, described(session), ran(session, sample.feeds)]


@case()
def options_of_a_session(work: Work) -> object:
    """What get_session_options returns makes another session, and can be changed."""
    sample = made("recogniser", seed=21)
    path = model_file(work, sample)
    given = options(graph_optimization_level=Level.ORT_ENABLE_EXTENDED)
    given.add_session_config_entry("own.key", "1")
    session = onnxruntime.InferenceSession(path, given)
    own = session.get_session_options()
    second = opened(sample, path, own, entries=["own.key"])
    own.graph_optimization_level = Level.ORT_ENABLE_BASIC
    own.intra_op_num_threads = 2
    return [options_seen(own, ["own.key"]), second, opened(sample, path, own), described(session)]


class Derived(onnxruntime.SessionOptions):
    """Options with a class and attributes of their own."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.mine = "mine"
        self.intra_op_num_threads = threads
        self.add_session_config_entry("own.key", "1")

    def add_session_config_entry(self, key: str, value: str) -> None:
        super().add_session_config_entry(key, value.upper())


@case()
def derived_options(work: Work) -> object:
    sample = made(seed=21)
    path = model_file(work, sample)
    given = Derived(1)
    given.add_session_config_entry("own.other", "x")
    seen = opened(sample, path, given, entries=["own.key", "own.other"])
    return [seen, vars(given), [options_seen(given, ["own.other"])]]


@case()
def odd_uses_of_options(work: Work) -> object:
    given = options()
    return [
        attempt(copy.copy, given),
        attempt(copy.deepcopy, given),
        attempt(pickle.dumps, given),
        attempt(setattr, given, "no_such_attribute", 1),
        attempt(setattr, given, "intra_op_num_threads", "two"),
        attempt(setattr, given, "graph_optimization_level", 99),
        attempt(given.add_session_config_entry, "key"),
        attempt(given.add_session_config_entry, "key", 1),
        attempt(given.add_session_config_entry, key="key", value="1"),
        attempt(given.add_free_dimension_override_by_name, "batch"),
        attempt(given.add_initializer, "x", 1),
        attempt(given.get_session_config_entry, "not there"),
        attempt(given.get_session_config_entry),
        attempt(Options, 5),
        repr(type(given)),
        sorted(dir(given)),
        [str(getattr(Options, name).__doc__)[:80] for name in sorted(dir(Options))],
    ]


@case(served=True)
def methods_by_other_ways(work: Work) -> object:
    """Bound methods kept, called on the class, with keywords."""
    sample = made("dimensions", seed=21)
    given = options()
    add = given.add_session_config_entry
    add("session.disable_prepacking", "1")
    Options.add_free_dimension_override_by_name(given, "batch", 3)
    return opened(sample, model_file(work, sample), given)


@case(served=True)
def options_die_before_the_session(work: Work) -> object:
    sample = made(seed=21)
    path = model_file(work, sample)
    sessions = []
    for number in range(5):
        given = options()
        given.add_session_config_entry("own.key", str(number))
        sessions.append(onnxruntime.InferenceSession(path, given))
        del given
    results = [ran(session, sample.feeds) for session in sessions]
    return [results, [described(session, ["own.key"]) for session in sessions]]


@case(served=True)
def default_options(work: Work) -> object:
    """Without options the library's own default ones are used, and stay as they are."""
    from onnxruntime.capi import _pybind_state

    sample = made(seed=21)
    path = model_file(work, sample)
    shared = _pybind_state.get_default_session_options()
    before = options_seen(shared)
    sessions = [opened(sample, path), opened(sample, path, None)]
    return [before, sessions, options_seen(_pybind_state.get_default_session_options())]


@case()
def changed_default_options(work: Work) -> object:
    from onnxruntime.capi import _pybind_state

    sample = made("recogniser", seed=21)
    path = model_file(work, sample)
    shared = _pybind_state.get_default_session_options()
    shared.graph_optimization_level = Level.ORT_ENABLE_BASIC
    shared.add_session_config_entry("session.disable_prepacking", "1")
    return opened(sample, path)
