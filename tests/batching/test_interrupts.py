"""A caller is interrupted after any step of a request; the requests of others are answered.

As by Ctrl-C, or a time limit whose signal handler raises: Python runs handlers when a function
begins and when one that is written in C has returned, and so does a profile function.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.batching.waiting import LONG_S, join, start
from trims_shim.batching import Batcher
from trims_shim.batching.policies.window import Window

Futures = list[concurrent.futures.Future[Any]]


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


def interrupted(step: int, request: Callable[[], object]) -> str | None:
    """Where it was interrupted; None if it came to its end before."""
    steps = itertools.count()
    place: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        # An interrupt there leaves the lock taken on Python 3.14 (python/cpython#148874).
        is_step = event in ("call", "c_return") and getattr(arg, "__name__", "") != "__enter__"
        if is_step and next(steps) == step:
            sys.setprofile(None)
            place.append(f"{event} {frame.f_code.co_filename}:{frame.f_lineno} {arg}")
            raise Interrupt

    gc.disable()  # finalizers of what other tests have left are no steps of this
    sys.setprofile(profile)
    try:
        request()
    except (Interrupt, RuntimeError):  # threading makes one of it when it comes in Condition.wait()
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return place[0] if place else None


@contextlib.contextmanager
def needs_a_thread() -> Iterator[None]:
    """It does, and may be told that there is none: threading's RuntimeError, as above."""
    try:
        yield
    except RuntimeError as error:
        if "needs a thread" not in str(error):
            raise


def calls(batcher: Batcher, others: Futures) -> None:
    batcher(5)


def submits(batcher: Batcher, others: Futures) -> None:
    batcher.submit(5).result(LONG_S)


def cancels(batcher: Batcher, others: Futures) -> None:
    if others:
        others.pop().cancel()


def maps(batcher: Batcher, others: Futures) -> None:
    assert list(batcher.map(range(3))) == [0, 2, 4]


def drains(batcher: Batcher, others: Futures) -> None:
    batcher.drain(LONG_S)


@pytest.mark.parametrize("queue_size", [2, 9])
@pytest.mark.parametrize("use", [calls, submits, cancels, maps, drains])
def test_an_interrupt_after_any_step_loses_nobody_elses_request(
    use: Callable[[Batcher, Futures], None], queue_size: int
) -> None:
    stride = 3 if use in (calls, maps) else 1
    reached = 0
    for step in range(queue_size % stride, 120 * stride, stride):
        batcher = Batcher(
            lambda items: [item * 2 for item in items],
            policy=functools.partial(Window, wait_ms=1),
            max_batch_size=4,
            queue_size=queue_size,
            name="function",
        )
        others: Futures = [batcher.submit(item) for item in range(2)]
        place = interrupted(step, functools.partial(use, batcher, others))
        for item, other in enumerate(others):
            with needs_a_thread():
                assert other.result(LONG_S) == item * 2, place
        found: list[int] = []
        join(start(functools.partial(_ask, batcher, found)))
        assert found == [8] * (queue_size + 1), place
        batcher.drain(LONG_S)
        batcher.close(timeout_s=LONG_S)
        reached += place is not None
    assert reached > 20


def _ask(batcher: Batcher, found: list[int]) -> None:
    found += batcher.map([4] * (batcher._engine.options.queue_size + 1))
