"""The store of prepared ONNX models: which exist, who leases them, what is being made, what goes.

A pure state machine, ``(state, event, now) -> (state, actions)``: no I/O, no clock, no thread. Its
owner (:mod:`trims_shim.daemon.prepared.serving`) feeds it events and executes the actions in order.

Rules
1. An entry is keyed by everything that decides its content (:mod:`trims_shim.daemon.prepared.key`).
   A file's identity only points at its content, and only once its owner has said so
   (:meth:`PreparedStore.learn`).
2. No request waits: while a model is prepared, the answer says so. There is one preparation for
   each flight (the model as it was offered, the recipe, and the client's installation) and for each
   key, and a limit on how many wait for their turn. Of those who ask for the same unknown content,
   one at a time is told that it may be offered.
3. Room is reserved when the content is known, and the real size is charged when the model is made.
   Entries that nobody leases are dropped for it, least recently used first; all or nothing.
4. A leased entry is never evicted. One whose files are damaged is lost, leases or not: mappings
   stay valid, as long as nobody writes to the files.
5. An unpreparable model is refused from then on (:mod:`trims_shim.daemon.prepared.refusals`).
6. Lease numbers are unique across the daemon, which shares the counter with the tiers' stores.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from trims_shim.daemon.leases import Leases
from trims_shim.daemon.prepared.refusals import Refusals
from trims_shim.daemon.prepared.values import (
    Action,
    Answer,
    Asking,
    DropEntry,
    Entry,
    Failure,
    Flight,
    Grant,
    KeepRefusal,
    Known,
    Start,
    Unknown,
    Verdict,
    Wait,
)
from trims_shim.daemon.recent import Recent
from trims_shim.errors import NoSpace, UnknownImage
from trims_shim.printable import size
from trims_shim.specs import Identity
from trims_shim.wire.admin import PreparedStatus

__all__ = ["JOBS_LIMIT", "PreparedStore"]

JOBS_LIMIT = 32
"""Each job holds a descriptor, and the last one waits for all the others."""
_OF_THE_CLIENT = frozenset({"not_importable", "other_onnxruntime", "unsettled_file"})
"""Reasons for which a model is refused to one installation, or of one file, and not to another with
its build, or of its content."""
_CHANGED = "file_changed"
"""A reason that says nothing of the content: others have it, and the file has another by now."""
_KNOWN_LIMIT = 4096
_NAMES_PER_ENTRY = 16
_AWAITED_LIMIT = 256
_AWAITED_NS = 60 * 10**9
"""A client offers a content when it has made its own session of it, if at all."""


@dataclass(slots=True)
class _Entry:
    key: str
    size_bytes: int
    runtime: str
    prepare_ns: int
    used_ns: int
    hits: int = 0
    names: Recent[str, None] = field(default_factory=lambda: Recent(_NAMES_PER_ENTRY))

    def name(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
            self.names.put(name, None)


@dataclass(slots=True)
class _Job:
    flight: Flight
    key: str
    name: str
    runtime: str
    started_ns: int
    reserved_bytes: int = 0


class PreparedStore:
    """See the module docstring."""

    def __init__(self, budget_bytes: int, *, numbers: Iterator[int]) -> None:
        """``numbers`` is the counter shared with the tiers' stores."""
        self.budget_bytes = budget_bytes
        self._numbers = numbers
        self._entries: dict[str, _Entry] = {}
        self._last_used_ns = 0
        self._jobs: dict[int, _Job] = {}
        self._known: Recent[tuple[Identity, str], Known] = Recent(_KNOWN_LIMIT)
        self._refusals = Refusals()
        self._leases: Leases[str] = Leases(numbers)
        self._awaited: Recent[str, tuple[int, int]] = Recent(_AWAITED_LIMIT)
        """The session that may offer a content, and since when."""

    # --- what files hold --------------------------------------------------------------------------

    def learn(self, known: Known) -> None:
        """Trust the identities in ``known`` from now on."""
        self._known.put((known.identity, known.directory), known)

    def recall(self, identity: Identity, directory: str) -> Known | None:
        """What a model's file holds; the caller checks that its external files are unchanged."""
        for where in ((identity, ""), (identity, directory)):
            known = self._known.get(where)
            if known is not None:
                self._known.move_to_end(where)
                return known
        return None

    def unlearn(self, known: Known) -> None:
        """Forget it: an external file has changed."""
        self._known.pop((known.identity, known.directory), None)

    # --- requests ---------------------------------------------------------------------------------

    def open(self, asking: Asking, now_ns: int, *, may_start: bool) -> Answer:
        """A client wants a prepared model. ``may_start``: it has offered what to make it from."""
        entry = self._entries.get(asking.key)
        if entry is not None:
            return self._grant(entry, asking, now_ns)
        if self._is_under_way(asking):
            return Wait()
        failure = self._refusals.find(asking.key, asking.flight, now_ns=now_ns)
        if failure is not None:
            return failure
        if not may_start:
            return self._await_offer(asking, now_ns)
        self._awaited.pop(asking.key, None)
        if len(self._jobs) >= JOBS_LIMIT:
            message = f"{JOBS_LIMIT} models wait to be prepared; load it again later"
            return Failure("busy", message, is_lasting=False)
        job = next(self._numbers)
        self._jobs[job] = _Job(asking.flight, asking.key, asking.name, asking.runtime, now_ns)
        return Start(job)

    def release(self, session: int, lease: int, now_ns: int) -> bool:
        """The client gave a lease up; False when it does not hold it."""
        key = self._leases.release(session, lease)
        if key is None:
            return False
        self._use(self._entries[key], now_ns)
        return True

    def close_session(self, session: int, now_ns: int) -> None:
        """The connection is gone, and with it its leases; preparations go on."""
        for key in self._leases.close_session(session):
            self._use(self._entries[key], now_ns)
        for key in [key for key, (owner, _) in self._awaited.items() if owner == session]:
            del self._awaited[key]

    # --- preparations -----------------------------------------------------------------------------

    def hashed(
        self, job: int, key: str, now_ns: int, *, needed_bytes: int, short_bytes: int = 0
    ) -> Verdict:
        """The content of the model that is to be prepared is known.

        ``needed_bytes``: what it may take; ``short_bytes``: what the file system lacks for it.
        """
        task = self._jobs[job]
        task.key = key
        if key in self._entries or self._refusals.find(key, now_ns=now_ns) is not None:
            return Verdict(False)
        actions = self._make_room(needed_bytes, short_bytes)
        if isinstance(actions, Failure):
            return Verdict(False, tuple(self._refuse(task, actions, now_ns)))
        task.reserved_bytes = needed_bytes
        return Verdict(True, tuple(actions))

    def made(self, job: int, entry: Entry, now_ns: int) -> list[Action]:
        """The model is prepared; it is dropped again if it does not fit after all."""
        task = self._jobs.pop(job)
        self._refusals.forget(task.flight, entry.key)
        if entry.key in self._entries:
            return []
        actions = self._make_room(entry.size_bytes)
        if isinstance(actions, Failure):
            return [
                *self._refuse(task, actions, now_ns),
                DropEntry(entry.key, entry.size_bytes),
            ]
        self.adopt(entry)
        self._use(self._entries[entry.key], now_ns)
        return actions

    def unwanted(self, job: int) -> None:
        """End a preparation without a result or a refusal: it was unwanted, or never began."""
        self._jobs.pop(job)

    def failed(self, job: int, failure: Failure, now_ns: int) -> list[Action]:
        """The model could not be prepared."""
        return self._refuse(self._jobs.pop(job), failure, now_ns)

    # --- from before ------------------------------------------------------------------------------

    def adopt(self, entry: Entry) -> None:
        """Add an entry that exists, whoever made it; may exceed the budget until :meth:`fit`."""
        if entry.key not in self._entries:
            made = _Entry(
                entry.key, entry.size_bytes, entry.runtime, entry.prepare_ns, entry.used_ns
            )
            made.name(entry.names)
            self._entries[entry.key] = made
            self._last_used_ns = max(self._last_used_ns, made.used_ns)

    def remember(self, refusal: KeepRefusal, refused_ns: int) -> None:
        """An earlier daemon could not prepare a model."""
        self._refusals.remember(refusal, refused_ns)

    def fit(self) -> list[Action]:
        """Drop free entries until the rest is within the budget, or none is left."""
        missing = self.resident_bytes() - self.budget_bytes
        return [self._drop(each) for each in self._victims(missing)]

    # --- ends -------------------------------------------------------------------------------------

    def lose(self, key: str) -> list[Action]:
        """Drop an entry whose files are damaged; its leases end with it."""
        entry = self._entries.get(key)
        return [] if entry is None else [self._drop(entry)]

    def evict(self, text: str = "") -> list[Action]:
        """Forget the models of a name or a key (6 or more digits of it), or all that are free.

        Raises UnknownImage, or NoSpace if all that are meant are in use.
        """
        entries, refusals = self._meant(text)
        free = [each for each in entries if not self._leases.of(each.key)]
        if text and not free and not refusals:
            leases = sum(self._leases.of(each.key) for each in entries)
            raise NoSpace(f"prepared model {entries[0].key[:12]} is in use (leases: {leases})")
        return [*(self._drop(each) for each in free), *self._refusals.drop(refusals)]

    # --- questions --------------------------------------------------------------------------------

    def lease_count(self, session: int | None = None) -> int:
        """Leases of one session, or of all."""
        return len(self._leases) if session is None else self._leases.of_session(session)

    def is_needed(self) -> bool:
        """Whether anybody leases anything, or something is being prepared."""
        return bool(self._leases or self._jobs)

    def entry_keys(self) -> list[str]:
        """The keys of all entries."""
        return list(self._entries)

    def resident_bytes(self) -> int:
        """The bytes of all entries."""
        return sum(entry.size_bytes for entry in self._entries.values())

    def used_ns(self, key: str) -> int:
        """When an entry was used last: in the order of uses, also where the clock was set back."""
        return self._entries[key].used_ns

    def rows(self, now_ns: int) -> list[PreparedStatus]:
        """Models being prepared, models that are there (most recently used first), refused ones."""
        ready = sorted(self._entries.values(), key=lambda each: -each.used_ns)
        return [
            *(_job_row(each) for each in self._jobs.values()),
            *(_entry_row(each, self._leases.of(each.key)) for each in ready),
            *self._refusals.rows(now_ns),
        ]

    # --- inside -----------------------------------------------------------------------------------

    def _grant(self, entry: _Entry, asking: Asking, now_ns: int) -> Grant:
        lease = self._leases.grant(asking.session, entry.key)
        self._use(entry, now_ns)
        entry.hits += 1
        entry.name([asking.name])
        return Grant(lease, entry.key)

    def _use(self, entry: _Entry, now_ns: int) -> None:
        # The clock may have been set back: a use now is still the last one.
        entry.used_ns = now_ns if now_ns >= self._last_used_ns else self._last_used_ns + 1
        self._last_used_ns = entry.used_ns

    def _await_offer(self, asking: Asking, now_ns: int) -> Unknown | Wait:
        """Let one client copy the content for us; the others would do it in vain."""
        if asking.key in self._awaited:
            _, since_ns = self._awaited[asking.key]
            if 0 <= now_ns - since_ns < _AWAITED_NS:
                return Wait()
        if asking.key:
            self._awaited.put(asking.key, (asking.session, now_ns))
        return Unknown()

    def _is_under_way(self, asking: Asking) -> bool:
        return any(
            job.flight == asking.flight or (job.key and job.key == asking.key)
            for job in self._jobs.values()
        )

    def _reserved_bytes(self) -> int:
        return sum(job.reserved_bytes for job in self._jobs.values())

    def _make_room(self, needed_bytes: int, short_bytes: int = 0) -> list[Action] | Failure:
        """Make room, or say why that is not possible; then nothing is dropped."""
        used_bytes = self.resident_bytes()
        over_bytes = used_bytes + self._reserved_bytes() + needed_bytes - self.budget_bytes
        missing = max(short_bytes, over_bytes)
        victims = self._victims(missing)
        lacking = missing - sum(each.size_bytes for each in victims)
        if lacking <= 0:
            return [self._drop(each) for each in victims]
        disk = f"; the file system lacks {size(short_bytes)}" if short_bytes > 0 else ""
        return Failure(
            "no_space",
            f"{size(needed_bytes)} do not fit the cache of prepared models: {size(lacking)} too "
            f"many; budget {size(self.budget_bytes)}, used {size(used_bytes)}{disk}; raise "
            "TRIMS_PREPARED_BYTES, free disk space, or `trims evict`",
            is_lasting=False,
        )

    def _victims(self, missing_bytes: int) -> list[_Entry]:
        free = [each for each in self._entries.values() if not self._leases.of(each.key)]
        chosen: list[_Entry] = []
        for entry in sorted(free, key=lambda each: (each.used_ns, each.key)):
            if missing_bytes <= 0:
                break
            chosen.append(entry)
            missing_bytes -= entry.size_bytes
        return chosen

    def _drop(self, entry: _Entry) -> DropEntry:
        del self._entries[entry.key]
        self._leases.forget(entry.key)
        return DropEntry(entry.key, entry.size_bytes)

    def _refuse(self, job: _Job, failure: Failure, now_ns: int) -> list[Action]:
        if job.key and failure.reason == _CHANGED:
            return []
        is_of_all = job.key and failure.reason not in _OF_THE_CLIENT
        place = job.key if is_of_all else job.flight
        return self._refusals.add(
            place, failure, now_ns, key=job.key, name=job.name, runtime=job.runtime
        )

    def _meant(self, text: str) -> tuple[list[_Entry], list[Hashable]]:
        """Entries, and places of refusals, that a name or a key means."""
        if not text:
            return list(self._entries.values()), self._refusals.places()
        entries = [each for each in self._entries.values() if text in each.names]
        refusals = self._refusals.named(text)
        if not entries and not refusals and len(text) >= 6:
            keys = {*self._entries, *self._refusals.keys()}
            prefix = text.lower()
            matches = [key for key in keys if key.startswith(prefix)]
            if len(matches) > 1:
                raise UnknownImage(f"{text} means {len(matches)} models; write more digits")
            entries = [self._entries[key] for key in matches if key in self._entries]
            refusals = self._refusals.keyed(matches)
        if not entries and not refusals:
            raise UnknownImage(f"no prepared model {text!r}; `trims status` shows them")
        return entries, refusals


def _job_row(job: _Job) -> PreparedStatus:
    return PreparedStatus(
        key=job.key,
        state="preparing",
        size_bytes=job.reserved_bytes,
        leases=0,
        hits=0,
        used_ns=job.started_ns,
        prepare_ns=0,
        names=(job.name,) if job.name else (),
        runtime=job.runtime,
    )


def _entry_row(entry: _Entry, leases: int) -> PreparedStatus:
    return PreparedStatus(
        key=entry.key,
        state="ready",
        size_bytes=entry.size_bytes,
        leases=leases,
        hits=entry.hits,
        used_ns=entry.used_ns,
        prepare_ns=entry.prepare_ns,
        names=tuple(entry.names),
        runtime=entry.runtime,
    )
