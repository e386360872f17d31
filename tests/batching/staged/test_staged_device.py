"""A simulated device: what a stage costs alone, and what stages cost each other."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.staged_device import (
    DeviceTime,
    Phase,
    StageDevice,
    demand_of_best_size,
    full_demand,
)
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

LINE = LatencyProfile.linear(1, 3, max_batch_size=8)
FLAT = LatencyProfile([8_000] * 4 + [16_000] * 4)
"""It prefers batches of 4."""


def of(size: int, key: str | None = None) -> list[Request]:
    return [Request(number, 0, key=key) for number in range(size)]


def ends(*starts: tuple[int, Phase] | tuple[int, Phase, Phase]) -> dict[int, int]:
    """Of (start, its phases): when each ends, by its number."""
    device = DeviceTime[int]()
    result = {}
    waiting = sorted(enumerate(starts), key=lambda each: each[1][0], reverse=True)
    while waiting or device.next_end_ns() != NEVER_NS:
        end_ns = device.next_end_ns()
        if waiting and waiting[-1][1][0] < end_ns:
            number, (start_ns, *phases) = waiting.pop()
            device.start(start_ns, number, phases)
        elif (number := device.end_next()) is not None:
            result[number] = end_ns
    return result


# --- demand ---------------------------------------------------------------------------------------


def test_the_best_size_keeps_the_device_busy_and_half_of_it_half_of_it() -> None:
    assert [demand_of_best_size(FLAT, size) for size in (1, 2, 4, 8)] == [0.25, 0.5, 1.0, 1.0]
    assert demand_of_best_size(FLAT, 6) == 0.75  # as long as 8 of them


@example([963] * 7)  # 7 * (963 / 7) > 963
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12))
def test_no_demand_is_more_than_all_of_it(latencies_ns: list[int]) -> None:
    profile = LatencyProfile(latencies_ns)
    for size in range(1, len(latencies_ns) + 1):
        assert 0 < demand_of_best_size(profile, size) <= 1


# --- costs ----------------------------------------------------------------------------------------


def test_all_stages_in_one_call_have_the_overhead_once() -> None:
    device = StageDevice(StagedProfile([LINE, FLAT]), demand=full_demand, overhead_ns=500)
    whole = device.cost(None, of(3))
    assert whole == device.unstaged().cost(0, of(3))
    stages = [device.cost(stage, of(3)) for stage in range(2)]
    alone_ns = [sum(own_ns for own_ns, _ in phases) for phases in (whole, *stages)]
    assert alone_ns[0] == alone_ns[1] + alone_ns[2] - 500


def test_a_stage_costs_what_its_profile_says_and_the_overhead_keeps_nothing_busy() -> None:
    device = StageDevice(StagedProfile([LINE, FLAT]), overhead_ns=8_000)
    assert device.stages == 2
    assert list(device.cost(1, of(2))) == [(16_000, 0.25)]
    assert device.profile().stage_ns(1, 2) == 16_000
    alone = StageDevice(StagedProfile([FLAT]), demand=full_demand)
    assert list(alone.cost(0, of(1))) == [(8_000, 1.0)]


def test_in_one_stage_it_goes_through_all_of_them_with_the_overhead_once() -> None:
    device = StageDevice(StagedProfile([FLAT, FLAT]), overhead_ns=16_000).unstaged()
    assert device.stages == 1
    assert list(device.cost(0, of(4))) == [(24_000, 1 / 3), (8_000, 1.0)]
    assert device.profile().latency_ns(4) == 32_000


def test_each_key_has_its_profile_or_who_makes_it_says_which() -> None:
    profiles = {"short": StagedProfile([LINE]), "long": StagedProfile([FLAT])}
    assert StageDevice(profiles).cost(0, of(1, "long"))[0][0] == 8_000
    of_size = StageDevice(profiles, profile_of=lambda batch: "short" if len(batch) < 3 else "long")
    assert of_size.cost(0, of(2, "long"))[0][0] == 5_000_000
    assert of_size.unstaged().cost(0, of(3, "short"))[0][0] == 8_000


def test_what_it_has_no_cost_for_is_refused() -> None:
    with pytest.raises(ValueError, match="same number"):
        StageDevice({1: StagedProfile([LINE]), 2: StagedProfile([LINE, LINE])})
    with pytest.raises(ValueError, match="same number"):
        StageDevice({})
    with pytest.raises(ValueError, match="larger than any"):
        StageDevice(StagedProfile([LINE])).cost(0, of(9))


# --- time -----------------------------------------------------------------------------------------


def test_stages_that_leave_room_for_each_other_notice_nothing() -> None:
    assert ends((0, (100, 0.5)), (10, (50, 0.5))) == {0: 100, 1: 60}


def test_where_they_do_not_all_are_slower_while_it_lasts() -> None:
    # Together from 50 to 150, half as fast as alone; then the first is alone again.
    assert ends((0, (200, 1.0)), (50, (50, 1.0))) == {0: 250, 1: 150}
    assert ends((0, (100, 1.0)), (0, (100, 0.5))) == {0: 150, 1: 150}


def test_one_that_starts_among_others_is_as_slow_as_they() -> None:
    # The first two have come to 50 at 100; the third is there when the first is.
    assert ends((0, (100, 1.0)), (0, (200, 1.0)), (100, (50, 1.0))) == {0: 250, 2: 250, 1: 350}


def test_three_that_start_at_once_end_in_the_order_of_their_lengths() -> None:
    assert ends((0, (100, 1.0)), (0, (200, 1.0)), (0, (300, 1.0))) == {0: 300, 1: 500, 2: 600}


def test_the_phases_of_one_that_meet_those_of_another_are_slower_only_where_they_fill_it() -> None:
    # Both want all of it from 100 on: twice as slow until the first is through.
    assert ends((0, (100, 0.5), (100, 1.0)), (0, (100, 0.5), (50, 1.0))) == {0: 250, 1: 200}
    # Busy by turns, they notice nothing.
    assert ends((0, (100, 1.0), (100, 0.0)), (0, (100, 0.0), (100, 1.0))) == {0: 200, 1: 200}


def test_nothing_runs_on_a_new_device_and_the_busy_share_is_weighted() -> None:
    device = DeviceTime[str]()
    assert device.next_end_ns() == NEVER_NS
    device.start(100, "first", [(100, 0.25)])
    device.start(150, "second", [(50, 1.0)])
    assert device.next_end_ns() == 212  # 50 ns each, at 1 / 1.25; of two, the first that started
    assert (device.end_next(), device.end_next()) == ("first", "second")
    assert device.busy_ns == pytest.approx(50 * 0.25 + 62)


starts_ns, phases = st.integers(0, 10_000), st.tuples(st.integers(1, 5_000), st.floats(0.01, 1))
programs = st.tuples(starts_ns, phases) | st.tuples(starts_ns, phases, phases)


@given(st.lists(programs, min_size=1, max_size=12))
def test_nobody_is_faster_than_alone_and_nothing_is_done_that_the_device_has_not(
    starts: list[tuple[int, Phase]],
) -> None:
    ended = ends(*starts)
    assert sorted(ended) == list(range(len(starts)))
    alone_ns = [sum(own_ns for own_ns, _ in phases) for _, *phases in starts]
    for number, (start_ns, *_) in enumerate(starts):
        assert ended[number] >= start_ns + alone_ns[number] - 2
    work_ns = sum(own_ns * demand for _, *phases in starts for own_ns, demand in phases)
    first_ns = min(start_ns for start_ns, *_ in starts)
    assert max(ended.values()) - first_ns >= work_ns - 2 * len(starts)
    # Nor more slowly than one after the other.
    last_ns = max(start_ns for start_ns, *_ in starts)
    assert max(ended.values()) <= last_ns + sum(alone_ns) + 2 * len(starts)
