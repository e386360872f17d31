"""Executes loads: worker threads that turn an offered descriptor into a sealed segment.

Owns the segments of resident images and the threads; decides nothing. A finished load is put on a
queue and the server is woken; the server asks the store, which says adopt or discard.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trims_shim.daemon import ingest
from trims_shim.daemon.ingest import Meter
from trims_shim.daemon.store import (
    Action,
    AdoptSegment,
    DiscardSegment,
    DropImage,
    Ingested,
    StartIngest,
)
from trims_shim.errors import FileChanged, MemoryFailure, NoSpace, ReadFailed, RequestRefused
from trims_shim.memory.host import HostMemory, SealedSegment
from trims_shim.specs import Digest, Identity

__all__ = ["Finished", "Loader"]

CONCURRENT_LOADS = 4
_SETTLED_AFTER_NS = 100_000_000
"""Local file systems stamp changes at least every 10 ms (CONFIG_HZ=100); ten times that."""
_SETTLED_AFTER_REMOTE_NS = 2_000_000_000
"""FAT has 2 s stamps, network file systems the server's; used for all that are not known local."""
_LOCAL_DEVICE_MAJORS = frozenset({8, 65, 66, 67, 68, 69, 70, 71, 202, 252, 253, 254, 259})
"""SCSI, Xen, virtio, device mapper and NVMe disks (Documentation/admin-guide/devices.txt)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A load that ended: with a result (and a segment, unless the image was known) or an error."""

    ingest: int
    result: Ingested | None
    segment: SealedSegment | None
    error: RequestRefused | None


def _started_pool() -> ThreadPoolExecutor:
    """A pool with all its threads: an executor keeps work whose thread cannot be started later.

    Its descriptor would be closed by then, and its number perhaps another file's.
    """
    pool = ThreadPoolExecutor(CONCURRENT_LOADS, thread_name_prefix="trims-load")
    together = threading.Barrier(CONCURRENT_LOADS + 1, timeout=10)
    for _ in range(CONCURRENT_LOADS):
        pool.submit(together.wait)
    together.wait()
    return pool


