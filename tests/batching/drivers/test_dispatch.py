"""Whatever happens in whatever order: each request is answered once, and every place is given back.

Jobs are run by hand here, so that each order of events is possible and none is a matter of luck.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from harness import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.drivers.dispatch import Dispatch, _call_all
from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.learning import Learning
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import BatchFuture, Entry
from trims_shim.batching.policies.early_drop import EarlyDrop
from trims_shim.batching.policies.window import Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, TIMER, DropReason, Finished, Request
from trims_shim.errors import BatcherClosed, QueueFull, RequestDropped

MS = 1_000_000


class ManualDispatch(Dispatch):
    """Launched jobs wait in ``launched`` until :meth:`run`; the clock stands still until moved."""

    def __init__(self, make_rule: Any, **limits: Any) -> None:
        self.now_ns = 1
        self.launched: list[Job] = []
        self.wake_ns: int | None = None
        self.rescues = 0
        profile = LatencyProfile.linear(1, 4, max_batch_size=3)
        devices = limits.pop("devices", 1)
        options = Options(
            Learning(
                make_rule,
                name=None,
                max_batch_size=3,
                devices=devices,
                prior=profile,
                store=lambda: None,
            ),
            devices=devices,
            queue_size=limits.pop("queue_size", 4),
            rejects_when_full=limits.pop("rejects_when_full", False),
            serves_late=limits.pop("serves_late", False),
            caller_runs=True,
            clock_ns=lambda: self.now_ns,
        )
        assert not limits
        function = BatchFunction(
            lambda items: items,
            collate="list",
            isolate_failures=True,
            name="function",
        )
        super().__init__(function, options)

    def is_running_here(self) -> bool:
        return False

    def check_may_wait(self) -> None:
        pass

    def _launch(self, job: Job) -> None:
        assert self._lock._is_owned()  # type: ignore[attr-defined]
        self.launched.append(job)
        job.runner = self

    def _keep_time(self, wake_ns: int | None) -> None:
        self.wake_ns = wake_ns

    def _rescue(self) -> None:
        self.rescues += 1

    def make(
        self, item: Any = 0, *, priority: int = 0, deadline_ns: int = NEVER_NS
    ) -> tuple[BatchFuture, Request]:
        future = BatchFuture()
        entry = Entry((item,), future, deadline_ns, None)
        request = Request(0, self.now_ns, deadline_ns, priority, None, 1, entry)
        future.attach(self, request)
        self.submit(request)
        return future, request

    def run(self, job: Job, *, fails: bool = False) -> None:
        """One launched job, from begin to end."""
        self.launched.remove(job)
        entries = job.begin(self.now_ns)
        self.now_ns += MS
        if fails:
            job.end_with(self.now_ns, ValueError("batch"))
        else:
            job.end(self.now_ns, [entry.arguments[0] for entry in entries])
        job.deliver()
        self.post(job)

    def tick(self) -> None:
        """Time passes, and the timer comes if it is due."""
        self.now_ns += MS
        if self.wake_ns is not None and self.wake_ns <= self.now_ns:
            self.post(lambda now_ns: self._tell(now_ns, TIMER))

    def check_empty(self) -> None:
        """Nothing is open, and nothing was lost."""
        stats = self.stats()
        assert (stats.queued, stats.running) == (0, 0)
        assert len(self._room) == self.options.queue_size
        assert not self._inbox
        assert not self._late
        assert not self._held
        ended = stats.answered + stats.failed + stats.cancelled + sum(stats.dropped.values())
        assert ended == stats.submitted


# --- any order ------------------------------------------------------------------------------------


class Moody(EarlyDrop):
    """Raises for a priority of 13."""

    def choose(self, now_ns: int) -> int:
        if self.queue[0].priority == 13:
            raise RuntimeError("thirteen")
        return super().choose(now_ns)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([0, 0, 0, 1, 13]), st.integers(-1, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("run"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("tick"), st.just(0), st.just(0)),
        st.tuples(st.just("watch"), st.just(0), st.just(0)),
    ),
    min_size=10,  # without it most have five steps or less, in which little happens
    max_size=40,
)


@given(
    steps=steps,
    maker=st.sampled_from([Moody, functools.partial(Window, wait_ms=3)]),
    serves_late=st.booleans(),
    rejects=st.booleans(),
    devices=st.integers(1, 2),
    end=st.sampled_from(["close", "cancel", "watch"]),
)
def test_each_request_is_answered_once(
    steps: list[Any], maker: Any, serves_late: bool, rejects: bool, devices: int, end: str
) -> None:
    dispatch = ManualDispatch(
        maker, serves_late=serves_late, rejects_when_full=rejects, devices=devices
    )
    futures: list[BatchFuture] = []
    answers: Counter[int] = Counter()
    watched: list[int] = []
    watches = 0
    for what, first, second in steps:
        if what == "submit":
            deadline_ns = NEVER_NS if second == 40 else dispatch.now_ns + second * MS
            try:
                future, _ = dispatch.make(len(futures), priority=first, deadline_ns=deadline_ns)
            except QueueFull:
                continue
            number = len(futures)
            futures.append(future)
            future.add_done_callback(lambda _, number=number: answers.update([number]))
        elif what == "cancel" and futures:
            futures[first % len(futures)].cancel()
        elif what == "run" and dispatch.launched:
            dispatch.run(dispatch.launched[first % len(dispatch.launched)], fails=second)
        elif what == "tick":
            dispatch.tick()
        elif what == "watch":
            watches += 1
            dispatch.watch(lambda: watched.append(1))
        assert len(dispatch.launched) <= devices
        assert len(dispatch._waiting) + len(dispatch._room) == dispatch.options.queue_size
    if end == "watch":
        watches += 1
        dispatch.watch(lambda: watched.append(1))
    else:
        dispatch.close(cancel=end == "cancel")
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert all(future.done() for future in futures)
    assert answers == Counter(range(len(futures)))
    assert len(watched) == watches
    for number, future in enumerate(futures):
        if not future.cancelled() and future.exception() is None:
            assert future.result() == number
    dispatch.check_empty()


# --- one by one -----------------------------------------------------------------------------------


def waiting_dispatch(**limits: Any) -> ManualDispatch:
    return ManualDispatch(functools.partial(Window, wait_ms=5), **limits)


def test_an_event_that_comes_while_the_lock_is_held_is_not_lost() -> None:
    dispatch = waiting_dispatch()
    with dispatch._lock:
        future, _ = dispatch.make()
        assert dispatch.stats().submitted == 0
    dispatch.settle()
    assert dispatch.stats().submitted == 1
    assert future.cancel()
    dispatch.check_empty()


def test_the_policy_sees_time_that_never_goes_back() -> None:
    seen = []

    class Recording(Window):
        def on_arrival(self, now_ns: int, request: Request) -> None:
            seen.append(now_ns)

    dispatch = ManualDispatch(functools.partial(Recording, wait_ms=1e6))
    for now_ns in (10, 5, 7, 20):
        dispatch.now_ns = now_ns
        dispatch.make()
    assert seen == [10, 10, 10, 20]


def test_numbers_ascend_in_the_order_of_arrival() -> None:
    dispatch = waiting_dispatch()
    assert [dispatch.make()[1].number for _ in range(3)] == [1, 2, 3]


def test_an_interrupt_under_the_lock_leaves_the_event_to_somebody_else() -> None:
    interrupts = iter([KeyboardInterrupt])

    class Interrupted(Window):
        def on_arrival(self, now_ns: int, request: Request) -> None:
            for error in interrupts:
                raise error

    dispatch = ManualDispatch(functools.partial(Interrupted, wait_ms=0))
    with pytest.raises(KeyboardInterrupt):
        dispatch.make("item")
    assert dispatch.rescues == 1
    assert not dispatch._lock._is_owned()  # type: ignore[attr-defined]
    dispatch.settle()
    (job,) = dispatch.launched
    future = job.requests[0].payload.reply
    dispatch.run(job)
    assert future.result() == "item"
    dispatch.check_empty()


@pytest.mark.parametrize("queue_size", [1, 9])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("step", ["_arrive", "_admit", "_settled"])
def test_an_event_for_which_there_was_no_memory_is_taken_again(
    step: str, before: int, queue_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = waiting_dispatch(queue_size=queue_size)
    do, numbers = getattr(dispatch, step), itertools.count()

    def without_memory(*arguments: Any) -> None:
        if next(numbers) == before:
            raise MemoryError
        do(*arguments)

    monkeypatch.setattr(dispatch, step, without_memory)
    futures = [dispatch.make(item)[0] for item in range(3)]
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    dispatch.close(cancel=False)
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert all(future.done() for future in futures)
    dispatch.check_empty()


def test_an_event_that_fails_again_is_left_out() -> None:
    dispatch = waiting_dispatch()
    times: list[int] = []

    def fail(now_ns: int) -> None:
        times.append(now_ns)
        raise ValueError

    dispatch.post(fail)
    assert len(times) == 2
    future, _ = dispatch.make("later")
    dispatch.close(cancel=False)
    dispatch.run(dispatch.launched[0])
    assert future.result(0) == "later"
    dispatch.check_empty()


def test_what_a_call_without_the_lock_raises_keeps_no_other_one_from_being_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatch = waiting_dispatch()
    told: list[int] = []

    def fail() -> None:
        told.append(1)
        raise ValueError

    dispatch.make()
    dispatch.watch(fail)
    dispatch.watch(lambda: told.append(2))
    dispatch.run(dispatch.launched[0])
    assert told == [1, 2]
    assert "a callback of a batcher failed" in caplog.text


@pytest.mark.parametrize("end", ["drain", "close"])
def test_those_that_get_their_place_later_do_not_wait_for_more_at_the_end(end: str) -> None:
    """A request ends the time in which nothing is waited for."""
    dispatch = ManualDispatch(functools.partial(Window, wait_ms=1e6), queue_size=2)
    drained: list[bool] = []
    futures = [dispatch.make(item)[0] for item in range(4)]
    if end == "drain":
        dispatch.watch(lambda: drained.append(all(future.done() for future in futures)))
    else:
        dispatch.close(cancel=False)
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert [future.result(0) for future in futures] == [0, 1, 2, 3]
    assert drained == [True] * (end == "drain")
    dispatch.check_empty()


def test_a_watch_that_has_ended_hurries_nobody() -> None:
    dispatch = ManualDispatch(functools.partial(Window, wait_ms=1e6), devices=2)
    told: list[str] = []
    futures = [dispatch.make(0)[0]]
    end = dispatch.watch(lambda: told.append("settled"))
    assert len(dispatch.launched) == 1
    end()
    end()
    futures += [dispatch.make(item)[0] for item in (1, 2)]
    assert len(dispatch.launched) == 1
    futures.append(dispatch.make(3)[0])
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert [future.result(0) for future in futures] == [0, 1, 2, 3]
    assert not told
    dispatch.check_empty()


def test_calls_that_are_interrupted_are_made_once_more_and_so_are_all_others() -> None:
    made: list[str] = []

    def interrupted(name: str, *errors: type[BaseException]) -> Callable[[], None]:
        left = iter(errors)

        def call() -> None:
            made.append(name)
            for error in left:
                raise error

        return call

    calls = deque(
        [
            interrupted("once", KeyboardInterrupt),
            interrupted("always", SystemExit, KeyboardInterrupt, KeyboardInterrupt),
            interrupted("never"),
        ]
    )
    with pytest.raises(KeyboardInterrupt):
        _call_all(calls)
    assert made == ["once", "once", "always", "always", "never"]
    assert not calls


def test_late_requests_are_served_when_nothing_else_is_left() -> None:
    dispatch = ManualDispatch(EarlyDrop, queue_size=9, serves_late=True)
    dispatch.make("runs")
    dispatch.make("late", deadline_ns=dispatch.now_ns)
    for item in range(4):
        dispatch.make(item, priority=-5)
    served = []
    while dispatch.launched:
        job = dispatch.launched[0]
        served.append([request.payload.arguments[0] for request in job.requests])
        dispatch.run(job)
    assert served == [["runs"], [0, 1, 2], [3], ["late"]]


def test_late_requests_that_had_to_wait_for_room_are_served_at_once() -> None:
    """Found: they waited for the next event, and ran though that was their cancellation."""
    dispatch = ManualDispatch(EarlyDrop, queue_size=1, devices=2, serves_late=True)
    with dispatch._lock:
        dispatch.make("runs")
        late, _ = dispatch.make("late", deadline_ns=dispatch.now_ns)
    dispatch.settle()
    assert len(dispatch.launched) == 2
    late.cancel()
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert dispatch._era == 0  # the policy was told nothing that is wrong
    assert (dispatch.stats().cancelled, dispatch.stats().failed) == (1, 0)
    dispatch.check_empty()


def test_a_watch_that_the_policy_fails_on_is_told_once() -> None:
    dispatch = waiting_dispatch(queue_size=9)
    futures = [dispatch.make(item)[0] for item in range(4)]
    (job,) = dispatch.launched

    def fail(now_ns: int, event: Any) -> Any:
        raise ValueError(event)

    dispatch._policy.on_event = fail  # type: ignore[method-assign]
    told: list[bool] = []
    dispatch.watch(lambda: told.append(futures[0].done()))
    assert isinstance(futures[3].exception(0), ValueError)
    assert told == []
    dispatch.run(job)
    assert told == [True]
    dispatch.watch(lambda: told.append(False))
    assert told == [True, False]
    dispatch.check_empty()


@pytest.mark.parametrize("wrong", ["empty", "unknown", "twice"])
def test_a_policy_that_runs_what_is_not_queued_fails_its_requests(wrong: str) -> None:
    dispatch = waiting_dispatch(queue_size=9)
    futures = [dispatch.make()[0] for _ in range(2)]
    on_event = dispatch._policy.on_event

    def lie(now_ns: int, event: Any) -> Any:
        (action,) = on_event(now_ns, event)
        first = action.batch[0]
        batch = {"empty": [], "unknown": [Request(99, 0)], "twice": [first, first]}[wrong]
        return [type(action)(action.device, batch)]

    dispatch._policy.on_event = lie  # type: ignore[method-assign]
    futures.append(dispatch.make()[0])
    for future in futures:
        assert isinstance(future.exception(0), ValueError)
    assert not dispatch.launched
    dispatch.check_empty()
    later, _ = dispatch.make(5)
    dispatch.close(cancel=False)
    dispatch.run(dispatch.launched[0])
    assert later.result(0) == 5


def _ends_that_the_policy_hears_of(dispatch: ManualDispatch) -> list[Finished]:
    on_event, ends = dispatch._policy.on_event, list[Finished]()

    def listen(now_ns: int, event: Any) -> Any:
        if isinstance(event, Finished):
            ends.append(event)
        return on_event(now_ns, event)

    dispatch._policy.on_event = listen  # type: ignore[method-assign]
    return ends


def test_to_the_policy_a_batch_takes_from_its_decision_on() -> None:
    dispatch = ManualDispatch(Moody)
    ends = _ends_that_the_policy_hears_of(dispatch)
    decided_ns = dispatch.now_ns
    dispatch.make()
    (job,) = dispatch.launched
    dispatch.now_ns += 5 * MS  # until its thread wakes up
    dispatch.run(job)
    assert [each.started_ns for each in ends] == [decided_ns]
    assert job.started_ns == decided_ns + 5 * MS  # what its profile is learned from


def test_to_the_policy_the_way_of_answers_to_their_loop_is_part_of_a_batch() -> None:
    dispatch = ManualDispatch(Moody)
    ends = _ends_that_the_policy_hears_of(dispatch)
    decided_ns = []
    for _ in range(3):
        decided_ns.append(dispatch.now_ns)
        dispatch.make()
        dispatch.run(dispatch.launched[-1])
        if len(ends) == 1:  # on two loops
            dispatch.options.learning.delivered(3 * MS)
            dispatch.options.learning.delivered(2 * MS)
    earlier = [chosen - end.started_ns for chosen, end in zip(decided_ns, ends, strict=True)]
    assert earlier == [0, 3 * MS, 0]


def test_jobs_of_a_new_policy_wait_for_those_of_the_old_one() -> None:
    dispatch = ManualDispatch(Moody)
    running, _ = dispatch.make(1)
    (old,) = dispatch.launched
    dispatch._start_over(RuntimeError("as if"))
    later, _ = dispatch.make(2)
    assert dispatch.launched == [old]
    dispatch.run(old)
    assert running.result(0) == 1
    dispatch.run(dispatch.launched[0])
    assert later.result(0) == 2
    dispatch.check_empty()


def test_a_batch_that_nobody_can_be_given_keeps_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: Job) -> None:
        raise RuntimeError("no")

    dispatch = ManualDispatch(Moody)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_launch", refuse)
        refused, _ = dispatch.make(1)
    assert isinstance(refused.exception(0), RuntimeError)
    later, _ = dispatch.make(2)
    dispatch.run(dispatch.launched[0])
    assert later.result(0) == 2
    dispatch.check_empty()


def test_a_drop_says_the_reason() -> None:
    dispatch = ManualDispatch(EarlyDrop)
    future, _ = dispatch.make(deadline_ns=dispatch.now_ns + MS)
    error = future.exception(0)
    assert isinstance(error, RequestDropped)
    assert error.reason == "hopeless"
    assert "function" in str(error)


def test_close_in_its_place_among_the_events() -> None:
    """What was submitted before is answered, although it is looked at afterwards."""
    dispatch = waiting_dispatch()
    with dispatch._lock:
        before, _ = dispatch.make(1)
        dispatch.close(cancel=False)
        with pytest.raises(BatcherClosed):
            dispatch.make(2)
    dispatch.settle()
    dispatch.run(dispatch.launched[0])
    assert before.result(0) == 1


def test_late_requests_that_are_given_up_while_all_are_cancelled_are_answered_once() -> None:
    class Fussy(Window):
        """Gives the rest up when one was cancelled."""

        def choose(self, now_ns: int) -> int:
            if len(self.queue) < 3:
                self.drop(self.queue.take(len(self.queue)), DropReason.SHED)
            return 0

    dispatch = ManualDispatch(functools.partial(Fussy, wait_ms=0), serves_late=True)
    futures = []
    with dispatch._lock:
        futures += [dispatch.make(deadline_ns=NEVER_NS - 1)[0] for _ in range(3)]
    dispatch._policy._free.clear()  # type: ignore[attr-defined]  # busy while they arrive
    dispatch.settle()
    dispatch._policy._free.append(0)  # type: ignore[attr-defined]
    dispatch.close(cancel=True)
    assert all(isinstance(future.exception(0), BatcherClosed) for future in futures)
    assert not dispatch.launched
    assert dispatch._era == 0  # the policy was told nothing that is wrong
    dispatch.check_empty()


def interrupting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request that is given up is interrupted, when it is counted and not yet told."""
    opened = Entry.open_gate

    def interrupted(entry: Entry) -> None:
        monkeypatch.setattr(Entry, "open_gate", opened)
        raise KeyboardInterrupt

    monkeypatch.setattr(Entry, "open_gate", interrupted)


