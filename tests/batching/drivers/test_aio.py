"""Event loops: callers that await, functions that are awaited, loops that end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from tests.batching.waiting import LONG_S, Endless, Gate, join, wait_until
from trims_shim.batching import Batcher
from trims_shim.batching.drivers.aio import AwaitedReply, LoopDispatch, Mailbox, ThreadLoop
from trims_shim.batching.policies.window import Window
from trims_shim.batching.rules import Rule
from trims_shim.errors import BatcherClosed, BatchingError, QueueFull, RequestDropped

greedy = functools.partial(Batcher, policy="immediate")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """On a loop of its own, with an end."""
    return asyncio.run(asyncio.wait_for(coroutine, LONG_S))


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def adouble(items: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [2 * item for item in items]


both = pytest.mark.parametrize("function", [double, adouble])


class AsyncGate:
    """An asynchronous batch function that is held until it is opened."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.may_go = asyncio.Semaphore(0)

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(list(items))
        await self.may_go.acquire()
        return items


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


# --- answers --------------------------------------------------------------------------------------


@both
def test_awaited_from_several_loops_after_each_other(function: Any) -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(batcher.aio(item) for item in range(20)))

    batcher = greedy(function, max_batch_size=8)
    for _ in range(3):
        assert run(main()) == [2 * item for item in range(20)]
    batcher.drain(LONG_S)  # answers come before they are counted
    assert batcher.stats().answered == 60
    batcher.close()


def test_a_loop_that_runs_is_not_forgotten_for_another_one() -> None:
    async def ask() -> int:
        return await batcher.aio(1)

    async def main() -> None:
        for _ in range(2):
            assert await ask() == 2
            here = batcher._engine.of_loop(asyncio.get_running_loop())
            assert await asyncio.to_thread(run, ask()) == 2
        assert batcher._engine.of_loop(asyncio.get_running_loop()) is here
        assert here.stats().submitted == 2

    batcher = greedy(adouble)
    run(main())
    batcher.close()
    assert batcher.stats().submitted == 4


@both
def test_awaited_on_several_loops_at_once(function: Any) -> None:
    answers: list[list[int]] = []

    async def main(first: int) -> None:
        for _ in range(20):
            items = range(first, first + 5)
            answers.append([first, *await asyncio.gather(*(batcher.aio(each) for each in items))])

    batcher = greedy(function, max_batch_size=8)
    threads = [
        threading.Thread(target=lambda first=first: run(main(first))) for first in (0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(answers) == 60
    assert all(found[1:] == [2 * (found[0] + each) for each in range(5)] for found in answers)
    batcher.close()


def test_an_asynchronous_function_is_called_from_threads_too() -> None:
    with greedy(adouble) as batcher:
        assert batcher(1) == 2
        assert batcher.submit(2).result(LONG_S) == 4
        assert list(batcher.map(range(10))) == [2 * item for item in range(10)]


def test_an_object_or_a_partial_with_an_asynchronous_call() -> None:
    class Model:
        async def __call__(self, items: list[int], factor: int = 3) -> list[int]:
            return [factor * item for item in items]

    assert run(greedy(Model()).aio(2)) == 6
    with greedy(functools.partial(Model().__call__, factor=4)) as batcher:
        assert batcher(2) == 8


def test_requests_share_batches_formed_late() -> None:
    async def main() -> None:
        gate = AsyncGate()
        batcher = greedy(gate, max_batch_size=3)
        tasks = [asyncio.create_task(batcher.aio(item)) for item in range(5)]
        await settle()
        assert gate.batches == [[0]]
        gate.may_go.release()
        await settle()
        assert gate.batches == [[0], [1, 2, 3]]
        gate.may_go.release()
        gate.may_go.release()
        assert await asyncio.gather(*tasks) == list(range(5))
        await batcher.aclose()

    run(main())


def test_blocking_on_the_loop_that_has_to_run_is_an_error() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="aio"):
            batcher(1)
        assert await batcher.aio(1) == 2

    batcher = greedy(adouble)
    run(main())
    batcher.close()


def test_waiting_on_the_loop_of_open_requests_is_an_error() -> None:
    async def main() -> None:
        gate = AsyncGate()
        batcher = greedy(gate)
        asked = asyncio.create_task(batcher.aio(1))
        await settle()
        assert batcher.stats().running == 1
        for wait in (batcher.drain, batcher.close):
            with pytest.raises(RuntimeError, match="await aio"):
                wait(timeout_s=0)
        gate.may_go.release()
        assert await asked == 1

    run(main())


def test_blocking_on_a_loop_works_with_a_synchronous_function() -> None:
    async def main() -> int:
        return int(batcher(1))

    with greedy(double) as batcher:
        assert run(main()) == 2


@both
def test_a_waiting_policy_is_woken_in_time(function: Any) -> None:
    async def main() -> None:
        started_s = time.monotonic()
        assert await batcher.aio(1) == 2
        assert time.monotonic() - started_s >= 0.02
        assert batcher.stats().wake_lateness.count == 1

    batcher = Batcher(function, policy=functools.partial(Window, wait_ms=20))
    run(main())
    batcher.close()


class Due(Rule):
    """Runs what is queued at the earliest deadline."""

    def choose(self, now_ns: int) -> int:
        self.wake_ns = self.queue.deadline_ns(len(self.queue))
        return self.room() if now_ns >= self.wake_ns else 0


@both
def test_a_timer_comes_earlier_for_a_request_that_cannot_wait_as_long(function: Any) -> None:
    async def main() -> None:
        async with Batcher(function, policy=Due) as batcher:
            late = asyncio.create_task(batcher.aio(1, deadline_ms=1e6))
            await settle()
            assert await batcher.aio(2, deadline_ms=5) == 4
            assert await late == 2

    run(main())


@both
def test_dropped_rejected_and_failed(function: Any) -> None:
    async def main() -> None:
        with pytest.raises(RequestDropped):
            await batcher.aio(1, deadline_ms=-1)
        with pytest.raises(TypeError):
            await batcher.aio(None)
        assert await batcher.aio(2) == 4

    batcher = Batcher(function, policy="early_drop")
    run(main())
    batcher.close()


def test_a_full_queue() -> None:
    async def main() -> None:
        gate = AsyncGate()
        rejecting = greedy(gate, queue_size=1, when_full="reject")
        tasks = [asyncio.create_task(rejecting.aio(0))]
        await settle()
        tasks.append(asyncio.create_task(rejecting.aio(1)))
        await settle()
        with pytest.raises(QueueFull):
            await rejecting.aio(2)
        gate.may_go.release()
        gate.may_go.release()
        assert await asyncio.gather(*tasks) == [0, 1]

        waiting = greedy(gate, queue_size=1, max_batch_size=1)
        tasks = [asyncio.create_task(waiting.aio(item)) for item in range(5)]
        await settle()
        assert waiting.stats().queued == 4
        tasks[3].cancel()
        for _ in range(4):
            gate.may_go.release()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in found if isinstance(each, int)] == [0, 1, 2, 4]
        assert waiting.stats().cancelled == 1

    run(main())


