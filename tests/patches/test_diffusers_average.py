"""Averages that diffusers copies into a model whose parameters are shared. With the real library
where it is installed; the stand-in writes as diffusers 0.42 does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import share
from torch import nn

from trims_shim.patches import diffusers_average

SIDE = 256


class EMAModel:
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shadow_params = [each.clone().detach() for each in parameters]
        self.temp_stored_params: list[torch.Tensor] = []

    def store(self, parameters: Iterable[nn.Parameter]) -> None:
        self.temp_stored_params = [each.detach().cpu().clone() for each in parameters]

    def copy_to(self, parameters: Iterable[nn.Parameter]) -> None:
        for average, parameter in zip(self.shadow_params, list(parameters), strict=True):
            parameter.data.copy_(average.data)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        for stored, parameter in zip(self.temp_stored_params, parameters, strict=True):
            parameter.data.copy_(stored.data)


@pytest.fixture
def average_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class."""
    module = emulation.library(monkeypatch, "diffusers.training_utils", EMAModel)
    points = *emulation.OF_LOADING, *diffusers_average.POINTS
    with emulation.emulated(monkeypatch, *points):
        yield module.EMAModel


@pytest.fixture
def ours(average_of: Any, tmp_path: Path) -> nn.Linear:
    """A module on shared memory."""
    layer = nn.Linear(SIDE, SIDE)
    share(layer, tmp_path)
    return layer


def test_averages_for_inference(average_of: Any, ours: nn.Linear) -> None:
    theirs = nn.Linear(SIDE, SIDE)
    average_of(theirs.parameters()).copy_to(ours.parameters())
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_weights_that_are_restored(average_of: Any, ours: nn.Linear) -> None:
    theirs = nn.Linear(SIDE, SIDE)
    average = average_of(theirs.parameters())
    average.store(theirs.parameters())
    average.restore(ours.parameters())
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
