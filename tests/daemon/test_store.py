"""Each rule of the store, by itself; test_store_model.py has them all at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

import pytest

from trims_shim.daemon import store as stores
from trims_shim.daemon.eviction import Candidate, LeastRecentlyUsed, Never
from trims_shim.daemon.store import Store
from trims_shim.daemon.values import (
    AdoptSegment,
    Announce,
    DiscardSegment,
    DropImage,
    GrantLease,
    Ingested,
    Opening,
    RefuseRequest,
    StartIngest,
)
from trims_shim.errors import NoSpace, ReadFailed, UnknownImage
from trims_shim.specs import Digest, Identity, Variant

A, B = "a" * 64, "b" * 64


def identity(inode: int = 1, size: int = 10) -> Identity:
    return Identity(device=1, inode=inode, size_bytes=size, mtime_ns=0, ctime_ns=0)


def opening(
    session: int = 1,
    request: int = 1,
    *,
    user: int = 1000,
    inode: int = 1,
    size: int = 10,
    name: str = "/model",
) -> Opening:
    return Opening(session, request, user, identity(inode, size), name)


def loaded(digest: Digest = A, size: int = 10, *, is_settled: bool = True) -> Ingested:
    return Ingested(digest, size, is_settled, load_ns=5)


def new_store(budget: int = 100) -> Store:
    return Store(budget, policy=LeastRecentlyUsed())


def started(actions: list[object]) -> StartIngest:
    (action,) = (each for each in actions if isinstance(each, StartIngest))
    return action


def granted(actions: list[object]) -> GrantLease:
    (action,) = (each for each in actions if isinstance(each, GrantLease))
    return action


def load(store: Store, opened: Opening, result: Ingested, now: int = 1) -> int:
    """Open, load, and return the lease."""
    ingest = started(store.open(opened, now)).ingest  # type: ignore[arg-type]
    return granted(store.ingest_done(ingest, result, now)).lease  # type: ignore[arg-type]


class TestIdentity:
    def test_a_first_open_is_a_miss(self) -> None:
        store = new_store()
        actions = store.open(opening(), 1)
        assert actions == [StartIngest(1, opening(), is_likely_known=False)]
        assert store.ingest_done(1, loaded(), 2) == [
            AdoptSegment(1, A),
            Announce("loaded", A, 10),
            GrantLease(opening(), 2, A, "miss", True),
        ]

    def test_a_settled_identity_is_a_hit(self) -> None:
        store = new_store()
        load(store, opening(), loaded())
        grant = granted(store.open(opening(2), 2))
        assert (grant.digest, grant.outcome, grant.is_settled) == (A, "hit", True)

    def test_an_unsettled_identity_is_read_again(self) -> None:
        store = new_store(20)
        load(store, opening(), loaded(is_settled=False))
        action = started(store.open(opening(2), 2))
        assert action.is_likely_known
        assert not action.is_only_hashed, "there is just room for other content"
        actions = store.ingest_done(action.ingest, loaded(), 3)
        assert actions[0] == DiscardSegment(action.ingest)
        assert granted(actions).is_settled
        assert granted(store.open(opening(3), 4)).outcome == "hit"

    def test_the_reply_says_when_it_is_not_settled(self) -> None:
        store = new_store()
        ingest = started(store.open(opening(), 1)).ingest
        assert not granted(store.ingest_done(ingest, loaded(is_settled=False), 2)).is_settled

    def test_another_users_equal_identity_proves_nothing(self) -> None:
        store = new_store()
        load(store, opening(user=1), loaded())
        action = started(store.open(opening(2, user=2), 2))
        assert action.is_likely_known

    @pytest.mark.parametrize("part", ["device", "inode", "size_bytes", "mtime_ns", "ctime_ns"])
    def test_every_part_of_an_identity_counts(self, part: str) -> None:
        store = new_store(1000)
        load(store, opening(), loaded())
        changed = identity()._replace(**{part: 99})
        action = started(store.open(opening(2)._replace(identity=changed), 2))
        assert not action.is_likely_known

    def test_identities_of_an_evicted_image_are_forgotten(self) -> None:
        store = new_store()
        lease = load(store, opening(), loaded())
        store.release(1, lease, 2)
        store.evict(A)
        assert not started(store.open(opening(), 3)).is_likely_known

    def test_the_identities_that_were_used_last_are_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stores, "_IDENTITIES_LIMIT", 2)
        store = new_store(1000)
        for inode in (1, 2):
            load(store, opening(inode=inode), loaded(f"{inode:064x}"))
        store.open(opening(2, inode=1), 3)
        load(store, opening(inode=3), loaded(f"{3:064x}"))
        known = [inode for inode in (1, 2, 3) if store.is_hit(opening(3, inode=inode))]
        assert known == [1, 3]
        for inode in (1, 2, 3):
            store.forget(f"{inode:064x}")
        assert not any(store.is_hit(opening(3, inode=inode)) for inode in (1, 2, 3))

    def test_an_identity_means_what_was_read_last(self) -> None:
        store = new_store(1000)
        first = started(store.open(opening(), 1))
        second = started(store.open(opening(user=1001), 1))
        store.ingest_done(first.ingest, loaded(A, is_settled=False), 2)
        store.ingest_done(second.ingest, loaded(B, is_settled=False), 2)
        store.forget(A)
        assert started(store.open(opening(2), 3)).is_likely_known
        store.forget(B)
        assert not started(store.open(opening(3, user=1002), 3)).is_likely_known

    def test_a_file_that_was_replaced_leaves_the_others_of_its_image(self) -> None:
        """And when the image goes, nothing is left of them."""
        store = new_store(1000)
        for inode in (1, 2):
            load(store, opening(inode=inode), loaded(A, is_settled=False))
        load(store, opening(2, inode=2), loaded(B, is_settled=False))
        store.forget(A)
        assert not started(store.open(opening(3, inode=1), 3)).is_likely_known
        store.forget(B)
        for pointers in (store._identities, store._hints):
            assert (pointers._digests, pointers._keys) == ({}, {})

    def test_to_forget_an_image_does_not_take_the_longer_the_more_there_are(self) -> None:
        """Nobody is served meanwhile; of 5000 each took milliseconds."""
        store = new_store(1_000_000)
        for inode in range(5000):
            store.release(1, load(store, opening(inode=inode), loaded(f"{inode:064x}")), 2)
        begun_s = time.process_time()
        assert len(store.relieve(1_000_000)) == 2 * 5000
        assert time.process_time() - begun_s < 2.0


class TestSingleFlight:
    def test_requests_for_a_loading_identity_wait(self) -> None:
        store = new_store()
        ingest = started(store.open(opening(1), 1)).ingest
        assert store.open(opening(2), 1) == []
        assert store.waiters(ingest) == [opening(1), opening(2)]
        grants = [
            each for each in store.ingest_done(ingest, loaded(), 2) if isinstance(each, GrantLease)
        ]
        assert [(each.opening.session, each.outcome) for each in grants] == [
            (1, "miss"),
            (2, "joined"),
        ]
        assert grants[0].lease != grants[1].lease
        assert store.waiters(ingest) == []

    def test_everybody_who_waits_hears_of_a_failure(self) -> None:
        store = new_store()
        ingest = started(store.open(opening(1), 1)).ingest
        store.open(opening(2), 1)
        error = ReadFailed("broken disk")
        assert store.ingest_failed(ingest, error) == [
            RefuseRequest(opening(1), error),
            RefuseRequest(opening(2), error),
        ]
        assert store.totals().reserved_bytes == 0
        assert started(store.open(opening(1), 2)).ingest != ingest

    def test_two_loads_of_one_content_share_an_image(self) -> None:
        store = new_store()
        first = started(store.open(opening(1, inode=1), 1)).ingest
        second = started(store.open(opening(2, inode=2), 1)).ingest
        store.ingest_done(first, loaded(A), 2)
        actions = store.ingest_done(second, loaded(A), 3)
        assert actions[0] == DiscardSegment(second)
        assert granted(actions).digest == A
        assert len(store.images()) == 1
        assert store.totals().resident_bytes == 10


class TestBudget:
    def test_bytes_are_reserved_while_loading(self) -> None:
        store = new_store()
        ingest = started(store.open(opening(size=60), 1)).ingest
        assert store.totals().reserved_bytes == 60
        assert isinstance(store.open(opening(2, inode=2, size=41), 1)[0], RefuseRequest)
        store.ingest_done(ingest, loaded(size=55), 2)
        assert (store.totals().resident_bytes, store.totals().reserved_bytes) == (55, 0)
        started(store.open(opening(3, inode=3, size=45), 3))

    def test_the_footprint_is_what_counts(self) -> None:
        store = Store(100, policy=LeastRecentlyUsed(), footprint_bytes=lambda size: size * 2)
        started(store.open(opening(size=50), 1))
        assert store.totals().reserved_bytes == 100
        assert isinstance(store.open(opening(2, inode=2, size=1), 1)[0], RefuseRequest)

    @pytest.mark.parametrize("user", [1000, 1001])
    def test_what_is_there_needs_no_room_to_be_hashed(self, user: int) -> None:
        """A file that is not trusted, or not yet for this user, and is half of the budget."""
        store = new_store()
        load(store, opening(inode=2, size=30), loaded(B, 30))
        store.close_session(1, 1)
        load(store, opening(size=60), loaded(A, 60, is_settled=False))
        (start,) = store.open(opening(session=2, user=user, size=60), 2)
        assert isinstance(start, StartIngest)
        assert start.is_only_hashed
        assert store.totals().reserved_bytes == 0
        assert store.is_resident(B), "nothing has to go for it"
        _, grant = store.ingest_done(start.ingest, loaded(A, 0, is_settled=False), 3)
        assert isinstance(grant, GrantLease)
        assert store.totals().resident_bytes == 90

    def test_a_file_may_change_after_it_was_read_for_another(self) -> None:
        """Found: who came then got it as it was before, where times are too coarse to tell."""
        store = new_store()
        first = started(store.open(opening(size=60), 1))
        late = [opening(session=number, size=60) for number in (2, 3)]
        assert [store.open(each, 2) for each in late] == [[], []]
        assert [store.needs_file(each) for each in late] == [True, False]
        *_, grant, again = store.ingest_done(first.ingest, loaded(A, 60, is_settled=False), 3)
        assert isinstance(grant, GrantLease)
        assert grant.opening == opening(size=60)
        assert again == StartIngest(again.ingest, late[0], True, is_only_hashed=True)
        store.close_session(1, 3)
        assert store.relieve(1) == [], "it is held"
        _, *grants = store.ingest_done(again.ingest, loaded(A, 0, is_settled=False), 4)
        assert [each.opening for each in grants] == late
        assert store.ingest_count() == 0

    @pytest.mark.parametrize("size", [60, 40])
    def test_what_a_file_is_compared_with_stays(self, size: int) -> None:
        """Found: it could go meanwhile, and the client was told that its file had changed."""
        store = new_store()
        load(store, opening(size=size), loaded(A, size, is_settled=False))
        store.close_session(1, 1)
        start = started(store.open(opening(session=2, size=size), 2))
        assert store.relieve(1) == store.evict_all() == store.expire(3) == []
        with pytest.raises(NoSpace, match="compared"):
            store.evict(A)
        *_, grant = store.ingest_done(start.ingest, loaded(A, 0, is_settled=False), 3)
        assert isinstance(grant, GrantLease)
        store.close_session(2, 4)
        assert store.evict(A)[0] == DropImage(A)

    def test_the_memory_of_what_a_file_is_compared_with_may_be_lost(self) -> None:
        store = new_store()
        load(store, opening(), loaded(A, is_settled=False))
        start = started(store.open(opening(session=2), 2))
        store.forget(A)
        store.ingest_done(start.ingest, loaded(A), 3)
        store.close_session(2, 4)
        assert store.evict(A)[0] == DropImage(A)

    def test_a_hint_that_was_wrong_is_forgotten(self) -> None:
        store = new_store()
        load(store, opening(size=60), loaded(A, 60, is_settled=False))
        store.close_session(1, 1)
        (start,) = store.open(opening(session=2, size=60), 2)
        (refusal,) = store.ingest_failed(start.ingest, ReadFailed("not what it was"))
        assert isinstance(refusal, RefuseRequest)
        drop, _, again = store.open(opening(session=2, size=60), 3)
        assert drop == DropImage(A)
        assert again == StartIngest(again.ingest, opening(session=2, size=60), False, False)

    def test_withheld_bytes_count(self) -> None:
        store = new_store()
        refused = store.open(opening(size=60), 1, withheld_bytes=41)[0]
        assert isinstance(refused, RefuseRequest)
        assert isinstance(refused.error, NoSpace)
        assert "not to be had 41" in str(refused.error)
        advice = "; free memory, or lower TRIMS_HOST_HEADROOM_BYTES and run `trims stop`"
        assert str(refused.error).endswith(advice)
        started(store.open(opening(size=60), 1, withheld_bytes=40))

    def test_a_budget_that_is_too_small_is_to_be_raised(self) -> None:
        refused = new_store().open(opening(size=101), 1, withheld_bytes=41)[0]
        assert isinstance(refused, RefuseRequest)
        assert str(refused.error).endswith("; raise TRIMS_HOST_BYTES and run `trims stop`")

    def test_evicting_is_no_advice_where_all_is_in_use(self) -> None:
        store = new_store(100)
        lease = load(store, opening(size=80), loaded(A, 80))
        (refused,) = store.open(opening(session=2, inode=2, size=101), 2)
        assert isinstance(refused, RefuseRequest)
        assert str(refused.error).endswith(", or end programs that use the images (`trims status`)")
        store.release(1, lease, 3)
        (refused,) = store.open(opening(session=2, inode=2, size=101), 4)
        assert isinstance(refused, RefuseRequest)
        assert str(refused.error).endswith(", or run `trims evict --all`")

    def test_what_is_pinned_is_named_where_room_is_missing(self) -> None:
        """Found: the advice was `trims evict --all` alone, which leaves pinned images."""
        store = new_store(100)
        load(store, opening(size=80), loaded(A, 80))
        store.close_session(1, 1)
        store.pin(A, 1000)
        refused = store.open(opening(session=2, inode=2, size=60), 2)[0]
        assert isinstance(refused, RefuseRequest)
        assert "`trims evict --all`, which keeps the 80 B that are pinned" in str(refused.error)

    def test_relieving_drops_free_images_only_and_no_more_than_wanted(self) -> None:
        store = new_store(100)
        held = load(store, opening(inode=1, size=30), loaded(A, 30), now=1)
        for inode, digest in ((2, B), (3, "c" * 64)):
            one = opening(inode=inode, size=30)
            store.release(1, load(store, one, loaded(digest, 30), now=inode), inode)
        assert [each.digest for each in store.relieve(10) if isinstance(each, DropImage)] == [B]
        assert store.relieve(0) == []
        assert len([each for each in store.relieve(99) if isinstance(each, DropImage)]) == 1
        assert [image.digest for image in store.images()] == [A]
        assert store.release(1, held, 10)

    def test_the_least_recently_used_goes_first(self) -> None:
        store = new_store(30)
        for inode, digest in ((1, A), (2, B), (3, "c" * 64)):
            store.release(1, load(store, opening(inode=inode), loaded(digest), now=inode), inode)
        store.release(1, granted(store.open(opening(inode=1), 9)).lease, 9)
        actions = store.open(opening(inode=4, size=1), 10)
        assert actions[:2] == [DropImage(B), Announce("evicted", B, 10)]
        assert started(actions)
        assert {row.digest for row in store.images()} == {A, "c" * 64}

    def test_nothing_is_evicted_for_a_request_that_is_refused(self) -> None:
        store = new_store(30)
        store.release(1, load(store, opening(inode=1), loaded(A)), 2)
        load(store, opening(inode=2), loaded(B))
        actions = store.open(opening(inode=3, size=25), 3)
        assert [type(each) for each in actions] == [RefuseRequest]
        assert len(store.images()) == 2

    def test_candidates_come_by_their_last_use_and_only_as_many_as_are_needed(self) -> None:
        seen: list[Digest] = []

        class Watched(LeastRecentlyUsed):
            def rank(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
                for each in candidates:
                    seen.append(each.digest)
                    yield each

        store = Store(60, policy=Watched())
        leases = [
            load(store, opening(session=inode, inode=inode), loaded(digest), now=inode)
            for inode, digest in enumerate("abcdef", 1)
        ]
        store.release(1, leases[0], 10)
        store.close_session(3, 11)
        store.release(2, leases[1], 12)
        again = granted(store.open(opening(session=9, inode=1), 13))
        store.release(9, again.lease, 14)
        store.relieve(20)
        assert seen == ["c", "b"]
        assert [row.digest for row in store.images()] == ["a", "f", "e", "d"]
        assert [row.digest for row in store.images(2)] == ["a", "f"]

    def test_what_a_policy_keeps_goes_only_when_the_machine_needs_it(self) -> None:
        store = Store(20, policy=Never())
        store.release(1, load(store, opening(inode=1), loaded(A)), 2)
        held = load(store, opening(inode=2), loaded(B))
        assert isinstance(store.open(opening(inode=3), 3)[0], RefuseRequest)
        assert DropImage(A) in store.relieve(20)
        assert store.relieve(20) == []
        assert store.release(1, held, 4)

    def test_what_the_policy_has_ranked_goes_before_what_it_keeps(self) -> None:
        class KeepsTheOldest(LeastRecentlyUsed):
            def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
                return list(candidates)[1:]

        store = Store(30, policy=KeepsTheOldest())
        for inode, digest in enumerate("abc", 1):
            store.release(1, load(store, opening(inode=inode), loaded(digest), now=inode), inode)
        dropped = [each.digest for each in store.relieve(30) if isinstance(each, DropImage)]
        assert dropped == ["b", "c", "a"]

    def test_the_policy_is_told_what_is_used_and_what_goes(self) -> None:
        told: list[tuple[str, str, int]] = []

        class Told(LeastRecentlyUsed):
            def used(self, image: Candidate) -> None:
                told.append(("used", image.digest, image.opens))

            def gone(self, image: Candidate) -> None:
                told.append(("gone", image.digest, image.opens))

        store = Store(20, policy=Told())
        load(store, opening(inode=1), loaded(A))
        store.open(opening(session=2, inode=1), 2)
        start = started(store.load(opening(inode=2), 3))
        store.ingest_done(start.ingest, loaded(B), 4)
        assert told == [("used", A, 1), ("used", A, 2), ("used", B, 0)], "B was loaded for later"
        store.evict_all()
        assert told[3:] == [("gone", B, 0)]

    def test_what_nobody_has_used_for_long_expires(self) -> None:
        store = new_store(100)
        held = load(store, opening(inode=1), loaded("a"), now=1)
        for inode, digest in enumerate("bcd", 2):
            store.release(1, load(store, opening(inode=inode), loaded(digest), now=inode), inode)
        store.pin("b", 1)
        assert store.expire(3) == []
        dropped = [each.digest for each in store.expire(4) if isinstance(each, DropImage)]
        assert dropped == ["c"]
        store.release(1, held, 9)
        assert [each.digest for each in store.expire(9) if isinstance(each, DropImage)] == ["d"]
        assert {row.digest for row in store.images()} == {"a", "b"}


class TestHolding:
    @pytest.mark.parametrize("hold", ["lease", "pin"])
    def test_a_held_image_is_never_evicted(self, hold: str) -> None:
        store = new_store(10)
        lease = load(store, opening(), loaded())
        if hold == "pin":
            store.pin(A, 1)
            store.release(1, lease, 2)
        assert isinstance(store.open(opening(inode=2), 3)[0], RefuseRequest)
        assert store.evict_all() == []
        with pytest.raises(NoSpace, match="is pinned" if hold == "pin" else "is in use"):
            store.evict(A)

    def test_what_is_copied_elsewhere_stays_until_every_copy_has_ended(self) -> None:
        store = new_store(10)
        store.release(1, load(store, opening(), loaded()), 2)
        for _ in range(2):
            store.hold(A)
        for held in (2, 1):
            assert store.evict_all() == store.relieve(10) == [], held
            with pytest.raises(NoSpace, match="being copied"):
                store.evict(A)
            assert isinstance(store.open(opening(inode=2), 3)[0], RefuseRequest)
            store.unhold(A)
        assert DropImage(A) in store.evict_all()
        with pytest.raises(UnknownImage):
            store.hold(A)

    def test_pinning_twice_is_announced_once(self) -> None:
        store = new_store()
        load(store, opening(), loaded())
        assert store.pin(A, 1) == [Announce("pinned", A, 10)]
        assert store.pin(A, 1) == []
        store.close_session(1, 2)
        assert store.is_needed()
        assert store.images()[0].is_pinned
        assert store.unpin(A, 1) == [Announce("unpinned", A, 10)]
        assert (store.is_needed(), store.images()[0].is_pinned) == (False, False)
        assert store.unpin(A, 1) == []

    @pytest.mark.parametrize("last", [2, None], ids=["itself", "for all"])
    def test_an_image_stays_while_any_user_has_pinned_it(self, last: int | None) -> None:
        store = new_store()
        load(store, opening(), loaded())
        store.pin(A, 1)
        assert store.pin(A, 2) == []
        assert store.unpin(A, 3) == store.unpin(A, 1) == store.unpin(A, 1) == []
        assert store.images()[0].is_pinned
        assert store.unpin(A, last) == [Announce("unpinned", A, 10)]
        assert not store.is_pinned(A)

    def test_a_lease_can_be_released_once_and_only_by_its_owner(self) -> None:
        store = new_store()
        lease = load(store, opening(1), loaded())
        assert not store.release(2, lease, 2)
        assert not store.release(1, lease + 1, 2)
        assert store.release(1, lease, 2)
        assert not store.release(1, lease, 2)

    def test_unknown_images(self) -> None:
        store = new_store()
        for act in (store.evict, lambda it: store.pin(it, 1), lambda it: store.unpin(it, 1)):
            with pytest.raises(UnknownImage, match="trims ls"):
                act(A)

    def test_evicting_everything_free(self) -> None:
        store = new_store()
        store.release(1, load(store, opening(inode=1), loaded(A)), 2)
        load(store, opening(inode=2), loaded(B))
        assert store.evict_all() == [DropImage(A), Announce("evicted", A, 10)]


class TestSessions:
    def test_a_closed_session_leaves_no_lease(self) -> None:
        store = new_store()
        load(store, opening(1), loaded())
        store.open(opening(2), 2)
        assert (store.lease_count(), store.lease_count(1)) == (2, 1)
        store.close_session(1, 5)
        assert (store.lease_count(), store.lease_count(1)) == (1, 0)
        store.close_session(2, 6)
        store.close_session(2, 6)
        assert store.evict(A)[0] == DropImage(A)

    def test_a_closed_session_waits_for_nothing(self) -> None:
        store = new_store()
        ingest = started(store.open(opening(1), 1)).ingest
        store.open(opening(2), 1)
        store.close_session(1, 2)
        grants = [
            each for each in store.ingest_done(ingest, loaded(), 3) if isinstance(each, GrantLease)
        ]
        assert [(each.opening.session, each.outcome) for each in grants] == [(2, "joined")]

    def test_a_load_nobody_waits_for_runs_to_its_end(self) -> None:
        store = new_store()
        ingest = started(store.open(opening(1), 1)).ingest
        store.close_session(1, 2)
        assert store.ingest_count() == 1
        assert store.ingest_done(ingest, loaded(), 3)[0] == AdoptSegment(ingest, A)
        assert granted(store.open(opening(2), 4)).outcome == "hit"


class TestNames:
    def test_the_last_sixteen_are_kept(self) -> None:
        store = new_store()
        load(store, opening(name="/0"), loaded())
        for number in range(1, 20):
            store.open(opening(name=f"/{number}"), 2)
        store.open(opening(name="/5"), 3)
        (row,) = store.images()
        kept = [name for _, name in row.names]
        assert len(kept) == 16
        assert kept[-1] == "/5"
        assert "/3" not in kept
        assert [store.named(name, user=1000) for name in ("/3", "/5")] == [None, A]

    def test_find(self) -> None:
        store = new_store()
        load(store, opening(inode=1, name="/a"), loaded("abcdef" + "0" * 58))
        load(store, opening(inode=2, name="/b", user=7), loaded("abcdef" + "1" * 58))
        ends = {text: [each[-1] for each in store.matching(text)] for text in ("abcde", "ABCDEF")}
        assert ends == {"abcde": [], "ABCDEF": ["0", "1"]}
        assert store.matching("abcdef1") == ["abcdef" + "1" * 58]
        assert store.named("/a", user=1) == "abcdef" + "0" * 58
        assert store.named("/b", user=7, may_see_all=False) == "abcdef" + "1" * 58
        assert store.named("/b", user=1000, may_see_all=False) is None
        assert store.named("/c", user=1) is None
        assert store.is_named_by("abcdef" + "1" * 58, 7)
        assert not store.is_named_by("abcdef" + "1" * 58, 1000)
        store.forget("abcdef" + "1" * 58)
        assert store.named("/b", user=7) is None
        assert not store.is_named_by("abcdef" + "1" * 58, 7)

    def test_a_long_text_is_read_once_however_many_images_there_are(self) -> None:
        """Found: 60 KB of letters took 1.7 s among 3000 images, and nobody was answered."""

        class Text(str):
            lowered = 0

            def lower(self) -> str:
                Text.lowered += 1
                return super().lower()

        store = new_store(1000)
        for inode in range(1, 10):
            load(store, opening(inode=inode), loaded(f"{inode:064x}"))
        assert store.matching(Text("ABCDEF")) == []
        assert Text.lowered <= 1

    def test_names_take_only_so_much_however_many_images_there_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: a client with tiny images of long names took all the daemon's memory."""
        monkeypatch.setattr(stores, "_NAMES_LIMIT", 3)
        store = new_store(1000)
        load(store, opening(inode=1, name="/gone"), loaded(f"{1:064x}"))
        store.forget(f"{1:064x}")
        for inode in (2, 3):
            load(store, opening(inode=inode, name=f"/{inode}"), loaded(f"{inode:064x}"))
        store.open(opening(inode=2, name="/2"), 3)
        store.open(opening(inode=2, name="/again"), 3)
        store.open(opening(inode=2, name="/and again"), 3)
        named = [[name for _, name in row.names] for row in store.images()]
        assert named == [["/2", "/again", "/and again"], []]
        assert store.named("/3", user=1000) is None

    def test_names_of_images_that_have_gone_leave_those_of_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: after thousands of other files, a pinned image could not be unpinned by path."""
        monkeypatch.setattr(stores, "_NAMES_LIMIT", 3)
        store = new_store()
        load(store, opening(inode=1, name="/a"), loaded(A))
        for number in range(10):
            load(store, opening(2, inode=2 + number, name=f"/{number}"), loaded(f"{number:064x}"))
            store.close_session(2, 3)
            store.evict(f"{number:064x}")
        assert store.named("/a", user=1000) == A
        assert store.images()[0].names == ((1000, "/a"),)

    def test_many_names_of_one_user_leave_those_of_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: one's own image was not one's own any more, and could not be unpinned."""
        monkeypatch.setattr(stores, "_NAMES_LIMIT", 20)
        store = new_store()
        load(store, opening(inode=1, name="/a", user=7), loaded(A))
        load(store, opening(inode=2, name="/b", user=8), loaded(A))
        for number in range(100):
            store.open(opening(inode=2, name=f"/b{number}", user=8), 3)
        assert store.is_named_by(A, 7)
        assert store.named("/a", user=7, may_see_all=False) == A
        assert [name for _, name in store.images()[0].names] == [
            "/a",
            *(f"/b{number}" for number in range(84, 100)),
        ]

    @pytest.mark.parametrize("many", [6, 8], ids=["a lower one", "a higher one"])
    def test_names_that_one_user_has_for_many_images_leave_those_of_others(
        self, monkeypatch: pytest.MonkeyPatch, many: int
    ) -> None:
        """Found: with sixteen for each of 512 images, a user took all of the table."""
        monkeypatch.setattr(stores, "_NAMES_LIMIT", 4)
        store = new_store(1000)
        load(store, opening(inode=1, name="/a", user=7), loaded(A))
        store.open(opening(inode=1, name="/again", user=7), 3)
        for inode in range(2, 8):
            load(store, opening(inode=inode, name=f"/{inode}", user=many), loaded(f"{inode:064x}"))
        assert store.named("/a", user=7, may_see_all=False) == A
        kept = [path for row in store.images() for _, path in row.names]
        assert kept == ["/7", "/6", "/a", "/again"]

    def test_ones_own_name_comes_before_anothers(self) -> None:
        """Anybody can call an image by anybody's path."""
        store = new_store()
        load(store, opening(inode=1, name="/a", user=7), loaded("abcdef" + "0" * 58))
        load(store, opening(inode=2, name="/a", user=0), loaded("abcdef" + "1" * 58))
        assert store.named("/a", user=0) == "abcdef" + "1" * 58
        assert store.named("/a", user=7) == "abcdef" + "0" * 58

    def test_what_another_has_pinned_is_not_ones_own_pin(self) -> None:
        """A name may mean two images, where its file was replaced."""
        store = new_store()
        for digest, inode in ((A, 1), (B, 2)):
            load(store, opening(inode=inode, name="/a", user=7), loaded(digest))
        store.pin(A, 8)
        assert store.named("/a", user=7, may_see_all=False, is_pinned=True) is None
        assert store.named("/a", user=7, is_pinned=True) == A
        store.pin(B, 7)
        assert store.named("/a", user=7, may_see_all=False, is_pinned=True) == B

    def test_rows_come_most_recently_used_first(self) -> None:
        store = new_store()
        load(store, opening(inode=1), loaded(A), now=1)
        load(store, opening(inode=2), loaded(B), now=2)
        assert [row.digest for row in store.images()] == [B, A]
        store.open(opening(inode=1), 3)
        row = store.images()[0]
        assert (row.digest, row.used_ns, row.loaded_ns, row.leases) == (A, 3, 1, 2)

    def test_hits_are_the_opens_that_read_nothing(self) -> None:
        """Whoever loaded the image: nobody has waited for one that came from another tier."""
        store = new_store()
        moved = store.admit(10, identities=(opening(inode=1).key,))
        store.ingest_done(moved, loaded(A), 1)
        store.open(opening(inode=1), 2)
        load(store, opening(inode=2), loaded(A))
        (start,) = store.open(opening(inode=3), 3)
        store.open(opening(session=2, inode=3), 3)
        store.ingest_done(start.ingest, loaded(B), 4)
        hits = {row.digest: row.hits for row in store.images()}
        assert hits == {A: 1, B: 1}


