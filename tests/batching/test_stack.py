"""A caller whose stack is nearly full fails alone."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.batching.waiting import LONG_S
from trims_shim.batching import Batcher
from trims_shim.batching.flex.batcher import FlexBatcher
from trims_shim.batching.policies.window import Window
from trims_shim.batching.staged import StagedModel
from trims_shim.stack import check_stack

_LIMIT = 1000


@pytest.fixture(autouse=True)
def limit() -> Any:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(_LIMIT)
    yield
    sys.setrecursionlimit(before)


def with_left(calls: int, function: Callable[[], Any]) -> Any:
    """Call it where so many calls are left."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]

    def down(more: int) -> Any:
        return down(more - 1) if more > 0 else function()

    return down(_LIMIT - depth - calls)


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def plain() -> Batcher:
    waiting = functools.partial(Window, wait_ms=1)
    return Batcher(double, policy=waiting, max_batch_size=4, collate="list")


def staged() -> Batcher:
    return Batcher(StagedModel([list, double, list]), max_batch_size=4, collate="list")


class _Flex(FlexBatcher):
    """Of one model, so that it is called as the others are."""

    def submit(self, *args: Any, **options: Any) -> Any:
        return super().submit("model", *args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return super().__call__("model", *args, **options)


def flex() -> Batcher:
    return _Flex({"model": [list, double]}, max_batch_size=4, collate="list")


def test_how_much_is_left() -> None:
    assert check_stack()
    assert not with_left(_LIMIT // 2, check_stack)
    with pytest.raises(RecursionError):
        with_left(20, check_stack)


@pytest.mark.parametrize("use", ["call", "submit", "cancel", "drain", "close", "update"])
@pytest.mark.parametrize("make", [plain, staged, flex])
def test_a_caller_without_stack_loses_nobody_elses_request(
    make: Callable[[], Batcher], use: str
) -> None:
    raised = 0
    for left in range(5, 40, 2):
        batcher = make()
        futures = [batcher.submit(item) for item in range(2)]
        doing: dict[str, Callable[[], object]] = {
            "call": functools.partial(batcher, 5),
            "submit": functools.partial(batcher.submit, 5),
            "cancel": batcher.submit(7).cancel,
            "drain": batcher.drain,
            "close": batcher.close,
            "update": functools.partial(batcher.update, max_batch_size=3),
        }
        try:
            with_left(left, doing[use])
        except RecursionError:
            raised += 1
        assert [future.result(LONG_S) for future in futures] == [0, 2], left
        if use != "close":
            assert batcher.submit(4).result(LONG_S) == 8
        batcher.drain(LONG_S)
        batcher.close(timeout_s=LONG_S)
    assert raised > 5


def test_a_future_is_cancelled_altogether_or_not_at_all() -> None:
    raised = 0
    with Batcher(double, policy=functools.partial(Window, wait_ms=1e6), collate="list") as batcher:
        for left in range(30, 90):
            future = batcher.submit(1)
            try:
                assert with_left(left, future.cancel)
            except RecursionError:
                raised += 1
                assert not future.done()
                assert batcher.stats().queued == 1
                assert future.cancel()
            assert batcher.stats().queued == 0
    assert 20 < raised < 60


def test_a_batch_runs_on_no_stack_that_is_half_full() -> None:
    ran_in: list[int] = []

    def function(items: list[int]) -> list[int]:
        ran_in.append(threading.get_ident())
        return items

    with Batcher(function, collate="list") as batcher:
        assert batcher(1) == 1
        assert with_left(_LIMIT // 2, functools.partial(batcher, 2)) == 2
    me = threading.get_ident()
    assert ran_in[0] == me != ran_in[1]
