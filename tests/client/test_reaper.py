"""Everything that is retired is dropped once, after a wait that began after it was retired."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PATIENCE_S, wait_until

from trims_shim.client.reaper import Reaper


class Thing:
    """Counts how often it was dropped."""

    def __init__(self, name: str = "", index: int = 0) -> None:
        self.name = name
        self.index = index
        self.drops = 0
        self.on_drop: Callable[[], None] = lambda: None

    def drop(self) -> None:
        self.drops += 1
        self.on_drop()


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def idle(index: int) -> bool:
    return True


class Gate:
    """A device that is busy until it is opened; says when somebody waits for it."""

    def __init__(self) -> None:
        self.waits = 0
        self.entered = threading.Semaphore(0)
        self.open = threading.Semaphore(0)

    def __call__(self, index: int) -> bool:
        self.waits += 1
        self.entered.release()
        assert self.open.acquire(timeout=PATIENCE_S)
        return True


def named(name: str) -> Callable[[Thing], bool]:
    return lambda each: each.name == name


def test_it_is_dropped_and_no_thread_is_left() -> None:
    before = thread_count()
    reaper: Reaper[Thing] = Reaper(idle)
    assert thread_count() <= before  # those of other tests may end
    for _ in range(3):
        things = [Thing(), Thing()]
        for each in things:
            reaper.retire(each)
        wait_until(lambda things=things: all(each.drops for each in things), "dropped")
        wait_until(lambda: thread_count() <= before, "no thread is left")
    assert reaper.dropped == 6


def test_what_is_retired_while_it_drops() -> None:
    """The thread that is about to end must not be the one that another retirement relies on."""
    reaper: Reaper[Thing] = Reaper(idle)
    second = Thing()
    first = Thing()
    first.on_drop = lambda: reaper.retire(second)
    reaper.retire(first)
    wait_until(lambda: second.drops == 1, "the second dropped")
    assert first.drops == 1


def test_what_is_retired_after_the_last_look() -> None:
    """The thread that ends is still there, so that the retirement starts none."""
    reaper: Reaper[Thing] = Reaper(idle)
    first, second = Thing(), Thing()
    late, lock = [second], reaper._is_running

    def release() -> None:
        if late:
            reaper.retire(late.pop())
        lock.release()

    running: Any = SimpleNamespace(acquire=lock.acquire, locked=lock.locked, release=release)
    reaper._is_running = running
    reaper.retire(first)
    wait_until(lambda: second.drops == 1, "the second dropped")
    assert first.drops == 1


def test_many_retirements_at_once() -> None:
    reaper: Reaper[Thing] = Reaper(idle)
    things = [Thing() for _ in range(400)]

    def retire(part: list[Thing]) -> None:
        for each in part:
            reaper.retire(each)
            if random.random() < 0.1:
                time.sleep(0.0005)

    threads = [threading.Thread(target=retire, args=(things[n::4],)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    wait_until(lambda: all(each.drops for each in things), "all dropped")
    time.sleep(0.01)
    assert Counter(each.drops for each in things) == {1: 400}


def test_revived_while_the_device_is_busy() -> None:
    gate = Gate()
    reaper: Reaper[Thing] = Reaper(gate)
    thing, other = Thing("a"), Thing("b")
    reaper.retire(thing)
    assert gate.entered.acquire(timeout=PATIENCE_S)
    reaper.retire(other)
    assert reaper.revive(named("c")) is None
    assert reaper.revive(named("a")) is thing
    assert reaper.revive(named("a")) is None
    gate.open.release(2)
    wait_until(lambda: other.drops, "the other dropped")
    assert thing.drops == 0


def test_work_queued_after_a_revival_is_waited_for() -> None:
    """Retired again during a wait that began before: that wait says nothing of the new work."""
    gate = Gate()
    reaper: Reaper[Thing] = Reaper(gate)
    thing = Thing("a")
    reaper.retire(thing)
    assert gate.entered.acquire(timeout=PATIENCE_S)
    assert reaper.revive(named("a")) is thing
    reaper.retire(thing)
    gate.open.release()
    assert gate.entered.acquire(timeout=PATIENCE_S)
    assert (gate.waits, thing.drops) == (2, 0)
    gate.open.release()
    wait_until(lambda: thing.drops == 1, "dropped after the second wait")


def test_a_device_that_cannot_be_waited_for_holds_up_no_other() -> None:
    is_ready = threading.Event()
    reaper: Reaper[Thing] = Reaper(lambda index: index == 1 or is_ready.is_set())
    stuck, free = Thing(index=0), Thing(index=1)
    reaper.retire(stuck)
    reaper.retire(free)
    wait_until(lambda: free.drops, "the other device's dropped")
    time.sleep(0.05)
    assert stuck.drops == 0
    assert reaper.revive(lambda each: True) is stuck
    reaper.retire(stuck)
    is_ready.set()
    wait_until(lambda: stuck.drops == 1, "dropped in the end")


def test_a_device_that_cannot_be_waited_for_is_asked_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, pauses, thing = [False] * 8 + [True], list[float](), Thing()
    monkeypatch.setattr("trims_shim.client.reaper.time", SimpleNamespace(sleep=pauses.append))
    Reaper[Thing](lambda index: answers.pop(0)).retire(thing)
    wait_until(lambda: thing.drops, "it is dropped")
    assert pauses == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]


def test_settling_waits_for_the_last_drop() -> None:
    """Whoever needs the memory now is told only when it is there."""
    reaper: Reaper[Thing] = Reaper(idle)
    thing = Thing()
    is_dropping, may_go_on = threading.Event(), threading.Event()

    def drop() -> None:
        is_dropping.set()
        assert may_go_on.wait(PATIENCE_S)

    thing.on_drop = drop
    reaper.retire(thing)
    assert is_dropping.wait(PATIENCE_S)
    threading.Timer(0.05, may_go_on.set).start()
    assert reaper.settle(PATIENCE_S)
    assert may_go_on.is_set()
    assert reaper.dropped == 1


def test_settling_with_nothing_to_do() -> None:
    assert Reaper[Thing](idle).settle(0)


def test_settling_gives_up_on_a_device_that_is_busy_for_ever() -> None:
    gate = Gate()
    reaper: Reaper[Thing] = Reaper(gate)
    reaper.retire(Thing())
    assert not reaper.settle(0.05)
    gate.open.release()
    assert reaper.settle(PATIENCE_S)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_without_a_thread_the_next_one_takes_it_along(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reaper: Reaper[Thing] = Reaper(idle)
    first, second = Thing(), Thing()

    def refuse(*_: object) -> None:
        raise error

    def retire_without_a_thread(thing: Thing) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", refuse)
            reaper.retire(thing)

    retire_without_a_thread(first)
    assert first.drops == 0
    reaper.retire(second)
    wait_until(lambda: first.drops == second.drops == 1, "both dropped")
    assert reaper.settle(PATIENCE_S)
    retire_without_a_thread(third := Thing())
    assert reaper.settle(PATIENCE_S)
    assert third.drops == 1


def test_a_finalizer_inside_the_reaper_s_own_steps() -> None:
    """The collector may run anywhere, in the reaper too, and retire more."""
    reaper: Reaper[Thing] = Reaper(idle)
    things = [Thing() for _ in range(300)]

    class Cycle:
        def __init__(self, thing: Thing) -> None:
            self.itself = self
            self.thing = thing

        def __del__(self) -> None:
            reaper.retire(self.thing)

    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for each in things:
            Cycle(each)
            reaper.revive(lambda each: False)
        gc.collect()
        wait_until(lambda: all(each.drops for each in things), "all dropped")
    finally:
        gc.set_threshold(*threshold)
    assert {each.drops for each in things} == {1}
