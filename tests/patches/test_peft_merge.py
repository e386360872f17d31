"""Merging adapters into weights that are shared. With the real library where it is installed; the
stand-in does with the base weight what peft 0.21 does."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import Devices, shared
from torch import nn

from trims_shim.patches import peft_hotswap, peft_merge, points, torch_load, torch_module

SIDE = 256


def check_adapters_to_merge(module: Any, adapter_names: Any = None) -> list[str]:
    return adapter_names or ["default"]


class LoraLayer(nn.Module):
    """As peft's ``lora.Linear``, with adapters of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ParameterDict({"default": torch.ones(8, SIDE)})
        self.merged_adapters: list[str] = []

    def merge(self, safe_merge: bool = False, adapter_names: Any = None) -> None:
        # Looked up in the layer's own module, which imported it by name.
        layers = sys.modules["peft.tuners.lora.layer"]
        for name in layers.check_adapters_to_merge(self, adapter_names):
            self.base_layer.weight.data += 1.0
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self.merged_adapters.pop()
            self.base_layer.weight.data -= 1.0

    def olora_init(self, adapter_name: str) -> None:
        weight = self.base_layer.weight.to(torch.float32)
        weight.data -= 1.0


def hotswap_adapter_from_state_dict(
    model: nn.Module, state_dict: Any, adapter_name: str, config: Any = None
) -> None:
    for name, value in state_dict.items():
        model.get_parameter(name).data.copy_(value)


class BaseTuner(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def merge_adapter(self, adapter_names: Any = None, safe_merge: bool = False) -> None:
        self.base.weight.data += 1.0

    def unmerge_adapter(self) -> None:
        self.base.weight.data -= 1.0

    def _unload_and_optionally_merge(self, merge: bool = True, progressbar: bool = True) -> Any:
        if merge:
            self.base.weight.data += 1.0
        return self.base


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    check = check_adapters_to_merge
    for name, content in (
        ("tuners.tuners_utils", {"BaseTuner": BaseTuner, check.__name__: check}),
        ("tuners.lora.layer", {"LoraLayer": LoraLayer, check.__name__: check}),
        (
            "utils.hotswap",
            {hotswap_adapter_from_state_dict.__name__: hotswap_adapter_from_state_dict},
        ),
    ):
        module = types.ModuleType(f"peft.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    points = (
        *torch_load.POINTS[:2],
        *torch_module.POINTS[:1],
        *peft_merge.POINTS,
        *peft_hotswap.POINTS,
    )
    with emulation.emulated(monkeypatch, *points) as devices:
        yield devices


@pytest.fixture
def tuner(devices: Devices, tmp_path: Any) -> BaseTuner:
    base = nn.Linear(SIDE, SIDE, bias=False)
    torch.save(base.state_dict(), tmp_path / "base.pt")
    base.load_state_dict(torch.load(tmp_path / "base.pt", map_location="cuda"))
    assert shared(base.weight)
    return BaseTuner(base)


def test_merge_and_unmerge(tuner: BaseTuner) -> None:
    before = tuner.base.weight.detach().clone()
    tuner.merge_adapter(safe_merge=False)
    assert torch.equal(tuner.base.weight, before + 1)
    assert not shared(tuner.base.weight)
    tuner.unmerge_adapter()
    assert torch.allclose(tuner.base.weight, before, atol=1e-6)


def test_unmerging_of_merged_weights_that_were_loaded_again(
    tuner: BaseTuner, tmp_path: Path
) -> None:
    before = tuner.base.weight.detach().clone()
    tuner.merge_adapter()
    torch.save(tuner.base.state_dict(), tmp_path / "merged.pt")
    tuner.base.load_state_dict(torch.load(tmp_path / "merged.pt", map_location="cuda"))
    assert shared(tuner.base.weight)
    tuner.unmerge_adapter()
    assert torch.allclose(tuner.base.weight, before, atol=1e-6)


@pytest.mark.parametrize("call", [(), (True,), (True, False)], ids=str)
def test_merge_and_unload(tuner: BaseTuner, call: Any) -> None:
    before = tuner.base.weight.detach().clone()
    assert tuner._unload_and_optionally_merge(*call) is tuner.base
    assert torch.equal(tuner.base.weight, before + 1)


def test_unloading_without_merging_keeps_sharing(tuner: BaseTuner) -> None:
    tuner._unload_and_optionally_merge(merge=False)
    assert shared(tuner.base.weight)


@pytest.fixture
def layer(devices: Devices, tmp_path: Any) -> LoraLayer:
    layer = LoraLayer(nn.Linear(SIDE, SIDE, bias=False))
    layer.lora_A["default"] = nn.Parameter(torch.randn(SIDE, SIDE))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    layer.load_state_dict(torch.load(tmp_path / "layer.pt", map_location="cuda"))
    assert all(shared(each) for each in layer.parameters())
    return layer


def test_merge_of_a_single_layer(layer: LoraLayer) -> None:
    """As diffusers' ``fuse_lora`` does."""
    before = layer.base_layer.weight.detach().clone()
    layer.merge(adapter_names=["default"])
    assert torch.equal(layer.base_layer.weight, before + 1)


@pytest.mark.parametrize("assign", [False, True])
def test_unmerging_of_a_single_layer_that_was_loaded_again(
    layer: LoraLayer, tmp_path: Path, assign: bool
) -> None:
    """As diffusers' ``unfuse_lora`` does."""
    layer.merge(adapter_names=["default"])
    merged = layer.base_layer.weight.detach().clone()
    torch.save(layer.state_dict(), tmp_path / "merged.pt")
    layer.load_state_dict(torch.load(tmp_path / "merged.pt", map_location="cuda"), assign=assign)
    assert torch.equal(layer.base_layer.weight, merged)
    layer.unmerge()
    assert torch.equal(layer.base_layer.weight, merged - 1)


def test_what_is_unmerged_is_shared_when_it_is_loaded_again(
    layer: LoraLayer, tmp_path: Path
) -> None:
    layer.merge(adapter_names=["default"])
    layer.unmerge()
    layer.load_state_dict(torch.load(tmp_path / "layer.pt", map_location="cuda"))
    assert shared(layer.base_layer.weight)


def test_olora_takes_its_adapter_out_of_the_base_weight(layer: LoraLayer) -> None:
    before = layer.base_layer.weight.detach().clone()
    layer.olora_init("default")
    assert torch.equal(layer.base_layer.weight, before - 1)


def test_adapters_that_are_swapped(layer: LoraLayer) -> None:
    other = torch.randn(SIDE, SIDE)
    sys.modules["peft.utils.hotswap"].hotswap_adapter_from_state_dict(
        layer, {"lora_A.default": other}, "default"
    )
    assert torch.equal(layer.lora_A["default"], other)
    assert shared(layer.base_layer.weight)


def test_the_real_library_has_these_methods() -> None:
    pytest.importorskip("peft.tuners.tuners_utils")
    pytest.importorskip("peft.utils.hotswap")
    for point in (*peft_merge.POINTS, *peft_hotswap.POINTS):
        assert callable(points.resolve(point.target).original)
