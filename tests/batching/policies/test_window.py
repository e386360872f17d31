"""Size and timeout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.checking import Checked, ms
from batching.policies.instances import Instance, instances, run
from trims_shim.batching.policies import Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=3)


def log_of(*requests: Request, **options: Any) -> list[Any]:
    return run(partial(Window, **options), Instance(requests, PROFILE)).log


def test_the_oldest_request_waits_ten_milliseconds() -> None:
    log = log_of(Request(0, ms(5), ms(6)), Request(1, ms(14), ms(20)))
    assert log == [(ms(15), "run", (0, 1))]


def test_the_oldest_need_not_be_the_first() -> None:
    """Request 1 has to be answered sooner, and came later."""
    log = log_of(Request(0, ms(5), ms(90)), Request(1, ms(9), ms(60)), wait_ms=7)
    assert log == [(ms(12), "run", (1, 0))]


def test_a_full_batch_does_not_wait() -> None:
    log = log_of(*(Request(number, ms(number), ms(9)) for number in range(3)), wait_ms=50)
    assert log == [(ms(2), "run", (0, 1, 2))]


def test_what_waited_while_the_device_was_busy_waits_no_more() -> None:
    log = log_of(Request(0, 0), Request(1, ms(1)), Request(2, ms(2)), wait_ms=0)
    assert log == [(0, "run", (0,)), (ms(22), "run", (1, 2))]


def test_weights_fill_a_batch() -> None:
    requests = tuple(Request(number, ms(number), weight=2) for number in range(2))
    instance = Instance(requests, PROFILE, max_weight=4)
    assert run(Window, instance).log == [(ms(1), "run", (0, 1))]


@given(instance=instances(devices=2, keys="ab", priorities=2), wait_ms=st.integers(0, 30))
def test_no_request_waits_longer_while_a_device_idles(instance: Instance, wait_ms: int) -> None:
    def observe(now_ns: int, policy: Checked, actions: Any) -> None:
        if policy.free and policy.queued:
            wake_ns = policy.next_deadline_ns()
            assert wake_ns is not None
            oldest_ns = min(each.arrival_ns for each in policy.queued.values())
            assert wake_ns <= oldest_ns + ms(wait_ms)

    run(partial(Window, wait_ms=wait_ms), instance, observe=observe)


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_wait_is_not_below_nothing(wrong: float) -> None:
    with pytest.raises(ValueError, match="wait_ms"):
        Window(PROFILE, max_batch_size=3, wait_ms=wrong)
