"""Merging adapters into weights that are shared. With the real library where it is installed; the
stand-in does with the base weight what peft 0.21 does."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import devices as emulation
import pytest
import torch
from devices import Devices, shared
from torch import nn

from trims_shim.patches import peft_merge, torch_load, torch_module

SIDE = 256


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
            self.merge_adapter()
        return self.base


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    devices = Devices()
    emulation.prepare(monkeypatch, devices, min_bytes="1", strict="1")
    module = types.ModuleType("peft.tuners.tuners_utils")
    module.BaseTuner = BaseTuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    undo = emulation.apply(*torch_load.POINTS[:2], *torch_module.POINTS, *peft_merge.POINTS)
    yield devices
    undo()
    devices.assert_untouched()


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


@pytest.mark.parametrize("call", [(), (True,), (True, False)], ids=str)
def test_merge_and_unload(tuner: BaseTuner, call: Any) -> None:
    before = tuner.base.weight.detach().clone()
    assert tuner._unload_and_optionally_merge(*call) is tuner.base
    assert torch.equal(tuner.base.weight, before + 1)


def test_unloading_without_merging_keeps_sharing(tuner: BaseTuner) -> None:
    tuner._unload_and_optionally_merge(merge=False)
    assert shared(tuner.base.weight)


def test_the_real_library_has_these_methods() -> None:
    utilities = pytest.importorskip("peft.tuners.tuners_utils")
    for point in peft_merge.POINTS:
        assert hasattr(utilities.BaseTuner, point.target.rpartition(".")[2])
