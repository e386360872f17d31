"""Averages that Lightning's callbacks copy into a model whose weights are shared. With the real
library where it is installed; the stand-ins write as Lightning 2.6.6 does."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import share, shared
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trims_shim.patches import lightning_average, pytorch_lightning_average

SIDE = 256


class WeightAveraging:
    def __init__(self) -> None:
        self._average_model: Any = None

    def _swap_models(self, pl_module: nn.Module) -> None:
        own = self._average_model.module.parameters()
        for average, current in zip(own, pl_module.parameters(), strict=True):
            before = average.data.clone()
            average.data.copy_(current.data)
            current.data.copy_(before)

    def _copy_average_to_current(self, pl_module: nn.Module) -> None:
        own = self._average_model.module.parameters()
        for average, current in zip(own, pl_module.parameters(), strict=True):
            current.data.copy_(average.data)


class StochasticWeightAveraging:
    @staticmethod
    def transfer_weights(src_pl_module: nn.Module, dst_pl_module: nn.Module) -> None:
        for source, target in zip(
            src_pl_module.parameters(), dst_pl_module.parameters(), strict=True
        ):
            target.detach().copy_(source)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def callbacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Both classes."""
    folder = f"{request.param}.callbacks"
    plain = emulation.library(monkeypatch, f"{folder}.weight_averaging", WeightAveraging)
    stochastic = emulation.library(
        monkeypatch, f"{folder}.stochastic_weight_avg", StochasticWeightAveraging
    )
    is_new = request.param == "lightning.pytorch"
    points = (lightning_average if is_new else pytorch_lightning_average).POINTS
    with emulation.emulated(monkeypatch, *emulation.OF_LOADING, *points):
        yield types.SimpleNamespace(
            plain=plain.WeightAveraging, stochastic=stochastic.StochasticWeightAveraging
        )


@pytest.fixture
def backbone(callbacks: Any, tmp_path: Path) -> nn.Linear:
    """A frozen module on shared memory."""
    module = nn.Linear(SIDE, SIDE).requires_grad_(False)
    share(module, tmp_path)
    return module


def averaging(callbacks: Any, module: nn.Module) -> Any:
    callback = callbacks.plain()
    callback._average_model = AveragedModel(module)
    with torch.no_grad():
        callback._average_model.module.weight.fill_(2.0)
    return callback


def test_a_validation_of_the_average(callbacks: Any, backbone: nn.Linear) -> None:
    before = backbone.weight.clone()
    callback = averaging(callbacks, backbone)
    callback._swap_models(backbone)
    assert backbone.weight.unique().tolist() == [2.0]
    assert not shared(backbone.weight)
    callback._swap_models(backbone)
    assert torch.equal(backbone.weight, before)


def test_averages_after_the_training(callbacks: Any, backbone: nn.Linear) -> None:
    averaging(callbacks, backbone)._copy_average_to_current(backbone)
    assert backbone.weight.unique().tolist() == [2.0]


def test_stochastic_averages_after_the_training(callbacks: Any, backbone: nn.Linear) -> None:
    average = nn.Linear(SIDE, SIDE)
    callbacks.stochastic.transfer_weights(average, backbone)
    assert torch.equal(backbone.weight, average.weight)
