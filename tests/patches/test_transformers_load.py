"""transformers' from_pretrained onto an emulated device, and what of it is patched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import devices as emulation
import pytest
import torch
from devices import Devices, ToCuda, events, shared
from images import make_variants, needs_extension
from torch import nn

from trims_shim import patches
from trims_shim.errors import UnknownDevice
from trims_shim.patches import (
    safetensors_device,
    torch_conversion,
    torch_device,
    torch_from_file,
    torch_modes,
    transformers_dtype,
    transformers_load,
)

transformers = pytest.importorskip("transformers", minversion="5")
core = pytest.importorskip("transformers.core_model_loading")
modeling = pytest.importorskip("transformers.modeling_utils")
experts = pytest.importorskip("trims_shim.patches.transformers_experts")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIDE = 256


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    with emulation.emulated(
        monkeypatch,
        *torch_from_file.POINTS,
        *safetensors_device.POINTS,
        *transformers_dtype.POINTS,
        *experts.POINTS,
        *transformers_load.POINTS,
    ) as devices:
        yield devices


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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
    transformers.GPT2LMHeadModel(configuration).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def _can_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate is asked for, but needed only for maps of several devices."""
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: 1)
    # What would be reserved on a device for what is not shared.
    monkeypatch.setattr("transformers.modeling_utils.get_total_byte_count", lambda *_: {})
    # What moves the inputs of modules between devices.
    monkeypatch.setattr("transformers.modeling_utils.accelerate_dispatch", lambda *_: None)
    # Function modes, and so torch's emulated copies, are those of one thread.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.mark.usefixtures("_can_dispatch")
def test_from_pretrained(devices: Devices, folder: Path) -> None:
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder)
    devices.opened_on_host.clear()
    with ToCuda(), ZerosOnCuda():
        ours = transformers.GPT2LMHeadModel.from_pretrained(folder, device_map={"": "cuda:0"})
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert shared(parameter) == (parameter.nbytes >= emulation.LARGE), name
        assert parameter.requires_grad == expected[name].requires_grad
    assert ours.lm_head.weight is ours.transformer.wte.weight
    assert not any(shared(each) for each in ours.buffers())
    assert len(devices.mappings) == 1
    assert devices.opened_on_host == [], "no host image was needed"
    assert safetensors_device.destination.get() is None, "other files are opened where they were"
    assert events("skipped:caching_allocator_warmup") == 1
    tokens = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(ours.eval()(tokens).logits, theirs.eval()(tokens).logits)


@pytest.mark.usefixtures("_can_dispatch")
def test_from_pretrained_in_another_dtype(devices: Devices, folder: Path) -> None:
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float16)
    with ToCuda(), ZerosOnCuda():
        ours = transformers.GPT2LMHeadModel.from_pretrained(
            folder, device_map={"": "cuda:0"}, dtype=torch.float16
        )
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.dtype is torch.float16
        assert not shared(parameter)
    assert devices.mappings == [], "nor is there an image of the file beside it"


@needs_extension
@pytest.mark.usefixtures("_can_dispatch")
def test_layers_that_keep_their_dtype(
    devices: Devices, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For them alone, all of the file would be put on the device."""
    model = transformers.GPT2LMHeadModel
    monkeypatch.setattr(model, "_keep_in_fp32_modules_strict", {"c_proj"})
    theirs = model.from_pretrained(folder, dtype=torch.float16)
    for is_converted in (False, True):
        if is_converted:
            make_variants(monkeypatch)
            passive = {*torch_modes.passive_modes, ZerosOnCuda}
            monkeypatch.setattr(torch_modes, "passive_modes", passive)
        with ToCuda(), ZerosOnCuda():
            ours = model.from_pretrained(folder, device_map={"": "cuda:0"}, dtype=torch.float16)
        for name, parameter in theirs.named_parameters():
            found = ours.get_parameter(name)
            assert torch.equal(found, parameter), name
            assert found.dtype is (torch.float32 if "c_proj" in name else torch.float16)
        assert len(devices.mappings) == is_converted
    assert [name for name, _ in devices.opened] == [f"{folder}/model.safetensors (float16)"]
    assert not transformers_load._converting


@needs_extension
@pytest.mark.usefixtures("_can_dispatch")
def test_from_pretrained_in_a_dtype_that_the_host_has(
    devices: Devices, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As converted there, and only that."""
    make_variants(monkeypatch)
    monkeypatch.setattr(torch_modes, "passive_modes", {*torch_modes.passive_modes, ZerosOnCuda})
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)
    for index in (0, 1):
        with ToCuda(), ZerosOnCuda():
            ours = transformers.GPT2LMHeadModel.from_pretrained(
                folder, device_map={"": f"cuda:{index}"}, dtype=torch.bfloat16
            )
        for name, parameter in theirs.named_parameters():
            found = ours.get_parameter(name)
            assert torch.equal(found, parameter), name
            assert found.dtype is torch.bfloat16
            assert shared(found) == (found.nbytes >= emulation.LARGE), name
        assert ours.lm_head.weight is ours.transformer.wte.weight
    opened = [(name.rpartition("/")[2], device) for name, device in devices.opened]
    assert opened == [("model.safetensors (bfloat16)", f"GPU-{index}") for index in (0, 1)]


