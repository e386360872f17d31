"""One item in, one answer out: what users of a batcher see, from threads."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.batching.waiting import LONG_S, Gate, join, start, wait_until
from trims_shim.batching import Batcher, FlexBatcher, LatencyProfile, Pad, batched
from trims_shim.batching.collating.collate import collate_of
from trims_shim.batching.drivers.instances import Beside
from trims_shim.batching.drivers.replies import BlockedCall
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.policies.window import Window
from trims_shim.batching.profiles.profile_store import SavedProfile, save_profile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.single import Batching
from trims_shim.batching.staged import StagedModel
from trims_shim.errors import BadBatch, BatcherClosed, BatchingError, QueueFull, RequestDropped

greedy = functools.partial(Batcher, policy="immediate")


def has_thread(name: str) -> bool:
    """Whether a batcher of this name has one."""
    return any(
        each.name.startswith("batch-") and name in each.name for each in threading.enumerate()
    )


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


# --- the forms ------------------------------------------------------------------------------------


def test_called_submitted_and_mapped() -> None:
    with greedy(double) as batcher:
        assert batcher(3) == 6
        assert batcher.submit(4).result(LONG_S) == 8
        assert list(batcher.map(range(5))) == [0, 2, 4, 6, 8]


def with_a_proxy_of_nothing(items: list[int]) -> list[Any]:
    """For a 2, what raises when it is asked for its class."""
    return [weakref.proxy(double) if item != 2 else weakref.proxy(lambda: None) for item in items]


async def awaited_proxies(items: list[int]) -> list[Any]:
    return with_a_proxy_of_nothing(items)


def streamed_proxies(items: list[int]) -> Iterator[list[Any]]:
    yield with_a_proxy_of_nothing(items)


@pytest.mark.parametrize(
    "function",
    [
        with_a_proxy_of_nothing,
        awaited_proxies,
        streamed_proxies,
        StagedModel([double, lambda items: with_a_proxy_of_nothing([item // 2 for item in items])]),
    ],
)
def test_an_answer_that_cannot_be_asked_for_its_class(function: Any) -> None:
    """Found: nobody told its caller anything, and all who waited were failed."""
    batcher = Batcher(function, policy=functools.partial(Window, wait_ms=10), collate="list")
    futures = [batcher.submit(item) for item in range(4)]
    assert concurrent.futures.wait(futures, LONG_S).not_done == set()
    batcher.close(timeout_s=LONG_S)
    assert batcher.stats().failed == 0


def test_decorator_with_and_without_options() -> None:
    @batched
    def plain(items: list[int]) -> list[int]:
        """Doubles."""
        return double(items)

    @batched(slo_ms=1000, max_batch_size=4)
    def limited(items: list[int]) -> list[int]:
        return double(items)

    assert plain(1, deadline_ms=1000) == limited(1) == 2
    assert plain.__doc__ == "Doubles."
    assert plain.__name__ == "plain"
    assert "limited" in limited.name
    assert limited.max_batch_size == 4
    assert limited.slo_ms == 1000
    assert plain.slo_ms is None
    plain.close()
    limited.close()


def test_what_it_says_of_itself() -> None:
    collate = collate_of("list")
    batcher = Batcher(lambda items: items, name="mine", max_batch_size=7, collate=collate)
    assert repr(batcher) == "<Batcher of mine, at most 7 at once>"
    assert batcher.collate is collate


def test_each_argument_is_collated_by_itself() -> None:
    seen = []

    def scaled(images: Any, factors: Any) -> Any:
        seen.append((images.shape, factors))
        return [image * factor for image, factor in zip(images, factors, strict=True)]

    with greedy(scaled) as batcher:
        result = batcher(np.ones((2, 3)), 5)
    np.testing.assert_array_equal(result, 5 * np.ones((2, 3)))
    assert seen == [((1, 2, 3), [5])]


def test_items_of_different_shapes_are_answered_by_one_batcher() -> None:
    with greedy(lambda arrays: arrays.sum(axis=1)) as batcher:
        futures = [batcher.submit(np.ones(size)) for size in (3, 5, 3, 7)]
        assert [int(future.result(LONG_S)) for future in futures] == [3, 5, 3, 7]


def test_map_takes_no_more_items_ahead_than_the_queue_holds() -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            yield item

    with greedy(double, queue_size=4, max_batch_size=2) as batcher:
        answers = batcher.map(items())
        assert next(answers) == 0
        assert len(taken) <= 5
        assert list(answers) == list(range(2, 200, 2))


def test_who_leaves_a_map_takes_back_what_waits() -> None:
    gate = Gate()
    with greedy(gate, max_batch_size=1) as batcher:
        answers = batcher.map(range(4))
        gate.open()
        assert next(answers) == 0
        gate.wait_entered()
        gate.wait_entered()
        answers.close()
        gate.open(3)
        batcher.drain(LONG_S)
        assert gate.batches == [[0], [1]]
        assert batcher.stats().cancelled == 2


def test_map_with_errors_in_place() -> None:
    with greedy(lambda items: [1 // item for item in items]) as batcher:
        found = list(batcher.map([1, 0, -1], return_exceptions=True))
        assert found[0] == 1
        assert isinstance(found[1], ZeroDivisionError)
        assert found[2] == -1
        with pytest.raises(ZeroDivisionError):
            list(batcher.map([1, 0, -1]))


def test_map_with_items_that_are_refused_in_place() -> None:
    with greedy(lambda batch: batch.lengths, collate=Pad(buckets=(4,))) as batcher:
        items = [[1], [1, 2], [1] * 5, [1, 2, 3]]
        found = list(batcher.map(items, return_exceptions=True))
        assert [found[0], found[1], found[3]] == [1, 2, 3]
        assert isinstance(found[2], ValueError)
        answers = batcher.map(items)
        assert [next(answers), next(answers)] == [1, 2]
        with pytest.raises(ValueError, match="above the largest bucket"):
            next(answers)
    with pytest.raises(BatcherClosed):
        next(batcher.map([[1]], return_exceptions=True))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_batch_size": 0}, ValueError),
        ({"max_batch_size": 1.5}, TypeError),
        ({"max_batch_size": 10**9}, ValueError),
        ({"queue_size": 0}, ValueError),
        ({"queue_size": float("inf")}, TypeError),
        ({"queue_size": 10**9}, ValueError),
        ({"devices": 0}, ValueError),
        ({"when_full": "explode"}, ValueError),
        ({"when_late": "never"}, ValueError),
        ({"policy": "no such"}, ValueError),
        ({"collate": "no such"}, ValueError),
        ({"slo_ms": float("nan")}, ValueError),
        ({"slo_ms": 0}, ValueError),
        ({"slo_ms": -1}, ValueError),
        ({"batch_sizes": (1, 2), "max_batch_size": 4}, ValueError),
        ({"profile": "/no/such/file"}, OSError),
    ],
)
def test_impossible_options_are_refused_at_once(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Batcher(double, **options)


def test_partials_have_the_name_of_their_function_and_mocks_are_functions() -> None:
    partial = functools.partial(functools.partial(lambda less, items: [items[0] - less]), 1)
    with greedy(partial) as batcher:
        assert "<lambda>" in batcher.name
        assert batcher(3) == 2
    with greedy(mock.Mock(return_value=[5])) as batcher:  # it has any attribute
        assert batcher(3) == 5


def test_an_impossible_update_is_refused_and_changes_nothing() -> None:
    with greedy(double) as batcher:
        for size, error in ((0, ValueError), (1.5, TypeError), (10**9, ValueError)):
            with pytest.raises(error, match="max_batch_size"):
                batcher.update(slo_ms=50, max_batch_size=size)  # type: ignore[arg-type]
        assert batcher(2) == 4
        assert batcher.max_batch_size == 32
        assert batcher.slo_ms is None


def test_not_a_function_and_no_item() -> None:
    with pytest.raises(TypeError, match=r"100 is no function; .*@batched\(slo_ms=100\)"):
        batched(100)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="callable"):
        Batcher(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs an item"):
        greedy(double)()


def test_a_weight_without_a_limit_and_a_limit_without_a_weight() -> None:
    for alone in ({"weight": len}, {"max_batch_weight": 4}):
        with pytest.raises(TypeError, match="give both"):
            Batcher(double, **alone)


def test_an_item_that_cannot_be_collated_fails_alone() -> None:
    with greedy(double, collate="stack") as batcher, pytest.raises((TypeError, ValueError)):
        batcher(object())


class ListedKeys:
    """A user's collate, whose keys are no keys for some items."""

    def key(self, item: Any) -> Any:
        return [item] if item == 1 else None

    def join(self, items: Sequence[Any]) -> Any:
        return list(items)

    def split(self, results: Any, items: Sequence[Any]) -> Sequence[Any]:
        return list(results)


