"""The tiers of a daemon: host memory, and one for each device that a client has asked for.

A tier is a store that decides and a loader that executes. Device tiers are made on first use, in a
thread of their own, because nothing here touches the driver before a client wants a device, and the
event loop never does. A driver that hangs costs those who ask for that device some patience, once.
Used by the server's thread only, unless a method says otherwise.

This module also decides how much of a tier's budget cannot be had: the rest of the machine and of a
device belongs to others, who come and go.
"""

from __future__ import annotations

import abc
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from trims_shim.config import Config, ShareOrSize
from trims_shim.daemon.device.loader import DeviceLoader
from trims_shim.daemon.device.peer_copying import PeerCopies
from trims_shim.daemon.device.uploading import Uploader
from trims_shim.daemon.eviction import eviction_policy
from trims_shim.daemon.loader import Loader, Loads
from trims_shim.daemon.recent import Recent
from trims_shim.daemon.store import DIGITS_NEEDED, Store
from trims_shim.daemon.workers import Workers
from trims_shim.errors import DriverFailure, TrimsError, UnknownDevice, UnknownImage
from trims_shim.memory import nvml
from trims_shim.memory.device import DeviceMemory
from trims_shim.memory.driver import driver
from trims_shim.memory.limits import available_bytes, memory_limit_bytes
from trims_shim.specs import AS_IS, HOST_TIER, DeviceId, Digest, Identity, Variant
from trims_shim.wire import admin

__all__ = ["DeviceSettings", "DeviceTier", "HostTier", "Tier", "Tiers"]

_logger = logging.getLogger("trims_shim.daemon")

_MARGIN_FRACTION = 32
"""One part in this many of the memory is left to others, unless a setting says how much."""
_TRY_AGAIN_S = 30.0
"""A device that could not be shared is looked at again: drivers come up after daemons."""
_DRIVER_PATIENCE_S = 20.0
"""The driver may take some ten seconds to start on a machine of many GPUs."""
_DEVICE_ID = re.compile(r"(GPU|MIG)-[0-9a-f-]{36}")
_UNAVAILABLE_LIMIT = 64


class DeviceSettings(NamedTuple):
    """The settings of device tiers; ``backend`` is ``vmm``, ``ipc`` or ``off``.

    ``has_peers``: images may be copied from one device to another.
    """

    backend: str
    budget: ShareOrSize
    headroom: ShareOrSize
    has_peers: bool
    uploader_idle_s: float
    eviction: str

    @classmethod
    def of(cls, config: Config) -> DeviceSettings:
        """What the daemon's settings say."""
        return cls(
            backend=config.device_backend,
            budget=config.device_bytes,
            headroom=config.device_headroom_bytes,
            has_peers=config.device_peers,
            uploader_idle_s=config.uploader_idle,
            eviction=config.eviction,
        )


class Tier(abc.ABC):
    """One tier. ``name`` is ``host`` or a device's id."""

    def __init__(self, name: str, store: Store, loader: Loads[Any]) -> None:
        self.name = name
        self.store = store
        self.loader = loader

    @abc.abstractmethod
    def withheld_bytes(self, image_bytes: int) -> int:
        """The part of the budget that lingering images take, or that such a load cannot have."""

    @abc.abstractmethod
    def missing_bytes(self) -> int:
        """How much has to be given back now, so that others have the memory left to them.

        Free images are evicted for it.
        """

    def close(self) -> None:
        """Wait for loads under way, then give everything up."""
        self.loader.close()


