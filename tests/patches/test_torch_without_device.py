"""A torch that is built for CUDA, on a machine without a GPU: PyPI's torch on most laptops.

All patches for devices are there. Loads to the CPU are served, those to a device raise torch's own
errors, and nobody asks for a driver. A torch for ROCm calls its devices ``cuda``, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import World

PROGRAM = """\
import safetensors.torch
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(512, 256), nn.BatchNorm1d(256))

def loaded(state=None, **how):
    model = net()
    model.load_state_dict(state or torch.load(PT, **how), assign=bool(how))
    return model

def total(state):
    return float(sum(tensor.double().sum() for tensor in state.values()))

def outcome(call):
    try:
        return total(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

torch.manual_seed(0)
state = net().state_dict()
torch.save(state, PT)
safetensors.torch.save_file(state, ST)
registry = torch.serialization._package_registry
kept = list(registry)
registry[:] = [(0, lambda storage: "cuda:0", kept[0][2])]
torch.save(state, FROM_CUDA)
registry[:] = kept
"""
ON_CPU = (
    "torch.load(PT)",
    "torch.load(PT, mmap=True)",
    "torch.load(FROM_CUDA, map_location='cpu')",
    "safetensors.torch.load_file(ST)",
    "safetensors.torch.load_file(ST, device='cpu')",
    "loaded().state_dict()",
    "loaded(mmap=True).state_dict()",
    "loaded(safetensors.torch.load_file(ST)).state_dict()",
    "loaded().to('cpu').half().state_dict()",
)
ON_DEVICE = (
    "torch.load(PT, map_location='cuda')",
    "torch.load(PT, map_location='cuda:1', mmap=True)",
    "torch.load(PT, map_location=torch.device('cuda'))",
    "torch.load(PT, map_location={'cpu': 'cuda:0'})",
    "torch.load(FROM_CUDA)",
    "safetensors.torch.load_file(ST, device='cuda')",
    "safetensors.torch.load_file(ST, device=0)",
    "loaded().cuda().state_dict()",
    "loaded().to('cuda').state_dict()",
    "loaded().to(0).state_dict()",
)


BUILDS = {
    "cuda": "torch.version.cuda = '13.0'\n",
    "rocm": "torch.version.cuda, torch.version.hip = None, '6.4'\n",
}


@pytest.fixture
def world() -> Iterator[World]:
    """The program switches the shim on, once torch says how it is built."""
    made = World(min_bytes="1", enabled="0")
    yield made
    made.close()


@pytest.mark.parametrize("build", BUILDS)
def test_loads_are_served_on_the_processor_and_fail_as_ever_on_devices(
    world: World, build: str
) -> None:
    names = {name: f"{world.root}/{name.lower()}" for name in ("PT", "ST", "FROM_CUDA")}
    calls = ", ".join(f"lambda: {each}" for each in (*ON_CPU, *ON_DEVICE))
    expected, found, events = world.run(
        "".join(f"{name} = {path!r}\n" for name, path in names.items())
        + PROGRAM
        + BUILDS[build]
        + f"calls = [{calls}]\n"
        + "expected = [outcome(call) for call in calls]\n"
        "trims_shim.enable()\n"
        "found = [outcome(call) for call in calls]\n"
        "used = sys.modules.get('trims_shim.memory.driver')\n"
        "assert used is None or not used._process.is_used\n"
        "say([expected, found, trims_shim.stats().events])\n",
    )
    assert found == expected
    assert [type(each) for each in found] == [float] * len(ON_CPU) + [str] * len(ON_DEVICE)
    loads = len(ON_CPU) + sum(each.startswith("loaded()") for each in ON_DEVICE)
    assert sum(events[name] for name in events if name.startswith("served:")) >= loads, events
    assert not any(name.startswith("fallback:") for name in events), events
    asked = {name for name in events if name.startswith("not_on_device:")}
    assert asked == ({"not_on_device:no_such_device"} if build == "cuda" else set())
