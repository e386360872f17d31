"""Forks, and the end of the interpreter."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from forks import passes_in_child

from tests.batching.waiting import LONG_S, Gate, join, start, wait_until, wait_until_main_sleeps
from trims_shim.batching import Batcher, batched
from trims_shim.batching.drivers import engine as engines
from trims_shim.batching.drivers import threads
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.threads import ThreadDispatch
from trims_shim.batching.policies.window import Window
from trims_shim.errors import BatcherClosed, BatchingError

greedy = functools.partial(Batcher, policy="immediate")


def triple(items: list[int]) -> list[int]:
    return [3 * item for item in items]


async def atriple(items: list[int]) -> list[int]:
    return [3 * item for item in items]


@pytest.mark.parametrize("function", [triple, atriple])
def test_the_batchers_of_a_child_work_anew(function: Callable[..., object]) -> None:
    batcher = greedy(function)
    assert batcher.submit(1).result(LONG_S) == 3
    assert asyncio.run(batcher.aio(1)) == 3

    def check() -> None:
        assert batcher.stats().submitted == 0
        assert batcher(2) == 6
        assert batcher.submit(2).result(LONG_S) == 6
        assert asyncio.run(batcher.aio(2)) == 6
        assert list(batcher.map(range(5))) == [0, 3, 6, 9, 12]
        assert batcher.stats().submitted == 8
        batcher.close(timeout_s=LONG_S)

    assert passes_in_child(check)
    assert batcher.submit(1).result(LONG_S) == 3
    assert batcher.stats().submitted == 3
    batcher.close()


def test_a_fork_while_a_batch_runs_and_others_wait() -> None:
    gate = Gate()
    with greedy(gate, queue_size=2) as batcher:
        running = batcher.submit(0)
        gate.wait_entered()
        waiting = [batcher.submit(1), batcher.submit(2)]
        called: list[object] = []
        waiting[0].add_done_callback(called.append)

        def check() -> None:
            for future in (running, *waiting):
                with pytest.raises(BatchingError, match="parent"):
                    future.result()
                assert isinstance(future.exception(), BatchingError)
                assert not future.cancel()
            assert not concurrent.futures.wait([running, *waiting], 1).not_done
            assert called == []
            gate.open()
            assert batcher(5) == 5
            batcher.close(timeout_s=LONG_S)

        assert passes_in_child(check)
        gate.open(2)
        assert [future.result(LONG_S) for future in (running, *waiting)] == [0, 1, 2]
        assert called == [waiting[0]]


def test_a_stream_of_the_parent_ends_in_the_child() -> None:
    may_go_on = threading.Event()

    def count(items: list[int]) -> Iterator[list[int]]:
        yield items
        assert may_go_on.wait(LONG_S)
        yield items

    with greedy(count) as batcher:
        stream = batcher.stream(7)
        assert next(stream) == 7

        def check() -> None:
            with pytest.raises(BatchingError, match="parent"):
                next(stream)

        assert passes_in_child(check)
        may_go_on.set()
        assert list(stream) == [7]


@pytest.mark.parametrize("queue_size", [1, 2])
def test_a_fork_in_a_signal_handler_of_a_caller_that_waits(queue_size: int) -> None:
    """It waits for its answer, or for its place in the queue."""
    gate, parent, ended = Gate(), os.getpid(), []

    def fork(*_: object) -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(round(LONG_S))
            return
        ended.append(os.waitpid(child, 0)[1])
        gate.open(3)

    def signal_it() -> None:
        wait_until(lambda: batcher.stats().queued == 2)
        wait_until_main_sleeps()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, fork)
    try:
        with greedy(gate, queue_size=queue_size) as batcher:
            futures = [batcher.submit(0)]
            gate.wait_entered()
            futures.append(batcher.submit(1))
            thread = threading.Thread(target=signal_it)
            thread.start()
            try:
                answer = batcher(2)
            except BatchingError as error:
                if os.getpid() != parent:
                    os._exit("parent" not in str(error))
                raise
            if os.getpid() != parent:
                os._exit(1)
            thread.join()
            assert [answer, *(future.result(LONG_S) for future in futures)] == [2, 0, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == [0]


def test_a_child_that_is_forked_in_the_middle_of_a_turn_may_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: one of a signal handler's; the turn's lock was not its own, which became the error."""
    arrive, parent, children = ThreadDispatch._arrive, os.getpid(), []

    def fork_and_arrive(*arguments: Any) -> None:
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(round(LONG_S))
            sys.exit(7)
        arrive(*arguments)

    batcher = Batcher(lambda items: items, slo_ms=1e5)
    monkeypatch.setattr(ThreadDispatch, "_arrive", fork_and_arrive)
    try:
        assert batcher(1) == 1
    except SystemExit as end:
        os._exit(end.code)  # type: ignore[arg-type]
    finally:
        if os.getpid() != parent:
            os._exit(1)
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_child_that_is_forked_in_the_middle_of_a_turn_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found: it logged that its policy had failed, and ran what its parent was about to queue."""
    check, parent, ran = ThreadDispatch._check_queued, os.getpid(), list[int]()
    children, later = list[int](), list[concurrent.futures.Future[int]]()

    def fork_and_check(*arguments: Any) -> None:
        monkeypatch.undo()
        later.append(batcher.submit(2))
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(round(LONG_S))
        check(*arguments)

    def run(items: list[int]) -> list[int]:
        ran.extend(items)
        return items

    batcher = greedy(run)
    monkeypatch.setattr(ThreadDispatch, "_check_queued", fork_and_check)
    try:
        answer = batcher(1)
    except BatchingError as error:
        if os.getpid() == parent:
            raise
        found = ("parent" in str(error), batcher(3), ran, caplog.messages)
        os._exit(7 if found == (True, 3, [3], []) else 1)
    finally:
        if os.getpid() != parent:
            os._exit(1)
    assert [answer, later[0].result(LONG_S)] == [1, 2]
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    ("imported", "work"),
    [
        ("trims_shim.batching.drivers.aio", "Batcher(same)(7)"),
        ("trims_shim.batching.drivers.aio", "asyncio.run(Batcher(same).aio(7))"),
        ("trims_shim.batching.staged.drivers.front", "Batcher(StagedModel([list]))(7)"),
        ("trims_shim.batching.staged.slicing.graph_slicing", "staged.slice_model and 7"),
        ("numpy", "int(Batcher(list, collate='stack')(7))"),
    ],
)
def test_a_fork_waits_for_what_another_thread_imports(imported: str, work: str) -> None:
    """Found: the child waited without end for the module that the thread was importing."""
    code = """
        import asyncio, importlib.abc, os, signal, sys, threading, time
        from trims_shim.batching import Batcher, staged
        from trims_shim.batching.staged import StagedModel

        begun = threading.Event()

        class Slow(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == sys.argv[1]:
                    begun.set()
                    time.sleep(0.2)

        async def same(items):
            return items

        def work():
            return eval(sys.argv[2])

        sys.meta_path.insert(0, Slow())
        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(work())
        thread.join()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), imported, work], timeout=LONG_S, check=False
    )
    assert done.returncode == 7


