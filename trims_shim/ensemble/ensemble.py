"""Several models that answer together, each in processes of its own, on a machine's devices."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from trims_shim.checks import check_amount, check_limit, whole
from trims_shim.ensemble.allocation import (
    Allocation,
    Device,
    Footprint,
    MemberProfile,
    Problem,
    worst_fit_decreasing,
)
from trims_shim.ensemble.combine import Combine, combine_of
from trims_shim.ensemble.devices import find_devices
from trims_shim.ensemble.hosting import pickled
from trims_shim.ensemble.payloads import count_of
from trims_shim.ensemble.system import System

__all__ = ["Ensemble", "EnsembleStats", "Member", "Worker", "names_of"]

_SEGMENT_SIZE = 128
"""Samples (section 3.1 of the paper)."""
_DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class Member:
    """A model of an ensemble."""

    name: str
    load: Callable[[str], Callable[[Any], Any]]
    """Called in each worker with the name of its device, as torch knows it (``cpu``, also for some
    of its cores, ``cuda:1``); returns the function of a batch ``[batch, ...]`` that runs there.
    Defined in a module, or a functools.partial."""
    weight: float = 1.0
    """In means and votes."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process of an ensemble."""

    member: str
    device: str
    batch_size: int
    pid: int | None
    """None for one that has died and was not started again."""


@dataclass(frozen=True, slots=True)
class EnsembleStats:
    """What an ensemble has done so far."""

    samples: int
    """Sent to members, those of calls that fail included."""
    batches: int
    """Sent to workers, once more if one has died with it."""
    restarts: int
    """How many workers have died and were started again."""
    workers: tuple[Worker, ...]


