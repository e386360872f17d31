"""Which workers of an ensemble run on which devices: the allocation matrix. Pure.

A row for each device, a column for each member; an element is the batch size of that member's
worker on that device, 0 for none. Each member has at least one worker. Several workers of a member
share its work (data parallelism); several workers on a device share the device.

Unlike the paper's, workers that share weights are counted so: devices with one *pool* of memory
(parts of a processor) hold the weights of a member once.

Source: Pochelu et al., "An efficient and flexible inference system for serving heterogeneous
ensembles of deep neural networks" (2022, arXiv:2208.14049), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.checks import check_amount, whole
from trims_shim.errors import PlanningError

__all__ = [
    "DEFAULT_BATCH_SIZES",
    "Allocation",
    "Device",
    "Footprint",
    "MemberProfile",
    "Problem",
    "worst_fit_decreasing",
]

DEFAULT_BATCH_SIZES = (8, 16, 32, 64, 128)
"""Those of the paper."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a member on one kind of device."""

    weights_bytes: int
    """Held once in a pool of memory, however many workers use them."""
    worker_bytes: int = 0
    """Of each worker: its runtime, its context, and weights that it cannot share."""
    sample_bytes: int = 0
    """Of each sample in a batch: inputs and activations."""

    def worker(self, batch_size: int) -> int:
        """The bytes of a worker, without shared weights."""
        return self.worker_bytes + batch_size * self.sample_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """Where workers run: ``cpu``, some cores as ``cpu:0-3``, or ``cuda:1``.

    Any other name is for planning only.
    """

    name: str
    memory_bytes: int
    """For workers and weights; equal for all devices of a pool."""
    kind: str = ""
    """Devices of a kind are equally fast. By default the name up to its colon."""
    pool: str = ""
    """Devices of one pool share their memory. By default each device is its own pool, except that
    all of the kind ``cpu`` are one."""
    is_reserve: bool = False
    """Whether members are first tried on others (a processor beside GPUs)."""

    def __post_init__(self) -> None:
        kind = self.kind or self.name.partition(":")[0]
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "pool", self.pool or ("cpu" if kind == "cpu" else self.name))


@dataclass(frozen=True, slots=True)
class MemberProfile:
    """What is known of a member, by kind of device; on kinds that are missing it cannot run."""

    footprints: Mapping[str, Footprint]
    latencies: Mapping[str, LatencyProfile] = field(default_factory=dict)
    """How long batches take alone on the device; only :func:`~.estimate.throughput` needs them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Raises ValueError without devices, members or batch sizes, and for contradictions."""

    devices: Sequence[Device]
    members: Mapping[str, MemberProfile]
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES
    """Those that are tried; the first one is for the first allocation (section 2.3)."""

    def __post_init__(self) -> None:
        if not self.devices or not self.members or not self.batch_sizes:
            raise ValueError("an allocation needs a device, a member and a batch size")
        for size in self.batch_sizes:
            whole("a size of batch_sizes", size)
        names = [device.name for device in self.devices]
        if len(set(names)) < len(names):
            raise ValueError(f"a device is given twice: {', '.join(names)}")
        for name, profile in self.members.items():
            for kind, footprint in profile.footprints.items():
                for what, size in asdict(footprint).items():
                    check_amount(f"{what} of {name!r} on {kind}", size, may_be_infinite=True)
        pools: dict[str, int] = {}
        for device in self.devices:
            check_amount(
                f"memory_bytes of {device.name!r}", device.memory_bytes, may_be_infinite=True
            )
            if pools.setdefault(device.pool, device.memory_bytes) != device.memory_bytes:
                raise ValueError(f"devices of the pool {device.pool!r} have different memory")

    def room_bytes(self, allocation: Allocation) -> dict[str, int]:
        """The memory that an allocation leaves, by pool; below 0 where it does not fit."""
        pools = dict.fromkeys(device.pool for device in self.devices)
        return {pool: self._room_in(pool, allocation) for pool in pools}

    def fits(self, allocation: Allocation) -> bool:
        """Whether each worker can run where it is, and memory suffices."""
        return all(self._runs_on(device, allocation) for device in range(len(self.devices))) and (
            min(self.room_bytes(allocation).values()) >= 0
        )

    def fits_on(self, device: int, allocation: Allocation) -> bool:
        """As :meth:`fits`, but of one device and its pool."""
        pool = self.devices[device].pool
        return self._runs_on(device, allocation) and self._room_in(pool, allocation) >= 0

    def _runs_on(self, device: int, allocation: Allocation) -> bool:
        kind, sizes = self.devices[device].kind, allocation.batch_sizes[device]
        return all(
            kind in profile.footprints
            for profile, size in zip(self.members.values(), sizes, strict=True)
            if size
        )

    def _room_in(self, pool: str, allocation: Allocation) -> int:
        memory_bytes = used_bytes = 0
        weights_bytes: dict[str, int] = {}
        for device, sizes in zip(self.devices, allocation.batch_sizes, strict=True):
            if device.pool != pool:
                continue
            memory_bytes = device.memory_bytes
            for (name, profile), size in zip(self.members.items(), sizes, strict=True):
                if size:
                    footprint = profile.footprints[device.kind]
                    used_bytes += footprint.worker(size)
                    weights_bytes[name] = max(weights_bytes.get(name, 0), footprint.weights_bytes)
        return memory_bytes - used_bytes - sum(weights_bytes.values())


