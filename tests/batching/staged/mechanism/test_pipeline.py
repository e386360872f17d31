"""New, stretch, split, loops and withdrawals, step by step. All states: test_state_search."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import Batch, Part, PartState, Piece
from trims_shim.batching.staged.mechanism.pipeline import Pipeline


def requests(*numbers: int, key: str = "a") -> list[Request]:
    return [Request(number, 0, key=key) for number in numbers]


def run(pipeline: Pipeline) -> Part:
    """Start what is ready first."""
    part = pipeline.ready()[0]
    pipeline.start(part)
    return part


def step(pipeline: Pipeline, left: Collection[Request] = ()) -> list[Part]:
    """Run what is ready first through its stage; what was queued by that."""
    return pipeline.finish(run(pipeline), left)


def places(pipeline: Pipeline) -> list[tuple[int, str, list[int]]]:
    """(stage, state, requests) of each part."""
    return [
        (part.stage, part.state.value, [request.number for request in part.requests])
        for batch in pipeline.table
        for part in batch.parts
    ]


def is_empty(pipeline: Pipeline) -> bool:
    return not len(pipeline.table) and not pipeline.ready() and pipeline.may_new


def test_it_needs_stages_and_buffers() -> None:
    with pytest.raises(ValueError, match="0 stages"):
        Pipeline(0)
    with pytest.raises(ValueError, match="0 buffer pairs"):
        Pipeline(1, pairs=0)


def test_a_batch_goes_through_all_stages() -> None:
    pipeline = Pipeline(3)
    batch = pipeline.new(7, requests(0, 1))
    for stage in range(3):
        assert places(pipeline) == [(stage, "queued", [0, 1])]
        step(pipeline)
    assert is_empty(pipeline)
    assert batch.passed == [2, 2, 2]
    assert batch.live == 0


def test_what_was_alone_may_have_run_on_through_several_stages() -> None:
    pipeline = Pipeline(4)
    batch = pipeline.new(0, requests(0))
    part = run(pipeline)
    assert pipeline.finish(part, (), through=1) == [part]
    assert places(pipeline) == [(2, "queued", [0])]
    assert batch.passed == [1, 1, 0, 0]
    pipeline.stretch(batch, requests(1))
    assert places(pipeline) == [(2, "waiting", [0]), (0, "queued", [1])]
    step(pipeline)
    step(pipeline)
    assert places(pipeline) == [(2, "queued", [0, 1])]
    step(pipeline)
    step(pipeline)
    assert is_empty(pipeline)
    pipeline.new(0, requests(2))
    assert pipeline.finish(run(pipeline), (), through=3) == []
    assert is_empty(pipeline)


# --- one pair and two -----------------------------------------------------------------------------


def test_with_one_pair_neighbouring_stages_take_turns() -> None:
    pipeline = Pipeline(3, pairs=1)
    pipeline.new(0, requests(0))
    step(pipeline)
    second = run(pipeline)
    assert not pipeline.may_new  # it would write what the second stage reads
    pipeline.finish(second, ())
    third = run(pipeline)
    assert pipeline.may_new
    pipeline.new(0, requests(1))
    first = run(pipeline)
    assert (third.stage, first.stage) == (2, 0)


def test_with_two_pairs_they_work_at_the_same_time() -> None:
    pipeline = Pipeline(2, pairs=2)
    pipeline.new(0, requests(0))
    step(pipeline)
    second = run(pipeline)
    pipeline.new(0, requests(1))
    first = run(pipeline)
    assert (second.stage, first.stage) == (1, 0)
    assert second.batch.pair != first.batch.pair
    pipeline.finish(first, ())
    assert not pipeline.ready()  # the second stage is one
    assert not pipeline.may_new  # both of its inputs are full
    pipeline.finish(second, ())
    assert pipeline.ready() == [first]


def test_a_new_batch_takes_buffers_of_which_nobody_is_left() -> None:
    pipeline = Pipeline(2, pairs=2)
    first = pipeline.new(0, requests(0))
    step(pipeline)
    second = pipeline.new(0, requests(1))
    assert second.pair != first.pair
    step(pipeline)
    assert list(pipeline.table) == [second]
    step(pipeline)
    assert pipeline.new(0, requests(2)).pair == first.pair


def test_a_new_batch_takes_buffers_that_hold_nobody_up() -> None:
    pipeline = Pipeline(5, pairs=2)
    first = pipeline.new(0, requests(0))
    step(pipeline)
    step(pipeline)
    # The first has left the first two borders of its buffers, and is before it on the way.
    second = pipeline.new(0, requests(1))
    assert second.pair != first.pair
    run(pipeline)  # the first batch: it is at the third stage
    step(pipeline)
    step(pipeline)
    # Both have; the first is further on.
    assert pipeline.new(0, requests(2)).pair == first.pair


# --- stretch --------------------------------------------------------------------------------------


def stretched(stages: int = 4, passed: int = 2, *, has_loop: bool = False) -> Pipeline:
    """A batch of 0, before the stage ``passed``, and 1 that joins it."""
    pipeline = Pipeline(stages, has_loop=has_loop)
    batch = pipeline.new(0, requests(0))
    for _ in range(passed):
        step(pipeline)
    assert pipeline.may_stretch(batch)
    pipeline.stretch(batch, requests(1))
    return pipeline


def test_the_first_part_waits_where_it_is_for_those_that_catch_up() -> None:
    pipeline = stretched()
    assert places(pipeline) == [(2, "waiting", [0]), (0, "queued", [1])]
    assert step(pipeline) != []
    assert places(pipeline) == [(2, "waiting", [0]), (1, "queued", [1])]
    (merged,) = step(pipeline)
    assert places(pipeline) == [(2, "queued", [0, 1])]
    assert merged.batch.passed == [2, 2, 0, 0]
    assert merged.batch.size == 2


def test_the_values_of_both_are_pieces_of_one_part() -> None:
    pipeline = stretched()
    (batch,) = pipeline.table
    batch.parts[0].pieces[0].value = "of the first"
    for value in ("of stage 0", "of stage 1"):
        part = run(pipeline)
        part.pieces = [Piece(part.requests, [0], value)]
        pipeline.finish(part, ())
    (part,) = batch.parts
    assert [piece.value for piece in part.pieces] == ["of the first", "of stage 1"]


def test_the_first_part_ends_its_stage_before_it_waits() -> None:
    pipeline = Pipeline(4)
    batch = pipeline.new(0, requests(0))
    step(pipeline)
    running = run(pipeline)
    assert pipeline.may_stretch(batch)
    pipeline.stretch(batch, requests(1))
    assert not pipeline.ready()  # who catches up would write what it reads
    pipeline.finish(running, ())
    assert places(pipeline) == [(2, "waiting", [0]), (0, "queued", [1])]


def test_before_the_first_stage_they_join_at_once() -> None:
    pipeline = Pipeline(2)
    batch = pipeline.new(0, requests(0))
    pipeline.stretch(batch, requests(1))
    assert places(pipeline) == [(0, "queued", [0, 1])]


def test_what_is_at_the_last_border_can_be_joined_and_what_runs_there_cannot() -> None:
    pipeline = Pipeline(2)
    batch = pipeline.new(0, requests(0))
    step(pipeline)
    assert pipeline.may_stretch(batch)
    run(pipeline)
    assert not pipeline.may_stretch(batch)


def test_nobody_joins_a_batch_while_it_runs_the_first_stage() -> None:
    pipeline = Pipeline(3)
    batch = pipeline.new(0, requests(0))
    part = run(pipeline)
    assert not pipeline.may_stretch(batch)
    pipeline.finish(part, ())
    assert pipeline.may_stretch(batch)


def test_only_the_newest_batch_is_joined() -> None:
    pipeline = Pipeline(3, pairs=2)
    first = pipeline.new(0, requests(0))
    step(pipeline)
    second = pipeline.new(0, requests(1))
    assert pipeline.may_stretch(second)
    assert not pipeline.may_stretch(first)
    pipeline.withdraw(second.parts[0].requests[0])
    assert pipeline.may_stretch(first)


def test_many_can_catch_up_one_after_the_other() -> None:
    pipeline = stretched()
    step(pipeline)
    (batch,) = pipeline.table
    pipeline.stretch(batch, requests(2))
    assert places(pipeline) == [
        (2, "waiting", [0]),
        (1, "waiting", [1]),
        (0, "queued", [2]),
    ]
    step(pipeline)
    assert places(pipeline) == [(2, "waiting", [0]), (1, "queued", [1, 2])]
    step(pipeline)
    assert places(pipeline) == [(2, "queued", [0, 1, 2])]


# --- split ----------------------------------------------------------------------------------------


def split(sizes: tuple[int, ...] = (2, 1), *, devices: int = 1) -> Pipeline:
    """A batch before the second of three stages, in parts of these sizes."""
    pipeline = Pipeline(3)
    pipeline.new(0, requests(*range(sum(sizes))))
    (part,) = step(pipeline)
    pipeline.split(part, sizes)
    return pipeline


def test_parts_of_a_split_batch_go_through_one_after_the_other() -> None:
    pipeline = split()
    assert places(pipeline) == [(1, "queued", [2]), (1, "queued", [0, 1])]
    seen = []
    while len(pipeline.table):
        part = pipeline.ready()[0]
        seen.append((part.stage, [request.number for request in part.requests]))
        step(pipeline)
    assert seen == [(1, [0, 1]), (2, [0, 1]), (1, [2]), (2, [2])]


def test_a_split_batch_cannot_be_joined() -> None:
    pipeline = split()
    (batch,) = pipeline.table
    assert not pipeline.may_stretch(batch)
    assert batch.is_split


def test_parts_of_a_split_batch_run_at_once_where_their_buffers_are_apart() -> None:
    pipeline = Pipeline(4)
    pipeline.new(0, requests(0, 1))
    (part,) = step(pipeline)
    pipeline.split(part, (1, 1))
    step(pipeline)
    first = run(pipeline)
    assert first.stage == 2
    assert not pipeline.ready()  # the other one would write what it reads
    pipeline.finish(first, ())
    first = run(pipeline)
    second = run(pipeline)
    assert (first.stage, second.stage) == (3, 1)


# --- who leaves -----------------------------------------------------------------------------------


def test_who_is_finished_leaves_at_any_border() -> None:
    pipeline = Pipeline(3)
    batch = pipeline.new(0, requests(0, 1))
    first, second = batch.parts[0].requests
    step(pipeline, [first])
    assert places(pipeline) == [(1, "queued", [1])]
    assert (batch.passed, batch.live, batch.size) == ([2, 0, 0], 1, 2)
    step(pipeline, [second])
    assert is_empty(pipeline)


def test_if_all_that_catch_up_leave_the_others_go_on() -> None:
    pipeline = stretched()
    part = pipeline.ready()[0]
    step(pipeline, part.requests)
    assert places(pipeline) == [(2, "queued", [0])]


@pytest.mark.parametrize("which", [0, 1])
def test_who_is_withdrawn_does_not_run_and_nobody_waits_for_him(which: int) -> None:
    pipeline = stretched()
    (batch,) = pipeline.table
    assert pipeline.withdraw(batch.parts[which].requests[0])
    assert places(pipeline) == [(0, "queued", [1])] if which == 0 else [(2, "queued", [0])]
    while len(pipeline.table):
        step(pipeline)
    assert is_empty(pipeline)


def test_who_is_withdrawn_while_he_runs_leaves_at_the_end_of_the_stage() -> None:
    pipeline = Pipeline(2)
    batch = pipeline.new(0, requests(0, 1))
    part = run(pipeline)
    gone = part.requests[0]
    assert pipeline.withdraw(gone)
    assert pipeline.active == 2
    part.pieces = [Piece(part.requests, [0, 1], "of stage 0")]
    pipeline.finish(part, ())
    assert pipeline.active == 1
    assert [(piece.rows, piece.value) for piece in part.pieces] == [([1], "of stage 0")]
    assert batch.passed == [2, 0]
    assert not pipeline.withdraw(gone)


def test_if_the_driver_leaves_him_out_himself_nothing_is_kept() -> None:
    pipeline = Pipeline(2)
    pipeline.new(0, requests(0, 1))
    part = run(pipeline)
    pipeline.withdraw(part.requests[0])
    part.pieces = [Piece(part.requests[1:], [0], "of stage 0")]
    pipeline.finish(part, ())
    assert part.gone == []
    assert places(pipeline) == [(1, "queued", [1])]


def test_who_is_not_there_is_not_withdrawn() -> None:
    pipeline = Pipeline(2)
    pipeline.new(0, requests(0))
    assert not pipeline.withdraw(Request(0, 0))


# --- loops ----------------------------------------------------------------------------------------


def looping(key: str = "a", *, pairs: int = 2) -> tuple[Pipeline, Batch]:
    pipeline = Pipeline(2, pairs=pairs, has_loop=True)
    batch = pipeline.new(0, requests(0, key=key))
    step(pipeline)
    return pipeline, batch


def test_a_loop_is_run_until_its_requests_have_left() -> None:
    pipeline, batch = looping()
    for _ in range(3):
        assert places(pipeline) == [(1, "queued", [0])]
        step(pipeline)
    step(pipeline, batch.parts[0].requests)
    assert is_empty(pipeline)
    assert batch.passed == [1, 4]


def test_newcomers_join_a_loop_between_two_steps() -> None:
    pipeline, batch = looping()
    assert pipeline.may_stretch(batch)
    pipeline.stretch(batch, requests(1))
    assert places(pipeline) == [(1, "queued", [0]), (0, "queued", [1])]
    step(pipeline)
    assert places(pipeline) == [(1, "queued", [0, 1])]
    step(pipeline, batch.parts[0].requests[:1])
    assert places(pipeline) == [(1, "queued", [1])]


def test_what_is_in_the_loop_does_not_wait_for_newcomers() -> None:
    pipeline = stretched(3, 1, has_loop=True)
    step(pipeline)
    step(pipeline)
    (batch,) = pipeline.table
    (part,) = batch.parts
    assert part.stage == 2
    pipeline.stretch(batch, requests(2))
    catching_up = run(pipeline)
    assert (catching_up.stage, part.state) == (0, PartState.QUEUED)
    assert pipeline.ready() == [part]


def test_a_loop_takes_newcomers_while_it_runs() -> None:
    pipeline, batch = looping()
    run(pipeline)
    assert pipeline.may_stretch(batch)


def test_batches_in_the_loop_take_turns() -> None:
    pipeline, first = looping()
    second = pipeline.new(0, requests(1, key="b"))
    step(pipeline)
    order = []
    for _ in range(4):
        order.append(pipeline.ready()[0].batch)
        step(pipeline)
    assert order == [first, second, first, second]


def test_a_batch_that_is_joined_keeps_its_turn() -> None:
    """One that is joined before each of its steps would never run beside another batch."""
    pipeline, first = looping()
    second = pipeline.new(0, requests(2, key="b"))
    step(pipeline)
    assert pipeline.ready()[0].batch is first
    assert pipeline.may_stretch(first)
    pipeline.stretch(first, requests(3))
    step(pipeline)
    order = []
    for _ in range(2):
        order.append(pipeline.ready()[0].batch)
        step(pipeline)
    assert order == [first, second]


def test_all_else_goes_before_the_steps_of_a_loop() -> None:
    pipeline, first = looping()
    pipeline.new(0, requests(1, key="b"))
    prompt, token = pipeline.ready()
    assert (prompt.stage, token.batch) == (0, first)
    assert pipeline.is_step(token)
    assert not pipeline.is_step(prompt)


def test_a_loop_is_not_joined_where_a_newer_batch_of_its_key_is() -> None:
    pipeline, first = looping(pairs=2)
    other = pipeline.new(0, requests(1, key="b"))
    step(pipeline)
    assert pipeline.may_stretch(first)
    pipeline.withdraw(other.parts[0].requests[0])
    pipeline.new(0, requests(2))
    step(pipeline)
    assert not pipeline.may_stretch(first)


def test_a_loop_is_not_joined_through_buffers_that_a_newer_batch_has() -> None:
    """It waits for the loop to end, and newcomers would wait for it."""
    pipeline = Pipeline(4, pairs=1, has_loop=True)
    first = pipeline.new(0, requests(0))
    for _ in range(3):
        step(pipeline)
    assert pipeline.may_stretch(first)
    pipeline.new(0, requests(1, key="b"))
    step(pipeline)
    assert not pipeline.may_stretch(first)


def test_a_loop_is_not_joined_behind_another_batch() -> None:
    pipeline, first = looping()
    other = pipeline.new(0, requests(1, key="b"))
    assert other.pair != first.pair
    assert not pipeline.may_stretch(first)
    pipeline.start(other.parts[0])
    assert not pipeline.may_stretch(first)
    pipeline.finish(other.parts[0], ())
    assert pipeline.may_stretch(first)


def test_where_all_is_a_loop_a_new_batch_gets_its_turn() -> None:
    pipeline = Pipeline(1, has_loop=True)
    first = pipeline.new(0, requests(0))
    step(pipeline)
    assert pipeline.may_new
    second = pipeline.new(0, requests(1, key="b"))
    assert not pipeline.may_new  # both pairs have one
    assert [run(pipeline).batch] == [first]
    assert not pipeline.may_new
    pipeline.finish(first.parts[0], ())
    assert pipeline.ready()[0].batch is second


# --- alone ----------------------------------------------------------------------------------------


def states(pipeline: Pipeline) -> list[object]:
    buffers = [buffer.state for row in pipeline._buffers for buffer in row]
    running = [part is not None for part in pipeline._running]
    return [*buffers, *running, *map(len, pipeline._queues)]


def test_what_is_alone_and_leaves_is_told_to_nobody() -> None:
    pipeline = Pipeline(3)
    before = states(pipeline)
    part = pipeline.new_alone(0, requests(0, 1))
    assert (part.state, part.size, len(pipeline.table)) == (PartState.RUNNING, 2, 1)
    assert pipeline.finish(part, part.requests, through=2) == []
    assert (len(pipeline.table), pipeline.active, pipeline.may_new) == (0, 0, True)
    assert states(pipeline) == before
    assert part.batch.passed == [2, 2, 2]


@pytest.mark.parametrize("through", [0, 1])
def test_what_was_alone_and_goes_on_is_where_any_other_would_be(through: int) -> None:
    alone, other = Pipeline(3), Pipeline(3)
    first = alone.new_alone(0, requests(0, 1, 2))
    other.new(0, requests(0, 1, 2))
    (second,) = other.ready()
    other.start(second)
    for pipeline, part in ((alone, first), (other, second)):
        pipeline.withdraw(part.requests[1])
        queued = pipeline.finish(part, part.requests[:1], through=through)
        assert [each.requests for each in queued] == [part.requests]
        assert len(part.requests) == 1
    assert states(alone) == states(other)
    assert places(alone) == places(other)
    assert alone.ready() == [first]
