"""Adapters that are shared and that peft writes in use.

With the real library where it is installed; the stand-ins do with their weights what peft 0.21
does.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import shared
from torch import nn

from trims_shim.patches import peft_adapters

SIDE = 256


class OFTRotationModule(nn.Module):
    def __init__(self, r: int, n_elements: int, *_: int, coft: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(r, n_elements))
        self.coft = coft
        self.eps = 6e-5

    def _project_batch(self, Q: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        return Q * eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.coft:
            with torch.no_grad():
                self.weight.copy_(self._project_batch(self.weight, eps=self.eps))
        return x + self.weight.sum()


class ArrowLoraLinearLayer(nn.Module):
    def __init__(self, in_features: int, arrow_config: Any) -> None:
        super().__init__()
        self.use_gks = arrow_config.use_gks
        self.gks_adapter_names = arrow_config.gks_adapter_names
        self.task_adapter_names = arrow_config.task_adapter_names
        self.gks_added_adapter_names: list[str] = []
        self.gks_done = False

    @torch.no_grad()
    def gen_know_sub(self, lora_A: Any, lora_B: Any) -> None:
        if not self.use_gks or (self.gks_done and not self.gks_added_adapter_names):
            return
        for each in (lora_A, lora_B):
            mean = torch.stack([each[name].weight for name in self.gks_adapter_names]).mean(0)
            for name in self.gks_added_adapter_names or self.task_adapter_names:
                each[name].weight.data.sub_(mean)
        self.gks_done = True
        self.gks_added_adapter_names = []


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The two classes, and the devices."""
    kinds = {
        "peft.tuners.oft.layer": OFTRotationModule,
        "peft.tuners.lora.arrow": ArrowLoraLinearLayer,
    }
    found = types.SimpleNamespace()
    for name, stand_in in kinds.items():
        module = emulation.library(monkeypatch, name, stand_in)
        vars(found)[stand_in.__name__] = vars(module)[stand_in.__name__]
    points = *emulation.OF_LOADING, *peft_adapters.POINTS
    with emulation.emulated(monkeypatch, *points) as devices:
        found.devices = devices
        yield found


def share(module: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Put a module on shared memory; return what it has."""
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    torch.save(module.state_dict(), path)
    module.load_state_dict(torch.load(path, map_location="cuda"))
    assert all(shared(each) for each in module.parameters())
    return before


@pytest.mark.parametrize("coft", [True, False])
def test_rotations_that_are_projected(peft: Any, tmp_path: Path, coft: bool) -> None:
    ours, theirs = (
        peft.OFTRotationModule(64, 496, 32, 2048, coft=coft).eval().requires_grad_(False)
        for _ in range(2)
    )
    with torch.no_grad():
        ours.weight.normal_()
    before = share(ours, tmp_path / "adapter.pt")
    theirs.load_state_dict(before, strict=False)
    x = torch.randn(2, 2048)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.weight, before["weight"]) is not coft
    assert shared(ours.weight) is not coft


@pytest.mark.parametrize("use_gks", [True, False])
def test_general_knowledge_that_is_subtracted(peft: Any, tmp_path: Path, use_gks: bool) -> None:
    config = types.SimpleNamespace(
        use_gks=use_gks,
        gks_adapter_names=["general"],
        task_adapter_names=["task"],
        top_k=1,
        router_temperature=1.0,
        rng_seed=None,
    )
    arrow = peft.ArrowLoraLinearLayer(in_features=SIDE, arrow_config=config)
    names = "general", "task", "added"
    pairs = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(SIDE, SIDE, bias=False) for name in names}) for _ in "AB"
    )
    before = share(pairs, tmp_path / "adapters.pt")
    arrow.gen_know_sub(*pairs)
    assert any(shared(each) for each in pairs.parameters()) is not use_gks
    arrow.gks_added_adapter_names = ["added"]
    share(pairs, tmp_path / "adapters.pt")
    arrow.gen_know_sub(*pairs)
    for layer in "01":
        for name in names[1:]:
            mean = before[f"{layer}.general.weight"]
            expected = before[f"{layer}.{name}.weight"] - (mean if use_gks else 0)
            assert torch.equal(pairs.get_parameter(f"{layer}.{name}.weight"), expected)
        assert torch.equal(pairs.get_parameter(f"{layer}.general.weight"), mean)
    share(pairs, tmp_path / "adapters.pt")
    arrow.gen_know_sub(*pairs)
    assert all(shared(each) for each in pairs.parameters()), "done: nothing is written again"
