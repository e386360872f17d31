"""Placements are as accurate as brute force finds, and never promise what devices cannot do."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from harness import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.making import option, problems, solve_for_minutes
from trims_shim.errors import PlanningError
from trims_shim.planner import Group, Placement, Problem, plan_proteus, programme, proteus
from trims_shim.planner.programme import OutOfTime, Programme, Solution


def counts_of(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every number of devices for every option."""
    choices = [range(problem.devices[each.device] + 1) for each in problem.options]
    for counts in itertools.product(*choices):
        used = dict.fromkeys(problem.devices, 0)
        for each, count in zip(problem.options, counts, strict=True):
            used[each.device] += count
        if all(used[kind] <= devices for kind, devices in problem.devices.items()):
            yield counts


def best(problem: Problem) -> tuple[float, float, float]:
    """(the largest share of each family's demand, requests served with it, their accuracy)."""
    found = (0.0, 0.0, 0.0)
    for counts in counts_of(problem):
        served, right, share = 0.0, 0.0, 1.0
        for family in problem.families:
            left = problem.demand_qps[family]
            rooms = [
                (each.accuracy, count * each.peak_qps)
                for each, count in zip(problem.options, counts, strict=True)
                if each.family == family
            ]
            share = min(share, sum(room for _, room in rooms) / left)
            for accuracy, room in sorted(rooms, reverse=True):
                taken = min(left, room)
                left -= taken
                served += taken
                right += taken * accuracy
        # The least share decides, then the number of answers, then how many are right.
        found = max(found, (round(share, 6), round(served, 6), right))
    return found


def check(problem: Problem, placement: Placement) -> None:
    """No more devices than there are, and no group has more than it can do."""
    for kind, used in placement.devices.items():
        assert used <= problem.devices[kind]
    for group in placement.groups:
        assert 0 <= group.utilisation <= 1 + 1e-6


@given(problems())
def test_no_placement_is_better(problem: Problem) -> None:
    share, served, right = best(problem)
    placement = plan_proteus(problem, headroom=1.0, gap=0.0)
    check(problem, placement)
    if not problem.families:
        assert not placement.groups
        return
    planned = sum(group.planned_qps for group in placement.groups)
    assert placement.headroom == pytest.approx(share, abs=1e-4)
    assert min(placement.served.values()) == pytest.approx(share, abs=1e-4)
    assert planned == pytest.approx(served, rel=1e-4, abs=1e-4)
    assert planned * placement.accuracy == pytest.approx(right, rel=1e-4, abs=1e-3)
    assert placement.accuracy <= placement.accuracy_bound + 1e-9


@given(problems(), st.sampled_from((0.5, 1.3, 3.0)))
def test_headroom_is_room_that_is_not_planned_for(problem: Problem, headroom: float) -> None:
    placement = plan_proteus(problem, headroom=headroom, gap=0.0)
    check(problem, placement)
    assert placement.headroom <= headroom
    for family, share in placement.served.items():
        assert share >= min(1.0, placement.headroom) - 1e-4
        room = sum(
            group.devices * group.option.peak_qps
            for group in placement.groups
            if group.option.family == family
        )
        assert room >= placement.headroom * problem.demand_qps[family] * (1 - 1e-4)


def test_devices_that_the_optimum_does_not_need_give_room() -> None:
    options = [option("cats", "large", "gpu", 90, 40), option("dogs", "large", "gpu", 90, 40)]
    problem = Problem({"gpu": 6}, options, {"cats": 10, "dogs": 30})
    placement = plan_proteus(problem, headroom=1.0)
    devices = {group.option.family: group.devices for group in placement.groups}
    assert devices == {"cats": 2, "dogs": 4}


def test_as_many_devices_as_are_needed() -> None:
    devices: dict[str, Any] = {"gpu": math.inf}
    (group,) = plan_proteus(
        Problem(devices, [option("cats", "x", "gpu", 90, 4)], {"cats": 9})
    ).groups
    assert 1 <= group.devices < math.inf


def test_the_first_plan_uses_all_devices_however_little_room_each_gives() -> None:
    """Less than a change would cost, but nothing ran before."""
    problem = Problem({"gpu": 100}, [option("cats", "c", "gpu", 80, 10)], {"cats": 600})
    for before in (None, Placement((), problem.demand_qps, 1.0)):
        (group,) = plan_proteus(problem, before=before).groups
        assert group.devices == 100


