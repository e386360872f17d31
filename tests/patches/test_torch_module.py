"""load_state_dict with elided copies: the same outcome as torch's own, and copies where in doubt.

Every condition is tested twice: it holds and the copy is elided, it fails and torch's copy is made;
the values are right either way, seen through every alias of the destination.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import mmap
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from devices import BOTH_WAYS, let_swap
from forks import passes_in_child
from harness import open_descriptors
from images import cached, conversion, image_of, image_with, make_variants, needs_extension
from torch import nn

from trims_shim import diagnostics, patches
from trims_shim.client import write_check
from trims_shim.client.arenas import Image
from trims_shim.errors import MemoryFailure
from trims_shim.formats import read_header
from trims_shim.memory import pages, reclaim
from trims_shim.patches import (
    points,
    torch_copies,
    torch_elision,
    torch_mappings,
    torch_module,
    torch_repoint,
)
from trims_shim.patches.torch_storage import storage_of, tensor_over
from trims_shim.specs import Conversion, Variant
from trims_shim.wire.messages import LEAD_LIMIT_BYTES

ROWS, COLUMNS = 128, 256  # 128 KiB in float32
TIMEOUT_S = 60.0
MODULE = "torch.nn.modules.module"
torchs_own = inspect.unwrap(nn.Module.load_state_dict)  # an installed shim may have patched it


@pytest.fixture(autouse=True, params=BOTH_WAYS)
def _patched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """The patch alone, with no daemon behind it."""
    let_swap(monkeypatch, request.param)
    monkeypatch.setattr(patches, "active", lambda: True)
    monkeypatch.setattr(nn.Module, "load_state_dict", torchs_own)
    monkeypatch.setattr(reclaim, "GRACE_S", 0.0)
    diagnostics.reset_after_fork()
    applied = points.apply(torch_module.POINTS[0])
    assert applied.state is points.PatchState.APPLIED, applied.reason
    yield
    points.undo(applied)
    assert nn.Module.load_state_dict is torchs_own
    errors = [key for key in diagnostics.stats().events if key.startswith("elision_error")]
    assert errors == []


@pytest.fixture(params=[True, False], ids=["told", "blind"])
def is_told(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    """Whether the kernel tells which pages were written."""
    if not request.param:
        monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")
    return bool(request.param)


def elided() -> int:
    """Copies elided since the test began."""
    return diagnostics.stats().events.get("elided:load_state_dict", 0)


def forget_errors() -> list[str]:
    errors = [key for key in diagnostics.stats().events if key.startswith("elision_error")]
    diagnostics.reset_after_fork()
    return errors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, ROWS)
        self.norm = nn.BatchNorm1d(ROWS)
        self.second = nn.Linear(ROWS, COLUMNS)
        self.register_buffer("table", torch.randn(ROWS, COLUMNS))
        self.register_buffer("scratch", torch.randn(ROWS, COLUMNS), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


NET_LARGE = 3


def _stock(module: nn.Module) -> None:
    """The tree as it is: the copies are done without torch's Python."""


def _hooked(module: nn.Module) -> None:
    """A hook that does nothing: torch's own code runs under the mode."""
    module._register_load_state_dict_pre_hook(lambda *_: None)


@pytest.fixture(params=[_stock, _hooked], ids=["stock", "mode"])
def prepare(request: pytest.FixtureRequest) -> Callable[[nn.Module], None]:
    return request.param


def assert_equal(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    actual = module.state_dict()
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def weight(value: torch.Tensor | None = None) -> nn.Module:
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    if value is not None:
        module.weight = nn.Parameter(value)
    return module


# --- it elides -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("is_told")
def test_large_entries_are_elided_and_all_are_right(prepare: Callable[..., None]) -> None:
    expected = Net().state_dict()
    net, state = Net(), cached(expected)
    prepare(net)
    identities = {key: id(value) for key, value in net.named_parameters()}
    storage = net.first.weight.untyped_storage()._cdata
    result = net.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert type(result) is type(torchs_own(nn.Module(), {}))
    assert_equal(net, expected)
    assert elided() == NET_LARGE
    assert image_of(net.first.weight) is image_of(state["first.weight"])
    assert net.first.weight.data_ptr() != state["first.weight"].data_ptr()
    assert {key: id(value) for key, value in net.named_parameters()} == identities
    if torch_repoint.has_swap():
        assert net.first.weight.untyped_storage()._cdata == storage
    assert net.first.weight.untyped_storage().nbytes() == net.first.weight.nbytes
    assert net.first.weight.requires_grad
    assert net.first.weight.is_leaf


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64", "bool", "complex64"])
def test_dtypes(dtype: str, prepare: Callable[..., None]) -> None:
    kind = getattr(torch, dtype)
    expected = {"table": (torch.randn(ROWS, COLUMNS) * 3).to(kind).repeat(4, 1)}
    module = nn.Module()
    module.register_buffer("table", torch.zeros(4 * ROWS, COLUMNS, dtype=kind))
    prepare(module)
    module.load_state_dict(cached(expected))
    assert_equal(module, expected)
    assert elided() == 1


def test_only_the_mode_way_enters_a_mode(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., None]
) -> None:
    entered = []
    mode = torch_elision._CopyMode
    monkeypatch.setattr(torch_elision, "_CopyMode", lambda call: entered.append(1) or mode(call))
    net = Net()
    prepare(net)
    net.load_state_dict(cached(Net().state_dict()))
    assert elided() == NET_LARGE
    assert bool(entered) == (prepare is _hooked)


def test_version_counters_go_up_as_with_a_copy(prepare: Callable[..., None]) -> None:
    expected = Net().state_dict()
    nets = [Net(), Net()]
    for net in nets:
        prepare(net)
    state = cached(expected)
    source_versions = [value._version for value in state.values()]
    torchs_own(nets[0], expected)
    nets[1].load_state_dict(state)
    assert elided() == NET_LARGE
    versions = [{key: value._version for key, value in net.state_dict().items()} for net in nets]
    assert versions[0] == versions[1]
    assert [value._version for value in state.values()] == source_versions


