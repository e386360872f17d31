"""Even cuts are those that brute force finds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trims_shim.batching.staged.slicing.cutting import Cut, even_cuts


def stages_of(times: list[int], positions: tuple[int, ...]) -> list[int]:
    borders = [0, *positions, len(times)]
    return [sum(times[begin:end]) for begin, end in itertools.pairwise(borders)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_brute_force(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    positions = [each for each in range(1, len(times)) if data.draw(st.booleans())]
    cuts = [Cut(each, data.draw(st.integers(0, 5))) for each in positions]
    stages = data.draw(st.integers(1, len(cuts) + 1))
    ways = list(itertools.combinations(positions, stages - 1))
    longest = min(max(stages_of(times, way)) for way in ways)
    crossing = {cut.position: cut.crossing_bytes for cut in cuts}

    def cost(way: tuple[int, ...]) -> tuple[int, int]:
        squares = sum(each**2 for each in stages_of(times, way))
        return sum(crossing[each] for each in way), squares

    found = tuple(even_cuts(times, cuts, stages))
    assert max(stages_of(times, found)) <= longest * 1.05
    good = [way for way in ways if max(stages_of(times, way)) <= int(longest * 1.05)]
    assert cost(found) == min(map(cost, good))


def test_fewer_bytes_are_worth_a_little_unevenness() -> None:
    cuts = [Cut(49, 1), Cut(50, 100)]
    assert even_cuts([1] * 100, cuts, 2) == [49]
    assert even_cuts([1] * 100, [Cut(40, 1), Cut(50, 100)], 2) == [50]


@pytest.mark.parametrize("stages", [0, 4])
def test_too_few_places(stages: int) -> None:
    with pytest.raises(ValueError, match="3 stages at most"):
        even_cuts([1, 1, 1], [Cut(1), Cut(2)], stages)
