"""Module.to a device: parameters in host memory of the shim end on the device image of their bytes.

torch's own copies to the device are emulated by a mode below everything, so that modules are moved
whole: what is not served is copied, as with a GPU. The outcome is compared with that of a module
whose tensors are not the shim's.
"""

from __future__ import annotations

import copy
import cProfile
import io
import pstats
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import safetensors.torch
import torch
from devices import LARGE, SIDE, Devices, Tied, ToCuda, events, reasons, shared
from images import image_with, make_variants, needs_extension
from torch import nn

from trims_shim import diagnostics
from trims_shim.client import arenas
from trims_shim.errors import NoSpace
from trims_shim.formats.device_layout import read_contents
from trims_shim.formats.torch_zip import TorchArchive
from trims_shim.memory import pages
from trims_shim.patches import (
    torch_device,
    torch_mappings,
    torch_modes,
    torch_module_move,
    torch_unshare,
)
from trims_shim.patches.torch_module_move import Sources
from trims_shim.patches.torch_storage import storage_of, tensor_over
from trims_shim.specs import Span, Variant


@pytest.fixture(params=emulation.BOTH_WAYS)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Devices]:
    emulation.let_swap(monkeypatch, request.param)
    points = *emulation.OF_LOADING, *torch_module_move.POINTS
    with emulation.emulated(monkeypatch, *points) as devices, ToCuda():
        yield devices
    assert "internal_error" not in reasons()


class Net(emulation.Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)


LARGE_PARAMETERS = ("first.weight", "second.weight")


@pytest.fixture
def loaded(devices: Devices, tmp_path: Path) -> Callable[..., Any]:
    """A module that was loaded from the cache into host memory, and the one it was saved from."""

    def make(kind: Callable[[], nn.Module] = Net, *, assign: bool = False) -> Any:
        theirs, ours = kind(), kind()
        path = tmp_path / "model.pt"
        torch.save(theirs.state_dict(), path)
        with ExitToCpu():
            ours.load_state_dict(torch.load(path), assign=assign)
        return ours, theirs

    return make


class ExitToCpu(ToCuda):
    """The mode that stands below everything is out of the way of loading."""

    def __enter__(self) -> ExitToCpu:
        self.mode = torch.overrides._pop_mode()
        return self

    def __exit__(self, *_: object) -> None:
        torch.overrides._push_mode(self.mode)


