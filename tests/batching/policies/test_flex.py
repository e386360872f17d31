"""Flex: which batch goes, what is preempted for it, and that nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.checking import Checked
from batching.policies.flex_optimum import most_in_time
from trims_shim.batching.policies.choice import Choice, by_need, by_size
from trims_shim.batching.policies.flex import Flex
from trims_shim.batching.policies.generation import Generation, by_earliest, by_largest
from trims_shim.batching.policies.preemptible import PreemptibleModel, even_exits
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    FLUSH,
    Action,
    Cancelled,
    Drop,
    DropReason,
    Finished,
    Preempt,
    Preempted,
    Request,
    Run,
)
from trims_shim.batching.simulator import Report, simulate

LONG = PreemptibleModel(LatencyProfile([100, 104, 108, 112, 116, 120, 124, 128]), 8, even_exits(4))
SHORT = PreemptibleModel(LatencyProfile([10, 11, 12, 13, 14, 15, 16, 17]), 8, even_exits(2))
SOLID = PreemptibleModel(LONG.profile, 8)
MODELS = {"long": LONG, "short": SHORT, "solid": SOLID}


def requests_of(
    key: str, count: int, deadline_ns: int, *, at_ns: int = 0, first: int = 0, priority: int = 0
) -> list[Request]:
    return [Request(first + index, at_ns, deadline_ns, priority, key) for index in range(count)]


def send(policy: Flex, requests: Sequence[Request]) -> list[Action]:
    """All of them as they arrive; what it did."""
    return [each for request in requests for each in policy.on_event(request.arrival_ns, request)]


def numbers(action: Action) -> list[int]:
    assert isinstance(action, Run)
    return [each.number for each in action.batch]


def busy_with(policy: Flex, key: str, count: int = 1, *, first: int = 0) -> list[Request]:
    """Let the one device run a batch of ``count``, from time 0 on."""
    requests = requests_of(key, count + 1, 10_000, first=first)
    (run,) = send(policy, requests)
    assert isinstance(run, Run)
    (run,) = policy.on_event(0, Finished(0, run.batch, 0))
    assert numbers(run) == [each.number for each in requests[1:]]
    return requests[1:]


# --- which batch goes -----------------------------------------------------------------------------


def test_a_request_that_finds_a_free_device_goes_at_once() -> None:
    (run,) = send(Flex(MODELS), requests_of("short", 1, 50))
    assert isinstance(run, Run)
    assert (run.device, numbers(run)) == (0, [0])


@pytest.mark.parametrize("make", [Flex, Flex.of_paper])
def test_the_largest_batch_of_all_models_goes(make: type[Flex]) -> None:
    policy = make(MODELS, preemption_factor=None)
    running = busy_with(policy, "solid")
    waiting = [*requests_of("short", 2, 10_000, first=10), *requests_of("long", 3, 9_000, first=20)]
    assert send(policy, waiting) == []
    (run,) = policy.on_event(100, Finished(0, running, 0))
    assert numbers(run) == [20, 21, 22]


def test_of_equal_batches_the_more_urgent_one_goes() -> None:
    policy = Flex(MODELS, preemption_factor=None)
    running = busy_with(policy, "solid")
    send(policy, requests_of("short", 2, 5_000, first=10))
    send(policy, requests_of("long", 2, 4_000, first=20))
    (run,) = policy.on_event(100, Finished(0, running, 0))
    assert numbers(run) == [20, 21]


def test_a_small_batch_that_cannot_wait_goes_before_a_large_one_that_can() -> None:
    """And not in the paper: there the large one goes, and the small one is lost."""
    for make, chosen in ((Flex, [10, 11]), (Flex.of_paper, [20, 21, 22])):
        policy = make(MODELS, preemption_factor=None)
        running = busy_with(policy, "solid")
        send(policy, requests_of("short", 2, 130, first=10))
        send(policy, requests_of("long", 3, 10_000, first=20))
        (run,) = policy.on_event(100, Finished(0, running, 0))
        assert numbers(run) == chosen


def test_priority_goes_before_size() -> None:
    policy = Flex(MODELS, preemption_factor=None)
    running = busy_with(policy, "solid")
    send(policy, requests_of("short", 1, 10_000, first=10, priority=1))
    send(policy, requests_of("long", 3, 10_000, first=20))
    (run,) = policy.on_event(100, Finished(0, running, 0))
    assert numbers(run) == [10]


def test_hopeless_requests_are_dropped() -> None:
    policy = Flex(MODELS, preemption_factor=None)
    running = busy_with(policy, "solid")
    waiting = requests_of("short", 1, 105, first=10)
    send(policy, waiting)
    assert policy.on_event(100, Finished(0, running, 0)) == [Drop(waiting, DropReason.HOPELESS)]


def test_a_margin_is_kept_free() -> None:
    (drop,) = send(Flex(MODELS, margin_ns=41), requests_of("short", 1, 50))
    assert isinstance(drop, Drop)
    (run,) = send(Flex(MODELS, margin_ns=40), requests_of("short", 1, 50))
    assert isinstance(run, Run)


def test_the_margin_counts_for_the_whole_batch() -> None:
    """Two would end at 111, and have to by 110."""
    policy = Flex(MODELS, preemption_factor=None, margin_ns=40)
    running = busy_with(policy, "solid")
    send(policy, requests_of("short", 2, 150, first=10))
    (run,) = policy.on_event(100, Finished(0, running, 0))
    assert numbers(run) == [10]


def test_the_margin_counts_for_those_who_go_second() -> None:
    """The long ones would follow the short one at 110, and end at 218: by 229, but not by 209."""
    for margin_ns, chosen in ((0, [10]), (20, [20, 21, 22])):
        policy = Flex(MODELS, preemption_factor=None, margin_ns=margin_ns)
        running = busy_with(policy, "solid")
        send(policy, requests_of("short", 1, 131, first=10))
        send(policy, requests_of("long", 3, 229, first=20))
        (run,) = policy.on_event(100, Finished(0, running, 0))
        assert numbers(run) == chosen


def test_more_devices_run_more_batches() -> None:
    policy = Flex(MODELS, devices=2)
    runs = send(policy, requests_of("long", 2, 10_000))
    assert [run.device for run in runs if isinstance(run, Run)] == [0, 1]


# --- preemption -----------------------------------------------------------------------------------


def test_a_batch_that_is_lambda_times_larger_preempts() -> None:
    """The short ones arrive at 30, can start at the exit at 50 and must not wait until 100."""
    policy = Flex(MODELS)
    running = busy_with(policy, "long")
    urgent = requests_of("short", 4, 90, at_ns=30, first=10)
    assert send(policy, urgent[:3]) == []
    assert send(policy, urgent[3:]) == [Preempt(0)]
    (run,) = policy.on_event(50, Preempted(0, running, 0))
    assert numbers(run) == [10, 11, 12, 13]


def test_what_was_preempted_runs_again_if_it_can() -> None:
    policy = Flex(MODELS)
    running = busy_with(policy, "long")
    send(policy, requests_of("short", 4, 90, at_ns=30, first=10))
    (run,) = policy.on_event(50, Preempted(0, running, 0))
    assert isinstance(run, Run)
    (again,) = policy.on_event(63, Finished(0, run.batch, 50))
    assert numbers(again) == [each.number for each in running]


def test_what_was_preempted_and_is_late_by_then_is_dropped() -> None:
    policy = Flex(MODELS)
    (run,) = send(policy, requests_of("long", 1, 150))
    assert isinstance(run, Run)
    running = run.batch
    send(policy, requests_of("short", 4, 90, at_ns=30, first=10))
    drop, run = policy.on_event(51, Preempted(0, running, 0))
    assert drop == Drop(list(running), DropReason.HOPELESS)
    assert numbers(run) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("key", "deadline_ns", "at_ns", "reason"),
    [
        ("solid", 90, 30, "there is no exit point"),
        ("long", 90, 76, "the last exit point has passed"),
        ("long", 62, 30, "too late at the exit point"),
        ("long", 10_000, 30, "they can wait for the device as well"),
    ],
)
def test_no_preemption_where_it_gains_nothing(
    key: str, deadline_ns: int, at_ns: int, reason: str
) -> None:
    policy = Flex(MODELS)
    busy_with(policy, key)
    assert send(policy, requests_of("short", 4, deadline_ns, at_ns=at_ns, first=10)) == [], reason


def test_a_small_batch_is_preempted_also_after_a_large_one_that_could_not_be() -> None:
    policy = Flex(MODELS)
    running = busy_with(policy, "long", 4)
    waiting = requests_of("short", 1, 10_000, at_ns=30, first=10)
    assert send(policy, waiting) == []
    policy.on_event(112, Finished(0, running, 0))
    (last,) = requests_of("long", 1, 10_000, at_ns=115, first=20)
    assert send(policy, [last]) == []
    (run,) = policy.on_event(122, Finished(0, waiting, 112))
    assert numbers(run) == [20]
    urgent = requests_of("short", 4, 212, at_ns=152, first=30)
    assert send(policy, urgent) == [Preempt(0)]


def test_the_paper_preempts_also_who_could_wait() -> None:
    policy = Flex.of_paper(MODELS)
    busy_with(policy, "long")
    waiting = requests_of("short", 4, 10_000, at_ns=30, first=10)
    assert send(policy, waiting) == [Preempt(0)]


def test_without_a_factor_nothing_is_preempted() -> None:
    policy = Flex.of_paper(MODELS, preemption_factor=None)
    busy_with(policy, "long")
    assert send(policy, requests_of("short", 8, 90, at_ns=30, first=10)) == []


def test_a_higher_priority_is_not_preempted() -> None:
    policy = Flex.of_paper(MODELS)
    send(policy, requests_of("long", 1, 10_000, priority=1))
    assert send(policy, requests_of("short", 8, 90, at_ns=30, first=10)) == []


def test_a_batch_grows_by_preempting_its_own_model() -> None:
    """The paper's listing: the candidate of the running model holds what runs already."""
    policy = Flex.of_paper(MODELS)
    busy_with(policy, "long")
    more = requests_of("long", 3, 10_000, at_ns=10, first=10)
    assert send(policy, more[:2]) == []
    assert send(policy, more[2:]) == [Preempt(0)]


