"""Simulate policies of staged models in virtual time, on a device that runs several stages at once.

Like :mod:`trims_shim.batching.simulator.loop`: single-threaded, deterministic, and strict: a policy
that loses, duplicates or reorders requests gets an error, not a good result.
:mod:`benchmarks.staged_device` models how stages that run at once slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.staged_device import DeviceTime, StageDevice
from trims_shim.batching.buckets import may_share
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Drop,
    Finished,
    Policy,
    Request,
    Run,
)
from trims_shim.batching.simulator.loop import Execution, Outcome, check_progress, leave
from trims_shim.batching.staged.mechanism.batches import Part, Piece
from trims_shim.batching.staged.scheduler import RunStage, StageEnded

__all__ = ["StageExecution", "StagedOutcome", "simulate_staged"]


@dataclass(slots=True, eq=False)
class StageExecution:
    """One run of a stage with a part, or of all stages with a plain batch (no ``part``)."""

    device: int
    """The policy's device: a lane of the simulated one."""
    stage: int
    part: Part | None
    batch: Sequence[Request]
    started_ns: int
    through: int
    """The last stage that was run: that of ``stage``, or of the model."""
    ended_ns: int = -1


@dataclass(slots=True)
class StagedOutcome(Outcome):
    """An :class:`Outcome` whose ``executions`` list the requests that left at a stage's end."""

    stage_executions: list[StageExecution] = field(default_factory=list)
    """In the order in which they ended."""
    device_busy_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """The device's busy time; each moment counts with the share of the device that is busy."""
        return self.device_busy_ns


def simulate_staged(
    policy: Policy,
    requests: Iterable[Request],
    *,
    device: StageDevice,
    exits: Callable[[Request, int], bool] | None = None,
    steps: Callable[[Request], int] | None = None,
) -> StagedOutcome:
    """Drive ``policy`` with ``requests``, sorted by arrival, until all are settled.

    A policy of plain batches runs the whole model with each; several may run at once.

    ``exits(request, stage)``: whether the request is finished after that stage, before the last.
    ``steps``: if given, the last stage is a loop, and a request needs ``steps(request)`` steps, 1
    or more. After the last arrival the policy gets FLUSH only if nothing else would happen. Raises
    ValueError if the policy breaks its contract, or if arrivals are not in order.
    """
    run = _Simulation(device, exits, steps)
    arrivals = iter(requests)
    arriving = next(arrivals, None)
    run.outcome.start_ns = 0 if arriving is None else arriving.arrival_ns
    is_flushed = False
    now_ns = 0
    actions: Sequence[Action]
    while True:
        arrival_ns = NEVER_NS if arriving is None else arriving.arrival_ns
        deadline_ns = policy.next_deadline_ns()
        wake_ns = NEVER_NS if deadline_ns is None else max(deadline_ns, now_ns)
        end_ns = run.shared.next_end_ns()
        if end_ns <= arrival_ns and end_ns <= wake_ns and end_ns != NEVER_NS:
            now_ns = end_ns
            ended = run.shared.end_next()
            if ended is None:
                continue
            actions = policy.on_event(now_ns, run.end(ended, now_ns))
        elif arriving is not None and arrival_ns <= wake_ns:
            if arrival_ns < now_ns:
                raise ValueError(f"request {arriving.number} arrives before what has happened")
            now_ns = arrival_ns
            run.admit(arriving)
            actions = policy.on_event(now_ns, arriving)
            arriving = next(arrivals, None)
        elif deadline_ns is not None:
            now_ns = wake_ns
            actions = policy.on_event(now_ns, TIMER)
            if not actions:
                check_progress(policy, now_ns)
        elif not is_flushed:
            is_flushed = True
            actions = policy.on_event(now_ns, FLUSH)
        else:
            return run.close(now_ns)
        run.carry_out(actions, now_ns)


