"""from_pretrained into another dtype than the files': transformers' own outcome, without copies."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import images
import pytest
import torch
from images import image_of, make_variants, needs_extension, patched

from trims_shim import diagnostics, patches
from trims_shim.errors import MemoryFailure
from trims_shim.patches import torch_from_file, torch_mappings, transformers_dtype
from trims_shim.specs import Conversion, Variant
from trims_shim.testing import FakeDaemon

transformers = pytest.importorskip("transformers", minversion="5")
core = pytest.importorskip("transformers.core_model_loading")
modeling = pytest.importorskip("transformers.modeling_utils")
pytestmark = needs_extension

SIDE = 256


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    targets = (*torch_from_file.POINTS, *transformers_dtype.POINTS)
    with patched(monkeypatch, *targets), FakeDaemon(strict="1"):
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    return make_variants(monkeypatch)


@pytest.fixture(params=["threads", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How transformers reads the tensors."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", str(int(request.param != "threads")))
    return str(request.param)


def saved(path: Path, dtype: torch.dtype, **options: Any) -> Path:
    configuration = transformers.GPT2Config(
        vocab_size=512,
        n_positions=64,
        n_embd=SIDE,
        n_layer=2,
        n_head=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(configuration).to(dtype).save_pretrained(path, **options)
    return path


def loaded(path: Path, **options: Any) -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(path, **options)


def plainly(path: Path, **options: Any) -> Any:
    """As transformers loads it, in memory of its own."""
    with patches.inactive():
        return loaded(path, **options)


def to_float32() -> Any:
    return transformers_dtype.Conversions(torch.float32, "x", lambda *_: False)


def elided() -> int:
    return diagnostics.stats().events.get("elided:from_pretrained", 0)


def assert_alike(ours: Any, theirs: Any) -> None:
    images.assert_alike(ours, theirs)
    assert ours.lm_head.weight is ours.transformer.wte.weight
    for tensor, expected in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "700KB"}], ids=["whole", "shards"])
def test_the_model_gets_converted_memory(
    tmp_path: Path,
    source: torch.dtype,
    target: torch.dtype,
    shards: dict[str, str],
    asked: list[Variant],
) -> None:
    path = saved(tmp_path, source, **shards)
    files = len(list(path.glob("*.safetensors")))
    assert (files > 1) is bool(shards)
    theirs = plainly(path, dtype=target)
    models = [loaded(path, dtype=target) for _ in range(2)]
    large = [
        name
        for name, each in theirs.named_parameters()
        if each.numel() * source.itemsize >= torch_mappings.MIN_SIZE_BYTES
    ]
    assert elided() == 2 * len(large)
    for model in models:
        assert_alike(model, theirs)
        for name in large:
            assert image_of(model.get_parameter(name)) is not None, name
    with torch.no_grad():
        models[0].lm_head.weight.fill_(7)
    assert_alike(models[1], theirs)
    again = loaded(path, dtype=target)
    assert_alike(again, theirs)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {}),
        (torch.float16, {"dtype": torch.float64}),
        (torch.float32, {"dtype": torch.float32}),
    ],
)
def test_others_are_as_before(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any], asked: list[Variant]
) -> None:
    path = saved(tmp_path, dtype)
    assert_alike(loaded(path, **options), plainly(path, **options))
    assert (asked, elided()) == ([], 0)


def test_layers_that_are_to_be_more_exact(
    tmp_path: Path, asked: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 for them alone; the image would be of all."""
    path = saved(tmp_path, torch.float16)
    monkeypatch.setattr(
        transformers.GPT2LMHeadModel, "_keep_in_fp32_modules", ["c_fc"], raising=False
    )
    model = loaded(path, dtype=torch.float16)
    assert model.transformer.h[0].mlp.c_fc.weight.dtype is torch.float32
    assert (asked, elided()) == ([], 0)