def are_shared(module: nn.Module) -> dict[str, bool]:
    return {name: shared(value) for name, value in module.named_parameters()}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    actual, expected = ours.state_dict(), theirs.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key
        assert actual[key].dtype == value.dtype
        assert actual[key].stride() == value.stride()


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to string": lambda module: module.to("cuda"),
    "to index": lambda module: module.to("cuda:0"),
    "to device": lambda module: module.to(torch.device("cuda", 0)),
    "to keyword": lambda module: module.to(device="cuda"),
    "to non-blocking": lambda module: module.to("cuda", non_blocking=True),
    "to its own dtype": lambda module: module.to("cuda", torch.float32),
    "cuda": lambda module: module.cuda(),
    "cuda number": lambda module: module.cuda(0),
    "cuda by hand": lambda module: module._apply(lambda tensor: tensor.cuda(0, True)),
    "cuda device": lambda module: module.cuda(torch.device("cuda:0")),
    "by hand": lambda module: module._apply(lambda tensor: tensor.to("cuda")),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_large_parameters_are_shared(
    devices: Devices, loaded: Callable[..., Any], move: Callable[[nn.Module], nn.Module]
) -> None:
    ours, theirs = loaded()
    before = {name: id(value) for name, value in ours.named_parameters()}
    assert move(ours) is ours
    assert {name for name, is_shared in are_shared(ours).items() if is_shared} == {
        *LARGE_PARAMETERS
    }
    assert_equal(ours, theirs)
    assert {name: id(value) for name, value in ours.named_parameters()} == before
    assert not ours.second.weight.requires_grad
    assert ours.first.weight.requires_grad
    assert ours.first.weight.is_leaf
    assert ours.first.weight.untyped_storage().nbytes() == ours.first.weight.nbytes
    assert not any(shared(buffer) for buffer in ours.buffers())
    assert events("moved:shared") == len(LARGE_PARAMETERS)
    assert len(devices.mappings) == 1
    x = torch.randn(4, SIDE)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_host_memory_is_given_up(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, _ = loaded()
    weight = ours.first.weight
    assert arenas.find(weight.data_ptr(), weight.nbytes) is not None
    ours.to("cuda")
    assert arenas.find(weight.data_ptr(), weight.nbytes) is None


def test_assigned_state_dicts(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded(assign=True)
    ours.to("cuda")
    assert sum(are_shared(ours).values()) == len(LARGE_PARAMETERS)
    assert_equal(ours, theirs)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "another dtype": lambda module: module.to("cuda", torch.float16),
    "another dtype by name": lambda module: module.to("cuda", dtype=torch.float16),
    "a forced copy": lambda module: module._apply(lambda each: each.to("cuda", copy=True)),
    "a forced copy by position": lambda module: module._apply(
        lambda each: each.to("cuda", each.dtype, False, True)
    ),
    "another tensor": lambda module: module._apply(lambda each: each.to(torch.empty(0))),
    "half": lambda module: module.half(),
    "the cpu": lambda module: module.to("cpu"),
    "no device": lambda module: module.to(torch.float32),
    "an absent device": lambda module: module._apply(lambda each: each.to("cuda:9")),
}


@pytest.mark.parametrize("move", COPIES.values(), ids=COPIES)
def test_other_moves_are_torchs(
    devices: Devices, loaded: Callable[..., Any], move: Callable[[nn.Module], nn.Module]
) -> None:
    ours, theirs = loaded()
    move(ours)
    assert not any(are_shared(ours).values())
    assert_equal(ours, move(theirs))
    assert devices.opened == []


def test_strides_of_dimensions_of_size_1(devices: Devices, loaded: Callable[..., Any]) -> None:
    """A kernel of 1 by 1 is contiguous and channels_last, and its strides say which it is."""
    ours, theirs = loaded(lambda: nn.Conv2d(SIDE, SIDE, 1, bias=False), assign=True)
    ours.weight.data = ours.weight.data.as_strided(ours.weight.shape, (SIDE, 1, SIDE, SIDE))
    ours.to("cuda")
    assert shared(ours.weight)
    assert ours.weight.stride() == (SIDE, 1, SIDE, SIDE)
    assert torch.equal(ours.weight, theirs.weight)


def test_compiled_code_moves_as_without_us(devices: Devices) -> None:
    module = nn.Linear(8, 8)
    compiled = torch.compile(
        lambda tensor: module.to("cpu")(tensor), backend="eager", fullgraph=True
    )
    tensor = torch.randn(2, 8)
    with ExitToCpu():
        assert torch.equal(compiled(tensor), module(tensor))


def test_channels_last_is_torchs(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded(lambda: nn.Conv2d(64, 64, 3))
    moved = [module.to("cuda", memory_format=torch.channels_last) for module in (ours, theirs)]
    assert_equal(*moved)
    assert not any(are_shared(ours).values())


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "blind"])
def test_what_was_written_is_copied(
    devices: Devices,
    loaded: Callable[..., Any],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the kernel does not tell what that is."""
    if not is_told:
        monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")
    ours, theirs = loaded()
    for module in (ours, theirs):
        with torch.no_grad():
            module.first.weight[0, 0] = 3.0
    ours.to("cuda")
    assert are_shared(ours)["first.weight"] is False
    assert are_shared(ours)["second.weight"] is True
    assert_equal(ours, theirs)
    assert reasons() == {"written": 1}


def stacked(name: str) -> nn.Module:
    """A module whose weight comes from an image of pieces of a file."""
    image = image_with(torch.randn(SIDE, SIDE).numpy().tobytes(), name=name)
    variant = Variant(0, None, 8, (8, 0))
    image.original = arenas.Original("of the file", variant, weakref.ref(image), "model.pt")
    storage = torch_mappings.FreshMappings(lambda *_: True).take(image, 0, image.size_bytes)
    assert storage is not None
    weight = nn.Parameter(tensor_over(storage, torch.float32, (SIDE, SIDE)))
    return nn.ParameterList([weight])


def test_stacked_weights(devices: Devices) -> None:
    """Their image is no model file; it is loaded as it is."""
    ours = stacked("model.pt (stacked)")
    expected = ours[0].detach().clone()
    ours.to("cuda")
    assert shared(ours[0])
    assert torch.equal(ours[0], expected)
    assert devices.opened == [("model.pt (stacked)", "GPU-0")]


class Converted:
    """Modules in float32 whose weights were loaded, and who asks for variants of their files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = make_variants(monkeypatch)

    def loaded(self, theirs: nn.Module, *, is_archive: bool = False) -> nn.Module:
        state = dict(theirs.state_dict())
        content = io.BytesIO()
        if is_archive:
            torch.save(state, content)
        else:
            content.write(safetensors.torch.save(state))
        image = image_with(content.getvalue(), name="model")
        storage = storage_of(image.map())
        spans = read_spans(content.getvalue())
        for name, value in theirs.state_dict().items():
            span = spans[name]
            part = storage[span.offset_bytes : span.end_bytes]
            state[name] = tensor_over(part, value.dtype, value.shape)
        ours = copy.deepcopy(theirs)
        ours.load_state_dict(state, assign=True)
        return ours


def read_spans(content: bytes) -> dict[str, Span]:
    contents = read_contents(memoryview(content))
    if not isinstance(contents, TorchArchive):
        return {each.name: each.span for each in contents}
    spans = [span for name, span in contents.records.items() if name.startswith("data/")]
    return {f"{n}.weight": span for n, span in enumerate(spans)}


@pytest.fixture
def converted(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> Converted:
    return Converted(monkeypatch)


def net(*, sides: tuple[int, ...] = (SIDE, SIDE, SIDE)) -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIDE, side, bias=False) for side in sides))


