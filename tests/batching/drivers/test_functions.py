"""Joining, splitting and halving, without threads."""

from __future__ import annotations

import asyncio
import functools
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.replies import BatchFuture, Entry, Failure
from trims_shim.errors import BadBatch


def make(function: Any, **options: Any) -> BatchFunction:
    defaults: dict[str, Any] = {"collate": "list", "isolate_failures": True}
    return BatchFunction(function, name="function", **{**defaults, **options})


def entries(*items: Any, owner: object = None) -> list[Entry]:
    found = [item if isinstance(item, tuple) else (item,) for item in items]
    return [Entry(arguments, BatchFuture(), 0, owner) for arguments in found]


class Picky:
    """Fails for batches with a 13; remembers what it was called with."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        if 13 in items:
            raise ValueError(f"thirteen among {len(items)}")
        return [2 * item for item in items]

    async def later(self, items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return self(items)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("items", [[1], [13], [13, 1], [1, 2, 13, 4, 5], [13, 13, 1, 13]])
def test_each_failing_item_is_alone_at_last(items: list[int], is_async: bool) -> None:
    picky = Picky()
    if is_async:
        function = make(picky.later)
        found = asyncio.run(function.arun(entries(*items)))
    else:
        function = make(picky)
        found = function.run(entries(*items))
    for item, result in zip(items, found, strict=True):
        if item == 13:
            assert isinstance(result, Failure)
            assert str(result.error) == "thirteen among 1"
        else:
            assert result == 2 * item
    assert len(picky.batches) <= max(1, 2 * len(items) - 1)


def test_the_whole_batch_fails_when_failures_are_not_isolated() -> None:
    picky = Picky()
    found = make(picky, isolate_failures=False).run(entries(1, 13))
    assert [type(each) for each in found] == [Failure] * 2
    assert len(picky.batches) == 1


def test_a_wrong_number_of_results_is_the_functions_fault() -> None:
    calls = []
    found = make(lambda items: calls.append(items) or [1]).run(entries(1, 2))
    assert [type(each.error) for each in found] == [BadBatch] * 2
    assert "function" in str(found[0].error)
    assert len(calls) == 1


def test_arguments_and_owners() -> None:
    class Owner:
        pass

    owner = Owner()
    seen: list[Any] = []

    def function(self: Owner, firsts: list[int], seconds: list[int]) -> list[int]:
        seen.append(self)
        return [first + second for first, second in zip(firsts, seconds, strict=True)]

    each = make(function, takes_owner=True)
    assert each.run(entries((1, 2), (3, 4), owner=owner)) == [3, 7]
    assert seen == [owner]


def test_keys_tell_numbers_of_arguments_apart() -> None:
    function = make(lambda *batches: batches[0])
    keys = {function.key((1,)), function.key((1, 2)), function.key((1, 2, 3))}
    assert len(keys) == 3
    assert function.key((1, 2)) == function.key((5, 6))


async def coroutine(items: list[int]) -> list[int]:
    return items


async def asynchronous_generator(items: list[int]) -> Any:
    yield items


def generator(items: list[int]) -> Any:
    yield items


class Awaited:
    async def __call__(self, items: list[int]) -> list[int]:
        return items


@pytest.mark.parametrize(
    ("function", "is_async", "is_streaming"),
    [
        (Picky(), False, False),
        (coroutine, True, False),
        (asynchronous_generator, True, True),
        (generator, False, True),
        (Awaited(), True, False),
        (functools.partial(coroutine), True, False),
        (functools.partial(Awaited()), True, False),
        (Awaited().__call__, True, False),
        (AsyncMock(), True, False),
        (functools.partial(AsyncMock()), True, False),
        (Mock(), False, False),
        (len, False, False),
    ],
)
def test_kinds_of_functions(function: Any, is_async: bool, is_streaming: bool) -> None:
    each = make(function)
    assert each.is_async == is_async
    assert (each.is_generator or each.is_async_generator) == is_streaming