def test_room_is_given_by_all_variants_that_the_optimum_has() -> None:
    options = [option("cats", "small", "cpu", 60, 40), option("cats", "large", "gpu", 90, 10)]
    options.append(option("dogs", "small", "cpu", 60, 40))
    problem = Problem({"cpu": 6, "gpu": 1}, options, {"cats": 30, "dogs": 30})
    placement = plan_proteus(problem, headroom=1.0)
    assert [group.devices for group in placement.groups] == [3, 1, 3]


def test_room_is_first_for_families_that_have_least() -> None:
    """Three more devices would be five times the demand of each of the others."""
    options = [option(name, name, "gpu", 90, 10 if name < "d" else 100) for name in "abcdef"]
    demand_qps = {each.family: 10.0 if each.family < "d" else 20.0 for each in options}
    placement = plan_proteus(Problem({"gpu": 9}, options, demand_qps), headroom=1.0)
    assert [group.devices for group in placement.groups] == [2, 2, 2, 1, 1, 1]


def test_without_the_time_to_give_room_the_optimum_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Mapping[int, float]] = []

    class Late(Programme):
        def maximise(self, goal: Mapping[int, float], **options: Any) -> Solution | None:
            made.append(goal)
            if len(made) > 2:
                raise OutOfTime
            return super().maximise(goal, **options)

    monkeypatch.setattr(proteus, "Programme", Late)
    options = [option("cats", "small", "cpu", 60, 40), option("cats", "large", "gpu", 90, 40)]
    placement = plan_proteus(Problem({"cpu": 1, "gpu": 1}, options, {"cats": 30}))
    assert placement.served == pytest.approx({"cats": 1.0})
    assert {group.option.variant for group in placement.groups} == {"small", "large"}


@pytest.mark.parametrize(("small", "large"), [(60, 90), (89.95, 90), (6e-8, 9e-8), (6e200, 9e200)])
def test_room_for_bursts_does_not_make_answers_worse(small: float, large: float) -> None:
    """Not even a little, and on whatever scale accuracy is."""
    options = [option("cats", "small", "cpu", small, 40), option("cats", "large", "gpu", large, 40)]
    placement = plan_proteus(Problem({"cpu": 3, "gpu": 1}, options, {"cats": 30}), headroom=1.0)
    assert [group.option.variant for group in placement.groups] == ["large"]


def test_a_family_that_is_hardly_asked_for_has_a_device() -> None:
    """What is asked for is less than the solver takes for nothing."""
    options = [option("cats", "c", "gpu", 80, 10), option("dogs", "d", "gpu", 80, 10)]
    demand_qps = {"cats": 8.0, "dogs": 1e-7}
    placement = plan_proteus(Problem({"gpu": 2}, options, demand_qps))
    assert {group.option.variant: group.devices for group in placement.groups} == {"c": 1, "d": 1}
    assert placement.served == pytest.approx({"cats": 1.0, "dogs": 1.0})
    assert [group.planned_qps for group in placement.groups] == pytest.approx([8.0, 1e-7])
    assert plan_proteus(Problem({"gpu": 1}, options, demand_qps)).headroom == 0


@pytest.mark.parametrize("headroom", [1.0, 1e9])
def test_however_much_is_asked_for_each_family_gets_its_share(headroom: float) -> None:
    options = [option("cats", "c", "gpu", 80, 10), option("dogs", "d", "gpu", 90, 20)]
    problem = Problem({"gpu": 5}, options, {"cats": 400.0, "dogs": 400.0})
    placement = plan_proteus(problem, headroom=headroom)
    assert {group.option.variant: group.devices for group in placement.groups} == {"c": 3, "d": 2}
    assert placement.headroom == pytest.approx(30 / 400)


def test_the_gap_is_of_the_accuracy_not_of_the_demand_that_is_answered() -> None:
    rates = {"a": 10, "b": 14, "c": 24, "d": 31, "e": 47, "f": 53}
    options = [option(name, name, "gpu", 80, qps) for name, qps in rates.items()]
    problem = Problem({"gpu": 17}, options, dict.fromkeys(rates, 400.0))
    exact, quick = (plan_proteus(problem, headroom=1.0, gap=gap) for gap in (0.0, 0.5))
    assert quick.headroom == pytest.approx(exact.headroom, rel=1e-4)


def test_answers_that_are_never_right_are_planned_for() -> None:
    problem = Problem({"gpu": 1}, [option("cats", "c", "gpu", 0, 10)], {"cats": 5.0})
    placement = plan_proteus(problem)
    assert (placement.served, placement.accuracy) == ({"cats": 1.0}, 0.0)


