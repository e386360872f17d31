"""load_state_dict of what lies on an emulated device: parameters are shared, the rest is copied.

Each condition is tested twice: it holds and memory is shared, it fails and torch copies; the values
are right either way, and the shared memory is never written.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import SIDE, Devices, Net, Tied, events, reasons, shared
from torch import nn

from trims_shim import patches
from trims_shim.client import device_arenas
from trims_shim.patches import (
    points,
    torch_device,
    torch_device_elision,
    torch_module,
    torch_repoint,
    torch_unshare,
)

LARGE_PARAMETERS = {"first.weight", "second.weight"}


@pytest.fixture(params=emulation.BOTH_WAYS)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Devices]:
    emulation.let_swap(monkeypatch, request.param)
    with emulation.emulated(monkeypatch, *emulation.OF_LOADING, *emulation.OF_UNSHARING) as devices:
        yield devices
    assert not [each for each in emulation.all_events() if each.startswith("elision_error")]


def _stock(module: nn.Module) -> None:
    """The tree as it is."""


def _hooked(module: nn.Module) -> None:
    """A hook that does nothing: torch's own code runs under the mode."""
    module._register_load_state_dict_pre_hook(lambda *_: None)


@pytest.fixture(params=[_stock, _hooked], ids=["stock", "mode"])
def prepare(request: pytest.FixtureRequest) -> Callable[[nn.Module], None]:
    return request.param


@pytest.fixture
def on_device(devices: Devices, tmp_path: Path) -> Callable[..., Any]:
    """The state dict of a module, saved and loaded onto the device."""
    count = iter(range(100))

    def save_and_load(module: nn.Module | dict[str, torch.Tensor]) -> Any:
        path = tmp_path / f"model-{next(count)}.pt"
        torch.save(module if isinstance(module, dict) else module.state_dict(), path)
        return torch.load(path, map_location="cuda")

    return save_and_load


def shared_names(module: nn.Module) -> set[str]:
    return {name for name, value in module.state_dict(keep_vars=True).items() if shared(value)}


