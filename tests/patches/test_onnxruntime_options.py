"""What is recorded of SessionOptions, and that recording changes nothing."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnxruntime.capi import _pybind_state
from preparations import apply_points

from trims_shim.errors import NotServed
from trims_shim.patches import onnxruntime_options as options_patch
from trims_shim.patches import onnxruntime_recipe as recipes
from trims_shim.patches import onnxruntime_records as records
from trims_shim.patches.points import AppliedPatch, Found, PatchState, apply, undo

Options = onnxruntime.SessionOptions


@pytest.fixture(autouse=True)
def _recording() -> Iterator[None]:
    undo_points = apply_points()
    yield
    undo_points()


def record(options: Any) -> records.Record:
    found = records.record_of(options)
    assert found is not None
    return found


def test_every_method_of_this_onnxruntime_was_looked_at() -> None:
    recorded = {point.target.rpartition(".")[2] for point in options_patch._RECORDED}
    not_replayed = {  # onnxruntime 1.19 to 1.32
        "add_external_initializers",
        "add_external_initializers_from_files_in_memory",
        "add_initializer",
        "add_provider",
        "add_provider_for_devices",
        "clear_ep_context_data_read_func",
        "register_custom_ops_library",
        "set_ep_context_data_read_func",
        "set_load_cancellation_flag",
        "set_provider_selection_policy",
        "set_provider_selection_policy_delegate",
    }
    assert set(records.changing_methods()) <= recorded | not_replayed
    assert records.is_watched()


def test_entries_and_dimensions() -> None:
    options = Options()
    options.add_session_config_entry("a", "1")
    options.add_session_config_entry("a", "2")
    options.add_session_config_entry("b", "4")
    options.add_free_dimension_override_by_name("batch", 3)
    options.add_free_dimension_override_by_denotation("DATA_BATCH", np.int64(5))
    assert record(options).entries == {"a": "2", "b": "4"}
    dimensions = {("name", "batch"): 3, ("denotation", "DATA_BATCH"): 5}
    assert record(options).dimensions == dimensions
    # Of two for one dimension onnxruntime takes the first.
    options.add_free_dimension_override_by_name("batch", 9)
    assert record(options).dimensions == dimensions
    assert record(options).other == ""


def test_what_failed_is_not_recorded() -> None:
    options = Options()
    for wrong in ((), ("a",), ("a", 1), ("a", "1", "2")):
        with pytest.raises(TypeError):
            options.add_session_config_entry(*wrong)
    with pytest.raises(TypeError):
        options.add_free_dimension_override_by_name("batch", "many")
    with pytest.raises(RuntimeError, match="key is empty"):
        options.add_session_config_entry("", "an empty key")
    assert record(options) == records.Record()


@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.add_session_config_entry(b"a", b"1"),
        lambda o: o.set_load_cancellation_flag(False),
        lambda o: o.add_provider("CPUExecutionProvider", {}),
        lambda o: o.add_external_initializers([], []),
        lambda o: o.set_provider_selection_policy_delegate(lambda *_: []),
    ],
)
def test_what_cannot_be_replayed(call: Any) -> None:
    options = Options()
    call(options)
    assert record(options).other


@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.register_custom_ops_library("/no_such_library.so"),
        lambda o: o.add_initializer("a", None),
        lambda o: o.add_provider("NoSuchExecutionProvider", {}),
    ],
)
def test_what_failed_half_way_counts(call: Any) -> None:
    options = Options()
    with pytest.raises(Exception):  # noqa: B017, PT011
        call(options)
    assert record(options).other


def messages_of(options: Any) -> list[tuple[type, str]]:
    found = []
    for call in (
        lambda: options.add_session_config_entry("a", 1),
        lambda: options.add_session_config_entry(),
        lambda: options.add_free_dimension_override_by_name(1, 2),
        lambda: options.add_initializer("a", None),
        lambda: options.register_custom_ops_library("/no_such_library.so"),
        lambda: type(options)(1),
        lambda: copy.copy(options),
        lambda: copy.deepcopy(options),
        lambda: pickle.dumps(options),
        lambda: setattr(options, "new_attribute", 1),
        lambda: options.get_session_config_entry("a"),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        text = str(caught.value).partition(" object at 0x")[0]
        found.append((caught.type, text))
    return found


def test_errors_are_the_originals() -> None:
    ours = messages_of(Options())
    for patch in reversed(_applied_now()):
        undo(patch)
    assert messages_of(Options()) == ours


def _applied_now() -> list[Any]:
    """As the fixture's; undone here for good."""
    found = []
    for point in options_patch.POINTS:
        attribute = point.target.rpartition(".")[2]
        current = vars(Options).get(attribute)
        if current is None:
            continue
        place = Found(Options, attribute, current.__wrapped__, is_inherited=False)
        found.append(AppliedPatch(point, PatchState.APPLIED, found=place, replacement=current))
    return found


def test_a_class_made_from_it() -> None:
    class Mine(Options):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("a", "1")
            self.extra = 1

    assert record(Mine()).entries == {"a": "1"}