# --- cancellation ---------------------------------------------------------------------------------


def test_cancelling_one_touches_nobody_else() -> None:
    async def main() -> None:
        gate = AsyncGate()
        batcher = greedy(gate)
        tasks = [asyncio.create_task(batcher.aio(0))]
        await settle()
        tasks += [asyncio.create_task(batcher.aio(item)) for item in (1, 2, 3)]
        await settle()
        tasks[2].cancel()  # still queued: its place is free
        await settle()
        assert batcher.stats().queued == 2
        gate.may_go.release()
        await settle()
        assert gate.batches == [[0], [1, 3]]
        tasks[1].cancel()  # in the batch that runs
        await settle()
        gate.may_go.release()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in found] == [
            int, asyncio.CancelledError, asyncio.CancelledError, int,
        ]  # fmt: skip
        assert found[3] == 3
        await batcher.aclose()

    run(main())


def test_cancelling_a_caller_of_a_synchronous_function() -> None:
    gate = Gate()

    async def main() -> None:
        tasks = [asyncio.create_task(batcher.aio(0))]
        await settle()
        await asyncio.to_thread(gate.wait_entered)
        tasks += [asyncio.create_task(batcher.aio(item)) for item in (1, 2)]
        await settle()
        tasks[0].cancel()
        tasks[1].cancel()
        await settle()
        gate.open(2)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found[2] == 2

    batcher = greedy(gate)
    run(main())
    batcher.drain(LONG_S)
    assert gate.batches == [[0], [2]]
    batcher.close()


def test_a_function_that_is_cancelled_tells_its_callers_and_goes_on() -> None:
    async def main() -> None:
        async def cancelled(items: list[int]) -> list[int]:
            if items == [13]:
                raise asyncio.CancelledError
            return items

        batcher = greedy(cancelled)
        with pytest.raises(BatchingError, match="cancelled"):
            await batcher.aio(13)
        assert await batcher.aio(1) == 1

    run(main())


def test_a_batch_that_is_cancelled_before_its_first_step() -> None:
    async def main() -> None:
        batcher = greedy(adouble)
        asked = asyncio.ensure_future(batcher.aio(1))
        await asyncio.sleep(0)
        (batch,) = (each for each in asyncio.all_tasks() if each.get_name().startswith("batch-"))
        batch.cancel()
        with pytest.raises(BatchingError, match="cancelled"):
            await asked
        assert await batcher.aio(2) == 4
        await batcher.aclose()

    run(main())


def test_who_leaves_a_stream_before_its_first_piece_gives_its_place_up() -> None:
    async def main() -> None:
        may_go = asyncio.Event()

        async def pieces(items: list[int]) -> AsyncGenerator[list[int], None]:
            await may_go.wait()
            yield items

        async with greedy(pieces) as batcher:
            running, waiting = (
                asyncio.ensure_future(anext(batcher.astream(item))) for item in range(2)
            )
            await settle()
            assert batcher.stats().queued == 1
            waiting.cancel()
            await settle()
            assert (batcher.stats().queued, batcher.stats().cancelled) == (0, 1)
            may_go.set()
            assert await running == 0

    run(main())


def test_a_coroutine_that_is_closed_gives_its_request_up() -> None:
    async def main() -> None:
        gate = AsyncGate()
        batcher = greedy(gate)
        running = asyncio.ensure_future(batcher.aio(0))
        await settle()
        asked = batcher.aio(1)
        asked.send(None)
        assert batcher.stats().queued == 1
        asked.close()
        assert batcher.stats().queued == 0
        gate.may_go.release()
        assert await running == 0

    run(main())