def test_nothing_is_given_up_for_those_who_can_all_wait() -> None:
    """Nor a batch of their own model: a larger one would answer nobody more in time."""
    for key in ("long", "short"):
        policy = Flex(MODELS)
        busy_with(policy, "long")
        assert send(policy, requests_of(key, 5, 10_000, at_ns=1, first=10)) == []


def test_a_batch_grows_where_not_all_of_its_model_can_wait() -> None:
    policy = Flex(MODELS)
    runs = send(policy, requests_of("long", 1, 10_000))
    end_ns = MODELS["long"].profile.latency_ns(1)
    waiting = requests_of("long", 5, end_ns + 60, at_ns=1, first=10)
    assert runs
    assert Preempt(0) in send(policy, waiting)


def test_the_smallest_of_several_batches_is_preempted() -> None:
    """Both could be: four are twice as many as two, and more than one."""
    policy = Flex.of_paper(MODELS, devices=2, preemption_factor=2)
    runs = send(policy, requests_of("solid", 2, 10_000))
    waiting = requests_of("solid", 3, 10_000, first=30)
    send(policy, requests_of("long", 2, 10_000, first=10, priority=1))
    send(policy, [*requests_of("short", 1, 10_000, first=20, priority=1), *waiting])
    for run, expected in zip(runs, ([10, 11], [20]), strict=True):
        assert isinstance(run, Run)
        (next_run,) = policy.on_event(100, Finished(run.device, run.batch, 0))
        assert numbers(next_run) == expected
    urgent = requests_of("solid", 1, 10_000, at_ns=101, first=40, priority=2)
    assert send(policy, urgent) == [Preempt(1)]


