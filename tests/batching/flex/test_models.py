"""Models in stages: what is accepted as one, and how a batch goes through."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trims_shim.batching.drivers.lanes import CpuLane
from trims_shim.batching.drivers.replies import BlockedCall, Entry, Failure
from trims_shim.batching.flex.exit_points import ExitPoints
from trims_shim.batching.flex.models import FlexFunctions, staged_on
from trims_shim.batching.staged import EarlyExit, Loop, StagedModel


def double(values: list[int]) -> list[int]:
    return [2 * value for value in values]


def fail_at_13(values: list[int]) -> list[int]:
    if 13 in values:
        raise LookupError("13")
    return values


async def later(values: list[int]) -> list[int]:
    return values


def entries(*values: Any, model: str = "m") -> list[Entry]:
    return [Entry((value,), BlockedCall(), 0, model) for value in values]


def functions(model: Any, **options: Any) -> FlexFunctions:
    return FlexFunctions(
        {"m": model},
        **{
            "devices": ["cpu"],
            "lanes": [CpuLane(), CpuLane()],
            "collate": "list",
            "isolate_failures": True,
            "name": "test",
            **options,
        },
    )


def run(staged: FlexFunctions, *values: Any, given_up: bool = False, device: int = 0) -> Any:
    points = ExitPoints(lambda: given_up, CpuLane(), lambda: 0)
    return staged.run_staged(entries(*values), device, points)


def test_stages_run_in_their_order() -> None:
    staged = functions([double, lambda values: [value + 1 for value in values]])
    assert run(staged, 1, 2) == [3, 5]
    assert staged.run(entries(1, 2)) == [3, 5]


def test_rows_that_leave_early_are_answered_with_the_others() -> None:
    def odd_leave(values: list[int]) -> EarlyExit:
        even = [value for value in values if value % 2 == 0]
        odd = [value for value in values if value % 2]
        return EarlyExit([value % 2 == 1 for value in values], odd, even)

    staged = functions(StagedModel([odd_leave, double]))
    for values, expected in (([1, 2, 3, 4], [1, 4, 3, 8]), ([1, 3], [1, 3])):
        assert run(staged, *values) == expected
        assert staged.run(entries(*values)) == expected


def test_a_sequential_is_its_children_and_gives_the_same() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    staged = functions(model, collate="auto")
    assert staged.number_of_stages("m") == 3
    rows = torch.randn(5, 4)
    with torch.inference_mode():
        results = run(staged, *rows)
    assert torch.equal(torch.stack(results), model(rows).detach())


def test_one_module_or_function_is_one_stage() -> None:
    assert functions(double).number_of_stages("m") == 1
    assert functions(torch.nn.Linear(2, 2)).number_of_stages("m") == 1


def test_a_batch_that_is_given_up_has_no_results_and_runs_no_further() -> None:
    ran = []
    staged = functions([double, ran.append])
    assert run(staged, 1, given_up=True) is None
    assert ran == []


class Logging(CpuLane):
    """Writes down when it was waited for."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def stage_done(self) -> None:
        self.log.append("stage")

    def finish(self, results: object = None) -> None:
        self.log.append(("finish", results))


@pytest.mark.parametrize(
    ("given_up", "expected"),
    [(False, ["stage", ("finish", [4])]), (True, ["stage", ("finish", None)])],
)
def test_the_device_is_waited_for_also_when_a_batch_is_given_up(
    given_up: bool, expected: list[object]
) -> None:
    """Until then it is not free."""
    lane = Logging()
    points = ExitPoints(lambda: given_up, lane, lambda: 0)
    functions([double, double], lanes=[lane]).run_staged(entries(1), 0, points)
    assert lane.log == expected


def test_each_device_has_its_own_lane() -> None:
    lanes = [Logging(), Logging()]
    staged = functions([double], devices=["cpu", "cpu"], lanes=lanes)
    assert run(staged, 1, device=1) == [2]
    assert [lane.log for lane in lanes] == [[], [("finish", [2])]]


