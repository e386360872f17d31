"""Executes loads: worker threads that turn an offered descriptor into a sealed segment.

Owns the segments of resident images and the threads; decides nothing. A finished load is put on a
queue and the server is woken; the server asks the store, which says adopt or discard.
:class:`Loads` is common to all tiers; :class:`Loader` is that of the host tier, a device's is in
:mod:`trims_shim.daemon.device.loader`.
"""

from __future__ import annotations

import abc
import logging
import math
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from trims_shim.daemon import ingest
from trims_shim.daemon.file_systems import has_change_time, is_by_reader, is_settled
from trims_shim.daemon.ingest import Meter
from trims_shim.daemon.values import Ingested, Opening, StartIngest
from trims_shim.daemon.workers import Workers
from trims_shim.errors import (
    AccessDenied,
    FileChanged,
    MemoryFailure,
    NoSpace,
    ReadFailed,
    TrimsError,
)
from trims_shim.memory.host import HostMemory, SealedSegment
from trims_shim.printable import printable
from trims_shim.specs import Digest, Identity
from trims_shim.wire.handover import close_all

__all__ = [
    "Finished",
    "Hashing",
    "Load",
    "Loader",
    "Loads",
    "Segment",
]

_logger = logging.getLogger("trims_shim.daemon")

CONCURRENT_LOADS = 4
_STUCK_AFTER_S = 5.0
"""A load without progress for this long does not count as one of them."""
_END_PATIENCE_S = 10.0
"""Longer than other work is waited for: it may have started a process that hangs."""
_POLL_S = 0.05


class Segment(Protocol):
    """Immutable memory of one image at some tier."""

    size_bytes: int

    def resident_bytes(self) -> int: ...
    def close(self) -> None: ...


_Segment = TypeVar("_Segment", bound=Segment)


@dataclass(frozen=True, slots=True)
class Finished(Generic[_Segment]):
    """A load that ended: with a result (and a segment, unless the image was known) or an error."""

    ingest: int
    result: Ingested | None
    segment: _Segment | None
    error: TrimsError | None
    meter: Meter | None = None


class Hashing(NamedTuple):
    """Work for a thread: the digest of an image's bytes as they are now.

    It has a hold of its own on the image, which may be evicted meanwhile; ``close`` gives it up.
    """

    compute: Callable[[], Digest]
    close: Callable[[], None]


@dataclass(slots=True)
class Load:
    """A load under way; it owns ``descriptor``.

    ``digest``: that of the content, if the descriptor is an image's segment and not a file.
    """

    action: StartIngest
    descriptor: int
    digest: Digest
    meter: Meter
    started_ns: int = 0
    """By the clock that files have their times from."""
    begun_ns: int = 0
    """By the one that is never set: how long it took orders evictions."""
    future: Future[None] | None = None
    seen_bytes: int = 0
    at_s: float = math.inf
    """When it last made progress; in the future while no worker has it."""

    @property
    def opening(self) -> Opening:
        """The request that began it."""
        return self.action.opening

    def is_stuck(self, now_s: float) -> bool:
        """Whether a worker has it and has made no progress for a while."""
        if self.meter.done_bytes != self.seen_bytes:
            self.seen_bytes, self.at_s = self.meter.done_bytes, now_s
        return now_s - self.at_s >= _STUCK_AFTER_S

    def check_unchanged(self) -> bool:
        """Whether the identity may be trusted. Raises FileChanged if it is another one now."""
        identity, name = self.opening.identity, self.opening.name
        if Identity.from_stat(os.fstat(self.descriptor)) != identity:
            raise FileChanged(f"{name} changed while it was being read; load it again")
        return is_settled(identity, self.started_ns) and has_change_time(self.descriptor, identity)

    def ended(self, digest: Digest, resident_bytes: int, *, is_settled: bool) -> Ingested:
        """Its result, now."""
        return Ingested(digest, resident_bytes, is_settled, time.monotonic_ns() - self.begun_ns)


