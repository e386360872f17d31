"""A placement that is carried out, as its callers see it."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trims_shim.batching.arguments import patience_s, span_ns
from trims_shim.batching.protocol import NEVER_NS
from trims_shim.cluster.driving import Driver
from trims_shim.cluster.fleet import Fleet
from trims_shim.cluster.routing import Router, Ticket
from trims_shim.errors import BatcherClosed
from trims_shim.planner import Placement

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DeviceStats", "FamilyStats", "Service", "ServiceStats"]

_COUNTED = ("requests", "answered", "late", "dropped", "failed", "rejected", "resent")


@dataclass(frozen=True, slots=True)
class FamilyStats:
    """What became of the requests of a family."""

    requests: int
    answered: int
    """With a result, in time or late."""
    late: int
    """Of ``answered``: after their deadline."""
    dropped: int
    """With RequestDropped."""
    failed: int
    """With another error: of the function, DeviceLost, or because an item cannot be pickled."""
    rejected: int
    """With QueueFull."""
    resent: int
    """How often one was given to another device because its own was lost."""
    waiting: int
    """For a device with room, now."""


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """A device now."""

    kind: str
    node: str
    """Ray's id of the node; empty before the first load."""
    variant: str
    """Empty if it has none."""
    phase: str
    """``ready``, ``loading``, ``empty`` or ``lost``."""
    open: int
    """Requests that it was given and has not answered."""


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """A snapshot."""

    families: Mapping[str, FamilyStats]
    devices: tuple[DeviceStats, ...]
    placement: Placement
    plans: int
    """How often it was planned again."""
    loads: int
    """How often a variant was loaded, the first ones included."""


class Service:
    """Made by :func:`~trims_shim.cluster.deploy`. From any thread and any event loop of the process
    that made it; in a forked child it cannot be used. As a context manager it shuts down at the
    end."""

    def __init__(
        self,
        driver: Driver,
        fleet: Fleet,
        router: Router,
        slo_ns: Mapping[str, int],
        *,
        on_shutdown: Callable[[], None],
    ) -> None:
        """``slo_ns``: of each family. ``on_shutdown`` may be called more than once."""
        self._driver = driver
        self._fleet = fleet
        self._router = router
        self._slo_ns = slo_ns
        self._on_shutdown = on_shutdown
        self._numbers = itertools.count()
        self._pid = os.getpid()

    def submit(self, family: str, item: Any, *, deadline_ms: float | None = None) -> Future[Any]:
        """The answer for one item as a future, which has all errors but these. Does not block.

        ``deadline_ms``, from now, replaces the family's objective. A future cannot be cancelled.
        Its callbacks run in the service's thread and must not block. Raises ValueError for an
        unknown family, BatcherClosed after :meth:`shutdown` and in a forked child.
        """
        if self._pid != os.getpid():
            raise BatcherClosed("this service belongs to the parent process: deploy another one")
        slo_ns = self._slo_ns.get(family)
        if slo_ns is None:
            known = ", ".join(map(repr, self._slo_ns))
            raise ValueError(f"{family!r} is no family of this service: it has {known}")
        limit_ns = slo_ns if deadline_ms is None else span_ns("deadline_ms", deadline_ms)
        deadline_ns = NEVER_NS if limit_ns == NEVER_NS else time.monotonic_ns() + limit_ns
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._driver.take(Ticket(next(self._numbers), family, deadline_ns, (item, future)))
        return future

    def call(self, family: str, item: Any, *, deadline_ms: float | None = None) -> Any:
        """The answer for one item; blocks. As :meth:`submit`; also raises what the function raised
        for the item, RequestDropped, QueueFull and DeviceLost."""
        future = self.submit(family, item, deadline_ms=deadline_ms)
        try:
            return future.result()
        finally:
            del future  # it may have an error, whose traceback has this frame

    async def aio(self, family: str, item: Any, *, deadline_ms: float | None = None) -> Any:
        """As :meth:`call`, for event loops."""
        return await asyncio.wrap_future(self.submit(family, item, deadline_ms=deadline_ms))

    def stats(self) -> ServiceStats:
        """What it did until now."""
        driver = self._driver
        families = {
            family: FamilyStats(
                waiting=self._router.waiting(family),
                **{name: counters[name] for name in _COUNTED},
            )
            for family, counters in self._router.counters.items()
        }
        devices = tuple(
            DeviceStats(
                kind=each.kind,
                node=driver.nodes.get(each.number, ""),
                variant="" if each.option is None else each.option.variant,
                phase=each.phase.value,
                open=each.open,
            )
            for each in self._fleet.devices
        )
        return ServiceStats(families, devices, driver.placement, driver.plans, self._fleet.loads)

    def shutdown(self, *, timeout_s: float = 30.0) -> None:
        """Take no more requests, wait for the answers of the open ones, and end the actors.

        After ``timeout_s``, requests without an answer fail with BatcherClosed. Does nothing in a
        forked child.
        """
        timeout_s = patience_s("timeout_s", timeout_s)
        if self._pid != os.getpid():
            return
        try:
            self._driver.stop(timeout_s)
        finally:
            self._on_shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown(timeout_s=0 if exc_info[0] is not None else 30.0)
