"""timm fills weights that are shared. With the real library where it is installed; the stand-ins
write as timm 1.0.31 does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import shared

from trims_shim.patches import timm_initializers, torch_load

SIDE = 256


def _trunc_normal_(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float
) -> torch.Tensor:
    return tensor.uniform_(-0.9, 0.9).erfinv_().mul_(std).add_(mean).clamp_(min=a, max=b)


def variance_scaling_(
    tensor: torch.Tensor, scale: float = 1.0, mode: str = "fan_in", distribution: str = "normal"
) -> None:
    tensor.normal_(std=scale)


@pytest.fixture
def initializers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module."""
    module = emulation.library(
        monkeypatch, "timm.layers.weight_init", _trunc_normal_, variance_scaling_
    )
    with emulation.emulated(monkeypatch, *torch_load.POINTS[:2], *timm_initializers.POINTS):
        yield module


FILLINGS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "truncated": lambda module, weight: module._trunc_normal_(weight, 0.0, 1.0, -2.0, 2.0),
    "normal": lambda module, weight: module.variance_scaling_(weight),
    "uniform": lambda module, weight: module.variance_scaling_(weight, distribution="uniform"),
}


@pytest.mark.parametrize("fill", FILLINGS.values(), ids=FILLINGS)
def test_what_is_filled_becomes_private(
    initializers: Any, tmp_path: Path, fill: Callable[[Any, torch.Tensor], object]
) -> None:
    theirs = torch.ones(SIDE, SIDE)
    torch.save({"weight": theirs}, tmp_path / "model.pt")
    ours = torch.load(tmp_path / "model.pt", map_location="cuda")["weight"]
    assert shared(ours)
    for weight in (theirs, ours):
        torch.manual_seed(0)
        fill(initializers, weight)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, torch.ones(SIDE, SIDE))
