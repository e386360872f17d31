"""Groups are as tolerant of bursts as brute force finds, and memory holds their models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trims_shim.errors import PlanningError
from trims_shim.planner import HerdPlan, HostedModel, Stream, herd, plan_herd
from trims_shim.planner.programme import OutOfTime, Programme, Solution

MODELS = {
    "a": HostedModel(10, 4),
    "b": HostedModel(20, 6),
    "c": HostedModel(40, 8, affinity="other"),
}

STREAM = {"one": Stream("a", 1)}


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


def plans(
    streams: Mapping[str, Stream], *, devices: int, memory: int, groups: int, largest: int
) -> Iterator[tuple[float, float]]:
    """(burst tolerance, slack) of every division that fits, of models as a whole.

    Each group that serves streams has a device.
    """
    models = list(dict.fromkeys(stream.model for stream in streams.values()))
    for choice in itertools.product(range(groups), repeat=len(models)):
        home = dict(zip(models, choice, strict=True))
        homes = {name: home[stream.model] for name, stream in streams.items()}
        if not fits(homes, streams, memory):
            continue
        loads = [sum(needed(streams[n]) for n, h in homes.items() if h == g) for g in range(groups)]
        for sizes in itertools.product(range(min(largest, devices) + 1), repeat=groups):
            if sum(sizes) <= devices and all(sizes[each] for each in homes.values()):
                tolerances = [sizes[each] / needed(streams[name]) for name, each in homes.items()]
                slacks = [
                    (size - load) / math.sqrt(load)
                    for size, load in zip(sizes, loads, strict=True)
                    if load
                ]
                yield min(tolerances), min(slacks)


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
    st.sampled_from((1, 5, 8)),
    st.integers(1, 5),
    st.sampled_from((8, 10, 18)),
    st.integers(1, 3),
    st.integers(4, 5),
)
@example(["c", "a", "a", "a"], 8, 2, 8, 2, 4)  # more slack if one group had no device
def test_no_plan_is_better(
    asked: list[str], rate: int, devices: int, memory: int, groups: int, largest: int
) -> None:
    streams = {f"s{i}": Stream(model, (rate + i) / 2) for i, model in enumerate(asked)}
    limits = {"devices": devices, "groups": groups, "largest": largest}
    found = list(plans(streams, memory=memory, **limits))
    if not found:
        with pytest.raises(PlanningError, match="do not fit"):
            plan_herd(streams, MODELS, memory_bytes=memory, gap=0.0, **limits)
        return
    of_paper = plan_herd(streams, MODELS, memory_bytes=memory, gap=0.0, of_paper=True, **limits)
    check(of_paper, streams, devices, memory)
    assert all(group.devices <= largest for group in of_paper.groups)
    assert of_paper.burst_tolerance == pytest.approx(max(each for each, _ in found), rel=1e-4)
    plan = plan_herd(streams, MODELS, memory_bytes=memory, gap=0.0, **limits)
    check(plan, streams, devices, memory)
    assert all(group.devices <= largest for group in plan.groups)
    most = max(slack for _, slack in found)
    whole = sum(needed(each) for each in streams.values())
    shared = whole if whole <= devices else whole * min(groups, len(asked))
    span = (devices - whole) / math.sqrt(shared) - of_paper.slack
    # The search ends at 3 %, and the last plan may have as much less.
    assert most - 0.061 * span - 1e-6 <= plan.slack <= most + 1e-6


def test_small_groups_get_more_than_their_share() -> None:
    streams = {"many": Stream("a", 40), "few": Stream("c", 40)}  # four devices, and one
    plan = plan_herd(streams, MODELS, devices=10, memory_bytes=20, groups=2)
    assert {group.streams: group.devices for group in plan.groups} == {("many",): 7, ("few",): 3}


@pytest.mark.parametrize(("rates", "devices"), [((20, 20, 20), 7), ((60, 40, 20), 13)])
def test_of_plans_of_equal_slack_it_is_the_most_tolerant(
    rates: tuple[int, ...], devices: int
) -> None:
    """Other groups have no more slack, and one of them has no room for a burst."""
    models = {name: HostedModel(10, 4) for name in "abc"}
    streams = {name: Stream(name, rate) for name, rate in zip("abc", rates, strict=True)}
    plan = plan_herd(streams, models, devices=devices, memory_bytes=8, groups=2)
    assert plan.slack == 0
    assert plan.burst_tolerance == 1.5


def test_a_little_slack_is_given_for_a_more_tolerant_plan() -> None:
    """Groups of 43 and 28 devices have the most."""
    models = {name: HostedModel(10, 4) for name in "abc"}
    streams = {name: Stream(name, 50) for name in models}
    plan = plan_herd(streams, models, devices=71, memory_bytes=8, groups=2)
    assert sorted(group.devices for group in plan.groups) == [29, 42]


def test_devices_that_no_group_may_have_do_not_blur_the_search() -> None:
    """Found: it went up to the slack of all of them in one group, so that little was found."""
    models = {name: HostedModel(10, 1) for name in "abcd"}
    streams = {"a": Stream("a", 20), **{name: Stream(name, 2) for name in "bcd"}}
    limits = {"devices": 60, "memory_bytes": 3, "groups": 2}
    plan = plan_herd(streams, models, largest=4, **limits)
    assert {group.models for group in plan.groups} == {("a",), ("b", "c", "d")}
    hardly = plan_herd({"a": Stream("a", 1e-8)}, models, largest=1, **limits)
    assert [group.devices for group in hardly.groups] == [1]


def test_when_the_time_is_up_it_is_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {"many": Stream("a", 40), "few": Stream("c", 40)}
    limits = {"devices": 10, "memory_bytes": 20, "groups": 2}
    of_paper = plan_herd(streams, MODELS, of_paper=True, **limits)

    class Late(Programme):
        def maximise(self, goal: Mapping[int, float], **options: Any) -> Solution | None:
            if made:
                raise OutOfTime
            made.append(goal)
            return super().maximise(goal, **options)

    made: list[Mapping[int, float]] = []
    monkeypatch.setattr(herd, "Programme", Late)
    assert plan_herd(streams, MODELS, **limits) == of_paper


def test_the_papers_groups_leave_others_without_room() -> None:
    streams = {f"small{i}": Stream("c", 40) for i in range(3)} | {"large": Stream("a", 20)}
    limits = {"devices": 8, "memory_bytes": 20, "groups": 2}
    of_paper = plan_herd(streams, MODELS, of_paper=True, **limits)
    plan = plan_herd(streams, MODELS, **limits)
    assert of_paper.burst_tolerance >= plan.burst_tolerance
    assert of_paper.slack <= plan.slack


def test_streams_that_no_group_can_take_together_are_divided() -> None:
    streams = {f"s{i}": Stream("a", 20) for i in range(3)}  # two devices each
    plan = plan_herd(streams, MODELS, devices=8, memory_bytes=4, groups=3, largest=4)
    check(plan, streams, devices=8, memory=4)
    assert len(plan.groups) > 1


def test_streams_that_just_fill_a_group_stay_together() -> None:
    """Apart they would have more slack; but requests for a model share batches."""
    streams = {f"s{i}": Stream("a", 20) for i in range(2)}  # two devices each
    plan = plan_herd(streams, MODELS, devices=8, memory_bytes=4, groups=2, largest=4)
    assert [group.devices for group in plan.groups] == [4]


@pytest.mark.parametrize("of_paper", [False, True])
def test_a_stream_that_is_hardly_used_has_a_device(*, of_paper: bool) -> None:
    """What it needs is less than the solver takes for nothing."""
    streams = {"busy": Stream("a", 15), "rare": Stream("b", 1e-7)}
    plan = plan_herd(streams, MODELS, devices=8, memory_bytes=8, groups=2, of_paper=of_paper)
    assert [(group.devices, group.streams) for group in plan.groups] == [
        (7, ("busy",)),
        (1, ("rare",)),
    ]


@pytest.mark.parametrize(("of_paper", "sizes"), [(False, (6, 2)), (True, (7, 1))])
@pytest.mark.parametrize("qps", [1.0, 1e-6, 1e-10, 1e-16])
def test_plans_for_streams_that_are_all_hardly_used_are_as_good(
    qps: float, *, of_paper: bool, sizes: tuple[int, int]
) -> None:
    """It is the programme's scale that matters to the solver."""
    streams = {"one": Stream("a", 4 * qps), "other": Stream("b", qps)}
    plan = plan_herd(streams, MODELS, devices=8, memory_bytes=8, groups=2, of_paper=of_paper)
    assert tuple(group.devices for group in plan.groups) == sizes


