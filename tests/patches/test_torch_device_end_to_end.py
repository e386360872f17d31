"""Unmodified torch code in several processes, a real daemon, one emulated GPU.

The code of the programs is what users write. Device memory is mapped as on a GPU: read-only, so
that a write ends the process. Only torch's notion of the device is replaced: tensors on it are CPU
tensors over its memory.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from devices import BOTH_WAYS
from emulated_cuda import Emulated
from harness import World

pytestmark = pytest.mark.slow

MIB = 1 << 20
WEIGHT_BYTES = 1024 * 1024 * 4

PROGRAM = """\
import os
import torch
from torch import nn
from trims_shim.client import device_arenas
from trims_shim.errors import NotServed
from trims_shim.patches import torch_device, torch_modes

class Emulated(torch_device.CudaRuntime):
    def is_built(self):
        return True
    def index(self, device):
        if device.type != "cuda":
            raise NotServed("device", str(device))
        return device.index or 0
    def device(self, index):
        return torch.device("cpu")
    def ready(self, index):
        pass
    def settle(self, device):
        pass
    def storage(self, address, size_bytes, index):
        return torch_device._storage_over(address, torch.device("cpu"), size_bytes)

class Hidden:
    def __get__(self, instance, owner):
        raise AttributeError

if "WITHOUT_SWAP" in os.environ:
    torch.UntypedStorage._swap_data_ptr_ = Hidden()
torch_device.runtime = Emulated()
trims_shim.enable()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 1024)
        self.norm = nn.BatchNorm1d(1024)
    def forward(self, x):
        return self.norm(self.first(x))

def where(tensor):
    return "device" if torch_device.find(tensor) else "here"
"""


@dataclass(frozen=True)
class Saved:
    """A file of a Net's state, and what the Net makes of ``torch.ones`` without the shim."""

    path: str
    result: float


@pytest.fixture(scope="module")
def saved() -> Iterator[Saved]:
    world = World(enabled="0")
    path = f"{world.root}/model.pt"
    result = world.run(
        PROGRAM
        + "torch.manual_seed(0)\n"
        + f"torch.save(Net().state_dict(), {path!r})\n"
        + f"net = Net(); net.load_state_dict(torch.load({path!r})); net.eval()\n"
        + "say(float(net(torch.ones(2, 1024)).double().sum()))\n"
    )
    yield Saved(path, result)
    world.close()


@pytest.fixture
def path(saved: Saved) -> str:
    return saved.path


@pytest.fixture
def world(emulated_environment: dict[str, str]) -> Iterator[World]:
    world = World(device_headroom_bytes="0", enabled="0", min_bytes="1", uploader_idle="1")
    world.variables = dict(emulated_environment)
    yield world
    world.close()


@pytest.fixture(params=BOTH_WAYS)
def either_world(world: World, request: pytest.FixtureRequest) -> World:
    """For tests in which tensors that exist are put on other memory."""
    if not request.param:
        world.variables["WITHOUT_SWAP"] = "1"
    return world


@pytest.fixture
def machine(emulated_environment: dict[str, str]) -> Emulated:
    return Emulated.of(emulated_environment)


def test_processes_share_one_copy(either_world: World, machine: Emulated, saved: Saved) -> None:
    world, path = either_world, saved.path
    world.start()
    script = (
        PROGRAM
        + f"state = torch.load({path!r}, map_location='cuda:0')\n"
        + "net = Net(); net.load_state_dict(state); net.eval()\n"
        + "del state\n"
        + "say([where(net.first.weight), where(net.norm.running_mean)])\n"
        + "while True:\n"
        + "    hear(); say(float(net(torch.ones(2, 1024)).double().sum()))\n"
    )
    children = [world.spawn(script) for _ in range(3)]
    assert [child.hear(60) for child in children] == [["device", "here"]] * 3
    assert WEIGHT_BYTES <= machine.used_bytes(0) < 2 * WEIGHT_BYTES + 4 * MIB
    results = []
    for child in children:
        child.say()
        results.append(child.hear())
    assert results == [saved.result] * 3


def test_a_write_ends_its_process_alone(world: World, machine: Emulated, path: str) -> None:
    world.start()
    script = (
        PROGRAM
        + f"state = torch.load({path!r}, map_location='cuda')\n"
        + "say(float(state['first.weight'].sum()))\n"
        + "if hear():\n"
        + "    faulthandler.disable(); state['first.weight'].add_(1)\n"
        + "say(float(state['first.weight'].sum()))\n"
        + "hear()\n"
    )
    writer, reader = world.spawn(script), world.spawn(script)
    values = [writer.hear(60), reader.hear(60)]
    assert values[0] == values[1]
    writer.say(True)
    assert writer.wait() == -signal.SIGSEGV
    reader.say(False)
    assert reader.hear() == values[1]
    assert world.run(PROGRAM + f"say(where(torch.load({path!r}, map_location='cuda')"
                     "['first.weight']))") == "device"  # fmt: skip


