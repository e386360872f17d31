"""torch.distributed.checkpoint loads into parameters that are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from devices import Devices, events, shared
from torch import nn

from trims_shim.patches import torch_checkpoint

SIDE = 256

pytestmark = pytest.mark.filterwarnings(
    # torch says so of each load and save of a single process
    "ignore:torch.distributed is .*unavailable or uninitialized",
    # torch 2.6 uses it itself
    "ignore:TypedStorage is deprecated",
)


@pytest.fixture(params=emulation.BOTH_WAYS)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Devices]:
    emulation.let_swap(monkeypatch, request.param)
    with emulation.emulated(
        monkeypatch, *emulation.OF_LOADING, *torch_checkpoint.POINTS
    ) as devices:
        yield devices


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.second = nn.Linear(SIDE, SIDE, bias=False)


@pytest.fixture
def sharing(devices: Devices, tmp_path: Path) -> Net:
    """A module on shared memory."""
    net = Net()
    torch.save(net.state_dict(), tmp_path / "model.pt")
    net.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cuda"))
    assert shared(net.first.weight)
    assert shared(net.second.weight)
    return net


STATES: dict[str, Any] = {
    "flat": lambda net: net.state_dict(),
    "nested": lambda net: {"model": net.state_dict(), "step": 3},
    "a module": lambda net: {"model": net},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_load_into_parameters(sharing: Net, tmp_path: Path, state: Any) -> None:
    tuned = Net()
    checkpoint.save(state(tuned), checkpoint_id=tmp_path / "tuned")
    checkpoint.load(state(sharing), checkpoint_id=tmp_path / "tuned")
    for ours, theirs in zip(sharing.parameters(), tuned.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert events("unshared:checkpoint") == 2


def test_what_is_not_loaded_stays_shared(sharing: Net, tmp_path: Path) -> None:
    tuned = nn.Linear(SIDE, SIDE)
    checkpoint.save(tuned.state_dict(), checkpoint_id=tmp_path / "tuned")
    checkpoint.load(sharing.first.state_dict(), checkpoint_id=tmp_path / "tuned")
    assert torch.equal(sharing.first.weight, tuned.weight)
    assert shared(sharing.second.weight)