@dataclass(frozen=True, slots=True)
class Allocation:
    """The matrix: ``batch_sizes[device][member]``, 0 for no worker."""

    batch_sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def none(cls, problem: Problem) -> Allocation:
        """No workers at all: where a search begins, not an allocation that can run."""
        return cls(((0,) * len(problem.members),) * len(problem.devices))

    def workers(self) -> Iterator[tuple[int, int, int]]:
        """The device, the member and the batch size of each worker, by number."""
        for device, row in enumerate(self.batch_sizes):
            for member, size in enumerate(row):
                if size:
                    yield device, member, size

    def check(self, devices: int, members: int) -> None:
        """Raise TypeError or ValueError unless it fits so many devices and members."""
        rows = self.batch_sizes
        if len(rows) != devices or any(len(row) != members for row in rows):
            raise ValueError(
                f"the allocation needs a row for each of {devices} devices, with a batch size for "
                f"each of {members} members"
            )
        for row in rows:
            for size in row:
                whole("a batch size of the allocation", size, least=0)

    def with_batch_size(self, device: int, member: int, size: int) -> Allocation:
        """The same but for one element."""
        row = list(self.batch_sizes[device])
        row[member] = size
        rows = list(self.batch_sizes)
        rows[device] = tuple(row)
        return Allocation(tuple(rows))

    @property
    def is_complete(self) -> bool:
        """Whether each member has a worker."""
        return all(map(any, zip(*self.batch_sizes, strict=True)))


def worst_fit_decreasing(problem: Problem) -> Allocation:
    """One worker for each member: large members first, each where most memory is left.

    All have the problem's first batch size. Where a member finds no room, all are placed anew after
    that one, as others may have taken the only place that it has. Raises PlanningError if there
    still is a member without room.

    Source: Algorithm 1, which gives up at once.
    """
    order = sorted(problem.members, key=lambda name: -_largest_bytes(problem, name))
    errors: list[PlanningError] = []
    for _ in range(1 + len(order)):
        allocation, homeless = _dealt(problem, order)
        if homeless is None:
            return allocation
        errors.append(_no_room(problem, allocation, homeless))
        order.remove(homeless)
        order.insert(0, homeless)
    raise errors[0]


def _dealt(problem: Problem, order: Sequence[str]) -> tuple[Allocation, str | None]:
    """Place members in this order, until one finds no room; return that one, too."""
    allocation = Allocation.none(problem)
    names = list(problem.members)
    for name in order:
        placed = _placed(problem, allocation, names.index(name))
        if placed is None:
            return allocation, name
        allocation = placed
    return allocation, None


def _largest_bytes(problem: Problem, name: str) -> int:
    size = problem.batch_sizes[0]
    footprints = problem.members[name].footprints.values()
    return max((each.weights_bytes + each.worker(size) for each in footprints), default=0)


def _placed(problem: Problem, before: Allocation, member: int) -> Allocation | None:
    found: list[tuple[bool, int, int, int, Allocation]] = []
    room = problem.room_bytes(before)
    for index, device in enumerate(problem.devices):
        allocation = before.with_batch_size(index, member, problem.batch_sizes[0])
        if problem.fits_on(index, allocation):
            room_bytes = room[device.pool]
            workers = sum(map(bool, before.batch_sizes[index]))
            found.append((device.is_reserve, -room_bytes, workers, index, allocation))
    return min(found, key=lambda each: each[:-1])[-1] if found else None


def _no_room(problem: Problem, before: Allocation, name: str) -> PlanningError:
    kinds = problem.members[name].footprints
    usable = [device for device in problem.devices if device.kind in kinds]
    if not usable:
        return PlanningError(
            f"member {name!r} runs on {', '.join(kinds) or 'no kind of device'}; there is none "
            "among the devices"
        )
    room = problem.room_bytes(before)
    left = ", ".join(f"{room[each.pool] / 1e9:.3g} GB on {each.name}" for each in usable)
    needed = kinds[usable[0].kind]
    size = problem.batch_sizes[0]
    needed_bytes = needed.weights_bytes + needed.worker(size)
    return PlanningError(
        f"member {name!r} finds no room: for batches of {size} it needs {needed_bytes / 1e9:.3g} "
        f"GB on {usable[0].name}, and there are {left} left; give fewer or smaller members, "
        "smaller batches first, or more devices"
    )
