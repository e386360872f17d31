"""FlexBatcher: staged models that really run, and really are given up.

Time stands still (a clock of the test), so what the policy decides is certain: a long model of two
stages is held in its first one while requests of a short model come that cannot wait for it.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import PATIENCE_S, wait_until

from trims_shim.batching.collating.collate import Collate
from trims_shim.batching.drivers.replies import Entry
from trims_shim.batching.flex.batcher import FlexBatcher, PreemptionStats
from trims_shim.batching.flex.dispatch import FlexDispatch, FlexJob
from trims_shim.batching.flex.exit_points import exit_point
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.errors import BatcherClosed, QueueFull, RequestDropped

PROFILES = {
    "long": LatencyProfile.linear(10, 1000, max_batch_size=32),
    "short": LatencyProfile.linear(1, 10, max_batch_size=32),
}
SLOS_MS = {"long": 10_000, "short": 700}


class Gate:
    """A stage that says when it was entered and waits until it may go on."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._may_go = threading.Semaphore(0)
        self.calls: list[list[Any]] = []

    def __call__(self, batch: list[Any]) -> list[Any]:
        self.calls.append(list(batch))
        self.entered.release()
        assert self._may_go.acquire(timeout=PATIENCE_S)
        return batch

    def wait(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)

    def open(self, times: int = 1) -> None:
        self._may_go.release(times)


class Scene:
    """A batcher whose models wait in their first stages."""

    def __init__(self, **options: Any) -> None:
        self.long, self.short = Gate(), Gate()
        self.second: list[list[Any]] = []
        stages = options.pop("stages", [self.long, self._finish])
        self.batcher = FlexBatcher(
            {"long": stages, "short": [self.short]},
            **{
                "slo_ms": SLOS_MS,
                "profiles": PROFILES,
                "collate": "list",
                "clock_ns": lambda: 0,
                **options,
            },
        )

    def _finish(self, batch: list[Any]) -> list[Any]:
        self.second.append(list(batch))
        return [f"{each}!" for each in batch]

    def submit(self, model: str, *items: Any, **options: Any) -> list[Any]:
        return [self.batcher.submit(model, item, **options) for item in items]

    def close(self) -> None:
        self.long.open(1000)
        self.short.open(1000)
        self.batcher.close(timeout_s=PATIENCE_S)


