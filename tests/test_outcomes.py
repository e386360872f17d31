"""What futures are told by a thread that serves everybody."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from trims_shim.outcomes import fail, settle


@pytest.mark.parametrize("error", [StopIteration(1), asyncio.CancelledError(), CancelledError()])
def test_errors_that_event_loops_take_for_their_own_are_told_as_others(
    error: BaseException,
) -> None:
    future: Future[Any] = Future()
    fail(future, error, "joining answers")
    told = future.exception(0)
    assert isinstance(told, RuntimeError)
    assert str(told) == f"joining answers raised {error!r}"
    assert told.__cause__ is error


def test_an_error_that_cannot_be_put_in_words_is_named() -> None:
    """Found: who waited for the future waited for ever."""

    class Unspeakable(StopIteration):
        def __repr__(self) -> str:
            raise ValueError

    future: Future[Any] = Future()
    fail(future, Unspeakable(), "joining answers")
    assert str(future.exception(0)) == "joining answers raised Unspeakable"


def test_other_errors_stay_what_they_are() -> None:
    future: Future[Any] = Future()
    error = SystemExit(3)
    fail(future, error, "a request")
    assert future.exception(0) is error


def test_a_callback_that_wants_to_exit_is_written_down(caplog: pytest.LogCaptureFixture) -> None:
    def leave(future: Future[Any]) -> None:
        raise SystemExit

    first: Future[Any] = Future()
    second: Future[Any] = Future()
    for future in (first, second):
        future.add_done_callback(leave)
    settle(first, 7)
    fail(second, KeyError("k"), "a request")
    assert first.result(0) == 7
    assert isinstance(second.exception(0), KeyError)
    assert caplog.messages == ["a callback of a future failed"] * 2
