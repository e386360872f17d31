"""Searches find the best allocations of small problems, within their bounds."""

from __future__ import annotations

import math
from random import Random

import pytest

from tests.ensemble.making import allocations, gpus, member, random_problem
from trims_shim.batching import LatencyProfile
from trims_shim.ensemble import (
    Allocation,
    Device,
    Footprint,
    MemberProfile,
    Problem,
    bounded_greedy,
    optimise,
    search,
    throughput,
    worst_fit_decreasing,
)
from trims_shim.ensemble.search import neighbours

SHAPES = [(1, 3), (2, 2), (2, 3), (3, 1), (3, 2)]


@pytest.mark.parametrize("seed", range(20))
def test_optimise_is_half_a_percent_behind_brute_force_at_most(seed: int) -> None:
    devices, members = SHAPES[seed % len(SHAPES)]
    problem = random_problem(Random(seed), devices=devices, members=members)
    best = max(throughput(problem, each) for each in allocations(problem))
    found = optimise(problem, tries=2000)
    assert found.is_complete
    assert problem.fits(found)
    assert throughput(problem, found) >= 0.995 * best


def test_optimise_is_the_same_each_time_and_keeps_to_its_tries() -> None:
    problem = random_problem(Random(3), devices=4, members=5)
    assert optimise(problem, tries=500) == optimise(problem, tries=500)
    first = worst_fit_decreasing(problem)
    assert optimise(problem, tries=1) == first
    assert throughput(problem, optimise(problem, tries=100)) > throughput(problem, first)


def test_searches_keep_to_the_memory() -> None:
    """A batch of 64 of one member leaves no room for the other."""
    members = {
        "a": member(1, sample_gb=0.02, line_ms=(1, 20)),
        "b": member(1, sample_gb=0.02, line_ms=(2, 20)),
    }
    problem = Problem(gpus(2, 3.0), members, (8, 64))
    fitting = list(allocations(problem))
    best = max(throughput(problem, each) for each in fitting)
    found = optimise(problem, tries=500)
    assert found in fitting
    assert throughput(problem, found) >= 0.995 * best
    assert {each for start in fitting for each in neighbours(problem, start)} <= set(fitting)


def test_workers_change_places_where_memory_is_full() -> None:
    """Each member alone fills a device, and each is quicker on the other's."""
    lines = {"a": {"new": (2, 1), "old": (1, 1)}, "b": {"new": (1, 1), "old": (9, 1)}}
    members = {
        name: MemberProfile(
            dict.fromkeys(kinds, Footprint(8)),
            {kind: LatencyProfile.linear(*line, max_batch_size=8) for kind, line in kinds.items()},
        )
        for name, kinds in lines.items()
    }
    problem = Problem([Device("new:0", 10), Device("old:0", 10)], members, (8,))
    assert worst_fit_decreasing(problem).batch_sizes == ((8, 0), (0, 8))
    assert optimise(problem, tries=500).batch_sizes == ((0, 8), (8, 0))


def test_a_worker_moves_where_memory_is_full() -> None:
    """Parts of a processor share memory, which has no room for one worker more."""
    parts = [Device("cpu:0", 20), Device("cpu:1", 20, is_reserve=True)]
    footprint = {"cpu": Footprint(1, worker_bytes=8)}
    profile = LatencyProfile.linear(1, 1, max_batch_size=8)
    member = MemberProfile(footprint, {"cpu": profile})
    problem = Problem(parts, {"a": member, "b": member}, (8,))
    assert worst_fit_decreasing(problem).batch_sizes == ((8, 8), (0, 0))
    found = optimise(problem, tries=500)
    assert sorted(found.batch_sizes) == [(0, 8), (8, 0)]


def test_a_climb_ends_when_each_change_was_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(Random(4), devices=3, members=3)
    asked: list[Allocation] = []

    def noted(problem: Problem, allocation: Allocation) -> float:
        asked.append(allocation)
        return throughput(problem, allocation)

    monkeypatch.setattr(search, "throughput", noted)
    start = worst_fit_decreasing(problem)
    found, _ = search._Search(problem, Random(1), 10_000)._climbed(start)
    assert found != start
    after = asked[asked.index(found) + 1 :]
    assert len(after) == len(set(after))
    assert set(after) == set(neighbours(problem, found))


def test_optimise_leaves_out_what_gains_next_to_nothing() -> None:
    # Larger batches of "slow" gain .01 %, of "other" 4 %.
    members = {"slow": member(line_ms=(10, 0.01)), "other": member(line_ms=(1, 4))}
    found = optimise(Problem(gpus(1), members, (8, 64)), tries=500)
    assert found.batch_sizes == ((8, 64),)
    alone = Problem(gpus(2), {"a": member(line_ms=(1, 8))}, (8, 64, 128))
    assert optimise(alone, tries=500).batch_sizes == ((128,), (128,))
    flat = Problem(gpus(1), {"a": member(line_ms=(1, 0))}, (64, 8, 128))
    assert optimise(flat, tries=500).batch_sizes == ((8,),)
    assert optimise(flat, start=Allocation(((128,),)), tries=1).batch_sizes == ((8,),)
    lines = {"gpu": (1.0, 0.0), "cpu": (1000.0, 0.0)}
    latencies = {
        kind: LatencyProfile.linear(*line, max_batch_size=8) for kind, line in lines.items()
    }
    both = MemberProfile(dict.fromkeys(lines, Footprint(1)), latencies)
    devices = [*gpus(1), Device("cpu", 1)]
    assert optimise(Problem(devices, {"a": both}, (8,)), tries=50).batch_sizes == ((8,), (0,))


