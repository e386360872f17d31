"""from_pretrained of mixtures of experts: transformers' own outcome, without stacking copies."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from images import image_of, make_variants

from trims_shim import diagnostics, patches
from trims_shim.errors import MemoryFailure
from trims_shim.patches import points, torch_from_file, torch_mappings
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
    monkeypatch.setattr(patches, "_is_enabled", True)
    diagnostics.reset_after_fork()
    applied = [points.apply(point) for point in (*torch_from_file.POINTS, *experts.POINTS)]
    assert all(each.state is points.PatchState.APPLIED for each in applied)
    with FakeDaemon(strict="1"):
        yield
    for each in applied:
        points.undo(each)


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


def assert_alike(ours: Any, theirs: Any) -> None:
    for (name, tensor), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(tensor, expected), name
        for attribute in ("dtype", "requires_grad", "is_leaf", "_version"):
            assert getattr(tensor, attribute) == getattr(expected, attribute), (name, attribute)
        assert tensor.stride() == expected.stride()


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
            assert image.digest == "variant"
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


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"dtype": torch.float16}])
def test_converted_experts_are_stacked_by_torch(
    options: dict[str, Any], tmp_path: Path, asked: list[Variant]
) -> None:
    kind = mixtral(tmp_path)
    assert_alike(kind.from_pretrained(tmp_path, **options), plainly(kind, tmp_path, **options))
    assert [each for each in asked if each.pieces] == []
    assert elided() == 0


@pytest.mark.parametrize("error", [None, MemoryFailure("no")])
def test_without_an_image_torch_stacks(
    error: Exception | None, tmp_path: Path, asked: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        if error is not None:
            raise error

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


def converted(operations: list[Any], lists: dict[str, Any], targets: list[str]) -> Any:
    """What a converter's operations make of lists of tensors; only they are looked at."""
    holder = type("Converter", (), {"operations": operations})()

    def run(_: Any) -> Any:
        result: Any = lists
        for each in operations:
            result = each.convert(result, source_patterns=list("ab"), target_patterns=targets)
        return result

    return experts._wrap_convert(run)(holder)


def lists_of_two() -> dict[str, list[torch.Tensor]]:
    return {
        name: [torch.full((3, 5), 10 * number + n) for n in range(2)]
        for number, name in enumerate("ab")
    }


CHAINS: dict[str, Callable[[], list[Any]]] = {
    "beside": lambda: [core.MergeModulelist(dim=0), core.Concatenate(dim=1)],
    "behind": lambda: [core.MergeModulelist(dim=0), core.Concatenate(dim=0)],
    "by another dimension": lambda: [core.MergeModulelist(dim=1), core.Concatenate(dim=1)],
    "of three": lambda: [
        core.MergeModulelist(dim=0),
        core.Concatenate(dim=1),
        core.Transpose(dim0=1, dim1=2),
    ],
}


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("change", ["none", "shape", "count", "dtype", "kind"])
def test_chains(make: Callable[[], list[Any]], change: str) -> None:
    """With tensors that no cache holds, so that nothing can be served."""

    def outcome() -> Any:
        lists: dict[str, Any] = lists_of_two()
        if change == "shape":
            lists["b"] = [each[:2] for each in lists["b"]]
        elif change == "count":
            lists["b"].append(lists["b"][0])
        elif change == "dtype":
            lists["b"] = [each.double() for each in lists["b"]]
        elif change == "kind":
            lists["b"][0] = torch.nn.Parameter(lists["b"][0].double())
        try:
            return converted(make(), lists, ["c"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    ours = outcome()
    with patches.inactive():
        theirs = outcome()
    assert type(ours) is type(theirs)
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor)
            assert (ours[name].dtype, ours[name].stride()) == (tensor.dtype, tensor.stride())


def test_experts_go_when_they_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first list before the second is stacked: a layer may be much of the memory."""
    alive: list[int] = []

    def lists_and_watched() -> dict[str, list[torch.Tensor]]:
        lists = lists_of_two()
        watched = [weakref.ref(each) for tensors in lists.values() for each in tensors]
        for name in ("stack", "cat"):
            original = getattr(torch, name)

            def counting(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                alive.append(sum(each() is not None for each in watched))
                return _original(*args, **kwargs)

            monkeypatch.setattr(torch, name, counting)
        return lists

    converted([core.MergeModulelist(dim=0), core.Concatenate(dim=1)], lists_and_watched(), ["c"])
    assert alive == [4, 2, 0]


def test_a_list_alone_and_its_name() -> None:
    for lists, targets in (({"a": lists_of_two()["a"]}, ["c"]), (lists_of_two(), ["c", "d"])):
        ours = converted([core.MergeModulelist(dim=0)], dict(lists), targets)
        with patches.inactive():
            theirs = converted([core.MergeModulelist(dim=0)], dict(lists), targets)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_merge_outside_of_a_converter_is_transformers() -> None:
    merged = core.MergeModulelist(dim=0).convert(
        lists_of_two(), source_patterns=["a", "b"], target_patterns=["c"]
    )
    assert {name: tuple(each.shape) for name, each in merged.items()} == {
        "a": (2, 3, 5),
        "b": (2, 3, 5),
    }


def test_the_wrappers_look_like_the_originals() -> None:
    for kind in (core.WeightConverter, core.MergeModulelist, core.Concatenate):
        original: Callable[..., Any] = inspect.unwrap(kind.convert)
        assert kind.convert is not original
        assert inspect.signature(kind.convert) == inspect.signature(original)
