"""Each row is answered once by each member, whatever dies in between."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trims_shim.ensemble.dispatch import Dispatch, Job


def two_workers(*, batch_size: int = 8) -> Dispatch:
    dispatch = Dispatch(1)
    for worker in (1, 2):
        dispatch.add_worker(worker, member=0, batch_size=batch_size)
    return dispatch


def test_idle_workers_come_before_second_batches() -> None:
    dispatch = two_workers()
    dispatch.add_segment(7, 30)
    assert dispatch.next_jobs() == [
        (1, Job(7, 0, 0, 8)),
        (2, Job(7, 0, 8, 16)),
        (1, Job(7, 0, 16, 24)),
        (2, Job(7, 0, 24, 30)),
    ]
    assert dispatch.next_jobs() == []


def test_a_worker_has_two_batches_at_most() -> None:
    dispatch = Dispatch(1)
    dispatch.add_worker(1, member=0, batch_size=8)
    dispatch.add_segment(1, 100)
    (_, job), _ = dispatch.next_jobs()
    dispatch.done(1, job)
    assert dispatch.next_jobs() == [(1, Job(1, 0, 16, 24))]


def test_batches_do_not_cross_segments() -> None:
    dispatch = two_workers()
    dispatch.add_segment(1, 3)
    dispatch.add_segment(2, 5)
    assert [job for _, job in dispatch.next_jobs()] == [Job(1, 0, 0, 3), Job(2, 0, 0, 5)]


def test_batches_of_a_dead_worker_go_first_and_only_the_running_one_is_suspect() -> None:
    dispatch = Dispatch(1)
    dispatch.add_worker(1, member=0, batch_size=8)
    dispatch.add_segment(1, 32)
    dispatch.next_jobs()
    lost = dispatch.remove_worker(1)
    assert lost == [Job(1, 0, 0, 8), Job(1, 0, 8, 16)]
    dispatch.again(lost, ran=lost[0])
    dispatch.add_worker(2, member=0, batch_size=8)
    assert dispatch.next_jobs() == [(2, Job(1, 0, 0, 8, deaths=1)), (2, Job(1, 0, 8, 16))]
    assert dispatch.remove_worker(1) == []


def test_each_part_of_a_batch_that_killed_a_worker_is_suspect() -> None:
    dispatch = Dispatch(1)
    dispatch.add_worker(1, member=0, batch_size=4)
    batch = Job(1, 0, 0, 8)
    dispatch.again([batch], ran=batch)
    assert dispatch.next_jobs() == [(1, Job(1, 0, 0, 4, deaths=1)), (1, Job(1, 0, 4, 8, deaths=1))]


def test_a_dropped_segment_is_not_begun() -> None:
    dispatch = two_workers()
    dispatch.add_segment(1, 3)
    dispatch.add_segment(2, 3)
    dispatch.drop_segment(1)
    assert dispatch.next_jobs() == [(1, Job(2, 0, 0, 3))]


def test_an_answer_after_death_is_nothing() -> None:
    dispatch = two_workers()
    dispatch.add_segment(1, 3)
    ((worker, job),) = dispatch.next_jobs()
    dispatch.remove_worker(worker)
    dispatch.done(worker, job)
    assert dispatch.next_jobs() == []


class Run(RuleBasedStateMachine):
    """Two members; workers come, die and answer in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatch = Dispatch(2)
        self.workers: dict[int, tuple[int, int, list[Job]]] = {}
        self.numbers = iter(range(10**9))
        self.rows: dict[int, int] = {}
        self.answered: Counter[tuple[int, int, int]] = Counter()

    def hand_out(self) -> None:
        for worker, job in self.dispatch.next_jobs():
            member, batch_size, jobs = self.workers[worker]
            jobs.append(job)
            assert job.member == member
            assert 0 < job.stop - job.start <= batch_size
            assert len(jobs) <= 2

    @rule(member=st.integers(0, 1), batch_size=st.integers(1, 9))
    def add_worker(self, member: int, batch_size: int) -> None:
        worker = next(self.numbers)
        self.workers[worker] = member, batch_size, []
        self.dispatch.add_worker(worker, member=member, batch_size=batch_size)
        self.hand_out()

    @rule(rows=st.integers(1, 40))
    def add_segment(self, rows: int) -> None:
        segment = next(self.numbers)
        self.rows[segment] = rows
        self.dispatch.add_segment(segment, rows)
        self.hand_out()

    @precondition(lambda self: any(jobs for _, _, jobs in self.workers.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        busy = [worker for worker, (_, _, jobs) in self.workers.items() if jobs]
        worker = data.draw(st.sampled_from(busy))
        job = self.workers[worker][2].pop(0)
        for row in range(job.start, job.stop):
            self.answered[job.segment, job.member, row] += 1
        self.dispatch.done(worker, job)
        self.hand_out()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        _, _, jobs = self.workers.pop(worker)
        lost = self.dispatch.remove_worker(worker)
        assert lost == jobs
        self.dispatch.again(lost, ran=lost[0] if lost else None)
        self.hand_out()

    @invariant()
    def no_row_is_answered_twice(self) -> None:
        assert all(count == 1 for count in self.answered.values())

    def teardown(self) -> None:
        """With a worker for each member, everything is answered in the end."""
        for member in (0, 1):
            self.add_worker(member, 5)
        while any(jobs for _, _, jobs in self.workers.values()):
            for worker, (_, _, jobs) in self.workers.items():
                while jobs:
                    job = jobs.pop(0)
                    for row in range(job.start, job.stop):
                        self.answered[job.segment, job.member, row] += 1
                    self.dispatch.done(worker, job)
            self.hand_out()
        self.no_row_is_answered_twice()
        assert len(self.answered) == 2 * sum(self.rows.values())


TestRun = Run.TestCase
