"""When batches will be where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batching.staged.policies.boards import batch_at
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.mechanism.batches import BatchTable
from trims_shim.batching.staged.policies.timetable import Timetable, levels_of, together_ns
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

# Stages of 10 + 1 b, 20 + 2 b and 10 + 1 b.
PROFILE = StagedProfile(
    [LatencyProfile(scale * (10 + size) for size in range(1, 9)) for scale in (1, 2, 1)]
)


def test_those_who_run_are_behind_their_stage() -> None:
    assert levels_of(batch_at((1, 3, 0), (0, 2, None))) == [(0, 2), (2, 3)]


def test_levels_merge_one_by_one() -> None:
    alone_ns = PROFILE.stage_ns(0, 1)
    pair_ns = PROFILE.stage_ns(1, 3)
    all_ns = PROFILE.stage_ns(2, 7)
    assert together_ns(PROFILE, [(0, 1), (1, 2), (2, 4)]) == alone_ns + pair_ns + all_ns


def test_what_runs_ends_when_its_stage_is_over() -> None:
    table = Timetable(PROFILE, now_ns=105)
    end_ns = table.add(batch_at((0, 2, 100)))
    assert end_ns == 100 + PROFILE.latency_ns(2)
    assert table.free_ns == [112, 136, 148]


def test_what_should_be_over_ends_now() -> None:
    assert Timetable(PROFILE, 500).add(batch_at((2, 2, 100))) == 500


def test_newcomers_catch_up() -> None:
    table = Timetable(PROFILE, now_ns=0)
    end_ns = table.add(batch_at((2, 2, None)), 1)
    assert end_ns == PROFILE.passed_ns(2, 1) + PROFILE.remaining_ns(2, 3)


def test_parts_of_a_split_batch_go_one_behind_the_other() -> None:
    batch = batch_at((2, 4, None))
    BatchTable(stages=3).split(batch.parts[0], (1, 3))
    end_ns = Timetable(PROFILE, 0).add(batch)
    assert end_ns == PROFILE.stage_ns(2, 1) + PROFILE.stage_ns(2, 3)


def test_a_batch_waits_for_the_one_ahead() -> None:
    table = Timetable(PROFILE, 0)
    table.add_size(1)
    # Stage 1 is free from 33 on, and the second could be there at 11.
    assert table.add_size(1) == 33 + 22 + 11
    assert Timetable(PROFILE, 0).next_ns(1) <= 0


@given(
    ahead=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    size=st.integers(1, 8),
    now_ns=st.integers(0, 100),
)
def test_who_starts_then_is_held_up_nowhere_and_any_sooner_somewhere(
    ahead: list[int], size: int, now_ns: int
) -> None:
    table = Timetable(PROFILE, now_ns)
    for each in ahead:
        table.add_size(each)
    next_ns = table.next_ns(size)
    assert Timetable(PROFILE, next_ns, table.free_ns).add_size(size) == next_ns + (
        PROFILE.latency_ns(size)
    )
    sooner = Timetable(PROFILE, next_ns - 1, table.free_ns).add_size(size)
    assert sooner > next_ns - 1 + PROFILE.latency_ns(size)


def test_larger_batches_than_it_knows_count_as_the_largest() -> None:
    small = PROFILE.limited(2)
    assert Timetable(small, 0).add(batch_at((0, 5, None))) == small.latency_ns(2)
