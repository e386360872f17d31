"""Which model goes first: the largest batch, or the one that needs it."""

from __future__ import annotations

import pytest

from trims_shim.batching.policies.choice import Choice, Offer, by_need, by_size
from trims_shim.batching.protocol import Request


def offer(
    size: int, *, due_ns: int | list[int], latency_ns: int = 10, later: int = 0, first: int = 0
) -> Offer:
    """``later``: the size of its batch once it has waited past ``due_ns``."""
    due = due_ns if isinstance(due_ns, list) else [due_ns]
    batch = [Request(first + each, 0, due[0] + latency_ns) for each in range(size)]
    return Offer(batch, latency_ns, due, lambda start: size if start <= due[0] else later)


@pytest.mark.parametrize("choose", [by_size, by_need])
def test_one_offer_is_taken(choose: Choice) -> None:
    only = offer(2, due_ns=50)
    for now_ns in (0, 51):
        assert choose(now_ns, [only], []) == (only, 2.0)


def test_by_size_the_largest_goes_however_urgent_the_others_are() -> None:
    small, large = offer(1, due_ns=0), offer(2, due_ns=100)
    assert by_size(0, [small, large], [])[0] is large


def test_as_long_as_all_can_be_in_time_the_one_that_can_wait_least_goes() -> None:
    large, small = offer(8, due_ns=30), offer(1, due_ns=29)
    assert by_need(0, [large, small], []) == (small, 1.0)


def test_when_not_all_can_be_the_one_with_most_to_lose_goes() -> None:
    """One device, busy for 10 with either, and both have to start by 5."""
    large, small = offer(3, due_ns=5), offer(2, due_ns=4)
    assert by_need(0, [large, small], [])[0] is large
    assert by_need(0, [large, small], [3])[0] is small, "another device is free soon enough"


def test_what_is_lost_counts_more_than_size() -> None:
    """The large one is one too many in its queue, but would itself come to no harm."""
    small = offer(2, due_ns=5)
    large = offer(7, due_ns=[100, 101, 102], latency_ns=50)
    best, worth = by_need(0, [large, small], [])
    assert best is small
    assert worth == 2 + 3 * 2


def test_of_a_batch_that_shrinks_by_waiting_only_the_rest_is_lost() -> None:
    small, large = offer(3, due_ns=5), offer(6, due_ns=4, later=5)
    assert by_need(0, [large, small], []) == (small, 3 + 3 * 3)


def test_a_batch_may_have_to_wait_for_the_longest_of_the_others() -> None:
    urgent = offer(2, due_ns=60)
    long = offer(3, due_ns=1000, latency_ns=100)
    crowded = offer(3, due_ns=[1000, 100, 100, 100, 100], latency_ns=50)
    assert by_need(0, [urgent, long, crowded], []) == (urgent, 2 + 3 * 2)
    assert by_need(0, [urgent, long, crowded], [61])[0] is urgent
    assert by_need(0, [urgent, long, crowded], [60])[0] is crowded, "another device is free then"


def test_a_short_batch_counts_no_more_than_one_of_half_the_objective() -> None:
    short, long = offer(2, due_ns=1000), offer(3, due_ns=1000, latency_ns=500)
    assert by_need(1000, [short, long], [])[0] is long


def test_the_rest_of_the_queue_counts() -> None:
    """Both batches fit; the second batch of one of the models makes it too many."""
    large, small = offer(8, due_ns=[30]), offer(1, due_ns=29)
    crowded = offer(8, due_ns=[30, 30, 30, 30])
    assert by_need(0, [large, small], [])[0] is small
    assert by_need(0, [crowded, small], [])[0] is crowded


def test_a_batch_that_outlasts_the_objectives_of_others_counts_for_less() -> None:
    """Where not all can be in time. The light model's requests have 80 ns."""
    light = offer(20, due_ns=5, latency_ns=75)
    assert by_need(0, [offer(32, due_ns=5, latency_ns=40), light], [])[0] is not light
    best, worth = by_need(0, [offer(32, due_ns=5, latency_ns=400), light], [])
    assert best is light
    assert worth == 20 + 3 * 20


def test_an_objective_counts_from_the_arrival() -> None:
    assert Offer([Request(0, 1000, 1080)], 10, [1070], lambda start: 1).objective_ns == 80


@pytest.mark.parametrize("choose", [by_size, by_need])
def test_of_equal_offers_the_more_urgent_then_the_older_goes(choose: Choice) -> None:
    later, sooner = offer(2, due_ns=60, first=0), offer(2, due_ns=50, first=10)
    assert choose(0, [later, sooner], [])[0] is sooner
    newer, older = offer(2, due_ns=50, first=10), offer(2, due_ns=50, first=0)
    assert choose(0, [newer, older], [])[0] is older
