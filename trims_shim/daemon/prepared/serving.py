"""Prepared ONNX models: who gets which, and the execution of what their store decides.

Owns the requests for them and the directory, with a thread that scans it and deletes. That thread
and the one that prepares (:mod:`trims_shim.daemon.prepared.jobs`) put events on a queue and wake
the server, and :meth:`PreparedModels.finish` takes them from there, so that the store needs no
lock. All methods are called by the server's thread. None waits for anything but the directory and
the client's interpreter; threads look for external data, whose server may be gone.

The directory is scanned after the start; requests that arrive before that are answered then. One
that cannot be used is looked at again later, if somebody asks.

A prepared model is a name that the client opens by itself, so only clients of the daemon's own user
that see the same files are served, or at least the directory of prepared models, which they show by
a descriptor of it. Files are checked before every answer: a model that is not as it was verified is
dropped, and made once more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from trims_shim.daemon import clock, descriptors
from trims_shim.daemon.front import Front, Request
from trims_shim.daemon.offers import Offer, status_of
from trims_shim.daemon.prepared.clients import (
    EarlyRequests,
    directory_of_model,
    flight_of,
    hit_reply,
    identity_of,
    refusal_reply,
)
from trims_shim.daemon.prepared.directory import PreparedSettings, space_of
from trims_shim.daemon.prepared.externals import external_identities
from trims_shim.daemon.prepared.files import PreparedFiles, Published, Scan
from trims_shim.daemon.prepared.interpreters import (
    Interpreter,
    cpu_identity,
    interpreter_of,
    namespace_problem,
    our_interpreter,
)
from trims_shim.daemon.prepared.jobs import (
    Ended,
    Hashed,
    Job,
    Jobs,
    Preparer,
)
from trims_shim.daemon.prepared.key import entry_key
from trims_shim.daemon.prepared.store import PreparedStore
from trims_shim.daemon.prepared.values import (
    RUNTIME_LIMIT,
    Action,
    Asking,
    Content,
    DropEntry,
    DropRefusal,
    Failure,
    Grant,
    Known,
    Start,
    Wait,
)
from trims_shim.daemon.sessions import Session
from trims_shim.daemon.workers import Workers
from trims_shim.directories import make
from trims_shim.errors import (
    AccessDenied,
    DaemonUnavailable,
    MalformedMessage,
    NoSpace,
    NotServed,
    TooManyRequests,
)
from trims_shim.memory.limits import available_bytes
from trims_shim.memory.memfd import is_sealed
from trims_shim.printable import printable
from trims_shim.specs import Identity
from trims_shim.wire import admin, messages

__all__ = ["PreparedModels"]

_logger = logging.getLogger("trims_shim.daemon")

_PATH_LIMIT = 4096
_LOOK_AGAIN_S = 60.0
_TOUCH_INTERVAL_NS = 60 * 10**9
_WAITING_FRACTION = 8
"""Models that wait may hold one in this many descriptors. Images may hold half of them, and a
quarter stays unused (:mod:`trims_shim.daemon.descriptors`)."""
_FOR_CLIENTS = 32
"""Descriptors that models leave to clients: half of what images leave, as they do not stay."""
_HELD_FRACTION = 4
"""Models that wait in memory may take one part in this many of the free memory."""
_END_PATIENCE_S = 10.0
"""Longer than the directory is waited for: its disk may be gone, and memory is to be given back."""

_Reply = TypeVar("_Reply")


class _Scanned(NamedTuple):
    """The directory was scanned."""

    scan: Scan
    budget_bytes: int
    cpu: str
    problem: str


class _Opening(NamedTuple):
    """A request for a model, and what came with it: perhaps nothing."""

    request: Request
    message: messages.OpenPreparedRequest
    offer: Offer
    externals: Mapping[str, Offer]

    @property
    def session(self) -> Session:
        return self.request.session


@dataclass(slots=True)
class _LookUp:
    """A request for a model that is known, if its external files are still what they were.

    ``held`` is everything that came with it.
    """

    opening: _Opening
    known: Known
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    found: tuple[Identity, ...] | None = None


_Event = _Scanned | _LookUp | Hashed | Ended


class PreparedModels:
    """See the module docstring."""

    def __init__(
        self,
        front: Front,
        settings: PreparedSettings,
        *,
        preparer: Preparer,
        numbers: Iterator[int],
        wake: Callable[[], None],
        pool: Executor | None = None,
        trusts_young_files: bool = False,
    ) -> None:
        """``numbers``, ``wake``, ``pool`` and ``trusts_young_files`` as for the tiers."""
        self._front = front
        self._settings = settings
        self._wake = wake
        self._files = PreparedFiles(settings.directory, judgement=settings.judgement)
        self._store = PreparedStore(0, numbers=numbers)
        self._aside = pool or Workers(1)
        self._lookups = pool or Workers(1)
        self._jobs = Jobs(
            self._files,
            preparer,
            key_of=self._key_of,
            deliver=self._deliver,
            pool=pool,
            trusts_young_files=trusts_young_files,
        )
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._published: dict[str, Published] = {}
        self._touched_ns: dict[str, int] = {}
        self._namespaces: dict[int, str] = {}
        """Why the client of a session does not see our files; empty if it does."""
        self._shown: set[int] = set()
        """The sessions of clients that do not, but have shown the directory to us."""
        self._early = EarlyRequests(front)
        self._cpu = ""
        self._problem = settings.problem
        self._look_again_s = math.inf
        """When a directory with a problem is looked at again, by time.monotonic()."""
        self._is_open = bool(settings.problem)

    def start(self) -> None:
        """Scan the directory, in a thread."""
        if not self._is_open:
            self._aside.submit(self._open_directory)

    # --- requests ---------------------------------------------------------------------------------

    def open(
        self, request: Request, message: messages.OpenPreparedRequest
    ) -> messages.OpenPreparedReply | None:
        """Return the reply, or None if it comes later. Raises TrimsError."""
        return self._when_open(request, lambda: self._open(request, message))

    def evict(
        self, request: Request, message: admin.EvictPreparedRequest
    ) -> admin.EvictPreparedReply | None:
        """Forget models; None: the reply is later. Raises AccessDenied, UnknownImage, NoSpace."""
        if not request.session.is_privileged:
            raise AccessDenied("prepared models are the daemon's own user's")
        return self._when_open(request, lambda: self._evict(message.model))

    def release(self, session: int, lease: int) -> None:
        """The client gave a lease up; nothing happens if it is a lease of another store."""
        self._store.release(session, lease, time.time_ns())

    def close_session(self, session: int) -> None:
        """The connection is gone."""
        self._store.close_session(session, time.time_ns())
        self._namespaces.pop(session, None)
        self._shown.discard(session)
        self._early.close_session(session)

    def finish(self) -> None:
        """Go on with what the threads have found or done."""
        while not self._events.empty():
            self._take(self._events.get())

    def tend(self) -> None:
        """Do periodic work; call about every second."""
        for job in self._jobs.give_up_late():
            text = "it has not ended; perhaps a file server does not answer"
            self._fail(job, Failure("preparer_stalled", text, is_lasting=False))
        if isinstance(self._lookups, Workers):
            self._lookups.replace_stuck()

    def _take(self, event: _Event) -> None:
        try:
            if isinstance(event, _Scanned):
                self._on_scanned(event)
            elif isinstance(event, _LookUp):
                self._on_looked_up(event)
            elif isinstance(event, Hashed):
                self._on_hashed(event)
            else:
                self._on_ended(event)
        # Border: a bug costs one preparation, not the daemon.
        except Exception:
            _logger.exception("a preparation cannot be gone on with")
            self._front.counters["internal_errors"] += 1
            if isinstance(event, Hashed):
                event.answer.put(False)  # The thread waits for it, and others for the thread.

    def close(self) -> None:
        """Give preparations up and end the threads, unless stuck. What is on the disk stays."""
        self._jobs.close()
        self._lookups.shutdown(wait=False)
        if isinstance(self._aside, Workers):
            self._aside.shutdown(patience_s=_END_PATIENCE_S)
        self._files.close()

    # --- questions --------------------------------------------------------------------------------

    def is_needed(self) -> bool:
        """Whether anybody leases a model, waits for an answer, or has one prepared."""
        return bool(self._early) or self._store.is_needed()

    def lease_count(self, session: int | None = None) -> int:
        """Leases of one session, or of all."""
        return self._store.lease_count(session)

    def rows(self) -> list[admin.PreparedStatus]:
        """What is being prepared, what is there, what was refused."""
        return self._store.rows(time.time_ns())

    def storage(self) -> admin.PreparedStorage:
        """The directory, and the account."""
        return admin.PreparedStorage(
            self._settings.directory,
            self._store.budget_bytes,
            self._store.resident_bytes(),
            self._problem,
        )

    # --- answers ----------------------------------------------------------------------------------

    def _when_open(self, request: Request, work: Callable[[], _Reply]) -> _Reply | None:
        if self._is_open:
            return work()
        self._early.put(request, work)
        return None

    def _open(
        self, request: Request, message: messages.OpenPreparedRequest
    ) -> messages.OpenPreparedReply | None:
        with contextlib.ExitStack() as held:
            # Taken before any check: offers that are left would add up.
            offer, directory = (
                held.enter_context(self._front.take_offer(request, ticket) if ticket else Offer())
                for ticket in (message.ticket, message.directory)
            )
            files = [
                held.enter_context(self._front.take_offer(request, each.ticket))
                for each in message.externals
            ]
            for each in (offer, directory, *files):
                each.check()
            if self._is_ours(directory.descriptor):
                self._shown.add(request.session.number)
            locations = (each.location for each in message.externals)
            opening = _Opening(request, message, offer, dict(zip(locations, files, strict=True)))
            known = self._recall(opening)
            if known is None or not known.externals or not os.path.isabs(known.directory):
                return self._reply(opening, known)
            lookup = _LookUp(opening, known)
            self._lookups.submit(self._look_up, lookup)
            lookup.held = held.pop_all()
        return None

    def _recall(self, opening: _Opening) -> Known | None:
        """What is known of the offered file."""
        path = opening.message.path
        with contextlib.suppress(NotServed):  # The reply will say so.
            self._check(opening.session, path)
            identity = identity_of(opening.offer)
            if identity is not None and path:
                return self._store.recall(identity, self._directory_of(opening))
        return None

    def _on_looked_up(self, event: _LookUp) -> None:
        opening, known = event.opening, event.known
        with event.held:
            found = known if event.found == known.externals else None
            if found is None:
                self._store.unlearn(known)
            if self._front.sessions.get(opening.session.number) is not None:
                self._front.serve(opening.request, lambda: self._reply(opening, found))

    def _reply(self, opening: _Opening, known: Known | None) -> messages.OpenPreparedReply:
        """``known``: what the offered file and its external files hold."""
        try:
            self._check(opening.session, opening.message.path)
            reply = self._answer(opening, known)
        except NotServed as error:
            reply = refusal_reply(error.reason, str(error))
        self._front.counters[f"prepared_{reply.outcome}"] += 1
        return reply

    def _check(self, session: Session, path: str) -> None:
        """Raises NotServed, TooManyRequests, DaemonUnavailable, MalformedMessage."""
        if self._front.is_stopping:
            raise DaemonUnavailable("the daemon is stopping; load again")
        limit = self._front.sessions.limits.leases
        if self._store.lease_count(session.number) >= limit:
            raise TooManyRequests(f"more than {limit} leases")
        if path and (not os.path.isabs(path) or "\0" in path or len(path) > _PATH_LIMIT):
            raise MalformedMessage(f"{path[:80]!r} is not the absolute path of a file")
        if self._problem:
            self._look_again()
            raise NotServed("prepared_off", f"there are no prepared models: {self._problem}")
        if session.peer.uid != os.geteuid():
            raise NotServed("other_user", "prepared models are for the daemon's own user only")
        problem = self._namespace_problem(session)
        if problem and session.number not in self._shown:
            with contextlib.suppress(OSError):
                make(self._settings.directory)  # so that it can be shown
            shared = f"it would have to share {self._settings.directory} (TRIMS_CACHE_DIR)"
            raise NotServed("other_namespace", f"{problem}; {shared}")

    def _namespace_problem(self, session: Session) -> str:
        problem = self._namespaces.get(session.number)
        if problem is None:
            problem = namespace_problem(session.peer.pid, session.connected_ns)
            self._namespaces[session.number] = problem
        return problem

    def _directory_of(self, opening: _Opening) -> str:
        is_elsewhere = bool(self._namespace_problem(opening.session))
        return directory_of_model(opening.message, opening.externals, is_elsewhere=is_elsewhere)

    def _is_ours(self, descriptor: int) -> bool:
        """Whether it is of our directory: then whoever has it could find our files."""
        if descriptor < 0:
            return False
        try:
            found, ours = status_of(descriptor).identity, os.stat(self._settings.directory)
        except OSError:
            return False
        return (found.device, found.inode) == (ours.st_dev, ours.st_ino)

    def _look_again(self) -> None:
        """What was wrong with the directory may have been mended."""
        if time.monotonic() >= self._look_again_s:
            self._look_again_s = math.inf
            self._aside.submit(self._open_directory)

    def _answer(self, opening: _Opening, known: Known | None) -> messages.OpenPreparedReply:
        message, identity = opening.message, identity_of(opening.offer)
        content = None if known is None else known.content
        if message.digest and (identity is None or not message.path):
            content = Content(message.digest)  # Of a model in memory, what the client says.
        key = "" if content is None else self._key_of(content, message.recipe)
        self._drop_if_damaged(key)
        asking = Asking(
            opening.session.number,
            flight_of(message, identity, self._directory_of(opening)),
            key,
            message.path,
            message.recipe.runtime[:RUNTIME_LIMIT],
        )
        answer = self._store.open(asking, time.time_ns(), may_start=identity is not None)
        if isinstance(answer, Grant):
            self._touch(answer.key)
            return hit_reply(answer, self._published[answer.key])
        if isinstance(answer, Failure):
            return refusal_reply(answer.reason, answer.message)
        if isinstance(answer, Start):
            assert identity is not None
            self._begin(opening, answer.job, identity)
        is_under_way = isinstance(answer, Start | Wait)
        return messages.OpenPreparedReply("preparing" if is_under_way else "unknown", key=key)

    def _key_of(self, content: Content, recipe: messages.SessionRecipe) -> str:
        return entry_key(content, recipe, cpu=self._cpu)

    def _drop_if_damaged(self, key: str) -> None:
        published = self._published.get(key)
        if published is None:
            # In the store all the same: by its key it is ours, by its record of another layout.
            self._execute(self._store.lose(key))
            return
        if published.is_sound():
            return
        found = self._files.load(key)
        if found is not None:
            # Another daemon has dropped it, and made it again.
            self._published[key] = found
            return
        if self._files.has(key):
            _logger.warning("prepared model %s is damaged; it is dropped", key[:12])
            self._front.counters["prepared_damaged"] += 1
        del self._published[key]
        self._execute(self._store.lose(key))

    def _forget_gone(self) -> None:
        """Another daemon may have evicted models that we still count."""
        for key in self._store.entry_keys():
            if not self._files.has(key):
                self._execute(self._store.lose(key))

    def _touch(self, key: str) -> None:
        """Tell later daemons which models were used last."""
        now_ns = clock.now_ns()
        if now_ns - self._touched_ns.get(key, -_TOUCH_INTERVAL_NS) >= _TOUCH_INTERVAL_NS:
            self._touched_ns[key] = now_ns
            self._do_aside(self._files.touch, key, self._store.used_ns(key))

    def _evict(self, text: str) -> admin.EvictPreparedReply:
        self._forget_gone()
        actions = self._store.evict(text)
        dropped = self._execute(actions)
        meant = [each.key for each in actions if isinstance(each, DropEntry)]
        left = sum(map(self._files.has, meant))
        if left:
            raise NoSpace(
                f"{left} of {len(meant)} prepared models cannot be removed from "
                f"{self._settings.directory}; is it read-only? See the daemon's log"
            )
        return admin.EvictPreparedReply(
            tuple(each.key for each in dropped), sum(each.size_bytes for each in dropped)
        )

    # --- preparations -----------------------------------------------------------------------------

    def _begin(self, opening: _Opening, job: int, identity: Identity) -> None:
        """Raises NotServed if it has nothing to be prepared with, or would be too much to wait."""
        try:
            self._check_descriptors(opening)
            interpreter = self._interpreter_for(opening)
            if not opening.message.path:
                if not is_sealed(opening.offer.descriptor):
                    # It stands for all equal bytes, and a mapping of it may change them unseen.
                    raise NotServed("unsettled_file", "the memory with the model is not sealed")
                self._check_memory(identity.size_bytes)
        except NotServed:
            self._store.unwanted(job)
            raise
        directory = self._directory_of(opening)
        files = {name: each.take() for name, each in opening.externals.items()}
        taken = opening.offer.take()
        self._jobs.start(
            Job(job, taken, identity, opening.message, interpreter, directory, externals=files)
        )

    def _interpreter_for(self, opening: _Opening) -> Interpreter:
        """The client's, or where it has none that could be started from here, ours."""
        peer, message = opening.session.peer, opening.message
        if not self._namespace_problem(opening.session):
            try:
                path = interpreter_of(peer.pid, peer.uid)
                return Interpreter(path, message.search_path, message.package)
            except NotServed as error:
                if error.reason != "not_python":
                    raise
        return our_interpreter()

    def _check_descriptors(self, opening: _Opening) -> None:
        """Files of models stay open while these wait; of few descriptors, others need most."""
        may_have = descriptors.limit()
        held = self._jobs.descriptor_count()
        is_much = held and held + 1 + len(opening.externals) > may_have // _WAITING_FRACTION
        left = min(_FOR_CLIENTS, may_have // (2 * _WAITING_FRACTION))
        if is_much or descriptors.are_scarce(self._front.sessions.missing_controls() + left):
            raise NotServed(
                "busy",
                "models that wait have too many files (see `ulimit -n`); load it again later",
            )

    def _check_memory(self, size_bytes: int) -> None:
        """Models that were offered as memory stay there until they are prepared."""
        waiting_bytes = self._jobs.memory_bytes() + size_bytes
        if waiting_bytes > available_bytes() // _HELD_FRACTION:
            raise NotServed("no_memory", f"{waiting_bytes} bytes of models would wait in memory")

    def _on_scanned(self, event: _Scanned) -> None:
        if event.problem and event.problem != self._problem:
            _logger.warning("no prepared ONNX models: %s", event.problem)
        self._is_open = True
        self._cpu = event.cpu
        self._problem = event.problem
        self._look_again_s = time.monotonic() + _LOOK_AGAIN_S
        self._store.budget_bytes = event.budget_bytes
        for published in event.scan.published:
            self._adopt(published)
        for entry in event.scan.others:
            self._store.adopt(entry)
        for record in event.scan.refusals:
            self._store.remember(record.refusal, record.refused_ns)
        for known in event.scan.sources():
            self._store.learn(known)
        self._execute(self._store.fit())
        self._early.serve()

    def _adopt(self, published: Published) -> None:
        self._published[published.manifest.key] = published
        self._store.adopt(published.entry)

    def _on_hashed(self, event: Hashed) -> None:
        job = event.job
        if not self._jobs.has(job):
            event.answer.put(False)
            return
        if event.found is not None and job.key not in self._published:
            self._adopt(event.found._replace(used_ns=time.time_ns()))
            self._execute(self._store.fit())
        self._forget_gone()
        verdict = self._store.hashed(
            job.number,
            job.key,
            time.time_ns(),
            needed_bytes=event.needed_bytes,
            short_bytes=event.short_bytes,
        )
        self._execute(verdict.actions)
        # Behind the deletions: the preparer looks at once how much room there is.
        self._do_aside(event.answer.put, verdict.is_wanted)

    def _on_ended(self, event: Ended) -> None:
        job, published = event.job, event.published
        if job.known is not None:
            self._store.learn(job.known)
        if not self._jobs.end(job):
            if published is not None:  # It takes its room all the same.
                self._adopt(published)
                self._execute(self._store.fit())
            return
        if published is not None:
            self._front.counters["prepared_made"] += 1
            self._published.setdefault(job.key, published)
            self._execute(self._store.made(job.number, published.entry, time.time_ns()))
        elif job.failure is not None:
            self._fail(job, job.failure)
        else:
            self._store.unwanted(job.number)
            if job.known is not None:
                self._do_aside(self._files.add_source, job.key, job.known)

    def _fail(self, job: Job, failure: Failure) -> None:
        self._front.counters["prepared_failed"] += 1
        message = printable(failure.message)
        _logger.info("%s: %s: %s", printable(job.name), failure.reason, message)
        actions = self._store.failed(job.number, failure, time.time_ns())
        self._execute(actions, known=job.known)

    def _execute(self, actions: Iterable[Action], *, known: Known | None = None) -> list[DropEntry]:
        """Return what was dropped. ``known``: of the model that is refused.

        A model that cannot be removed stays, unless it is damaged: it takes its room.
        """
        dropped = []
        for action in actions:
            if isinstance(action, DropEntry):
                published = self._published.pop(action.key, None)
                path = self._files.retire(action.key)
                if path is None and published is not None:
                    self._adopt(published)
                    continue
                dropped.append(action)
                self._front.counters["prepared_dropped"] += 1
                self._touched_ns.pop(action.key, None)
                self._do_aside(self._files.delete, path)
            elif isinstance(action, DropRefusal):
                self._do_aside(self._files.drop_refusal, action.key)
            else:
                self._do_aside(self._files.keep_refusal, action, known, time.time_ns())
        return dropped

    # --- threads ----------------------------------------------------------------------------------

    def _do_aside(self, work: Callable[..., None], *arguments: Any) -> None:
        def job() -> None:
            try:
                work(*arguments)
            # Border: nobody waits for it, and later work has to be done.
            except Exception as error:
                _logger.warning("%s: %s: %s", work.__name__, type(error).__name__, error)

        self._aside.submit(job)

    def _look_up(self, lookup: _LookUp) -> None:
        try:
            locations = (location for location, _ in lookup.known.content.externals)
            lookup.found = external_identities(lookup.opening.message.path, locations)
        finally:
            self._deliver(lookup)

    def _deliver(self, event: _Event) -> None:
        self._events.put(event)
        self._wake()

    def _open_directory(self) -> None:
        scan, budget_bytes, cpu, problem = Scan(), 0, "", ""
        try:
            cpu = cpu_identity()
            # Before the scan: what is found does not fit a budget that is not known.
            budget_bytes = self._settings.budget.of(space_of(self._settings.directory).total_bytes)
            scan = self._files.open()
        # Border: without this event, nobody would ever be answered.
        except Exception as error:
            problem = str(error) or type(error).__name__
            if not isinstance(error, NotServed | OSError):
                _logger.exception("the directory of prepared models cannot be looked through")
        self._deliver(_Scanned(scan, budget_bytes, cpu, problem))