def assert_equal(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    actual = module.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


# --- it is shared ---------------------------------------------------------------------------------


def test_large_parameters_are_shared_and_buffers_copied(
    on_device: Callable[..., Any], prepare: Callable[..., None]
) -> None:
    theirs, ours = Net(), Net()
    prepare(ours)
    state = on_device(theirs)
    identities = {name: id(value) for name, value in ours.named_parameters()}
    storage = ours.first.weight.untyped_storage()._cdata
    result = ours.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert shared_names(ours) == LARGE_PARAMETERS
    assert_equal(ours, theirs.state_dict())
    assert ours.first.weight.data_ptr() == state["first.weight"].data_ptr()
    assert {name: id(value) for name, value in ours.named_parameters()} == identities
    if torch_repoint.has_swap():
        assert ours.first.weight.untyped_storage()._cdata == storage
    assert ours.first.weight.untyped_storage().nbytes() == ours.first.weight.nbytes
    assert ours.first.weight.requires_grad
    assert events("elided:load_state_dict") == len(LARGE_PARAMETERS)
    ours.train()(torch.randn(8, SIDE))
    ours.table.add_(1)


def test_versions_go_up_as_with_a_copy(
    on_device: Callable[..., Any], prepare: Callable[..., None]
) -> None:
    ours, plain = Net(), Net()
    prepare(ours)
    state = on_device(Net())
    ours.load_state_dict(state)
    plain.load_state_dict({key: value.clone() for key, value in state.items()})
    assert [p._version for p in ours.parameters()] == [p._version for p in plain.parameters()]


def test_the_state_dict_can_go(
    devices: Devices, on_device: Callable[..., Any], prepare: Callable[..., None]
) -> None:
    theirs, ours = Net(), Net()
    prepare(ours)
    ours.load_state_dict(on_device(theirs))
    assert torch_device.find(ours.first.weight) is not None
    assert_equal(ours, theirs.state_dict())
    device_arenas.reap()
    assert devices.released == []
    del ours
    device_arenas.reap()
    assert len(devices.released) == 1


def test_another_checkpoint_into_the_same_module(
    devices: Devices, on_device: Callable[..., Any], prepare: Callable[..., None]
) -> None:
    ours = Net()
    prepare(ours)
    for _ in range(3):
        theirs = Net()
        ours.load_state_dict(on_device(theirs))
        assert_equal(ours, theirs.state_dict())
        assert shared_names(ours) == LARGE_PARAMETERS
    device_arenas.reap()
    assert len(devices.released) == 2, "what was replaced is let go of"


def test_the_same_checkpoint_again(
    devices: Devices, on_device: Callable[..., Any], prepare: Callable[..., None]
) -> None:
    ours, theirs = Net(), Net()
    prepare(ours)
    state = on_device(theirs)
    ours.load_state_dict(state)
    version = ours.first.weight._version
    ours.load_state_dict(state)
    assert ours.first.weight._version == version + 1
    assert shared_names(ours) == LARGE_PARAMETERS
    assert_equal(ours, theirs.state_dict())


def test_tied_parameters(on_device: Callable[..., Any], prepare: Callable[..., None]) -> None:
    ours, theirs = Tied(), Tied()
    prepare(ours)
    ours.load_state_dict(on_device(theirs))
    assert ours.decoder.weight is ours.encoder.weight
    assert shared_names(ours) == {"encoder.weight", "decoder.weight"}
    assert_equal(ours, theirs.state_dict())


def test_under_a_default_device(on_device: Callable[..., Any], prepare: Any) -> None:
    theirs, ours = Net(), Net()
    prepare(ours)
    state = on_device(theirs)
    with torch.device("cpu"):
        ours.load_state_dict(state)
    assert shared_names(ours) == LARGE_PARAMETERS
    assert_equal(ours, theirs.state_dict())


def test_a_state_dict_in_host_memory_of_the_shim(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    """For a module on a device, which on this machine cannot be told from one in host memory."""
    theirs, ours = Net(), Net()
    prepare(ours)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    monkeypatch.setattr(devices.runtime, "index", lambda device: 0)
    monkeypatch.setattr(torch_device_elision, "_is_on_device", lambda tensor: True)
    state = torch.load(tmp_path / "model.pt", map_location="cpu")
    ours.load_state_dict(state)
    assert shared_names(ours) == LARGE_PARAMETERS
    assert_equal(ours, theirs.state_dict())
    with torch.no_grad():
        state["first.weight"].zero_()
    ours.load_state_dict(state)
    assert shared_names(ours) == {"second.weight"}
    assert_equal(ours, state)


# --- it is copied ---------------------------------------------------------------------------------


def _captured(module: nn.Module) -> Any:
    torch_device.keep_addresses()


def _alias(module: nn.Module) -> Any:
    return module.first.weight.data


def _view(module: nn.Module) -> Any:
    return module.first.weight[3]


def _gradient(module: nn.Module) -> Any:
    module.first.weight.grad = torch.zeros(SIDE, SIDE)


def _optimizer(module: nn.Module) -> Any:
    return torch.optim.SGD([module.first.weight], lr=0.1)


def _part(module: nn.Module) -> Any:
    module.first.weight = nn.Parameter(torch.zeros(2 * SIDE, SIDE)[:SIDE])


def _half(module: nn.Module) -> Any:
    module.first.half()


def _permuted(module: nn.Module) -> Any:
    module.first.weight = nn.Parameter(torch.zeros(SIDE, SIDE).t())


@pytest.mark.parametrize(
    "arrange",
    [_captured, _alias, _view, _gradient, _optimizer, _part, _half, _permuted],
)
def test_where_sharing_could_be_told_it_is_copied(
    on_device: Callable[..., Any],
    prepare: Callable[..., None],
    arrange: Callable[[nn.Module], Any],
) -> None:
    theirs, ours = Net(), Net()
    prepare(ours)
    keep = arrange(ours)
    address = ours.first.weight.data_ptr()
    ours.load_state_dict(on_device(theirs))
    assert "first.weight" not in shared_names(ours)
    assert ours.first.weight.data_ptr() == address
    assert torch.equal(ours.first.weight.float(), theirs.first.weight.to(ours.first.weight.dtype))
    if isinstance(keep, torch.Tensor):
        assert torch.equal(keep, theirs.first.weight[3] if keep.dim() == 1 else theirs.first.weight)
    del keep


def test_an_optimizer_that_is_gone_is_no_reason(on_device: Callable[..., Any]) -> None:
    ours = Net()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    assert torch_unshare.trained() >= {id(each) for each in ours.parameters()}
    del optimizer
    ours.load_state_dict(on_device(Net()))
    assert shared_names(ours) == LARGE_PARAMETERS


def test_a_checkpoint_of_training_in_host_memory_is_copied(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    """A teacher, as DINO resumes one: no optimizer has it, and each step writes it."""
    student, teacher = Net(), Net()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    saved = {"teacher": Net().state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    prepare(teacher)
    monkeypatch.setattr(devices.runtime, "index", lambda device: 0)
    monkeypatch.setattr(torch_device_elision, "_is_on_device", lambda tensor: True)
    teacher.load_state_dict(torch.load(tmp_path / "checkpoint.pt", map_location="cpu")["teacher"])
    assert shared_names(teacher) == set()
    assert_equal(teacher, saved["teacher"])
    assert reasons() == {"checkpoint_of_training": 1}
    assert devices.opened == []
    for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
        theirs.data.mul_(0.9).add_(ours.detach().data, alpha=0.1)


def test_a_renormalised_embedding_is_copied(on_device: Callable[..., Any], prepare: Any) -> None:
    theirs, ours = (nn.Embedding(SIDE, SIDE, max_norm=1.0) for _ in range(2))
    prepare(ours)
    ours.load_state_dict(on_device(theirs))
    assert shared_names(ours) == set()
    ours(torch.arange(4))


def test_entries_on_another_device_are_copied(
    devices: Devices, on_device: Callable[..., Any], prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = Net(), Net()
    prepare(ours)
    state = on_device(theirs)
    monkeypatch.setattr(devices.runtime, "device", lambda index: torch.device("meta"))
    ours.load_state_dict(state)
    assert shared_names(ours) == set()
    assert_equal(ours, theirs.state_dict())


def test_private_access(on_device: Callable[..., Any], prepare: Any) -> None:
    theirs, ours = Net(), Net()
    prepare(ours)
    state = on_device(theirs)
    token = torch_device.access.set("private")
    ours.load_state_dict(state)
    torch_device.access.reset(token)
    assert shared_names(ours) == set()
    assert_equal(ours, theirs.state_dict())


# --- loads into shared memory ---------------------------------------------------------------------


@pytest.fixture
def sharing(on_device: Callable[..., Any]) -> Net:
    """A module on shared memory."""
    ours = Net()
    ours.load_state_dict(on_device(Net()))
    assert shared_names(ours) == LARGE_PARAMETERS
    return ours


def test_a_private_state_dict_into_a_shared_module(sharing: Net, prepare: Any) -> None:
    theirs = Net()
    prepare(sharing)
    sharing.load_state_dict(theirs.state_dict())
    assert shared_names(sharing) == set()
    assert_equal(sharing, theirs.state_dict())


def test_aliases_are_looked_for_once(
    sharing: Net, on_device: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[int] = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: scans.append(1) or get_objects())
    for make in (lambda net: net.state_dict(), on_device):
        aliases, theirs = sharing.state_dict(), Net()
        sharing.load_state_dict(make(theirs))
        assert_equal(sharing, theirs.state_dict())
        assert_equal(sharing, aliases)
        assert len(scans) == (0 if torch_repoint.has_swap() else 1)
        scans.clear()
        del aliases
        sharing.load_state_dict(on_device(theirs))
        assert shared_names(sharing) == LARGE_PARAMETERS
        assert scans == []


def test_part_of_a_state_dict(sharing: Net, on_device: Callable[..., Any], prepare: Any) -> None:
    before = {key: value.clone() for key, value in sharing.state_dict().items()}
    prepare(sharing)
    entry = torch.randn(SIDE, SIDE)
    sharing.load_state_dict({"first.weight": entry}, strict=False)
    assert_equal(sharing, {**before, "first.weight": entry})
    with pytest.raises(RuntimeError, match="size mismatch"):
        sharing.load_state_dict({"first.weight": torch.randn(3)}, strict=False)
    assert_equal(sharing, {**before, "first.weight": entry})


def test_while_inactive(sharing: Net) -> None:
    theirs = Net()
    token = patches.overridden.set(False)
    sharing.load_state_dict(theirs.state_dict())
    patches.overridden.reset(token)
    assert_equal(sharing, theirs.state_dict())


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_while_watched(sharing: Net) -> None:
    theirs = Net()
    state = theirs.state_dict()
    with Watching():
        sharing.load_state_dict(state)
    assert_equal(sharing, theirs.state_dict())


def test_assigned_buffers_are_private(on_device: Callable[..., Any]) -> None:
    theirs, ours = Net(), Net()
    state = on_device(theirs)
    assert shared(state["table"])
    ours.load_state_dict(state, assign=True)
    assert shared_names(ours) == LARGE_PARAMETERS
    assert ours.table.data_ptr() == state["table"].data_ptr(), "still one tensor, as torch has it"
    ours.table.add_(1)
    ours.train()(torch.randn(8, SIDE))
    again = Net()
    state = on_device(theirs)
    state._metadata[""]["assign_to_params_buffers"] = True
    again.load_state_dict(state)
    assert not shared(again.table)


def test_an_assigned_embedding_that_renormalises_is_private(on_device: Callable[..., Any]) -> None:
    theirs, ours = (nn.Sequential(nn.Embedding(SIDE, SIDE, max_norm=1.0)) for _ in range(2))
    state = on_device(theirs)
    assert shared(state["0.weight"])
    ours.load_state_dict(state, assign=True)
    assert shared_names(ours) == set()
    assert ours[0].weight.data_ptr() == state["0.weight"].data_ptr(), "still one tensor"
    assert torch.equal(ours(torch.arange(4)), theirs(torch.arange(4)))


def test_the_guard_alone(devices: Devices, on_device: Callable[..., Any]) -> None:
    """With TRIMS_ELIDE_COPIES=0 load_state_dict copies, never into shared memory."""
    guard = torch_unshare.POINTS[-1]
    load = guard.wrap(nn.Module.load_state_dict.__wrapped__)
    theirs, ours = Net(), Net()
    load(ours, on_device(theirs), assign=True)
    assert shared_names(ours) == LARGE_PARAMETERS
    load(ours, Net().state_dict())
    assert shared_names(ours) == set()
    copied = copy.deepcopy(ours)
    load(copied, on_device(theirs))
    assert shared_names(copied) == set()
    assert_equal(copied, theirs.state_dict())


def test_the_guard_is_applied_where_nobody_else_does_it(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    eliding = points.AppliedPatch(torch_module.POINTS[0], points.PatchState.APPLIED)
    # Undone before the fixture applies the real patches again, which are to be remembered.
    with monkeypatch.context() as patched:
        patched.setattr(patches, "_applied", {"torch_module": [eliding]})
        assert torch_unshare.POINTS[-1].probe() == "torch_module does it"
        eliding.state = points.PatchState.SKIPPED
        assert torch_unshare.POINTS[-1].probe() is None
        patched.setattr(patches, "_applied", {})
        assert torch_unshare.POINTS[-1].probe() is None
