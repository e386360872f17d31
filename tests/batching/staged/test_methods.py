"""Methods whose model in stages is that of their instance."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import types
import weakref
from typing import Any

import pytest

from tests.batching.waiting import LONG_S, join, start, wait_until
from trims_shim.batching import Batcher, batched
from trims_shim.batching.staged import StagedModel


class Scaler:
    """Its stages are methods of its own."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.parts = types.SimpleNamespace(staged=StagedModel([self.first, self.second]))
        self.whole_calls = 0

    def first(self, items: list[int]) -> list[int]:
        return [item * self.factor for item in items]

    def second(self, items: list[int]) -> list[int]:
        if -self.factor in items:
            raise ValueError("minus one")
        return [item + 1 for item in items]

    @batched(model="parts.staged", collate="list")
    def named(self, items: list[int]) -> list[int]:
        self.whole_calls += 1
        return [item * self.factor + 1 for item in items]

    @batched(model=lambda self: StagedModel([self.first, self.second]), collate="list")
    def made(self, items: list[int]) -> list[int]:
        return [item * self.factor + 1 for item in items]


def test_each_instance_has_its_own_stages() -> None:
    one, two = Scaler(3), Scaler(5)
    assert [one.named(item) for item in (1, 2)] == [4, 7]
    assert [two.named(item) for item in (1, 2)] == [6, 11]
    assert one.named.model is one.parts.staged
    assert one.named.submit(4).result(LONG_S) == 13
    one.named.drain(LONG_S)
    assert one.whole_calls == 1  # the first batch, to be compared
    assert one.named.stage_stats().stages[1].runs == 2
    assert two.named.stats().submitted == 2


def test_methods_of_one_name_have_stages_of_their_own() -> None:
    class Two:
        def __init__(self) -> None:
            self.doubling = StagedModel([lambda items: [2 * item for item in items]])
            self.squaring = StagedModel([lambda items: [item * item for item in items]])

        @batched(model="doubling", name="model", collate="list")
        def double(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

        @batched(model="squaring", name="model", collate="list")
        def square(self, items: list[int]) -> list[int]:
            return [item * item for item in items]

    two = Two()
    assert (two.double(3), two.square(3)) == (6, 9)
    assert two.square.model is two.squaring


def test_a_function_of_the_instance_is_called_once() -> None:
    scaler = Scaler(3)
    assert [scaler.made(item) for item in (1, 2)] == [4, 7]
    assert scaler.made.model is scaler.made.model


def test_where_a_stage_fails_the_method_of_that_instance_answers() -> None:
    scaler = Scaler(3)
    assert scaler.named(1) == 4
    assert scaler.named(-1) == -2
    scaler.named.drain(LONG_S)
    assert scaler.whole_calls == 2
    assert scaler.named.stage_stats().failures == 1


def test_stages_are_measured_without_the_instance() -> None:
    scaler = Scaler(3)
    profile: Any = scaler.named.warm(1, repeats=1)
    assert len(profile.stages) == 2
    assert scaler.named(1) == 4


def test_an_instance_is_gone_though_its_stages_are_its_methods() -> None:
    scaler = Scaler(3)
    assert scaler.named(1) == 4
    assert scaler.named.submit(1).result(LONG_S) == 4
    gone = weakref.ref(scaler)
    del scaler
    wait_until(lambda: gc.collect() is not None and gone() is None, "the end of the instance")


def test_copies_have_batchers_of_their_own() -> None:
    scaler = Scaler(3)
    assert scaler.made(1) == 4
    for other in (copy.copy(scaler), copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        other.factor = 5
        assert other.made(1) == 6
        assert scaler.made(1) == 4


def test_threads_that_come_first_share_one() -> None:
    scaler = Scaler(3)
    meeting = threading.Barrier(4)
    engines: set[int] = set()

    def ask() -> None:
        meeting.wait(LONG_S)
        engines.add(id(scaler.named._engine))

    join(*[start(ask) for _ in range(4)])
    assert len(engines) == 1


def test_instances_without_attributes_of_their_own() -> None:
    class Slotted:
        __slots__ = ("__weakref__", "staged")

        @batched(model="staged", collate="list")
        def method(self, items: list[int]) -> list[int]:
            return items

    slotted = Slotted()
    slotted.staged = StagedModel([lambda items: items])
    assert [slotted.method(item) for item in (1, 2)] == [1, 2]
    assert slotted.method.stats().submitted == 2


# --- mistakes -------------------------------------------------------------------------------------


def test_the_class_has_no_model() -> None:
    with pytest.raises(TypeError, match="that of an instance"):
        Scaler.named(1)
    with pytest.raises(TypeError, match="that of an instance"):
        Scaler.named.warm(1)
    with pytest.raises(TypeError, match="other stages for each instance"):
        Scaler.named.stage_stats()
    assert Scaler.named.model is None
    assert Scaler.named.stats().submitted == 0


def test_a_function_that_is_no_method_has_no_instance() -> None:
    batcher = Batcher(lambda items: items, model="staged", collate="list")
    with pytest.raises(TypeError, match="that of an instance"):
        batcher.submit(1)


class Lookup:
    """As torch's modules are: what is missing is looked for elsewhere."""

    @batched(model="parts.staged", collate="list")
    def method(self, items: list[int]) -> list[int]:
        return items

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nothing is called {name}")


def test_an_attribute_that_is_not_there_is_named() -> None:
    with pytest.raises(TypeError, match="finds none in this Lookup: nothing is called parts"):
        Lookup().method(1)


def test_an_attribute_that_is_no_model_is_named() -> None:
    scaler = Scaler(3)
    scaler.parts.staged = [scaler.first]
    with pytest.raises(TypeError, match="give a StagedModel"):
        scaler.named(1)


def test_options_that_cannot_be_are_refused_with_the_class() -> None:
    async def awaited(self: object, items: list[int]) -> list[int]:
        return items

    with pytest.raises(TypeError, match="one plain call"):
        Batcher(awaited, model="staged")
    with pytest.raises(ValueError, match="no policy 'nothing'"):
        batched(model="staged", policy="nothing")(lambda self, items: items)
    with pytest.raises(ValueError, match="max_active is 0"):
        batched(model="staged", max_active=0)(lambda self, items: items)
    staged = StagedModel([lambda items: items])
    mistaken = type("Mistaken", (), {"method": batched(model=staged)(lambda self, items: items)})
    with pytest.raises(TypeError, match="the name of the attribute"):
        mistaken().method(1)
