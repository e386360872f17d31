"""The compared batchers, each behind the same two calls.

An adapter follows the library's documentation for a model whose batch function blocks: with an
asyncio library, the function runs in a thread. ``CATALOGUE`` has the adapters, with the module and
the possible settings of each. Results show every peer with its best settings.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.batching_devices import Device

__all__ = [
    "CATALOGUE",
    "Dropped",
    "Kind",
    "LoopPeer",
    "Peer",
    "Settings",
    "check_installed",
    "make_peer",
]

Settings = Mapping[str, Any]
Done = Callable[[Any, BaseException | None], None]


class Dropped(Exception):
    """The batcher gave this request up on purpose."""


class Peer(ABC):
    """A batcher in front of a device. ``slo_ms`` is for batchers that can use it."""

    def __init__(
        self, device: Device, *, slo_ms: float, max_batch_size: int, settings: Settings
    ) -> None:
        self.device = device
        self.slo_ms = slo_ms
        self.max_batch_size = max_batch_size
        self.settings = settings

    @abstractmethod
    def start(self) -> None:
        """Get ready for requests."""

    @abstractmethod
    def submit(self, item: Any, done: Done) -> None:
        """Take a request and return at once; any thread may call ``done(result, error)``."""

    def end_warm_up(self) -> None:
        """Bring the library into the state that it reaches by itself in a long run."""
        return

    def facts(self) -> dict[str, Any]:
        """The batcher's own statistics, for the results."""
        return {}


class LoopPeer(Peer):
    """A batcher for asyncio, with an event loop in a thread of its own.

    Requests reach the loop by ``call_soon_threadsafe``, which wakes it up as a socket would.
    """

    def start(self) -> None:
        """See :class:`Peer`."""
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="event loop", daemon=True).start()
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.run_coroutine_threadsafe(self.prepare(), self.loop).result(60)

    @abstractmethod
    async def prepare(self) -> None:
        """Make the batcher, in the loop."""

    @abstractmethod
    async def answer(self, item: Any) -> Any:
        """Await an answer as a client of the library does. Raises Dropped if it was given up."""

    def submit(self, item: Any, done: Done) -> None:
        """See :class:`Peer`."""
        self.loop.call_soon_threadsafe(self._begin, item, done)

    def _begin(self, item: Any, done: Done) -> None:
        task = self.loop.create_task(self._settle(item, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, item: Any, done: Done) -> None:
        # A border: the client gets whatever the library raises.
        try:
            result = await self.answer(item)
        except (Exception, asyncio.CancelledError) as error:
            done(None, error)
        else:
            done(result, None)


@dataclass(frozen=True, slots=True)
class Kind:
    """A batcher of the comparison: module and class of its adapter, and possible settings."""

    title: str
    module: str
    adapter: str
    variants: tuple[Settings, ...] = ({},)
    note: str = ""
    package: str = "trims_shim"
    """The import name of the library."""


def _waits(*waits_ms: float, **fixed: Any) -> tuple[Settings, ...]:
    return tuple({"wait_ms": wait_ms, **fixed} for wait_ms in waits_ms)


def _ours() -> dict[str, Kind]:
    kinds = {
        "trims": Kind("trims, threads", "ours", "Threads", ({"policy": "auto"},)),
        "trims-asyncio": Kind("trims, asyncio", "ours", "Asyncio", ({"policy": "auto"},)),
    }
    for policy in ("early_drop", "proteus", "aimd", "window", "immediate", "cork"):
        title = f"trims, threads, {policy}"
        # Proteus as published has no margin, and real timers are late.
        settings = {"policy": policy} | ({"margin_ms": 3} if policy == "proteus" else {})
        kinds[f"trims-{policy}"] = Kind(title, "ours", "Threads", (settings,))
    return kinds


_RAY = (
    *_waits(5, 20, 40, calls="executor"),
    *_waits(5, 20, calls="blocking"),
)
CATALOGUE: dict[str, Kind] = {
    **_ours(),
    "cork": Kind(
        "BentoML CorkDispatcher",
        "cork",
        "Cork",
        tuple({"latency_share": share} for share in (1.0, 0.95, 0.9)),
        "private class; told the objective, or a little less; trained by the warm-up",
        package="bentoml",
    ),
    "batched": Kind(
        "batched, thread", "batched_dynamically", "Thread", _waits(1, 5, 10), package="batched"
    ),
    "batched-asyncio": Kind(
        "batched, asyncio", "batched_dynamically", "Asyncio", _waits(1, 5, 10), package="batched"
    ),
    "async-batcher": Kind(
        "async-batcher", "async_batchers", "Batcher", _waits(0, 5, 10), package="async_batcher"
    ),
    "batch-inference": Kind(
        "batch-inference",
        "batch_inference_host",
        "Host",
        _waits(0, 5, 10),
        package="batch_inference",
    ),
    "ray": Kind(
        "Ray @serve.batch",
        "ray_serve",
        "ServeBatch",
        _RAY,
        "outside of a replica, whose context is replaced",
        package="ray",
    ),
}
"""By the name on the command line."""


def check_installed(names: Iterable[str]) -> None:
    """Raise SystemExit if a library is missing here, with the environment that has it."""
    packages = {CATALOGUE[name].package for name in names}
    missing = sorted(each for each in packages if importlib.util.find_spec(each) is None)
    if missing:
        raise SystemExit(
            f"{', '.join(missing)} cannot be imported here; benchmarks/peers/setup.sh installs "
            "them into .venv-peers, so use .venv-peers/bin/python, or leave them out"
        )


def make_peer(
    name: str, device: Device, *, slo_ms: float, max_batch_size: int, settings: Settings
) -> Peer:
    """Import the library of ``name`` and put it in front of the device, not yet started."""
    kind = CATALOGUE[name]
    module = importlib.import_module(f"benchmarks.peers.{kind.module}")
    adapter = getattr(module, kind.adapter)
    peer: Peer = adapter(device, slo_ms=slo_ms, max_batch_size=max_batch_size, settings=settings)
    return peer
