"""One stage with one part: who goes on with which rows, who leaves with which result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.lanes import CpuLane, CudaLane
from trims_shim.batching.drivers.replies import BatchFuture, Entry
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged import EarlyExit, Loop, Shared, StagedModel, Stepped
from trims_shim.batching.staged.drivers.running import StageRunner
from trims_shim.batching.staged.mechanism.batches import Piece
from trims_shim.errors import BadBatch

Keep = [lambda items: items]


def runner(model: StagedModel, *, collate: Any = "list", **options: Any) -> StageRunner:
    function = BatchFunction(model, collate=collate, isolate_failures=True, name="m")
    return StageRunner(model, function, **{"lanes": [CpuLane()], **options})


def piece(values: Sequence[Any], *, rows: Sequence[int] | None = None, value: Any = None) -> Piece:
    """Of requests for these values; without ``value`` they have not begun."""
    requests = [
        Request(number, 0, payload=Entry((each,), BatchFuture(), 0, None))
        for number, each in enumerate(values)
    ]
    return Piece(requests, list(rows if rows is not None else range(len(requests))), value)


def asked(requests: Sequence[Request]) -> list[Any]:
    return [request.payload.arguments[0] for request in requests]


def test_the_first_stage_gets_the_items() -> None:
    seen: list[Any] = []
    model = StagedModel([lambda items: (seen.append(items), items)[1], *Keep])
    output = runner(model).run(0, [piece([1, 2]), piece([3])])
    assert seen == [[1, 2, 3]]
    (after,) = output.pieces
    assert (asked(after.requests), after.rows, after.value) == ([1, 2, 3], None, [1, 2, 3])
    assert not output.left
    assert not output.finished


def test_later_stages_get_the_rows_that_are_left_of_each_piece() -> None:
    seen: list[Any] = []
    model = StagedModel([*Keep, lambda items: (seen.append(items), items)[1], *Keep])
    pieces = [piece("bd", rows=[1, 3], value=list("abcd")), piece("z", rows=[0], value=["z"])]
    output = runner(model).run(1, pieces)
    assert seen == [["b", "d", "z"]]
    assert asked(output.pieces[0].requests) == ["b", "d", "z"]
    assert output.runs == 1


def test_a_stage_gets_the_very_value_of_which_nothing_was_taken() -> None:
    value = object()  # no activation: who looked into it would fail
    seen: list[Any] = []
    model = StagedModel([*Keep, lambda state: (seen.append(state), [1, 2])[1], *Keep])
    whole = piece([1, 2], value=value)
    whole.rows = None
    runner(model).run(1, [whole])
    assert seen == [value]


def test_the_last_stage_gives_results() -> None:
    model = StagedModel([*Keep, lambda items: [item.upper() for item in items]])
    output = runner(model).run(1, [piece("bd", rows=[1, 3], value=list("abcd"))])
    assert (asked(output.left), output.results) == (["b", "d"], ["B", "D"])
    assert not output.pieces


def test_what_has_no_batch_is_shared() -> None:
    model = StagedModel([*Keep, lambda value: value, *Keep])
    value = ([1, 2], Shared("mask"), None)
    output = runner(model).run(1, [piece("ab", value=value), piece("c", value=([3], *value[1:]))])
    assert output.pieces[0].value == ([1, 2, 3], Shared("mask"), None)


def test_pieces_of_several_kinds_are_joined_with_their_like() -> None:
    seen: list[Any] = []
    model = StagedModel([*Keep, lambda value: (seen.append(value), value)[1], *Keep])
    pieces = [
        piece("a", value=(["a"], Shared(1))),
        piece("b", value=(["b"], Shared(2))),
        piece("c", value=(["c"], Shared(1))),
    ]
    output = runner(model).run(1, pieces)
    assert seen == [(["a", "c"], Shared(1)), (["b"], Shared(2))]
    assert [asked(each.requests) for each in output.pieces] == [["a", "c"], ["b"]]
    assert output.runs == 2


def test_batches_are_filled_with_their_last_row() -> None:
    seen: list[Any] = []

    def stage(items: list[int]) -> list[int]:
        seen.append(list(items))
        return items

    model = StagedModel([stage, stage, stage])
    run = runner(model, batch_sizes=(4,)).run
    output = run(0, [piece([1, 2])])
    assert output.pieces[0].rows == [0, 1]
    output = run(1, [*output.pieces, piece([3], value=[3])])
    output = run(2, output.pieces)
    assert seen == [[1, 2, 2, 2], [1, 2, 3, 3], [1, 2, 3, 3]]
    assert output.results == [1, 2, 3]


def test_rows_that_exit_early() -> None:
    def exits(items: list[int]) -> EarlyExit:
        flags = [item < 0 for item in items]
        return EarlyExit(
            flags, [-item for item in items if item < 0], [item for item in items if item >= 0]
        )

    output = runner(StagedModel([exits, *Keep]), batch_sizes=(4,)).run(0, [piece([-1, 5, -2])])
    assert (asked(output.left), output.results) == ([-1, -2], [1, 2])
    assert [(asked(each.requests), each.rows, each.value) for each in output.pieces] == [
        ([5], None, [5])
    ]


def test_all_rows_may_exit() -> None:
    model = StagedModel([lambda items: EarlyExit([True] * len(items), items, None), *Keep])
    output = runner(model).run(0, [piece([1, 2])])
    assert output.results == [1, 2]
    assert not output.pieces


def test_a_step_of_a_loop() -> None:
    def step(state: list[int]) -> Stepped:
        return Stepped([n - 1 for n in state], [10 * n for n in state], [n == 1 for n in state])

    output = runner(StagedModel([*Keep, Loop(step)]), batch_sizes=(4,)).run(
        1, [piece([3, 1, 2], value=[3, 1, 2])]
    )
    assert [(asked([request])[0], made) for request, made in output.steps] == [
        (3, 30), (1, 10), (2, 20)
    ]  # fmt: skip
    assert asked(output.finished) == [1]
    (after,) = output.pieces
    assert (asked(after.requests), after.rows, after.value) == ([3, 2], [0, 2], [2, 0, 1, 1])


def test_a_row_that_a_step_fails_for_leaves_with_its_exception() -> None:
    error = ValueError("two")

    def step(state: list[int]) -> Stepped:
        pieces = [error if n == 2 else n for n in state]
        return Stepped([n - 1 for n in state], pieces, [n == 1 for n in state])

    output = runner(StagedModel([*Keep, Loop(step)])).run(1, [piece([3, 2, 1], value=[3, 2, 1])])
    assert [(asked([request])[0], made) for request, made in output.steps] == [(3, 3), (1, 1)]
    assert (asked(output.left), output.results, asked(output.finished)) == ([2], [error], [1])
    (after,) = output.pieces
    assert (asked(after.requests), after.rows) == ([3], [0])


def test_nothing_is_taken_of_a_loop_that_nobody_has_left() -> None:
    def take(state: list[int], rows: Sequence[int]) -> list[int]:
        raise AssertionError("asked to take rows")

    loop = Loop(lambda state: Stepped(state, state, [False] * len(state)), take=take)
    run = runner(StagedModel([*Keep, loop])).run
    output = run(1, run(0, [piece([3, 1])]).pieces)
    assert run(1, output.pieces).pieces[0].value == [3, 1]


def test_a_loop_is_filled_anew_for_each_step() -> None:
    seen: list[list[int]] = []
    loop = Loop(lambda state: (seen.append(state), Stepped(state, state, [False] * 4))[1])
    run = runner(StagedModel([*Keep, loop]), batch_sizes=(4,)).run
    output = run(1, run(0, [piece([3, 1])]).pieces)
    run(1, output.pieces)
    assert seen == [[3, 1, 1, 1]] * 2


def test_newcomers_of_a_loop_without_stages_before_it_are_filled_with_the_others() -> None:
    seen: list[list[int]] = []
    loop = Loop(lambda state: (seen.append(state), Stepped(state, state, [False] * len(state)))[1])
    run = runner(StagedModel([loop]), batch_sizes=(2, 4, 8)).run
    output = run(0, [piece([3, 1])])
    output = run(0, [*output.pieces, piece([5, 6, 7])])
    assert seen == [[3, 1], [3, 1, 5, 6, 7, 7, 7, 7]]
    assert asked(output.pieces[0].requests) == [3, 1, 5, 6, 7]


def test_loops_join_and_take_as_they_say() -> None:
    calls: list[Any] = []

    def join(states: Sequence[Any]) -> Any:
        calls.append(("join", list(states)))
        return [row for state in states for row in state]

    def take(state: Any, rows: Sequence[int]) -> Any:
        calls.append(("take", list(rows)))
        return [state[row] for row in rows]

    step = lambda state: Stepped(state, state, [True] * len(state))  # noqa: E731
    model = StagedModel([*Keep, Loop(step, join=join, take=take)])
    runner(model).run(1, [piece("b", rows=[1], value=["a", "b"]), piece("c", value=["c"])])
    assert calls == [("take", [1]), ("take", [0]), ("join", [["b"], ["c"]])]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda items: items[1:], "stage 1 of m returned 1 rows for a batch of 2"),
        (lambda items: None, "stage 1 of m returned no rows"),
        (lambda items: 2, "returned the number 2"),
        (lambda items: EarlyExit([True], items, None), "said of 1 rows"),
        (lambda items: EarlyExit([True, False], [1], [1, 2]), "2 rows of activations for 1"),
        (lambda items: EarlyExit([True, False], [1, 2], [1]), "2 results"),
    ],
)
def test_what_no_stage_may_return(returned: Any, message: str) -> None:
    model = StagedModel([*Keep, returned, *Keep])
    with pytest.raises(BadBatch, match=message):
        runner(model).run(1, [piece([1, 2], value=[1, 2])])


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda items: EarlyExit([True, False], [1], [2]), "is the last one"),
        (Loop(lambda items: Stepped(items, [True, True], items)), "a boolean for each row"),
        (Loop(lambda items: Stepped(items, items, [True])), "said of 1 rows"),
        (Loop(lambda items: Stepped(items, items[1:], [True, True])), "1 results"),
    ],
)
def test_what_no_last_stage_may_return(last: Any, message: str) -> None:
    with pytest.raises(BadBatch, match=message):
        runner(StagedModel([*Keep, last])).run(1, [piece([1, 2], value=[1, 2])])


# --- devices --------------------------------------------------------------------------------------


class Streams:
    """What a CUDA lane uses of torch: writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.cuda = SimpleNamespace(
            Stream=lambda device: SimpleNamespace(
                device=device,
                wait_stream=lambda other: self.log.append(f"wait for {other}"),
                synchronize=lambda: self.log.append("synchronize"),
            ),
            default_stream=lambda device: "default",
            stream=self._in_stream,
        )

    def device(self, name: str) -> str:
        return name

    @contextlib.contextmanager
    def _in_stream(self, stream: object) -> Iterator[None]:
        self.log.append("in")
        yield
        self.log.append("out")