def test_little_demand_has_a_device_beside_far_more_than_can_be_answered() -> None:
    """Its share of a demand is less than the solver takes for nothing."""
    options = [option("cats", "c", "gpu", 80, 5), option("dogs", "d", "gpu", 80, 10)]
    placement = plan_proteus(Problem({"gpu": 3}, options, {"cats": 1e5, "dogs": 1e-3}))
    assert {group.option.variant: group.devices for group in placement.groups} == {"c": 2, "d": 1}
    assert placement.headroom == pytest.approx(2 * 5 / 1e5, rel=1e-4)


def test_little_demand_is_answered_beside_far_more_than_can_be() -> None:
    """All of it is less than the solver's tolerance in the sum of all requests."""
    options = [option("cats", "c", "gpu", 80, 1e5), option("dogs", "d", "gpu", 80, 10)]
    placement = plan_proteus(Problem({"gpu": 3}, options, {"cats": 1e7, "dogs": 0.1}))
    assert placement.served == pytest.approx({"cats": 2e5 / 1e7, "dogs": 1.0})


def test_little_demand_that_is_planned_for_at_last_is_so_once() -> None:
    """Two groups have room for more than all of it."""
    options = [option("cats", "c", "gpu", 80, 1e5)]
    options += [option("dogs", "d", kind, 80, 0.06) for kind in ("tpu", "cpu")]
    problem = Problem({"gpu": 2, "tpu": 1, "cpu": 1}, options, {"cats": 1e7, "dogs": 0.1})
    assert [each.planned_qps for each in plan_proteus(problem).groups] == [
        pytest.approx(2e5),
        *(pytest.approx(0.05), pytest.approx(0.05)),
    ]


def test_little_demand_is_answered_beside_a_family_that_no_device_can_run() -> None:
    options = [option("cats", "c", "cpu", 80, 10), option("dogs", "d", "gpu", 80, 10)]
    problem = Problem({"cpu": 0, "gpu": 3}, options, {"cats": 60.0, "dogs": 1e-7})
    assert plan_proteus(problem).served == pytest.approx({"cats": 0.0, "dogs": 1.0})


@pytest.mark.parametrize(
    ("accuracy", "stays"), [(90, True), (89.95, True), (89.5, False), (80, False)]
)
def test_what_runs_stays_where_a_change_gains_nothing(accuracy: float, *, stays: bool) -> None:
    """Nothing, or less than the gap."""
    options = [option("cats", "one", "gpu", accuracy, 40), option("cats", "other", "gpu", 90, 40)]
    problem = Problem({"gpu": 2}, options, {"cats": 60})
    for variant in options:
        before = plan_proteus(Problem({"gpu": 2}, [variant], {"cats": 60}))
        after = plan_proteus(problem, before=before)
        kept = variant if stays else options[1]
        assert [group.option for group in after.groups] == [kept]


