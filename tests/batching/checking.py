"""Drives a policy through a script of events, and holds it to the protocol's contract all the way.

Independent of the simulator, so that each can be checked against the other; unlike it, it can
cancel, send timers that nobody asked for, and flush at any time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from trims_shim.batching.buckets import bucket_in, may_share
from trims_shim.batching.protocol import (
    FLUSH,
    TIMER,
    Action,
    Cancelled,
    Drop,
    DropReason,
    Event,
    Finished,
    Policy,
    Preempted,
    Request,
    Run,
)

__all__ = ["Checked", "History", "drive", "ms"]

LogRow = tuple[int, str, tuple[int, ...]]
Observer = Callable[[int, "Checked", Sequence[Action]], None]


def ms(value: float) -> int:
    """In nanoseconds."""
    return round(value * 1_000_000)


class Checked:
    """A policy that asserts what the protocol promises, of its driver and of the wrapped one."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch_size: int,
        devices: int = 1,
        max_weight: int | None = None,
    ) -> None:
        self.queued: dict[int, Request] = {}
        self.running: dict[int, Sequence[Request]] = {}
        self.free = set(range(devices))
        self._policy = policy
        self._max_batch_size = max_batch_size
        self._max_weight = max_weight
        self._seen: set[int] = set()
        self._now_ns = 0

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """Of the wrapped policy."""
        assert now_ns >= self._now_ns
        self._now_ns = now_ns
        self._note(event)
        actions = self._policy.on_event(now_ns, event)
        for action in actions:
            if isinstance(action, Run):
                self._check_run(action)
            elif isinstance(action, Drop):
                assert action.requests
                self._leave_queue(action.requests)
        if event is FLUSH and self.free:
            assert not self.queued, "something waits although no more will come"
        return actions

    def next_deadline_ns(self) -> int | None:
        """Of the wrapped policy."""
        deadline_ns = self._policy.next_deadline_ns()
        if deadline_ns is not None:
            assert deadline_ns > self._now_ns, "a timer for now, or for what is over"
            assert self.queued
            assert self.free, "a timer that cannot lead to anything"
        return deadline_ns

    def _note(self, event: Event) -> None:
        if isinstance(event, Request):
            assert event.number not in self._seen
            self._seen.add(event.number)
            self.queued[event.number] = event
        elif isinstance(event, Cancelled):
            self.queued.pop(event.request.number, None)
        elif isinstance(event, Finished | Preempted):
            batch = self.running.pop(event.device)
            assert list(event.batch) == list(batch)
            self.free.add(event.device)
            if isinstance(event, Preempted):
                self.queued |= {request.number: request for request in batch}

    def _check_run(self, run: Run) -> None:
        assert run.device in self.free
        assert 1 <= len(run.batch) <= self._max_batch_size
        assert may_share(request.key for request in run.batch)
        lengths = [bucket_in(request.key) or 0 for request in run.batch]
        assert lengths[0] == max(lengths)
        if self._max_weight is not None and len(run.batch) > 1:
            assert sum(request.weight for request in run.batch) <= self._max_weight
        self._leave_queue(run.batch)
        self.free.remove(run.device)
        self.running[run.device] = run.batch

    def _leave_queue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert self.queued.pop(request.number) is request


@dataclass
class History:
    """What a driven policy did."""

    log: list[LogRow] = field(default_factory=list)
    """(time, what, numbers) of every run and drop."""
    answered: dict[int, int] = field(default_factory=dict)
    """Time of the answer by number."""
    dropped: dict[int, DropReason] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)

    def note_event(self, now_ns: int, event: Event, policy: Checked) -> None:
        """Before the policy gets it."""
        if isinstance(event, Finished):
            self.answered |= {request.number: now_ns for request in event.batch}
        elif isinstance(event, Cancelled) and event.request.number in policy.queued:
            self.cancelled.add(event.request.number)

    def note_actions(self, now_ns: int, actions: Iterable[Action]) -> None:
        """As they were made."""
        for action in actions:
            if isinstance(action, Run):
                self.log.append((now_ns, "run", tuple(each.number for each in action.batch)))
            elif isinstance(action, Drop):
                self.log.append((now_ns, "drop", tuple(each.number for each in action.requests)))
                self.dropped |= {each.number: action.reason for each in action.requests}

    def in_time(self, requests: Iterable[Request]) -> int:
        """How many were answered by their deadlines."""
        return sum(self.answered.get(each.number, 1 << 63) <= each.deadline_ns for each in requests)


def drive(
    policy: Checked,
    script: Iterable[tuple[int, Event]],
    *,
    service_ns: Callable[[Sequence[Request]], int],
    late_ns: Callable[[], int] = lambda: 0,
    observe: Observer | None = None,
) -> History:
    """Send the script, timers when asked for, what finishes, and FLUSH when nothing else is left.

    Timers come ``late_ns`` too late. At equal times what finishes goes first, in the order in which
    it was started, then the script in its order, then the timer.
    """
    history = History()
    events = [(time_ns, 1, index, event) for index, (time_ns, event) in enumerate(script)]
    heapq.heapify(events)
    asked_ns = timer_ns = None
    started, is_flushed = 0, False
    while True:
        if policy.next_deadline_ns() != asked_ns:
            asked_ns = policy.next_deadline_ns()
            timer_ns = None if asked_ns is None else asked_ns + late_ns()
        if timer_ns is not None and (not events or timer_ns < events[0][0]):
            now_ns, event = timer_ns, TIMER
            asked_ns = timer_ns = None
        elif events:
            now_ns, _, _, event = heapq.heappop(events)
        elif not is_flushed:
            is_flushed, event = True, FLUSH
        else:
            break
        history.note_event(now_ns, event, policy)
        actions = policy.on_event(now_ns, event)
        history.note_actions(now_ns, actions)
        for run in actions:
            if isinstance(run, Run):
                finished = Finished(run.device, run.batch, now_ns)
                started += 1
                heapq.heappush(events, (now_ns + service_ns(run.batch), 0, started, finished))
        if observe is not None:
            observe(now_ns, policy, actions)
    assert not policy.queued
    assert not policy.running
    return history