def test_training_and_the_other_seams_write_private_memory(either_world: World, path: str) -> None:
    world = either_world
    world.start()
    said = world.run(
        PROGRAM
        + f"net = Net(); net.load_state_dict(torch.load({path!r}, map_location='cuda'))\n"
        + "before = where(net.first.weight)\n"
        + "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        + "for _ in range(2):\n"
        + "    net(torch.randn(4, 1024)).square().mean().backward(); optimizer.step()\n"
        + f"net.load_state_dict(torch.load({path!r}, map_location='cuda'))\n"
        + f"other = Net(); other.load_state_dict(torch.load({path!r}, map_location='cuda'))\n"
        + "nn.init.zeros_(other.first.weight)\n"
        + "other.load_state_dict(net.state_dict())\n"
        + "third = Net()\n"
        + f"third.load_state_dict(torch.load({path!r}, map_location='cuda'), assign=True)\n"
        + "third.load_state_dict(net.state_dict())\n"
        + "third.train()(torch.randn(4, 1024))\n"
        + "say([before, where(net.first.weight), where(other.first.weight)])\n"
    )
    assert said == ["device", "here", "here"]


def test_a_loop_of_loads_leaves_nothing(either_world: World, machine: Emulated, path: str) -> None:
    world = either_world
    world.start()
    said = world.run(
        PROGRAM
        + "def mapped():\n"
        + "    with open('/proc/self/maps') as maps: return len(maps.readlines())\n"
        + "counts = []\n"
        + "for _ in range(30):\n"
        + f"    net = Net(); net.load_state_dict(torch.load({path!r}, map_location='cuda'))\n"
        + "    assert where(net.first.weight) == 'device'\n"
        + "    del net\n"
        + "    counts.append(mapped())\n"
        + "device_arenas.reap()\n"
        + "say(counts)\n"
    )
    assert max(said[10:]) - min(said[10:]) < 20, said
    assert machine.used_bytes(0) < 2 * WEIGHT_BYTES + 4 * MIB


COPIES = """\
class ToCuda(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and str(args[1]).startswith("cuda"):
            return args[0].clone()
        return func(*args, **(kwargs or {}))
torch_modes.passive_modes.add(ToCuda)
"""


def test_a_module_moves_onto_the_image_of_its_host_memory(
    either_world: World, machine: Emulated, path: str
) -> None:
    world = either_world
    world.start()
    said = world.run(
        PROGRAM
        + COPIES
        + f"net = Net(); net.load_state_dict(torch.load({path!r}))\n"
        + "expected = net.first.weight.clone()\n"
        + "with ToCuda(): net.to('cuda')\n"
        + "assert torch.equal(net.first.weight, expected)\n"
        + f"state = torch.load({path!r}, map_location='cuda')\n"
        + "same = state['first.weight'].data_ptr() == net.first.weight.data_ptr()\n"
        + "say([where(net.first.weight), where(net.norm.running_mean), same])\n"
    )
    assert said == ["device", "here", True]
    assert machine.used_bytes(0) < 2 * WEIGHT_BYTES + 4 * MIB
    on_device = [image for image in world.status().images if image.tier != "host"]
    assert len(on_device) == 1


def test_safetensors(either_world: World, machine: Emulated) -> None:
    world = either_world
    world.start()
    path = f"{world.root}/model.safetensors"
    said = world.run(
        PROGRAM
        + "import safetensors.torch\n"
        + "from safetensors import safe_open\n"
        + f"safetensors.torch.save_file(Net().state_dict(), {path!r})\n"
        + f"state = safetensors.torch.load_file({path!r}, device='cuda')\n"
        + f"plain = safetensors.torch.load_file({path!r})\n"
        + "equal = all(torch.equal(state[key], plain[key]) for key in plain)\n"
        + f"with safe_open({path!r}, 'pt', device='cuda:0') as file:\n"
        + "    view = file.get_slice('first.weight')[512:]\n"
        + "equal = equal and torch.equal(view, plain['first.weight'][512:])\n"
        + "net = Net()\n"
        + f"safetensors.torch.load_model(net, {path!r}, device='cuda')\n"
        + "say([equal, where(state['first.weight']), where(view), where(net.first.weight)])\n"
    )
    assert said == [True, "device", "device", "device"]
    assert machine.used_bytes(0) < 2 * WEIGHT_BYTES + 4 * MIB


def test_a_forked_child_forgets(world: World, path: str) -> None:
    world.start()
    said = world.run(
        PROGRAM
        + "import gc\n"
        + f"state = torch.load({path!r}, map_location='cuda')\n"
        + "before = float(state['first.weight'].sum())\n"
        + "child = os.fork()\n"
        + "if child == 0:\n"
        + "    del state; gc.collect()\n"
        + "    nn.init.zeros_(torch.empty(3)); torch.optim.SGD([torch.zeros(3)], lr=0.1)\n"
        + "    os._exit(0 if not torch_device.is_any_shared() else 1)\n"
        + "status = os.waitpid(child, 0)[1]\n"
        + "again = torch.load("
        + repr(path)
        + ", map_location='cuda')\n"
        + "same = again['first.weight'].data_ptr() == state['first.weight'].data_ptr()\n"
        + "say([status, float(state['first.weight'].sum()) == before, same])\n"
    )
    assert said == [0, True, True]
    (image,) = [image for image in world.status().images if image.tier != "host"]
    assert image.leases == 0