def test_a_fork_ends_no_batch_that_awaits() -> None:
    """The child has nobody who could wake it; destroyed, it would run the `finally` of the user."""
    events: list[weakref.ref[asyncio.Event]] = []
    ended: list[int] = []

    async def hold(items: list[int]) -> list[int]:
        event = asyncio.Event()
        events.append(weakref.ref(event))
        try:
            await event.wait()
        finally:
            ended.append(os.getpid())
        return items

    def check() -> None:
        gc.collect()
        assert ended == []

    with greedy(hold) as batcher:
        future = batcher.submit(1)
        wait_until(lambda: events)
        is_kept = passes_in_child(check)
        own, event = batcher._engine._own, events[0]()
        assert own is not None
        assert event is not None
        own.loop.call_soon_threadsafe(event.set)
        assert is_kept
        assert future.result(LONG_S) == 1
        wait_until(lambda: not own._tasks, "nothing is kept of what has run")


def test_a_fork_with_a_lock_held() -> None:
    """As at a fork in one thread while another one is in the middle of an event."""
    policy = functools.partial(Window, wait_ms=1e6)
    batcher = Batcher(triple, policy=policy)
    future = batcher.submit(1)
    dispatch = batcher._engine.threads()
    with dispatch._lock, batcher._engine._lock, future._condition:

        def check() -> None:
            with pytest.raises(BatchingError, match="parent"):
                future.result()
            later = batcher.submit(2)
            batcher.drain(LONG_S)
            assert later.result(LONG_S) == 6

        assert passes_in_child(check)
    batcher.close()
    assert future.result(LONG_S) == 3


def test_a_fork_while_another_thread_learns() -> None:
    batcher = Batcher(triple, policy="immediate")
    learns, may_end = threading.Event(), threading.Event()

    def learn() -> None:
        with batcher._engine.options.learning._lock:
            learns.set()
            may_end.wait(LONG_S)

    thread = threading.Thread(target=learn)
    thread.start()
    assert learns.wait(LONG_S)
    assert passes_in_child(lambda: batcher(2))
    may_end.set()
    thread.join()
    assert batcher(1) == 3
    batcher.close()