@pytest.mark.parametrize("step", ["__init__", "start"])
def test_where_no_thread_can_be_had_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    loops: list[asyncio.AbstractEventLoop] = []
    make = asyncio.new_event_loop

    def kept() -> asyncio.AbstractEventLoop:
        loops.append(make())
        return loops[-1]

    with greedy(adouble) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, step, refuse)
            patch.setattr(asyncio, "new_event_loop", kept)
            with pytest.raises(RuntimeError, match=r"adouble needs a thread .*batcher\.aio"):
                batcher(1)
        assert [loop.is_closed() for loop in loops] == [True]
        assert batcher(1) == 2


@pytest.mark.parametrize("place", [(threading.Thread, "start"), (ThreadLoop, "start")])
def test_an_interrupt_once_its_thread_lives_leaves_no_loop(
    monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    do, lives = getattr(*place), threading.Event()
    threads: list[threading.Thread] = []

    def interrupted(*args: Any) -> None:
        do(*args)
        lives.wait(LONG_S)
        raise KeyboardInterrupt

    def running(loop: Any, dispatch: Any) -> None:
        threads.append(threading.current_thread())
        loop.loop.call_soon(lives.set)
        run_loop(loop, dispatch)

    run_loop = ThreadLoop._run
    monkeypatch.setattr(ThreadLoop, "_run", running)
    with greedy(adouble) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(*place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                batcher(1)
        join(*threads)
        assert batcher(1) == 2


@pytest.mark.parametrize(
    ("module", "asks", "patched"),
    [
        ("gevent.monkey", "is_module_patched", "threading"),
        ("eventlet.patcher", "is_monkey_patched", "thread"),
    ],
)
def test_where_threads_are_replaced_it_says_so(
    monkeypatch: pytest.MonkeyPatch, module: str, asks: str, patched: str
) -> None:
    """They share one thread of the system, which has one running loop for asyncio."""
    patcher = types.SimpleNamespace(**{asks: lambda name: name == patched})
    monkeypatch.setitem(sys.modules, module, patcher)  # type: ignore[arg-type]
    with greedy(adouble) as batcher:
        for ask in (batcher, batcher.submit):
            with pytest.raises(RuntimeError, match=f"adouble is asynchronous .* {module[:6]}"):
                ask(1)
    with greedy(lambda items: items) as plain:
        assert plain.submit(1).result(LONG_S) == 1


@pytest.mark.parametrize(
    ("module", "asks"),
    [("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")],
)
def test_what_could_replace_threads_and_does_not_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, module: str, asks: str
) -> None:
    patcher = types.SimpleNamespace(**{asks: lambda name: False})
    monkeypatch.setitem(sys.modules, module, patcher)  # type: ignore[arg-type]
    with greedy(adouble) as batcher:
        assert batcher(1) == 2


@both
def test_awaiting_without_a_loop_of_asyncio_says_what_to_do(function: Any) -> None:
    # As under trio, whose tasks run on no loop of asyncio.
    with Batcher(function) as batcher:
        for awaited in (
            batcher.aio(1),
            batcher.adrain(),
            batcher.aclose(),
            anext(batcher.astream(1)),
        ):
            with pytest.raises(RuntimeError, match=r"double: .* of asyncio; under trio"):
                next(awaited.__await__())
        assert batcher(1) == 2  # it was not closed


def test_how_long_answers_take_from_a_thread_to_those_who_await_them() -> None:
    taken: list[int] = []
    learning: Any = types.SimpleNamespace(delivered=taken.append)
    clock = types.SimpleNamespace(now_ns=100)

    options: Any = types.SimpleNamespace(clock_ns=lambda: clock.now_ns, learning=learning)

    async def caller(future: asyncio.Future[int]) -> None:
        taken_ns = await future
        clock.now_ns += taken_ns

    async def main() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop, options)
        futures = [loop.create_future() for _ in range(2)]
        tasks = [asyncio.create_task(caller(future)) for future in futures]
        await settle()
        for future in futures:
            AwaitedReply(future, mailbox).answer(7)
        clock.now_ns += 50  # until the loop wakes up
        await asyncio.gather(*tasks)
        await settle()

    run(main())
    assert taken == [50 + 7 + 7]


def test_a_loop_that_is_interrupted_hands_the_other_answers_out_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupts = [KeyboardInterrupt]
    hand_out = AwaitedReply._set

    def interrupted(reply: AwaitedReply, result: Any) -> None:
        if result == 8 and interrupts:  # the last one, after which no other letter comes
            raise interrupts.pop()
        hand_out(reply, result)

    async def ask() -> list[int]:
        return await asyncio.gather(*(batcher.aio(item) for item in range(5)))

    monkeypatch.setattr(AwaitedReply, "_set", interrupted)
    loop = asyncio.new_event_loop()
    with greedy(double) as batcher:
        asking = loop.create_task(ask())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asking)
        answers = asyncio.wait_for(asking, LONG_S)
        assert loop.run_until_complete(answers) == [0, 2, 4, 6, 8]
    loop.close()


OPTIONS: Any = types.SimpleNamespace(
    clock_ns=time.monotonic_ns, learning=types.SimpleNamespace(delivered=lambda taken_ns: None)
)
"""Of a mailbox."""


