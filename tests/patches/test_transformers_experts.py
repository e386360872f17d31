"""from_pretrained of mixtures of experts: transformers' own outcome, without stacking copies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from images import (
    assert_alike,
    cached,
    image_of,
    make_variants,
    needs_extension,
    patched,
)

from trims_shim import diagnostics, patches
from trims_shim.errors import MemoryFailure
from trims_shim.patches import torch_conversion, torch_from_file, torch_mappings, transformers_dtype
from trims_shim.specs import Variant
from trims_shim.testing import FakeDaemon

transformers = pytest.importorskip("transformers", minversion="5")
core = pytest.importorskip("transformers.core_model_loading")
experts = pytest.importorskip("trims_shim.patches.transformers_experts")

SIDE, EXPERTS = 128, 4
SIZES = {
    "vocab_size": 256,
    "hidden_size": SIDE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    targets = (*torch_from_file.POINTS, *experts.POINTS)
    with patched(monkeypatch, *targets), FakeDaemon(strict="1"):
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    return make_variants(monkeypatch)


def mixtral(path: Path, **options: Any) -> Any:
    configuration = transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS)
    return saved(transformers.MixtralForCausalLM, configuration, path, **options)


def qwen(path: Path, **options: Any) -> Any:
    configuration = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=32, moe_intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=2
    )
    return saved(transformers.Qwen3MoeForCausalLM, configuration, path, **options)


def saved(kind: Any, configuration: Any, path: Path, **options: Any) -> Any:
    torch.manual_seed(1)
    kind(configuration).to(torch.bfloat16).save_pretrained(path, **options)
    return kind


def plainly(kind: Any, path: Path, **options: Any) -> Any:
    """As transformers loads it, in memory of its own."""
    with patches.inactive():
        return kind.from_pretrained(path, **options)


def elided() -> int:
    return diagnostics.stats().events.get("elided:stack", 0)


@pytest.mark.parametrize("save", [mixtral, qwen])
@pytest.mark.parametrize("is_threaded", [True, False], ids=["threads", "one by one"])
def test_experts_come_from_an_image(
    save: Callable[[Path], Any],
    is_threaded: bool,
    tmp_path: Path,
    asked: list[Variant],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", str(int(not is_threaded)))
    kind = save(tmp_path)
    theirs = plainly(kind, tmp_path)
    models = [kind.from_pretrained(tmp_path) for _ in range(2)]
    assert elided() == len(models) * 2 * 2
    stacks = [name for name, each in theirs.named_parameters() if each.dim() == 3]
    assert len(stacks) == 4
    for model in models:
        assert_alike(model, theirs)
        for name in stacks:
            image = image_of(model.get_parameter(name))
            assert image is not None
            assert image.original is not None
    tokens = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(models[0](tokens).logits, theirs(tokens).logits)
        models[0].get_parameter(stacks[0]).fill_(7)
    assert_alike(models[1], theirs)
    assert {len(each.pieces) for each in asked} == {EXPERTS, 2 * EXPERTS}
    models[1].save_pretrained(tmp_path / "again")
    assert_alike(plainly(kind, tmp_path / "again"), theirs)


def test_experts_of_several_files(tmp_path: Path, asked: list[Variant]) -> None:
    kind = mixtral(tmp_path, max_shard_size="400KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_alike(kind.from_pretrained(tmp_path), plainly(kind, tmp_path))
    assert 0 < elided() < 4


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts_that_are_converted(
    dtype: torch.dtype,
    tmp_path: Path,
    asked: list[Variant],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their stack is made of pieces of the converted image."""
    monkeypatch.setattr(torch_conversion, "MIN_SIZE_BYTES", 0)
    kind = mixtral(tmp_path)
    theirs = plainly(kind, tmp_path, dtype=dtype)
    with patched(monkeypatch, *transformers_dtype.POINTS):
        models = [kind.from_pretrained(tmp_path, dtype=dtype) for _ in range(2)]
        assert elided() == len(models) * 2 * 2
    for model in models:
        assert_alike(model, theirs)
    assert [bool(each.conversion) for each in asked if each.pieces] == [False] * 8
    with torch.no_grad():
        models[0].model.layers[0].mlp.experts.down_proj.fill_(7)
    assert_alike(models[1], theirs)


