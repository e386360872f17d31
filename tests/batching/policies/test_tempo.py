"""Whether the last batches say how slow the next one is."""

from __future__ import annotations

import math
from random import Random

import pytest

from trims_shim.batching.policies.tempo import Tempo


def told(ratios: list[float]) -> Tempo:
    tempo = Tempo()
    for ratio in ratios:
        tempo.add(ratio)
    return tempo


def test_nothing_is_expected_without_batches() -> None:
    assert Tempo().now == 1.0


def test_batches_as_in_the_profile_change_nothing() -> None:
    tempo = Tempo()
    assert not any(tempo.add(1.0) for _ in range(10))
    assert tempo.now == 1.0


def test_what_stays_slow_is_expected_to_be_slow() -> None:
    assert told([1.0] * 20 + [1.4] * 12).now == pytest.approx(1.4, rel=0.05)
    assert told([0.8] * 12).now == pytest.approx(0.8, rel=0.05)


def test_what_stays_far_off_is_expected_to_be_off_on_the_same_side_by_a_factor_of_two() -> None:
    assert 1.7 < told([1.0] * 20 + [3.0] * 12).now <= 2
    assert 1 / 2 <= told([0.2] * 12).now < 1 / 1.7


def test_each_ratio_is_compared_with_what_was_expected_before_it() -> None:
    ratios = [1.0] * 20 + [1.4] * 12
    one_by_one, found = Tempo(), []
    for ratio in ratios:
        found.append(ratio / one_by_one.now)
        one_by_one.add(ratio)
    tempo = Tempo()
    assert tempo.follow(ratios) == found
    assert tempo.now == one_by_one.now
    assert found[20] == 1.4
    assert found[-1] == pytest.approx(1, abs=0.05)


def test_what_is_quick_again_is_soon_expected_to_be() -> None:
    assert told([1.4] * 12 + [1.0] * 4).now < 1.06


def test_independent_times_say_nothing() -> None:
    random = Random(1)
    tempo, found = Tempo(), []
    for _ in range(2000):
        tempo.add(math.exp(random.gauss(0, 0.2)))
        found.append(abs(math.log(tempo.now)))
    assert sum(found) / len(found) < 0.02


def test_drifting_times_are_predicted() -> None:
    """Better than by what is usual."""
    random, level = Random(1), 0.0
    tempo, errors, usual = Tempo(), 0.0, 0.0
    for _ in range(2000):
        level = 0.95 * level + random.gauss(0, 0.06)
        ratio = math.exp(level + random.gauss(0, 0.05))
        errors += math.log(ratio / tempo.now) ** 2
        usual += math.log(ratio) ** 2
        tempo.add(ratio)
    assert errors < 0.4 * usual


def test_a_pause_is_soon_forgotten() -> None:
    tempo = told([1.0, 1.01, 0.99] * 20 + [50.0])
    assert tempo.now < 1.4
    for _ in range(5):
        tempo.add(1.0)
    assert tempo.now < 1.05


@pytest.mark.parametrize("ratio", [0.0, 1e-300, 1e300])
def test_times_that_cannot_be(ratio: float) -> None:
    """As of a clock that stands still."""
    assert 0.4 < told([ratio] * 50).now < 2.1
