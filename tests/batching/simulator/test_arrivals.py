"""Arrival processes have the rate and the variation that they are asked for, and keep to a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from statistics import fmean, pstdev, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.protocol import NEVER_NS
from trims_shim.batching.simulator import bursty, gamma, merged, poisson, requests, uniform

S = 1_000_000_000
PROCESSES: dict[str, Callable[[float, Random], Iterator[int]]] = {
    "uniform": lambda rate, random: uniform(rate),
    "poisson": poisson,
    "regular gamma": lambda rate, random: gamma(rate, 0.5, random),
    "gamma": lambda rate, random: gamma(rate, 4, random),
    "bursty": bursty,
}


def gaps_s(times_ns: list[int]) -> list[float]:
    return [(b - a) / S for a, b in zip([0, *times_ns], times_ns, strict=False)]


@pytest.mark.parametrize("name", PROCESSES)
def test_times_ascend_and_are_those_of_the_seed(name: str) -> None:
    first, again, other = (
        list(islice(PROCESSES[name](50, Random(seed)), 500)) for seed in (1, 1, 2)
    )
    assert first == again == sorted(first)
    assert (first == other) == (name == "uniform")
    assert all(type(each) is int and each >= 0 for each in first)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_rate_is_kept(name: str) -> None:
    times_ns = list(islice(PROCESSES[name](50, Random(3)), 40_000))
    tolerance = {"gamma": 0.08, "bursty": 0.08}.get(name, 0.02)
    assert 40_000 / (times_ns[-1] / S) == pytest.approx(50, rel=tolerance)


@pytest.mark.parametrize("cv", [0.5, 1, 2, 4])
def test_gamma_gaps_vary_as_asked(cv: float) -> None:
    gaps = gaps_s(list(islice(gamma(100, cv, Random(4)), 60_000)))
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_poisson_and_uniform_gaps() -> None:
    exponential = gaps_s(list(islice(poisson(100, Random(4)), 60_000)))
    assert pstdev(exponential) / fmean(exponential) == pytest.approx(1, rel=0.02)
    assert list(islice(uniform(3), 3)) == [333_333_333, 666_666_667, S]


def test_bursts_hold_the_share_of_requests_that_their_rate_says() -> None:
    times_ns = list(islice(bursty(100, Random(6), peak=4, share=0.2, burst_s=2), 60_000))
    counts = [0] * (times_ns[-1] // S + 1)
    for time_ns in times_ns:
        counts[time_ns // S] += 1
    crowded = sum(count for count in counts if count > 200)
    assert crowded / sum(counts) == pytest.approx(0.8, abs=0.1)
    assert pvariance(counts) / fmean(counts) > 50  # of Poisson arrivals: 1


def test_between_bursts_there_may_be_nothing() -> None:
    times_ns = list(islice(bursty(100, Random(6), peak=5, share=0.2), 5000))
    assert 5000 / (times_ns[-1] / S) == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize("make", [uniform, lambda qps: poisson(qps, Random(1))])
def test_what_hardly_ever_comes_does_not_come(make: Callable[[float], Iterator[int]]) -> None:
    """In 1e300 seconds and more: nanoseconds that no number can hold."""
    assert not list(requests(make(1e-305), slo_ms=1, duration_s=60))


@pytest.mark.parametrize(
    "make",
    [
        lambda: uniform(0),
        lambda: poisson(-1, Random(1)),
        lambda: gamma(10, 0, Random(1)),
        lambda: gamma(0, 1, Random(1)),
        lambda: bursty(0, Random(1)),
        lambda: bursty(10, Random(1), peak=6, share=0.2),
        lambda: bursty(10, Random(1), peak=1, share=1),
        lambda: bursty(10, Random(1), burst_s=0),
    ],
)
def test_what_is_no_process_is_refused(make: Callable[[], Iterator[int]]) -> None:
    with pytest.raises(ValueError, match=r"not positive|more than all"):
        make()


def test_requests_are_numbered_and_have_deadlines() -> None:
    first, second = requests([5, 7], slo_ms=0.001, key="a", priority=2)
    assert (first.number, first.arrival_ns, first.deadline_ns) == (0, 5, 1005)
    assert (second.number, second.key, second.priority) == (1, "a", 2)
    assert next(requests([5], slo_ms=None)).deadline_ns == NEVER_NS


def test_requests_end_at_the_count_or_the_time() -> None:
    assert len(list(requests(uniform(10), slo_ms=1, count=7))) == 7
    assert len(list(requests(uniform(10), slo_ms=1, duration_s=1))) == 9
    assert len(list(requests(uniform(10), slo_ms=1, duration_s=1, count=3))) == 3
    assert list(requests(uniform(10), slo_ms=1, count=0)) == []


@given(st.lists(st.lists(st.integers(0, 20)).map(sorted), max_size=4))
def test_merged_streams_keep_every_request_in_the_order_of_arrival(
    streams: list[list[int]],
) -> None:
    mixed = list(
        merged(*(requests(each, slo_ms=1, key=index) for index, each in enumerate(streams)))
    )
    assert [each.number for each in mixed] == list(range(sum(map(len, streams))))
    assert [each.arrival_ns for each in mixed] == sorted(time for each in streams for time in each)
    for index, each in enumerate(streams):
        assert [r.arrival_ns for r in mixed if r.key == index] == each