def test_answers_after_an_interrupt_on_their_way_to_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(function: Any) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop, OPTIONS)
        futures = [loop.create_future() for _ in range(2)]
        replies = [AwaitedReply(future, mailbox) for future in futures]
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                replies[0].answer(1)
        for reply in replies:
            reply.answer(2)
        assert await asyncio.gather(*futures) == [1, 2]

    run(main())


def test_a_mailbox_keeps_nothing_for_a_closed_loop() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    mailbox = Mailbox(loop, OPTIONS)
    for _ in range(2):
        letter = asyncio.Event()
        mailbox.send(asyncio.Event.set, letter)
        reference = weakref.ref(letter)
        del letter
        assert reference() is None


def test_closing_on_the_loop_where_nothing_is_open() -> None:
    async def main() -> None:
        with greedy(adouble) as batcher:
            assert await batcher.aio(1) == 2

    run(main())


@pytest.mark.parametrize("error", [KeyError, StopIteration, SystemExit, KeyboardInterrupt])
def test_whatever_an_asynchronous_function_raises_in_the_batchers_own_loop(
    error: type[BaseException],
) -> None:
    async def fail(items: list[int]) -> list[int]:
        if items == [13]:
            raise error
        return items

    with greedy(fail) as batcher:
        expected = RuntimeError if error is StopIteration else error
        assert isinstance(batcher.submit(13).exception(LONG_S), expected)
        assert batcher(1) == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError("why"), StopIteration("why")])
def test_what_the_future_of_a_caller_may_not_have_is_told_in_words(error: BaseException) -> None:
    """Found: neither what it said nor where it was raised could be seen."""

    def fail(items: list[int]) -> list[int]:
        raise error

    batcher = greedy(fail)
    with pytest.raises(RuntimeError) as told:
        run(batcher.aio(1))
    assert str(told.value) == f"the batch function raised {error!r}"
    assert told.value.__cause__ is error
    batcher.close()


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), StopIteration(), concurrent.futures.CancelledError()]
)
def test_so_is_what_the_future_of_a_loop_may_not_have_of_a_submitted_one(
    error: BaseException,
) -> None:
    """Found: who awaited it waited for ever, or seemed cancelled."""

    def fail(items: list[int]) -> list[int]:
        raise error

    async def main() -> None:
        await asyncio.wrap_future(batcher.submit(1))

    batcher = greedy(fail)
    with pytest.raises(RuntimeError, match="the batch function raised"):
        run(main())
    batcher.close()


def test_an_error_that_cannot_be_asked_for_its_class() -> None:
    """Found: its caller waited for ever, while the loop tried again and again."""

    class Classless(Exception):
        @property
        def __class__(self) -> Any:
            raise ValueError

    def fail(items: list[int]) -> list[int]:
        return [Classless()] * len(items)  # type: ignore[list-item]

    async def main() -> None:
        with pytest.raises(Classless):  # here, as a loop asks what ends it
            await batcher.aio(1)

    batcher = greedy(fail)
    run(main())
    batcher.close()


@pytest.mark.parametrize("said", [RuntimeError("closed"), ValueError("gone")], ids=repr)
def test_what_is_told_in_words_has_none(said: Exception) -> None:
    """Found: its caller waited for ever."""

    class Unspeakable:
        def __repr__(self) -> str:
            raise said

    def fail(items: list[int]) -> list[int]:
        raise StopIteration(Unspeakable())

    batcher = greedy(fail)
    with pytest.raises(RuntimeError, match=r"^the batch function raised StopIteration$"):
        run(batcher.aio(1))
    batcher.close()


@both
def test_one_failing_item_fails_alone(function: Any) -> None:
    async def main() -> list[Any]:
        calls = (batcher.aio(item) for item in (1, 2, None, 4))
        return await asyncio.gather(*calls, return_exceptions=True)

    batcher = Batcher(function, policy=functools.partial(Window, wait_ms=10), max_batch_size=4)
    found = run(main())
    assert [found[0], found[1], found[3]] == [2, 4, 8]
    assert isinstance(found[2], TypeError)
    batcher.close()


# --- from inside ----------------------------------------------------------------------------------


def test_from_inside_an_asynchronous_batch() -> None:
    async def recursive(items: list[int]) -> list[int]:
        return [item if item < 1 else 1 + await batcher.aio(item - 1) for item in items]

    async def gathering(items: list[int]) -> list[int]:
        if items == [0]:
            return items
        return await asyncio.gather(*(gatherer.aio(0) for _ in items))

    batcher, gatherer = greedy(recursive), greedy(gathering)

    async def main() -> None:
        assert await batcher.aio(5) == 5
        assert await gatherer.aio(5) == 0

    run(main())


@pytest.mark.parametrize("wait", ["adrain", "astream"])
def test_what_a_batch_would_wait_for_in_vain_is_an_error(wait: str) -> None:
    async def waits() -> None:
        if wait == "adrain":
            await batcher.adrain()
        async for _ in batcher.astream(1):
            pass

    async def function(items: list[int]) -> list[int]:
        await waits()
        return items

    def plain(items: list[int]) -> list[int]:
        run(waits())
        return items

    for batcher in (greedy(function), greedy(plain)):
        with pytest.raises(RuntimeError, match="batch"):
            run(batcher.aio(0))
        batcher.close()