def test_an_object_that_was_made_before_has_no_record() -> None:
    assert records.record_of(_pybind_state.get_default_session_options()) is None
    options = Options()
    records.forget_all()
    options.add_session_config_entry("a", "1")
    assert records.record_of(options) is None


def test_applying_again_forgets_what_was_made_before() -> None:
    options = Options()
    undone = _applied_now()
    for patch in reversed(undone):
        undo(patch)
    options.add_session_config_entry("a", "1")
    done = [apply(point) for point in options_patch.POINTS]
    assert records.record_of(options) is None
    for patch in reversed(done):
        undo(patch)


def test_records_go_with_their_objects() -> None:
    gc.collect()
    before = len(records._records)
    many = [Options() for _ in range(5)]
    assert len(records._records) == before + 5
    del many
    gc.collect()
    assert len(records._records) == before


def test_an_object_that_is_initialised_again_is_as_new() -> None:
    options = Options()
    options.add_session_config_entry("a", "1")
    options.__init__()
    assert record(options).entries == {}


class TestClones:
    def test_everything_that_can_be_read_is_equal(self) -> None:
        options = Options()
        values = {
            "enable_cpu_mem_arena": False,
            "enable_mem_pattern": False,
            "enable_mem_reuse": False,
            "enable_profiling": True,
            "execution_mode": onnxruntime.ExecutionMode.ORT_PARALLEL,
            "execution_order": onnxruntime.ExecutionOrder.PRIORITY_BASED,
            "graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
            "inter_op_num_threads": 3,
            "intra_op_num_threads": 2,
            "log_severity_level": 1,
            "log_verbosity_level": 2,
            "logid": "mine",
            "optimized_model_filepath": "/somewhere",
            "profile_file_prefix": "prefix",
            "use_deterministic_compute": True,
            "use_per_session_threads": False,
        }
        properties = {n for n, each in vars(Options).items() if isinstance(each, property)}
        assert values.keys() == properties, "a property nobody knows; see _KNOWN_PROPERTIES"
        for name, value in values.items():
            assert getattr(options, name) != value, "a test that cannot fail"
            setattr(options, name, value)
        copied = records.clone(options, record(options))
        assert copied is not options
        assert {name: getattr(copied, name) for name in values} == values

    def test_of_a_class_with_properties_of_its_own(self) -> None:
        """onnxruntime does not see them, so neither may a copy."""

        class Mine(Options):  # type: ignore[misc]
            intra_op_num_threads = 7
            graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            optimized_model_filepath = "/somewhere"

        options = Mine()
        copied = records.clone(options, record(options))
        assert copied.intra_op_num_threads == 0
        assert copied.graph_optimization_level.name == "ORT_ENABLE_ALL"
        assert copied.optimized_model_filepath == ""

    def test_recorded_calls_are_replayed_and_recorded(self) -> None:
        options = Options()
        options.add_session_config_entry("a", "1")
        options.add_free_dimension_override_by_denotation("DATA_BATCH", 5)
        copied = records.clone(options, record(options), entries={"b": "2"})
        assert copied.get_session_config_entry("a") == "1"
        assert copied.get_session_config_entry("b") == "2"
        assert record(copied).entries == {"a": "1", "b": "2"}
        assert record(copied).dimensions == record(options).dimensions
        assert record(options).entries == {"a": "1"}

    def test_of_nothing(self) -> None:
        copied = records.clone(
            None, records.Record(), level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        )
        assert copied.graph_optimization_level.name == "ORT_DISABLE_ALL"
        assert record(copied) == records.Record()


class TestNewerVersions:
    @staticmethod
    def why_not_served(options: Any) -> str:
        with pytest.raises(NotServed) as caught:
            recipes.read_settings(options, None, None, None)
        return caught.value.reason

    def test_a_method_nobody_wrapped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def set_something_new(self: Any) -> None:
            """What a newer version might have."""

        monkeypatch.setattr(Options, "set_something_new", set_something_new, raising=False)
        assert not records.is_watched()
        assert self.why_not_served(Options()) == "options_unknown"
        target = "onnxruntime.capi._pybind_state:SessionOptions.set_something_new"
        done = [apply(point) for point in options_patch._others() if point.target == target]
        assert records.is_watched()
        options = Options()
        options.set_something_new()
        assert record(options).other == "set_something_new"
        for patch in done:
            undo(patch)

    def test_a_method_that_another_tool_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Options, "add_initializer", lambda *_: None)
        assert not records.is_watched()

    def test_a_property_nobody_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        values: dict[int, int] = {}
        new = property(
            lambda self: values.get(id(self), 0), lambda self, v: values.update({id(self): v})
        )
        monkeypatch.setattr(Options, "new_property", new, raising=False)
        records._properties.cache_clear()
        try:
            options = Options()
            assert records.unknown_settings(options) == []
            options.new_property = 3
            assert records.unknown_settings(options) == ["new_property"]
            assert self.why_not_served(options) == "options_unknown"
        finally:
            records._properties.cache_clear()
