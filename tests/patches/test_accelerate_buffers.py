"""What accelerate puts into modules. With the real library where it is installed; the stand-in does
with a value that is on the device what accelerate 1.15 does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import devices as emulation
import pytest
import torch
from devices import shared
from torch import nn

from trims_shim.patches import accelerate_buffers, torch_load

SIDE = 256


def set_module_tensor_to_device(
    module: nn.Module, tensor_name: str, device: Any, value: torch.Tensor
) -> None:
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    if name in owner._buffers:
        owner._buffers[name] = value.to(device)
    else:
        owner._parameters[name] = nn.Parameter(value.to(device))


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The patched function."""
    stand_in = set_module_tensor_to_device
    module = emulation.library(monkeypatch, "accelerate.utils.modeling", stand_in)
    points = *torch_load.POINTS[:2], *accelerate_buffers.POINTS
    with emulation.emulated(monkeypatch, *points):
        yield module.set_module_tensor_to_device


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIDE, SIDE)
        self.inner.register_buffer("table", torch.ones(SIDE, SIDE))


def test_buffers_are_private_and_parameters_shared(put: Any, tmp_path: Any) -> None:
    torch.save(Net().state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        net = Net()
    for name, value in torch.load(tmp_path / "model.pt", map_location="cuda").items():
        put(net, name, "cpu", value=value)
    assert shared(net.inner.weight)
    net.inner.table.add_(1)
    assert torch.equal(net.inner.table, torch.full((SIDE, SIDE), 2.0))