def test_a_thread_that_a_batch_waits_for_does_not_wait_for_the_batch() -> None:
    async def waits(items: list[int]) -> list[int]:
        await asyncio.to_thread(batcher.drain, 0)
        return items

    batcher = greedy(waits)
    with pytest.raises(RuntimeError, match="a batch cannot wait for its own end"):
        run(batcher.aio(0))
    batcher.close()


def test_a_thread_that_a_batch_waits_for_asks_the_same_batcher() -> None:
    """In the batcher's own loop, where its answer would come after the batch."""

    async def asks(items: list[Any]) -> list[Any]:
        return [await asyncio.to_thread(*item) if type(item) is tuple else item for item in items]

    batcher = greedy(asks, collate="list")
    assert batcher.submit((batcher, (batcher, 1))).result(LONG_S) == 1
    for wait in (
        lambda: batcher.submit(1).result(LONG_S),
        lambda: list(batcher.map([1])),
        lambda: next(batcher.stream(1)),
    ):
        error = batcher.submit((wait,)).exception(LONG_S)
        assert isinstance(error, RuntimeError)
        assert "call the batcher itself" in str(error)
    assert isinstance(batcher.submit((batcher, (int, "x"))).exception(LONG_S), ValueError)
    batcher.close(timeout_s=LONG_S)


def test_batches_that_ask_each_other_by_turns() -> None:
    """The one in the middle was begun within the outer one, which waits for it."""

    def counting_down(of_other: list[Batcher]) -> Batcher:
        async def count(items: list[int]) -> list[int]:
            return [1 + await of_other[0].aio(item - 1) if item else 0 for item in items]

        return Batcher(count, collate="list")

    ones: list[Batcher] = []
    others = [counting_down(ones)]
    ones.append(counting_down(others))

    async def main() -> list[int]:
        return await asyncio.gather(*(ones[0].aio(item) for item in (5, 0, 3)))

    assert [run(main()) for _ in range(2)] == [[5, 0, 3]] * 2


def test_from_inside_a_batch_of_a_plain_function() -> None:
    def nested(items: list[int]) -> list[int]:
        return [asyncio.run(batcher.aio(1)) * 3 if item == 0 else item * 2 for item in items]

    with greedy(nested) as batcher:
        assert batcher(0) == 6
        assert run(batcher.aio(0)) == 6


def test_what_a_batch_leaves_behind_is_not_inside_it() -> None:
    left: list[asyncio.Task[Any]] = []

    async def leaves(items: list[Any]) -> list[Any]:
        if items == ["leave"]:
            left.append(asyncio.create_task(later()))
        return [len(items)] * len(items)

    async def later() -> list[int]:
        await asyncio.sleep(0.01)
        return await asyncio.gather(*(batcher.aio(item) for item in range(4)))

    async def main() -> None:
        asked = asyncio.create_task(batcher.aio("leave"))
        await settle()
        await batcher.adrain()
        await asked
        assert await left[0] == [4, 4, 4, 4]

    batcher = Batcher(leaves, policy=functools.partial(Window, wait_ms=1e6), max_batch_size=4)
    run(main())
    batcher.close()


def test_waiting_in_the_batchers_own_loop_is_an_error() -> None:
    async def waiting(items: list[int]) -> list[Any]:
        return [batcher.submit(item).result() for item in items]

    batcher = greedy(waiting)
    with pytest.raises(RuntimeError, match="await"):
        batcher(1)
    batcher.close(cancel=True)


# --- loops that end -------------------------------------------------------------------------------


def test_a_loop_that_is_closed_with_requests_open_harms_nobody() -> None:
    gate = Gate()
    batcher = greedy(gate, max_batch_size=2)
    loop = asyncio.new_event_loop()
    task = loop.create_task(batcher.aio(0))
    loop.run_until_complete(settle())
    gate.wait_entered()
    late = loop.create_task(batcher.aio(1))
    loop.run_until_complete(settle())
    neighbour = batcher.submit(2)
    loop.close()
    gate.open(2)
    assert neighbour.result(LONG_S) == 2
    batcher.close(timeout_s=LONG_S)
    for each in (task, late):
        each._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_loop_that_is_closed_with_an_asynchronous_batch_running() -> None:
    async def hang(items: list[int]) -> list[int]:
        if items != [1]:
            await asyncio.sleep(LONG_S)
        return items

    batcher = greedy(hang)

    async def main() -> None:
        asyncio.get_running_loop().create_task(batcher.aio(0))
        await settle()

    run(main())
    assert run(batcher.aio(1)) == 1
    batcher.close(timeout_s=LONG_S)


def test_a_stream_ends_when_its_loop_is_closed() -> None:
    endless = Endless()
    loop = asyncio.new_event_loop()
    batcher = greedy(endless)
    pieces = batcher.astream(1)
    assert loop.run_until_complete(anext(pieces)) == 1
    loop.close()
    assert endless.ended.wait(LONG_S)
    batcher.close()


@both
@pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_loops_that_nobody_closes_are_not_kept(function: Any) -> None:
    loops: list[weakref.ref[Any]] = []
    with greedy(function) as batcher:
        for item in range(6):
            loop = asyncio.new_event_loop()
            loops.append(weakref.ref(loop))
            assert loop.run_until_complete(batcher.aio(item)) == 2 * item
            del loop
        gc.collect()
        left = [loop for each in loops if (loop := each()) is not None]
        assert len(left) <= 2
        batcher.drain(LONG_S)
        assert batcher.stats().answered == 6
    for loop in left:
        loop.close()


