"""Tensors go on with other memory, in both ways: they stay what they are, and all of them go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import devices as emulation
import pytest
import torch
from torch import nn

from trims_shim.patches import torch_repoint


@pytest.fixture(params=emulation.BOTH_WAYS)
def can_swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    emulation.let_swap(monkeypatch, request.param)
    return torch_repoint.has_swap()


@pytest.fixture
def no_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation.let_swap(monkeypatch, False)


def move(*tensors: torch.Tensor) -> int:
    """Put everything over the memory of ``tensors`` on copies of it."""
    sources = list({each.untyped_storage()._cdata: each for each in tensors}.values())
    storages = [each.untyped_storage() for each in sources]
    return torch_repoint.move(storages, [each.clone() for each in storages], tensors)


def _inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        other = torch.empty(0)
        return other.set_(tensor.untyped_storage(), 4, (8, 3), (1, 8))


def _view_while_inferring(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.view(-1)[4:]


class Odd(torch.Tensor):
    """A subclass that must not be asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


class Traced(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "view": lambda tensor: tensor[2],
    "transpose": lambda tensor: tensor.t(),
    "strided": lambda tensor: tensor[1:, ::3],
    "other dtype": lambda tensor: tensor.detach().view(torch.int16)[:, 3:],
    "complex": lambda tensor: torch.view_as_complex(tensor.detach().view(8, 4, 2)),
    "conjugate": lambda tensor: torch.view_as_complex(tensor.detach().view(8, 4, 2)).conj(),
    "negative": lambda tensor: torch._neg_view(tensor.detach())[2:],
    "view while inferring": _view_while_inferring,
    "inference": _inference,
    "parameter": lambda tensor: nn.Parameter(tensor.detach()[3:]),
    "subclass": lambda tensor: torch.Tensor._make_subclass(Odd, tensor.detach()),
    "dispatching": lambda tensor: torch.Tensor._make_subclass(Traced, tensor.detach()),
}


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        version = None if tensor.is_inference() else tensor._version
        graph = (tensor.requires_grad, tensor.grad_fn, tensor._base is None, tensor.is_leaf)
        bits = (tensor.is_conj(), tensor.is_neg(), tensor.is_inference())
        shape = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return type(tensor), version, graph, bits, shape


def storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return tensor.untyped_storage()._cdata


def values(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg().clone().detach()


@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("is_inferring", [False, True])
def test_an_alias_stays_what_it_is(
    can_swap: bool, make: Callable[[torch.Tensor], torch.Tensor], is_inferring: bool
) -> None:
    parameter = nn.Parameter(torch.randn(8, 8))
    with torch.no_grad():
        parameter.add_(1)
    alias = make(parameter)
    pointer = parameter.data_ptr()
    before = facts(parameter), facts(alias), values(alias)
    with torch.inference_mode(is_inferring):
        assert move(parameter) == 0
    assert (facts(parameter), facts(alias)) == before[:2]
    assert torch.equal(values(alias), before[2])
    assert parameter.data_ptr() != pointer
    assert storage(alias) == storage(parameter)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        parameter.untyped_storage().fill_(0)
    assert torch.equal(values(alias), torch.zeros_like(before[2]))


def test_gradients_hooks_and_graphs_stay(can_swap: bool) -> None:
    parameter = nn.Parameter(torch.randn(8, 8))
    seen: list[torch.Tensor] = []
    parameter.register_hook(seen.append)
    parameter.grad = torch.ones(8, 8)
    row = parameter[3]
    row.retain_grad()
    loss = (row * row).sum()
    assert move(parameter) == 0
    loss.backward()
    assert len(seen) == 1
    assert torch.equal(row.grad, 2 * row.detach())
    assert torch.equal(parameter.grad[3], 1 + 2 * row.detach())


def test_several_storages_in_one_scan(no_swap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(8) for _ in range(4)]
    views = [each[2:] for each in tensors]
    others = [torch.randn(8) for _ in range(3)]
    pointers = [each.data_ptr() for each in others]
    scans: list[int] = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: scans.append(1) or get_objects())
    assert move(*tensors) == 0
    assert scans == [1]
    assert [each.data_ptr() for each in others] == pointers
    for tensor, view in zip(tensors, views, strict=True):
        assert view.data_ptr() == tensor.data_ptr() + 8
    del views, view
    assert move(*tensors) == 0
    assert scans == [1], "who is known to be alone is not looked for"