def test_an_overload_is_planned_for_as_well() -> None:
    streams = {"one": Stream("a", 40), "two": Stream("c", 80)}  # four devices, and two
    plan = plan_herd(streams, MODELS, devices=3, memory_bytes=20, groups=2)
    check(plan, streams, devices=3, memory=20)
    assert plan.slack < 0


def test_an_overload_is_shared_by_groups() -> None:
    """Together they have a slack of -1, apart of -0.71."""
    streams = {"one": Stream("a", 20), "two": Stream("b", 40)}  # two devices each
    plan = plan_herd(streams, MODELS, devices=2, memory_bytes=20, groups=2)
    check(plan, streams, devices=2, memory=20)
    assert plan.slack == pytest.approx(-1 / math.sqrt(2))


def test_an_overload_is_shared_by_groups_though_one_would_be_more_tolerant() -> None:
    streams = {"one": Stream("a", 43), "two": Stream("b", 76)}  # 4.3 and 3.8 devices
    limits: dict[str, Any] = {"devices": 5, "memory_bytes": 10, "groups": 2}
    assert len(plan_herd(streams, MODELS, of_paper=True, **limits).groups) == 1
    plan = plan_herd(streams, MODELS, **limits)
    assert [group.devices for group in plan.groups] == [3, 2]