@pytest.mark.parametrize(
    ("kinds", "running", "wanted"),
    [(("gpu", "gpu"), (5, 1), (3, 3)), (("gpu", "cpu"), (1, 1), (6, 1))],
)
def test_devices_change_where_that_gives_room(
    kinds: tuple[str, ...], running: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    """To the family that has least, or beside one that can have no more."""
    options = [option(name, name, kind, 90, 40) for name, kind in zip("ab", kinds, strict=True)]
    groups = tuple(Group(each, n, 30.0) for each, n in zip(options, running, strict=True))
    problem = Problem({"gpu": 6, "cpu": 1}, options, {"a": 30.0, "b": 30.0})
    before = Placement(groups, problem.demand_qps, 1.0)
    after = plan_proteus(problem, headroom=1.0, before=before)
    assert tuple(group.devices for group in after.groups) == wanted


def test_an_overload_is_answered_as_far_as_can_be_not_as_accurately() -> None:
    """With cats at their share, dogs get 40 quick answers and not 30 better ones."""
    options = [
        option("cats", "only", "cpu", 80, 10),
        option("dogs", "quick", "gpu", 60, 40),
        option("dogs", "slow", "gpu", 90, 30),
    ]
    problem = Problem({"cpu": 1, "gpu": 1}, options, {"cats": 100, "dogs": 100})
    placement = plan_proteus(problem, headroom=1.0)
    assert [group.option.variant for group in placement.groups] == ["only", "quick"]


@pytest.mark.parametrize("variants", [("quick", "slow"), ("slow", "quick")])
def test_how_much_can_be_answered_is_by_the_quickest_variant(variants: tuple[str, ...]) -> None:
    rates = {"quick": 40, "slow": 10}
    options = [option("cats", name, "gpu", 80, rates[name]) for name in variants]
    placement = plan_proteus(Problem({"gpu": 1}, options, {"cats": 80.0}), headroom=1.0)
    assert placement.headroom == pytest.approx(0.5)


def test_groups_of_a_family_are_equally_busy() -> None:
    options = [option("cats", "large", kind, 90, 40) for kind in ("cpu", "gpu")]
    problem = Problem({"cpu": 1, "gpu": 3}, options, {"cats": 40})
    busy = [group.utilisation for group in plan_proteus(problem, headroom=1.0).groups]
    assert busy == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(("bound", "expected"), [(1.2, 1.2), (1.0 - 1e-9, 1.0)])
def test_how_accurate_a_plan_may_be_is_what_the_solver_says(
    bound: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it is as accurate as it is."""

    class Unsure(Programme):
        def maximise(self, goal: Mapping[int, float], **options: Any) -> Solution | None:
            found = super().maximise(goal, **options)
            return found and replace(found, bound=bound * found.goal)

    monkeypatch.setattr(proteus, "Programme", Unsure)
    options = [option("cats", "small", "gpu", 60, 40), option("cats", "large", "gpu", 90, 10)]
    placement = plan_proteus(Problem({"gpu": 2}, options, {"cats": 30}), headroom=1.0)
    assert placement.accuracy_bound >= placement.accuracy
    assert placement.accuracy_bound == pytest.approx(expected * placement.accuracy, rel=1e-5)


def test_the_bound_is_of_plans_that_change_more_too() -> None:
    """Found: it was that of the plan, which stays where another is better by less than the gap."""
    options = [option("cats", "old", "gpu", 90, 40), option("cats", "new", "gpu", 90.05, 40)]
    problem = Problem({"gpu": 1}, options, {"cats": 10})
    before = plan_proteus(replace(problem, options=options[:1]))
    after = plan_proteus(problem, before=before)
    assert after.accuracy == pytest.approx(90)
    assert after.accuracy_bound >= 90.0499


def test_a_family_without_options_is_named() -> None:
    problem = Problem({"gpu": 1}, [option("cats", "large", "gpu", 90, 40)], {"cats": 1, "dogs": 1})
    with pytest.raises(PlanningError, match="no device runs a variant of 'dogs'"):
        plan_proteus(problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"headroom": 0.0}, "headroom is 0.0; it has to be more than 0"),
        ({"headroom": math.inf}, "headroom is inf, which is too much"),
        ({"gap": -1.0}, "gap is -1.0; it has to be 0 or more"),
        ({"gap": math.nan}, "gap is nan"),
        ({"time_limit_s": 0.0}, "time_limit_s is 0.0; it has to be more than 0"),
        ({"time_limit_s": math.nan}, "time_limit_s is nan"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, float], message: str) -> None:
    problem = Problem({"gpu": 1}, [option("cats", "c", "gpu", 80, 10)], {"cats": 1.0})
    with pytest.raises(ValueError, match=message):
        plan_proteus(problem, **arguments)  # type: ignore[arg-type]


def test_without_a_solver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    programme._highs.cache_clear()
    problem = Problem({"gpu": 1}, [option("cats", "large", "gpu", 90, 40)], {"cats": 1})
    with pytest.raises(PlanningError, match=r"pip install 'trims-shim\[planner\]'"):
        plan_proteus(problem)


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    options = [option("cats", name, "gpu", 60 + 10 * i, 40 - i) for i, name in enumerate("abcd")]
    plan_proteus(Problem({"gpu": 7}, options, {"cats": 130}))
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_does_not_wait_for_the_solver() -> None:
    """Whether it comes before the solver starts, or while it runs."""
    began_s = time.monotonic()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            solve_for_minutes()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began_s < PATIENCE_S


def test_ctrl_c_while_the_solver_is_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: it ran on until its time was up, and the program could not end before."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve_for_minutes()
    (solving,) = started
    solving.join(PATIENCE_S)
    assert not solving.is_alive()


def test_a_program_ends_while_a_thread_of_it_plans() -> None:
    program = (
        "import threading, time\n"
        "from tests.planner.making import solve_for_minutes\n"
        "import highspy\n"
        "began_s = time.process_time()\n"
        "threading.Thread(target=solve_for_minutes, daemon=True).start()\n"
        "while time.process_time() < began_s + 0.5:\n"
        "    time.sleep(0.01)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_can_plan_after_its_parent_has() -> None:
    """HiGHS keeps threads for the next programme, and they are not in a child."""
    options = [option("cats", name, "gpu", 60 + 10 * i, 40 - i) for i, name in enumerate("abcd")]
    problem = Problem({"gpu": 7}, options, {"cats": 130})
    plan_proteus(problem)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=plan_proteus, args=(problem,))
    child.start()
    child.join(PATIENCE_S)
    child.kill()
    child.join()
    assert child.exitcode == 0
