"""Event loops: callers that await, and batch functions that are awaited.

A synchronous function runs in threads (:mod:`trims_shim.batching.drivers.threads`), also for
callers on an event loop; their answers come back through one mailbox for each loop, with one
wake-up for all that are ready. An asynchronous function runs on the loop of its callers, in a task
of its own, which a caller's cancellation does not touch; each loop has its own policy and devices.
Callers without a loop share one that runs in a thread of the batcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from typing import TYPE_CHECKING, Any

from trims_shim.batching.drivers.dispatch import Dispatch
from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import (
    BatchFuture,
    BlockedCall,
    Entry,
    Failure,
    Reply,
    Seat,
    deliver,
)
from trims_shim.batching.drivers.streams import END, StreamReply
from trims_shim.batching.drivers.threads import JOIN_S, is_first
from trims_shim.batching.protocol import Request
from trims_shim.errors import BatchingError
from trims_shim.outcomes import for_futures

if TYPE_CHECKING:
    from trims_shim.batching.drivers.engine import Engine

__all__ = [
    "AwaitedReply",
    "AwaitedStream",
    "LoopDispatch",
    "Mailbox",
    "ThreadLoop",
    "call",
    "joined",
    "running_loop",
    "settled",
    "stream",
]

_running: contextvars.ContextVar[tuple[weakref.ref[Job], ...]] = contextvars.ContextVar(
    "trims_shim_batch", default=()
)
"""The batch that runs here, and batches (of other batchers, too) inside of which it was begun, as
they may wait for it. Weak: all that a batch leaves behind (tasks, timers, connections) has its
context, too."""

_LOOK_S = 0.001
"""How often it is seen whether threads have ended."""


class Mailbox:
    """Answers on their way from other threads to one loop."""

    __slots__ = ("_clock_ns", "_is_due", "_learning", "_letters", "_sent_ns", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Options) -> None:
        """``options.learning`` learns how long it takes until callers have their answers."""
        self.loop = loop
        self._clock_ns = options.clock_ns
        self._learning = options.learning
        self._sent_ns = 0
        self._letters: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_due = False

    def send(self, receive: Callable[[Any], None], letter: Any) -> None:
        """Send from any thread. A closed loop loses its own answers, and no other's.

        After an interrupt ``receive`` may get a letter twice.
        """
        self._letters.append((receive, letter))
        if self._is_due:
            return
        try:
            self._is_due = True
            self._sent_ns = self._clock_ns()
            self.loop.call_soon_threadsafe(self._open)
        except RuntimeError:
            self._is_due = False
            self._letters.clear()
        except BaseException:  # of a signal handler: the thread that goes on sends it again
            self._is_due = False
            raise

    def _open(self) -> None:
        # Before the first letter: a letter that comes after the last look makes a new call.
        self._is_due = False
        sent_ns = self._sent_ns
        try:
            while self._letters:
                receive, letter = self._letters[0]
                receive(letter)
                self._letters.popleft()
        except BaseException:  # of a signal handler
            self.loop.call_soon(self._open)
            raise
        # After the callers that these letters wake.
        self.loop.call_soon(self._measure, sent_ns)

    def _measure(self, sent_ns: int) -> None:
        self._learning.delivered(self._clock_ns() - sent_ns)


class AwaitedReply:
    """The answer goes to a future; through the mailbox of its loop where it comes from threads."""

    __slots__ = ("_mailbox", "future")

    def __init__(self, future: asyncio.Future[Any], mailbox: Mailbox | None) -> None:
        self.future = future
        self._mailbox = mailbox

    def begin(self) -> bool:
        """See :class:`~trims_shim.batching.drivers.replies.Reply`."""
        return not self.future.done()

    def answer(self, result: Any) -> None:
        """See :class:`~trims_shim.batching.drivers.replies.Reply`."""
        if self._mailbox is None:
            self._set(result)
        else:
            self._mailbox.send(self._set, result)

    def fail(self, error: BaseException) -> None:
        """See :class:`~trims_shim.batching.drivers.replies.Reply`."""
        self.answer(Failure(error))

    def _set(self, result: Any) -> None:
        future = self.future
        if future.done():
            return  # its caller was cancelled
        try:
            if type(result) is not Failure:
                future.set_result(result)
            else:
                future.set_exception(for_futures(result.error, "the batch function"))
        except RuntimeError:
            pass  # its loop is closed


class AwaitedStream(StreamReply):
    """The pieces go to a coroutine that iterates."""

    __slots__ = ("_arrived", "_mailbox")

    def __init__(self, mailbox: Mailbox | None) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._arrived = asyncio.Event()

    async def aget(self) -> Any:
        """The next piece, or END; raises the error."""
        while not self.has_pieces:
            self._arrived.clear()
            await self._arrived.wait()
        return self.get()

    def step(self, piece: Any) -> bool:
        """See :class:`StreamReply`. On a loop that is closed nobody listens."""
        if self._mailbox is not None and self._mailbox.loop.is_closed():
            self.is_abandoned = True
        return super().step(piece)

    def _put(self, piece: Any) -> None:
        super()._put(piece)
        if self._mailbox is None:
            self._arrived.set()
        else:
            self._mailbox.send(asyncio.Event.set, self._arrived)


class LoopDispatch(Dispatch):
    """The dispatch of an asynchronous function on one loop, where alone events are taken."""

    def __init__(
        self, function: BatchFunction, options: Options, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.on_rest: Callable[[], None] | None = None
        """Ends the loop, where it is the batcher's own."""
        self._is_lost = False
        self._tasks: set[asyncio.Task[None]] = set()
        """Of batches that run. A forked child keeps the parent's: a task that is gone ends the
        user's code."""
        self._direct: dict[BatchFuture[list[Any]], asyncio.Task[None] | None] = {}
        """The results of :meth:`run_now` that threads wait for, and their tasks."""
        super().__init__(function, options)

    def _set_up(self) -> None:
        super()._set_up()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def settle(self, me: Seat | None = None) -> None:
        """See :class:`Dispatch`."""
        if asyncio._get_running_loop() is self.loop:
            super().settle(me)
            return
        try:
            self.loop.call_soon_threadsafe(super().settle)
        except RuntimeError:
            self.lose()

    @property
    def is_lost(self) -> bool:
        """Whether its loop is closed, or about to be."""
        return self._is_lost or self.loop.is_closed()

    @property
    def is_over(self) -> bool:
        """Whether its loop is closed, or stands without open requests, so may be forgotten."""
        return self.is_lost or not (self.is_alive() or self.queued or self.running)

    def lose(self) -> None:
        """Fail all open requests: its loop is closed, or was stopped for good."""
        with self._lock:
            self._end_all(self._ended_loop())
        self._is_lost = True  # all is counted, and who is told now may ask again, on another loop
        super().settle()
        for done in list(self._direct):
            done.fail(self._ended_loop())
            self._direct.pop(done, None)

    def _closed(self) -> BatchingError:
        # The end of a closed batcher's own loop is not why it takes no more.
        is_why = self.is_lost and not self.is_closed
        return self._ended_loop() if is_why else super()._closed()

    def _ended_loop(self) -> BatchingError:
        return BatchingError(f"{self.function.name}: the event loop of its batches has ended")

    def rest(self) -> None:
        """See :class:`Dispatch`."""
        if self.on_rest is not None:
            self.on_rest()

    def is_alive(self) -> bool:
        """See :class:`Dispatch`. A loop of the batcher's own is, also before its first step."""
        return self.loop.is_running() or (self.on_rest is not None and not self.is_lost)

    def run_now(self, entries: list[Entry]) -> list[Any]:
        """Run entries without the policy, and wait for the results. Not on the loop.

        Raises what the function raises and is no Exception, and BatchingError if the loop ends.
        """
        self._check_not_on_loop()
        done: BatchFuture[list[Any]] = BatchFuture()
        self._direct[done] = None
        try:
            self.loop.call_soon_threadsafe(self._start_now, entries, done)
        except RuntimeError:
            self.lose()
        try:
            return done.result()
        finally:
            del done  # it may have an error, whose traceback has this frame

    def _start_now(self, entries: list[Entry], done: BatchFuture[list[Any]]) -> None:
        if self._is_lost:
            return  # its loop tidies up, and fails it at the end
        task = self._direct[done] = self.loop.create_task(self._run_now(entries, done))
        task.add_done_callback(lambda _: self._ended_now(done))

    def _ended_now(self, done: BatchFuture[list[Any]]) -> None:
        if not done.done():  # cancelled before its first step
            done.fail(self._cancelled())
        self._direct.pop(done, None)

    async def _run_now(self, entries: list[Entry], done: BatchFuture[list[Any]]) -> None:
        try:
            done.answer(await self.function.arun(entries))
        except asyncio.CancelledError:
            done.fail(self._cancelled())
            raise
        except BaseException as error:
            done.fail(error)  # its caller raises it; here it might end the loop

    async def call_nested(self, entry: Entry) -> Any:
        """Run a request from inside a batch alone, here and now: it cannot wait for that batch."""
        (result,) = await self.function.arun([entry])
        future: asyncio.Future[Any] = self.loop.create_future()
        deliver(AwaitedReply(future, None), result)
        try:
            return await future
        finally:
            del future, result  # they may have the error, whose traceback has this frame

    def wait_nested(self, entry: Entry) -> Any:
        """As :meth:`call_nested`, in a thread that the batch may wait for. Blocks."""
        (result,) = self.run_now([entry])
        reply = BlockedCall()
        deliver(reply, result)
        del result  # it may have the error, whose traceback will have this frame
        return reply.take()

    def is_running_here(self) -> bool:
        """See :class:`Dispatch`. Tasks that a batch leaves behind are not inside it any more."""
        return any(reference() in self._jobs for reference in _running.get())

    def check_may_wait(self) -> None:
        """See :class:`Dispatch`."""
        self._check_not_on_loop()
        if self.is_running_here():
            raise RuntimeError(
                f"{self.function.name}: a batch cannot wait for its own end, and it may wait for "
                "this thread; call the batcher itself, which then runs the item at once"
            )

    def _check_not_on_loop(self) -> None:
        if asyncio._get_running_loop() is self.loop:
            raise RuntimeError(
                f"{self.function.name}: waiting here would stop the event loop on which the batch "
                "runs; await aio(), adrain() or aclose() instead"
            )

    def _launch(self, job: Job) -> None:
        task = self.loop.create_task(self._run(job), name=f"batch-{self.function.name}")
        job.runner = task
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, job))

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if job.results is None:  # cancelled before its first step
            now_ns = self.options.clock_ns()
            job.begin(now_ns)
            job.end_with(now_ns, self._cancelled())
            job.deliver_surely()
            self.post(job)

    def _cancelled(self) -> BatchingError:
        return BatchingError(f"{self.function.name}: the task of this batch was cancelled")

    async def _run(self, job: Job) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            # By the turn that has made this task: the loop's tasks are eager (Python 3.12), and
            # users' code is called without the lock.
            await asyncio.sleep(0)
        outer = [each for each in _running.get() if (of := each()) and of.results is None]
        _running.set((*outer, weakref.ref(job)))
        clock_ns = self.options.clock_ns
        entries = job.begin(clock_ns())
        try:
            results = await self.function.arun(entries) if entries else []
            job.end(clock_ns(), results)
        except asyncio.CancelledError:
            # The loop ends, or its tasks were all cancelled, or the function raised it. The callers
            # were not cancelled, so they get another error.
            job.end_with(clock_ns(), self._cancelled())
            raise
        except BaseException as error:
            job.end_with(clock_ns(), error)  # the callers raise it, also to end the loop
        finally:
            job.deliver_surely()
            self.post(job)

    def _rescue(self) -> None:
        self.loop.call_soon(super().settle)

    def _keep_time(self, wake_ns: int | None) -> None:
        if wake_ns is None:
            if self._is_shut and self._timer is not None:
                self._timer.cancel()  # else the loop would hold the function until then
                self._timer = None
            return
        if self._timer is not None:
            if self._timer_ns <= wake_ns:
                return
            self._timer.cancel()
        self._timer_ns = wake_ns
        left_s = max(0.0, (wake_ns - self.options.clock_ns()) / 1e9)
        self._timer = self.loop.call_later(left_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.post(self._ask_if_due)


def running_loop(engine: Engine) -> asyncio.AbstractEventLoop:
    """The loop of asyncio that runs here. Raises RuntimeError where there is none."""
    loop = asyncio._get_running_loop()
    if loop is None:
        raise RuntimeError(
            f"{engine.function.name}: this needs a running event loop of asyncio; under trio, "
            "`await trio.to_thread.run_sync(batcher, item)`"
        )
    return loop


async def call(engine: Engine, make: Callable[[Reply], Request]) -> Any:
    """Make a request on the running loop and await its answer."""
    loop = running_loop(engine)
    future: asyncio.Future[Any] = loop.create_future()
    if engine.function.is_async:
        on_loop = engine.of_loop(loop)
        request = make(AwaitedReply(future, None))
        if on_loop.is_running_here():
            return await on_loop.call_nested(request.payload)
        dispatch: Dispatch = on_loop
    else:
        threads = engine.threads()
        request = make(AwaitedReply(future, engine.mailbox(loop)))
        if threads.is_running_here():
            return threads.call_nested(request.payload)
        dispatch = threads
    dispatch.submit(request)
    try:
        return await future
    except (asyncio.CancelledError, GeneratorExit):
        dispatch.cancel(request)
        raise
    finally:
        del future  # it may have an error, whose traceback has this frame


async def stream(engine: Engine, make: Callable[[Reply], Request]) -> AsyncGenerator[Any, None]:
    """Make a request on the running loop and iterate over the pieces of its answer."""
    loop = running_loop(engine)
    dispatch: Dispatch
    if engine.function.is_async:
        reply, dispatch = AwaitedStream(None), engine.of_loop(loop)
    else:
        reply, dispatch = AwaitedStream(engine.mailbox(loop)), engine.threads()
    request = make(reply)
    if dispatch.is_running_here():
        raise RuntimeError(
            f"{engine.function.name}: this is in the middle of a batch, and the answer it wants to "
            "iterate over comes after it; await aio(), which then runs the item at once"
        )
    dispatch.submit(request)
    try:
        while (piece := await reply.aget()) is not END:
            yield piece
    finally:
        reply.is_abandoned = True
        dispatch.cancel(request)


async def settled(engine: Engine) -> None:
    """Await until all requests made until now are settled."""
    engine.check_may_end()
    loop = running_loop(engine)
    future: asyncio.Future[Any] = loop.create_future()
    reply = AwaitedReply(future, engine.mailbox(loop))
    with engine.watching(lambda: reply.answer(None)):
        while not (await asyncio.wait([future], timeout=engine.look_s))[0]:
            engine.lose_ended()


async def joined(engine: Engine) -> None:
    """As ``engine.join()``; awaits."""
    end_s = time.monotonic() + JOIN_S
    while any(each.is_alive() for each in engine.workers()) and time.monotonic() < end_s:
        await asyncio.sleep(_LOOK_S)


def _patcher_of_threads() -> str | None:
    gevent, eventlet = (sys.modules.get(name) for name in ("gevent.monkey", "eventlet.patcher"))
    if gevent is not None and any(map(gevent.is_module_patched, ("threading", "select"))):
        return "gevent"
    if eventlet is not None and any(map(eventlet.is_monkey_patched, ("thread", "select"))):
        return "eventlet"
    return None


class ThreadLoop:
    """A loop in a thread of its own, for callers that have none. Ends with :meth:`stop`.

    Raises RuntimeError under gevent and eventlet, whose threads are all one: the loop would run in
    the middle of the callers that wait for it, which asyncio refuses.
    """

    def __init__(self, name: str) -> None:
        if (patcher := _patcher_of_threads()) is not None:
            raise RuntimeError(
                f"{name} is asynchronous and needs an event loop in a thread, which {patcher}'s "
                "patches do not allow: batch a plain function (def)"
            )
        self.loop = asyncio.new_event_loop()
        self._name = name
        """The name of the function."""
        self._is_ending = False
        self._claim: dict[None, object] = {}

    def start(self, dispatch: weakref.ref[LoopDispatch]) -> None:
        """Run the loop, for this dispatch. Raises RuntimeError where no thread can be had."""
        name = f"batch-{self._name}"
        try:
            threading.Thread(target=self._run, args=(dispatch,), name=name, daemon=True).start()
        except BaseException as error:
            if not is_first(self._claim, self):
                self.stop()  # of a signal handler: its thread lives
                raise
            self.loop.close()
            if isinstance(error, RuntimeError):  # see ThreadDispatch._without_thread
                raise RuntimeError(
                    f"{self._name} needs a thread for its event loop: {error}; on a loop of your "
                    "own, `await batcher.aio(item)` needs none"
                ) from error
            raise

    def stop(self) -> None:
        """Let it end; does not wait."""
        try:
            self.loop.call_soon_threadsafe(self._stop)
        except RuntimeError:
            pass  # closed already

    def _stop(self) -> None:
        if not self._is_ending:  # else what tidies up would be stopped
            self.loop.stop()

    def _run(self, dispatch_ref: weakref.ref[LoopDispatch]) -> None:
        if not is_first(self._claim, self.loop):
            return
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self._is_ending = True
            _tidy_up(self.loop, dispatch_ref)
        finally:
            self.loop.close()
            # Users' code may have stopped it while requests were open.
            if (dispatch := dispatch_ref()) is not None:
                dispatch.lose()


def _cancel(loop: asyncio.AbstractEventLoop, tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=JOIN_S))


def _tidy_up(loop: asyncio.AbstractEventLoop, dispatch_ref: weakref.ref[LoopDispatch]) -> None:
    """As ``asyncio.run`` ends: tasks and generators that batches left behind may clean up.

    For at most :data:`JOIN_S` each. Then batches that still run, as users' code has stopped the
    loop, are failed, and their tasks end; so do those that have begun meanwhile.
    """
    left = asyncio.all_tasks(loop)
    if (dispatch := dispatch_ref()) is not None:
        left -= dispatch._tasks
    del dispatch
    _cancel(loop, left)
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), JOIN_S))
    if (dispatch := dispatch_ref()) is not None:
        dispatch.lose()
    del dispatch
    _cancel(loop, asyncio.all_tasks(loop) - left)
