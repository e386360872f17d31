"""Groups are as tolerant of bursts as brute force finds, and memory holds their models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trims_shim.errors import PlanningError
from trims_shim.planner import HerdPlan, HostedModel, Stream, plan_herd

MODELS = {
    "a": HostedModel(10, 4),
    "b": HostedModel(20, 6),
    "c": HostedModel(40, 8, affinity="other"),
}


def needed(stream: Stream) -> float:
    return stream.rate_qps / MODELS[stream.model].throughput_qps


def fits(homes: Mapping[str, int], streams: Mapping[str, Stream], memory: int) -> bool:
    """Whether each group's models fit in memory, and are of one affinity."""
    for group in set(homes.values()):
        models = {streams[name].model for name, home in homes.items() if home == group}
        if sum(MODELS[name].memory_bytes for name in models) > memory:
            return False
        if len({MODELS[name].affinity for name in models}) > 1:
            return False
    return True


def best(
    streams: Mapping[str, Stream], *, devices: int, memory: int, groups: int, largest: int
) -> float:
    """The highest burst tolerance of all partitions; 0 if none fits."""
    found = 0.0
    for choice in itertools.product(range(groups), repeat=len(streams)):
        homes = dict(zip(streams, choice, strict=True))
        if not fits(homes, streams, memory):
            continue
        for sizes in itertools.product(range(min(largest, devices) + 1), repeat=groups):
            if sum(sizes) <= devices:
                tolerances = [sizes[home] / needed(streams[name]) for name, home in homes.items()]
                found = max(found, min(tolerances))
    return found


def check(plan: HerdPlan, streams: Mapping[str, Stream], devices: int, memory: int) -> None:
    assert sorted(name for group in plan.groups for name in group.streams) == sorted(streams)
    assert sum(group.devices for group in plan.groups) <= devices
    for group in plan.groups:
        assert set(group.models) == {streams[name].model for name in group.streams}
        assert sum(MODELS[name].memory_bytes for name in group.models) <= memory
        assert len({MODELS[name].affinity for name in group.models}) == 1
        assert group.needed == pytest.approx(sum(needed(streams[n]) for n in group.streams))


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
    st.sampled_from((1, 5, 17)),
    st.integers(1, 5),
    st.sampled_from((8, 10, 18)),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_no_plan_is_more_tolerant(
    asked: list[str], rate: int, devices: int, memory: int, groups: int, largest: int
) -> None:
    streams = {f"s{i}": Stream(model, rate + 3 * i) for i, model in enumerate(asked)}
    limits = {"devices": devices, "groups": groups, "largest": largest}
    expected = best(streams, memory=memory, **limits)
    if not expected:
        with pytest.raises(PlanningError, match="do not fit"):
            plan_herd(streams, MODELS, memory_bytes=memory, gap=0.0, **limits)
        return
    plan = plan_herd(streams, MODELS, memory_bytes=memory, gap=0.0, **limits)
    check(plan, streams, devices, memory)
    assert all(group.devices <= largest for group in plan.groups)
    assert plan.burst_tolerance == pytest.approx(expected, rel=1e-4)
    assert plan.bound >= plan.burst_tolerance


def test_of_the_best_plans_one_has_spare_devices_in_all_groups() -> None:
    streams = {
        f"{model}{i}": Stream(model, 10 if model == "a" else 20) for i in (1, 2) for model in "ab"
    }
    plan = plan_herd(streams, MODELS, devices=6, memory_bytes=10, groups=2, largest=3)
    assert plan.burst_tolerance == pytest.approx(3)
    assert [group.devices - group.needed for group in plan.groups] == pytest.approx([1, 1])


def test_a_model_that_fits_nowhere_is_named() -> None:
    with pytest.raises(PlanningError, match="'b', which 'big' asks for, needs more memory"):
        plan_herd({"big": Stream("b", 1)}, MODELS, devices=1, memory_bytes=5, groups=1)


def test_no_streams_need_no_groups() -> None:
    assert plan_herd({}, MODELS, devices=1, memory_bytes=5, groups=1).groups == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"groups": 0}, "groups is 0"),
        ({"largest": 0}, "largest is 0"),
        ({"streams": {"x": Stream("z", 1)}}, "'x' asks for 'z', which is no model"),
        ({"streams": {"x": Stream("a", 0)}}, "'x' has a rate of 0"),
        ({"models": {"a": HostedModel(0, 1)}}, "'a' has a throughput of 0"),
        ({"models": {"a": HostedModel(1, -1)}}, "'a' needs -1 bytes"),
    ],
)
def test_nonsense_is_refused(options, message: str) -> None:  # type: ignore[no-untyped-def]
    known = {"streams": {}, "models": MODELS, "devices": 1, "memory_bytes": 9, "groups": 1}
    with pytest.raises(ValueError, match=message):
        plan_herd(**known | options)
