"""Jobs: the thread that has models prepared, one after the other, and publishes them.

Owns the thread and the descriptors of models that wait for it; decides nothing. Its owner
(:mod:`trims_shim.daemon.prepared.serving`), which the thread tells through ``deliver``, says
whether a model is wanted, once its content is known, and what becomes of it in the end.

What is published under a content's key was made of that content: identities are taken before the
files are read and compared after the last read. A preparation begins when the model has been quiet
for so long that every change would show in its identity.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trims_shim._version import __version__
from trims_shim.daemon.file_systems import has_change_time, is_by_reader, is_settled
from trims_shim.daemon.prepared.directory import space_of
from trims_shim.daemon.prepared.externals import external_identities, is_private, may_others_write
from trims_shim.daemon.prepared.files import PreparedFiles, Published
from trims_shim.daemon.prepared.interpreters import Interpreter
from trims_shim.daemon.prepared.key import LAYOUT_VERSION
from trims_shim.daemon.prepared.manifest import FileStamp, Manifest
from trims_shim.daemon.prepared.preparing import Order
from trims_shim.daemon.prepared.values import Content, Failure, Known
from trims_shim.daemon.workers import Workers
from trims_shim.errors import AccessDenied, NotServed, TrimsError
from trims_shim.memory.limits import available_bytes
from trims_shim.memory.memfd import is_sealed
from trims_shim.specs import Identity
from trims_shim.wire import duties, messages
from trims_shim.wire.handover import close_all

__all__ = ["Ended", "Hashed", "Job", "Jobs", "Preparer"]

_logger = logging.getLogger("trims_shim.daemon")

_SETTLE_PATIENCE_S = 2.5
"""Longer than any identity takes to settle; that of a file from the future never does."""
_POLL_S = 0.02
_GRACE_S = 60.0
"""What a job may take beside its preparer. It takes for ever if the server of its file is gone."""
_END_PATIENCE_S = 10.0
"""Longer than a preparer is waited for."""
_GROWTH = 2
"""How much a model grows: packed weights are stored beside the original ones. The largest that was
measured is 1.8 (BERT-base, GPT-2)."""
_SCRATCH = 2
"""The disk holds two of a model while it is prepared: as it was saved, and in its final form."""
_MEMORY_GROWTH = 5
"""The preparer holds a session of the original, with packed weights, and a copy in the making: 3 of
the model. Meanwhile the program makes a session of its own, which onnxruntime packs, too."""


class Preparer(Protocol):
    """Makes prepared models: :class:`~.preparing.Preparer`, or a test's."""

    timeout_s: float

    def run(
        self, order: Order, decide: Callable[[duties.SourceHashed], bool]
    ) -> duties.PrepareReply | None: ...
    def give_up(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Job:
    """One preparation; owns ``descriptor`` and those of ``externals``, by location.

    The thread fills in the fields with a default.

    ``directory`` is where external files are looked for; relative if that is no path of ours: then
    ``externals`` are all that there are. ``known`` is what was learned of the model's files, None
    for a model that is offered as memory.
    ``young`` is external data so new that a change might not have shown. ``due_s`` is when it
    should have ended, by time.monotonic(); infinite before its turn comes.
    """

    number: int
    descriptor: int
    identity: Identity
    request: messages.OpenPreparedRequest
    interpreter: Interpreter
    directory: str
    externals: Mapping[str, int]
    content: Content | None = None
    key: str = ""
    known: Known | None = None
    young: tuple[Identity, ...] = ()
    failure: Failure | None = None
    due_s: float = math.inf

    @property
    def is_memory(self) -> bool:
        """Whether the model was offered as a memfd, not as a file."""
        return not self.request.path

    @property
    def is_elsewhere(self) -> bool:
        """Whether its files have no names here."""
        return not self.is_memory and not os.path.isabs(self.directory)

    @property
    def descriptors(self) -> list[int]:
        """Of all files that were offered."""
        return [self.descriptor, *self.externals.values()]

    @property
    def name(self) -> str:
        """For people."""
        return self.request.path or "a model in memory"

    @property
    def source_bytes(self) -> int:
        """The size of the model and of its external files, once they are known."""
        externals = () if self.known is None else self.known.externals
        return self.identity.size_bytes + sum(each.size_bytes for each in externals)


@dataclass(frozen=True, slots=True)
class Hashed:
    """The thread asks whether to go on. ``found``: another daemon has published the model."""

    job: Job
    needed_bytes: int
    short_bytes: int
    found: Published | None
    answer: queue.SimpleQueue[bool] = field(default_factory=queue.SimpleQueue)


class Ended(NamedTuple):
    """A preparation ended: with a model, with ``job.failure``, or because it was not wanted."""

    job: Job
    published: Published | None = None


class Jobs:
    """See the module docstring."""

    def __init__(
        self,
        files: PreparedFiles,
        preparer: Preparer,
        *,
        key_of: Callable[[Content, messages.SessionRecipe], str],
        deliver: Callable[[Hashed | Ended], None],
        pool: Executor | None = None,
        trusts_young_files: bool = False,
    ) -> None:
        """``deliver`` is called by the thread; another thread answers the event."""
        self._files = files
        self._preparer = preparer
        self._key_of = key_of
        self._deliver = deliver
        self._pool = pool or Workers(1)
        self._trusts_young_files = trusts_young_files
        self._closing = threading.Event()
        self._waiting: dict[int, tuple[Job, Future[None]]] = {}
        self._stuck: set[int] = set()
        """The jobs that were given up and keep a thread."""

    def start(self, job: Job) -> None:
        """Have a model prepared when its turn comes; owns its descriptor from here on."""
        self._waiting[job.number] = (job, self._pool.submit(self._run, job))

    def has(self, job: Job) -> bool:
        """Whether a job was neither ended nor given up."""
        return job.number in self._waiting

    def end(self, job: Job) -> bool:
        """Forget a job that has ended; False if it was given up before."""
        self._stuck.discard(job.number)
        return self._waiting.pop(job.number, None) is not None

    def give_up_late(self) -> list[Job]:
        """Give up jobs that should have ended long ago, so that others go on; return them."""
        now_s = time.monotonic()
        late = [job for job, _ in self._waiting.values() if job.due_s <= now_s]
        for job in late:
            del self._waiting[job.number]
            self._stuck.add(job.number)
            self._preparer.give_up()
        if isinstance(self._pool, Workers):
            self._pool.replace(len(self._stuck))
        return late

    def descriptor_count(self) -> int:
        """Descriptors of the waiting models."""
        return sum(len(job.descriptors) for job, _ in self._waiting.values())

    def memory_bytes(self) -> int:
        """Bytes of the waiting models that were offered as memory."""
        waiting = (job for job, _ in self._waiting.values())
        return sum(each.identity.size_bytes for each in waiting if each.is_memory)

    def close(self) -> None:
        """Give up what runs and what waits; a thread that is stuck ends with the process."""
        self._closing.set()
        self._preparer.close()
        self._pool.shutdown(wait=False)
        wait([future for _, future in self._waiting.values()], timeout=_END_PATIENCE_S)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self, job: Job) -> None:
        published = None
        try:
            published = self._make(job)
        except TrimsError as error:
            job.failure = Failure(error.reason, str(error), is_lasting=False)
        # Border: whatever a preparation dies of, the store has to know.
        except Exception as error:
            if not isinstance(error, OSError):
                _logger.exception("preparing %s", job.name)
            text = f"{type(error).__name__}: {error}"
            job.failure = Failure("not_prepared", text, is_lasting=False)
        finally:
            close_all(job.descriptors)  # closing a file may report an error of its server
        self._deliver(Ended(job, published))

    def _make(self, job: Job) -> Published | None:
        """None if the model was not wanted, or if ``job.failure`` says why there is none."""
        if self._closing.is_set():
            raise NotServed("stopping", "the daemon is stopping")
        published = self._try(job)
        if job.young:
            # Only the first reading tells which files to wait for.
            job.content = job.failure = None
            published = self._try(job)
        return published

    def _try(self, job: Job) -> Published | None:
        job.due_s = time.monotonic() + self._preparer.timeout_s + _GRACE_S
        if any(map(is_by_reader, job.descriptors)):
            raise AccessDenied(f"{job.name} is in /proc, where root may read more than others")
        self._wait_until_settled(job)
        # A file that was made for one session is gone by now: no process is started for it, nor
        # for what is known to be in vain.
        self._check_unchanged(job)
        self._check_memory(job.identity.size_bytes)
        started_ns, begun_ns = time.time_ns(), time.monotonic_ns()
        directory = self._files.make()
        try:
            reply = self._preparer.run(
                _order(job, directory), lambda hashed: self._decide(job, hashed, started_ns)
            )
            if reply is None:
                return None
            if reply.reason:
                # Of what was hashed? A file that becomes shorter kills who has mapped it.
                self._check_unchanged(job)
                job.failure = Failure(reply.reason, reply.message, reply.is_lasting)
                return None
            if job.content is None:
                raise NotServed("preparer_confused", "it did not say what it has prepared")
            # The preparer has read it more than once, by its name.
            self._check_unchanged(job)
            return self._files.publish(directory, _manifest(job, reply, begun_ns))
        finally:
            self._files.delete(directory)

    def _wait_until_settled(self, job: Job) -> None:
        if not (job.is_memory or has_change_time(job.descriptor, job.identity)):
            raise NotServed(
                "unsettled_file", f"{job.name} is on a file system without times of changes"
            )
        deadline_s = time.monotonic() + _SETTLE_PATIENCE_S
        while not self._is_settled(job):
            if time.monotonic() > deadline_s or self._closing.wait(_POLL_S):
                raise NotServed("unsettled_file", f"{job.name} has only just been changed")

    def _is_settled(self, job: Job) -> bool:
        now_ns = time.time_ns()
        files = (job.identity, *job.young)
        if self._trusts_young_files or all(is_settled(each, now_ns) for each in files):
            return True
        return job.is_memory and is_sealed(job.descriptor)

    def _decide(self, job: Job, hashed: duties.SourceHashed, started_ns: int) -> bool:
        try:
            self._note_content(job, hashed, started_ns)
        except NotServed as error:
            job.failure = Failure(error.reason, str(error), is_lasting=False)
            return False
        needed_bytes = _GROWTH * job.source_bytes
        short_bytes = _SCRATCH * needed_bytes - space_of(self._files.directory).spare_bytes
        if job.is_elsewhere:
            short_bytes += job.source_bytes  # for copies
        found = self._files.load(job.key)
        event = Hashed(job, needed_bytes, short_bytes, found)
        self._deliver(event)
        while True:
            try:
                return event.answer.get(timeout=_POLL_S)
            except queue.Empty:
                if self._closing.is_set():
                    return False

    def _note_content(self, job: Job, hashed: duties.SourceHashed, started_ns: int) -> None:
        """Raises NotServed if the files have changed, or may have, or if memory is short."""
        files = sorted(hashed.externals, key=lambda each: each.location)
        content = Content(hashed.digest, tuple((each.location, each.digest) for each in files))
        if not job.is_memory:
            directory = job.directory if files or job.is_elsewhere else ""
            identities = tuple(each.identity for each in files)
            if not self._is_ours_alone(job, hashed):
                place = repr((job.identity, directory, identities))
                content = content._replace(place=place)
            job.known = Known(job.identity, content, directory, identities)
        job.content = content
        job.key = self._key_of(content, job.request.recipe)
        self._check_unchanged(job)
        externals = () if job.known is None else job.known.externals
        if not all(_has_change_time(job, each) for each in files):
            job.known = None
            raise NotServed(
                "unsettled_file", "its external data are on a file system without times of changes"
            )
        if not self._trusts_young_files:
            job.young = tuple(each for each in externals if not is_settled(each, started_ns))
        if job.young:
            job.known = None
            raise NotServed("unsettled_file", "its external data has only just been changed")
        self._check_memory(job.source_bytes)

    def _check_memory(self, source_bytes: int) -> None:
        """Raises NotServed if a program could be killed because of the preparation."""
        growth = _MEMORY_GROWTH
        if space_of(self._files.directory).is_memory:
            growth += _SCRATCH * _GROWTH
        if growth * source_bytes > available_bytes():
            raise NotServed("no_memory", "too little memory is free to prepare it")

    def _is_ours_alone(self, job: Job, hashed: duties.SourceHashed) -> bool:
        """Whether nobody else can have changed the files since they were hashed.

        Not every change shows in a file's identity: a process that has mapped it may write to it.
        And a user who may rename a directory may put other files in its place for a while.
        """
        if any(may_others_write(os.fstat(each)) for each in job.descriptors):
            return False
        if job.is_elsewhere:
            return True
        # With external files, the model itself is opened once more by its name.
        paths = [each.path for each in hashed.externals]
        return not paths or all(map(is_private, [job.request.path, *paths]))

    def _check_unchanged(self, job: Job) -> None:
        known = job.known
        is_same = Identity.from_stat(os.fstat(job.descriptor)) == job.identity
        if known is not None and known.externals:
            locations = (location for location, _ in known.content.externals)
            is_same = is_same and _identities(job, locations) == known.externals
        if not is_same:
            job.known = None
            raise NotServed("file_changed", f"{job.name} changed while it was prepared")