@pytest.mark.parametrize("rows", [((8, 0),), ((8, 64),)])
def test_searches_start_with_what_can_run(rows: tuple[tuple[int, ...], ...]) -> None:
    problem = Problem(gpus(1, 4), dict.fromkeys("ab", member(1, sample_gb=0.04)), (8, 64))
    start = Allocation(rows)
    with pytest.raises(ValueError, match="start with an allocation of all members that fits"):
        optimise(problem, start=start)
    with pytest.raises(ValueError, match="start with an allocation"):
        bounded_greedy(problem, lambda each: 1.0, random=Random(1), start=start)
    assert optimise(problem, start=Allocation(((8, 8),)), tries=50).is_complete


def test_optimise_ends_where_there_is_nothing_to_change() -> None:
    problem = Problem(gpus(1), {"a": member()}, (8,))
    assert optimise(problem, tries=10**9) == Allocation(((8,),))


def test_a_search_may_have_no_limits() -> None:
    problem = Problem(gpus(1), {"a": member()}, (8,))
    found = bounded_greedy(
        problem, lambda _: 1.0, random=Random(1), max_iter=10**30, max_neighs=math.inf
    )
    assert found == Allocation(((8,),))


def test_neighbours_differ_in_one_element_fit_and_are_complete() -> None:
    problem = random_problem(Random(1), devices=2, members=2)
    start = worst_fit_decreasing(problem)
    found = list(neighbours(problem, start))
    expected = [
        each
        for each in allocations(problem)
        if sum(
            one != other
            for row, others in zip(each.batch_sizes, start.batch_sizes, strict=True)
            for one, other in zip(row, others, strict=True)
        )
        == 1
    ]
    assert sorted(each.batch_sizes for each in found) == sorted(
        each.batch_sizes for each in expected
    )
    assert len(found) == 6  # two of another size, two elements with two sizes each; none removed


def test_the_greedy_search_takes_the_best_neighbour_and_stops_at_a_peak() -> None:
    problem = Problem(gpus(2), {"a": member(line_ms=(1, 10))}, (8, 64))
    asked: list[Allocation] = []

    def bench(allocation: Allocation) -> float:
        asked.append(allocation)
        return throughput(problem, allocation)

    found = bounded_greedy(problem, bench, random=Random(1))
    assert found.batch_sizes == ((64,), (64,))
    # The start; 64 instead of 8, and 8 or 64 beside; then from (8, 64) or (64, 64).
    assert asked[0].batch_sizes == ((8,), (0,))
    assert {each.batch_sizes for each in asked[1:4]} == {((64,), (0,)), ((8,), (8,)), ((8,), (64,))}
    assert asked.count(found) == 1


def test_the_greedy_search_keeps_to_its_bounds() -> None:
    problem = random_problem(Random(2), devices=3, members=4, batch_sizes=(8, 16, 32, 64))
    calls = 0

    def faster_and_faster(allocation: Allocation) -> float:
        nonlocal calls
        calls += 1
        return calls

    bounded_greedy(problem, faster_and_faster, random=Random(1), max_iter=4, max_neighs=7)
    assert calls == 1 + 4 * 7
    calls, problem = 0, random_problem(Random(2), devices=9, members=2)
    bounded_greedy(problem, faster_and_faster, random=Random(1), max_iter=4, max_neighs=7)
    assert calls == 1 + (9 - 2) * 7
    calls = 0

    def equal(allocation: Allocation) -> float:
        nonlocal calls
        calls += 1
        return 1.0

    bounded_greedy(problem, equal, random=Random(1), max_neighs=7)
    assert calls == 1 + 7, "what is no faster is not gone on from"


def test_the_greedy_search_has_as_many_steps_as_devices_are_idle() -> None:
    problem = Problem(gpus(16), {"a": member(line_ms=(1, 0))}, (8,))
    found = bounded_greedy(
        problem, lambda each: throughput(problem, each), random=Random(1), max_iter=10
    )
    assert found.batch_sizes == ((8,),) * 16


def test_the_greedy_search_ends_where_there_is_nothing_to_change() -> None:
    problem = Problem(gpus(1), {"a": member()}, (8,))
    assert bounded_greedy(problem, lambda each: 1.0, random=Random(1)) == Allocation(((8,),))


def test_nonsense_is_refused() -> None:
    problem = Problem(gpus(1), {"a": member()}, (8,))
    with pytest.raises(ValueError, match="tries is nan"):
        optimise(problem, tries=math.nan)  # type: ignore[arg-type]
    for name in ("max_iter", "max_neighs"):
        with pytest.raises(ValueError, match=f"{name} is -1; it has to be 0 or more"):
            bounded_greedy(problem, lambda each: 1.0, random=Random(1), **{name: -1})


def test_the_greedy_search_leaves_what_does_not_run() -> None:
    problem = Problem(gpus(2), {"a": member()}, (8, 64))
    start = worst_fit_decreasing(problem)
    found = bounded_greedy(problem, lambda each: float(each == start), random=Random(1))
    assert found == start


@pytest.mark.parametrize("seed", range(5))
def test_optimise_is_no_worse_than_the_greedy_search_of_the_paper(seed: int) -> None:
    problem = random_problem(Random(seed), devices=4, members=6, batch_sizes=(8, 32, 128))
    greedy = bounded_greedy(problem, lambda each: throughput(problem, each), random=Random(seed))
    assert throughput(problem, optimise(problem, tries=3000)) >= throughput(problem, greedy)
