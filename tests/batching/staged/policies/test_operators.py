"""When a batch goes on in parts, and in which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.checking import ms
from batching.staged.policies.boards import batch_at, queue_up
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS
from trims_shim.batching.staged.policies.operators import OperatorDiversity, ways_to_split
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile


def plateau(whole_ms: float, preferred: int) -> LatencyProfile:
    """As long for fewer than ``preferred``; then in proportion."""
    return LatencyProfile(ms(whole_ms * max(size, preferred) / 16) for size in range(1, 17))


# What gains from large batches comes first; from the second stage on, 4 are enough.
UNET = StagedProfile([plateau(40, 16), plateau(40, 4), plateau(40, 4)], preferred=[16, 4, 4])
FIXED = StagedProfile([LatencyProfile.linear(1, 30, max_batch_size=16)] * 3)


def parts_of(
    profile: StagedProfile,
    size: int,
    *,
    stage: int = 1,
    deadlines_ns: Sequence[int] = (),
    queued: int = 0,
    now_ns: int = 0,
) -> Sequence[int]:
    rule = OperatorDiversity(profile, max_batch_size=profile.max_batch_size)
    queue_up(rule, *[NEVER_NS] * queued)
    stages = len(profile.stages)
    batch = batch_at((stage, size, None), stages=stages, deadlines_ns=deadlines_ns)
    return rule.split(now_ns, batch.parts[0])


def test_parts_are_of_the_preferred_size_where_more_gain_nothing() -> None:
    assert parts_of(UNET, 16) == (4, 4, 4, 4)
    assert parts_of(UNET, 10) in ((4, 4, 2), (5, 5))


def test_it_is_asked_next_where_it_would_split() -> None:
    """The first stage before which it would be split, were it there now."""
    late = StagedProfile([*UNET.stages[:1], *UNET.stages], preferred=[16, 16, 4, 4])
    for profile, size, stage in ((UNET, 16, 1), (late, 16, 2), (UNET, 4, None), (FIXED, 16, None)):
        rule = OperatorDiversity(profile, max_batch_size=16)
        part = batch_at((0, size, 0), stages=len(profile.stages)).parts[0]
        assert rule.next_split(0, part) == stage
        assert (part.stage, part.size) == (0, size)  # only looked at


def test_what_is_no_larger_than_preferred_stays_whole() -> None:
    assert not parts_of(UNET, 4)
    assert not parts_of(UNET, 1)


def test_where_all_stages_gain_from_large_batches_nothing_is_split() -> None:
    assert not parts_of(FIXED, 16)


def test_a_model_whose_stages_are_alike_has_no_operator_diversity() -> None:
    """However little its batches gain: smaller ones should have been made at first."""
    alike = StagedProfile([LatencyProfile.linear(10, 0.1, max_batch_size=16)] * 3)
    assert not parts_of(alike, 16)


def test_where_many_wait_parts_must_not_take_longer() -> None:
    steps = LatencyProfile(ms(40 * max(size, 4) / 16 + 0.4) for size in range(1, 17))
    profile = StagedProfile([plateau(40, 16), steps, steps], preferred=[16, 4, 4])
    calm, busy = parts_of(profile, 16), parts_of(profile, 16, queued=200)
    assert len(calm) > max(1, len(busy))


def test_parts_that_take_much_longer_altogether_are_not_worth_it() -> None:
    """Even if the mean is lower: two of 8 take 56, 16 at once 52."""
    fixed = LatencyProfile.linear(3, 4, max_batch_size=16)
    assert not parts_of(StagedProfile([plateau(60, 16), fixed]), 16)


def test_what_saves_little_is_not_worth_it() -> None:
    """0.4 ms for both, or 0.25 and 0.5, with what a driver does."""
    profile = StagedProfile([plateau(2, 16), LatencyProfile.linear(0.15, 0, max_batch_size=16)])
    assert not parts_of(profile, 2)
    assert parts_of(profile, 4)


def test_nobody_is_made_late() -> None:
    """The last part ends when the whole would have, and not much before it."""
    odd = LatencyProfile(ms(3 * max(size, 4) + (1 if size < 16 else 0)) for size in range(1, 17))
    profile = StagedProfile([plateau(200, 16), odd], preferred=[16, 4])
    whole_ns = profile.remaining_ns(1, 16)
    assert parts_of(profile, 16)
    due = (NEVER_NS,) * 15 + (whole_ns,)
    sizes = parts_of(profile, 16, deadlines_ns=due)
    assert sum(profile.remaining_ns(1, size) for size in sizes) <= whole_ns
    late_anyway = (NEVER_NS,) * 15 + (whole_ns - 1,)
    assert parts_of(profile, 16, deadlines_ns=late_anyway) == parts_of(profile, 16)


def test_a_batch_from_before_a_smaller_limit_stays_whole() -> None:
    rule = OperatorDiversity(UNET, max_batch_size=16)
    part = batch_at((1, 16, None)).parts[0]
    rule.profile = UNET.limited(8)
    assert not rule.split(0, part)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    yield (total,)
    for first in range(1, total):
        for rest in compositions(total - first):
            yield (first, *rest)


@given(size=st.integers(2, 8), scale=st.integers(1, 4), preferred=st.integers(1, 4))
def test_it_is_nearly_as_good_as_the_best_way(size: int, scale: int, preferred: int) -> None:
    profile = StagedProfile([plateau(90, 16), plateau(20 * scale, preferred)])

    def latencies(sizes: Sequence[int]) -> int:
        ends = accumulate(profile.remaining_ns(1, each) + ms(0.1) for each in sizes)
        return sum(end * count for end, count in zip(ends, sizes, strict=True))

    whole_ns = profile.remaining_ns(1, size)
    ways = [
        each
        for each in compositions(size)
        if sum(profile.remaining_ns(1, part) for part in each) <= 1.05 * whole_ns
    ]
    best = min(map(latencies, ways))
    assert latencies(parts_of(profile, size) or (size,)) <= best + 0.12 * whole_ns * size


@given(size=st.integers(2, 16), stage=st.integers(0, 2))
def test_ways_are_of_all_requests(size: int, stage: int) -> None:
    ways = list(ways_to_split(UNET, stage, size))
    assert ways
    for sizes in ways:
        assert len(sizes) > 1
        assert min(sizes) > 0
        assert sum(sizes) == size


@pytest.mark.parametrize("size", [2, 7, 16])
def test_ways_are_few(size: int) -> None:
    assert len(list(ways_to_split(UNET, 1, size))) <= 10
