"""What a job of a stage says of its run: who leaves, whether rows met, what may be learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from trims_shim.batching.drivers.replies import BatchFuture, Entry
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.staged.drivers.jobs import StageJob
from trims_shim.batching.staged.drivers.running import StageOutput
from trims_shim.batching.staged.mechanism.batches import BatchTable, Piece
from trims_shim.batching.staged.scheduler import RunStage


def job_of(*sizes: int, has_run: bool = True, is_end: bool = False) -> StageJob:
    """The second of three stages, with pieces of these sizes."""
    requests = [
        Request(number, 0, payload=Entry((number,), BatchFuture(), NEVER_NS, None))
        for number in range(sum(sizes))
    ]
    part = BatchTable(stages=3).new(0, requests, pair=0)
    left = iter(requests)
    value = "activations" if has_run else None
    part.pieces = [Piece([next(left) for _ in range(size)], None, value) for size in sizes]
    part.stage = 1
    return StageJob(RunStage(0, requests, 1, part), 0, is_end=is_end, result=list)


def run(job: StageJob, output: StageOutput) -> list[list[int]]:
    """The requests of each piece that the stage gets."""
    job.begin(5)
    pieces = job.pieces()
    job.end_stage(12, output)
    return [[request.number for request in piece.requests] for piece in pieces]


def give_up(job: StageJob, *numbers: int) -> None:
    for number in numbers:
        assert job.requests[number].payload.reply.cancel()


def going_on(job: StageJob, *numbers: int) -> StageOutput:
    return StageOutput([Piece([job.requests[number] for number in numbers], None, "next")])


def numbers(requests: Sequence[Request]) -> list[int]:
    return [request.number for request in requests]


@pytest.mark.parametrize(
    ("sizes", "runs", "is_joined"), [((3,), 1, None), ((2, 1), 1, True), ((2, 1), 2, False)]
)
def test_whether_those_that_met_ran_as_one(
    sizes: tuple[int, ...], runs: int, is_joined: bool | None
) -> None:
    job = job_of(*sizes)
    assert run(job, StageOutput(runs=runs)) == ([[0, 1, 2]] if len(sizes) == 1 else [[0, 1], [2]])
    assert job.is_joined is is_joined
    assert job.is_typical == (runs == 1)
    assert job.durations_ns == [7]


def test_requests_that_have_not_started_do_not_meet() -> None:
    job = job_of(1, 1, has_run=False)
    run(job, StageOutput())
    assert job.is_joined is None


def test_what_the_whole_function_answered_did_not_meet() -> None:
    job = job_of(1, 1)
    run(job, StageOutput(runs=0))
    assert job.is_joined is None
    assert not job.is_typical
    assert not job.is_by_stage


def test_who_was_given_up_before_it_meets_nobody() -> None:
    job = job_of(1, 2)
    give_up(job, 0)
    assert run(job, going_on(job, 1, 2)) == [[1, 2]]
    assert job.is_joined is None
    assert job.sizes(1) == [2]
    left, gone = job.settle_part()
    assert (numbers(left), numbers(gone)) == ([0], [0])


def test_those_that_are_left_meet() -> None:
    job = job_of(2, 2)
    give_up(job, 1)
    assert run(job, going_on(job, 0, 2, 3)) == [[0], [2, 3]]
    assert job.is_joined


def test_nothing_is_learned_from_a_run_with_nobody() -> None:
    job = job_of(1)
    give_up(job, 0)
    assert run(job, StageOutput()) == []
    assert not job.is_typical
    assert job.sizes(1) == []


def test_it_runs_on_while_all_go_on() -> None:
    job = job_of(2)
    job.until = 2
    job.begin(5)
    job.pieces()
    assert not job.may_run_on(StageOutput())
    assert not job.may_run_on(going_on(job, 0))
    assert job.may_run_on(going_on(job, 0, 1))
    assert job.run_on(12, is_end=True)
    assert not job.may_run_on(going_on(job, 0, 1))
    job.end_stage(15, StageOutput(left=job.requests, results=["a", "b"]))
    assert (job.through, job.durations_ns) == (2, [7, 3])
    assert [job.sizes(stage) for stage in (1, 2)] == [[2], [2]]
    assert numbers(job.settle_part()[0]) == [0, 1]


def test_it_does_not_run_the_last_stage_with_who_was_given_up() -> None:
    job = job_of(2)
    job.begin(5)
    job.pieces()
    give_up(job, 1)
    assert job.run_on(9, is_end=False)  # as long as it can still be noticed
    assert not job.run_on(12, is_end=True)
    assert (job.through, job.durations_ns) == (2, [4])
    assert not job.is_end


def test_who_leaves_is_told_apart_from_who_was_given_up() -> None:
    job = job_of(3)
    give_up(job, 2)
    answered = StageOutput(
        [Piece([job.requests[0]], None, "next")], left=[job.requests[1]], results=["early"]
    )
    run(job, answered)
    assert [job.lets_go(request) for request in job.requests] == [False, True, False]
    left, gone = job.settle_part()
    assert (numbers(left), numbers(gone)) == ([1, 2], [2])
    assert numbers(job.part.pieces[0].requests) == [0]


def test_all_of_the_last_stage_leave() -> None:
    job = job_of(2, is_end=True)
    job.begin(5)
    assert not job.requests[0].payload.reply.cancel()  # it is too late
    assert all(map(job.lets_go, job.requests))


class _Interrupting(list[Any]):
    """No results; a signal comes when they are looked at."""

    def __iter__(self) -> Iterator[Any]:
        raise KeyboardInterrupt


def test_an_interrupt_at_the_end_of_a_stage_leaves_its_requests_to_whoever_goes_on() -> None:
    job = job_of(2)
    job.begin(5)
    job.pieces()
    output = going_on(job, 0, 1)
    output.results = _Interrupting()
    with pytest.raises(KeyboardInterrupt):
        job.end_stage(12, output)
    assert job.results is None
    assert job.begin(13) == [each.payload for each in job.requests]