class HostTier(Tier):
    """Host memory."""

    loader: Loader

    def __init__(self, store: Store, loader: Loader, headroom: ShareOrSize | None = None) -> None:
        """``headroom`` is left to programs; None: a margin, and what a load may cost them.

        A program that writes all of a model's weights has a copy of its own beside the image. So a
        load leaves room for one: else programs would run out of memory that run without the cache.
        """
        super().__init__(HOST_TIER, store, loader)
        self.outline_bytes: Callable[[], int] = lambda: 0
        """Host memory that the images of device tiers take."""
        self._headroom = headroom
        self._leaves_room_for_a_copy = headroom is None

    def withheld_bytes(self, image_bytes: int) -> int:
        """See :class:`Tier`."""
        left = self._margin_bytes() + image_bytes * self._leaves_room_for_a_copy
        # Measured first: memory allocated meanwhile counts as taken twice, not free twice.
        held = self.loader.memory.held_bytes()
        usable = max(0, held + available_bytes() - left)
        taken = max(0, self.lingering_bytes()) + self.outline_bytes()
        return max(taken, self.store.totals().budget_bytes - usable)

    def missing_bytes(self) -> int:
        """See :class:`Tier`."""
        return self._margin_bytes() - available_bytes()

    def _margin_bytes(self) -> int:
        """Of the memory as it is limited now: limits of cgroups change."""
        total = memory_limit_bytes()
        return self._headroom.of(total) if self._headroom else total // _MARGIN_FRACTION

    def lingering_bytes(self) -> int:
        """Bytes of evicted images that a process still maps; -1 if the kernel does not say."""
        held = self.loader.memory.held_bytes()
        used = self.loader.memory.used_bytes()
        return -1 if used is None else max(0, used - held)


class DeviceTier(Tier):
    """The memory of one device."""

    loader: DeviceLoader

    def __init__(
        self,
        device: DeviceId,
        store: Store,
        loader: DeviceLoader,
        *,
        label: str,
        total_bytes: int,
        budget: ShareOrSize,
        headroom_bytes: int,
    ) -> None:
        """``label`` is what people call the device."""
        super().__init__(device, store, loader)
        self.label = label
        self.total_bytes = total_bytes
        self._budget = budget
        self.headroom_bytes = headroom_bytes
        self._reachable_bytes: int | None = None
        self._left_bytes = 0
        """At least this was left to us by other programs when it was last measured."""
        # Not the loader's: NVML may hang with a device, and nobody is to wait for it.
        self._measurer = Workers(1)
        self._measuring: Future[None] | None = None

    def rank_of(self, peer: DeviceTier) -> int | None:
        """How good the link from another device is, 0 the best; None if none is to be used."""
        peers = self.loader.peers
        return None if peers is None else peers.rank(peer.name)

    def measure(self) -> None:
        """Measure how much memory we have or could have. Blocks: NVML may hang with a device."""
        while True:
            ours, resident = self.loader.allocated_bytes(), self._resident_bytes()
            free = nvml.free_bytes(self.name)
            if ours == self.loader.allocated_bytes():
                # Only the sum is kept: what we allocate or free later does not change it.
                self._reachable_bytes = None if free is None else free + ours
                # What a load is about to allocate is ours already, and still free. An image is not.
                surely_ours = min(resident, self._resident_bytes())
                self._left_bytes = 0 if free is None else free + surely_ours
                return

    def _resident_bytes(self) -> int:
        return self.store.totals().resident_bytes

    def measure_soon(self) -> None:
        """Measure in a thread of its own, unless it still does."""
        if self._measuring is None or self._measuring.done():
            self._measuring = self._measurer.submit(self._measure_or_warn)

    def _measure_or_warn(self) -> None:
        try:
            self.measure()
        # Border: nobody waits for it, and it is tried again.
        except Exception as error:
            _logger.warning("%s cannot be measured: %s", self.name, error)

    def grow(self) -> None:
        """Take a budget that is a share of more, if other programs leave more than ever before."""
        self.store.grow(self._budget.of(self._left_bytes))

    def close(self) -> None:
        """See :class:`Tier`."""
        self._measurer.shutdown(wait=False)
        super().close()

    def free_bytes(self) -> int:
        """Memory of the device that was free a moment ago; -1 if NVML does not say."""
        if self._reachable_bytes is None:
            return -1
        return max(0, self._reachable_bytes - self.loader.allocated_bytes())

    def withheld_bytes(self, image_bytes: int) -> int:
        """See :class:`Tier`; the head-room does not depend on the image."""
        if self._reachable_bytes is None:
            return 0
        usable = self._reachable_bytes - self.headroom_bytes
        return max(0, self.store.totals().budget_bytes - usable)

    def missing_bytes(self) -> int:
        """See :class:`Tier`."""
        if self._reachable_bytes is None:
            return 0
        return self.headroom_bytes - self.free_bytes() - self.loader.leaving_bytes()

    def status(self) -> admin.DeviceStatus:
        """What ``trims status`` shows."""
        totals = self.store.totals()
        return admin.DeviceStatus(
            device=self.name,
            name=self.label,
            backend=self.loader.memory.backend,
            total_bytes=self.total_bytes,
            free_bytes=self.free_bytes(),
            budget_bytes=totals.budget_bytes,
            headroom_bytes=self.headroom_bytes,
            resident_bytes=totals.resident_bytes,
            reserved_bytes=totals.reserved_bytes,
            # The driver does not say who maps what we have given up.
            lingering_bytes=-1,
        )