class TestTiers:
    """What a store has so that it can be one of several."""

    def test_numbers_are_shared(self) -> None:
        numbers = itertools.count(1)
        one, two = (Store(100, policy=LeastRecentlyUsed(), numbers=numbers) for _ in range(2))
        leases = [load(store, opening(), loaded()) for store in (one, two)]
        leases.append(granted(one.open(opening(2), 3)).lease)
        assert len(set(leases)) == 3
        assert not two.release(1, leases[0], 4)
        assert one.release(1, leases[0], 4)

    def test_the_hint_names_the_tier_and_its_setting(self) -> None:
        store = Store(5, policy=LeastRecentlyUsed(), tier="tier of GPU-1", settings="TRIMS_DEVICE")
        (refused,) = store.open(opening(), 1)
        assert isinstance(refused, RefuseRequest)
        assert "10 B do not fit the tier of GPU-1: 5 B too many; budget 5 B," in str(refused.error)
        assert "raise TRIMS_DEVICE_BYTES" in str(refused.error)

    def test_what_was_known_of_an_image_goes_with_it(self) -> None:
        device, host = new_store(), new_store()
        load(device, opening(user=1, name="/a"), loaded())
        load(device, opening(2, user=2, inode=2, name="/b"), loaded())
        device.close_session(1, 2)
        device.close_session(2, 2)
        dropped = device.evict(A)[0]
        assert isinstance(dropped, DropImage)
        ingest = host.admit(dropped.size_bytes, identities=dropped.identities, names=dropped.names)
        assert host.totals().reserved_bytes == 10
        assert host.ingest_done(ingest, loaded(), 3) == [
            AdoptSegment(ingest, A),
            Announce("loaded", A, 10),
        ]
        assert host.trusted_digest(1, identity(1)) == A
        assert host.trusted_digest(2, identity(2)) == A
        assert host.trusted_digest(2, identity(1)) is None
        assert granted(host.open(opening(3, user=2, inode=2), 4)).outcome == "hit"
        assert host.images()[0].names == ((1, "/a"), (2, "/b"), (2, "/model"))

    def test_an_unsettled_identity_does_not_become_trusted_by_moving(self) -> None:
        store = new_store()
        load(store, opening(), loaded(is_settled=False))
        store.close_session(1, 2)
        dropped = store.evict(A)[0]
        assert isinstance(dropped, DropImage)
        assert dropped.identities == ()

    def test_what_is_admitted_takes_nobodys_place(self) -> None:
        store = new_store(30)
        store.release(1, load(store, opening(size=20), loaded(size=20)), 2)
        with pytest.raises(NoSpace):
            store.admit(11)
        with pytest.raises(NoSpace):
            store.admit(5, withheld_bytes=6)
        assert len(store.images()) == 1
        ingest = store.admit(10)
        with pytest.raises(NoSpace):
            store.admit(1)
        store.ingest_failed(ingest, ReadFailed("no"))
        assert store.totals().reserved_bytes == 0

    def test_a_file_can_be_opened_while_its_image_is_on_its_way(self) -> None:
        store = new_store()
        ingest = store.admit(10, identities=((1000, identity()),))
        opened = started(store.open(opening(), 1)).ingest
        store.ingest_done(ingest, loaded(), 2)
        actions = store.ingest_done(opened, loaded(), 3)
        assert actions[0] == DiscardSegment(opened)
        assert granted(actions).outcome == "miss"
        assert granted(store.open(opening(2), 4)).outcome == "hit"

    def test_lost_memory_is_forgotten_leases_and_all(self) -> None:
        store = new_store()
        lease = load(store, opening(), loaded())
        store.pin(A, 1)
        assert store.forget(A) == [DropImage(A), Announce("evicted", A, 10)]
        assert store.forget(A) == []
        assert (store.lease_count(), store.images(), store.is_needed()) == (0, [], False)
        assert not store.release(1, lease, 3)
        store.close_session(1, 4)
        assert started(store.open(opening(), 5))


