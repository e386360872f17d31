"""Module.float, half, bfloat16 and to(dtype) without copies: the outcome is that of torch's own."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from images import cached, conversion, image_of, image_with, make_variants, needs_extension, patched
from torch import nn
from torch._subclasses import FakeTensorMode

from trims_shim import diagnostics, patches
from trims_shim.client import write_check
from trims_shim.errors import MemoryFailure
from trims_shim.formats import read_header
from trims_shim.memory import pages
from trims_shim.patches import torch_conversion, torch_mappings, torch_module_dtype, torch_rounding
from trims_shim.patches.torch_storage import storage_of, tensor_over
from trims_shim.specs import Variant

pytestmark = needs_extension

SIDE = 256  # 128 KiB in float16
CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float": lambda module: module.float(),
    "to": lambda module: module.to(torch.float32),
    "to a device": lambda module: module.to("cpu", torch.float32),
    "by name": lambda module: module.to(dtype=torch.float32, non_blocking=True),
}
to_float32 = pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The patch alone, with no daemon behind it."""
    with patched(monkeypatch, *torch_module_dtype.POINTS):
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    return make_variants(monkeypatch)


def elided(dtype: str = "float32") -> int:
    return diagnostics.stats().events.get(f"elided:{dtype}", 0)


class Net(nn.Module):
    """Tied and small parameters, buffers, and one that no gradient is taken of."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.second = nn.Linear(SIDE, SIDE, bias=False)
        self.tied = nn.Linear(SIDE, SIDE, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
        self.register_buffer("table", torch.randn(SIDE, SIDE))
        self.register_buffer("count", torch.arange(4))
        self.to(dtype)


def loaded(plain: nn.Module) -> nn.Module:
    """The same module, its tensors as a load has left them."""
    module = Net(plain.first.weight.dtype)
    module.load_state_dict(cached(plain.state_dict()), assign=True)
    module.tied.weight = module.second.weight
    module.frozen.requires_grad_(False)
    return module


def assert_alike(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, tensor), (_, expected) in zip(
        [*ours.named_parameters(), *ours.named_buffers()],
        [*theirs.named_parameters(), *theirs.named_buffers()],
        strict=True,
    ):
        assert torch.equal(tensor, expected), name
        for attribute in ("dtype", "shape", "requires_grad", "is_leaf", "grad"):
            assert getattr(tensor, attribute) == getattr(expected, attribute), (name, attribute)
        assert type(tensor) is type(expected)
        assert tensor.stride() == expected.stride()


@to_float32
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "blind"])
def test_a_module_gets_converted_memory(
    convert: Callable[[nn.Module], nn.Module],
    dtype: torch.dtype,
    is_told: bool,
    asked: list[Variant],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_told:
        monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")
    plain = Net(dtype)
    modules = [loaded(plain), loaded(plain)]
    for module in modules:
        assert convert(module) is module
    assert elided() == 2 * 4
    assert {each.conversion for each in asked} == {conversion(dtype, torch.float32)}
    with patches.inactive():
        convert(plain)
    for module in modules:
        assert_alike(module, plain)
        assert module.table._version == plain.table._version == 0
        assert module.tied.weight is module.second.weight
        images = {image_of(each) for each in (module.first.weight, module.frozen, module.table)}
        assert len(images) == 1
        assert None not in images
    with torch.no_grad():
        modules[0].first.weight.fill_(7)
    assert_alike(modules[1], plain)


@pytest.mark.parametrize(
    ("convert", "source", "target"),
    [
        (nn.Module.half, torch.float32, torch.float16),
        (nn.Module.bfloat16, torch.float32, torch.bfloat16),
        (nn.Module.bfloat16, torch.float16, torch.bfloat16),
        (nn.Module.half, torch.bfloat16, torch.float16),
        (lambda module: module.to(torch.bfloat16), torch.float32, torch.bfloat16),
        (lambda module: module.to(device="cpu", dtype=torch.half), torch.float32, torch.float16),
    ],
)
def test_numbers_that_are_rounded(
    convert: Callable[[nn.Module], nn.Module],
    source: torch.dtype,
    target: torch.dtype,
    asked: list[Variant],
) -> None:
    plain = Net(source)
    with torch.no_grad():
        plain.first.weight[0, :4] = torch.tensor([1e-7, 1e5, float("-inf"), -0.0])
    modules = [loaded(plain), loaded(plain)]
    for module in modules:
        assert convert(module) is module
    assert elided(str(target).removeprefix("torch.")) == 2 * 4
    assert {each.conversion for each in asked} == {conversion(source, target)}
    with patches.inactive():
        convert(plain)
    for module in modules:
        assert_alike(module, plain)
        for each in (module.first.weight, module.frozen, module.table):
            assert image_of(each) is not None
            assert each.data_ptr() % 64 == 0
    with torch.no_grad():
        modules[0].first.weight.fill_(7)
    assert_alike(modules[1], plain)


def test_how_numbers_are_rounded_is_found_out_unseen() -> None:
    """Whoever looks first: a mode would see it, or have it done on another device."""
    torch_rounding.conversion_of.cache_clear()
    with torch.device("meta"), FakeTensorMode():
        found = torch_rounding.conversion_of(torch.float32, torch.float16)
    assert found == conversion(torch.float32, torch.float16)


def test_numbers_that_are_rounded_otherwise_here(
    asked: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a processor that takes the smallest for 0, for example."""
    monkeypatch.setattr(torch_rounding, "_ROUNDED", torch_rounding._ROUNDED | {0x00400000: (0, 0)})
    torch_rounding.conversion_of.cache_clear()
    plain = Net(torch.float32)
    modules = {"bfloat16": loaded(plain), "half": loaded(plain)}
    try:
        for name, module in modules.items():
            getattr(module, name)()
    finally:
        torch_rounding.conversion_of.cache_clear()
    assert {each.conversion for each in asked} == {conversion(torch.float32, torch.float16)}
    assert torch.equal(modules["bfloat16"].first.weight, plain.first.weight.bfloat16())