def test_a_key_that_is_none_fails_in_its_own_call() -> None:
    gate = Gate()
    flex = FlexBatcher({"model": gate}, collate=ListedKeys())
    plain = greedy(gate, collate=ListedKeys())
    for batcher, model in ((plain, ()), (flex, ("model",))):
        with batcher:
            futures = [batcher.submit(*model, 0)]
            gate.wait_entered()
            futures.append(batcher.submit(*model, 2))
            for asked in (batcher.submit, batcher):
                with pytest.raises(TypeError, match="unhashable"):
                    asked(*model, 1)
            gate.open(2)
            assert [future.result(LONG_S) for future in futures] == [0, 2]


@pytest.mark.parametrize("priority", ["1", None, [1], float("nan")])
def test_a_priority_that_is_none_fails_in_its_own_call(priority: Any) -> None:
    gate = Gate()
    flex = FlexBatcher({"model": double})
    with greedy(gate, slo_ms=1e6) as batcher, flex:
        futures = [batcher.submit(0)]
        gate.wait_entered()
        for asked in (batcher.submit, batcher, functools.partial(flex, "model")):
            with pytest.raises((TypeError, ValueError), match="priority is"):
                asked(1, priority=priority)
        futures += [batcher.submit(2, priority=each) for each in (0, np.int64(3), 1.5)]
        gate.open(4)
        assert [future.result(LONG_S) for future in futures] == [0, 2, 2, 2]


def test_a_weight_that_is_none_fails_in_its_own_call() -> None:
    with greedy(double, weight=lambda item: item, max_batch_weight=5) as batcher:
        with pytest.raises(TypeError, match="weight is 'heavy'; it has to be a number"):
            batcher("heavy")
        assert batcher(3) == 6


# --- batches --------------------------------------------------------------------------------------


def test_requests_that_come_while_a_batch_runs_share_the_next_one() -> None:
    gate = Gate()
    with greedy(gate, max_batch_size=3) as batcher:
        futures = [batcher.submit(0)]
        gate.wait_entered()
        futures += [batcher.submit(item) for item in range(1, 6)]
        gate.open(3)
        assert [future.result(LONG_S) for future in futures] == list(range(6))
    assert gate.batches == [[0], [1, 2, 3], [4, 5]]


def test_priority_goes_first_and_a_tighter_deadline_next() -> None:
    gate = Gate()
    with greedy(gate, max_batch_size=1, slo_ms=1e6) as batcher:
        futures = [batcher.submit(0)]
        gate.wait_entered()
        futures += [
            batcher.submit("last"),
            batcher.submit("second", deadline_ms=1e5),
            batcher.submit("first", priority=1),
        ]
        gate.open(4)
        concurrent.futures.wait(futures, LONG_S)
    assert gate.batches == [[0], ["first"], ["second"], ["last"]]


