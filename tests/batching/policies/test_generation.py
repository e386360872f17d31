"""Every rule of batch generation names a batch that is in time, and the largest one is largest."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.ordering import DeadlineQueue
from trims_shim.batching.policies.generation import (
    Generation,
    by_earliest,
    by_largest,
)
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request

RULES = (by_earliest, by_largest)
PROFILE = LatencyProfile([10, 12, 15, 19, 24, 30])


def queue_of(*deadlines: int, priorities: tuple[int, ...] = ()) -> list[Request]:
    queue = DeadlineQueue()
    for number, deadline_ns in enumerate(deadlines):
        priority = priorities[number] if priorities else 0
        queue.add(Request(number, 0, deadline_ns, priority))
    return list(queue)


def deadlines_of(requests: object) -> list[int]:
    return [each.deadline_ns for each in requests]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", RULES)
@given(
    deadlines=st.lists(st.integers(0, 40), max_size=8),
    priorities=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    start_ns=st.integers(0, 15),
    most=st.integers(1, 6),
)
def test_a_candidate_is_in_time_and_there_is_one_if_there_can_be(
    rule: Generation, deadlines: list[int], priorities: list[int], start_ns: int, most: int
) -> None:
    requests = queue_of(*deadlines, priorities=tuple(priorities))
    batch = rule(start_ns, requests, PROFILE, most)
    assert len(batch) <= most
    assert len({each.number for each in batch}) == len(batch)
    assert {each.number for each in batch} <= set(range(len(requests)))
    can_be = any(each.deadline_ns >= start_ns + PROFILE.latency_ns(1) for each in requests)
    assert bool(batch) == can_be
    if batch:
        end_ns = start_ns + PROFILE.latency_ns(len(batch))
        assert min(deadlines_of(batch)) >= end_ns


@given(
    deadlines=st.lists(st.integers(0, 40), max_size=7),
    start_ns=st.integers(0, 15),
    most=st.integers(1, 6),
)
def test_the_largest_is_the_largest(deadlines: list[int], start_ns: int, most: int) -> None:
    requests = queue_of(*deadlines)

    def is_in_time(batch: tuple[Request, ...]) -> bool:
        end_ns = start_ns + PROFILE.latency_ns(len(batch))
        return min(deadlines_of(batch)) >= end_ns

    sizes = [
        size
        for size in range(1, min(len(requests), most) + 1)
        if any(is_in_time(batch) for batch in combinations(requests, size))
    ]
    assert len(by_largest(start_ns, requests, PROFILE, most)) == max(sizes, default=0)


@given(
    latencies_ns=st.lists(st.integers(5, 30), min_size=1, max_size=7),
    deadlines=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    most=st.integers(1, 7),
)
def test_the_largest_is_the_largest_also_where_larger_batches_take_less(
    latencies_ns: list[int], deadlines: list[int], most: int
) -> None:
    profile = LatencyProfile(latencies_ns)
    most = min(most, profile.max_batch_size)
    latest_first = sorted(deadlines, reverse=True)
    sizes = [
        size
        for size in range(1, min(len(deadlines), most) + 1)
        if latest_first[size - 1] >= profile.latency_ns(size)
    ]
    found = by_largest(0, queue_of(*deadlines), profile, most)
    assert len(found) == max(sizes, default=0)


def test_a_size_that_takes_less_than_a_smaller_one_is_found() -> None:
    profile = LatencyProfile([10, 10, 13, 10, 14])
    assert len(by_largest(0, queue_of(12, 12, 12, 12, 12), profile, 5)) == 4


def test_the_earliest_deadline_bounds_the_batch() -> None:
    """10 alone, 12 for two: the second would make the first late."""
    found = by_earliest(0, queue_of(11, 30, 30), PROFILE, 6)
    assert deadlines_of(found) == [11]


def test_the_largest_batch_passes_over_who_is_in_its_way() -> None:
    requests = queue_of(11, 15, 16, 17)
    found = by_largest(0, requests, PROFILE, 6)
    assert deadlines_of(found) == [15, 16, 17]


def test_the_largest_batch_is_filled_from_the_earliest() -> None:
    found = by_largest(0, queue_of(20, 30, 40), PROFILE, 2)
    assert deadlines_of(found) == [20, 30]


def test_lower_priorities_fill_up_and_never_push_out() -> None:
    """Two urgent ones until 12; three others would make a larger batch without them."""
    requests = queue_of(12, 12, 30, 30, 30, priorities=(1, 1, 0, 0, 0))
    assert deadlines_of(by_largest(0, requests, PROFILE, 6)) == [12, 12]
    requests = queue_of(16, 16, 30, 30, 30, priorities=(1, 1, 0, 0, 0))
    assert deadlines_of(by_largest(0, requests, PROFILE, 6)) == [16, 16, 30]


def test_lower_priorities_go_when_none_of_the_higher_can() -> None:
    requests = queue_of(3, 30, 30, priorities=(1, 0, 0))
    assert deadlines_of(by_largest(0, requests, PROFILE, 6)) == [30, 30]


def test_a_lower_priority_does_not_share_the_time_of_a_higher_one() -> None:
    queue = queue_of(100, 11, priorities=(1, 0))
    assert deadlines_of(by_largest(0, queue, PROFILE, 6)) == [100]
    assert deadlines_of(by_largest(0, queue_of(100, 12, priorities=(1, 0)), PROFILE, 6)) == [
        100,
        12,
    ]