@pytest.mark.parametrize("policy", ["immediate", functools.partial(Window, wait_ms=1e6)])
def test_a_loop_that_stands_is_not_forgotten_while_it_has_requests(policy: Any) -> None:
    gate, first, second = AsyncGate(), asyncio.new_event_loop(), asyncio.new_event_loop()
    batcher = Batcher(gate, policy=policy)
    asked = first.create_task(batcher.aio(1))
    first.run_until_complete(settle())
    batcher._engine.of_loop(second)
    stats = batcher.stats()
    assert (stats.submitted, stats.queued + stats.running) == (1, 1)
    gate.may_go.release()
    first.run_until_complete(batcher.adrain())
    assert first.run_until_complete(asked) == 1
    batcher.close()
    for loop in (first, second):
        loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed_is_forgotten_whatever_was_open() -> None:
    loop, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    batcher = greedy(AsyncGate())
    asked = loop.create_task(batcher.aio(1))
    loop.run_until_complete(settle())
    tasks = asyncio.all_tasks(loop)
    assert asked in tasks
    for each in tasks:  # also the batch's own: it may be freed in a later test
        each._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    batcher._engine.of_loop(other)
    assert [*batcher._engine._loops] == [other]
    batcher.close()
    other.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("looks", [True, False])
def test_what_was_open_on_a_loop_that_is_closed_has_failed(looks: bool) -> None:
    loop = asyncio.new_event_loop()
    batcher = greedy(AsyncGate(), max_batch_size=2)
    asked = [loop.create_task(batcher.aio(item)) for item in range(5)]
    loop.run_until_complete(settle())
    assert batcher.stats().failed == 0
    for each in asyncio.all_tasks(loop):
        each._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    if looks:
        stats = batcher.stats()
        assert (stats.failed, stats.queued, stats.running) == (5, 0, 0)
    other = asyncio.new_event_loop()
    batcher._engine.of_loop(other)
    stats = batcher.stats()
    assert (stats.submitted, stats.failed, stats.queued, stats.running) == (5, 5, 0, 0)
    assert not any(each.done() for each in asked)
    batcher.close()
    other.close()


def test_a_finalizer_that_asks_while_a_loop_is_new_uses_the_same_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        engine, loop = batcher._engine, asyncio.get_running_loop()
        learning = engine.options.learning
        make, inner = learning.make_policy, list[Any]()

        def interrupted() -> Any:
            monkeypatch.setattr(learning, "make_policy", make)
            inner.append(engine.of_loop(loop))
            return make()

        monkeypatch.setattr(learning, "make_policy", interrupted)
        assert [engine.of_loop(loop)] == inner

    batcher = greedy(adouble)
    run(main())
    batcher.close()


@both
def test_two_loops_by_turns(function: Any) -> None:
    loops = [asyncio.new_event_loop() for _ in range(2)]
    with greedy(function) as batcher:
        for item in range(6):
            assert loops[item % 2].run_until_complete(batcher.aio(item)) == 2 * item
        batcher.drain(LONG_S)
        assert batcher.stats().answered == batcher.stats().submitted == 6
    for loop in loops:
        loop.close()