Ready = Callable[[Tier | TrimsError], None]
"""Called with the tier that was asked for, or why there is none."""


@dataclass(slots=True)
class _Making:
    """A tier that is being made, and who waits for it: nobody if the driver hangs."""

    since_s: float
    waiting: list[Ready]
    is_stuck: bool = False


class Tiers:
    """All tiers, the host's first."""

    def __init__(
        self,
        host: HostTier,
        settings: DeviceSettings,
        *,
        numbers: Iterator[int],
        wake: Callable[[], None],
        pool: Executor | None = None,
        trusts_young_files: bool = False,
    ) -> None:
        """``numbers`` is the counter of the host's store, too; the rest is for the loaders."""
        self.host = host
        self.settings = settings
        self._numbers = numbers
        self._wake = wake
        self._pool = pool
        self._trusts_young_files = trusts_young_files
        self._devices: dict[DeviceId, DeviceTier] = {}
        self._making: dict[DeviceId, _Making] = {}
        self._has_made = False
        self._maker = pool
        """Its thread makes the tiers of devices, and is started for the first of them."""
        self._unavailable: Recent[DeviceId, tuple[float, str]] = Recent(_UNAVAILABLE_LIMIT)
        host.outline_bytes = lambda: sum(each.loader.outline_bytes() for each in self.devices)

    def __iter__(self) -> Iterator[Tier]:
        return iter([self.host, *self._devices.values()])

    @property
    def devices(self) -> list[DeviceTier]:
        """Device tiers, in the order in which they were first asked for."""
        return list(self._devices.values())

    def named(self, name: str) -> Tier:
        """The tier of this name. Raises UnknownDevice if nobody has asked for it yet."""
        for tier in self:
            if tier.name == name:
                return tier
        raise UnknownDevice(f"no images on {name[:80]!r}; `trims status` shows the devices")

    def when_ready(self, name: str, ready: Ready) -> None:
        """Call ``ready`` with the tier, at once if that is possible."""
        if name == HOST_TIER:
            ready(self.host)
        elif name in self._devices:
            ready(self._devices[name])
        elif name in self._making and not self._making[name].is_stuck:
            self._making[name].waiting.append(ready)
        elif (refusal := self._refusal(name)) is not None:
            ready(refusal)
        else:
            self._begin(name, ready)

    def ready(self, name: str) -> Tier | None:
        """The tier of this name, if it is there already."""
        return self.host if name == HOST_TIER else self._devices.get(name)

    def is_making(self) -> bool:
        """Whether requests wait for a tier that is being made."""
        return any(not each.is_stuck for each in self._making.values())

    def find(
        self,
        text: str,
        *,
        user: int,
        may_see_all: bool,
        tier: str = "",
        prefers_pinned: bool = False,
    ) -> Digest:
        """The image that a digest prefix or a name means, in one tier or in all of them.

        See :meth:`Store.named`. Raises UnknownImage, UnknownDevice.
        """
        tiers = [self.named(tier)] if tier else list(self)
        matches = {digest for each in tiers for digest in each.store.matching(text)}
        if len(matches) > 1:
            raise UnknownImage(f"{text} means {len(matches)} images; write more digits")
        named = (
            each.store.named(text, user=user, may_see_all=may_see_all, is_pinned=is_pinned)
            for is_pinned in ((True, False) if prefers_pinned else (False,))
            for each in tiers
        )
        for digest in (*matches, *named):
            if digest is not None:
                return digest
        few = (
            "" if len(text) >= DIGITS_NEEDED else f" (of a digest, {DIGITS_NEEDED} digits or more)"
        )
        # Whether another user has loaded it is not told.
        advice = (
            "`trims ls` shows them" if may_see_all else "load its file first if another user has"
        )
        raise UnknownImage(f"no resident image {text!r}{few}; {advice}")

    def holding(self, digest: Digest, *, tier: str = "") -> list[Tier]:
        """Tiers where an image is resident; all of them, or the one of a name."""
        tiers = [self.named(tier)] if tier else list(self)
        return [each for each in tiers if each.store.is_resident(digest)]

    def trusted_digest(
        self, user: int, identity: Identity, variant: Variant = AS_IS
    ) -> Digest | None:
        """As :meth:`Store.trusted_digest`, from any tier that knows."""
        found = (each.store.trusted_digest(user, identity, variant) for each in self)
        return next((digest for digest in found if digest is not None), None)

    def peer_with(self, digest: Digest, tier: DeviceTier) -> DeviceTier | None:
        """The device with this image that is nearest to a tier's device, if there is any."""
        ranks = {
            each: tier.rank_of(each) for each in self.devices if each.store.is_resident(digest)
        }
        reachable = {each: rank for each, rank in ranks.items() if rank is not None}
        return min(reachable, key=lambda each: reachable[each], default=None)

    def lease_count(self, session: int | None = None) -> int:
        """Leases of one session, or of all."""
        return sum(each.store.lease_count(session) for each in self)

    def ingest_count(self) -> int:
        """Loads under way."""
        return sum(each.store.ingest_count() for each in self)

    def descriptor_count(self) -> int:
        """Descriptors that images hold; one for each image that is being loaded."""
        return self.ingest_count() + sum(each.loader.descriptor_count() for each in self)

    def is_loading(self) -> bool:
        """Whether any load under way makes progress."""
        return any(each.store.ingest_count() > each.loader.stuck_count() for each in self)

    def is_needed(self) -> bool:
        """Whether anybody leases, waits for or has pinned anything.

        Loads that are stuck do not count.
        """
        is_busy = self.is_making() or self.is_loading()
        return is_busy or any(each.store.is_needed() for each in self)

    def release(self, session: int, lease: int, now_ns: int) -> None:
        """The client gave a lease up, at whichever tier."""
        for each in self:
            if each.store.release(session, lease, now_ns):
                return

    def close_session(self, session: int, now_ns: int) -> None:
        """The connection is gone, and with it what it held at every tier."""
        for each in self:
            each.store.close_session(session, now_ns)

    def tend(self) -> None:
        """Do periodic work; call about every second."""
        for each in self:
            each.loader.tend()
        for device in self.devices:
            device.grow()
            device.measure_soon()
        stuck_since_s = time.monotonic() - _DRIVER_PATIENCE_S
        for name, making in self._making.items():
            if not making.is_stuck and making.since_s <= stuck_since_s:
                making.is_stuck = True
                refusal = UnknownDevice(self._driver_hangs(name))
                _logger.warning("%s", refusal)
                self._answer(making, refusal)

    def close(self) -> None:
        """Wait for loads under way, then give everything up."""
        # The host's last: images that leave a device go there.
        for each in reversed(list(self)):
            each.close()
        if isinstance(self._maker, Workers):
            self._maker.shutdown(wait=False)

    # --- making a device's tier -------------------------------------------------------------------

    def _refusal(self, name: str) -> UnknownDevice | None:
        """Why a device is refused without a search, if it is."""
        if self.settings.backend == "off":
            return UnknownDevice("device memory is not shared here: TRIMS_DEVICE_BACKEND=off")
        if not _DEVICE_ID.fullmatch(name):
            return UnknownDevice(f"{name[:80]!r} is not the id of a device (GPU-... or MIG-...)")
        if name in self._making:
            return UnknownDevice(self._driver_hangs(name))
        moment, reason = self._unavailable.get(name, (0.0, ""))
        is_fresh = reason and time.monotonic() < moment + _TRY_AGAIN_S
        return UnknownDevice(reason) if is_fresh else None

    @staticmethod
    def _driver_hangs(device: DeviceId) -> str:
        return f"{device}: its driver has not answered for {_DRIVER_PATIENCE_S:g} s"

    def _begin(self, device: DeviceId, ready: Ready) -> None:
        self._making[device] = _Making(time.monotonic(), [ready])
        try:
            self._maker = self._maker or Workers(1)
        except RuntimeError as error:
            self._made(device, error)
            return
        self.host.loader.run(
            lambda: self._make(device), lambda made: self._made(device, made), pool=self._maker
        )

    def _make(self, device: DeviceId) -> DeviceTier:
        """In a thread. Raises UnknownDevice."""
        settings = self.settings
        if not nvml.is_installed():
            raise UnknownDevice(
                f"{device} is not shared: without the package nvidia-ml-py nothing tells when "
                f"other programs need its memory; {nvml.INSTALL}"
            )
        uploader = Uploader(
            device,
            backend=settings.backend,
            idle_s=settings.uploader_idle_s,
            on_death=self._wake,
        )
        # The first load waits for it, and for the driver here: they start at the same time. Only
        # once, as anybody may ask for devices that do not exist.
        if not self._has_made:
            self._has_made = True
            uploader.start()
        try:
            return self._tier_of(device, uploader)
        except BaseException as error:
            uploader.close()
            if isinstance(error, DriverFailure):
                # Clients show it, who may see the device: "this process" in it is not theirs.
                raise UnknownDevice(f"the daemon cannot share {device}: {error}") from error
            raise

    def _tier_of(self, device: DeviceId, uploader: Uploader) -> DeviceTier:
        settings = self.settings
        info = driver().devices()[driver().index_of(device)]
        memory = DeviceMemory(device, settings.backend)
        free = nvml.free_bytes(device)
        budget_bytes = settings.budget.of(info.total_bytes if free is None else free)
        store = Store(
            budget_bytes,
            policy=eviction_policy(settings.eviction, budget_bytes),
            footprint_bytes=memory.footprint_bytes,
            numbers=self._numbers,
            tier=f"tier of {device}",
            settings="TRIMS_DEVICE",
        )
        loader = DeviceLoader(
            memory,
            uploader,
            wake=self._wake,
            peers=self._peers_of(device),
            pool=self._pool,
            trusts_young_files=self._trusts_young_files,
        )
        try:
            tier = DeviceTier(
                device,
                store,
                loader,
                label=info.name,
                total_bytes=info.total_bytes,
                budget=settings.budget,
                headroom_bytes=settings.headroom.of(info.total_bytes),
            )
        except RuntimeError:  # no more threads
            loader.close()
            raise
        tier.measure()
        return tier

    def _peers_of(self, device: DeviceId) -> PeerCopies | None:
        """How images come to a device from others; None if they do not."""
        # Memory of the backend ipc can be opened only by the device that it was made on.
        if self.settings.backend != "vmm" or not self.settings.has_peers:
            return None
        try:
            ranks = driver().peers(driver().index_of(device))
        except DriverFailure as error:
            _logger.warning("%s: nothing is copied from other devices: %s", device, error)
            return None
        if not ranks:
            return None
        idle_s = self.settings.uploader_idle_s
        return PeerCopies(ranks, Uploader(device, backend="vmm", idle_s=idle_s, peers=tuple(ranks)))

    def _made(self, device: DeviceId, made: DeviceTier | Exception) -> None:
        answer: Tier | TrimsError
        if isinstance(made, DeviceTier):
            answer = self._devices[device] = made
            _logger.info("device tier %s (%s)", device, made.label)
        else:
            answer = made if isinstance(made, UnknownDevice) else UnknownDevice(f"{device}: {made}")
            self._note_refusal(device, str(answer))
        self._answer(self._making.pop(device), answer)

    @staticmethod
    def _answer(making: _Making, answer: Tier | TrimsError) -> None:
        waiting, making.waiting = making.waiting, []
        for ready in waiting:
            ready(answer)

    def _note_refusal(self, device: DeviceId, reason: str) -> None:
        is_full = len(self._unavailable) >= _UNAVAILABLE_LIMIT
        # No machine has so many devices: somebody makes ids up.
        if device not in self._unavailable and not is_full:
            _logger.warning("%s", reason)
        self._unavailable.put(device, (time.monotonic(), reason))