DTYPES = [torch.float16, torch.bfloat16]


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "move",
    [
        lambda module, dtype: module.to("cuda", dtype),
        lambda module, dtype: module.to(device="cuda:0", dtype=dtype, non_blocking=True),
    ],
)
def test_a_call_that_moves_and_converts(
    converted: Converted, devices: Devices, dtype: torch.dtype, move: Callable[..., nn.Module]
) -> None:
    theirs = net()
    models = [converted.loaded(theirs), converted.loaded(theirs)]
    for ours in models:
        assert move(ours, dtype) is ours
    theirs.to(dtype)
    for ours in models:
        assert_equal(ours, theirs)
        assert set(are_shared(ours).values()) == {True}
        assert {each.dtype for each in ours.parameters()} == {dtype}
    assert [name for name, _ in devices.opened] == [f"model ({str(dtype)[6:]})"]
    assert len(devices.mappings) == 1
    assert reasons() == {}
    assert diagnostics.stats().events[f"elided:{str(dtype)[6:]}"] == 6, "ended, and so counted"


@needs_extension
def test_numbers_that_are_not_aligned_as_on_a_device(
    converted: Converted, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a torch archive lie at multiples of 64: its images would be loaded for a few.

    They are copied as the host has converted them, not converted again.
    """
    copied: list[torch.dtype] = []

    class Watched(ToCuda):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.to:
                copied.append(args[0].dtype)
            return super().__torch_function__(func, types, args, kwargs)

    monkeypatch.setattr(torch_modes, "passive_modes", {*torch_modes.passive_modes, Watched})
    theirs = net()
    ours = converted.loaded(theirs, is_archive=True)
    with Watched():
        ours.to("cuda", torch.float16)
    assert copied == [torch.float16] * 3
    theirs.half()
    assert_equal(ours, theirs)
    assert not any(are_shared(ours).values())
    assert devices.opened == []
    assert reasons() == {"converted": 3}


@needs_extension
def test_nearly_all_have_to_be_aligned(converted: Converted, devices: Devices) -> None:
    """The first one always is."""
    rows = {"a few": (20 * SIDE, SIDE - 1, SIDE), "a third": (4 * SIDE - 1, SIDE, SIDE)}
    for name, sides in rows.items():
        theirs = nn.Sequential(*(nn.Linear(SIDE // 4 + 8, side, bias=False) for side in sides))
        ours = converted.loaded(theirs)
        ours.to("cuda", torch.float16)
        theirs.half()
        assert_equal(ours, theirs)
        assert any(are_shared(ours).values()) == (name == "a few"), name


@needs_extension
def test_what_the_host_has_not_converted_is_torchs(
    converted: Converted, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loads of all; and what was written."""
    theirs = net()
    ours = converted.loaded(theirs)
    with torch.no_grad():
        for each in (theirs, ours):
            each[0].weight[0, 0] = 3
    ours.to("cuda", torch.float16)
    assert list(are_shared(ours).values()) == [False, True, True]
    monkeypatch.setattr(torch_mappings, "variant_image", lambda *_: None)
    again = converted.loaded(theirs)
    again.to("cuda", torch.float16)
    assert not any(are_shared(again).values())
    theirs.half()
    assert_equal(ours, theirs)
    assert_equal(again, theirs)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": torch.conj,
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_parameter_that_says_otherwise_than_its_bytes_is_copied(
    devices: Devices, loaded: Callable[..., Any], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    ours, theirs = loaded(lambda: nn.Linear(SIDE, SIDE, bias=False, dtype=torch.complex64))
    for module in (ours, theirs):
        module.weight = nn.Parameter(view(module.weight.detach()))
    ours.to("cuda")
    assert not shared(ours.weight)
    assert_equal(ours, theirs)


def test_a_parameter_with_a_gradient_is_copied(
    devices: Devices, loaded: Callable[..., Any]
) -> None:
    ours, theirs = loaded()
    ours(torch.randn(4, SIDE)).sum().backward()
    gradient = ours.first.weight.grad.clone()
    running_mean = ours.norm.running_mean.clone()
    ours.to("cuda")
    assert are_shared(ours)["first.weight"] is False
    assert torch.equal(ours.first.weight.grad, gradient)
    assert torch.equal(ours.norm.running_mean, running_mean)
    assert torch.equal(ours.first.weight, theirs.first.weight)


def test_a_parameter_of_an_optimizer_is_copied(
    devices: Devices, loaded: Callable[..., Any]
) -> None:
    ours, theirs = loaded()
    undo = emulation.apply(torch_unshare.POINTS[0])
    optimizer = torch.optim.SGD([ours.first.weight], lr=0.1)
    ours.to("cuda")
    undo()
    assert not shared(optimizer.param_groups[0]["params"][0])
    assert shared(ours.second.weight)
    assert_equal(ours, theirs)


def test_a_checkpoint_of_training_is_copied(devices: Devices, tmp_path: Path) -> None:
    """An average of weights that is resumed is written by each step, and no optimizer has it."""
    theirs, average = Net(), Net()
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    torch.save(
        {"ema": theirs.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt"
    )
    with ExitToCpu():
        average.load_state_dict(torch.load(tmp_path / "last.pt")["ema"])
    average.to("cuda")
    assert not any(are_shared(average).values())
    assert_equal(average, theirs)
    assert reasons() == {"checkpoint_of_training": 1}
    assert devices.opened == []
    for parameter in average.parameters():
        parameter.data.lerp_(torch.zeros_like(parameter), 0.1)


def test_a_file_is_read_once_for_all_moves(
    devices: Devices, loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers moves each tensor by itself."""
    read: list[int] = []
    look = torch_module_move.is_of_training
    monkeypatch.setattr(
        torch_module_move, "is_of_training", lambda file: read.append(len(file)) or look(file)
    )
    ours, theirs = loaded()
    ours.first.to("cuda")
    ours.second.to("cuda")
    assert all(map(shared, (ours.first.weight, ours.second.weight)))
    assert_equal(ours, theirs)
    assert len(read) == 1


def test_other_tensors_that_the_function_moves_are_torchs(
    devices: Devices, loaded: Callable[..., Any]
) -> None:
    ours, theirs = loaded()
    other = torch.randn(SIDE, SIDE)
    moved = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(other.to("cuda"))
        return tensor.to("cuda")

    ours._apply(move)
    assert all(torch.equal(each, other) for each in moved)
    assert shared(ours.first.weight)
    assert_equal(ours, theirs)


def test_tied_parameters_stay_tied(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded(Tied)
    ours.to("cuda")
    assert ours.decoder.weight is ours.encoder.weight
    assert shared(ours.decoder.weight)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("setting", ["overwrite", "swap"])
def test_future_settings(
    devices: Devices, loaded: Callable[..., Any], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"set_{setting}_module_params_on_conversion"
    ours, theirs = loaded()
    identity = id(ours.first.weight)
    getattr(torch.__future__, name)(True)
    try:
        ours.to("cuda")
    finally:
        getattr(torch.__future__, name)(False)
    assert sum(are_shared(ours).values()) == len(LARGE_PARAMETERS)
    assert_equal(ours, theirs)
    assert (id(ours.first.weight) == identity) == (setting == "swap")
    assert type(ours.first.weight) is nn.Parameter
    assert not ours.second.weight.requires_grad


def test_embeddings_that_renormalise_are_copied(
    devices: Devices, loaded: Callable[..., Any]
) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(SIDE, SIDE, max_norm=1.0)
            self.rest = nn.Linear(SIDE, SIDE, bias=False)

    ours, _ = loaded(Words)
    ours.to("cuda")
    assert are_shared(ours) == {"words.weight": False, "rest.weight": True}
    ours.words(torch.tensor([3]))
    alone, _ = loaded(lambda: nn.Embedding(SIDE, SIDE, max_norm=1.0))
    assert not shared(alone.to("cuda").weight)


def test_what_a_module_that_writes_its_parameters_holds_is_copied(
    devices: Devices, loaded: Callable[..., Any]
) -> None:
    """As a layer of peft that was merged: the base weight is a parameter of a module in it."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(SIDE, SIDE, bias=False)
            self.merged_adapters = ["default"]

        def unmerge(self) -> None:
            self.base_layer.weight.data -= 1.0

    for kind in (Merged, lambda: nn.Sequential(Merged())):
        ours, theirs = loaded(kind)
        ours.to("cuda")
        for net in (ours, theirs):
            next(each for each in net.modules() if isinstance(each, Merged)).unmerge()
        assert_equal(ours, theirs)


def test_overridden_apply_and_hooks(devices: Devices, loaded: Callable[..., Any]) -> None:
    calls = []

    class Custom(Net):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            result = super()._apply(fn, recurse)
            self.extra = fn(torch.ones(3))
            calls.append(fn)
            return result

    ours, _ = loaded(Custom)
    handle = ours.first.register_forward_hook(lambda *_: None)
    ours.to("cuda")
    assert sum(are_shared(ours).values()) == len(LARGE_PARAMETERS)
    assert torch.equal(ours.extra, torch.ones(3))
    assert len(ours.first._forward_hooks) == 1
    handle.remove()


def test_recurse_off(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, _ = loaded()
    ours._apply(lambda tensor: tensor.to("cuda"), recurse=False)
    assert not any(are_shared(ours).values())


def test_modules_that_are_not_the_shims(devices: Devices) -> None:
    theirs = Net()
    expected = copy.deepcopy(theirs)
    assert_equal(theirs.to("cuda"), expected)
    assert devices.opened == []


def test_a_refusal_is_copied(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded()
    devices.refusal = NoSpace("full")
    emulation_cache_strictness("0")
    ours.to("cuda")
    assert not any(are_shared(ours).values())
    assert_equal(ours, theirs)
    assert len(devices.opened) == 1, "asked once for a module, not for each parameter"


def emulation_cache_strictness(value: str) -> None:
    from trims_shim.client.cache import cache

    cache().config._values["strict"] = value == "1"


def test_an_error_of_ours_is_a_copy(
    devices: Devices, loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = loaded()
    emulation_cache_strictness("0")

    def fail(*_: object) -> None:
        raise ZeroDivisionError("?")

    monkeypatch.setattr(Sources, "find", fail)
    ours.to("cuda")
    assert_equal(ours, theirs)
    assert reasons() == {"internal_error": len(LARGE_PARAMETERS)}
    diagnostics.reset_after_fork()


def test_private_access(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded()
    token = torch_device.access.set("private")
    ours.to("cuda")
    torch_device.access.reset(token)
    assert not any(are_shared(ours).values())
    assert_equal(ours, theirs)
    assert devices.opened == [], "no image is kept for what is copied"


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_watches_sees_the_copies(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded()
    with Watching():
        ours.to("cuda")
    assert not any(are_shared(ours).values())
    assert_equal(ours, theirs)


def test_a_default_device_does_not_watch(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded()
    with torch.device("cpu"):
        ours.to("cuda")
    assert sum(are_shared(ours).values()) == len(LARGE_PARAMETERS)
    assert_equal(ours, theirs)


def test_small_modules_ask_nobody(devices: Devices, loaded: Callable[..., Any]) -> None:
    ours, theirs = loaded(lambda: nn.Linear(LARGE // 4 - 1, 1))
    ours.to("cuda")
    assert devices.opened == []
    assert_equal(ours, theirs)


def test_other_tensors_pay_some_questions(devices: Devices) -> None:
    """Of a tensor that is not the shim's torch is asked a few things, in 2 us on real devices."""
    function = torch_module_move._Mover(lambda tensor: tensor, Sources(), nn.Module())
    parameter = nn.Parameter(torch.randn(SIDE, SIDE))
    function(parameter)
    profile = cProfile.Profile()
    profile.runcall(function, parameter)
    # The devices of these tests answer half of them.
    assert pstats.Stats(profile).total_calls < 50
    assert devices.opened == []
