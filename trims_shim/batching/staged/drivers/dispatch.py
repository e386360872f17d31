"""Threads that run the stages of a model: what staged models need beyond ThreadDispatch.

Each stage of each part is a job of its own. Between two stages a request is neither in the queue
nor in a job. It is *active* until it is answered or cancelled. Whether its next stage runs in a
caller's thread or in a worker is decided anew each time. A part with the model to itself runs
through several stages in one job until an event occurs, which saves most of the overhead of stages.

A failure of a stage does not tell which request caused it, and the activations are lost. So all
requests of that part are answered by the whole function, with bisection, and leave.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import is_failure
from trims_shim.batching.drivers.threads import ThreadDispatch
from trims_shim.batching.protocol import Action, Cancelled, Request, Run
from trims_shim.batching.staged.drivers.functions import StagedFunction
from trims_shim.batching.staged.drivers.jobs import StageJob
from trims_shim.batching.staged.drivers.running import StageOutput
from trims_shim.batching.staged.scheduler import RunStage, StageEnded
from trims_shim.batching.staged.stage_statistics import StageRecord
from trims_shim.errors import BatchingError

__all__ = ["StagedDispatch"]

_logger = logging.getLogger(__name__)


class StagedDispatch(ThreadDispatch):
    """See the module docstring. Its policy is a StagedBatching with the model's stages."""

    function: StagedFunction

    def __init__(self, function: StagedFunction, options: Options) -> None:
        super().__init__(function, options)
        self._last = len(function.model) - 1
        self._has_loop = function.model.loop is not None
        self._end_stage = None if self._has_loop else self._last
        """The stage whose end answers all its requests; None if the last stage is a loop."""

    def _set_up(self) -> None:
        super()._set_up()
        self._active: dict[int, Request] = {}
        """Requests that have left the queue and are not answered, by number."""
        self.stages = StageRecord(len(self.function.model))
        self._news = 0
        """The number of events so far."""

    # --- a thread that runs a stage ---------------------------------------------------------------

    def _run(self, job: Job) -> None:
        if not isinstance(job, StageJob):
            super()._run(job)
            return
        job.begin(self.options.clock_ns())
        output = self._output_of(job)
        job.end_stage(self.options.clock_ns(), output)

    def _output_of(self, job: StageJob) -> StageOutput:
        pieces = job.pieces()
        is_second, job.has_started = job.has_started, True
        if is_second and job.stage:
            # The thread was interrupted; the stage may have modified its activations in place.
            return self.function.instead(job.live or [])
        if not pieces:
            return StageOutput()
        output = self.function.run_stage(job.stage, pieces, device=job.device)
        while job.may_run_on(output) and job.news == self._news and not self._inbox:
            is_end = job.through + 1 == self._end_stage
            if not job.run_on(self.options.clock_ns(), is_end=is_end):
                break
            output = self.function.run_stage(job.through, output.pieces, device=job.device)
        return output

    # --- under the lock: actions ------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        if not isinstance(action, RunStage):
            super()._carry_out(action)
            is_whole = type(action) is Run
            self.stages.batches += is_whole
            self.stages.whole += is_whole
            return
        if not action.stage and not self._has_loop:
            self._check_queued(action.batch)
        job = self._job_of(action)
        job.news = self._news
        for other in self._jobs:
            if isinstance(other, StageJob):
                other.is_beside = job.is_beside = True
        self._begin(job)
        self._set_out(job)

    def _job_of(self, action: RunStage) -> StageJob:
        loop = self.function.model.loop
        return StageJob(
            action,
            self._era,
            is_end=action.stage == self._end_stage,
            result=list if loop is None else loop.result,
        )

    def _set_out(self, job: StageJob) -> None:
        """Remove the job's requests from the queue if this is their first stage."""
        if job.stage:
            return
        new = [each for each in job.requests if each.number in self._waiting]
        for request in new:
            self._active[request.number] = request
        self._leave(new)
        if new:
            is_first = not job.part.batch.passed[0]
            self.stages.batches += is_first
            self.stages.stretches += not is_first

    def _may_be_callers(self) -> bool:
        # A loop's steps serve many callers and cannot run again after an interrupt.
        return super()._may_be_callers() and not self._has_loop

    # --- under the lock: events -------------------------------------------------------------------

    def _take(self, event: Any) -> None:
        self._news += 1
        super()._take(event)

    def _end(self, now_ns: int, job: Job) -> None:
        if not isinstance(job, StageJob):
            super()._end(now_ns, job)
            return
        if job not in self._jobs:
            return  # started before a fork or an interrupt
        self._jobs.discard(job)
        self._free_seat(job)
        left, gone = job.settle_part()
        self._count_stage(job, gone)
        self._settled([each for each in left if self._active.pop(each.number, None)])
        job.let_go()
        self._launch_held()
        if job.era != self._era:
            for request in [each for each in job.requests if each.number in self._active]:
                if self._begin_again(request):
                    self._tell(now_ns, request)
            return
        is_typical = self.options.learning.ran(self._policy, job)
        batch = job.part.batch
        was_split = batch.is_split
        self._tell(
            now_ns,
            StageEnded(
                job.device,
                job.requests,
                job.started_ns,
                is_typical,
                part=job.part,
                left=left,
                has_exits=job.has_exits,
                through=job.through,
                is_joined=job.is_joined,
            ),
        )
        self.stages.splits += batch.is_split and not was_split

    def _count_stage(self, job: StageJob, gone: Sequence[Request]) -> None:
        record = self.record
        record.add_stage(job.started_ns, job.ended_ns)
        if not job.stage:
            record.add_start([each.arrival_ns for each in job.began], job.started_ns)
        if job.through == self._last or not job.part.pieces:  # all have left
            for size in job.sizes(job.through):
                record.batch_sizes[size] += 1
        record.cancelled += sum(each.number in self._active for each in gone)
        answered = 0
        for request, result in zip(job.live or (), job.results or (), strict=True):
            if request.number not in self._active:
                continue  # cancelled meanwhile
            if is_failure(result):
                record.failed += 1
            else:
                answered += 1
                record.add_answer(request.arrival_ns, request.payload.deadline_ns, job.ended_ns)
        for stage, taken_ns in enumerate(job.durations_ns, job.stage):
            self.stages.add_runs(stage, job.sizes(stage), taken_ns)
        if job.through < self._last and job.is_by_stage:
            self.stages.add_exits(job.through, answered)
        self.stages.failures += job.has_failed

    def _withdraw(self, now_ns: int, request: Request) -> None:
        if request.number not in self._active:
            super()._withdraw(now_ns, request)
        elif not self._is_leaving(request):
            del self._active[request.number]
            self.record.cancelled += 1
            self._tell(now_ns, Cancelled(request))
            self._settled([request])

    def _is_leaving(self, request: Request) -> bool:
        """Whether it is in its last stage, or has its result already."""
        return any(isinstance(job, StageJob) and job.lets_go(request) for job in self._jobs)

    # --- under the lock: once more ----------------------------------------------------------------

    def _start_over(self, error: BaseException | None) -> None:
        """Queue active requests that are in no job again: the policy that held them is gone."""
        begun = filter(self._is_begun, self._jobs)
        running = {each.number for job in begun for each in job.requests}
        for request in [each for each in self._active.values() if each.number not in running]:
            self._begin_again(request)
        super()._start_over(error)

    def _tidy_up(self) -> None:
        for job in self._jobs:
            if isinstance(job, StageJob) and self._is_begun(job):
                self._set_out(job)
        super()._tidy_up()

    def _begin_again(self, request: Request) -> bool:
        """Queue an active request again; False if it had to fail instead."""
        # It is in one of the two at any time: an interrupt between them must not lose it.
        is_heard = self._is_heard(request)
        if is_heard:
            self._fail([request], self._interrupted())
        else:
            self._wait_again(request)
        del self._active[request.number]
        return not is_heard

    def _is_heard(self, request: Request) -> bool:
        """Whether its caller already streams pieces; if not, forget the pieces."""
        entry = request.payload
        if entry.pieces is not None and entry.is_streamed:
            return True
        entry.pieces = None
        return False

    def _interrupted(self) -> BatchingError:
        return BatchingError(
            f"{self.function.name}: interrupted after the first pieces of this answer, which "
            "cannot be taken back; ask again"
        )

    # --- watching, closing, forgetting ------------------------------------------------------------

    @property
    def running(self) -> int:
        """See :class:`Dispatch`: active requests, and those that run through the whole model."""
        return len(self._active) + len(self._in_whole())

    def _open_requests(self) -> list[Request]:
        return [
            *self._waiting.values(),
            *self._overflow,
            *self._active.values(),
            *self._in_whole(),
        ]

    def _in_whole(self) -> list[Request]:
        whole = [job for job in self._jobs.copy() if not isinstance(job, StageJob)]
        return [request for job in whole for request in job.requests]
