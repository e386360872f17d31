"""Executes loads of a device tier: device memory made here, filled by the uploader.

Owns the segments of the device's images, as :class:`~trims_shim.daemon.loader.Loader` does those of
the host tier, and their way back to the host tier when they are evicted. Makes and exports memory
without a context; reads no file but to hash it.

Memory of an image that leaves is held until it has been copied to the host tier; a load that was
started later makes none before that, so that both never have to fit at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from trims_shim.daemon.ingest import Meter
from trims_shim.daemon.loader import Finished, Loads, check_unchanged
from trims_shim.daemon.store import Ingested, StartIngest
from trims_shim.daemon.uploading import Job, Uploader
from trims_shim.errors import DriverFailure, ReadFailed, TrimsError, UnknownDevice, WireError
from trims_shim.memory.device import (
    DeviceAllocation,
    DeviceMemory,
    DeviceSegment,
    seal_outline,
    sparse_outline,
)
from trims_shim.memory.host import HostMemory, SealedSegment
from trims_shim.specs import Digest
from trims_shim.wire import messages

__all__ = ["DeviceLoader"]

_TRIES = 2
"""A load is repeated once when the uploader dies of another one."""


class DeviceLoader(Loads[DeviceSegment]):
    """See the module docstring. Methods are called by the server's thread, unless they say so."""

    def __init__(
        self,
        memory: DeviceMemory,
        uploader: Uploader,
        *,
        wake: Callable[[], None],
        pool: Executor | None = None,
        trusts_young_files: bool = False,
    ) -> None:
        super().__init__(wake=wake, pool=pool, trusts_young_files=trusts_young_files)
        self.memory = memory
        self.uploader = uploader
        self._account = _Account()
        self._jobs_of: dict[int, int] = {}

    def allocated_bytes(self) -> int:
        """Device memory that exists because of us. Any thread may ask."""
        return self._account.allocated_bytes

    def leaving_bytes(self) -> int:
        """The part of it that goes without any further doing."""
        return self._account.leaving_bytes

    def outline_bytes(self) -> int:
        """Host memory that the outlines of resident images take."""
        return sum(os.fstat(each.outline).st_blocks * 512 for each in list(self._segments.values()))

    def lost(self) -> list[Digest]:
        """Resident images whose memory has gone with the process that made it (backend ``ipc``)."""
        return [
            digest
            for digest, segment in self._segments.items()
            if segment.handles and not self.uploader.keeps(self._jobs_of.get(segment.outline, 0))
        ]

    def demote(
        self,
        digest: Digest,
        ingest: int,
        *,
        to: HostMemory,
        deliver: Callable[[Finished[SealedSegment]], None],
    ) -> None:
        """Give an image up, but copy it first, which ends the load ``ingest`` of the host tier."""
        segment = self._segments.pop(digest)
        size = segment.resident_bytes()
        self._account.begin_leaving(size)

        def leave() -> None:
            finished = self._copied(segment, digest, ingest, to)
            self._give_up(segment)
            self._account.end_leaving(size)
            deliver(finished)

        # Not in a thread of the loads, which wait for it.
        self._aside.submit(leave)

    def hashing(self, digest: Digest, *, to: HostMemory) -> Callable[[], Digest]:
        """Work for a thread: the digest of what is in device memory now, by way of host memory.

        Holds the memory until it is done; it has to be done.
        """
        segment = self._segments[digest]
        memory = self._jobs_of.get(segment.outline, 0)
        # A hold of its own: the image may be evicted while a worker hashes it.
        held = dataclasses.replace(
            segment,
            outline=os.dup(segment.outline),
            descriptors=tuple(os.dup(each) for each in segment.descriptors),
        )

        def work() -> Digest:
            try:
                computed, copy = self._download(held, memory, to)
            finally:
                held.close()
            copy.close()
            return computed

        return work

    def close(self) -> None:
        """See :meth:`Loads.close`; ends the uploader."""
        super().close()
        self.uploader.close()

    def start(self, action: StartIngest, descriptor: int, *, digest: Digest = "") -> None:
        """See :meth:`Loads.start`."""
        self._account.note_start(action.ingest)
        super().start(action, descriptor, digest=digest)

    def take_finished(self) -> list[Finished[DeviceSegment]]:
        """See :meth:`Loads.take_finished`."""
        finished = super().take_finished()
        for each in finished:
            self._account.forget_start(each.ingest)
        return finished

    # --- worker threads ---------------------------------------------------------------------------

    def _load(
        self, action: StartIngest, descriptor: int, digest: Digest, meter: Meter
    ) -> tuple[Ingested, DeviceSegment | None]:
        identity, name = action.opening.identity, action.opening.name
        started_ns = time.time_ns()
        if action.is_likely_known and not digest:
            known = self._known(action, descriptor, meter, started_ns)
            if known is not None:
                return known, None
        segment, computed = self._upload(action, descriptor, meter, is_hashed=not digest)
        try:
            is_settled = bool(digest) or check_unchanged(descriptor, identity, started_ns, name)
        except BaseException:
            self._give_up(segment)
            raise
        duration = time.time_ns() - started_ns
        resident = segment.resident_bytes()
        return Ingested(digest or computed, resident, is_settled, duration), segment

    def _upload(
        self, action: StartIngest, descriptor: int, meter: Meter, *, is_hashed: bool
    ) -> tuple[DeviceSegment, Digest]:
        name = action.opening.name
        # Before a job begins: an uploader that dies of a download is not this file's fault.
        self._account.wait_for_leavers(action.ingest)
        for _ in range(_TRIES):
            is_innocent = False
            try:
                with self.uploader.job() as job:
                    try:
                        return self._upload_once(job, action, descriptor, meter, is_hashed)
                    finally:
                        is_innocent = job.is_innocent
            except WireError as error:
                raise ReadFailed(f"{name}: {error}") from error
            except DriverFailure as error:
                failure = error
                if not is_innocent:
                    break
        raise UnknownDevice(f"{name} cannot be put on {self.memory.device}: {failure}") from failure

    def _upload_once(
        self, job: Job, action: StartIngest, source: int, meter: Meter, is_hashed: bool
    ) -> tuple[DeviceSegment, Digest]:
        size_bytes, name = action.opening.identity.size_bytes, action.opening.name
        # What the store has reserved, of which rounding up may take the last.
        limit_bytes = self.memory.footprint_bytes(size_bytes) - self.memory.granularity_bytes
        planned = job.plan(
            source, size_bytes=size_bytes, limit_bytes=limit_bytes, is_hashed=is_hashed, name=name
        )
        before = meter.total_bytes - size_bytes

        def on_progress(done_bytes: int) -> None:
            meter.done_bytes = max(meter.done_bytes, before + done_bytes)

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
        """New memory, given back where the block fails; None where the uploader makes it."""
        if self.memory.backend != "vmm":
            yield None
            return
        memory = self.memory.create(device_bytes)
        size = sum(memory.allocations)
        self._account.add(size)
        try:
            yield memory
        except BaseException:
            memory.close()
            self._account.add(-size)
            raise

    def _segment(
        self,
        job: Job,
        memory: DeviceAllocation | None,
        reply: messages.UploadReply,
        outline: int,
        planned: messages.PlanUploadReply,
    ) -> DeviceSegment:
        try:
            sealed = seal_outline(outline)
        except BaseException:
            self.uploader.free(job.number)
            raise
        if memory is None:
            self._jobs_of[sealed] = job.number
            self._account.add(sum(reply.allocations))
        return DeviceSegment(
            device=self.memory.device,
            backend=self.memory.backend,
            allocations=reply.allocations if memory is None else memory.allocations,
            descriptors=() if memory is None else memory.descriptors,
            handles=reply.handles,
            outline=sealed,
            size_bytes=os.fstat(sealed).st_size,
            layout=planned.layout,
        )

    def _give_up(self, segment: DeviceSegment) -> None:
        size = segment.resident_bytes()
        job = self._jobs_of.pop(segment.outline, None)
        segment.close()
        if job is not None:
            self.uploader.free(job)
        self._account.add(-size)

    def _copied(
        self, segment: DeviceSegment, digest: Digest, ingest: int, to: HostMemory
    ) -> Finished[SealedSegment]:
        started_ns = time.time_ns()
        try:
            computed, copy = self._download(segment, self._jobs_of.get(segment.outline, 0), to)
        except TrimsError as error:
            return Finished(ingest, None, None, error)
        # Border: the reservation at the host tier has to end, whatever happened.
        except Exception as error:
            failure = ReadFailed(f"image {digest[:12]}: {type(error).__name__}: {error}")
            return Finished(ingest, None, None, failure)
        if computed != digest:
            copy.close()
            failure = ReadFailed(f"image {digest[:12]} was damaged on {self.memory.device}")
            return Finished(ingest, None, None, failure)
        result = Ingested(digest, copy.resident_bytes(), True, time.time_ns() - started_ns)
        return Finished(ingest, result, copy, None)

    def _download(
        self, segment: DeviceSegment, memory: int, to: HostMemory
    ) -> tuple[Digest, SealedSegment]:
        writable = to.create(segment.size_bytes)
        try:
            with self.uploader.job() as job:
                reply = job.download(
                    segment.outline,
                    writable.descriptor,
                    size_bytes=segment.size_bytes,
                    allocations=segment.allocations,
                    descriptors=segment.descriptors,
                    memory=memory,
                )
        except BaseException:
            writable.discard()
            raise
        return reply.digest, writable.seal()


class _Account:
    """How much device memory we made, and what of it goes. Any thread may call."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.leaving_bytes = 0
        self._changed = threading.Condition()
        self._begun = 0
        self._ended = 0
        self._begun_before: dict[int, int] = {}

    def add(self, size_bytes: int) -> None:
        """Memory was made, or (negative) given back."""
        with self._changed:
            self.allocated_bytes += size_bytes

    def begin_leaving(self, size_bytes: int) -> None:
        """Memory will be given back by the next one that leaves; they do so in order."""
        with self._changed:
            self._begun += 1
            self.leaving_bytes += size_bytes

    def end_leaving(self, size_bytes: int) -> None:
        """The first of those that leave has left."""
        with self._changed:
            self._ended += 1
            self.leaving_bytes -= size_bytes
            self._changed.notify_all()

    def note_start(self, ingest: int) -> None:
        """A load begins: it has to wait for those that leave now."""
        self._begun_before[ingest] = self._begun

    def wait_for_leavers(self, ingest: int) -> None:
        """Block until all have left that were leaving when the load began."""
        begun = self._begun_before[ingest]
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= begun)

    def forget_start(self, ingest: int) -> None:
        """The load has ended."""
        self._begun_before.pop(ingest, None)
