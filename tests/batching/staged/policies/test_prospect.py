"""What a plan costs, against value iteration and against adding latencies up."""

from __future__ import annotations

from math import exp

import pytest

from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.staged.policies.prospect import Prospect

ALPHA, BETA = 1000, 5000
LINE = LatencyProfile(ALPHA * size + BETA for size in range(1, 65))
STATES = 150


def prospect(rate: float) -> Prospect:
    return Prospect(LINE, max_batch_size=64, rate=rate)


def value(rate: float, queue: int) -> float:
    return prospect(rate).cost_ns([], next_ns=0, queued=queue)


def poisson(mean: float) -> list[float]:
    chances = [exp(-mean)]
    for count in range(1, STATES):
        chances.append(chances[-1] * mean / count)
    return chances


def by_iteration(rate: float) -> list[float]:
    """Relative values of the queue if batches take all, by value iteration (Puterman, 8.5)."""
    latencies = [ALPHA * size + BETA for size in range(STATES)]
    # A semi-Markov chain: steps of equal length by uniformisation with the shortest latency.
    step = BETA
    moves = [poisson(rate * latency) for latency in latencies]
    costs = [
        (size * latency + rate * latency**2 / 2) / latency for size, latency in enumerate(latencies)
    ]
    values = [0.0] * STATES
    for _ in range(250):
        new = []
        for size, latency in enumerate(latencies):
            mean = sum(map(float.__mul__, moves[size], values))
            share = step / latency
            new.append(costs[size] * step + share * mean + (1 - share) * values[size])
        values = [each - new[0] for each in new]
    return values


@pytest.mark.parametrize("load", [0.0, 0.3, 0.6])
def test_the_value_of_a_queue_is_that_of_value_iteration(load: float) -> None:
    rate = load / ALPHA
    values = by_iteration(rate)
    for queue in (1, 5, 10, 20):
        expected = values[queue] - values[0]
        assert value(rate, queue) - value(rate, 0) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("queued", [0, 3])
def test_without_arrivals_latencies_are_added_up(queued: int) -> None:
    first, second = 7000, 12000
    cost = prospect(0).cost_ns([(first, 2), (second, 4)], next_ns=second, queued=queued)
    last = second + BETA + ALPHA * queued
    assert cost == pytest.approx(2 * first + 4 * second + queued * last)


def test_time_costs_more_when_more_are_coming() -> None:
    def price(rate: float) -> float:
        model = prospect(rate)
        later, now = (model.cost_ns([], next_ns=each, queued=40) for each in (1000, 0))
        return later - now

    assert price(0.0002) < price(0.0005) < price(0.0008)


def test_overload_counts_as_nearly_all_that_can_be_answered() -> None:
    most = 64 / LINE.latency_ns(64)
    plan = [(9000.0, 3)]
    assert prospect(most).cost_ns(plan, next_ns=9000, queued=5) == prospect(9 * most).cost_ns(
        plan, next_ns=9000, queued=5
    )


def test_a_single_size_is_enough() -> None:
    only = Prospect(LatencyProfile([100]), max_batch_size=1, rate=1)
    assert only.cost_ns([(100, 1)], next_ns=100, queued=2) > only.cost_ns(
        [(90, 1)], next_ns=90, queued=2
    )