class Loader:
    """See the module docstring. Methods are called by the server's thread only."""

    def __init__(
        self,
        memory: HostMemory,
        *,
        threads: int,
        wake: Callable[[], None],
        pool: Executor | None = None,
    ) -> None:
        """``wake`` is called from a worker after each end; ``pool`` runs the work, ours if None."""
        self.memory = memory
        self._threads = threads
        self._wake = wake
        self._pool = pool or _started_pool()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._meters: dict[int, Meter] = {}
        self._pending: dict[int, SealedSegment] = {}
        self._segments: dict[Digest, SealedSegment] = {}

    def execute(self, action: Action, *, descriptor: int = -1) -> bool:
        """Execute an action of the store that is about segments; False for any other.

        ``descriptor``: of the file to read, owned from here on by the load that it starts.
        """
        if isinstance(action, StartIngest):
            self.start(action, descriptor)
        elif isinstance(action, AdoptSegment):
            self.adopt(action.ingest, action.digest)
        elif isinstance(action, DiscardSegment):
            self.discard(action.ingest)
        elif isinstance(action, DropImage):
            self.drop(action.digest)
        else:
            return False
        return True

    def start(self, action: StartIngest, descriptor: int) -> None:
        """Begin a load; owns ``descriptor`` from here on."""
        meter = Meter(action.opening.identity.size_bytes)
        self._meters[action.ingest] = meter
        self._pool.submit(self._run, action, descriptor, meter)

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Do ``work`` in a worker thread; its result (or exception) goes to a :meth:`take_jobs`."""

        def job() -> None:
            try:
                result: Any = work()
            # Border: the requester must be answered whatever happened.
            except Exception as error:
                result = error
            self._jobs.put(lambda: done(result))
            self._wake()

        self._pool.submit(job)

    def take_jobs(self) -> list[Callable[[], None]]:
        """Calls that finish jobs, to be made by the server's thread."""
        jobs = []
        while not self._jobs.empty():
            jobs.append(self._jobs.get())
        return jobs

    def take_finished(self) -> list[Finished]:
        """Loads that ended since the last call; their segments wait for adopt or discard."""
        finished = []
        while not self._finished.empty():
            each = self._finished.get()
            self._meters.pop(each.ingest, None)
            if each.segment is not None:
                self._pending[each.ingest] = each.segment
            finished.append(each)
        return finished

    def adopt(self, ingest_number: int, digest: Digest) -> None:
        """Keep the segment of a load as the image of ``digest``."""
        self._segments[digest] = self._pending.pop(ingest_number)

    def discard(self, ingest_number: int) -> None:
        """Free the segment of a load."""
        segment = self._pending.pop(ingest_number, None)
        if segment is not None:
            segment.close()

    def drop(self, digest: Digest) -> None:
        """Give up the segment of an image."""
        self._segments.pop(digest).close()

    def segment(self, digest: Digest) -> SealedSegment:
        """The segment of a resident image."""
        return self._segments[digest]

    def meters(self) -> dict[int, Meter]:
        """How far each load is."""
        return dict(self._meters)

    def close(self) -> None:
        """Wait for loads under way, then give up every segment."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.take_finished()
        for segment in [*self._segments.values(), *self._pending.values()]:
            segment.close()
        self._segments.clear()
        self._pending.clear()
        self.memory.close()

    def _run(self, action: StartIngest, descriptor: int, meter: Meter) -> None:
        result, segment, error = None, None, None
        try:
            result, segment = self._load(action, descriptor, meter)
        except RequestRefused as refused:
            error = refused
        except MemoryFailure as failure:
            error = NoSpace(f"{action.opening.name}: {failure}")
        # Border: whatever a load dies of, its waiters must be told.
        except Exception as failure:
            error = ReadFailed(f"{action.opening.name}: {type(failure).__name__}: {failure}")
        finally:
            os.close(descriptor)
        self._finished.put(Finished(action.ingest, result, segment, error))
        self._wake()

    def _load(
        self, action: StartIngest, descriptor: int, meter: Meter
    ) -> tuple[Ingested, SealedSegment | None]:
        identity, name = action.opening.identity, action.opening.name
        started_ns = time.time_ns()
        if action.is_likely_known:
            digest = ingest.hash_file(descriptor, identity.size_bytes, meter=meter, name=name)
            if digest in self._segments:
                settled = self._check_unchanged(descriptor, identity, started_ns, name)
                return Ingested(digest, 0, settled, time.time_ns() - started_ns), None
            # All over again: the client sees a meter that goes on, not one that fell back.
            meter.total_bytes += identity.size_bytes
        writable = self.memory.create(identity.size_bytes)
        try:
            digest = ingest.fill(
                descriptor, writable.view, threads=self._threads, meter=meter, name=name
            )
            settled = self._check_unchanged(descriptor, identity, started_ns, name)
        except BaseException:
            writable.discard()
            raise
        segment = writable.seal()
        duration = time.time_ns() - started_ns
        return Ingested(digest, segment.resident_bytes(), settled, duration), segment

    @staticmethod
    def _check_unchanged(descriptor: int, identity: Identity, started_ns: int, name: str) -> bool:
        """Whether the identity may be trusted. Raises FileChanged when it is not the same now."""
        if Identity.from_stat(os.fstat(descriptor)) != identity:
            raise FileChanged(f"{name} changed while it was being read; load it again")
        is_local = os.major(identity.device) in _LOCAL_DEVICE_MAJORS
        quiet_ns = _SETTLED_AFTER_NS if is_local else _SETTLED_AFTER_REMOTE_NS
        return started_ns - max(identity.mtime_ns, identity.ctime_ns) > quiet_ns