def test_a_device_on_its_way_out_is_not_preempted_again() -> None:
    policy = Flex.of_paper(MODELS)
    busy_with(policy, "long")
    assert send(policy, requests_of("short", 4, 9_000, at_ns=30, first=10)) == [Preempt(0)]
    assert send(policy, requests_of("short", 4, 9_000, at_ns=31, first=20)) == []


def test_what_a_device_is_preempted_for_is_not_taken_by_another() -> None:
    """Nor is a second device preempted for it."""
    policy = Flex.of_paper(MODELS, devices=2)
    runs = send(policy, requests_of("long", 2, 10_000))
    assert send(policy, requests_of("short", 4, 9_000, at_ns=30, first=10)) == [Preempt(0)]
    assert send(policy, requests_of("short", 1, 9_000, at_ns=31, first=20)) == []
    second = runs[1]
    assert isinstance(second, Run)
    (run,) = policy.on_event(100, Finished(1, second.batch, 0))
    assert numbers(run) == [20]


def test_what_is_reserved_goes_to_a_device_that_would_idle() -> None:
    policy = Flex.of_paper(MODELS, devices=2)
    runs = send(policy, requests_of("long", 2, 10_000))
    first, second = (run.batch for run in runs if isinstance(run, Run))
    assert send(policy, requests_of("short", 4, 9_000, at_ns=30, first=10)) == [Preempt(0)]
    (run,) = policy.on_event(49, Finished(1, second, 0))
    assert numbers(run) == [10, 11, 12, 13]
    (run,) = policy.on_event(50, Preempted(0, first, 0))
    assert numbers(run) == [0]