def test_a_device_is_waited_for_without_exit_points_too() -> None:
    lane = Logging()
    functions([double], lanes=[lane]).run(entries(1))
    assert lane.log == [("finish", [2])]
    points = ExitPoints(lambda: False, lane, lambda: 0)
    results = functions([fail_at_13], lanes=[lane]).run_staged(entries(1, 13), 0, points)
    assert lane.log[1:] == [("finish", results)]


class Entering(CpuLane):
    """Knows whether it is entered."""

    is_entered = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        self.is_entered = True
        try:
            yield
        finally:
            self.is_entered = False


def test_stages_run_nowhere_but_on_their_lane() -> None:
    """On another stream of a GPU nobody would wait for them."""
    lane, entered = Entering(), []

    def stage(values: list[int]) -> list[int]:
        entered.append(lane.is_entered)
        return fail_at_13(values)

    staged = functions([stage], lanes=[lane])
    staged.run(entries(1))
    staged.run_staged(entries(1, 13), 0, ExitPoints(lambda: False, lane, lambda: 0))
    assert entered == [True] * 4  # alone, both, and each half


def test_a_model_in_one_stage_is_never_given_up() -> None:
    assert run(functions([double]), 1, given_up=True) == [2]


def test_an_item_that_fails_fails_alone() -> None:
    first, second, third = run(functions([double, fail_at_13]), 1, 6.5, 3)
    assert (first, third) == (2, 6)
    assert isinstance(second, Failure)
    assert isinstance(second.error, LookupError)


def test_without_isolation_all_fail() -> None:
    results = run(functions([fail_at_13], isolate_failures=False), 1, 13)
    assert [type(each) for each in results] == [Failure] * 2


def test_a_wrong_number_of_results_is_said_to_be_the_models() -> None:
    runs: list[list[int]] = []
    staged = functions([lambda values: [runs.append(values), 2]])
    for values in ([1], [1, 2, 3, 4]):  # two halves would get results of other items
        found = run(staged, *values)
        assert ["m returned 2 results" in str(each.error) for each in found] == [True] * len(values)
    assert runs == [[1], [1, 2, 3, 4]]


def test_each_device_may_have_a_copy_of_its_own() -> None:
    staged = functions({"cpu": [double], "cpu:1": [sorted]}, devices=["cpu", "cpu:1"])
    assert run(staged, 2, 1) == [4, 2]
    assert run(staged, 2, 1, device=1) == [1, 2]
    with pytest.raises(ValueError, match="no stages for cpu:2; it has cpu"):
        functions({"cpu": [double]}, devices=["cpu:2"])


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ([], ValueError, "at least one stage"),
        ([double, 3], TypeError, "3 is no stage"),
        ([later], TypeError, "asynchronous"),
        (StagedModel([double, Loop(double)]), TypeError, "a Loop cannot start anew"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        staged_on("cpu", model)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ([], ValueError, "model 'm': a model needs at least one stage"),
        ("bad.pt", TypeError, "model 'm': 'bad.pt' is no stage"),
        ({"cuda:0": [double]}, ValueError, "model 'm': a model has no stages for cpu"),
    ],
)
def test_the_model_that_is_none_is_named(model: Any, error: type[Exception], message: str) -> None:
    """Found: of several models nobody could tell which; text was taken for stages, by letters."""
    with pytest.raises(error, match=message):
        functions(model)


def test_no_models_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        FlexFunctions(
            {}, devices=["cpu"], lanes=[], collate="auto", isolate_failures=True, name="x"
        )


def test_a_time_limit_is_no_failure_of_an_item() -> None:
    """As Celery's: what a signal handler raises is the thread's."""
    runs = []

    def limit(number: int, frame: Any) -> None:
        raise LookupError("late")

    def stage(values: list[int]) -> list[int]:
        runs.append(values)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return values

    old = signal.signal(signal.SIGINT, limit)
    try:
        with pytest.raises(LookupError, match="late"):
            run(functions([stage]), 1, 2)
    finally:
        signal.signal(signal.SIGINT, old)
    assert runs == [[1, 2]]
