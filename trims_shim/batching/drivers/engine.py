"""What is behind a batcher: its function, its dispatches, and the ends of their lives.

A synchronous function has one dispatch, for threads. An asynchronous one has a dispatch for each
event loop that calls it, and one on a loop of its own for callers that have none.

Fork: the child's batchers start anew; the parent's requests fail there at once. Exit: queued
requests are answered for at most :data:`EXIT_S`; then they fail, so nothing keeps the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trims_shim.batching.drivers.dispatch import Dispatch, at_exit, closed
from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.learning import Learning
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import Entry, Failure, Seat
from trims_shim.batching.drivers.threads import ThreadDispatch, join, join_workers, living
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profiling import measure
from trims_shim.batching.protocol import Request
from trims_shim.batching.statistics import BatcherStats, Record
from trims_shim.late_imports import ensure_imported

if TYPE_CHECKING:
    import asyncio

    from trims_shim.batching.drivers.aio import LoopDispatch, Mailbox

__all__ = ["EXIT_S", "Engine", "EngineKind"]

EXIT_S = 10.0
"""How long the end of the interpreter waits for answers; a batch that hangs must not keep it."""

_LOOPS = "trims_shim.batching.drivers.aio"
_engines: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()
_parents: list[object] = []
"""In a forked child: what belongs to the parent."""


class Engine:
    """See the module docstring. Methods may be called from any thread unless they say otherwise."""

    def __init__(
        self,
        function: BatchFunction,
        options: Options,
        *,
        slo_ns: int,
        dispatch: Callable[[Any, Options], ThreadDispatch] = ThreadDispatch,
    ) -> None:
        """``dispatch`` is that of a synchronous function."""
        self.slo_ns = slo_ns
        self._make_threads = dispatch
        self.function = function
        self.options = options
        self.look_s = 1.0
        """How often who waits for all requests looks whether loops were closed."""
        self.is_closed = False
        self._forget()
        _engines[self] = None

    def _forget(self) -> None:
        # Re-entrant: while a dispatch is made under it, the collector may run a finalizer that
        # calls the batcher. So what is made is kept only if there is still no other one.
        self._lock = threading.RLock()
        self._threads: ThreadDispatch | None = None
        self._loops: dict[asyncio.AbstractEventLoop, LoopDispatch] = {}
        self._own: LoopDispatch | None = None
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._past = Record(devices=self.options.devices)
        """The counters of loops that are gone."""

    # --- dispatches -------------------------------------------------------------------------------

    def threads(self) -> ThreadDispatch:
        """The dispatch of a synchronous function."""
        if self._threads is None:
            with self._lock:
                self._check_open()
                if self._threads is None:
                    made = self._make_threads(self.function, self.options)
                    self._threads = self._threads or made
        return self._threads

    def of_loop(self, loop: asyncio.AbstractEventLoop) -> LoopDispatch:
        """The dispatch of an asynchronous function for callers on this loop."""
        dispatch = self._loops.get(loop)
        if dispatch is not None:
            return dispatch
        ensure_imported(_LOOPS)
        from trims_shim.batching.drivers.aio import LoopDispatch

        with self._lock:
            self._check_open()
            self._bury()
            made = LoopDispatch(self.function, self.options, loop)
            return self._loops.setdefault(loop, made)

    def _bury(self) -> None:
        self.lose_ended()
        for loop, dispatch in list(self._loops.items()):
            if dispatch.is_over:
                self._past.merge(dispatch.record)
                del self._loops[loop]

    def lose_ended(self) -> None:
        """Fail what is open on loops that were closed meanwhile: it counts, and is settled."""
        with self._lock:
            for dispatch in list(self._loops.values()):
                if dispatch.is_lost and dispatch.is_busy:
                    dispatch.lose()

    def own_loop(self) -> LoopDispatch:
        """The dispatch of an asynchronous function for callers without a loop."""
        own = self._own
        if own is not None and not own.is_lost:
            return own
        ensure_imported(_LOOPS)
        from trims_shim.batching.drivers.aio import LoopDispatch, ThreadLoop

        with self._lock:
            self._check_open()
            own = self._own
            if own is None or own.is_lost:
                thread = ThreadLoop(self.function.name)
                made = LoopDispatch(self.function, self.options, thread.loop)
                made.on_rest = thread.stop
                weakref.finalize(made, thread.stop).atexit = False
                thread.start(weakref.ref(made))
                if own is not None and self._own is own:
                    self._past.merge(own.record)
                    self._own = None
                own = self._own = self._own or made
        return own

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The mailbox by which answers of threads come to this loop. To be called on the loop."""
        mailbox = self._mailboxes.get(loop)
        if mailbox is not None:
            return mailbox
        ensure_imported(_LOOPS)
        from trims_shim.batching.drivers.aio import Mailbox

        with self._lock:
            # A loop that stands may have been forgotten. Letters on their way keep their mailbox.
            self._mailboxes = {
                each: kept for each, kept in self._mailboxes.items() if each.is_running()
            }
            return self._mailboxes.setdefault(loop, Mailbox(loop, self.options))

    def dispatches(self) -> list[Dispatch]:
        """All dispatches that there are."""
        found: list[Dispatch] = list(self._loops.values())
        # Read once: another thread may replace the batcher's own loop.
        found += [each for each in (self._own, self._threads) if each is not None]
        return found

    # --- for all dispatches -----------------------------------------------------------------------

    def stats(self) -> BatcherStats:
        """The sum over dispatches."""
        if self._threads is not None:
            return self._threads.stats()
        total = Record(devices=self.options.devices)
        with self._lock:  # else one that ends meanwhile would count twice, or not at all
            self.lose_ended()
            dispatches = self.dispatches()
            for record in (self._past, *(dispatch.record for dispatch in dispatches)):
                total.merge(record)
        queued = sum(dispatch.queued for dispatch in dispatches)
        running = sum(dispatch.running for dispatch in dispatches)
        return total.snapshot(queued=queued, running=running, now_ns=self.options.clock_ns())

    @contextlib.contextmanager
    def watching(self, on_done: Callable[[], None]) -> Iterator[None]:
        """Call ``on_done`` once, from some thread, when all requests until now are settled.

        A loop that is closed before it hears of this says nothing: who waits has to call
        :meth:`lose_ended` now and then. Who leaves the block before the end has given up: nothing
        is kept for it, or hurried.
        """
        watched = [dispatch for dispatch in self.dispatches() if dispatch.is_alive()]
        left = _Countdown(len(watched) + 1, on_done)
        with contextlib.ExitStack() as ends:
            for dispatch in watched:
                ends.callback(dispatch.watch(left.count))
            left.count()
            yield

    def wait(self, timeout_s: float | None) -> None:
        """Block until all requests made until now are settled. Raises TimeoutError."""
        for dispatch in self.dispatches():
            if dispatch.is_busy:
                dispatch.check_may_wait()
        self.check_may_end()
        # No Event: a thread that is interrupted while it waits for one may keep its lock, and then
        # the thread that sets it waits for ever.
        done = Seat()
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self.watching(done.wake):
            while not (is_done := done.sleep(min(self.look_s, max(0.0, end_s - time.monotonic())))):
                if time.monotonic() >= end_s:
                    break
                self.lose_ended()
        if not is_done:
            stats = self.stats()
            raise TimeoutError(
                f"{self.function.name}: requests are still open after {timeout_s} s: "
                f"{stats.running} in batches that run, {stats.queued} queued"
            )

    def check_may_end(self) -> None:
        """Raise RuntimeError in the middle of a batch."""
        if any(dispatch.is_running_here() for dispatch in self.dispatches()):
            raise RuntimeError(f"{self.function.name}: a batch cannot wait for its own end")

    def close(self, *, cancel: bool) -> None:
        """Take no more requests. Does not wait."""
        with self._lock:
            self.is_closed = True
        for dispatch in self.dispatches():
            dispatch.close(cancel=cancel)

    def shut_down(self, *, cancel: bool, timeout_s: float | None) -> None:
        """Close, and wait until all is settled. Raises TimeoutError."""
        self.close(cancel=cancel)
        if self._threads is None or not self._threads.is_running_here():
            self.wait(timeout_s)
        self.rest()

    def rest(self) -> None:
        """It is closed and all is settled: let threads end, and keep what was learned."""
        for dispatch in self.dispatches():
            dispatch.rest()
        self.keep()

    def join(self) -> None:
        """After :meth:`rest`: wait for workers to end, as until then they may hold the function."""
        join(self.workers())

    def workers(self) -> list[threading.Thread]:
        """Threads that run batches of a synchronous function."""
        return [thread for dispatch in self.dispatches() for thread in dispatch.workers()]

    def keep(self) -> None:
        """Save what was learned for the next process."""
        self.options.learning.save()

    def finish(self, timeout_s: float) -> None:
        """Shut down at the end of the interpreter. What is queued after ``timeout_s`` fails."""
        try:
            self.shut_down(cancel=False, timeout_s=timeout_s)
        except (TimeoutError, RuntimeError):
            self.close(cancel=True)
            self.rest()

    def resize(self, max_batch_size: int) -> None:
        """Set the largest size of later batches. Raises ValueError."""
        learning = self.options.learning
        learning.check_size(max_batch_size)
        learning.max_batch_size = max_batch_size
        for dispatch in self.dispatches():
            dispatch.change(learning.resize)

    def warm(self, request: Request, *, repeats: int, limit_s: float) -> LatencyProfile:
        """Measure with copies of this request. Raises what the function raises."""
        learning = self.options.learning
        profile = self._measured(request, repeats=repeats, limit_ns=round(limit_s * 1e9))
        for dispatch in self.dispatches():
            dispatch.change(lambda policy: learning.refresh(policy, request.key))
        return profile

    def _measured(self, request: Request, *, repeats: int, limit_ns: int) -> LatencyProfile:
        learning, entry = self.options.learning, request.payload

        def run(size: int) -> None:
            for result in self._run([entry] * size):
                if isinstance(result, Failure):
                    raise result.error

        durations_ns = measure(
            run,
            learning.sizes_to_measure(),
            repeats=repeats,
            clock=self.options.clock_ns,
            limit_ns=limit_ns,
        )
        return learning.measured(request.key, durations_ns)

    def _run(self, entries: list[Entry]) -> list[Any]:
        if not self.function.is_async:
            return self.function.run(entries)
        return self.own_loop().run_now(entries)

    def forget(self) -> None:
        """In a forked child: return to the state in which it was made."""
        self.options.learning.forget()
        dispatches = self.dispatches()
        # Never finalized: tasks would complain, loops would write to the parent's.
        _parents.append(dispatches)
        for dispatch in dispatches:
            dispatch.forget()
        self._forget()

    def _check_open(self) -> None:
        if self.is_closed:
            raise closed(self.function)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What a :class:`~trims_shim.batching.batcher.Batcher` makes its engine of."""

    devices: int
    learning: Callable[..., Learning]
    function: Callable[..., BatchFunction] = BatchFunction
    engine: Callable[..., Engine] = Engine


class _Countdown:
    def __init__(self, number: int, on_zero: Callable[[], None]) -> None:
        # Taken in one step, without a lock: a signal handler that waits in the middle of it would
        # keep it from the thread that it waits for.
        self._left = deque(range(number))
        self._on_zero = on_zero

    def count(self) -> None:
        if self._left and not self._left.pop():
            self._on_zero()


def _after_fork_in_child() -> None:
    for engine in living(_engines):
        engine.forget()


def _at_exit() -> None:
    at_exit.set()
    end_s = time.monotonic() + EXIT_S
    for engine in living(_engines):
        engine.finish(max(0.0, end_s - time.monotonic()))
    join_workers()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