class _Simulation:
    """The place of every request, and the outcome of those that left."""

    __slots__ = (
        "_device",
        "_exits",
        "_inside",
        "_lanes",
        "_loop_left",
        "_queued",
        "_running",
        "_steps",
        "outcome",
        "shared",
    )

    def __init__(
        self,
        device: StageDevice,
        exits: Callable[[Request, int], bool] | None,
        steps: Callable[[Request], int] | None,
    ) -> None:
        self.outcome = StagedOutcome()
        self.shared = DeviceTime[StageExecution]()
        self._device = device
        self._exits = exits
        self._steps = steps
        self._queued: set[Request] = set()
        self._inside: dict[Request, int] = {}
        """The requests between two stages, with the number of the next stage."""
        self._lanes: set[int] = set()
        """The lanes that are busy."""
        self._running: set[int] = set()
        """The stages that run."""
        self._loop_left: dict[Request, int] = {}

    def admit(self, request: Request) -> None:
        self.outcome.requests += 1
        self._queued.add(request)

    def carry_out(self, actions: Sequence[Action], now_ns: int) -> None:
        for action in actions:
            if isinstance(action, RunStage):
                self._check_stage(action)
                self._start(action, action.stage, action.part, now_ns)
            elif isinstance(action, Run) and self._steps is None:
                self._start(action, 0, None, now_ns)
            elif isinstance(action, Drop):
                leave(self._queued, action.requests)
                self.outcome.dropped.extend((request, now_ns) for request in action.requests)
            else:
                raise ValueError(f"{type(action).__name__} is no action of a staged model's policy")

    def end(self, execution: StageExecution, now_ns: int) -> Finished:
        """End a stage: free its lane, and return the event with the requests that left."""
        execution.ended_ns = now_ns
        self._lanes.discard(execution.device)
        self.outcome.stage_executions.append(execution)
        left = [each for each in execution.batch if self._is_finished(each, execution.through)]
        self._inside.update(dict.fromkeys(execution.batch, self._next_stage(execution.stage)))
        for request in left:
            del self._inside[request]
        if left:
            answer = Execution(execution.device, left, execution.started_ns, execution.ended_ns)
            self.outcome.executions.append(answer)
        part, lane, started_ns = execution.part, execution.device, execution.started_ns
        if part is None:
            return Finished(lane, execution.batch, started_ns)
        self._running.discard(execution.stage)
        part.pieces = [Piece(list(execution.batch))]
        return StageEnded(lane, execution.batch, started_ns, part=part, left=left)

    def close(self, now_ns: int) -> StagedOutcome:
        outcome = self.outcome
        outcome.unanswered = sorted(
            [*self._queued, *self._inside], key=lambda request: request.number
        )
        outcome.end_ns = now_ns
        outcome.device_busy_ns = round(self.shared.busy_ns)
        return outcome

    def _check_stage(self, action: RunStage) -> None:
        if action.stage in self._running:
            raise ValueError(f"the policy runs stage {action.stage} twice at the same time")
        self._running.add(action.stage)

    def _start(self, action: Run, stage: int, part: Part | None, now_ns: int) -> None:
        lane, batch = action.device, list(action.batch)
        if lane in self._lanes:
            raise ValueError(f"the policy runs a stage on device {lane}, which is busy")
        if not batch:
            raise ValueError(f"the policy runs stage {stage} with nothing")
        if not may_share(request.key for request in batch):
            raise ValueError(f"the policy runs stage {stage} with requests of different keys")
        if stage == 0:
            self._enter([request for request in batch if request not in self._inside])
        self._leave_border(batch, stage)
        self._lanes.add(lane)
        through = self._device.stages - 1 if part is None else stage
        execution = StageExecution(lane, stage, part, batch, now_ns, through)
        cost = self._device.cost(None if part is None else stage, batch)
        self.shared.start(now_ns, execution, cost)

    def _enter(self, batch: Sequence[Request]) -> None:
        leave(self._queued, batch)
        self._inside.update(dict.fromkeys(batch, 0))
        if self._steps is not None:
            self._loop_left.update((request, self._steps(request)) for request in batch)

    def _leave_border(self, batch: Sequence[Request], stage: int) -> None:
        for request in batch:
            if self._inside.pop(request, None) != stage:
                raise ValueError(
                    f"the policy runs stage {stage} with request {request.number}, "
                    "which is not there"
                )

    def _is_finished(self, request: Request, stage: int) -> bool:
        if stage < self._device.stages - 1:
            return self._exits is not None and self._exits(request, stage)
        if self._steps is None:
            return True
        self._loop_left[request] -= 1
        return self._loop_left[request] < 1

    def _next_stage(self, stage: int) -> int:
        return min(stage + 1, self._device.stages - 1)
