"""Which rows which worker gets next. Pure: told what happened, says what to do; knows no process.

A *segment* is some samples that all members answer. Each member has a queue of the rows that it has
not begun. A worker takes up to its batch size from one segment, as soon as it has less than two
batches: one that it runs, and one that is copied meanwhile. Of several, those with less go first.

Invariant: each row of a segment is begun once for each member, except that rows of a worker that
died are begun again, by another worker or by the one that is started in its place.

Source: Pochelu et al. (2022), section 2.1 (segments, and queues of them for each model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

__all__ = ["Dispatch", "Job"]

_DEPTH = 2


@dataclass(frozen=True, slots=True)
class Job:
    """Rows ``start`` to ``stop`` of a segment, for one member."""

    segment: int
    member: int
    start: int
    stop: int
    deaths: int = 0
    """How many workers have died with it."""


@dataclass(slots=True)
class _Worker:
    member: int
    batch_size: int
    jobs: list[Job] = field(default_factory=list)


class Dispatch:
    """Workers and segments have numbers that the caller chooses, each new."""

    def __init__(self, members: int) -> None:
        self._queues: list[deque[Job]] = [deque() for _ in range(members)]
        self._workers: dict[int, _Worker] = {}

    def add_worker(self, worker: int, *, member: int, batch_size: int) -> None:
        """A worker is ready."""
        self._workers[worker] = _Worker(member, batch_size)

    def remove_worker(self, worker: int) -> list[Job]:
        """A worker has died; return its batches, of which the first one ran."""
        gone = self._workers.pop(worker, None)
        return [] if gone is None else gone.jobs

    def again(self, jobs: Sequence[Job], *, ran: Job | None) -> None:
        """Queue batches of a worker that died before all others; ``ran`` may have killed it."""
        for job in reversed(jobs):
            deaths = job.deaths + (job == ran)
            self._queues[job.member].appendleft(replace(job, deaths=deaths))

    def add_segment(self, segment: int, rows: int) -> None:
        """There are samples to answer."""
        for member, queue in enumerate(self._queues):
            queue.append(Job(segment, member, 0, rows))

    def drop_segment(self, segment: int) -> None:
        """Nobody wants the rest of a segment."""
        for member, queue in enumerate(self._queues):
            self._queues[member] = deque(job for job in queue if job.segment != segment)

    def done(self, worker: int, job: Job) -> None:
        """A worker has answered its first batch, ``job``, or failed to."""
        if worker in self._workers:
            self._workers[worker].jobs.remove(job)

    def next_jobs(self) -> list[tuple[int, Job]]:
        """Return the batches to send now, and to which workers."""
        found: list[tuple[int, Job]] = []
        for depth in range(_DEPTH):
            for number, worker in self._workers.items():
                queue = self._queues[worker.member]
                if len(worker.jobs) == depth and queue:
                    job = _taken(queue, worker.batch_size)
                    worker.jobs.append(job)
                    found.append((number, job))
        return found


def _taken(queue: deque[Job], batch_size: int) -> Job:
    whole = queue.popleft()
    middle = whole.start + batch_size
    if middle >= whole.stop:
        return whole
    queue.appendleft(replace(whole, start=middle))
    return replace(whole, stop=middle)
