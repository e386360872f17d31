"""loralib merges adapters into weights that are shared. With the real library where it is
installed; the stand-ins write as loralib 0.1.2 does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import share, shared
from torch import nn

from trims_shim.patches import loralib_merge

SIDE = 256


class _Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, r: int = 0, merge_weights: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(r, inputs))
        self.lora_B = nn.Parameter(torch.randn(outputs, r))
        self.r, self.merge_weights, self.merged = r, merge_weights, False

    def _write(self, mode: bool) -> None:
        if self.merge_weights and self.merged == mode:
            if self.r > 0:
                delta = self.lora_B @ self.lora_A
                weight = getattr(self, "conv", self).weight
                weight.data += (-delta if mode else delta).reshape(weight.shape)
            self.merged = not mode


class Embedding(_Layer):
    def train(self, mode: bool = True) -> Any:
        self._write(mode)


class Linear(_Layer):
    def train(self, mode: bool = True) -> Any:
        self._write(mode)


class MergedLinear(_Layer):
    def __init__(self, *args: Any, enable_lora: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        self._write(mode)


class ConvLoRA(_Layer):
    def train(self, mode: bool = True) -> Any:
        self._write(mode)


class Conv2d(ConvLoRA):
    def __init__(self, inputs: int, outputs: int, kernel: int, **kwargs: Any) -> None:
        super().__init__(inputs, outputs, **kwargs)
        del self.weight
        self.conv = nn.Conv2d(inputs, outputs, kernel)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module."""
    stand_ins = Embedding, Linear, MergedLinear, ConvLoRA, Conv2d
    module = emulation.library(monkeypatch, "loralib.layers", *stand_ins)
    points = *emulation.OF_LOADING, *loralib_merge.POINTS
    with emulation.emulated(monkeypatch, *points):
        yield module


def sharing(layer: Any, folder: Path) -> torch.Tensor:
    """The base weight of a layer that is put on shared memory, with adapters that change it."""
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    share(layer, folder)
    weight: torch.Tensor = getattr(layer, "conv", layer).weight
    assert shared(weight)
    return weight


LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "embedding": lambda module: module.Embedding(SIDE, SIDE, r=4),
    "linear": lambda module: module.Linear(SIDE, SIDE, r=4),
    "merged linear": lambda module: module.MergedLinear(SIDE, SIDE, r=4, enable_lora=[True]),
    "convolution": lambda module: module.Conv2d(SIDE, SIDE, 1, r=4),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_merging_for_inference(
    layers: Any, tmp_path: Path, make: Callable[[Any], nn.Module]
) -> None:
    layer = make(layers)
    weight = sharing(layer, tmp_path)
    before = weight.detach().clone()
    layer.train(False)
    assert not shared(weight)
    assert not torch.equal(weight, before)
    layer.train()
    assert torch.allclose(weight, before, atol=1e-4)


def test_merged_weights_that_were_loaded_again(layers: Any, tmp_path: Path) -> None:
    layer = layers.Linear(SIDE, SIDE, r=4)
    layer.train(False)
    weight = sharing(layer, tmp_path)
    before = weight.detach().clone()
    layer.train()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("options", [{"r": 4, "merge_weights": False}, {"r": 0}], ids=str)
def test_what_is_not_merged_stays_shared(layers: Any, tmp_path: Path, options: Any) -> None:
    layer = layers.Linear(SIDE, SIDE, **options)
    share(layer, tmp_path)
    layer.train(False)
    layer.train()
    assert shared(layer.weight)


def test_training_of_what_is_not_merged_keeps_sharing(layers: Any, tmp_path: Path) -> None:
    layer = layers.Linear(SIDE, SIDE, r=4)
    weight = sharing(layer, tmp_path)
    layer.train()
    assert shared(weight)