class TestLeads:
    """One file, several images: its bytes, and its bytes behind some zeros."""

    def test_they_are_told_apart(self) -> None:
        store = new_store()
        load(store, opening(), loaded(A))
        aligned = opening(request=2)._replace(variant=Variant(8))
        action = started(store.open(aligned, 2))  # type: ignore[arg-type]
        assert action.opening.image_bytes == 18
        assert store.totals().reserved_bytes == 18
        store.ingest_done(action.ingest, loaded(B, 18), 3)
        assert store.trusted_digest(1000, identity()) == A
        assert store.trusted_digest(1000, identity(), Variant(8)) == B
        assert {row.size_bytes for row in store.images()} == {10, 18}

    def test_a_load_for_those_who_come_later(self) -> None:
        store = new_store()
        aligned = opening()._replace(variant=Variant(8))
        action = started(store.load(aligned, 1))  # type: ignore[arg-type]
        assert store.load(aligned, 1) == [], "it is under way"
        assert store.waiters(action.ingest) == []
        actions = store.ingest_done(action.ingest, loaded(B, 18), 2)
        assert not any(isinstance(each, GrantLease) for each in actions)
        assert store.load(aligned, 3) == [], "it is there"
        assert new_store(17).load(aligned, 3) == [], "there is no room"
        assert granted(store.open(aligned, 3)).outcome == "hit"  # type: ignore[arg-type]

    def test_who_asks_during_such_a_load_waits_for_it(self) -> None:
        store = new_store()
        aligned = opening()._replace(variant=Variant(8))
        action = started(store.load(aligned, 1))  # type: ignore[arg-type]
        assert store.open(aligned._replace(), 1) == []
        done = store.ingest_done(action.ingest, loaded(B, 18), 2)
        assert granted(done).outcome == "joined"  # type: ignore[arg-type]