class Loads(abc.ABC, Generic[_Segment]):
    """The loads and segments of one tier. Methods are called by the server's thread only."""

    def __init__(
        self,
        *,
        wake: Callable[[], None],
        pool: Executor | None = None,
        trusts_young_files: bool = False,
    ) -> None:
        """``wake`` is called from a worker after each end; ``pool`` runs the work, ours if None.

        ``trusts_young_files``: take every identity as settled, for tests, whose files are new.
        """
        self._wake = wake
        self._trusts_young_files = trusts_young_files
        self._pool = pool or Workers(CONCURRENT_LOADS)
        try:
            # Other work neither waits for slow files nor keeps loads waiting.
            self._aside = pool or Workers(1)
        except RuntimeError:
            self._pool.shutdown(wait=False)
            raise
        self._finished: queue.SimpleQueue[Finished[_Segment]] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loads: dict[int, Load] = {}
        self._pending: dict[int, _Segment] = {}
        self._segments: dict[Digest, _Segment] = {}

    def start(
        self,
        action: StartIngest,
        descriptor: int,
        *,
        digest: Digest = "",
        meter: Meter | None = None,
    ) -> None:
        """Begin a load; owns ``descriptor`` from here on. ``digest``: see :class:`Load`.

        ``meter``: that of the load for which its requests have waited, and goes on counting.
        """
        self._begin(Load(action, descriptor, digest, meter or Meter()))

    def deliver(self, finished: Finished[_Segment]) -> None:
        """A load that was done elsewhere has ended. Any thread may call this."""
        self._finished.put(finished)
        self._wake()

    def run(
        self,
        work: Callable[[], Any],
        done: Callable[[Any], None],
        *,
        pool: Executor | None = None,
    ) -> None:
        """Do ``work`` in a worker thread; a :meth:`take_jobs` call gives its result to ``done``.

        ``pool``: whose thread, for work that may take for ever.
        """

        def job() -> None:
            try:
                result: Any = work()
            # Border: the requester must be answered whatever happened; a panic is no Exception.
            except BaseException as error:
                result = error if isinstance(error, Exception) else ReadFailed(repr(error))
            self._jobs.put(lambda: done(result))
            self._wake()

        (pool or self._aside).submit(job)

    def take_jobs(self) -> list[Callable[[], None]]:
        """Calls that finish jobs, to be made by the server's thread."""
        jobs = []
        while not self._jobs.empty():
            jobs.append(self._jobs.get())
        return jobs

    def take_finished(self) -> list[Finished[_Segment]]:
        """Loads that ended since the last call; their segments wait for adopt or discard."""
        finished = []
        while not self._finished.empty():
            each = self._finished.get()
            self._loads.pop(each.ingest, None)
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
            self._give_up(segment)

    def drop(self, digest: Digest) -> None:
        """Give up the segment of an image."""
        self._give_up(self._segments.pop(digest))

    def segment(self, digest: Digest) -> _Segment:
        """The segment of a resident image."""
        return self._segments[digest]

    @abc.abstractmethod
    def descriptor_count(self) -> int:
        """Descriptors that resident images hold."""

    @abc.abstractmethod
    def hashing(self, digest: Digest) -> Hashing:
        """Hash a resident image again; the caller closes it. Raises OSError."""

    def meters(self) -> dict[int, Meter]:
        """How far each load is."""
        return {ingest: load.meter for ingest, load in self._loads.items()}

    def stuck_count(self) -> int:
        """Loads without progress, as of files whose server is gone."""
        now_s = time.monotonic()
        return sum([each.is_stuck(now_s) for each in self._loads.values()])

    def tend(self) -> None:
        """Do periodic work; call about every second. Never blocks."""
        if isinstance(self._pool, Workers):
            self._pool.replace(self.stuck_count())

    def close(self) -> None:
        """Wait for the loads that are not stuck, then give up every segment."""
        if isinstance(self._aside, Workers):
            self._aside.shutdown(patience_s=_END_PATIENCE_S)
        else:
            self._aside.shutdown(wait=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        while healthy := self._healthy():
            wait(healthy, timeout=_POLL_S)
        self.take_finished()
        for load in self._loads.values():
            if load.future is not None and load.future.cancelled():
                self._abandon(load)
        self._loads.clear()
        for segment in [*self._segments.values(), *self._pending.values()]:
            self._give_up(segment)
        self._segments.clear()
        self._pending.clear()

    def _healthy(self) -> list[Future[None]]:
        """Loads under way that make progress."""
        now_s = time.monotonic()
        futures = [each.future for each in self._loads.values() if not each.is_stuck(now_s)]
        return [each for each in futures if each is not None and not each.done()]

    def _give_up(self, segment: _Segment) -> None:
        segment.close()

    def _abandon(self, load: Load) -> None:
        """Close what was given to a load that never began."""
        os.close(load.descriptor)

    def _begin(self, load: Load) -> None:
        load.seen_bytes = load.meter.done_bytes  # of the load before it
        self._loads[load.action.ingest] = load
        load.future = self._pool.submit(self._run, load)

    def _run(self, load: Load) -> None:
        result: Ingested | None = None
        segment: _Segment | None = None
        error: TrimsError | None = None
        name = load.opening.name
        load.started_ns, load.begun_ns = time.time_ns(), time.monotonic_ns()
        load.at_s = time.monotonic()
        try:
            if is_by_reader(load.descriptor):
                raise AccessDenied(f"{name} is in /proc, where root may read more than others")
            if load.action.is_only_hashed:
                result = self._hashed(load)
            else:
                result, segment = self._load(load)
            if self._trusts_young_files:
                result = result._replace(is_settled=True)
        except MemoryFailure as failure:
            error = NoSpace(f"{name}: {failure}")
        except TrimsError as refused:
            error = refused
        except OSError as failure:
            error = ReadFailed(f"{name}: {failure}")
        # Border: whatever a load dies of, its waiters must be told; a panic is no Exception.
        except BaseException as failure:
            _logger.exception("load of %s failed", printable(name))
            error = ReadFailed(f"{name}: {type(failure).__name__}: {failure}")
        finally:
            close_all([load.descriptor])  # closing a file may report an error of its server
            load.at_s = math.inf
        self.deliver(Finished(load.action.ingest, result, segment, error, load.meter))

    @abc.abstractmethod
    def _load(self, load: Load) -> tuple[Ingested, _Segment | None]:
        """Make the segment; None where an image of this digest is resident already."""

    def _hashed(self, load: Load) -> Ingested:
        """Only hash a load for which there is no room. Raises FileChanged."""
        known = self._known(load)
        if known is None:
            name = load.opening.name
            raise FileChanged(f"{name} is not what was read of it before; load it again")
        return known

    def _known(self, load: Load) -> Ingested | None:
        """The result of a load that only had to be hashed; None if no such image is resident."""
        opening = load.opening
        digest = ingest.hash_file(
            load.descriptor,
            opening.identity.size_bytes,
            meter=load.meter,
            variant=opening.variant,
            name=opening.name,
        )
        if digest not in self._segments:
            return None
        return load.ended(digest, 0, is_settled=load.check_unchanged())


class Loader(Loads[SealedSegment]):
    """Loads of the host tier: a segment is the variant of a file that was asked for."""

    def __init__(
        self,
        memory: HostMemory,
        *,
        threads: int,
        wake: Callable[[], None],
        pool: Executor | None = None,
        trusts_young_files: bool = False,
    ) -> None:
        """``threads``: how many read one file."""
        super().__init__(wake=wake, pool=pool, trusts_young_files=trusts_young_files)
        self.memory = memory
        self._threads = threads
        self._own: set[tuple[int, int]] = set()
        """The files of resident segments. Workers read this, too."""

    def adopt(self, ingest_number: int, digest: Digest) -> None:
        """See :meth:`Loads.adopt`."""
        super().adopt(ingest_number, digest)
        self._own.add(_file_of(self._segments[digest].descriptor))

    def drop(self, digest: Digest) -> None:
        """See :meth:`Loads.drop`."""
        self._own.discard(_file_of(self._segments[digest].descriptor))
        super().drop(digest)

    def descriptor_count(self) -> int:
        """See :meth:`Loads.descriptor_count`."""
        return len(self._segments)

    def hashing(self, digest: Digest) -> Hashing:
        """See :meth:`Loads.hashing`."""
        segment = self._segments[digest]
        descriptor, size_bytes = os.dup(segment.descriptor), segment.size_bytes
        return Hashing(
            lambda: ingest.hash_segment(descriptor, size_bytes), lambda: os.close(descriptor)
        )

    def close(self) -> None:
        """See :meth:`Loads.close`."""
        super().close()
        self.memory.close()

    def _load(self, load: Load) -> tuple[Ingested, SealedSegment | None]:
        if load.action.is_likely_known:
            known = self._known(load)
            if known is not None:
                return known, None
        opening = load.opening
        writable = self.memory.create(opening.image_bytes)
        try:
            digest = ingest.fill(
                load.descriptor,
                writable.view,
                threads=self._threads,
                meter=load.meter,
                variant=opening.variant,
                name=opening.name,
            )
            is_settled = load.check_unchanged() or self._is_own(load.descriptor)
        except BaseException:
            writable.discard()
            raise
        segment = writable.seal()
        return load.ended(digest, segment.resident_bytes(), is_settled=is_settled), segment

    def _is_own(self, descriptor: int) -> bool:
        """Whether the file is a segment of ours, which never changes."""
        return _file_of(descriptor) in self._own


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