def test_a_batch_that_ends_before_its_exit_frees_what_was_reserved() -> None:
    policy = Flex.of_paper(MODELS)
    running = busy_with(policy, "long")
    send(policy, requests_of("short", 4, 9_000, at_ns=30, first=10))
    (run,) = policy.on_event(49, Finished(0, running, 0))
    assert numbers(run) == [10, 11, 12, 13]


def test_arrivals_until_the_exit_join_the_batch() -> None:
    policy = Flex.of_paper(MODELS)
    running = busy_with(policy, "long")
    send(policy, requests_of("short", 5, 9_000, at_ns=30, first=10))
    (run,) = policy.on_event(50, Preempted(0, running, 0))
    assert numbers(run) == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("position", [0, 4])
def test_the_cancelled_do_not_run(position: int) -> None:
    """Neither one that is reserved nor one that is queued."""
    policy = Flex.of_paper(MODELS)
    running = busy_with(policy, "long")
    waiting = requests_of("short", 5, 9_000, at_ns=30, first=10)
    send(policy, waiting)
    assert policy.on_event(31, Cancelled(waiting[position])) == []
    (run,) = policy.on_event(50, Preempted(0, running, 0))
    assert waiting[position].number not in numbers(run)
    assert len(numbers(run)) == 4


def test_a_batch_whose_successors_are_all_cancelled_runs_again() -> None:
    policy = Flex.of_paper(MODELS)
    running = busy_with(policy, "long")
    waiting = requests_of("short", 4, 9_000, at_ns=30, first=10)
    assert send(policy, waiting) == [Preempt(0)]
    for each in waiting:
        assert policy.on_event(31, Cancelled(each)) == []
    (run,) = policy.on_event(50, Preempted(0, running, 0))
    assert numbers(run) == [each.number for each in running]


# --- what is refused ------------------------------------------------------------------------------


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no model 'other'; there are long, short, solid"):
        Flex(MODELS).on_event(0, Request(0, 0, 100, 0, "other"))


@pytest.mark.parametrize(
    ("option", "value"), [("devices", 0), ("preemption_factor", 1.0), ("preemption_factor", 0.5)]
)
def test_what_cannot_work_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        Flex(MODELS, **{option: value})  # type: ignore[arg-type]


def test_models_can_be_added_and_idle_ones_are_forgotten() -> None:
    policy = Flex({})
    policy.add("short", SHORT)
    busy_with(policy, "short")
    for number in range(1024):
        policy.add(number, LONG)
    assert set(policy.models) == {"short", 1023}
    assert send(policy, requests_of("short", 1, 50)) == []


# --- all of it ------------------------------------------------------------------------------------

UNIT_NS = 1000
KEYS = ("a", "b", "c")