def mixtral(path: Path) -> Any:
    configuration = transformers.MixtralConfig(
        vocab_size=512,
        hidden_size=SIDE,
        intermediate_size=SIDE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    torch.manual_seed(1)
    transformers.MixtralForCausalLM(configuration).save_pretrained(path)
    return transformers.MixtralForCausalLM


@pytest.mark.usefixtures("_can_dispatch")
@pytest.mark.parametrize(
    "device_map", ["cuda:0", {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1", "": "cpu"}]
)
@pytest.mark.parametrize("outcome", ["shared", "no image", "refused"])
def test_experts_that_are_stacked(
    devices: Devices,
    device_map: Any,
    outcome: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The image of the file would need as much of the device again as the model."""
    if outcome != "no image":
        make_variants(monkeypatch)
    if outcome == "refused":
        from trims_shim.client.cache import cache

        cache().config._values["strict"] = False
        devices.refusal = UnknownDevice("no")
    monkeypatch.setattr(torch_modes, "passive_modes", {*torch_modes.passive_modes, ZerosOnCuda})
    kind = mixtral(tmp_path)
    with patches.inactive():
        theirs = kind.from_pretrained(tmp_path)
    for _ in range(2):
        with ToCuda(), ZerosOnCuda():
            ours = kind.from_pretrained(tmp_path, device_map=device_map)
        for name, parameter in theirs.named_parameters():
            found = ours.get_parameter(name)
            assert torch.equal(found, parameter), name
            assert found.stride() == parameter.stride()
            assert shared(found) == (outcome == "shared" and found.dim() == 3), name
    opened = {name.rpartition("/")[2] for name, _ in devices.opened}
    assert opened == (set() if outcome == "no image" else {"model.safetensors (stacked)"})
    assert events("skipped:caching_allocator_warmup") == 2
    ours.save_pretrained(tmp_path / "again")
    for name, parameter in kind.from_pretrained(tmp_path / "again").named_parameters():
        assert torch.equal(theirs.get_parameter(name), parameter), name
    assert not transformers_load._assembling
    assert experts.placement.get() is None
    assert safetensors_device.destination.get() is None


@pytest.mark.usefixtures("_can_dispatch")
def test_experts_that_were_saved_as_stacks(devices: Devices, tmp_path: Path) -> None:
    """Nothing is made of them, but they are read to host memory as those that are stacked."""
    kind = mixtral(tmp_path / "first")
    with patches.inactive():
        theirs = kind.from_pretrained(tmp_path / "first")
    theirs.save_pretrained(tmp_path / "second", save_original_format=False)
    moved: list[Any] = []

    class Counting(ToCuda):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.to and "cuda:0" in map(str, args[1:]):
                moved.append(args[0].shape)
            return super().__torch_function__(func, types, args, kwargs)

    with Counting(), ZerosOnCuda():
        ours = kind.from_pretrained(tmp_path / "second", device_map="cuda:0")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    assert sum(len(each) == 3 for each in moved) == 4


class AtOnce:
    """Threads that have read all before anyone looks."""

    def __init__(self, **_: Any) -> None: ...

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def shutdown(self, **_: Any) -> None: ...


@pytest.mark.usefixtures("_can_dispatch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_no_image_leave_host_memory_as_they_are_read(
    devices: Devices, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch converts is a copy."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    monkeypatch.setattr(core, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(core, "GLOBAL_WORKERS", 1)
    kind = mixtral(tmp_path)
    where: list[str] = []

    class Recording(ToCuda):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.to and args[0].shape == (SIDE, SIDE):
                where.append(str((kwargs or {}).get("device", args[1:2] and args[1])))
            return super().__torch_function__(func, types, args, kwargs)

    theirs = kind.from_pretrained(tmp_path, dtype=dtype)
    with Recording(), ZerosOnCuda():
        ours = kind.from_pretrained(tmp_path, device_map="cuda:0", dtype=dtype)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    steps = [place for place in where if place in ("cpu", "cuda:0")]
    first = steps.index("cpu")
    assert steps[first + 1] == ("cpu" if dtype is torch.float32 else "cuda:0")


@pytest.mark.parametrize("mesh", [None, "mesh"])
def test_experts_of_a_model_that_is_split_are_transformers_own(mesh: Any) -> None:
    stacks = core.WeightConverter("a.*.w", "a.w", operations=[core.MergeModulelist(dim=0)])
    configuration = modeling.LoadStateDictConfig(weight_mapping=[stacks], device_mesh=mesh)
    assert (transformers_load._placement(configuration) is None) == (mesh is not None)


@needs_extension
@pytest.mark.usefixtures("_can_dispatch")
def test_experts_that_are_converted_and_stacked(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_variants(monkeypatch)
    monkeypatch.setattr(torch_conversion, "MIN_SIZE_BYTES", 0)
    monkeypatch.setattr(torch_modes, "passive_modes", {*torch_modes.passive_modes, ZerosOnCuda})
    kind = mixtral(tmp_path)
    with patches.inactive():
        theirs = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with ToCuda(), ZerosOnCuda():
        ours = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cuda:0")
    for name, parameter in theirs.named_parameters():
        found = ours.get_parameter(name)
        assert torch.equal(found, parameter), name
        assert found.dtype is torch.bfloat16
        assert shared(found) == (found.dim() == 3), name
    assert {name.rpartition("/")[2] for name, _ in devices.opened} == {
        "model.safetensors (bfloat16) (stacked)"
    }


@pytest.mark.usefixtures("_can_dispatch")
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_family_with_models_that_are_put_together(
    devices: Devices, tmp_path: Path, is_gated: bool
) -> None:
    """Only Dinov2's largest model has the matrices that transformers splits."""
    configuration = transformers.Dinov2Config(
        hidden_size=SIDE, num_hidden_layers=1, num_attention_heads=4, use_swiglu_ffn=is_gated
    )
    torch.manual_seed(1)
    transformers.Dinov2Model(configuration).save_pretrained(tmp_path)
    theirs = transformers.Dinov2Model.from_pretrained(tmp_path)
    with ToCuda(), ZerosOnCuda():
        ours = transformers.Dinov2Model.from_pretrained(tmp_path, device_map="cuda:0")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    assert len(devices.mappings) == (not is_gated)


@pytest.mark.usefixtures("_can_dispatch")
def test_from_pretrained_that_is_refused(devices: Devices, folder: Path) -> None:
    from trims_shim.client.cache import cache

    cache().config._values["strict"] = False
    devices.refusal = UnknownDevice("no")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder)
    devices.opened_on_host.clear()
    with ToCuda(), ZerosOnCuda():
        ours = transformers.GPT2LMHeadModel.from_pretrained(folder, device_map={"": "cuda:0"})
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
        assert not shared(ours.get_parameter(name))
    assert len(devices.opened_on_host) == 1, "the host tier serves it"


class ZerosOnCuda(torch.overrides.TorchFunctionMode):
    """Tensors that are made on the device are made here."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.fixture
def entry(devices: Devices, tmp_path: Path) -> Any:
    """A slice as from_pretrained has it: of a file that is open on the CPU."""
    import safetensors

    path = tmp_path / "m.safetensors"
    tensors = {"w": torch.randn(SIDE, SIDE), "small": torch.randn(3)}
    safetensors_torch.save_file(tensors, path)
    return safetensors.safe_open(str(path), "pt")


def materialize(*args: Any) -> Any:
    with ToCuda():
        return core._materialize_copy(*args)


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda:0")], ids=str
)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_devices_and_the_same_dtype(entry: Any, device: Any, dtype: Any) -> None:
    moved = materialize(entry.get_slice("w"), device, dtype)
    assert shared(moved)
    assert torch.equal(moved, entry.get_tensor("w"))
    assert type(moved) is torch.Tensor


def test_what_is_copied(devices: Devices, entry: Any) -> None:
    weight, small = entry.get_slice("w"), entry.get_slice("small")
    for args in (
        (weight, "cuda", torch.float16),
        (small, "cuda", None),
        (weight, "cpu", None),
        (weight, None, None),
        (torch.randn(SIDE, SIDE), "cuda", None),
    ):
        expected = args[0][...].to(args[2])
        assert torch.equal(materialize(*args), expected)
        assert not shared(materialize(*args))
    assert devices.opened == []


def test_a_tensor_that_was_written(entry: Any) -> None:
    tensor = entry.get_tensor("w")
    tensor[0, 0] = 7.0
    moved = materialize(tensor, "cuda", None)
    assert not shared(moved)
    assert moved[0, 0] == 7.0


def test_a_refusal_is_a_copy(devices: Devices, entry: Any) -> None:
    from trims_shim.client.cache import cache

    cache().config._values["strict"] = False
    devices.refusal = UnknownDevice("no")
    assert torch.equal(materialize(entry.get_slice("w"), "cuda", None), entry.get_tensor("w"))


def test_private_access(devices: Devices, entry: Any) -> None:
    token = torch_device.access.set("private")
    assert not shared(materialize(entry.get_slice("w"), "cuda", None))
    assert devices.opened == [], "no image is kept for what is copied"
    configuration = modeling.LoadStateDictConfig(device_map={"": "cuda:0"})
    assert transformers_load._places(configuration) == []
    reserved: list[Any] = []
    transformers_load.POINTS[2].wrap(lambda *args: reserved.append(args))("", {"": 0}, None)
    assert len(reserved) == 1, "the copies need as much"
    torch_device.access.reset(token)


def test_while_inactive(devices: Devices, entry: Any) -> None:
    """All is transformers' own."""
    reserved: list[Any] = []
    before = entry.get_tensor("w")
    token = patches.overridden.set(False)
    for source in (entry.get_slice("w"), before):
        assert not shared(materialize(source, "cuda", None))
    transformers_load.POINTS[2].wrap(lambda *args: reserved.append(args))("", {"": 0}, None)
    patches.overridden.reset(token)
    assert devices.opened == []
    assert len(reserved) == 1


@pytest.mark.parametrize(
    ("device_map", "is_left_out"),
    [
        ({"": torch.device("cuda", 0)}, True),
        ({"a": 0, "b": "cpu"}, True),
        ({"a": "cuda:1"}, True),
        ({"a": "cuda:9"}, False),
        ({"a": "xpu:0"}, False),
        ({"a": 0, "b": "xpu:0"}, False),
        ("auto", False),
    ],
    ids=str,
)
def test_reserving_memory(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, device_map: Any, is_left_out: bool
) -> None:
    calls: list[Any] = []
    warmup = transformers_load.POINTS[2].wrap(lambda *args: calls.append(args))
    warmup("model", device_map, None)
    assert (calls == []) == is_left_out
    warmup("model", device_map, "a quantizer")
    assert len(calls) == 1 + (not is_left_out)


def test_large_buffers_become_private(entry: Any) -> None:
    class Masked(nn.Module):
        base_model_prefix = ""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(SIDE, SIDE))
            self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))

    outer = nn.Module()
    outer.inner = Masked()
    moved = materialize(entry.get_slice("w"), "cuda", None)
    information = core.LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(),
        mismatched_keys=set(),
        conversion_errors={},
        error_msgs=[],
        skipped_pp_keys=set(),
    )
    core.set_param_for_module(outer, "inner.weight", moved, information, None)
    assert shared(outer.inner.weight)
    moved = materialize(entry.get_slice("w"), "cuda", None)
    core.set_param_for_module(outer, "inner.mask", moved, information, None)
    assert not shared(outer.inner.mask)
    assert shared(outer.inner.weight)
    assert torch.equal(outer.inner.mask, outer.inner.weight)