@pytest.mark.parametrize(
    "convert",
    [
        lambda module: module.to(torch.float64),
        lambda module: module.half(),
        lambda module: module.to("cpu"),
        lambda module: module.to(torch.float32, memory_format=torch.channels_last),
        lambda module: module.to(device="meta", dtype=torch.float32),
    ],
)
def test_other_conversions_are_torchs(
    convert: Callable[[nn.Module], nn.Module], asked: list[Variant]
) -> None:
    plain = nn.Conv2d(SIDE, SIDE, 3, bias=False).half()
    module = nn.Conv2d(SIDE, SIDE, 3, bias=False).half()
    module.load_state_dict(cached(plain.state_dict()), assign=True)
    with patches.inactive():
        expected = convert(plain).weight
    weight = convert(module).weight
    assert (weight.dtype, weight.device) == (expected.dtype, expected.device)
    assert weight.stride() == expected.stride()
    assert weight.is_meta or torch.equal(weight, expected)
    assert (asked, elided()) == ([], 0)


def test_what_was_loaded_from_a_safetensors_file(asked: list[Variant]) -> None:
    """load_state_dict has put it on an aligned image, which is then converted as any other."""
    plain = Net(torch.float32)
    state = {name: each for name, each in plain.state_dict().items() if "tied" not in name}
    content = safetensors.torch.save(state)
    image = image_with(content)
    storage = storage_of(image.map())
    mappings = torch_mappings.FreshMappings(lambda *_: True)
    module = Net(torch.float32)
    for record in read_header(content):
        if record.span.size_bytes < torch_mappings.MIN_SIZE_BYTES:
            continue
        place = mappings.image_for(image, record.span.offset_bytes, None)
        assert place is not None
        part = mappings.take(*place, record.span.size_bytes)
        assert part is not None
        tensor = tensor_over(part, torch.float32, record.shape)
        owner, _, name = record.name.rpartition(".")
        getattr(module.get_submodule(owner), name).data = tensor
    del storage
    module.tied.weight = module.second.weight
    module.first.bias.data = plain.first.bias.data.clone()
    module.half()
    with patches.inactive():
        plain.half()
    assert_alike(module, plain)
    assert elided("float16") == 4
    for each in (module.first.weight, module.frozen, module.table):
        assert each.data_ptr() % 512 == 0


