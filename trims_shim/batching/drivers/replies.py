"""Where answers go: to a blocked thread, to a future, to an event loop.

Each request has one reply. ``begin`` is called when its batch starts, and says whether its caller
still waits; after that comes one ``answer`` or ``fail``. A request that never runs gets ``fail``
only. After an interrupt, or when a batch was given up half-way, calls come again. None of them
raises an Exception, whatever became of the caller: a cancelled request must not cost others their
answers. Calls come from any thread, never under a batcher's lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trims_shim.batching.protocol import Cancelled
from trims_shim.diagnostics import pass_on
from trims_shim.errors import BatchingError
from trims_shim.outcomes import for_futures
from trims_shim.stack import check_stack

if TYPE_CHECKING:
    from trims_shim.batching.drivers.dispatch import Dispatch
    from trims_shim.batching.drivers.jobs import Job
    from trims_shim.batching.protocol import Request
    from trims_shim.batching.signatures import Answer
else:
    Answer = TypeVar("Answer")
    Dispatch = Job = Request = Any  # annotations can be evaluated

__all__ = [
    "OTHER_PROCESS",
    "BatchFuture",
    "BlockedCall",
    "Entry",
    "Failure",
    "Reply",
    "Seat",
    "deliver",
    "is_failure",
]

_logger = logging.getLogger(__name__)

OTHER_PROCESS = (
    "this request was made before a fork and belongs to the parent process; make it again in this "
    "one, its batcher works"
)


class Reply(Protocol):
    """See the module docstring."""

    def begin(self) -> bool:
        """False if nobody waits any more; the request is then left out of its batch."""

    def answer(self, result: Any) -> None:
        """Hand the result over."""

    def fail(self, error: BaseException) -> None:
        """Hand the error over."""


class _Nobody:
    """In place of a reply that has got its answer."""

    def begin(self) -> bool:
        return False

    def answer(self, result: Any) -> None:
        """Nobody waits for it."""

    def fail(self, error: BaseException) -> None:
        """Nobody waits for it."""


_NOBODY = _Nobody()


class Entry:
    """What a driver keeps of a request while it waits: its arguments and where the answer goes."""

    __slots__ = (
        "arguments",
        "deadline_ns",
        "gate",
        "has_failed",
        "has_room",
        "is_admitted",
        "owner",
        "padded",
        "pieces",
        "reply",
    )

    def __init__(
        self, arguments: tuple[Any, ...], reply: Reply, deadline_ns: int, owner: object
    ) -> None:
        self.arguments = arguments
        self.reply = reply
        self.deadline_ns = deadline_ns
        """The caller's; a late request that is served nevertheless has no other deadline."""
        self.owner = owner
        """The instance whose method is batched, alive until it has answered."""
        self.has_room = True
        """Whether it has a place in the queue, or else waits for one."""
        self.is_admitted = False
        """Whether the policy was told about it."""
        self.has_failed = False
        """Whether it was counted as failed."""
        self.gate: threading.Lock | None = None
        """Released when it gets its place, or is lost; its caller may wait for that."""
        self.padded: int | None = None
        """The length to which it was padded, where the collate has to know afterwards."""
        self.pieces: list[Any] | None = None
        """What a loop has added to its answer; None before the first step."""

    @property
    def is_streamed(self) -> bool:
        """Whether its caller gets the pieces of the answer as they come."""
        return hasattr(self.reply, "step")

    def lose(self, error: BaseException) -> None:
        """Fail it; it will not run."""
        self.reply.fail(error)
        self.let_go()

    def let_go(self) -> None:
        """Drop the reply, which is its caller's alone once it was answered.

        The traceback of an error has the frames that had this entry. If these led to the reply that
        keeps the error, all that they had would stay until the collector runs.
        """
        self.reply = _NOBODY

    def open_gate(self) -> None:
        """Wake a caller that waits for its place."""
        gate = self.gate
        if gate is not None and gate.locked():
            gate.release()


class Failure:
    """In a list of results: this item failed."""

    __slots__ = ("_traceback", "error")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self._traceback = error.__traceback__

    def to_raise(self) -> BaseException:
        """The error as it came; callers that share it have since added their frames to it."""
        return self.error.with_traceback(self._traceback)

    def let_go(self) -> None:
        """Drop the error once it was handed out; see :meth:`Entry.let_go`."""
        with contextlib.suppress(AttributeError):  # one for several items
            del self.error
            del self._traceback


