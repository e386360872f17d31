"""One device: its loads come one after the other, and user code cannot end its loop. No Ray."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENCE_S

from tests.cluster.making import LARGE, SMALL
from trims_shim.cluster import actor
from trims_shim.cluster.actor import BatchFunction, DeviceActor
from trims_shim.errors import RequestDropped


@pytest.fixture(autouse=True)
def _node(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_accelerator_ids=dict, get_node_id=lambda: "here")
    monkeypatch.setattr(actor, "_context", lambda: context)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


def exits(*_: Any) -> Any:
    raise SystemExit(3)


def test_loaders_are_told_what_ray_gives_to_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def load(device: str) -> BatchFunction:
        devices.append(device)
        return lambda items: items

    async def test() -> None:
        given: dict[str, list[str]] = {}
        context = SimpleNamespace(get_accelerator_ids=lambda: given, get_node_id=lambda: "here")
        monkeypatch.setattr(actor, "_context", lambda: context)
        for number, found in enumerate((["0"], []), start=1):
            given["GPU"] = found
            await DeviceActor({"small": load}, None).load(number, SMALL)

    run(test())
    assert devices == ["cuda", "cpu"]


def test_what_is_interrupted_fails_too() -> None:
    def interrupted(device: str) -> BatchFunction:
        raise KeyboardInterrupt

    async def test() -> None:
        with pytest.raises(RuntimeError, match=r"raised KeyboardInterrupt\(\)"):
            await DeviceActor({"small": interrupted}, None).load(1, SMALL)

    run(test())


def test_what_exits_fails_and_the_actor_goes_on() -> None:
    async def test() -> None:
        device = DeviceActor({"small": exits, "large": lambda device: exits}, None)
        with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\)"):
            await device.load(1, SMALL)
        assert await device.answer(1, 7, 1e3) == ()
        await device.load(2, LARGE)
        with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\)"):
            await device.answer(2, 7, 1e6)

    run(test())


def test_a_variant_needs_the_images_of_its_last_load(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: set[str] = set()
    images = iter(("before", "after", "after"))

    def load(device: str) -> BatchFunction:
        opened.add(next(images))
        return lambda items: items

    async def test() -> None:
        device = DeviceActor({"small": load}, None)
        digests = [(await device.load(number, SMALL)).digests for number in (1, 2, 3)]
        assert digests == [{"before"}, {"after"}, {"after"}]  # a load may open nothing new

    monkeypatch.setattr(actor, "_opened", lambda: frozenset(opened))
    run(test())


def test_of_two_loads_at_once_the_last_one_stays() -> None:
    """The service may take an actor for lost that was only out of reach."""
    is_asked_again = threading.Event()

    def load_small(device: str) -> BatchFunction:
        assert is_asked_again.wait(PATIENCE_S)
        return lambda items: ["small" for _ in items]

    def load_large(device: str) -> BatchFunction:
        return lambda items: ["large" for _ in items]

    async def test() -> None:
        device = DeviceActor({"small": load_small, "large": load_large}, None)
        first = asyncio.create_task(device.load(1, SMALL))
        second = asyncio.create_task(device.load(2, LARGE))
        await asyncio.sleep(0.05)  # a load that did not wait would be done
        is_asked_again.set()
        await asyncio.gather(first, second)
        assert await device.answer(2, 7, 1e6) == ("large",)
        assert await device.answer(1, 7, 1e6) == ()

    run(test())


def test_what_was_asked_before_is_answered_before_another_variant_loads() -> None:
    proceed, loaded = threading.Event(), threading.Event()

    def load_small(device: str) -> BatchFunction:
        def answer(items: list[int]) -> list[str]:
            assert proceed.wait(PATIENCE_S)
            assert not loaded.is_set()
            return ["small" for _ in items]

        return answer

    def load_large(device: str) -> BatchFunction:
        loaded.set()
        return lambda items: ["large" for _ in items]

    async def test() -> None:
        device = DeviceActor({"small": load_small, "large": load_large}, None)
        await device.load(1, SMALL)
        asked = [asyncio.create_task(device.answer(1, 7, 1e6)) for _ in range(3)]
        await asyncio.sleep(0)
        loading = asyncio.create_task(device.load(2, LARGE))
        await asyncio.sleep(0)
        assert await device.answer(1, 7, 1e6) == (), "it goes to another device"
        proceed.set()
        assert await asyncio.gather(*asked) == [("small",)] * 3
        await loading

    run(test())


class Model:
    """Has a cycle, as many models do."""

    def __init__(self) -> None:
        self.itself = self

    def __call__(self, items: list[int]) -> list[int]:
        return items


def test_a_model_is_gone_before_the_next_one_loads() -> None:
    models: list[weakref.ref[Model]] = []
    found: list[Model | None] = []

    def load_small(device: str) -> BatchFunction:
        model = Model()
        models.append(weakref.ref(model))
        return model

    def load_large(device: str) -> BatchFunction:
        found.append(models[0]())
        return lambda items: items

    async def test() -> None:
        device = DeviceActor({"small": load_small, "large": load_large}, None)
        await device.load(1, SMALL)
        assert await device.answer(1, 7, 1e6) == (7,)
        await device.load(2, LARGE)

    gc.disable()  # it would find the cycle in the end
    try:
        run(test())
    finally:
        gc.enable()
    assert found == [None]


def test_a_model_that_its_loader_keeps_for_a_while_is_freed_after_that() -> None:
    models: list[weakref.ref[Model]] = []
    kept: list[Model] = []

    def load(device: str) -> BatchFunction:
        kept[:] = [Model()]
        models.append(weakref.ref(kept[0]))
        return kept[0]

    async def test() -> None:
        device = DeviceActor({"small": load, "large": load}, None)
        for number, option in enumerate((SMALL, LARGE, SMALL, LARGE), start=1):
            await device.load(number, option)

    run(test())
    gc.collect()
    assert [model() is not None for model in models] == [False, False, False, True]


def test_batches_are_those_of_the_option_and_the_deployment() -> None:
    sizes: list[int] = []
    may_answer = threading.Event()

    def load(device: str) -> BatchFunction:
        def answer(items: list[int]) -> list[int]:
            sizes.append(len(items))
            assert may_answer.wait(PATIENCE_S)
            return items

        return answer

    async def test() -> None:
        device = DeviceActor({"small": load}, None)
        await device.load(1, SMALL)
        with pytest.raises(RequestDropped):  # by the profile, a batch takes 10 ms
            await device.answer(1, 7, 2.0)
        answers = asyncio.gather(*(device.answer(1, n, 1e6) for n in range(7)))
        assert device._batcher is not None
        while device._batcher.stats().submitted < 1 + 7:
            await asyncio.sleep(0.001)
        may_answer.set()
        assert await answers == [(n,) for n in range(7)]
        assert max(sizes) == SMALL.profile.max_batch_size
        assert device._batcher.name == "cats/small"
        with pytest.raises(ValueError, match="nosuch"):
            await DeviceActor({"small": load}, "nosuch").load(1, SMALL)

    run(test())


def test_without_a_variant_nothing_is_answered_and_without_a_daemon_nothing_held() -> None:
    async def test() -> None:
        device = DeviceActor({}, None)
        assert await device.answer(0, 7, 1e6) == ()
        assert await device.resident() == frozenset()

    run(test())