def test_a_fork_inside_a_batch() -> None:
    """The function forks, as one that starts a process does; the child may even go on."""

    def forks(items: list[int]) -> list[int]:
        if items == [13]:
            assert passes_in_child(lambda: batcher(1) == 1)
        return items

    with greedy(forks) as batcher:
        assert batcher(13) == 13
        assert batcher.submit(13).result(LONG_S) == 13


class Model:
    @batched(policy="immediate")
    def scale(self, items: list[int]) -> list[int]:
        return triple(items)


def test_methods_in_a_child() -> None:
    model = Model()
    assert model.scale.submit(1).result(LONG_S) == 3
    assert passes_in_child(lambda: model.scale.submit(1).result(LONG_S))


# --- the end of the interpreter -------------------------------------------------------------------


def run_script(script: str, *, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
    code = "import functools, sys, threading, time\n" + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize("prefix", ["", "async "])
def test_what_is_queued_is_answered_before_the_end(prefix: str) -> None:
    result = run_script(f"""
        from trims_shim.batching import Batcher
        from trims_shim.batching.policies.window import Window
        {prefix}def function(items):
            return items
        batcher = Batcher(function, policy=functools.partial(Window, wait_ms=1e6))
        for item in range(3):
            batcher.submit(item).add_done_callback(lambda f: print(f.result(), flush=True))
    """)
    assert result.stdout.split() == ["0", "1", "2"], result
    assert result.returncode == 0
    assert result.stderr == ""


def test_a_batch_that_hangs_does_not_keep_the_interpreter() -> None:
    result = run_script("""
        from trims_shim.batching import Batcher
        from trims_shim.batching.drivers import engine
        engine.EXIT_S = 0.2
        started = threading.Event()
        def hang(items):
            started.set()
            time.sleep(1e6)
        batcher = Batcher(hang, policy="immediate")
        running, waiting = batcher.submit(0), batcher.submit(1)
        waiting.add_done_callback(lambda f: print(type(f.exception()).__name__, flush=True))
        started.wait()
    """)
    assert result.stdout.split() == ["BatcherClosed"], result
    assert result.returncode == 0


@pytest.mark.parametrize("prefix", ["", "async "])
def test_who_asks_while_the_interpreter_ends_hears_that_it_does(prefix: str) -> None:
    result = run_script(f"""
        import atexit
        def ask():
            try:
                batcher(0)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
        # Python runs it after those that are registered later.
        atexit.register(ask)
        from trims_shim.batching import Batcher
        {prefix}def function(items):
            return items
        batcher = Batcher(function, name="echo", policy="immediate")
        batcher(0)
    """)
    expected = "BatcherClosed echo takes no more requests: the interpreter ends"
    assert result.stdout.splitlines() == [expected], result
    assert result.stderr == ""


def test_all_but_the_batch_that_hangs_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 1e3)
    gate, saved = Gate(), list[None]()

    def hang_at_0(items: list[object]) -> list[object]:
        return gate(items) if items == [0] else items

    batcher = greedy(hang_at_0, devices=2)
    engine = batcher._engine
    monkeypatch.setattr(engine.options.learning, "save", lambda: saved.append(None))
    hanging = batcher.submit(0)
    gate.wait_entered()
    assert batcher.submit(1).result(LONG_S) == 1
    wait_until(lambda: len(engine.workers()) == 2)
    engine.finish(0.0)
    wait_until(lambda: sum(each.is_alive() for each in engine.workers()) == 1)
    assert saved == [None]
    gate.open()
    assert hanging.result(LONG_S) == 0


def test_the_end_on_a_loop_that_runs_waits_for_nothing() -> None:
    """As where a program calls its exit functions itself."""

    async def main() -> None:
        may_go = asyncio.Event()

        async def hold(items: list[int]) -> list[int]:
            await may_go.wait()
            return items

        batcher = greedy(hold)
        running, waiting = (asyncio.ensure_future(batcher.aio(item)) for item in range(2))
        await asyncio.sleep(0)
        batcher._engine.finish(LONG_S)
        with pytest.raises(BatcherClosed):
            await waiting
        may_go.set()
        assert await running == 0

    asyncio.run(asyncio.wait_for(main(), LONG_S))


def test_functions_at_exit_call_a_batcher_if_they_are_registered_after_its_import() -> None:
    result = run_script("""
        import atexit
        def call(what):
            try:
                print(what, batcher(1))
            except Exception as error:
                print(what, type(error).__name__)
        atexit.register(call, "before")
        from trims_shim.batching import Batcher
        atexit.register(call, "after")
        batcher = Batcher(lambda x: x)
    """)
    assert result.stdout.splitlines() == ["after 1", "before BatcherClosed"], result
    assert result.returncode == 0
    assert result.stderr == ""


