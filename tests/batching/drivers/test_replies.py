"""Futures and seats: what others do to them is no reason to lose anything."""

from __future__ import annotations

import concurrent.futures
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest

from tests.batching.waiting import LONG_S, join, start, wait_until
from trims_shim.batching.drivers.replies import (
    BatchFuture,
    BlockedCall,
    Entry,
    Failure,
    Seat,
    deliver,
)
from trims_shim.batching.drivers.streams import StreamReply
from trims_shim.errors import BatchingError


@pytest.mark.parametrize("end", ["cancel", "set_result", "set_exception"])
def test_a_future_that_somebody_else_has_ended_takes_no_answer_and_raises_nothing(
    end: str,
) -> None:
    future = BatchFuture()
    if end == "cancel":
        assert future.cancel()
    elif end == "set_result":
        future.set_result("theirs")
    else:
        future.set_exception(KeyError("theirs"))
    assert not future.begin()
    future.answer("ours")
    future.fail(ValueError("ours"))
    if end == "set_result":
        assert future.result(0) == "theirs"
    elif end == "set_exception":
        assert isinstance(future.exception(0), KeyError)
    else:
        assert future.cancelled()


def test_a_cancelled_future_is_done_for_those_who_wait_for_several() -> None:
    future = BatchFuture()
    found: list[set[object]] = []
    waiter = start(lambda: found.append(concurrent.futures.wait([future], LONG_S).done))
    assert future.cancel()
    join(waiter)
    assert found == [{future}]
    assert list(concurrent.futures.as_completed([future], LONG_S)) == [future]


@pytest.mark.parametrize("get", [BatchFuture.result, BatchFuture.exception])
def test_who_waits_holds_nothing_at_any_step(get: Callable[..., Any]) -> None:
    """A signal handler may come between any two, and wait for another answer of the same batch."""
    future = BatchFuture()
    has_condition: list[bool] = []

    def profile(*_: Any) -> None:
        has_condition.append(future._condition._is_owned())  # type: ignore[attr-defined]

    sys.setprofile(profile)
    try:
        with pytest.raises(futures.TimeoutError):
            get(future, 0.001)
    finally:
        sys.setprofile(None)
    assert len(has_condition) > 5
    assert not any(has_condition)


@pytest.mark.parametrize("error", [None, ValueError()])
def test_those_that_an_interrupted_thread_has_not_told_are_told(error: ValueError | None) -> None:
    future, other = BatchFuture(), BatchFuture()
    until = futures.FIRST_COMPLETED if error is None else futures.FIRST_EXCEPTION
    done: list[Any] = []
    waiting = [
        start(lambda: done.extend(futures.wait([future, other], LONG_S, until).done)),
        start(lambda: done.append(future.exception(LONG_S))),
    ]
    wait_until(lambda: bool(other._waiters and future._sleepers))  # type: ignore[attr-defined]
    called: list[Any] = []
    future.add_done_callback(called.append)
    future._exception, future._state = error, "FINISHED"  # as in the middle of set_result()
    future.answer(1)
    join(*waiting)
    assert called == [future]
    assert len(done) == 2
    assert future in done
    assert error in done
    other.fail(ValueError())
    assert other._dispatch is None


def test_who_waits_while_its_signal_handler_forks_is_told_in_the_child() -> None:
    future = BatchFuture()
    found: list[Any] = []
    waiting = start(lambda: found.append(future.exception(LONG_S)))
    wait_until(lambda: bool(future._sleepers))
    future.orphan()
    join(waiting)
    assert isinstance(found[0], BatchingError)


def test_a_running_future_cannot_be_cancelled_and_begins_again_after_an_interrupt() -> None:
    future = BatchFuture()
    assert future.begin()
    assert future.begin()
    assert not future.cancel()
    assert future.running()
    future.requeue()
    assert future.cancel()


def test_an_answer_may_be_waited_for_longer_than_any_thread_can_sleep() -> None:
    future = BatchFuture()
    found: list[Any] = []
    waiting = start(lambda: found.append(future.result(1e300)))
    wait_until(lambda: bool(future._sleepers) or not waiting.is_alive())
    future.answer(5)
    join(waiting)
    assert found == [5]


def test_who_asks_again_and_again_leaves_nothing_in_the_future() -> None:
    future = BatchFuture()
    for _ in range(3):
        with pytest.raises(futures.TimeoutError):
            future.result(0)
    assert not future._sleepers


def test_a_failing_callback_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    future = BatchFuture()
    called: list[object] = []
    future.add_done_callback(lambda _: 1 / 0)  # type: ignore[arg-type]
    future.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        future.answer(5)
    assert called == [future]
    assert "ZeroDivisionError" in caplog.text


def test_delivering_results_and_failures() -> None:
    futures = [BatchFuture() for _ in range(3)]
    deliver(futures[0], 5)
    deliver(futures[1], Failure(KeyError()))
    deliver(futures[2], ValueError())
    assert futures[0].result(0) == 5
    assert isinstance(futures[1].exception(0), KeyError)
    assert isinstance(futures[2].exception(0), ValueError)


def test_a_seat_is_woken_whenever_it_was_told_to() -> None:
    seat = Seat()
    seat.wake()
    seat.wake()  # a second one before it sleeps is the same one
    assert seat.sleep(0)
    assert not seat.sleep(0)
    woken = threading.Event()
    sleeper = start(lambda: (seat.sleep(), woken.set()))
    seat.wake()
    assert woken.wait(LONG_S)
    join(sleeper)


def test_a_blocked_call_raises_its_error_and_keeps_nothing() -> None:
    call = BlockedCall()
    assert call.begin()
    call.fail(KeyError("its own"))
    assert call.is_done
    with pytest.raises(KeyError, match="its own"):
        call.take()
    assert call._failure is None
    call.is_abandoned = True
    assert not call.begin()


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (BlockedCall, BlockedCall.take),
        (BatchFuture, BatchFuture.result),
        (StreamReply, StreamReply.get),
    ],
    ids=["call", "future", "stream"],
)
def test_callers_that_share_an_error_do_not_see_each_others_frames(
    make: Callable[[], Any], get: Callable[[Any], object]
) -> None:
    """Found: of 32 callers the last one's traceback had 130 entries."""

    def failing() -> None:
        raise KeyError("of the batch")

    replies = [make() for _ in range(5)]
    with pytest.raises(KeyError) as caught:
        failing()
    for reply in replies:
        reply.fail(caught.value)
    shown = []
    for reply in replies:
        with pytest.raises(KeyError, match="of the batch") as caught:
            get(reply)
        shown.append(traceback.format_exception(caught.value))
    assert "in failing" in "".join(shown[0])
    assert shown == [shown[0]] * 5


def test_a_gate_is_opened_once() -> None:
    entry = Entry((1,), BatchFuture(), 0, None)
    entry.open_gate()
    entry.gate = threading.Lock()
    entry.gate.acquire()
    gate = entry.gate
    entry.open_gate()
    entry.open_gate()
    assert not gate.locked()