class Ensemble:
    """Models that answer the same samples, and whose outputs are combined.

    ::

        members = [Member("resnet", load_resnet), Member("vit", load_vit)]
        with Ensemble(members, combine="mean") as ensemble:
            scores = ensemble.predict(images)  # [n, 3, 224, 224] -> [n, 1000]

    Each member has one process or more. Workers of one member share its weights where trims_shim
    shares them. Any thread may call; in a forked child an ensemble cannot be used.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        devices: Sequence[Device | str] | None = None,
        allocation: Allocation | None = None,
        combine: str | Combine = "mean",
        segment_size: int | None = None,
        max_segments: int | None = None,
        restarts: int = 3,
    ) -> None:
        """Start all workers, and wait until they have loaded their models.

        ``devices``: by default the GPUs, and the processor if there are none (or an allocation has
        a row for it). ``allocation``: a row for each device, a column for each member
        (:func:`~.measure`, :func:`~.optimise`); by default each member has one worker, with
        batches of 8, and members are dealt to the devices in turn. ``combine``: see
        :func:`~.combine.combine_of`; a function gets the outputs by member, and runs in the thread
        that serves all workers. ``segment_size``: so many samples are combined at a time, by
        default 128, or the largest batch size.
        ``max_segments``: so many may be under way; by default, as many as keep all workers busy.
        ``restarts``: how often a worker that dies is started again.

        Raises ValueError or TypeError for what cannot be, EnsembleError for a load function that
        another process cannot find, MemberFailed if a member cannot be loaded, OSError if no
        process can be started.
        """
        if not isinstance(allocation, Allocation | None):
            raise TypeError(
                f"allocation is {allocation!r}; give an Allocation, such as "
                "Allocation(((8, 0), (0, 16)))"
            )
        self.members = tuple(members)
        _check(self.members, segment_size, max_segments, restarts)
        self.devices = _found(devices, allocation)
        self.allocation = allocation or _dealt(self.devices, self.members)
        _check_allocation(self.allocation, self.devices, self.members)
        if segment_size is None:
            segment_size = max(_SEGMENT_SIZE, *map(max, self.allocation.batch_sizes))
        weights = {member.name: member.weight for member in self.members}
        if max_segments is None:
            max_segments = _enough_segments(self.allocation, segment_size)
        self._system = System(
            {member.name: pickled(member.load, member.name) for member in self.members},
            self.devices,
            self.allocation,
            combine=combine_of(combine, weights),
            segment_size=segment_size,
            max_segments=max_segments,
            restarts=restarts,
        )
        self._end = weakref.finalize(self, self._system.close, wait=False)
        try:
            self._system.wait_ready()
        except BaseException:
            self._end()
            raise

    def predict(self, samples: Any) -> Any:
        """The combined result of all members for ``samples``, an array ``[n, ...]`` or more.

        Arrays, tensors, lists of n things, and mappings, tuples and dataclasses of these. Blocks.
        Raises ValueError for no samples, MemberFailed if a member fails, EnsembleError when closed,
        and what combining their outputs raises.
        """
        return self.submit(samples).result()

    def submit(self, samples: Any) -> Future[Any]:
        """As :meth:`predict`, but only begin.

        Blocks while as many segments are under way as may be. The future cannot be cancelled.
        """
        count = count_of(samples)
        if not count:
            raise ValueError("there are no samples to answer")
        return self._system.submit(samples, count)

    async def aio(self, samples: Any) -> Any:
        """As :meth:`predict`, awaited."""
        future = await asyncio.to_thread(self.submit, samples)
        return await asyncio.wrap_future(future)

    def stats(self) -> EnsembleStats:
        """What it has done so far, and which workers there are."""
        workers = tuple(Worker(*each) for each in self._system.workers())
        return EnsembleStats(**self._system.counts, workers=workers)

    def close(self, *, wait: bool = True) -> None:
        """End the workers; with ``wait``, after the calls that are under way, which else fail."""
        self._system.close(wait=wait)
        self._end.detach()  # else it would wait once more for a callback that waits

    def __enter__(self) -> Ensemble:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(wait=kind is None)


def names_of(members: Sequence[Member]) -> list[str]:
    """The names of members, in their order.

    Raises ValueError if two are equal, TypeError for what is no :class:`Member`.
    """
    for member in members:
        if not isinstance(member, Member):
            raise TypeError(f"a member is {member!r}; give a Member, such as Member('a', load)")
    names = [member.name for member in members]
    if len(set(names)) < len(names):
        raise ValueError(f"members need names of their own: {', '.join(names)}")
    return names


def _check(
    members: Sequence[Member], segment_size: int | None, max_segments: int | None, restarts: int
) -> None:
    if not names_of(members):
        raise ValueError("an ensemble needs a member")
    for member in members:
        check_amount(f"the weight of {member.name!r}", member.weight)
    total = sum(member.weight for member in members)
    if not total:
        raise ValueError("all members have a weight of 0")
    if total == float("inf"):
        raise ValueError("the weights of all members are too large for a sum")
    if segment_size is not None:
        whole("segment_size", segment_size, most=math.inf)
    if max_segments is not None:
        check_limit("max_segments", max_segments)
    check_limit("restarts", restarts, least=0)


def _check_allocation(
    allocation: Allocation, devices: Sequence[Device], members: Sequence[Member]
) -> None:
    allocation.check(len(devices), len(members))
    for member, sizes in zip(members, zip(*allocation.batch_sizes, strict=True), strict=True):
        if not any(sizes):
            raise ValueError(f"member {member.name!r} has no worker in the allocation")


def _found(
    devices: Sequence[Device | str] | None, allocation: Allocation | None
) -> tuple[Device, ...]:
    if devices is not None:
        return tuple(find_devices(devices))
    found = find_devices()
    if allocation is None or len(allocation.batch_sizes) < len(found):
        found = [device for device in found if not device.is_reserve]
    return tuple(found)


def _dealt(devices: Sequence[Device], members: Sequence[Member]) -> Allocation:
    """One worker each; nothing is known of memory, so members count as equal, and so do devices."""
    footprints = {device.kind: Footprint(1) for device in devices}
    profiles = {member.name: MemberProfile(footprints) for member in members}
    equal = [replace(device, memory_bytes=len(members)) for device in devices]
    return worst_fit_decreasing(Problem(equal, profiles, (_DEFAULT_BATCH_SIZE,)))


def _enough_segments(allocation: Allocation, segment_size: int) -> int:
    """Of each member, each worker has two batches, and one segment more is being filled."""
    most: int = max(sum(sizes) for sizes in zip(*allocation.batch_sizes, strict=True))
    return 2 + -(-2 * most // segment_size)
