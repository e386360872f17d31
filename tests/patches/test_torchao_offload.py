"""torchao's optimizer that works in host memory, of weights that are shared. The real one needs a
GPU to be made; the stand-in writes as torchao 0.18 does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import share, shared
from torch import nn

from trims_shim.patches import points, torchao_offload

SIDE = 256


class CPUOffloadOptimizer:
    def __init__(self, parameters: Any, optimizer_class: Any, **options: Any) -> None:
        self.param_d2h_map = {each: each.detach().clone() for each in parameters}
        self._optimizer = optimizer_class(list(self.param_d2h_map.values()), **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for on_device, on_host in self.param_d2h_map.items():
            on_host.grad = on_device.grad
        self._optimizer.step()
        for on_device, on_host in self.param_d2h_map.items():
            on_device.copy_(on_host)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulation.stand_in(monkeypatch, "torchao.optim.cpu_offload", CPUOffloadOptimizer)
    wanted = *emulation.OF_LOADING, *torchao_offload.POINTS
    with emulation.emulated(monkeypatch, *wanted):
        yield


def train(layer: nn.Linear, optimizer: Any) -> None:
    layer(torch.ones(4, SIDE)).square().sum().backward()
    optimizer.step()


def test_what_is_trained_becomes_private(tmp_path: Path) -> None:
    ours, theirs = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    theirs.load_state_dict(ours.state_dict())
    share(ours, tmp_path)
    train(ours, CPUOffloadOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    assert torch.equal(ours.weight, theirs.weight)
    assert not shared(ours.weight)


def test_weights_that_the_optimizer_was_made_before(tmp_path: Path) -> None:
    layer = nn.Linear(SIDE, SIDE)
    optimizer = CPUOffloadOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1)
    share(layer, tmp_path)
    train(layer, optimizer)
    assert not shared(layer.weight)


def test_the_real_library_has_this_method() -> None:
    pytest.importorskip("torchao.optim.cpu_offload")
    for point in torchao_offload.POINTS:
        assert callable(points.resolve(point.target).original)