@pytest.fixture
def make_scene() -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(**options: Any) -> Scene:
        scenes.append(Scene(**options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.close()


def results(futures: list[Any]) -> list[Any]:
    return [each.result(PATIENCE_S) for each in futures]


# --- answers --------------------------------------------------------------------------------------


def make_linear() -> FlexBatcher:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return FlexBatcher(
        {"linear": model.requires_grad_(False), "double": [lambda batch: batch * 2]}, slo_ms=5000
    )


def test_models_are_called_by_name() -> None:
    with make_linear() as batcher:
        row = torch.ones(3)
        assert torch.equal(batcher("double", row), row * 2)
        assert batcher.submit("linear", row).result(PATIENCE_S).shape == (2,)
        batcher.drain(PATIENCE_S)
        assert batcher.stats().answered == 2


class Model(str, enum.Enum):
    """Its members are their values, but ``str`` makes something else of them."""

    DOUBLE = "double"


@pytest.mark.parametrize("name", ["double", Model.DOUBLE])
def test_names_may_be_members_of_an_enum(name: str) -> None:
    with FlexBatcher({name: [lambda items: [2 * item for item in items]]}) as batcher:
        assert batcher("double", 1) == 2
        assert batcher(Model.DOUBLE, 2) == 4
        assert list(batcher.map(Model.DOUBLE, range(3))) == [0, 2, 4]


def test_many_items_of_one_model_or_of_several() -> None:
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    with FlexBatcher({"d": [double], "double": [double, double]}) as batcher:
        assert list(batcher.map("double", range(3))) == [0, 4, 8]
        assert list(batcher.map("d", range(3), deadline_ms=1e6)) == [0, 2, 4]
        assert list(batcher.map(["d", "double"], [1, 1])) == [2, 4]


def test_and_awaited() -> None:
    async def ask(batcher: FlexBatcher) -> list[Any]:
        rows = [torch.full((3,), float(number)) for number in range(5)]
        return await asyncio.gather(*(batcher.aio("double", row) for row in rows))

    with make_linear() as batcher:
        answers = asyncio.run(ask(batcher))
    assert [float(each[0]) for each in answers] == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_items_of_different_shapes_do_not_share_a_batch() -> None:
    with make_linear() as batcher:
        futures = [batcher.submit("double", torch.ones(size)) for size in (2, 3, 2, 3)]
        assert [tuple(each.shape) for each in results(futures)] == [(2,), (3,), (2,), (3,)]


def test_a_profile_is_measured_beforehand() -> None:
    with make_linear() as batcher:
        profile = batcher.warm("linear", torch.ones(3), repeats=1, limit_s=5)
        assert profile.max_batch_size == batcher.max_batch_size == 32


# --- preemption -----------------------------------------------------------------------------------


def preempted(scene: Scene, *, items: int = 4) -> tuple[list[Any], list[Any]]:
    """Futures of a batch that was given up, and of those for which it was, which run now."""
    longs = scene.submit("long", "a")
    scene.long.wait()
    shorts = scene.submit("short", *range(items))
    scene.long.open()
    scene.short.wait()
    return longs, shorts


def test_a_batch_is_given_up_at_its_exit_point_and_runs_again(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene()
    longs, shorts = preempted(scene)
    assert scene.second == [], "nothing beyond the exit point has run"
    scene.short.open()
    assert results(shorts) == [0, 1, 2, 3]
    scene.long.wait()
    scene.long.open()
    assert results(longs) == ["a!"]
    assert scene.long.calls == [["a"], ["a"]]
    scene.batcher.drain(PATIENCE_S)
    assert scene.batcher.preemption_stats().preemptions == 1
    assert scene.batcher.stats().answered == 5


@pytest.mark.parametrize("step", ["_wait_again", "_free_seat", "_note"])
def test_an_interrupt_while_a_batch_that_was_given_up_is_queued_again_loses_none_of_it(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    interrupts = [KeyboardInterrupt]
    plain = getattr(FlexDispatch, step)

    def interrupted(dispatch: FlexDispatch, of: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return plain(dispatch, of)

    scene = make_scene()
    longs = scene.submit("long", "a")
    scene.long.wait()
    shorts = scene.submit("short", *range(4))
    monkeypatch.setattr(FlexDispatch, step, interrupted)
    scene.long.open(9)
    scene.short.open(9)
    assert results(shorts) == [0, 1, 2, 3]
    assert results(longs) == ["a!"]
    assert not interrupts
    assert scene.long.calls == [["a"], ["a"]]
    scene.batcher.drain(PATIENCE_S)


def test_requests_that_an_interrupted_close_gives_up_are_told_that_it_was_closed(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Entry.open_gate

    def interrupted(entry: Entry) -> None:
        monkeypatch.setattr(Entry, "open_gate", opened)
        raise KeyboardInterrupt

    scene = make_scene(preemption_factor=None)
    running = scene.submit("long", "a")
    scene.long.wait()
    first = scene.submit("short", 1)
    others = scene.submit("long", "b", "c")
    monkeypatch.setattr(Entry, "open_gate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scene.batcher.close(cancel=True)
    # The policy after the interrupt runs one of the others, and knows nothing of the first.
    for closed in (*first, others[1]):
        with pytest.raises(BatcherClosed):
            closed.result(PATIENCE_S)
    scene.long.open(9)
    assert results([*running, others[0]]) == ["a!", "b!"]
    scene.batcher.drain(PATIENCE_S)
    stats = scene.batcher.stats()
    assert (stats.answered, stats.failed, stats.cancelled) == (2, 2, 0)


def test_what_giving_up_costs_is_told(make_scene: Callable[..., Scene]) -> None:
    now_ns = 1_000_000
    scene = make_scene(clock_ns=lambda: now_ns)
    scene.submit("long", "a")
    scene.long.wait()
    now_ns = 4_000_000
    scene.submit("short", *range(4))
    now_ns = 6_000_000
    scene.long.open()
    scene.short.wait()
    expected = PreemptionStats(preemptions=1, wasted_s=0.005, stop_p50_ms=2, stop_p99_ms=2)
    assert scene.batcher.preemption_stats() == expected
    stats = scene.batcher.stats()
    assert (stats.busy_total_s, stats.batches, stats.wait.count) == (0.005, 0, 0)


def test_the_longest_of_a_few_stops_is_their_99th_percentile(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene()
    preempted(scene)
    (dispatch,) = scene.batcher._engine.dispatches()
    assert isinstance(dispatch, FlexDispatch)
    assert list(dispatch.stops_ns) == [0]
    dispatch.stops_ns += [8_000_000, 3_000_000]
    found = scene.batcher.preemption_stats()
    assert (found.stop_p50_ms, found.stop_p99_ms) == (3, 8)


def test_of_two_devices_one_gives_its_batch_up(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(devices=2)
    longs = scene.submit("long", "a", "b")
    scene.long.wait()
    scene.long.wait()
    shorts = scene.submit("short", *range(4))
    scene.long.open(3)
    scene.short.open()
    assert results(shorts) == [0, 1, 2, 3]
    assert results(longs) == ["a!", "b!"]
    assert scene.batcher.preemption_stats().preemptions == 1


def test_a_caller_that_blocks_survives_it(make_scene: Callable[..., Scene]) -> None:
    """It may have run the batch itself, in its own thread."""
    scene = make_scene()
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(scene.batcher("long", "a")))
    caller.start()
    scene.long.wait()
    shorts = scene.submit("short", *range(4))
    scene.long.open(2)
    scene.short.open()
    assert results(shorts) == [0, 1, 2, 3]
    caller.join(PATIENCE_S)
    assert found == ["a!"]
    assert len(scene.long.calls) == 2


def test_a_caller_whose_batch_was_given_up_runs_the_one_with_his_item(
    make_scene: Callable[..., Scene],
) -> None:
    """Its own model's larger batch, in which he is; the others could not wait for the next one."""
    scene = make_scene(slo_ms=SLOS_MS | {"long": 1700})
    found: list[Any] = []
    callers = [
        threading.Thread(target=lambda item=item: found.append(scene.batcher("long", item)))
        for item in "abcdef"
    ]
    callers[0].start()
    scene.long.wait()
    for each in callers[1:]:
        each.start()
    wait_until(lambda: scene.batcher.stats().submitted == 6)
    scene.long.open(2)
    for each in callers:
        each.join(PATIENCE_S)
    assert sorted(found) == ["a!", "b!", "c!", "d!", "e!", "f!"]
    assert sorted(map(len, scene.long.calls)) == [1, 6]
    assert scene.batcher.preemption_stats().preemptions == 1


def test_fewer_requests_do_not_preempt(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    longs = scene.submit("long", "a")
    scene.long.wait()
    shorts = scene.submit("short", *range(3))
    scene.long.open()
    scene.short.open()
    assert results(longs) == ["a!"]
    assert results(shorts) == [0, 1, 2]
    assert scene.long.calls == [["a"]]


def test_without_a_factor_nothing_is_given_up(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(preemption_factor=None)
    longs = scene.submit("long", "a")
    scene.long.wait()
    scene.submit("short", *range(8))
    scene.long.open()
    scene.short.open()
    assert results(longs) == ["a!"]
    assert scene.batcher.preemption_stats().preemptions == 0


def test_a_stage_may_have_exit_points_of_its_own(make_scene: Callable[..., Scene]) -> None:
    beyond: list[Any] = []
    gate = Gate()

    def looping(batch: list[Any]) -> list[Any]:
        batch = gate(batch)
        exit_point()
        beyond.append(batch)
        return batch

    scene = make_scene(stages=[looping, lambda batch: batch])
    longs = scene.submit("long", "a")
    gate.wait()
    scene.submit("short", *range(4))
    gate.open()
    scene.short.wait()
    assert beyond == []
    gate.open()
    scene.short.open()
    assert results(longs) == ["a"]


def test_what_was_given_up_can_be_cancelled(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    longs, shorts = preempted(scene)
    assert longs[0].cancel()
    scene.short.open()
    results(shorts)
    scene.batcher.drain(PATIENCE_S)
    assert scene.long.calls == [["a"]], "it did not run again"
    assert scene.batcher.stats().cancelled == 1


def test_who_gave_up_before_a_batch_that_is_given_up_is_waited_for_no_longer(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = FlexJob.begin

    def cancel_and_begin(job: FlexJob, now_ns: int) -> list[Any]:
        longs[1].cancel()
        return begin(job, now_ns)

    scene = make_scene()
    scene.submit("short", 0)
    scene.short.wait()
    longs = scene.submit("long", "a", "b")
    monkeypatch.setattr(FlexJob, "begin", cancel_and_begin)
    scene.short.open()
    scene.long.wait()
    drain = threading.Thread(target=scene.batcher.drain, args=[PATIENCE_S])
    drain.start()
    (dispatch,) = scene.batcher._engine.dispatches()
    wait_until(lambda: dispatch._watches)
    scene.submit("short", *range(8))
    scene.long.open(2)
    scene.short.open()
    assert results(longs[:1]) == ["a!"]
    wait_until(lambda: not drain.is_alive())
    assert scene.long.calls == [["a"], ["a"]]
    assert scene.batcher.stats().cancelled == 1


def test_giving_up_does_not_make_the_queue_longer(make_scene: Callable[..., Scene]) -> None:
    """The one that waits again takes a place, also when there was none."""
    scene = make_scene(queue_size=4, when_full="reject")
    preempted(scene)
    scene.submit("short", *range(3))
    with pytest.raises(QueueFull):
        scene.submit("short", 3)


def test_closing_fails_what_was_given_up(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    longs, shorts = preempted(scene)
    with pytest.raises(TimeoutError):
        scene.batcher.close(cancel=True, timeout_s=0.0)  # the short ones run
    with pytest.raises(BatcherClosed):
        results(longs)
    scene.short.open()
    assert results(shorts) == [0, 1, 2, 3]
    assert scene.long.calls == [["a"]]


# --- what else a batcher does ---------------------------------------------------------------------


def test_the_hopeless_are_dropped(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    (future,) = scene.submit("short", 1, deadline_ms=5)
    with pytest.raises(RequestDropped) as caught:
        future.result(PATIENCE_S)
    assert caught.value.reason == "hopeless"


def test_a_margin_is_kept_before_deadlines(make_scene: Callable[..., Scene]) -> None:
    for margin_ms, is_answered in ((689, True), (690, False)):  # one takes 11 ms, and has 700
        scene = make_scene(margin_ms=margin_ms)
        scene.short.open()
        (future,) = scene.submit("short", 1)
        assert (future.exception(PATIENCE_S) is None) == is_answered


def test_or_served_late(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(when_late="serve")
    scene.short.open()
    assert results(scene.submit("short", 1, deadline_ms=5)) == [1]


def test_late_ones_are_served_also_after_others_of_their_model(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(when_late="serve")
    scene.short.open(2)
    assert results(scene.submit("short", 1)) == [1]
    scene.batcher.drain(PATIENCE_S)  # what was learned of the first one is known
    assert results(scene.submit("short", 2, deadline_ms=5)) == [2]


def test_priority_goes_first(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(max_batch_size=1)
    futures = scene.submit("short", 0)
    scene.short.wait()
    futures += scene.submit("short", 1) + scene.submit("short", 2, priority=1)
    scene.short.open(3)
    assert results(futures) == [0, 1, 2]
    assert scene.short.calls == [[0], [2], [1]]


@pytest.mark.parametrize("caller_runs", [True, False])
def test_a_caller_runs_its_batch_if_it_may(caller_runs: bool) -> None:
    def runners(items: list[Any]) -> list[int]:
        return [threading.get_ident()] * len(items)

    with FlexBatcher({"m": [runners]}, caller_runs=caller_runs) as batcher:
        assert (batcher("m", 1) == threading.get_ident()) == caller_runs


def test_all_models_get_their_batches_by_the_collate_that_was_given() -> None:
    def kinds(batch: Any) -> list[type]:
        return [type(batch)] * len(batch)

    for collate, kind in (("auto", torch.Tensor), ("list", list)):
        with FlexBatcher({"m": [kinds]}, collate=collate) as batcher:
            assert batcher("m", torch.ones(1)) is kind


def test_an_objective_may_be_set_for_all(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.batcher.update(slo_ms=5)
    with pytest.raises(RequestDropped):
        results(scene.submit("short", 1))
    assert scene.batcher.slo_ms == 5


def test_objectives_of_models_end_with_that_of_all(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(slo_ms={"long": 10_000, "short": 5})
    scene.batcher.update(slo_ms=None)
    (future,) = scene.submit("short", 1)
    scene.short.open()
    assert future.result(PATIENCE_S) == 1


def test_a_failing_item_fails_alone() -> None:
    def fail_at_2(batch: list[int]) -> list[int]:
        if 2 in batch:
            raise LookupError("2")
        return batch

    with FlexBatcher({"m": [fail_at_2]}, collate="list") as batcher:
        futures = [batcher.submit("m", number) for number in range(5)]
        with pytest.raises(LookupError):
            futures[2].result(PATIENCE_S)
        del futures[2]
        assert results(futures) == [0, 1, 3, 4]
        found = list(batcher.map("m", range(5), return_exceptions=True))
        assert isinstance(found.pop(2), LookupError)
        assert found == [0, 1, 3, 4]


def test_a_failing_batch_fails_whole_when_asked_for(make_scene: Callable[..., Scene]) -> None:
    def fail_at_2(batch: list[int]) -> list[int]:
        if 2 in batch:
            raise LookupError("2")
        return batch

    scene = make_scene(stages=[fail_at_2], isolate_failures=False)
    shorts = scene.submit("short", 0)
    scene.short.wait()
    longs = scene.submit("long", 1, 2, 3)  # they share a batch
    scene.short.open()
    assert results(shorts) == [0]
    assert [type(each.exception(PATIENCE_S)) for each in longs] == [LookupError] * 3


def test_nothing_was_given_up_before_the_first_request() -> None:
    batcher = FlexBatcher({"m": [len]}, name="models")
    batcher.close()
    assert batcher.preemption_stats() == PreemptionStats(0, 0.0, 0.0, 0.0)
    assert repr(batcher) == "<FlexBatcher models, at most 32 at once>"
    assert repr(FlexBatcher({"m": [len]})) == "<FlexBatcher flex, at most 32 at once>"
    assert isinstance(batcher.collate, Collate)


def test_an_unknown_model_is_named() -> None:
    with make_linear() as batcher:
        with pytest.raises(ValueError, match="no model 'other'; it has 'linear', 'double'"):
            batcher("other", 1)
        with pytest.raises(TypeError, match="name of a model, and an item"):
            batcher("linear")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo_ms": {"other": 5}}, "slo_ms is given for other; the models are m"),
        ({"slo_ms": {"m": 0}}, "slo_ms is 0"),
        ({"slo_ms": -1}, "slo_ms is -1"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"queue_size": 0}, "queue_size is 0"),
        ({"devices": 0}, "devices is 0"),
        ({"devices": ["tpu"]}, "device 'tpu'"),
        ({"preemption_factor": 1.0}, "preemption_factor is 1.0"),
        ({"when_late": "never"}, "when_late is 'never'"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlexBatcher({"m": [lambda batch: batch]}, **options)


def test_objectives_are_given_for_all_models_or_for_none() -> None:
    with pytest.raises(ValueError, match="slo_ms is given for long; the models are long, short"):
        FlexBatcher({"long": [list], "short": [list]}, slo_ms={"long": 5})


def test_it_has_models_by_name_and_no_stages_of_its_own() -> None:
    with FlexBatcher({"m": [lambda values: values]}, collate="list") as batcher:
        assert batcher.model is None
        with pytest.raises(TypeError, match=r"stats\(\) .* preemption_stats\(\)"):
            batcher.stage_stats()
