"""Running batches of a synchronous function: in the threads of callers, and in workers.

A thread that waits for its own answer runs its batch when the policy says so: at batch 1 nothing is
handed over. Batches without such a caller go to workers, at most one for each device, started when
they are needed and ended when they were idle for a while. A caller runs no batch but its own.

One seat (a waiting caller or a worker) keeps the time: it sleeps no longer than to the policy's
next deadline. No thread polls; without requests all sleep until they are woken, or have ended.

A thread that has a seat and waits for something else of this batcher, in a callback of a future or
in a signal handler, is away from its seat: other threads do its work.

Workers are daemon threads that hold their dispatch weakly while idle: a dispatch that is not used
any more is gone, and its workers end.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

from trims_shim.batching.drivers.dispatch import Dispatch, nothing
from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import BatchFuture, BlockedCall, Entry, Seat, deliver
from trims_shim.batching.protocol import Request
from trims_shim.batching.torch_settings import adopt_torch_threads
from trims_shim.diagnostics import is_interrupt
from trims_shim.errors import BatcherClosed, QueueFull

__all__ = ["IDLE_S", "JOIN_S", "ThreadDispatch", "is_first", "join", "join_workers", "living"]

_logger = logging.getLogger(__name__)

IDLE_S = 30.0
"""How long a worker without work stays. Starting one costs about 100 us."""
JOIN_S = 1.0
"""How long ends wait for threads that have nothing to do any more; they take some microseconds."""


_started: weakref.WeakKeyDictionary[threading.Thread, None] = weakref.WeakKeyDictionary()
_Kept = TypeVar("_Kept")


class ThreadDispatch(Dispatch):
    """See the module docstring."""

    def __init__(self, function: BatchFunction, options: Options) -> None:
        self._idle: list[Seat] = []
        super().__init__(function, options)
        weakref.finalize(self, _wake_all, self._idle).atexit = False

    def _set_up(self) -> None:
        super()._set_up()
        self._idle.clear()
        self._keeper: Seat | None = None
        self._runners: dict[int, int] = {}
        """How many runs of batches are nested, by thread."""
        self._workers: weakref.WeakKeyDictionary[threading.Thread, None]
        self._workers = weakref.WeakKeyDictionary()
        """Those that have been started; without those that are gone."""
        self._starting: dict[Seat, int] = {}
        """Of workers whose threads are not started yet: the thread that starts them."""
        self._beginning: dict[Seat, threading.Thread] = {}
        """Of workers that have not sat down yet: their threads."""
        self._seats: dict[int, Seat] = {}
        """By thread; without those that are away."""

    # --- callers ----------------------------------------------------------------------------------

    def call(self, request: Request, reply: BlockedCall) -> Any:
        """Wait for the answer in this thread, which may run its batch. Raises its error."""
        self._leave_seat()
        ident = threading.get_ident()
        self._seats[ident] = reply
        try:
            self.submit(request, reply)
            while not reply.is_done:
                if reply.job is not None:
                    self._run_own(reply)
                else:
                    self._wait(reply)
            if self._keeper is reply:
                self.post(self._look_for_keeper)
        except (QueueFull, BatcherClosed):
            raise
        except BaseException:
            self._abandon(request, reply)
            raise
        finally:
            self._seats.pop(ident, None)
        return reply.take()

    def _run_own(self, reply: BlockedCall) -> None:
        ident = self._enter()  # first: from here on it is not taken away
        try:
            job = reply.job
            if job is not None:
                # It stays the seat's until its end: there :meth:`_abandon` finds it.
                self._execute(job)
        finally:
            self._exit(ident)
        if job is not None:
            self._report(job, reply)

    def _report(self, job: Job, reply: BlockedCall) -> None:
        """Report the end of the caller's job. Without an answer the caller may get another job."""
        self.post(job, reply)
        while reply.job is job and not (reply.is_done or reply.is_orphan):
            self._wait(reply)
        if reply.is_orphan and not reply.is_done:  # this was a stage, or was given up
            reply.job = None
            reply.orphan()

    def call_nested(self, entry: Entry) -> Any:
        """Run a request from inside a batch alone, here and now: it cannot wait for that batch."""
        ident = self._enter()
        try:
            (result,) = self.function.run([entry])
        finally:
            self._exit(ident)
        reply = BlockedCall()
        deliver(reply, result)
        del result  # it may have the error, whose traceback will have this frame
        return reply.take()

    def is_running_here(self) -> bool:
        """See :class:`Dispatch`. Also true in a signal handler, or a finalizer, in the middle of
        this thread's turn, before it has started a worker, or before it has sat down as one:
        neither can it wait for these.
        """
        is_my_turn: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        ident = threading.get_ident()
        if is_my_turn or ident in self._runners or ident in list(self._starting.values()):
            return True
        # By its number: threading knows the thread itself only later.
        return any(each.ident == ident for each in list(self._beginning.values()))

    def check_may_wait(self) -> None:
        """See :class:`Dispatch`. From now on this thread may be away from its seat."""
        # Also with other devices: they may all be held by threads that wait like this.
        if self.is_running_here():
            raise RuntimeError(
                f"{self.function.name}: this thread runs a batch, and the answer it wants to wait "
                "for comes after it; call the batcher itself, which then runs the item at once"
            )
        self._leave_seat()

    def _leave_seat(self) -> None:
        seat = self._seats.pop(threading.get_ident(), None)
        if seat is None:
            return
        with self._lock:
            seat.is_away = True
            seat.wake_ns = None
            if self._keeper is seat:
                self._keeper = None
            if seat in self._idle:
                self._idle.remove(seat)
            job, seat.job = seat.job, None
        if job is not None:
            self._hand_over(job)
        else:
            self.post(nothing)  # another seat keeps the time

    def _abandon(self, request: Request, reply: BlockedCall) -> None:
        """After an interrupt of its caller: a worker runs the batch, for its other requests."""
        self._runners.pop(threading.get_ident(), None)
        self.recover()
        reply.is_abandoned = reply.is_away = True
        with self._lock:
            job, reply.job = reply.job, None
        if job is not None:
            job.leave_out(reply)
            self._hand_over(job)
        self.post(self._look_for_keeper)
        self.cancel(request)

    def _wait(self, seat: Seat) -> None:
        wake_ns = seat.wake_ns
        if wake_ns is None:
            seat.sleep()
            return
        left_ns = wake_ns - self.options.clock_ns()
        if left_ns > 0:
            seat.sleep(min(left_ns / 1e9, threading.TIMEOUT_MAX))
        else:
            seat.wake_ns = None
            self._report_time(seat)

    # --- workers ----------------------------------------------------------------------------------

    def sit_down(self, worker: Seat) -> None:
        """Make ``worker`` the seat of this thread."""
        self._seats[threading.get_ident()] = worker
        self._beginning.pop(worker, None)

    def work(self, worker: Seat) -> bool:
        """One step of a worker's life; False if it has nothing to do and keeps no time."""
        if worker.job is not None:
            ident = self._enter()  # until it is reported: a finalizer cannot wait for it here
            try:
                job, worker.job = worker.job, None
                if job is not None:
                    self._run_in_worker(job)
                    self._idle.append(worker)
                    self._inbox.append(job)
            finally:
                self._exit(ident)
            self.settle(worker)
        elif worker.wake_ns is not None:
            self._wait(worker)
        else:
            return False
        return True

    def retire(self, worker: Seat) -> bool:
        """End an idle worker, unless it was given something meanwhile."""
        with self._lock:
            is_idle = worker.job is None and worker.wake_ns is None
            if is_idle and worker in self._idle:
                self._idle.remove(worker)
            if is_idle:
                self._seats.pop(threading.get_ident(), None)
        self.settle()
        return is_idle

    def rest(self) -> None:
        """See :class:`Dispatch`."""
        keeper = self._keeper
        if keeper is not None:
            keeper.wake_ns = None  # of a wait that has ended before its time
        # Not only those in `_idle`: an interrupt may have left one in neither that nor a job.
        _wake_all(list(self._seats.values()))

    def workers(self) -> list[threading.Thread]:
        """See :class:`Dispatch`."""
        return living(self._workers)

    def _run_in_worker(self, job: Job) -> None:
        try:
            adopt_torch_threads()
            self._execute(job)
        except BaseException as error:
            if job.results is None:
                job.begin(self.options.clock_ns())  # it may not have come to that
                job.end_with(self.options.clock_ns(), error)
            job.deliver_surely()

    def _execute(self, job: Job) -> None:
        if job.results is None:
            self._run(job)
        job.deliver()

    def _run(self, job: Job) -> None:
        entries = job.begin(self.options.clock_ns())
        results = self.function.run(entries) if entries else []
        job.end(self.options.clock_ns(), results)

    def _enter(self) -> int:
        ident = threading.get_ident()
        self._runners[ident] = self._runners.get(ident, 0) + 1
        return ident

    def _exit(self, ident: int) -> None:
        depth = self._runners.pop(ident, 1)
        if depth > 1:
            self._runners[ident] = depth - 1

    # --- the end of a job; under the lock ---------------------------------------------------------

    def _end(self, now_ns: int, job: Job) -> None:
        self._free_seat(job)
        super()._end(now_ns, job)

    def _free_seat(self, job: Job) -> None:
        """Let the runner of a job get another one."""
        seat = job.runner
        if isinstance(seat, Seat) and seat.job is job:
            seat.job = None
            if seat is not self._me:
                seat.wake()

    # --- once more; under the lock ----------------------------------------------------------------

    def _wait_again(self, request: Request) -> None:
        """Put a request, which had left the queue and was not answered, into the queue again."""
        reply = request.payload.reply
        if isinstance(reply, BatchFuture):
            reply.requeue()
        self._waiting[request.number] = request
        self._take_place()  # it may have none: a request that came later has it

    # --- who does what; under the lock ------------------------------------------------------------

    def _launch(self, job: Job) -> None:
        self._give(job, self._seat_for(job))

    def _give(self, job: Job, seat: Seat) -> None:
        # No interrupt can come between these two.
        seat.job = job
        job.runner = seat
        if seat is self._keeper:
            self._keeper = None
        seat.wake_ns = None
        seat.wake()

    def _seat_for(self, job: Job) -> Seat:
        me = self._me
        if me is not None and me in self._idle:
            self._idle.remove(me)
            return me
        if self._may_be_callers():
            callers = [
                each.payload.reply
                for each in job.requests
                if type(each.payload.reply) is BlockedCall and not each.payload.reply.is_away
            ]
            if callers:
                return me if me in callers else callers[0]
        return self._free_worker()

    def _free_worker(self) -> Seat:
        return self._idle.pop() if self._idle else self._new_worker()

    def _may_be_callers(self) -> bool:
        """Whether a caller may run a batch in its own thread."""
        return self.options.caller_runs and not self.function.is_generator

    def _new_worker(self) -> Seat:
        worker = Seat()
        claim: dict[None, object] = {}
        # First: a callback that is called after the same turn may wait for what it runs.
        self._outside.insert(0, lambda: self._start(worker, claim))
        self._starting[worker] = threading.get_ident()
        return worker

    def _start(self, worker: Seat, claim: dict[None, object]) -> None:
        """Start its thread. It takes ``claim``, or this thread does, and then does without it."""
        try:
            if claim.get(None) is self:  # it was interrupted below
                self._replace(worker)
                return
            self._starting[worker] = threading.get_ident()  # again, if this is done once more
            thread = threading.Thread(
                target=_begin,
                args=(weakref.ref(self), worker, claim),
                name=f"batch-{self.function.name}",
                daemon=True,
            )
            self._beginning[worker] = thread
            thread.start()
            self._workers[thread] = None
            _started[thread] = None
        except BaseException as error:
            if not is_first(claim, self):
                raise  # its thread lives
            self._beginning.pop(worker, None)
            if not is_interrupt(error):
                self._do_without(worker, self._without_thread(error))
                return
            # Of a signal handler, which may leave a thread that never comes to its target.
            self._replace(worker)
            raise
        finally:
            self._starting.pop(worker, None)

    def _without_thread(self, error: BaseException) -> RuntimeError:
        """The error if there are too many, the interpreter ends, or it allows no daemon threads."""
        instead = "; a plain call, batcher(item), needs none" if self._may_be_callers() else ""
        found = RuntimeError(f"{self.function.name} needs a thread for batches: {error}{instead}")
        found.__cause__ = error
        return found

    def _replace(self, worker: Seat) -> None:
        """Its thread does not live: let another one do its work."""
        job = self._taken_from(worker)
        if job is not None:
            self._hand_over(job)
        else:
            self.post(nothing)  # another seat keeps the time

    def _taken_from(self, worker: Seat) -> Job | None:
        """Take its job away; it gets no other one, and keeps no time."""
        with self._lock:
            job, worker.job = worker.job, None
            if self._keeper is worker:
                self._keeper = None
            if worker in self._idle:
                self._idle.remove(worker)
        return job

    def _do_without(self, worker: Seat, error: RuntimeError) -> None:
        job = self._taken_from(worker)
        if job is not None:
            job.begin(self.options.clock_ns())
            job.end_with(self.options.clock_ns(), error)
            job.deliver()
            self.post(job)
        else:
            self.post(lambda now_ns: self._give_up(now_ns, error))

    def _hand_over(self, job: Job) -> None:
        before = job.runner

        def give(now_ns: int) -> None:
            if job.runner is before:  # else it has a worker, and this is taken once more
                self._give(job, self._free_worker())

        self.post(give)

    def _rescue(self) -> None:
        self._idle_worker().wake()

    def _idle_worker(self) -> Seat:
        if not self._idle:
            self._idle.append(self._new_worker())
        return self._idle[-1]

    # --- time; under the lock ---------------------------------------------------------------------

    def _keep_time(self, wake_ns: int | None) -> None:
        keeper = self._keeper
        if wake_ns is None:
            return  # a keeper that wakes for nothing asks once, and sleeps on
        if keeper is not None and keeper.wake_ns is not None and keeper.wake_ns <= wake_ns:
            return
        seat = self._seat_for_time()
        if keeper is not None and keeper is not seat:
            keeper.wake_ns = None
        seat.wake_ns = wake_ns
        if seat is not self._me:
            seat.wake()
        self._keeper = seat  # last: an interrupt leaves no keeper that does not know it is one

    def _seat_for_time(self) -> Seat:
        me = self._me
        if isinstance(me, BlockedCall):
            if not me.is_done and not me.is_away and me.job is None:
                return me
        elif me is not None and me in self._idle:
            return me
        if self._keeper is not None:
            return self._keeper
        return self._idle_worker()

    def _report_time(self, seat: Seat) -> None:
        def report(now_ns: int) -> None:
            if self._keeper is seat:
                self._keeper = None
            self._ask_if_due(now_ns)

        self.post(report, seat)

    def _look_for_keeper(self, now_ns: int) -> None:
        keeper = self._keeper
        if isinstance(keeper, BlockedCall) and (keeper.is_done or keeper.is_abandoned):
            self._keeper = None


