"""Quantiles of the last values, against sorting them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.policies.recent import Recent


@given(st.lists(st.integers(-5, 5)), st.integers(1, 8), st.floats(0, 1))
def test_a_quantile_is_of_the_last_values_only(values: list[int], count: int, share: float) -> None:
    recent = Recent(count)
    for value in values:
        recent.add(value)
    kept = sorted(values[-count:])
    assert len(recent) == len(kept)
    assert recent.quantile(share) == (kept[int(share * (len(kept) - 1))] if kept else 0)


def test_one_outlier_among_few_values_is_above_every_quantile_but_the_last() -> None:
    recent = Recent(100)
    for value in (1, 2, 1000, 1):
        recent.add(value)
    assert recent.quantile(0.99) == 2
    assert recent.quantile(1) == 1000


def test_what_is_replaced_is_forgotten() -> None:
    recent = Recent(2)
    recent.add(7)
    recent.replace(())
    assert len(recent) == 0
    assert recent.quantile(0.5) == 0
    recent.replace([9, 3, 1])
    assert recent.quantiles((0, 1)) == [1, 3]
    recent.add(2)
    assert recent.quantiles((0, 1)) == [1, 2]


def test_a_value_that_takes_the_place_of_its_equal_changes_no_quantile() -> None:
    recent = Recent(2)
    assert recent.add(1)
    assert recent.add(2)
    assert not recent.add(1)
    assert recent.quantiles((0, 1)) == [1, 2]
    assert recent.add(1)
    assert recent.quantiles((0, 1)) == [1, 1]
    assert Recent(2).quantiles((0, 1)) == [0, 0]
