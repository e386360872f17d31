"""Between callers, a policy and runners of batches; the same for threads and event loops.

Events (requests, cancellations, finished jobs) go into an inbox. A thread that puts one in tries to
take the lock. With the lock it takes a *turn*: it empties the inbox, asks the policy and hands jobs
out. After giving the lock back it looks into the inbox again. So no thread waits for the lock to
report an event, not even an event loop or a finalizer that runs in the middle of a turn, and no
event stays in the inbox. The clock is read when an event is taken out: the policy sees time that
never goes back.

Users' code (callbacks of futures, batch functions, collates) is called without the lock.
Sub-classes run jobs, and keep the time of ``next_deadline_ns``. Nothing is decided here: the policy
says which requests run when, and which are dropped.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.learning import LateKey
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import BatchFuture, BlockedCall, Seat, is_failure
from trims_shim.batching.drivers.streams import StreamReply
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Cancelled,
    Drop,
    DropReason,
    Event,
    Finished,
    Policy,
    Request,
    Run,
)
from trims_shim.batching.statistics import BatcherStats, Record
from trims_shim.diagnostics import is_interrupt
from trims_shim.errors import BatcherClosed, BatchingError, QueueFull, RequestDropped
from trims_shim.stack import check_stack

__all__ = ["Dispatch", "at_exit", "closed", "nothing"]

_logger = logging.getLogger(__name__)

_LATE_PRIORITY = -(1 << 62)
"""Below every request that can still be in time."""

at_exit = threading.Event()
"""Set when the interpreter ends."""


class Dispatch(ABC):
    """See the module docstring. One for threads, or one for each event loop."""

    _job_type: type[Job] = Job

    def __init__(self, function: BatchFunction, options: Options) -> None:
        self.function = function
        self.options = options
        self.is_closed = False
        self._era = 0
        self._number = 0
        self._set_up()

    def _set_up(self) -> None:
        # Of a kind that knows its owner: a thread that is interrupted while holding it can give it
        # back, and a finalizer in the middle of a turn can see that its thread holds it.
        # Who takes it for something that is no event calls :meth:`settle` afterwards.
        self._lock = threading.RLock()
        self._inbox: deque[Any] = deque()
        self._policy = self.options.learning.make_policy()
        self._now_ns = 0
        self._waiting: dict[int, Request] = {}
        self._overflow: list[Request] = []
        """Requests behind a full queue: by priority, then in the order of arrival."""
        # A token for each free place: taken without the lock, given back with it.
        self._room: deque[None] = deque([None] * self.options.queue_size)
        self._late: deque[Request] = deque()
        self._jobs: set[Job] = set()
        self._held: deque[Job] = deque()
        """Jobs of a new policy, which does not know that the old one's jobs still run."""
        self._watches: list[_Watch] = []
        self._is_shut = self.is_closed
        """As ``is_closed``, but set in the order of events."""
        self.record = Record(devices=self.options.devices)
        self._outside: list[Callable[[], None]] = []
        self._me: Seat | None = None
        """Of the thread that has the lock: it takes a job, or keeps the time, without a wake-up."""

    # --- for callers ------------------------------------------------------------------------------

    def submit(self, request: Request, me: Seat | None = None) -> None:
        """Queue it, or put it behind a full queue. Raises QueueFull, BatcherClosed."""
        if self.is_closed:
            raise self._closed()
        has_stack = check_stack()
        if not has_stack and me is not None:
            me.is_away = True  # a batch that fails on a full stack would fail its neighbours, too
        try:
            if not self._take_place():
                self._go_without(request)
            self.post(request, me)
        except QueueFull:
            raise
        except BaseException:  # of a signal handler
            self.recover()
            raise

    def _take_place(self) -> bool:
        """Take a place in the queue; False if none is free. Callers do it without the lock."""
        try:
            self._room.pop()
        except IndexError:
            return False
        return True

    def _go_without(self, request: Request) -> None:
        if self.options.rejects_when_full:
            self.post(self.record.add_rejection)
            raise QueueFull(
                f"{self.function.name}: as many wait as queue_size allows, "
                f"{self.options.queue_size}"
            )
        request.payload.has_room = False

    def submit_and_wait_for_room(self, request: Request) -> None:
        """As :meth:`submit`, but blocks until it is in the queue, or lost."""
        gate = request.payload.gate = threading.Lock()
        gate.acquire()
        self.submit(request)
        if request.payload.has_room:
            return
        try:
            if self.is_running_here():
                raise QueueFull(
                    f"{self.function.name}: the queue is full, and the batch that has to end "
                    "before there is room is the one that makes this request"
                )
            self.check_may_wait()
            gate.acquire()
        except BaseException:
            self.cancel(request)
            raise

    def cancel(self, request: Request) -> None:
        """Give a request up, for which nobody waits any more. Never blocks."""
        check_stack()
        self.post(Cancelled(request))

    def post(self, event: Any, me: Seat | None = None) -> None:
        """Report an event, or something to call with the time. Never blocks.

        ``me`` is the seat of the calling thread, if it can be given a job.
        """
        self._inbox.append(event)
        self.settle(me)

    def settle(self, me: Seat | None = None) -> None:
        """Empty the inbox, unless another thread does, which then looks again."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return  # a finalizer or a handler, in the middle of this thread's own turn
        outside: deque[Callable[[], None]] = deque()
        try:
            self._take_turns(me, outside)
        except BaseException:  # of a signal handler, and maybe between any two steps
            self.recover()
            _call_all(outside)
            raise

    def _take_turns(self, me: Seat | None, outside: deque[Callable[[], None]]) -> None:
        while self._inbox:
            lock = self._lock  # In a child that a signal handler forks in the turn it is another.
            if not lock.acquire(blocking=False):
                return
            try:
                self._me = me
                try:
                    self._empty()
                finally:
                    outside += self._outside
                    self._outside.clear()
                    self._me = None  # it may have its answer by now, which is its caller's
            finally:
                lock.release()
            _call_all(outside)

    def recover(self) -> None:
        """Restore order after an interrupt of this thread, which may come between any two steps."""
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()
        self.post(self._count_room)

    def _count_room(self, now_ns: int) -> None:
        """Restore places that an interrupt lost between their taking and the queue.

        Those of requests on their way are counted, too. :meth:`_leave` gives as many less back.
        """
        while len(self._room) + len(self._waiting) < self.options.queue_size:
            self._room.append(None)

    @abstractmethod
    def is_running_here(self) -> bool:
        """Whether the caller is in the middle of a batch."""

    @abstractmethod
    def check_may_wait(self) -> None:
        """Raises RuntimeError in a thread whose waiting would prevent what it waits for."""

    @abstractmethod
    def _launch(self, job: Job) -> None:
        """Give a job to a runner, and note it in ``job.runner``. Under the lock."""

    @abstractmethod
    def _keep_time(self, wake_ns: int | None) -> None:
        """See to it that TIMER comes at that time. Under the lock."""

    @abstractmethod
    def _rescue(self) -> None:
        """This thread was interrupted: see to it that another one calls :meth:`settle`."""

    # --- under the lock: events -------------------------------------------------------------------

    def _empty(self) -> None:
        inbox, failed = self._inbox, None
        # A child that a signal handler forks in here has another one: these are its parent's.
        while inbox and inbox is self._inbox:
            try:
                self._take(inbox[0])
            except BaseException as error:
                if is_interrupt(error):
                    # The event stays: another thread goes on with it.
                    self._start_over(None)
                    self._rescue()
                    raise
                if inbox is not self._inbox:
                    break
                self._start_over(error)
                if inbox[0] is not failed:
                    failed = inbox[0]
                    continue  # it may not have come to its end
            inbox.popleft()
        self._keep_time(self._policy.next_deadline_ns())

    def _take(self, event: Any) -> None:
        now_ns = self.options.clock_ns()
        if now_ns < self._now_ns:
            now_ns = self._now_ns
        self._now_ns = now_ns
        if type(event) is Request:
            self._arrive(now_ns, event)
        elif isinstance(event, Job):
            self._end(now_ns, event)
        elif type(event) is Cancelled:
            self._withdraw(now_ns, event.request)
        else:
            event(now_ns)
        if self._late or self._overflow:
            self._catch_up(now_ns)

    def _arrive(self, now_ns: int, request: Request) -> None:
        if not request.number:
            self.record.add_request(request.arrival_ns)
            self._number = request.number = self._number + 1
        elif request.payload.is_admitted or self._place_behind(request) is not None:
            return  # seen before, when this was interrupted
        if self._is_shut:
            self._fail([request], self._closed())
            if request.payload.has_room:
                request.payload.has_room = False
                self._room.append(None)
        elif request.payload.has_room:
            self._admit(now_ns, request)
        else:
            insort(self._overflow, request, key=_precedence)

    def _admit(self, now_ns: int, request: Request) -> None:
        self._waiting[request.number] = request
        request.payload.is_admitted = True
        self._queue(now_ns, request)

    def _queue(self, now_ns: int, request: Request) -> None:
        self._tell(now_ns, request)
        if self._watches or self._is_shut:
            self._tell(now_ns, FLUSH)  # the request has ended the last one

    def _catch_up(self, now_ns: int) -> None:
        """Queue late requests that are served nevertheless, and those that had no room so far."""
        while self._late or self._overflow:
            if self._late:  # also those that were given up as soon as they had room
                self._queue(now_ns, self._late.popleft())
                continue
            # In this order an interrupt between any two of them loses no request.
            request = self._overflow[0]
            if not (request.payload.has_room or (self._room and self._take_place())):
                return
            request.payload.has_room = True
            if not request.payload.is_admitted:
                self._admit(now_ns, request)
            request.payload.open_gate()
            self._overflow.pop(0)

    def _end(self, now_ns: int, job: Job) -> None:
        if job not in self._jobs:
            return  # from before a fork
        self._settled(job.requests)
        self._jobs.discard(job)
        self._count(job)
        self._launch_held()
        if job.era == self._era:
            is_typical = self.options.learning.ran(self._policy, job)
            # To its callers a batch ends when they have the answers. These are still on their way;
            # they are taken to need as long as the last ones.
            started_ns = job.chosen_ns - self.options.learning.take_delivery_ns()
            self._tell(now_ns, Finished(job.device, job.requests, started_ns, is_typical))
        job.let_go()

    def _withdraw(self, now_ns: int, request: Request) -> None:
        if request.number in self._waiting:
            self._settled([request])
            self._leave([request])
            self.record.cancelled += 1
            self._tell(now_ns, Cancelled(request))
        elif (place := self._place_behind(request)) is not None:
            self._settled([request])
            request.payload.open_gate()
            del self._overflow[place]
            self.record.cancelled += 1

    def _place_behind(self, request: Request) -> int | None:
        """Its index among requests behind the full queue, which may be many; None if not there."""
        place = bisect_left(self._overflow, _precedence(request), key=_precedence)
        found = self._overflow[place : place + 1]
        return place if found and found[0] is request else None

    # --- under the lock: actions ------------------------------------------------------------------

    def _tell(self, now_ns: int, event: Event) -> None:
        for action in self._policy.on_event(now_ns, event):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if type(action) is Run:
            self._check_queued(action.batch)
            self._begin(self._job_type(action.device, action.batch, self._era))
            self._leave(action.batch)
        elif type(action) is Drop:
            self._drop(action)
        else:
            raise ValueError(f"{action!r} cannot be carried out by this executor")

    def _begin(self, job: Job) -> None:
        job.chosen_ns = self._now_ns
        self._jobs.add(job)
        if len(self._jobs) > self.options.devices:
            self._held.append(job)
        else:
            self._launch(job)

    def _launch_held(self) -> None:
        """Launch as many held jobs as there are devices for."""
        held = self._held
        while held and len(self._jobs) - len(held) < self.options.devices:
            if held[0].runner is None:  # else it was launched, and then came an interrupt
                self._launch(held[0])
            held.popleft()

    def _is_begun(self, job: Job) -> bool:
        return job.runner is not None or job in self._held

    def _check_queued(self, requests: Sequence[Request]) -> None:
        # Before anything is done: a rule of the user's may be wrong.
        numbers = {request.number for request in requests}
        if not 0 < len(numbers) == len(requests) or not numbers <= self._waiting.keys():
            raise ValueError("the policy runs nothing, or requests that are not queued")

    def _drop(self, drop: Drop) -> None:
        self.options.learning.gave_up(self._policy, drop, self._now_ns)
        if self.options.serves_late:
            for request in drop.requests:
                # The same request, without a deadline and behind all that have one.
                request.key = LateKey(request.key)
                request.deadline_ns = NEVER_NS
                request.priority = _LATE_PRIORITY
                self._late.append(request)
            return
        # Before they leave: an interrupt finds them in the queue, and failing twice does no harm.
        for request in drop.requests:
            self._lose(request, _dropped(self.function.name, drop.reason))
        self._leave(drop.requests)
        self.record.add_drop(drop)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Take requests out of the queue."""
        for request in requests:
            if len(self._room) + len(self._waiting) <= self.options.queue_size:
                self._room.append(None)  # else it had no place, or one that was given back before
            del self._waiting[request.number]

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        for request in requests:
            if not request.payload.has_failed:  # else it is failed once more
                request.payload.has_failed = True
                self.record.failed += 1
            self._lose(request, error)

    def _lose(self, request: Request, error: BaseException) -> None:
        request.payload.open_gate()
        self._outside.append(lambda: request.payload.lose(error))
        self._settled([request])

    def _ask_if_due(self, now_ns: int) -> None:
        """Send TIMER if it is due: ``next_deadline_ns`` may have changed since a timer was set."""
        due_ns = self._policy.next_deadline_ns()
        if due_ns is not None and due_ns <= now_ns:
            self.record.add_wake(now_ns - due_ns)
            self._tell(now_ns, TIMER)

    def _settled(self, requests: Sequence[Request]) -> None:
        for watch in self._watches[:]:
            watch.numbers.difference_update(request.number for request in requests)
            if not watch.numbers:
                self._outside.append(watch.on_done)
                watch.is_done = True
                self._watches.remove(watch)

    def _count(self, job: Job) -> None:
        live, record = job.live or (), self.record
        record.add_batch([each.arrival_ns for each in live], job.started_ns, job.ended_ns)
        record.cancelled += len(job.requests) - len(live)
        record.failed += job.failed
        for request, result in zip(live, job.results or (), strict=False):
            if not is_failure(result):
                record.add_answer(request.arrival_ns, request.payload.deadline_ns, job.ended_ns)

    def _start_over(self, error: BaseException | None) -> None:
        """Replace a policy that has failed, or was interrupted, by one that knows of no device.

        A policy that raises would raise again: its requests fail with ``error``. After an interrupt
        (None), as by KeyboardInterrupt, the new one gets them.
        """
        self._era += 1
        self._policy = self.options.learning.make_policy()
        self._late.clear()
        self._tidy_up()
        waiting = list(self._waiting.values())
        if error is not None:
            _logger.error("the batching policy of %s failed", self.function.name, exc_info=error)
            self._fail(waiting, error)
            self._leave(waiting)
            self._inbox.append(nothing)  # requests behind the full queue get their places
            return
        for request in waiting:
            # Else it is being given up: the event that was interrupted is taken again, and ends it.
            if not request.payload.has_failed:
                self._tell(self._now_ns, request)

    def _tidy_up(self) -> None:
        """After an interrupt: a job is handed out and its requests leave the queue, or neither."""
        for job in list(self._jobs):
            if self._is_begun(job):
                self._leave([each for each in job.requests if each.number in self._waiting])
                if isinstance(job.runner, Seat):
                    job.runner.wake()
            else:
                self._jobs.discard(job)
        self._launch_held()

    # --- watching, closing, forgetting ------------------------------------------------------------

    def watch(self, on_done: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_done`` once, when all requests made until now are settled.

        Returns what ends the watch before that, and does nothing after it; it never blocks.
        """
        watch = _Watch(on_done)

        def begin(now_ns: int) -> None:
            if watch.is_done:
                return  # this is taken once more
            watch.numbers = {request.number for request in self._open_requests()}
            if watch not in self._watches:
                self._watches.append(watch)
            if watch.numbers:
                self._tell(now_ns, FLUSH)
            self._settled([])  # maybe there were none

        def end(now_ns: int) -> None:
            watch.is_done = True
            if watch in self._watches:
                self._watches.remove(watch)

        check_stack()
        self.post(begin)
        return lambda: None if watch.is_done else self.post(end)

    def close(self, *, cancel: bool) -> None:
        """Take no more requests; with ``cancel`` fail those that wait. Does not wait."""
        check_stack()
        self.is_closed = True

        def shut(now_ns: int) -> None:
            self._is_shut = True
            if cancel:
                self._give_up(now_ns, self._closed())
            self._tell(now_ns, FLUSH)

        self.post(shut)

    def _give_up(self, now_ns: int, error: BaseException) -> None:
        self._fail(self._overflow, error)
        self._overflow.clear()
        while self._waiting:
            request = next(iter(self._waiting.values()))
            self._fail([request], error)
            self._leave([request])
            # One by one: a policy may run others because this one is gone.
            self._tell(now_ns, Cancelled(request))
        self._late.clear()  # given up by the policy meanwhile, and failed here

    def change(self, apply: Callable[[Policy], None]) -> None:
        """Let ``apply`` change the policy between two events."""
        check_stack()
        self.post(lambda now_ns: apply(self._policy))

    def is_alive(self) -> bool:
        """Whether it can answer at all."""
        return True

    def rest(self) -> None:  # noqa: B027  (most have nothing to put down)
        """It is closed, and nothing will come: let threads end now."""

    def workers(self) -> list[threading.Thread]:
        """Its threads, but one of a loop; each holds the function while it has something to do."""
        return []

    @property
    def is_busy(self) -> bool:
        """Whether there are requests, or events that may be some."""
        return bool(self._inbox or self.queued or self.running)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting) + len(self._overflow)

    @property
    def running(self) -> int:
        """Requests in batches that run."""
        return sum(len(job.requests) for job in self._jobs.copy())

    def stats(self) -> BatcherStats:
        """As of now; does not wait for the lock."""
        now_ns = self.options.clock_ns()
        return self.record.snapshot(queued=self.queued, running=self.running, now_ns=now_ns)

    def forget(self) -> None:
        """In a forked child: start anew; requests of the parent fail. Takes no lock.

        Those of event loops do not: in a child no loop of the parent runs.
        """
        unseen = [event for event in self._inbox if type(event) is Request]
        for request in [*self._open_requests(), *unseen]:
            reply = request.payload.reply
            if isinstance(reply, BatchFuture | BlockedCall | StreamReply):
                reply.orphan()
            request.payload.open_gate()
        self._set_up()

    def _open_requests(self) -> list[Request]:
        running = (request for job in self._jobs for request in job.requests)
        return [*self._waiting.values(), *self._overflow, *running]

    def _end_all(self, error: BatchingError) -> None:
        """Under the lock: no batch runs any more, so all requests fail, also later ones."""
        self._is_shut = True
        self._fail(self._open_requests(), error)
        for each in (self._waiting, self._overflow, self._late, self._jobs, self._held):
            each.clear()
        self._policy = self.options.learning.make_policy()
        self._inbox.append(nothing)  # its turn tells the callers of what has failed

    def _closed(self) -> BatchingError:
        return closed(self.function)


class _Watch:
    __slots__ = ("is_done", "numbers", "on_done")

    def __init__(self, on_done: Callable[[], None]) -> None:
        self.on_done = on_done
        self.numbers: set[int] = set()
        """Of requests that are open."""
        self.is_done = False


def closed(function: BatchFunction) -> BatcherClosed:
    """The error of requests that a batcher takes no more."""
    why = "the interpreter ends" if at_exit.is_set() else "it was closed"
    return BatcherClosed(f"{function.name} takes no more requests: {why}")


def nothing(now_ns: int) -> None:
    """An event of no meaning, after which everything is looked at again."""


def _precedence(request: Request) -> tuple[int, int]:
    return -request.priority, request.number


def _dropped(name: str, reason: DropReason) -> RequestDropped:
    if reason is DropReason.HOPELESS:
        message = f"{name}: it could not be answered before its deadline, not even alone"
    else:
        message = f"{name}: too many requests; given up so that others are answered in time"
    return RequestDropped(reason.value, message)


def _call_all(calls: deque[Callable[[], None]]) -> None:
    """Call all, whatever they raise; then raise the first interrupt.

    A call that is interrupted is made once more. Those not made yet stay in ``calls``.
    """
    interrupt: BaseException | None = None
    tried: Callable[[], None] | None = None
    while calls:
        call = calls[0]
        try:
            call()
        except BaseException as error:
            if is_interrupt(error):
                interrupt = interrupt or error
                if call is not tried:
                    tried = call
                    continue  # it may not have come to its end
            else:
                _logger.exception("a callback of a batcher failed")
        calls.popleft()
    if interrupt is not None:
        raise interrupt
