"""What tests of the daemon's device tiers do with a world: model files, loads, what is where."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import emulated_cuda
from device_images import MIB, Opened, open_on, safetensors
from emulated_cuda import Emulated
from harness import PATIENCE_S, World, wait_until

from trims_shim.client.connection import Connection
from trims_shim.errors import TrimsError

__all__ = [
    "GPU",
    "GPU2",
    "Background",
    "MakeWorld",
    "connected",
    "content",
    "image_memory",
    "machine",
    "maps_of",
    "model",
    "opened",
    "tiers",
    "touch",
    "uploaders",
    "wait_for_upload",
]

GPU, GPU2 = emulated_cuda.device_ids(2)
SIZES = (MIB, 3, 5 * MIB + 1, 700)
MakeWorld = Callable[..., World]
"""The fixture ``make_device_world``."""


def model(world: World, seed: int = 1, sizes: tuple[int, ...] = SIZES) -> str:
    """A model file, old enough for its identity to be trusted."""
    path = world.file(name=f"model-{seed}.safetensors")
    with open(path, "wb") as file:
        file.write(safetensors(sizes, seed=seed))
    time.sleep(0.12)  # A change is settled after 100 ms (trims_shim.daemon.loader).
    return path


def content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def machine(world: World) -> Emulated:
    return Emulated.of(world.variables)


def uploaders(world: World) -> list[int]:
    """Live uploader processes."""
    return world.running("daemon.device.uploader")


def image_memory(world: World) -> int:
    """Device memory of images, without contexts."""
    return sum(each.size_bytes for each in machine(world).allocations() if each.kind != "context")


@contextlib.contextmanager
def connected(world: World) -> Iterator[Connection]:
    connection = world.connection()
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def opened(connection: Connection, path: str, tier: str = GPU) -> Iterator[Opened]:
    image = open_on(connection, path, tier)
    try:
        yield image
    finally:
        image.close()


def touch(world: World, path: str, tier: str = GPU) -> Opened:
    """Open an image and let go of it at once."""
    with connected(world) as connection, opened(connection, path, tier) as image:
        assert image.content() == content(path)
    wait_until(lambda: not any(each.leases for each in world.status().images), "no lease")
    return image


def tiers(world: World) -> dict[str, set[str]]:
    """Digests at each tier."""
    found: dict[str, set[str]] = {}
    for image in world.status().images:
        found.setdefault(image.tier, set()).add(image.digest)
    return found


class Background:
    """An open request in a thread, with its outcome or error."""

    def __init__(self, world: World, path: str, tier: str = GPU) -> None:
        self._world, self._path, self._tier = world, path, tier
        self.result: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                connected(self._world) as connection,
                opened(connection, self._path, self._tier) as image,
            ):
                self.result = (image.outcome, image.content() == content(self._path))
        except TrimsError as error:
            self.result = error

    def join(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.result


def wait_for_upload(world: World) -> int:
    """Returns while an upload copies; the uploader's process id."""
    wait_until(lambda: image_memory(world) > 0 and uploaders(world), "an upload", interval_s=0.002)
    (pid,) = uploaders(world)
    # The copies begin once memory is mapped.
    wait_until(lambda: "/allocations/" in maps_of(pid), "memory is mapped", interval_s=0.002)
    return pid


def maps_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/maps") as file:
            return file.read()
    except OSError:
        return ""
