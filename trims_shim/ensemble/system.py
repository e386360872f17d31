"""An ensemble at work: workers in processes of their own, and the thread that keeps them busy.

A call's samples are cut into segments. Each segment is copied into shared memory once, answered by
all members in batches of their workers' own sizes, and combined as soon as the last of them has
answered. Members do not wait for each other, except that only so many segments are under way at a
time; that bounds memory, and makes callers wait (back-pressure).

Threads: callers copy segments, and hand batches to idle workers; one thread receives all answers,
combines them and hands out what comes next. A lock guards the workers' sockets and all state here.
:mod:`.dispatch` decides.

Source: Pochelu et al. (2022), section 2.1.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from trims_shim.ensemble import messages
from trims_shim.ensemble.allocation import Allocation, Device
from trims_shim.ensemble.buffers import Buffer, Buffers
from trims_shim.ensemble.combine import Combine
from trims_shim.ensemble.crew import Crew, Event, Place
from trims_shim.ensemble.dispatch import Dispatch, Job
from trims_shim.ensemble.hosting import set_up
from trims_shim.ensemble.payloads import count_of, dumped, joined, loaded, rows_of
from trims_shim.errors import EnsembleError, MemberFailed
from trims_shim.outcomes import fail, settle

__all__ = ["System", "WorkerTraceback"]

_logger = logging.getLogger("trims_shim.ensemble")

_PATIENCE_S = 5.0
_MOST_DEATHS = 2
"""Workers that may die with the same batch, before it is given up."""


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text; the cause of a MemberFailed."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(slots=True)
class _Call:
    future: Future[Any]
    results: dict[int, Any] = field(default_factory=dict)
    """By the number of the segment in the call."""
    segments: int | None = None
    """How many there are; None while they are being made."""


@dataclass(slots=True)
class _Segment:
    call: _Call
    position: int
    rows: int
    buffer: Buffer
    layout: messages.Layout
    missing: list[int]
    """Rows that each member has not answered."""
    parts: list[list[tuple[int, Any]]]
    """By member: the first row and the result of each batch."""


def _inside(what: str) -> EnsembleError:
    return EnsembleError(
        f"an ensemble is {what} from its own thread (by `combine`, or a future's callback), or "
        "by a signal handler in the middle of a call, which would wait for itself; do it from "
        "another thread"
    )


class System:
    """The workers of an allocation at work. See :class:`~.ensemble.Ensemble`, its face to users."""

    def __init__(
        self,
        loads: Mapping[str, bytes],
        devices: Sequence[Device],
        allocation: Allocation,
        *,
        combine: Combine,
        segment_size: int,
        max_segments: int,
        restarts: int,
    ) -> None:
        """Start the workers; :meth:`wait_ready` waits for them. Raises OSError."""
        self.names = tuple(loads)
        self.counts = {"samples": 0, "batches": 0, "restarts": 0}
        self._combine = combine
        self._segment_size = segment_size
        self._max_segments = max_segments
        self._filling: set[int] = set()
        """The threads of which each has a segment that is about to be under way."""
        self._buffers = Buffers(max_segments)
        # Reentrant: an ensemble that nobody has any more may be closed wherever the collector runs.
        self._lock = threading.RLock()
        # Entered by the lock alone: an interrupt within Condition.__enter__ leaves it locked.
        self._changed = threading.Condition(self._lock)
        self._dispatch = Dispatch(len(loads))
        self._segments: dict[int, _Segment] = {}
        self._last_segment = 0
        self._failures: list[tuple[_Call, BaseException]] = []
        """Calls that have failed and were not told so yet."""
        self._error: EnsembleError | None = None
        """Why no call is taken any more."""
        self._is_lost = False
        """Whether a member has no workers, and gets none."""
        self._load_errors: dict[int, MemberFailed] = {}
        """By place, why the member could not be loaded there."""
        self._is_started = False
        self._is_ending = False
        self._pid = os.getpid()
        self._memory: dict[int, messages.Memory] = {}
        places = [
            Place(
                member,
                set_up(member=name, device=devices[device].name, load=loads[name]),
                size,
                restarts,
            )
            for device, member, size in allocation.workers()
            for name in (self.names[member],)
        ]
        self._crew = Crew(places)
        self._places = self._crew.places
        self._thread = threading.Thread(target=self._run, name="trims-ensemble", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # as many threads as there may be
            self._crew.end()
            raise

    # --- for callers ------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until all workers have loaded their members. Raises MemberFailed if one cannot."""
        with self._lock:
            while not all(place.is_ready for place in self._places):
                self._check()
                self._changed.wait()
            self._is_started = True

    def submit(self, samples: Any, count: int) -> Future[Any]:
        """Begin to answer ``count`` samples. Waits while as many segments are under way as may be.

        Raises EnsembleError when closed, MemberFailed when a member has no workers left.
        """
        self._check_process()
        me = threading.get_ident()
        if self._has_lock or me in (self._thread.ident, *self._filling.copy()):
            raise _inside("called")
        call = _Call(Future())
        call.future.set_running_or_notify_cancel()
        for position, start in enumerate(range(0, count, self._segment_size)):
            stop = min(count, start + self._segment_size)
            try:
                self._wait_for_room(me)
                if call.future.done():  # A segment has failed already.
                    return call.future
                self._add(call, position, rows_of(samples, start, stop), stop - start)
            finally:
                with self._lock:
                    self._filling.discard(me)
                    self._changed.notify_all()
        with self._lock:
            call.segments = -(-count // self._segment_size)
        self._finish(call)
        return call.future

    def memory_of(self, place: int, *, timeout_s: float = 60.0) -> messages.Memory:
        """What a worker says of its memory, after the jobs that it has. Raises MemberFailed."""
        deadline_s = time.monotonic() + timeout_s
        name = self._places[place].name
        with self._lock:
            self._memory.pop(place, None)
            process = self._places[place].process
            if process is not None:
                process.ask_memory()
            while place not in self._memory:
                self._check()
                if process is None or process is not self._places[place].process:
                    raise MemberFailed(
                        f"the worker of member {name!r} has ended before it said how much memory "
                        "it uses; it may have printed why"
                    )
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise MemberFailed(f"member {name!r} does not say how much memory it uses")
            return self._memory[place]

    def workers(self) -> list[tuple[str, str, int, int | None]]:
        """Member, device, batch size and pid of each worker; None for one that is not there."""
        self._check_process()
        with self._lock:
            return [
                (
                    place.name,
                    place.device,
                    place.batch_size,
                    None if place.process is None else place.process.pid,
                )
                for place in self._places
            ]

    def close(self, *, wait: bool) -> None:
        """Take no more calls. Those under way are answered first if ``wait``, else they fail."""
        if self._pid != os.getpid():
            return  # a forked child's copy, whose sockets are closed
        is_inside = self._has_lock or threading.current_thread() is self._thread
        if wait and is_inside:
            raise _inside("closed")
        if not wait:
            if self._lock.acquire(timeout=_PATIENCE_S):
                self._lock.release()
            else:  # Who has it sends to a worker that does not go on, for example.
                self._is_ending = True  # without the lock: else a worker might be started again
                self._crew.kill()
        with self._lock:
            if self._error is None:
                self._error = EnsembleError("the ensemble is closed; make another one")
            while wait and self._segments and not self._is_ending:
                self._changed.wait()
            self._is_ending = True
        self._crew.ring()
        if is_inside:
            return
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():  # It receives from a worker that does not go on, for example.
            self._crew.kill()
        # A callback, or `combine`, may wait for who closes, as at the end of the interpreter.
        self._thread.join(None if wait else _PATIENCE_S)

    @property
    def _has_lock(self) -> bool:
        """Whether this thread has it: a signal handler is in the middle of one of its steps."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _check(self) -> None:
        if self._error is not None:
            # Else each time that it is raised would add its frames, with the samples in them.
            raise self._error.with_traceback(None)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise EnsembleError("this ensemble belongs to the parent process; make one after forks")

    # --- segments ---------------------------------------------------------------------------------

    def _wait_for_room(self, me: int) -> None:
        # By what there is, not a count, which an interrupt might leave wrong.
        with self._lock:
            while len(self._segments) + len(self._filling) >= self._max_segments:
                self._changed.wait()
            self._filling.add(me)

    def _add(self, call: _Call, position: int, samples: Any, rows: int) -> None:
        buffer, layout = self._buffers.filled(dumped(samples))
        members = len(self.names)
        segment = _Segment(
            call, position, rows, buffer, layout, [rows] * members, [[] for _ in range(members)]
        )
        with self._lock:
            try:
                self._check()
            except BaseException:
                buffer.close()
                raise
            try:
                self._begin(segment)
            except BaseException as error:
                # Ctrl-C: it cannot be said what workers were told.
                self._error = EnsembleError(
                    f"the ensemble was interrupted while it sent samples ({error!r}); make another "
                    "one"
                )
                self._crew.ring()
                raise

    def _begin(self, segment: _Segment) -> None:
        self._last_segment += 1
        self._segments[self._last_segment] = segment
        self._dispatch.add_segment(self._last_segment, segment.rows)
        self.counts["samples"] += segment.rows
        self._send_jobs()

    def _send_jobs(self) -> None:
        for number, job in self._dispatch.next_jobs():
            process, segment = self._places[number].process, self._segments[job.segment]
            assert process is not None
            self.counts["batches"] += 1
            process.run(messages.RunJob(job, segment.layout), segment.buffer.descriptor)

    def _end(self, number: int) -> _Segment | None:
        """Forget a segment, which makes room for another; None if it was forgotten before."""
        segment = self._segments.pop(number, None)
        if segment is not None:
            self._changed.notify_all()
        return segment

    def _fail(self, number: int, error: BaseException) -> None:
        segment = self._end(number)
        if segment is not None:
            self._dispatch.drop_segment(number)
            # Not used again: workers may be about to copy samples out of it.
            segment.buffer.close()
            self._crew.close_buffer(segment.buffer)
            self._failures.append((segment.call, error))

    def _tell_failures(self) -> None:
        """Without the lock: who waits for a future may do anything."""
        while self._failures:
            call, error = self._failures.pop(0)
            if not call.future.done():
                fail(call.future, error, "unpickling an answer")

    def _combine_segment(self, segment: _Segment) -> None:
        """Without the lock: a rule of the user's may do anything."""
        call = segment.call
        try:
            outputs = {
                name: joined([result for _, result in sorted(parts, key=lambda part: part[0])])
                for name, parts in zip(self.names, segment.parts, strict=True)
            }
            result = self._combine(outputs)
            if (found := count_of(result)) != segment.rows:
                raise ValueError(
                    f"`combine` returned {found} rows for the outputs of {segment.rows} samples"
                )
            call.results[segment.position] = result
        except BaseException as error:
            if not call.future.done():
                fail(call.future, error, "`combine`")
            return
        self._finish(call)

    def _finish(self, call: _Call) -> None:
        with self._lock:
            is_whole = len(call.results) == call.segments and not call.future.done()
            if is_whole:
                call.segments = -1  # only once
        if is_whole:
            try:
                result = joined([call.results[position] for position in sorted(call.results)])
            except BaseException as error:
                fail(call.future, error, "joining answers")
            else:
                settle(call.future, result)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for event in self._crew.events():
                self._handle(event)
                self._tell_failures()
        except BaseException as error:
            # Callers must not wait for ever, whatever it is.
            _logger.exception("the ensemble stops")
            with self._lock:
                self._error = self._error or EnsembleError(f"the ensemble has failed: {error!r}")
        with self._lock:
            self._is_ending = True
            for number in list(self._segments):
                self._fail(number, self._error or EnsembleError("the ensemble is closed"))
            self._changed.notify_all()
        self._tell_failures()
        self._crew.end()
        self._buffers.close()

    def _handle(self, event: Event) -> None:
        number, message = event.place, event.message
        if message is None:
            self._died(number)
        elif isinstance(message, messages.Answer):
            self._answered(number, message.job, event.parts)
        elif isinstance(message, messages.Failure):
            self._failed(number, message)
        else:
            self._told(number, message)

    def _told(self, number: int, message: object) -> None:
        place = self._places[number]
        with self._lock:
            if isinstance(message, messages.Ready):
                place.is_ready = True
                self._dispatch.add_worker(number, member=place.member, batch_size=place.batch_size)
                self._send_jobs()
            elif isinstance(message, messages.Memory):
                self._memory[number] = message
            self._changed.notify_all()

    def _answered(self, number: int, job: Job, parts: Sequence[bytearray] | MemoryError) -> None:
        with self._lock:
            self._dispatch.done(number, job)
            self._send_jobs()
            segment = self._segments.get(job.segment)
        if segment is None:
            return
        try:
            if isinstance(parts, MemoryError):
                raise parts
            result = loaded(parts)
        except BaseException as error:  # of a class that only the worker has
            with self._lock:
                self._fail(job.segment, error)
            return
        segment.parts[job.member].append((job.start, result))
        segment.missing[job.member] -= job.stop - job.start
        if not any(segment.missing):
            self._combine_segment(segment)
            with self._lock:
                self._end(job.segment)
                superfluous = self._buffers.give_back(segment.buffer)
                if superfluous is not None:
                    self._crew.close_buffer(superfluous)

    def _failed(self, number: int, message: messages.Failure) -> None:
        place = self._places[number]
        job = message.job
        what = "could not be loaded" if job is None else f"failed on {job.stop - job.start} samples"
        error = MemberFailed(f"member {place.name!r} {what} on {place.device}: {message.summary}")
        error.__cause__ = WorkerTraceback(message.traceback)
        with self._lock:
            if job is None:
                place.restarts = 0  # it would fail again
                self._load_errors[number] = error
                return
            self._dispatch.done(number, job)
            self._fail(job.segment, error)
            self._send_jobs()

    # --- workers that die -------------------------------------------------------------------------

    def _died(self, number: int) -> None:
        place = self._places[number]
        with self._lock:
            how = self._crew.bury(number)
            error = self._load_errors.pop(number, None) or MemberFailed(
                f"the worker of member {place.name!r} on {place.device} {how}"
            )
            jobs = self._dispatch.remove_worker(number)
            ran = jobs[0] if jobs else None
            if ran is not None and ran.deaths + 1 >= _MOST_DEATHS:
                self._fail(ran.segment, error)
            wanted = [job for job in jobs if job.segment in self._segments]
            self._dispatch.again(wanted, ran=ran)
            if not self._is_lost and not self._is_ending:
                self._replace(number, error)
            self._send_jobs()
            self._changed.notify_all()

    def _replace(self, number: int, error: MemberFailed) -> None:
        """Start a worker in the place of one that has died, or do without."""
        place = self._places[number]
        if place.restarts:
            place.restarts -= 1
            self.counts["restarts"] += 1
            _logger.warning("%s; it is started again", error)
            try:
                self._crew.start(number)
            except OSError as failure:
                _logger.warning("no worker can be started: %s", failure)
            else:
                return
        others = (each.process for each in self._places if each.member == place.member)
        # At the start, all workers have to come.
        if not self._is_started or not any(others):
            self._give_up(error)

    def _give_up(self, error: MemberFailed) -> None:
        """A member cannot answer any more, so nobody can."""
        self._is_lost = True
        if self._error is None:
            self._error = error
        for segment in list(self._segments):
            self._fail(segment, error)