def test_a_checkpoint_that_is_mostly_something_else(tmp_path: Path, asked: list[Variant]) -> None:
    from safetensors.torch import load_file, save_file

    path = saved(tmp_path, torch.float32)
    state = load_file(path / "model.safetensors")
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"].half()
    name = "transformer.h.0.mlp.c_fc.weight"
    state[name] = state[name].half()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    assert_alike(loaded(path, dtype=torch.float32), plainly(path, dtype=torch.float32))
    assert asked == []


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("where", ["take", "begin"])
def test_after_an_error_of_ours_transformers_converts(
    where: str, tmp_path: Path, asked: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise MemoryFailure("no")

    path = saved(tmp_path, torch.float16)
    if where == "take":
        monkeypatch.setattr(torch_mappings.FreshMappings, "take", fail)
    else:
        monkeypatch.setattr(transformers_dtype, "Conversions", fail)
    assert_alike(loaded(path, dtype=torch.float32), plainly(path, dtype=torch.float32))
    assert elided() == 0
    assert diagnostics.stats().events["elision_error:MemoryFailure"] >= 1


def test_an_error_of_transformers_leaves_nothing_behind(
    tmp_path: Path, asked: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, torch.float16)

    def fail(*_: object) -> Any:
        raise RuntimeError("theirs")

    with monkeypatch.context() as patched:
        patched.setattr(core, "set_param_for_module", fail)
        with pytest.raises(RuntimeError, match="theirs"):
            loaded(path, dtype=torch.float32)
    assert transformers_dtype._conversions.get() is None


def test_an_entry_is_what_it_stands_for() -> None:
    class Slice:
        def get_shape(self) -> list[int]:
            return [2, 3]

        def __getitem__(self, index: Any) -> Any:
            return index

    entry = transformers_dtype.ConvertedEntry(Slice(), to_float32())
    assert entry.get_shape() == [2, 3]
    assert entry[1:2] == slice(1, 2)
    assert entry[...] is ...


ENTRY = torch.zeros(1, dtype=torch.float16)


@pytest.mark.parametrize("sharding", [None, object()])
def test_all_arguments_by_position(sharding: Any) -> None:
    seen: list[Any] = []
    spawn = transformers_dtype._wrap_materialize(lambda *args: seen.append(args))
    token = transformers_dtype._conversions.set(to_float32())
    spawn(None, ENTRY, None, torch.float32, sharding, 3)
    transformers_dtype._conversions.reset(token)
    (_, entry, *others) = seen[0]
    assert others == [None, torch.float32, sharding, 3]
    assert isinstance(entry, transformers_dtype.ConvertedEntry) is (sharding is None)


@pytest.mark.parametrize(
    ("options", "is_ours"),
    [
        ({"device": "cpu", "dtype": torch.float32}, True),
        ({"device": None, "dtype": torch.float32, "sharding_op": None, "tensor_idx": 3}, True),
        ({"device": torch.device("cpu"), "dtype": torch.float32}, True),
        ({"device": "cuda:0", "dtype": torch.float32}, True),
        ({"device": 0, "dtype": torch.float32}, True),
        ({"device": "meta", "dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float32, "sharding_op": object()}, False),
    ],
)
def test_what_is_asked_for(options: dict[str, Any], is_ours: bool) -> None:
    seen: list[Any] = []
    spawn = transformers_dtype._wrap_materialize(lambda _, tensor, *__, **___: seen.append(tensor))
    spawn(None, ENTRY, **options)
    token = transformers_dtype._conversions.set(to_float32())
    spawn(None, ENTRY, **options)
    transformers_dtype._conversions.reset(token)
    assert seen[0] is ENTRY
    assert isinstance(seen[1], transformers_dtype.ConvertedEntry) is is_ours


@pytest.mark.parametrize(
    ("change", "is_ours"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float64}, False),
        ({"hf_quantizer": object()}, False),
        ({"entries": UserDict()}, False),
        ({"is_limited": True}, False),
        ({"is_active": False}, False),
    ],
)
def test_which_loads(
    change: dict[str, Any], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SimpleNamespace(
        dtype=torch.float32, hf_quantizer=None, entries={}, is_limited=False, is_active=True
    )
    vars(load).update(change)
    monkeypatch.setattr(transformers_dtype, "are_addresses_limited", lambda: load.is_limited)
    monkeypatch.setattr(patches, "active", lambda: load.is_active)
    assert (transformers_dtype._begin(load.entries, load) is not None) is is_ours


@pytest.mark.parametrize("is_read", [True, False], ids=["tensors", "slices"])
@pytest.mark.parametrize(
    ("narrow", "wide", "is_most"), [(3, 1, True), (3, 2, False), (2, 1, False)]
)
def test_most_of_the_bytes(narrow: int, wide: int, is_most: bool, is_read: bool) -> None:
    """Just half is not most, whatever comes first."""
    tensors = {"wide": torch.zeros(wide), "narrow": torch.zeros(narrow, dtype=torch.float16)}
    slices = {
        name: SimpleNamespace(get_dtype=lambda kind=kind: kind, get_shape=lambda n=n: [1, n])
        for name, kind, n in (("wide", "F32", wide), ("narrow", "F16", narrow))
    }
    image: Any = None
    found = transformers_dtype._is_mostly(
        tensors if is_read else slices, image, Conversion("float16", "float32")
    )
    assert found is is_most


@pytest.mark.parametrize(
    ("dtypes", "dtype", "is_changed"),
    [
        (["float32"], torch.float16, True),
        (["float32"], torch.float32, False),
        (["float32"], torch.float64, False),
        (["float32"], None, False),
        (["float64"], torch.float32, False),
        (["float32", "float32", "float16"], torch.float16, True),
        (["float32", "float16", "float16"], torch.float16, False),
        (["float16", "bfloat16"], torch.float32, False),
    ],
)
def test_files_that_have_to_be_converted(
    tmp_path: Path, dtypes: list[str], dtype: Any, is_changed: bool
) -> None:
    from safetensors.torch import save_file

    path = str(tmp_path / "model.safetensors")
    values = {str(n): torch.zeros(8, dtype=getattr(torch, each)) for n, each in enumerate(dtypes)}
    save_file(values, path)
    assert transformers_dtype.is_converted(path, dtype) is is_changed
    assert not transformers_dtype.is_converted("model.bin", dtype)
    assert not transformers_dtype.is_converted(Path(path), dtype)


def test_a_look_at_a_file_loads_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would be given the file, and the host should not hold it, too."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    found: list[bool] = []

    def seen(*args: Any, **kwargs: Any) -> Any:
        found.append(patches.active())
        return safe_open(*args, **kwargs)

    path = str(tmp_path / "model.safetensors")
    save_file({"weight": torch.zeros(8)}, path)
    monkeypatch.setattr(transformers_dtype.safetensors, "safe_open", seen)
    assert patches.active()
    assert transformers_dtype.is_converted(path, torch.float16)
    assert found == [False]


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    assert not transformers_dtype.is_converted(str(path), torch.float16)


def test_the_wrappers_look_like_the_originals() -> None:
    for function in (modeling.convert_and_load_state_dict_in_model, core.spawn_materialize):
        original: Callable[..., Any] = inspect.unwrap(function)
        assert function is not original
        assert inspect.signature(function) == inspect.signature(original)
