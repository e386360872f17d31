"""The GPU benchmark's control of its daemon and of its measuring processes.

Owns the state of the cache before a sample, and the readings of device memory. These come from the
driver's management library, never from the product.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.forking import Server, server
from benchmarks.harness import Daemon, WorkerFailed, daemon

__all__ = ["MODULE", "Shared", "free_bytes", "let_settle", "shared", "stable_free_bytes"]

MODULE = "benchmarks.gpu_workers"
_EVICTION_S = 20.0


_SETTLED_S = 2.2
"""A file younger than two seconds may change within its time stamp, so each load reads it."""


def let_settle(path: str) -> str:
    """Wait until a new file is old enough for its identity to be trusted; return the path."""
    age_s = time.time() - os.stat(path).st_ctime
    time.sleep(max(0.0, _SETTLED_S - age_s))
    return path


@dataclass(frozen=True, slots=True)
class Shared:
    """A daemon, a server of its clients, and control over resident images."""

    daemon: Daemon
    server: Server
    device_id: str = ""
    _caches: list[Any] = field(default_factory=list)

    def request(self, message: Any) -> Any:
        """Ask the daemon. Raises TrimsError."""
        from trims_shim import config
        from trims_shim.client.cache import Cache

        if not self._caches:
            directory = str(self.daemon.socket_directory)
            self._caches.append(Cache(config.load({}, socket_dir=directory, autostart="0")))
        return self._caches[0].request(message)

    def close(self) -> None:
        """Close the connection."""
        while self._caches:
            self._caches.pop().close()

    def tiers(self, path: str) -> set[str]:
        """Tiers where a file's image is resident."""
        return {image.tier for image in self._status().images if path in image.names}

    def forget(self, path: str) -> None:
        """Evict the file's image everywhere, so that the next load is a miss."""
        end = time.monotonic() + _EVICTION_S
        while not self._is_idle() or self.tiers(path):
            # The device first, because an image that leaves it may go to the host.
            for tier in (self.device_id, "host"):
                if tier in self.tiers(path):
                    self._try_to_evict(path, tier)
            if time.monotonic() > end:
                raise WorkerFailed(f"{path} stays in {self.tiers(path)}")
            time.sleep(0.02)

    def keep_on_host(self, path: str) -> None:
        """Keep the image in host memory only, so that the next load to the device is a host hit."""
        if "host" not in self.tiers(path):
            self.daemon.warm(path)
        end = time.monotonic() + _EVICTION_S
        while self.device_id in self.tiers(path):
            self._try_to_evict(path, self.device_id)
            if time.monotonic() > end:
                raise WorkerFailed(f"{path} stays on the device")
            time.sleep(0.02)

    def _try_to_evict(self, path: str, tier: str) -> None:
        from trims_shim.errors import RequestRefused
        from trims_shim.wire.admin import EvictImageRequest

        # Refused while the last sample's process still holds its lease.
        with contextlib.suppress(RequestRefused):
            self.request(EvictImageRequest(path, tier))

    def _is_idle(self) -> bool:
        status = self._status()
        return not any(each.reserved_bytes for each in (status.memory, *status.devices))

    def _status(self) -> Any:
        from trims_shim.wire.admin import GetStatusRequest

        return self.request(GetStatusRequest())


@contextlib.contextmanager
def shared(device_id: str, **settings: str) -> Iterator[Shared]:
    """A private daemon with a server of clients."""
    with daemon(**settings) as own, server(MODULE, own.environment) as clients:
        both = Shared(own, clients, device_id)
        try:
            yield both
        finally:
            both.close()


def free_bytes(device_id: str) -> int:
    """Free memory of a device by the driver's management library. Raises its errors."""
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(device_id)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)


def stable_free_bytes(
    device_id: str,
    *,
    quiet_s: float = 1.0,
    limit_s: float = 20.0,
    read: Callable[[str], int] = free_bytes,
) -> int:
    """Free memory once it is stable, because ended processes give theirs back late."""
    end = time.monotonic() + limit_s
    last, since = read(device_id), time.monotonic()
    while time.monotonic() - since < quiet_s and time.monotonic() < end:
        time.sleep(0.05)
        now = read(device_id)
        if now != last:
            last, since = now, time.monotonic()
    return last
