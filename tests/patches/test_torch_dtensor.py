"""Tensors over a mesh of processes whose local parts are shared: what writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import Devices, shared
from torch import nn
from torch.distributed import tensor as distributed_tensor
from torch.distributed.tensor import DTensor, Replicate, _collective_utils

from trims_shim.patches import torch_dtensor

SIDE = 256


@pytest.fixture(params=emulation.BOTH_WAYS)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Devices]:
    emulation.let_swap(monkeypatch, request.param)
    wanted = *emulation.OF_TRAINING, *torch_dtensor.POINTS
    with emulation.emulated(monkeypatch, *wanted) as devices:
        yield devices


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def sharing(devices: Devices, tmp_path: Path) -> nn.Linear:
    """A module on shared memory."""
    layer = nn.Linear(SIDE, SIDE, bias=False)
    torch.save(layer.state_dict(), tmp_path / "model.pt")
    layer.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cuda"))
    assert shared(layer.weight)
    return layer


@pytest.fixture
def replicated(sharing: nn.Linear, mesh: Any) -> nn.Linear:
    """The module with a DTensor over its shared memory."""
    local = sharing.weight.detach()
    sharing.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()]))
    assert shared(sharing.weight.to_local())
    return sharing


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch 2.6, on any CPU
def test_modules_that_are_distributed(sharing: nn.Linear, mesh: Any) -> None:
    distributed_tensor.distribute_module(sharing, mesh)
    assert not shared(sharing.weight.to_local())


def test_tensors_that_are_checked(sharing: nn.Linear, mesh: Any) -> None:
    local = sharing.weight.detach()
    assert not shared(DTensor.from_local(local, mesh, [Replicate()], run_check=True).to_local())


def test_a_name_imported_after_the_shim(devices: Devices) -> None:
    public = torch.distributed.broadcast
    assert _collective_utils.broadcast is public
    assert torch_dtensor._wrap(public) is public


def test_training(replicated: nn.Linear) -> None:
    before = replicated.weight.to_local().clone()
    optimizer = torch.optim.SGD(replicated.parameters(), lr=1.0)
    replicated.weight.grad = torch.ones_like(replicated.weight)
    optimizer.step()
    assert torch.equal(replicated.weight.to_local(), before - 1)


def test_load_state_dict(replicated: nn.Linear) -> None:
    replicated.load_state_dict({"weight": torch.ones_like(replicated.weight)})
    assert bool(replicated.weight.to_local().eq(1).all())


def test_initialisation(replicated: nn.Linear) -> None:
    nn.init.ones_(replicated.weight)
    assert bool(replicated.weight.to_local().eq(1).all())
