"""Recipes: what is in them, what is not, and what is refused."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as binding
import pytest
from harness import wait_until
from preparations import apply_points

from trims_shim.daemon.preparer.installation import installation
from trims_shim.errors import MemoryFailure, NotServed
from trims_shim.patches import onnxruntime_models as models
from trims_shim.patches import onnxruntime_recipe as recipes
from trims_shim.wire.messages import SessionRecipe

LEVELS = onnxruntime.GraphOptimizationLevel
CPU = "CPUExecutionProvider"


def label(value: object) -> str:
    """Of a parameter, the same in every process: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@pytest.fixture(autouse=True)
def _recording() -> Iterator[None]:
    undo_points = apply_points()
    yield
    undo_points()


def recipe(
    *changes: Any,
    providers: Any = None,
    provider_options: Any = None,
    disabled: Any = None,
    prepack: str = "share",
    has_sessions: bool | None = False,
) -> SessionRecipe:
    options = onnxruntime.SessionOptions()
    for change in changes:
        change(options)
    settings = recipes.read_settings(options, providers, provider_options, disabled)
    return recipes.recipe_of(settings, prepack=prepack, has_sessions=has_sessions)


def setting(name: str, value: Any) -> Any:
    return lambda options: setattr(options, name, value)


def entry(key: str, value: str) -> Any:
    return lambda options: options.add_session_config_entry(key, value)


def test_of_a_session_without_options() -> None:
    plain = recipes.recipe_of(recipes.read_settings(None, None, None, None), prepack="share")
    assert plain == recipe() == recipes.default_recipe(prepack="share")
    assert plain.runtime == binding.get_version_string()
    assert plain.level == "ORT_ENABLE_ALL"
    assert plain.providers == ((CPU,),)
    assert plain.prepack == "share"
    assert (plain.entries, plain.free_dimensions, plain.disabled_optimizers) == ((), (), ())


@pytest.mark.parametrize(
    "change",
    [
        {"changes": [setting("graph_optimization_level", LEVELS.ORT_ENABLE_BASIC)]},
        {"changes": [setting("use_deterministic_compute", True)]},
        {"changes": [entry("session.set_denormal_as_zero", "1")]},
        {"changes": [entry("optimization.enable_gelu_approximation", "1")]},
        {"changes": [entry("session.disable_prepacking", "1")]},
        {"changes": [entry("custom.anything", "1")]},
        {"changes": [lambda o: o.add_free_dimension_override_by_name("batch", 1)]},
        {"changes": [lambda o: o.add_free_dimension_override_by_name("batch", 2)]},
        {"changes": [lambda o: o.add_free_dimension_override_by_denotation("batch", 1)]},
        {"disabled": ["MatMulAddFusion"]},
        {"providers": [(CPU, {"a": "1"})]},
    ],
    ids=label,
)
def test_what_changes_the_result_is_in_it(change: dict[str, Any]) -> None:
    seen = {recipe(), recipe(*change.pop("changes", ()), **change)}
    assert len(seen) == 2


def test_all_of_these_are_different() -> None:
    found = [
        recipe(),
        recipe(lambda o: o.add_free_dimension_override_by_name("batch", 1)),
        recipe(lambda o: o.add_free_dimension_override_by_name("batch", 2)),
        recipe(lambda o: o.add_free_dimension_override_by_denotation("batch", 1)),
        recipe(entry("session.set_denormal_as_zero", "1")),
        recipe(entry("session.set_denormal_as_zero", "0")),
        recipe(prepack="off"),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "change",
    [
        {"changes": [setting("intra_op_num_threads", 3)]},
        {"changes": [setting("inter_op_num_threads", 3)]},
        {"changes": [setting("execution_mode", onnxruntime.ExecutionMode.ORT_PARALLEL)]},
        {"changes": [setting("enable_cpu_mem_arena", False)]},
        {"changes": [setting("enable_mem_pattern", False)]},
        {"changes": [setting("enable_profiling", True)]},
        {"changes": [setting("log_severity_level", 0), setting("logid", "mine")]},
        {"changes": [entry("session.intra_op.allow_spinning", "0")]},
        {"changes": [entry("session.intra_op_thread_affinities", "1")]},
        {"providers": []},
        {"providers": [CPU]},
        {"providers": (CPU,)},
        {"providers": [(CPU, {})]},
        {"providers": ["AzureExecutionProvider", CPU]},
        {"providers": ["CUDAExecutionProvider"]},
        {"providers": ["CUDAExecutionProvider", CPU]},
        {"providers": [CPU, CPU]},
        {"providers": [CPU], "provider_options": [{}]},
        {"providers": None, "provider_options": [{"a": "1"}]},
        {"disabled": set()},
    ],
    ids=label,
)
def test_what_does_not_change_the_result_is_not(change: dict[str, Any]) -> None:
    assert recipe(*change.pop("changes", ()), **change) == recipe()