def instance(seed: int, *, most: int) -> tuple[list[Request], dict[str, PreemptibleModel]]:
    """Requests at whole units, for models that can be given up at every unit."""
    random = Random(seed)
    models = {}
    for key in KEYS:
        beta, alpha = random.randint(1, 8), random.randint(0, 2)
        latencies = [(beta + alpha * size) * UNIT_NS for size in range(1, 5)]
        stages = {latency // UNIT_NS for latency in latencies}
        # Shares are the same for all sizes, so whole units need the product of the lengths.
        exits = sorted({step / count for count in stages for step in range(1, count)})
        models[key] = PreemptibleModel(LatencyProfile(latencies), 4, tuple(exits))
    arrivals = sorted(random.randint(0, 12) * UNIT_NS for _ in range(random.randint(1, most)))
    requests = []
    for number, arrival_ns in enumerate(arrivals):
        key = random.choice(KEYS)
        slack = random.randint(0, 10) * UNIT_NS
        deadline_ns = arrival_ns + models[key].profile.latency_ns(1) + slack
        requests.append(Request(number, arrival_ns, deadline_ns, 0, key))
    return requests, models


class WorkConserving(Checked):
    """Asserts that no device is free while a request is queued that could be in time."""

    def __init__(self, policy: Flex, devices: int) -> None:
        super().__init__(policy, max_batch_size=4, devices=devices)
        self._flex = policy

    def on_event(self, now_ns: int, event: object) -> Sequence[Action]:
        actions = super().on_event(now_ns, event)  # type: ignore[arg-type]
        if self.free:
            for request in self.queued.values():
                latency_ns = self._flex.models[request.key].profile.latency_ns(1)
                assert now_ns + latency_ns > request.deadline_ns
        return actions


@pytest.mark.parametrize("generation", [by_earliest, by_largest])
@given(
    seed=st.integers(0, 10**6),
    devices=st.integers(1, 3),
    factor=st.sampled_from([None, 1.2, 3.03]),
    gain=st.sampled_from([0.0, 1.0]),
    choice=st.sampled_from([by_need, by_size]),
)
def test_nothing_is_lost_late_or_left_waiting(
    generation: Generation,
    seed: int,
    devices: int,
    factor: float | None,
    gain: float,
    choice: Choice,
) -> None:
    requests, models = instance(seed, most=30)
    policy = Flex(
        models,
        devices=devices,
        preemption_factor=factor,
        preemption_gain=gain,
        generation=generation,
        choice=choice,
    )
    outcome = simulate(
        WorkConserving(policy, devices),
        requests,
        service_ns=lambda _, batch: models[batch[0].key].profile.latency_ns(len(batch)),
        next_exit_ns=lambda _, batch, passed_ns: models[batch[0].key].next_exit_ns(
            len(batch), passed_ns
        ),
    )
    report = Report.of(outcome, devices=devices)
    assert report.unanswered == 0
    assert report.late == 0, "every batch that was started was in time by the profile"
    assert not any(policy.queues.values())


@pytest.mark.parametrize("make", [Flex, Flex.of_paper])
@pytest.mark.parametrize("devices", [1, 2])
def test_it_stays_within_the_bound_of_the_paper(make: type[Flex], devices: int) -> None:
    """Within 12.62 times of a clairvoyant schedule, the paper's bound for lambda = 3.03.

    What this shows: no counterexample among some hundred random instances of up to six requests for
    three models, preemption being free and possible at every unit of time. It proves nothing about
    longer ones. The instances are far from the bound, so the test asks for half.
    """
    worst = 1.0
    for seed in range(120):
        requests, models = instance(seed, most=6)
        optimum = most_in_time(requests, models, devices=devices)
        outcome = simulate(
            make(models, devices=devices),
            requests,
            service_ns=lambda _, batch, models=models: (  # type: ignore[misc]
                models[batch[0].key].profile.latency_ns(len(batch))
            ),
            next_exit_ns=lambda _, batch, passed_ns, models=models: (  # type: ignore[misc]
                models[batch[0].key].next_exit_ns(len(batch), passed_ns)
            ),
        )
        reached = Report.of(outcome, devices=devices).on_time
        assert reached <= optimum
        assert optimum <= 12.62 * reached
        worst = max(worst, optimum / reached)
    assert 1.0 < worst <= 6.31


def test_preemption_bounds_the_loss() -> None:
    """One long batch against a crowd: without preemption the loss grows with the crowd."""
    crowd = requests_of("short", 8, 60, at_ns=1, first=1)
    requests = [*requests_of("long", 1, 1_000), *crowd]

    def answered(factor: float | None) -> int:
        outcome = simulate(
            Flex(MODELS, preemption_factor=factor),
            requests,
            service_ns=lambda _, batch: MODELS[batch[0].key].profile.latency_ns(len(batch)),
            next_exit_ns=lambda _, batch, ns: MODELS[batch[0].key].next_exit_ns(len(batch), ns),
        )
        return Report.of(outcome).on_time

    assert answered(None) == 1
    assert answered(3.03) == 9


def test_a_flush_and_a_timer_change_nothing() -> None:
    policy = Flex(MODELS)
    busy_with(policy, "long")
    send(policy, requests_of("short", 1, 10_000, at_ns=30, first=10))
    assert policy.on_event(31, FLUSH) == []
    assert policy.next_deadline_ns() is None
