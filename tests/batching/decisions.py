"""What a policy was told and what it decided, recorded from any driver, and gone through again.

Twice: event by event in a fresh policy of the same kind, and in the simulator, which makes its own
events from the recorded arrivals, service times and timer lateness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trims_shim.batching.protocol import (
    TIMER,
    Action,
    Drop,
    Event,
    Finished,
    Policy,
    Request,
    Run,
)
from trims_shim.batching.simulator import Outcome, simulate

__all__ = ["Recorder", "Step", "decisions", "replayed", "simulated"]

_NEVER_LATE_NS = 1 << 60

Decision = tuple[int, str, object]
"""(time, action, what it is about)."""


@dataclass(frozen=True)
class Step:
    """One event and what came of it."""

    now_ns: int
    event: Event
    actions: tuple[Action, ...]
    next_ns: int | None


class Recorder:
    """A policy that keeps a log of another one."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.log: list[Step] = []

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        actions = tuple(self._policy.on_event(now_ns, event))
        self.log.append(Step(now_ns, event, actions, self._policy.next_deadline_ns()))
        return actions

    def next_deadline_ns(self) -> int | None:
        return self._policy.next_deadline_ns()


def decisions(log: Sequence[Step]) -> list[Decision]:
    """All actions with their times; requests by their numbers."""
    return [(step.now_ns, *_described(action)) for step in log for action in step.actions]


def _described(action: Action) -> tuple[str, object]:
    if isinstance(action, Run):
        return "run", (action.device, [request.number for request in action.batch])
    if isinstance(action, Drop):
        return f"drop {action.reason.value}", sorted(each.number for each in action.requests)
    return "preempt", action.device


def replayed(log: Sequence[Step], policy: Policy) -> list[Step]:
    """The log that ``policy`` makes of the same events."""
    recorder = Recorder(policy)
    for step in log:
        recorder.on_event(step.now_ns, step.event)
    return recorder.log


# --- in the simulator -----------------------------------------------------------------------------


def simulated(log: Sequence[Step], policy: Policy) -> tuple[list[Step], Outcome]:
    """The log that ``policy`` makes in the simulator; ``log`` has no cancellation."""
    recorder = Recorder(policy)
    script = _Script(log, recorder)
    outcome = simulate(
        script, script.arrivals(), service_ns=script.service_ns, lateness_ns=script.lateness_ns
    )
    return recorder.log, outcome


class _Script:
    """Gives the simulator what the log says of the world: no word of what was decided.

    A driver takes note of a request a little after its arrival, and starts a batch a little after
    the decision to run it: the simulator's requests arrive when they were taken note of, and the
    policy gets the recorded events in their place.
    """

    def __init__(self, log: Sequence[Step], policy: Policy) -> None:
        self._log = log
        self._policy = policy
        self._now_ns = 0
        self._arrived: dict[int, Request] = {}
        """The simulator's own by number."""
        self._ends = {
            tuple(request.number for request in step.event.batch): (step.now_ns, step.event)
            for step in log
            if isinstance(step.event, Finished)
        }

    def arrivals(self) -> Iterator[Request]:
        for step in self._log:
            if isinstance(step.event, Request):
                yield Request(step.event.number, step.now_ns, payload=step.event)

    def service_ns(self, device: int, batch: Sequence[Request]) -> int:
        ended_ns, _ = self._ends[tuple(request.number for request in batch)]
        return ended_ns - self._now_ns

    def lateness_ns(self) -> int:
        """Of a timer that was asked for now."""
        deadline_ns = self._policy.next_deadline_ns()
        assert deadline_ns is not None
        for step in self._log:
            if step.now_ns > self._now_ns:
                if step.event is TIMER and step.now_ns >= deadline_ns:
                    return step.now_ns - max(deadline_ns, self._now_ns)
                if step.next_ns != deadline_ns:
                    break
        return _NEVER_LATE_NS  # something else came first

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        self._now_ns = now_ns
        if isinstance(event, Request):
            self._arrived[event.number] = event
            event = event.payload
        elif isinstance(event, Finished):
            _, event = self._ends[tuple(request.number for request in event.batch)]
        return [self._for_simulator(each) for each in self._policy.on_event(now_ns, event)]

    def next_deadline_ns(self) -> int | None:
        return self._policy.next_deadline_ns()

    def _for_simulator(self, action: Action) -> Action:
        if isinstance(action, Run):
            return Run(action.device, [self._arrived[each.number] for each in action.batch])
        assert isinstance(action, Drop)
        return Drop([self._arrived[each.number] for each in action.requests], action.reason)