def test_order_does_not_matter_where_onnxruntime_has_none() -> None:
    one, two = entry("custom.a", "1"), entry("custom.b", "2")
    assert recipe(one, two) == recipe(two, one)
    first = lambda o: o.add_free_dimension_override_by_name("a", 1)  # noqa: E731
    second = lambda o: o.add_free_dimension_override_by_name("b", 1)  # noqa: E731
    assert recipe(first, second) == recipe(second, first)
    names = recipe(disabled=["a", "b"])
    for same in ({"b", "a"}, frozenset({"a", "b"}), ("b", "a"), ["b", "a", "b"]):
        assert recipe(disabled=same) == names
    assert recipe(providers=[(CPU, {5: "a"})]) == recipe(providers=[(CPU, {"5": "a"})])
    assert recipe(providers=[(CPU, {"a": 1, "b": True})]) == recipe(
        providers=[CPU], provider_options=[{"b": "True", "a": "1"}]
    )


def test_the_first_of_two_equal_providers_counts() -> None:
    assert recipe(providers=[(CPU, {"a": "1"}), (CPU, {"a": "2"})]) == recipe(
        providers=[(CPU, {"a": "1"})]
    )


@pytest.mark.parametrize("asked", ["share", "off"])
def test_a_program_that_sets_packing_itself(asked: str) -> None:
    key = recipes.NO_PREPACKING
    assert recipe(entry(key, "1"), prepack=asked) == recipe(prepack="off")
    assert recipe(entry(key, "0"), prepack=asked) == recipe(prepack="share")


def test_denormal_numbers_are_set_by_the_first_session() -> None:
    are_zero, are_kept = (entry("session.set_denormal_as_zero", value) for value in "10")
    assert recipe(are_zero, has_sessions=True) == recipe(are_kept, has_sessions=True) == recipe()
    for change in [(), (are_kept,)]:
        assert recipe(*change, has_sessions=None) == recipe(*change)
    with pytest.raises(NotServed, match="maybe for a later session"):
        recipe(are_zero, has_sessions=None)


def test_it_is_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe()
    assert (before.runtime, before.build) == (installation().runtime, installation().build)
    for field in ("runtime", "build"):
        other = installation()._replace(**{field: "another"})
        monkeypatch.setattr(recipes, "installation", lambda other=other: other)
        assert recipe() == before._replace(**{field: "another"})
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        ("arguments", {"providers": CPU}),
        ("arguments", {"providers": iter([CPU])}),
        ("arguments", {"providers": [1]}),
        ("arguments", {"providers": [(CPU,)]}),
        ("arguments", {"providers": [(CPU, [])]}),
        ("arguments", {"providers": [(CPU, {"a": []})]}),
        ("arguments", {"providers": [(CPU, {(): "a"})]}),
        ("provider", {"providers": ["NoSuchExecutionProvider", CPU]}),
        ("arguments", {"providers": [CPU], "provider_options": {}}),
        ("arguments", {"providers": [CPU], "provider_options": []}),
        ("arguments", {"providers": [], "provider_options": [{}]}),
        ("arguments", {"providers": [(CPU, {})], "provider_options": [{}]}),
        ("arguments", {"disabled": "MatMulAddFusion"}),
        ("arguments", {"disabled": iter(["MatMulAddFusion"])}),
        ("arguments", {"disabled": [1]}),
    ],
    ids=label,
)
def test_arguments_that_are_not_understood(reason: str, arguments: Any) -> None:
    with pytest.raises(NotServed) as caught:
        recipe(**arguments)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "key",
    [
        "ep.context_enable",
        "memory.something_new",
        "mlas.something_new",
        "optimization.something_new",
        "session.load_model_format",
        "session.model_external_initializers_file_folder_path",
        "session.optimized_model_external_initializers_file_name",
        "session.record_ep_graph_assignment_info",
        "session.save_external_prepacked_constant_initializers",
        "session.strict_shape_type_inference",
        "session.use_ort_model_bytes_directly",
        "session.something_new",
    ],
)
def test_config_entries_that_are_not_known_to_be_harmless(key: str) -> None:
    with pytest.raises(NotServed) as caught:
        recipe(entry(key, "1"))
    assert caught.value.reason == "config_entry"


def test_providers_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Binding:
        get_build_info = binding.get_build_info
        get_available_providers = staticmethod(
            lambda: ["CUDAExecutionProvider", "OtherExecutionProvider", CPU]
        )
        get_all_providers = get_available_providers

    monkeypatch.setattr(recipes, "binding", Binding)
    for names in (["CUDAExecutionProvider", CPU], ["OtherExecutionProvider"], None):
        with pytest.raises(NotServed) as caught:
            recipe(providers=names)
        assert caught.value.reason == "provider"
    assert recipe(providers=[CPU]).providers == ((CPU,),)


def test_search_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", "relative", "/absolute", 5])
    assert recipes.search_path() == (str(tmp_path), str(tmp_path / "relative"), "/absolute")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    assert recipes.search_path() == ("/absolute",)


# --- models ---------------------------------------------------------------------------------------