def test_however_large_an_overload_is_groups_share_it() -> None:
    streams = {"one": Stream("a", 8e18), "two": Stream("b", 4e18)}
    plan = plan_herd(streams, MODELS, devices=6, memory_bytes=8, groups=2)
    assert [group.devices for group in plan.groups] == [5, 1]


def test_a_model_that_fits_nowhere_is_named() -> None:
    with pytest.raises(PlanningError, match="'b', which 'big' asks for, needs more memory"):
        plan_herd({"big": Stream("b", 1)}, MODELS, devices=1, memory_bytes=5, groups=1)


@pytest.mark.parametrize("of_paper", [False, True])
def test_models_that_do_not_fit_by_a_hair_do_not_share_devices(of_paper: bool) -> None:
    """Found: by less than the solver's tolerance, a millionth of a device."""
    models = {name: HostedModel(10, 8_000_001_000) for name in "abcd"} | {
        "other half": HostedModel(10, 7_999_999_000)
    }
    limits: dict[str, Any] = {"devices": 9, "memory_bytes": 16 * 10**9, "of_paper": of_paper}
    streams = {name: Stream(name, 5) for name in models}
    plan = plan_herd(streams, models, groups=4, **limits)
    assert sorted(len(group.models) for group in plan.groups) == [1, 1, 1, 2]
    with pytest.raises(PlanningError, match="do not fit"):
        plan_herd(streams, models, groups=3, **limits)


def overfull_by_a_hair(count: int) -> tuple[dict[str, Stream], dict[str, HostedModel]]:
    """Models of which four share a device, and five do not, by some bytes."""
    models = {str(n): HostedModel(10, 3_200_000_001 + 37 * n % count) for n in range(count)}
    return {name: Stream(name, 5) for name in models}, models


def solving(monkeypatch: pytest.MonkeyPatch, *, taken_s: float | None = None) -> list[float]:
    """The time limits of the solver's runs, which say that they have taken so long."""
    solve, limits_s = Programme.maximise, list[float]()

    def maximise(programme: Programme, goal: Any, *, gap: float, time_limit_s: float) -> Any:
        limits_s.append(time_limit_s)
        found = solve(programme, goal, gap=gap, time_limit_s=60)
        return found and replace(found, taken_s=taken_s or found.taken_s)

    monkeypatch.setattr(Programme, "maximise", maximise)
    return limits_s


