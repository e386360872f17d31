"""One device of a cluster, in a process of its own: runs one variant, in batches.

A plain class; :mod:`trims_shim.cluster.deploying` makes Ray actors of it. Its methods run on the
actor's event loop; variants load and compute in threads. Importing this module imports trims_shim,
so loaders take weights from the node's daemon.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from trims_shim.batching import Batcher
from trims_shim.config import platform_problem
from trims_shim.errors import TrimsError
from trims_shim.planner import Option

if TYPE_CHECKING:
    from trims_shim.client.cache import Cache

__all__ = ["BatchFunction", "DeviceActor", "Loaded", "Loader"]

_T = TypeVar("_T")

BatchFunction: TypeAlias = Callable[..., Any]
"""A batch -> one result for each item, as for :class:`~trims_shim.batching.Batcher`."""
Loader: TypeAlias = Callable[[str], BatchFunction]
"""The device for torch, ``"cuda"`` or ``"cpu"`` -> what runs there."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A variant is ready."""

    node: str
    """Ray's id of the node."""
    digests: frozenset[str]
    """Of the images that its loader has opened through the node's daemon."""


class DeviceActor:
    """``loaders``: by the names of variants. ``policy``: of the batchers."""

    def __init__(self, loaders: Mapping[str, Loader], policy: str | None) -> None:
        self._loaders = loaders
        self._policy = policy
        self._load = 0
        """The number of the load whose variant is ready; 0 for none."""
        self._batcher: Batcher[Any, Any, Any] | None = None
        self._digests: dict[str, frozenset[str]] = {}
        self._is_loading = asyncio.Lock()
        """Held by loads, as one may come while another runs: the service may take the actor for
        lost when it was only out of reach."""
        # Libraries came with the loaders; looking at torch at each load takes 130 ms. Not later:
        # a model that its loader still keeps then would never be freed if it has cycles.
        gc.collect()
        gc.freeze()

    async def ping(self) -> None:
        """Return when the process has started."""

    async def load(self, number: int, option: Option) -> Loaded:
        """Answer what was asked before, then load a variant. Raises what its loader raises."""
        async with self._is_loading:
            self._load = 0
            if self._batcher is not None:
                await self._batcher.aclose()
                self._batcher = None
            gc.collect()  # models may have cycles, and the next one may need their memory
            function = await _outcome(asyncio.to_thread(self._function_of, option.variant))
            self._batcher = Batcher(
                function,
                max_batch_size=option.profile.max_batch_size,
                profile=option.profile,
                policy=self._policy,
                name=f"{option.family}/{option.variant}",
            )
            self._load = number
            digests = self._digests.get(option.variant, frozenset())
            return Loaded(_context().get_node_id(), digests)

    async def answer(self, load: int, item: Any, limit_ms: float) -> tuple[Any, ...]:
        """The answer in a tuple; an empty one if the variant of this load is not here.

        ``limit_ms``: the time that is left. Raises what the batcher raises.
        """
        if load != self._load or self._batcher is None:
            return ()
        return (await _outcome(self._batcher.aio(item, deadline_ms=limit_ms)),)

    async def resident(self) -> frozenset[str]:
        """Digests of the images in the memory of this node's daemon; none without a daemon."""
        return await asyncio.to_thread(_resident)

    def _function_of(self, variant: str) -> BatchFunction:
        before = _opened()
        function = self._loaders[variant](_device())
        # One that was loaded here before may have opened nothing new.
        if opened := _opened() - before:
            self._digests[variant] = opened
        return function


async def _outcome(call: Awaitable[_T]) -> _T:
    """Of user code, which may want to exit: that would end the loop, but not the actor."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the variant raised {error!r}") from error


def _opened() -> frozenset[str]:
    return _told(lambda cache: cache.opened())


def _resident() -> frozenset[str]:
    return _told(_digests)


def _digests(cache: Cache) -> Iterable[str]:
    from trims_shim.client.listing import every_image

    return (each.digest for each in every_image(cache))


def _told(question: Callable[[Cache], Iterable[str]]) -> frozenset[str]:
    """Digests of images; none without a daemon, and with unusable settings."""
    if platform_problem:
        return frozenset()
    from trims_shim.client.cache import cache

    try:
        return frozenset(question(cache()))
    except TrimsError:
        return frozenset()


def _device() -> str:
    """Of what Ray shows to this actor."""
    return "cuda" if _context().get_accelerator_ids().get("GPU") else "cpu"


def _context() -> Any:
    import ray

    return ray.get_runtime_context()
