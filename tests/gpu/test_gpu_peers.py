"""An image gets from one device to another, and arrives whole whatever the machine makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.conftest import MODEL_BYTES, GpuWorld
from gpu.files import file_digest

_PEERS = (
    "from trims_shim.memory.driver import driver\n"
    "index = driver().index_of({device!r})\n"
    "say(sorted(driver().peers(index).items(), key=lambda each: each[1]))\n"
)
_CLIENT = (
    "from trims_shim.memory.driver import driver\n"
    "DEVICE = {other!r}\n"
    "cuda = Cuda(driver().index_of(DEVICE))\n"
    "start = time.monotonic()\n"
    "arena = open_device({path!r})\n"
    "seconds = time.monotonic() - start\n"
    "say([device_digest(cuda, arena), seconds])\n"
)


def test_an_image_is_copied_from_a_peer(gpu_world: GpuWorld, record: Any) -> None:
    world = gpu_world
    peers = world.run(_PEERS.format(device=world.device))
    if not peers:
        record("not answered: the device has no peers")
        pytest.skip("no second device that the first one can access")
    other, rank = peers[0]
    paths = [world.model(seed) for seed in (1, 2)]
    for path in paths:
        world.warm(path)
    seconds = []
    for path in paths:
        client = world.client(_CLIENT.format(other=other, path=path))
        with world.ended(client):
            digest, took = client.hear(120)
        assert digest == file_digest(path)
        seconds.append(took)
    copied = world.status().counters.get("images_copied_from_peer", 0)
    record(
        "copied" if copied == len(paths) else "not copied, see the daemon's log",
        rank=rank,
        model_bytes=MODEL_BYTES,
        seconds_of_the_first_which_is_checked_and_the_second=seconds,
        log=world.log()[-2000:] if copied < len(paths) else "",
    )