def test_threads_that_wait_at_the_end_get_their_answers() -> None:
    result = run_script("""
        from trims_shim.batching import Batcher
        from trims_shim.batching.policies.window import Window
        batcher = Batcher(lambda x: x, policy=functools.partial(Window, wait_ms=500))
        def call(item):
            print(f"{batcher(item)}\\n", end="", flush=True)
        def submit(item):
            print(f"{batcher.submit(item).result()}\\n", end="", flush=True)
        threading.Thread(target=call, args=(1,)).start()
        threading.Thread(target=submit, args=(2,)).start()
        while batcher.stats().submitted < 2:
            time.sleep(0.001)
    """)
    assert sorted(result.stdout.split()) == ["1", "2"], result
    assert result.returncode == 0


def test_an_idle_batcher_does_not_keep_the_interpreter() -> None:
    result = run_script("""
        from trims_shim.batching import Batcher
        async def function(items):
            return items
        Batcher(function)(1)
        kept = Batcher(lambda x: x)
        kept.submit(1).result()
        other = Batcher(function)
        other(1)
        print("done", flush=True)
    """)
    assert (result.stdout, result.stderr, result.returncode) == ("done\n", "", 0)


def test_two_engines_share_nothing() -> None:
    first, second = greedy(triple, queue_size=1), greedy(triple, queue_size=1)
    assert first(1) == second(1) == 3
    first.close()
    assert second(1) == 3
    wait_until(lambda: second.stats().submitted == 2)
    second.close()


def test_a_finalizer_that_calls_while_the_first_call_begins_uses_the_same_queue() -> None:
    """Of another one, nothing would count the requests or wait for them."""
    batcher = greedy(triple)
    engine = batcher._engine
    answers: list[int | None] = []
    make = engine._make_threads

    def interrupted(function: Any, options: Options) -> ThreadDispatch:
        if not answers:
            answers.append(None)
            answers.append(batcher(1))
        return make(function, options)

    engine._make_threads = interrupted
    assert (batcher(2), answers[1]) == (6, 3)
    assert batcher.stats().submitted == 2
    batcher.close()


def test_the_end_of_the_process_waits_for_workers_that_give_tensors_back() -> None:
    """A thread of torch's that is cut off in the middle of that aborts the process."""
    pytest.importorskip("torch")
    code = (
        "import torch\n"
        "from trims_shim.batching import Batcher\n"
        "batcher = Batcher(lambda batch: batch)\n"
        "batcher.submit(torch.ones(5)).result()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=LONG_S, check=False)
    assert done.returncode == 0


def test_who_looks_while_the_batchers_own_loop_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = greedy(atriple)
    engine = batcher._engine
    own = engine.own_loop()
    looks = iter([own])  # there is none from the second look on, until there is the next one
    replaced = property(lambda _: next(looks, None), lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "_own", replaced, raising=False)
        assert engine.dispatches() == [own]
    batcher.close(timeout_s=LONG_S)


@contextlib.contextmanager
def between_steps_of_weak_collections(call: Callable[[], object]) -> Iterator[None]:
    """Call it where another thread may come while a collection of weak references is listed."""

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        if frame.f_globals["__name__"] not in ("weakref", "_weakrefset"):
            return None
        if event == "line":
            call()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_workers_that_start_while_others_are_listed() -> None:
    gate = Gate()
    with greedy(gate, devices=32, max_batch_size=1) as batcher:
        requests = [batcher.submit(0)]
        with between_steps_of_weak_collections(lambda: requests.append(batcher.submit(0))):
            assert batcher._engine.workers()
        assert 1 < len(requests) == len(batcher._engine.workers())
        gate.open(len(requests))


def test_batchers_that_are_made_while_the_interpreter_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, finished = [greedy(triple)], list[object]()
    monkeypatch.setattr(engines.Engine, "finish", lambda engine, _: finished.append(engine))
    monkeypatch.setattr(engines, "join_workers", lambda: None)
    with between_steps_of_weak_collections(lambda: made.append(greedy(triple))):
        engines._at_exit()
    engines.at_exit.clear()
    assert made[0]._engine in finished
    assert len(made) > 1


@pytest.mark.parametrize("step", range(6))
def test_nobody_waits_for_one_that_is_interrupted_while_it_begins_to_wait(step: int) -> None:
    done: list[None] = []
    left = engines._Countdown(2, lambda: done.append(None))
    steps = itertools.count()

    def handler(frame: types.FrameType, event: str, argument: object) -> Any:
        if frame.f_code is engines._Countdown.count.__code__ and next(steps) == step:
            # It waits for a batch, whose thread has to tell the one below, too.
            join(start(left.count))
        return handler

    before = sys.gettrace()
    sys.settrace(handler)
    try:
        left.count()
    finally:
        sys.settrace(before)
    if next(steps) <= step:  # it has fewer
        left.count()
    assert len(done) == 1