@pytest.mark.parametrize(
    ("device_map", "quantizer", "index"),
    [
        ({"": "cuda:1"}, None, 1),
        ({"a": 0, "b": torch.device("cuda:0")}, None, 0),
        ({"a": "cuda:0", "b": "cuda:1"}, None, None),
        ({"a": "cuda:0", "b": "cpu"}, None, None),
        ({"": "cpu"}, None, None),
        ({}, None, None),
        (None, None, None),
        ("auto", None, None),
        ({"": "cuda:0"}, "quantizer", None),
    ],
    ids=str,
)
def test_when_files_are_opened_for_a_device(
    devices: Devices, device_map: Any, quantizer: Any, index: int | None
) -> None:
    configuration = modeling.LoadStateDictConfig(device_map=device_map, hf_quantizer=quantizer)
    assert transformers_load._sole_device(transformers_load._places(configuration)) == index


ASSEMBLED = [
    core.WeightRenaming("a", "b"),
    core.WeightConverter("a", "b", operations=[core.Transpose()]),
]


@pytest.mark.parametrize("is_by_name", [False, True])
@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize(
    ("mapping", "is_assembled"),
    [(None, False), ([], False), (ASSEMBLED[:1], False), (ASSEMBLED, True)],
    ids=["none", "empty", "renamed", "assembled"],
)
def test_loads_within_loads(
    devices: Devices, mapping: Any, is_assembled: bool, is_active: bool, is_by_name: bool
) -> None:
    """What one says of its files and of its model ends with it."""
    outer = modeling.LoadStateDictConfig(device_map={"": 0}, weight_mapping=ASSEMBLED)
    inner = modeling.LoadStateDictConfig(device_map={"": 0}, weight_mapping=mapping)
    seen: list[Any] = []

    def load(model: Any, state_dict: Any, files: Any, load_config: Any, keys: Any = None) -> None:
        seen.append((safetensors_device.destination.get(), len(transformers_load._assembling)))
        if load_config is outer:
            token = patches.overridden.set(is_active)
            if is_by_name:
                wrapped(model, state_dict, files, load_config=inner)
            else:
                wrapped(model, state_dict, files, inner)
            patches.overridden.reset(token)
            seen.append((safetensors_device.destination.get(), len(transformers_load._assembling)))

    wrapped = transformers_load.POINTS[1].wrap(staticmethod(load)).__func__
    wrapped(nn.ParameterDict({"b": nn.Parameter(torch.ones(1))}), None, [], outer)
    within = (0 if is_active and not is_assembled else None, 1 + is_assembled)
    assert seen == [(None, 1), within, (None, 1)]
    assert not transformers_load._assembling


