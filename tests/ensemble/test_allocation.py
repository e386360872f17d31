"""The allocation matrix: what fits, and the first allocation."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from tests.ensemble.making import GB, gpus, member, random_problem
from trims_shim.ensemble import Allocation, Device, Footprint, MemberProfile, Problem
from trims_shim.ensemble import worst_fit_decreasing as first
from trims_shim.errors import PlanningError


def test_large_members_go_first_each_where_most_memory_is_left() -> None:
    members = {"small": member(1), "large": member(6), "middle": member(5), "other": member(2)}
    allocation = first(Problem(gpus(2, 10), members))
    # large: 4 left on the first; middle: 5 left on the second; other goes there: 3 left; small
    # goes to the first.
    assert allocation.batch_sizes == ((8, 8, 0, 0), (0, 0, 8, 8))


def test_equal_members_are_dealt_to_devices_in_turn() -> None:
    members = {name: member(1) for name in "abcd"}
    assert first(Problem(gpus(2), members)).batch_sizes == ((8, 0, 8, 0), (0, 8, 0, 8))


def test_the_first_batch_size_is_used_and_counts_in_memory() -> None:
    members = {"a": member(1, worker_gb=0.5, sample_gb=0.1)}
    problem = Problem(gpus(1, 3), members, (15, 4))
    allocation = first(problem)
    assert allocation.batch_sizes == ((15,),)
    assert problem.room_bytes(allocation) == {"gpu:0": 0}
    assert problem.fits(allocation)
    assert not problem.fits(allocation.with_batch_size(0, 0, 16))


def test_what_fits_on_one_device_may_not_fit_on_another() -> None:
    devices = [*gpus(1, 10), Device("gpu:1", 1 * GB)]
    problem = Problem(devices, {"a": member(2)}, (1,))
    assert problem.fits(Allocation(((1,), (0,))))
    assert not problem.fits(Allocation(((1,), (1,))))


def test_what_workers_need_makes_a_member_large() -> None:
    members = {"small": member(2), "large": member(1, worker_gb=5)}
    devices = [Device("gpu:0", 8 * GB), Device("gpu:1", 7 * GB)]
    assert first(Problem(devices, members)).batch_sizes == ((0, 8), (8, 0))


def test_a_reserve_is_used_only_for_what_fits_nowhere_else() -> None:
    devices = [Device("cpu", 100 * GB, is_reserve=True), *gpus(1, 3)]
    members = {name: member(2, kinds=("cpu", "gpu")) for name in "ab"}
    assert first(Problem(devices, members)).batch_sizes == ((0, 8), (8, 0))


def test_members_stay_on_devices_that_they_can_run_on() -> None:
    devices = [Device("cpu", 100 * GB), *gpus(1)]
    members = {"a": member(kinds=("gpu",)), "b": member(kinds=("gpu",))}
    allocation = first(Problem(devices, members))
    assert allocation.batch_sizes == ((0, 0), (8, 8))
    assert not Problem(devices, members).fits(Allocation(((8, 0), (8, 8))))
    problem = Problem(devices, {"a": member(kinds=("gpu",)), "b": member(kinds=("cpu", "gpu"))})
    assert problem.fits(Allocation(((0, 8), (8, 0))))
    assert not problem.fits(Allocation(((8, 8), (0, 0))))


def test_members_are_dealt_to_devices_of_one_pool_in_turn() -> None:
    devices = [Device(name, 10 * GB) for name in ("cpu:0", "cpu:1")]
    members = {name: member(1, kinds=("cpu",)) for name in "abc"}
    assert first(Problem(devices, members)).batch_sizes == ((8, 0, 8), (0, 8, 0))


@pytest.mark.parametrize("weights", [(3, 1), (1, 3)])
def test_weights_of_different_size_in_a_pool_count_as_the_largest(weights: tuple[int, int]) -> None:
    devices = [Device(name, 10 * GB, pool="all") for name in ("slow:0", "fast:0")]
    footprints = dict(
        zip(("slow", "fast"), (Footprint(each * GB) for each in weights), strict=True)
    )
    problem = Problem(devices, {"a": MemberProfile(footprints)})
    assert problem.room_bytes(Allocation(((8,), (8,)))) == {"all": 7 * GB}


def test_weights_count_once_in_a_pool_and_workers_each() -> None:
    devices = [Device("cpu:0", 10 * GB), Device("cpu:1", 10 * GB)]
    problem = Problem(devices, {"a": member(4, worker_gb=1, kinds=("cpu",))})
    assert {device.pool for device in devices} == {"cpu"}
    assert problem.room_bytes(Allocation(((8,), (8,)))) == {"cpu": 4 * GB}
    apart = [Device("gpu:0", 10 * GB), Device("gpu:1", 10 * GB)]
    problem = Problem(apart, {"a": member(4, worker_gb=1)})
    assert problem.room_bytes(Allocation(((8,), (8,)))) == {"gpu:0": 5 * GB, "gpu:1": 5 * GB}


def test_a_member_that_finds_its_only_place_taken_is_placed_first() -> None:
    devices = [Device("cpu", 15 * GB), *gpus(1, 12)]
    members = {"any": member(9, kinds=("cpu", "gpu")), "cpu": member(8, kinds=("cpu",))}
    assert first(Problem(devices, members)).batch_sizes == ((0, 8), (8, 0))


def placing(memory_gb: list[int], *weights_gb: dict[int, int]) -> Problem:
    """Devices of a kind each; members with their weights by the number of the device."""
    devices = [Device(f"kind{i}:0", each * GB) for i, each in enumerate(memory_gb)]
    members = {
        f"m{i}": MemberProfile({f"kind{n}": Footprint(each * GB) for n, each in weights.items()})
        for i, weights in enumerate(weights_gb)
    }
    return Problem(devices, members)


def test_members_are_placed_anew_as_often_as_there_are_members() -> None:
    problem = placing([4, 4, 4], {2: 3, 0: 3, 1: 4}, {0: 4, 1: 3}, {0: 2})
    assert first(problem).batch_sizes == ((0, 0, 8), (0, 8, 0), (8, 0, 0))


def test_the_first_member_without_room_is_named() -> None:
    with pytest.raises(PlanningError, match="'m0' finds no room"):
        first(placing([7, 8], {0: 4}, {1: 6, 0: 7}, {0: 5}))


def test_a_device_may_be_full() -> None:
    assert first(Problem([*gpus(1, 0), *gpus(2)[1:]], {"a": member()})).batch_sizes == ((0,), (8,))


def test_no_room_names_the_member_and_what_is_left() -> None:
    members = {"first": member(12), "second": member(9)}
    with pytest.raises(PlanningError, match=r"'second' .* 9 GB on gpu:0, .* 4 GB on gpu:0 left"):
        first(Problem(gpus(1), members))
    with pytest.raises(PlanningError, match=r"for batches of 32 it needs 33 GB .* smaller batches"):
        first(Problem(gpus(1), {"a": member(1, sample_gb=1)}, (32, 8)))


def test_no_device_of_a_kind_names_the_kinds() -> None:
    with pytest.raises(PlanningError, match="'a' runs on tpu; there is none"):
        first(Problem(gpus(1), {"a": member(kinds=("tpu",))}))
    with pytest.raises(PlanningError, match="'a' runs on no kind of device"):
        first(Problem(gpus(1), {"a": MemberProfile({})}))


@pytest.mark.parametrize("seed", range(30))
def test_the_first_allocation_fits_and_is_complete(seed: int) -> None:
    problem = random_problem(Random(seed), devices=3, members=5)
    allocation = first(problem)
    assert problem.fits(allocation)
    assert [sum(map(bool, column)) for column in zip(*allocation.batch_sizes, strict=True)] == [
        1
    ] * 5


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (lambda: Problem([], {"a": member()}), "needs a device"),
        (lambda: Problem(gpus(1), {}), "needs a device, a member"),
        (lambda: Problem(gpus(1), {"a": member()}, ()), "and a batch size"),
        (
            lambda: Problem(gpus(1), {"a": member()}, (8, 0)),
            "a size of batch_sizes is 0; it has to be 1 or more",
        ),
        (lambda: Problem(gpus(1) * 2, {"a": member()}), "given twice: gpu:0, gpu:0"),
        (
            lambda: Problem([Device("cpu:0", 1), Device("cpu:1", 2)], {"a": member()}),
            "pool 'cpu' have different memory",
        ),
        (lambda: Problem([Device("gpu", -1)], {"a": member()}), "memory_bytes of 'gpu' is -1"),
        (
            lambda: Problem([Device("gpu", math.nan)], {"a": member()}),
            "memory_bytes of 'gpu' is nan",
        ),  # type: ignore[arg-type]
        (
            lambda: Problem(gpus(1), {"a": MemberProfile({"gpu": Footprint(1, 1, -1)})}),
            "sample_bytes of 'a' on gpu is -1",
        ),
    ],
)
def test_contradictions_are_refused(problem: Callable[[], Problem], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem()


@pytest.mark.parametrize("rows", [((8, 0),), ((8, 0), (8,)), ((8, 0, 8), (8, 0))])
def test_each_row_of_an_allocation_has_to_be_of_all_members(
    rows: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(ValueError, match=r"a row for each of 2 devices, .* each of 2 members"):
        Allocation(rows).check(2, 2)


def test_kind_and_pool_follow_from_the_name() -> None:
    assert Device("cuda:1", 1).kind == "cuda"
    assert Device("cuda:1", 1).pool == "cuda:1"
    given = Device("a100-1", 1, kind="a100", pool="mig")
    assert (given.kind, given.pool) == ("a100", "mig")
    assert Device("part-0", 1, kind="cpu").pool == "cpu"


def test_footprints_grow_with_the_batch() -> None:
    assert Footprint(100, 10, 2).worker(8) == 26
