"""Against brute force: what a scheduler could have answered that knew all arrivals before.

Half of the optimum is what early drop and the default policy promise here, under the condition
that Nexus puts on the batch size: an SLO of at least two of the longest batches, the same for all.
It is the bound of the worst cases found, not a proven one: a lone request that starts just before
a burst costs the device one batch of the two that the burst had time for. Without the condition
there is no such bound for any policy that does not know the future.
"""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.checking import ms
from batching.policies.instances import Instance, instances, offline_optimum, run
from trims_shim.batching.policies import POLICIES, Auto, EarlyDrop
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import RuleMaker

NS_PER_MS = 1_000_000


def two_batches(profile: LatencyProfile) -> st.SearchStrategy[int]:
    """One SLO for all requests of an instance, in milliseconds."""
    sizes = range(1, profile.max_batch_size + 1)
    return st.just(2 * max(map(profile.latency_ns, sizes)) // NS_PER_MS)


def ordinary(seed: int) -> Instance:
    """Nine requests in clumps, at about what the device can do."""
    rng = random.Random(seed)
    profile = LatencyProfile.linear(2, rng.choice((5, 20, 40)), max_batch_size=4)
    longest_ms = profile.latency_ns(4) / NS_PER_MS
    time_ms, requests = 0.0, []
    for number in range(9):
        time_ms += rng.choice((0.0, 0.0, rng.expovariate(4 / longest_ms)))
        requests.append(Request(number, ms(time_ms), ms(time_ms + 2.5 * longest_ms)))
    return Instance(tuple(requests), profile)


def test_the_optimum_of_a_case_worked_out_by_hand() -> None:
    """Two of three fit whatever comes first; all three only if the device waits for the second."""
    profile = LatencyProfile.linear(1, 9, max_batch_size=2)
    requests = (
        Request(0, 0, ms(13)),
        Request(1, ms(2), ms(13)),
        Request(2, ms(3), ms(23)),
    )
    assert offline_optimum(Instance(requests, profile)) == 3
    assert offline_optimum(Instance(requests[:2], profile)) == 2
    hasty = (Request(0, 0, ms(12)), *requests[1:])
    assert offline_optimum(Instance(hasty, profile)) == 2
    assert run(EarlyDrop, Instance(requests, profile)).in_time(requests) == 2


@given(instance=instances(most=7, dips=False))
def test_no_policy_is_better(instance: Instance) -> None:
    optimum = offline_optimum(instance)
    for name, maker in POLICIES.items():
        assert run(maker, instance).in_time(instance.requests) <= optimum, name


@pytest.mark.parametrize("maker", [Auto, EarlyDrop])
@given(instance=instances(most=8, slack=two_batches))
def test_half_of_it_is_always_reached(maker: RuleMaker, instance: Instance) -> None:
    assert 2 * run(maker, instance).in_time(instance.requests) >= offline_optimum(instance)


@pytest.mark.parametrize("maker", [Auto, EarlyDrop])
def test_nine_tenths_of_it_are_reached_on_ordinary_arrivals(maker: RuleMaker) -> None:
    shares = []
    for seed in range(60):
        instance = ordinary(seed)
        shares.append(run(maker, instance).in_time(instance.requests) / offline_optimum(instance))
    assert statistics.mean(shares) >= 0.9
