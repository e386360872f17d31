"""What a plan costs, against value iteration and against adding latencies up."""

from __future__ import annotations

from math import exp

import pytest

from trims_shim.batching.profiles.profile import LatencyProfile
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


@pytest.mark.parametrize("load", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("queue", [1, 5, 20])
def test_to_run_all_that_is_there_costs_what_the_queue_is_worth(load: float, queue: int) -> None:
    """Howard's equation, with all that plans are compared by: time, and who comes meanwhile."""
    model, latency = prospect(load / ALPHA), ALPHA * queue + BETA
    plan = model.cost_ns([(latency, queue)], next_ns=latency, queued=0)
    assert plan == pytest.approx(value(load / ALPHA, queue))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.2])
def test_nobody_joins_where_that_saves_nothing(rate: float) -> None:
    """Items that cost as much in any batch: those on board would only wait for the new ones."""
    profile = LatencyProfile(ALPHA * size for size in range(1, 17))
    model = Prospect(profile, max_batch_size=16, rate=rate / ALPHA * 4)
    rest, all_of_both = ALPHA / 2, 1.5 * ALPHA
    apart = model.cost_ns([(rest, 1)], next_ns=rest, queued=1)
    assert apart < model.cost_ns([(all_of_both, 2)], next_ns=all_of_both, queued=0)


def test_large_batches_that_cost_more_do_not_change_what_small_ones_do() -> None:
    slower = [
        ALPHA * size + BETA + (2000 * (size - 16) if size > 16 else 0) for size in range(1, 65)
    ]
    few = 0.2 / ALPHA
    model = Prospect(LatencyProfile(slower), max_batch_size=64, rate=few)
    for queued in (0, 1, 5):
        assert model.cost_ns([], next_ns=5000, queued=queued) == pytest.approx(
            prospect(few).cost_ns([], next_ns=5000, queued=queued)
        )


def test_those_that_wait_need_not_be_one_batch() -> None:
    """More than eight take as long as two batches, whatever one of them all takes."""
    few = [ALPHA * size + BETA for size in range(1, 9)]
    many = [few[7] + each for each in few]

    def worth(slower: int) -> float:
        profile = LatencyProfile([*few, *[slower * each for each in many]])
        return Prospect(profile, max_batch_size=16, rate=5e-4).cost_ns([], next_ns=5000, queued=5)

    assert worth(3) == pytest.approx(worth(1))


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
