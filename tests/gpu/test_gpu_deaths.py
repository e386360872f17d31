"""Processes die while others compute. Nobody may ever read wrong bytes, and nobody else may die.

"Compute" is here a copy out of the shared memory, checked byte by byte; kernels are in
test_gpu_faults.py. Verdicts are recorded, also those that only describe the driver.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import Child, process_state, wait_until

from gpu.conftest import GpuWorld
from gpu.files import file_digest

TENSORS = 8
BUSY_S = 1.0

# Told for how long, it computes again and again, and says the different answers it got, in order.
_CLIENT = (
    "cuda = Cuda()\narena = open_device(hear())\n"
    "while True:\n"
    "  answers, end = {}, time.monotonic() + hear()\n"
    "  say('busy')\n"
    "  while not answers or time.monotonic() < end:\n"
    "    try:\n"
    "      answers[device_digest(cuda, arena)] = 1\n"
    "    except CudaError as error:\n"
    "      answers[f'error {error.result}'] = 1\n"
    "  say(list(answers))\n"
)


def _open(world: GpuWorld, path: str) -> Child:
    client = world.client(_CLIENT)
    client.say(path)
    return client


def _start(*clients: Child) -> None:
    """They compute when this returns."""
    for client in clients:
        client.say(BUSY_S)
    for client in clients:
        assert client.hear(60) == "busy"


def _answers(*clients: Child) -> list[list[str]]:
    """Of clients that were started."""
    return [client.hear(60) for client in clients]


def _compute(*clients: Child) -> list[list[str]]:
    _start(*clients)
    return _answers(*clients)


def test_daemon_killed_while_clients_compute(gpu_world: GpuWorld, record: Any) -> None:
    world, path = gpu_world, gpu_world.model(tensors=TENSORS)
    right = [[file_digest(path)]]
    clients = [_open(world, path) for _ in range(2)]
    assert _compute(*clients) == right * 2
    _start(*clients)
    first = world.kill_daemon()
    during = _answers(*clients)
    afterwards = _compute(*clients)
    goes_on = during == afterwards == right * 2
    record("clients go on" if goes_on else "clients fail", backend="vmm")
    assert goes_on, (during, afterwards)
    assert _compute(_open(world, path)) == right
    assert world.pid() != first


def test_owner_killed_under_legacy_ipc(make_gpu_world: Any, record: Any) -> None:
    """Documented limit: the owner must live. An error or right bytes; never other bytes."""
    world = make_gpu_world(device_backend="ipc", uploader_idle="60")
    path = world.model(tensors=TENSORS)
    right = file_digest(path)
    client = _open(world, path)
    assert _compute(client) == [[right]]
    owners = world.uploaders()
    assert owners, "no process owns the memory"
    _start(client)
    for owner in owners:
        world.signal(owner, signal.SIGKILL)
        wait_until(lambda pid=owner: process_state(pid) in ("", "Z"), f"owner {owner} gone")
    found = [answer for answers in (*_answers(client), *_compute(client)) for answer in answers]
    kinds = ["right" if a == right else a if a.startswith("error") else "wrong" for a in found]
    record(", then ".join(dict.fromkeys(kinds)), backend="ipc")
    assert "wrong" not in kinds
    assert world.status().pid, "the daemon is gone"
    assert _compute(_open(world, path)) == [[right]]


@pytest.mark.parametrize(
    "write", ["copy_in(arena.address, bytes(4096))", "fill(arena.address, 0, 4096)"]
)
def test_a_write_to_shared_memory_ends_the_writer_only(
    gpu_world: GpuWorld, record: Any, write: str
) -> None:
    world, path = gpu_world, gpu_world.model(tensors=TENSORS)
    right = [[file_digest(path)]]
    neighbour = _open(world, path)
    assert _compute(neighbour) == right
    daemon = world.pid()
    writer = world.client(
        f"cuda = Cuda()\narena = open_device({path!r})\nsay('ready')\nhear()\n"
        f"say(cuda.{write})\nsay(cuda.result('cuCtxSynchronize'))\n"
    )
    assert writer.hear(60) == "ready"
    _start(neighbour)
    writer.say()
    status = writer.wait(60)
    said = [writer.hear() for _ in range(2)] if status == 0 else []
    answers = [*_answers(neighbour), *_compute(neighbour)]
    is_unharmed = answers == right * 2
    record(
        f"died by signal {-status}" if status < 0 else f"CUresult {said[0]}, then {said[1]}",
        neighbour="unharmed" if is_unharmed else "harmed",
    )
    assert status < 0 or said[0] != 0, "the write went through"
    assert is_unharmed, answers
    assert world.pid() == daemon
    assert _compute(_open(world, path)) == right


def test_a_client_killed_while_it_computes_leaves_nothing(gpu_world: GpuWorld) -> None:
    world, path = gpu_world, gpu_world.model(tensors=TENSORS)
    victim, neighbour = _open(world, path), _open(world, path)
    _start(victim, neighbour)
    victim.kill()
    wait_until(
        lambda: [i.leases for i in world.status().images if i.tier == world.device] == [1],
        "the lease of the killed client is released",
    )
    assert [*_answers(neighbour), *_compute(neighbour)] == [[file_digest(path)]] * 2
