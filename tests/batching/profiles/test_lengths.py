"""What is expected of a number of values, from what others took."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.profiles.lengths import LengthCurve

MS = 1_000_000


def told(*durations: tuple[int, float]) -> LengthCurve:
    curve = LengthCurve()
    for values, duration_ms in durations:
        curve.tell(1, values, round(duration_ms * MS))
    return curve


def test_nothing_is_known_at_first() -> None:
    assert LengthCurve().version == 0
    assert told((8, 1)).version == 1


def test_between_and_beyond_what_ran() -> None:
    curve = told((100, 10), (200, 20))
    assert curve.expected_ns(150) == 15 * MS
    assert curve.expected_ns(400) == 20 * MS  # twice as many are taken to be as quick
    assert curve.expected_ns(800) == 40 * MS
    assert curve.expected_ns(50) == 7.5 * MS  # half is taken to be fixed


@pytest.mark.parametrize(
    ("durations", "expected_ms"),
    [
        ([(100, 10), (400, 40)], 80),  # all in proportion
        ([(100, 25), (200, 30), (400, 40)], 60),  # some of it fixed
        ([(100, 10), (400, 10)], 10),  # all of it
        ([(100, 30), (400, 10)], 10),  # and not less than nothing for more
    ],
)
def test_beyond_much_that_is_known_it_goes_on_like_that(
    durations: list[tuple[int, float]], expected_ms: float
) -> None:
    curve = told(*durations, durations[-1])
    assert curve.expected_ns(800) == pytest.approx(expected_ms * MS)


def test_what_is_larger_and_quicker_says_that_the_smaller_one_was_held_up() -> None:
    curve = told((100, 50), (200, 8), (200, 8))
    assert curve.expected_ns(100) == 8 * MS


def test_what_takes_longer_than_it_can_is_believed_when_it_does_again() -> None:
    known = [(100, 10)]
    assert told(*known, (200, 1000)).expected_ns(200) == 10 * MS
    assert told(*known, (200, 1000), (200, 1000)).expected_ns(200) == 1000 * MS
    assert told(*known, (200, 1000), (200, 20)).expected_ns(200) == 20 * MS
    assert told(*known, (200, 39)).expected_ns(200) == 39 * MS


def test_another_shape_that_compiles_as_well_confirms_nothing() -> None:
    curve = told((32, 5))
    curve.tell(4, 32, 300 * MS)
    curve.tell(1, 128, 300 * MS)
    assert curve.expected_ns(128) == 10 * MS
    curve.tell(1, 128, 300 * MS)
    curve.tell(1, 128, 300 * MS)
    assert curve.expected_ns(128) == 300 * MS


def test_a_device_that_becomes_slower_is_noticed() -> None:
    curve = told(*[(100, 10)] * 20, *[(100, 30)] * 64)
    assert curve.expected_ns(100) == 30 * MS


def test_what_has_not_run_for_long_is_forgotten() -> None:
    curve = told(*[(800, 900)] * 2, *[(100, 10)] * 1000)
    assert curve.expected_ns(800) == 40 * MS


def test_versions_become_fewer() -> None:
    curve, versions = LengthCurve(), []
    for _ in range(1000):
        curve.tell(1, 8, MS)
        versions.append(curve.version)
    assert versions[:5] == [1, 2, 3, 3, 4]
    assert versions[-1] < 45
    quick = LengthCurve()
    for _ in range(1000):
        quick.tell(1, 8, 1000)
    assert quick.version < curve.version


@given(st.integers(0, 1000), st.floats(0, 0.3))
def test_a_line_with_noise_is_found(seed: int, sigma: float) -> None:
    drawn = random.Random(seed)
    curve = LengthCurve()
    for _ in range(400):
        size, length = drawn.randint(1, 64), drawn.choice((8, 16, 32))
        values = size * length
        curve.tell(size, length, round((5 + values / 100) * MS * drawn.lognormvariate(0, sigma)))
    for values in (64, 512, 1024):
        expected = (5 + values / 100) * MS
        assert curve.expected_ns(values) == pytest.approx(expected, rel=0.1 + 2.5 * sigma)