class Session:
    def __init__(self, path: Any, data: Any = None) -> None:
        self._model_path = path
        self._model_bytes = data


@pytest.mark.parametrize(
    ("reason", "session"),
    [
        ("not_a_file", Session("/no such file")),
        ("not_a_file", Session("a\0b")),
        ("not_a_file", Session("\udcff")),
        ("not_regular", Session("/dev/null")),
        ("not_regular", Session("/")),
        ("ort_format", Session("/model.ort")),
        ("ort_format", Session(None, b"\0\0\0\0ORTM" + bytes(100))),
        ("arguments", Session("")),
        ("arguments", Session(b"/path")),
        ("arguments", Session(None, None)),
    ],
    ids=label,
)
def test_models_that_are_left_alone(reason: str, session: Session) -> None:
    with pytest.raises(NotServed) as caught:
        models.model_of(session)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("data", "min_bytes"), [(bytes(9), 10), (b"", 10), (b"", 0)])
def test_bytes_that_are_too_few(data: bytes, min_bytes: int) -> None:
    assert models.model_of(Session(None, data)).data == data
    with pytest.raises(NotServed) as caught:
        models.check_size(data, min_bytes=min_bytes)
    assert caught.value.reason == "small_file"


def test_what_a_class_of_options_has_of_its_own_is_not_in_it() -> None:
    class Mine(onnxruntime.SessionOptions):  # type: ignore[misc]
        graph_optimization_level = LEVELS.ORT_ENABLE_BASIC
        use_deterministic_compute = True
        optimized_model_filepath = "/somewhere"

    settings = recipes.read_settings(Mine(), None, None, None)
    assert recipes.recipe_of(settings, prepack="share") == recipe()


def test_paths_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """External data are looked for beside the model: where the kernel found it, not the text."""
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "real" / "model.onnx").write_bytes(b"the one that is meant")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "real" / "inner")
    (tmp_path / "here" / "model.onnx").write_bytes(b"another")
    monkeypatch.chdir(tmp_path / "here")
    for path in ("link/../model.onnx", str(tmp_path / "here/link/../model.onnx"), "./model.onnx"):
        found = models.absolute(path)
        assert os.path.isabs(found)
        assert os.path.samefile(found, path)
        assert os.path.samefile(os.path.dirname(found), os.path.dirname(path))
    assert models.absolute("./model.onnx") == str(tmp_path / "here" / "model.onnx")


def test_the_preparer_finds_pythons_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where files beside the script are named like them."""
    library = os.path.dirname(os.__file__)
    monkeypatch.setattr(sys, "path", ["/script", library, "/site"])
    assert recipes.search_path() == (library, "/script", "/site")


def test_names_that_no_message_can_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(odd)
    monkeypatch.setattr(sys, "path", ["", "/good", odd])
    monkeypatch.chdir(odd)
    assert recipes.search_path() == ("/good",)
    with pytest.raises(NotServed) as caught:
        models.absolute("model.onnx")
    assert caught.value.reason == "arguments"
    os.rmdir(odd)
    with pytest.raises(NotServed):
        models.absolute("model.onnx")
    assert recipes.search_path() == ("/good",)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    with pytest.raises(NotServed, match="not a regular file"):
        models.model_of(Session(str(pipe)))
    # It may have taken the place of a file meanwhile; then at least nobody waits for a writer.
    with (
        pytest.raises(NotServed, match="not a regular file"),
        models.opened(str(pipe), min_bytes=1),
    ):
        pass


def test_a_sealed_copy_of_bytes() -> None:
    data = os.urandom(100_000)
    with models.offered(data) as descriptor:
        assert os.pread(descriptor, 200_000, 0) == data
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_bytes_are_not_copied_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "available_bytes", lambda: 400)
    with models.offered(bytes(100)):
        pass
    with pytest.raises(MemoryFailure, match="101 bytes"), models.offered(bytes(101)):
        pass


def test_digests_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(1 << 20)
    assert models.digest_of(data) == blake3.blake3(data).hexdigest()
    monkeypatch.setattr(models, "_THREADS_WORTH_BYTES", 1)
    assert models.digest_of(data) == blake3.blake3(data).hexdigest()


def test_no_thread_is_left_by_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_THREADS_WORTH_BYTES", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        models.digest_of(os.urandom(1 << 20))
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before, "the end of its threads")


def test_where_no_thread_can_start_the_caller_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """blake3 would panic, which is no Exception."""
    real, used = blake3.blake3, []

    def spy(data: bytes, *, max_threads: int) -> Any:
        used.append(max_threads)
        return real(data, max_threads=max_threads)

    monkeypatch.setattr(blake3, "blake3", spy)
    monkeypatch.setattr(models, "_THREADS_WORTH_BYTES", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for can_start, threads in ((True, 4), (False, 1)):
        monkeypatch.setattr(models, "can_start", lambda count, answer=can_start: answer)
        assert models.digest_of(b"a model") == real(b"a model").hexdigest()
        assert used.pop() == threads