@pytest.mark.parametrize("wait", [Batcher.drain, Batcher.close])
def test_waiting_for_requests_before_the_batchers_own_loop_runs(
    wait: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run, run = threading.Event(), ThreadLoop._run

    def late(*args: Any) -> None:
        may_run.wait(LONG_S)
        run(*args)

    monkeypatch.setattr(ThreadLoop, "_run", late)
    batcher = greedy(adouble)
    request = batcher.submit(1)
    with pytest.raises(TimeoutError):
        wait(batcher, timeout_s=0)
    may_run.set()
    wait(batcher, timeout_s=LONG_S)
    assert request.result(0) == 2
    batcher.close(timeout_s=LONG_S)


def test_the_batchers_own_loop_is_replaced_when_somebody_stops_it() -> None:
    async def stops(items: list[int]) -> list[int]:
        if items == [13]:
            asyncio.get_running_loop().stop()
            await asyncio.sleep(LONG_S)
        return items

    batcher = greedy(stops)
    stopped = batcher.submit(13)
    assert isinstance(stopped.exception(LONG_S), BatchingError)
    wait_until(lambda: batcher._engine._own.is_lost)  # type: ignore[union-attr]
    assert batcher(1) == 1
    assert batcher.stats().submitted == 2
    batcher.close(timeout_s=LONG_S)


def test_batches_that_run_in_the_batchers_own_loop_clean_up_when_it_is_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cleaned = list[int]()

    async def stops(items: list[int]) -> list[int]:
        try:
            if items == [13]:
                asyncio.get_running_loop().stop()
            if items != [1]:
                await asyncio.sleep(LONG_S)
        finally:
            await asyncio.sleep(0)
            cleaned.extend(items)
        return items

    batcher = greedy(stops, devices=2, max_batch_size=1)
    requests = [batcher.submit(item) for item in (12, 13)]
    assert all("has ended" in str(request.exception(LONG_S)) for request in requests)
    assert batcher(1) == 1  # at once, in another loop
    wait_until(lambda: len(cleaned) == 3)
    assert sorted(cleaned) == [1, 12, 13]
    batcher.drain(LONG_S)
    stats = batcher.stats()
    assert (stats.submitted, stats.failed, stats.answered) == (3, 2, 1)
    batcher.close(timeout_s=LONG_S)
    gc.collect()
    assert not caplog.records  # "Task was destroyed but it is pending!"


def test_who_waits_for_requests_of_a_loop_that_is_stopped_is_told() -> None:
    stopping, may_go = threading.Event(), threading.Event()

    async def stops(items: list[int]) -> list[int]:
        asyncio.get_running_loop().stop()
        stopping.set()
        may_go.wait(LONG_S)
        await asyncio.sleep(LONG_S)
        return items

    batcher = greedy(stops)
    requests = [batcher.submit(1)]
    assert stopping.wait(LONG_S)
    # What is reported now, the loop will not see.
    requests.append(batcher.submit(2))
    drained = threading.Event()
    with batcher._engine.watching(drained.set):
        may_go.set()
        assert drained.wait(LONG_S)
    assert all("has ended" in str(request.exception(LONG_S)) for request in requests)
    stats = batcher.stats()
    assert (stats.submitted, stats.failed, stats.queued, stats.running) == (2, 2, 0, 0)
    batcher.close(timeout_s=LONG_S)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_who_waits_for_requests_does_not_wait_for_a_loop_that_is_closed_unheard(
    monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    """Found: what was told to a loop that ran at the look before, and no more, came to nobody."""

    async def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    batcher = greedy(double)
    batcher._engine.look_s = 0.01
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert asyncio.run_coroutine_threadsafe(batcher.aio(1), loop).result(LONG_S) == 2

    def close() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        monkeypatch.undo()
        threading.Timer(0.1, loop.close).start()

    def was_alive(dispatch: LoopDispatch) -> bool:
        if dispatch.loop is loop:
            close()
        return True

    monkeypatch.setattr(LoopDispatch, "is_alive", was_alive)
    if is_awaited:
        asyncio.run(asyncio.wait_for(batcher.adrain(), LONG_S))
    else:
        batcher.drain(LONG_S)
    batcher.close(timeout_s=LONG_S)


def raised_by(call: Callable[[], object]) -> BaseException:
    """What a call raises, in a thread that may hang."""
    raised: list[BaseException] = []

    def target() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(LONG_S)
    (error,) = raised
    return error


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_whatever_a_function_raises_that_is_measured(kind: type[BaseException]) -> None:
    async def fails(items: list[int]) -> list[int]:
        raise kind("no model")

    batcher = greedy(fails)
    expected = BatchingError if kind is asyncio.CancelledError else kind
    assert all(isinstance(raised_by(lambda: batcher.warm(1)), expected) for _ in range(2))
    batcher.close(timeout_s=LONG_S)


def test_closing_while_an_asynchronous_function_is_measured() -> None:
    has_begun = threading.Event()

    async def sleeps(items: list[int]) -> list[int]:
        has_begun.set()
        await asyncio.sleep(LONG_S)
        return items

    batcher = greedy(sleeps)

    def close() -> None:
        has_begun.wait(LONG_S)
        batcher.close(timeout_s=LONG_S)

    closing = threading.Thread(target=close)
    closing.start()
    assert isinstance(raised_by(lambda: batcher.warm(1)), BatchingError)
    closing.join()


def test_a_loop_that_ends_as_an_asynchronous_function_begins_to_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batcher = greedy(adouble)
    loop = batcher._engine.own_loop().loop

    def create_task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        monkeypatch.undo()
        loop.stop()  # after this step, and before the task's first one
        return loop.create_task(coroutine)

    monkeypatch.setattr(loop, "create_task", create_task)
    assert isinstance(raised_by(lambda: batcher.warm(1)), BatchingError)
    batcher.close(timeout_s=LONG_S)


def test_no_timer_holds_the_function_of_a_closed_batcher() -> None:
    async def main() -> None:
        async def function(items: list[int]) -> list[int]:
            return items

        held = weakref.ref(function)
        batcher = Batcher(
            function, max_batch_size=2, policy=functools.partial(Window, wait_ms=1000 * LONG_S)
        )
        assert await asyncio.gather(batcher.aio(1), batcher.aio(2)) == [1, 2]
        await batcher.aclose()
        del batcher, function
        for _ in range(3):  # what has ended is let go of in the loop's next steps
            await asyncio.sleep(0)
        gc.collect()
        assert held() is None

    asyncio.run(main())


def test_what_begins_while_a_loop_tidies_up_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, is_cancelled = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    async def sleeps(items: list[int]) -> list[int]:
        has_begun.set()
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise
        return items

    async def shutdown_asyncgens() -> None:
        measuring.start()
        while not has_begun.is_set():
            await asyncio.sleep(0.001)

    batcher = greedy(sleeps)
    loop = batcher._engine.own_loop().loop
    measuring = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: batcher.warm(1))), daemon=True
    )
    monkeypatch.setattr(loop, "shutdown_asyncgens", shutdown_asyncgens)
    batcher.close(timeout_s=LONG_S)
    assert is_cancelled.wait(LONG_S)
    join(measuring)
    assert isinstance(raised[0], BatchingError)


def test_who_asks_a_loop_that_has_just_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    batcher = greedy(adouble)
    assert batcher(1) == 2
    own = batcher._engine.own_loop()
    own.loop.call_soon_threadsafe(own.loop.stop)
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of its thread")
    monkeypatch.setattr(batcher._engine, "own_loop", lambda: own)
    assert "has ended" in str(batcher.submit(2).exception(LONG_S))
    batcher.close()