def test_files_that_are_opened_for_a_device(devices: Devices, entry: Any) -> None:
    """What is done with them on the CPU is the compiled class's."""
    import safetensors

    expected = entry.get_tensor("w")
    path = devices.opened_on_host[-1]
    token = safetensors_device.destination.set(1)
    file = safetensors.safe_open(path, "pt")
    safetensors_device.destination.reset(token)
    assert [device for _, device in devices.opened] == ["GPU-1"]
    weight = file.get_slice("w")
    assert weight.get_shape() == [SIDE, SIDE]
    assert not shared(weight[3:5])
    assert torch.equal(weight[3:5], expected[3:5])
    assert not shared(file.get_tensor("w"))
    assert not any(map(shared, file.get_tensors().values()))
    assert shared(materialize(weight, "cuda:1", None))
    assert not shared(materialize(weight, "cuda:0", None))
    assert materialize(weight, "cuda:1", torch.float16).dtype is torch.float16
    assert weight.on_device(0, None) is None


def test_a_method_of_the_class(devices: Devices) -> None:
    """As it is in transformers 5.0."""
    configuration = modeling.LoadStateDictConfig(device_map={"": 0})
    seen: list[Any] = []

    class Model:
        @classmethod
        def load(cls, model: Any, state_dict: Any, files: Any, load_config: Any) -> None:
            seen.append((cls, load_config, safetensors_device.destination.get()))

    Model.load = transformers_load._wrap_load(Model.__dict__["load"])  # type: ignore[method-assign]
    Model.load(nn.Linear(1, 1), None, [], configuration)
    Model().load(nn.Linear(1, 1), None, [], load_config=configuration)
    assert seen == [(Model, configuration, 0)] * 2


def test_a_mapping_that_cannot_be_read_is_transformers_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trims_shim.client.cache import cache

    monkeypatch.setattr(torch_device.skip, "warned", {"internal_error"})
    with emulation.emulated(monkeypatch):
        cache().config._values["strict"] = False
        seen: list[bool] = []
        load = transformers_load._wrap_load(
            staticmethod(lambda *_: seen.append(bool(transformers_load._assembling)))
        )
        converter = SimpleNamespace(operations=[], target_patterns=[3])
        load.__func__(nn.Linear(1, 1), None, [], SimpleNamespace(weight_mapping=[converter]))
    assert seen == [True]
    assert not transformers_load._assembling
