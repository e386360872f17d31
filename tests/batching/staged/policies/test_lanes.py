"""A second lane is used where it gains."""

from __future__ import annotations

import statistics
from random import Random

import pytest

from benchmarks.staged_device import StageDevice, demand_of_best_size
from benchmarks.staged_simulation import simulate_staged
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.simulator.arrivals import poisson
from trims_shim.batching.staged.policies import DVABatch
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import StagedBatching

STAGE = LatencyProfile.linear(0.3, 3.5, max_batch_size=32)
PROFILE = StagedProfile([STAGE] * 4)
CAPACITY_QPS = 32e9 / PROFILE.latency_ns(32)
COUNT = 400


def mean_ms(width: float, load: float, *, devices: int, told: float | None) -> float:
    """On a device of that width, of which the policy is ``told`` something."""

    def demand(profile: LatencyProfile, size: int) -> float:
        return 1 - width * (1 - demand_of_best_size(profile, size))

    profile = StagedProfile(PROFILE.stages, width=told)
    policy = StagedBatching(
        lambda key: DVABatch(profile, max_batch_size=32), stages=4, devices=devices
    )
    arrivals = poisson(load * CAPACITY_QPS, Random(3))
    requests = [Request(number, next(arrivals)) for number in range(COUNT)]
    outcome = simulate_staged(policy, requests, device=StageDevice(PROFILE, demand=demand))
    assert len(outcome.answered) == COUNT
    return statistics.fmean(end - each.arrival_ns for each, end in outcome.answered) / 1e6


@pytest.mark.parametrize("load", [0.2, 0.85])
def test_on_a_narrow_device_two_lanes_are_as_good_as_one(load: float) -> None:
    one = mean_ms(0.0, load, devices=1, told=None)
    assert mean_ms(0.0, load, devices=2, told=0.0) < 1.03 * one
    assert mean_ms(0.0, load, devices=2, told=None) > 1.3 * one  # if nobody says so


def test_on_a_half_wide_device_the_second_lane_helps_where_there_is_room() -> None:
    one = mean_ms(0.5, 0.2, devices=1, told=None)
    assert mean_ms(0.5, 0.2, devices=2, told=0.5) < 0.93 * one
    one = mean_ms(0.5, 0.85, devices=1, told=None)
    assert mean_ms(0.5, 0.85, devices=2, told=0.5) < 1.05 * one


@pytest.mark.parametrize("load", [0.2, 0.85])
def test_on_a_wide_device_it_is_always_used(load: float) -> None:
    unknown = mean_ms(1.0, load, devices=2, told=None)
    assert mean_ms(1.0, load, devices=2, told=1.0) == unknown
    assert unknown < 0.85 * mean_ms(1.0, load, devices=1, told=None)
