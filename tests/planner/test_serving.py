"""A plan in virtual time: every request is accounted for, whatever devices change meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.making import option
from trims_shim.batching.policies import rule_maker
from trims_shim.batching.protocol import Request
from trims_shim.batching.simulator import merged, poisson, requests
from trims_shim.errors import PlanningError
from trims_shim.planner import (
    Option,
    Placement,
    Problem,
    Replanning,
    Serving,
    plan_proteus,
    serve,
)
from trims_shim.planner.serving import _Device

SECOND = 1_000_000_000
OPTIONS = [
    option("cats", "small", "gpu", 60, 200),
    option("cats", "large", "gpu", 90, 40),
    option("dogs", "small", "gpu", 60, 200),
    option("dogs", "large", "gpu", 90, 40),
]
TPU = option("dogs", "large", "tpu", 90, 40)
KINDS = ["gpu"] * 4


def problem(cats: float, dogs: float) -> Problem:
    return Problem({"gpu": 4}, OPTIONS, {"cats": cats, "dogs": dogs})


def plan(demand_qps: Mapping[str, float], before: Placement) -> Placement:
    return plan_proteus(replace(problem(0, 0), demand_qps=demand_qps), before=before)


def arrivals(*phases: tuple[float, float, float]) -> list[Request]:
    """Requests of phases, each (seconds, cats a second, dogs a second)."""
    found: list[Request] = []
    start_ns = 0
    for number, (length_s, *rates) in enumerate(phases):
        streams = [
            requests(
                poisson(qps, Random(f"{family} {number}")),
                slo_ms=300,
                duration_s=length_s,
                key=family,
            )
            for family, qps in zip(("cats", "dogs"), rates, strict=True)
        ]
        for each in merged(*streams):
            each.arrival_ns += start_ns
            each.deadline_ns += start_ns
            each.number = len(found)
            found.append(each)
        start_ns += round(length_s * SECOND)
    return found


def serving(
    first: Placement, *, replanning: Replanning | None = None, load_s: float = 0
) -> Serving:
    def load_ns(chosen: Option) -> int:
        return round(load_s * SECOND)

    return Serving(
        KINDS,
        first,
        make_rule=rule_maker("auto"),
        random=Random(1),
        load_ns=load_ns,
        replanning=replanning,
    )


def test_what_was_planned_is_what_comes_out() -> None:
    stream = arrivals((60, 40, 10))
    first = plan_proteus(problem(40, 10))
    _, report = serve(serving(first), stream)
    assert report.requests == len(stream)
    assert report.violation_ratio < 0.01
    assert report.accuracy == pytest.approx(first.accuracy, abs=2)


def test_when_demand_rises_answers_become_less_accurate_instead_of_late() -> None:
    stream = arrivals((40, 20, 10), (40, 300, 10))
    first = plan_proteus(problem(20, 10))
    static = serve(serving(first), stream)[1]
    again = serving(first, replanning=Replanning(plan))
    scaled = serve(again, stream)[1]
    assert static.violation_ratio > 0.3
    assert scaled.violation_ratio < 0.1
    assert scaled.accuracy is not None
    assert static.accuracy is not None
    assert 60 <= scaled.accuracy < static.accuracy <= 90
    assert again.plans > 5
    assert again.loads > 0


@pytest.mark.parametrize("name", ["period_s", "burst"])
def test_when_to_plan_again_has_to_be_a_number(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is nan"):
        Replanning(plan, **{name: math.nan})
    with pytest.raises(ValueError, match="period_s is 0; it has to be more than 0"):
        Replanning(plan, period_s=0)


def test_no_burst_may_be_one_to_plan_for() -> None:
    first = plan_proteus(problem(20, 10))
    again = serving(first, replanning=Replanning(plan, period_s=1000, burst=math.inf))
    serve(again, arrivals((2, 5, 5), (2, 300, 10)))
    assert again.plans == 1  # at the end of its period


def test_where_no_plan_is_found_the_old_one_stays() -> None:
    def none(demand_qps: Mapping[str, float], before: Placement) -> Placement:
        raise PlanningError("no time left")

    stream = arrivals((40, 60, 10))
    first = plan_proteus(problem(60, 10))
    never, fails = serving(first), serving(first, replanning=Replanning(none))
    assert serve(never, stream)[1] == serve(fails, stream)[1]
    assert fails.plans > 1
    assert fails.placement is first


def test_the_wait_for_another_plan_is_not_of_the_simulation() -> None:
    """Found: devices counted as idle until the period after the last request ended."""
    stream = arrivals((10, 60, 10))
    first = plan_proteus(problem(60, 10))
    again = serving(first, replanning=Replanning(lambda demand, before: before, period_s=300))
    assert serve(serving(first), stream)[1] == serve(again, stream)[1]
    assert again.plans == 1


def test_variants_that_load_slowly_cost_answers() -> None:
    stream = arrivals((20, 20, 10), (20, 300, 10))
    first = plan_proteus(problem(20, 10))
    quick = serve(serving(first, replanning=Replanning(plan), load_s=0.02), stream)[1]
    loading = serving(first, replanning=Replanning(plan), load_s=8)
    slow = serve(loading, stream)[1]
    assert slow.violations > quick.violations + 500
    # Also those that went to another device meanwhile: else one that lost some would get no more.
    assert [each.open for each in loading.nodes] == [0] * len(KINDS)


@settings(max_examples=10)
@given(st.data())
def test_no_request_is_lost_while_devices_change(data: st.DataObject) -> None:
    """Each plan is one at random, so that devices change at any time."""
    random = Random(data.draw(st.integers(0, 1000)))

    def any_plan(demand_qps: Mapping[str, float], before: Placement) -> Placement:
        return plan_proteus(problem(random.choice((1, 50, 400)), random.choice((1, 50, 400))))

    rates = data.draw(st.tuples(st.sampled_from((5, 60, 300)), st.sampled_from((1, 100))))
    stream = arrivals((5, *rates))
    replanning = Replanning(any_plan, period_s=data.draw(st.sampled_from((0.5, 2.0))))
    load_s = data.draw(st.sampled_from((0, 0.01, 0.7)))
    # serve() checks the contract of policies, and that all requests are in the report.
    _, report = serve(
        serving(plan_proteus(problem(5, 5)), replanning=replanning, load_s=load_s), stream
    )
    assert report.requests == len(stream)
    assert not report.unanswered


def test_a_family_that_nobody_asked_for_can_be_asked_for_later() -> None:
    first = plan_proteus(problem(20, 1))
    stream = arrivals((30, 20, 0.001), (30, 20, 30))
    _, report = serve(serving(first, replanning=Replanning(plan)), stream)
    assert report.violation_ratio < 0.05


def test_a_family_without_a_device_is_not_answered() -> None:
    first = plan_proteus(Problem({"gpu": 4, "tpu": 0}, [*OPTIONS[:2], TPU], {"cats": 9, "dogs": 9}))
    _, report = serve(serving(first), arrivals((10, 9, 9)))
    assert report.on_time > 50
    assert report.dropped > 50
    assert report.on_time + report.dropped == report.requests


def test_what_waits_for_a_variant_is_handed_back_once() -> None:
    device = _Device(rule_maker("auto"))
    device.switch(0, OPTIONS[0], SECOND)
    request = Request(1, 1, key="cats")
    assert device.on_event(1, request) == ()
    assert device.switch(2, OPTIONS[1], SECOND) == [request]
    assert device.switch(3, OPTIONS[2], SECOND) == []
