"""Discrete-event simulation of a policy: virtual time, no threads, the same objects as production.

Single-threaded and deterministic: all randomness comes from generators that the caller passes in.
The loop owns time, devices and what became of every request; it decides nothing. It refuses what
breaks the contract of :mod:`trims_shim.batching.protocol`, so a policy that loses, doubles or
invents a request does not get away with a good result.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Drop,
    Finished,
    Policy,
    Preempt,
    Preempted,
    Request,
    Run,
)

__all__ = ["Execution", "Outcome", "check_progress", "leave", "simulate"]

ServiceTime = Callable[[int, Sequence[Request]], int]
"""(device, batch) -> nanoseconds."""
NextExit = Callable[[int, Sequence[Request], int], int]
"""(device, batch, nanoseconds since its start) -> nanoseconds from its start to the next exit
point, or later."""


# As Request: made by the million, so not frozen.
@dataclass(slots=True, eq=False)
class Execution:
    """One batch on one device."""

    device: int
    batch: Sequence[Request]
    started_ns: int
    ended_ns: int
    is_preempted: bool = False
    """Given up at an exit point: nothing of it was answered."""


@dataclass(slots=True)
class Outcome:
    """What became of every request; each is in exactly one of answered, dropped, unanswered."""

    executions: list[Execution] = field(default_factory=list)
    """In the order of their ends."""
    dropped: list[tuple[Request, int]] = field(default_factory=list)
    """With the time of the drop."""
    unanswered: list[Request] = field(default_factory=list)
    """Still queued when no event was left."""
    requests: int = 0
    """How many arrived."""
    start_ns: int = 0
    """When the first arrived."""
    end_ns: int = 0
    """When the last request was answered or dropped, or one arrived that never was."""

    @property
    def answered(self) -> list[tuple[Request, int]]:
        """With the time of the answer."""
        return [
            (request, each.ended_ns)
            for each in self.executions
            if not each.is_preempted
            for request in each.batch
        ]

    @property
    def batch_sizes(self) -> list[int]:
        """Of the batches that were answered."""
        return [len(each.batch) for each in self.executions if not each.is_preempted]

    @property
    def busy_ns(self) -> int:
        """Summed over devices, including the time of batches that were given up."""
        return sum([each.ended_ns - each.started_ns for each in self.executions])


def simulate(
    policy: Policy,
    requests: Iterable[Request],
    *,
    service_ns: ServiceTime,
    lateness_ns: Callable[[], int] | None = None,
    next_exit_ns: NextExit | None = None,
) -> Outcome:
    """Drive ``policy`` with ``requests``, sorted by arrival, until all are settled.

    ``service_ns`` returns how long a batch really takes, ``lateness_ns`` how much too late a timer
    comes. ``next_exit_ns`` returns when a batch can be given up, including the cost of that; a
    policy that preempts needs it. After the last arrival the policy gets FLUSH only when nothing
    else would happen. Raises ValueError if the policy breaks its contract, or an arrival comes
    before its predecessor.

    The garbage collector of cycles is off meanwhile, in all threads: nothing here makes cycles, and
    its repeated scans of all that is kept would take a third of the time.
    """
    run = _Simulation(service_ns, next_exit_ns)
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return _run(run, policy, requests, lateness_ns)
    finally:
        if is_collecting:
            gc.enable()


def _run(
    run: _Simulation,
    policy: Policy,
    requests: Iterable[Request],
    lateness_ns: Callable[[], int] | None,
) -> Outcome:
    ends, admit = run.ends, run.queued.add
    decide, next_deadline_ns = policy.on_event, policy.next_deadline_ns
    arrivals = iter(requests)
    arriving = next(arrivals, None)
    arrival_ns = NEVER_NS if arriving is None else arriving.arrival_ns
    run.outcome.start_ns = 0 if arriving is None else arrival_ns
    wake_ns = NEVER_NS
    asked_ns: int | None = None
    now_ns = 0
    is_flushed = False
    admitted = 0
    actions: Sequence[Action]
    while True:
        if ends and ends[0][0] <= arrival_ns and ends[0][0] <= wake_ns:
            end_ns, _, execution = heapq.heappop(ends)
            if execution.ended_ns != end_ns:  # was given up before
                continue
            now_ns = end_ns
            actions = decide(now_ns, run.end(execution))
        elif arriving is not None and arrival_ns <= wake_ns:
            if arrival_ns < now_ns:
                raise ValueError(f"request {arriving.number} arrives before what has happened")
            now_ns = arrival_ns
            admit(arriving)
            admitted += 1
            actions = decide(now_ns, arriving)
            arriving = next(arrivals, None)
            arrival_ns = NEVER_NS if arriving is None else arriving.arrival_ns
        elif wake_ns < NEVER_NS:
            now_ns, wake_ns = wake_ns, NEVER_NS
            asked_ns = None
            actions = decide(now_ns, TIMER)
            if not actions:
                check_progress(policy, now_ns)
        elif not is_flushed:
            is_flushed = True
            actions = decide(now_ns, FLUSH)
        else:
            break
        if actions:
            run.carry_out(actions, now_ns)
        deadline_ns = next_deadline_ns()
        if deadline_ns != asked_ns:
            asked_ns = deadline_ns
            wake_ns = NEVER_NS
            if deadline_ns is not None:
                late_ns = 0 if lateness_ns is None else lateness_ns()
                wake_ns = min(max(deadline_ns, now_ns) + late_ns, NEVER_NS)
    run.outcome.requests = admitted
    return run.close()


def check_progress(policy: Policy, now_ns: int) -> None:
    """Raise ValueError if the policy, after a timer that led to nothing, wants the next one now."""
    deadline_ns = policy.next_deadline_ns()
    if deadline_ns is not None and deadline_ns <= now_ns:
        raise ValueError(f"the policy did nothing at {now_ns} ns, and wants to be asked again then")


class _Simulation:
    """Which requests are queued, what runs where, and what has become of the rest."""

    __slots__ = (
        "_next_exit_ns",
        "_numbers",
        "_running",
        "_service_ns",
        "ends",
        "outcome",
        "queued",
    )

    def __init__(self, service_ns: ServiceTime, next_exit_ns: NextExit | None) -> None:
        self.outcome = Outcome()
        self.ends: list[tuple[int, int, Execution]] = []
        """A heap of (time, number, execution); void if its time is no longer the end of it."""
        self._running: dict[int, Execution] = {}
        self.queued: set[Request] = set()
        self._service_ns = service_ns
        self._next_exit_ns = next_exit_ns
        self._numbers = count()

    def end(self, execution: Execution) -> Finished | Preempted:
        """Free its device, and say how it went."""
        del self._running[execution.device]
        self.outcome.executions.append(execution)
        if execution.is_preempted:
            self.queued.update(execution.batch)
            return Preempted(execution.device, execution.batch, execution.started_ns)
        return Finished(execution.device, execution.batch, execution.started_ns)

    def carry_out(self, actions: Sequence[Action], now_ns: int) -> None:
        for action in actions:
            if isinstance(action, Run):
                self._start(action, now_ns)
            elif isinstance(action, Drop):
                leave(self.queued, action.requests)
                self.outcome.dropped.extend((request, now_ns) for request in action.requests)
            else:
                self._preempt(action, now_ns)

    def close(self) -> Outcome:
        outcome = self.outcome
        outcome.unanswered = sorted(self.queued, key=lambda request: request.number)
        # Not the last event, as a timer may come long after: that is no time of idle devices.
        outcome.end_ns = max(
            *(each.ended_ns for each in outcome.executions[-1:]),
            *(dropped_ns for _, dropped_ns in outcome.dropped[-1:]),
            *(request.arrival_ns for request in outcome.unanswered),
            outcome.start_ns,
            0,
        )
        return outcome

    def _start(self, action: Run, now_ns: int) -> None:
        device, batch = action.device, action.batch
        if device in self._running:
            raise ValueError(f"the policy runs a batch on device {device}, which is busy")
        if not batch:
            raise ValueError(f"the policy runs a batch of nothing on device {device}")
        leave(self.queued, batch)
        end_ns = min(now_ns + self._service_ns(device, batch), NEVER_NS)
        execution = self._running[device] = Execution(device, batch, now_ns, end_ns)
        heapq.heappush(self.ends, (end_ns, next(self._numbers), execution))

    def _preempt(self, action: Preempt, now_ns: int) -> None:
        if self._next_exit_ns is None:
            raise ValueError("the policy preempts, and this simulation has no exit points")
        execution = self._running.get(action.device)
        if execution is None:
            raise ValueError(f"the policy preempts device {action.device}, which runs nothing")
        started_ns = execution.started_ns
        passed_ns = self._next_exit_ns(action.device, execution.batch, now_ns - started_ns)
        exit_ns = max(now_ns, started_ns + passed_ns)
        if exit_ns < execution.ended_ns:
            execution.ended_ns = exit_ns
            execution.is_preempted = True
            heapq.heappush(self.ends, (exit_ns, next(self._numbers), execution))


def leave(queued: set[Request], requests: Sequence[Request]) -> None:
    """Remove requests from the queue. Raises ValueError for one that is not there, or twice."""
    try:
        for request in requests:
            queued.remove(request)
    except KeyError:
        message = "the policy runs or drops a request that is not queued, or twice"
        raise ValueError(message) from None
