"""An ensemble in virtual time: the dispatcher's own batches, on devices that are shared evenly."""

from __future__ import annotations

from trims_shim.ensemble import Allocation, Problem
from trims_shim.ensemble.dispatch import Dispatch, Job

_NOTHING_NS = 1e-3


class Simulation:
    """Segments without end; so many of them are under way at a time."""

    def __init__(
        self, problem: Problem, allocation: Allocation, *, segment_size: int, window: int
    ) -> None:
        self._members = len(problem.members)
        self._segment_size = segment_size
        self._window = window
        self._dispatch = Dispatch(self._members)
        self._device: list[int] = []
        self._profiles = []
        self._jobs: list[list[Job]] = []
        self._left_ns: dict[int, float] = {}
        self._missing: dict[int, int] = {}
        self._begun = 0
        profiles = list(problem.members.values())
        for number, (device, member, size) in enumerate(allocation.workers()):
            self._dispatch.add_worker(number, member=member, batch_size=size)
            self._device.append(device)
            self._profiles.append(profiles[member].latencies[problem.devices[device].kind])
            self._jobs.append([])

    def samples_per_s(self, segments: int) -> float:
        """Over so many segments, after some to fill it."""
        self._ran_ns(2 * self._window)
        return segments * self._segment_size / self._ran_ns(segments) * 1e9

    def _ran_ns(self, segments: int) -> float:
        """How long the next segments take."""
        now_ns, last = 0.0, self._begun - len(self._missing) + segments
        while self._begun - len(self._missing) < last:
            now_ns += self._step_ns()
        return now_ns

    def _step_ns(self) -> float:
        """Until the next batch has ended."""
        self._hand_out()
        busy = [self._device[worker] for worker in self._left_ns]
        step_ns = min(
            left_ns * busy.count(self._device[worker]) for worker, left_ns in self._left_ns.items()
        )
        for worker, left_ns in list(self._left_ns.items()):
            self._left_ns[worker] = left_ns - step_ns / busy.count(self._device[worker])
            if self._left_ns[worker] < _NOTHING_NS:
                del self._left_ns[worker]
                self._answer(worker, self._jobs[worker].pop(0))
        return step_ns

    def _hand_out(self) -> None:
        while len(self._missing) < self._window:
            self._begun += 1
            self._missing[self._begun] = self._members * self._segment_size
            self._dispatch.add_segment(self._begun, self._segment_size)
        for worker, job in self._dispatch.next_jobs():
            self._jobs[worker].append(job)
        for worker, jobs in enumerate(self._jobs):
            if jobs and worker not in self._left_ns:
                rows = jobs[0].stop - jobs[0].start
                self._left_ns[worker] = self._profiles[worker].taken_ns(rows)

    def _answer(self, worker: int, job: Job) -> None:
        self._dispatch.done(worker, job)
        self._missing[job.segment] -= job.stop - job.start
        if not self._missing[job.segment]:
            del self._missing[job.segment]
