"""Averages that torch-ema copies into a model whose parameters are shared. With the real library
where it is installed; the stand-in writes as torch-ema 0.3 does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import share
from torch import nn

from trims_shim.patches import torch_ema_average

SIDE = 256


class ExponentialMovingAverage:
    def __init__(self, parameters: Any, decay: float) -> None:
        self._own = list(parameters)
        self.shadow_params = [each.clone().detach() for each in self._own]
        self.collected_params: list[torch.Tensor] = []

    def _get_parameters(self, parameters: Any) -> list[nn.Parameter]:
        return self._own if parameters is None else list(parameters)

    def _write(self, values: list[torch.Tensor], parameters: Any) -> None:
        for value, parameter in zip(values, self._get_parameters(parameters), strict=True):
            parameter.data.copy_(value.data)

    def store(self, parameters: Any = None) -> None:
        self.collected_params = [each.clone() for each in self._get_parameters(parameters)]

    def copy_to(self, parameters: Any = None) -> None:
        self._write(self.shadow_params, parameters)

    def restore(self, parameters: Any = None) -> None:
        self._write(self.collected_params, parameters)


@pytest.fixture
def average_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class."""
    module = emulation.library(monkeypatch, "torch_ema.ema", ExponentialMovingAverage)
    points = *emulation.OF_LOADING, *torch_ema_average.POINTS
    with emulation.emulated(monkeypatch, *points):
        yield module.ExponentialMovingAverage


@pytest.fixture
def ours(average_of: Any, tmp_path: Path) -> nn.Linear:
    """A module on shared memory."""
    layer = nn.Linear(SIDE, SIDE)
    share(layer, tmp_path)
    return layer


WRITES: dict[str, Callable[[Any, nn.Linear], None]] = {
    "copy_to": lambda average, layer: average.copy_to(layer.parameters()),
    "restore": lambda average, layer: average.restore(layer.parameters()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_averages_for_inference(
    average_of: Any, ours: nn.Linear, write: Callable[[Any, nn.Linear], None]
) -> None:
    theirs = nn.Linear(SIDE, SIDE)
    average = average_of(theirs.parameters(), decay=0.9)
    average.store(theirs.parameters())
    write(average, ours)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_the_parameters_that_it_was_made_of(average_of: Any, ours: nn.Linear) -> None:
    average = average_of(ours.parameters(), decay=0.9)
    average.shadow_params[0].fill_(1.0)
    average.copy_to()
    assert torch.equal(ours.weight, torch.ones(SIDE, SIDE))