@pytest.mark.usefixtures("is_told")
def test_both_sides_stay_independent(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    state, one, two = cached(expected), weight(), weight()
    prepare(one), prepare(two)
    one.load_state_dict(state)
    two.load_state_dict(state)
    assert elided() == 2
    state["weight"].fill_(1)
    assert_equal(one, expected)
    with torch.no_grad():
        one.weight.fill_(2)
    assert torch.equal(state["weight"], torch.ones(ROWS, COLUMNS))
    assert_equal(two, expected)
    third = weight()
    prepare(third)
    third.load_state_dict(state)  # written to: its pages are no longer the image's
    assert torch.equal(third.weight, torch.ones(ROWS, COLUMNS))
    assert elided() == 2


def test_the_state_dict_may_go_away(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    module.load_state_dict(state)
    image = weakref.ref(image_of(state["weight"]))
    del state
    assert_equal(module, expected)
    assert image() is not None
    del module
    assert image() is None  # at once: nothing waits for the garbage collector


@pytest.mark.parametrize("has_array", [True, False])
def test_a_resized_parameter_keeps_its_mapping_for_an_array_only(
    has_array: bool, prepare: Callable[..., None]
) -> None:
    if not torch_repoint.has_swap():
        pytest.skip("this torch cannot resize such a storage")
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    module.load_state_dict(state)
    image = weakref.ref(image_of(state.pop("weight")))
    array = module.weight.detach().numpy() if has_array else None
    torch_mappings.make_resizable(module.weight.untyped_storage(), keeps_bytes=False)
    assert (image() is not None) == has_array
    if array is not None:
        assert torch.equal(torch.from_numpy(array), expected["weight"])
        del module, array
        assert image() is None


def test_torchs_own_storages_stay_where_they_are() -> None:
    storage = torch.ones(4).untyped_storage()
    address = storage.data_ptr()
    torch_mappings.make_resizable(storage, keeps_bytes=True)
    assert storage.data_ptr() == address


@pytest.mark.usefixtures("is_told")
def test_a_second_load_of_the_same_finds_it_there(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    module.load_state_dict(state)
    address, version = module.weight.data_ptr(), module.weight._version
    module.load_state_dict(state)
    assert module.weight.data_ptr() == address
    assert module.weight._version == version + 1
    assert elided() == 2


@pytest.mark.usefixtures("is_told")
def test_what_was_written_since_is_copied_to(prepare: Callable[..., None]) -> None:
    """A program that resets and trains a module again and again writes it again."""
    module, state = weight(), cached({"weight": torch.randn(ROWS, COLUMNS)})
    prepare(module)
    module.load_state_dict(state)
    for count in range(3):
        address = module.weight.data_ptr()
        with torch.no_grad():
            module.weight[0, count] = 7
        module.load_state_dict(state)
        assert_equal(module, state)
        assert module.weight.data_ptr() == address
    assert elided() == 1


@pytest.mark.usefixtures("is_told")
def test_another_checkpoint_into_the_same_module(prepare: Callable[..., None]) -> None:
    first, second = weight().state_dict(), weight().state_dict()
    module, images = weight(), []
    prepare(module)
    for expected in (first, second, first):
        state = cached(expected, shift=64)
        module.load_state_dict(state)
        assert_equal(module, expected)
        assert image_of(module.weight) is image_of(state["weight"])
        images.append(weakref.ref(image_of(module.weight)))
    assert elided() == 3
    wait_until(lambda: [image() is None for image in images] == [True, True, False])


@pytest.mark.parametrize("_patched", [True], indirect=True)  # the program has its own torch
def test_replaced_memory_goes_back_to_the_system() -> None:
    code = """
import os, sys, time, torch
from torch import nn
sys.path.insert(0, {tests!r})
import test_torch_module as t
t.patches.active = lambda: True
nn.Module.load_state_dict = t.torchs_own
t.points.apply(t.torch_module.POINTS[0])
def anonymous():
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0]) >> 10
shapes = [(1024, 1024)] * 24 + [(128, 256)] * 192  # 96 MiB mmapped, 24 MiB from malloc's heap
module = nn.ParameterList([torch.randn(shape) for shape in shapes])
state = t.cached({{key: value.clone() for key, value in module.state_dict().items()}})
before = anonymous()
module.load_state_dict(state)
assert t.elided() == len(shapes)
limit = time.monotonic() + 60
while before - anonymous() < 110:
    assert time.monotonic() < limit, (before, anonymous())
    time.sleep(0.01)
"""
    tests = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, "-c", code.format(tests=tests)],
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == 0, run.stderr


# --- it copies: what else can reach the destination -----------------------------------------------


def _numpy(tensor: torch.Tensor) -> Any:
    array = tensor.detach().numpy()
    return lambda: torch.from_numpy(array)


def _dlpack(tensor: torch.Tensor) -> Any:
    capsule = tensor.detach_().__dlpack__() if not tensor.requires_grad else None
    capsule = capsule or tensor.detach().__dlpack__()
    return lambda: torch.utils.dlpack.from_dlpack(capsule)


def _dlpack_of_itself(tensor: torch.Tensor) -> Any:
    tensor.requires_grad_(False)
    capsule = tensor.__dlpack__()
    return lambda: torch.utils.dlpack.from_dlpack(capsule)


def _numpy_of_itself(tensor: torch.Tensor) -> Any:
    array = tensor.requires_grad_(False).numpy()
    return lambda: torch.from_numpy(array)


def _storage(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()
    return lambda: torch.empty(0).set_(storage, 0, tensor.shape)


def _typed_storage(tensor: torch.Tensor) -> Any:
    storage = tensor._typed_storage()
    return lambda: torch.empty(0).set_(storage._untyped_storage, 0, tensor.shape)


def _part_of_storage(tensor: torch.Tensor) -> Any:
    part = tensor.untyped_storage()[:]
    return lambda: torch.empty(0).set_(part, 0, tensor.shape)


def _alias(tensor: torch.Tensor) -> Any:
    alias = tensor.data
    return lambda: alias


def _view(tensor: torch.Tensor) -> Any:
    view = tensor.view(-1)
    return lambda: view.view(tensor.shape)


def _second_parameter(tensor: torch.Tensor) -> Any:
    parameter = nn.Parameter(tensor.data)
    return lambda: parameter


OBSERVERS = [
    _numpy,
    _numpy_of_itself,
    _dlpack,
    _dlpack_of_itself,
    _storage,
    _typed_storage,
    _part_of_storage,
    _alias,
    _view,
    _second_parameter,
]


def _prepared(prepare: Callable[..., None], loaded_before: bool) -> nn.Module:
    """A module that has loaded other values, or none."""
    module = weight()
    prepare(module)
    if loaded_before:
        module.load_state_dict(cached(weight().state_dict()))
    return module


@pytest.mark.usefixtures("is_told")
@pytest.mark.parametrize("loaded_before", [False, True], ids=["fresh", "elided-before"])
@pytest.mark.parametrize("observe", OBSERVERS, ids=lambda observe: observe.__name__[1:])
def test_an_observer_of_the_old_memory_sees_the_new_values(
    observe: Callable[[torch.Tensor], Any], loaded_before: bool, prepare: Callable[..., None]
) -> None:
    expected = weight().state_dict()
    module, state = _prepared(prepare, loaded_before), cached(expected)
    before = elided()
    see = observe(module.weight)
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert torch.equal(see(), expected["weight"])
    assert elided() == before
    del see
    unobserved = weight()
    prepare(unobserved)
    unobserved.load_state_dict(state)
    assert elided() == before + 1


@pytest.mark.parametrize("loaded_before", [False, True], ids=["fresh", "elided-before"])
@pytest.mark.parametrize(
    "moment", [(Image, "map"), (torch.Tensor, "is_pinned")], ids=["mapping", "pinned?"]
)
def test_another_thread_that_observes_the_old_memory_in_the_middle_sees_the_new_values(
    moment: tuple[Any, str],
    loaded_before: bool,
    prepare: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs whenever the loading thread is in a system call, or in most functions of torch."""
    expected = weight().state_dict()
    module, state = _prepared(prepare, loaded_before), cached(expected)
    before = elided()
    original, seen = getattr(*moment), []

    def let_others_run(*args: Any) -> Any:
        if not seen:
            other = threading.Thread(target=lambda: seen.append(_numpy(module.weight)))
            other.start()
            other.join(TIMEOUT_S)
        return original(*args)

    monkeypatch.setattr(*moment, let_others_run)
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert torch.equal(seen[0](), expected["weight"])
    assert elided() == before


def test_a_graph_that_saved_the_parameter_notices_the_load(prepare: Callable[..., None]) -> None:
    module, state = weight(), cached(weight().state_dict())
    prepare(module)
    output = module(torch.randn(2, COLUMNS, requires_grad=True)).sum()
    module.load_state_dict(state)
    assert elided() == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # not for Python 3.14, torch says
def test_a_script_module_keeps_seeing_the_parameter(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    traced = torch.jit.trace(weight(), torch.ones(1, COLUMNS))
    traced.load_state_dict(state)
    assert torch.equal(traced.weight, expected["weight"])
    assert elided() == 0
    module.load_state_dict(state)
    assert elided() == 1


# --- it copies: the destination -------------------------------------------------------------------


class Special(nn.Parameter):
    """Not exactly a Parameter."""


def _sliced() -> nn.Module:
    return weight(torch.randn(2 * ROWS, COLUMNS)[ROWS:])


def _head_of_more() -> nn.Module:
    return weight(torch.randn(2 * ROWS, COLUMNS)[:ROWS])


def _transposed() -> nn.Module:
    return weight(torch.randn(COLUMNS, ROWS).t())


def _other_dtype() -> nn.Module:
    return weight().double()


def _shared() -> nn.Module:
    return weight().share_memory()


def _borrowed_from_bytes() -> nn.Module:
    memory = bytearray(ROWS * COLUMNS * 4)
    return weight(torch.frombuffer(memory, dtype=torch.float32).view(ROWS, COLUMNS))


def _borrowed_and_never_touched() -> nn.Module:
    size, private = ROWS * COLUMNS * 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags=private)
    return weight(torch.frombuffer(memory, dtype=torch.float32).view(ROWS, COLUMNS))


def _of_another_mapping() -> nn.Module:
    """Arrays of a handle may lie there, too."""
    return weight(cached(weight().state_dict())["weight"])


def _subclass() -> nn.Module:
    module = weight()
    module.weight = Special(module.weight.data)
    return module


def _inference_buffer() -> nn.Module:
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("weight", torch.randn(ROWS, COLUMNS))
    return module


def _with_graph() -> nn.Module:
    module = nn.Module()
    module.register_buffer("weight", torch.randn(ROWS, COLUMNS, requires_grad=True) * 2)
    return module


def _negative_view() -> nn.Module:
    module = nn.Module()
    # Detached: a view would keep its base, which reaches the same memory.
    module.register_buffer("weight", torch._neg_view(torch.randn(ROWS, COLUMNS)).detach())
    return module


DESTINATIONS = [
    _sliced,
    _head_of_more,
    _transposed,
    _other_dtype,
    _shared,
    _borrowed_from_bytes,
    _borrowed_and_never_touched,
    _of_another_mapping,
    _subclass,
    _with_graph,
    _negative_view,
]


@pytest.mark.usefixtures("is_told")
@pytest.mark.parametrize("make", DESTINATIONS, ids=lambda make: make.__name__[1:])
def test_a_destination_that_is_not_ordinary_is_copied_to(
    make: Callable[[], nn.Module], prepare: Callable[..., None]
) -> None:
    expected = weight().state_dict()
    module, state = make(), cached(expected)
    prepare(module)
    address = module.weight.untyped_storage().data_ptr()
    module.load_state_dict(state)
    assert torch.equal(module.weight.float(), expected["weight"])
    assert module.weight.untyped_storage().data_ptr() == address
    assert elided() == 0


def test_a_lazy_clone_is_copied_to_and_its_twin_left_alone(prepare: Callable[..., None]) -> None:
    twin = torch.randn(ROWS, COLUMNS)
    before, expected = twin.clone(), weight().state_dict()
    module, state = weight(torch._lazy_clone(twin)), cached(expected)
    prepare(module)
    assert torch._C._is_cow_tensor(module.weight)
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert torch.equal(twin, before)
    assert elided() == 0


def test_an_inference_tensor_is_copied_to(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    module, state = _inference_buffer(), cached(expected)
    prepare(module)
    messages = []
    for load in (torchs_own, nn.Module.load_state_dict):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor") as raised:
            load(module, state)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert elided() == 0


def test_pinned_memory_is_copied_to(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., None]
) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 0


def test_copies_to_tensors_outside_the_module_are_torchs() -> None:
    state, outside, module = cached(weight().state_dict()), torch.zeros(ROWS, COLUMNS), weight()
    address = outside.data_ptr()

    def hook(*_: object) -> None:
        outside.copy_(state["weight"])

    module._register_load_state_dict_pre_hook(hook)
    module.load_state_dict(state)
    assert outside.data_ptr() == address
    assert torch.equal(outside, state["weight"])
    assert elided() == 1  # the parameter


def test_other_calls_of_torch_keep_their_arguments() -> None:
    expected = weight().state_dict()
    state, module = cached(expected), weight()

    def hook(state: dict[str, torch.Tensor], *_: object) -> None:
        found = state["weight"]
        state["weight"] = torch.cat([found[:, :1], found[:, 1:]], dim=1)

    module._register_load_state_dict_pre_hook(hook)
    module.load_state_dict(state)
    assert_equal(module, expected)


def test_a_copy_with_more_arguments_is_torchs() -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
            with torch.no_grad():
                self.weight.copy_(state[prefix + "weight"], True)

    expected, module = weight().state_dict(), Own(COLUMNS, ROWS, bias=False)
    module.load_state_dict(cached(expected))
    assert_equal(module, expected)
    assert elided() == 0


def test_a_copy_that_autograd_records_is_torchs() -> None:
    state, module = cached(weight().state_dict()), nn.Module()
    module.register_buffer("weight", torch.zeros(ROWS, COLUMNS))
    source = state["weight"].requires_grad_(True)

    def hook(*_: object) -> None:
        module.weight.copy_(source)

    module._register_load_state_dict_pre_hook(hook)
    module.load_state_dict(state)
    assert module.weight.grad_fn is not None
    assert elided() == 0


def test_a_copy_that_autograd_refuses_is_refused() -> None:
    state, module = cached(weight().state_dict()), weight()

    def hook(*_: object) -> None:
        with pytest.raises(RuntimeError, match="leaf"):
            module.weight.copy_(state["weight"])
        refused.append(True)

    refused: list[bool] = []
    module._register_load_state_dict_pre_hook(hook)
    module.load_state_dict(state)
    assert refused
    assert elided() == 1  # torch's own, without gradients


# --- it copies: the source ------------------------------------------------------------------------


def _plain(state: OrderedDict[str, torch.Tensor]) -> None:
    state["weight"] = state["weight"].clone()


def _written(state: OrderedDict[str, torch.Tensor]) -> None:
    state["weight"][5, 5] = 5


def _not_contiguous(state: OrderedDict[str, torch.Tensor]) -> None:
    state["weight"] = state["weight"].view(COLUMNS, ROWS).t()


def _negative(state: OrderedDict[str, torch.Tensor]) -> None:
    state["weight"] = torch._neg_view(state["weight"])


def _converted(state: OrderedDict[str, torch.Tensor]) -> None:
    state["weight"] = state["weight"].view(torch.int32)


def _a_subclass(state: OrderedDict[str, torch.Tensor]) -> None:
    state["weight"] = Special(state["weight"])


@pytest.mark.parametrize("is_source", [True, False])
def test_a_conjugate_is_copied(is_source: bool, prepare: Callable[..., None]) -> None:
    def conjugate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.conj(tensor).detach()  # else its base reaches the same memory

    module = nn.Module()
    module.register_buffer("weight", torch.randn(ROWS, COLUMNS, dtype=torch.complex64))
    state = cached(copy.deepcopy(module.state_dict()))
    state["weight"] = conjugate(state["weight"]) if is_source else state["weight"]
    module.weight = module.weight if is_source else conjugate(module.weight.clone())
    prepare(module)
    module.load_state_dict(state)
    assert torch.equal(module.weight, state["weight"])
    assert elided() == 0


SOURCES = [
    _plain,
    _written,
    _not_contiguous,
    _negative,
    _converted,
    _a_subclass,
]


@pytest.mark.usefixtures("is_told")
@pytest.mark.parametrize("change", SOURCES, ids=lambda change: change.__name__[1:])
def test_a_source_that_is_not_the_images_bytes_is_copied(
    change: Callable[..., None], prepare: Callable[..., None]
) -> None:
    state = cached({**weight().state_dict(), "other": torch.randn(ROWS, COLUMNS)})
    module = weight()
    module.register_buffer("other", torch.zeros(ROWS, COLUMNS))
    prepare(module)
    change(state)
    module.load_state_dict(state)
    assert torch.equal(module.weight, state["weight"].float())
    assert torch.equal(module.other, state["other"])
    assert image_of(module.weight) is None
    assert elided() == 1  # the other one


def test_an_inference_tensor_is_copied_from(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    module = weight()
    prepare(module)
    with torch.inference_mode():
        state = cached(expected)
    assert state["weight"].is_inference()
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 0


def test_small_entries_are_copied(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., None]
) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    with monkeypatch.context() as patch:
        patch.setattr(torch_elision, "MIN_SIZE_BYTES", module.weight.nbytes + 1)
        module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 0
    monkeypatch.setattr(torch_elision, "MIN_SIZE_BYTES", module.weight.nbytes)
    module.load_state_dict(state)
    assert elided() == 1


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_copied_where_addresses_are_limited(prepare: Callable[..., None], limit: int) -> None:
    """The program may need those that a replaced parameter has until it is given back."""
    module = weight()
    prepare(module)
    state = cached({"weight": torch.randn(ROWS, COLUMNS)})
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (1 << 46, before[1]))
    try:
        module.load_state_dict(state)
    finally:
        resource.setrlimit(limit, before)
    assert_equal(module, state)
    assert elided() == 0
    module.load_state_dict(state)
    assert elided() == 1


def test_copied_while_much_memory_waits_to_be_given_back(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that makes new modules beside another thread has those of the last second, too."""
    state = cached({"weight": torch.randn(ROWS, COLUMNS)})
    modules = [weight() for _ in range(3)]
    wait_until(lambda: not reclaim._batches)
    monkeypatch.setattr(reclaim, "GRACE_S", TIMEOUT_S)
    monkeypatch.setattr(reclaim, "LITTLE_BYTES", 0)
    monkeypatch.setattr(reclaim, "available_bytes", lambda: 3 * state["weight"].nbytes)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        for module, expected in zip(modules, (1, 1, 2), strict=True):
            prepare(module)
            module.load_state_dict(state)
            assert_equal(module, state)
            assert elided() == expected
            if module is modules[1]:
                reclaim._is_hurried = True  # as if its time had come
                wait_until(lambda: not reclaim._batches)
    finally:
        stop.set()
        other.join()
        reclaim._is_hurried = True


@pytest.mark.parametrize("shift", [8, 16, 32, 64])
def test_bytes_off_the_alignment_of_torchs_allocator_are_copied(
    shift: int, prepare: Callable[..., None]
) -> None:
    expected = weight().state_dict()
    module = weight()
    prepare(module)
    module.load_state_dict(cached(expected, shift=shift))
    assert_equal(module, expected)
    assert module.weight.data_ptr() % torch_mappings.ALIGNMENT_BYTES == 0
    assert elided() == (shift % torch_mappings.ALIGNMENT_BYTES == 0)


@pytest.mark.usefixtures("is_told")
@pytest.mark.parametrize("shift", [7, 8])
def test_bytes_off_the_alignment_come_from_an_image_where_they_are_on_it(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """Once for each image and call; as independent as any copy, and found there by the next."""
    asked = make_variants(monkeypatch)
    expected = {"a.weight": torch.randn(ROWS, COLUMNS), "b.weight": torch.randn(ROWS, COLUMNS)}
    module = nn.ModuleDict({"a": weight(), "b": weight()})
    prepare(module)
    state = cached(expected, shift=shift)
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 2
    assert asked == [Variant(-shift % 64)], "once for both"
    assert all(each.data_ptr() % 64 == 0 for each in module.parameters())
    where = [each.data_ptr() for each in module.parameters()]
    module.load_state_dict(state)
    assert [each.data_ptr() for each in module.parameters()] == where
    state["a.weight"].zero_()
    assert_equal(module, expected)
    module.load_state_dict(state)
    assert not module["a"].weight.any(), "what was written to the state dict is copied"


@pytest.mark.usefixtures("is_told")
@needs_extension
@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_numbers_come_from_an_image_where_they_are_converted(
    prepare: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    source: torch.dtype,
    target: torch.dtype,
    shift: int,
) -> None:
    """Exactly as torch does it, as independent as any copy, and found there by the next load."""
    asked = make_variants(monkeypatch)
    values = {name: torch.randn(ROWS, COLUMNS).to(source) for name in ("a.weight", "b.weight")}
    values["a.weight"][0, :5] = torch.tensor([0.0, -0.0, float("inf"), 1e-7, 1e5]).to(source)
    expected = {name: value.to(target) for name, value in values.items()}
    module = nn.ModuleDict({"a": weight(), "b": weight()}).to(target)
    prepare(module)
    state, versions = cached(values, shift=shift), [each._version for each in module.parameters()]
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 2
    assert {each.conversion for each in asked} == {conversion(source, target)}
    assert len(asked) == len(set(asked)) <= 2, "each once"
    assert [each._version for each in module.parameters()] == [each + 1 for each in versions]
    where = [each.data_ptr() for each in module.parameters()]
    assert [address % 64 for address in where] == [0, 0]
    module.load_state_dict(state)
    assert [each.data_ptr() for each in module.parameters()] == where
    state["a.weight"].zero_()
    assert_equal(module, expected)
    module.load_state_dict(state)
    assert not module["a"].weight.any(), "what was written to the state dict is copied"
    with torch.no_grad():
        module["b"].weight.zero_()
    assert state["b.weight"].any()


@pytest.mark.parametrize("before", [0, 1, 53])
@pytest.mark.parametrize("source", [torch.float16, torch.float32])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_most_of_a_file_lies_as_on_a_device(
    before: int, source: torch.dtype, target: torch.dtype
) -> None:
    """In safetensors files, integers come first. Whichever tensor asks first, the lead is one."""
    state = {f"a{n}": torch.zeros((), dtype=torch.int64) for n in range(before)}
    state |= {f"b{n:02}": torch.zeros(1000 if n == 13 else 1024, dtype=source) for n in range(20)}
    content = safetensors.torch.save(state)
    image = image_with(content)
    spans = {each.name: each.span.offset_bytes for each in read_header(content)}
    for order in (1, -1):
        mappings = torch_mappings.FreshMappings(lambda *_: True)
        found: list[int] = []
        for name in sorted(spans)[::order]:
            if name.startswith("b"):
                lead = mappings._lead(image, spans[name], conversion(source, target))
                assert lead is not None
                assert 0 <= lead < LEAD_LIMIT_BYTES
                variant = Variant(lead, conversion(source, target))
                assert variant.offset_bytes(spans[name]) % 64 == 0
                found.append(variant.offset_bytes(spans[name]) % 512)
        assert not any(found[::order][:14]), "up to the odd one"
    image.release()
    mappings = torch_mappings.FreshMappings(lambda *_: True)
    assert mappings._lead(image, 128, conversion(source, target)) == 0


@needs_extension
def test_few_numbers_of_a_file_get_no_image_of_their_own(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a classifier, whose rows of an odd number shift all that follows."""
    asked = make_variants(monkeypatch)
    shapes = {"a": (ROWS - 1, COLUMNS - 3), **dict.fromkeys("bcdefghijkl", (ROWS, COLUMNS))}
    plain = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    content = safetensors.torch.save(plain)
    image = image_with(content)
    storage = storage_of(image.map())
    state = {}
    for record in read_header(content):
        part = storage[record.span.offset_bytes : record.span.end_bytes]
        state[record.name] = tensor_over(part, torch.float32, record.shape)
    module = nn.ModuleDict(
        {name: nn.Linear(*shape[::-1], bias=False) for name, shape in shapes.items()}
    ).half()
    prepare(module)
    module.load_state_dict(state)
    assert_equal(module, {name: value.half() for name, value in plain.items()})
    assert len(asked) == 1
    assert image_of(module["a"].weight) is None
    assert elided() == len(shapes) - 1


def test_a_model_in_many_files_has_variants_of_each(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for a file whose tensors are aligned in many ways."""
    asked = make_variants(monkeypatch)
    expected = {f"{n}.weight": torch.randn(ROWS, COLUMNS) for n in range(10)}
    files = [cached({name: value}, shift=8) for name, value in expected.items()]
    module = nn.Sequential(*(weight() for _ in expected))
    prepare(module)
    module.load_state_dict({name: value for file in files for name, value in file.items()})
    assert_equal(module, expected)
    assert elided() == len(asked) == len(expected)


def test_an_image_has_few_variants_if_it_is_large_and_none_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = make_variants(monkeypatch)
    image = image_of(cached({"w": torch.zeros(99)})["w"])
    assert image is not None

    def found() -> list[bool]:
        return [mappings.image_for(image, offset, None) is not None for offset in range(10)]

    mappings = torch_mappings.FreshMappings(lambda *_: True)
    for _ in range(2):
        assert found() == [True] * 9 + [False], "the first are the file's own bytes"
    assert len(asked) == 8, "each once"
    for limit, is_asked in ((image.size_bytes, True), (image.size_bytes + 1, False)):
        monkeypatch.setattr(torch_mappings, "_VARIANTS_FROM_BYTES", limit)
        mappings = torch_mappings.FreshMappings(lambda *_: True)
        assert any(found()[1:]) == is_asked
    monkeypatch.setattr(torch_mappings, "_VARIANTS_FROM_BYTES", 0)
    mappings = torch_mappings.FreshMappings(lambda *_: True)
    image.original = object()  # type: ignore[assignment]
    assert found() == [True] + [False] * 9


@pytest.mark.parametrize(
    ("begin", "end", "is_free"),
    [
        (0, 10, True),
        (20, 30, True),
        (40, 50, True),
        (5, 11, False),
        (12, 13, False),
        (19, 21, False),
        (5, 45, False),
        (25, 35, False),
    ],
)
def test_each_byte_of_a_fresh_mapping_is_given_away_once(
    begin: int, end: int, is_free: bool
) -> None:
    image = image_of(cached({"w": torch.zeros(99)})["w"])
    assert image is not None
    mappings = torch_mappings.FreshMappings(lambda *_: True)
    for first in (30, 10):
        assert mappings.take(image, first, 10) is not None
    assert (mappings.take(image, begin, end - begin) is not None) == is_free
    assert mappings.take(image, begin, end - begin) is None


@needs_extension
def test_numbers_that_are_a_small_part_of_an_image_are_not_converted_in_it(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it would be, and cost four times what it gains."""
    asked = make_variants(monkeypatch)
    module = nn.ModuleDict({"a": weight(), "b": weight(), "c": weight()})
    prepare(module)
    half = {"a": "float32", "b": "float16", "c": "float16"}  # just half of the bytes
    for loaded in (half, dict.fromkeys("abc", "float16")):
        state = {
            f"{name}.weight": torch.randn(ROWS, COLUMNS, dtype=getattr(torch, dtype))
            for name, dtype in loaded.items()
        }
        module.load_state_dict(cached(state))
        assert_equal(module, {name: value.float() for name, value in state.items()})
    assert asked == [Variant(0, Conversion("float16", "float32"))]


@needs_extension
@pytest.mark.parametrize("is_hooked", [False, True])
def test_numbers_are_not_converted_for_a_small_part_of_a_module(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_hooked: bool
) -> None:
    """One in half precision that keeps a layer in float32."""
    asked = make_variants(monkeypatch)
    module = nn.ModuleDict({"a": weight().half(), "b": weight().half(), "c": weight()})
    if is_hooked:
        module.register_load_state_dict_pre_hook(lambda *_: None)
    prepare(module)
    state = {f"{name}.weight": torch.randn(ROWS, COLUMNS).half() for name in "abc"}
    module.load_state_dict(cached(state))
    assert torch.equal(module["c"].weight, state["c.weight"].float())
    assert module["a"].weight.dtype is torch.float16
    assert torch.equal(module["a"].weight, state["a.weight"])
    assert asked == []


@needs_extension
def test_numbers_at_odd_offsets_are_not_asked_for(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a safetensors file with a header of odd length; no daemon makes such an image."""
    asked = make_variants(monkeypatch)
    module, value = weight(), torch.randn(ROWS, COLUMNS).half()
    prepare(module)
    module.load_state_dict(cached({"weight": value}, shift=7))
    assert torch.equal(module.weight, value.float())
    assert asked == []


@needs_extension
def test_tied_numbers_are_no_larger_part_of_an_image(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_variants(monkeypatch)
    module = nn.ModuleDict({"a": weight(), "b": weight(), "c": weight()})
    module["c"].weight = module["b"].weight
    prepare(module)
    values = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS).half()
    state = cached(dict(zip(("a.weight", "b.weight"), values, strict=True)))  # a third of the bytes
    module.load_state_dict({**state, "c.weight": state["b.weight"].detach()})
    assert torch.equal(module["b"].weight, values[1].float())
    assert asked == []


@needs_extension
@pytest.mark.parametrize(
    ("narrow", "wide"),
    [(torch.float16, torch.float64), (torch.float64, torch.float16), (torch.int16, torch.float32)],
)
def test_other_conversions_are_copies(
    prepare: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    narrow: torch.dtype,
    wide: torch.dtype,
) -> None:
    asked = make_variants(monkeypatch)
    module, value = weight().to(wide), torch.ones(ROWS, COLUMNS).to(narrow)
    prepare(module)
    module.load_state_dict(cached({"weight": value}))
    assert torch.equal(module.weight, value.to(wide))
    assert (asked, elided()) == ([], 0)


@needs_extension
def test_numbers_that_are_converted_over_other_memory_of_their_image(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same bytes at the same place, and they are other numbers."""
    make_variants(monkeypatch)
    state = cached({"weight": torch.randn(2 * ROWS, COLUMNS).half()})
    narrow = state["weight"][:ROWS]
    image = image_of(narrow)
    assert image is not None
    size = 4 * narrow.numel()
    there = storage_of(image.map())[:size]
    module = weight(tensor_over(there, torch.float32, narrow.shape))
    prepare(module)
    module.load_state_dict({"weight": narrow})
    assert torch.equal(module.weight, narrow.float())


@needs_extension
def test_numbers_are_converted_where_the_kernel_tells_no_more(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared with the original's, not with the result, which is twice as long."""
    asked = make_variants(monkeypatch)

    class Failing(pages.PageScanner):
        def __init__(self) -> None:
            super().__init__()
            self._has_ioctl = False
            monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")

    monkeypatch.setattr(write_check, "PageScanner", Failing)
    module, value = weight(), torch.randn(ROWS, COLUMNS).half()
    prepare(module)
    module.load_state_dict(cached({"weight": value}))
    assert torch.equal(module.weight, value.float())
    assert (asked, elided()) == ([Variant(0, Conversion("float16", "float32"))], 1)


@pytest.mark.parametrize("is_said", [True, False])
def test_a_state_dict_that_the_caller_holds(is_said: bool, prepare: Callable[..., None]) -> None:
    """As safetensors' load_model does; of other aliases nobody knows what they are for."""
    expected = Net().state_dict()
    module = Net()
    prepare(module)
    held = module.state_dict()
    with torch_copies.holding_state_dict() if is_said else contextlib.nullcontext():
        module.load_state_dict(cached(expected))
    assert_equal(module, expected)
    assert elided() == (NET_LARGE if is_said else 0)
    if torch_repoint.has_swap():
        assert all(torch.equal(held[key], value) for key, value in expected.items())


def test_more_aliases_than_the_caller_holds(prepare: Callable[..., None]) -> None:
    expected = Net().state_dict()
    module = Net()
    prepare(module)
    held, other = module.state_dict(), module.first.weight.detach()
    with torch_copies.holding_state_dict():
        module.load_state_dict(cached(expected))
    assert_equal(module, expected)
    assert torch.equal(other, expected["first.weight"])
    assert elided() == NET_LARGE - 1
    assert held
    held = module.state_dict()
    module.load_state_dict(cached(Net().state_dict()))
    assert elided() == NET_LARGE - 1, "the block has ended, and any alias counts"


def _clone(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    state.update({key: value.clone() for key, value in state.items()})


def test_a_state_dict_of_clones_that_the_caller_holds(prepare: Callable[..., None]) -> None:
    """The one alias is somebody else's."""
    expected, module = weight().state_dict(), weight()
    prepare(module)
    module._register_state_dict_hook(_clone)
    held, see = module.state_dict(), _dlpack(module.weight)
    with torch_copies.holding_state_dict():
        module.load_state_dict(cached(expected))
    assert_equal(module, expected)
    assert torch.equal(see(), expected["weight"])
    assert held
    assert elided() == 0


def test_small_images_are_not_asked_for(
    prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_mappings, "variant_image", lambda *_: pytest.fail("asked"))
    module = weight()
    prepare(module)
    module.load_state_dict(cached(weight().state_dict(), shift=8))
    assert elided() == 0


@pytest.mark.usefixtures("is_told")
def test_a_range_is_given_to_one_parameter_only(prepare: Callable[..., None]) -> None:
    state = cached({"a": torch.randn(ROWS, COLUMNS)})
    state["b"] = state["a"]
    state["c"] = state["a"].view(-1)[: ROWS * COLUMNS // 2].view(ROWS, COLUMNS // 2)
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    module.b = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    module.c = nn.Parameter(torch.zeros(ROWS, COLUMNS // 2))
    prepare(module)
    module.load_state_dict(state)
    assert elided() == 1
    with torch.no_grad():
        module.a.fill_(1)
    for name in ("b", "c"):
        assert torch.equal(getattr(module, name), state[name])


def test_a_target_gives_every_byte_away_once() -> None:
    target = torch_mappings._Target(torch.UntypedStorage(0), [], [])
    assert target.take(100, 200)
    assert target.take(300, 400)
    assert target.take(200, 300)
    taken = [(0, 101), (199, 210), (100, 200), (150, 160), (50, 500), (399, 401), (250, 260)]
    assert not any(target.take(start, end) for start, end in taken)
    assert target.take(0, 100)
    assert target.take(400, 401)


# --- it copies: somebody watches ------------------------------------------------------------------


class RecordingMode(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.Tensor.copy_
        return func(*args, **(kwargs or {}))


class RecordingDispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@contextlib.contextmanager
def _replaced(target: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, value)
        yield


WATCHERS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "function mode": RecordingMode,
    "default device": lambda: torch.device("cpu"),
    "dispatch mode": RecordingDispatchMode,
    "deterministic": _deterministic,
    "swap setting": _swapping,
    "forward mode": torch.autograd.forward_ad.dual_level,
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "compiling": lambda: _replaced("torch.compiler.is_compiling", lambda: True),
    "jit tracing": lambda: _replaced("torch._C._get_tracing_state", lambda: object()),
    "fx tracing": lambda: _replaced(
        f"torch.fx._symbolic_trace.{torch_copies._FX_TRACING}", lambda: True
    ),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("name", WATCHERS)
def test_nothing_is_elided_while_somebody_watches(name: str, prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    with WATCHERS[name]():
        assert torch_copies.is_watched()
        module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 0
    module.load_state_dict(state)
    assert elided() == 1


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_nothing_is_elided_inside_a_functorch_transform(
    transform: str, prepare: Callable[..., None]
) -> None:
    expected = weight().state_dict()
    module, state, outcomes = weight(), cached(expected), []
    prepare(module)

    def body(x: torch.Tensor) -> torch.Tensor:
        assert torch_copies.is_watched()
        for load in (torchs_own, nn.Module.load_state_dict):
            try:
                outcomes.append(str(load(module, state)))
            except RuntimeError as error:  # torch refuses to write to what it did not wrap
                outcomes.append(str(error))
        return x.sum()

    getattr(torch.func, transform)(body)(torch.ones(3))
    assert outcomes[0] == outcomes[1]
    assert elided() == 0


def test_a_users_mode_sees_the_same_calls(prepare: Callable[..., None]) -> None:
    expected = Net().state_dict()
    counts = []
    for load, state in ((torchs_own, expected), (nn.Module.load_state_dict, cached(expected))):
        net = Net()
        prepare(net)
        with RecordingMode() as mode:
            load(net, state)
        counts.append(mode.copies)
    assert counts[0] == counts[1] > 0


def test_a_mode_that_a_hook_enters_sees_its_copies() -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    mode = RecordingMode()
    module._register_load_state_dict_pre_hook(lambda *_: mode.__enter__())
    module.register_load_state_dict_post_hook(lambda *_: mode.__exit__(None, None, None))
    module.load_state_dict(state)
    assert mode.copies == 1
    assert_equal(module, expected)


def test_a_watcher_that_a_hook_starts_is_respected() -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    module._register_load_state_dict_pre_hook(lambda *_: torch.use_deterministic_algorithms(True))
    module.register_load_state_dict_post_hook(lambda *_: torch.use_deterministic_algorithms(False))
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 0


# --- torch's own behaviour ------------------------------------------------------------------------


def _message(load: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises((RuntimeError, TypeError, AttributeError)) as raised:
        load(*arguments, **options)
    return f"{type(raised.value).__name__}: {raised.value}"


def _missing(state: dict[str, Any]) -> None:
    del state["second.weight"]


def _unexpected(state: dict[str, Any]) -> None:
    state["third.weight"] = torch.zeros(3)


def _wrong_shape(state: dict[str, Any]) -> None:
    state["first.weight"] = torch.zeros(3, 3)


def _broadcastable_shape(state: dict[str, Any]) -> None:
    state["first.weight"] = torch.zeros(1, COLUMNS)


def _no_tensor(state: dict[str, Any]) -> None:
    state["first.bias"] = "nothing"


def _meta_entry(state: dict[str, Any]) -> None:
    state["first.weight"] = torch.zeros(ROWS, COLUMNS, device="meta")


def _sparse_entry(state: dict[str, Any]) -> None:
    state["first.weight"] = torch.zeros(ROWS, COLUMNS).to_sparse()


def _quantized_entry(state: dict[str, Any]) -> None:
    zeros = torch.zeros(ROWS, COLUMNS)
    state["first.weight"] = torch.quantize_per_tensor(zeros, 0.1, 0, torch.quint8)


def _extra_state(state: dict[str, Any]) -> None:
    state["norm._extra_state"] = 3


def _odd_key(state: dict[str, Any]) -> None:
    state[3] = torch.zeros(3)  # type: ignore[index]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "damage",
    [
        *(_missing, _unexpected, _wrong_shape, _broadcastable_shape, _no_tensor),
        *(_extra_state, _odd_key),
        *(_meta_entry, _sparse_entry, _quantized_entry),
    ],
    ids=lambda damage: damage.__name__[1:],
)
def test_errors_are_torchs_and_the_rest_is_loaded(
    damage: Callable[..., None], prepare: Callable[..., None]
) -> None:
    plain = dict(Net().state_dict())
    state: dict[str, Any] = dict(cached(plain))
    start = Net().state_dict()
    nets = [Net(), Net()]
    damage(plain), damage(state)
    messages = []
    for net, load, entries in zip(
        nets, (torchs_own, nn.Module.load_state_dict), (plain, state), strict=True
    ):
        torchs_own(net, start)
        prepare(net)
        messages.append(_message(load, net, entries))
    assert messages[0] == messages[1]
    assert_equal(nets[1], nets[0].state_dict())


def test_a_state_dict_given_by_name(prepare: Callable[..., None]) -> None:
    """So torch.distributed.checkpoint calls it, and with it accelerate."""
    expected = Net().state_dict()
    net = Net()
    prepare(net)
    net.load_state_dict(assign=False, state_dict=cached(expected))
    assert_equal(net, expected)
    assert elided() == NET_LARGE


def test_not_strict(prepare: Callable[..., None]) -> None:
    expected = Net().state_dict()
    state = cached(expected)
    del state["second.weight"]
    state["third.weight"] = torch.zeros(3)
    for positional in (True, False):
        net = Net()
        prepare(net)
        kept = net.second.weight.detach().clone()
        options = {} if positional else {"strict": False}
        result = net.load_state_dict(state, *([False] if positional else []), **options)
        assert result == (["second.weight"], ["third.weight"])
        assert torch.equal(net.second.weight, kept)
        assert torch.equal(net.first.weight, expected["first.weight"])
    assert elided() == 2 * (NET_LARGE - 1)


@pytest.mark.parametrize(
    "arguments",
    [(), (3,), ([],), (cached({"weight": torch.ones(ROWS, COLUMNS)}), True, False, 4)],
    ids=["none", "number", "list", "too many"],
)
def test_wrong_calls_fail_as_before(arguments: tuple[Any, ...]) -> None:
    module = weight()
    expected = _message(torchs_own, module, *arguments)
    assert _message(nn.Module.load_state_dict, module, *arguments) == expected


@pytest.mark.parametrize("arguments", [({},), ()])
def test_unknown_keywords_fail_as_before(arguments: tuple[Any, ...]) -> None:
    options = {"strictly": True}
    expected = _message(torchs_own, weight(), *arguments, **options)
    assert _message(nn.Module.load_state_dict, weight(), *arguments, **options) == expected


@pytest.mark.parametrize("arguments", [(True,), (True, False)])
def test_an_argument_given_twice_fails_as_before(arguments: tuple[bool, ...]) -> None:
    state, twice = cached(weight().state_dict()), ["strict", "assign"][len(arguments) - 1]
    expected = _message(torchs_own, weight(), state, *arguments, **{twice: False})
    assert (
        _message(nn.Module.load_state_dict, weight(), state, *arguments, **{twice: False})
        == expected
    )


@pytest.mark.parametrize("positional", [True, False])
def test_assign_is_torchs(positional: bool, prepare: Callable[..., None]) -> None:
    module, state = weight(), cached(weight().state_dict())
    prepare(module)
    arguments, options = ((True, True), {}) if positional else ((), {"assign": True})
    module.load_state_dict(state, *arguments, **options)
    assert module.weight.data_ptr() == state["weight"].data_ptr()
    assert elided() == 0


@pytest.mark.parametrize("shift", [0, 8])
def test_loading_an_assigned_entry_again_is_a_copy_onto_itself(
    prepare: Callable[..., None], shift: int
) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected, shift=shift)
    prepare(module)
    module.load_state_dict(state, assign=True)
    address = module.weight.data_ptr()
    module.load_state_dict(state)
    assert module.weight.data_ptr() == state["weight"].data_ptr() == address
    assert elided() == 1
    other = cached(weight().state_dict())
    module.load_state_dict(other)  # the memory is the state dict's: it has to change too
    assert torch.equal(state["weight"], other["weight"])
    assert torch.equal(module.weight, other["weight"])


def test_torchs_mark_of_an_earlier_assign_is_obeyed() -> None:
    plain, state = weight().state_dict(), cached(weight().state_dict())
    state._metadata = copy.deepcopy(plain._metadata)  # type: ignore[attr-defined]
    outcomes = []
    for load, entries in ((torchs_own, plain), (nn.Module.load_state_dict, state)):
        load(weight(), entries, assign=True)
        module = weight()
        load(module, entries)
        outcomes.append(module.weight.data_ptr() == entries["weight"].data_ptr())
    assert outcomes == [True, True]


def test_no_hook_is_left_out() -> None:
    state, net, calls = cached(Net().state_dict()), Net(), []
    net.second._register_load_state_dict_pre_hook(lambda *_: calls.append("pre"))
    net.first.register_load_state_dict_post_hook(lambda *_: calls.append("post"))
    net.load_state_dict(state)
    assert calls == ["post", "pre"]
    assert elided() == NET_LARGE


@pytest.mark.parametrize(
    "register", ["_register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"]
)
def test_a_single_hook_is_called(register: str) -> None:
    state, net, calls = cached(Net().state_dict()), Net(), []
    getattr(net.second, register)(lambda *_: calls.append(1))
    net.load_state_dict(state)
    assert calls == [1]


def test_a_hook_that_renames_keys(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    state = cached({"old": expected["weight"]})
    module = weight()
    prepare(module)
    module._register_load_state_dict_pre_hook(
        lambda entries, *_: entries.update(weight=entries.pop("old"))
    )
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert elided() == 1


def test_a_hook_that_writes_to_an_entry_is_heard() -> None:
    state, net = cached(Net().state_dict()), Net()
    net.second._register_load_state_dict_pre_hook(
        lambda entries, *_: entries["second.weight"].fill_(4)
    )
    net.load_state_dict(state)
    assert torch.equal(net.second.weight, torch.full((COLUMNS, ROWS), 4.0))
    # Its page may be its neighbour's, which then is copied: conservative, and right.
    assert torch.equal(net.first.weight, state["first.weight"])


def test_overrides_are_called() -> None:
    class Doubling(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            with torch.no_grad():
                self.weight.mul_(2)

    expected = weight().state_dict()
    module, state = Doubling(COLUMNS, ROWS, bias=False), cached(expected)
    module.load_state_dict(state)
    assert torch.equal(module.weight, expected["weight"] * 2)
    assert elided() == 1
    on_instance, calls = weight(), []
    on_instance._load_from_state_dict = lambda *_: calls.append(1)  # type: ignore[method-assign]
    on_instance.load_state_dict(state)
    assert calls == [1]


def test_extra_state_is_delivered() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return "mine"

        def set_extra_state(self, state: Any) -> None:
            self.got = state

    state = cached(weight().state_dict())
    state["_extra_state"] = "mine"  # type: ignore[assignment]
    module = Extra(COLUMNS, ROWS, bias=False)
    module.load_state_dict(state)
    assert module.got == "mine"
    assert elided() == 1
    del state["_extra_state"]
    message = _message(nn.Module.load_state_dict, module, state)
    assert message == _message(torchs_own, module, state)
    assert "_extra_state" in message


def test_names_that_torch_does_not_expect(prepare: Callable[..., None]) -> None:
    one, two, entry = weight(), weight(), torch.randn(ROWS, COLUMNS)
    module = nn.ModuleDict({"a": nn.ModuleDict({"b": one})})
    module._modules["a.b"] = two  # two places, one key
    prepare(module)
    module.load_state_dict(cached({"a.b.weight": entry}))
    assert torch.equal(one.weight, entry)
    assert torch.equal(two.weight, entry)
    extra = nn.Module()
    extra._extra_state = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    prepare(extra)
    state = cached({"_extra_state": entry})
    message = _message(nn.Module.load_state_dict, extra, state)
    assert message == _message(torchs_own, extra, state)


def test_an_old_checkpoint_without_batch_counters() -> None:
    expected = Net().state_dict()
    state = cached({key: value for key, value in expected.items() if "tracked" not in key})
    net = Net()
    net.norm.num_batches_tracked.fill_(3)
    net.load_state_dict(state)
    assert torch.equal(net.first.weight, expected["first.weight"])
    assert net.norm.num_batches_tracked == 3
    assert elided() == NET_LARGE
    uncounted = Net()
    uncounted.norm.num_batches_tracked = None
    plain = {key: value for key, value in expected.items() if "tracked" not in key}
    messages = [_message(load, uncounted, plain) for load in (torchs_own,)]
    assert messages == [_message(nn.Module.load_state_dict, uncounted, state)]


def test_parametrized_and_lazy_modules(prepare: Callable[..., None]) -> None:
    normed = nn.utils.parametrizations.weight_norm(weight())
    expected = nn.utils.parametrizations.weight_norm(weight()).state_dict()
    prepare(normed)
    normed.load_state_dict(cached(expected))
    assert_equal(normed, expected)
    lazy = nn.LazyLinear(ROWS)
    full = nn.Linear(COLUMNS, ROWS).state_dict()
    prepare(lazy)
    lazy.load_state_dict(cached(full))
    assert_equal(lazy, full)


def test_a_meta_module_warns_as_before(prepare: Callable[..., None]) -> None:
    module = nn.Linear(COLUMNS, ROWS, bias=False, device="meta")
    prepare(module)
    with pytest.warns(UserWarning, match="which is a no-op"):
        module.load_state_dict(cached(weight().state_dict()))
    assert module.weight.is_meta
    assert elided() == 0


def test_recurrent_modules(prepare: Callable[..., None]) -> None:
    expected = nn.LSTM(ROWS, ROWS).state_dict()
    module = nn.LSTM(ROWS, ROWS)
    prepare(module)
    module.load_state_dict(cached(expected))
    assert_equal(module, expected)
    assert elided() == 2
    x = torch.randn(3, 1, ROWS)
    reference = nn.LSTM(ROWS, ROWS)
    torchs_own(reference, expected)
    assert torch.equal(module(x)[0], reference(x)[0])


@pytest.mark.usefixtures("is_told")
def test_tied_parameters(prepare: Callable[..., None]) -> None:
    tied = nn.ModuleDict({"a": weight(), "b": weight()})
    tied["b"].weight = tied["a"].weight
    prepare(tied)
    entry = torch.randn(ROWS, COLUMNS)
    state = cached({"a.weight": entry})
    state["b.weight"] = state["a.weight"]
    version = tied["a"].weight._version
    tied.load_state_dict(state)
    assert tied["a"].weight is tied["b"].weight
    assert torch.equal(tied["a"].weight, entry)
    assert tied["a"].weight._version == version + 2
    assert elided() == 2
    last = cached({"a.weight": torch.randn(ROWS, COLUMNS), "b.weight": entry})
    tied.load_state_dict(last)  # the later key wins
    assert torch.equal(tied["a"].weight, entry)


def test_a_module_that_occurs_twice(prepare: Callable[..., None]) -> None:
    shared = weight()
    module = nn.ModuleDict({"a": shared, "b": shared})
    prepare(module)
    expected = {"a.weight": torch.randn(ROWS, COLUMNS), "b.weight": torch.randn(ROWS, COLUMNS)}
    module.load_state_dict(cached(expected))
    assert torch.equal(shared.weight, expected["b.weight"])


@pytest.mark.usefixtures("is_told")
def test_two_parameters_on_one_storage(prepare: Callable[..., None]) -> None:
    memory = torch.zeros(ROWS, COLUMNS)
    module = nn.Module()
    module.a, module.b = nn.Parameter(memory), nn.Parameter(memory.view(ROWS, COLUMNS))
    prepare(module)
    expected = {"a": torch.randn(ROWS, COLUMNS), "b": torch.randn(ROWS, COLUMNS)}
    module.load_state_dict(cached(expected))
    assert torch.equal(module.a, expected["b"])
    assert torch.equal(memory, expected["b"])
    assert elided() == 0


def test_a_module_that_contains_itself_fails_as_before() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(ROWS, COLUMNS), persistent=False)
    module._modules["inner"] = module
    state = cached({"table": torch.zeros(ROWS, COLUMNS)})
    with pytest.raises(RecursionError):
        torchs_own(module, state)
    with pytest.raises(RecursionError):
        module.load_state_dict(state)
    assert forget_errors() == ["elision_error:RecursionError"]


def test_mappings_that_compute_their_entries_are_read_once() -> None:
    class Counting(UserDict[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, key: str) -> torch.Tensor:
            self.reads += 1
            return super().__getitem__(key)

    expected = weight().state_dict()
    state, module = Counting(cached(expected)), weight()
    module.load_state_dict(state)
    assert_equal(module, expected)
    assert state.reads == 1


def test_somebody_elses_wrapper_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def theirs(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        return torchs_own(self, *arguments, **options)

    load = torch_module.POINTS[0].wrap(theirs)
    module, expected = weight(), weight().state_dict()
    load(module, cached(expected))
    assert calls == [module]
    assert elided() == 1
    with monkeypatch.context() as patch:
        original = nn.Module._load_from_state_dict

        def also_theirs(self: nn.Module, *rest: Any) -> None:
            calls.append(self)
            original(self, *rest)

        patch.setattr(nn.Module, "_load_from_state_dict", also_theirs)
        module.load_state_dict(cached(expected))
    assert calls == [module, module]


def test_inactive_patches_leave_everything_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "active", lambda: False)
    expected = weight().state_dict()
    module = weight()
    module.load_state_dict(cached(expected))
    assert_equal(module, expected)
    assert elided() == 0


def test_a_load_inside_a_hook(prepare: Callable[..., None]) -> None:
    expected, inner_expected = weight().state_dict(), weight().state_dict()
    outer, inner = weight(), weight()
    state, inner_state = cached(expected), cached(inner_expected)
    prepare(inner)
    outer._register_load_state_dict_pre_hook(lambda *_: inner.load_state_dict(inner_state))
    outer.load_state_dict(state)
    assert_equal(outer, expected)
    assert_equal(inner, inner_expected)


def test_an_exception_of_a_hook_passes_and_leaves_no_mode_behind() -> None:
    class Mine(BaseException):
        pass

    def hook(*_: object) -> None:
        raise Mine

    module, state = weight(), cached(weight().state_dict())
    module._register_load_state_dict_pre_hook(hook)
    descriptors = open_descriptors()
    with pytest.raises(Mine):
        module.load_state_dict(state)
    assert torch._C._len_torch_function_stack() == 0
    assert open_descriptors() <= descriptors


def test_a_failure_after_the_load_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch_elision, "retire", fail)
    expected = Net().state_dict()
    net = Net()
    net.load_state_dict(cached(expected))
    assert_equal(net, expected)
    assert elided() > 0
    assert forget_errors() == ["elision_error:MemoryError"]


@pytest.mark.parametrize("where", ["map", "swap", "after", "scan"])
def test_a_failure_of_ours_becomes_a_copy(
    where: str, monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., None]
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise MemoryFailure("no more mappings")

    targets = {
        "map": (Image, "map"),
        "swap": (torch_elision._Call, "_swap"),
        "after": (torch.autograd.graph, "increment_version"),
        "scan": (write_check.PageScanner, "is_pristine"),
    }
    expected = Net().state_dict()
    net, state = Net(), cached(expected)
    prepare(net)
    if where == "scan":  # the scanner itself asks when it is made
        monkeypatch.setattr(write_check, "PageScanner", fail)
    else:
        monkeypatch.setattr(*targets[where], fail)
    net.load_state_dict(state)
    assert_equal(net, expected)
    assert elided() == 0
    assert forget_errors() == ["elision_error:MemoryFailure"]
    state["first.weight"].fill_(1)
    assert_equal(net, expected)


def test_a_torch_without_the_private_parts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_copies.missing_capability() is None
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_storage_Use_Count")
        assert "_storage_Use_Count" in str(torch_copies.missing_capability())
    sole = torch_copies._sole()
    with monkeypatch.context() as patch:
        patch.setattr(torch_copies._Owners, "of", classmethod(lambda *_: sole))
        assert "cannot be noticed" in str(torch_copies.missing_capability())


def test_a_default_device_of_the_program_does_not_matter() -> None:
    """The patches may be applied when it is set already."""
    with torch.device("meta"):
        assert torch_copies.missing_capability() is None


def test_the_wrapper_looks_like_the_original() -> None:
    assert inspect.signature(nn.Module.load_state_dict) == inspect.signature(torchs_own)
    assert nn.Module.load_state_dict.__doc__ == torchs_own.__doc__
    assert nn.Module.load_state_dict.__qualname__ == torchs_own.__qualname__


# --- life after the load --------------------------------------------------------------------------


def trained(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, COLUMNS)).square().mean().backward()
        optimizer.step()
    return net.state_dict()


def test_training_goes_on_as_after_a_copy(prepare: Callable[..., None]) -> None:
    expected = Net().state_dict()
    state, results = cached(expected), []
    for load, entries in ((torchs_own, expected), (nn.Module.load_state_dict, state)):
        torch.manual_seed(1)
        net = Net()
        prepare(net)
        optimizer = torch.optim.Adam(net.parameters())
        trained(net, optimizer)
        load(net, entries)
        results.append({key: value.clone() for key, value in trained(net, optimizer).items()})
    assert elided() == NET_LARGE
    for key, value in results[0].items():
        assert torch.equal(results[1][key], value), key
    assert_equal_states(state, expected)


def assert_equal_states(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def _deepcopied(net: Net) -> Net:
    return copy.deepcopy(net)


def _pickled(net: Net) -> Net:
    return pickle.loads(pickle.dumps(net))


def _saved(net: Net) -> Net:
    file = io.BytesIO()
    torch.save(net, file)
    assert len(file.getvalue()) < 2 * sum(value.nbytes for value in net.state_dict().values())
    file.seek(0)
    return torch.load(file, weights_only=False)


def _in_shared_memory(net: Net) -> Net:
    net.share_memory()
    assert net.first.weight.is_shared()
    return net


def _converted_and_back(net: Net) -> Net:
    return net.double().float()


@pytest.mark.parametrize(
    "use",
    [_deepcopied, _pickled, _saved, _in_shared_memory, _converted_and_back],
    ids=lambda use: use.__name__[1:],
)
def test_what_programs_do_with_a_loaded_module(
    use: Callable[[Net], Net], prepare: Callable[..., None]
) -> None:
    expected = Net().state_dict()
    net, state = Net(), cached(expected)
    if prepare is _stock:
        prepare(net)
    net.load_state_dict(state)
    assert elided() == NET_LARGE
    other = use(net)
    assert_equal(other, expected)
    with torch.no_grad():
        other.first.weight.fill_(1)
    assert_equal_states(state, expected)
    if other is not net:
        assert_equal(net, expected)


def test_fork_after_load(prepare: Callable[..., None]) -> None:
    expected = weight().state_dict()
    module, state = weight(), cached(expected)
    prepare(module)
    module.load_state_dict(state)

    def is_right() -> bool:
        before = elided()  # what is counted is forgotten at a fork, once there is a cache
        assert_equal(module, expected)
        with torch.no_grad():
            module.weight.fill_(1)
        again = weight()
        prepare(again)
        again.load_state_dict(state)
        assert_equal(again, expected)
        return elided() == before + 1

    assert passes_in_child(is_right)
    assert_equal(module, expected)


def test_threads_load_at_the_same_time(prepare: Callable[..., None]) -> None:
    expected = Net().state_dict()
    state, failures = cached(expected), []

    def load() -> None:
        try:
            for _ in range(5):
                net = Net()
                prepare(net)
                net.load_state_dict(state)
                assert_equal(net, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert elided() == 4 * 5 * NET_LARGE


def test_nothing_of_ours_keeps_the_module_alive(prepare: Callable[..., None]) -> None:
    module, state = weight(), cached(weight().state_dict())
    prepare(module)
    module.load_state_dict(state)
    parameter = weakref.ref(module.weight)
    del module
    assert parameter() is None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)