def test_converted_experts_without_a_converted_image(tmp_path: Path, asked: list[Variant]) -> None:
    options: dict[str, Any] = {"dtype": torch.float32}
    kind = mixtral(tmp_path)
    assert_alike(kind.from_pretrained(tmp_path, **options), plainly(kind, tmp_path, **options))
    assert [each for each in asked if each.pieces] == []
    assert elided() == 0


@pytest.mark.parametrize("error", [None, MemoryFailure])
def test_without_an_image_torch_stacks(
    error: type[Exception] | None,
    tmp_path: Path,
    asked: list[Variant],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Any:
        if error is not None:
            raise error("no")  # of its own: a raised error keeps the frames, and so the image

    monkeypatch.setattr(torch_mappings.FreshMappings, "take", fail)
    kind = mixtral(tmp_path)
    assert_alike(kind.from_pretrained(tmp_path), plainly(kind, tmp_path))
    assert elided() == 0


def test_what_is_wrong_with_a_file_is_told_alike(tmp_path: Path, asked: list[Variant]) -> None:
    from safetensors.torch import load_file, save_file

    kind = mixtral(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    names = [name for name in state if ".experts.1." in name]
    assert names
    for name in names:
        state[name] = state[name][:-1].contiguous()
    save_file(state, file, metadata={"format": "pt"})
    outcomes = []
    for load in (kind.from_pretrained, lambda path, **options: plainly(kind, path, **options)):
        try:
            _, told = load(tmp_path, output_loading_info=True)
            outcomes.append({key: sorted(map(str, value)) for key, value in told.items()})
        except Exception as raised:
            outcomes.append(f"{type(raised).__name__}: {raised}")
    assert outcomes[0] == outcomes[1]


# --- the operations alone -------------------------------------------------------------------------


def converter(
    operations: list[Any], lists: dict[str, Any], targets: list[str], patterns: list[str]
) -> Any:
    """One that has read lists of tensors. Only its operations and patterns are looked at.

    Its source patterns are in another order.
    """
    made = object.__new__(core.WeightConverter)
    made.operations = operations
    made.source_patterns = patterns
    made.target_patterns = targets
    made.collected_tensors = lists
    made.layer_targets = {"c": set()}
    return made


def converted(
    operations: list[Any], lists: dict[str, Any], targets: list[str], lacking: str
) -> Any:
    """What a converter makes of lists of tensors, of which it lacks those of some patterns."""
    patterns = sorted({*lists, *lacking}, reverse=True)
    result = converter(operations, lists, targets, patterns).materialize_tensors()
    for each in operations:
        result = each.convert(result, source_patterns=patterns, target_patterns=targets)
    assert lists == {}, "nothing that was read is kept"
    return result


def outcome(
    operations: list[Any], lists: dict[str, Any], targets: list[str], lacking: str = ""
) -> Any:
    try:
        return converted(operations, lists, targets, lacking)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, str):
        assert ours == theirs
        return
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor)
        assert (ours[name].dtype, ours[name].stride()) == (tensor.dtype, tensor.stride())


def lists_of_two(*, is_cached: bool = False) -> dict[str, Any]:
    state = {f"{name}{n}": torch.randn(3, 5) for name in "ab" for n in range(2)}
    if is_cached:
        state = cached({**state, "other": torch.zeros(99)})
    return {name: [state[f"{name}{n}"] for n in range(2)] for name in "ab"}


class Doubled(core.MergeModulelist):  # type: ignore[misc]
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        return {name: 2 * each for name, each in super().convert(*args, **kwargs).items()}


class Other(core.ConversionOps):  # type: ignore[misc]
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        merged = core.MergeModulelist(dim=0).convert(*args, **kwargs)
        return {name: 2 * each for name, each in merged.items()}


CHAINS: dict[str, Callable[[], list[Any]]] = {
    "beside": lambda: [core.MergeModulelist(dim=0), core.Concatenate(dim=1)],
    "behind": lambda: [core.MergeModulelist(dim=0), core.Concatenate(dim=0)],
    "from the end": lambda: [core.MergeModulelist(dim=0), core.Concatenate(dim=-2)],
    "by another dimension": lambda: [core.MergeModulelist(dim=1), core.Concatenate(dim=1)],
    "of three": lambda: [
        core.MergeModulelist(dim=0),
        core.Concatenate(dim=1),
        core.Transpose(dim0=1, dim1=2),
    ],
    "of a subclass": lambda: [Doubled(dim=0), core.Concatenate(dim=1)],
    "of another": lambda: [Other(), core.Concatenate(dim=1)],
}

CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "none": lambda tensors: tensors,
    "shape": lambda tensors: [each[:2] for each in tensors],
    "count": lambda tensors: [*tensors, tensors[0]],
    "fewer": lambda tensors: tensors[:1],
    "empty": lambda _: [],
    "dtype": lambda tensors: [each.double() for each in tensors],
    "numbers": lambda tensors: [each.view(torch.int32) for each in tensors],
    "kind": lambda tensors: [torch.nn.Parameter(tensors[0].double()), tensors[1]],
    "a stack": torch.stack,
}


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_cached", [False, True], ids=["private", "cached"])
def test_chains(
    make: Callable[[], list[Any]],
    change: Callable[[list[Any]], Any],
    is_cached: bool,
    asked: list[Variant],
) -> None:
    lists = lists_of_two(is_cached=is_cached)
    lists["b"] = change(lists["b"])
    with patches.inactive():
        theirs = outcome(make(), dict(lists), ["c"])
        assert asked == []
    assert_same(outcome(make(), lists, ["c"]), theirs)
    is_served = is_cached and make is CHAINS["beside"] and change is CHANGES["none"]
    assert elided() == is_served


@pytest.mark.parametrize("take", [lambda each: each[0], lambda each: each[0, 0]])
@pytest.mark.parametrize("name", ["beside", "behind", "from the end"])
def test_chains_of_less_than_matrices(
    name: str, take: Callable[[torch.Tensor], torch.Tensor], asked: list[Variant]
) -> None:
    lists = lists_of_two(is_cached=True)
    lists = {name: [take(each) for each in tensors] for name, tensors in lists.items()}
    with patches.inactive():
        theirs = outcome(CHAINS[name](), dict(lists), ["c"])
    assert_same(outcome(CHAINS[name](), lists, ["c"]), theirs)


@pytest.mark.parametrize(
    ("chain", "names", "targets", "is_served"),
    [
        ((core.MergeModulelist,), "a", "c", True),
        ((core.MergeModulelist,), "a", "cd", False),
        ((core.MergeModulelist,), "ab", "c", False),
        ((core.MergeModulelist,), "ab", "cd", False),
        ((core.MergeModulelist, core.Transpose), "a", "a", False),
        ((core.MergeModulelist, lambda: core.Concatenate(dim=1)), "a", "c", False),
        ((core.MergeModulelist, lambda: core.Concatenate(dim=1)), "ab", "cd", False),
    ],
)
def test_lists_and_names(
    chain: tuple[Callable[[], Any], ...],
    names: str,
    targets: str,
    is_served: bool,
    asked: list[Variant],
) -> None:
    lists = {name: each for name, each in lists_of_two(is_cached=True).items() if name in names}
    with patches.inactive():
        theirs = outcome([make() for make in chain], dict(lists), list(targets))
    assert_same(outcome([make() for make in chain], lists, list(targets)), theirs)
    assert elided() == is_served


def test_a_layer_without_some_of_the_tensors(asked: list[Variant]) -> None:
    """Versions of transformers differ in what they make of it."""
    lists = lists_of_two(is_cached=True)
    with patches.inactive():
        theirs = outcome(CHAINS["beside"](), dict(lists), ["c"], lacking="c")
    assert_same(outcome(CHAINS["beside"](), lists, ["c"], lacking="c"), theirs)
    assert asked == []


def test_under_a_default_device(asked: list[Variant]) -> None:
    torch.manual_seed(1)
    lists = lists_of_two(is_cached=True)
    torch.manual_seed(1)
    with patches.inactive():
        theirs = outcome(CHAINS["beside"](), lists_of_two(), ["c"])
    with torch.device("meta"):
        assert_same(outcome(CHAINS["beside"](), lists, ["c"]), theirs)
    assert elided() == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_have_no_shape(asked: list[Variant]) -> None:
    nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) for _ in range(2)]
    with patches.inactive():
        theirs = outcome([core.MergeModulelist(dim=0)], {"a": list(nested)}, ["a"])
    ours = outcome([core.MergeModulelist(dim=0)], {"a": list(nested)}, ["a"])
    assert isinstance(theirs, str)
    assert ours == theirs


def test_the_wrappers_look_like_the_originals() -> None:
    for wrapper in (
        core.WeightTransform.materialize_tensors,
        core.MergeModulelist.convert,
        core.Concatenate.convert,
    ):
        original: Callable[..., Any] = inspect.unwrap(wrapper)
        assert wrapper is not original
        assert inspect.signature(wrapper) == inspect.signature(original)