def test_what_is_solved_for_again_is_solved_in_what_is_left_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: each time had the whole limit, and there were dozens."""
    limits_s = solving(monkeypatch, taken_s=10)
    streams, models = overfull_by_a_hair(5)
    with pytest.raises(PlanningError, match="more time"):
        plan_herd(streams, models, devices=4, memory_bytes=16 * 10**9, groups=1, time_limit_s=9)
    assert limits_s == [9]
    limits_s.clear()
    with pytest.raises(PlanningError, match="do not fit"):
        plan_herd(streams, models, devices=4, memory_bytes=16 * 10**9, groups=1, time_limit_s=19)
    assert limits_s == [19, 9]


def test_many_models_that_do_not_fit_by_a_hair_are_excluded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = solving(monkeypatch)
    streams, models = overfull_by_a_hair(10)
    limits: dict[str, Any] = {"devices": 4, "memory_bytes": 16 * 10**9, "of_paper": True}
    plan = plan_herd(streams, models, groups=3, **limits)
    assert max(len(group.models) for group in plan.groups) == 4
    assert len(runs) < 10


def test_models_too_small_to_matter_do_not_keep_others_from_being_excluded() -> None:
    models = {name: HostedModel(10, 8_000_001_000) for name in "ab"} | {"tiny": HostedModel(10, 9)}
    streams = {name: Stream(name, 5) for name in models}
    limits: dict[str, Any] = {"devices": 2, "memory_bytes": 16 * 10**9, "of_paper": True}
    with pytest.raises(PlanningError, match="do not fit"):
        plan_herd(streams, models, groups=1, **limits)
    assert len(plan_herd(streams, models, groups=2, **limits).groups) == 2


def test_groups_that_have_no_device_each_are_no_room() -> None:
    streams = {"one": Stream("a", 1), "two": Stream("c", 1)}
    with pytest.raises(PlanningError, match=r"at most 1\), by memory or affinity: .* more devices"):
        plan_herd(streams, MODELS, devices=1, memory_bytes=20, groups=2)


def test_groups_and_their_sizes_may_have_no_limit() -> None:
    streams = {"one": Stream("a", 1), "two": Stream("c", 1)}
    limits: dict[str, Any] = {"devices": 4, "memory_bytes": 20}
    plan = plan_herd(streams, MODELS, groups=4, largest=4, **limits)
    unlimited: list[Any] = [10**9, math.inf]
    for limit in unlimited:
        assert plan_herd(streams, MODELS, groups=limit, largest=limit, **limits) == plan


def test_no_streams_need_no_groups() -> None:
    plan = plan_herd({}, MODELS, devices=1, memory_bytes=5, groups=1)
    assert (plan.groups, plan.burst_tolerance, plan.slack) == ((), math.inf, math.inf)


def test_a_model_may_need_no_memory_and_devices_have_none() -> None:
    models = {"a": HostedModel(10, 0)}
    plan = plan_herd({"one": Stream("a", 5)}, models, devices=1, memory_bytes=0, groups=1)
    assert plan.burst_tolerance == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"groups": 0}, "groups is 0"),
        ({"largest": 0}, "largest is 0"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"memory_bytes": math.nan}, "memory_bytes is nan"),
        ({"streams": {"x": Stream("z", 1)}}, "'x' asks for 'z', which is no model"),
        ({"streams": {"x": Stream("a", 0)}}, "the rate_qps of 'x' is 0; it has to be more than 0"),
        ({"streams": {"x": Stream("a", 5e-324)}}, "the rate_qps of 'x' is 5e-324"),
        (
            {"streams": {"x": Stream("a", 1e308)}, "models": {"a": HostedModel(0.1, 1)}},
            r"the rate_qps of 'x' is 1e\+308",
        ),
        ({"models": {"a": HostedModel(0, 1)}}, "the throughput_qps of 'a' is 0"),
        ({"models": {"a": HostedModel(math.inf, 1)}}, "the throughput_qps of 'a' is inf"),
        ({"models": {"a": HostedModel(1, -1)}}, "the memory_bytes of 'a' is -1"),
        ({"models": {"a": HostedModel(1, math.nan)}}, "the memory_bytes of 'a' is nan"),
        ({"streams": STREAM, "gap": math.nan}, "gap is nan"),
        ({"streams": STREAM, "time_limit_s": 0}, "time_limit_s is 0"),
    ],
)
def test_nonsense_is_refused(options, message: str) -> None:  # type: ignore[no-untyped-def]
    known = {"streams": {}, "models": MODELS, "devices": 1, "memory_bytes": 9, "groups": 1}
    with pytest.raises(ValueError, match=message):
        plan_herd(**known | options)


def test_programmes_for_many_devices_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS does not look at the clock while it simplifies one of ten thousands of variables."""
    made = []

    class Counted(Programme):
        def variable(self, *, upper: float = math.inf, is_integer: bool = False) -> int:
            made.append(super().variable(upper=upper, is_integer=is_integer))
            return made[-1]

    monkeypatch.setattr(herd, "Programme", Counted)
    plan = plan_herd(
        {"large": Stream("a", 30_000), "small": Stream("b", 10_000)},
        {"a": HostedModel(1, 2), "b": HostedModel(1, 2)},
        devices=100_000,
        memory_bytes=3,
        groups=2,
        time_limit_s=60,
    )
    assert max(made) < 2_000
    assert sum(group.devices for group in plan.groups) <= 100_000
    # Both groups have 219.6 at best: 60000 devices over the sum of both roots.
    assert plan.slack > 205