def test_a_request_that_an_interrupted_close_gives_up_ends_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatch = ManualDispatch(functools.partial(Window, wait_ms=0))
    first, _ = dispatch.make(1)
    second, _ = dispatch.make(2)
    interrupting_once(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        dispatch.close(cancel=True)
    dispatch.settle()
    with pytest.raises(BatcherClosed):
        second.result(0)
    dispatch.run(dispatch.launched[0])
    assert first.result(0) == 1
    assert not dispatch.launched
    assert dispatch.stats().failed == 1
    dispatch.check_empty()


def test_who_waits_behind_a_full_queue_is_found_without_looking_at_all() -> None:
    class Long(list[Request]):
        def __contains__(self, request: object) -> bool:
            raise AssertionError("it may be long")

        remove = index = __iter__ = __contains__  # type: ignore[assignment]

    dispatch = ManualDispatch(EarlyDrop, queue_size=1)
    dispatch._overflow = Long()
    dispatch.make("runs")
    made = [dispatch.make(item, priority=item % 3) for item in range(9)]
    for item in (4, 0, 8, 5):
        assert made[item][0].cancel()
    assert dispatch.stats().cancelled == 4
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert [made[item][0].result(0) for item in (1, 2, 3, 6, 7)] == [1, 2, 3, 6, 7]
    dispatch.check_empty()


def test_a_caller_may_take_the_place_that_one_behind_the_full_queue_is_about_to_get() -> None:
    class Late(EarlyDrop):
        def on_arrival(self, now_ns: int, request: Request) -> None:
            if request.payload.arguments == ("behind",):
                made.append(dispatch.make("meanwhile"))  # as from another thread: without the lock

    dispatch = ManualDispatch(Late, queue_size=1)
    made: list[tuple[BatchFuture, Request]] = []
    made += [dispatch.make(item) for item in ("runs", "waits", "behind")]
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert [future.result(0) for future, _ in made] == ["runs", "waits", "behind", "meanwhile"]
    dispatch.check_empty()


def test_a_submitter_that_waits_for_room_gets_it_or_is_told() -> None:
    dispatch = waiting_dispatch(queue_size=1)
    dispatch.make(1)
    outcomes: list[Any] = []

    def submit(item: int) -> None:
        future = BatchFuture()
        entry = Entry((item,), future, NEVER_NS, None)
        dispatch.submit_and_wait_for_room(Request(0, dispatch.now_ns, payload=entry))
        outcomes.append(future)

    threads = [threading.Thread(target=submit, args=(item,)) for item in (2, 3)]
    for thread in threads:
        thread.start()
    while dispatch.stats().queued < 3:
        pass
    assert outcomes == []
    dispatch.close(cancel=True)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(outcomes) == 2
    assert all(isinstance(each.exception(0), BatcherClosed) for each in outcomes)
    dispatch.check_empty()


def test_an_interrupt_beside_a_request_on_its_way_does_not_enlarge_the_queue() -> None:
    dispatch = waiting_dispatch(queue_size=2)
    assert dispatch._take_place()  # in another thread, whose request is not in the inbox yet
    dispatch.recover()
    entry = Entry((), BatchFuture(), NEVER_NS, None)
    dispatch.post(Request(0, dispatch.now_ns, NEVER_NS, 0, None, 1, entry))
    dispatch.close(cancel=True)
    dispatch.check_empty()


def test_an_interrupt_beside_requests_that_wait_does_not_enlarge_the_queue() -> None:
    dispatch = waiting_dispatch(queue_size=2, rejects_when_full=True)
    for item in range(2):
        dispatch.make(item)
    dispatch.recover()
    with pytest.raises(QueueFull):
        dispatch.make()
    assert dispatch.stats().rejected == 1
    dispatch.close(cancel=True)
    dispatch.check_empty()


@pytest.mark.parametrize("policy_fails", [False, True])
def test_a_request_that_comes_after_the_end_keeps_no_place(
    policy_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the place that came free, before the request behind the full queue could."""
    dispatch = ManualDispatch(functools.partial(Window, wait_ms=0), queue_size=1)
    first, _ = dispatch.make()
    second, _ = dispatch.make()
    third, behind = dispatch.make(3)
    assert dispatch.running
    assert not behind.payload.has_room
    dispatch.close(cancel=False)
    leave, admit, errors = dispatch._leave, dispatch._admit, [ValueError()] * policy_fails

    def lose_place(requests: Any) -> None:
        leave(requests)
        dispatch._room.pop()

    def fail(now_ns: int, request: Request) -> None:
        admit(now_ns, request)
        for error in errors:
            errors.clear()
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_leave", lose_place)
        second.cancel()
    assert not behind.payload.is_admitted
    late = BatchFuture()
    monkeypatch.setattr(dispatch, "_admit", fail)
    entry = Entry((), late, NEVER_NS, None)
    dispatch.post(Request(0, dispatch.now_ns, NEVER_NS, 0, None, 1, entry))
    assert isinstance(late.exception(0), BatcherClosed)
    while dispatch.launched:
        dispatch.run(dispatch.launched[0])
    assert first.done()
    assert isinstance(third.exception(0), ValueError) if policy_fails else third.result(0) == 3
    dispatch.check_empty()