def test_devices_run_as_many_batches_at_once_and_no_more() -> None:
    gate = Gate()
    with greedy(gate, max_batch_size=1, devices=2) as batcher:
        futures = [batcher.submit(item) for item in range(3)]
        gate.wait_entered()
        gate.wait_entered()
        assert len(gate.batches) == 2
        assert batcher.stats().running == 2
        gate.open(3)
        assert [future.result(LONG_S) for future in futures] == [0, 1, 2]


def test_weights_limit_a_batch() -> None:
    gate = Gate()
    with greedy(gate, weight=len, max_batch_weight=5) as batcher:
        futures = [batcher.submit("a")]
        gate.wait_entered()
        futures += [batcher.submit(text) for text in ("bb", "ccc", "d", "too heavy")]
        gate.open(4)
        concurrent.futures.wait(futures, LONG_S)
    assert gate.batches == [["a"], ["bb", "ccc"], ["d"], ["too heavy"]]


def test_batch_sizes_are_the_only_ones_the_function_sees() -> None:
    sizes = []

    def seen(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    with greedy(seen, batch_sizes=(4, 8), max_batch_size=8) as batcher:
        assert list(batcher.map(range(20))) == list(range(20))
    assert set(sizes) <= {4, 8}


def test_update_of_one_instance_holds() -> None:
    model, other = Model(1), Model(2)
    model.scale.update(slo_ms=7, max_batch_size=3)
    assert model.scale.slo_ms == 7
    assert model.scale.max_batch_size == 3
    assert other.scale.slo_ms is None


def test_update_of_the_class_holds_for_later_instances() -> None:
    class Other(Model):
        @batched(slo_ms=100)
        def answer(self, items: list[int]) -> list[int]:
            return items

    before = Other(1)
    assert before.answer(1) == 1
    Other.answer.update(slo_ms=7, max_batch_size=3)
    after = Other(2)
    assert (after.answer.slo_ms, after.answer.max_batch_size) == (7, 3)
    assert (before.answer.slo_ms, before.answer.max_batch_size) == (100, 32)


@pytest.mark.parametrize("deadline_ms", [float("inf"), 1e300])
def test_a_deadline_beyond_all_times_is_none(deadline_ms: float) -> None:
    with Batcher(double, slo_ms=1) as batcher:
        assert batcher._request((1,), BlockedCall(), deadline_ms, 0).deadline_ns == NEVER_NS


def test_update_changes_later_batches_and_deadlines() -> None:
    gate = Gate()
    with greedy(gate, max_batch_size=1) as batcher:
        futures = [batcher.submit(0)]
        gate.wait_entered()
        batcher.update(max_batch_size=40, slo_ms=5)
        assert batcher.max_batch_size == 40
        assert batcher.slo_ms == 5
        futures += [batcher.submit(item) for item in range(1, 41)]
        gate.open(2)
        concurrent.futures.wait(futures, LONG_S)
        assert [len(batch) for batch in gate.batches] == [1, 40]
        with pytest.raises(ValueError, match="max_batch_size"):
            batcher.update(max_batch_size=0)
        gate.open()
        assert batcher(1) == 1


def test_update_to_no_objective() -> None:
    with greedy(double, slo_ms=5) as batcher:
        batcher.update(max_batch_size=2)
        assert batcher.slo_ms == 5, "what is left out stays"
        batcher.update(slo_ms=None)
        assert batcher.slo_ms is None
        assert batcher.max_batch_size == 2
        assert batcher._request((1,), BlockedCall(), None, 0).deadline_ns == NEVER_NS


# --- deadlines ------------------------------------------------------------------------------------


def slow_profile() -> LatencyProfile:
    return LatencyProfile.linear(1, 10, max_batch_size=32)


async def adouble(items: list[int]) -> list[int]:
    return double(items)


async def pieces_of(batcher: Batcher, **options: Any) -> list[Any]:
    return [piece async for piece in batcher.astream(1, **options)]


@pytest.mark.parametrize("function", [double, adouble])
@pytest.mark.parametrize(
    "ask",
    [
        lambda batcher, **options: batcher(1, **options),
        lambda batcher, **options: batcher.submit(1, **options).result(LONG_S),
        lambda batcher, **options: next(batcher.map([1], **options)),
        lambda batcher, **options: next(batcher.stream(1, **options)),
        lambda batcher, **options: asyncio.run(batcher.aio(1, **options)),
        lambda batcher, **options: asyncio.run(pieces_of(batcher, **options))[0],
    ],
    ids=["call", "submit", "map", "stream", "aio", "astream"],
)
def test_every_way_of_asking_has_deadlines_and_priorities(function: Any, ask: Any) -> None:
    noted = []

    class Noting(Immediate):
        def on_arrival(self, now_ns: int, request: Request) -> None:
            noted.append((request.deadline_ns - request.arrival_ns, request.priority))

    with Batcher(function, policy=Noting) as batcher:
        assert ask(batcher, deadline_ms=5000, priority=3) == 2
    assert noted == [(5_000_000_000, 3)]


def test_a_hopeless_request_is_dropped_and_says_why() -> None:
    with Batcher(double, policy="early_drop", profile=slow_profile()) as batcher:
        with pytest.raises(RequestDropped, match="deadline") as caught:
            batcher(1, deadline_ms=0)
        assert caught.value.reason == "hopeless"
        with pytest.raises(RequestDropped):
            batcher.submit(1, deadline_ms=-5).result(LONG_S)
        assert batcher.stats().dropped == {"hopeless": 2}
        assert batcher(1, deadline_ms=1e6) == 2


def test_a_profile_by_which_nothing_is_in_time_is_doubted_though_another_device_is_busy() -> None:
    gate = Gate()

    def work(items: list[Any]) -> list[Any]:
        return gate(items) if "gate" in items else items

    slow = LatencyProfile.linear(1, 10_000, max_batch_size=32)
    with Batcher(work, policy="early_drop", profile=slow, devices=2, collate="list") as batcher:
        busy = batcher.submit("gate", deadline_ms=1e6)
        gate.wait_entered()
        for _ in range(100):
            try:
                assert batcher("other", deadline_ms=1000) == "other"
                break
            except RequestDropped:
                continue
        else:
            pytest.fail("nothing is ever answered")
        gate.open()
        busy.result(LONG_S)


def test_late_requests_are_served_when_asked_for() -> None:
    gate = Gate()
    options: dict[str, Any] = {"policy": "early_drop", "profile": slow_profile()}
    with Batcher(gate, when_late="serve", **options) as batcher:
        futures = [batcher.submit("first", deadline_ms=1e6)]
        gate.wait_entered()
        futures.append(batcher.submit("late", deadline_ms=0))
        futures.append(batcher.submit("in time", deadline_ms=1e6))
        cancelled = batcher.submit("late and cancelled", deadline_ms=0)
        gate.open()
        gate.wait_entered()
        assert cancelled.cancel()
        gate.open(2)
        assert [future.result(LONG_S) for future in futures] == ["first", "late", "in time"]
        batcher.drain(LONG_S)
        assert gate.batches == [["first"], ["in time"], ["late"]]
        stats = batcher.stats()
        assert stats.late == 1
        assert stats.dropped == {}
        assert stats.violations == 1


def test_a_profile_far_too_slow_does_not_stop_the_batcher_for_good() -> None:
    hours = LatencyProfile.linear(1, 1e7, max_batch_size=32)
    with Batcher(double, slo_ms=1000, policy="early_drop", profile=hours) as batcher:
        for _ in range(200):
            try:
                assert batcher(1) == 2
                break
            except RequestDropped:
                pass
        else:
            pytest.fail("it never tried")


def test_a_waiting_policy_is_woken_in_time_and_counts_how_late() -> None:
    policy = functools.partial(Window, wait_ms=20)
    with Batcher(double, policy=policy) as batcher:
        started_s = time.monotonic()
        assert batcher(1) == 2
        assert batcher.submit(1).result(LONG_S) == 2
        assert time.monotonic() - started_s >= 0.04
        assert batcher.stats().wake_lateness.count == 2


# --- the queue's bound ----------------------------------------------------------------------------


def test_a_full_queue_rejects() -> None:
    gate = Gate()
    with greedy(gate, queue_size=2, when_full="reject") as batcher:
        running = batcher.submit(0)
        gate.wait_entered()
        waiting = [batcher.submit(1), batcher.submit(2)]
        with pytest.raises(QueueFull):
            batcher.submit(3)
        with pytest.raises(QueueFull):
            batcher(3)
        assert batcher.stats().rejected == 2
        assert waiting[0].cancel()
        waiting.append(batcher.submit(4))
        gate.open(2)
        assert [each.result(LONG_S) for each in (running, *waiting[1:])] == [0, 2, 4]


def test_a_full_queue_makes_callers_wait_and_lets_priority_first() -> None:
    gate = Gate()
    with greedy(gate, queue_size=1, max_batch_size=1) as batcher:
        batcher.submit(0)
        gate.wait_entered()
        batcher.submit(1)
        submitted: list[int] = []

        def submit(item: int, priority: int) -> None:
            batcher.submit(item, priority=priority)
            submitted.append(item)

        threads = [start(lambda: submit(2, 0))]
        wait_until(lambda: batcher.stats().queued == 2)
        threads.append(start(lambda: submit(3, 1)))
        wait_until(lambda: batcher.stats().queued == 3)
        caller = start(lambda: batcher(4))
        wait_until(lambda: batcher.stats().queued == 4)
        assert submitted == []
        gate.open(5)
        join(*threads, caller)
    assert gate.batches == [[0], [1], [3], [2], [4]]


# --- failures -------------------------------------------------------------------------------------


def test_a_failing_item_fails_alone() -> None:
    gate = threading.Event()

    def inverse(items: list[int]) -> list[float]:
        assert gate.wait(LONG_S)
        return [1 / item for item in items]

    with greedy(inverse) as batcher:
        futures = [batcher.submit(item) for item in (1, 2, 0, 4, 0)]
        gate.set()
        errors = [future.exception(LONG_S) for future in futures]
        assert [type(error) for error in errors] == [
            type(None), type(None), ZeroDivisionError, type(None), ZeroDivisionError,
        ]  # fmt: skip
        assert errors[2] is not errors[4]
        batcher.drain(LONG_S)  # what has been answered is counted a moment later
        assert batcher.stats().failed == 2


def test_a_failing_batch_fails_whole_when_asked_for() -> None:
    gate = Gate()

    def inverse(items: list[int]) -> list[float]:
        gate(items)
        return [1 / item for item in items]

    with greedy(inverse, isolate_failures=False) as batcher:
        batcher.submit(7)
        gate.wait_entered()
        futures = [batcher.submit(item) for item in (1, 0)]
        gate.open(2)
        assert all(isinstance(each.exception(LONG_S), ZeroDivisionError) for each in futures)
    assert len(gate.batches) == 2


def test_an_exception_among_the_results_is_that_items_own() -> None:
    with greedy(lambda items: [ValueError("odd") if item % 2 else item for item in items]) as each:
        assert each(2) == 2
        with pytest.raises(ValueError, match="odd"):
            each(3)
        assert each.stats().failed == 1


def test_a_wrong_number_of_results_names_the_function_and_is_not_tried_again() -> None:
    calls = []

    def forgetful(items: list[int]) -> list[int]:
        calls.append(len(items))
        return items[1:]

    with greedy(forgetful) as batcher, pytest.raises(BadBatch, match="forgetful"):
        batcher(1)
    assert calls == [1]


class Fatal(BaseException):
    """No Exception, as KeyboardInterrupt and SystemExit."""


def test_what_is_no_exception_reaches_the_callers_of_a_worker() -> None:
    def fail(items: list[int]) -> list[int]:
        raise Fatal

    with greedy(fail) as batcher:
        futures = [batcher.submit(item) for item in range(3)]
        for future in futures:
            assert isinstance(future.exception(LONG_S), Fatal)
        batcher.drain(LONG_S)


def test_a_policy_that_raises_fails_its_requests_and_not_the_batcher() -> None:
    class Broken(Window):
        def choose(self, now_ns: int) -> int:
            if any(request.priority == 13 for request in self.queue):
                raise RuntimeError("thirteen")
            return super().choose(now_ns)

    policy = functools.partial(Broken, wait_ms=0)
    with Batcher(double, policy=policy) as batcher:
        with pytest.raises(RuntimeError, match="thirteen"):
            batcher(1, priority=13)
        assert batcher(1) == 2
        assert batcher.stats().failed == 1


def test_a_policy_that_raises_lets_those_behind_a_full_queue_in() -> None:
    class Broken(Window):
        def choose(self, now_ns: int) -> int:
            if self.queue[0].priority == 13:
                raise RuntimeError("thirteen")
            return super().choose(now_ns)

    gate = Gate()
    policy = functools.partial(Broken, wait_ms=0)
    with Batcher(gate, policy=policy, queue_size=1, max_batch_size=1) as batcher:
        batcher.submit(0)
        gate.wait_entered()
        broken = batcher.submit(1, priority=13)
        caller = start(lambda: batcher(2))
        wait_until(lambda: batcher.stats().queued == 2)
        gate.open(2)
        assert isinstance(broken.exception(LONG_S), RuntimeError)
        join(caller)
    assert gate.batches == [[0], [2]]


# --- cancellation ---------------------------------------------------------------------------------


def test_cancelling_frees_the_place_and_touches_nobody_else() -> None:
    gate = Gate()
    with greedy(gate, queue_size=3) as batcher:
        running = batcher.submit(0)
        gate.wait_entered()
        futures = [batcher.submit(item) for item in (1, 2, 3)]
        assert not running.cancel()
        assert futures[1].cancel()
        assert futures[1].cancel()
        assert futures[1].cancelled()
        assert concurrent.futures.wait([futures[1]], LONG_S).done
        assert batcher.stats().queued == 2
        futures.append(batcher.submit(4))
        gate.open(2)
        assert [futures[index].result(LONG_S) for index in (0, 2, 3)] == [1, 3, 4]
        assert batcher.stats().cancelled == 1
    assert gate.batches == [[0], [1, 3, 4]]


def test_all_of_a_batch_cancelled_between_decision_and_run() -> None:
    """The device is free again, although nothing was run."""
    ran = []
    batcher = greedy(lambda items: ran.append(len(items)) or items)
    dispatch = batcher._engine.threads()
    futures: list[Any] = []
    launch = dispatch._launch

    def cancel_and_launch(job: Any) -> None:
        for request in job.requests:
            request.payload.reply.cancel()
        launch(job)

    dispatch._launch = cancel_and_launch  # type: ignore[method-assign]
    futures.append(batcher.submit(1))
    batcher.drain(LONG_S)
    dispatch._launch = launch  # type: ignore[method-assign]
    assert futures[0].cancelled()
    assert batcher(2) == 2
    assert ran == [1]
    assert batcher.stats().cancelled == 1
    batcher.close()


def test_a_callback_may_use_the_batcher_and_may_fail() -> None:
    nested: list[Any] = []

    def again(future: concurrent.futures.Future[Any]) -> None:
        nested.append(batcher(future.result()))
        nested.append(batcher.submit(future.result()))
        raise ValueError("a callback's own error")

    gate = Gate()
    with greedy(gate) as batcher:
        future = batcher.submit(1)
        future.add_done_callback(again)
        gate.open(3)
        assert future.result(LONG_S) == 1
        wait_until(lambda: len(nested) == 2)
        assert nested[0] == 1
        assert nested[1].result(LONG_S) == 1


def test_from_inside_a_batch() -> None:
    """Calling works, at once and alone; waiting for a future could never end and says so."""

    def recursive(items: list[int]) -> list[Any]:
        return [item if item < 1 else 1 + batcher(item - 1) for item in items]

    def waiting(items: list[int]) -> list[Any]:
        if items == [0]:
            return items
        assert waiter(0) == 0  # after which it is still inside
        return [waiter.submit(item).result(LONG_S) for item in items]

    batcher = greedy(recursive)
    waiter = greedy(waiting)
    assert batcher(5) == 5
    with pytest.raises(RuntimeError, match="comes after it"):
        waiter(1)

    def filling(items: list[int]) -> list[Any]:
        return [[filler.submit(item) for _ in range(3)] for item in items]

    filler = greedy(filling, queue_size=1)
    with pytest.raises(QueueFull, match="makes this request"):
        filler(1)
    filler.close(cancel=True)
    waiter.close(cancel=True)
    batcher.close()


# --- the end --------------------------------------------------------------------------------------


def test_drain_hurries_a_waiting_policy_and_the_batcher_goes_on() -> None:
    policy = functools.partial(Window, wait_ms=1e6)
    with Batcher(double, policy=policy) as batcher:
        future = batcher.submit(1)
        batcher.drain(LONG_S)
        assert future.result(0) == 2
        later = batcher.submit(2)
        batcher.drain(LONG_S)
        assert later.result(0) == 4


def test_drain_and_close_have_an_end() -> None:
    gate = Gate()
    batcher = greedy(gate)
    future = batcher.submit(1)
    gate.wait_entered()
    with pytest.raises(TimeoutError, match=r"still open after 0.01 s: 1 in .* that run, 0 queued$"):
        batcher.drain(0.01)
    with pytest.raises(TimeoutError):
        batcher.close(timeout_s=0.01)
    with pytest.raises(BatcherClosed):
        batcher.submit(2)
    gate.open()
    assert future.result(LONG_S) == 1
    batcher.close()


def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    """Not until the request ends that they waited for, which may be never."""
    gate = Gate()
    batcher = greedy(gate)
    future = batcher.submit(1)
    gate.wait_entered()
    watches = batcher._engine.threads()._watches
    for _ in range(3):
        with pytest.raises(TimeoutError):
            batcher.drain(0.001)
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(asyncio.wait_for(batcher.adrain(), 0.001))
    assert not watches
    gate.open()
    assert future.result(LONG_S) == 1
    batcher.close()


def test_close_answers_what_waits_or_fails_it() -> None:
    for cancel in (False, True):
        gate = Gate()
        batcher = greedy(gate, queue_size=2, max_batch_size=1)
        futures = [batcher.submit(0)]
        gate.wait_entered()
        futures += [batcher.submit(1), batcher.submit(2)]
        outcome: list[object] = []

        def call(batcher: Batcher = batcher, outcome: list[object] = outcome) -> None:
            try:
                outcome.append(batcher(3))
            except BatchingError as error:
                outcome.append(type(error))

        caller = start(call)
        wait_until(lambda batcher=batcher: batcher.stats().queued == 3)
        closing = start(functools.partial(batcher.close, cancel=cancel, timeout_s=LONG_S))
        if cancel:  # nothing of it runs before that
            wait_until(lambda batcher=batcher: batcher.stats().queued == 0)
        gate.open(4)
        join(caller, closing)
        assert futures[0].result(0) == 0
        if cancel:
            assert isinstance(futures[2].exception(0), BatcherClosed)
            assert outcome == [BatcherClosed]
        else:
            assert [futures[1].result(0), futures[2].result(0)] == [1, 2]
            assert outcome == [3]
        with pytest.raises(BatcherClosed):
            batcher(9)


def test_an_exception_in_the_context_gives_up_what_waits() -> None:
    gate = Gate()
    futures = []

    def use() -> None:
        with greedy(gate, max_batch_size=1) as batcher:
            futures.append(batcher.submit(0))
            gate.wait_entered()
            futures.append(batcher.submit(1))
            gate.open()
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert futures[0].result(LONG_S) == 0
    assert isinstance(futures[1].exception(LONG_S), BatcherClosed)


def test_a_batcher_that_nobody_uses_is_gone_with_its_threads() -> None:
    batcher = greedy(double, name="forgotten")
    assert batcher.submit(1).result(LONG_S) == 2
    assert has_thread("forgotten")
    gone = weakref.ref(batcher._engine)
    del batcher
    assert gone() is None  # without the collector
    wait_until(lambda: not has_thread("forgotten"), "the end of its thread")


class Tracked:
    """An item, or an answer, whose end can be seen."""


class TrackedError(Exception):
    """Another one."""


def answers(items: list[Any]) -> list[Any]:
    return [Tracked() for _ in items]


async def answers_later(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return [Tracked() for _ in items]


def fails(items: list[Any]) -> list[Any]:
    raise TrackedError


async def fails_later(items: list[Any]) -> list[Any]:
    raise TrackedError


def streams(items: list[Any]) -> Iterator[list[Any]]:
    yield answers(items)
    raise TrackedError


def called(batcher: Batcher, item: Any) -> Any:
    return batcher(item)


def submitted(batcher: Batcher, item: Any) -> Any:
    return batcher.submit(item).result(LONG_S)


def awaited(batcher: Batcher, item: Any) -> Any:
    """Past the task of ``asyncio.run``, which leaves to the collector the error it ends with."""
    errors: list[TrackedError] = []

    async def main() -> Any:
        try:
            return await batcher.aio(item)
        except TrackedError as error:
            errors.append(error)

    answer = asyncio.run(main())
    if errors:
        raise errors.pop()
    return answer


def streamed(batcher: Batcher, item: Any) -> Any:
    return list(batcher.stream(item))


def in_a_batch(batcher: Batcher, item: Any) -> Any:
    outer = greedy(lambda items: [batcher(each) for each in items])
    return outer(item)


def given_up(batcher: Batcher, item: Any) -> Any:
    gate = Gate()
    with Batcher(gate, slo_ms=20, max_batch_size=1) as busy:
        first = busy.submit(0)
        gate.wait_entered()
        late = [busy.submit(item, deadline_ms=0.001)]
        gate.open(2)
        first.result(LONG_S)
        return late.pop().result(LONG_S)


@pytest.mark.parametrize(
    ("use", "function"),
    [
        *itertools.product(
            [called, submitted, awaited, streamed, in_a_batch],
            [answers, answers_later, fails, fails_later, streams],
        ),
        (given_up, answers),
    ],
)
def test_nothing_of_a_request_is_left_to_the_collector(use: Any, function: Any) -> None:
    """Items and answers may be tensors of a GPU, and a program may have the collector off."""
    batcher = greedy(function, isolate_failures=False)
    kept: list[weakref.ref[Any]] = []

    def request() -> None:
        item = Tracked()
        kept.append(weakref.ref(item))
        try:
            answer = use(batcher, item)
        except (TrackedError, RequestDropped) as error:
            kept.append(weakref.ref(error))
        else:
            kept.append(weakref.ref(answer[0] if isinstance(answer, list) else answer))

    gc.collect()
    gc.disable()
    try:
        request()
        assert len(kept) == 2
        wait_until(lambda: not any(each() for each in kept), "the end of all of it")
    finally:
        gc.enable()


def test_what_a_batch_leaves_behind_does_not_keep_it() -> None:
    """A task, a timer or a connection has the context in which it was made."""
    left: list[asyncio.Task[bool]] = []
    kept: list[weakref.ref[Any]] = []

    async def leaving(items: list[Any]) -> list[Any]:
        left.append(asyncio.create_task(asyncio.Event().wait()))
        return await answers_later(items)

    async def run(batcher: Batcher) -> None:
        kept.append(weakref.ref(await batcher.aio(1)))
        await batcher.adrain()
        assert kept[0]() is None
        left[0].cancel()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run(greedy(leaving)))
    finally:
        gc.enable()


def test_answers_come_although_the_batcher_is_forgotten() -> None:
    gate = Gate()
    futures = [greedy(gate).submit(1)]
    gate.wait_entered()
    gc.collect()
    gate.open()
    assert futures[0].result(LONG_S) == 1


# --- methods --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """Equal to others, and without a hash."""

    factor: int

    @batched(policy="immediate")
    def scale(self, items: list[int]) -> list[int]:
        return [self.factor * item for item in items]

    @batched(policy="immediate")
    @classmethod
    def named(cls, items: list[int]) -> list[str]:
        return [f"{cls.__name__} {item}" for item in items]


def test_methods_have_a_batcher_for_each_instance() -> None:
    one, two = Model(3), Model(3)
    two.factor = 5
    assert one.scale(2) == 6
    assert two.scale(2) == 10
    assert one.scale.submit(2).result(LONG_S) == 6
    assert one.scale.stats().submitted == 2
    assert two.scale.stats().submitted == 1
    assert Model.scale.stats().submitted == 0


def test_static_methods_may_be_anything_that_functions_may() -> None:
    class Model:
        @batched(policy="immediate")
        @staticmethod
        async def later(items: list[int]) -> list[int]:
            return await asyncio.sleep(0, [2 * item for item in items])

        @batched(policy="immediate")
        @staticmethod
        def pieces(items: list[int]) -> Iterator[list[int]]:
            yield items
            yield [2 * item for item in items]

    assert asyncio.run(Model().later.aio(2)) == 4
    assert list(Model().pieces.stream(2)) == list(Model.pieces.stream(2)) == [2, 4]


def test_a_method_of_the_class_gets_the_instance_first() -> None:
    model = Model(3)
    assert Model.scale(model, 2) == 6
    assert Model.scale.submit(model, 2).result(LONG_S) == 6
    assert list(Model.scale.map([model, model], [2, 3])) == [6, 9]
    assert list(Model.scale.stream(model, 2)) == [6]
    assert asyncio.run(Model.scale.aio(model, 2)) == 6
    assert model.scale.stats().submitted == 6
    assert Model.scale.stats().submitted == 0


def test_a_wrapped_method_is_that_of_its_instance() -> None:
    """And one that its class got later: neither has heard of a class."""

    def wrapped(function: Any) -> Any:
        return lambda *args: function(*args)

    def scale(self: Any, items: list[int]) -> list[int]:
        return [self.factor * item for item in items]

    class Wrapping:
        factor = 3
        inside = wrapped(Batcher(scale))
        later: Any

    Wrapping.later = Batcher(scale)
    one, two = Wrapping(), Wrapping()
    two.factor = 5
    assert [one.inside(2), two.inside(2)] == [6, 10]
    assert [Wrapping.later(one, 2), Wrapping.later(two, 2), two.later(3)] == [6, 10, 15]
    assert two.later.stats().submitted == 2


def test_class_methods_have_a_batcher_for_each_class() -> None:
    class Sub(Model):
        pass

    before = Model.named.stats().submitted  # by other tests
    assert Model(3).named(1) == Model.named(1) == "Model 1"
    assert Sub.named(1) == "Sub 1"
    assert Model.named.stats().submitted == before + 2
    assert Sub.named.stats().submitted == 1


def test_methods_are_copied_and_pickled_with_their_instance() -> None:
    model = Model(3)
    assert copy.copy(model.scale)(2) == 6
    for scale in (copy.deepcopy(model.scale), pickle.loads(pickle.dumps(model.scale))):
        assert scale(2) == 6
    assert model.scale.stats().submitted == 1
    assert pickle.loads(pickle.dumps(Model.scale)) is Model.scale
    assert pickle.loads(pickle.dumps(Model.named))(2) == "Model 2"


def test_methods_are_equal_and_have_a_signature_as_methods_do() -> None:
    model = Model(3)
    assert model.scale == model.scale
    assert model.scale not in (Model(3).scale, Model.scale, None)
    assert len({model.scale, model.scale, Model(3).scale, Model.scale}) == 3
    assert list(inspect.signature(Model.scale).parameters) == ["self", "items"]
    assert list(inspect.signature(model.scale).parameters) == ["items"]


def test_methods_of_a_subclass_of_batcher_are_of_that_subclass() -> None:
    class Doubling(Batcher[int, int]):
        def __call__(self, *args: Any, **options: Any) -> int:
            return 2 * super().__call__(*args, **options)

    class Own(Model):
        scale = Doubling(Model.scale.function)

    assert Own(3).scale(2) == 12


def test_a_class_method_above_a_batcher_calls_it() -> None:
    def named(cls: type, items: list[int]) -> list[str]:
        return [f"{cls.__name__} {item}" for item in items]

    # What Python makes of `@classmethod` above `@batched`, from 3.13 on.
    assert MethodType(Batcher(named), Model)(1) == "Model 1"
    assert Batcher(lambda cls, items: [*zip(cls, items, strict=True)])(1, 2) == (1, 2)


def test_an_instance_without_weak_references_is_told_what_to_do() -> None:
    class Slotted:
        __slots__ = ()
        scale = batched(Model.scale.function)

    with pytest.raises(TypeError, match="'__weakref__' to its __slots__"):
        Slotted().scale(2)


def test_an_abstract_method_stays_abstract() -> None:
    class Abstract(abc.ABC):
        @batched
        @abc.abstractmethod
        def scale(self, items: list[int]) -> list[int]: ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # type: ignore[abstract]


def test_an_instance_lives_while_it_is_asked_and_no_longer() -> None:
    future = Model(7).scale.submit(2)
    assert future.result(LONG_S) == 14
    kept = Model.scale._engines
    assert isinstance(kept, Beside)
    wait_until(lambda: gc.collect() is not None and not kept._kept, "the end of the model")
    wait_until(lambda: not has_thread("Model.scale"), "the end of its thread")


# --- profiles -------------------------------------------------------------------------------------


def test_what_is_learned_is_kept_for_the_next_batcher_of_that_name() -> None:
    def slow(items: list[int]) -> list[int]:
        time.sleep(0.002)
        return items

    for _ in range(2):
        with greedy(slow, name="test_batcher.slow") as batcher:
            if _ == 1:
                assert batcher.profile.latency_ns(1) > 1_000_000
            for item in range(12):
                batcher(item)
            assert batcher.profile.latency_ns(1) > 1_000_000


@pytest.mark.parametrize("is_awaited", [False, True])
def test_what_is_learned_is_kept_by_draining(is_awaited: bool) -> None:
    """By a server that ends by a signal, as uvicorn does, nothing is kept at its end."""

    def slow(items: list[int]) -> list[int]:
        time.sleep(0.002)
        return items

    name = f"test_batcher.drained-{is_awaited}"
    with greedy(slow, name=name) as batcher:
        for item in range(12):
            batcher(item)
        if is_awaited:
            asyncio.run(batcher.adrain())
        else:
            batcher.drain()
        with greedy(slow, name=name) as next_one:
            assert next_one.profile.latency_ns(1) > 1_000_000
        batcher(1)


def test_a_profile_that_is_asked_for_before_the_first_request() -> None:
    with greedy(lambda items: items) as batcher:
        guessed = batcher.profile
        measured = batcher.warm(np.zeros(3), limit_s=0.05)
        assert batcher.profile == measured != guessed


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, SavedProfile({1: 7e6, 8: 14e6}, 8))
    with greedy(double, profile=path, max_batch_size=4) as batcher:
        assert batcher.profile.latency_ns(1) == 7_000_000
    with greedy(double, profile=str(path), max_batch_size=32) as batcher:
        assert batcher.profile.max_batch_size == 32


