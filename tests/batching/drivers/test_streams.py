"""Answers in pieces: generators of lists, from threads and event loops."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.batching.drivers.test_aio import run
from tests.batching.waiting import LONG_S, Endless, wait_until
from trims_shim.batching import Batcher
from trims_shim.batching.policies.window import Window
from trims_shim.errors import BadBatch

together = functools.partial(
    Batcher, policy=functools.partial(Window, wait_ms=1e6), max_batch_size=2
)


def count(items: list[int]) -> Iterator[list[Any]]:
    """As many pieces as the item says."""
    for step in range(max(items)):
        yield [step if step < item else StopIteration for item in items]


async def acount(items: list[int]) -> AsyncIterator[list[Any]]:
    for step in range(max(items)):
        yield [step if step < item else StopAsyncIteration() for item in items]


both = pytest.mark.parametrize("function", [count, acount])


@both
def test_each_item_has_its_own_end(function: Any) -> None:
    with together(function) as batcher:
        other = batcher.submit(2)
        assert list(batcher.stream(5)) == [0, 1, 2, 3, 4]
        assert other.result(LONG_S) == [0, 1]
        batcher.drain(LONG_S)  # what has been answered is counted a moment later
        assert batcher.stats().batch_sizes == {2: 1}


@pytest.mark.parametrize("end", [lambda pieces: pieces.close(), lambda pieces: None])
def test_a_stream_that_nobody_begins_to_read_is_given_up(end: Any) -> None:
    endless = Endless()
    batcher = Batcher(endless, policy="immediate")
    pieces = batcher.stream(1)
    assert endless.begun.wait(LONG_S)  # else it would never begin
    end(pieces)
    del pieces
    assert endless.ended.wait(LONG_S)
    batcher.close(timeout_s=LONG_S)


@both
def test_pieces_come_while_the_batch_runs_to_event_loops_too(function: Any) -> None:
    async def main() -> None:
        async def collect(item: int) -> list[Any]:
            return [piece async for piece in batcher.astream(item)]

        assert await asyncio.gather(collect(3), collect(2)) == [[0, 1, 2], [0, 1]]
        assert await asyncio.gather(batcher.aio(2), collect(2)) == [[0, 1], [0, 1]]

    batcher = together(function)
    run(main())
    batcher.close()


def test_an_event_loop_goes_on_while_it_waits_for_each_piece() -> None:
    ended = asyncio.Event()

    async def slow(items: list[int]) -> AsyncIterator[list[int]]:
        try:
            while True:
                for _ in range(3):
                    await asyncio.sleep(0)
                yield items
        finally:
            ended.set()

    async def main() -> None:
        pieces = batcher.astream(7)
        assert [await anext(pieces) for _ in range(3)] == [7, 7, 7]
        await pieces.aclose()
        await asyncio.wait_for(ended.wait(), LONG_S)

    batcher = together(slow, max_batch_size=1)
    run(main())
    batcher.close(timeout_s=LONG_S)


def test_a_piece_is_there_before_the_next_one_is_made() -> None:
    may_go = threading.Semaphore(0)

    def slow(items: list[int]) -> Iterator[list[int]]:
        for step in range(3):
            assert may_go.acquire(timeout=LONG_S)
            yield [step] * len(items)

    with Batcher(slow, policy="immediate") as batcher:
        pieces = batcher.stream(0)
        for step in range(3):
            may_go.release()
            assert next(pieces) == step
        assert list(pieces) == []


def test_who_stops_listening_stops_nobody_else_and_the_last_one_the_generator() -> None:
    closed = threading.Event()
    steps = []

    def endless(items: list[int]) -> Iterator[list[int]]:
        try:
            while True:
                steps.append(1)
                yield [len(steps)] * len(items)
        finally:
            closed.set()

    with together(endless) as batcher:
        first, second = batcher.stream(0), batcher.stream(0)
        assert next(first) == 1
        first.close()
        assert [next(second) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert not closed.is_set()
        second.close()
        assert closed.wait(LONG_S)
        batcher.drain(LONG_S)


def test_a_failure_before_the_first_piece_is_isolated() -> None:
    def picky(items: list[int]) -> Iterator[list[int]]:
        if 13 in items:
            raise ValueError("thirteen")
        yield items

    with together(picky) as batcher:
        good, bad = batcher.submit(1), batcher.submit(13)
        assert good.result(LONG_S) == [1]
        assert isinstance(bad.exception(LONG_S), ValueError)


def test_a_failure_after_it_is_everybodys_and_an_exception_as_piece_ones_own() -> None:
    runs = []

    def breaks(items: list[int]) -> Iterator[list[Any]]:
        runs.append(items)
        yield [KeyError("own") if item == 13 else 1 for item in items]
        raise ValueError("all")

    with together(breaks) as batcher:
        own = batcher.submit(13)
        pieces = batcher.stream(1)
        assert next(pieces) == 1
        assert isinstance(own.exception(LONG_S), KeyError)
        with pytest.raises(ValueError, match="all"):
            next(pieces)
        batcher.drain(LONG_S)
        assert batcher.stats().failed == 2
    assert len(runs) == 1


def test_an_item_that_has_failed_gets_no_further_pieces() -> None:
    def goes_on(items: list[int]) -> Iterator[list[Any]]:
        yield [KeyError("own") if item == 13 else 1 for item in items]
        yield [2 for _ in items]

    with together(goes_on) as batcher:
        own, other = batcher.submit(13), batcher.submit(1)
        assert isinstance(own.exception(LONG_S), KeyError)
        assert other.result(LONG_S) == [1, 2]
        batcher.drain(LONG_S)
        assert (batcher.stats().failed, batcher.stats().answered) == (1, 1)


def test_a_list_of_another_length_names_the_function() -> None:
    def short(items: list[int]) -> Iterator[list[int]]:
        yield items[1:]

    with Batcher(short, policy="immediate") as batcher, pytest.raises(BadBatch, match="short"):
        list(batcher.stream(1))


def test_functions_that_do_not_stream_have_one_piece() -> None:
    async def main() -> list[Any]:
        return [piece async for piece in batcher.astream(2)]

    with Batcher(lambda items: items, policy="immediate") as batcher:
        assert list(batcher.stream(1)) == [1]
        assert run(main()) == [2]


def test_pieces_are_not_waited_for_in_the_middle_of_a_batch() -> None:
    """They come after it."""
    may_read = threading.Event()

    def reading(items: list[int]) -> Iterator[list[Any]]:
        if items == [1]:
            assert may_read.wait(LONG_S)
            yield [next(pieces)]
        yield items

    batcher = Batcher(reading, policy="immediate", max_batch_size=1)
    reader = batcher.submit(1)
    pieces = batcher.stream(2)
    may_read.set()
    assert "this thread runs a batch" in str(reader.exception(LONG_S))
    batcher.close(timeout_s=LONG_S)


def test_a_stream_that_is_never_read_is_given_up() -> None:
    with together(count) as batcher:
        pieces = batcher.stream(3)
        wait_until(lambda: batcher.stats().queued == 1)
        next_one = batcher.submit(1)
        del pieces
        assert next_one.result(LONG_S) == [0]
