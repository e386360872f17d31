"""Against Clockwork's own shape: one queue for each batch size, every request in all of them."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.checking import ms
from batching.policies.instances import Instance, instances, run
from trims_shim.batching.policies import Clockwork
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import DropReason, Request

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=8)


def batches_of(instance: Instance, sizes: list[int]) -> list[tuple[int, ...]]:
    """Of one device, with a queue for each size; requests in the order of their arrival."""
    queues: dict[int, list[Request]] = {size: [] for size in sizes}
    coming, batches, free_ns = list(instance.requests), [], 0
    while coming or queues[1]:
        now_ns = free_ns if queues[1] else max(free_ns, coming[0].arrival_ns)
        # A device that idles runs the first of those that arrive at the same time at once.
        if coming and not queues[1] and coming[0].arrival_ns >= free_ns:
            arrived = [coming.pop(0)]
        else:
            arrived = [each for each in coming if each.arrival_ns < now_ns]
            coming = coming[len(arrived) :]
        for size, queue in queues.items():
            queue += arrived
            end_ns = now_ns + instance.profile.latency_ns(size)
            while queue and queue[0].deadline_ns < end_ns:
                queue.pop(0)
        full = [size for size, queue in queues.items() if len(queue) >= size]
        if full:
            batch = queues[max(full)][: max(full)]
            batches.append(tuple(each.number for each in batch))
            for queue in queues.values():
                queue[:] = [each for each in queue if each.number > batch[-1].number]
            free_ns = now_ns + instance.profile.latency_ns(max(full))
    return batches


@given(
    instance=instances(most=20, slack=lambda profile: st.just(profile.latency_ns(1) // 400_000)),
)
def test_the_same_batches_as_with_a_queue_for_each_size(instance: Instance) -> None:
    sizes = [size for size in (1, 2, 4) if size <= instance.max_batch_size]
    moments = {each.arrival_ns for each in instance.requests}
    history = run(Clockwork, instance)
    if moments & set(history.answered.values()):
        return  # which comes first, the answer or the arrival, is the driver's choice
    runs = [numbers for _, what, numbers in history.log if what == "run"]
    assert runs == batches_of(instance, sizes)


def queued(*deadlines_ms: float, **options: object) -> Clockwork:
    rule = Clockwork(PROFILE, max_batch_size=8, **options)  # type: ignore[arg-type]
    for number, deadline_ms in enumerate(deadlines_ms):
        rule.queue.add(Request(number, 0, ms(deadline_ms)))
    return rule


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 2), (5, 4), (7, 4), (8, 8), (17, 8)])
def test_only_supported_sizes_run(count: int, size: int) -> None:
    assert queued(*[500.0] * count).choose(0) == size


def test_the_largest_that_can_be_filled_in_time() -> None:
    """Four end at 28, which the first two cannot meet; two behind them are in time, not four."""
    rule = queued(25, 25, 100, 100, 100)
    assert rule.choose(0) == 2
    assert not rule.take_drops()


def test_those_in_front_of_it_are_given_up() -> None:
    rule = queued(21, 25, 25, 100, 100, 100, 100)
    assert rule.choose(0) == 4
    reasons = {each.number: drop.reason for drop in rule.take_drops() for each in drop.requests}
    assert reasons == {0: DropReason.HOPELESS, 1: DropReason.SHED, 2: DropReason.SHED}
    assert [each.number for each in rule.queue] == [3, 4, 5, 6]


def test_sizes_of_its_own() -> None:
    assert queued(*[500.0] * 7, batch_sizes=[1, 3, 6]).choose(0) == 6
    with pytest.raises(ValueError, match="1 has to be among them"):
        queued(batch_sizes=[2, 4])


def test_a_larger_maximum_is_used() -> None:
    rule = Clockwork(PROFILE, max_batch_size=2)
    rule.max_batch_size = 8
    for number in range(5):
        rule.queue.add(Request(number, 0))
    assert rule.choose(0) == 4


def test_a_margin() -> None:
    assert queued(26, 26).choose(0) == 2
    assert queued(26, 26, margin_ms=3).choose(0) == 1
    history = run(partial(Clockwork, margin_ms=5), Instance((Request(0, 0, ms(26)),), PROFILE))
    assert history.dropped == {0: DropReason.HOPELESS}


def of_weights(max_weight: int, *weights: int) -> Clockwork:
    """Requests of these weights, of which only the first cannot wait for a batch of four."""
    rule = queued()
    rule.max_weight = max_weight
    for number, weight in enumerate(weights):
        rule.queue.add(Request(number, 0, ms(28 if number else 25), weight=weight))
    return rule


def test_what_moves_up_may_be_too_heavy() -> None:
    """Four end at 28, too late for the first; the four behind it weigh more than a batch may."""
    rule = of_weights(6, 1, 3, 1, 1, 2)
    assert rule.choose(0) == 2
    assert not rule.take_drops()


def test_what_is_given_up_may_have_been_too_heavy() -> None:
    rule = of_weights(4, 4, 1, 1, 1, 1)
    assert rule.choose(0) == 4
    assert [(each.requests[0].number, each.reason) for each in rule.take_drops()] == [
        (0, DropReason.SHED)
    ]