def test_storages_in_use_are_counted(no_swap: None) -> None:
    def linear(tensor: torch.Tensor) -> Any:
        return nn.functional.linear(torch.randn(2, 8, requires_grad=True), tensor)

    keepers: dict[str, Callable[[torch.Tensor], Any]] = {
        "storage": lambda tensor: tensor.untyped_storage(),
        "part": lambda tensor: tensor.untyped_storage()[4:],
        "typed": lambda tensor: tensor._typed_storage(),
        "graph": linear,
    }
    for name, keeper in keepers.items():
        tensor, other = nn.Parameter(torch.randn(8, 8)), torch.randn(8)
        pointer = tensor.data_ptr()
        kept = keeper(tensor)
        assert move(tensor, other) == 1, name
        assert tensor.data_ptr() != pointer, "what is about to be written goes in any case"
        del kept
        assert move(tensor, other) == 0, name


def test_the_old_memory_is_given_up(can_swap: bool) -> None:
    tensor = torch.randn(8)
    alias = tensor[2:]
    gone: list[int] = []
    if can_swap:
        target = tensor.untyped_storage().clone()
        torch_repoint.move([tensor.untyped_storage()], [target], [tensor])
        weakref.finalize(target, gone.append, 1)
        del target
    else:
        weakref.finalize(tensor.untyped_storage(), gone.append, 1)
        assert move(tensor) == 0
    assert gone == [1]
    assert torch.equal(alias, tensor[2:])


class Lazy:
    """What wakes when it is asked what it is."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


class Meta(type):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError


class Unhashable(metaclass=Meta):
    pass


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_strange_objects_are_passed_by(no_swap: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.randn(8)
    tensor = torch.randn(8, 8)
    quantized = torch.quantize_per_tensor(tensor, 1, 0, torch.qint8)
    strange = [Lazy(), Unhashable(), fake, torch.ones(2, 2).to_sparse(), quantized]
    strange += [torch.empty(3, device="meta"), nn.UninitializedParameter()]
    alias = tensor[1]
    found: list[int] = []
    torch.func.vmap(lambda row: found.append(move(tensor)) or row)(torch.randn(2, 3))
    assert found == [0]
    assert torch.equal(alias, tensor[1])
    assert alias.data_ptr() == tensor[1].data_ptr()
    assert len(strange) == 7


def test_replacing(can_swap: bool) -> None:
    parameter, target = nn.Parameter(torch.zeros(8)), torch.ones(8).untyped_storage()
    before, pointer = facts(parameter), target.data_ptr()
    own, address = parameter.untyped_storage()._cdata, parameter.data_ptr()
    old = torch_repoint.replace(parameter, target)
    assert old.data_ptr() == address
    assert parameter.data_ptr() == pointer
    assert facts(parameter) == before
    assert (parameter.untyped_storage()._cdata == own) == can_swap


def test_what_a_torch_must_have(can_swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_repoint.missing_capability() is None
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    reason = torch_repoint.missing_capability()
    assert reason is None if can_swap else "_storage_Use_Count" in str(reason)


def test_counts_that_do_not_count(no_swap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_repoint._broken_promise.cache_clear()
    try:
        monkeypatch.setattr(torch_repoint._Uses, "of", lambda *_: torch_repoint._unused())
        assert torch_repoint.missing_capability() == "a storage in use cannot be noticed"
        torch_repoint._broken_promise.cache_clear()
        monkeypatch.setattr(torch_repoint, "_put", lambda *_: None)
        assert torch_repoint.missing_capability() == "tensors do not follow to other memory"
    finally:
        torch_repoint._broken_promise.cache_clear()
