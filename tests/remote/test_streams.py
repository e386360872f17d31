"""Answers come in the order of the questions, some of which are asked at the same time."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from trims_shim.remote.streams import STREAMS, in_order


def test_the_first_answer_is_given_when_all_streams_are_taken() -> None:
    begun: list[int] = []
    answers = in_order(partial(begun.append, number) for number in range(3 * STREAMS))
    assert begun == [], "nothing is asked before an answer is wanted"
    for given in range(1, 3 * STREAMS + 1):
        next(answers).result(30)
        assert len(begun) <= given + STREAMS - 1
    assert sorted(begun) == list(range(3 * STREAMS))
    assert next(answers, None) is None


def test_the_order_is_that_of_the_questions() -> None:
    gates = [threading.Event() for _ in range(STREAMS)]

    def late(number: int) -> int:
        assert gates[number].wait(30)
        if number:
            gates[number - 1].set()
        return number

    gates[-1].set()
    calls = [partial(late, number) for number in range(STREAMS)]
    assert [answer.result(30) for answer in in_order(calls)] == list(range(STREAMS))


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
def test_an_error_is_raised_where_the_answer_is_waited_for(error: BaseException) -> None:
    """Of whatever kind: who waits would do so for good."""

    def fail() -> None:
        raise error

    failed, fine = in_order([fail, lambda: None])
    with pytest.raises(type(error)) as raised:
        failed.result(30)
    assert raised.value is error
    assert fine.result(30) is None


def test_no_exit_waits_for_an_answer() -> None:
    """Of a server that says nothing, it would come much later."""
    (answer,) = in_order([lambda: threading.current_thread().daemon])
    assert answer.result(30)