def test_a_request_that_comes_as_its_batcher_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = greedy(adouble)
    own = batcher._engine.own_loop()
    batcher.close(timeout_s=LONG_S)
    wait_until(lambda: own.is_lost, "the end of its loop")
    monkeypatch.setattr(batcher._engine, "own_loop", lambda: own)  # asked for before the close
    with pytest.raises(BatcherClosed):
        batcher.submit(1)


def test_the_batchers_own_loop_is_gone_with_it() -> None:
    before = set(threading.enumerate())
    assert greedy(adouble)(1) == 2
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of its thread")


def test_what_batches_left_behind_in_the_batchers_own_loop_cleans_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = set(threading.enumerate())
    cleaned: list[str] = []
    left: list[Any] = []

    async def pieces() -> AsyncGenerator[int, None]:
        try:
            yield 0
        finally:
            await asyncio.sleep(0)
            cleaned.append("generator")

    async def background() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            await asyncio.sleep(0)
            cleaned.append("task")

    async def leaves(items: list[int]) -> list[int]:
        left.extend((pieces(), asyncio.create_task(background())))
        await asyncio.sleep(0)
        return [await anext(left[0])] * len(items)

    with greedy(leaves) as batcher:
        assert batcher(1) == 0
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of its thread")
    left.clear()
    gc.collect()
    assert sorted(cleaned) == ["generator", "task"]
    assert not caplog.records


def test_closing_again_does_not_end_what_cleans_up_in_the_batchers_own_loop() -> None:
    before = set(threading.enumerate())
    is_cleaning, may_end = threading.Event(), threading.Event()
    left: list[Any] = []

    async def background() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            is_cleaning.set()
            await asyncio.to_thread(may_end.wait, LONG_S)
            left.append("cleaned")

    async def leaves(items: list[int]) -> list[int]:
        left.append(asyncio.create_task(background()))
        await asyncio.sleep(0)
        return items

    batcher = greedy(leaves)
    assert batcher(1) == 1
    batcher.close()
    assert is_cleaning.wait(LONG_S)
    batcher.close()
    del batcher
    gc.collect()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), left[0].get_loop()).result(LONG_S)
    may_end.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of its threads")
    assert left[1:] == ["cleaned"]


def test_a_finalizer_that_asks_while_the_batchers_own_loop_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(threading.enumerate())
    batcher, new_event_loop = greedy(adouble), asyncio.new_event_loop
    asked: list[Any] = []

    def make() -> asyncio.AbstractEventLoop:
        if not asked:
            asked.append(None)
            asked[0] = batcher.submit(1)
        return new_event_loop()

    monkeypatch.setattr(asyncio, "new_event_loop", make)
    assert batcher(2) == 4
    assert asked[0].result(LONG_S) == 2
    batcher.drain(LONG_S)
    assert batcher.stats().answered == 2
    batcher.close(timeout_s=LONG_S)
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of their threads")


@both
def test_closing_before_the_first_request(function: Any) -> None:
    async def main() -> None:
        for ask in (batcher.aio, lambda item: anext(batcher.astream(item))):
            with pytest.raises(BatcherClosed):
                await ask(1)

    batcher = greedy(function)
    batcher.close()
    for ask in (batcher, batcher.submit, batcher.stream):
        with pytest.raises(BatcherClosed):
            ask(1)
    run(main())


@both
def test_closing(function: Any) -> None:
    async def main() -> None:
        async with Batcher(function, policy=functools.partial(Window, wait_ms=1e6)) as batcher:
            task = asyncio.create_task(batcher.aio(1))
            await settle()
            await batcher.adrain()
            assert await task == 2
            task = asyncio.create_task(batcher.aio(2))
            await settle()
        assert await task == 4
        with pytest.raises(BatcherClosed):
            await batcher.aio(3)

        other = Batcher(function, policy=functools.partial(Window, wait_ms=1e6))
        task = asyncio.create_task(other.aio(1))
        await settle()
        await other.aclose(cancel=True)
        with pytest.raises(BatcherClosed):
            await task

    run(main())


class Ended(asyncio.Future[Any]):
    """In place of a task that has ended."""

    def set_name(self, name: str) -> None:
        pass


def eager(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Future[Any]:
    """As asyncio.eager_task_factory (Python 3.12), of batches that do not wait."""
    if coroutine.__name__ == "_run":
        try:
            coroutine.send(None)
        except StopIteration as end:
            ended = Ended(loop=loop)
            ended.set_result(end.value)
            return ended
    return asyncio.Task(coroutine, loop=loop, **options)


def test_batches_are_made_where_tasks_are_eager() -> None:
    batches: list[list[int]] = []

    async def function(items: list[int]) -> list[int]:
        batches.append(items)  # awaits nothing: an eager task ends before it is known
        return items

    async def main() -> None:
        factory: Any = getattr(asyncio, "eager_task_factory", eager)
        asyncio.get_running_loop().set_task_factory(factory)
        async with greedy(function, max_batch_size=8) as batcher:
            assert await asyncio.gather(*map(batcher.aio, range(10))) == [*range(10)]
            assert batcher.stats().answered == 10

    run(main())
    assert max(map(len, batches)) == 8
