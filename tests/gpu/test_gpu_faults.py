"""Kernels meet death: of the daemon, of the owner, of a process that writes what it must not."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import Child, process_state, wait_until

from gpu.computing import LOOP, answers, compute, kinds, start
from gpu.conftest import GpuWorld

# An answer is what eight matrices make of a vector.
_CLIENT = (
    "import torch\n"
    "state = torch.load(hear(), map_location='cuda')\n"
    "x = torch.linspace(-1, 1, 8 * 1024, device='cuda').reshape(8, 1024)\n"
    "def compute():\n"
    "  y = x\n"
    "  for name in sorted(state):\n"
    "    y = (y @ state[name]) / 16\n"
    "  return str([float(value) for value in y.double().sum(1).cpu()])\n"
    "say(trims_shim.stats().served)\n" + LOOP
)
_FILE = (
    "import torch\ntorch.manual_seed(1)\n"
    "torch.save({f'w{i}': torch.randn(1024, 1024) for i in range(8)}, {path!r})\n"
)


@pytest.fixture
def path(gpu_world: GpuWorld, torch_device: str) -> str:
    """A checkpoint of eight matrices."""
    return _checkpoint(gpu_world)


def _checkpoint(world: GpuWorld) -> str:
    path = f"{world.root}/matrices.pt"
    world.run(_FILE.replace("{path!r}", repr(path)), enabled="0")
    return path


def _open(world: GpuWorld, path: str) -> Child:
    client = world.client(_CLIENT)
    client.say(path)
    assert client.hear(90) == 1, "the load was not served"
    return client


def test_daemon_killed_while_kernels_run(gpu_world: GpuWorld, path: str, record: Any) -> None:
    clients = [_open(gpu_world, path) for _ in range(2)]
    expected = compute(*clients)
    assert len(expected[0]) == 1
    start(*clients)
    gpu_world.kill_daemon()
    during = answers(*clients)
    goes_on = during == compute(*clients) == expected
    record("kernels go on" if goes_on else "kernels fail", backend="vmm")
    assert goes_on, during
    assert compute(_open(gpu_world, path)) == expected[:1]


def test_owner_killed_under_legacy_ipc_while_kernels_run(
    make_gpu_world: Any, torch_device: str, record: Any
) -> None:
    """What the driver does is recorded; to compute with other bytes is never right."""
    world = make_gpu_world(device_backend="ipc", uploader_idle="60")
    path = _checkpoint(world)
    client = _open(world, path)
    ((right,),) = compute(client)
    owners = world.uploaders()
    assert owners
    start(client)
    for owner in owners:
        world.signal(owner, signal.SIGKILL)
        wait_until(lambda pid=owner: process_state(pid) in ("", "Z"), f"owner {owner} gone")
    found = kinds([*answers(client), *compute(client)], right=right)
    record(", then ".join(dict.fromkeys(found)), backend="ipc")
    assert "wrong" not in found


def test_a_kernel_that_writes_ends_its_process_only(
    gpu_world: GpuWorld, path: str, record: Any
) -> None:
    neighbour = _open(gpu_world, path)
    expected = compute(neighbour)
    daemon = gpu_world.pid()
    writer = gpu_world.client(
        "import torch\n"
        f"state = torch.load({path!r}, map_location='cuda')\n"
        "say('ready')\nhear()\n"
        "try:\n"
        "  state['w0'].add_(1)\n"
        "  torch.cuda.synchronize()\n"
        "except Exception as error:\n"
        "  say(f'{type(error).__name__}: {error}'[:200])\n"
        "else:\n"
        "  say('no error')\n"
        "try:\n"
        "  say(float(torch.ones(8, device='cuda').sum()))\n"
        "except Exception as error:\n"
        "  say('context lost')\n"
        "sys.stdout.flush()\nos._exit(0)\n"
    )
    assert writer.hear(90) == "ready"
    start(neighbour)
    writer.say()
    said = [writer.hear(60), writer.hear(60)]
    found = [*answers(neighbour), *compute(neighbour)]
    is_unharmed = found == expected * 2
    record(said[0], afterwards=said[1], neighbour="unharmed" if is_unharmed else "harmed")
    assert said[0] != "no error"
    assert is_unharmed, found
    assert gpu_world.pid() == daemon
    assert compute(_open(gpu_world, path)) == expected