def is_first(claim: dict[None, object], me: object) -> bool:
    """True for one of two threads, however often it asks; its own ``me`` says which one it is."""
    return claim.setdefault(None, me) is me


def _begin(
    dispatch_ref: weakref.ref[ThreadDispatch], worker: Seat, claim: dict[None, object]
) -> None:
    if is_first(claim, worker):
        _live(dispatch_ref, worker)


def _live(dispatch_ref: weakref.ref[ThreadDispatch], worker: Seat) -> None:
    while (dispatch := dispatch_ref()) is not None:
        dispatch.sit_down(worker)
        while _step(dispatch, worker):
            pass
        may_end = dispatch.is_closed or worker.is_away
        del dispatch
        may_end |= not worker.sleep(0 if may_end else IDLE_S)
        dispatch = dispatch_ref()
        if dispatch is not None and may_end and dispatch.retire(worker):
            return


def _step(dispatch: ThreadDispatch, worker: Seat) -> bool:
    """False if there is nothing to do."""
    try:
        dispatch.settle(worker)
        return dispatch.work(worker)
    except BaseException:
        # Of a user's callback. A worker that dies would take later batches with it.
        _logger.exception("a callback of a future of %s failed", dispatch.function.name)
        return True


def living(kept: weakref.WeakKeyDictionary[_Kept, None]) -> list[_Kept]:
    """What is kept and not gone. A WeakSet cannot be listed while other threads add to it."""
    # The references come in one step.
    return [each for reference in kept.keyrefs() if (each := reference()) is not None]


def join_workers() -> None:
    """Wait at most :data:`JOIN_S` for the workers of closed batchers, and of those gone, to end.

    A thread that still frees a tensor when the interpreter ends aborts the process: torch takes the
    interpreter's lock again in a destructor, and the end of a thread must not leave one.
    """
    join(living(_started))


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait at most :data:`JOIN_S` for all of them to end; not for the one that waits."""
    end_s = time.monotonic() + JOIN_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end_s - time.monotonic()))


def _wake_all(workers: list[Seat]) -> None:
    for worker in workers:
        worker.wake()
