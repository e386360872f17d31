"""Devices get the variants of a placement; as few as possible change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.making import option
from trims_shim.planner import Group, Option, Placement, assign

OPTIONS = [
    option("cats", "small", "cpu", 60, 40),
    option("cats", "large", "gpu", 90, 40),
    option("dogs", "large", "gpu", 90, 40),
]


def placed(counts: list[int]) -> Placement:
    groups = [Group(each, n, 1.0) for each, n in zip(OPTIONS, counts, strict=True) if n]
    return Placement(tuple(groups), {"cats": 2, "dogs": 1}, 1.0)


@given(st.lists(st.integers(0, 2), min_size=3, max_size=3), st.data())
def test_every_group_gets_its_devices_and_few_change(
    counts: list[int], data: st.DataObject
) -> None:
    kinds = ["cpu"] * 3 + ["gpu"] * 5
    before = [
        data.draw(st.sampled_from([None, *(each for each in OPTIONS if each.device == kind)]))
        for kind in kinds
    ]
    chosen = assign(placed(counts), kinds, before)
    for each, count in zip(OPTIONS, counts, strict=True):
        assert chosen.count(each) == count
        kept = sum(now is each is then for now, then in zip(chosen, before, strict=True))
        assert kept == min(count, before.count(each))
    assert all(
        each is None or each.device == kind for each, kind in zip(chosen, kinds, strict=True)
    )


def test_warm_devices_come_first_but_none_changes_for_it() -> None:
    cats, dogs = OPTIONS[1:]

    def is_warm(device: int, each: Option) -> bool:
        return (device, each) in {(2, cats), (0, cats), (1, dogs)}

    chosen = assign(placed([0, 1, 1]), ["gpu"] * 4, [None, None, None, dogs], is_warm=is_warm)
    assert chosen == [cats, None, None, dogs]
    # Nor is a warm device given to another variant that comes first in the placement.
    assert assign(
        placed([0, 1, 1]), ["gpu"] * 2, is_warm=lambda device, each: (device, each) == (0, dogs)
    ) == [dogs, cats]


def test_too_few_devices_are_an_error() -> None:
    with pytest.raises(ValueError, match="too few devices of the kind 'gpu'"):
        assign(placed([0, 1, 1]), ["gpu", "cpu"])


def test_the_accuracy_is_that_of_planned_requests() -> None:
    groups = (Group(OPTIONS[0], 1, 30.0), Group(OPTIONS[1], 1, 10.0))
    placement = Placement(groups, {"cats": 50, "dogs": 0}, 0.8)
    assert placement.accuracy == pytest.approx(67.5)
    assert placement.served == {"cats": pytest.approx(0.8), "dogs": 1.0}
    assert groups[0].utilisation == pytest.approx(0.75)


def test_groups_of_a_kind_add_up() -> None:
    groups = (Group(OPTIONS[1], 2, 60.0), Group(OPTIONS[2], 1, 10.0))
    placement = Placement(groups, {"cats": 50, "dogs": 20}, 1.0)
    assert placement.devices == {"gpu": 3}
    assert placement.served == {"cats": 1.0, "dogs": 0.5}
    assert groups[0].device_qps == 30
    assert Placement((), {}, 1.0).accuracy == 0