def test_warming_measures_with_copies_of_an_item() -> None:
    sizes = []

    def costly(items: list[int]) -> list[int]:
        sizes.append(len(items))
        time.sleep(0.001 * len(items))
        return items

    with greedy(costly, max_batch_size=4) as batcher:
        profile = batcher.warm(1, repeats=1)
        assert set(sizes) == {1, 2, 4}
        assert profile.latency_ns(4) >= 4_000_000
        assert batcher.profile == profile
        assert batcher(1) == 1
    with greedy(lambda items: 1 / 0) as failing, pytest.raises(ZeroDivisionError):
        failing.warm(1)


def test_what_was_measured_holds_for_the_policy_that_there_is() -> None:
    with greedy(double) as batcher:
        batcher(1)
        batcher.drain(LONG_S)
        profile = batcher.warm(1, repeats=1)
        policy = batcher._engine.threads()._policy
        assert isinstance(policy, Batching)
        assert [rule.profile for rule in policy.rules.values()] == [profile]


def test_what_was_measured_is_kept_for_the_next_batcher_of_that_name() -> None:
    def slow(items: list[int]) -> list[int]:
        time.sleep(0.003)
        return items

    with greedy(slow, name="test_batcher.warmed", max_batch_size=4) as batcher:
        batcher.warm(1, repeats=1)
    with greedy(slow, name="test_batcher.warmed", max_batch_size=4) as batcher:
        assert batcher.profile.latency_ns(1) > 1_000_000
        assert batcher.profile.latency_ns(4) > 1_000_000


def test_an_asynchronous_function_is_warmed_too() -> None:
    async def function(items: list[int]) -> list[int]:
        return items

    with greedy(function, max_batch_size=2) as batcher:
        assert batcher.warm(1, repeats=1).max_batch_size == 2


# --- statistics -----------------------------------------------------------------------------------


def test_every_request_is_accounted_for() -> None:
    gate = Gate()
    with greedy(gate, queue_size=5, when_full="reject") as batcher:
        futures = [batcher.submit(0)]
        gate.wait_entered()
        futures += [batcher.submit(item) for item in range(1, 5)]
        futures[1].cancel()
        stats = batcher.stats()
        assert (stats.submitted, stats.queued, stats.running, stats.cancelled) == (5, 3, 1, 1)
        gate.open(2)
        batcher.drain(LONG_S)
        stats = batcher.stats()
    assert (stats.answered, stats.queued, stats.running) == (4, 0, 0)
    assert stats.batch_sizes == {1: 1, 3: 1}
    assert stats.batches == 2
    assert stats.mean_batch_size == 2
    assert stats.latency.count == 4
    assert stats.latency.max_ms >= stats.wait.p50_ms >= 0
    assert 0 < stats.busy_share <= 1
