"""Two containers that share the socket directory, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from gpu.conftest import TENSOR_BYTES, UPLOADER_ENDS_S, GpuWorld
from gpu.files import file_digest

# Own processes, System V memory and mounts: process ids of one side mean nothing on the other.
_APART = ("unshare", "--fork", "--pid", "--mount-proc", "--ipc", "--mount")
_HIDE = 'mount -t tmpfs tmpfs "$0" && exec "$@"'


def _can_unshare(hidden: str) -> str:
    if shutil.which("unshare") is None:
        return "no unshare command"
    try:
        done = subprocess.run(
            [*_APART, "sh", "-c", _HIDE, hidden, "true"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "unshare does not return"
    return done.stderr.strip() if done.returncode else ""


def test_namespaces_share_the_memory_through_the_socket_directory(
    gpu_world: GpuWorld, record: Any
) -> None:
    # An emulated device is files in /dev/shm: only a real one may be cut off from it.
    hidden = "/mnt" if gpu_world.machine else "/dev/shm"
    if reason := _can_unshare(hidden):
        record(f"not answered: {reason}")
        pytest.skip(f"no new namespaces: {reason}")
    world = gpu_world
    path = world.model(7, tensors=8)
    world.warm(path)
    script = (
        f"copy = write_model('{hidden}/own.safetensors', seed=7, tensors=8,"
        f" tensor_bytes={TENSOR_BYTES})\n"
        "cuda = Cuda()\nbefore = cuda.free_bytes()\narena = open_device(copy)\n"
        f"time.sleep({UPLOADER_ENDS_S})\n"  # of the process that read the copy
        "say([os.getpid(), device_digest(cuda, arena), before - cuda.free_bytes()])\n"
    )
    apart = world.client(script, prefix=(*_APART, "sh", "-c", _HIDE, hidden), autostart="0")
    with world.ended(apart):
        pid, digest, taken = apart.hear(60)
    images = [image for image in world.status().images if image.tier == world.device]
    record("shared", process_id_inside=pid, taken_bytes=taken, images=len(images))
    assert pid <= 2, "it was not apart"
    assert digest == file_digest(path)
    assert len(images) == 1
