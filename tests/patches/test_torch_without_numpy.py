"""A torch without numpy, which ``pip install torch`` does not bring along: loads need none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import safetensors.torch
from harness import World
from torch import nn

PROGRAM = """\
sys.modules["numpy"] = None  # as if it were not installed
import safetensors.torch
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(512, 256), nn.BatchNorm1d(256))

def loaded(state):
    model = net()
    model.load_state_dict(state)
    return model.half().state_dict()

def from_safetensors():
    model = net()
    safetensors.torch.load_model(model, ST)
    return model.state_dict()

def part():
    with safetensors.safe_open(ST, "pt") as file:
        return {"part": file.get_slice("0.weight")[3:70]}

def total(state):
    return float(sum(tensor.double().sum() for tensor in state.values()))

torch.manual_seed(0)
model = net()
torch.save(model.state_dict(), PT)
torch.save(model, MODULE)
torch.jit.script(model).save(SCRIPT)
"""
CALLS = (
    "torch.load(PT)",
    "torch.load(PT, mmap=True)",
    "torch.load(PT, weights_only=False, map_location='cpu')",
    "torch.load(MODULE, weights_only=False).state_dict()",
    "torch.jit.load(SCRIPT).state_dict()",
    "safetensors.torch.load_file(ST)",
    "part()",
    "from_safetensors()",
    "loaded(torch.load(PT))",
    "loaded(torch.load(PT, mmap=True))",
)


@pytest.fixture
def world() -> Iterator[World]:
    """The program switches the shim on after it has loaded all without."""
    made = World(min_bytes="1", enabled="0", strict="1")
    yield made
    made.close()


def test_loads_are_served(world: World) -> None:
    """Found: ``torch.load(mmap=True)`` was not, with a warning."""
    names = {name: f"{world.root}/{name}" for name in ("PT", "ST", "MODULE", "SCRIPT")}
    net = nn.Sequential(nn.Linear(512, 256), nn.BatchNorm1d(256))
    safetensors.torch.save_file(net.state_dict(), names["ST"])  # numpy is needed for that
    calls = ", ".join(f"lambda: total({each})" for each in CALLS)
    expected, found, events = world.run(
        "".join(f"{name} = {path!r}\n" for name, path in names.items())
        + PROGRAM
        + f"calls = [{calls}]\n"
        "expected = [call() for call in calls]\n"
        "trims_shim.enable()\n"
        "found = [call() for call in calls]\n"
        "say([expected, found, trims_shim.stats().events])\n",
    )
    assert found == expected
    assert not any(name.startswith("fallback:") for name in events), events
    assert sum(events[name] for name in events if name.startswith("served:")) >= len(CALLS), events