class OnGpu(list[Any]):
    """An activation on a GPU."""

    is_cuda = True

    def __init__(self, values: Sequence[Any], log: list[str]) -> None:
        super().__init__(values)
        self.record_stream = lambda stream: log.append(f"used on {stream}")


def test_a_stage_is_done_on_its_stream_before_another_gets_what_it_made() -> None:
    torch = Streams()

    def stage(items: Any) -> Any:
        torch.log.append("stage")
        return OnGpu(items, torch.log)

    lanes = [CudaLane("cuda:0", torch), CudaLane("cuda:0", torch)]
    run = runner(StagedModel([stage, stage]), lanes=lanes).run
    pieces = run(0, [piece([1, 2])], device=0).pieces
    once = ["wait for default", "in", "stage", "out", "synchronize", "used on default"]
    assert torch.log == once
    assert run(1, pieces, device=1).results == [1, 2]
    assert torch.log == 2 * once


def test_a_stage_that_fails_is_waited_for_as_well() -> None:
    """What it was reading is given back to the allocator only then."""
    torch = Streams()

    def fail(items: Any) -> Any:
        raise ValueError("bad")

    run = runner(StagedModel([fail, *Keep]), lanes=[CudaLane("cuda:0", torch)]).run
    with pytest.raises(ValueError, match="bad"):
        run(0, [piece([1])])
    assert torch.log[-1] == "synchronize"
