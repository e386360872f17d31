"""The fluid model, against times that can be worked out by hand, and batches in virtual time."""

from __future__ import annotations

from random import Random

import pytest

from tests.ensemble.making import gpus, member, random_problem
from tests.ensemble.simulating import Simulation
from trims_shim.ensemble import Allocation, MemberProfile, Problem, throughput
from trims_shim.errors import PlanningError


def rate(rows: tuple[tuple[int, ...], ...], *costs_ms: float, fixed_ms: float = 0.0) -> float:
    """Of members whose samples take so long alone, and each batch ``fixed_ms`` more."""
    members = {
        str(number): member(line_ms=(cost_ms, fixed_ms)) for number, cost_ms in enumerate(costs_ms)
    }
    return throughput(Problem(gpus(len(rows)), members), Allocation(rows))


def test_one_worker_has_the_rate_of_its_batches() -> None:
    assert rate(((8,),), 2.0) == pytest.approx(500)
    assert rate(((8,),), 1.0, fixed_ms=8.0) == pytest.approx(500)
    assert rate(((64,),), 1.0, fixed_ms=64.0) == pytest.approx(500)


def test_workers_of_one_member_add_up() -> None:
    assert rate(((8,), (8,), (8,)), 2.0) == pytest.approx(1500)


def test_members_on_one_device_take_the_sum_of_their_times() -> None:
    assert rate(((8, 8),), 2.0, 3.0) == pytest.approx(200)


def test_members_apart_are_as_fast_as_the_slowest() -> None:
    assert rate(((8, 0), (0, 8)), 2.0, 5.0) == pytest.approx(200)


def test_what_ends_first_leaves_its_share_to_others() -> None:
    # The first member, with the first device half of the time (another has the other half), and
    # nobody else on the second: 1/2 + 1 samples in 2 ms, so it ends after 4/3 ms for each sample.
    # The second member has done 1/3 by then (half a device), and 2/3 of 2 ms are left.
    assert rate(((8, 8), (8, 0)), 2.0, 2.0) == pytest.approx(1000 / (4 / 3 + 4 / 3))


def test_a_batch_beyond_the_profile_costs_as_the_largest_that_is_known() -> None:
    known = member(line_ms=(1, 8))
    profile = known.latencies["gpu"].limited(8)
    problem = Problem(gpus(1), {"a": MemberProfile(known.footprints, {"gpu": profile})})
    assert throughput(problem, Allocation(((64,),))) == pytest.approx(500)


def test_a_member_without_a_worker_is_never_answered() -> None:
    assert rate(((8, 0),), 1.0, 1.0) == 0.0


def test_latencies_are_needed_where_workers_are() -> None:
    problem = Problem(gpus(1), {"a": MemberProfile(member().footprints)})
    with pytest.raises(PlanningError, match="how fast member 'a' is on gpu; measure it"):
        throughput(problem, Allocation(((8,),)))


@pytest.mark.parametrize("seed", range(12))
def test_estimates_are_near_what_batches_take_one_by_one(seed: int) -> None:
    """Batches that are small beside segments; the rest is what a fluid leaves out."""
    random = Random(seed)
    devices, members = random.randint(2, 4), random.randint(2, 4)
    problem = random_problem(random, devices=devices, members=members, batch_sizes=(4, 16))
    allocation = Allocation(
        tuple(
            tuple(random.choice((4, 16) if member % devices == device else (0, 4, 16))
                  for member in range(members))
            for device in range(devices)
        )
    )  # fmt: skip
    simulation = Simulation(problem, allocation, segment_size=256, window=6)
    found = simulation.samples_per_s(40) / throughput(problem, allocation)
    assert found == pytest.approx(1, abs=0.05)