def is_failure(result: object) -> bool:
    """Whether it is no answer, in a list of results.

    Asked of its type: a proxy has the ``__class__`` of something else, which raises if that is
    gone. One of an error cannot be raised.
    """
    return issubclass(type(result), (Failure, BaseException))


def deliver(reply: Reply, result: Any) -> None:
    """Answer, or fail where the result is an error."""
    if type(result) is Failure:
        reply.fail(result.error)
    elif issubclass(type(result), BaseException):
        reply.fail(result)
    else:
        reply.answer(result)


# --- a thread that waits --------------------------------------------------------------------------


class Seat:
    """A thread that can sleep, be woken, and be handed a job: a blocked caller or a worker.

    ``wake`` may come at any time and any number of times; it means "look again". ``job`` is set
    under the lock of the dispatch.
    """

    __slots__ = ("_gate", "is_away", "job", "wake_ns")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.job: Job | None = None
        self.wake_ns: int | None = None
        """Until when it sleeps at most, while it keeps the time for its dispatch."""
        self.is_away = False
        """Its thread waits for something else: it gets no job, and keeps no time."""

    def sleep(self, timeout_s: float = -1.0) -> bool:
        """Sleep until woken, or for ``timeout_s``; False if it was not woken."""
        return self._gate.acquire(True, timeout_s)

    def wake(self) -> None:
        """End its sleep, or its next one."""
        # A binary semaphore: one that is awake already, or about to be, needs no second wake-up.
        try:
            self._gate.release()
        except RuntimeError:
            pass


class BlockedCall(Seat):
    """The caller's thread waits, and runs its batch itself when it is asked to."""

    __slots__ = ("_failure", "_result", "is_abandoned", "is_done", "is_orphan")

    def __init__(self) -> None:
        super().__init__()
        self.is_done = False
        self.is_abandoned = False
        self.is_orphan = False
        """In a forked child: no other batch than its thread's own can answer it."""
        self._result: Any = None
        self._failure: Failure | None = None

    def begin(self) -> bool:
        """See :class:`Reply`."""
        return not self.is_abandoned

    def answer(self, result: Any) -> None:
        """See :class:`Reply`."""
        self._result = result
        self.is_done = True
        self.wake()

    def fail(self, error: BaseException) -> None:
        """See :class:`Reply`."""
        self._failure = Failure(error)
        self.is_done = True
        self.wake()

    def orphan(self) -> None:
        """In a child that was forked while its thread waited, as by a signal handler: fail."""
        self.is_orphan = True
        if self.job is None:  # else it runs its batch here
            self.fail(BatchingError(OTHER_PROCESS))
        self.wake()

    def take(self) -> Any:
        """The result; raises the error."""
        if self._failure is None:
            return self._result
        try:
            raise self._failure.to_raise()
        finally:
            self._failure = None  # its traceback holds this frame, and with it this object


# --- futures --------------------------------------------------------------------------------------


class _Condition(threading.Condition):
    """Entered and left in one step each, as its lock is, not by functions in Python.

    In these a signal handler may raise while the lock is taken, and it is never released: the
    thread that hands the answer over would wait for ever, and its device, too.
    """

    __slots__ = ("__enter__", "__exit__")

    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        self.__enter__ = lock.__enter__  # type: ignore[method-assign]
        self.__exit__ = lock.__exit__  # type: ignore[method-assign]


