"""The store against a model that is too simple to be wrong, under arbitrary events.

The model executes the actions as the server does: it holds segments, answers and leases, and
refuses actions that make no sense (a grant of an image without a segment, a second answer...).
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from trims_shim.config import EVICTIONS
from trims_shim.daemon.eviction import eviction_policy
from trims_shim.daemon.store import Store
from trims_shim.daemon.values import (
    Action,
    AdoptSegment,
    Announce,
    DiscardSegment,
    DropImage,
    GrantLease,
    IdentityKey,
    Ingested,
    Opening,
    RefuseRequest,
    StartIngest,
)
from trims_shim.errors import NoSpace, ReadFailed, UnknownImage
from trims_shim.specs import Identity

BUDGET = 100
SESSIONS = st.integers(1, 5)
USERS = st.integers(1, 3)
# Content of a file is a number; a file that is rewritten has a new identity and other content.
FILES = st.integers(0, 7)


def digest_of(content: int) -> str:
    return f"{content:02d}" * 32


def size_of(content: int) -> int:
    return 10 + 7 * (content % 5)


class StoreMachine(RuleBasedStateMachine):
    loads = Bundle("loads")
    leases = Bundle("leases")

    @initialize(lingering=st.integers(0, 30), policy=st.sampled_from(["lru", *EVICTIONS]))
    def start(self, lingering: int, policy: str) -> None:
        self.policy = policy
        self.store = Store(BUDGET, policy=eviction_policy(policy, BUDGET))
        self.lingering = lingering
        self.now = 0
        self.request = 0
        self.content = {file: file for file in range(8)}
        self.segments: dict[str, int] = {}
        self.loading: dict[int, Opening] = {}
        self.only_hashed: set[int] = set()
        self.comparing: dict[int, str] = {}
        self.again: list[int] = []
        """Loads for those who came while another, which is not trusted, was under way."""
        self.hinted: dict[Identity, str] = {}
        self.waiting: set[tuple[int, int]] = set()
        self.held: dict[int, tuple[int, str]] = {}
        self.pins: set[tuple[str, int]] = set()
        self.used: dict[str, int] = {}
        self.trusted: dict[IdentityKey, str] = {}
        self.issued: set[int] = set()

    # --- the server -------------------------------------------------------------------------------

    def execute(self, actions: list[Action]) -> None:
        for action in actions:
            getattr(self, "on_" + type(action).__name__)(action)

    def on_StartIngest(self, action: StartIngest) -> None:
        assert action.ingest not in self.loading
        key = action.opening.key
        assert key not in {(each.user, each.identity) for each in self.loading.values()}
        assert key not in self.trusted
        self.loading[action.ingest] = action.opening
        if action.is_likely_known:
            self.comparing[action.ingest] = self.hinted[action.opening.identity]
        if action.is_only_hashed:
            self.only_hashed.add(action.ingest)
            self.used[self.hinted[action.opening.identity]] = self.now

    def on_AdoptSegment(self, action: AdoptSegment) -> None:
        assert action.digest not in self.segments
        self.segments[action.digest] = self.finished_size
        self.used[action.digest] = self.now

    def on_DiscardSegment(self, action: DiscardSegment) -> None:
        assert self.finished_digest in self.segments

    def on_GrantLease(self, action: GrantLease) -> None:
        assert action.digest in self.segments
        assert action.digest == self.expected(action)
        assert action.lease not in self.issued
        self.answer(action.opening)
        self.issued.add(action.lease)
        self.held[action.lease] = (action.opening.session, action.digest)
        self.used[action.digest] = self.now

    def on_RefuseRequest(self, action: RefuseRequest) -> None:
        self.answer(action.opening)

    def on_DropImage(self, action: DropImage) -> None:
        assert not self.is_held(action.digest)
        older = [
            digest
            for digest in self.segments
            if self.used[digest] < self.used[action.digest] and not self.is_held(digest)
        ]
        if self.evicting_for_room:
            assert self.policy != "never"
            assert not (self.policy == "lru" and older), "a younger image went first"
        del self.segments[action.digest]
        self.trusted = {k: d for k, d in self.trusted.items() if d != action.digest}
        self.hinted = {k: d for k, d in self.hinted.items() if d != action.digest}

    def on_Announce(self, action: Announce) -> None:
        assert action.event in ("loaded", "evicted", "pinned", "unpinned")
        assert (action.digest in self.segments) == (action.event != "evicted")

    def answer(self, opening: Opening) -> None:
        key = (opening.session, opening.request)
        assert key in self.waiting, "answered twice, or after its session closed"
        self.waiting.remove(key)

    def expected(self, action: GrantLease) -> str:
        content = action.opening.identity.inode
        return digest_of(content % 8)

    def is_held(self, digest: str) -> bool:
        leased = (each for _, each in self.held.values())
        return digest in {*leased, *self.pinned(), *self.comparing.values()}

    def pinned(self) -> set[str]:
        return {digest for digest, _ in self.pins}

    evicting_for_room = False
    finished_size = 0
    finished_digest = ""

    # --- events -----------------------------------------------------------------------------------

    @rule(target=loads, session=SESSIONS, file=FILES, alias=st.booleans())
    def open(self, session: int, file: int, alias: bool) -> object:
        self.now += 1
        self.request += 1
        # An alias is another file (inode) of the same content.
        inode = file + 8 * alias
        identity = Identity(1, inode, size_of(file), 0, 0)
        opening = Opening(session, self.request, session % 2, identity, f"/{inode}")
        self.waiting.add((session, self.request))
        before = set(self.loading)
        is_trusted = opening.key in self.trusted
        free = {d for d in self.segments if not self.is_held(d)}
        if self.policy == "never":
            free = set()
        room = BUDGET - self.lingering - self.total() + sum(self.segments[d] for d in free)
        is_full = self.total() + self.lingering + size_of(file) > BUDGET
        is_hinted = identity in self.hinted
        self.evicting_for_room = True
        actions = self.store.open(opening, self.now, withheld_bytes=self.lingering)
        self.execute(actions)
        self.evicting_for_room = False
        refused = any(isinstance(each, RefuseRequest) for each in actions)
        if is_trusted:
            assert [type(each) for each in actions] == [GrantLease]
        elif actions and is_full and is_hinted:
            assert [type(each) for each in actions] == [StartIngest], "hashing takes no room"
            assert actions[0].is_only_hashed  # type: ignore[union-attr]
        elif actions:
            assert refused == (size_of(file) > room), "refused with room, or let in without"
        return multiple(*(set(self.loading) - before))

    @rule(target=leases, load=consumes(loads), is_settled=st.booleans(), is_known=st.booleans())
    def finish(self, load: int, is_settled: bool, is_known: bool) -> object:
        return self.end(load, is_settled, is_known)

    @precondition(lambda self: self.again)
    @rule(target=leases, is_settled=st.booleans())
    def finish_again(self, is_settled: bool) -> object:
        return self.end(self.again.pop(), is_settled, is_known=True)

    def end(self, load: int, is_settled: bool, is_known: bool) -> object:
        self.now += 1
        opening = self.loading.pop(load)
        self.comparing.pop(load, None)
        content = opening.identity.inode % 8
        self.finished_digest = digest_of(content)
        if load in self.only_hashed and self.finished_digest not in self.segments:
            self.execute(self.store.ingest_failed(load, ReadFailed("it was evicted meanwhile")))
            return multiple()
        is_known = is_known or load in self.only_hashed
        self.finished_size = size_of(content)
        size = 0 if is_known and self.finished_digest in self.segments else self.finished_size
        before = set(self.held)
        result = Ingested(self.finished_digest, size, is_settled, 1)
        actions = self.store.ingest_done(load, result, self.now)
        self.hinted[opening.identity] = self.finished_digest
        before_loads = set(self.loading)
        self.execute(actions)
        self.again += set(self.loading) - before_loads
        assert not (is_settled and set(self.loading) - before_loads)
        if is_settled:
            self.trusted[opening.key] = self.finished_digest
        return multiple(*(set(self.held) - before))

    @rule(load=consumes(loads))
    def fail(self, load: int) -> None:
        opening = self.loading.pop(load)
        self.comparing.pop(load, None)
        self.execute(self.store.ingest_failed(load, ReadFailed("no")))
        if load in self.only_hashed:
            self.hinted.pop(opening.identity, None)

    @rule(content=FILES, ends_well=st.booleans())
    def move_in(self, content: int, ends_well: bool) -> None:
        """An image comes from another tier, at once; its owner there trusted the identity."""
        self.now += 1
        key = (0, Identity(1, content, size_of(content), 0, 0), 0)
        before = set(self.segments)
        try:
            load = self.store.admit(
                size_of(content), identities=(key,), withheld_bytes=self.lingering
            )
        except NoSpace:
            assert self.total() + self.lingering + size_of(content) > BUDGET
            return
        assert self.total() + self.lingering + size_of(content) <= BUDGET
        assert set(self.segments) == before, "nothing makes room for it"
        if not ends_well:
            assert self.store.ingest_failed(load, ReadFailed("no")) == []
            return
        self.finished_digest, self.finished_size = digest_of(content), size_of(content)
        result = Ingested(self.finished_digest, self.finished_size, True, 1)
        self.execute(self.store.ingest_done(load, result, self.now))
        self.trusted[key] = self.hinted[key[1]] = self.finished_digest

    @rule(content=FILES)
    def lose(self, content: int) -> None:
        """The memory of an image is gone, and with it every lease and pin."""
        self.now += 1
        digest = digest_of(content)
        self.held = {lease: held for lease, held in self.held.items() if held[1] != digest}
        self.pins = {pin for pin in self.pins if pin[0] != digest}
        self.comparing = {load: each for load, each in self.comparing.items() if each != digest}
        self.execute(self.store.forget(digest))
        assert digest not in self.segments

    @rule(lease=consumes(leases))
    def release(self, lease: int) -> None:
        self.now += 1
        session, digest = self.held.pop(lease, (-1, ""))
        assert not self.store.release(99, lease, self.now)
        assert self.store.release(session, lease, self.now) == bool(digest)
        if digest:
            self.used[digest] = self.now

    @rule(session=SESSIONS)
    def close(self, session: int) -> None:
        self.now += 1
        for lease, (owner, digest) in list(self.held.items()):
            if owner == session:
                del self.held[lease]
                self.used[digest] = self.now
        self.waiting = {key for key in self.waiting if key[0] != session}
        self.store.close_session(session, self.now)

    @rule(content=FILES, user=USERS)
    def pin(self, content: int, user: int) -> None:
        digest = digest_of(content)
        try:
            self.execute(self.store.pin(digest, user))
        except UnknownImage:
            assert digest not in self.segments
            return
        self.pins.add((digest, user))

    @rule(content=FILES, user=st.none() | USERS)
    def unpin(self, content: int, user: int | None) -> None:
        digest = digest_of(content)
        try:
            self.execute(self.store.unpin(digest, user))
        except UnknownImage:
            assert digest not in self.segments
            return
        kept = {pin for pin in self.pins if pin[0] != digest}
        self.pins = kept if user is None else self.pins - {(digest, user)}

    @rule(content=FILES)
    def evict(self, content: int) -> None:
        digest = digest_of(content)
        try:
            self.execute(self.store.evict(digest))
        except UnknownImage:
            assert digest not in self.segments
        except NoSpace:
            assert self.is_held(digest)
        else:
            assert digest not in self.segments

    @rule(wanted_bytes=st.integers(0, BUDGET))
    def relieve(self, wanted_bytes: int) -> None:
        before = self.total()
        self.execute(self.store.relieve(wanted_bytes))
        is_enough = before - self.total() >= wanted_bytes
        assert is_enough or all(self.is_held(digest) for digest in self.segments)

    @rule(age=st.integers(0, 20))
    def expire(self, age: int) -> None:
        before = self.now - age
        stays = {d for d in self.segments if self.is_held(d) or self.used[d] >= before}
        self.execute(self.store.expire(before))
        assert set(self.segments) == stays

    @rule()
    def evict_all(self) -> None:
        self.execute(self.store.evict_all())
        assert all(self.is_held(digest) for digest in self.segments)

    # --- always -----------------------------------------------------------------------------------

    def total(self) -> int:
        loading = sum(
            each.identity.size_bytes
            for load, each in self.loading.items()
            if load not in self.only_hashed
        )
        return sum(self.segments.values()) + loading

    @invariant()
    def the_account_is_right(self) -> None:
        totals = self.store.totals()
        assert totals.resident_bytes == sum(self.segments.values())
        assert totals.resident_bytes + totals.reserved_bytes == self.total()
        assert self.total() + self.lingering <= BUDGET

    @invariant()
    def both_know_the_same_images(self) -> None:
        rows = {row.digest: row for row in self.store.images()}
        assert set(rows) == set(self.segments)
        assert {digest for digest, row in rows.items() if row.is_pinned} == self.pinned()
        for digest, row in rows.items():
            assert row.leases == [each for _, each in self.held.values()].count(digest)
            assert row.used_ns == self.used[digest]

    @invariant()
    def nobody_is_lost(self) -> None:
        queued = [opening for load in self.loading for opening in self.store.waiters(load)]
        keys = [(each.session, each.request) for each in queued]
        assert len(keys) == len(set(keys))
        assert set(keys) == self.waiting
        assert self.store.ingest_count() == len(self.loading)
        assert self.store.lease_count() == len(self.held)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