def test_what_goes_to_another_device_is_not_watched() -> None:
    """Who looks for modes, as sharing on devices does, finds none of ours."""

    class Watched(Net):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.modes = torch._C._len_torch_function_stack()
            return super()._apply(fn, recurse)

    module = Watched(torch.float16)
    module.load_state_dict(cached(module.state_dict()), assign=True)
    module.to("meta", torch.float32)
    assert module.modes == 0


def test_a_tensor_that_is_converted_and_moved_otherwise(asked: list[Variant]) -> None:
    """A module's own _apply may do what it likes."""

    class Moved(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.copies = [
                self.weight.to(torch.float32, copy=True),
                self.weight.to(torch.float64),
                self.weight.to(self.weight.float()),
                self.weight.to(tensor=self.weight.float()),
                self.weight.to(device="cpu", dtype=torch.float32),
            ]
            with pytest.raises((TypeError, RuntimeError)):
                self.weight.to("no such thing")
            return self

    module = Moved(SIDE, SIDE, bias=False, dtype=torch.float16)
    module.load_state_dict(cached(module.state_dict()), assign=True)
    expected = module.weight.detach().clone()
    with torch.no_grad():
        module.float()
    dtypes = [each.dtype for each in module.copies]
    assert dtypes == [torch.float32, torch.float64, *[torch.float32] * 3]
    assert all(torch.equal(each, expected.to(each.dtype)) for each in module.copies)
    assert image_of(module.copies[0]) is None
    addresses = [each.data_ptr() for each in module.copies]
    assert len(set(addresses)) == len(addresses), "each has memory of its own"


def test_a_memory_format(asked: list[Variant]) -> None:
    """A module's own _apply may name one."""

    class ChannelsLast(nn.Conv2d):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            return super()._apply(
                lambda tensor: tensor.float(memory_format=torch.channels_last), recurse
            )

    module = ChannelsLast(64, 64, 4, bias=False, dtype=torch.float16)
    module.load_state_dict(cached(module.state_dict()), assign=True)
    expected = module.weight.detach().clone().float(memory_format=torch.channels_last)
    module.float()
    assert module.weight.stride() == expected.stride()
    assert torch.equal(module.weight, expected)


@to_float32
def test_strides_of_dimensions_of_size_1(
    convert: Callable[[nn.Module], nn.Module], asked: list[Variant]
) -> None:
    """A kernel of 1 by 1 is contiguous and channels_last, and its strides say which it is."""
    module = nn.Conv2d(SIDE, SIDE, 1, bias=False, dtype=torch.float16)
    module.load_state_dict(cached(module.state_dict()), assign=True)
    weight = module.weight.data
    module.weight.data = weight.as_strided(weight.shape, (SIDE, 1, SIDE, SIDE))
    expected = weight.float()
    convert(module)
    assert (elided(), module.weight.stride()) == (1, (SIDE, 1, SIDE, SIDE))
    assert torch.equal(module.weight, expected)
    assert not module.weight.data._is_view()


@to_float32
def test_what_was_written_is_converted_by_torch(
    convert: Callable[[nn.Module], nn.Module], asked: list[Variant]
) -> None:
    module = loaded(Net(torch.float16))
    with torch.no_grad():
        module.first.weight[3, 4] = 77
    expected = module.first.weight.detach().float()
    convert(module)
    assert torch.equal(module.first.weight, expected)
    assert image_of(module.first.weight) is None
    assert elided() == 3


def test_no_image_is_asked_for_when_all_was_written(asked: list[Variant]) -> None:
    """The daemon would make one for whoever trains, and nobody would map it."""
    module = loaded(Net(torch.float32))
    with torch.no_grad():
        for tensor in [*module.parameters(), module.table]:
            tensor.mul_(2)
    module.bfloat16()
    assert (asked, elided("bfloat16")) == ([], 0)


def test_a_modules_own_parameters_are_not_asked_for(asked: list[Variant]) -> None:
    """torch does not either; the method may do anything."""

    class Grouped(Net):
        def parameters(self, rate: float) -> Any:  # type: ignore[override]
            raise AssertionError

    plain = Net(torch.float16)
    module = Grouped(torch.float16)
    module.load_state_dict(cached(plain.state_dict()), assign=True)
    module.float()
    assert elided() == 5
    assert "elision_error:TypeError" not in diagnostics.stats().events


def test_a_part_of_a_file_is_not_worth_it(asked: list[Variant]) -> None:
    state = cached({"weight": torch.randn(SIDE, SIDE).half(), "other": torch.randn(SIDE, SIDE)})
    module = nn.Linear(SIDE, SIDE, bias=False).half()
    module.load_state_dict({"weight": state["weight"]}, assign=True)
    module.float()
    assert torch.equal(module.weight, state["weight"].float())
    assert asked == []


def test_tied_tensors_are_no_larger_part(asked: list[Variant]) -> None:
    state = cached({"weight": torch.randn(SIDE, SIDE).half(), "other": torch.randn(SIDE, SIDE)})
    module = nn.ModuleList([nn.Linear(SIDE, SIDE, bias=False).half() for _ in range(4)])
    for each in module:
        each.load_state_dict({"weight": state["weight"]}, assign=True)
    module.float()
    assert asked == []


def test_each_kind_and_file_counts_by_itself(asked: list[Variant]) -> None:
    """Just half of an image is of one kind; and of each of two files a third is in the module."""
    values = [torch.randn(SIDE, SIDE) for _ in range(3)]
    mixed = cached({"a": values[0].half(), "b": values[1].bfloat16()})
    files = [
        cached({name: each.half() for name, each in zip("abc", values, strict=True)})
        for _ in range(2)
    ]
    for state in (mixed, {"a": files[0]["a"], "b": files[1]["b"]}):
        module = nn.ParameterDict(state).requires_grad_(False)
        module.float()
        assert all(torch.equal(module[name], state[name].float()) for name in "ab")
    assert asked == []


def test_buffers_alone(asked: list[Variant]) -> None:
    module = nn.Module()
    module.register_buffer("table", cached({"table": torch.randn(SIDE, SIDE).half()})["table"])
    module.float()
    assert elided() == 1


@pytest.mark.parametrize("why", ["inactive", "limited"])
def test_not_now(why: str, asked: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded(Net(torch.float16))
    expected = module.first.weight.detach().float()
    monkeypatch.setattr(torch_conversion, "are_addresses_limited", lambda: why == "limited")
    with patches.inactive() if why == "inactive" else torch.enable_grad():
        module.float()
    assert torch.equal(module.first.weight, expected)
    assert (asked, elided()) == ([], 0)


def test_a_gradient_goes_along(asked: list[Variant]) -> None:
    plain = Net(torch.float16)
    module = loaded(plain)
    for each in (plain, module):
        each.first.weight.grad = torch.ones(SIDE, SIDE, dtype=torch.float16)
    module.float()
    with patches.inactive():
        plain.float()
    assert torch.equal(module.first.weight.grad, plain.first.weight.grad)
    assert module.first.weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    "setting", ["swap_module_params_on_conversion", "overwrite_module_params_on_conversion"]
)
def test_settings_of_torch(
    setting: str, asked: list[Variant], request: pytest.FixtureRequest
) -> None:
    plain = Net(torch.float16)
    module = loaded(plain)
    change = getattr(torch.__future__, f"set_{setting}")
    request.addfinalizer(lambda: change(False))
    change(True)
    module.float()
    with patches.inactive():
        plain.float()
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("way", ["float", "to"])
def test_compiled_code_converts_as_without_us(way: str) -> None:
    """In one graph; an export needs that, too."""
    module, convert = nn.Linear(8, 8), CONVERSIONS[way]
    compiled = torch.compile(
        lambda tensor: convert(module)(tensor), backend="eager", fullgraph=True
    )
    tensor = torch.randn(2, 8)
    assert torch.equal(compiled(tensor), module(tensor))


def test_who_watches_sees_what_torch_does(asked: list[Variant]) -> None:
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    module = loaded(Net(torch.float16))
    with Watching():
        module.float()
    assert torch.Tensor.float in seen
    assert (asked, elided()) == ([], 0)


def test_inference_mode(asked: list[Variant]) -> None:
    module = loaded(Net(torch.float16))
    with torch.inference_mode():
        module.float()
    assert module.table.is_inference()
    assert asked == []


def test_a_module_that_was_not_loaded(
    asked: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_conversion, "Conversions", lambda *_: pytest.fail("a mode"))
    plain = Net(torch.float16)
    assert plain.float() is plain
    assert plain.first.weight.dtype is torch.float32
    assert asked == []


@pytest.mark.parametrize("where", ["take", "begin", "program"])
def test_an_error(where: str, asked: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours: torch converts. The program's: it is the same, and nothing stays behind."""
    module = loaded(Net(torch.float16))
    expected = module.first.weight.detach().float()

    def fail(*_: object) -> Any:
        raise MemoryFailure("no")

    if where != "program":
        holder = (torch_mappings.FreshMappings, "take")
        monkeypatch.setattr(
            *(holder if where == "take" else (torch_conversion, "Conversions")), fail
        )
        module.float()
        assert torch.equal(module.first.weight, expected)
        count = diagnostics.stats().events["elision_error:MemoryFailure"]
        assert count >= (4 if where == "take" else 1)
    else:
        module.second._apply = fail
        with pytest.raises(MemoryFailure, match="no"):
            module.float()
    assert torch._C._len_torch_function_stack() == 0


def test_a_signal_handlers_error_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class TooLate(RuntimeError):
        pass

    def handle(*_: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(
            torch._C._nn, "_parse_to", lambda *_: signal.raise_signal(signal.SIGUSR1)
        )
        with pytest.raises(TooLate):
            torch_module_dtype._dtype_of_to((torch.float32,), {})
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_leaves_no_mode(asked: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come when the mode has just been put on torch's stack."""
    push = torch._C._push_on_torch_function_stack

    def interrupted(mode: Any) -> None:
        push(mode)
        raise KeyboardInterrupt

    module = loaded(Net(torch.float16))
    for holder in (torch._C, torch.overrides):
        monkeypatch.setattr(holder, "_push_on_torch_function_stack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.float()
    left = torch._C._len_torch_function_stack()
    for _ in range(left):
        torch._C._pop_torch_function_stack()
    assert left == 0


@pytest.mark.parametrize("arguments", [(1, 2, 3), ("no such device",), (torch.int32,)])
def test_wrong_calls_are_torchs(arguments: tuple[Any, ...], asked: list[Variant]) -> None:
    texts = []
    for is_active in (True, False):
        module = loaded(Net(torch.float16))
        with patches.inactive() if not is_active else torch.enable_grad():
            with pytest.raises((TypeError, RuntimeError)) as caught:
                module.to(*arguments)
            texts.append(str(caught.value))
            with pytest.raises(TypeError):
                module.float(*arguments)
    assert texts[0] == texts[1]


def test_the_wrappers_look_like_the_originals() -> None:
    for name in ("float", "to"):
        method = getattr(nn.Module, name)
        original = inspect.unwrap(method)
        assert method is not original
        assert method.__qualname__ == original.__qualname__
        assert inspect.signature(method) == inspect.signature(original)


def test_an_end_that_fails(asked: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has closed our descriptor."""

    def fail(_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    module = loaded(Net(torch.float16))
    expected = module.first.weight.detach().float()
    monkeypatch.setattr(write_check.WriteCheck, "close", fail)
    assert module.float() is module
    assert torch.equal(module.first.weight, expected)
    assert diagnostics.stats().events["elision_error:OSError"] == 1
