"""The store of prepared models: each rule by itself, and all of them against a model of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from trims_shim.daemon.prepared import refusals
from trims_shim.daemon.prepared import store as prepared_store
from trims_shim.daemon.prepared.store import PreparedStore
from trims_shim.daemon.prepared.values import (
    Action,
    Asking,
    Content,
    DropEntry,
    DropRefusal,
    Entry,
    Failure,
    Grant,
    KeepRefusal,
    Known,
    Start,
    Unknown,
    Verdict,
    Wait,
)
from trims_shim.errors import NoSpace, UnknownImage
from trims_shim.specs import Identity

A, B, C = "a" * 64, "b" * 64, "c" * 64
SECOND = 10**9
BROKEN = Failure("unknown_model", "it is no model", is_lasting=True)
SLOW = Failure("preparer_stalled", "it took too long", is_lasting=False)
DIED = Failure("preparer_died", "it died", is_lasting=False)


def new_store(budget: int = 100) -> PreparedStore:
    return PreparedStore(budget, numbers=itertools.count(1))


def asking(
    key: str = "", *, session: int = 1, flight: object = "flight", name: str = "/m.onnx"
) -> Asking:
    return Asking(session, flight, key, name, "1.31.1")


def entry(key: str = A, size: int = 10, *, used_ns: int = 1, name: str = "/m.onnx") -> Entry:
    return Entry(key, size, "1.31.1", 5, used_ns, (name,))


def identity(inode: int = 1) -> Identity:
    return Identity(device=1, inode=inode, size_bytes=10, mtime_ns=0, ctime_ns=0)


def ready(store: PreparedStore) -> list[str]:
    """The keys of all entries."""
    return sorted(row.key for row in store.rows(0) if row.state == "ready")


def preparing(store: PreparedStore) -> int:
    """How many preparations are under way, or wait."""
    return sum(row.state == "preparing" for row in store.rows(0))


def started(store: PreparedStore, ask: Asking, now: int = 1) -> int:
    answer = store.open(ask, now, may_start=True)
    assert isinstance(answer, Start), answer
    return answer.job


def make(
    store: PreparedStore, key: str = A, size: int = 10, *, now: int = 1, flight: object = None
) -> list[Action]:
    """Have a model prepared; what went to make room for it."""
    job = started(store, asking(flight=flight or key), now)
    verdict = store.hashed(job, key, now, needed_bytes=size)
    assert verdict.is_wanted
    return [*verdict.actions, *store.made(job, entry(key, size), now)]


def fail(store: PreparedStore, failure: Failure, *, now: int = 1) -> list[Action]:
    job = started(store, asking(), now)
    assert store.hashed(job, A, now, needed_bytes=1).is_wanted
    return store.failed(job, failure, now)


def granted(store: PreparedStore, key: str = A, *, session: int = 1, now: int = 1) -> int:
    answer = store.open(asking(key, session=session), now, may_start=False)
    assert isinstance(answer, Grant), answer
    return answer.lease


class TestOpening:
    def test_the_first_starts_and_the_others_are_told(self) -> None:
        store = new_store()
        job = started(store, asking())
        assert store.open(asking(session=2), 2, may_start=True) == Wait()
        assert store.open(asking(flight="other"), 2, may_start=True) != Wait()
        assert store.hashed(job, A, 3, needed_bytes=10) == Verdict(True)
        # By now somebody else may know the content, too.
        assert store.open(asking(A, flight="third"), 4, may_start=True) == Wait()
        assert store.made(job, entry(), 5) == []
        assert isinstance(store.open(asking(A), 6, may_start=True), Grant)

    def test_without_an_offer_nothing_is_started(self) -> None:
        store = new_store()
        assert store.open(asking(A), 1, may_start=False) == Unknown()
        for _ in range(2):  # what is not hashed may be anything
            assert store.open(asking(), 1, may_start=False) == Unknown()
        assert not store.is_needed()
        started(store, asking())
        assert store.is_needed()
        assert store.open(asking(), 1, may_start=False) == Wait()

    def test_one_at_a_time_may_offer_what_nobody_knows(self) -> None:
        store = new_store()

        def ask(session: int, now: int = 1, *, key: str = A, offers: bool = False) -> object:
            return store.open(asking(key, session=session, flight=key), now, may_start=offers)

        assert ask(1) == Unknown()
        assert [ask(1), ask(2), ask(3)] == [Wait()] * 3
        assert ask(2, key=B) == Unknown()
        store.close_session(1, 2)
        assert [ask(2), ask(3)] == [Unknown(), Wait()]
        assert ask(3, key=B) == Wait(), "it is another one's to offer"
        assert ask(3, 59 * SECOND) == Wait()
        assert ask(2, 59 * SECOND, key=C) == Unknown()
        assert ask(3, 60 * SECOND, key=C) == Wait()
        assert ask(3, 61 * SECOND) == Unknown(), "the other one took too long"
        assert ask(2, 60 * SECOND) == Unknown(), "the clock was set back"
        job = ask(4, 62 * SECOND, offers=True)
        assert isinstance(job, Start)
        store.unwanted(job.job)
        assert ask(1, 62 * SECOND) == Unknown(), "the offer was not wanted after all"

    def test_a_limited_number_waits(self) -> None:
        store = new_store()
        jobs = [started(store, asking(flight=n)) for n in range(prepared_store.JOBS_LIMIT)]
        answer = store.open(asking(flight="one more"), 1, may_start=True)
        assert isinstance(answer, Failure)
        assert (answer.reason, answer.is_lasting) == ("busy", False)
        assert preparing(store) == prepared_store.JOBS_LIMIT
        store.unwanted(jobs[0])
        started(store, asking(flight="one more"))

    def test_lease_numbers_come_from_the_shared_counter(self) -> None:
        store = PreparedStore(100, numbers=itertools.count(100, 7))
        store.adopt(entry())
        assert [granted(store) for _ in range(2)] == [100, 107]

    def test_a_content_that_is_there_is_not_wanted_again(self) -> None:
        store = new_store()
        make(store)
        job = started(store, asking(flight="a copy of the file"))
        assert store.hashed(job, A, 2, needed_bytes=10) == Verdict(False)
        store.unwanted(job)
        assert not store.is_needed()


class TestLeases:
    def test_a_lease_ends_with_its_release_or_its_session(self) -> None:
        store = new_store()
        store.adopt(entry())
        first, _, third = (granted(store, session=n) for n in (1, 1, 2))
        assert not store.release(2, first, 5)
        assert store.release(1, first, 5)
        assert not store.release(1, first, 5)
        assert (store.lease_count(), store.lease_count(1), store.lease_count(2)) == (2, 1, 1)
        store.close_session(1, 6)
        store.close_session(1, 6)
        assert store.is_needed()
        assert store.release(2, third, 7)
        assert not store.is_needed()

    def test_a_lost_entry_takes_its_leases_along(self) -> None:
        store = new_store()
        store.adopt(entry())
        lease = granted(store)
        assert store.lose(A) == [DropEntry(A, 10)]
        assert store.lose(A) == []
        assert not store.release(1, lease, 2)
        store.close_session(1, 2)
        assert store.resident_bytes() == 0
        started(store, asking(A))


class TestRoom:
    @pytest.mark.parametrize("is_adopted", [False, True])
    def test_a_clock_that_is_set_back_changes_nobodys_turn(self, is_adopted: bool) -> None:
        store = new_store(30)
        for key, now in ((A, 1000), (B, 2000), (C, 3000)):
            if is_adopted:
                store.adopt(entry(key, used_ns=now))
            else:
                make(store, key, now=now)
        store.release(1, granted(store, A, now=10), 11)
        assert make(store, "d" * 64, now=20) == [DropEntry(B, 10)]
        assert make(store, "e" * 64, now=30) == [DropEntry(C, 10)]
        assert make(store, "f" * 64, now=5000) == [DropEntry(A, 10)]

    def test_the_least_recently_used_goes(self) -> None:
        store = new_store(30)
        for moment, key in enumerate((A, B, C), start=1):
            make(store, key, now=moment)
        granted(store, A, now=10)
        store.close_session(1, 11)
        assert make(store, "d" * 64, now=12) == [DropEntry(B, 10)]
        assert ready(store) == [A, C, "d" * 64]

    @pytest.mark.parametrize("is_released", [True, False])
    def test_it_is_used_until_its_lease_ends(self, is_released: bool) -> None:
        store = new_store(30)
        for moment, key in enumerate((A, B, C), start=1):
            make(store, key, now=moment)
        lease = granted(store, A, now=10)
        granted(store, B, session=2, now=11)
        store.close_session(2, 12)
        if is_released:
            store.release(1, lease, 13)
        else:
            store.close_session(1, 13)
        assert make(store, "d" * 64, now=14) == [DropEntry(C, 10)]
        assert make(store, "e" * 64, now=15) == [DropEntry(B, 10)]

    def test_two_preparations_of_one_model_make_it_once(self) -> None:
        store = new_store()
        jobs = [started(store, asking(flight=number)) for number in range(2)]
        for job in jobs:
            assert store.hashed(job, A, 1, needed_bytes=10).is_wanted
        assert [store.made(job, entry(), 2) for job in jobs] == [[], []]
        assert (ready(store), store.resident_bytes(), preparing(store)) == ([A], 10, 0)

    def test_the_second_one_drops_nothing_where_there_is_room_for_one(self) -> None:
        store = new_store(15)
        jobs = [started(store, asking(flight=number)) for number in range(2)]
        for job in jobs:
            assert store.hashed(job, A, 1, needed_bytes=5).is_wanted
        assert [store.made(job, entry(), 2) for job in jobs] == [[], []]
        assert ready(store) == [A]

    def test_a_leased_one_stays_and_nothing_goes_in_vain(self) -> None:
        store = new_store(30)
        make(store, A, 20, now=1)
        make(store, B, 10, now=2)
        granted(store, A)
        job = started(store, asking(flight="large"), 3)
        assert store.hashed(job, C, 3, needed_bytes=15) == Verdict(False)
        store.unwanted(job)
        assert ready(store) == [A, B]
        answer = store.open(asking(flight="large", key=C), 4, may_start=True)
        assert isinstance(answer, Failure)
        assert answer.reason == "no_space"
        assert "15 B do not fit the cache of prepared models: 5 B too many" in answer.message
        assert "TRIMS_PREPARED_BYTES" in answer.message
        assert "file system" not in answer.message

    def test_no_space_does_not_last(self) -> None:
        store = new_store(5)
        job = started(store, asking())
        assert not store.hashed(job, A, 1, needed_bytes=6).is_wanted
        store.unwanted(job)
        assert isinstance(store.open(asking(A), 2, may_start=True), Failure)
        assert isinstance(store.open(asking(A), 61 * SECOND, may_start=True), Start)

    def test_a_full_file_system_makes_entries_go_too(self) -> None:
        store = new_store(1000)
        make(store, A, 10, now=1)
        make(store, B, 10, now=2)
        job = started(store, asking())
        verdict = store.hashed(job, C, 3, needed_bytes=10, short_bytes=5)
        assert verdict == Verdict(True, (DropEntry(A, 10),))
        other = started(store, asking(flight="other"))
        assert not store.hashed(other, "d" * 64, 3, needed_bytes=1, short_bytes=11).is_wanted
        store.unwanted(other)
        answer = store.open(asking(flight="other", key="d" * 64), 4, may_start=True)
        assert isinstance(answer, Failure)
        assert "1 B too many; budget 1000 B" in answer.message
        assert "; the file system lacks 11 B; " in answer.message

    def test_what_is_reserved_counts(self) -> None:
        store = new_store(30)
        first = started(store, asking(flight=1))
        assert store.hashed(first, A, 1, needed_bytes=20).is_wanted
        second = started(store, asking(flight=2))
        assert not store.hashed(second, B, 1, needed_bytes=11).is_wanted
        store.unwanted(first)
        third = started(store, asking(flight=3))
        assert store.hashed(third, C, 1, needed_bytes=30).is_wanted

    def test_what_was_underestimated_is_charged_or_dropped_again(self) -> None:
        store = new_store(30)
        make(store, A, 20, now=1)
        job = started(store, asking(), 2)
        assert store.hashed(job, B, 2, needed_bytes=5).is_wanted
        assert store.made(job, entry(B, 15), 3) == [DropEntry(A, 20)]
        job = started(store, asking(flight="more"), 4)
        assert store.hashed(job, C, 4, needed_bytes=5).is_wanted
        assert store.made(job, entry(C, 31), 5) == [DropEntry(C, 31)]
        assert ready(store) == [B]
        assert store.resident_bytes() == 15

    def test_one_goes_for_a_byte(self) -> None:
        store = new_store(20)
        make(store, A, now=1)
        make(store, B, now=2)
        assert make(store, C, 1, now=3) == [DropEntry(A, 10)]

    def test_a_smaller_budget_than_before(self) -> None:
        store = new_store(15)
        for moment, key in enumerate((A, B, C), start=1):
            store.adopt(entry(key, used_ns=moment))
        granted(store, A)
        store.close_session(1, 9)
        assert store.fit() == [DropEntry(B, 10), DropEntry(C, 10)]
        assert store.fit() == []


class TestRefusals:
    def test_a_lasting_reason_is_written_down(self) -> None:
        store = new_store()
        kept = KeepRefusal(A, BROKEN.reason, BROKEN.message, "1.31.1", ("/m.onnx",))
        assert fail(store, BROKEN) == [kept]
        assert store.open(asking(A), 10**18, may_start=True) == BROKEN
        job = started(store, asking(flight="a copy"))
        assert store.hashed(job, A, 2, needed_bytes=1) == Verdict(False)

    def test_it_holds_for_what_was_not_even_hashed(self) -> None:
        store = new_store()
        job = started(store, asking())
        assert store.failed(job, BROKEN, 1) == [], "there is no key to write it down for"
        assert isinstance(store.open(asking(), 10**18, may_start=True), Failure)
        started(store, asking(flight="another file"))

    def test_another_reason_does_not_hold_when_the_clock_was_set_back(self) -> None:
        """By hours, as where it showed local time until the network told it better."""
        store = new_store()
        fail(store, SLOW, now=10_000 * SECOND)
        assert isinstance(store.open(asking(A), 10_001 * SECOND, may_start=False), Failure)
        assert store.open(asking(A), 1_000 * SECOND, may_start=False) == Unknown()

    def test_another_reason_holds_for_a_while_that_grows(self) -> None:
        store = new_store()
        now = 1
        for pause_s in (60, 240, 960, 3600, 3600, 3600):
            assert fail(store, SLOW, now=now) == []
            now += pause_s * SECOND
            assert store.open(asking(A), now - 1, may_start=False) == SLOW
            assert store.open(asking(A), now, may_start=False) == Unknown()

    def test_the_second_death_is_lasting(self) -> None:
        store = new_store()
        assert fail(store, DIED) == []
        assert fail(store, SLOW, now=10**12) == []
        assert [type(each) for each in fail(store, DIED, now=10**13)] == [KeepRefusal]
        assert isinstance(store.open(asking(A), 10**18, may_start=True), Failure)

    def test_a_file_that_changed_says_nothing_of_its_content(self) -> None:
        store = new_store()
        assert fail(store, Failure("file_changed", "it changed", is_lasting=False)) == []
        assert isinstance(store.open(asking(A), 2, may_start=True), Start)

    def test_a_file_that_changed_before_it_was_hashed_may_be_changing(self) -> None:
        store = new_store()
        changed = Failure("file_changed", "it changed", is_lasting=False)
        store.failed(started(store, asking()), changed, 1)
        assert store.open(asking(), 2, may_start=True) == changed

    def test_what_one_installation_lacks_another_may_have(self) -> None:
        store = new_store()
        lacking = Failure("not_importable", "no onnxruntime", is_lasting=False)
        fail(store, lacking)
        assert store.open(asking(A), 2, may_start=True) == lacking
        assert isinstance(store.open(asking(A, flight="other"), 2, may_start=True), Start)

    def test_they_are_bounded_also_where_they_are_written_down(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(refusals, "_REFUSALS_LIMIT", 1)
        store = new_store()
        fail(store, BROKEN)
        job = started(store, asking(flight="another"))
        assert store.failed(job, SLOW, 2) == [DropRefusal(A)]

    def test_success_forgets_what_was_before(self) -> None:
        store = new_store()
        fail(store, DIED)
        make(store, A, now=10**12)
        store.lose(A)
        assert fail(store, DIED, now=10**13) == []

    def test_success_forgets_a_file_that_was_not_even_hashed(self) -> None:
        store = new_store()
        store.failed(started(store, asking()), DIED, 1)
        make(store, A, now=10**12, flight=asking().flight)
        store.lose(A)
        store.failed(started(store, asking(), 10**13), DIED, 10**13)
        started(store, asking(), 10**18)

    def test_it_is_remembered_from_a_daemon_before(self) -> None:
        store = new_store()
        store.remember(KeepRefusal(A, "metadata_differs", "x", "1.31.1", ("/m.onnx",)), 1)
        assert store.open(asking(A), 2, may_start=True) == Failure(
            "metadata_differs", "x", is_lasting=True
        )
        assert store.evict("/m.onnx") == [DropRefusal(A)]
        started(store, asking(A))


class TestEviction:
    def test_by_name_by_key_and_all(self) -> None:
        store = new_store()
        for key, name in ((A, "/a"), (B, "/models/b"), (C, "/models/b")):
            store.adopt(entry(key, name=name))
        assert store.evict("/models/b") == [DropEntry(B, 10), DropEntry(C, 10)]
        assert store.evict(A[:6]) == [DropEntry(A, 10)]
        store.adopt(entry(A))
        store.adopt(entry(B))
        store.open(asking(B, name="/link"), 1, may_start=False)
        with pytest.raises(NoSpace):
            store.evict("/link")
        store.close_session(1, 1)
        granted(store, A)
        fail_job = started(store, asking(flight="x"))
        store.failed(fail_job, SLOW, 1)
        assert store.evict() == [DropEntry(B, 10)]
        assert store.evict() == [], "what is in use stays"
        assert isinstance(store.open(asking(flight="x"), 2, may_start=True), Start)

    def test_of_a_name_whose_model_is_in_use_the_refusals_go(self) -> None:
        """The model with other options, say."""
        store = new_store()
        store.adopt(entry(A, name="/m"))
        granted(store, A)
        store.remember(KeepRefusal(B, "metadata_differs", "x", "1.31.1", ("/m",)), 1)
        assert store.evict("/m") == [DropRefusal(B)]
        with pytest.raises(NoSpace):
            store.evict("/m")

    def test_refusals_by_name_by_key_and_all(self) -> None:
        store = new_store()
        for key, name in ((A, "/a"), (B, "/b"), (C, "/c")):
            store.remember(KeepRefusal(key, "metadata_differs", "x", "1.31.1", (name,)), 1)
        assert store.evict("/b") == [DropRefusal(B)]
        assert store.evict(C[:6]) == [DropRefusal(C)]
        assert store.evict() == [DropRefusal(A)]

    def test_one_in_use(self) -> None:
        store = new_store()
        store.adopt(entry(A))
        granted(store)
        with pytest.raises(NoSpace, match="in use"):
            store.evict(A)
        store.close_session(1, 2)
        assert store.evict(A) == [DropEntry(A, 10)]

    @pytest.mark.parametrize("text", ["/unknown", "aaa", "dddddd"])
    def test_what_is_not_there(self, text: str) -> None:
        store = new_store()
        store.adopt(entry(A))
        with pytest.raises(UnknownImage):
            store.evict(text)

    def test_too_few_digits(self) -> None:
        store = new_store()
        store.adopt(entry("abcdef" + "0" * 58))
        store.adopt(entry("abcdef" + "1" * 58))
        with pytest.raises(UnknownImage, match="means 2 models"):
            store.evict("abcdef")


class TestKnowledge:
    KNOWN = Known(identity(), Content("d" * 64))
    EXTERNAL = Known(identity(), Content("d" * 64, (("w", "e" * 64),)), "/models", (identity(2),))

    def test_it_is_found_wherever_the_file_is(self) -> None:
        store = new_store()
        store.learn(self.KNOWN)
        assert store.recall(identity(), "/anywhere") == self.KNOWN
        store.unlearn(self.KNOWN)
        assert store.recall(identity(), "/anywhere") is None

    def test_with_external_files_only_in_their_directory(self) -> None:
        store = new_store()
        store.learn(self.EXTERNAL)
        assert store.recall(identity(), "/models") == self.EXTERNAL
        assert store.recall(identity(), "/copies") is None

    @pytest.mark.parametrize("part", ["device", "inode", "size_bytes", "mtime_ns", "ctime_ns"])
    def test_every_part_of_an_identity_counts(self, part: str) -> None:
        store = new_store()
        store.learn(self.KNOWN)
        assert store.recall(identity()._replace(**{part: 99}), "") is None

    def test_it_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepared_store, "_KNOWN_LIMIT", 3)
        store = new_store()
        for inode in range(3):
            store.learn(Known(identity(inode), Content("d" * 64)))
        store.recall(identity(0), "")
        store.learn(Known(identity(3), Content("d" * 64)))
        assert [store.recall(identity(n), "") is not None for n in range(4)] == [
            True,
            False,
            True,
            True,
        ]


def test_rows() -> None:
    store = new_store()
    store.adopt(entry(A, used_ns=1))
    store.adopt(entry(B, used_ns=2))
    granted(store, A, now=7)
    store.adopt(entry(A, used_ns=1))  # once more
    fail_job = started(store, asking(flight="x"))
    store.failed(fail_job, SLOW, 8)
    started(store, asking(flight="y", name="/y"), 9)
    store.failed(started(store, asking(flight="z", name=""), 9), SLOW, 9)
    rows = store.rows(10)
    assert [(row.state, row.key, row.leases, row.hits, row.reason) for row in rows] == [
        ("preparing", "", 0, 0, ""),
        ("ready", A, 1, 1, ""),
        ("ready", B, 0, 0, ""),
        ("refused", "", 0, 0, "preparer_stalled"),
        ("refused", "", 0, 0, "preparer_stalled"),
    ]
    assert [(row.size_bytes, row.used_ns, row.prepare_ns) for row in rows] == [
        (0, 9, 0),
        (10, 7, 5),
        (10, 2, 5),
        (0, 9, 0),
        (0, 8, 0),
    ]
    assert [row.names for row in rows] == [("/y",), *[("/m.onnx",)] * 2, (), ("/m.onnx",)]
    assert len(store.rows(100 * SECOND)) == 3, "a refusal that has expired is no news"


# --- everything at once ---------------------------------------------------------------------------

BUDGET = 60
MODELS = st.integers(0, 6)
SESSIONS = st.integers(1, 3)


def key_of(model: int) -> str:
    return f"{model:02d}" * 32


def size_of(model: int) -> int:
    return 8 + 9 * (model % 4)


class StoreMachine(RuleBasedStateMachine):
    """The model executes the actions, and refuses those that make no sense."""

    jobs = Bundle("jobs")
    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.store = new_store(BUDGET)
        self.now = 0
        self.files: dict[str, int] = {}
        self.held: dict[int, tuple[int, str]] = {}
        self.used: dict[str, int] = {}
        self.running: dict[int, int] = {}
        self.wanted: set[int] = set()
        self.written: set[str] = set()
        self.issued: set[int] = set()

    def is_leased(self, key: str) -> bool:
        return any(each == key for _, each in self.held.values())

    def execute(self, actions: list[Action] | tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, DropEntry):
                assert not self.is_leased(action.key)
                assert self.files.pop(action.key) == action.size_bytes
                others = [self.used[key] for key in self.files if not self.is_leased(key)]
                self.drops.append((self.used.pop(action.key), others))
            elif isinstance(action, KeepRefusal):
                self.written.add(action.key)
            else:
                assert action.key in self.written
                self.written.remove(action.key)

    def run(self, actions: list[Action] | tuple[Action, ...], *, is_lru: bool = False) -> None:
        self.drops: list[tuple[int, list[int]]] = []
        self.execute(actions)
        if is_lru:
            assert all(gone <= other for gone, others in self.drops for other in others)

    @rule(target=jobs, model=MODELS, session=SESSIONS, is_known=st.booleans())
    def ask(self, model: int, session: int, is_known: bool) -> object:
        self.now += 1
        key = key_of(model) if is_known else ""
        before = set(self.held)
        answer = self.store.open(
            asking(key, session=session, flight=model), self.now, may_start=True
        )
        if isinstance(answer, Start):
            assert model not in self.running.values(), "single flight"
            assert key not in self.files
            self.running[answer.job] = model
            return answer.job
        if isinstance(answer, Grant):
            assert key == answer.key
            assert key in self.files
            assert answer.lease not in self.issued
            self.issued.add(answer.lease)
            self.held[answer.lease] = (session, key)
            self.used[key] = self.now
            assert set(self.held) > before
            return multiple()
        if isinstance(answer, Wait):
            assert model in self.running.values()
        return multiple()

    @rule(target=leases)
    def take_leases(self) -> object:
        return multiple(*self.held)

    @rule(job=jobs, short=st.sampled_from([0, 0, 0, 5, 100]))
    def hash(self, job: int, short: int) -> None:
        if job not in self.running or job in self.wanted:
            return
        self.now += 1
        model = self.running[job]
        verdict = self.store.hashed(
            job, key_of(model), self.now, needed_bytes=size_of(model), short_bytes=short
        )
        self.run(verdict.actions, is_lru=True)
        if verdict.is_wanted:
            self.wanted.add(job)
        else:
            assert not verdict.actions
            self.store.unwanted(job)
            del self.running[job]

    @rule(job=consumes(jobs), growth=st.integers(-5, 30))
    def finish(self, job: int, growth: int) -> None:
        if job not in self.wanted:
            return
        self.now += 1
        model = self.running.pop(job)
        self.wanted.discard(job)
        key, size = key_of(model), size_of(model) + growth
        self.files[key] = size
        self.used[key] = self.now
        self.run(self.store.made(job, entry(key, size), self.now))

    @rule(job=consumes(jobs), failure=st.sampled_from([BROKEN, SLOW, DIED]))
    def fail(self, job: int, failure: Failure) -> None:
        if job not in self.running:
            return
        self.now += 1
        del self.running[job]
        self.wanted.discard(job)
        self.run(self.store.failed(job, failure, self.now))

    @rule(lease=consumes(leases))
    def release(self, lease: int) -> None:
        self.now += 1
        session, key = self.held.pop(lease, (-1, ""))
        assert self.store.release(session, lease, self.now) == bool(key)
        if key:
            self.used[key] = self.now

    @rule(session=SESSIONS)
    def close(self, session: int) -> None:
        self.now += 1
        for lease, (owner, key) in list(self.held.items()):
            if owner == session:
                del self.held[lease]
                self.used[key] = self.now
        self.store.close_session(session, self.now)

    @rule(model=MODELS)
    def lose(self, model: int) -> None:
        key = key_of(model)
        self.held = {lease: held for lease, held in self.held.items() if held[1] != key}
        self.run(self.store.lose(key))
        assert key not in self.files

    @rule(model=st.one_of(st.none(), MODELS))
    def evict(self, model: int | None) -> None:
        text = "" if model is None else key_of(model)
        try:
            self.run(self.store.evict(text))
        except UnknownImage:
            assert text not in self.files
        except NoSpace:
            assert self.is_leased(text)

    @rule()
    def wait(self) -> None:
        self.now += 3600 * SECOND

    @invariant()
    def the_account_is_right(self) -> None:
        assert self.store.resident_bytes() == sum(self.files.values()) <= BUDGET
        assert ready(self.store) == sorted(self.files)
        assert self.store.lease_count() == len(self.held)
        assert preparing(self.store) == len(self.running)
        rows = {row.key: row for row in self.store.rows(self.now) if row.state == "ready"}
        for key, row in rows.items():
            assert row.leases == [each for _, each in self.held.values()].count(key)
            assert row.used_ns == self.used[key]


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