def _identities(job: Job, locations: Iterable[str]) -> tuple[Identity, ...] | None:
    """Of external files, now; None if one cannot be had."""
    if not job.is_elsewhere:
        return external_identities(job.request.path, locations)
    try:
        found = [os.fstat(job.externals[each]) for each in locations]
    except (KeyError, OSError):
        return None
    return tuple(map(Identity.from_stat, found))


def _has_change_time(job: Job, file: duties.ExternalFile) -> bool:
    if job.is_elsewhere:
        offered = job.externals.get(file.location, -1)
        return offered >= 0 and has_change_time(offered, file.identity)
    try:
        descriptor = os.open(file.path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return has_change_time(descriptor, file.identity)
    finally:
        close_all([descriptor])


def _order(job: Job, directory: str) -> Order:
    asked = job.request
    sources = tuple(duties.ExternalSource(*each) for each in job.externals.items())
    request = duties.PrepareRequest(
        protocol=messages.PROTOCOL_VERSION,
        source=job.descriptor,
        path="" if job.is_elsewhere else asked.path,
        recipe=asked.recipe,
        package=job.interpreter.package,
        directory=directory,
        externals=sources if job.is_elsewhere else None,
    )
    return Order(request, job.interpreter.path, job.interpreter.search_path)


def _manifest(job: Job, reply: duties.PrepareReply, begun_ns: int) -> Manifest:
    assert job.content is not None
    return Manifest(
        layout=LAYOUT_VERSION,
        key=job.key,
        package=__version__,
        content=job.content,
        recipe=job.request.recipe,
        probe=reply.probe,
        made_ns=time.time_ns(),
        prepare_ns=time.monotonic_ns() - begun_ns,
        names=(job.request.path,) if job.request.path else (),
        sources=() if job.known is None else (job.known,),
        model=FileStamp(0, 0, 0, 0),
        weights=None,
    )
