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

# What torch does without a device: there is none, so a copy stands for what it would move.
TO_CUDA = """
class ToCuda(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and str(args[1]).startswith("cuda"):
            return args[0].clone()
        return func(*args, **(kwargs or {}))
torch_modes.passive_modes.add(ToCuda)
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


@pytest.fixture
def machine(emulated_environment: dict[str, str]) -> Emulated:
    return Emulated.of(emulated_environment)


def test_processes_share_one_copy(world: World, machine: Emulated, saved: Saved) -> None:
    path = saved.path
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
    children = [world.spawn(script) for _ in range(2)]
    assert [child.hear(60) for child in children] == [["device", "here"]] * 2
    assert WEIGHT_BYTES <= machine.used_bytes(0) < 2 * WEIGHT_BYTES + 4 * MIB
    results = []
    for child in children:
        child.say()
        results.append(child.hear())
    assert results == [saved.result] * 2


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


# One program that does one thing after the other: nearly all of its time are its imports.
SCENES = """
import gc
import safetensors.torch
from safetensors import safe_open

def load():
    return torch.load(PATH, map_location="cuda")

def loaded():
    net = Net(); net.load_state_dict(load())
    return net

def move():
    net = Net(); net.load_state_dict(torch.load(PATH))
    expected = net.first.weight.clone()
    with ToCuda(): net.to("cuda")
    assert torch.equal(net.first.weight, expected)
    same = load()["first.weight"].data_ptr() == net.first.weight.data_ptr()
    return [where(net.first.weight), where(net.norm.running_mean), same]

def loop():
    counts = []
    for _ in range(30):
        net = loaded()
        assert where(net.first.weight) == "device"
        del net
        with open("/proc/self/maps") as maps: counts.append(len(maps.readlines()))
    return counts

def fork():
    state = load()
    before = float(state["first.weight"].sum())
    child = os.fork()
    if child == 0:
        del state; gc.collect()
        nn.init.zeros_(torch.empty(3)); torch.optim.SGD([torch.zeros(3)], lr=0.1)
        os._exit(0 if not torch_device.is_any_shared() else 1)
    status = os.waitpid(child, 0)[1]
    same = load()["first.weight"].data_ptr() == state["first.weight"].data_ptr()
    return [status, float(state["first.weight"].sum()) == before, same]

def train():
    net = loaded()
    before = where(net.first.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(4, 1024)).square().mean().backward(); optimizer.step()
    net.load_state_dict(load())
    other = loaded()
    nn.init.zeros_(other.first.weight)
    other.load_state_dict(net.state_dict())
    third = Net()
    third.load_state_dict(load(), assign=True)
    third.load_state_dict(net.state_dict())
    third.train()(torch.randn(4, 1024))
    return [before, where(net.first.weight), where(other.first.weight)]

def answer():
    return float(loaded().eval()(torch.ones(2, 1024)).double().sum())

def other_format():
    path = os.path.join(os.path.dirname(os.environ["TRIMS_SOCKET_DIR"]), "model.safetensors")
    safetensors.torch.save_file(Net().state_dict(), path)
    state = safetensors.torch.load_file(path, device="cuda")
    plain = safetensors.torch.load_file(path)
    equal = all(torch.equal(state[key], plain[key]) for key in plain)
    with safe_open(path, "pt", device="cuda:0") as file:
        view = file.get_slice("first.weight")[512:]
    equal = equal and torch.equal(view, plain["first.weight"][512:])
    net = Net()
    safetensors.torch.load_model(net, path, device="cuda")
    return [equal, where(state["first.weight"]), where(view), where(net.first.weight)]

while scene := hear():
    said = globals()[scene]()
    gc.collect()
    device_arenas.reap()
    say(said)
"""


@pytest.mark.parametrize("may_swap", BOTH_WAYS)
def test_a_program(world: World, machine: Emulated, saved: Saved, may_swap: bool) -> None:
    """With and without torch's function that puts tensors that exist on other memory."""
    if not may_swap:
        world.variables["WITHOUT_SWAP"] = "1"
    world.start()
    program = world.spawn(f"{PROGRAM}{TO_CUDA}PATH = {saved.path!r}\n{SCENES}")

    def plays(scene: str) -> object:
        program.say(scene)
        return program.hear()

    # A module moves onto the image of its host memory.
    assert plays("move") == ["device", "here", True]
    assert machine.used_bytes(0) < 2 * WEIGHT_BYTES + 4 * MIB
    on_device = [image for image in world.status().images if image.tier != "host"]
    assert len(on_device) == 1

    # A loop of loads leaves nothing.
    counts = plays("loop")
    assert isinstance(counts, list)
    assert max(counts[10:]) - min(counts[10:]) < 20, counts
    assert machine.used_bytes(0) < 2 * WEIGHT_BYTES + 4 * MIB

    # A forked child forgets; training and the other seams write private memory.
    assert plays("fork") == [0, True, True]
    assert plays("train") == ["device", "here", "here"]
    assert plays("answer") == saved.result
    assert plays("other_format") == [True, "device", "device", "device"]
    assert machine.used_bytes(0) < 3 * WEIGHT_BYTES + 4 * MIB
    program.say()
    assert program.wait() == 0
    assert [image.leases for image in world.status().images if image.tier != "host"] == [0, 0]


UNALIGNED = """
import gc, os
import safetensors.torch
from trims_shim import diagnostics

def data_begin():
    with open(PATH, "rb") as file: return 8 + int.from_bytes(file.read(8), "little")

def loaded(state):
    net = nn.Linear(2048, 2048, bias=False); net.load_state_dict(state)
    return net

def moved(net):
    expected = net.weight.detach().clone()
    with ToCuda(): net.to("cuda")
    assert torch.equal(net.weight, expected)
    return net

def elided():
    return diagnostics.stats().events.get("elided:load_state_dict", 0)

size = 0
while size == 0 or data_begin() % 64 == 0:
    size += 8
    weights = nn.Linear(2048, 2048, bias=False).state_dict()
    safetensors.torch.save_file(weights, PATH, {"padding": "x" * size})

state = safetensors.torch.load_file(PATH)
while not elided():  # The first ones copy, and have the aligned image made.
    net = loaded(state); time.sleep(0.01)
first = moved(net)
net = loaded(state)
del state; gc.collect()
say([where(first.weight), where(moved(net).weight)])

def without_state():
    before = elided()
    net = loaded(safetensors.torch.load_file(PATH)); gc.collect()
    assert elided() > before
    return net

del first, net; gc.collect(); device_arenas.reap()
say(where(moved(without_state()).weight))

gc.collect(); device_arenas.reap()
net = without_state()
os.utime(PATH)
say(where(moved(net).weight))
reasons = {key: n for key, n in diagnostics.stats().events.items() if "not_on_device" in key}
say(reasons)
"""


def test_weights_of_an_aligned_image_move_as_those_of_the_file(world: World) -> None:
    """No device is asked for an image of the aligned bytes, which are no model file."""
    world.start()
    path = f"{world.root}/model.safetensors"
    program = world.spawn(f"{PROGRAM}{TO_CUDA}PATH = {path!r}\n{UNALIGNED}")
    assert program.hear() == ["device", "device"]
    # Nothing here holds the file's image any more: it is opened again, if it is the same file.
    assert program.hear() == "device"
    assert program.hear() == "here"
    assert program.hear() == {"not_on_device:aligned": 1}
    assert program.wait() == 0
    assert world.status().counters.get("refused", 0) == 0
