"""Executes loads of a device tier: device memory made here, filled by the uploader.

Owns the segments of the device's images, as :class:`~trims_shim.daemon.loader.Loader` does those of
the host tier, and copies evicted images back to the host tier. Makes and exports memory without a
context; reads a file only to hash it.

Other programs take memory without asking, so the driver may have less than the account says. Then
the load waits (:class:`~trims_shim.daemon.device.account.Shortage`) while unused images are given
up, and tries again.

The memory of an image that leaves is held until it has been copied to the host tier. A load that
started later allocates nothing before that, so that both never have to fit at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

from trims_shim.daemon.device.account import Account, Shortage
from trims_shim.daemon.device.peer_copying import PeerCopies, PeerImage
from trims_shim.daemon.device.uploading import Job, Uploader
from trims_shim.daemon.ingest import Meter
from trims_shim.daemon.loader import Finished, Hashing, Load, Loads
from trims_shim.daemon.recent import Recent
from trims_shim.daemon.values import Ingested, StartIngest
from trims_shim.errors import (
    DriverFailure,
    NoSpace,
    ReadFailed,
    TrimsError,
    UnknownDevice,
    WireError,
)
from trims_shim.memory.device import (
    DeviceAllocation,
    DeviceMemory,
    DeviceSegment,
    seal_outline,
    sparse_outline,
)
from trims_shim.memory.held import charged_bytes
from trims_shim.memory.host import HostMemory, SealedSegment
from trims_shim.memory.mapping import round_up
from trims_shim.printable import printable
from trims_shim.specs import Digest
from trims_shim.wire import duties

__all__ = ["DeviceLoader"]

_logger = logging.getLogger("trims_shim.daemon")

_TRIES = 2
"""A load is repeated once when the uploader dies of another load."""
_SHORTAGES = 4
"""How often a load is given room, each time as much as it needs. A program that takes all of that
as well, while it becomes free, may have it."""
_WARNING_INTERVAL_S = 60.0
"""Between warnings of one cause."""
_CAUSES_LIMIT = 64

_Result = TypeVar("_Result")


@dataclasses.dataclass(slots=True)
class _DeviceLoad(Load):
    """``source`` is tried first, and owned; ``leaver`` is the last image to wait for."""

    source: PeerImage | None = None
    leaver: int = 0

    def take_source(self) -> PeerImage | None:
        """The caller owns it from here on."""
        source, self.source = self.source, None
        return source


class DeviceLoader(Loads[DeviceSegment]):
    """See the module docstring. Methods are called by the server's thread, unless they say so."""

    def __init__(
        self,
        memory: DeviceMemory,
        uploader: Uploader,
        *,
        wake: Callable[[], None],
        peers: PeerCopies | None = None,
        pool: Executor | None = None,
        trusts_young_files: bool = False,
    ) -> None:
        """``peers``: the devices that images may be copied from; None if there are none."""
        super().__init__(wake=wake, pool=pool, trusts_young_files=trusts_young_files)
        self.memory = memory
        self.uploader = uploader
        self.peers = peers
        self._account = Account()
        self._from_peers: set[int] = set()
        self._shortages: queue.SimpleQueue[Shortage] = queue.SimpleQueue()
        self._warned_s: Recent[str, float] = Recent(_CAUSES_LIMIT)
        self._warning = threading.Lock()
        # With a pool that does all our work in one thread, no thread could copy images meanwhile.
        self._may_demote = pool is None
        self._is_closing = threading.Event()
        self._retiring: Future[None] | None = None

    def allocated_bytes(self) -> int:
        """Device memory that we allocated. Any thread may ask."""
        return self._account.allocated_bytes

    def leaving_bytes(self) -> int:
        """The part of it that is already being given back."""
        return self._account.leaving_bytes

    def outline_bytes(self) -> int:
        """Host memory that the outlines of resident images take."""
        return sum(charged_bytes(each.outline) for each in list(self._segments.values()))

    def descriptor_count(self) -> int:
        """See :meth:`Loads.descriptor_count`: one for the outline, one for each allocation."""
        return sum(1 + len(each.descriptors) for each in self._segments.values())

    def lost(self) -> list[Digest]:
        """Resident images whose memory has gone with the process that made it (backend ``ipc``)."""
        return [
            digest
            for digest, segment in self._segments.items()
            if segment.job and not self.uploader.keeps(segment.job)
        ]

    def demote(
        self,
        digest: Digest,
        ingest: int,
        *,
        to: HostMemory,
        deliver: Callable[[Finished[SealedSegment]], None],
    ) -> None:
        """Give an image up once it is copied to the host tier, which ends its load ``ingest``."""
        segment = self._segments.pop(digest)
        size = segment.resident_bytes()
        self._account.begin_leaving(size)

        def leave() -> None:
            finished = self._copied(segment, digest, ingest, to)
            self._give_up(segment)
            self._account.end_leaving(size)
            if finished.error is not None:  # Nobody waits for the image, who would be told.
                what = f"image {digest[:12]} cannot be moved from {self.memory.device}"
                self._warn(what, finished.error)
            deliver(finished)

        # Not in a thread of the loads, which wait for it.
        self._aside.submit(leave)

    def hashing(self, digest: Digest) -> Hashing:
        """See :meth:`Loads.hashing`: the bytes in device memory, read back through the host."""
        held = self._segments[digest].hold()

        def compute() -> Digest:
            with open(os.devnull, "wb") as nowhere:
                return self._read_back(held, nowhere.fileno())

        return Hashing(compute, held.close)

    def take_shortages(self) -> list[Shortage]:
        """Loads that wait for memory; each has to be answered."""
        found = []
        while not self._shortages.empty():
            found.append(self._shortages.get())
        return found

    def was_copied(self, ingest: int) -> bool:
        """Whether a load that has ended took its image from another device. Asked once."""
        is_copied = ingest in self._from_peers
        self._from_peers.discard(ingest)
        return is_copied

    def tend(self) -> None:
        """See :meth:`Loads.tend`."""
        super().tend()
        for uploader in self._uploaders():
            uploader.tend()
        is_retiring = self._retiring is not None and not self._retiring.done()
        if not is_retiring and any(each.is_idle() for each in self._uploaders()):
            # Not here: starting the next process may hang, with the disk its interpreter is on.
            self._retiring = self._aside.submit(self._retire_uploaders)

    def close(self) -> None:
        """See :meth:`Loads.close`; ends the uploaders."""
        self._is_closing.set()
        for shortage in self.take_shortages():
            shortage.answer(is_relieved=False)
        super().close()
        for uploader in self._uploaders():
            uploader.close()

    def start(
        self,
        action: StartIngest,
        descriptor: int,
        *,
        digest: Digest = "",
        meter: Meter | None = None,
        source: PeerImage | None = None,
    ) -> None:
        """See :meth:`Loads.start`. ``source`` is tried first, and owned from here on."""
        load = _DeviceLoad(action, descriptor, digest, meter or Meter())
        load.source, load.leaver = source, self._account.last_leaver()
        self._begin(load)

    def _abandon(self, load: Load) -> None:
        super()._abandon(load)
        assert isinstance(load, _DeviceLoad)
        source = load.take_source()
        if source is not None:
            source.segment.close()

    # --- worker threads ---------------------------------------------------------------------------

    def _load(self, load: Load) -> tuple[Ingested, DeviceSegment | None]:
        assert isinstance(load, _DeviceLoad)
        copied = self._copy(load)
        if copied is not None:
            return copied
        if load.action.is_likely_known and not load.digest:
            known = self._known(load)
            if known is not None:
                return known, None
        try:
            segment, computed = self._with_room(load, lambda: self._upload(load))
        except NoSpace as error:
            self._warn(f"{load.opening.name} cannot be put on {self.memory.device}", error)
            raise
        try:
            is_settled = bool(load.digest) or load.check_unchanged()
        except BaseException:
            self._give_up(segment)
            raise
        digest = load.digest or computed
        return load.ended(digest, segment.resident_bytes(), is_settled=is_settled), segment

    def _with_room(self, load: _DeviceLoad, attempt: Callable[[], _Result]) -> _Result:
        """Return the result of an attempt; repeat it while there is something to give up."""
        for _ in range(_SHORTAGES):
            try:
                return attempt()
            except NoSpace:
                if not self._is_relieved(load):
                    raise
        return attempt()

    def _is_relieved(self, load: _DeviceLoad) -> bool:
        wanted_bytes = load.opening.identity.size_bytes
        shortage = Shortage(wanted_bytes, may_demote=self._may_demote)
        self._shortages.put(shortage)
        if self._is_closing.is_set():
            shortage.answer(is_relieved=False)
        self._wake()
        if not shortage.wait():
            return False
        # The images just given up may have to be copied away first.
        load.leaver = self._account.last_leaver()
        return True

    def _copy(self, load: _DeviceLoad) -> tuple[Ingested, DeviceSegment] | None:
        """The image, copied from another device; None if it has to come from elsewhere."""
        source = load.take_source()
        if source is None:
            return None
        name, device = load.opening.name, source.segment.device
        try:
            segment = self._with_room(load, lambda: self._copy_once(load, source))
        # NoSpace too: perhaps only the context of another uploader has no room.
        except (TrimsError, OSError) as error:
            self._warn(f"{name} cannot be copied from {device}", error)
            return None
        finally:
            source.segment.close()
        self._from_peers.add(load.action.ingest)
        return load.ended(source.digest, segment.resident_bytes(), is_settled=True), segment

    def _copy_once(self, load: _DeviceLoad, source: PeerImage) -> DeviceSegment:
        peers = self.peers
        if peers is None:
            raise DriverFailure(f"{self.memory.device} has no peers")
        self._account.wait_for(load.leaver)
        on_progress = load.meter.from_here()
        with self._memory_for(sum(source.segment.allocations)) as memory:
            if memory is None:
                raise DriverFailure(f"memory of {self.memory.backend} is not copied")
            peers.copy(source, memory, on_progress)
            return dataclasses.replace(
                source.segment,
                device=self.memory.device,
                descriptors=memory.descriptors,
                # Nobody can change the outline, so both images share it.
                outline=os.dup(source.segment.outline),
            )

    def _upload(self, load: _DeviceLoad) -> tuple[DeviceSegment, Digest]:
        name = load.opening.name
        what = f"{name} cannot be put on {self.memory.device}"
        # Before a job begins: this file is not to blame for an uploader that dies of a download.
        self._account.wait_for(load.leaver)
        for _ in range(_TRIES):
            is_innocent = False
            try:
                with self.uploader.job() as job:
                    try:
                        return self._upload_once(job, load)
                    finally:
                        is_innocent = job.is_innocent
            except WireError as error:
                self._warn(what, error)
                raise ReadFailed(f"{name}: {error}") from error
            except DriverFailure as error:
                failure = error
                if not is_innocent:
                    break
        self._warn(what, failure)
        raise UnknownDevice(f"{what}: {failure}") from failure

    def _warn(self, what: str, error: Exception) -> None:
        """Write a failure down, if its cause has not just been; all that follow are like it."""
        cause, now_s = str(error), time.monotonic()
        with self._warning:
            if now_s < self._warned_s.get(cause, -math.inf) + _WARNING_INTERVAL_S:
                return
            self._warned_s.put(cause, now_s)
        _logger.warning("%s", printable(f"{what}: {cause}"))

    def _upload_once(self, job: Job, load: _DeviceLoad) -> tuple[DeviceSegment, Digest]:
        size_bytes, name = load.opening.identity.size_bytes, load.opening.name
        # What the store has reserved, less the last granule, which rounding up may take.
        limit_bytes = self.memory.footprint_bytes(size_bytes) - self.memory.granularity_bytes
        planned = job.plan(
            load.descriptor,
            size_bytes=size_bytes,
            limit_bytes=limit_bytes,
            is_hashed=not load.digest,
            name=name,
            is_numbers=not load.opening.variant.is_shifted,
        )
        on_progress = load.meter.from_here()
        # A sign of life: starting an uploader took time, and making its context will take more.
        on_progress(1)
        outline = sparse_outline(size_bytes)
        try:
            with self._memory_for(planned.device_bytes) as memory:
                reply = job.upload(memory, outline, on_progress)
                return self._segment(job, memory, reply, outline, planned), reply.digest
        finally:
            os.close(outline)

    @contextlib.contextmanager
    def _memory_for(self, device_bytes: int) -> Iterator[DeviceAllocation | None]:
        """New memory, freed if the block fails; None where the uploader makes it."""
        size = self._allocated_bytes(device_bytes)
        # Before it is allocated: a measurement is believed for a second. One taken meanwhile may
        # overstate what is free, but not understate it, for then images would be evicted.
        self._account.add(size)
        memory: DeviceAllocation | None = None
        try:
            if self.memory.backend == "vmm":
                memory = self.memory.create(device_bytes)
            yield memory
        except BaseException:
            if memory is not None:
                memory.close()
            self._account.add(-size)
            raise

    def _allocated_bytes(self, device_bytes: int) -> int:
        return round_up(device_bytes, self.memory.granularity_bytes)

    def _segment(
        self,
        job: Job,
        memory: DeviceAllocation | None,
        reply: duties.UploadReply,
        outline: int,
        planned: duties.PlanUploadReply,
    ) -> DeviceSegment:
        try:
            allocated = self._allocated_bytes(planned.device_bytes)
            if memory is None and sum(reply.allocations) != allocated:
                raise WireError(f"the uploader made {reply.allocations}, not {allocated} bytes")
            sealed = seal_outline(outline)
        except BaseException:
            self.uploader.free(job.number)
            raise
        return DeviceSegment(
            device=self.memory.device,
            backend=self.memory.backend,
            allocations=reply.allocations if memory is None else memory.allocations,
            descriptors=() if memory is None else memory.descriptors,
            handles=reply.handles,
            outline=sealed,
            size_bytes=os.fstat(sealed).st_size,
            layout=planned.layout,
            job=job.number if memory is None else 0,
        )

    def _give_up(self, segment: DeviceSegment) -> None:
        size = segment.resident_bytes()
        segment.close()
        if segment.job:
            self.uploader.free(segment.job)
        self._account.add(-size)

    def _copied(
        self, segment: DeviceSegment, digest: Digest, ingest: int, to: HostMemory
    ) -> Finished[SealedSegment]:
        begun_ns = time.monotonic_ns()
        try:
            computed, copy = self._download(segment, to)
        except TrimsError as error:
            return Finished(ingest, None, None, error)
        except OSError as error:
            return Finished(ingest, None, None, ReadFailed(f"image {digest[:12]}: {error}"))
        # Border: the reservation at the host tier has to end, whatever happened.
        except Exception as error:
            _logger.exception("image %s cannot be moved", digest[:12])
            failure = ReadFailed(f"image {digest[:12]}: {type(error).__name__}: {error}")
            return Finished(ingest, None, None, failure)
        if computed != digest:
            copy.close()
            failure = ReadFailed(f"image {digest[:12]} was damaged on {self.memory.device}")
            return Finished(ingest, None, None, failure)
        result = Ingested(digest, copy.resident_bytes(), True, time.monotonic_ns() - begun_ns)
        return Finished(ingest, result, copy, None)

    def _download(self, segment: DeviceSegment, to: HostMemory) -> tuple[Digest, SealedSegment]:
        writable = to.create(segment.size_bytes)
        try:
            digest = self._read_back(segment, writable.descriptor)
        except BaseException:
            writable.discard()
            raise
        return digest, writable.seal()

    def _read_back(self, segment: DeviceSegment, target: int) -> Digest:
        """Write an image to a file; return the digest of what was written."""
        with self.uploader.job() as job:
            reply = job.download(
                segment.outline,
                target,
                size_bytes=segment.size_bytes,
                allocations=segment.allocations,
                descriptors=segment.descriptors,
                memory=segment.job,
                is_numbers=segment.is_numbers,
            )
        return reply.digest

    def _retire_uploaders(self) -> None:
        for uploader in self._uploaders():
            uploader.retire_if_idle()

    def _uploaders(self) -> list[Uploader]:
        return [self.uploader] if self.peers is None else [self.uploader, self.peers.uploader]
