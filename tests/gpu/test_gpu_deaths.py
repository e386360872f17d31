"""Processes die while others compute. Nobody may ever read wrong bytes, and nobody else may die.

"Compute" is here a copy out of the shared memory, checked byte by byte; kernels are in
test_gpu_faults.py. Verdicts are recorded, also those that only describe the driver.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import Child, process_state, wait_until

from gpu.computing import LOOP, answers, compute, kinds, start
from gpu.conftest import GpuWorld
from gpu.files import file_digest

TENSORS = 8

_CLIENT = (
    "cuda = Cuda()\narena = open_device(hear())\n"
    f"def compute():\n  return device_digest(cuda, arena)\n{LOOP}"
)


def _open(world: GpuWorld, path: str) -> Child:
    client = world.client(_CLIENT)
    client.say(path)
    return client


def test_daemon_killed_while_clients_compute(gpu_world: GpuWorld, record: Any) -> None:
    world, path = gpu_world, gpu_world.model(tensors=TENSORS)
    right = [[file_digest(path)]]
    clients = [_open(world, path) for _ in range(2)]
    assert compute(*clients) == right * 2
    start(*clients)
    first = world.kill_daemon()
    during = answers(*clients)
    afterwards = compute(*clients)
    goes_on = during == afterwards == right * 2
    record("clients go on" if goes_on else "clients fail", backend="vmm")
    assert goes_on, (during, afterwards)
    assert compute(_open(world, path)) == right
    assert world.pid() != first


def test_owner_killed_under_legacy_ipc(make_gpu_world: Any, record: Any) -> None:
    """Documented limit: the owner must live. An error or right bytes; never other bytes."""
    world = make_gpu_world(device_backend="ipc", uploader_idle="60")
    path = world.model(tensors=TENSORS)
    right = file_digest(path)
    client = _open(world, path)
    assert compute(client) == [[right]]
    owners = world.uploaders()
    assert owners, "no process owns the memory"
    start(client)
    for owner in owners:
        world.signal(owner, signal.SIGKILL)
        wait_until(lambda pid=owner: process_state(pid) in ("", "Z"), f"owner {owner} gone")
    found = kinds([*answers(client), *compute(client)], right=right)
    record(", then ".join(dict.fromkeys(found)), backend="ipc")
    assert "wrong" not in found
    assert world.status().pid, "the daemon is gone"
    assert compute(_open(world, path)) == [[right]]


@pytest.mark.parametrize(
    "write", ["copy_in(arena.address, bytes(4096))", "fill(arena.address, 0, 4096)"]
)
def test_a_write_to_shared_memory_ends_the_writer_only(
    gpu_world: GpuWorld, record: Any, write: str
) -> None:
    world, path = gpu_world, gpu_world.model(tensors=TENSORS)
    right = [[file_digest(path)]]
    neighbour = _open(world, path)
    assert compute(neighbour) == right
    daemon = world.pid()
    writer = world.client(
        f"cuda = Cuda()\narena = open_device({path!r})\nsay('ready')\nhear()\n"
        f"say(cuda.{write})\nsay(cuda.result('cuCtxSynchronize'))\n"
    )
    assert writer.hear(60) == "ready"
    start(neighbour)
    writer.say()
    status = writer.wait(60)
    said = [writer.hear() for _ in range(2)] if status == 0 else []
    found = [*answers(neighbour), *compute(neighbour)]
    is_unharmed = found == right * 2
    record(
        f"died by signal {-status}" if status < 0 else f"CUresult {said[0]}, then {said[1]}",
        neighbour="unharmed" if is_unharmed else "harmed",
    )
    assert status < 0 or said[0] != 0, "the write went through"
    assert is_unharmed, found
    assert world.pid() == daemon
    assert compute(_open(world, path)) == right


def test_a_client_killed_while_it_computes_leaves_nothing(gpu_world: GpuWorld) -> None:
    world, path = gpu_world, gpu_world.model(tensors=TENSORS)
    victim, neighbour = _open(world, path), _open(world, path)
    start(victim, neighbour)
    victim.kill()
    wait_until(
        lambda: [i.leases for i in world.status().images if i.tier == world.device] == [1],
        "the lease of the killed client is released",
    )
    assert [*answers(neighbour), *compute(neighbour)] == [[file_digest(path)]] * 2
