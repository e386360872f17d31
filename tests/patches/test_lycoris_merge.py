"""lycoris merges adapters into weights that are shared. The stand-in writes as lycoris-lora 4.1.3
does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import devices as emulation
import pytest
import torch
from devices import share
from torch import nn

from trims_shim.patches import lycoris_merge, points

SIDE = 256


class LycorisBaseModule(nn.Module):
    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.org_module = [original]

    def _write(self, value: torch.Tensor) -> None:
        self.org_module[0].weight.data.copy_(value)

    def merge_to(self, multiplier: float = 1.0, *, precise: bool = False) -> None:
        self._write(self.org_module[0].weight + multiplier)

    def onfly_merge(self, multiplier: float = 1.0) -> None:
        self.cached_org_weight = self.org_module[0].weight.detach().clone()
        self._write(self.org_module[0].weight + multiplier)

    def onfly_restore(self) -> None:
        self._write(self.cached_org_weight)


class FullModule(nn.Module):
    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.org_module = [original]
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))
        self.bias = nn.Parameter(torch.zeros(SIDE))

    def apply_to(self) -> None:
        self.weight.data.add_(self.org_module[0].weight.data)
        self.bias.data.add_(self.org_module[0].bias.data)


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[nn.Linear]:
    """A module on shared memory."""
    emulation.stand_in(monkeypatch, "lycoris.modules.base", LycorisBaseModule)
    emulation.stand_in(monkeypatch, "lycoris.modules.full", FullModule)
    wanted = *emulation.OF_LOADING, *lycoris_merge.POINTS
    with emulation.emulated(monkeypatch, *wanted):
        layer = nn.Linear(SIDE, SIDE)
        share(layer, tmp_path)
        yield layer


def test_merging_for_good(layer: nn.Linear) -> None:
    before = layer.weight.detach().clone()
    LycorisBaseModule(layer).merge_to(2.0, precise=True)
    assert torch.equal(layer.weight, before + 2)


def test_merging_for_a_while(layer: nn.Linear, tmp_path: Path) -> None:
    before = layer.weight.detach().clone()
    adapter = LycorisBaseModule(layer)
    adapter.onfly_merge()
    assert torch.equal(layer.weight, before + 1)
    share(layer, tmp_path)
    adapter.onfly_restore()
    assert torch.equal(layer.weight, before)


def test_a_full_matrix_that_is_applied(layer: nn.Linear, tmp_path: Path) -> None:
    adapter = FullModule(layer)
    nn.init.ones_(adapter.weight)
    share(adapter, tmp_path)
    adapter.apply_to()
    assert torch.equal(adapter.weight, layer.weight + 1)


def test_the_real_library_has_these_methods() -> None:
    pytest.importorskip("lycoris.modules.base")
    for point in lycoris_merge.POINTS:
        assert callable(points.resolve(point.target).original)
