"""What is learned of staged models while they run. Time is made by their stages."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import numpy as np
import pytest
from harness import PATIENCE_S

from trims_shim.batching.flex.batcher import FlexBatcher
from trims_shim.batching.flex.dispatch import FlexLearning, _ascending
from trims_shim.batching.flex.exit_points import exit_point
from trims_shim.batching.policies.preemptible import PreemptibleModel
from trims_shim.batching.profiles.learning import LearnedProfile
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.errors import RequestDropped

KEY_SIGNATURE = None  # of a collate that makes lists
MS = 1_000_000


class Clock:
    """Goes on only when a stage says so."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def stage(self, takes_ms: float) -> Callable[[list[int]], list[int]]:
        def run(batch: list[int]) -> list[int]:
            self.now_ns += round(takes_ms * MS)
            return batch

        return run


def learned(batcher: FlexBatcher) -> PreemptibleModel:
    learning = batcher._engine.options.learning
    assert isinstance(learning, FlexLearning)
    (key,) = learning.keys()
    return learning.model(key)


def test_where_the_exit_points_are_is_learned() -> None:
    clock = Clock()
    stages = [clock.stage(10), clock.stage(20), clock.stage(70)]
    with FlexBatcher({"m": stages}, collate="list", clock_ns=clock) as batcher:
        for number in range(40):
            batcher("m", number)
        model = learned(batcher)
    assert model.exits == pytest.approx((0.1, 0.3), abs=0.01)
    assert model.profile.latency_ns(1) == pytest.approx(100 * MS, rel=0.05)


def test_one_batch_of_another_course_moves_them_by_little() -> None:
    clock = Clock()
    takes_ms = [10, 20, 70]
    stages = [lambda batch, n=n: clock.stage(takes_ms[n])(batch) for n in range(3)]
    with FlexBatcher({"m": stages}, collate="list", clock_ns=clock) as batcher:
        for number in range(40):
            batcher("m", number)
        takes_ms.reverse()
        batcher("m", 0)
        # At .7 and .9 this once: a fifth of the way.
        assert learned(batcher).exits == pytest.approx((0.22, 0.42), abs=0.01)


def test_those_inside_of_stages_too() -> None:
    clock = Clock()

    def looping(batch: list[int]) -> list[int]:
        for _ in range(4):
            clock.now_ns += 25 * MS
            exit_point()
        return batch

    with FlexBatcher({"m": [looping]}, collate="list", clock_ns=clock) as batcher:
        for number in range(5):
            batcher("m", number)
        # The last one is at the very end, where nothing is left to be given up.
        assert learned(batcher).exits == pytest.approx((0.25, 0.5, 0.75), abs=0.01)


def test_before_the_first_batch_stages_are_thought_to_be_equal() -> None:
    with FlexBatcher({"m": [len, len, len, len]}, slo_ms=1000, collate="list") as batcher:
        learning = batcher._engine.options.learning
        assert isinstance(learning, FlexLearning)
        assert learning.model(("m", KEY_SIGNATURE)).exits == (0.25, 0.5, 0.75)


def test_a_profile_by_which_nothing_can_be_in_time_is_doubted() -> None:
    clock = Clock()
    slow = LatencyProfile.linear(0, 100_000, max_batch_size=32)
    with FlexBatcher(
        {"m": [clock.stage(10)]},
        slo_ms=1000,
        collate="list",
        profiles={"m": slow},
        clock_ns=clock,
    ) as batcher:
        for _ in range(200):
            try:
                assert batcher("m", 5) == 5
                break
            except RequestDropped:
                clock.now_ns += MS
        else:
            pytest.fail("nothing is ever answered")


def test_shapes_without_end_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trims_shim.batching.drivers.learning._MOST_KEYS", 3)
    with FlexBatcher({"m": [lambda batch: batch]}) as batcher:
        for length in range(1, 9):
            batcher("m", np.zeros(length))
        learning = batcher._engine.options.learning
        assert isinstance(learning, FlexLearning)
        assert len(learning.keys()) == len(learning._exits) == 3


def test_another_batch_size_is_for_all_models() -> None:
    clock = Clock()
    with FlexBatcher({"m": [clock.stage(1)]}, collate="list", clock_ns=clock) as batcher:
        batcher("m", 1)
        batcher.update(max_batch_size=5)
        assert learned(batcher).max_batch_size == 5
        assert batcher("m", 1) == 1
        assert batcher.max_batch_size == 5


def test_another_batch_size_holds_for_what_is_queued_of_a_known_model() -> None:
    entered, gate = threading.Event(), threading.Event()
    sizes: list[int] = []

    def hold(batch: list[int]) -> list[int]:
        entered.set()
        assert gate.wait(PATIENCE_S)
        return batch

    def note(batch: list[int]) -> list[int]:
        sizes.append(len(batch))
        return batch

    models = {"held": [hold], "known": [note]}
    with FlexBatcher(models, collate="list", clock_ns=Clock()) as batcher:
        batcher("known", 0)
        held = batcher.submit("held", 0)
        assert entered.wait(PATIENCE_S)
        queued = [batcher.submit("known", number) for number in range(4)]
        batcher.update(max_batch_size=2)
        gate.set()
        assert [each.result(PATIENCE_S) for each in [held, *queued]] == [0, 0, 1, 2, 3]
    assert sizes == [1, 2, 2]


def test_another_batch_size_may_come_while_a_model_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FlexBatcher({"m": [list]}, collate="list", max_batch_size=2) as batcher:
        learning, look_up = batcher._engine.options.learning, LearnedProfile.profile

        def profile(learned: LearnedProfile, max_batch_size: int) -> LatencyProfile:
            found = look_up(learned, max_batch_size)
            learning.max_batch_size = 5  # as update() in another thread does first
            return found

        monkeypatch.setattr(LearnedProfile, "profile", profile)
        assert batcher("m", 1) == 1


def test_what_was_learned_is_kept_for_the_next_one_of_its_name() -> None:
    def make(name: str, takes_ms: float) -> FlexBatcher:
        clock = Clock()
        return FlexBatcher(
            {"m": [clock.stage(takes_ms)]}, collate="list", name=name, clock_ns=clock
        )

    name = f"kept-{uuid.uuid4()}"
    with make(name, 50) as batcher:
        for number in range(20):
            batcher("m", number)
    for same, is_known in ((name, True), (f"another-{name}", False)):
        with make(same, 10) as batcher:
            learning = batcher._engine.options.learning
            assert isinstance(learning, FlexLearning)
            latency_ns = learning.model(("m", KEY_SIGNATURE)).profile.latency_ns(1)
        assert (latency_ns == pytest.approx(50 * MS, rel=0.05)) == is_known


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.2, 0.6], (0.2, 0.6)),
        ([0.5, 0.5], (0.5, 0.500001)),
        ([0.0, 0.5], (0.000001, 0.5)),
        ([0.5, 1.0], (0.5,)),
        ([0.9, 0.3], (0.9, 0.900001)),
        ([], ()),
    ],
)
def test_exit_points_always_ascend(shares: list[float], expected: tuple[float, ...]) -> None:
    found = _ascending(shares)
    assert found == pytest.approx(expected)
    PreemptibleModel(LatencyProfile([1]), 1, found)