class BatchFuture(Future[Answer]):
    """What ``submit`` returns. ``cancel()`` frees its place in the queue."""

    # Who waits for the answer does not hold the condition at any step: a signal handler of its
    # thread may wait for another answer, and whoever hands that out may need the condition before.

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()
        self._sleepers: deque[Seat] = deque()
        self._traceback: TracebackType | None = None
        self._dispatch: Dispatch | None = None
        self._request: Request | None = None

    def attach(self, dispatch: Dispatch, request: Request) -> None:
        """Set the dispatch to tell when it is cancelled."""
        self._dispatch, self._request = dispatch, request

    def cancel(self) -> bool:
        """Give the request up unless its batch runs already; True if it was given up.

        Raises RecursionError on a stack without room for it, and then does nothing.
        """
        if self._dispatch is not None:
            check_stack()
        # A second cancel() succeeds as well, as the first one's promise still holds.
        if not super().cancel():
            return False
        self._notify_cancelled()
        dispatch, request = self._dispatch, self._request
        self._let_go()
        if dispatch is not None and request is not None:
            dispatch.post(Cancelled(request))
        return True

    def result(self, timeout: float | None = None) -> Answer:
        """See :class:`concurrent.futures.Future`; an error where waiting would never end."""
        self._await(timeout)
        try:
            if self._exception is not None:
                raise self._exception.with_traceback(self._traceback)  # see Failure.to_raise
            return self._result  # type: ignore[return-value]
        finally:
            del self  # else an error would keep itself, by this frame in its traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :class:`concurrent.futures.Future`; an error where waiting would never end."""
        self._await(timeout)
        return self._exception

    def begin(self) -> bool:
        """See :class:`Reply`."""
        with self._condition:
            if self._state == "PENDING":
                self._state = "RUNNING"
            if self._state == "RUNNING":
                return True  # also when it is asked again, after an interrupt
        self._notify_cancelled()
        return False

    def requeue(self) -> None:
        """Its batch was given up half-way: it waits again, and can be cancelled again."""
        with self._condition:
            if self._state == "RUNNING":
                self._state = "PENDING"

    def set_exception(self, exception: BaseException | None) -> None:
        """See :class:`concurrent.futures.Future`."""
        if exception is not None:
            self._traceback = exception.__traceback__
        super().set_exception(exception)

    def answer(self, result: Any) -> None:
        """See :class:`Reply`."""
        self._let_go()
        self._settle(self.set_result, result)

    def fail(self, error: BaseException) -> None:
        """See :class:`Reply`."""
        self._let_go()
        self._settle(self.set_exception, for_futures(error, "the batch function"))

    def orphan(self) -> None:
        """In a forked child: fail without a lock, which the parent may have held."""
        if self._is_open:
            self._condition = _Condition()
            self._waiters.clear()
            self.__dict__["_done_callbacks"] = []
            self._exception = BatchingError(OTHER_PROCESS)
            self._state = "FINISHED"
            self._wake_sleepers()
        self._let_go()

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        try:
            settle(value)
        except InvalidStateError:
            self._tell()  # cancelled, or set by another thread, which may have been interrupted

    def _tell(self) -> None:
        """Tell waiters and callbacks that were not told yet that it is done."""
        with self._condition:
            if self._state != "FINISHED":
                return
            for waiter in self._waiters:
                if self not in waiter.finished_futures:
                    add = waiter.add_result if self._exception is None else waiter.add_exception
                    add(self)
            self._condition.notify_all()
        self._invoke_callbacks()

    def _invoke_callbacks(self) -> None:
        self._wake_sleepers()
        # Not as the base class's: a thread that goes on after an interrupt calls those left.
        callbacks = self._done_callbacks  # type: ignore[attr-defined]
        while callbacks:
            try:
                callbacks[0](self)
            except Exception as error:
                pass_on(error)
                _logger.exception("a callback of %r failed", self)
            callbacks.pop(0)

    def _notify_cancelled(self) -> None:
        # What wait() and as_completed() look for; the executor's part of a cancellation.
        with self._condition:
            if self._state == "CANCELLED":
                self._state = "CANCELLED_AND_NOTIFIED"
                for waiter in self._waiters:
                    waiter.add_cancelled(self)

    def _await(self, timeout: float | None) -> None:
        """Wait until it has an answer. Raises TimeoutError, or CancelledError if it is given up."""
        if self._is_open:
            self._sleep(timeout)
        if self._is_open:
            raise futures.TimeoutError
        if self._state != "FINISHED":
            raise futures.CancelledError

    def _sleep(self, timeout: float | None) -> None:
        dispatch, seat = self._dispatch, Seat()
        if dispatch is not None:
            dispatch.check_may_wait()
        self._sleepers.append(seat)
        try:
            if self._is_open:
                limit_s = -1.0 if timeout is None else max(0.0, timeout)
                seat.sleep(min(limit_s, threading.TIMEOUT_MAX))
        finally:
            self._sleepers.remove(seat)

    @property
    def _is_open(self) -> bool:
        return self._state in ("PENDING", "RUNNING")

    def _wake_sleepers(self) -> None:
        # A copy is one step, also without the interpreter lock: other threads come and go.
        for seat in self._sleepers.copy():
            seat.wake()

    def _let_go(self) -> None:
        # A caller that keeps an answer must not keep the batcher, or the item.
        self._dispatch = self._request = None
